"""FlashInfer's autotuner: what it and vLLM's warm-up are asked, and the count of calls that find no tactic.

``AutoTuner.choose_one`` is where FlashInfer picks a tactic for each call. Every MoE kernel of every release asks it, while
tuning and while serving, with the same arguments: ``(custom_op, runners, tuning_config, inputs)``.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_moe_tune_plugin.patching import Advice, Args, Kwargs, Observe, Patch, Verdict, unsupported
from vllm_moe_tune_plugin.stack import Argument, module_code, names_in

logger = logging.getLogger("vllm.moe_tune")

CHOOSE_ONE = "flashinfer.autotuner:AutoTuner.choose_one"
WARM_UP = "vllm.model_executor.warmup.kernel_warmup"

CUTLASS = "cutlass_fused_moe"

#: FlashInfer's own default of ``tune_max_num_tokens``, and the least that is worth tuning for.
FLOOR = 8192


def is_moe(custom_op: str) -> bool:
    """Whether a name given to ``choose_one`` is an MoE kernel's, as ``flashinfer::trtllm_bf16_moe``."""
    return "moe" in custom_op.lower()


def without_autotuner() -> Verdict:
    return unsupported("this FlashInfer has no autotuner")


def without_kernel() -> Verdict:
    return unsupported("this FlashInfer has no such function")


def warm_up_overrides_buckets() -> bool:
    """Whether the installed vLLM's warm-up replaces the kernels' own buckets."""
    code = module_code(WARM_UP)
    return code is not None and "tuning_buckets" in names_in(code)


def tunes_powers_of_two_only() -> bool:
    """Whether the imported FlashInfer has no other buckets (before its PR 3115, 0.6.10)."""
    return not hasattr(sys.modules["flashinfer.fused_moe.utils"], "get_hybrid_num_tokens_buckets")


def data_parallel_size(config: Any) -> int:
    """The ranks whose tokens an MoE layer of a ``FusedMoEConfig`` may see, elastic expert parallelism at its largest."""
    return int(getattr(config, "elastic_ep_max_dp_size", None) or config.dp_size)


# -------------------------------------------------------------------------------------------- calls without a tactic


@dataclass
class Untuned:
    """The MoE calls of one kernel that ran without a tuned tactic."""

    kernel: str
    calls: int
    fewest_tokens: int
    most_tokens: int


class UntunedCalls:
    """Counts the MoE calls for which FlashInfer, once it has tuned, has no tactic and runs its default (-1).

    The default may be a third slower than a tuned tactic (FlashInfer issue 4190). The first such call of each kernel is said
    in the log. Calls that a CUDA graph replays are not seen; the one that was captured is.
    """

    def __init__(self) -> None:
        self.by_kernel: dict[str, Untuned] = {}
        self._lock = threading.Lock()

    def patch(self) -> Patch:
        """The patch that does the counting."""
        return Patch(CHOOSE_ONE, self._decide, missing=without_autotuner, serves=True)

    def as_json(self) -> list[dict[str, Any]]:
        return [vars(untuned).copy() for untuned in self.by_kernel.values()]

    def _decide(self, choose_one: Any) -> Advice:
        custom_op, inputs = Argument(choose_one, "custom_op"), Argument(choose_one, "inputs")
        config = Argument(choose_one, "tuning_config")

        def look(tuner: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
            tactic = result[1]
            # The hot path ends here: a tactic found is a pair, a string or a number from 0.
            if type(tactic) is not int or tactic != -1 or tuner.is_tuning_mode:
                return
            kernel = custom_op.get(args, kwargs)
            if is_moe(kernel) and has_tuned(tuner):
                self._count(kernel, tokens_of(config.get(args, kwargs), inputs.get(args, kwargs)))

        return Observe(look, note="counts calls without a tuned tactic")

    def _count(self, kernel: str, tokens: int) -> None:
        with self._lock:
            untuned = self.by_kernel.get(kernel)
            if untuned is not None:
                untuned.calls += 1
                untuned.fewest_tokens = min(untuned.fewest_tokens, tokens)
                untuned.most_tokens = max(untuned.most_tokens, tokens)
                return
            self.by_kernel[kernel] = Untuned(kernel, 1, tokens, tokens)
        logger.warning(
            "moe-tune: %s has no tuned tactic for %d tokens and runs its default, which may be slower. "
            "`vllm-moe-tune coverage` shows which batch sizes warm-up tunes. Said once for each kernel.",
            kernel,
            tokens,
        )


def has_tuned(tuner: Any) -> bool:
    """Whether an AutoTuner has tuned, or loaded from a file, any kernel at all: before warm-up every call runs the default."""
    winners = tuner._winner_cache() if hasattr(tuner, "_winner_cache") else tuner.profiling_cache
    return bool(winners) or bool(getattr(tuner, "_file_configs", None)) or getattr(tuner, "_managed_cache", None) is not None


def tokens_of(tuning_config: Any, inputs: Iterable[Any]) -> int:
    """The number of tokens of a call, as the autotuner reads it from the call's tensors."""
    spec = tuning_config.dynamic_tensor_specs[0]
    return int(list(inputs)[spec.input_idx[0]].shape[spec.dim_idx[0]])
