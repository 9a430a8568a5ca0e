"""``vllm-moe-tune tune``: the search, what is kept of it, and that engines take it up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from test_decode_moe import call, patch_of

from vllm_moe_tune_plugin import tuned_tiles
from vllm_moe_tune_plugin.bench import layer as bench_layer
from vllm_moe_tune_plugin.bench import search
from vllm_moe_tune_plugin.bench.schema import BenchError
from vllm_moe_tune_plugin.cli import main
from vllm_moe_tune_plugin.tuned_tiles import LIMITS, Entry, Problem
from vllm_moe_tune_plugin.tunings import decode_kernel

TILES = {
    "up_rows": 2,
    "up_columns": 1024,
    "up_warps": 2,
    "down_rows": 2,
    "down_columns": 512,
    "down_warps": 1,
    "down_ahead": 6,
}
PROBLEM = Problem(6, 6, 2, 16, 32, "bf16")  # that of test_decode_moe.call()

powers = st.integers(0, 4).map(lambda exponent: 2**exponent)
any_tiles = st.fixed_dictionaries({name: st.integers(1, 64) if name == "down_ahead" else powers for name in LIMITS}).map(
    lambda tiles: {**tiles, "up_columns": 256 * tiles["up_columns"], "down_columns": 256 * tiles["down_columns"]}
)


# --- the search


@given(any_tiles, st.sampled_from([4, 8, 16]))
def test_every_neighbour_is_one_that_an_engine_would_take(tiles: dict[str, int], vector: int) -> None:
    found = list(search.neighbours(tiles, vector))
    assert found
    assert tiles not in found
    for neighbour in found:
        assert Entry(1, neighbour).tiles == neighbour


@given(any_tiles)
def test_climbing_never_ends_on_something_slower(start: dict[str, int]) -> None:
    """And reaches the top where there is one hill."""

    def took(tiles: dict[str, int] | None) -> float:
        tiles = tiles or start
        return 1.0 + sum(abs(tiles[name].bit_length() - 3) for name in ("up_rows", "down_rows", "up_warps", "down_warps"))

    best, speed_up, tried = search.climb(took, start, 4, seconds=60)
    assert took(best) == 1.0
    assert speed_up == took(start) / took(best)
    assert tried > 1


def test_climbing_ends_when_its_time_is_over() -> None:
    best, speed_up, tried = search.climb(lambda tiles: 1.0 / tiles["up_rows"] if tiles else 1.0, TILES, 8, seconds=0)
    assert (best, speed_up, tried) == (None, 1.0, 0)


def test_what_is_found_must_beat_what_the_formula_says_for_each_number_of_tokens() -> None:
    """It may be faster than any tiles that are the same for all."""
    best, speed_up, tried = search.climb(lambda tiles: 2.0 / tiles["up_rows"] if tiles else 0.1, TILES, 8, seconds=60)
    assert (best, speed_up) == (None, 1.0)
    assert tried == 1 + len(list(search.neighbours(TILES, 8)))


def test_the_formula_of_one_number_of_tokens_may_be_the_best_for_all() -> None:
    best, speed_up, _ = search.climb(lambda tiles: 0.9 if tiles == TILES else 1.0, TILES, 8, seconds=60)
    assert best == TILES
    assert speed_up == pytest.approx(1 / 0.9)


def test_where_nothing_compiles_nothing_is_found() -> None:
    assert search.climb(lambda tiles: float("inf"), TILES, 8, seconds=60)[:2] == (None, 1.0)


def test_tiles_that_do_not_compile_are_not_taken() -> None:
    def took(tiles: dict[str, int] | None) -> float:
        return 2.0 if tiles is None else 1.0 if tiles["up_rows"] == 2 else float("inf")

    best, _, _ = search.climb(took, TILES, 8, seconds=60)
    assert best is not None
    assert best["up_rows"] == 2


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [([1.4, 1.2, 1.1], 4), ([1.4, 1.2, 0.99], 2), ([1.4, 0.9, 1.1], 1), ([1.0, 1.2, 1.1], 0), ([1.4, 1.2, 1.0001], 2)],
)
def test_the_window_ends_before_the_first_row_that_does_not_win(ratios: list[float], tokens: int) -> None:
    """One within the noise does not."""
    rows = [
        {"key": {"tokens": size}, "ratio": ratio, "ratio_ci95": [ratio - 0.01, ratio + 0.01]}
        for size, ratio in zip((1, 2, 4), ratios, strict=True)
    ]
    assert search.window(rows) == tokens


# --- what is kept


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    other = dataclasses.replace(PROBLEM, dtype="fp8-block")
    assert tuned_tiles.look_up(tmp_path, "NVIDIA L4", PROBLEM) is None
    path = tuned_tiles.save(tmp_path, "NVIDIA L4", PROBLEM, Entry(2, TILES))
    tuned_tiles.save(tmp_path, "NVIDIA L4", other, Entry(0, TILES), ratios={"1": 0.9})
    tuned_tiles.save(tmp_path, "NVIDIA L4", PROBLEM, Entry(4, TILES))
    assert path.name == "nvidia-l4.json"
    assert tuned_tiles.look_up(tmp_path, "NVIDIA L4", PROBLEM) == Entry(4, TILES)
    assert tuned_tiles.look_up(tmp_path, "NVIDIA L4", other) == Entry(0, TILES)
    tuned_tiles.save(tmp_path, "NVIDIA L4", other, Entry(3, None))
    assert tuned_tiles.look_up(tmp_path, "NVIDIA L4", other) == Entry(3, None)
    assert tuned_tiles.look_up(tmp_path, "NVIDIA L40", PROBLEM) is None
    assert len(json.loads(path.read_text())["layers"]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["nvidia-l4.json"]


@pytest.mark.parametrize(
    "layers",
    [
        "no JSON",
        [],
        {},
        {"layers": [{"problem": {}, "tokens": 1, "tiles": TILES}]},
        {"layers": [{"problem": dataclasses.asdict(PROBLEM), "tokens": 17, "tiles": TILES}]},
        {"layers": [{"problem": dataclasses.asdict(PROBLEM), "tokens": 1, "tiles": {**TILES, "up_rows": 3}}]},
        {"layers": [{"problem": dataclasses.asdict(PROBLEM), "tokens": 1, "tiles": {**TILES, "up_rows": 32}}]},
        {"layers": [{"problem": dataclasses.asdict(PROBLEM), "tokens": 1, "tiles": {**TILES, "down_columns": 8}}]},
        {"layers": [{"problem": dataclasses.asdict(PROBLEM), "tokens": 1, "tiles": {**TILES, "down_ahead": "6"}}]},
        {"layers": [{"problem": dataclasses.asdict(PROBLEM), "tokens": 1, "tiles": {"up_rows": 2}}]},
    ],
)
def test_a_file_that_makes_no_sense_is_told_and_left_aside(tmp_path: Path, caplog: Any, layers: Any) -> None:
    """Until a search has written it anew, as the warning advises."""
    tuned_tiles.file_of(tmp_path, "gpu").write_text(layers if isinstance(layers, str) else json.dumps(layers))
    with caplog.at_level("WARNING", logger="vllm.moe_tune"):
        assert tuned_tiles.look_up(tmp_path, "gpu", PROBLEM) is None
        assert tuned_tiles.look_up(tmp_path, "gpu", PROBLEM) is None
    assert len(caplog.records) == 1
    tuned_tiles.save(tmp_path, "gpu", PROBLEM, Entry(2, TILES))
    assert tuned_tiles.look_up(tmp_path, "gpu", PROBLEM) == Entry(2, TILES)


def test_saving_keeps_of_a_file_what_makes_sense(tmp_path: Path) -> None:
    other = dataclasses.replace(PROBLEM, dtype="fp8-block")
    path = tuned_tiles.save(tmp_path, "gpu", other, Entry(1, TILES))
    data = json.loads(path.read_text())
    unhashable = {**dataclasses.asdict(PROBLEM), "hidden": [32]}
    data["layers"] += ["nonsense", {"problem": unhashable, "tokens": 1, "tiles": TILES}]
    path.write_text(json.dumps(data))
    tuned_tiles.save(tmp_path, "gpu", PROBLEM, Entry(2, TILES))
    assert tuned_tiles.load(tmp_path, "gpu") == {other: Entry(1, TILES), PROBLEM: Entry(2, TILES)}


# --- engines take it up


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call a patched ``TritonExperts.apply``; returns the tiles of the kernels, "formula", or "stock"."""
    took: list[Any] = []

    def apply(self: Any, **arguments: Any) -> None:
        took.append("stock")

    apply.__module__ = patch_of.__module__  # where the class and its other steps are
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setattr(decode_kernel, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(decode_kernel, "_run", lambda experts, call, found: took.append(found.tiles if found else "formula"))

    def run(tokens: int, decode_tokens: int | None = None) -> Any:
        patch, experts_class = patch_of(monkeypatch, apply, decode_tokens=decode_tokens, cache_dir=str(tmp_path))
        whole = call()
        some = {
            name: getattr(whole, name)[:1].repeat(tokens, 1) for name in ("output", "hidden_states", "topk_weights", "topk_ids")
        }
        scratch = torch.empty(tokens * 2 * 64, dtype=torch.bfloat16)
        arguments = {name: getattr(whole, name) for name in decode_kernel._PARAMETERS} | some | {"workspace2": scratch}
        experts_class().apply(**arguments)
        assert patch.undo()
        return took[-1]

    return SimpleNamespace(run=run, folder=tmp_path)


def test_without_a_search_the_formula_decides(layer: Any) -> None:
    assert decode_kernel.window(Problem(6, 6, 2, 16, 32, "bf16"), 3 * 16 * 32 * 2) == 1
    assert [layer.run(tokens) for tokens in (1, 2)] == ["formula", "stock"]


def test_what_was_found_decides_about_tiles_and_tokens(layer: Any) -> None:
    tuned_tiles.save(layer.folder, "interpreter", PROBLEM, Entry(3, TILES))
    assert [layer.run(tokens) for tokens in (1, 3, 4)] == [TILES, TILES, "stock"]
    tuned_tiles.save(layer.folder, "interpreter", PROBLEM, Entry(0, TILES))
    assert layer.run(1) == "stock"
    tuned_tiles.save(layer.folder, "interpreter", PROBLEM, Entry(3, None))
    assert [layer.run(tokens) for tokens in (1, 3, 4)] == [None, None, "stock"]


def test_the_setting_outweighs_what_was_found(layer: Any) -> None:
    tuned_tiles.save(layer.folder, "interpreter", PROBLEM, Entry(1, TILES))
    assert layer.run(4, decode_tokens=4) == TILES
    assert layer.run(1, decode_tokens=0) == "stock"


# --- which layer a model has


@pytest.mark.parametrize("words", [[], ["--shape", "tiny", "--model", "."], ["--shape", "nonsense"]])
def test_what_cannot_be_searched_is_said_in_one_line(words: list[str]) -> None:
    done = CliRunner().invoke(main, ["tune", *words])
    assert done.exit_code != 0
    assert done.output.strip().splitlines()[-1].startswith("Error: ")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search would begin."""

    def start(interpret: bool) -> None:
        raise BenchError("begun")

    monkeypatch.setattr(bench_layer, "start", start)


@pytest.mark.parametrize(("shape", "tp"), [("16,2,128,100", 3), ("16,2,8,128", 16)])
def test_ranks_that_cannot_share_a_layer_are_refused(start: None, tmp_path: Path, shape: str, tp: int) -> None:
    words = ["tune", "--shape", shape, "--cache-dir", str(tmp_path), "--tp"]
    done = CliRunner().invoke(main, [*words, str(tp)])
    assert done.exit_code == 1
    assert done.output == f"Error: {tp} ranks cannot share an intermediate size of {shape.split(',')[2]}\n"
    assert CliRunner().invoke(main, [*words, "2"]).output == "Error: begun\n"


def test_a_folder_that_cannot_be_written_to_is_told_before_the_search(start: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["tune", "--shape", "tiny", "--cache-dir", str(tmp_path / "file" / "cache")])
    assert done.exit_code == 1
    assert done.output == f"Error: {tmp_path / 'file' / 'cache'} cannot be written to: Not a directory; name another folder\n"
