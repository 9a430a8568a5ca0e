"""Tuning that covers what is served: the installed release with FlashInfer's real autotuner, and the table of all releases.

The table is made by `real.py`, release by release. Here the installed release is measured again in a few configurations, and
`vllm_moe_tune_plugin.coverage` must give the table's numbers in all of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from packaging.version import Version

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("flashinfer") is None:
    pytest.skip("needs stock vLLM with its FlashInfer", allow_module_level=True)

import real

from vllm_moe_tune_plugin.coverage import Coverage, Serving
from vllm_moe_tune_plugin.stack import installed

HERE = pathlib.Path(__file__).parent
TABLE = {name: real.unpacked(release) for name, release in json.loads((HERE / "coverage.json").read_text()).items()}
VLLM = str(installed("vllm"))
release = installed("vllm") or Version("0")
LAYERS = "vllm.model_executor.layers."

# 5000 is no bucket: in the table there are powers of two only.
MEASURED = ("4x8192", "1x5000")
SERVED = ("miss", "beyond", "below")


def serving(configuration: str, **changed: Any) -> Serving:
    dp_size, tokens = map(int, configuration.split("x"))
    shape = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}  # as in call_sites.Setup
    return Serving(**{"max_num_batched_tokens": tokens, "dp_size": dp_size, **shape, **changed})


def start(output: pathlib.Path, *options: str, rank: int = 0) -> subprocess.Popen[bytes]:
    """Start a process, told its rank as an engine's are; Python's hashes differ by rank, too.

    VLLM_DP_RANK is not among the names: the identity of vLLM 0.26 counts it, so that such ranks differ without the plugin, too.
    """
    log = output.with_suffix(".log").open("wb")
    command = [sys.executable, "-W", "ignore", real.__file__, str(output), *options]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MOE_TUNE_", "VLLM_PLUGINS"))}
    environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "PYTHONHASHSEED"), str(rank))
    return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the processes found out, two of them at a time."""
    folder = tmp_path_factory.mktemp("autotune")
    configurations = [*TABLE.get(VLLM, {"rows": {}})["rows"], *MEASURED]
    asked = json.dumps([dataclasses.asdict(serving(configuration)) for configuration in configurations])
    options = {
        "measured": ("--configurations", ",".join(MEASURED), "--look", asked),
        "rank 0": ("--rank", "0", "--free", str(150 << 30)),
        "rank 3": ("--rank", "3", "--free", str(1 << 30)),
    }
    found: dict[str, Any] = {}
    for together in (("measured", "rank 0"), ("rank 3",)):
        running = {name: start(folder / f"{name}.json", *options[name], rank=3 if name == "rank 3" else 0) for name in together}
        for name, process in running.items():
            output = folder / f"{name}.json"
            assert process.wait(timeout=600) == 0, output.with_suffix(".log").read_text()[-3000:]
            found[name] = json.loads(output.read_text())
    coverages = map(Coverage.from_json, found["measured"]["looked"])
    found["looked"] = dict(zip(configurations, coverages, strict=True))
    return found


def looked(coverage: Coverage, site: str, side: str) -> dict[str, int]:
    function = site.split(" ")[0]
    kernel = next(kernel for kernel in coverage.kernels if kernel.caller.removeprefix(LAYERS) == function)
    which = kernel.stock if side == "stock" else kernel.plugin
    return {"sizes": kernel.largest_call, **{served: which.sizes(served) for served in SERVED}}


def measured(row: dict[str, int]) -> dict[str, int]:
    return {name: row[name] for name in ("sizes", *SERVED)}


def test_the_table_has_the_installed_release() -> None:
    assert VLLM in TABLE, f"make it: real.py OUT.json; real.py --merge {HERE / 'coverage.json'} OUT.json"
    assert TABLE[VLLM]["flashinfer"] == str(installed("flashinfer-python"))


def test_the_release_still_measures_what_the_table_says(answers: dict[str, Any]) -> None:
    assert answers["measured"]["rows"]["4x8192"] == TABLE[VLLM]["rows"]["4x8192"]


@pytest.mark.parametrize("side", ["stock", "tuned"])
def test_coverage_says_what_the_autotuner_does(answers: dict[str, Any], side: str) -> None:
    rows = {**TABLE[VLLM]["rows"], **answers["measured"]["rows"]}
    for configuration, sites in rows.items():
        coverage = answers["looked"][configuration]
        assert {site.split(" ")[0] for site in sites} <= {kernel.caller.removeprefix(LAYERS) for kernel in coverage.kernels}
        for site, found in sites.items():
            assert looked(coverage, site, side) == measured(found[side]), f"{configuration} {site}"


