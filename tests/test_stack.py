"""What is installed: found without importing it; arguments read and put; states summed up."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import fake_stack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from vllm_moe_tune_plugin import stack
from vllm_moe_tune_plugin.ledger import PatchRecord, State, TuningRecord, sum_up
from vllm_moe_tune_plugin.stack import Argument

# --- Argument --------------------------------------------------------------------------------------------------------------

WANTED = "wanted"


@st.composite
def functions(draw) -> Any:
    """A function with ``wanted`` somewhere in its signature, which returns what each parameter got; and one call of it."""
    before = draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, max_size=3))
    after = draw(st.lists(st.sampled_from(["d", "e", "f"]), unique=True, max_size=3))
    is_method = draw(st.booleans())
    names = [*before, WANTED, *after]
    first_default = draw(st.integers(0, len(names)))
    star = draw(st.integers(0, len(names)))  # parameters from here on are keyword-only
    keyword_defaults = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    parts = ["self"] if is_method else []
    has_default = []
    for index, name in enumerate(names):
        if index == star:
            parts.append("*")
        default = keyword_defaults[index] if index >= star else index >= first_default
        has_default.append(default)
        parts.append(f"{name}='default {name}'" if default else name)
    scope: dict[str, Any] = {}
    source = f"def function({', '.join(parts)}): return {{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    exec(source, scope)

    positional = draw(st.integers(0, star))
    args = tuple(f"given {name}" for name in names[:positional])
    kwargs = {}
    for index, name in list(enumerate(names))[positional:]:
        if not has_default[index] or draw(st.booleans()):
            kwargs[name] = f"given {name}"
    return scope["function"], is_method, args, kwargs


def call(function: Any, is_method: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return function(*([None] if is_method else []), *args, **kwargs)


@given(functions())
def test_argument_is_read_as_the_function_gets_it(case):
    function, is_method, args, kwargs = case
    assert Argument(function, WANTED).get(args, kwargs) == call(function, is_method, args, kwargs)[WANTED]


@given(functions())
def test_argument_is_put_and_nothing_else_changes(case):
    function, is_method, args, kwargs = case
    before = call(function, is_method, args, kwargs)
    argument = Argument(function, WANTED)
    put_args, put_kwargs = argument.put(args, dict(kwargs), "put")
    assert call(function, is_method, put_args, put_kwargs) == {**before, WANTED: "put"}
    assert argument.get(put_args, put_kwargs) == "put"


@given(functions(), st.sampled_from(["other", "self", "args", ""]))
def test_argument_that_is_not_there(case, name):
    function, is_method, *_ = case
    if name == "self" and is_method:
        name = "other"
    with pytest.raises(LookupError, match=name or "no parameter"):
        Argument(function, name)


@pytest.mark.parametrize("function", [lambda: None, lambda *args, **kwargs: None])
def test_argument_of_a_function_without_parameters(function):
    with pytest.raises(LookupError):
        Argument(function, WANTED)


def test_argument_behind_a_variable_number_of_others():
    def function(first, *rest, wanted=0):
        return wanted

    argument = Argument(function, WANTED)
    assert argument.get((1, 2, 3), {}) == 0
    assert argument.put((1, 2, 3), {}, 5) == ((1, 2, 3), {WANTED: 5})


# --- the ledger ------------------------------------------------------------------------------------------------------------

states = st.lists(st.sampled_from(State), min_size=1, max_size=8)


@given(states)
def test_a_tuning_sums_up_its_patches(values):
    total = sum_up(values)
    assert total in values
    for state in (State.FAILED, State.APPLIED, State.PENDING, State.NATIVE, State.UNSUPPORTED):
        if state in values:
            assert total is state
            break
    else:
        assert set(values) == {total} == {State.DISABLED}


@given(states, st.randoms())
def test_the_order_of_patches_does_not_matter(values, random):
    shuffled = random.sample(values, len(values))
    assert sum_up(shuffled) is sum_up(values)


@given(st.lists(st.tuples(st.sampled_from(State), st.sampled_from(["", "one", "two"]), st.booleans()), min_size=1, max_size=6))
def test_reasons_are_those_of_the_telling_patches(rows):
    rows.append((State.NATIVE, "main", False))
    patches = tuple(
        PatchRecord(f"m:{index}", state, reason, tuned=index, serves=serves)
        for index, (state, reason, serves) in enumerate(rows)
    )
    record = TuningRecord("name", patches)
    telling = [(state, reason) for state, reason, serves in rows if not serves or state is State.FAILED]
    assert record.state is sum_up(state for state, _ in telling)
    reasons = [part for part in record.reason.split("; ") if part]
    assert len(set(reasons)) == len(reasons)
    assert set(reasons) == {reason for state, reason in telling if state is record.state and reason}
    as_json = record.as_json()
    assert as_json["state"] == record.state.value
    assert as_json["tuned"] == sum(range(len(rows)))
    assert [patch["target"] for patch in as_json["patches"]] == [patch.target for patch in patches]


# --- what is on disk -------------------------------------------------------------------------------------------------------


def test_modules_are_found_without_being_imported(install):
    install()
    module = f"{fake_stack.EXPERTS}.trtllm_fp8_moe"
    assert stack.exists(module)
    code = stack.module_code(module)
    assert code is not None
    assert "trtllm_fp8_block_scale_routed_moe" in stack.names_in(code)
    assert [name for name, _ in stack.functions_in(code)] == ["TrtLlmFp8ExpertsModular.apply"]
    assert not [name for name in sys.modules if name.partition(".")[0] in ("vllm", "flashinfer")]


@pytest.mark.parametrize("module", ["vllm.gone", "vllm.config.gone", "vllm.utils.gone.deeper", "no_such_package_at_all.x", ""])
def test_modules_that_do_not_exist(install, module):
    install()
    assert not stack.exists(module)
    assert stack.module_code(module) is None


def test_a_module_that_lives_in_memory_only_exists(install, monkeypatch):
    install()
    monkeypatch.setitem(sys.modules, "vllm.made_up", type(sys)("vllm.made_up"))
    assert stack.exists("vllm.made_up")


def test_first_existing(install):
    install()
    assert stack.first_existing("vllm.gone:a", "vllm.config:a", "vllm.utils:a") == "vllm.config:a"
    assert stack.first_existing("vllm.gone:a", "vllm.gone_too:a") == "vllm.gone_too:a"


def test_versions_come_from_the_metadata(install):
    install(flashinfer="0.6.14")
    assert stack.installed("flashinfer-python") == Version("0.6.14")
    assert stack.installed("vllm") == Version("0.28.0")
    assert stack.installed("no-such-distribution-at-all") is None


def test_names_of_nested_functions_and_of_keywords():
    def outer(hidden):
        def inner():
            return hidden.attribute(keyword=1)

        return inner

    assert {"attribute", "keyword"} <= stack.function_names(outer)
    assert stack.function_names(len) == frozenset()


def test_class_names_end_at_the_module(install):
    install()
    module = importlib.import_module(f"{fake_stack.EXPERTS}.trtllm_mxfp4_moe")
    assert "max_capture_size" in stack.class_names(module.TrtLlmMxfp4ExpertsModular), "a base of the same module counts"
    elsewhere = type("Elsewhere", (module.TrtLlmMxfp4ExpertsModular,), {"method": lambda self: self.own_name})
    assert "max_capture_size" not in stack.class_names(elsewhere)
    assert "own_name" in stack.class_names(elsewhere)
    assert inspect.isclass(elsewhere)
