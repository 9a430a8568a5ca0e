"""Order and undo: our wrapper with others' below and above it, before and after the import, any number of times."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import importlib
import inspect
import pickle
import sys
import threading
import time
import traceback
import types
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_stack
import pytest
import wrapt

import vllm_moe_tune_plugin
from vllm_moe_tune_plugin import patching, plugin, tunings
from vllm_moe_tune_plugin.ledger import State
from vllm_moe_tune_plugin.patching import STOCK, Around, Convert, Observe, Patch, Replace, Rewrite, Within, native

SOURCES = {
    "prey": "from .core import function\n",
    "prey.core": """
def function(value, tags=()):
    return [value, *tags]

class Base:
    def inherited(self, value, tags=()):
        return [value, *tags]

class Class(Base):
    def method(self, value, tags=()):
        return [value, *tags]

    @classmethod
    def of_class(cls, value, tags=()):
        return [value, *tags]

    @staticmethod
    def static(value, tags=()):
        return [value, *tags]
""",
}


def tag(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {**kwargs, "tags": (*kwargs.get("tags", ()), name)}


class Target(NamedTuple):
    name: str
    also: tuple[str, ...] = ()

    def patch(self, decide: Any = None) -> Patch:
        ours = Rewrite(lambda _, args, kwargs: (args, tag(kwargs, "ours")))
        return Patch(f"prey.core:{self.name}", decide or (lambda function: ours), also=self.also, needs=("prey",))

    @property
    def parent(self) -> Any:
        module = importlib.import_module("prey.core")
        return module.Class if "." in self.name else module

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    def calls(self) -> list[list[Any]]:
        """Call it by every name it has; each call must see the same wrappers."""
        owner = self.parent() if "." in self.name else self.parent
        callers = [getattr(owner, self.attribute), *(importlib.import_module("prey").function for _ in self.also)]
        return [caller(7) for caller in callers]


FUNCTION = Target("function")
ALIASED = Target("function", also=("prey:function",))
METHOD = Target("Class.method")
INHERITED = Target("Class.inherited")
CLASSMETHOD = Target("Class.of_class")
STATICMETHOD = Target("Class.static")
TARGETS = (FUNCTION, ALIASED, METHOD, INHERITED, CLASSMETHOD, STATICMETHOD)


def snapshot() -> dict[str, Any]:
    """Every object in every namespace of the package, held so that no id is given twice."""
    module, package = importlib.import_module("prey.core"), importlib.import_module("prey")
    spaces = {"prey": package, "prey.core": module, "Base": module.Base, "Class": module.Class}
    return {
        f"{space}.{name}": value
        for space, holder in spaces.items()
        for name, value in vars(holder).items()
        if not name.startswith("__")
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    changed = [name for name in before if before[name] is not after[name]]
    assert not changed


@pytest.fixture
def session(tmp_path, monkeypatch):
    """``register`` and ``unregister`` with one tuning, whose patches the test sets."""
    own: list[Patch] = []
    fake_stack.write(tmp_path, SOURCES)
    monkeypatch.setattr(tunings, "NAMES", ("prey",))
    monkeypatch.setattr(tunings, "patches_of", lambda name, settings: own_now())
    make: list[Any] = []

    def own_now() -> list[Patch]:
        own[:] = [patch() for patch in make]
        return own

    with fake_stack.new_process(monkeypatch, tmp_path, "prey"):
        yield SimpleNamespace(make=make, own=own)


# --- ours alone ------------------------------------------------------------------------------------------------------------

SEQUENCES = (
    "import patch undo",
    "patch import undo",
    "patch patch import patch undo undo",
    "import patch patch undo undo",
    "patch import undo patch undo",
    "import patch undo patch undo undo",
    "patch undo import patch undo",
    "patch undo patch import undo patch patch undo",
    "undo import undo",
)


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name + "+alias" * bool(target.also))
def test_order_and_undo(session, target, sequence):
    session.make.append(target.patch)
    imported = patched = False
    before: dict[str, Any] = {}
    for step in sequence.split():
        if step == "import":
            if patched:  # what a module holds before any wrapper is known from its source alone
                importlib.import_module("prey")
            else:
                before = snapshot()
            imported = True
        elif step == "patch":
            vllm_moe_tune_plugin.register()
            patched = True
        else:
            vllm_moe_tune_plugin.unregister()
            patched = False
        if imported:
            assert target.calls() == [[7, "ours"] if patched else [7]] * (1 + len(target.also))
            if not patched:
                before = before or snapshot()
                assert_same(before, snapshot())
                assert not [name for name, value in snapshot().items() if fake_stack.is_wrapper(value)]


def test_one_wrapper_for_one_object_with_two_names(session):
    session.make.append(ALIASED.patch)
    vllm_moe_tune_plugin.register()
    package = importlib.import_module("prey")
    assert isinstance(package.function, wrapt.FunctionWrapper)
    assert package.function is package.core.function


def test_a_name_given_twice_is_one(session, logged):
    session.make.append(Target("function", also=("prey.core:function",)).patch)
    stock = importlib.import_module("prey.core").function
    vllm_moe_tune_plugin.register()
    assert FUNCTION.calls() == [[7, "ours"]]
    vllm_moe_tune_plugin.unregister()
    assert importlib.import_module("prey.core").function is stock
    assert "foreign" not in logged.text


@pytest.mark.parametrize("first", [0, 1])
def test_two_of_ours_on_one_object_with_two_names(session, first):
    """Whichever goes first, both are gone, and nobody is said to hold on to them."""
    module = importlib.import_module("prey.core")
    package = importlib.import_module("prey")
    before = module.function
    patches = [ALIASED.patch(), ALIASED.patch()]
    for patch in patches:
        patch.attempt()
    assert patches[first].undo()
    assert package.function is module.function is not before
    assert patches[1 - first].undo()
    assert package.function is module.function is before


# --- with a foreign wrapper ------------------------------------------------------------------------------------------------


class Foreign:
    """Another plugin's wrapper on the same name, in one of the ways in which plugins wrap."""

    def __init__(self, kind: str, target: Target) -> None:
        self.kind, self.parent, self.name = kind, target.parent, target.attribute
        self.was_own = self.name in vars(self.parent)
        found = vars(self.parent).get(self.name, getattr(self.parent, self.name))
        self.before = getattr(self.parent, self.name) if kind == "closure of the attribute" else found
        if kind == "wrapt":
            self.wrapper: Any = wrapt.FunctionWrapper(
                found, lambda wrapped, _, args, kwargs: wrapped(*args, **tag(kwargs, "foreign"))
            )
        else:
            inner = getattr(self.parent, self.name) if kind == "closure of the attribute" else found
            self.wrapper = self._bare(inner) if kind == "closure without wraps" else functools.wraps(inner)(self._bare(inner))
        setattr(self.parent, self.name, self.wrapper)

    @staticmethod
    def _bare(inner: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **tag(kwargs, "foreign"))

        return wrapper

    @property
    def inner(self) -> Any:
        if self.kind == "wrapt":
            return self.wrapper.__wrapped__
        cells = dict(zip(self.wrapper.__code__.co_freevars, self.wrapper.__closure__, strict=True))
        return cells["inner"].cell_contents

    def remove_politely(self) -> None:
        """Take itself out of the chain, wherever it stands now, and leave the others in."""
        current = vars(self.parent).get(self.name)
        if current is self.wrapper or getattr(current, "_self_parent", None) is self.wrapper:
            if self.was_own:
                setattr(self.parent, self.name, self.inner)
            else:
                delattr(self.parent, self.name)
        elif current is not None:
            assert current.__wrapped__ is self.wrapper
            current.__wrapped__ = self.inner

    def remove_rudely(self) -> None:
        """Put back what it found, whatever has been put there since."""
        if self.was_own:
            setattr(self.parent, self.name, self.before)
        else:
            delattr(self.parent, self.name)


