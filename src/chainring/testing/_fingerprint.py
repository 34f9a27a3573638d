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
from collections.abc import Iterable, Iterator, Mapping
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

Fingerprint = dict[str, dict[str, str]]
"""By category (``"parameters"``), the text of each value by its path."""

_COUNTERS = ("progress", "epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")
_MAX_WRITTEN = 4  # elements up to which a tensor is written out


def fingerprint(trainer: Trainer, batches: Iterable[Mapping[str, str]] = ()) -> Fingerprint:
    """Return the fingerprint of a trainer's present state and observation, and of described batches."""
    generators, observation = _random.get_rng_state(), trainer.observation
    found: Fingerprint = {
        "iterator": {},
        "batch": {path: text for batch in batches for path, text in batch.items()},
        "observation": {f"observation/{k}": describe(float(v)) for k, v in observation.items() if is_scalar(v)},
        "generators": {f"generators/{trainer.comm.rank}/{name}": checksum(state) for name, state in generators.items()},
        "parameters": {},
        "buffers": {},
        "optimizer": {},
    }
    for name, iterator in trainer.updater.get_all_iterators().items():
        for counter in _COUNTERS:
            found["iterator"][f"updater/iterator:{name}/{counter}"] = repr(getattr(iterator, counter, None))
    models = trainer.updater.get_all_models()
    for name, model in models.items():
        module = unwrap(model)
        parameters = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        for path, value in module.state_dict().items():
            category = "parameters" if path in parameters else "buffers"
            found[category] |= describe_leaves(f"updater/model:{name}/{path.replace('.', '/')}", value)
    names = parameter_names(models)
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        prefix = f"updater/optimizer:{name}"
        for parameter, state in optimizer.state.items():
            path = f"{prefix}/state/{names.get(id(parameter), 'parameter')}"
            found["optimizer"] |= describe_leaves(path, state)
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found["optimizer"] |= describe_leaves(f"{prefix}/param_groups/{index}", settings)
    return found


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


def describe_leaves(path: str, value: Any) -> dict[str, str]:
    """Return the descriptions of all values in nested containers by path."""
    return {leaf_path: describe(leaf) for leaf_path, leaf in leaves(path, value)}


def describe(value: Any) -> str:
    """Return a plain value as Python writes it, a large array as dtype, shape and CRC-32, anything else as its class."""
    value = _as_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.tolist()
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_meta:
            return f"{dtype} {tuple(value.shape)} without data"
        if value.numel() <= _MAX_WRITTEN and not value.is_complex():
            return f"{dtype} {value.tolist()}"
        return f"{dtype} {tuple(value.shape)} of CRC {zlib.crc32(_bytes_of(value).numpy().data):08x}"
    if isinstance(value, (bool, int, float, complex, str, bytes, list, type(None), np.generic)):
        return repr(value)
    return type(value).__name__


def checksum(value: Any) -> str:
    """Return one CRC-32 of everything in nested containers."""
    return f"{zlib.crc32(repr(describe_leaves('', value)).encode()):08x}"


