"""State that is not saved: attributes that updates change, and that loading does not restore.

Nothing is serialized for it: the objects that a trainer reaches are walked, and what they hold is written down as texts that
differ where the bits differ.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chainring._callables import defined_by, is_taken_apart, references
from chainring._naming import unwrap
from chainring._progress import Trainer
from chainring._random import generator_state, is_generator
from chainring.iterators._order import generators_of, members_of
from chainring.serializers.protocol import has_state

Attributes = dict[str, str]
"""By path, such as ``updater.model:main.encoder.counter``, the text of what is there."""

_MAX_WRITTEN = 4  # elements up to which a tensor is written out
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_ARRAYS = (Tensor, np.ndarray)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NOT_WALKED = (type, ModuleType, BuiltinMethodType)
_DISPLAYS = frozenset({"tqdm", "rich", "wandb", "mlflow", "tensorboard", "matplotlib", "optuna", "logging"})
_MAX_DEPTH, _MAX_OBJECTS, _MAX_ITEMS, _MAX_BYTES = 8, 20_000, 100, 2**26
_SAMPLED = 2**16  # elements of an array that is looked at in part
_NOT_PERSISTENT = " (a buffer with persistent=False)"
_FOREIGN = "\0"  # ends the text of what belongs to an installed package
_TIMES = frozenset(
    ["time", "times", "elapsed", "seconds", "duration", "durations", "clock", "wall", "timestamp", "timestamps", "speed"]
)
_CACHES = frozenset(["cache", "caches", "cached", "memo"])
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_INDEX = re.compile(r"((\[[^\]]*\])+|, length)$")
_CLOCKS = (time.time, time.monotonic, time.perf_counter)


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
    value = as_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.tolist()
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_meta:
            return f"{dtype} {tuple(value.shape)} without data"
        if value.numel() <= _MAX_WRITTEN and not value.is_complex():
            return f"{dtype} {value.tolist()}"
        return f"{dtype} {tuple(value.shape)} of CRC {zlib.crc32(bytes_of(value).numpy().data):08x}"
    if isinstance(value, (bool, int, float, complex, str, bytes, list, type(None), np.generic)):
        return repr(value)
    return type(value).__name__


def checksum(value: Any) -> str:
    """Return one CRC-32 of everything in nested containers."""
    return f"{zlib.crc32(repr(describe_leaves('', value)).encode()):08x}"


def as_tensor(value: Any) -> Any:
    """Return a numeric array as a tensor, and anything else as it is."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.from_numpy(value.copy()) if is_numeric else value


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 in one dimension."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def is_time(value: Any) -> bool:
    """Return whether a number is what a clock has shown in the last hours."""
    if isinstance(value, _ARRAYS):
        if value.nbytes > 8 or (isinstance(value, Tensor) and value.is_meta) or list(value.shape) not in ([], [1]):
            return False
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    number = float(value)
    if isinstance(value, (int, np.integer)):
        return number > 1e12 and any(abs(number / 1e9 - clock()) < 86400 for clock in _CLOCKS)
    if abs(number - time.time()) < 86400:
        return True
    return not number.is_integer() and any(-600 < number - clock() < 1 for clock in _CLOCKS)


def attributes_of(trainer: Trainer, stop_trigger: Any = None) -> Attributes:
    """Return what the objects of a trainer hold, saved or not, by path: values, arrays, generators, lengths of lists."""
    updater = trainer.updater
    models = {name: unwrap(model) for name, model in updater.get_all_models().items()}
    roots: dict[str, Any] = {f"updater.model:{name}": model for name, model in models.items()}
    roots |= {f"updater.iterator:{name}": iterator for name, iterator in updater.get_all_iterators().items()}
    roots["updater"] = updater
    for entry in trainer.entries:
        roots |= {f"extensions.{entry.name}": entry.extension, f"extensions.{entry.name}.trigger": entry.trigger}
    roots["stop_trigger"] = trainer.stop_trigger if stop_trigger is None else stop_trigger
    loaders = [getattr(iterator, "loader", None) for iterator in updater.get_all_iterators().values()]
    generators = [item for loader in loaders for item in generators_of(members_of(loader, is_loader=True))]
    saved = [*updater.get_all_optimizers().values(), *generators]  # these are put back with the first batch of a resumed run
    walk = _Walk(models.values(), saved, [trainer, *roots.values()])
    for path, root in roots.items():
        walk.visit(path, root, is_root=True)
    return walk.attributes


