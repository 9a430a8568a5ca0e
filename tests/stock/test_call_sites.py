"""Every FlashInfer MoE call site of the installed vLLM, down to FlashInfer's C++ boundary, without and with the plugin.

A process for each, with the same random inputs; what the plugin must change is stated here, and everything else must be
equal bit for bit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import pathlib
import re
import secrets
import subprocess
import sys
from typing import Any

import pytest
import torch
from packaging.version import Version

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("flashinfer") is None:
    pytest.skip("needs stock vLLM with its FlashInfer", allow_module_level=True)

import call_sites

from vllm_moe_tune_plugin import known_bad

FLASHINFER = Version(importlib.metadata.version("flashinfer-python"))
# Twelve thousand is no power of two; 64 ranks bring the bucket above what one NVFP4 or MXFP4 launch can take.
SETUP = {"max_num_tokens": 12000, "dp_size": 64}
FUNCTIONS = sorted(call_sites.find_call_sites())

Outcomes = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Outcomes]:
    """What each run of each site did, by (site, run), without and with the plugin."""
    folder = tmp_path_factory.mktemp("call_sites")
    seed = secrets.randbits(32)
    print("seed", seed)
    command = [sys.executable, "-W", "ignore", call_sites.__file__, str(folder), str(seed), "--setup", str(SETUP)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
    print(done.stdout[-8000:])
    result = {}
    for plugin in (False, True):
        if (folder / str(plugin)).exists():
            saved = torch.load(folder / str(plugin), weights_only=False)
            result[plugin] = {(outcome["site"], outcome["run"]): outcome for outcome in saved}
    return result


@pytest.fixture
def stock(outcomes: dict[bool, Outcomes]) -> Outcomes:
    assert False in outcomes, "the process without the plugin failed"
    return outcomes[False]


@pytest.fixture
def tuned(outcomes: dict[bool, Outcomes]) -> Outcomes:
    assert True in outcomes, "the process with the plugin failed"
    return outcomes[True]


def sites_of(outcomes: Outcomes, function: str) -> list[str]:
    """The function's site, or one for each variant of it."""
    return [site for site, run in outcomes if run == "int32" and site.split(" ")[0] == function]


def only_call(outcome: dict[str, Any]) -> dict[str, Any]:
    assert outcome["error"] is None, f"{outcome['site']}, {outcome['run']}: {outcome['error']}"
    assert len(outcome["calls"]) == 1, outcome["site"]
    return outcome["calls"][0]  # type: ignore[no-any-return]


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, NaN included."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def packs_with_helper(function: str) -> bool:
    """Whether vLLM packs this site's ids and weights in its helper, which the plugin can do without."""
    return any(
        "trtllm_moe_pack_topk_ids_weights" in pathlib.Path(path).read_text()
        for path, _ in call_sites.find_call_sites()[function]
    )


def takes_tuple(kernel: str) -> bool:
    """Whether FlashInfer's function takes ids and float32 weights apart from each other."""
    import flashinfer.fused_moe

    annotation = inspect.signature(getattr(flashinfer.fused_moe, kernel)).parameters["topk_ids"].annotation
    return bool(re.search(r"[Tt]uple\[", str(annotation))) and Version("0.6.16" if "fp4" in kernel else "0.6.18") <= FLASHINFER


def routed_kernel(op: str) -> str:
    """The public function of a C++ op whose routing comes from the caller."""
    return op if op.endswith("routed_moe") else op.removesuffix("_moe") + "_routed_moe"


def becomes_tuple(function: str, call: dict[str, Any]) -> bool:
    return call["routing"] == "packed" and packs_with_helper(function) and takes_tuple(routed_kernel(call["op"]))


def warm_up_overrides_buckets() -> bool:
    """Whether vLLM's warm-up tunes CUTLASS up to max_num_batched_tokens whatever its bound is."""
    warm_up = pathlib.Path(vllm_folder()) / "model_executor" / "warmup" / "kernel_warmup.py"
    return "tuning_buckets=" in warm_up.read_text()


