"""Fingerprints of a trainer after an iteration, texts that differ where the bits differ, and its unsaved state.

Nothing is serialized for them, so that the observed run does exactly what it does without an observer.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from chainring import _random
from chainring._naming import unwrap
from chainring.reporting.summary import is_scalar
from chainring.training.updaters.base import parameter_names

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer
    from chainring.training.updaters.callbacks import UpdateContext

Fingerprint = dict[str, dict[str, str]]
"""By category (``"parameters"``), the text of each value by its path."""

_COUNTERS = ("progress", "epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")
_SHORT = 4  # elements up to which a tensor is written out


class BatchRecorder:
    """The descriptions of the batches that an updater converted: a callback for ``batch_on_finish``."""

    def __init__(self) -> None:
        self._batches: list[dict[str, str]] = []

    def __call__(self, context: UpdateContext) -> None:
        self._batches.append({path: describe(leaf) for path, leaf in leaves("", context.batch)})

    def pop(self) -> dict[str, str]:
        """Return the batches since the last call, and forget them."""
        batches, self._batches = self._batches, []
        return {f"batch {index}{path}": text for index, batch in enumerate(batches) for path, text in batch.items()}


def fingerprint(trainer: Trainer, batches: BatchRecorder | None) -> Fingerprint:
    """Return the fingerprint of a trainer's present state, observation and batches."""
    found: Fingerprint = {"iterator": {}, "batch": {} if batches is None else batches.pop(), "observation": {}}
    for name, iterator in trainer.updater.get_all_iterators().items():
        for counter in _COUNTERS:
            found["iterator"][f"updater/iterator:{name}/{counter}"] = repr(getattr(iterator, counter, None))
    for key, value in trainer.observation.items():
        if is_scalar(value):
            found["observation"][f"observation/{key}"] = describe(float(value))
    prefix = f"generators/{trainer.comm.rank}"
    found["generators"] = {f"{prefix}/{name}": checksum(state) for name, state in _random.get_rng_state().items()}
    return found | _of_models(trainer) | {"optimizer": dict(_of_optimizers(trainer))}


def _of_models(trainer: Trainer) -> Fingerprint:
    found: Fingerprint = {"parameters": {}, "buffers": {}}
    for name, model in trainer.updater.get_all_models().items():
        module = unwrap(model)
        parameters = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        for path, value in module.state_dict().items():
            category = "parameters" if path in parameters else "buffers"
            for leaf_path, leaf in leaves(f"updater/model:{name}/{path.replace('.', '/')}", value):
                found[category][leaf_path] = describe(leaf)
    return found


def _of_optimizers(trainer: Trainer) -> Iterator[tuple[str, str]]:
    names = parameter_names(trainer.updater.get_all_models())
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        prefix = f"updater/optimizer:{name}"
        for parameter, state in optimizer.state.items():
            for path, leaf in leaves(f"{prefix}/state/{names.get(id(parameter), 'parameter')}", state):
                yield path, describe(leaf)
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for path, leaf in leaves(f"{prefix}/param_groups/{index}", settings):
                yield path, describe(leaf)


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value in nested containers that is not a container itself, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(f"{path}/{index}", item)
    elif isinstance(value, (set, frozenset)):
        yield from leaves(path, sorted(value, key=repr))
    else:
        yield path, value


def describe(value: Any) -> str:
    """Return a plain value as Python writes it, a large array as dtype, shape and CRC-32, anything else as its class."""
    value = _as_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.tolist()
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_meta:
            return f"{dtype} {tuple(value.shape)} without data"
        if value.numel() <= _SHORT and not value.is_complex():
            return f"{dtype} {value.tolist()}"
        return f"{dtype} {tuple(value.shape)} of CRC {zlib.crc32(_bytes_of(value).numpy().data):08x}"
    if isinstance(value, (bool, int, float, complex, str, bytes, list, type(None), np.generic)):
        return repr(value)
    return type(value).__name__


def checksum(value: Any) -> str:
    """Return one CRC-32 of everything in nested containers."""
    return f"{zlib.crc32(repr([(path, describe(leaf)) for path, leaf in leaves('', value)]).encode()):08x}"


def difference(one: Any, other: Any) -> str | None:
    """Return how two values differ, ``None`` where they are the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    texts = f"{describe(one)} -> {describe(other)}"
    same_class = type(one) is type(other)
    one, other = _as_tensor(one), _as_tensor(other)
    if not (same_class and isinstance(one, Tensor)):
        return None if same_class and describe(one) == describe(other) else texts
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return texts
    if torch.equal(_bytes_of(one), _bytes_of(other)):
        return None
    if one.numel() == 1:
        return texts
    distances = (_in_double(one) - _in_double(other)).abs()
    largest = distances.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    if largest == 0:
        return "the same numbers in other bits, such as -0.0 for 0.0"
    return f"by at most {largest:.3g}, in {int((distances != 0).sum())} of {distances.numel()} elements"


def _as_tensor(value: Any) -> Any:
    """Return a numeric array as a tensor, and anything else as it is."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.from_numpy(value.copy()) if is_numeric else value


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 in one dimension."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def _in_double(tensor: Tensor) -> Tensor:
    """Return the elements in double precision, real or complex, in one dimension."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().cpu().to(dtype).reshape(-1)


# --- unsaved state ---

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LIBRARIES = ("chainring", "torch.nn", "torch.utils.data")  # their own attributes are saved or are settings
_MAX_DEPTH, _MAX_OBJECTS, _MAX_ITEMS, _MAX_ELEMENTS = 8, 20_000, 100, 2**22


def unsaved_state(trainer: Trainer, stop_trigger: Any) -> dict[str, str]:
    """Return the attributes and variables of a program, saved or not, by a path such as ``model 'main'.calls``.

    Those of the killed run beside those of the resumed one name what was not restored. They only explain a difference and
    decide nothing: a cache may well be empty after a resume.
    """
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
