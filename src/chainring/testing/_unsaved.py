"""What the objects of a program remember in attributes and closures, saved or not: where the cause of a difference is found.

The memory of the killed run beside that of the resumed one names what was not put back. It decides nothing: a cache may
well be empty after a resume.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from chainring._naming import unwrap
from chainring.testing._fingerprint import checksum, text

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_QUIET = ("chainring", "torch.nn", "torch.utils.data")  # their own attributes are saved or are settings
_DEEP, _MANY, _ITEMS, _ELEMENTS = 8, 20_000, 100, 2**22


def memory(trainer: Trainer, stop_trigger: Any) -> dict[str, str]:
    """By a path that a reader understands, such as ``model 'main'.calls``, what stands there."""
    walk = _Walk()
    for name, model in trainer.updater.get_all_models().items():
        walk.visit(f"model {name!r}", unwrap(model), 0)
    for name, source in trainer.updater.get_all_iterators().items():
        walk.visit(f"iterator {name!r}", source, 0)
    walk.visit("updater", trainer.updater, 0)
    for entry in trainer.entries:
        walk.visit(f"extension {entry.name!r}", entry.extension, 0)
        walk.visit(f"trigger of {entry.name!r}", entry.trigger, 0)
    walk.visit("stop trigger", stop_trigger, 0)
    return walk.found


class _Walk:
    """Goes through objects, each once, and takes down what is plain, an array, or a random generator."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # kept, so that no id is given twice

    def visit(self, path: str, value: Any, depth: int, quiet: bool = False) -> None:
        if isinstance(value, (*_PLAIN, Tensor, np.ndarray)):
            if not quiet:
                self._leaf(path, value)
            return
        if id(value) in self._seen or depth > _DEEP or len(self._seen) > _MANY:
            return
        self._seen[id(value)] = value
        if isinstance(value, _GENERATORS):
            self.found[path] = f"a {type(value).__name__} in state {checksum(_state(value))}"
        elif isinstance(value, dict):
            self._items(path, list(value.items()), depth, quiet)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            self._items(path, list(enumerate(value)), depth, quiet)
        elif not isinstance(value, (type, ModuleType, torch.optim.Optimizer)):
            self._object(path, value, depth)

    def _leaf(self, path: str, value: Any) -> None:
        if not isinstance(value, (Tensor, np.ndarray)) or np.prod(value.shape) <= _ELEMENTS:
            self.found[path] = text(value)

    def _items(self, path: str, items: list[tuple[Any, Any]], depth: int, quiet: bool) -> None:
        if not quiet:
            self.found[f"{path}, length"] = str(len(items))
        for key, item in items[:_ITEMS]:
            self.visit(f"{path}[{key!r}]" if isinstance(key, _PLAIN) else path, item, depth + 1, quiet)

    def _object(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._function(path, value, depth)
        elif isinstance(value, MethodType):
            self.visit(path, value.__self__, depth + 1)
            self._function(path, value.__func__, depth)
        elif isinstance(value, functools.partial):
            self._items(path, [(0, value.func), (1, value.args), (2, value.keywords)], depth, True)
        elif not isinstance(value, BuiltinMethodType):
            self._attributes(path, value, depth)

    def _function(self, path: str, function: Any, depth: int) -> None:
        if function.__module__ is None or _is_of_library(function.__module__):
            return
        for name, cell in _variables(function):
            self.visit(f"{path}, variable {name!r}", cell, depth + 1)
        for name, value in vars(function).items():
            self.visit(f"{path}.{name}", value, depth + 1)

    def _attributes(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
            return
        is_module = isinstance(value, nn.Module)
        saved = {"_parameters", "_buffers", "_modules"} if is_module else set()
        quiet = _names_of_libraries(kind)
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if name not in saved:
                self.visit(f"{path}.{name}", item, depth + 1, name in quiet or _is_quiet(kind))
        if is_module:
            for name in sorted(value._non_persistent_buffers_set):
                self.visit(f"{path}.{name} (a buffer with persistent=False)", value._buffers[name], depth + 1)
            for name, part in value._modules.items():
                self.visit(f"{path}.{name}", part, depth + 1)
        if not _is_quiet(kind):
            self._class(path, kind, depth)

    def _class(self, path: str, kind: type, depth: int) -> None:
        """What the methods of the user's classes use beside the object, and what the classes themselves remember."""
        for base in kind.__mro__:
            if _is_of_library(base.__module__) or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            for name, item in vars(base).items():
                if isinstance(item, FunctionType):
                    self._function(path, item, depth)
                elif not name.startswith("__") and isinstance(item, (*_PLAIN, *_GENERATORS)):
                    self.visit(f"{path}, class attribute {base.__name__}.{name}", item, depth + 1)


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function uses from around it: of an enclosing function, and of its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if hasattr(cell, "cell_contents"):
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in {*sys.stdlib_module_names, "chainring", "torch", "numpy"}


def _is_quiet(kind: type) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{name}.") for name in _QUIET)


def _names_of_libraries(kind: type) -> set[str]:
    """The attributes that a class has from a library, as far as the library's methods name them."""
    methods = [method for base in kind.__mro__ if _is_quiet(base) for method in vars(base).values()]
    return {name for method in methods if isinstance(method, FunctionType) for name in method.__code__.co_names}


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
