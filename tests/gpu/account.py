"""Where the time of the decode kernels goes: ``python tests/gpu/account.py OUT.json``.

Each of the two kernels alone, both as the layer runs them, and what reading the weights takes at the bandwidth of a copy, here
called the limit (reading alone can be a little faster). What both take beyond it is launches, the tail of each kernel, and
waiting; what they save against the sum of the two is their overlap.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import by_shape
import click

from vllm_moe_tune_plugin.bench import layer, search
from vllm_moe_tune_plugin.bench.experts import Layer
from vllm_moe_tune_plugin.bench.layer import Machine
from vllm_moe_tune_plugin.bench.shapes import Shape
from vllm_moe_tune_plugin.expert_load import distinct_experts

UP, DOWN = "_gate_up_kernel", "_down_kernel"


class NoLaunch:
    """Stands for a kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def without(kernel: str) -> AbstractContextManager[Any]:
    """One of the two is not launched."""
    return mock.patch.object(importlib.import_module("vllm_moe_tune_plugin.kernels.decode_moe"), kernel, NoLaunch())


def alone(layers: Sequence[Layer], dtype: str, machine: Machine, tokens: int) -> search.Measure:
    """The time of both kernels for that many tokens, with the tiles that it is asked for."""
    plan = search.Plan(0, compared=(tokens,), samples=9 if machine.device.type == "cuda" else 1)
    return search.kernels_alone(layers, dtype, machine, plan, lambda line: None)


def account(
    machine: Machine, shape: Shape, dtype: str, tokens: Sequence[int], bandwidth: float
) -> Iterator[tuple[dict[str, Any], str]]:
    layers: list[Layer] = []
    layer.make_layers(layers, shape, dtype, 1, machine)
    for count in tokens:
        measure = alone(layers, dtype, machine, count)
        took = {}
        for name, context in (("gate_up", without(DOWN)), ("down", without(UP)), ("both", nullcontext())):
            with context:
                took[name] = round(measure(None), 2)
        both = distinct_experts(count, shape.top_k, shape.num_experts) * shape.expert_bytes(dtype) / bandwidth * 1e6
        limit = {"gate_up": round(both * 2 / 3, 2), "down": round(both / 3, 2), "both": round(both, 2)}
        row = {
            "shape": shape.name,
            "dtype": dtype,
            "tokens": count,
            "us": took,
            "limit_us": limit,
            "over_the_limit": round(took["both"] / both, 3),
            "overlap_us": round(took["gate_up"] + took["down"] - took["both"], 2),
        }
        times = ", ".join(f"{name} {time:.1f} ({limit[name]:.1f})" for name, time in took.items())
        yield row, f"{shape.name} {dtype} M={count}: {times} us, {row['over_the_limit']} of the limit"


@click.command()
@by_shape.options(tokens="1,2,4,8")
def main(**options: Any) -> None:
    by_shape.run(account, **options)


if __name__ == "__main__":
    main()
