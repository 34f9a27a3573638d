"""Serializers: an object declares its changing state once for both directions, in ``serialize(serializer)``."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import empty_shard_like, is_sharded, is_summand, shard_like, to_full, to_local
from chainring._messages import info
from chainring._naming import name_cleaner, submodules

K = TypeVar("K")


class AbstractSerializer:
    """Saves or loads state: ``serializer(key, value)`` is one value, ``serializer[key]`` a serializer of nested state.

    While saving, a serializer returns the value that it was given; while loading, the value that was saved. So one line
    serves both directions, and they cannot diverge. A tensor or array of the saved shape and dtype is filled in place
    with the saved numbers and returned itself, so that Chainer's form without an assignment works. A number or string is
    returned in the type of the given value, if that type can represent it exactly.

    Example::

        def serialize(self, serializer):
            self.iteration = serializer("iteration", self.iteration)
            serializer("order", self.order)  # an array of a fixed shape, which is filled
            serializer.visit("iterator", self.iterator)

    Attributes:
        directory: the directory that contains the snapshot; ``None`` if the state stays in memory. Data that is appended
            to a file beside the snapshot, such as the rows of a log, need not be written again into each snapshot: a
            reference to the file is enough.
        comm: the communicator of the ranks that save or load together, each in the same order. State that differs between
            ranks is gathered while saving, and given to rank 0 while loading. State that stays in memory belongs to its
            rank.
    """

    directory: Path | None = None
    comm: Communicator = Communicator()
    _path = ""

    def __getitem__(self, key: str) -> AbstractSerializer:
        raise NotImplementedError

    def __call__(self, key: str, value: Any) -> Any:
        """Save ``value`` under ``key`` and return it, or return what was saved there.

        A value is a number, a string, bytes, ``None``, a tensor, an array, or a list, tuple or dict of these.
        """
        raise NotImplementedError

    def visit(self, key: str, obj: Any) -> None:
        """Save or load a whole object under ``key``: with its ``serialize``, or its ``state_dict``/``load_state_dict``.

        An empty key means the serializer itself. A ``serialize`` that does not take exactly one argument is ignored. The
        entries of a module's ``state_dict`` become one key each, with slashes instead of dots, so that a submodule can be
        found by its path. In addition, each submodule with a ``serialize`` method saves its own state under its path;
        this state must not depend on the rank.

        Raises:
            TypeError: the object has neither of them.
            ValueError: while saving, a key is saved twice.
        """
        if is_module(obj):
            self._enter(key, (obj, _ENTRIES))._visit_module(obj)
        elif (method := serialize_method(obj)) is not None:
            method(self._enter(key, (obj, "serialize")))
        elif has_state(obj):
            self._enter(key, (obj, "state_dict"))._visit_state(obj)
        else:
            found = "; the serialize that it has does not take a serializer alone" if hasattr(obj, "serialize") else ""
            raise TypeError(
                f"{type(obj).__name__} has no state to save or load at {self._path + key!r}: "
                f"give it serialize(serializer), or state_dict() and load_state_dict(state){found}"
            )

    def _enter(self, key: str, owner: _Owner) -> AbstractSerializer:
        """Return the child for an object that is visited."""
        return self[key]

    def _is_part(self, module: Any) -> bool:
        """Return whether the module belongs to one that is being visited, which brings its parameters and buffers."""
        return False

    def _own_states(self, module: Any) -> list[tuple[str, Any]]:
        """Return what `own_states` does, without those that were called before."""
        return own_states(module)

    def _visit_module(self, module: Any) -> None:
        raise NotImplementedError

    def _visit_own(self, parts: list[tuple[str, Any]]) -> None:
        for path, part in parts:
            part.serialize(self._enter(path, (part, "serialize")))

    def _visit_state(self, obj: Any) -> None:
        raise NotImplementedError


class Serializer(AbstractSerializer):
    """A serializer that saves. ``isinstance(serializer, Serializer)`` tells an object that its state is being saved.

    Example::

        def serialize(self, serializer):
            lines = serializer("lines", len(self.lines))
            if not isinstance(serializer, Serializer):
                self.lines = read_lines(self.path, lines)
    """

    def refer(self, path: Path) -> None:
        """Register a file to which the state refers: it is flushed to the disk before the snapshot is published."""

    def _visit_module(self, module: Any) -> None:
        is_part, parts = self._is_part(module), self._own_states(module)
        if not is_part:
            self._save_entries(module)
        self._visit_own(parts)

    def _save_entries(self, module: Any) -> None:
        entries = state_entries(module)
        for path, name in entry_names(module, entries, self._path).items():
            self(path, entries[name])

    def _visit_state(self, obj: Any) -> None:
        self("state_dict", obj.state_dict())


class Deserializer(AbstractSerializer):
    """A serializer that loads. With ``strict`` a key that was not saved is an error; otherwise the current value is kept.

    Example::

        def serialize(self, serializer):
            if isinstance(serializer, Deserializer) and "momentum" not in set(serializer.paths()):
                return  # saved by a version without momentum
            self.momentum = serializer("momentum", self.momentum)

    Attributes:
        strict: True if a key that was not saved is an error.
        place: the location of the run that saved the state, an absolute path or an address; ``None`` if it comes from
            memory.
        gives_way: True for a starting point from elsewhere: a run that has its own snapshots continues from those
            instead.
    """

    strict: bool = True
    gives_way: bool = False
    place: str | None = None

    def __getitem__(self, key: str) -> Deserializer:
        raise NotImplementedError

    def paths(self) -> Iterator[str]:
        """Return all keys saved below this serializer, as paths relative to it."""
        raise NotImplementedError

    def _was_asked(self, key: str) -> bool:
        """Return whether the value under this key was asked for before."""
        return False

    def _is_ignored(self, key: str) -> bool:
        """Return whether the value at hand is kept in place of the saved one."""
        return False

    def _visit_module(self, module: Any) -> None:
        """Load a module; a parameter that was saved as ``None`` was left out and stays what it is."""
        is_part, parts = self._is_part(module), self._own_states(module)
        self._visit_own(parts)
        if is_part:
            return
        entries = state_entries(module)
        names = entry_names(module, entries, self._path)
        paths = [path for path in self.paths() if path in names or not self._was_asked(path)]
        if self.strict and parts and names and names.keys().isdisjoint(paths):
            raise KeyError(
                f"the saved state of {type(module).__name__} at {self._path!r} has none of its parameters and buffers, such "
                f"as {next(iter(names))!r}: it was saved by a version that saved only what serialize names. Load it with "
                "strict=False to keep the current parameters"
            )
        entry_of = {path: names.get(path, path.replace("/", ".")) for path in paths}
        found = self._read_entries({path: entries.get(name) for path, name in entry_of.items()})
        saved = {name: shard_like(found[path], entries.get(name)) for path, name in entry_of.items()}
        kept = [name for name, value in saved.items() if value is None and hasattr(entries.get(name), "detach")]
        kept += [name for key, name in names.items() if self._is_ignored(key)]
        try:
            load_entries(module, saved | {name: entries[name] for name in kept}, self.strict)
        except RuntimeError as error:
            if parts:
                classes = ", ".join(sorted({type(part).__name__ for _, part in parts}))
                error.add_note(f"Your own serialize, here of {classes}, asks for the keys that it saves when it loads too")
            raise

    def _read_entries(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was saved of the entries of a module, by path, beside which the entries at hand are given."""
        return {path: self(path, None) for path in entries}

    def _visit_state(self, obj: Any) -> None:
        state = self("state_dict", None)
        if state is not None:
            obj.load_state_dict(state)