def difference(one: Any, other: Any) -> str | None:
    """Return how two values differ, ``None`` where they are the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    texts = f"{describe(one)} -> {describe(other)}"
    same_class = type(one) is type(other)
    one, other = _as_tensor(one), _as_tensor(other)
    if not (same_class and isinstance(one, Tensor)):
        return None if same_class and describe(one) == describe(other) else texts
    is_comparable = (one.dtype, one.shape) == (other.dtype, other.shape)
    if is_comparable and torch.equal(_bytes_of(one), _bytes_of(other)):
        return None
    if not is_comparable or one.numel() == 1:
        return texts
    dtype = torch.complex128 if one.is_complex() else torch.float64
    distances = (one.detach().cpu().to(dtype) - other.detach().cpu().to(dtype)).abs()
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


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_ARRAYS = (Tensor, np.ndarray)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_NOT_WALKED = (type, ModuleType, BuiltinMethodType, torch.optim.Optimizer)
_COMMON = frozenset({*sys.stdlib_module_names, "chainring", "torch", "numpy"})
_LIBRARIES = ("chainring.", "torch.nn.", "torch.utils.data.")  # their own attributes are saved or are settings
_MAX_DEPTH, _MAX_OBJECTS, _MAX_ITEMS, _MAX_ELEMENTS = 8, 20_000, 100, 2**22

_References = Iterator[tuple[str, Any, bool]]
"""The objects that one refers to: the path, the object, and whether the reference belongs to a library."""


def unsaved_state(trainer: Trainer, stop_trigger: Any) -> dict[str, str]:
    """Return the attributes and variables of a program, saved or not, which only explain a difference, by path."""
    walk = _Walk()
    for name, model in trainer.updater.get_all_models().items():
        walk.visit(f"model {name!r}", unwrap(model))
    for name, iterator in trainer.updater.get_all_iterators().items():
        walk.visit(f"iterator {name!r}", iterator)
    walk.visit("updater", trainer.updater)
    for entry in trainer.entries:
        walk.visit(f"extension {entry.name!r}", entry.extension)
        walk.visit(f"trigger of {entry.name!r}", entry.trigger)
    walk.visit("stop trigger", stop_trigger)
    return walk.found


class _Walk:
    """A walk through objects, each once, that records plain values, arrays and random generators."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._visited: dict[int, Any] = {}  # kept alive, so that no id is given out twice

    def visit(self, path: str, value: Any, depth: int = 0, is_library: bool = False) -> None:
        """Record a value and whatever it refers to; of a library's own attribute only user objects inside it."""
        if isinstance(value, _PLAIN + _ARRAYS):
            is_large = isinstance(value, _ARRAYS) and np.prod(value.shape) > _MAX_ELEMENTS
            if not (is_library or is_large):
                self.found[path] = describe(value)
            return
        if id(value) in self._visited or depth > _MAX_DEPTH or len(self._visited) > _MAX_OBJECTS:
            return
        self._visited[id(value)] = value
        if isinstance(value, _GENERATORS):
            self.found[path] = f"a {type(value).__name__} in state {checksum(_state_of(value))}"
            return
        if isinstance(value, _CONTAINERS) and not is_library:
            self.found[f"{path}, length"] = str(len(value))
        for child_path, child, is_library_reference in self._references(path, value, is_library):
            self.visit(child_path, child, depth + 1, is_library_reference)

    def _references(self, path: str, value: Any, is_library: bool) -> _References:
        if isinstance(value, _CONTAINERS):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in [*items][:_MAX_ITEMS]:
                yield (f"{path}[{key!r}]" if isinstance(key, _PLAIN) else path), item, is_library
        elif isinstance(value, FunctionType):
            yield from _of_function(path, value)
        elif isinstance(value, MethodType):
            yield path, value.__self__, False
            yield from _of_function(path, value.__func__)
        elif isinstance(value, functools.partial):
            for index, item in enumerate((value.func, value.args, value.keywords)):
                yield f"{path}[{index}]", item, True
        elif not isinstance(value, _NOT_WALKED) and _package(type(value)) not in sys.stdlib_module_names:
            yield from _of_attributes(path, value)
            if not _is_of_library(type(value)):
                yield from self._of_class(path, type(value))

    def _of_class(self, path: str, cls: type) -> _References:
        """Yield the variables that the methods of a user's class use, and its class attributes."""
        for base in cls.__mro__:
            if _package(base) in _COMMON or id(base) in self._visited:
                continue
            self._visited[id(base)] = base
            for name, item in vars(base).items():
                if isinstance(item, FunctionType):
                    yield from _of_function(path, item)
                elif not name.startswith("__") and isinstance(item, _PLAIN + _GENERATORS):
                    yield f"{path}, class attribute {base.__name__}.{name}", item, False


def _of_function(path: str, function: Any) -> _References:
    """Yield the attributes of a user's function, and the variables of its enclosing function and module that it uses."""
    if function.__module__ is None or _package(function) in _COMMON:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if hasattr(cell, "cell_contents"):
            yield f"{path}, variable {name!r}", cell.cell_contents, False
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{path}, variable {name!r}", function.__globals__[name], False
    for name, value in vars(function).items():
        yield f"{path}.{name}", value, False


def _of_attributes(path: str, value: Any) -> _References:
    cls = type(value)
    library_methods = [item for base in cls.__mro__ if _is_of_library(base) for item in vars(base).values()]
    # The names that methods of library classes mention are the attributes that it has from there.
    library_names = {name for item in library_methods if isinstance(item, FunctionType) for name in item.__code__.co_names}
    is_module = isinstance(value, nn.Module)
    for name, item in [*getattr(value, "__dict__", {}).items()]:
        if not (is_module and name in ("_parameters", "_buffers", "_modules")):
            yield f"{path}.{name}", item, name in library_names or _is_of_library(cls)
    if is_module:
        for name in sorted(value._non_persistent_buffers_set):
            yield f"{path}.{name} (a buffer with persistent=False)", value._buffers[name], False
        for name, child in value._modules.items():
            yield f"{path}.{name}", child, False


def _package(definition: Any) -> str:
    return str(definition.__module__.partition(".")[0])


def _is_of_library(cls: type) -> bool:
    return f"{cls.__module__}.".startswith(_LIBRARIES)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
