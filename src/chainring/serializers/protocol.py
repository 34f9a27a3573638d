"""Serializers: an object declares its changing state once for both directions; by which paths modules lie in it."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import shard_like
from chainring._messages import info
from chainring.serializers._values import (
    SCALARS,
    StoredTensor,
    copy_value,
    fill,
    is_same_tensor,
    is_same_value,
    move,
    read_stored,
    to_type_of,
)

_Owner = tuple[Any, str]
"""An object that is visited, and what of it: ``serialize``, ``state_dict``, or its entries as a module."""
ENTRIES = "parameters and buffers"
_STATELESS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
"""Wrapper classes that have no state of their own, and the attribute that holds the model."""
_WRAPPERS = {**_STATELESS, "AveragedModel": "module", "ActivationWrapper": "_checkpoint_wrapped_module"}


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
    _owner: _Owner = (None, "serialize")
    _module: nn.Module | None = None  # the innermost around, whose own state is visited

    def __init__(self) -> None:
        self._covered: set[tuple[str, int]] = set()  # path and id of the submodules of a module that is being visited
        self._called: set[str] = set()  # the paths of those whose serialize was called

    def __getitem__(self, key: str) -> Self:
        # hot path: "chainring, asynchronous" in benchmarks/snapshot.py; copy.copy takes five times as long
        below = object.__new__(type(self))
        vars(below).update(vars(self), _path=f"{self._path}{key}/" if key else self._path)
        return below

    def __call__(self, key: str, value: Any) -> Any:
        """Save ``value`` under ``key`` and return it, or return what was saved there.

        A value is a number, a string, bytes, ``None``, a tensor, an array, or a list, tuple or dict of these.
        """
        raise NotImplementedError

    def visit(self, key: str, obj: Any) -> None:
        """Save or load a whole object under ``key``: with its ``serialize``, or its ``state_dict``/``load_state_dict``.

        An empty key means the serializer itself. A ``serialize`` that does not take exactly one argument is ignored; of one
        that takes any, as the function of a decorator does, the decorated one counts. The entries of a module's
        ``state_dict`` become one key each, with slashes instead of dots, so that a submodule can be found by its path. In
        addition, each submodule with a ``serialize`` method saves its own state under its path.

        In a snapshot of several ranks, the state that classes of the script declare is that of rank 0, and beside it that
        of each rank that has another, which as many ranks get back.

        Raises:
            TypeError: the object has neither of them, or a ``serialize(*args)`` that may not be the protocol's.
            ValueError: while saving, a key is saved twice.
        """
        if is_module(obj):
            self._enter(key, obj, ENTRIES)._visit_module(obj)
        elif (method := serialize_method(obj)) is not None:
            method(self._enter(key, obj, "serialize"))
        elif has_state(obj):
            below, is_saving = self._enter(key, obj, "state_dict"), isinstance(self, Serializer)
            state = below("state_dict", obj.state_dict() if is_saving else None)
            if not is_saving and state is not None:
                obj.load_state_dict(state)
        else:
            reason = "; the serialize that it has does not take a serializer alone" if hasattr(obj, "serialize") else ""
            raise TypeError(
                f"{type(obj).__name__} has no state to save or load at {self._path + key!r}: "
                f"give it serialize(serializer), or state_dict() and load_state_dict(state){reason}"
            )

    def _enter(self, key: str, obj: Any, part: str) -> Self:
        below = self[key]
        below._owner = obj, part
        if part != ENTRIES and isinstance(obj, nn.Module):
            below._module = obj
        return below

    def _visit_module(self, module: Any) -> None:
        """Visit its entries, unless a module around it brings them, and the submodules that still have their own state."""
        is_covered, is_saving = (self._path, id(module)) in self._covered, isinstance(self, Serializer)
        if own := own_states(module):
            clean = name_cleaner(module)
            for name, part in module.named_modules(remove_duplicate=False):
                self._covered.add((self[clean(name).replace(".", "/")]._path, id(part)))
            own = [(path, part) for path, part in own if self[path]._path not in self._called]
            self._called.update(self[path]._path for path, _ in own)
        if is_saving and not is_covered:
            self._visit_entries(module, own)
        for path, part in own:
            part.serialize(self._enter(path, part, "serialize"))
        if not is_saving and not is_covered:  # now it is known what else was saved below them
            self._visit_entries(module, own)

    def _visit_entries(self, module: Any, own: list[tuple[str, Any]]) -> None:
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

    def paths(self) -> Iterator[str]:
        """Return all keys saved below this serializer, as paths relative to it."""
        raise NotImplementedError


class DictionarySerializer(Serializer):
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
        # hot path: "chainring, asynchronous" in benchmarks/snapshot.py, for thousands of parameters
        path = self._path + key
        if path in self._owners:
            self._check_repeated(path, value)
            return value
        self._owners[path] = self._owner
        self._given[path] = value
        if self._given is not self.target:
            self.target[path] = copy_value(value)
        return value

    def visited(self) -> list[Any]:
        """Return the objects that have saved something, each once."""
        return list({id(obj): obj for obj, _ in self._owners.values()}.values())

    def _visit_entries(self, module: Any, own: list[tuple[str, Any]]) -> None:
        entries = state_entries(module)
        for path, name in entry_names(module, entries, self._path).items():
            self(path, entries[name])

    def _check_repeated(self, path: str, value: Any) -> None:
        """Refuse a second value under a path, unless a module saves its own parameter, or calls a submodule itself."""
        (first, first_part), (second, second_part) = owners = self._owners[path], self._owner
        given, has_entries = self._given[path], ENTRIES in (first_part, second_part)
        if has_entries:
            if is_same_tensor(given, value):
                return
        elif first is not second and is_module(first) and is_module(second) and is_same_value(given, value):
            return
        named = dict.fromkeys(f"the {part} of {type(obj).__name__}" for obj, part in owners if obj is not None)
        raise ValueError(
            f"{path!r} is saved twice, by {' and '.join(named) or 'serialize'}, and only one value could be loaded again; "
            "give each value a key of its own"
            + (". Parameters and buffers of a module are saved in any case" if has_entries else "")
        )


class DictionaryDeserializer(Deserializer):
    """Loads state from ``source``, a dictionary that a `DictionarySerializer` has filled; its values are copied.

    Raises:
        KeyError: with ``strict``, a requested key is missing in ``source``.

    Example::

        saved = DictionarySerializer()
        saved.visit("trigger", trigger)
        DictionaryDeserializer(saved.target).visit("trigger", other_trigger)
    """

    _ignores: Callable[[str], bool] | None = None  # whether the value at hand is kept in place of the saved one, by path

    def __init__(self, source: Mapping[str, Any], strict: bool = True) -> None:
        super().__init__()
        self.source = source
        self.strict = strict
        self.origin: Any = None  # the tensors of the snapshot from which those of the source are read
        self._asked: set[str] = set()

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

    def paths(self) -> Iterator[str]:
        start = len(self._path)
        return (path[start:] for path in self.source if path.startswith(self._path))

    def _restore(self, path: str, value: Any) -> Any:
        """Return the saved value as the object declares it."""
        saved = self.source[path]
        if isinstance(value, (Tensor, np.ndarray)):
            saved = read_stored(saved, value)
            if saved is value or fill(value, saved):
                return value
        if saved is None and isinstance(value, nn.Parameter):  # left out of the snapshot
            return value
        if isinstance(value, SCALARS):
            return to_type_of(value, read_stored(saved))
        restored = read_stored(copy_value(saved))
        if value is not None or self._module is None:
            return restored
        devices = {parameter.device for parameter in self._module.parameters()}  # of what it keeps, such as its last output
        return move(restored, devices.pop()) if len(devices) == 1 else restored

    def _visit_entries(self, module: Any, own: list[tuple[str, Any]]) -> None:
        """Load a module; a parameter that was saved as ``None`` was left out and stays what it is."""
        entries = state_entries(module)
        names = entry_names(module, entries, self._path)
        paths = [path for path in self.paths() if path in names or self._path + path not in self._asked]
        name_of = {path: names.get(path, path.replace("/", ".")) for path in paths}
        at_hand = {path: entries.get(name) for path, name in name_of.items()}
        stored = {path: value for path in paths if isinstance(value := self.source[self._path + path], StoredTensor)}
        self._asked.update(self._path + path for path in stored)
        read = read_stored(stored, at_hand, at_hand)
        saved = {
            name_of[path]: shard_like(read[path] if path in stored else self(path, None), current)
            for path, current in at_hand.items()
        }
        kept = [name for name, value in saved.items() if value is None and hasattr(entries.get(name), "detach")]
        if self._ignores is not None:
            kept += [name for path, name in names.items() if self._ignores(self._path + path)]
        try:
            load_entries(module, saved | {name: entries[name] for name in kept}, self.strict)
        except RuntimeError as error:
            if own:
                classes = ", ".join(sorted({type(part).__name__ for _, part in own}))
                error.add_note(f"Your own serialize, here of {classes}, asks for the keys that it saves when it loads too")
            raise


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
        with printing_changes([]):
            self.serialize(DictionaryDeserializer(state_dict))


def visit_setting(serializer: AbstractSerializer, key: str, value: Any, name: str) -> None:
    """Record a setting, a number, string or ``None``, beside the state: the saved one is printed if it differs."""
    saved = visit_optional(serializer, key, value)
    if saved != value:
        announce_change(name, saved, value)


def visit_optional(serializer: AbstractSerializer, key: str, value: Any) -> Any:
    """Save or load a value that not every snapshot has; from one without it, the current value is returned."""
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
    saved = serializer.source.get(serializer._path + key) if isinstance(serializer, DictionaryDeserializer) else None
    if not isinstance(serializer, DictionaryDeserializer) or not isinstance(saved, dict):
        return serializer(key, value)
    serializer._asked.add(serializer._path + key)
    return read_stored(copy_value(saved), value, likes)


def visit_if_stateful(serializer: AbstractSerializer, key: str, obj: Any) -> None:
    """Save or load an object under ``key``, if it has state."""
    method = serialize_method(obj)
    saves_nothing = getattr(method, "__func__", None) is Stateful.serialize
    if not saves_nothing and (method is not None or has_state(obj)):
        serializer.visit(key, obj)


def has_state(obj: Any) -> bool:
    """Return whether an object has PyTorch's pair ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def is_module(obj: Any) -> bool:
    """Return whether an object is a module, of which the entries of its ``state_dict`` are saved in any case."""
    if isinstance(obj, nn.Module):
        return True
    return has_state(obj) and serialize_method(obj) is None and hasattr(obj, "named_parameters")


