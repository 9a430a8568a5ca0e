"""tuple_routing: ids and weights as a tuple where FlashInfer reads fp32, packed with the same bits elsewhere."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, Optional, Tuple, Union  # noqa: UP035 - FlashInfer's annotations are spelt this way

import fake_stack
import pytest
import torch
from fake_stack import EXPERTS, FUSED_MOE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import no_gpu
from vllm_moe_tune_plugin.ledger import State
from vllm_moe_tune_plugin.patching import STOCK, Verdict
from vllm_moe_tune_plugin.tunings import tuple_routing
from vllm_moe_tune_plugin.tunings.tuple_routing import ROUTED, as_tuple, takes_tuple

FP4, FP8, BF16 = "trtllm_fp4_block_scale_routed_moe", "trtllm_fp8_block_scale_routed_moe", "trtllm_bf16_routed_moe"


def random_routing(rows: int = 5, top_k: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 128, (rows, top_k)), torch.rand(rows, top_k)


def packed(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What stock computes with torch.compile."""
    return (ids.to(torch.int32) << 16) | weights.to(torch.bfloat16).view(torch.int16)


# --- what FlashInfer takes -------------------------------------------------------------------------------------------------

TAKES = [
    Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]],  # noqa: UP006, UP007
    Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],  # noqa: UP007
    torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    Optional[Tuple[torch.Tensor, torch.Tensor]],  # noqa: UP006, UP045
    "torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
    "Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]",
]
REFUSES = [torch.Tensor, "torch.Tensor", Optional[torch.Tensor], Any, list[torch.Tensor], None, "TupleLike", int]  # noqa: UP045


def kernel_with(annotation: Any) -> Any:
    def kernel(topk_ids, hidden_states=None, tune_max_num_tokens=8192):
        return topk_ids

    kernel.__annotations__["topk_ids"] = annotation
    return kernel


@pytest.mark.parametrize("annotation", TAKES, ids=str)
def test_takes_a_tuple(annotation):
    assert takes_tuple(kernel_with(annotation))


@pytest.mark.parametrize("annotation", REFUSES, ids=str)
def test_takes_no_tuple(annotation):
    assert not takes_tuple(kernel_with(annotation))


def test_without_an_annotation_or_the_parameter_there_is_no_tuple():
    assert not takes_tuple(lambda topk_ids: None)
    assert not takes_tuple(lambda routing_logits: None)
    assert not takes_tuple(lambda *args, **kwargs: None)


versions = st.builds(
    "0.{}.{}{}".format,
    st.sampled_from([5, 6, 6, 6, 7]),
    st.integers(0, 20) | st.sampled_from([15, 16, 17, 18]),
    st.sampled_from(["", "", ".post1", ".post3", "rc1", "a2", ".dev20260101", "+cu129", "rc1+cu129"]),
)


def reads_fp32(kernel: str, version: str) -> bool:
    """Whether a release reads fp32 weights of tuples as fp32; what comes before it (rc, dev) may not have it yet."""
    release = Version(version)
    first = (0, 6, 16) if "fp4" in kernel else (0, 6, 18)
    return release.release > first or (release.release == first and not release.is_prerelease)


def triton_pack(topk_ids, topk_weights, block_size=1024):
    return _pack_kernel(topk_ids, topk_weights)


def compiled_pack(topk_ids, topk_weights):
    return packed(topk_ids, topk_weights)


def _pack_kernel(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return packed(ids, weights)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    kernel=st.sampled_from(sorted(set(ROUTED.values()))),
    version=versions,
    annotation=st.sampled_from([*TAKES, *REFUSES]),
    pack=st.sampled_from([triton_pack, compiled_pack]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    is_tuning=st.booleans(),
)
def test_weights_that_flashinfer_would_misread_never_reach_it(monkeypatch, kernel, version, annotation, pack, dtype, is_tuning):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "flashinfer.fused_moe", SimpleNamespace(**{kernel: kernel_with(annotation)}))
        tuner = SimpleNamespace(get=lambda: SimpleNamespace(is_tuning_mode=is_tuning))
        patched.setitem(sys.modules, "flashinfer.autotuner", SimpleNamespace(AutoTuner=tuner))
        patched.setattr(tuple_routing, "installed", lambda name: Version(version))
        answer = tuple_routing._decide(kernel)(pack)
        may = annotation in TAKES and reads_fp32(kernel, version)
        if isinstance(answer, Verdict):
            assert not may
            assert answer.state is State.UNSUPPORTED
            assert kernel in answer.reason
            assert version.partition("+")[0] in answer.reason
            return
        ids, weights = random_routing()
        result = answer.instead(pack, (ids,), {"topk_weights": weights.to(dtype)})
    tunes_on_garbage = "fp4" in kernel and Version(version) < Version("0.6.17")
    if may and dtype in (torch.float32, torch.bfloat16) and not (is_tuning and tunes_on_garbage):
        got_ids, got_weights = result
        assert type(result) is tuple
        assert got_ids.dtype == torch.int32
        assert torch.equal(got_ids, ids.to(torch.int32))
        assert got_weights.dtype == dtype
        assert torch.equal(got_weights, weights.to(dtype))
    else:
        assert result is STOCK, "stock packs; on a CPU without Triton's interpreter ours does not either"