KINDS = ("wrapt", "closure of the attribute", "closure of the dict", "closure without wraps")
# F, P: the foreign wrapper and ours are put on; f, p: they are taken off.
ORDERS = ("FPfp", "FPpf", "PFfp", "PFpf", "PFpPpf", "FPpPfp", "PFppfPp")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [FUNCTION, METHOD, INHERITED], ids=lambda target: target.name)
@pytest.mark.parametrize("late", [False, True], ids=["imported", "imported later"])
def test_foreign_wrapper_in_any_order(session, target, kind, order, late):
    if late and order[0] == "F":
        pytest.skip("a foreign wrapper below ours needs the module first")
    session.make.append(target.patch)
    if not late:
        importlib.import_module("prey")
        before, original = snapshot(), getattr(target.parent, target.attribute)
    active: list[str] = []
    for step in order:
        if step == "F":
            foreign = Foreign(kind, target)
        elif step == "f":
            foreign.remove_politely()
        elif step == "P":
            vllm_moe_tune_plugin.register()
        else:
            vllm_moe_tune_plugin.unregister()
        name = {"f": "foreign", "p": "ours"}[step.lower()]
        if step.isupper():
            active.append(name)
        elif name in active:
            active.remove(name)
        (result,) = target.calls()
        assert sorted(result[1:]) == sorted(active)
    if late:
        assert not [name for name, value in snapshot().items() if fake_stack.is_wrapper(value)]
        return
    assert getattr(target.parent, target.attribute) is original
    if target is not INHERITED:  # there the foreign wrapper makes an attribute of its own
        assert_same(before, snapshot())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_foreign_wrapper_that_puts_back_what_it_found(session, kind, order):
    """It may drop ours or bring a dead one back; calls stay right, no wrapper acts twice, and none of ours once it is off."""
    session.make.append(METHOD.patch)
    importlib.import_module("prey")
    is_on = False
    for step in order:
        if step == "F":
            foreign = Foreign(kind, METHOD)
        elif step == "f":
            foreign.remove_rudely()
        elif step == "P":
            vllm_moe_tune_plugin.register()
            is_on = True
        else:
            vllm_moe_tune_plugin.unregister()
            is_on = False
        (result,) = METHOD.calls()
        assert result.count("ours") <= is_on
        assert result.count("foreign") <= 1
    assert METHOD.calls() == [[7]]
    assert not is_on


