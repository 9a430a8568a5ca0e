"""The tunings, one file each; a file's docstring is the tuning's manual.

A tuning's file has a function ``patches(settings)`` that returns its patches. To add or delete a tuning, add or delete
its file and its line below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from vllm_moe_tune_plugin.patching import Patch
from vllm_moe_tune_plugin.settings import Settings

#: Where two wrap the same function, the later one's wrapper is the outer one.
NAMES: tuple[str, ...] = (
    "autotune_bucket",
    "tuple_routing",
    "int32_ids",
    "low_latency_assignment",
    "kept_count",
    "assignment_cost",
    "decode_kernel",
    "warmup_buckets",
    "cache_identity",
)


def patches_of(name: str, settings: Settings) -> Sequence[Patch]:
    """The patches of one tuning, none of them applied yet."""
    make = cast(Callable[[Settings], Sequence[Patch]], import_module(f"{__name__}.{name}").patches)
    return make(settings)