@pytest.mark.parametrize("imported", ["0.6.13", "0.0.0+unknown"])
def test_an_imported_flashinfer_older_than_the_metadata_gets_no_fp32_tuple(install, imported):
    """A source tree on the path comes before the installed distribution, whose metadata is found all the same."""
    install({**fake_stack.STACK, "flashinfer": f"__version__ = {imported!r}\n{fake_stack.STACK['flashinfer']}"})
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    experts = importlib.import_module(f"{EXPERTS}.trtllm_nvfp4_moe").TrtLlmNvFp4ExpertsModular()
    experts.apply(None, *random_routing())
    assert not isinstance(importlib.import_module("flashinfer.fused_moe.core").CALLS[-1][1], tuple)


# --- as_tuple --------------------------------------------------------------------------------------------------------------


def layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = tensor.shape
    wide = torch.zeros(rows, 2 * columns, dtype=tensor.dtype)
    wide[:, ::2] = tensor
    return {"contiguous": tensor, "transposed": tensor.T.contiguous().T, "strided": wide[:, ::2]}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_as_tuple(layout, dtype):
    ids, weights = random_routing(6, 3)
    given_ids, given_weights = layouts(ids.to(dtype))[layout], layouts(weights)[layout]
    got_ids, got_weights = as_tuple(given_ids, given_weights)
    assert got_ids.dtype == torch.int32
    assert got_ids.is_contiguous()
    assert got_weights.is_contiguous()
    assert torch.equal(got_ids, ids.to(torch.int32))
    assert torch.equal(got_weights, weights)
    if layout == "contiguous":
        assert got_weights is given_weights
        assert (got_ids is given_ids) == (dtype is torch.int32)


# --- through the experts ---------------------------------------------------------------------------------------------------

EXPERTS_CLASSES = {
    "trtllm_nvfp4_moe": ("TrtLlmNvFp4ExpertsModular", ()),
    "trtllm_mxfp4_moe": ("TrtLlmMxfp4ExpertsModular", (64,)),
    "trtllm_fp8_moe": ("TrtLlmFp8ExpertsModular", ()),
    "trtllm_bf16_moe": ("TrtLlmBf16ExpertsModular", ()),
}


