"""State that is not saved: attributes that updates change, and that loading does not restore.

Nothing is serialized for it: the objects that a trainer reaches are walked, and what they hold is written down as texts that
differ where the bits differ.
"""

from __future__ import annotations

import array
import datetime
import dis
import enum
import functools
import io
import itertools
import operator
import os
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chainring._callables import defined_by, is_taken_apart, origin_of_module, references
from chainring._progress import Trainer
from chainring._random import generator_state, is_generator
from chainring.iterators._order import generators_of, members_of, state_methods
from chainring.serializers.protocol import unwrap
from chainring.training._digests import checksum, describe

Attributes = dict[str, str]
"""By path, such as ``updater.model:main.encoder.counter``, the text of what is there."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_VALUES = (enum.Enum, Fraction, Decimal, PurePath, datetime.date, datetime.time, datetime.timedelta, range, slice)
_BUFFERS = (bytearray, memoryview, array.array)
_ARRAYS = (Tensor, np.ndarray)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NOT_WALKED = (type, ModuleType, BuiltinMethodType)
_DISPLAYS = frozenset({"tqdm", "rich", "wandb", "mlflow", "tensorboard", "matplotlib", "optuna", "logging"})
_MAX_DEPTH, _MAX_OBJECTS, _MAX_ITEMS, _MAX_BYTES = 8, 20_000, 100, 2**26
_LEAST_BYTES = 2**14  # that an array counts for, since each takes time
_SAMPLED = 2**16  # elements of an array that is looked at in part
_NOT_PERSISTENT = " (a buffer with persistent=False)"
# What ends the text of what belongs to an installed package, of what may be a cache, and of what cannot be looked into.
_FOREIGN, _CACHE, _UNSEEN = _MARKS = "\0\1\2"
_TIMES = frozenset(
    ["time", "times", "elapsed", "seconds", "duration", "durations", "clock", "wall", "timestamp", "timestamps", "speed"]
)
_CACHES = frozenset(["cache", "caches", "cached", "memo"])
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# Of Python's own library, what is walked as an object of the script is, and the modules whose other objects have state.
_OPEN = frozenset(["SimpleNamespace", "Namespace", "UserDict", "UserList", "Event", "Semaphore", "BoundedSemaphore"])
_CLOSED = frozenset(["queue", "_queue", "sqlite3", "mmap", "shelve", "contextvars", "_contextvars", "multiprocessing"])
_INDEX = re.compile(r"((\[[^\]]*\])+|, length)$")
_SETTINGS = (torch.get_default_dtype, torch.get_float32_matmul_precision, torch.is_grad_enabled, torch.get_num_threads)
_CLOCKS = (time.time, time.monotonic, time.perf_counter)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a container with their keys or positions, those of a set in an order that no hash decides."""
    if isinstance(container, dict):
        return container.items()
    return enumerate(sorted(container, key=repr) if isinstance(container, (set, frozenset)) else container)


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
    is_recent = not number.is_integer() and any(-600 < number - clock() < 1 for clock in _CLOCKS)
    return is_recent or abs(number - time.time()) < 86400


def attributes_of(trainer: Trainer, *, in_modules: bool = False) -> Attributes:
    """Return what the objects of a trainer hold, saved or not, by path: values, arrays, generators, lengths of lists.

    With ``in_modules`` also the variables of the script's modules, the environment, settings of torch, and what follows the
    first items of long containers.
    """
    updater = trainer.updater
    models = {name: unwrap(model) for name, model in updater.get_all_models().items()}
    roots: dict[str, Any] = {f"updater.model:{name}": model for name, model in models.items()}
    for name, iterator in updater.get_all_iterators().items():
        if in_modules and (data := getattr(iterator, "dataset", None)) is not None:
            roots[f"updater.iterator:{name}.dataset"] = data  # a script may change it in place
        roots[f"updater.iterator:{name}"] = iterator
    roots |= {f"updater.optimizer:{name}": optimizer for name, optimizer in updater.get_all_optimizers().items()}
    roots["updater"] = updater
    for entry in trainer.entries:
        roots |= {f"extensions.{entry.name}": entry.extension, f"extensions.{entry.name}.trigger": entry.trigger}
    roots["stop_trigger"] = trainer.stop_trigger
    loaders = [getattr(iterator, "loader", None) for iterator in updater.get_all_iterators().values()]
    generators = [item for loader in loaders for item in generators_of(members_of(loader, is_loader=True))]
    saved = [*updater.get_all_optimizers().values(), *generators]  # these are put back with the first batch of a resumed run
    walk = _Walk(models.values(), saved, [trainer, *roots.values()])
    for path, root in roots.items():
        walk.visit(path, root, is_root=True)
    if in_modules:
        for path, value in _variables_of_modules().items():
            walk.visit(path, value)
        walk.visit_rest()
    return walk.attributes


