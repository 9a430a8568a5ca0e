"""kept_count: the constant of unsorted assignment is made once, not in each layer.

What: for tiny batches vLLM 0.20 and later skips sorting: it answers with the expert ids as they are and with the count
``num_tokens_post_padded``, a tensor that a launch fills with the same number in each layer (0.6 to 1.3 us on an H200, the
median is 1.1: ``tests/gpu/results/assignment``).

How: what ``_prepare_expert_assignment`` answers depends on its settings and on the shapes of its tensors, never on their
contents, which nobody can look at inside a CUDA graph. So vLLM decides, once for each such key, and where its answer was
"unsorted" the count of that answer is kept and given again. What is answered while a CUDA graph is captured belongs to that
graph and is not kept.

Where it shows: where few tokens do not go to the decode kernel, that is on other GPUs than Hopper before ``vllm-moe-tune
tune``. vLLM 0.14 to 0.19: low_latency_assignment keeps its own.

Upstream: nothing like it up to vLLM 0.33.
Delete when: vLLM keeps the count, or the decode kernel serves all that goes unsorted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from vllm_moe_tune_plugin import gpu
from vllm_moe_tune_plugin.patching import STOCK, Advice, Args, Kwargs, Patch, Replace, Verdict, unsupported
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, first_existing, function_names

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
PREPARE = "_prepare_expert_assignment"

_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = frozenset({dict, list, tuple})


def key_of(args: Args, kwargs: Kwargs) -> Hashable:
    """All that the answer can depend on: values, and of tensors their shape, layout, type and device."""
    return _of_all(args), _of_all(kwargs)


def _of_all(values: Any) -> Hashable:
    # A loop, not a comprehension of calls: outside CUDA graphs this is done in every layer, beside a launch of 5 us.
    parts: list[Hashable] = []
    for value in values.items() if isinstance(values, dict) else values:
        kind = type(value)
        if kind in _PLAIN:
            parts.append(value)
        elif isinstance(value, torch.Tensor):
            parts.append((value.shape, value.stride(), value.dtype, value.device))
        elif kind in _CONTAINERS:
            parts.append((kind, _of_all(value)))
        else:
            hash(value)  # a TypeError for what cannot be told apart
            parts.append(value)
    return tuple(parts)


def is_unsorted(topk_ids: torch.Tensor, answer: Any) -> bool:
    """Whether an answer is (None, the expert ids as they are, a count)."""
    sorted_ids, expert_ids, count = answer
    if sorted_ids is not None or expert_ids.data_ptr() != topk_ids.data_ptr():
        return False
    flat = (expert_ids.shape, expert_ids.stride(), expert_ids.dtype) == ((topk_ids.numel(),), (1,), topk_ids.dtype)
    return flat and tuple(count.shape) == (1,)


class Kept:
    """The counts of this process, one for each key that vLLM answered with "unsorted"."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, torch.Tensor] = {}
        self._most = 0  # ids of any answer that is kept

    def decide(self, function: Any) -> Advice | Verdict:
        if why := gpu.not_nvidia():
            return unsupported(why)
        if "full" not in function_names(function):
            return unsupported("this vLLM makes no count there")
        ids = Argument(function, "topk_ids")

        def answer(_: Any, args: Args, kwargs: Kwargs) -> Any:
            topk_ids = ids.get(args, kwargs)
            if topk_ids.numel() > self._most:
                return STOCK
            count = self._counts.get(key_of(args, kwargs))
            return STOCK if count is None else (None, topk_ids.view(-1), count)

        def learn(_: Any, args: Args, kwargs: Kwargs, answer: Any) -> None:
            topk_ids = ids.get(args, kwargs)
            if topk_ids.numel() and is_unsorted(topk_ids, answer) and not _is_capturing(topk_ids.device):
                self._counts.setdefault(key_of(args, kwargs), answer[2])
                self._most = max(self._most, topk_ids.numel())

        return Replace(answer, learn=learn)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def patches(settings: Settings) -> Sequence[Patch]:
    target = first_existing(f"{FUSED_MOE}.experts.triton_moe:{PREPARE}", f"{FUSED_MOE}.fused_moe:{PREPARE}")
    return (Patch(target, Kept().decide, also=(f"{FUSED_MOE}.fused_moe:{PREPARE}",)),)
