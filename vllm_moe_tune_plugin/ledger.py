"""What became of each patch, and of each tuning as the sum of its patches."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple


class State(str, enum.Enum):
    """The states in which a patch can be.

    ``applied``: the wrapper is in place. ``native``: upstream does it already, nothing is wrapped. ``unsupported``: the
    installed stack does not allow it. ``disabled``: the user turned it off. ``failed``: our own code broke; stock runs.
    ``pending``: the module it belongs to has not been imported yet.
    """

    APPLIED = "applied"
    NATIVE = "native"
    UNSUPPORTED = "unsupported"
    DISABLED = "disabled"
    FAILED = "failed"
    PENDING = "pending"

    def __str__(self) -> str:
        return self.value


# A tuning is what its most telling patch is: a failure must show, and one applied patch makes the tuning applied.
_WEIGHT = (State.FAILED, State.APPLIED, State.PENDING, State.NATIVE, State.UNSUPPORTED, State.DISABLED)


def sum_up(states: Iterable[State]) -> State:
    """The state of a tuning whose patches are in ``states`` (at least one)."""
    return min(states, key=_WEIGHT.index)


class PatchRecord(NamedTuple):
    """One patch as ``doctor`` shows it.

    Attributes:
        calls: how many calls the wrapper saw.
        tuned: how many of them it changed.
        serves: it only helps other patches of its tuning.
    """

    target: str
    state: State
    reason: str
    calls: int = 0
    tuned: int = 0
    serves: bool = False


class TuningRecord(NamedTuple):
    """One tuning with its patches."""

    name: str
    patches: tuple[PatchRecord, ...]

    @property
    def state(self) -> State:
        return sum_up(patch.state for patch in self.patches if not patch.serves or patch.state is State.FAILED)

    @property
    def reason(self) -> str:
        """The reasons of the patches that gave the tuning its state, each once."""
        telling = (patch for patch in self.patches if not patch.serves or patch.state is State.FAILED)
        reasons = (patch.reason for patch in telling if patch.state is self.state and patch.reason)
        return "; ".join(dict.fromkeys(reasons))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": str(self.state),
            "reason": self.reason,
            "tuned": sum(patch.tuned for patch in self.patches),
            "patches": [
                {
                    "target": patch.target,
                    "state": str(patch.state),
                    "reason": patch.reason,
                    "calls": patch.calls,
                    "tuned": patch.tuned,
                    "serves": patch.serves,
                }
                for patch in self.patches
            ],
        }
