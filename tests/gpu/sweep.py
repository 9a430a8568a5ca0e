"""Tiles of the decode kernels against each other, for many shapes: ``python tests/gpu/sweep.py OUT.json``.

The figures behind ``choose_tiles``. ``vllm-moe-tune tune`` looks for the best tiles of one shape; this asks which of a few
are good for all of them. The second kernel's are varied first, then with the best of those the first one's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import by_shape
import click
from account import alone

from vllm_moe_tune_plugin.bench import layer, search
from vllm_moe_tune_plugin.bench.experts import Layer
from vllm_moe_tune_plugin.bench.layer import Machine
from vllm_moe_tune_plugin.bench.shapes import Shape

#: (rows, parts of the formula's columns, tiles ahead)
DOWN = ((2, 1, 4), (2, 1, 6), (2, 1, 8), (2, 1, 12), (2, 2, 12), (2, 2, 24), (1, 1, 8), (1, 1, 16), (4, 2, 6))
#: (rows, parts of the formula's columns, the same of its warps)
UP = ((2, 2, 2), (1, 1, 1), (1, 2, 2), (4, 1, 1), (4, 1, 2), (4, 2, 2))
#: The same where experts are shared out to ranks: a token has few of them on each.
DOWN_SHARED = ((2, 1, 2), (2, 1, 4), (2, 1, 6), (4, 1, 2))
UP_SHARED = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 2), (2, 2, 2))


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


def sweep(
    machine: Machine, shape: Shape, dtype: str, tokens: Sequence[int], _: float, ep: int = 1
) -> Iterator[tuple[dict[str, Any], str]]:
    layers: list[Layer] = []
    layer.make_layers(layers, shape, dtype, ep, machine)
    measures = {count: alone(layers, dtype, machine, count) for count in tokens}
    best = search.formula(layers, tokens[0])
    choices = (("down", DOWN), ("up", UP)) if ep == 1 else (("down", DOWN_SHARED), ("up", UP_SHARED))
    for kernel, of_kernel in choices:
        rows = []
        for tiles in candidates(best, of_kernel, kernel):
            took = {count: round(measure(tiles), 3) for count, measure in measures.items()}
            rows.append({"shape": shape.name, "dtype": dtype, "ep": ep, "varied": kernel, "tiles": tiles, "us": took})
            own = " ".join(f"{name} {value}" for name, value in tiles.items() if name.startswith(kernel))
            yield rows[-1], f"{shape.name} {dtype} {own}: {' '.join(f'{time:.2f}' for time in took.values())} us"
        best = min(rows, key=lambda row: row["us"][tokens[0]])["tiles"]


@click.command()
@click.option("--ep", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that experts are shared out to.")
@by_shape.options(tokens="1,2,4,8")
def main(ep: int, **options: Any) -> None:
    by_shape.run(functools.partial(sweep, ep=ep), **options)


if __name__ == "__main__":
    main()