def vllm_folder() -> str:
    return importlib.util.find_spec("vllm").submodule_search_locations[0]  # type: ignore[union-attr,index]


def expected_bucket(stock: dict[str, Any], outcome: dict[str, Any]) -> int:
    before = only_call(stock)
    if before["op"] == "cutlass_fused_moe":
        return max(SETUP["max_num_tokens"], 8192) if warm_up_overrides_buckets() else 8192
    kernel = before["op"] if before["routing"] == "logits" else routed_kernel(before["op"])
    if known_bad.find(kernel, FLASHINFER) is not None:
        return int(before["tune_max_num_tokens"])
    bucket = max(SETUP["max_num_tokens"] * SETUP["dp_size"], 8192)
    if Version("0.6.10") > FLASHINFER:
        bucket = 1 << (bucket - 1).bit_length()
    return min(bucket, outcome["limit"] or bucket)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_site_is_reached(stock: Outcomes, function: str) -> None:
    if function in call_sites.UNREACHED:
        assert not sites_of(stock, function)
        pytest.skip(call_sites.UNREACHED[function])
    assert sites_of(stock, function)
    for site in sites_of(stock, function):
        outcome = stock[site, "int32"]
        only_call(outcome)
        assert set(outcome["reached"]) == {function}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bucket(stock: Outcomes, tuned: Outcomes, function: str) -> None:
    for site in sites_of(tuned, function):
        outcome = tuned[site, "int32"]
        assert only_call(outcome)["tune_max_num_tokens"] == expected_bucket(stock[site, "int32"], outcome), site


@pytest.mark.parametrize("function", FUNCTIONS)
def test_ids_of_any_type_reach_the_kernel_as_int32(tuned: Outcomes, function: str) -> None:
    for site in sites_of(tuned, function):
        narrow, wide = (only_call(tuned[site, run]) for run in ("int32", "int64"))
        assert same(list(wide["others"].values()), list(narrow["others"].values())), site
        assert (wide["routing"], wide["tune_max_num_tokens"]) == (narrow["routing"], narrow["tune_max_num_tokens"])
        if wide["routing"] != "logits":
            assert wide["ids"].dtype == torch.int32
            assert same([wide["ids"], wide["weights"]], [narrow["ids"], narrow["weights"]]), site


@pytest.mark.parametrize("function", FUNCTIONS)
def test_routing(stock: Outcomes, tuned: Outcomes, function: str) -> None:
    for site in sites_of(stock, function):
        before, after = only_call(stock[site, "int32"]), only_call(tuned[site, "int32"])
        if not becomes_tuple(function, before):
            assert after["routing"] == before["routing"]
            assert same([after["ids"], after["weights"]], [before["ids"], before["weights"]]), site
            continue
        packed = before["ids"]
        for run in ("int32", "int64", "strided"):
            after = only_call(tuned[site, run])
            assert after["routing"] == "unpacked"
            assert after["ids"].is_contiguous()
            assert after["weights"].is_contiguous()
            assert after["weights"].dtype == torch.float32
            assert same(after["ids"], packed >> 16), site
            # Packing keeps the upper half of each weight, rounded; here all of it arrives.
            assert same(after["weights"].bfloat16(), (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16)), site
        assert not same(after["weights"], after["weights"].bfloat16().float()), (
            "random weights that bf16 holds exactly prove nothing"
        )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_arguments_are_untouched(stock: Outcomes, tuned: Outcomes, function: str) -> None:
    assert sites_of(stock, function) == sites_of(tuned, function)
    for site in sites_of(stock, function):
        before, after = only_call(stock[site, "int32"]), only_call(tuned[site, "int32"])
        assert before["op"] == after["op"]
        assert before["others"].keys() == after["others"].keys()
        changed = [name for name, value in before["others"].items() if not same(value, after["others"][name])]
        assert not changed, site
