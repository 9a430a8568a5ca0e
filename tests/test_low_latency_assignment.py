"""low_latency_assignment: no sorting in TritonExperts.apply for tiny batches, and nowhere else."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import fake_stack
import pytest
import torch
from fake_stack import FUSED_MOE

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import gpu
from vllm_moe_tune_plugin.tunings import low_latency_assignment
from vllm_moe_tune_plugin.tunings.low_latency_assignment import Counts

SORTED = ("sorted", "experts", "count")
W1, W2 = torch.empty(64, 4, 2), torch.empty(64, 2, 2)


# --- Counts ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch) -> Any:
    """A CUDA device, as far as Counts can tell; its tensors are made on the CPU."""
    full = torch.full
    device = SimpleNamespace(type="cuda")
    made: list[torch.Tensor] = []

    def make(shape, value, *, dtype, device):
        made.append(full(shape, value, dtype=dtype))
        return made[-1]

    class Device:
        type = "cuda"

    device, capturing = Device(), SimpleNamespace(now=False)
    monkeypatch.setattr(torch, "full", make)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    return SimpleNamespace(device=device, other=Device(), capturing=capturing, made=made)


def test_a_count_is_made_once_for_a_value_and_device(cuda):
    counts = Counts()
    first = counts.get(64, cuda.device)
    assert (first.tolist(), first.dtype, first.shape) == ([64], torch.int32, (1,))
    assert counts.get(64, cuda.device) is first
    assert counts.get(128, cuda.device).tolist() == [128]
    assert counts.get(64, cuda.other) is not first
    assert len(cuda.made) == 3


def test_nothing_made_during_a_graph_capture_is_kept(cuda):
    counts = Counts()
    cuda.capturing.now = True
    captured = [counts.get(64, cuda.device) for _ in range(3)]
    assert len(cuda.made) == 3
    cuda.capturing.now = False
    kept = counts.get(64, cuda.device)
    assert all(kept is not tensor for tensor in captured)
    cuda.capturing.now = True
    assert counts.get(64, cuda.device) is kept, "what was made before has its value in every replay"


def test_on_the_cpu_nobody_asks_for_a_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("would need CUDA"))
    counts = Counts()
    assert counts.get(3, torch.device("cpu")) is counts.get(3, torch.device("cpu"))


# --- through vLLM's classes ------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(install) -> Any:
    install()
    vllm_moe_tune_plugin.register()
    return fake_stack.load(f"{FUSED_MOE}.fused_moe")


def ids(rows: int, top_k: int = 4) -> torch.Tensor:
    return torch.randint(0, 64, (rows, top_k), dtype=torch.int32)


def assert_unsorted(result: Any, topk_ids: torch.Tensor) -> None:
    sorted_ids, expert_ids, count = result
    assert sorted_ids is None
    assert expert_ids.tolist() == topk_ids.flatten().tolist()
    assert count.tolist() == [topk_ids.numel() * 16]
    assert count.dtype == torch.int32


def assert_not_in_force() -> None:
    assert low_latency_assignment._unsorted_ids.get() is None


@pytest.mark.parametrize(
    ("rows", "num_experts", "is_unsorted"), [(4, 64, True), (5, 64, False), (4, 63, False), (1, 16, True), (1, -1, True)]
)
def test_under_the_condition(serving, rows, num_experts, is_unsorted):
    topk_ids = ids(rows)
    result = serving.TritonExperts().apply(None, W1, W2, topk_ids, num_experts)
    if is_unsorted:
        assert_unsorted(result, topk_ids)
        assert serving.ALIGNED == []
    else:
        assert result == SORTED
    assert_not_in_force()
    record = fake_stack.patches()[f"{FUSED_MOE}.fused_moe:moe_align_block_size"]
    assert (record.calls, record.tuned) == (1, is_unsorted)


def test_by_keyword(serving):
    topk_ids = ids(2)
    assert_unsorted(
        serving.TritonExperts().apply(output=None, w1=W1, w2=W2, topk_ids=topk_ids, global_num_experts=64), topk_ids
    )


def test_the_number_of_experts_is_the_weights_own_where_none_is_given(serving):
    assert serving.TritonExperts().apply(None, W1, W2, ids(5)) == SORTED
    topk_ids = ids(4)
    assert_unsorted(serving.TritonExperts().apply(None, W1, W2, topk_ids), topk_ids)


@pytest.mark.parametrize(("capability", "is_unsorted"), [((9, 0), False), ((10, 0), True)])
def test_large_experts_stay_sorted_where_that_was_measured(serving, monkeypatch, capability, is_unsorted):
    """Four tokens, experts of 48 MiB: by upstream's rule they would go unsorted."""
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    w1, w2 = (torch.empty(64, rows, 1 << 24, dtype=torch.uint8, device="meta") for rows in (2, 1))
    result = serving.TritonExperts().apply(None, w1, w2, ids(4), 64)
    assert (result[0] is None) == is_unsorted


def test_not_with_an_expert_map(serving):
    assert serving.TritonExperts().apply(None, W1, W2, ids(1), 64, torch.arange(64)) == SORTED


@pytest.mark.parametrize("flag", ["use_int8_w8a16", "use_int4_w4a16"])
@pytest.mark.parametrize(("block_shape", "is_unsorted"), [(None, True), ([0, 0], True), ([0, 128], False), ([128, 128], False)])
def test_not_with_weights_quantised_in_blocks(serving, flag, block_shape, is_unsorted):
    experts = serving.TritonExperts(block_shape)
    setattr(experts.quant_config, flag, True)
    topk_ids = ids(1)
    result = experts.apply(None, W1, W2, topk_ids, 64)
    assert (result[0] is None) == is_unsorted


