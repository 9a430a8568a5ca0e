"""Four ranks agree on all that they decide, and together compute the whole layer; see `ranks.py`.

A disagreement about what is tuned would make one rank wait for another for good: the ranks then end by a timeout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from packaging.version import Version

from vllm_moe_tune_plugin.stack import installed

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("flashinfer") is None:
    pytest.skip("needs stock vLLM with its FlashInfer", allow_module_level=True)

release = installed("vllm") or Version("0")

#: The sizes of vLLM's FusedMoEParallelConfig: without expert parallelism all ranks share each expert, data-parallel ones too.
SIZES = {"TP4": (4, 1, 1), "EP4": (1, 1, 4), "DP4": (4, 4, 1), "DP4xEP4": (1, 4, 4), "DP2xTP2": (4, 2, 1)}
LAYOUTS = pytest.mark.parametrize("layout", SIZES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout reports."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name("ranks.py")), str(folder / "ranks.json")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MOE_TUNE_", "VLLM_PLUGINS"))}
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, env=environ, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=600)
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "ranks.json").read_text())
    return found


@LAYOUTS
def test_the_layout_is_what_vllm_makes_of_it(ranks: dict[str, list[dict[str, Any]]], layout: str) -> None:
    tensor, data, experts = SIZES[layout]
    assert [rank["sizes"] for rank in ranks[layout]] == [[tensor, data, experts]] * 4
    assert sorted(rank["ranks"][0] for rank in ranks[layout]) == sorted(number % tensor for number in range(4))
    assert sorted(rank["ranks"][2] for rank in ranks[layout]) == sorted(number % experts for number in range(4))


@LAYOUTS
def test_ranks_agree(ranks: dict[str, list[dict[str, Any]]], layout: str) -> None:
    for rank in ranks[layout]:
        assert len(rank["agreed"]) == 4
        assert all(decided == rank["agreed"][0] for decided in rank["agreed"])
        assert rank["agreed"][0]["why not all tokens"] == ""  # with vLLM's default, whatever the layout
        assert rank["tuned_after_all"]["decode_kernel"] == rank["tuned_after_all"]["autotune_bucket"] == "applied"
        assert "failed" not in rank["tuned_after_all"].values()


@LAYOUTS
def test_the_bucket_holds_the_tokens_of_all_data_parallel_ranks(ranks: dict[str, list[dict[str, Any]]], layout: str) -> None:
    _, data, _ = SIZES[layout]
    starts = ranks[layout][0]["agreed"][0]["starts"]
    assert starts["bound"] == starts["buckets"][-1] == 8192 * data


@LAYOUTS
def test_no_rank_tunes_alone(ranks: dict[str, list[dict[str, Any]]], layout: str) -> None:
    """Where ranks tune together, what they measured is their mean, and that was compared above, number by number."""
    starts = ranks[layout][0]["agreed"][0]["starts"]
    kept = release >= Version("0.25")
    assert len(starts["measured"]) == 10
    for start, measured in starts["measured"].items():
        warm = kept and start.startswith("warm")
        assert len(measured) == (0 if warm else 2 * len(starts["buckets"])), start  # there are two tactics
    assert len(starts["files"]) == (4 if kept else 0)
    assert len({pathlib.PurePath(file).parent for file in starts["files"]}) == int(kept)


def test_the_window_is_for_the_tokens_of_all_ranks(ranks: dict[str, list[dict[str, Any]]]) -> None:
    """A quarter of each expert does not narrow it; with a quarter of the experts a rank has less to read, and it is wider."""
    windows = {layout: of_all[0]["agreed"][0]["windows"] for layout, of_all in ranks.items()}
    shared = {"qwen3-30b-a3b": 8, "qwen3-next-80b-a3b": 16, "mixtral-8x7b": 1}
    assert windows["TP4"] == windows["DP4"] == windows["DP2xTP2"] == shared
    assert windows["EP4"] == windows["DP4xEP4"] == {"qwen3-30b-a3b": 16, "qwen3-next-80b-a3b": 16, "mixtral-8x7b": 2}


@LAYOUTS
def test_each_expert_is_on_one_rank_or_on_all(ranks: dict[str, list[dict[str, Any]]], layout: str) -> None:
    held = [expert for rank in ranks[layout] for expert in rank["experts"]]
    assert sorted(held) == sorted(list(range(128)) * (4 if SIZES[layout][2] == 1 else 1))


@LAYOUTS
def test_the_ranks_outputs_add_up_to_the_layer(ranks: dict[str, list[dict[str, Any]]], layout: str) -> None:
    for rank in ranks[layout]:
        assert rank["error"] < 1e-6


@pytest.mark.skipif(release < Version("0.30"), reason="vLLM's all-to-all needs CUDA's libraries")
def test_each_rank_serves_the_tokens_of_all_and_gets_its_own_back(ranks: dict[str, list[dict[str, Any]]]) -> None:
    """Through vLLM's own prepare and finalize: 8 tokens of four ranks, one call of the decode kernel on each."""
    for rank in ranks["DP4xEP4"]:
        assert rank["together"]["served"] == [8]
        assert rank["together"]["error"] < 1e-2
