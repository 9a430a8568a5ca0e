"""low_latency_assignment: tiny batches skip the sorting of tokens by expert.

What: with few (token, expert) pairs almost every expert has one token at most, so that sorting them
(``moe_align_block_size``, about 5 us a layer) only finds what is known: one block for each pair. vLLM's Triton kernel takes
such an assignment (no sorted ids, the expert ids themselves, a constant count). vLLM 0.14 to 0.19 uses it in
``fused_experts_impl``, but not in ``TritonExperts.apply``, through which every model goes.

How: ``moe_align_block_size`` as ``TritonExperts.apply`` calls it is answered without sorting, under upstream's conditions:
no expert map, ``tokens * top_k * 4 <= experts``, and not the int8 or int4 weights quantised in blocks, whose kernel cannot
do it. Other callers of the same name (``TritonWNA16Experts``, ``fused_experts_impl``) never meet it. The count is a constant
of its value and device: it is made once and kept, which saves a launch in each layer.

Where the rule is wrong: it counts pairs, not bytes. Unsorted, an expert's weights are read once for each pair; with the large
experts of gpt-oss-120b, 8 tokens are 7.5 % slower than sorted (H200). So those stay sorted by the rule of assignment_cost,
whether or not that one is turned off.

Others that sort by the same contract (sorted ids, expert ids, count) stay stock:

* ``TritonWNA16Experts``: its kernel for weights of 4 and 8 bits loads the sorted ids, there is no unsorted form;
* ``TritonExperts`` with expert parallelism: few tokens are decode_kernel's;
* Marlin and Humming: compiled kernels, which a constant template (a block for each pair) could serve in place of sorting; not
  proven on a GPU, and Marlin chooses its block size by the mean number of tokens of an expert;
* LoRA under expert parallelism: its own kernels' unsorted form has no expert map;
* NVFP4 emulation and the experts of ROCm: not for production on NVIDIA GPUs.

Upstream: vLLM PR 29354 (origin), lost in PR 31052, back with PR 39016 (0.20.0).
Delete when: the oldest supported vLLM is 0.20.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Sequence
from typing import Any

import torch

from vllm_moe_tune_plugin import gpu
from vllm_moe_tune_plugin.patching import (
    STOCK,
    Advice,
    Args,
    Kwargs,
    Patch,
    Replace,
    Verdict,
    Within,
    native,
    unsupported,
)
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, first_existing, function_names
from vllm_moe_tune_plugin.tunings.assignment_cost import ALIGN, PREPARE, is_cheaper_sorted, is_sparse

FUSED_MOE = "vllm.model_executor.layers.fused_moe"

# The ids of the TritonExperts.apply call in progress that may go unsorted; None: there is none.
_unsorted_ids: contextvars.ContextVar[torch.Tensor | None] = contextvars.ContextVar("moe_tune_unsorted_ids", default=None)


class Counts:
    """The one-element int32 tensors that hold ``num_tokens_post_padded``, one for each value and device."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], torch.Tensor] = {}

    def get(self, count: int, device: torch.device) -> torch.Tensor:
        key = (count, device)
        kept = self._kept.get(key)
        if kept is None:
            kept = torch.full((1,), count, dtype=torch.int32, device=device)
            # What is made while a CUDA graph is captured belongs to that graph and has no value before it is replayed.
            if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self._kept[key] = kept
        return kept


def _native_or_unsupported(function: Any) -> Verdict | None:
    names = function_names(function)
    if PREPARE in names:
        return native("vLLM does it")
    if why := gpu.not_nvidia():
        return unsupported(why)
    if ALIGN not in names:
        return unsupported("this vLLM assigns experts in another way")
    kernel = getattr(sys.modules[f"{FUSED_MOE}.fused_moe"], "fused_moe_kernel", None)
    parameters = getattr(kernel, "arg_names", None) or getattr(getattr(kernel, "fn", kernel), "__code__", None)
    if "naive_block_assignment" not in getattr(parameters, "co_varnames", parameters or ()):
        return unsupported("this vLLM's Triton kernel needs sorted ids")
    return None


def _decide_apply(function: Any) -> Advice | Verdict:
    verdict = _native_or_unsupported(function)
    if verdict is not None:
        return verdict
    ids, experts_map, global_experts, first, second = (
        Argument(function, name) for name in ("topk_ids", "expert_map", "global_num_experts", "w1", "w2")
    )

    def unsorted_ids(experts: Any, args: Args, kwargs: Kwargs) -> torch.Tensor | None:
        topk_ids: torch.Tensor = ids.get(args, kwargs)
        if experts_map.get(args, kwargs) is not None:
            return None
        w1, num_experts = first.get(args, kwargs), global_experts.get(args, kwargs)
        if num_experts == -1:
            num_experts = w1.size(0)
        quant, block_shape = experts.quant_config, experts.block_shape
        in_blocks = block_shape is not None and block_shape[1] > 0
        if in_blocks and (quant.use_int8_w8a16 or quant.use_int4_w4a16):
            return None
        if not is_sparse(topk_ids.numel(), num_experts) or is_cheaper_sorted(topk_ids, w1, second.get(args, kwargs)):
            return None
        return topk_ids

    return Within(_unsorted_ids, unsorted_ids)


def _decide_align(function: Any) -> Advice | Verdict:
    module = sys.modules[f"{FUSED_MOE}.fused_moe"]
    experts = getattr(module, "TritonExperts", None)
    if experts is None or ALIGN not in function_names(experts.apply):
        return native("TritonExperts.apply does not sort by this name")
    ids, block_size = Argument(function, "topk_ids"), Argument(function, "block_size")
    counts = Counts()

    def assign(_: Any, args: Args, kwargs: Kwargs) -> Any:
        topk_ids = _unsorted_ids.get()
        if topk_ids is None or ids.get(args, kwargs) is not topk_ids:
            return STOCK
        count = topk_ids.numel() * block_size.get(args, kwargs)
        return None, topk_ids.reshape(-1), counts.get(count, topk_ids.device)

    return Replace(assign)


def _decide_functional(function: Any) -> Verdict:
    names = function_names(function)
    code = getattr(function, "__code__", None)
    if PREPARE in names or "naive_block_assignment" in getattr(code, "co_varnames", ()):
        return native("vLLM does it")
    return unsupported("this vLLM always sorts there")


def patches(settings: Settings) -> Sequence[Patch]:
    kernel = (f"{FUSED_MOE}.fused_moe",)
    return (
        Patch(
            first_existing(f"{FUSED_MOE}.experts.triton_moe:TritonExperts.apply", f"{FUSED_MOE}.fused_moe:TritonExperts.apply"),
            _decide_apply,
            needs=kernel,
        ),
        Patch(f"{FUSED_MOE}.fused_moe:{ALIGN}", _decide_align, serves=True),
        Patch(f"{FUSED_MOE}.fused_moe:fused_experts_impl", _decide_functional),
    )
