"""Serializers: an object declares its changing state once for both directions, in ``serialize(serializer)``."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import shard_like
from chainring._messages import announce_change
from chainring._naming import name_cleaner


class AbstractSerializer:
    """The destination or source of state. ``serializer[key]`` is a child, ``serializer(key, value)`` is one value.

    While saving, a serializer hands back the value that it was given; while loading, the value that was saved. So the
    line reads the same both ways and the two directions cannot drift apart.

    Example::

        def serialize(self, serializer):
            self.iteration = serializer("iteration", self.iteration)
            serializer.visit("iterator", self.iterator)

    Attributes:
        directory: the directory in which the snapshot lies; ``None`` where state stays in memory. What is appended to a
            file beside the snapshot, such as the rows of a log, need not be written again into each snapshot: a reference
            to the file will do.
        comm: the communicator of the ranks that save or load together, each in the same order. What each rank has for itself
            is gathered while saving, and is given to rank 0 while loading. State that stays in memory is the rank's own.
    """

    directory: Path | None = None
    comm: Communicator = Communicator()

    def __getitem__(self, key: str) -> AbstractSerializer:
        raise NotImplementedError

    def __call__(self, key: str, value: Any) -> Any:
        """Save ``value`` under ``key`` and return it, or return what was saved there.

        A value is a number, a string, bytes, ``None``, a tensor, an array, or a list, tuple or dict of such.
        """
        raise NotImplementedError

    def visit(self, key: str, obj: Any) -> None:
        """Save or load a whole object under ``key``: by its ``serialize``, or its ``state_dict``/``load_state_dict``.

        An empty key means the serializer itself.
        A module's entries become one key each, with slashes for dots, so that a submodule can be found by its path.

        Raises:
            TypeError: the object has neither.
        """
        method = serialize_method(obj)
        if method is not None:
            method(self[key])
        elif hasattr(obj, "named_parameters") and has_state(obj):
            self[key]._visit_module(obj)
        elif has_state(obj):
            self[key]._visit_state(obj)
        else:
            raise TypeError(
                f"{type(obj).__name__} has no state to save or load at {key!r}: "
                "give it serialize(serializer), or state_dict() and load_state_dict(state)"
            )

    def _visit_module(self, module: Any) -> None:
        raise NotImplementedError

    def _visit_state(self, obj: Any) -> None:
        raise NotImplementedError


class Serializer(AbstractSerializer):
    """The direction of saving. ``isinstance(serializer, Serializer)`` is how an object asks which way it goes.

    Example::

        def serialize(self, serializer):
            lines = serializer("lines", len(self.lines))
            if not isinstance(serializer, Serializer):
                self.lines = read_lines(self.path, lines)
    """

    def refer(self, path: Path) -> None:
        """Note that the state refers to this file: it is flushed to the disk before the snapshot is published."""

    def _visit_module(self, module: Any) -> None:
        clean = name_cleaner(module)
        for name, value in module.state_dict().items():
            self(clean(name).replace(".", "/"), value)

    def _visit_state(self, obj: Any) -> None:
        self("state_dict", obj.state_dict())


class Deserializer(AbstractSerializer):
    """The direction of loading. With ``strict`` a key that was not saved is an error, else the value at hand is kept.

    Example::

        def serialize(self, serializer):
            if isinstance(serializer, Deserializer) and "momentum" not in set(serializer.paths()):
                return  # saved by a version without momentum
            self.momentum = serializer("momentum", self.momentum)
    """

    strict: bool = True

    def __getitem__(self, key: str) -> Deserializer:
        raise NotImplementedError

    def paths(self) -> Iterator[str]:
        """Return every key saved below here, as paths relative to here."""
        raise NotImplementedError

    def _visit_module(self, module: Any) -> None:
        """Load a module; a parameter that was saved as ``None`` was left out and stays what it is."""
        entries, clean = module.state_dict(), name_cleaner(module)
        names = {clean(name).replace(".", "/"): name for name in entries}  # a name may hold slashes of its own
        saved = {names.get(path, path.replace("/", ".")): self(path, None) for path in self.paths()}
        saved = {name: shard_like(value, entries.get(name)) for name, value in saved.items()}
        left_out = [name for name, value in saved.items() if value is None and hasattr(entries.get(name), "detach")]
        module.load_state_dict(saved | {name: entries[name] for name in left_out}, strict=self.strict)

    def _visit_state(self, obj: Any) -> None:
        state = self("state_dict", None)
        if state is not None:
            obj.load_state_dict(state)


def visit_setting(serializer: AbstractSerializer, key: str, value: Any, name: str) -> None:
    """Record a setting beside state. It is not state: the saved value does not hold, and is printed where it differs."""
    try:
        saved = serializer(key, value)
    except KeyError:  # of a snapshot that was made before it was recorded
        return
    if saved != value:
        announce_change(name, saved, value)


def visit_if_stateful(serializer: AbstractSerializer, key: str, obj: Any) -> None:
    """Save or load an object under ``key``, if it has state."""
    if serialize_method(obj) is not None or has_state(obj):
        serializer.visit(key, obj)


def has_state(obj: Any) -> bool:
    """Return whether an object has PyTorch's pair ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def serialize_method(obj: Any) -> Callable[[AbstractSerializer], None] | None:
    """Return an object's ``serialize``, unless its class declares the PyTorch pair on top of one that it inherits."""
    method: Callable[[AbstractSerializer], None] | None = getattr(obj, "serialize", None)
    if not callable(method):
        return None
    for cls in type(obj).__mro__:  # whichever is declared by the more derived class speaks for the object
        if "serialize" in vars(cls):
            return method
        if "state_dict" in vars(cls) and has_state(obj):
            return None
    return method


