"""int32_ids: any integer ids as int32, values intact."""

from __future__ import annotations

import importlib

import fake_stack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin.tunings.int32_ids import as_int32

INTEGERS = [
    getattr(torch, name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    if hasattr(torch, name)
]
LARGEST = 2**31 - 1


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return max(info.min, -(2**31)), min(info.max, LARGEST)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@given(data=st.data())
def test_values_survive(dtype, data):
    low, high = bounds(dtype)
    rows, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    values = data.draw(
        st.lists(st.integers(low, high) | st.sampled_from([low, high, 0]), min_size=rows * columns, max_size=rows * columns)
    )
    ids = torch.tensor(values, dtype=torch.int64).to(dtype).reshape(rows, columns)
    cast = as_int32(ids)
    assert cast.dtype == torch.int32
    assert cast.shape == (rows, columns)
    assert cast.flatten().tolist() == values


@pytest.mark.parametrize("strided", [False, True])
def test_int32_is_the_same_object(strided):
    ids = torch.randint(-1, 64, (6, 8), dtype=torch.int32)
    ids = ids[:, ::2] if strided else ids
    assert as_int32(ids) is ids


@pytest.mark.parametrize(
    "value", [None, 3, "ids", torch.rand(2), torch.rand(2, dtype=torch.float16), torch.zeros(2, dtype=torch.complex64)]
)
def test_anything_else_is_unchanged(value):
    assert as_int32(value) is value


def reached(name: str):
    """The ids in the last call of a FlashInfer kernel."""
    return [ids for kernel, ids, _ in importlib.import_module("flashinfer.fused_moe.core").CALLS if kernel == name][-1]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_the_lora_experts_of_the_fake_stack_cast(install, dtype):
    install()
    vllm_moe_tune_plugin.register()
    lora = fake_stack.load(f"{fake_stack.EXPERTS}.trtllm_lora_moe").TrtLlmBf16LoRAExperts()
    ids, weights = torch.randint(0, 100, (3, 2)).to(dtype), torch.rand(3, 2)
    lora.apply(None, ids, weights)
    got_ids, got_weights = reached("trtllm_bf16_routed_moe")
    assert got_ids.dtype == torch.int32
    assert got_ids.tolist() == ids.tolist()
    assert got_weights is weights
    assert (got_ids is ids) == (dtype == torch.int32)
    record = fake_stack.patches()[f"{fake_stack.EXPERTS}.trtllm_lora_moe:TrtLlmBf16LoRAExperts.invoke_routed_moe"]
    assert (record.calls, record.tuned) == (1, dtype != torch.int32)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_experts_that_pack_without_a_cast(install, by_keyword):
    """As vLLM 0.18's fp8 experts do."""
    module = f"{fake_stack.EXPERTS}.trtllm_fp8_moe"
    install(
        {
            **fake_stack.STACK,
            module: """
class TrtLlmFp8ExpertsModular:
    def apply(self, hidden_states, topk_ids, topk_weights):
        import flashinfer
        return flashinfer.fused_moe.trtllm_fp8_block_scale_routed_moe(topk_ids << 16, hidden_states)
""",
        }
    )
    vllm_moe_tune_plugin.register()
    experts = fake_stack.load(module).TrtLlmFp8ExpertsModular()
    ids = torch.tensor([[1, -1], [5, 300]])
    if by_keyword:
        experts.apply(hidden_states=None, topk_ids=ids, topk_weights=None)
    else:
        experts.apply(None, ids, None)
    got = reached("trtllm_fp8_block_scale_routed_moe")
    assert got.dtype == torch.int32
    assert got.tolist() == (ids << 16).tolist()
    assert ids.dtype == torch.int64


def test_experts_whose_packing_casts_are_native(install):
    install()
    vllm_moe_tune_plugin.register()
    fake_stack.load()
    patches = fake_stack.patches()
    for name in ("trtllm_fp8_moe:TrtLlmFp8", "trtllm_nvfp4_moe:TrtLlmNvFp4", "trtllm_mxfp4_moe:TrtLlmMxfp4"):
        assert str(patches[f"{fake_stack.EXPERTS}.{name}ExpertsModular.apply"].state) == "native"