def changed(before: Attributes, between: Attributes, after: Attributes) -> list[str]:
    """Return the paths of what has changed in a way that matters.

    A cache is filled once: what was not there before, or belongs to an installed package, must have changed twice.
    """
    return [path for path, text in after.items() if _has_changed(before.get(path), between.get(path), text)]


def _has_changed(before: str | None, between: str | None, after: str) -> bool:
    is_foreign = after.endswith(_FOREIGN)
    if before == after or between is None:
        return before is not None and before != after and not is_foreign
    if is_foreign and before in (None, between):
        return False
    may_be_cache = is_foreign or before in (None, "None")
    return between != after or not may_be_cache


def unsaved(paths: Iterable[str], expected: Attributes, loaded: Attributes) -> dict[str, str]:
    """Return by path how changed attributes differ after loading from what they were when the state was saved."""
    differing: dict[str, str] = {}
    for path in paths:
        if expected.get(path) != loaded.get(path):
            texts = (texts_at.get(path, "nothing").removesuffix(_FOREIGN) for texts_at in (expected, loaded))
            differing.setdefault(_INDEX.sub("", path), " -> ".join(texts))
    return differing


def remedy(path: str, text: str) -> str:
    """Return what makes an attribute of this path state, given the text of its value."""
    if path.endswith(_NOT_PERSISTENT):
        return "register it with persistent=True"
    if text.startswith("an optimizer"):
        return "give it to the updater among its optimizers"
    if " in state " in text:
        return "draw from the global generators, which are saved, or save its state"
    if path.startswith("updater.model:"):
        return "register_buffer, or a serialize(serializer) of the module"
    if path.startswith("updater.iterator:"):
        return "serialize(serializer), or state_dict() and load_state_dict(state), of the iterator or loader"
    return "serialize(serializer) of the object that holds it"