_recorded: ContextVar[dict[str, list[Any]] | None] = ContextVar("_recorded", default=None)


class ChangedSetting(NamedTuple):
    """A setting of a resumed run that differs from the saved run, and the value that is used."""

    name: str
    saved: Any
    given: Any
    consequence: str


_untold: ContextVar[list[ChangedSetting] | None] = ContextVar("_untold", default=None)
_HOLDS = "the new value holds"


def announce_change(name: str, saved: Any, given: Any, consequence: str = _HOLDS) -> None:
    """Print that a setting of a resumed run differs; in `telling_changes` with the others, as one table."""
    changes, untold = _recorded.get(), _untold.get()
    setting = ChangedSetting(name, saved, given, consequence)
    if changes is not None:
        changes[name] = [saved, given]
    if untold is None:
        info(_format_changes([setting]))
    else:
        untold.append(setting)


@contextmanager
def recording_changes(changes: dict[str, list[Any]]) -> Iterator[None]:
    """Inside, add each announced change to ``changes``: its name, with the saved and the given value."""
    token = _recorded.set(changes)
    try:
        yield
    finally:
        _recorded.reset(token)


@contextmanager
def telling_changes(untold: list[ChangedSetting], is_complete: bool = True) -> Iterator[None]:
    """Inside, collect what is announced, and print it at the end as a table, unless this is inside another one.

    With ``is_complete=False`` more changes will follow, and nothing is printed.
    """
    if _untold.get() is not None:
        yield
        return
    token = _untold.set(untold)
    try:
        yield
    finally:
        _untold.reset(token)
    if untold and is_complete:
        info(_format_changes(untold))
        untold.clear()