def _variables_of_modules() -> dict[str, Any]:
    variables: dict[str, Any] = {f"torch.{get.__name__}()": get() for get in _SETTINGS}
    for name, text in os.environ.items():  # which may be secret
        variables[f"os.environ.{name}"] = f"a text of CRC {zlib.crc32(os.fsencode(text)):08x}"
    for module in {id(module): module for module in [*sys.modules.values()] if isinstance(module, ModuleType)}.values():
        if vars(module).get("__file__") and origin_of_module(module.__name__) == "user":
            names = {name: item for name, item in vars(module).items() if not name.startswith("__")}
            variables |= {f"variable {module.__name__}.{name}": item for name, item in names.items()}
    return variables


def changed(before: Attributes, between: Attributes, after: Attributes) -> list[str]:
    """Return the paths of what has changed in a way that matters.

    A cache is filled once: what was not there before, or belongs to an installed package, must have changed twice.
    """
    return [path for path, text in after.items() if _has_changed(before.get(path), between.get(path), text)]


def _has_changed(before: str | None, between: str | None, after: str) -> bool:
    if after.endswith((_CACHE, _UNSEEN)):
        return False
    is_foreign = after.endswith(_FOREIGN)
    if before == after or between is None:
        return before is not None and before != after and not is_foreign
    if is_foreign:
        return between != after and before not in (None, between)
    return between != after or before not in (None, "None")


def unsaved(paths: Iterable[str], expected: Attributes, loaded: Attributes) -> dict[str, str]:
    """Return by path how changed attributes differ after loading from what they were when the state was saved."""
    differing: dict[str, str] = {}
    for path in paths:
        if expected.get(path) != loaded.get(path):
            texts = (texts_at.get(path, "nothing").rstrip(_MARKS) for texts_at in (expected, loaded))
            differing.setdefault(_INDEX.sub("", path), " -> ".join(texts))
    return differing


def may_be_cache(text: str) -> bool:
    """Return whether a text is of what may be a cache, or belongs to an installed package."""
    return text.endswith((_FOREIGN, _CACHE))


def unseen(attributes: Attributes) -> dict[str, str]:
    """Return by path what could not be looked into, in words."""
    return {path: text.rstrip(_UNSEEN) for path, text in attributes.items() if text.endswith(_UNSEEN)}


