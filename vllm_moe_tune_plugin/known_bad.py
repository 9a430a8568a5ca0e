"""FlashInfer releases whose MoE autotuning is known to be bad: the one list of them.

Tuning is not widened where an entry applies: every bucket that is tuned in addition is another chance to pick a tactic
that computes wrong results. An entry names the first and the last release that shows the fault, as far as sources tell,
and where it is written down. What was read in the published wheels themselves is marked `wheel`.
"""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import Version


class Fault(NamedTuple):
    """One fault of FlashInfer's MoE autotuning.

    Attributes:
        since: the first affected release; None: no earlier release is known to be free of it.
        fixed: the first release without it; None: none so far.
        kernels: parts of the names of the FlashInfer functions that are affected.
        what: what goes wrong, in one sentence.
        source: where it is reported, and what was read in the wheels.
        forbids: whether tuning must not be widened; otherwise another part of this package deals with it, or vLLM does.
    """

    since: Version | None
    fixed: Version | None
    kernels: tuple[str, ...]
    what: str
    source: str
    forbids: bool = True

    def applies(self, kernel: str, flashinfer: Version) -> bool:
        return (
            any(part in kernel for part in self.kernels)
            and (self.since is None or flashinfer >= self.since)
            and (self.fixed is None or flashinfer < self.fixed)
        )


FAULTS = (
    Fault(
        since=Version("0.6.8"),
        fixed=Version("0.6.11"),
        kernels=("fp4", "fp8_block"),
        what="tactics with clusterDimZ above 1 compute wrong FP4 and MXFP8 results, and the tuner may choose them",
        source="FlashInfer issue 3197, fixed by PR 3227; vLLM PR 41524 turned autotuning off for it in 0.21; "
        "wheel: the tactics are filtered in 0.6.11, not in 0.6.8.post1, 0.6.9 and 0.6.10",
    ),
    Fault(
        since=Version("0.6.16.post4"),
        fixed=Version("0.6.18"),
        kernels=("fp4",),
        what="NVFP4 tactics of tile size 192 give NaN on SM100 and SM103; larger batches prefer that tile",
        source="FlashInfer issue 4486",
    ),
    Fault(
        since=None,
        fixed=Version("0.6.8"),
        kernels=("routed",),
        what="routed kernels are profiled with uninitialised expert ids, or tuning them crashes",
        source="FlashInfer PRs 2942 (ids, fp8 scales) and 2916 (meta tensors)",
    ),
    Fault(
        since=None,
        fixed=Version("0.6.13"),
        kernels=("moe",),
        what="the persisted cache's keys leave out what tells runners apart, so a tactic of another runner is loaded",
        source="FlashInfer issue 3363, PR 3367; vLLM PR 43119 keeps the persistent cache off in 0.22 to 0.24; "
        "wheel: 0.6.11.post2 carries the fix, 0.6.12 does not",
        forbids=False,  # nothing is persisted with these releases, and the keys in memory are complete
    ),
    Fault(
        since=Version("0.6.12"),
        fixed=Version("0.6.17"),
        kernels=("fp4_block_scale_routed",),
        what="tuples of ids and weights are profiled on ids that belong to no expert",
        source="FlashInfer PR 4104",
        forbids=False,  # tuple_routing keeps ids packed while FlashInfer tunes
    ),
)


def find(kernel: str, flashinfer: Version | None) -> Fault | None:
    """The fault that forbids to widen the tuning of a FlashInfer function, None where there is none.

    Args:
        kernel: the function's name, as ``trtllm_fp4_block_scale_moe``.
        flashinfer: the installed release; None: FlashInfer is not installed.
    """
    if flashinfer is None:
        return None
    return next((fault for fault in FAULTS if fault.forbids and fault.applies(kernel, flashinfer)), None)
