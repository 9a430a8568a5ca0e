"""``AutoTuner.choose_one``: where FlashInfer picks a tactic for each call, and what this package does around it.

Every MoE kernel of every FlashInfer release asks it, while tuning and while serving. Its arguments are the same in all of
them: ``(custom_op, runners, tuning_config, inputs)``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_moe_tune_plugin.patching import Advice, Args, Kwargs, Observe, Patch, Verdict, unsupported
from vllm_moe_tune_plugin.stack import Argument, exists

logger = logging.getLogger("vllm.moe_tune")

CHOOSE_ONE = "flashinfer.autotuner:AutoTuner.choose_one"


def is_moe(custom_op: str) -> bool:
    """Whether a name given to ``choose_one`` is an MoE kernel's, as ``flashinfer::trtllm_bf16_moe``."""
    return "moe" in custom_op.lower()


def without_flashinfer() -> Verdict:
    return unsupported("this FlashInfer has no autotuner" if exists("flashinfer") else "flashinfer-python is not installed")


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
        return Patch(CHOOSE_ONE, self._decide, missing=without_flashinfer, serves=True)

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
