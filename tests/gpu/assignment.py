"""Tokens sorted by expert against a block for each (token, expert) pair: ``python tests/gpu/assignment.py OUT.json``.

In vLLM's own Triton experts of 0.20 and later, without the plugin, beside what vLLM chooses by itself. Unsorted, an expert's
weights may be read once for each pair; sorting takes a launch. `ratio_sorted` and `ratio_unsorted` are vLLM's time over theirs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import by_shape
import click

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin.bench import experts, layer
from vllm_moe_tune_plugin.bench.layer import STOCK, Arm, Job, Machine
from vllm_moe_tune_plugin.bench.shapes import Shape
from vllm_moe_tune_plugin.tunings.low_latency_assignment import Counts

EXPERTS = "vllm.model_executor.layers.fused_moe.experts.triton_moe"
PREPARE = "_prepare_expert_assignment"


@functools.cache
def arms() -> list[Arm]:
    """Stock and the two ways, each forced whatever vLLM would choose. Made once: later what is there is no longer stock."""
    module = importlib.import_module(EXPERTS)
    stock, counts = getattr(module, PREPARE), Counts()
    align = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe").moe_align_block_size

    def by_expert(ids: Any, config: Any, tokens: int, top_k: int, num_experts: int, expert_map: Any, **more: Any) -> Any:
        ignore = more.get("ignore_invalid_experts", False)
        return align(ids, config["BLOCK_SIZE_M"], num_experts, expert_map, ignore_invalid_experts=ignore)

    def by_pair(ids: Any, config: Any, *args: Any, **more: Any) -> Any:
        return None, ids.view(-1), counts.get(ids.numel() * config["BLOCK_SIZE_M"], ids.device)

    def enter(assign: Any) -> None:
        vllm_moe_tune_plugin.unregister()
        setattr(module, PREPARE, assign)

    return [Arm(name, functools.partial(enter, way)) for name, way in (("sorted", by_expert), ("unsorted", by_pair))] + [
        Arm(STOCK.name, functools.partial(enter, stock))
    ]


def compare(
    seconds: float, machine: Machine, shape: Shape, dtype: str, tokens: Sequence[int], bandwidth: float
) -> Iterator[tuple[dict[str, Any], str]]:
    layers: list[experts.Layer] = []
    layer.make_layers(layers, shape, dtype, 1, machine)
    job = Job((shape,), (dtype,), tokens, ("uniform",), (1,), seconds, arms())
    for key in job.row_keys():
        row = layer.measure(job, machine, layers, key, bandwidth)
        if row.get("status") == "failed":
            raise click.ClickException(f"{key}: {row['reason']}")
        told = {name: value for name, value in row.items() if not name.startswith("ratio_stock")}
        times = ", ".join(f"{name} {took:.1f}" for name, took in row["median_us"].items())
        line = f"{shape.name} {dtype} M={key['tokens']}: {times} us"
        yield {"key": key, "expert_bytes": shape.expert_bytes(dtype), **told}, line


@click.command()
@by_shape.options(tokens="1,2,3,4,6,8,12,16")
@click.option("--seconds", default=0.1, show_default=True, help="For a row.")
def main(seconds: float, **options: Any) -> None:
    by_shape.run(functools.partial(compare, seconds), **options)


if __name__ == "__main__":
    main()
