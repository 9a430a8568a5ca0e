"""autotune_bucket: have FlashInfer tune its MoE kernels for the token counts that really arrive.

What: every FlashInfer MoE kernel that takes ``tune_max_num_tokens`` gets ``max(max_num_tokens * dp_size, 8192)``, one value
for all layers of a process. With data parallelism a call sees the gathered batch of all ranks, so its largest bucket is
the scheduler's ``max_num_batched_tokens`` times ``elastic_ep_max_dp_size or dp_size``.

Why: FlashInfer tunes one tactic for each bucket of token counts up to ``tune_max_num_tokens`` (default 8192). Larger
batches run the tactic of the last bucket, and where vLLM passes the largest CUDA-graph size (512 by default) every
prefill does.

How:
* a value that vLLM passes is raised, never lowered, except to what one launch can take: NVFP4's chunk size and MXFP4's
  supported tokens, beyond which the kernel's grid overflows while tuning (vLLM forgets the latter);
* up to vLLM 0.19 ``FusedMoEConfig.max_num_tokens`` is the chunk size of data parallelism (256), so the scheduler's limit
  is taken where the config is built;
* FlashInfer's CUTLASS kernel is given 8192 where vLLM passes the CUDA-graph size. More is off unless
  ``MOE_TUNE_CUTLASS_BUCKET=1``: vLLM merged it (PR 52989) and took it back (PR 53186), because its workspace grows with
  the bucket and an engine died for 12 GiB with 9.7 GiB free. On an H200, in bf16, it gains nothing
  (``tests/gpu/results/cutlass``);
* FlashInfer before 0.6.10 tunes powers of two only and looks beyond them in vain, so the value is rounded up to one.

Upstream: vLLM PRs 47427 (0.26.0), 50942 (MXFP4, 0.28.0), 46838 and 52989/53186 (CUTLASS).
Delete when: the oldest supported vLLM passes the estimate at every call (0.33 still does not for the routed bf16, LoRA
and MXINT4 kernels, and bounds no MXFP4 call).
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_moe_tune_plugin import known_bad
from vllm_moe_tune_plugin.patching import (
    Advice,
    Args,
    Kwargs,
    Observe,
    Patch,
    Rewrite,
    Verdict,
    Within,
    native,
    unsupported,
)
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, functions_in, installed, module_code, names_in
from vllm_moe_tune_plugin.tactics import (
    CUTLASS,
    FLOOR,
    data_parallel_size,
    tunes_powers_of_two_only,
    warm_up_overrides_buckets,
    without_kernel,
)

LAYERS = "vllm.model_executor.layers"
EXPERTS = f"{LAYERS}.fused_moe.experts"

ROUTED_FP4 = "trtllm_fp4_block_scale_routed_moe"

#: FlashInfer's MoE kernels that take ``tune_max_num_tokens``.
KERNELS = (
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp4_block_scale_moe",
    ROUTED_FP4,
    "trtllm_mxint4_block_scale_moe",
    CUTLASS,
)

#: The vLLM modules, of any release, that call them.
CALLERS = (
    f"{LAYERS}.fused_moe.flashinfer_cutlass_moe",
    f"{LAYERS}.fused_moe.flashinfer_trtllm_moe",
    f"{LAYERS}.fused_moe.trtllm_moe",
    f"{EXPERTS}.flashinfer_cutlass_moe",
    f"{EXPERTS}.trtllm_bf16_moe",
    f"{EXPERTS}.trtllm_fp8_moe",
    f"{EXPERTS}.trtllm_lora_moe",
    f"{EXPERTS}.trtllm_mxfp4_moe",
    f"{EXPERTS}.trtllm_nvfp4_moe",
    f"{LAYERS}.quantization.modelopt",
    f"{LAYERS}.quantization.mxfp4",
    f"{LAYERS}.quantization.utils.flashinfer_fp4_moe",
    f"{LAYERS}.quantization.utils.flashinfer_mxint4_moe",
    "vllm.models.muse_spark.nvidia.muse_moe_runner",
)

#: About how many bytes of GPU memory CUTLASS's profiling keeps for each token of the largest bucket: the tokens' share of
#: :func:`coverage.profile_bytes`, for readers. ``width``: bytes of one activation.
CUTLASS_BYTES = "top_k * ((hidden + inner) * width + 2 * max(2 * inner, hidden))"

# The most tokens that one launch of the kernel below can take; None: no bound is known.
_launch_limit: contextvars.ContextVar[int | None] = contextvars.ContextVar("moe_tune_launch_limit", default=None)


@functools.cache
def calls(kernel: str) -> Mapping[str, frozenset[str]]:
    """The functions of the installed vLLM that call a FlashInfer kernel, each with all the names that it uses."""
    spellings = {kernel, f"flashinfer_{kernel}"}  # FlashInfer's name and vLLM's lazy one
    found: dict[str, frozenset[str]] = {}
    for module in CALLERS:
        code = module_code(module)
        for name, function in functions_in(code) if code is not None else ():
            names = names_in(function)
            if names & spellings:
                found[f"{module}:{name}"] = names
    return found


def _passes_estimate(kernel: str, caller: frozenset[str]) -> bool:
    """Whether a caller's names show that it passes the estimate, bounded where a launch has a limit."""
    is_bounded = kernel != ROUTED_FP4 or not caller.isdisjoint(("_get_chunk_size", "_max_supported_tokens"))
    return "fi_moe_largest_bucket" in caller and is_bounded


