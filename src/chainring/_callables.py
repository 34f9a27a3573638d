"""What a callable carries with it, in each form that Python has: the only module that takes callables apart."""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

_LIBRARIES = ("chainring.", "torch.")
_LIKE_USER = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")  # in torch, but their state is for the script to save


class Reference(NamedTuple):
    """Something to which a callable refers, with a name that is the same in every process."""

    kind: str  # "function", "object", "argument", "default", "variable" or "attribute"
    name: str
    value: Any


def is_taken_apart(value: Any) -> bool:
    """Return whether `references` knows this form of a callable; an object with ``__call__`` is taken by its attributes."""
    return isinstance(value, (FunctionType, MethodType, functools.partial, functools.partialmethod, BuiltinMethodType)) or (
        isinstance(value, (staticmethod, classmethod)) or (callable(value) and hasattr(value, "__wrapped__"))
    )


def references(function: Any) -> Iterator[Reference]:
    """Yield everything to which a callable refers directly.

    A partial has its function and its arguments; a bound method its object and its function; a function of the script the
    outer variables, the globals and the defaults that it uses, its attributes and the function that it decorates.
    """
    if isinstance(function, (functools.partial, functools.partialmethod)):
        yield Reference("function", "", function.func)
        for key, item in [*enumerate(function.args), *function.keywords.items()]:
            yield Reference("argument", str(key), item)
    elif isinstance(function, (MethodType, BuiltinMethodType)):
        if not isinstance(function.__self__, (ModuleType, type, type(None))):
            yield Reference("object", "self", function.__self__)
        if isinstance(function, MethodType):
            yield Reference("function", "", function.__func__)
    elif isinstance(function, FunctionType):
        if defined_by(function) == "user":
            yield from _references_of_function(function)
    elif hasattr(function, "__wrapped__"):  # a static or class method, a cached function, an object that decorates
        yield Reference("function", "", function.__wrapped__)


def _references_of_function(function: FunctionType) -> Iterator[Reference]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # of a variable that is not set yet
            yield Reference("variable", name, cell.cell_contents)
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield Reference("variable", name, function.__globals__[name])
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    by_name = zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    for name, item in [*by_name, *(function.__kwdefaults__ or {}).items()]:
        yield Reference("default", name, item)
    for name, item in vars(function).items():
        yield Reference("function" if name == "__wrapped__" else "attribute", "" if name == "__wrapped__" else name, item)


@functools.lru_cache(1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that code reads, the functions and comprehensions inside of it included."""
    names = [row.argval for row in dis.get_instructions(code) if row.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(dict.fromkeys([*names, *(name for names in inner for name in names)]))


def defined_by(definition: Any) -> str:
    """Return who defines a class or function: ``"library"`` (Chainring, PyTorch, Python), ``"foreign"``, or ``"user"``."""
    return origin_of_module(str(definition.__module__))


@functools.cache
def origin_of_module(name: str) -> str:
    """Return who defines what a module of this name has, as `defined_by` says it."""
    if f"{name}.".startswith(_LIKE_USER):
        return "user"
    if f"{name}.".startswith(_LIBRARIES) or name.partition(".")[0] in sys.stdlib_module_names:
        return "library"
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "foreign" if re.search(r"[/\\](site|dist)-packages[/\\]", file) else "user"
