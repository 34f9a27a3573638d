"""The state that the objects of a program keep in attributes and closures, saved or not.

That of the killed run beside that of the resumed one names what was not put back. It only explains a difference and
decides nothing: a cache may well be empty after a resume.
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
from chainring.testing._fingerprint import checksum, describe

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LIBRARIES = ("chainring", "torch.nn", "torch.utils.data")  # their own attributes are saved or are settings
_MAX_DEPTH, _MAX_OBJECTS, _MAX_ITEMS, _MAX_ELEMENTS = 8, 20_000, 100, 2**22


def unsaved_state(trainer: Trainer, stop_trigger: Any) -> dict[str, str]:
    """Return the state in memory by a path that a reader understands, such as ``model 'main'.calls``."""
    walk = _Walk()
    for name, model in trainer.updater.get_all_models().items():
        walk.visit(f"model {name!r}", unwrap(model), 0)
    for name, iterator in trainer.updater.get_all_iterators().items():
        walk.visit(f"iterator {name!r}", iterator, 0)
    walk.visit("updater", trainer.updater, 0)
    for entry in trainer.entries:
        walk.visit(f"extension {entry.name!r}", entry.extension, 0)
        walk.visit(f"trigger of {entry.name!r}", entry.trigger, 0)
    walk.visit("stop trigger", stop_trigger, 0)
    return walk.found


class _Walk:
    """A walk through objects, each once, that records plain values, arrays and random generators."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._visited: dict[int, Any] = {}  # kept alive, so that no id is given out twice

    def visit(self, path: str, value: Any, depth: int, is_library: bool = False) -> None:
        """Record a value and whatever it refers to; of a library's own attribute only user objects inside it."""
        if isinstance(value, (*_PLAIN, Tensor, np.ndarray)):
            is_large = isinstance(value, (Tensor, np.ndarray)) and np.prod(value.shape) > _MAX_ELEMENTS
            if not (is_library or is_large):
                self.found[path] = describe(value)
            return
        if id(value) in self._visited or depth > _MAX_DEPTH or len(self._visited) > _MAX_OBJECTS:
            return
        self._visited[id(value)] = value
        if isinstance(value, _GENERATORS):
            self.found[path] = f"a {type(value).__name__} in state {checksum(_state_of(value))}"
        elif isinstance(value, dict):
            self._visit_items(path, list(value.items()), depth, is_library)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            self._visit_items(path, list(enumerate(value)), depth, is_library)
        elif not isinstance(value, (type, ModuleType, torch.optim.Optimizer)):
            self._visit_object(path, value, depth)

    def _visit_items(self, path: str, items: list[tuple[Any, Any]], depth: int, is_library: bool) -> None:
        if not is_library:
            self.found[f"{path}, length"] = str(len(items))
        for key, item in items[:_MAX_ITEMS]:
            self.visit(f"{path}[{key!r}]" if isinstance(key, _PLAIN) else path, item, depth + 1, is_library)

    def _visit_object(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._visit_function(path, value, depth)
        elif isinstance(value, MethodType):
            self.visit(path, value.__self__, depth + 1)
            self._visit_function(path, value.__func__, depth)
        elif isinstance(value, functools.partial):
            self._visit_items(path, [(0, value.func), (1, value.args), (2, value.keywords)], depth, True)
        elif not isinstance(value, BuiltinMethodType):
            self._visit_attributes(path, value, depth)

    def _visit_function(self, path: str, function: Any, depth: int) -> None:
        if function.__module__ is None or _is_of_library(function.__module__):
            return
        for name, value in _variables_of(function):
            self.visit(f"{path}, variable {name!r}", value, depth + 1)
        for name, value in vars(function).items():
            self.visit(f"{path}.{name}", value, depth + 1)

    def _visit_attributes(self, path: str, value: Any, depth: int) -> None:
        cls = type(value)
        if cls.__module__.partition(".")[0] in sys.stdlib_module_names:
            return
        is_module = isinstance(value, nn.Module)
        saved = {"_parameters", "_buffers", "_modules"} if is_module else set()
        library_names = _library_attributes(cls)
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if name not in saved:
                self.visit(f"{path}.{name}", item, depth + 1, name in library_names or _is_library_class(cls))
        if is_module:
            for name in sorted(value._non_persistent_buffers_set):
                self.visit(f"{path}.{name} (a buffer with persistent=False)", value._buffers[name], depth + 1)
            for name, child in value._modules.items():
                self.visit(f"{path}.{name}", child, depth + 1)
        if not _is_library_class(cls):
            self._visit_class(path, cls, depth)

    def _visit_class(self, path: str, cls: type, depth: int) -> None:
        """Record the variables that the methods of a user's class use, and its class attributes."""
        for base in cls.__mro__:
            if _is_of_library(base.__module__) or id(base) in self._visited:
                continue
            self._visited[id(base)] = base
            for name, item in vars(base).items():
                if isinstance(item, FunctionType):
                    self._visit_function(path, item, depth)
                elif not name.startswith("__") and isinstance(item, (*_PLAIN, *_GENERATORS)):
                    self.visit(f"{path}, class attribute {base.__name__}.{name}", item, depth + 1)


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of an enclosing function and of the module that a function uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if hasattr(cell, "cell_contents"):
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in {*sys.stdlib_module_names, "chainring", "torch", "numpy"}


def _is_library_class(cls: type) -> bool:
    return any(f"{cls.__module__}.".startswith(f"{name}.") for name in _LIBRARIES)


def _library_attributes(cls: type) -> set[str]:
    """Return the names that the methods of a class's library bases mention: the attributes that it has from there."""
    methods = [method for base in cls.__mro__ if _is_library_class(base) for method in vars(base).values()]
    return {name for method in methods if isinstance(method, FunctionType) for name in method.__code__.co_names}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
