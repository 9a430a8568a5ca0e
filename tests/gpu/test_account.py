"""The limit that tests/gpu/account.py compares with; the rest of it runs where vLLM is (tests/bench/test_layer_bench.py)."""

from __future__ import annotations

from typing import Any

import account
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_decode_moe import draw, kernels, run  # noqa: F401  (kernels is a fixture)

from vllm_moe_tune_plugin.bench.shapes import Shape, draw_routing
from vllm_moe_tune_plugin.expert_load import distinct_experts


@pytest.mark.parametrize("kernel", [account.UP, account.DOWN])
def test_a_kernel_that_is_left_out_writes_nothing(kernels: Any, kernel: str) -> None:  # noqa: F811
    problem = draw(2, hidden=32, inner=16)
    with account.without(kernel):
        # Of poisoned memory: no activated rows to read, or no output written.
        assert run(kernels, problem).isnan().all()
    assert not run(kernels, problem).isnan().any()


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 64))
def test_distinct_experts(top_k: int, times: int, tokens: int) -> None:
    expected = distinct_experts(tokens, top_k, top_k * times)
    assert top_k - 1e-6 <= expected <= min(top_k * times, top_k * tokens) + 1e-6
    assert distinct_experts(1, top_k, top_k * times) == pytest.approx(top_k)


def test_distinct_experts_are_those_that_are_drawn() -> None:
    shape = Shape("any", 32, 4, 1, 1)
    ids, _ = draw_routing(shape, "uniform", 2000, 8, torch.device("cpu"))
    drawn = sum(len(set(call.flatten().tolist())) for call in ids) / 2000
    assert distinct_experts(8, 4, 32) == pytest.approx(drawn, rel=0.01)
