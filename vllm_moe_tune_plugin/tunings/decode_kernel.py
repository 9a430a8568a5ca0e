"""decode_kernel: an MoE layer for a handful of tokens in two launches instead of five.

What: where ``TritonExperts.apply`` is called with few tokens, :mod:`vllm_moe_tune_plugin.kernels.decode_moe` computes the
layer: gate and up projections with the activation, then the down projection with the router-weighted sum. No sorting, no
intermediate round trips, no separate activation and sum, fp32 accumulation, the same bits in every run.

When: for weights in bf16, fp16 or fp8 (scales for each tensor, channel or block), with or without expert parallelism, where
every condition is proven (:func:`why_stock` says which one is not; ``MOE_TUNE_LOG=debug`` logs it), and only up to the number
of tokens at which it was measured to win (:func:`reach`; ``vllm-moe-tune doctor --model DIR`` tells it): on Hopper by
:func:`window`, on any GPU by what ``vllm-moe-tune tune`` found there. ``MOE_TUNE_DECODE_TOKENS`` sets another number of
tokens, on any GPU. Everything else is exactly stock. A subclass of ``TritonExperts`` keeps its own behaviour, and so does an
instance of which a step was replaced (LoRA), and the class where another plugin replaced a step or had wrapped ``apply``
before. With fp8 the activated rows between the two projections stay in the output's type where stock quantises them once
more: the result is nearer to the exact one.

Upstream: nothing like it up to vLLM 0.33. The idea of a GEMV path for decode was proposed and closed in PR 41379.
Delete when: vLLM has a fused path for few tokens that is as fast.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_moe_tune_plugin import gpu, tuned_tiles
from vllm_moe_tune_plugin.expert_load import distinct_experts, expert_bytes, repeated_bytes
from vllm_moe_tune_plugin.kernels import scales
from vllm_moe_tune_plugin.kernels.scales import Scale
from vllm_moe_tune_plugin.patching import (
    STOCK,
    Advice,
    Args,
    Kwargs,
    Patch,
    Replace,
    Verdict,
    is_foreign,
    unsupported,
    without_ours,
)
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, first_existing
from vllm_moe_tune_plugin.tuned_tiles import Entry, Problem
from vllm_moe_tune_plugin.tunings.tuple_routing import runs_triton

logger = logging.getLogger("vllm.moe_tune")

FUSED_MOE = "vllm.model_executor.layers.fused_moe"

#: vLLM's name of each activation with the kernel's, and whether gate and up rows alternate in w1.
ACTIVATIONS = {
    "silu": ("silu", False),
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "swigluoai": ("swigluoai", True),
    "relu2_no_mul": ("relu2_no_mul", False),
}
#: The constants of vLLM's swigluoai.
SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT = 1.702, 7.0

#: Bytes of an expert up to which it counts as small.
SMALL_EXPERT = 12 << 20
#: Small experts, and large ones: how many times more experts than (token, expert) pairs there must be, and the most tokens.
SMALL, LARGE = (2, 16), (4, 8)
#: With expert parallelism: bytes that a rank may read again; of fp8, whose first reading counts with that share, too.
BUDGET, FP8_BUDGET, LARGE_FP8_BUDGET = 110e6, 80e6, 60e6
FP8_SHARE = 0.2
#: The types of weights, as a search names them.
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}

#: vLLM's ways to bring the tokens of all data-parallel ranks to each rank ("naive" up to 0.18).
GATHERING = ("allgather_reducescatter", "naive")

#: The steps of TritonExperts.apply that a class or an instance may replace.
STEPS = ("activation", "moe_sum", "_finalize_expert_output", "_apply_router_weight_in_gemm2")
#: vLLM's marks of weights that it left on the host (`_vllm_is_uva_offloaded` since 0.16).
OFFLOADED = ("_vllm_is_uva_offloaded", "_vllm_offloaded_cpu_data")

_PARAMETERS = (
    "output",
    "hidden_states",
    "w1",
    "w2",
    "topk_weights",
    "topk_ids",
    "activation",
    "expert_map",
    "a1q_scale",
    "workspace2",
    "apply_router_weight_on_input",
)
#: What TritonExperts.apply takes besides, of which nothing depends where the conditions are met.
_WITHOUT_MEANING = {"global_num_experts", "a2_scale", "workspace13", "expert_tokens_meta"}


class Call(NamedTuple):
    """The arguments of one ``TritonExperts.apply`` that matter here."""

    output: torch.Tensor
    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: Any
    expert_map: torch.Tensor | None
    a1q_scale: torch.Tensor | None
    workspace2: torch.Tensor
    apply_router_weight_on_input: bool

    @property
    def activation_name(self) -> str:
        return str(getattr(self.activation, "value", self.activation))  # a string up to vLLM 0.16

    @property
    def scratch(self) -> int:
        """Elements that the activated rows of all pairs take."""
        return int(self.topk_ids.numel() * self.w2.size(2))


@functools.cache
def window(problem: Problem, expert_bytes: int) -> int:
    """The largest number of tokens for which the two kernels were measured to win.

    They read an expert once for each token that chose it, from the L2 cache after the first time; stock reads it once. So
    they win while few tokens share an expert: on an H200 up to a quarter as many (token, expert) pairs as experts for every
    shape, and up to half as many where experts are small.

    With expert parallelism the tokens are those of all ranks (:func:`why_not_all_tokens`). A rank reads less for them, while
    stock's five launches take what they always take: there the kernels win as long as what they read again takes no longer
    than what they save. fp8 weights cost them time also at first reading. (``tests/gpu/results/expert-parallel``: six models
    on one of 2, 4 and 8 ranks.)

    Args:
        expert_bytes: bytes of one expert's weights.
    """
    is_small = expert_bytes <= SMALL_EXPERT
    sparsity, most = SMALL if is_small else LARGE
    sparse = min(most, problem.num_experts // sparsity // problem.top_k)
    if not problem.is_shared:
        return sparse
    if not problem.dtype.startswith("fp8"):
        tokens, share, budget = SMALL[1], 0.0, BUDGET
    elif is_small:
        tokens, share, budget = SMALL[1], FP8_SHARE, FP8_BUDGET
    else:
        tokens, share, budget = sparse, FP8_SHARE, LARGE_FP8_BUDGET
    # Not by this rank's own number: where experts do not divide evenly, all ranks shall decide alike.
    ranks = round(problem.num_experts / problem.local_experts)

    def cost(tokens: int) -> float:
        routing = (tokens, problem.top_k, problem.num_experts)
        return share * distinct_experts(*routing) * expert_bytes + repeated_bytes(*routing, expert_bytes)

    while tokens and cost(tokens) > budget * ranks:
        tokens -= 1
    return tokens


def reach(
    problem: Problem, expert_bytes: int, capability: tuple[int, int], found: Entry | None, decode_tokens: int | None
) -> tuple[int, str]:
    """The largest number of tokens for which the two kernels are used, and what says so.

    Args:
        problem: the layer.
        expert_bytes: bytes of one expert's weights.
        capability: the GPU's compute capability.
        found: what a search found for this layer on this GPU model.
        decode_tokens: the user's setting.
    """
    if decode_tokens is not None:
        return decode_tokens, "MOE_TUNE_DECODE_TOKENS"
    if found is not None:
        return found.tokens, "as vllm-moe-tune tune found on this GPU model"
    if capability != gpu.MEASURED_ON:
        return 0, "not measured on this GPU: run vllm-moe-tune tune"
    tokens = window(problem, expert_bytes)
    slow = f"stock is faster with a top-k of {problem.top_k} and {problem.local_experts} experts of this size on a rank"
    return tokens, "as measured on Hopper" if tokens else slow


def why_not_all_tokens(experts: Any) -> str:
    """Why a rank may get other tokens than those of all ranks together, empty where it gets them.

    The window with expert parallelism is for a batch of which a rank serves its share of the pairs. Other ways to bring tokens
    to experts bring a rank those that chose its own: fewer, each with more pairs for it.
    """
    parallel = getattr(getattr(experts, "moe_config", None), "moe_parallel_config", None)
    brought, backend = (getattr(parallel, name, None) for name in ("use_all2all_kernels", "all2all_backend"))
    if brought is None:
        return "this vLLM's experts do not tell how tokens come to a rank"
    if not brought or backend in GATHERING:
        return ""
    return f"not measured with {backend}, which brings a rank the tokens of its experts only"


def why_stock(experts: Any, call: Call, stock_class: type) -> str:
    """Which condition of the two kernels a call does not meet, empty where it meets all."""
    if type(experts) is not stock_class:
        return f"{type(experts).__name__} has steps of its own"
    replaced = [step for step in ("apply", *STEPS) if step in vars(experts)]
    if replaced:
        return f"{', '.join(replaced)} was replaced on this instance"
    if getattr(experts, "_lora_context", None) is not None:
        return "LoRA is active"
    uses_hook = getattr(experts, "_uses_post_gemm2_hook", None)
    if uses_hook is not None and uses_hook(call.topk_ids.size(0)):
        return "something runs after the second GEMM"
    return _why_activation(experts, call) or _why_weights(experts, call) or _why_tensors(call)


def _why_layer(call: Call) -> str:
    """What makes a layer another kind of problem than any of the kernels'."""
    if call.w1.dtype not in DTYPES or call.w1.dtype != call.w2.dtype:
        return f"weights in {call.w1.dtype} and {call.w2.dtype}"
    if call.w1.dim() != 3 or call.w2.dim() != 3 or call.topk_ids.dim() != 2:
        return f"weights of shapes {tuple(call.w1.shape)} and {tuple(call.w2.shape)}"
    return ""