class _Walk:
    """A walk through objects, each once, that records plain values, arrays and random generators."""

    def __init__(self, models: Iterable[nn.Module], saved: Iterable[Any], roots: Iterable[Any]) -> None:
        self.attributes: Attributes = {}
        self._saved = {id(module) for model in models if isinstance(model, nn.Module) for module in model.modules()}
        self._saved |= set(map(id, saved))
        self._visited: dict[int, Any] = {}  # kept alive, so that no id is given out twice
        self._roots = set(map(id, roots))  # each has a path of its own
        self._bytes_left = _MAX_BYTES

    def visit(self, path: str, value: Any, depth: int = 0, origin: str = "user", is_root: bool = False) -> None:
        """Record a value and whatever it refers to; of an attribute of a library only the user's objects in it."""
        if isinstance(value, _PLAIN + _ARRAYS):
            if origin != "library" and not _is_named(_CACHES, path):
                is_left_out = is_time(value) or (isinstance(value, (float, *_ARRAYS)) and _is_named(_TIMES, path))
                self._record(path, "a time" if is_left_out else self._describe(value), origin)
            return
        if id(value) in self._visited or (id(value) in self._roots and not is_root):
            return
        if depth > _MAX_DEPTH or len(self._visited) > _MAX_OBJECTS:
            return
        self._visited[id(value)] = value
        if is_generator(value):
            if id(value) not in self._saved:
                self._record(path, f"a {type(value).__name__} in state {checksum(generator_state(value))}", "user")
        elif isinstance(value, torch.optim.Optimizer):
            if id(value) not in self._saved:
                self._record(path, f"an optimizer in state {checksum(value.state_dict())}", "user")
        elif any(_package(base) in _DISPLAYS for base in type(value).__mro__):
            return
        elif not (origin == "foreign" and path.startswith("updater.iterator:") and has_state(value)):
            # A dict that grows is a cache, and results are collected in lists that a script has in variables.
            is_counted = isinstance(value, _CONTAINERS) and not isinstance(value, dict) and not path.endswith("'")
            if is_counted and origin != "library" and not _is_named(_CACHES | _TIMES, path):
                self._record(f"{path}, length", str(len(value)), origin)
            for child_path, child, child_origin in self._references(path, value, origin):
                self.visit(child_path, child, depth + 1, child_origin)

    def _record(self, path: str, text: str, origin: str) -> None:
        self.attributes[path] = text + (_FOREIGN if origin == "foreign" else "")

    def _describe(self, value: Any) -> str:
        """Return the description of a value; when too many bytes were read already, that of evenly spaced elements."""
        try:
            if isinstance(value, _ARRAYS):
                self._bytes_left -= value.nbytes
                if self._bytes_left < 0 and value.nbytes > 8 * _SAMPLED:
                    flat = value.detach().reshape(-1) if isinstance(value, Tensor) else value.reshape(-1)
                    return f"{tuple(value.shape)}, in part {describe(flat[:: max(len(flat) // _SAMPLED, 1)])}"
            return describe(value)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # a tensor of a kind that has no bytes to read
            return type(value).__name__

    def _references(self, path: str, value: Any, origin: str) -> Iterator[tuple[str, Any, str]]:
        """Yield the path, the object and the origin of everything that a value refers to."""
        if isinstance(value, _CONTAINERS):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in [*itertools.islice(items, _MAX_ITEMS)]:
                yield (f"{path}[{key!r}]" if isinstance(key, _PLAIN) else path), item, origin
        elif is_taken_apart(value) and not isinstance(
            value, _NOT_WALKED
        ):  # a user's: its attributes, and the outer variables that it uses
            for kind, name, item in references(value):
                below = {"attribute": f".{name}", "function": "", "object": ""}.get(kind, f", {kind} {name!r}")
                yield path + below, item, "library" if kind == "argument" and isinstance(item, _PLAIN) else "user"
        elif not isinstance(value, _NOT_WALKED) and _package(type(value)) not in sys.stdlib_module_names:
            yield from self._of_attributes(path, value)

    def _of_attributes(self, path: str, value: Any) -> Iterator[tuple[str, Any, str]]:
        cls, is_module, origin_of = type(value), isinstance(value, nn.Module), _attribute_origins(type(value))
        attributes = dict(getattr(value, "__dict__", {}))
        for base in reversed(cls.__mro__):
            if defined_by(base) == "user":
                slots = vars(base).get("__slots__", ())
                names = [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
                attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
                for name, item in vars(base).items():  # a default that the object has not replaced yet
                    if isinstance(item, _PLAIN) and not name.startswith("__"):
                        attributes.setdefault(name, item)
        for name, item in attributes.items():
            if not (is_module and name in ("_parameters", "_buffers", "_modules")):
                yield f"{path}.{name}", item, origin_of(name)
        if is_module:
            for name in sorted(value._non_persistent_buffers_set):
                yield f"{path}.{name}{_NOT_PERSISTENT}", value._buffers[name], defined_by(cls)
            if id(value) not in self._saved:
                for name, item in {**value._parameters, **value._buffers}.items():
                    yield f"{path}.{name}", item, "user"
            for name, child in value._modules.items():
                yield f"{path}.{name}", child, "user"


def _attribute_origins(cls: type) -> Callable[[str], str]:
    """Return a function that gives the origin of an attribute by its name, as `defined_by` does of a class.

    An attribute is the user's if a method of a user's class mentions it, and else belongs to the class that these extend.
    """
    origins = [defined_by(base) for base in cls.__mro__ if _package(base) not in sys.stdlib_module_names]
    extended = next((origin for origin in origins if origin != "user"), "user")
    if defined_by(cls) != "user" or extended == "user":
        return lambda name: origins[0]
    if issubclass(cls, nn.Module):
        return lambda name: "library" if name in _MODULE_ATTRIBUTES else "user"
    members = [vars(base) for base in cls.__mro__ if defined_by(base) == "user"]
    methods = [item for names in members for item in names.values() if isinstance(item, FunctionType)]
    mentioned = set(itertools.chain(*members, *(method.__code__.co_names for method in methods)))
    return lambda name: "user" if name in mentioned else extended


def _package(definition: Any) -> str:
    return str(definition.__module__).partition(".")[0]


def _is_named(words: frozenset[str], path: str) -> bool:
    """Return whether the last name of a path contains one of these words, such as ``time`` in ``start_time``."""
    name = re.split(r"[.']", _INDEX.sub("", path).removesuffix("'"))[-1]
    return not words.isdisjoint(name.lower().split("_"))