def test_fp8_in_blocks_is_fine(serving):
    topk_ids = ids(1)
    assert_unsorted(serving.TritonExperts([128, 128]).apply(None, W1, W2, topk_ids, 64), topk_ids)


def test_a_subclass_with_an_apply_of_its_own_never_meets_it(serving):
    assert serving.TritonWNA16Experts().apply(None, W1, W2, ids(1), 64) == SORTED


def test_a_subclass_that_calls_apply_meets_it(serving):
    topk_ids = ids(1)
    assert_unsorted(serving.EmulatedExperts().apply(None, W1, W2, topk_ids, 64), topk_ids)


def test_other_callers_never_meet_it(serving):
    topk_ids = ids(1)
    assert serving.moe_align_block_size(topk_ids, 16, 64) == SORTED
    assert serving.fused_experts_impl(ids(40), 64) == SORTED


@pytest.mark.parametrize("same_ids", [False, True])
def test_callers_inside_apply_never_meet_it(serving, same_ids):
    """Another experts class, and an alignment of other ids, while TritonExperts.apply is running."""
    topk_ids, inside = ids(1), []

    def others():
        inside.append(serving.moe_align_block_size(ids(1), 16, 64))
        if not same_ids:
            inside.append(serving.TritonWNA16Experts().apply(None, W1, W2, ids(1), 64))
        inside.append(serving.TritonExperts().apply(None, W1, W2, topk_ids if same_ids else ids(1), 64, torch.arange(64)))

    assert_unsorted(serving.TritonExperts().apply(None, W1, W2, topk_ids, 64, inside=others), topk_ids)
    assert all(result == SORTED for result in inside)
    assert_not_in_force()


def test_nested_calls_each_have_their_own(serving):
    outer, inner, results = ids(1), ids(2), []

    def nested():
        results.append(serving.TritonExperts().apply(None, W1, W2, inner, 64))
        results.append(serving.TritonExperts().apply(None, W1, W2, ids(30), 64))

    assert_unsorted(serving.TritonExperts().apply(None, W1, W2, outer, 64, inside=nested), outer)
    assert_unsorted(results[0], inner)
    assert results[1] == SORTED
    assert_not_in_force()


def test_an_exception_inside_apply_leaves_nothing_behind(serving):
    topk_ids = ids(1)
    error = RuntimeError("out of memory")

    def fails():
        raise error

    with pytest.raises(RuntimeError) as caught:
        serving.TritonExperts().apply(None, W1, W2, topk_ids, 64, inside=fails)
    assert caught.value is error
    assert_not_in_force()
    assert serving.moe_align_block_size(topk_ids, 16, 64) == SORTED
    assert fake_stack.states()["low_latency_assignment"] == "applied"


def test_experts_that_look_otherwise_fail_once_and_are_sorted(serving, logged):
    experts = serving.TritonExperts()
    del experts.quant_config
    topk_ids = ids(1)
    assert experts.apply(None, W1, W2, topk_ids, 64) == SORTED
    assert serving.TritonExperts().apply(None, W1, W2, topk_ids, 64) == SORTED
    assert fake_stack.states()["low_latency_assignment"] == "failed"
    assert len([record for record in logged.records if record.levelname == "ERROR"]) == 1


def test_unregistered_it_sorts_again(serving):
    vllm_moe_tune_plugin.unregister()
    assert serving.TritonExperts().apply(None, W1, W2, ids(1), 64) == SORTED


def states_of(install: Any, *replaced: tuple[str, str]) -> dict[str, tuple[str, str]]:
    install(fake_stack.replaced(f"{FUSED_MOE}.fused_moe", *replaced))
    vllm_moe_tune_plugin.register()
    importlib.import_module(f"{FUSED_MOE}.fused_moe")
    names = {
        target.partition(":")[2]: record for target, record in fake_stack.patches().items() if "fused_moe.fused_moe:" in target
    }
    return {name: (str(record.state), record.reason) for name, record in names.items()}


def test_the_functional_interface_is_native(install):
    assert states_of(install)["fused_experts_impl"] == ("native", "vLLM does it")


def test_upstream_has_it_from_0_20(install):
    upstream = """
def _prepare_expert_assignment(topk_ids, block_size, num_experts, expert_map):
    return moe_align_block_size(topk_ids, block_size, num_experts, expert_map)

class TritonExperts:"""
    found = states_of(
        install,
        ("\nclass TritonExperts:", upstream),
        ("inside()\n        return moe_align_block_size(", "inside()\n        return _prepare_expert_assignment("),
    )
    assert {state for state, _ in found.values()} == {"native"}
    assert fake_stack.states()["low_latency_assignment"] == "native"


def test_other_vendors_gpus_are_unsupported(install, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "1.0")
    assert states_of(install)["TritonExperts.apply"] == ("unsupported", "written for NVIDIA GPUs, not for ROCm")


def test_a_kernel_that_needs_sorted_ids_is_unsupported(install):
    found = states_of(install, ("c, naive_block_assignment)", "c)"))
    assert found["TritonExperts.apply"] == ("unsupported", "this vLLM's Triton kernel needs sorted ids")