def _why_activation(experts: Any, call: Call) -> str:
    if call.activation_name not in ACTIVATIONS:
        return f"activation {call.activation_name}"
    limits = (
        getattr(getattr(experts, "activation_config", None), "clamp_limit", None),
        getattr(experts.quant_config, "gemm1_clamp_limit", None),
        getattr(experts.moe_config, "swiglu_limit", None) if hasattr(experts, "moe_config") else None,
    )
    if call.activation_name != "swigluoai" and any(limit is not None for limit in limits):
        return "the activation has a clamp"
    return ""


def _why_weights(experts: Any, call: Call) -> str:
    quant, w1, w2 = experts.quant_config, call.w1, call.w2
    if quant.use_int8_w8a16 or quant.use_int4_w4a16 or quant.quant_dtype not in (None, torch.float8_e4m3fn):
        return f"weights quantised as {quant.quant_dtype or 'integers'}"
    if getattr(experts, "quantization_emulation", False):
        return "quantisation is emulated"
    known = (torch.float8_e4m3fn,) if quant.quant_dtype is not None else (torch.bfloat16, torch.float16)
    if w1.dtype not in known or not w1.dtype == w2.dtype == call.hidden_states.dtype:
        return f"weights in {w1.dtype} and {w2.dtype}, input in {call.hidden_states.dtype}"
    rows = w2.size(2) * (1 if call.activation_name == "relu2_no_mul" else 2)
    if w1.dim() != 3 or w1.size(1) != rows or w1.size(2) != w2.size(1) or call.hidden_states.size(1) != w1.size(2):
        return f"weights of shapes {tuple(w1.shape)} and {tuple(w2.shape)}"
    step = 16 // w1.element_size()
    if any(w.stride(2) != 1 or w.stride(1) % step or w.data_ptr() % 16 for w in (w1, w2)):
        return "rows of weights that do not begin at 16 bytes"
    if quant.quant_dtype is not None:
        if any(scale is None for scale in _scales(experts, call)):
            return "scales of another kind"
    elif any(scale is not None for scale in (call.a1q_scale, quant.w1_scale, quant.w2_scale)):
        return "weights have scales"
    for bias in (quant.w1_bias, quant.w2_bias):
        if bias is not None and bias.stride(-1) != 1:
            return "biases with gaps"
    return ""


