"""Tiles of the decode kernels against each other, for many shapes: ``python tests/gpu/sweep.py OUT.json``.

The figures behind ``choose_tiles``. ``vllm-moe-tune tune`` looks for the best tiles of one shape; this asks which of a few
are good for all of them. The second kernel's are varied first, then with the best of those the first one's.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import click

from vllm_moe_tune_plugin.bench import layer, schema, search
from vllm_moe_tune_plugin.bench.experts import Layer
from vllm_moe_tune_plugin.bench.layer import Machine
from vllm_moe_tune_plugin.bench.shapes import SHAPES, Shape

#: (rows, parts of the formula's columns, tiles ahead)
DOWN = ((2, 1, 4), (2, 1, 6), (2, 1, 10), (2, 1, 16), (2, 2, 12), (2, 2, 24), (1, 1, 8), (1, 1, 16))
#: (rows, parts of the formula's columns, the same of its warps)
UP = ((2, 2, 2), (1, 1, 1), (1, 2, 2), (4, 1, 1), (4, 1, 2), (4, 2, 2))


def candidates(tiles: dict[str, int], choices: Sequence[tuple[int, int, int]], kernel: str) -> list[dict[str, int]]:
    """The given tiles and those in which one kernel's are replaced, each once."""
    found = [tiles]
    for rows, parts, last in choices:
        columns = max(16, tiles[f"{kernel}_columns"] // parts)
        own = {"rows": rows, "columns": columns}
        own |= (
            {"warps": max(1, columns // 512), "ahead": last}
            if kernel == "down"
            else {"warps": max(1, tiles["up_warps"] // last)}
        )
        candidate = tiles | {f"{kernel}_{name}": value for name, value in own.items()}
        if candidate not in found:
            found.append(candidate)
    return found


def sweep(machine: Machine, shape: Shape, dtype: str, tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    from vllm_moe_tune_plugin.kernels.decode_moe import choose_tiles

    layers: list[Layer] = []
    layer.make_layers(layers, shape, dtype, 1, machine)
    formula = dataclasses.asdict(
        choose_tiles(shape.hidden, shape.intermediate, shape.top_k, layers[0].weights.w1.element_size())
    )
    measures = {
        count: search.kernels_alone(
            layers,
            dtype,
            machine,
            search.Plan(0, (count,), samples=9 if machine.device.type == "cuda" else 1),
            lambda line: None,
        )
        for count in tokens
    }
    best = formula
    for kernel, choices in (("down", DOWN), ("up", UP)):
        rows = []
        for tiles in candidates(best, choices, kernel):
            took = {count: round(measure(tiles), 3) for count, measure in measures.items()}
            rows.append({"shape": shape.name, "dtype": dtype, "varied": kernel, "tiles": tiles, "us": took})
            yield rows[-1]
        best = min(rows, key=lambda row: row["us"][tokens[0]])["tiles"]


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
    rows: list[dict[str, Any]] = []
    with torch.inference_mode(), layer.vllm_config():
        for shape in (Shape.parse(name) for name in shapes.split(",")):
            for dtype in (name for name in dtypes.split(",") if not shape.refusal(name, 1)):
                for row in sweep(machine, shape, dtype, counts):
                    rows.append(row)
                    own = {name: value for name, value in row["tiles"].items() if name.startswith(row["varied"])}
                    times = " ".join(f"{took:.2f}" for took in row["us"].values())
                    click.echo(
                        f"{row['shape']} {dtype} {' '.join(f'{name} {value}' for name, value in own.items())}: {times} us"
                    )
                machine.free_bytes()
                # After each shape: it may be stopped at any time.
                out.write_text(json.dumps({"environment": schema.environment(commit), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