def bucket(passed: int | None, estimate: int, limit: int | None, powers_of_two: bool) -> int:
    """The ``tune_max_num_tokens`` of one call, in tokens.

    Args:
        passed: what vLLM passes, None if nothing.
        estimate: the most tokens that a call is expected to have, or :data:`FLOOR`.
        limit: the most tokens that one launch can take.
        powers_of_two: whether FlashInfer finds nothing but powers of two.
    """
    value = max(passed or 0, estimate)
    if powers_of_two:
        value = 1 << (value - 1).bit_length()
    if limit is not None and value > limit:
        value = 1 << (limit.bit_length() - 1) if powers_of_two else limit
    return value


class Estimate:
    """The most tokens that an MoE call of this process is expected to have, learnt as vLLM builds its MoE layers."""

    def __init__(self) -> None:
        self.tokens: int | None = None

    def learn(self, max_num_tokens: int, dp_size: int) -> None:
        # The largest of all layers, so that a kernel sees one value in warm-up and in serving.
        self.tokens = max(self.tokens or 0, max_num_tokens * dp_size, FLOOR)


def _learn_from_configs(estimate: Estimate) -> Patch:
    def decide(function: Any) -> Advice:
        code = module_code(f"{LAYERS}.fused_moe.config")
        field_is_dp_chunk = code is not None and "VLLM_MOE_DP_CHUNK_SIZE" in names_in(code)

        def learn(config: Any) -> None:
            tokens = config.max_num_tokens
            if field_is_dp_chunk:
                from vllm.config import get_current_vllm_config_or_none

                vllm_config = get_current_vllm_config_or_none()
                if vllm_config is not None:
                    tokens = max(tokens, vllm_config.scheduler_config.max_num_batched_tokens)
            estimate.learn(tokens, data_parallel_size(config))

        return Observe(lambda config, *_: learn(config), note="learns the expected token count")

    return Patch(f"{LAYERS}.fused_moe.config:FusedMoEConfig.__post_init__", decide, serves=True)


def _cutlass_memory(beyond_floor: bool) -> str:
    """What ``doctor``, which knows no model, says of the memory that the CUTLASS bucket asks for."""
    most, option = ("max_num_batched_tokens * dp_size", " --cutlass-bucket") if beyond_floor else (str(FLOOR), "")
    return (
        f"CUTLASS profiles up to {most} tokens and keeps about {CUTLASS_BYTES} bytes of GPU memory for each; "
        f"`vllm-moe-tune coverage{option}` says how much that is"
    )


