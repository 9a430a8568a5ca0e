"""The order of tests/gpu/sweep.py; how it measures is what tests/gpu/account.py and `tune` do, too."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sweep
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from test_decode_moe import kernels  # noqa: F401  (a fixture)

from vllm_moe_tune_plugin.bench import layer, search
from vllm_moe_tune_plugin.bench.schema import BenchError
from vllm_moe_tune_plugin.bench.shapes import SHAPES
from vllm_moe_tune_plugin.tuned_tiles import Entry


@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_of_one_kernel_is_kept_for_the_other(monkeypatch: pytest.MonkeyPatch, kernels: Any, shape: str) -> None:  # noqa: F811
    asked = []

    def measure(tiles: dict[str, int]) -> float:
        asked.append(tiles)
        # The fewer rows the better, and of those the more tiles ahead.
        return float(tiles["down_rows"] * 1000 - tiles["down_ahead"] + tiles["up_rows"])

    own = SHAPES[shape]
    weights = SimpleNamespace(
        w1=torch.empty(1, 2 * own.intermediate, own.hidden, dtype=torch.bfloat16, device="meta"),
        w2=torch.empty(1, own.hidden, own.intermediate, dtype=torch.bfloat16, device="meta"),
    )
    held = SimpleNamespace(weights=weights, expert_map=None, shape=own)
    monkeypatch.setattr(layer, "make_layers", lambda layers, *_: layers.append(held))
    monkeypatch.setattr(search, "kernels_alone", lambda *_: measure)
    machine: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    rows = [row for row, _ in sweep.sweep(machine, SHAPES[shape], "bf16", [1, 2], 1.0)]

    down, up = ([row["tiles"] for row in rows if row["varied"] == kernel] for kernel in ("down", "up"))
    assert down[0] == dataclasses.asdict(
        kernels.choose_tiles(SHAPES[shape].hidden, SHAPES[shape].intermediate, SHAPES[shape].top_k, 2, 1, 132)
    )
    for tiles in up:
        assert (tiles["down_rows"], tiles["down_ahead"]) == (1, 16)
    assert {tiles["up_rows"] for tiles in up} == {1, 2, 4}
    assert asked == [tiles for row in rows for tiles in [row["tiles"]] * 2]


def measured(shared: bool) -> list[Any]:
    """The rows about the second kernel of each layer, with its experts shared out to ranks or not."""
    files = sorted((Path(__file__).parent / "results" / "sweep").glob("*.json"))
    rows = [row for file in files for row in json.loads(file.read_text())["rows"] if row["varied"] == "down"]
    layers = itertools.groupby(rows, lambda row: (row["shape"], row["dtype"], row["ep"]))
    return [(key, list(group)) for key, group in layers if (key[2] > 1) == shared]


def by_layer(shared: bool) -> Any:
    return pytest.mark.parametrize(
        ("layer", "rows"), measured(shared), ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else ""
    )


def own_tiles(kernels: Any, layer: tuple[str, str, int], tokens: int) -> Any:  # noqa: F811
    shape, size = SHAPES[layer[0]], 1 if layer[1].startswith("fp8") else 2
    expected = None if layer[2] == 1 else -(-tokens * shape.top_k // layer[2])
    return kernels.choose_tiles(shape.hidden, shape.intermediate, shape.top_k, size, tokens, 132, expected)


def test_what_was_measured() -> None:
    names = {"qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "deepseek-v3-tp8", "gpt-oss-120b"}
    alone = {(name, "bf16", 1) for name in names} | {("qwen3-30b-a3b", "fp8-block", 1)}
    assert {layer for layer, _ in measured(shared=False)} == alone
    shared = itertools.product(("qwen3-30b-a3b", "glm-4.5-air"), ("bf16", "fp8-block"), (2, 8))
    assert {layer for layer, _ in measured(shared=True)} == set(shared)


@by_layer(shared=False)
def test_the_formula_loads_as_far_ahead_as_was_fastest(kernels: Any, layer: tuple[str, str, int], rows: list[Any]) -> None:  # noqa: F811
    for tokens in (1, 2, 4, 8):
        own = own_tiles(kernels, layer, tokens)
        took = {
            row["tiles"]["down_ahead"]: row["us"][str(tokens)]
            for row in rows
            if (row["tiles"]["down_rows"], row["tiles"]["down_columns"]) == (own.down_rows, own.down_columns)
        }
        assert took[own.down_ahead] <= 1.01 * min(took.values()), (tokens, took)


@by_layer(shared=True)
def test_with_experts_elsewhere_rows_and_tiles_ahead_are_among_the_fastest(
    kernels: Any,  # noqa: F811
    layer: tuple[str, str, int],
    rows: list[Any],
) -> None:
    worst = 1.0
    for tokens in (1, 4, 16):
        own = own_tiles(kernels, layer, tokens)
        took = {(row["tiles"]["down_rows"], row["tiles"]["down_ahead"]): row["us"][str(tokens)] for row in rows}
        assert took[own.down_rows, own.down_ahead] <= 1.1 * min(took.values()), (tokens, took)
        worst = max(worst, max(took.values()) / min(took.values()))
    assert worst > 1.05  # else nothing was compared


@given(
    st.fixed_dictionaries(
        {
            "up_rows": st.sampled_from([1, 2, 4]),
            "up_columns": st.sampled_from([16, 1024, 4096]),
            "up_warps": st.sampled_from([1, 4, 16]),
            "down_rows": st.sampled_from([1, 2]),
            "down_columns": st.sampled_from([16, 512, 2048]),
            "down_warps": st.sampled_from([1, 4]),
            "down_ahead": st.integers(1, 16),
        }
    ),
    st.sampled_from([("down", sweep.DOWN), ("up", sweep.UP)]),
)
def test_candidates_can_be_launched_and_differ(tiles: dict[str, int], varied: tuple[str, Any]) -> None:
    found = sweep.candidates(tiles, varied[1], varied[0])
    assert found[0] == tiles
    assert len({tuple(candidate.items()) for candidate in found}) == len(found)
    for candidate in found:
        Entry(1, candidate)  # raises for what no kernel takes


@pytest.mark.parametrize(
    ("out", "options", "error"),
    [
        ("out", ["--dtypes", "int4"], "Error: Invalid value for '--dtypes': 'int4' is not one of bf16, "),
        (
            "out",
            ["--shapes", "tiny,nonsense"],
            "Error: Invalid value for '--shapes': 'nonsense' is neither E,topk,N,K nor one of ",
        ),
        ("out", ["--tokens", "0"], "Error: Invalid value for '--tokens': '0' names no positive numbers"),
        ("file/out", [], "Error: {0}/file cannot be written to: File exists; name another folder"),
        ("out", [], "Error: no GPU"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: str, options: list[str], error: str
) -> None:
    def start(interpret: bool) -> None:
        raise BenchError("no GPU")

    monkeypatch.setattr(layer, "start", start)
    (tmp_path / "file").touch()
    done = CliRunner().invoke(sweep.main, [str(tmp_path / out), *options])
    assert done.exit_code in (1, 2)
    assert done.output.splitlines()[-1].startswith(error.format(tmp_path))