def serialize_method(obj: Any) -> Callable[[Any], None] | None:
    """Return an object's ``serialize``, if it takes a serializer and nothing else.

    A class that declares the PyTorch pair on top of a ``serialize`` that it inherits is saved by the pair.
    """
    method: Callable[[Any], None] | None = getattr(obj, "serialize", None)
    if not callable(method) or not _takes_serializer(obj, method):
        return None
    for cls in type(obj).__mro__:  # whichever is declared by the more derived class speaks for the object
        if "serialize" in vars(cls):
            return method
        if "state_dict" in vars(cls) and has_state(obj):
            return None
    return method


_takes_one: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""By the function of a method, whether the method takes exactly one required argument."""


def _takes_serializer(obj: Any, method: Any) -> bool:
    function, bound_to = getattr(method, "__func__", None), getattr(method, "__self__", None)
    if isinstance(bound_to, type) or (isinstance(method, FunctionType) and "serialize" not in getattr(obj, "__dict__", {})):
        return False  # a class method or a static method, which knows nothing of the object's state
    is_known = isinstance(function, FunctionType)
    if is_known and function in _takes_one:
        return _takes_one[function]
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # of a function that is not written in Python
        return False
    required = [p.kind for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_one = required in ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD])
    if not required and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        takes_one = _takes_serializer_below(obj, function if is_known else method)
    if is_known:
        _takes_one[function] = takes_one
    return takes_one


def _takes_serializer_below(obj: Any, function: Any) -> bool:
    """Return whether a ``serialize(*args, **kwargs)`` passes them on to a function that takes a serializer.

    Raises:
        TypeError: that cannot be known, of a class of the script.
    """
    from chainring._callables import defined_by, references  # which few programs need

    names = ("serialize", getattr(function, "__name__", None))  # that of a decorator around another is the same
    inner = [item for _, _, item in references(function) if isinstance(item, FunctionType) and item.__name__ in names]
    inherited = [vars(cls).get("serialize") for cls in type(obj).__mro__[1:] if cls is not Stateful]
    for method in (*inner, *(item for item in inherited if isinstance(item, FunctionType))):
        if _takes_serializer(obj, MethodType(method, obj)):
            return True
    if inner or defined_by(type(obj)) != "user":
        return False
    raise TypeError(
        f"serialize of {type(obj).__name__} takes *args, as the function of a decorator does, and may not take a serializer "
        "alone; put @functools.wraps(function) above that function, or declare serialize(self, serializer)"
    )


def own_states(module: Any) -> list[tuple[str, Any]]:
    """Return the submodules, each once and the module itself first, whose class has ``serialize(serializer)``, by path."""
    parts = submodules(module) if isinstance(module, nn.Module) else []
    classes = {cls for cls in set(map(type, parts)) if hasattr(cls, "serialize")}
    if not any(type(part) in classes or "serialize" in vars(part) for part in parts):
        return []
    clean, own = name_cleaner(module), []
    for name, part in module.named_modules():
        declared = getattr(type(part), "serialize", None)
        method = vars(part).get("serialize", declared and part.serialize)
        if callable(method) and declared is not Stateful.serialize and _takes_serializer(part, method):
            own.append((clean(name).replace(".", "/"), part))
    return own


def state_entries(module: Any) -> Mapping[str, Any]:
    """Return the parameters and buffers of a module by name, not copied."""
    cls: Any = type(module)
    is_derived = isinstance(module, nn.Module) and cls.state_dict is Stateful.state_dict  # from its serialize
    entries: Mapping[str, Any] = nn.Module.state_dict(module) if is_derived else module.state_dict()
    return entries


def load_entries(module: Any, entries: Mapping[str, Any], strict: bool) -> None:
    """Load parameters and buffers of a module by name."""
    cls: Any = type(module)
    is_derived = isinstance(module, nn.Module) and cls.state_dict is Stateful.state_dict  # from its serialize
    load = partial(nn.Module.load_state_dict, module) if is_derived else module.load_state_dict
    try:
        load(entries, strict=strict)
    except RuntimeError as error:
        head, *differences = str(error).splitlines()
        if differences and head.startswith("Error(s) in loading state_dict"):  # a line of each tensor, or with all names
            more = f" And {len(differences) - 1} more differences" if len(differences) > 1 else ""
            error.args = (f"{head} {shorten(differences[0], 300, placeholder=' ...')}{more}",)
        raise


def entry_names(module: Any, entries: Mapping[str, Any], below: str = "") -> dict[str, str]:
    """Return the name of each entry of a module by its path, which has slashes for dots and no prefix of a wrapper."""
    clean, names = name_cleaner(module), dict[str, str]()
    for name in entries:
        path = clean(name).replace(".", "/")
        if names.setdefault(path, name) != name:
            modules = dict(module.named_modules(remove_duplicate=False))
            owners = [(entry, modules.get(entry.rpartition(".")[0])) for entry in (names[path], name)]
            first, second = (
                repr(entry) + (f" of a {type(owner).__name__}" if owner is not None else "") for entry, owner in owners
            )
            raise ValueError(
                f"two entries of {type(module).__name__}, {first} and {second}, have one path in saved state, "
                f"{below + path!r}; rename one of these modules, parameters or buffers"
            )
    return names


def unwrap(model: Any) -> Any:
    """Return the module inside the wrappers of ``torch.compile`` and DDP; any other object is returned as it is.

    A wrapper changes how a model runs, not the names of its submodules, so its prefix must not reach a name.
    """
    while attributes := [_STATELESS[base.__name__] for base in type(model).__mro__ if base.__name__ in _STATELESS]:
        model = getattr(model, attributes[0])
    return model


def name_of_model(model: Any, models: Mapping[str, Any]) -> str:
    """Return the name that a model has among several, of one that is not among them its class."""
    model = unwrap(model)
    return next((name for name, registered in models.items() if unwrap(registered) is model), type(model).__name__)


def name_cleaner(model: nn.Module) -> Callable[[str], str]:
    """Return a function from the dotted name of a submodule, parameter or buffer to its name without wrappers."""
    attributes = {
        cls: _WRAPPERS[base.__name__]
        for cls in set(map(type, submodules(model)))
        for base in reversed(cls.__mro__)  # the most derived one decides
        if base.__name__ in _WRAPPERS
    }
    if not attributes:
        return str
    wrapped = [(path, attributes[type(module)]) for path, module in model.named_modules() if type(module) in attributes]
    prefixes = [(f"{path}.{attribute}".removeprefix("."), path) for path, attribute in reversed(wrapped)]  # innermost first

    def clean(name: str) -> str:
        for prefix, path in prefixes:
            if name == prefix or name.startswith(prefix + "."):
                name = (path + name[len(prefix) :]).removeprefix(".")
        return name

    return clean


def named_submodules(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every submodule of ``model`` with its path below ``name``, the model itself first; dots become slashes."""
    clean = name_cleaner(model)
    for path, module in model.named_modules():
        yield f"{name}/{clean(path).replace('.', '/')}".removesuffix("/"), module