def _format_changes(settings: Iterable[ChangedSetting]) -> str:
    """Return a table: ``setting  saved -> now``, and which value holds where that is not the new one."""
    rows = [("setting", "saved", "now", "")]
    for name, saved, given, consequence in dict.fromkeys(
        (s.name, repr(s.saved), repr(s.given), s.consequence) for s in settings
    ):
        rows.append((name, saved, given, "" if consequence == _HOLDS else f"  ({consequence})"))
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:{names}}  {saved:{values}} -> {given}{note}" for name, saved, given, note in rows]
    return "\n".join(["resumed with different settings from the saved run:", *lines])


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection during the block, in which many lasting objects are created.

    Python looks for cycles each time that enough objects were made, among all of them: of states with many tensors that
    takes half of the time.
    """
    # hot path: "stop for a snapshot" in benchmarks/growth.py
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def visit_setting(serializer: AbstractSerializer, key: str, value: Any, name: str) -> None:
    """Record a setting beside the state: the saved value is not restored, but printed if it differs."""
    if not isinstance(serializer, Deserializer):
        serializer(key, value)
        return
    try:
        saved = serializer(key, _MISSING)  # and not the value, which would be filled with the saved one
    except KeyError:  # of a snapshot that was made before it was recorded
        return
    if saved is not _MISSING and not is_same_value(saved, value):
        announce_change(name, saved, value)


def visit_optional(serializer: AbstractSerializer, key: str, value: Any) -> Any:
    """Save or load a value that snapshots of earlier versions lack; from those, the current value is returned."""
    try:
        return serializer(key, value)
    except KeyError:
        if isinstance(serializer, Serializer):
            raise
        return value


def visit_like(serializer: AbstractSerializer, key: str, value: Any, likes: Mapping[str, Any]) -> Any:
    """Save or load a dict whose items belong to the tensors ``likes`` of their keys.

    Tensors in an item that have the shape of a sharded one are read from a snapshot as shards, and never whole.
    """
    if isinstance(serializer, DictionaryDeserializer):
        return serializer.read_like(key, value, likes)
    return serializer(key, value)


def conclude_reading(serializer: AbstractSerializer) -> None:
    """End the loading of a snapshot by several ranks; each waits until none needs it any more to read for the others."""
    if isinstance(serializer, DictionaryDeserializer) and serializer.origin is not None:
        serializer.origin.conclude()


def visit_if_stateful(serializer: AbstractSerializer, key: str, obj: Any) -> None:
    """Save or load an object under ``key``, if it has state."""
    if serialize_method(obj) is not None or has_state(obj):
        serializer.visit(key, obj)


def has_state(obj: Any) -> bool:
    """Return whether an object has PyTorch's pair ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def is_module(obj: Any) -> bool:
    """Return whether an object is a module, of which the entries of its ``state_dict`` are saved in any case."""
    if isinstance(obj, nn.Module):
        return True
    return hasattr(obj, "named_parameters") and has_state(obj) and serialize_method(obj) is None


