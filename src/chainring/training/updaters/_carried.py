"""State of the script that reaches a trainer in a function alone: a trigger in a lambda, a loss that is a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._callables import defined_by, is_taken_apart, references
from chainring._distributed.digests import sums_of
from chainring._distributed.sharding import to_local
from chainring._progress import Trainer
from chainring.serializers.protocol import (
    AbstractSerializer,
    Deserializer,
    Serializer,
    Stateful,
    has_state,
    own_states,
    serialize_method,
)

OWN_ATTRIBUTES = frozenset(["_scheme", "comm", "_layouts", "_flags", "_groups"])
"""Of an updater, those that hold no state of the script."""

_PLAIN = (type, ModuleType, str, bytes, int, float, complex, type(None), Tensor)
_OF_UPDATER = "carried/"
_MAX_DEPTH, _MAX_ITEMS, _MAX_OBJECTS = 8, 100, 10_000


class Carried(dict[str, dict[str, Any]]):
    """The objects with state that functions carry, by the key under which a function is saved and by their paths there.

    They are found once, when a function is registered, and saved unless something else saves them. Of a module only those
    parameters and buffers are saved that have changed since: the constants of a loss, or a frozen network that gives its
    targets, cost nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._initial: dict[int, dict[str, Any]] = {}  # by the id of a module

    def add(self, key: str, function: Any, *, is_visited: bool = False) -> None:
        """Add what a function carries.

        If its own state is saved, it ``is_visited``; if it has some, then the functions of the script that an object of the
        library was given are looked into, such as the trigger of another one.
        """
        given = {"": function}
        is_of_the_library = defined_by(type(function)) == "library" and not is_taken_apart(function)
        if is_visited and (is_of_the_library or _has_own_state(function)):
            attributes = getattr(function, "__dict__", {}) if is_of_the_library else {}
            given = {name: item for name, item in attributes.items() if _is_of_the_script(item)}
        if objects := {path: obj for name, item in given.items() for path, obj in _find(name, item, {})}:
            self[key] = objects
            for module in (obj for obj in objects.values() if isinstance(obj, nn.Module)):
                self._initial.setdefault(id(module), _contents(module))

    def add_updater(self, updater: Any) -> None:
        functions = {name: getattr(updater, name, None) for name in ("loss_func", "converter")}
        for stage, callbacks in getattr(getattr(updater, "callbacks", None), "__dict__", {}).items():
            if isinstance(callbacks, tuple):
                functions |= {f"{stage}:{index}": callback for index, callback in enumerate(callbacks)}
        for name, function in functions.items():
            self.add(f"{_OF_UPDATER}{name}", function)

    def of_updater(self) -> Carried:
        carried = Carried()
        carried.update({key: objects for key, objects in self.items() if key.startswith(_OF_UPDATER)})
        carried._initial = self._initial
        return carried

    def save(self, serializer: Serializer, trainer: Trainer, *, is_whole: bool = False) -> None:
        """Save what nothing else has saved with it, of modules what has changed or the whole."""
        updater = trainer.updater
        objects = [trainer, updater, *updater.get_all_iterators().values(), *updater.get_all_optimizers().values()]
        parts = [part for entry in trainer.entries for part in (entry.extension, entry.trigger)]
        objects += [*parts, *(getattr(part, "scheduler", None) for part in parts if defined_by(type(part)) == "library")]
        objects += [*updater.get_all_models().values(), *getattr(serializer, "visited", list)()]
        models = {id(obj): obj for obj in objects if isinstance(obj, nn.Module)}
        modules = {id(module): module for model in models.values() for module in model.modules()}.values()
        tensors = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
        elsewhere = set(map(id, [*objects, *modules, *tensors]))
        for key, carried in self.items():
            for path, obj in carried.items():
                if id(obj) not in elsewhere:
                    serializer[key].visit(path, self._visited(obj, elsewhere, is_whole))
            elsewhere |= set(map(id, carried.values()))

    def load(self, serializer: Deserializer, key: str) -> None:
        for path, obj in self.get(key, {}).items():
            if any(saved.startswith(f"{path}/") for saved in serializer.paths()):
                serializer.visit(path, self._visited(obj))

    def _visited(self, obj: Any, elsewhere: Set[int] = frozenset(), is_whole: bool = False) -> Any:
        return _Changes(obj, self._initial[id(obj)], elsewhere, is_whole) if isinstance(obj, nn.Module) else obj