def submodules(model: nn.Module) -> list[nn.Module]:
    """Return a model and its submodules, each once."""
    # hot path: "chainring, asynchronous" in benchmarks/snapshot.py; modules() takes three times as long
    if not hasattr(model, "_modules"):  # another class with the methods of a module
        return [module for _, module in model.named_modules()]
    visited: dict[nn.Module, None] = {}
    to_visit = [model]
    while to_visit:
        module = to_visit.pop()
        if module not in visited:
            visited[module] = None
            to_visit += [child for child in module._modules.values() if child is not None]
    return list(visited)


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id, such as ``main/predictor/l1/weight``; of a tied one the first."""
    names: dict[int, str] = {}
    for model_name, model in models.items():
        clean = name_cleaner(model)
        for path, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{model_name}/{clean(path).replace('.', '/')}")
    return names


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection while a snapshot is taken or loaded, and many lasting objects are created.

    Python looks for cycles among all objects each time that enough were made: with many tensors half of the time.
    """
    # hot path: "stop for a snapshot" in benchmarks/growth.py
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ChangedSetting(NamedTuple):
    """A setting of a resumed run that differs from the saved run, and the value that is used."""

    name: str
    saved: Any
    given: Any
    consequence: str


_Announced = tuple[list[ChangedSetting], dict[str, list[Any]] | None]
_announced: ContextVar[_Announced | None] = ContextVar("_announced", default=None)
_HOLDS = "the new value holds"