def remedy(path: str, text: str) -> str:
    """Return what makes an attribute of this path state, given the text of its value."""
    if path.endswith(_NOT_PERSISTENT):
        return "register it with persistent=True"
    if path.endswith(", hooks"):
        return "register them where the program starts"
    if text.startswith("an optimizer"):
        return "give it to the updater among its optimizers"
    if " in state " in text:
        return "draw from the global generators, which are saved, or save its state"
    if path.startswith("updater.model:"):
        return "register_buffer, or a serialize(serializer) of the module"
    if path.startswith("updater.iterator:") and ".loader.dataset." in path:
        return "state_dict() and load_state_dict(state) of the dataset, and torchdata's StatefulDataLoader"
    if path.startswith("updater.iterator:"):
        return "serialize(serializer), or state_dict() and load_state_dict(state), of the iterator or loader"
    if path.startswith("variable "):
        return "make it an attribute of an extension that has serialize(serializer)"
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
        self._rest: list[tuple[str, Any, int, str]] = []  # long containers, of which the first items were visited

    def visit(self, path: str, value: Any, depth: int = 0, origin: str = "user", is_root: bool = False) -> None:
        """Record a value and whatever it refers to; of an attribute of a library only the user's objects in it."""
        if isinstance(value, _PLAIN + _ARRAYS + _VALUES + _BUFFERS):
            if origin != "library":
                is_left_out = is_time(value) or (isinstance(value, (float, *_ARRAYS)) and _is_named(_TIMES, path))
                self._record(path, "a time" if is_left_out else self._describe(value), origin)
            return
        if id(value) in self._visited or (id(value) in self._roots and not is_root):
            return
        if len(self._visited) > _MAX_OBJECTS:
            self._record("the objects that follow", f"more than {_MAX_OBJECTS:,}", _UNSEEN)
            return
        if depth > _MAX_DEPTH:
            if origin == "user":
                self._record(path, f"an object behind {depth - 1} others", _UNSEEN)
            return
        self._visited[id(value)] = value
        if is_generator(value):
            if id(value) not in self._saved:
                self._record(path, f"a {type(value).__name__} in state {checksum(generator_state(value))}", "user")
        elif isinstance(value, torch.optim.Optimizer):
            self.visit(f"{path}, hooks", _hooks_of(value), depth + 1)
            if id(value) not in self._saved:
                self._record(path, f"an optimizer in state {checksum(value.state_dict())}", "user")
        elif any(_package(base) in _DISPLAYS for base in type(value).__mro__):
            return
        elif origin == "user" and (text := _text_of_builtin(value)) is not None:
            self._record(path, *text)
        elif not (path.startswith("updater.iterator:") and _is_put_back_later(path, value, origin)):
            if isinstance(value, _CONTAINERS) and origin != "library" and not _is_named(_TIMES, path):
                self._record(f"{path}, length", str(len(value)), _CACHE if _collects(path, value) else origin)
            for child_path, child, child_origin in self._references(path, value, depth, origin):
                self.visit(child_path, child, depth + 1, child_origin)

    def visit_rest(self) -> None:
        """Visit what follows the first items of long containers, as far as the limits go."""
        for path, value, depth, origin in self._rest:
            plain = list[Any]()
            for index, (key, item) in enumerate(itertools.islice(_items(value), _MAX_ITEMS, None), _MAX_ITEMS):
                if isinstance(item, _PLAIN):
                    plain.append((key, item) if isinstance(key, _PLAIN) else item)
                elif len(self._visited) > _MAX_OBJECTS or self._bytes_left < 0:
                    self._record(path, f"what follows its first {index:,} items", _UNSEEN)
                    break
                else:
                    self.visit(f"{path}[{key!r}]" if isinstance(key, _PLAIN) else path, item, depth + 1, origin)
            if plain and origin != "library":
                text = f"{len(plain)} items of CRC {zlib.crc32(repr(plain).encode()):08x}"
                self._record(f"{path}[{_MAX_ITEMS}:]", text, _CACHE if _collects(path, value) else origin)
        self._rest.clear()

    def _record(self, path: str, text: str, origin: str) -> None:
        mark = {"user": "", "library": "", "foreign": _FOREIGN}.get(origin, origin)
        self.attributes[path] = text + (_CACHE if _is_named(_CACHES, path) and not mark else mark)

    def _describe(self, value: Any) -> str:
        """Return the description of a value; when too many bytes were read already, that of evenly spaced elements."""
        try:
            if isinstance(value, _BUFFERS):
                return f"{len(value)} items of CRC {zlib.crc32(value):08x}"
            if isinstance(value, _VALUES) and not isinstance(value, _PLAIN):
                return repr(value)
            if isinstance(value, _ARRAYS):
                self._bytes_left -= max(value.nbytes, _LEAST_BYTES)
                if self._bytes_left < 0 and value.nbytes > 8 * _SAMPLED:
                    flat = value.detach().reshape(-1) if isinstance(value, Tensor) else value.reshape(-1)
                    return f"{tuple(value.shape)}, in part {describe(flat[:: max(len(flat) // _SAMPLED, 1)])}"
            return describe(value)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # a tensor of a kind that has no bytes to read
            return type(value).__name__

    def _references(self, path: str, value: Any, depth: int, origin: str) -> Iterator[tuple[str, Any, str]]:
        """Yield the path, the object and the origin of everything that a value refers to."""
        if isinstance(value, _CONTAINERS):
            if len(value) > _MAX_ITEMS:
                self._rest.append((path, value, depth, origin))
            for key, item in [*itertools.islice(_items(value), _MAX_ITEMS)]:
                yield (f"{path}[{key!r}]" if isinstance(key, _PLAIN) else path), item, origin
        elif is_taken_apart(value) and not isinstance(
            value, _NOT_WALKED
        ):  # a user's: its attributes, and the outer variables that it uses
            for kind, name, item in references(value):
                if name == "__class__":
                    continue
                below = {"attribute": f".{name}", "function": "", "object": ""}.get(kind, f", {kind} {name!r}")
                yield path + below, item, "library" if kind == "argument" and isinstance(item, _PLAIN) else "user"
        elif isinstance(value, GeneratorType):
            yield from _of_generator(path, value)
        elif isinstance(value, type) and defined_by(value) == "user":
            for name, item in vars(value).items():
                if not name.startswith("__") and not callable(item) and not hasattr(item, "__get__"):
                    yield f"{path}.{name}", item, "user"
        elif not isinstance(value, _NOT_WALKED) and (
            type(value).__name__ in _OPEN or _package(type(value)) not in sys.stdlib_module_names
        ):
            yield from self._of_attributes(path, value)

    def _of_attributes(self, path: str, value: Any) -> Iterator[tuple[str, Any, str]]:
        cls, is_module, origin_of = type(value), isinstance(value, nn.Module), _attribute_origins(type(value))
        attributes = dict(getattr(value, "__dict__", {}))
        for base in reversed(cls.__mro__):
            if defined_by(base) == "user":
                slots = vars(base).get("__slots__", ())
                names = [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
                attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
                for name, item in vars(base).items():
                    if isinstance(item, FunctionType):
                        yield from _of_method(path, item)
                    elif isinstance(item, _PLAIN + _VALUES + _CONTAINERS) and not name.startswith("__"):
                        attributes.setdefault(name, item)  # a default that the object has not replaced yet, or shares
        for name, item in attributes.items():
            if not (is_module and name in ("_parameters", "_buffers", "_modules")):
                yield f"{path}.{name}", item, origin_of(name)
        if is_module:
            hooks = [hook for owner in (value, *value._parameters.values()) for hook in _hooks_of(owner)]
            yield f"{path}, hooks", hooks, "user"
            for name in sorted(value._non_persistent_buffers_set):
                origin = defined_by(cls)
                yield f"{path}.{name}{_NOT_PERSISTENT}", value._buffers[name], "user" if origin == "library" else origin
            if id(value) not in self._saved:
                for name, item in {**value._parameters, **value._buffers}.items():
                    yield f"{path}.{name}", item, "user"
            for name, child in value._modules.items():
                yield f"{path}.{name}", child, "user"


def _is_put_back_later(path: str, value: Any, origin: str) -> bool:
    """Return whether it is a loader, or a pass over one, that its own state puts back with its next batch.

    `check_state` has tried it.
    """
    is_taken = origin == "foreign" or path.endswith(".loader") or "._passes._state" in path
    return is_taken and state_methods(value) is not None


def _of_method(path: str, method: FunctionType) -> Iterator[tuple[str, Any, str]]:
    """Yield the outer variables of a method of a class that a function makes."""
    for kind, name, item in references(method):
        if kind == "variable" and name in method.__code__.co_freevars and name != "__class__":
            yield f"{path}, variable {name!r}", item, "user"


def _hooks_of(value: Any) -> list[Any]:
    """Return the hooks that the script has registered on a module, an optimizer or a parameter."""
    names = [*getattr(value, "__dict__", {}), "_backward_hooks", "_post_accumulate_grad_hooks"]
    registered = [getattr(value, name, None) for name in dict.fromkeys(names) if name.endswith("_hooks")]
    hooks = [hook for hooks in registered if isinstance(hooks, dict) for hook in hooks.values() if callable(hook)]
    owners = ((hook, getattr(hook, "__self__", getattr(hook, "func", hook))) for hook in hooks)
    return [hook for hook, owner in owners if defined_by(owner if hasattr(owner, "__name__") else type(owner)) == "user"]


def _of_generator(path: str, value: GeneratorType[Any, Any, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield where a generator stands, and its variables."""
    if (frame := value.gi_frame) is not None:  # it has not ended
        origin = origin_of_module(str(frame.f_globals.get("__name__")))
        yield f"{path}, position", frame.f_lasti, origin
        for name, item in frame.f_locals.items():
            yield f"{path}, variable {name!r}", item, origin
        yield f"{path}, yield from", value.gi_yieldfrom, origin


def _text_of_builtin(value: Any) -> tuple[str, str] | None:
    """Return what stands for the state of an iterator, a file or another object of Python's own, and its mark."""
    cls = type(value)
    package, name = _package(cls), f"{'an' if cls.__name__[0] in 'aeiou' else 'a'} {cls.__name__}"
    if cls.__name__ == "_lru_cache_wrapper":
        return f"{value.cache_info().currsize} results", _CACHE
    if package not in sys.stdlib_module_names or isinstance(value, GeneratorType):
        return None
    if isinstance(value, (itertools.count, itertools.repeat)):
        return repr(value), "user"
    if isinstance(value, Iterator) and (left := operator.length_hint(value, -1)) >= 0:
        return f"{name} with {left} items left", "user"
    is_closed = isinstance(value, (Iterator, io.IOBase)) or package in _CLOSED
    is_stream = any(value is stream for stream in (sys.stdin, sys.stdout, sys.stderr))
    return (name, _UNSEEN) if is_closed and not is_stream else None


def _collects(path: str, container: Any) -> bool:
    """Return whether it may grow without being state: a dict as a cache, a variable of the script as its results."""
    return isinstance(container, dict) or path.endswith("'") or path.startswith("variable ")


def _attribute_origins(cls: type) -> Callable[[str], str]:
    """Return a function that gives the origin of an attribute by its name, as `defined_by` does of a class.

    An attribute is the user's if a method of a user's class mentions it, and else belongs to the class that these extend. Of
    a module of the library it is the user's unless a method of the library sets it.
    """
    origins = [defined_by(base) for base in cls.__mro__ if _package(base) not in sys.stdlib_module_names]
    extended = next((origin for origin in origins if origin != "user"), "user")
    if not origins:  # a namespace of Python's own
        return lambda name: "user"
    if issubclass(cls, nn.Module) and origins[0] == "library":
        stored = frozenset().union(*(_stored_by(base) for base in cls.__mro__ if defined_by(base) == "library"))
        return lambda name: "library" if name in stored else "user"
    if defined_by(cls) != "user" or extended == "user":
        return lambda name: origins[0]
    if issubclass(cls, nn.Module):
        return lambda name: "library" if name in _MODULE_ATTRIBUTES else "user"
    members = [vars(base) for base in cls.__mro__ if defined_by(base) == "user"]
    methods = [item for names in members for item in names.values() if isinstance(item, FunctionType)]
    mentioned = set(itertools.chain(*members, *(method.__code__.co_names for method in methods)))
    return lambda name: "user" if name in mentioned else extended


@functools.cache
def _stored_by(cls: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of a class set."""
    codes = [item.__code__ for item in vars(cls).values() if isinstance(item, FunctionType)]
    rows = itertools.chain.from_iterable(map(dis.get_instructions, codes))
    return _MODULE_ATTRIBUTES.union(vars(cls), (row.argval for row in rows if row.opname == "STORE_ATTR"))


def _package(definition: Any) -> str:
    return str(definition.__module__).partition(".")[0]


def _is_named(words: frozenset[str], path: str) -> bool:
    """Return whether the last name of a path contains one of these words, such as ``time`` in ``start_time``."""
    name = re.split(r"[.']", _INDEX.sub("", path).removesuffix("'"))[-1]
    return not words.isdisjoint(name.lower().split("_"))