def serialize_method(obj: Any) -> Callable[[AbstractSerializer], None] | None:
    """Return an object's ``serialize``, if it takes a serializer and nothing else.

    A class that declares the PyTorch pair on top of a ``serialize`` that it inherits is saved by the pair.
    """
    method: Callable[[AbstractSerializer], None] | None = getattr(obj, "serialize", None)
    if not callable(method) or not _takes_serializer(obj, method):
        return None
    for cls in type(obj).__mro__:  # whichever is declared by the more derived class speaks for the object
        if "serialize" in vars(cls):
            return method
        if "state_dict" in vars(cls) and has_state(obj):
            return None
    return method


def own_states(module: Any) -> list[tuple[str, Any]]:
    """Return the submodules, each once and the module itself first, whose class has ``serialize(serializer)``, by path."""
    parts = submodules(module) if isinstance(module, nn.Module) else []
    classes = {cls for cls in set(map(type, parts)) if hasattr(cls, "serialize")}
    if not any(type(part) in classes or "serialize" in vars(part) for part in parts):
        return []
    clean = name_cleaner(module)
    return [(clean(name).replace(".", "/"), part) for name, part in module.named_modules() if _has_own_state(part)]


def state_entries(module: Any) -> Mapping[str, Any]:
    """Return the parameters and buffers of a module by name, not copied."""
    entries: Mapping[str, Any]
    entries = nn.Module.state_dict(module) if _derives_state_dict(module) else module.state_dict()
    return entries


def load_entries(module: Any, entries: Mapping[str, Any], strict: bool) -> None:
    """Load parameters and buffers of a module by name."""
    if _derives_state_dict(module):
        nn.Module.load_state_dict(module, entries, strict=strict)
    else:
        module.load_state_dict(entries, strict=strict)


def entry_names(module: Any, entries: Mapping[str, Any], below: str = "") -> dict[str, str]:
    """Return the name of each entry of a module by its path, which has slashes for dots and no prefix of a wrapper.

    Raises:
        ValueError: two have the same path.
    """
    clean, names = name_cleaner(module), dict[str, str]()
    for name in entries:
        path = clean(name).replace(".", "/")
        if names.setdefault(path, name) != name:
            raise ValueError(
                f"two entries of {type(module).__name__}, {_describe_entry(module, names[path])} and "
                f"{_describe_entry(module, name)}, have one path in saved state, {below + path!r}; "
                "rename one of these modules, parameters or buffers"
            )
    return names


def _derives_state_dict(module: Any) -> bool:
    """Return whether the ``state_dict`` of a module is the one that `Stateful` makes of its ``serialize``."""
    cls: Any = type(module)
    return isinstance(module, nn.Module) and cls.state_dict is Stateful.state_dict


def _has_own_state(module: nn.Module) -> bool:
    cls: Any = type(module)
    declared = getattr(cls, "serialize", None)
    if declared is None and "serialize" not in vars(module):
        return False
    method = vars(module).get("serialize", declared and module.serialize)
    return callable(method) and declared is not Stateful.serialize and _takes_serializer(module, method)