class _Changes:
    """The parameters and buffers of a module that have changed, and what its submodules save themselves."""

    may_differ_by_rank = True

    def __init__(self, module: nn.Module, initial: Mapping[str, Any], elsewhere: Set[int], is_whole: bool) -> None:
        self._module, self._initial, self._elsewhere, self._is_whole = module, initial, elsewhere, is_whole

    def serialize(self, serializer: AbstractSerializer) -> None:
        tensors, initial = _tensors_of(self._module), self._initial
        saved = set(serializer.paths()) if isinstance(serializer, Deserializer) else None
        now = _contents(self._module) if saved is None and not self._is_whole else {}
        for name in dict.fromkeys([*initial, *tensors]):
            key, tensor = name.replace(".", "/"), tensors.get(name)
            if saved is None:
                is_visited = id(tensor) not in self._elsewhere and (self._is_whole or now.get(name) != initial.get(name))
            else:
                is_visited = key in saved
            if is_visited and (tensor is None or name not in initial or serializer(key, tensor) is not tensor):
                raise ValueError(
                    f"{name!r} of the {type(self._module).__name__} that loss_func or another function carries has "
                    "appeared, gone or changed its shape, and could not be loaded; register the module, "
                    'model={"main": model, "loss": loss}'
                )
        for path, part in own_states(self._module):
            below = f"{path}/" if path else ""
            if id(part) not in self._elsewhere and (saved is None or any(key.startswith(below) for key in saved)):
                part.serialize(serializer[path])


def _find(path: str, value: Any, seen: dict[int, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what has state in what a callable carries, by paths that are the same in every process."""
    if isinstance(value, _PLAIN) or id(value) in seen or depth > _MAX_DEPTH or len(seen) > _MAX_OBJECTS:
        return
    seen[id(value)] = value  # kept alive, so that no id is given out twice
    children: list[tuple[str, Any]] = []
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        children = [(str(key), item) for key, item in items][:_MAX_ITEMS]
    elif is_taken_apart(value):
        named = {"argument": "argument:", "default": "default:", "attribute": "attribute:"}
        children = [(named.get(kind, "") + name, item) for kind, name, item in references(value)]
    elif isinstance(value, nn.Module):
        yield path or "self", value
    elif hasattr(value, "update_core") or hasattr(value, "updater") or defined_by(type(value)) == "foreign":
        return
    elif _has_own_state(value):
        if not hasattr(value, "__iter__"):  # a loader, which goes on where it was in its pass
            yield path or "self", value
    elif defined_by(type(value)) == "user":
        children = [*getattr(value, "__dict__", {}).items()]
        if callable(value):
            children.append(("__call__", type(value).__call__))
    for name, item in children:
        yield from _find(f"{path}/{name}".strip("/"), item, seen, depth + 1)


def _is_of_the_script(value: Any) -> bool:
    if isinstance(value, (FunctionType, partial)):
        return defined_by(value.func if isinstance(value, partial) else value) == "user"
    definer = type(value.__self__ if isinstance(value, MethodType) else value)
    return callable(value) and defined_by(definer) == "user" and not _has_own_state(value)


def _has_own_state(value: Any) -> bool:
    with suppress(TypeError):  # a serialize that may be for something else
        method = serialize_method(value)
        if getattr(method, "__func__", None) is Stateful.serialize:  # which saves nothing
            return False
        return method is not None or has_state(value)
    return False


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    entries: dict[str, Any] = nn.Module.state_dict(module, keep_vars=True)
    return {name: tensor for name, tensor in entries.items() if isinstance(tensor, Tensor)}


def _contents(module: nn.Module) -> dict[str, Any]:
    """Return what changes with the content of each tensor; of one whose content is not known, when it is replaced."""
    tensors = _tensors_of(module)
    known = {name: to_local(t.detach()) for name, t in tensors.items() if not (is_lazy(t) or t.is_quantized)}
    sums = zip(known.items(), sums_of(list(known.values())), strict=True)
    contents = {name: (local.dtype, local.shape, total or id(tensors[name])) for (name, local), total in sums}
    return {name: contents.get(name, id(tensor)) for name, tensor in tensors.items()}


def check_carried(loss_func: Any, models: Mapping[str, nn.Module]) -> None:
    """Refuse a loss with virtual ranks whose buffers each of them would change, as those of a registered model do not."""
    registered = {id(module) for model in models.values() for module in model.modules()}
    for _, module in _find("", loss_func, {}):
        if not isinstance(module, nn.Module) or not module.training or id(module) in registered:
            continue
        for name, part in module.named_modules():
            buffers = {f"{name}.{key}".strip(".") for key, item in part._buffers.items() if item is not None}
            if buffers and id(part) not in registered and not type(part).__module__.startswith("torch.nn.modules.loss"):
                raise ValueError(
                    f"virtual ranks compute an update with the buffers of registered models as they were before it, and "
                    f"loss_func carries a {type(module).__name__} with the buffers {sorted(buffers)}, which is not "
                    'registered; write model={"main": model, "loss": loss}, or loss.eval() if they are constants'
                )