def test_tuned_leaves_nothing_uncovered_without_naming_why(answers: dict[str, Any]) -> None:
    for configuration, sites in answers["measured"]["rows"].items():
        for site, found in sites.items():
            uncovered = sum(found["tuned"][served] for served in SERVED)
            function = site.split(" ")[0]
            kernels = answers["looked"][configuration].kernels
            limits = next(kernel.limits for kernel in kernels if kernel.caller.removeprefix(LAYERS) == function)
            assert uncovered == 0 or limits, f"{configuration} {site}"


def test_the_plugin_never_covers_less_than_stock() -> None:
    for configuration, sites in TABLE[VLLM]["rows"].items():
        for site, found in sites.items():
            stock, tuned = found["stock"], found["tuned"]
            assert tuned["miss"] <= stock["miss"], f"{configuration} {site}"
            # Rounding down leaves no size uncovered twice: what was beyond the last bucket is then below one.
            assert sum(tuned[served] for served in SERVED) <= sum(stock[served] for served in SERVED), f"{configuration} {site}"


@pytest.mark.skipif(release < Version("0.30"), reason="its warm-up tunes each kernel's own buckets")
def test_stock_misses_what_data_parallel_ranks_gather() -> None:
    """The loss that this is about: PR 47427's bound without its buckets."""
    row = TABLE[VLLM]["rows"]["4x8192"]["fused_moe.experts.trtllm_nvfp4_moe:TrtLlmNvFp4ExpertsModular._invoke_kernel"]
    assert row["stock"] == {"sizes": 32768, "miss": 24576, "beyond": 0, "below": 0, "profiles": 21, "largest": 8192}
    assert row["tuned"] == {"sizes": 32768, "miss": 0, "beyond": 0, "below": 0, "profiles": 23, "largest": 32768}


def test_ranks_agree_whatever_their_rank_and_free_memory(answers: dict[str, Any]) -> None:
    one, other = answers["rank 0"], answers["rank 3"]
    for name in ("states", "profiles", "buckets", "folders", "keys"):
        assert one[name] == other[name], name
    assert one["keys"]


def test_a_rank_tunes_for_the_tokens_of_all_ranks(answers: dict[str, Any]) -> None:
    """What the ranks agree on follows from the configuration: four ranks of 8192 tokens."""
    kernel = "trtllm_fp8_per_tensor_scale_moe"
    for rank in ("rank 0", "rank 3"):
        tuned = answers[rank]["buckets"]["tuned"][kernel]
        assert tuned["bound"] == tuned["tuned"][-1] == 32768


keeps_tactics = pytest.mark.skipif(release < Version("0.25"), reason="this vLLM keeps nothing that it tuned")


@keeps_tactics
@pytest.mark.parametrize("arrangement", real.ARRANGEMENTS)
def test_without_the_plugin_what_is_kept_is_stock_to_the_byte(answers: dict[str, Any], arrangement: str) -> None:
    for rank in ("rank 0", "rank 3"):
        kept = answers[rank]["kept"][arrangement]
        for ranks in ("four", "one"):
            stock, own = kept["stock"][ranks], kept["own"][ranks]
            assert stock
            assert stock.keys().isdisjoint(own) if arrangement == "on" else stock == own


@keeps_tactics
@pytest.mark.parametrize("arrangement", real.ARRANGEMENTS)
def test_ranks_keep_the_same_under_the_same_identity(answers: dict[str, Any], arrangement: str) -> None:
    """vLLM names some files after the rank: the identity is the folder's name."""
    one, other = answers["rank 0"]["kept"][arrangement], answers["rank 3"]["kept"][arrangement]
    for when in ("stock", "own"):
        assert one[when]["one"] == other[when]["one"]
        in_folders = [
            sorted((str(pathlib.PurePath(path).parent), digest) for path, digest in rank[when]["four"].items())
            for rank in (one, other)
        ]
        assert in_folders[0] == in_folders[1]


def test_what_is_tuned_with_and_without_the_plugin_is_kept_apart(answers: dict[str, Any]) -> None:
    profiles, folders = answers["rank 0"]["profiles"], answers["rank 0"]["folders"]
    assert profiles["stock"] > 0
    assert profiles["tuned"] >= profiles["stock"]
    if release < Version("0.25"):  # nothing is kept
        assert folders == {"stock": [], "own": [], "after": []}
        return
    assert len(folders["stock"]) == len(folders["own"]) == 1
    assert folders["after"] == sorted(folders["stock"] + folders["own"])
    assert profiles["again"] == profiles["stock_again"] == 0


def test_calls_without_a_tactic_are_counted_once_tuning_has_happened(answers: dict[str, Any]) -> None:
    untuned = answers["rank 0"]["untuned"]
    assert untuned["before"] == untuned["tuned"] == []
    kernel = "flashinfer::trtllm_fp8_per_tensor_scale_moe"
    assert untuned["lost"] == [{"kernel": kernel, "calls": 2, "fewest_tokens": 8, "most_tokens": 8}]