_takes_one: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By the function of a method, whether the method takes exactly one required argument."""


def _takes_serializer(obj: Any, method: Any) -> bool:
    function, bound_to = getattr(method, "__func__", None), getattr(method, "__self__", None)
    if isinstance(bound_to, type) or (isinstance(method, FunctionType) and "serialize" not in getattr(obj, "__dict__", {})):
        return False  # a class method or a static method, which knows nothing of the object's state
    if not isinstance(function, FunctionType):
        return _requires_one(method)
    if function not in _takes_one:
        _takes_one[function] = _requires_one(method)
    return _takes_one[function]


def _requires_one(method: Any) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # of a function that is not written in Python
        return False
    required = [p.kind for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return required in ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD])


def _describe_entry(module: nn.Module, name: str) -> str:
    """Return the name of an entry with the class of the module that has it."""
    owner = dict(module.named_modules(remove_duplicate=False)).get(name.rpartition(".")[0])
    return repr(name) if owner is None else f"{name!r} of a {type(owner).__name__}"


_Owner = tuple[Any, str]
"""An object that is visited, and the part of its state."""
_ENTRIES = "parameters and buffers"
_MISSING = object()


class _ByPath(AbstractSerializer):
    """A serializer that knows every value by its path."""

    _owner: _Owner = (None, "serialize")

    def __init__(self) -> None:
        self._covered: set[tuple[str, int]] = set()  # path and id of the submodules of a module that is being visited
        self._called: set[str] = set()  # the paths of those of which serialize was called

    def __getitem__(self, key: str) -> Self:
        # hot path: "chainring, asynchronous" in benchmarks/snapshot.py; copy.copy takes five times as long
        below = object.__new__(type(self))
        vars(below).update(vars(self), _path=self._path_of(key))
        return below

    def _enter(self, key: str, owner: _Owner) -> Self:
        below = self[key]
        below._owner = owner
        return below

    def _is_part(self, module: Any) -> bool:
        return (self._path, id(module)) in self._covered

    def _own_states(self, module: Any) -> list[tuple[str, Any]]:
        parts = own_states(module)
        if parts:
            clean = name_cleaner(module)
            for name, part in module.named_modules(remove_duplicate=False):
                self._covered.add((self._path_of(clean(name).replace(".", "/")), id(part)))
        parts = [(path, part) for path, part in parts if self._path_of(path) not in self._called]
        self._called.update(self._path_of(path) for path, _ in parts)
        return parts

    def _path_of(self, key: str) -> str:
        """Return the path of the child under ``key``."""
        return f"{self._path}{key}/" if key else self._path


class DictionarySerializer(_ByPath, Serializer):
    """Saves state into ``target``, a dictionary from path to value.

    Tensors, arrays and containers are copied, so that later training does not change the saved state.

    Raises:
        ValueError: a key is saved twice.

    Example::

        serializer = DictionarySerializer()
        serializer.visit("model", model)
        DictionaryDeserializer(serializer.target).visit("model", other_model)
    """

    def __init__(self, target: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.target: dict[str, Any] = {} if target is None else target
        self._given: dict[str, Any] = {}  # by path, what was saved, not copied
        self._owners: dict[str, _Owner] = {}

    def __call__(self, key: str, value: Any) -> Any:
        path = self._path + key
        if path in self._owners:
            self._check_repeated(path, value)
            return value
        self._owners[path] = self._owner
        self._given[path] = value
        self.target[path] = copy_value(value)
        return value

    def _check_repeated(self, path: str, value: Any) -> None:
        """Refuse a second value under a path, unless a module saves its own parameter, or calls a submodule itself."""
        (first, first_part), (second, second_part) = self._owners[path], self._owner
        given = self._given[path]
        if _ENTRIES in (first_part, second_part):
            if _is_same_tensor(given, value):
                return
        elif first is not second and is_module(first) and is_module(second) and is_same_value(given, value):
            return
        owners = [
            f"the {part} of {type(obj).__name__}" for obj, part in (self._owners[path], self._owner) if obj is not None
        ]
        both = " and ".join(dict.fromkeys(owners)) or "serialize"
        raise ValueError(
            f"{path!r} is saved twice, by {both}, and only one value could be loaded again; give each value a key of its own"
            + (". Parameters and buffers of a module are saved in any case" if _ENTRIES in (first_part, second_part) else "")
        )


class StateCollector(DictionarySerializer):
    """Saves into ``target`` without copying, for state that is written or copied before the training continues."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__()
        self._given = self.target
        self.directory = directory
        self.referred: list[Path] = []  # the files to which the state refers

    def __call__(self, key: str, value: Any) -> Any:
        # hot path: "chainring, asynchronous" in benchmarks/snapshot.py, for thousands of parameters
        path = self._path + key
        if path in self._owners:
            self._check_repeated(path, value)
            return value
        self._owners[path] = self._owner
        self.target[path] = value
        return value

    def refer(self, path: Path) -> None:
        self.referred.append(path)

    def own_paths(self) -> list[str]:
        """Return the paths of what modules have saved beside their parameters and buffers."""
        below = tuple(self._called)
        return (
            [path for path, (_, part) in self._owners.items() if part != _ENTRIES and path.startswith(below)]
            if below
            else []
        )