@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_two_foreign_wrappers_above(session, inner, outer):
    session.make.append(METHOD.patch)
    importlib.import_module("prey")
    before, original = snapshot(), METHOD.parent.method
    vllm_moe_tune_plugin.register()
    ours = vars(METHOD.parent)["method"]
    below, above = Foreign(inner, METHOD), Foreign(outer, METHOD)
    assert sorted(METHOD.calls()[0][1:]) == ["foreign", "foreign", "ours"]
    vllm_moe_tune_plugin.unregister()
    assert METHOD.calls() == [[7, "foreign", "foreign"]]
    link = above.wrapper
    while link is not None:  # what is unwrapped shows no trace of ours either
        assert link is not ours
        assert getattr(link, "_self_parent", None) is not ours
        link = getattr(link, "__wrapped__", None)
    assert below.inner is original
    above.remove_politely()
    below.remove_politely()
    assert_same(before, snapshot())


def test_foreign_subclass_in_place_of_the_class(session):
    session.make.append(METHOD.patch)
    module = importlib.import_module("prey.core")
    vllm_moe_tune_plugin.register()
    stock_class = module.Class

    class Sub(stock_class):
        def method(self, value, tags=()):
            return super().method(value, tags=(*tags, "foreign"))

    module.Class = Sub
    assert Sub().method(7) == [7, "foreign", "ours"]
    vllm_moe_tune_plugin.unregister()
    assert Sub().method(7) == [7, "foreign"]
    assert not fake_stack.is_wrapper(vars(stock_class)["method"])
    # The other way round: ours goes on the subclass, and comes off it.
    vllm_moe_tune_plugin.register()
    assert Sub().method(7) == [7, "ours", "foreign"]
    vllm_moe_tune_plugin.unregister()
    assert Sub().method(7) == [7, "foreign"]
    assert inspect.isfunction(vars(Sub)["method"])


