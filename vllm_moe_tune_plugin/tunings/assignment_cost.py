"""assignment_cost: few tokens of large experts are sorted after all, where that is cheaper than reading weights again.

What: vLLM has two ways to share (token, expert) pairs out to the blocks of its Triton kernel: sorted by expert
(``moe_align_block_size``, 4 to 6 us a layer), or unsorted, a block for each pair, which reads an expert's weights again for
each further token that chose it. vLLM goes unsorted up to ``tokens * top_k * 4 <= experts``, however large an expert is.

How: with uniform routing ``tokens`` tokens choose ``E * (1 - (1 - top_k / E) ** tokens)`` different experts, and what is more
in pairs is read again. 40 MB of it take about as long as sorting: beyond that the call is sorted, as vLLM itself sorts larger
batches.

Measured on an H200, layers of nine models in bf16 and in fp8 blocks, 1 to 16 tokens (``tests/gpu/results/assignment``): where
vLLM's rule goes unsorted it is up to 7.5 % slower than the better way (gpt-oss-120b, 8 tokens), with the bytes in mind up to
1.6 % (deepseek-v3-tp8, bf16, 8 tokens); on average over all rows 0.23 % and 0.04 %. The other direction, unsorted where vLLM
sorts, has nothing to win: up to 40 MB that is one row, which loses 1.5 % (qwen3-30b-a3b, fp8, 6 tokens), and of the rows with
more only one would win (qwen3.5-35b-a3b, fp8, 12 tokens: 3.3 % with 47 MB). So it only ever sorts more.

Where it shows: on Hopper, where it was measured, up to the 16 tokens that were; all else keeps vLLM's rule. Most calls with so
few tokens are decode_kernel's, which is faster than both: what is left are those it does not serve (LoRA, a clamp in the
activation, int8, ``MOE_TUNE_DECODE_TOKENS``). vLLM 0.14 to 0.19 sort all of it but for low_latency_assignment, which asks the
same.

Upstream: nothing like it up to vLLM 0.33.
Delete when: vLLM's rule knows bytes, or the decode kernel serves all that goes unsorted.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from vllm_moe_tune_plugin import gpu
from vllm_moe_tune_plugin.expert_load import expert_bytes, repeated_bytes
from vllm_moe_tune_plugin.patching import (
    STOCK,
    Advice,
    Args,
    Kwargs,
    Patch,
    Replace,
    Verdict,
    Within,
    is_foreign,
    native,
    unsupported,
    without_ours,
)
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, first_existing, function_names

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
ALIGN = "moe_align_block_size"
PREPARE = "_prepare_expert_assignment"

#: (token, expert) pairs may be this many times fewer than experts (upstream's margin).
SPARSITY = 4
#: Bytes whose reading again takes as long as sorting (H200, vLLM 0.33.0: ``tests/gpu/results/assignment``).
BREAK_EVEN = 40_000_000
#: The most tokens that were measured.
MOST_TOKENS = 16

_PARAMETERS = ("topk_ids", "config", "global_num_experts", "expert_map", "ignore_invalid_experts")
#: What the stock function takes besides, which only decides between the two ways.
_WITHOUT_MEANING = {
    "num_tokens",
    "top_k_num",
    "use_int8_w8a16",
    "use_int4_w4a16",
    "block_shape",
    "weights_host_resident",
}

# The ids of the TritonExperts.apply call in progress that are cheaper sorted; None: there is none.
_ids_to_sort: contextvars.ContextVar[torch.Tensor | None] = contextvars.ContextVar("moe_tune_ids_to_sort", default=None)


def is_sparse(pairs: int, num_experts: int) -> bool:
    """Upstream's rule: so few (token, expert) pairs meet so many experts that few of these have more than one."""
    return pairs * SPARSITY <= num_experts


def is_cheaper_sorted(topk_ids: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether sorting a call's pairs costs less than reading weights again, on a GPU on which that was measured."""
    num_tokens, top_k = topk_ids.shape
    num_experts = w1.size(0)
    repeated = repeated_bytes(num_tokens, top_k, num_experts, expert_bytes(w1, w2))
    return repeated > BREAK_EVEN and num_tokens <= MOST_TOKENS and gpu.capability(w1.device) == gpu.MEASURED_ON


def _why_not(prepare: Any) -> str:
    """Why an answer cannot be given in this function's place, empty where it can."""
    stock = without_ours(prepare)
    if is_foreign(stock, "vllm"):
        return f"{PREPARE} is not vLLM's own: something else wrapped or replaced it"
    if ALIGN not in function_names(stock):
        return "this vLLM sorts in another way"
    parameters = inspect.signature(stock).parameters.keys()
    odd = sorted((parameters - _WITHOUT_MEANING) ^ set(_PARAMETERS))
    return f"this vLLM's {PREPARE} takes other arguments: {', '.join(odd)}" if odd else ""


def _decide_apply(function: Any) -> Advice | Verdict:
    names = function_names(function)
    if why := gpu.not_nvidia():
        return unsupported(why)
    if PREPARE not in names:
        if ALIGN in names:
            return native("low_latency_assignment asks the same")
        return unsupported("this vLLM assigns experts in another way")
    if why := _why_not(inspect.unwrap(function).__globals__.get(PREPARE)):
        return unsupported(why)
    ids, first, second = (Argument(function, name) for name in ("topk_ids", "w1", "w2"))

    def ids_to_sort(_: Any, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
        topk_ids, w1 = ids.get(args, kwargs), first.get(args, kwargs)
        # What is cheap to ask comes first: outside CUDA graphs every layer asks it, with any number of tokens.
        if not is_sparse(topk_ids.numel(), w1.size(0)):
            return None
        return topk_ids if is_cheaper_sorted(topk_ids, w1, second.get(args, kwargs)) else None

    return Within(_ids_to_sort, ids_to_sort)


def _decide_prepare(function: Any) -> Advice | Verdict:
    if why := _why_not(function):
        return unsupported(why)
    ids, config, num_experts, expert_map, ignore = (Argument(function, name) for name in _PARAMETERS)
    # Looked up at each call, as the stock function does: it may be wrapped.
    namespace = without_ours(function).__globals__

    def by_expert(_: Any, args: Args, kwargs: Kwargs) -> Any:
        topk_ids = _ids_to_sort.get()
        if topk_ids is None or ids.get(args, kwargs) is not topk_ids or expert_map.get(args, kwargs) is not None:
            return STOCK
        return namespace[ALIGN](
            topk_ids,
            config.get(args, kwargs)["BLOCK_SIZE_M"],
            num_experts.get(args, kwargs),
            None,
            ignore_invalid_experts=ignore.get(args, kwargs),
        )

    return Replace(by_expert)


def patches(settings: Settings) -> Sequence[Patch]:
    # Outside of kept_count's: a count may have been kept of a layer with smaller experts.
    module = first_existing(f"{FUSED_MOE}.experts.triton_moe:", f"{FUSED_MOE}.fused_moe:")
    return (
        Patch(f"{module}TritonExperts.apply", _decide_apply),
        Patch(f"{module}{PREPARE}", _decide_prepare, serves=True),
    )