class StoredTensor:
    """A tensor in the files of a snapshot, which is read on demand."""

    def __init__(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: Any, origin: TensorReader) -> None:
        self.name, self.dtype, self.shape, self.strides = name, dtype, shape, strides
        self.origin = origin
        self.convert: Callable[[Tensor], Any] | None = None  # makes of it the value that was saved, such as an array

    def __deepcopy__(self, memo: object) -> StoredTensor:
        return self

    def converted(self, convert: Callable[[Tensor], Any]) -> StoredTensor:
        """Return a value that is made of this tensor."""
        other = copy.copy(self)
        other.convert = convert
        return other

    def fits(self, value: Any) -> bool:
        """Return whether the tensor can be read into an existing value without changing a number."""
        if not isinstance(value, Tensor) or self.convert is not None or is_lazy(value) or value.is_meta:
            return False
        if value.layout is not torch.strided or (tuple(value.shape), value.dtype) != (self.shape, self.dtype):
            return False
        local = to_local(value)
        is_expanded = any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))
        return not (is_expanded or local.is_inference() or is_summand(value) or type(local) not in (Tensor, nn.Parameter))

    def empty(self, like: Any = None) -> Tensor:
        """Return a tensor to read it into, sharded as one of the same shape."""
        if is_sharded(like) and tuple(like.shape) == self.shape and self.convert is None and not is_summand(like):
            return empty_shard_like(like, self.dtype)  # type: ignore[no-any-return]
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


