"""What a batch is expected to read of a layer's experts, with uniform routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def expert_bytes(w1: torch.Tensor, w2: torch.Tensor) -> int:
    """Bytes of one expert's weights."""
    return int((w1.nbytes + w2.nbytes) // w1.size(0))


def distinct_experts(num_tokens: int, top_k: int, num_experts: int) -> float:
    """How many experts are expected to be chosen by that many tokens."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def repeated_bytes(num_tokens: int, top_k: int, num_experts: int, expert_bytes: float) -> float:
    """What is expected to be read again where each (token, expert) pair reads its expert."""
    return (num_tokens * top_k - distinct_experts(num_tokens, top_k, num_experts)) * expert_bytes