def _scales(experts: Any, call: Call) -> tuple[Scale | None, Scale | None, Scale | None]:
    """The scales of the input, of w1 and of w2 as the kernels take them, None for each that they cannot take."""
    quant, block = experts.quant_config, experts.block_shape
    tokens, hidden = call.hidden_states.shape
    return (
        scales.of_input(call.a1q_scale, tokens, hidden, block),
        scales.of_weight(quant.w1_scale, call.w1, block),
        scales.of_weight(quant.w2_scale, call.w2, block),
    )


def _why_tensors(call: Call) -> str:
    if not runs_triton(call.w1) or not runs_triton(call.hidden_states):
        return "not on a GPU"
    if not call.topk_ids.is_contiguous() or not call.topk_weights.is_contiguous():
        return "routing tensors with gaps"
    if call.topk_ids.is_floating_point() or not call.topk_weights.is_floating_point():
        return f"routing in {call.topk_ids.dtype} and {call.topk_weights.dtype}"
    if call.hidden_states.stride(1) != 1 or call.output.stride(1) != 1:
        return "input or output with gaps"
    scratch = call.workspace2
    if not scratch.is_floating_point() or not scratch.is_contiguous() or scratch.numel() < call.scratch:
        return "no room for the activated rows"
    if _overlap(call.output, scratch.view(-1)[: call.scratch]):
        return "the activated rows would lie in the output"
    return ""


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory, by the first and last byte of each."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    (first, end), (begin, last) = span(one), span(other)
    return first < last and begin < end


def _host_resident(module: Any) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Whether weights are on the host, behind an address of the GPU: vLLM's own answer (0.30 and later), else by its marks."""

    def by_marks(*weights: torch.Tensor) -> bool:
        return any(getattr(weight, mark, False) is not False for weight in weights for mark in OFFLOADED)

    answer: Callable[[torch.Tensor, torch.Tensor], bool] = getattr(module, "_weights_host_resident", by_marks)
    return answer


def _why_foreign(stock_class: type, function: Any) -> str:
    """Why this ``TritonExperts.apply`` may do more than is known of it, empty where it does not."""
    stock = without_ours(function)
    home = stock_class.__module__.partition(".")[0]
    for name, step in {"apply": stock, **_steps(stock_class)}.items():
        if is_foreign(step, home):
            return f"TritonExperts.{name} is not vLLM's own: something else wrapped or replaced it"
    unknown = inspect.signature(stock).parameters.keys() - {"self", *_PARAMETERS, *_WITHOUT_MEANING}
    return f"this vLLM's TritonExperts.apply also takes {', '.join(sorted(unknown))}" if unknown else ""


