"""Expert ids and routing weights packed into the 32-bit words that FlashInfer's routed kernels take."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _pack_kernel(ids, weights, packed, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    expert = tl.load(ids + index, mask=mask).to(tl.int32)
    # Through bf16 as stock does, and sign-extended as stock does: a negative weight sets the upper half, too.
    weight = tl.load(weights + index, mask=mask).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    tl.store(packed + index, (expert << 16) | weight, mask=mask)


def pack_topk(topk_ids: torch.Tensor, topk_weights: torch.Tensor, block: int = 1024) -> torch.Tensor:
    """Pack in one launch, casts included.

    Args:
        topk_ids: [tokens, top_k], any integer dtype, contiguous; expert ids.
        topk_weights: [tokens, top_k], any float dtype, contiguous; routing weights, rounded to bf16.
        block: elements for each program.

    Returns:
        [tokens, top_k] int32: ``(expert_id << 16) | bits of the bf16 weight``, bit for bit what vLLM 0.19 and 0.20 compute
        with torch.compile (``trtllm_moe_pack_topk_ids_weights``; vLLM PR 37695, replaced by PR 42527).
    """
    packed = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    count = packed.numel()
    if count:
        launch: Any = _pack_kernel
        launch[(triton.cdiv(count, block),)](topk_ids, topk_weights, packed, count, BLOCK=block)
    return packed
