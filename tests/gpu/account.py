"""Where the time of the decode kernels goes: ``python tests/gpu/account.py OUT.json``.

Each of the two kernels alone, both as the layer runs them, and what reading the weights takes at the bandwidth of a copy. What
both take beyond the limit is launches, the tail of each kernel, and waiting; what they save against the sum of the two is
their overlap.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import click

from vllm_moe_tune_plugin.bench import layer, schema, search
from vllm_moe_tune_plugin.bench.experts import Layer
from vllm_moe_tune_plugin.bench.layer import Machine
from vllm_moe_tune_plugin.bench.shapes import SHAPES, Shape

UP, DOWN = "_gate_up_kernel", "_down_kernel"


class NoLaunch:
    """Stands for a kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def without(kernel: str) -> AbstractContextManager[Any]:
    """One of the two is not launched."""
    return mock.patch.object(importlib.import_module("vllm_moe_tune_plugin.kernels.decode_moe"), kernel, NoLaunch())


def distinct_experts(shape: Shape, tokens: int) -> float:
    """How many experts are expected to be chosen by that many tokens, each by uniform routing."""
    return float(shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens))


def account(machine: Machine, shape: Shape, dtype: str, tokens: Sequence[int], bandwidth: float) -> Iterator[dict[str, Any]]:
    from vllm_moe_tune_plugin.kernels.decode_moe import choose_tiles

    layers: list[Layer] = []
    layer.make_layers(layers, shape, dtype, 1, machine)
    tiles = choose_tiles(shape.hidden, shape.intermediate, shape.top_k, layers[0].weights.w1.element_size())
    for count in tokens:
        plan = search.Plan(0, compared=(count,), samples=9 if machine.device.type == "cuda" else 1)
        measure = search.kernels_alone(layers, dtype, machine, plan, lambda line: None)
        took = {}
        for name, context in (("gate_up", without(DOWN)), ("down", without(UP)), ("both", nullcontext())):
            with context:
                took[name] = round(measure(dataclasses.asdict(tiles)), 2)
        limit = distinct_experts(shape, count) * shape.expert_bytes(dtype) / bandwidth * 1e6
        yield {
            "shape": shape.name,
            "dtype": dtype,
            "tokens": count,
            "us": took,
            "limit_us": {"gate_up": round(limit * 2 / 3, 2), "down": round(limit / 3, 2), "both": round(limit, 2)},
            "over_the_limit": round(took["both"] / limit, 3),
            "overlap_us": round(took["gate_up"] + took["down"] - took["both"], 2),
        }


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, path_type=pathlib.Path))
@click.option("--shapes", default=",".join(SHAPES), show_default=True, help="Names, separated by commas.")
@click.option("--dtypes", default="bf16,fp8-block", show_default=True)
@click.option("--tokens", default="1,2,4,8", show_default=True)
@click.option("--commit", default="")
@click.option("--interpret", is_flag=True, help="In Triton's interpreter; the times mean nothing.")
def main(out: pathlib.Path, shapes: str, dtypes: str, tokens: str, commit: str, interpret: bool) -> None:
    import torch

    machine = layer.start(interpret)
    counts = [int(count) for count in tokens.split(",")]
    rows = []
    with torch.inference_mode(), layer.vllm_config():
        bandwidth = machine.copy_bandwidth()
        for shape in (Shape.parse(name) for name in shapes.split(",")):
            for dtype in (name for name in dtypes.split(",") if not shape.refusal(name, 1)):
                for row in account(machine, shape, dtype, counts, bandwidth):
                    rows.append(row)
                    times = ", ".join(f"{name} {took:.1f} ({row['limit_us'][name]:.1f})" for name, took in row["us"].items())
                    click.echo(f"{row['shape']} {dtype} M={row['tokens']}: {times} us, {row['over_the_limit']} of the limit")
                machine.free_bytes()
    out.write_text(json.dumps({"environment": schema.environment(commit), "bandwidth": bandwidth, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
