"""The protocol by which an object declares its state, and the entries of modules: their parameters and buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from chainring._naming import name_cleaner, submodules

F = TypeVar("F")

_derived: list[Any] = []


def derived(method: F) -> F:
    """Mark a method that `Stateful` gives to every subclass, which says nothing of the state of one."""
    _derived.append(method)
    return method


def has_state(obj: Any) -> bool:
    """Return whether an object has PyTorch's pair ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def is_module(obj: Any) -> bool:
    """Return whether an object is a module, of which the entries of its ``state_dict`` are saved in any case."""
    if isinstance(obj, nn.Module):
        return True
    return hasattr(obj, "named_parameters") and has_state(obj) and serialize_method(obj) is None


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
    return isinstance(module, nn.Module) and _is_derived(type(module).state_dict)


def _is_derived(method: Any) -> bool:
    return any(method is other for other in _derived)


def _has_own_state(module: nn.Module) -> bool:
    cls: Any = type(module)
    declared = getattr(cls, "serialize", None)
    if declared is None and "serialize" not in vars(module):
        return False
    method = vars(module).get("serialize", declared and module.serialize)
    return callable(method) and not _is_derived(declared) and _takes_serializer(module, method)


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