class TensorReader(Protocol):
    """Reads the tensors of a snapshot, perhaps together with other ranks."""

    def read(self, targets: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Read each of these into a tensor of its shape and dtype, which may be sharded."""

    def conclude(self) -> None:
        """Read for the other ranks until none of them needs it."""


def _read_into(targets: Sequence[tuple[StoredTensor, Tensor]]) -> None:
    """Read tensors; what is the same memory twice, as tied parameters are, is read once."""
    views = {(id(stored), _view_of(to_local(target))): (stored, target) for stored, target in targets}
    if views:
        targets[0][0].origin.read(list(views.values()))


def read_stored(value: Any, target_of: Callable[[StoredTensor, tuple[Any, ...]], Tensor] | None = None) -> Any:
    """Return a value with all tensors in it read, each into what ``target_of`` returns for it and the keys to it."""
    targets: dict[int, tuple[StoredTensor, Tensor]] = {}

    def place(stored: StoredTensor, keys: tuple[Any, ...]) -> StoredTensor:
        if id(stored) not in targets:
            targets[id(stored)] = stored, stored.empty() if target_of is None else target_of(stored, keys)
        return stored

    def take(stored: StoredTensor, keys: tuple[Any, ...]) -> Any:
        tensor = targets[id(stored)][1]
        return tensor if stored.convert is None else stored.convert(tensor)

    _replace_stored(value, place, ())
    if not targets:
        return value
    _read_into(list(targets.values()))
    return _replace_stored(value, take, ())


def _has_stored(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_has_stored, value))
    return any(map(_has_stored, value.values())) if isinstance(value, dict) else isinstance(value, StoredTensor)


def _replace_stored(value: Any, function: Callable[[StoredTensor, tuple[Any, ...]], Any], keys: tuple[Any, ...]) -> Any:
    if isinstance(value, StoredTensor):
        return function(value, keys)
    if type(value) in (list, tuple):
        return type(value)(_replace_stored(item, function, (*keys, i)) for i, item in enumerate(value))
    if isinstance(value, dict) and value:
        replaced = copy.copy(value)
        for key, item in value.items():  # by update, a Counter would add
            replaced[key] = _replace_stored(item, function, (*keys, key))
        return replaced
    return value


class DictionaryDeserializer(_ByPath, Deserializer):
    """Loads state from ``source``, a dictionary that a `DictionarySerializer` has filled; its values are copied.

    Raises:
        KeyError: with ``strict``, a requested key is missing in ``source``.

    Example::

        saved = DictionarySerializer()
        saved.visit("trigger", trigger)
        DictionaryDeserializer(saved.target).visit("trigger", other_trigger)
    """

    # Where a tensor comes back that a module keeps, such as its last output, and has not computed yet.
    _device: torch.device | None = None

    def __init__(self, source: Mapping[str, Any], strict: bool = True) -> None:
        super().__init__()
        self.source = source
        self.strict = strict
        self.origin: TensorReader | None = None  # from which the tensors of the source are read
        self._asked: set[str] = set()

    def _enter(self, key: str, owner: _Owner) -> Self:
        below = super()._enter(key, owner)
        if isinstance(owner[0], nn.Module) and owner[1] != _ENTRIES:
            devices = {parameter.device for parameter in owner[0].parameters()}
            below._device = devices.pop() if len(devices) == 1 else None
        return below

    def __call__(self, key: str, value: Any) -> Any:
        path = self._path + key
        self._asked.add(path)
        if path in self.source:
            return self._restore(path, value)
        if self.strict:
            raise KeyError(
                f"the saved state has no {path!r}. It comes from an object of another type or version; "
                "load it into the object that it was saved from, or pass strict=False to keep missing values as they are"
            )
        return value

    def _restore(self, path: str, value: Any) -> Any:
        """Return the saved value as the object declares it."""
        saved = self.source[path]
        if isinstance(saved, StoredTensor) and saved.fits(value):
            _read_into([(saved, value)])
            return value
        is_own = _has_stored(saved)
        saved = read_stored(copy_value(saved)) if is_own else saved
        if isinstance(value, (Tensor, np.ndarray)) and fill(value, saved):
            return value
        if saved is None and isinstance(value, nn.Parameter):  # left out of the snapshot
            return value
        if isinstance(value, _SCALARS):
            return to_type_of(value, saved)
        return _move(saved if is_own else copy_value(saved), self._device if value is None else None)

    def _read_entries(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        stored = {path: saved for path in entries if isinstance(saved := self.source.get(self._path + path), StoredTensor)}
        for path, saved in stored.items():
            self._asked.add(self._path + path)
            found[path] = entries[path] if saved.fits(entries[path]) else saved.empty(entries[path])
        _read_into([(saved, found[path]) for path, saved in stored.items()])
        return {path: found[path] if path in found else self(path, None) for path in entries}

    def read_like(self, key: str, value: Any, likes: Mapping[str, Any]) -> Any:
        """Load a dict whose items belong to the tensors ``likes`` of their keys, as shards where those are sharded."""
        path = self._path + key
        saved = copy_value(self.source.get(path))
        if not isinstance(saved, dict):
            return self(key, value)
        self._asked.add(path)

        def target_of(stored: StoredTensor, keys: tuple[Any, ...]) -> Tensor:
            at_hand = value
            for each in keys:
                at_hand = at_hand.get(each) if isinstance(at_hand, dict) else None
            return at_hand if stored.fits(at_hand) else stored.empty(likes.get(keys[0]))

        return read_stored(saved, target_of)

    def _was_asked(self, key: str) -> bool:
        return self._path + key in self._asked

    def paths(self) -> Iterator[str]:
        start = len(self._path)
        return (path[start:] for path in self.source if path.startswith(self._path))


_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_SCALARS = (*_NUMBERS, str)


def to_type_of(value: Any, saved: Any) -> Any:
    """Return a saved number or string in the type of ``value``, or unchanged if that type cannot represent it exactly."""
    cls, is_text = type(value), isinstance(value, str)
    is_same_kind = isinstance(saved, str) if is_text else isinstance(saved, _NUMBERS) and not is_text
    if type(saved) is cls or not is_same_kind or np.timedelta64 in (cls, type(saved)):
        return copy_value(saved)
    try:
        with warnings.catch_warnings(action="error", category=DeprecationWarning):  # as NumPy before 2.0 says what it cuts
            converted = cls(saved)
        is_exact = repr(type(saved)(converted)) == repr(saved)
    except (TypeError, ValueError, OverflowError, DeprecationWarning):
        return saved
    return converted if is_exact else saved


def fill(value: Tensor | np.ndarray[Any, Any], saved: Any) -> bool:
    """Copy saved numbers into a tensor or array; return False, and leave it, if its shape or dtype is another one."""
    if isinstance(value, np.ndarray):
        array = as_array(saved)
        if array is None or type(value) not in (np.ndarray, np.memmap) or value.dtype.hasobject or not value.flags.writeable:
            return False
        if (value.shape, value.dtype) != (array.shape, array.dtype):
            return False
        np.copyto(value, array)
        return True
    tensor = as_tensor(saved)
    if tensor is None or is_lazy(value) or value.is_meta or value.layout is not torch.strided:
        return False
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        return False
    try:
        with torch.no_grad():
            value.copy_(shard_like(tensor, value))
    except RuntimeError:  # it must not be written to: it is expanded, or was made in inference mode
        return False
    return True


def as_tensor(value: Any) -> Tensor | None:
    """Return a tensor as it is and an array as a tensor; ``None`` for anything else, and where PyTorch lacks the dtype."""
    if not isinstance(value, np.ndarray):
        return value if isinstance(value, Tensor) else None
    try:
        return torch.from_numpy(np.array(value, order="K"))
    except (TypeError, ValueError):
        return None


def as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array as it is and a tensor as an array; ``None`` for anything else, and where NumPy lacks the dtype."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, np.ndarray) else None
    try:
        array: np.ndarray[Any, Any] = to_full(value.detach()).cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError):
        return None
    return array


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal, also where they are arrays or tensors, or hold such."""
    if one is other:
        return True
    if isinstance(one, (Tensor, np.ndarray)) or isinstance(other, (Tensor, np.ndarray)):
        arrays = as_array(one), as_array(other)
        return type(one) is type(other) and arrays[0] is not None and np.array_equal(arrays[0], arrays[1])  # type: ignore[arg-type]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_value(value, other[key]) for key, value in one.items())
    return bool(one == other)


def _is_same_tensor(one: Any, other: Any) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if one is other:
        return True
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or is_lazy(one) or is_lazy(other):
        return False
    return is_sharded(one) == is_sharded(other) and _view_of(to_local(one)) == _view_of(to_local(other))


def copy_value(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a copy that shares no memory with ``value``; tensors leave their graph, keep dtype, device and strides.

    A tensor that stands in several places of ``value``, such as the learning rate of two groups, is one in the copy too.
    """
    memo = {} if memo is None else memo
    if hasattr(value, "detach"):
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone()
        return memo[id(value)]
    if type(value) in (list, tuple):
        return type(value)(copy_value(item, memo) for item in value)
    if type(value) is dict:
        return {key: copy_value(item, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)


def _move(value: Any, device: torch.device | None) -> Any:
    """Return a value with its tensors on an accelerator, if that is given."""
    if device is None or device.type in ("cpu", "meta"):
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_move(item, device) for item in value)
    if type(value) is dict:
        return {key: _move(item, device) for key, item in value.items()}
    return value


def find_aliases(tensors: Mapping[K, Tensor]) -> dict[K, K]:
    """Return the key of the first tensor that is the same view of the same memory, by key: its own unless it is tied."""
    addresses = list(map(Tensor.data_ptr, tensors.values()))
    if len(set(addresses)) == len(addresses):
        return dict(zip(tensors, tensors, strict=True))
    counts = Counter(addresses)
    first: dict[Any, K] = {}
    return {
        name: first.setdefault(address if counts[address] == 1 else _view_of(tensors[name]), name)
        for name, address in zip(tensors, addresses, strict=True)
    }


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    memory = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.storage_offset())
    return (*memory, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


class Stateful:
    """Base class that derives ``state_dict`` and ``load_state_dict`` from ``serialize``, which does nothing by default."""

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Declare the state that changes while training; settings are never state."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, keyed by path (``"updater/iteration"``): later training does not change it."""
        serializer = DictionarySerializer()
        self.serialize(serializer)
        return serializer.target

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned. A missing key raises a ``KeyError`` that names it."""
        with telling_changes([]):
            self.serialize(DictionaryDeserializer(state_dict))
