"""One wrapper on one name: wait for the import, ask the code, apply, undo.

A tuning names its patches; a patch names its target, ``package.module:name`` or ``package.module:Class.method``, and asks
a ``decide`` function what to do with the object found there. The answer is either a :class:`Verdict` (it stays stock, and
why) or an advice, which says how calls are changed:

* :class:`Rewrite`: change the arguments, then make the stock call;
* :class:`Replace`: give the result without the stock call, where the conditions are met;
* :class:`Within`: make the stock call with a context variable set, for a wrapper further down;
* :class:`Around`: make the stock call inside a context manager;
* :class:`Observe`: look at the call once it is over, and change nothing;
* :class:`Convert`: change the stock call's result.

Named tuples, since a data class takes half a millisecond of register()'s time to be made.

Whatever the tuning's own code raises is caught there: the stock call is made, the failure is logged once and the tuning
stays stock from then on. What the stock function raises passes unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import inspect
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NamedTuple

import wrapt

from vllm_moe_tune_plugin.ledger import PatchRecord, State
from vllm_moe_tune_plugin.stack import UnknownSignature, exists

logger = logging.getLogger("vllm.moe_tune")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Wrapper = Callable[[Callable[..., Any], Any, Args, Kwargs], Any]

#: Returned by a :class:`Replace` function to have the stock call made.
STOCK: Final = object()


class Verdict(NamedTuple):
    """A patch that is not applied: ``native`` or ``unsupported``, and why."""

    state: State
    reason: str


def native(reason: str) -> Verdict:
    return Verdict(State.NATIVE, reason)


def unsupported(reason: str) -> Verdict:
    return Verdict(State.UNSUPPORTED, reason)


class Rewrite(NamedTuple):
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


class Replace(NamedTuple):
    """Return what ``instead(instance, args, kwargs)`` returns; where that is :data:`STOCK`, make the stock call.

    ``learn(instance, args, kwargs, result)`` looks at what a stock call returned.
    """

    instead: Callable[[Any, Args, Kwargs], Any]
    note: str = ""
    learn: Callable[[Any, Args, Kwargs, Any], None] | None = None

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
            result = wrapped(*args, **kwargs)
            if self.learn is not None and patch.live:
                try:
                    self.learn(instance, args, kwargs, result)
                except Exception as error:
                    patch.fail(error)
            return result

        return replace


class Within(NamedTuple):
    """Make the stock call with ``variable`` set to ``value(instance, args, kwargs)``."""

    variable: contextvars.ContextVar[Any]
    value: Callable[[Any, Args, Kwargs], Any]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def within(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            token = None
            if patch.live:
                patch.calls += 1
                try:
                    token = self.variable.set(self.value(instance, args, kwargs))
                except Exception as error:
                    patch.fail(error)
            if token is None:
                return wrapped(*args, **kwargs)
            try:
                return wrapped(*args, **kwargs)
            finally:
                self.variable.reset(token)

        return within


class Around(NamedTuple):
    """Make the stock call inside the context manager that ``enter(instance, args, kwargs)`` returns, None: as it is."""

    enter: Callable[[Any, Args, Kwargs], contextlib.AbstractContextManager[Any] | None]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def around(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            if not patch.live:
                return wrapped(*args, **kwargs)
            patch.calls += 1
            stack = None
            try:
                context = self.enter(instance, args, kwargs)
                if context is not None:
                    stack = contextlib.ExitStack()
                    stack.enter_context(context)
                    patch.tuned += 1
            except Exception as error:
                patch.fail(error)
                stack = None
            if stack is None:
                return wrapped(*args, **kwargs)
            with stack:
                return wrapped(*args, **kwargs)

        return around


class Observe(NamedTuple):
    """Look at a call when it is over with ``look(instance, args, kwargs, result)``, and change nothing."""

    look: Callable[[Any, Args, Kwargs, Any], None]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def observe(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            result = wrapped(*args, **kwargs)
            if patch.live:
                patch.calls += 1
                try:
                    self.look(instance, args, kwargs, result)
                except Exception as error:
                    patch.fail(error)
            return result

        return observe


class Convert(NamedTuple):
    """Return ``convert(result)`` of the stock call's result."""

    convert: Callable[[Any], Any]
    note: str = ""

    def wrapper(self, patch: Patch) -> Wrapper:
        def converted(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
            result = wrapped(*args, **kwargs)
            if patch.live:
                patch.calls += 1
                try:
                    result = self.convert(result)
                    patch.tuned += 1
                except Exception as error:
                    patch.fail(error)
            return result

        return converted


Advice = Rewrite | Replace | Within | Around | Observe | Convert
Decide = Callable[[Any], Advice | Verdict]


# Modules that have been executed to their end. The import machinery calls them initialising until a moment later.
_arrived: set[str] = set()

# Two threads may import, and one may unregister, at the same time.
_lock = threading.RLock()


def _is_imported(name: str) -> bool:
    """Whether a module has been imported to its end: an object copied from half a module would miss the rest."""
    module = sys.modules.get(name)
    if module is None:
        return False
    return name in _arrived or not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """Ours. Where a function may be copied or pickled, so may its wrapper: it goes by its name, as functions do."""

    def __copy__(self) -> _Wrapper:
        return self

    def __deepcopy__(self, memo: object) -> _Wrapper:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _by_name, (self.__module__, self.__qualname__)


def _by_name(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def _own(foreign: Any, name: str) -> Any:
    """An attribute that a foreign object really has, else None: one that makes up whatever it is asked for has none."""
    try:
        absent = object()
        return None if inspect.getattr_static(foreign, name, absent) is absent else getattr(foreign, name)
    except Exception:  # of the foreign object's own code
        return None


def _is_or_binds(candidate: Any, ours: _Wrapper) -> bool:
    """Whether an object is our wrapper, or what looking it up on its class made of it."""
    return candidate is ours or _own(candidate, "_self_parent") is ours


def without_ours(function: Any) -> Any:
    """What is below this plugin's wrappers: the stock function, or another plugin's wrapper."""
    while type(function) is _Wrapper:
        function = function.__wrapped__
    return function


def is_foreign(function: Any, home: str) -> bool:
    """Whether something else wrapped or replaced what should be a function of the package ``home``."""
    return hasattr(function, "__wrapped__") or (getattr(function, "__module__", None) or "").partition(".")[0] != home


def _relink(outer: Any, ours: _Wrapper, inner: Any) -> bool:
    """Take ``ours`` out of the foreign wrappers that begin at ``outer``, wherever they hold it; whether any did.

    A wrapt wrapper keeps what it wraps in ``__wrapped__``, and a bound one also the unbound; a closure keeps it in a cell.
    """
    found = False
    seen: set[int] = set()
    waiting = [outer]
    while waiting:
        holder = waiting.pop()
        if holder is None or id(holder) in seen or _is_or_binds(holder, ours):
            continue
        seen.add(id(holder))
        below = _own(holder, "__wrapped__")
        if below is not None and _is_or_binds(below, ours):
            holder.__wrapped__ = inner
            found = True
        waiting += [below, _own(holder, "_self_parent")]
        # Of the holder itself: a proxy would show its wrapped function's.
        cells = getattr(holder, "__closure__", None) if type(holder).__name__ == "function" else None
        for cell in cells or ():
            try:
                kept = cell.cell_contents
            except ValueError:  # not filled yet, or emptied
                continue
            if _is_or_binds(kept, ours):
                cell.cell_contents = inner
                found = True
            elif callable(kept):
                waiting.append(kept)
    return found


@dataclass
class _Place:
    """A namespace in which the wrapper was put. ``inherited``: it had no such attribute of its own."""

    parent: Any
    name: str
    wrapper: _Wrapper
    inherited: bool

    def restore(self, let_go: set[tuple[int, int]]) -> bool:
        """Put the original back; False where a foreign wrapper keeps ours and cannot be made to let go.

        ``let_go``: the wrappers around ours that did, with ours: they may stand under several names.
        """
        # Not what was found when the patch was applied: a foreign wrapper below may have come or gone since.
        original = self.wrapper.__wrapped__
        current = vars(self.parent).get(self.name)
        if not _is_or_binds(current, self.wrapper):
            pair = id(current), id(self.wrapper)
            if current is None or pair in let_go:
                return True
            if _relink(current, self.wrapper, original):
                let_go.add(pair)
                return True
            return False
        if self.inherited:
            delattr(self.parent, self.name)
        else:
            setattr(self.parent, self.name, original)
        return True


@dataclass
class Group:
    """The patches of one tuning fail together."""

    failed: bool = False


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
    applied: bool = field(default=False, init=False)
    calls: int = field(default=0, init=False)
    tuned: int = field(default=0, init=False)
    group: Group = field(default_factory=Group, init=False, repr=False)
    _places: list[_Place] = field(default_factory=list, init=False, repr=False)
    _undone: bool = field(default=False, init=False, repr=False)

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose imports the patch waits for."""
        return (self.module, *self.needs)

    @property
    def live(self) -> bool:
        """Whether the wrapper does anything but pass calls on."""
        return self.applied and not self.group.failed

    @property
    def wrappers(self) -> list[_Wrapper]:
        """What stands in the places of the originals."""
        return [place.wrapper for place in self._places]

    def record(self) -> PatchRecord:
        return PatchRecord(self.target, self.state, self.reason, self.calls, self.tuned, self.serves)

    def settle(self, verdict: Verdict) -> None:
        self.state, self.reason = verdict.state, verdict.reason

    def settle_if_missing(self) -> None:
        """Settle the patch if a module that it waits for does not exist; never raises."""
        if self.state is not State.PENDING:
            return
        try:
            gone = [name for name in self.modules if not exists(name)]
            if any(name.partition(".")[0] == "flashinfer" for name in gone) and not exists("flashinfer"):
                self.settle(unsupported("flashinfer-python is not installed"))
            elif self.module in gone:
                self.settle(self.missing())
            elif gone:
                self.settle(unsupported(f"there is no module {gone[0]}"))
        except Exception as error:
            self.fail(error)

    def attempt(self) -> None:
        """Apply the patch if all that it waits for is there; never raises."""
        with _lock:
            try:
                if self.state is State.PENDING and not self._undone and all(map(_is_imported, self.modules)):
                    self._apply()
            except UnknownSignature as error:
                self.settle(unsupported(str(error)))
            except Exception as error:
                self.fail(error)

    def _apply(self) -> None:
        try:
            original = self._resolve(self.target)[2]
        except AttributeError:
            self.settle(self.missing())
            return
        found = {}
        for name in dict.fromkeys((self.target, *self.also)):
            try:
                found[name] = self._resolve(name)
            except (AttributeError, ImportError):
                continue  # a release that does not re-export it there
        answer = self.decide(original)
        if isinstance(answer, Verdict):
            self.settle(answer)
            return
        # One wrapper for one object, however many names it has: a caller that compares them still finds them equal.
        wrappers: dict[int, _Wrapper] = {}
        for parent, name, original in found.values():
            wrapper = wrappers.setdefault(id(original), _Wrapper(original, answer.wrapper(self)))
            inherited = name not in vars(parent)
            setattr(parent, name, wrapper)
            self._places.append(_Place(parent, name, wrapper, inherited))
        self.applied = True
        self.state, self.reason = State.APPLIED, answer.note

    @staticmethod
    def _resolve(target: str) -> tuple[Any, str, Any]:
        module, _, name = target.partition(":")
        parent, attribute, original = wrapt.resolve_path(sys.modules.get(module, module), name)
        return parent, attribute, original

    def fail(self, error: Exception) -> None:
        """Record that our own code broke; everything of the tuning only passes calls on from now on."""
        first = self.state is not State.FAILED
        self.state, self.reason = State.FAILED, f"{type(error).__name__}: {error}"
        self.group.failed = True
        if first:
            logger.error("moe-tune: %s failed and is stock from now on", self.target, exc_info=error)

    def undo(self) -> bool:
        """Restore every original object, for good; whether nothing of the wrapper is left anywhere. Never raises."""
        with _lock:
            self.applied = False
            self._undone = True  # another thread may be about to apply it
            let_go: set[tuple[int, int]] = set()
            clean = True
            for place in reversed(self._places):
                try:
                    clean &= place.restore(let_go)
                except Exception:  # a namespace that cannot be changed back: the wrapper there only passes calls on
                    logger.exception("moe-tune: %s keeps a wrapper", self.target)
                    clean = False
            self._places.clear()
            return clean


def restore_copies(wrappers: Iterable[_Wrapper]) -> None:
    """Put the originals where modules took wrappers by name, ``from module import function``, while these were in place."""
    ours = {id(wrapper) for wrapper in wrappers}
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            names = vars(module)
            names.update({name: without_ours(value) for name, value in list(names.items()) if id(value) in ours})


class _NotifyingLoader:
    """Stands for a module's loader while it is imported, to tell when it has been executed."""

    def __init__(self, loader: Any, arrived: Callable[[str], None]) -> None:
        self._loader = loader
        self._tell = arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on nobody needs to know that there was a stand-in.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._tell(module.__name__)


class ImportWatch:
    """A finder on ``sys.meta_path`` that finds nothing itself but calls ``arrived(module)`` after an import.

    wrapt has such hooks, too. They cannot be taken back, and while one thread imports a package and another a module of
    it they can wait for each other for ever: wrapt's finder imports the parent in the middle of the search. This one asks
    the other finders as the import machinery does.
    """

    def __init__(self) -> None:
        self._modules: frozenset[str] = frozenset()
        self._arrived: Callable[[str], None] = lambda name: None

    def start(self, modules: Iterable[str], arrived: Callable[[str], None]) -> None:
        self._modules, self._arrived = frozenset(modules), arrived
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in self._modules:
            if name in sys.modules and not _is_imported(name):
                threading.Thread(target=self._wait_for, args=(name,), daemon=True).start()

    def _wait_for(self, name: str) -> None:
        """For a module whose import began before anyone watched: importing it again waits for the end of that."""
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            self._notify(name)

    def stop(self) -> None:
        self._modules, self._arrived = frozenset(), lambda name: None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _NotifyingLoader(spec.loader, self._notify)  # type: ignore[assignment]
                return spec
        return None

    def _notify(self, name: str) -> None:
        _arrived.add(name)
        try:
            self._arrived(name)
        except Exception:  # an import must not break because of us
            logger.exception("moe-tune: not told of %s", name)