def _tune(kernel: str, estimate: Estimate, beyond_floor: bool, loses_buckets: bool) -> Patch:
    def decide(function: Any) -> Advice | Verdict:
        callers = calls(kernel)
        if not callers:
            return unsupported("nothing in this vLLM calls it")
        fault = known_bad.find(kernel, installed("flashinfer-python"))
        if fault is not None:
            return unsupported(f"not widened: {fault.what} ({fault.source})")
        if beyond_floor:
            if all(_passes_estimate(kernel, names) for names in callers.values()):
                return native("vLLM passes the estimate at every call")
            if loses_buckets:
                return unsupported("warm-up would not tune what this bound looks up: warmup_buckets is off")
        elif not any("max_capture_size" in names for names in callers.values()):
            return native(
                f"FlashInfer's {FLOOR} holds; more only with MOE_TUNE_CUTLASS_BUCKET=1 (memory, PR 53186: "
                "`vllm-moe-tune coverage --cutlass-bucket` says how much)"
            )
        argument = Argument(function, "tune_max_num_tokens")
        powers_of_two = tunes_powers_of_two_only()

        def inject(_: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
            expected = estimate.tokens if beyond_floor else FLOOR
            if expected is None:  # no MoE layer has been configured: nothing is known of the batches to come
                return None
            given = argument.get(args, kwargs)
            value = bucket(given if beyond_floor else None, expected, _launch_limit.get(), powers_of_two)
            return argument.put(args, kwargs, value) if value != given else None

        return Rewrite(inject, note=_cutlass_memory(beyond_floor) if kernel == CUTLASS else "")

    return Patch(
        f"flashinfer.fused_moe:{kernel}",
        decide,
        also=(f"flashinfer:{kernel}",),
        # The package re-exports the function, so that it must have been imported to its end.
        needs=("flashinfer", "flashinfer.fused_moe.utils"),
        missing=without_kernel,
    )


def _limit_nvfp4() -> Patch:
    def decide(function: Any) -> Advice:
        return Within(_launch_limit, lambda experts, args, kwargs: experts._get_chunk_size(), note="bounded by the chunk size")

    return Patch(
        f"{EXPERTS}.trtllm_nvfp4_moe:TrtLlmNvFp4ExpertsModular._invoke_kernel",
        decide,
        missing=lambda: unsupported("this vLLM launches NVFP4 batches whole"),
        serves=True,
    )


def _limit_mxfp4(module: str, name: str) -> Patch:
    def decide(function: Any) -> Advice | Verdict:
        # LoRA's experts share no base with the class that knows the limit, which looks at its arguments alone.
        experts_class = getattr(sys.modules[f"{EXPERTS}.trtllm_mxfp4_moe"], "TrtLlmMxfp4ExpertsModular", None)
        supported = getattr(experts_class, "_max_supported_tokens", None)
        if supported is None:
            return unsupported("this vLLM knows no limit of MXFP4 launches")
        num_experts = Argument(function, "global_num_experts")

        def limit(experts: Any, args: Args, kwargs: Kwargs) -> Any:
            return supported(experts, experts.topk, num_experts.get(args, kwargs))

        return Within(_launch_limit, limit, note="bounded by the supported tokens")

    return Patch(f"{EXPERTS}.{module}:{name}", decide, needs=(f"{EXPERTS}.trtllm_mxfp4_moe",), serves=True)


def patches(settings: Settings) -> Sequence[Patch]:
    estimate = Estimate()
    # Where warm-up replaces the kernels' buckets, a higher bound alone makes large batches miss what they would have found.
    loses_buckets = "warmup_buckets" in settings.disable and warm_up_overrides_buckets()
    return (
        _learn_from_configs(estimate),
        *(_tune(kernel, estimate, kernel != CUTLASS or settings.cutlass_bucket, loses_buckets) for kernel in KERNELS),
        _limit_nvfp4(),
        _limit_mxfp4("trtllm_mxfp4_moe", "TrtLlmMxfp4ExpertsModular._invoke_kernel"),
        _limit_mxfp4("trtllm_lora_moe", "TrtLlmMxfp4LoRAExperts.invoke_routed_moe"),
    )
