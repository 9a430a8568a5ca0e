"""One wrapper on one name: wait for the import, ask the code, apply, undo.

A tuning names its patches; a patch names its target, ``package.module:name`` or ``package.module:Class.method``, and asks
a ``decide`` function what to do with the object found there. The answer is either a :class:`Verdict` (it stays stock, and
why) or an advice, which says how calls are changed:

* :class:`Rewrite`: change the arguments, then make the stock call;
* :class:`Replace`: give the result without the stock call, where the conditions are met;
* :class:`Within`: make the stock call with a context variable set, for a wrapper further down;
* :class:`Notice`: look at the object once the stock call is over, and change nothing.

Whatever the tuning's own code raises is caught there: the stock call is made, the failure is logged once and the tuning
stays stock from then on. What the stock function raises passes unchanged.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import wrapt

from vllm_moe_tune_plugin.ledger import PatchRecord, State

logger = logging.getLogger("vllm.moe_tune")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Wrapper = Callable[[Callable[..., Any], Any, Args, Kwargs], Any]

#: Returned by a :class:`Replace` function to have the stock call made.
STOCK: Final = object()


@dataclass(frozen=True)
class Verdict:
    """A patch that is not applied: ``native`` or ``unsupported``, and why."""

    state: State
    reason: str


def native(reason: str) -> Verdict:
    return Verdict(State.NATIVE, reason)


def unsupported(reason: str) -> Verdict:
    return Verdict(State.UNSUPPORTED, reason)


@dataclass(frozen=True)
class Rewrite:
    """Make the stock call with the ``(args, kwargs)`` that ``change(instance, args, kwargs)`` returns, None: unchanged.

    ``change`` may alter ``kwargs`` in place, but only as its last step.
    """

    change: Callable[[Any, Args, Kwargs], tuple[Args, Kwargs] | None]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def rewrite(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            if patch.live:
                patch.calls += 1
                try:
                    changed = self.change(instance, args, kwargs)
                    if changed is not None:
                        args, kwargs = changed
                        patch.tuned += 1
                except Exception as error:
                    patch.fail(error)
            return wrapped(*args, **kwargs)

        return rewrite


@dataclass(frozen=True)
class Replace:
    """Return what ``instead(instance, args, kwargs)`` returns; where that is :data:`STOCK`, make the stock call."""

    instead: Callable[[Any, Args, Kwargs], Any]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def replace(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            if patch.live:
                patch.calls += 1
                try:
                    result = self.instead(instance, args, kwargs)
                except Exception as error:
                    patch.fail(error)
                else:
                    if result is not STOCK:
                        patch.tuned += 1
                        return result
            return wrapped(*args, **kwargs)

        return replace


@dataclass(frozen=True)
class Within:
    """Make the stock call with ``variable`` set to ``value(instance, args, kwargs)``."""

    variable: contextvars.ContextVar[Any]
    value: Callable[[Any, Args, Kwargs], Any]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def within(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            if not patch.live:
                return wrapped(*args, **kwargs)
            patch.calls += 1
            try:
                token = self.variable.set(self.value(instance, args, kwargs))
            except Exception as error:
                patch.fail(error)
                return wrapped(*args, **kwargs)
            try:
                return wrapped(*args, **kwargs)
            finally:
                self.variable.reset(token)

        return within


@dataclass(frozen=True)
class Notice:
    """Call ``look(instance)`` after the stock call."""

    look: Callable[[Any], None]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def notice(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            result = wrapped(*args, **kwargs)
            if patch.live:
                patch.calls += 1
                try:
                    self.look(instance)
                except Exception as error:
                    patch.fail(error)
            return result

        return notice


Advice = Rewrite | Replace | Within | Notice
Decide = Callable[[Any], Advice | Verdict]


# Modules whose post-import hook has run. The import machinery calls them initialising until a moment later.
_arrived: set[str] = set()


def _is_imported(name: str) -> bool:
    """Whether a module has been imported to its end: an object copied from half a module would miss the rest."""
    module = sys.modules.get(name)
    if module is None:
        return False
    return name in _arrived or not getattr(module.__spec__, "_initializing", False)


def _is_or_binds(candidate: Any, ours: wrapt.FunctionWrapper[..., Any]) -> bool:
    """Whether an object is our wrapper, or what looking it up on its class made of it."""
    return candidate is ours or getattr(candidate, "_self_parent", None) is ours


def _relink(outer: Any, ours: wrapt.FunctionWrapper[..., Any], inner: Any) -> bool:
    """Take ``ours`` out of a chain of foreign wrappers that begins at ``outer``; whether it was found there.

    A wrapt wrapper keeps what it wraps in ``__wrapped__``; a closure keeps it in a cell.
    """
    seen: set[int] = set()
    while outer is not None and id(outer) not in seen:
        seen.add(id(outer))
        below = getattr(outer, "__wrapped__", None)
        found = below is not None and _is_or_binds(below, ours)
        if found:
            outer.__wrapped__ = inner
        for cell in getattr(outer, "__closure__", None) or ():
            if _is_or_binds(cell.cell_contents, ours):
                cell.cell_contents = inner
                found = True
        if found:
            return True
        outer = below
    return False


@dataclass
class _Place:
    """A namespace in which the wrapper was put. ``inherited``: the class had no such attribute of its own."""

    parent: Any
    name: str
    wrapper: wrapt.FunctionWrapper[..., Any]
    inherited: bool

    def restore(self) -> bool:
        """Put the original back; False where a foreign wrapper keeps ours and cannot be made to let go."""
        # Not what was found when the patch was applied: a foreign wrapper below may have come or gone since.
        original = self.wrapper.__wrapped__
        current = vars(self.parent).get(self.name)
        if current is not self.wrapper:
            return current is None or _relink(current, self.wrapper, original)
        if self.inherited:
            delattr(self.parent, self.name)
        else:
            setattr(self.parent, self.name, original)
        return True


@dataclass(eq=False)
class Patch:
    """One wrapper on one name.

    Attributes:
        target: ``package.module:name`` or ``package.module:Class.method``.
        decide: given the object at the target, an advice or a verdict.
        also: other ``package.module:name`` at which the same object is reached.
        needs: modules that must have been imported besides the target's before ``decide`` can answer.
        missing: what it means that the target's module or name does not exist.
        serves: the patch only helps others of its tuning, whose state does not follow from it.
    """

    target: str
    decide: Decide
    also: Sequence[str] = ()
    needs: Sequence[str] = ()
    missing: Callable[[], Verdict] = lambda: unsupported("this vLLM has no such code")
    serves: bool = False

    state: State = field(default=State.PENDING, init=False)
    reason: str = field(default="", init=False)
    live: bool = field(default=False, init=False)
    calls: int = field(default=0, init=False)
    tuned: int = field(default=0, init=False)
    on_failure: Callable[[], None] = field(default=lambda: None, init=False, repr=False)
    _places: list[_Place] = field(default_factory=list, init=False, repr=False)

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose imports the patch waits for."""
        return (self.module, *self.needs)

    def record(self) -> PatchRecord:
        return PatchRecord(self.target, self.state, self.reason, self.calls, self.tuned, self.serves)

    def settle(self, verdict: Verdict) -> None:
        self.state, self.reason = verdict.state, verdict.reason

    def attempt(self) -> None:
        """Apply the patch if all that it waits for is there; never raises."""
        if self.state is not State.PENDING or not all(map(_is_imported, self.modules)):
            return
        try:
            self._apply()
        except Exception as error:
            self.fail(error)

    def _apply(self) -> None:
        try:
            found = [self._resolve(self.target)]
        except AttributeError:
            self.settle(self.missing())
            return
        for name in self.also:
            try:
                found.append(self._resolve(name))
            except (AttributeError, ImportError):
                continue  # a release that does not re-export it there
        answer = self.decide(found[0][2])
        if isinstance(answer, Verdict):
            self.settle(answer)
            return
        # One wrapper for one object, however many names it has: a caller that compares them still finds them equal.
        wrappers: dict[int, wrapt.FunctionWrapper[..., Any]] = {}
        for parent, name, original in found:
            wrapper = wrappers.setdefault(id(original), wrapt.FunctionWrapper(original, answer.wrapper(self)))
            inherited = isinstance(parent, type) and name not in vars(parent)
            setattr(parent, name, wrapper)
            self._places.append(_Place(parent, name, wrapper, inherited))
        self.live = True
        self.state, self.reason = State.APPLIED, answer.note

    @staticmethod
    def _resolve(target: str) -> tuple[Any, str, Any]:
        module, _, name = target.partition(":")
        parent, attribute, original = wrapt.resolve_path(sys.modules.get(module, module), name)
        return parent, attribute, original

    def fail(self, error: Exception) -> None:
        """Record that our own code broke; everything of the tuning becomes a plain pass-through."""
        first = self.state is not State.FAILED
        self.state, self.reason = State.FAILED, f"{type(error).__name__}: {error}"
        self.live = False
        self.on_failure()
        if first:
            logger.error("moe-tune: %s failed and is stock from now on", self.target, exc_info=error)

    def undo(self) -> bool:
        """Restore every original object; whether nothing of the wrapper is left anywhere."""
        self.live = False
        clean = [place.restore() for place in reversed(self._places)]
        self._places.clear()
        self.state, self.reason = State.PENDING, ""
        return all(clean)


class ImportWatch:
    """Calls ``arrived(module)`` once a module of interest has been imported.

    wrapt's post-import hooks cannot be taken back, so each module gets one hook for the life of the process, which asks
    whether anybody is listening.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hooked: set[str] = set()
        self._listener: Callable[[str], None] | None = None

    def listen(self, modules: Iterator[str], arrived: Callable[[str], None]) -> None:
        with self._lock:
            self._listener = arrived
            new = [name for name in dict.fromkeys(modules) if name not in self._hooked]
            self._hooked.update(new)
        for name in new:
            if name not in sys.modules:
                wrapt.register_post_import_hook(self._notify, name)

    def stop(self) -> None:
        self._listener = None

    def _notify(self, module: ModuleType) -> None:
        _arrived.add(module.__name__)
        listener = self._listener
        if listener is not None:
            listener(module.__name__)