def test_foreign_holder_that_cannot_let_go_is_reported_and_passes_on(session, logged):
    session.make.append(FUNCTION.patch)
    module = importlib.import_module("prey.core")
    vllm_moe_tune_plugin.register()
    module.function = functools.partial(module.function)
    vllm_moe_tune_plugin.unregister()
    assert module.function(7) == [7]
    assert "foreign wrapper" in logged.text
    vllm_moe_tune_plugin.register()
    assert module.function(7) == [7, "ours"]


def test_foreign_wrapper_with_an_empty_cell_does_not_stop_undo(session):
    """A closure's cell is empty until its variable is set, and again after ``del``."""
    session.make.extend([METHOD.patch, FUNCTION.patch])
    module = importlib.import_module("prey.core")
    before = snapshot()
    vllm_moe_tune_plugin.register()

    def wrap(aaa_function):
        def wrapper(*args, **kwargs):
            return aaa_function(*args, **kwargs) if args else a_late_name

        if not callable(aaa_function):
            a_late_name = None
        return wrapper

    module.function = wrap(module.function)
    vllm_moe_tune_plugin.unregister()
    assert module.Class.method is before["Class.method"]
    assert module.function(7) == [7]


class RaisesWhenAsked:
    """A stand-in for a thing that is not there now, as lazy modules and context-local proxies are."""

    def __call__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name}: outside of its context")


