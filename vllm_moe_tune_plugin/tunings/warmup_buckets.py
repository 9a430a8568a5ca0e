"""warmup_buckets: have warm-up tune the token counts to which serving maps.

What: while vLLM's warm-up runs under ``autotune(tuning_buckets=...)``, each MoE kernel is tuned in addition for the buckets
that its own mapper gives for 1 to ``dp_size`` times as many tokens. Nothing else is tuned in addition: linear layers see one
rank's tokens. FlashInfer's CUTLASS kernel is given a bound of the warm-up's largest bucket, which is tuned anyway.

Why: vLLM 0.30 to 0.33 makes these buckets from one rank's ``max_num_batched_tokens``, and they replace the kernels' own. In
serving that context is gone: a kernel maps the gathered tokens of all data-parallel ranks with its own bound. Whatever it
maps beyond the warm-up's last bucket has no entry and runs the default tactic (28 to 30 % slower from 8192 tokens on,
FlashInfer issue 4190). One rank is enough where ``max_num_batched_tokens`` is no bucket itself: 5000 tokens are tuned as
5000 and looked up as 8192. CUTLASS is given no bound, and serves all above 8192 with the tactic of 8192.

How:
* the buckets are asked of the kernel: of the tuning configuration with which it calls ``AutoTuner.choose_one``, as it will
  in serving. So they are bounded by the ``tune_max_num_tokens`` that vLLM, or autotune_bucket, passes;
* the number of tokens follows from the warm-up's own largest bucket and the configured data-parallel size, never from a
  batch or from free memory: all ranks tune the same profiles, in the same order;
* a bucket that stock tunes is tuned still. The additional profiles are the largest ones; what they take is in
  ``vllm-moe-tune coverage``;
* where FlashInfer's tactics are known to be wrong (:mod:`known_bad`) nothing is widened.

Upstream: vLLM PR 47427 (0.26) passed the bound, and the context of 0.30 lost it again.
Delete when: the oldest supported vLLM multiplies the buckets by the data-parallel size, or tunes each kernel's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm_moe_tune_plugin import known_bad
from vllm_moe_tune_plugin.patching import (
    Advice,
    Args,
    Around,
    Kwargs,
    Observe,
    Patch,
    Rewrite,
    Verdict,
    native,
    unsupported,
)
from vllm_moe_tune_plugin.settings import Settings
from vllm_moe_tune_plugin.stack import Argument, installed
from vllm_moe_tune_plugin.tactics import (
    CHOOSE_ONE,
    CUTLASS,
    FLOOR,
    data_parallel_size,
    is_moe,
    warm_up_overrides_buckets,
    without_autotuner,
    without_kernel,
)


def reached(spec: Any, tokens: int) -> set[int]:
    """The buckets to which a kernel maps batches of 1 to ``tokens`` tokens in serving.

    Args:
        spec: the ``DynamicTensorSpec`` of the kernel's tuning configuration.
    """
    last = int(spec.map_to_tuning_buckets(tokens))
    buckets = spec.gen_tuning_buckets(last) if callable(spec.gen_tuning_buckets) else spec.gen_tuning_buckets
    return {bucket for bucket in buckets if bucket <= last} | {last}


def widened(overridden: Collection[int], spec: Any, dp_size: int) -> tuple[int, ...] | None:
    """What to tune instead of the warm-up's buckets: those and all that serving reaches; None where they are enough."""
    wanted = reached(spec, max(overridden) * dp_size)
    return None if wanted.issubset(overridden) else tuple(sorted(wanted.union(overridden)))


class Configured:
    """What vLLM's MoE layers are configured for: the largest of all layers, so that all ranks agree."""

    def __init__(self) -> None:
        self.dp_size = 1
        self.max_num_tokens = 0

    def learn(self, config: Any) -> None:
        self.dp_size = max(self.dp_size, data_parallel_size(config))
        self.max_num_tokens = max(self.max_num_tokens, config.max_num_tokens)


def _native() -> Verdict:
    return native("warm-up tunes each kernel's own buckets")


def _learn(configured: Configured) -> Patch:
    def decide(function: Any) -> Advice | Verdict:
        return (
            Observe(lambda config, *_: configured.learn(config), note="learns the sizes")
            if warm_up_overrides_buckets()
            else _native()
        )

    return Patch("vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.__post_init__", decide, serves=True)


def _widen(configured: Configured) -> Patch:
    def decide(choose_one: Any) -> Advice | Verdict:
        if not warm_up_overrides_buckets():
            return _native()
        from flashinfer.autotuner import AutoTuner, autotune

        if not hasattr(AutoTuner, "_override_tuning_buckets"):
            return unsupported("this FlashInfer does not tell which buckets are in force")
        custom_op, config = Argument(choose_one, "custom_op"), Argument(choose_one, "tuning_config")
        flashinfer = installed("flashinfer-python")

        def enter(tuner: Any, args: Args, kwargs: Kwargs) -> contextlib.AbstractContextManager[Any] | None:
            if not tuner.is_tuning_mode:
                return None
            kernel, overridden = custom_op.get(args, kwargs), tuner._override_tuning_buckets
            specs = config.get(args, kwargs).dynamic_tensor_specs
            if not (overridden and specs and is_moe(kernel)) or known_bad.find(kernel, flashinfer) is not None:
                return None
            buckets = widened(overridden, specs[0], configured.dp_size)
            return None if buckets is None else autotune(True, tuning_buckets=buckets)

        return Around(enter, note="MoE kernels are tuned for the tokens of all data-parallel ranks")

    return Patch(CHOOSE_ONE, decide, needs=("flashinfer",), missing=without_autotuner)


def _bound_cutlass(configured: Configured) -> Patch:
    def decide(function: Any) -> Advice | Verdict:
        if not warm_up_overrides_buckets():
            # There the bound itself would be tuned for, with memory that nobody has set aside: autotune_bucket's to decide.
            return _native()
        bound = Argument(function, "tune_max_num_tokens")

        def raise_bound(_: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
            given = bound.get(args, kwargs)
            tuned = max(configured.max_num_tokens, FLOOR)
            return bound.put(args, kwargs, tuned) if tuned > given else None

        return Rewrite(raise_bound, note="bounded by what warm-up tunes anyway")

    return Patch(
        f"flashinfer.fused_moe:{CUTLASS}",
        decide,
        also=(f"flashinfer:{CUTLASS}",),
        needs=("flashinfer",),
        missing=without_kernel,
    )


def patches(settings: Settings) -> Sequence[Patch]:
    configured = Configured()
    make: Sequence[Callable[[Configured], Patch]] = (_learn, _widen, _bound_cutlass)
    return tuple(patch(configured) for patch in make)
