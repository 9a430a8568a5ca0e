"""kept_count: vLLM's own answer, with the count of an earlier one, and never another answer than vLLM's."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_tune_plugin.patching import Patch
from vllm_moe_tune_plugin.tunings import kept_count
from vllm_moe_tune_plugin.tunings.kept_count import Kept, is_unsorted, key_of

TARGET = "module:_prepare_expert_assignment"


def assignment(topk_ids, config, num_experts, expert_map=None, block_shape=None):
    """As vLLM's: unsorted for few pairs, else something sorted."""
    assignment.calls += 1
    if expert_map is None and block_shape is None and topk_ids.numel() * 4 <= num_experts:
        return None, topk_ids.view(-1), torch.full((1,), topk_ids.numel() * config["BLOCK_SIZE_M"], dtype=torch.int32)
    return topk_ids.flatten().argsort(), topk_ids.flatten().sort().values, torch.tensor([topk_ids.numel()])


@contextlib.contextmanager
def tuned() -> Iterator[Callable[..., Any]]:
    """The function, as callers find it."""
    module = types.ModuleType("module")
    module._prepare_expert_assignment = assignment  # type: ignore[attr-defined]
    assignment.calls = 0
    patch = Patch(TARGET, Kept().decide)
    with mock.patch.dict(sys.modules, module=module):
        patch.attempt()
        yield lambda *args, **kwargs: module._prepare_expert_assignment(*args, **kwargs)
        assert patch.state == "applied"
        assert patch.undo()
    assert module._prepare_expert_assignment is assignment


@pytest.fixture
def patched() -> Iterator[Callable[..., Any]]:
    with tuned() as function:
        yield function


def ids(tokens: int, top_k: int = 2) -> torch.Tensor:
    return torch.randint(-1, 64, (tokens, top_k), dtype=torch.int32)


def same(one: Any, other: Any) -> bool:
    return all(mine is theirs or torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


CALLS = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.sampled_from([{"BLOCK_SIZE_M": 16}, {"BLOCK_SIZE_M": 32}, {"BLOCK_SIZE_M": 16, "num_warps": 4}]),
        st.sampled_from([16, 64]),
        st.sampled_from([{}, {"expert_map": torch.arange(64)}, {"block_shape": [0, 128]}]),
    ),
    min_size=1,
    max_size=20,
)


@given(CALLS)
def test_every_answer_is_vllms(calls: list[Any]) -> None:
    with tuned() as function:
        for tokens, config, num_experts, more in calls:
            topk_ids = ids(tokens)
            assert same(function(topk_ids, config, num_experts, **more), assignment(topk_ids, config, num_experts, **more))


def test_the_count_is_made_once(patched: Callable[..., Any]) -> None:
    first = patched(ids(2), {"BLOCK_SIZE_M": 16}, 64)
    again = ids(2)
    second = patched(again, {"BLOCK_SIZE_M": 16}, 64)
    assert assignment.calls == 1
    assert second[2] is first[2]
    assert second[1].data_ptr() == again.data_ptr()
    assert patched(ids(3), {"BLOCK_SIZE_M": 16}, 64)[2].item() == 96


def test_what_is_sorted_is_sorted_each_time(patched: Callable[..., Any]) -> None:
    for _ in range(3):
        assert patched(ids(40), {"BLOCK_SIZE_M": 16}, 64)[0] is not None
    assert assignment.calls == 3


def test_nothing_of_a_graph_capture_is_kept(patched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = True
    monkeypatch.setattr(kept_count, "_is_capturing", lambda device: capturing)
    for _ in range(2):
        patched(ids(1), {"BLOCK_SIZE_M": 16}, 64)
    assert assignment.calls == 2
    capturing = False
    kept = patched(ids(1), {"BLOCK_SIZE_M": 16}, 64)[2]
    capturing = True
    assert patched(ids(1), {"BLOCK_SIZE_M": 16}, 64)[2] is kept
    assert assignment.calls == 3


def test_only_ids_as_they_are_count_as_unsorted() -> None:
    topk_ids, count = ids(3), torch.tensor([48])
    assert is_unsorted(topk_ids, (None, topk_ids.view(-1), count))
    assert not is_unsorted(topk_ids, (topk_ids, topk_ids.view(-1), count))
    assert not is_unsorted(topk_ids, (None, topk_ids.flatten().clone(), count))
    assert not is_unsorted(topk_ids, (None, topk_ids, count))
    assert not is_unsorted(topk_ids, (None, topk_ids.view(-1)[:5], count))
    assert not is_unsorted(topk_ids, (None, topk_ids.view(-1), torch.zeros(2)))


def test_a_key_tells_apart_what_an_answer_can_depend_on() -> None:
    one = torch.empty(2, 4)
    others = [torch.empty(4, 2), torch.empty(2, 4, dtype=torch.int64), torch.empty(4, 2).t(), None, 3, [3], {"a": 1}]
    assert key_of((one,), {"x": [1, {"b": 2}]}) == key_of((torch.ones(2, 4),), {"x": [1, {"b": 2}]})
    assert len({key_of((value,), {}) for value in [one, *others]}) == 1 + len(others)
    assert key_of((one,), {"x": 1}) != key_of((one,), {"y": 1})
    with pytest.raises(TypeError):
        key_of((SimpleNamespace(a=1),), {})


def test_a_vllm_that_makes_no_count_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("module")
    module._prepare_expert_assignment = lambda topk_ids, config: (None, topk_ids, topk_ids)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "module", module)
    patch = Patch(TARGET, Kept().decide)
    patch.attempt()
    assert patch.state == "unsupported"