class MakesUpWhatItIsAskedFor:
    """Has every attribute, a new one each time, as a mock has."""

    def __call__(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return MakesUpWhatItIsAskedFor()


@pytest.mark.parametrize("kind", [RaisesWhenAsked, MakesUpWhatItIsAskedFor])
def test_strange_objects_in_a_foreign_closure_do_not_stop_undo(session, kind):
    session.make += [METHOD.patch, FUNCTION.patch]
    module = importlib.import_module("prey.core")
    before = snapshot()
    vllm_moe_tune_plugin.register()
    helper, inner = kind(), module.function

    def foreign(value, tags=()):
        helper()
        return inner(value, tags)

    module.function = foreign
    vllm_moe_tune_plugin.unregister()
    assert module.function(7) == [7]
    assert inspect.getclosurevars(foreign).nonlocals["inner"] is before["prey.core.function"]
    module.function = before["prey.core.function"]
    assert_same(before, snapshot())


def test_a_namespace_that_refuses_is_reported_and_the_others_are_undone(session, logged):
    session.make += [FUNCTION.patch, METHOD.patch]
    module = importlib.import_module("prey.core")

    class Sealed(type):
        sealed = False

        def __setattr__(cls, name: str, value: object) -> None:
            if Sealed.sealed:
                raise TypeError("sealed")
            super().__setattr__(name, value)

    module.Class = Sealed("Class", (module.Base,), {"method": module.Class.method})
    stock = module.function
    vllm_moe_tune_plugin.register()
    Sealed.sealed = True
    vllm_moe_tune_plugin.unregister()
    assert "Class.method keeps a wrapper" in logged.text
    assert METHOD.calls() == [[7]]
    assert module.function is stock


def test_a_module_that_took_ours_by_name_gets_the_original(session, monkeypatch):
    """Two of ours are on it, and the module was imported between them and the end."""
    session.make += [FUNCTION.patch, FUNCTION.patch]
    stock = importlib.import_module("prey.core").function
    vllm_moe_tune_plugin.register()
    consumer = types.ModuleType("consumer")
    monkeypatch.setitem(sys.modules, "consumer", consumer)
    monkeypatch.setitem(sys.modules, "no module", object())
    exec("from prey.core import function as taken", vars(consumer))
    assert consumer.taken(7) == [7, "ours", "ours"]
    vllm_moe_tune_plugin.unregister()
    assert consumer.taken is stock


@pytest.mark.parametrize("target", [FUNCTION, METHOD], ids=lambda target: target.name)
def test_copies_and_pickles_go_by_name_as_those_of_functions_do(session, target):
    session.make.append(target.patch)
    importlib.import_module("prey.core")
    vllm_moe_tune_plugin.register()
    ours = vars(target.parent)[target.attribute]
    assert copy.copy(ours) is ours
    assert copy.deepcopy({"kept": ours})["kept"] is ours
    again = pickle.loads(pickle.dumps(ours))
    assert again == getattr(target.parent, target.attribute)
    vllm_moe_tune_plugin.unregister()
    assert pickle.loads(pickle.dumps(getattr(target.parent, target.attribute))) is vars(target.parent)[target.attribute]


def test_a_replacement_without_ours_in_it_is_left_alone(session):
    session.make.append(FUNCTION.patch)
    module = importlib.import_module("prey.core")
    vllm_moe_tune_plugin.register()
    module.function = foreign = lambda value: ["other", value]
    vllm_moe_tune_plugin.unregister()
    assert module.function is foreign


def test_a_name_that_a_module_makes_on_demand_is_gone_again(tmp_path, session):
    """``flashinfer/__init__.py`` gives some of its names by a module-level ``__getattr__``."""
    (tmp_path / "prey" / "__init__.py").write_text("from . import core\ndef __getattr__(name): return getattr(core, name)\n")
    importlib.invalidate_caches()
    session.make.append(ALIASED.patch)
    package = importlib.import_module("prey")
    vllm_moe_tune_plugin.register()
    assert package.function(7) == [7, "ours"]
    vllm_moe_tune_plugin.unregister()
    assert "function" not in vars(package)


# --- what goes wrong -------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    """Raised by a tuning's code."""


class StockError(Exception):
    """Raised by the wrapped function."""


def broken(*_: Any) -> Any:
    raise OwnError("ours")


VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("test_variable", default=None)
BROKEN = {
    "rewrite": Rewrite(broken),
    "replace": Replace(broken),
    "replace and learn": Replace(lambda *_: STOCK, learn=broken),
    "within": Within(VARIABLE, broken),
    "around": Around(broken),
    "observe": Observe(broken),
    "convert": Convert(broken),
}
WORKING = {
    "rewrite": Rewrite(lambda _, args, kwargs: (args, kwargs)),
    "replace": Replace(lambda *_: STOCK),
    "replace and learn": Replace(lambda *_: STOCK, learn=lambda *_: None),
    "within": Within(VARIABLE, lambda *_: 1),
    "around": Around(lambda *_: contextlib.nullcontext()),
    "observe": Observe(lambda *_: None),
    "convert": Convert(lambda result: result),
}


@pytest.mark.parametrize("advice", BROKEN)
def test_own_failure_at_run_time_makes_the_stock_call(session, logged, advice):
    session.make.extend([lambda: METHOD.patch(lambda _: BROKEN[advice]), FUNCTION.patch])
    vllm_moe_tune_plugin.register()
    module = importlib.import_module("prey.core")
    assert module.function(7) == [7, "ours"]
    assert [module.Class().method(7, tags=("a",)) for _ in range(3)] == [[7, "a"]] * 3
    errors = [record for record in logged.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].exc_info[0] is OwnError
    (record,) = plugin.records()
    assert record.state is State.FAILED
    assert record.reason == "OwnError: ours"
    assert record.patches[0].calls == 1
    assert record.patches[0].tuned == 0
    assert module.function(7) == [7], "the whole tuning stays stock"
    vllm_moe_tune_plugin.unregister()
    vllm_moe_tune_plugin.register()
    assert module.function(7) == [7, "ours"]


def test_a_failed_tuning_stays_stock_when_its_other_modules_arrive(session, tmp_path):
    """Some patches are still waiting for their module when another one's code fails."""
    session.make.append(lambda: METHOD.patch(lambda _: BROKEN["rewrite"]))
    session.make.append(lambda: Patch("prey.late:function", lambda _: WORKING["rewrite"]))
    (tmp_path / "prey" / "late.py").write_text(SOURCES["prey.core"])
    vllm_moe_tune_plugin.register()
    importlib.import_module("prey.core").Class().method(7)
    assert importlib.import_module("prey.late").function(7) == [7]
    late = session.own[1]
    assert not late.live
    assert late.calls == 0


@pytest.mark.parametrize("advice", [*WORKING, *(f"broken {name}" for name in BROKEN)])
def test_exceptions_of_the_wrapped_function_pass_unchanged(session, tmp_path, advice):
    is_broken = advice.startswith("broken ")
    session.make.append(lambda: FUNCTION.patch(lambda _: (BROKEN if is_broken else WORKING)[advice.removeprefix("broken ")]))
    module = importlib.import_module("prey.core")
    error, cause = StockError("stock"), ValueError("cause")
    seen_in_progress = []

    def function(value):
        seen_in_progress.append(sys.exc_info()[1])
        raise error from cause

    module.function = function
    vllm_moe_tune_plugin.register()
    with pytest.raises(StockError) as caught:
        module.function(7)
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__context__ is None
    assert seen_in_progress == [None]
    assert traceback.extract_tb(error.__traceback__)[-1].name == "function"
    (record,) = plugin.records()
    afterwards = ("broken observe", "broken convert", "broken replace and learn")
    assert record.state is (State.FAILED if is_broken and advice not in afterwards else State.APPLIED)


@pytest.mark.parametrize("base", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_failure_of_ours(session, base):
    def interrupted(*_):
        raise base

    session.make.append(lambda: FUNCTION.patch(lambda _: Rewrite(interrupted)))
    module = importlib.import_module("prey.core")
    vllm_moe_tune_plugin.register()
    with pytest.raises(base):
        module.function(7)
    assert plugin.records()[0].state is State.APPLIED


def test_a_hook_that_fails_does_not_break_the_import(session, logged):
    def decide(function):
        raise OwnError("while deciding")

    session.make.append(lambda: FUNCTION.patch(decide))
    vllm_moe_tune_plugin.register()
    module = importlib.import_module("prey.core")
    package = importlib.import_module("prey")
    assert module.function is package.function
    assert module.function(7) == [7]
    assert plugin.records()[0].state is State.FAILED
    assert "OwnError: while deciding" in logged.text


def test_a_stand_in_without_a_spec_does_not_break_an_import(session, monkeypatch):
    """Users put all kinds of objects into ``sys.modules``."""
    monkeypatch.setitem(sys.modules, "prey_stand_in", SimpleNamespace(__name__="prey_stand_in"))
    session.make.append(lambda: Patch("prey.core:function", lambda _: WORKING["rewrite"], needs=("prey_stand_in",)))
    vllm_moe_tune_plugin.register()
    assert importlib.import_module("prey.core").function(7) == [7]
    assert plugin.records(), "registered in spite of it"


def test_a_class_that_forbids_attributes_fails_and_leaves_nothing(session, tmp_path):
    (tmp_path / "prey" / "core.py").write_text(
        """
class Meta(type):
    def __setattr__(cls, name, value):
        raise TypeError("sealed")

class Class(metaclass=Meta):
    def method(self, value, tags=()):
        return [value, *tags]

def function(value, tags=()):
    return [value, *tags]
"""
    )
    session.make.append(METHOD.patch)
    vllm_moe_tune_plugin.register()
    module = importlib.import_module("prey.core")
    importlib.import_module("prey")
    assert module.Class().method(7) == [7]
    assert plugin.records()[0].state is State.FAILED
    assert "sealed" in plugin.records()[0].reason


def test_the_variable_is_reset_after_an_exception_and_nested_calls(session):
    seen = []

    def method(self, depth):
        seen.append(VARIABLE.get())
        if depth:
            try:
                self.method(depth - 1)
            except StockError:
                seen.append(VARIABLE.get())
                raise
        raise StockError

    session.make.append(lambda: METHOD.patch(lambda _: Within(VARIABLE, lambda _, args, kwargs: args[0])))
    module = importlib.import_module("prey.core")
    module.Class.method = method
    vllm_moe_tune_plugin.register()
    with pytest.raises(StockError):
        module.Class().method(2)
    assert seen == [2, 1, 0, 1, 2]
    assert VARIABLE.get() is None


def test_kwargs_of_the_caller_are_not_changed(session):
    def change(_, args, kwargs):
        kwargs["tags"] = ("ours",)
        return args, kwargs

    session.make.append(lambda: FUNCTION.patch(lambda _: Rewrite(change)))
    module = importlib.import_module("prey.core")
    vllm_moe_tune_plugin.register()
    kept = {"tags": ("mine",)}
    assert module.function(7, **kept) == [7, "ours"]
    assert functools.partial(module.function, **kept)(7) == [7, "ours"]
    assert kept == {"tags": ("mine",)}


def test_a_verdict_wraps_nothing(session):
    session.make.append(lambda: FUNCTION.patch(lambda _: native("upstream has it")))
    importlib.import_module("prey")
    before = snapshot()
    vllm_moe_tune_plugin.register()
    assert_same(before, snapshot())
    (record,) = plugin.records()
    assert (record.state, record.reason) == (State.NATIVE, "upstream has it")


# --- threads ---------------------------------------------------------------------------------------------------------------


def test_two_modules_that_arrive_at_once_apply_the_patch_once(session):
    """Each import runs its hook in its own thread, and both find that all is there."""
    both = threading.Barrier(2)

    def decide(function):
        with contextlib.suppress(threading.BrokenBarrierError):  # the other thread waits for us: just what is wanted
            both.wait(timeout=0.5)
        return Rewrite(lambda _, args, kwargs: (args, tag(kwargs, "ours")))

    patch = FUNCTION.patch(decide)
    module = importlib.import_module("prey.core")
    threads = [threading.Thread(target=patch.attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert module.function(7) == [7, "ours"]
    assert patch.undo()
    assert not fake_stack.is_wrapper(module.function)


def test_nothing_is_applied_after_undo(session):
    """Another thread may be about to: it saw the module arrive before the plugin was unregistered."""
    session.make.append(
        lambda: Patch("prey.core:function", lambda _: Rewrite(lambda _, args, kwargs: (args, tag(kwargs, "ours"))))
    )
    vllm_moe_tune_plugin.register()
    (patch,) = session.own
    importing, go_on = threading.Event(), threading.Event()
    attempt = patch.attempt

    def late():
        importing.set()
        go_on.wait(10)
        attempt()

    patch.attempt = late
    thread = threading.Thread(target=importlib.import_module, args=("prey",))
    thread.start()
    importing.wait(10)
    vllm_moe_tune_plugin.unregister()
    go_on.set()
    thread.join()
    assert FUNCTION.calls() == [[7]]
    assert not fake_stack.is_wrapper(importlib.import_module("prey.core").function)


def test_a_module_imported_while_register_runs_is_patched(session, monkeypatch):
    """By another thread, after register() looked whether it is there and before it watched the imports."""
    session.make.append(FUNCTION.patch)
    start = patching.ImportWatch.start

    def start_late(*args):
        importlib.import_module("prey")
        return start(*args)

    monkeypatch.setattr(patching.ImportWatch, "start", start_late)
    vllm_moe_tune_plugin.register()
    assert FUNCTION.calls() == [[7, "ours"]]


def test_register_during_the_import_of_a_target(session, tmp_path):
    """A module may be half imported when vLLM loads its plugins."""
    core = tmp_path / "prey" / "core.py"
    core.write_text(f"import vllm_moe_tune_plugin\nvllm_moe_tune_plugin.register()\n{core.read_text()}")
    session.make.append(FUNCTION.patch)
    importlib.import_module("prey")
    deadline = time.monotonic() + 10
    while FUNCTION.calls() != [[7, "ours"]] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert FUNCTION.calls() == [[7, "ours"]]