class _ByPath(AbstractSerializer):
    """A serializer that knows every value by its path."""

    _path = ""

    def __getitem__(self, key: str) -> Self:
        # hot path: "chainring, asynchronous" in benchmarks/snapshot.py; copy.copy takes five times as long
        below = object.__new__(type(self))
        vars(below).update(vars(self), _path=f"{self._path}{key}/" if key else self._path)
        return below


class DictionarySerializer(_ByPath, Serializer):
    """Saves into ``target``, a dictionary from path to value.

    Tensors, arrays and containers are copied, so that what was saved does not follow the training that goes on.

    Example::

        serializer = DictionarySerializer()
        serializer.visit("model", model)
        DictionaryDeserializer(serializer.target).visit("model", other_model)
    """

    def __init__(self, target: dict[str, Any] | None = None) -> None:
        self.target: dict[str, Any] = {} if target is None else target

    def __call__(self, key: str, value: Any) -> Any:
        self.target[self._path + key] = copy_value(value)
        return value


class StateCollector(DictionarySerializer):
    """Saves into ``target`` without copying, for state that is written or copied before the training goes on."""

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__()
        self.directory = directory
        self.referred: list[Path] = []  # the files to which the state refers

    def __call__(self, key: str, value: Any) -> Any:
        self.target[self._path + key] = value
        return value

    def refer(self, path: Path) -> None:
        self.referred.append(path)


class DictionaryDeserializer(_ByPath, Deserializer):
    """Loads from ``source``, a dictionary that a `DictionarySerializer` has filled; its values are copied.

    Raises:
        KeyError: with ``strict``, a key is asked for that ``source`` lacks.

    Example::

        saved = DictionarySerializer()
        saved.visit("trigger", trigger)
        DictionaryDeserializer(saved.target).visit("trigger", other_trigger)
    """

    def __init__(self, source: Mapping[str, Any], strict: bool = True) -> None:
        self.source = source
        self.strict = strict

    def __call__(self, key: str, value: Any) -> Any:
        path = self._path + key
        if path in self.source:
            return copy_value(self.source[path])
        if self.strict:
            raise KeyError(
                f"the saved state has no {path!r}. It comes from an object of another type or version; "
                "load it into what it was saved from, or with strict=False to keep what is missing as it is"
            )
        return value

    def paths(self) -> Iterator[str]:
        start = len(self._path)
        return (path[start:] for path in self.source if path.startswith(self._path))


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


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the name of the first tensor that is the same view of the same memory, by name: its own unless it is tied."""
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    counts = Counter(addresses.values())
    first: dict[Any, str] = {}
    return {
        name: first.setdefault(address if counts[address] == 1 else _view_of(tensors[name]), name)
        for name, address in addresses.items()
    }


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    memory = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.storage_offset())
    return (*memory, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


class Stateful:
    """The base that derives PyTorch's pair of methods from ``serialize``, which does nothing until it is overridden."""

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Declare the state that changes while training; settings are never state."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state, keyed by path (``"updater/iteration"``): later training does not change it."""
        serializer = DictionarySerializer()
        self.serialize(serializer)
        return serializer.target

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned. A missing key raises a ``KeyError`` that names it."""
        self.serialize(DictionaryDeserializer(state_dict))
