"""What the plugin's wrappers cost a layer's call that stays stock, as the README tells it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from test_assignment_cost import SMALL, Serve, ids, serve  # noqa: F401  (a fixture)

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import plugin


def microseconds(call: Callable[[], object]) -> float:
    """Of processor time, the least of several."""
    took = []
    for _ in range(20):
        begin = time.thread_time()
        for _ in range(100):
            call()
        took.append(time.thread_time() - begin)
    return min(took) / 100 * 1e6


@pytest.mark.parametrize("tokens", [1, 5, 64, 4096])
def test_a_call_that_stays_stock(serve: Serve, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    serving, topk_ids = serve(), ids(1).repeat(tokens, 1)
    # A launch, which takes the processor no longer with more tokens.
    monkeypatch.setattr(serving.module, "moe_align_block_size", lambda *_, **__: (topk_ids, topk_ids, topk_ids))
    call = lambda: serving(topk_ids, SMALL)  # noqa: E731
    assert {record.name: str(record.state) for record in plugin.records()} == dict.fromkeys(
        ("kept_count", "assignment_cost", "decode_kernel"), "applied"
    )
    with torch.inference_mode():
        tuned = microseconds(call)
        vllm_moe_tune_plugin.unregister()
        assert tuned - microseconds(call) < 50