def announce_change(name: str, saved: Any, given: Any, consequence: str = _HOLDS) -> None:
    """Print that a setting of a resumed run differs; in `printing_changes` with the others, as one table."""
    setting, announced = ChangedSetting(name, saved, given, consequence), _announced.get()
    if announced is None:
        info(_format_changes([setting]))
        return
    unprinted, changes = announced
    unprinted.append(setting)
    if changes is not None:
        changes[name] = [saved, given]


@contextmanager
def printing_changes(
    unprinted: list[ChangedSetting], changes: dict[str, list[Any]] | None = None, *, is_complete: bool = True
) -> Iterator[None]:
    """Inside, add each announced change to ``unprinted``; at the end print all of these as one table, and empty it.

    With ``is_complete=False`` more changes will follow, and nothing is printed; nor is it inside another one, which prints.
    The saved and the given values are added to ``changes`` by name.
    """
    outer = _announced.get()
    unprinted, around = (unprinted, None) if outer is None else outer
    token = _announced.set((unprinted, around if changes is None else changes))
    try:
        yield
    finally:
        _announced.reset(token)
    if outer is None and unprinted and is_complete:
        info(_format_changes(unprinted))
        unprinted.clear()


def _format_changes(settings: Iterable[ChangedSetting]) -> str:
    """Return a table: ``setting  saved -> now``, and which value holds where that is not the new one."""
    notes = {_HOLDS: ""}
    given = ((s.name, repr(s.saved), repr(s.given), notes.get(s.consequence, f"  ({s.consequence})")) for s in settings)
    rows = [("setting", "saved", "now", ""), *dict.fromkeys(given)]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:{names}}  {saved:{values}} -> {now}{note}" for name, saved, now, note in rows]
    return "\n".join(["resumed with different settings from the saved run:", *lines])