def _steps(stock_class: type) -> dict[str, Any]:
    return {name: getattr(stock_class, name) for name in STEPS if hasattr(stock_class, name)}


def _decide(target: str, settings: Settings) -> Callable[[Any], Advice | Verdict]:
    decode_tokens, folder = settings.decode_tokens, tuned_tiles.folder_of(settings)
    told: set[str] = set()

    def decide(function: Any) -> Advice | Verdict:
        if why := gpu.not_nvidia():
            return unsupported(why)
        if os.environ.get("VLLM_BATCH_INVARIANT", "0").strip() not in ("", "0"):
            return unsupported("VLLM_BATCH_INVARIANT asks for results that do not depend on the batch size")
        module = sys.modules[target.partition(":")[0]]
        stock_class, host_resident = module.TritonExperts, _host_resident(module)
        arguments = [Argument(function, name) for name in _PARAMETERS]
        foreign = _why_foreign(stock_class, function)
        if foreign:
            return unsupported(foreign)
        steps = _steps(stock_class)
        ids = Argument(function, "topk_ids")
        most = tuned_tiles.MOST_TOKENS if decode_tokens is None else decode_tokens

        def look(experts: Any, call: Call) -> tuple[int, str, Entry | None]:
            """The largest number of tokens for this layer, what says so, and what a search found."""
            why = _why_layer(call)
            if why:
                return 0, why, None
            device, problem = call.w1.device, _problem(experts, call)
            if decode_tokens is None and problem.is_shared and (why := why_not_all_tokens(experts)):
                return 0, why, None
            found = tuned_tiles.look_up(folder, gpu.name(device), problem)
            return *reach(problem, expert_bytes(call.w1, call.w2), gpu.capability(device), found, decode_tokens), found

        def instead(experts: Any, args: Args, kwargs: Kwargs) -> Any:
            tokens = ids.get(args, kwargs).size(0)
            if not 0 < tokens <= most:
                return STOCK
            call = Call(*(argument.get(args, kwargs) for argument in arguments))
            # What is cheap to ask comes first: outside CUDA graphs every layer asks it.
            reached, by, found = look(experts, call)
            if 0 < reached < tokens:
                return STOCK
            why = (
                ("" if reached else by)
                or ("a step of TritonExperts was replaced" if _steps(stock_class) != steps else "")
                or why_stock(experts, call, stock_class)
                or ("weights are on the host" if host_resident(call.w1, call.w2) else "")
            )
            if why:
                if settings.log == "debug" and why not in told:
                    told.add(why)
                    # At INFO, because vLLM's handlers drop what is below their own level.
                    logger.info("moe-tune: decode_kernel leaves a layer stock: %s", why)
                return STOCK
            _run(experts, call, found)
            return None

        return Replace(instead)

    return decide


def _problem(experts: Any, call: Call) -> Problem:
    local, _, hidden = call.w1.shape
    dtype = DTYPES[call.w1.dtype]
    if dtype == "fp8" and experts.block_shape is not None:
        dtype = "fp8-block"
    everywhere = local if call.expert_map is None else call.expert_map.numel()
    return Problem(everywhere, local, call.topk_ids.size(1), call.w2.size(2), hidden, dtype)


def _run(experts: Any, call: Call, found: Entry | None) -> None:
    from vllm_moe_tune_plugin.kernels.decode_moe import Tiles, decode_moe

    activation, interleaved = ACTIVATIONS[call.activation_name]
    device, quant = call.w1.device, experts.quant_config
    x_scale, w1_scale, w2_scale = (None, None, None) if quant.quant_dtype is None else _scales(experts, call)
    decode_moe(
        call.output,
        call.hidden_states,
        call.w1,
        call.w2,
        None if call.apply_router_weight_on_input else call.topk_weights,
        call.topk_ids,
        call.workspace2.view(-1)[: call.scratch],
        activation=activation,
        expert_map=call.expert_map,
        x_scale=x_scale,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=quant.w1_bias,
        w2_bias=quant.w2_bias,
        interleaved=interleaved,
        alpha=SWIGLUOAI_ALPHA,
        limit=SWIGLUOAI_LIMIT,
        pdl=gpu.has_pdl(device),
        tiles=None if found is None or found.tiles is None else Tiles(**found.tiles),
    )


def patches(settings: Settings) -> Sequence[Patch]:
    target = first_existing(f"{FUSED_MOE}.experts.triton_moe:TritonExperts.apply", f"{FUSED_MOE}.fused_moe:TritonExperts.apply")
    return (Patch(target, _decide(target, settings)),)