def route(module: str, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """What FlashInfer gets as ``topk_ids`` from one layer."""
    name, more = EXPERTS_CLASSES[module]
    getattr(importlib.import_module(f"{EXPERTS}.{module}"), name)().apply(None, ids, weights, *more)
    return importlib.import_module("flashinfer.fused_moe.core").CALLS[-1][1]


@pytest.mark.parametrize("module", EXPERTS_CLASSES)
def test_experts_hand_over_a_tuple(install, module):
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    ids, weights = random_routing()
    got_ids, got_weights = route(module, ids, weights)
    assert torch.equal(got_ids, ids.to(torch.int32))
    assert got_weights is weights
    vllm_moe_tune_plugin.unregister()
    assert torch.equal(route(module, ids, weights), packed(ids, weights))


@pytest.mark.parametrize("module", EXPERTS_CLASSES)
@pytest.mark.parametrize("version", ["0.6.12", "0.6.15.post1", "0.6.16", "0.6.16.post3", "0.6.17", "0.6.18"])
def test_by_flashinfer_release(install, module, version):
    install(flashinfer=version)
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    ids, weights = random_routing()
    tuner = importlib.import_module("flashinfer.autotuner").AutoTuner.get()
    is_fp4 = "fp4" in module
    by_mode = {}
    for tuner.is_tuning_mode in (True, False):
        by_mode[tuner.is_tuning_mode] = isinstance(route(module, ids, weights), tuple)
    assert by_mode[False] == reads_fp32(ROUTED[module], version)
    assert by_mode[True] == (by_mode[False] and not (is_fp4 and version.startswith("0.6.16")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_weights_of_other_dtypes_stay_packed(install, dtype):
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    ids, weights = random_routing()
    got = route("trtllm_nvfp4_moe", ids, weights.to(dtype))
    assert torch.equal(got, packed(ids, weights.to(dtype)))


def test_a_flashinfer_without_tuples_and_a_packing_kernel_is_unsupported(install):
    install({**fake_stack.STACK, "flashinfer.fused_moe.core": fake_stack.kernels("torch.Tensor")}, flashinfer="0.6.8.post1")
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    for module, kernel in ROUTED.items():
        if module != "trtllm_lora_moe":
            record = fake_stack.patches()[f"{EXPERTS}.{module}:{tuple_routing.PACK}"]
            assert record.state is State.UNSUPPORTED
            assert record.reason == f"{kernel} of FlashInfer 0.6.8.post1 takes packed ids only"


@pytest.mark.parametrize(
    ("source", "state", "reason"),
    [
        (f"def apply(x):\n    return {FP8}(x.view(torch.int16))\n", "unsupported", "in the middle of a function"),
        (f"def apply(x):\n    return {FP8}((x, x))\n", "native", "hands over a tuple"),
        ("def apply(x):\n    return x\n", "unsupported", "no routed experts"),
    ],
)
def test_experts_without_the_packing_function(install, source, state, reason):
    install({**fake_stack.STACK, f"{EXPERTS}.trtllm_fp8_moe": source})
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    record = fake_stack.patches()[f"{EXPERTS}.trtllm_fp8_moe:{tuple_routing.PACK}"]
    assert str(record.state) == state
    assert reason in record.reason


# --- packing in one launch -------------------------------------------------------------------------------------------------

KERNEL_MODULE = "vllm_moe_tune_plugin.kernels.pack_topk"


@pytest.fixture
def interpreted(monkeypatch) -> Any:
    """``pack_topk`` in Triton's interpreter, its output poisoned: what the kernel leaves out is not zero by luck."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, KERNEL_MODULE, raising=False)
    module = importlib.import_module(KERNEL_MODULE)
    no_gpu.repair_interpreter()
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(0x5A5A5A5A)

    monkeypatch.setattr(module, "torch", SimpleNamespace(empty=poisoned, int32=torch.int32))
    yield module.pack_topk
    sys.modules.pop(KERNEL_MODULE, None)


SHAPES = [(1, 1), (1, 8), (3, 7), (17, 6), (129, 8), (1024, 1), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_packed_bit_for_bit(interpreted, shape, ids_dtype, weights_dtype):
    ids = torch.randint(-1, 32_000, shape).to(ids_dtype)
    weights = (torch.randn(shape) * 10 ** torch.randint(-6, 5, shape)).to(weights_dtype)
    got = interpreted(ids, weights)
    assert got.dtype == torch.int32
    assert got.shape == shape
    assert torch.equal(got, packed(ids, weights))


@pytest.mark.parametrize("block", [1, 32, 64])
def test_packed_in_several_programs(interpreted, block):
    ids, weights = random_routing(7, 9)
    assert torch.equal(interpreted(ids, weights, block=block), packed(ids, weights))


SPECIAL = {
    "zeros": [0.0, -0.0],
    "infinities": [float("inf"), float("-inf")],
    "negative": [-1.0, -0.375, -1e-30],
    "denormal in bf16": [1e-39, -1e-39, 9.2e-41, 2.0**-133, 2.0**-134, 3 * 2.0**-135],
    "ties": [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23, 1 + 2**-8 - 2**-23, 2 - 2**-9],
    "round up to infinity": [3.4e38, -3.4e38],
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_weights(interpreted, case):
    weights = torch.tensor([SPECIAL[case]], dtype=torch.float32)
    ids = torch.randint(0, 256, weights.shape)
    assert interpreted(ids, weights).tolist() == packed(ids, weights).tolist()


def test_not_a_number_stays_one(interpreted):
    """Its bits differ between devices, with stock, too."""
    weights = torch.tensor([[float("nan"), 0.5]])
    got = interpreted(torch.tensor([[3, 4]]), weights)
    assert got.to(torch.int16).view(torch.bfloat16).isnan().tolist() == [[True, False]]


def test_ids_at_the_ends_of_16_bits(interpreted):
    ids = torch.tensor([[0, -1, 32_767, -32_768]])
    weights = torch.tensor([[0.5, -0.5, 1.0, -1.0]])
    assert torch.equal(interpreted(ids, weights), packed(ids, weights))


def compiled_stack() -> dict[str, str]:
    """As vLLM 0.19 with its FlashInfer: packed by an expression in which no kernel is named, and no tuples."""
    utils = """
import torch

def trtllm_moe_pack_topk_ids_weights(topk_ids, topk_weights):
    return (topk_ids.to(torch.int32) << 16) | topk_weights.to(torch.bfloat16).view(torch.int16)
"""
    return {
        **fake_stack.STACK,
        f"{FUSED_MOE}.utils": utils,
        "flashinfer.fused_moe.core": fake_stack.kernels("torch.Tensor"),
    }


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_one_launch_in_place_of_torch_compile(install, interpreted, layout):
    install(compiled_stack(), flashinfer="0.6.6")
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    ids, weights = random_routing()
    got = route("trtllm_fp8_moe", layouts(ids)[layout], weights)
    assert torch.equal(got, packed(ids, weights))
    record = fake_stack.patches()[f"{EXPERTS}.trtllm_fp8_moe:{tuple_routing.PACK}"]
    assert str(record.state) == "applied"
    assert (record.calls, record.tuned) == (1, layout == "contiguous")


def test_no_launch_on_a_cpu_without_the_interpreter(install, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    install(compiled_stack(), flashinfer="0.6.6")
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    ids, weights = random_routing()
    assert torch.equal(route("trtllm_fp8_moe", ids, weights), packed(ids, weights))
    record = fake_stack.patches()[f"{EXPERTS}.trtllm_fp8_moe:{tuple_routing.PACK}"]
    assert (str(record.state), record.tuned) == ("applied", 0)
