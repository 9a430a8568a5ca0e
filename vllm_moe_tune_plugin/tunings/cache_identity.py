"""cache_identity: keep what FlashInfer tuned with these tunings apart from what it tuned without.

What: vLLM persists FlashInfer's tuned tactics in a folder named by a hash of the engine's configuration. A fingerprint of
the tunings that change what is tuned, or under which key, is mixed into that hash; where FlashInfer manages the store itself
(``autotune_v2``, one rank, 0.33) the store gets a folder of its own under the same root.

Why: the hash knows nothing of this plugin. vLLM 0.33 skips tuning altogether when it finds a file, so a file written
without the plugin would leave the added buckets untuned, and one written with packed ids holds no key that bf16 and fp8
kernels look up for tuples. Earlier releases add what is missing, and would serve stock with the plugin's entries later on.

How: the fingerprint is made of settings alone: which of the tunings below are on, MOE_TUNE_CUTLASS_BUCKET, and a revision
that counts changes of what they tune. Not of the version, so that an update that tunes the same finds its files again, nor of
whether a patch took hold, so that ranks cannot differ: one rank that finds a file where another does not is a deadlock
(vLLM PR 54618). With none of the tunings on, the stock identity stays.

Upstream: nothing to expect; vLLM cannot know.
Delete when: nothing here changes what FlashInfer tunes.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from vllm_moe_tune_plugin.patching import Advice, Convert, Patch, Verdict, native, unsupported
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import first_existing
from vllm_moe_tune_plugin.tactics import WARM_UP

CACHE = "vllm.model_executor.warmup.flashinfer_autotune_cache"

#: The tunings that change which profiles are tuned, or under which keys.
TUNE = ("autotune_bucket", "tuple_routing", "warmup_buckets")

#: To be raised with every change of what they tune.
REVISION = 1


def fingerprint(settings: Settings) -> str | None:
    """What these settings change about tuning, in 16 hexadecimal digits; None: nothing."""
    active = [name for name in TUNE if name not in settings.disable]
    if not active:
        return None
    what = f"{REVISION}:{','.join(active)}:{int(settings.cutlass_bucket)}"
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def _missing() -> Verdict:
    return native("this vLLM persists no tuned tactics")


def _mix(mark: str | None, into: Callable[[Any, str], Any]) -> Callable[[Any], Advice | Verdict]:
    def decide(function: Any) -> Advice | Verdict:
        if mark is None:
            return unsupported("no tuning is on that changes what is tuned")

        return Convert(lambda stock: into(stock, mark), note=f"marked {mark}")

    return decide


def _mixed_hash(stock: str, mark: str) -> str:
    return hashlib.sha256(f"{stock}:{mark}".encode()).hexdigest()


def _own_root(stock: pathlib.Path | None, mark: str) -> pathlib.Path:
    if stock is None:
        from flashinfer.autotune_cache import get_default_cache_root

        stock = pathlib.Path(get_default_cache_root())
    return stock / f"moe-tune-{mark}"


def patches(settings: Settings) -> Sequence[Patch]:
    mark = fingerprint(settings)
    root = "resolve_flashinfer_autotune_v2_root"
    return (
        Patch(
            first_existing(f"{CACHE}:flashinfer_autotune_cache_hash", f"{WARM_UP}:_flashinfer_autotune_cache_hash"),
            _mix(mark, _mixed_hash),
            missing=_missing,
        ),
        Patch(
            f"{WARM_UP}:{root}",
            _mix(mark, _own_root),
            also=(f"{CACHE}:{root}",),
            missing=lambda: native("this vLLM leaves no store to FlashInfer"),
            serves=True,
        ),
    )
