"""State of the script that reaches a trainer in a function alone: a trigger in a lambda, a loss that is a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from chainring._callables import defined_by, is_taken_apart, references
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
from chainring.training.updaters.base import Updater

_PLAIN = (type, ModuleType, str, bytes, int, float, complex, type(None), Tensor)
_MAX_DEPTH, _MAX_ITEMS, _MAX_OBJECTS = 8, 100, 10_000
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Carried:
    """The objects with state that a function carries, which are saved with it unless something else saves them.

    They are found once, when the function is registered. Of a module only those parameters and buffers are saved that have
    changed since: the constants of a loss, or a frozen network that gives its targets, cost nothing.

    Args:
        function: any callable.
        is_visited: True if its own state is saved, if it has some; then the functions of the script that an object of the
            library was given are looked into, such as the trigger of another one.
    """

    def __init__(self, function: Any, *, is_visited: bool = False) -> None:
        given: list[tuple[str, Any]] = [("", function)]
        is_of_the_library = defined_by(type(function)) == "library" and not is_taken_apart(function)
        if is_visited and (is_of_the_library or _has_own_state(function)):
            attributes = getattr(function, "__dict__", {}) if is_of_the_library else {}
            given = [(name, item) for name, item in attributes.items() if _is_of_the_script(item)]
        self.objects = {path: obj for name, item in given for path, obj in _find(name, item, {})}
        self._initial = {path: _fingerprints(obj) for path, obj in self.objects.items() if isinstance(obj, nn.Module)}

    def serialize(
        self, serializer: AbstractSerializer, elsewhere: Set[int] = frozenset(), *, is_whole: bool = False
    ) -> None:
        """Save what is not saved ``elsewhere``, of modules what has changed or the whole; or load what was saved.

        Raises:
            ValueError: a module has changed in a way that could not be loaded.
        """
        for path, obj in self.objects.items():
            if isinstance(serializer, Deserializer):
                is_visited = any(key.startswith(f"{path}/") for key in serializer.paths())
            else:
                is_visited = id(obj) not in elsewhere
            if is_visited:
                is_module = isinstance(obj, nn.Module)
                serializer.visit(path, _Changes(obj, self._initial[path], elsewhere, is_whole) if is_module else obj)


class _Changes:
    """The parameters and buffers of a module that have changed, and what its submodules save themselves."""

    may_differ_by_rank = True

    def __init__(self, module: nn.Module, initial: Mapping[str, Any], elsewhere: Set[int], is_whole: bool) -> None:
        self._module, self._initial, self._elsewhere, self._is_whole = module, initial, elsewhere, is_whole

    def serialize(self, serializer: AbstractSerializer) -> None:
        is_saving = isinstance(serializer, Serializer)
        tensors = _tensors_of(self._module)
        known = set(serializer.paths()) if isinstance(serializer, Deserializer) else set[str]()
        now = _fingerprints(self._module) if is_saving else {}
        for name in dict.fromkeys([*self._initial, *tensors]):
            key, tensor = name.replace(".", "/"), tensors.get(name)
            is_visited = key in known
            if is_saving:
                has_changed = self._is_whole or now.get(name) != self._initial.get(name)
                is_visited = id(tensor) not in self._elsewhere and has_changed
            if not is_visited:
                continue
            if tensor is None or (name not in self._initial) or serializer(key, tensor) is not tensor:
                raise ValueError(_refusal(self._module, name))
        for path, part in own_states(self._module):
            below = f"{path}/" if path else ""
            if id(part) not in self._elsewhere and (is_saving or any(key.startswith(below) for key in known)):
                part.serialize(serializer[path])


def _refusal(module: nn.Module, name: str) -> str:
    cls = type(module).__name__
    return (
        f"{name!r} of the {cls} that loss_func or another function carries has appeared, gone or changed its shape, "
        f'and could not be loaded; register the module, model={{"main": model, "loss": loss}}'
    )


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
    elif isinstance(value, Updater) or hasattr(value, "updater") or defined_by(type(value)) == "foreign":
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


def _fingerprints(module: nn.Module) -> dict[str, Any]:
    """Return what changes with the content of each tensor; of another layout, when it is replaced."""
    return {name: _fingerprint(tensor) for name, tensor in _tensors_of(module).items()}


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Any:
    try:
        local = to_local(tensor)
        real = torch.view_as_real(local) if local.is_complex() else local
        bits = real.view(_BITS[real.element_size()]).reshape(len(real) if real.ndim else 1, -1)
        sums = (bits.sum(dim, dtype=torch.int64) for dim in (0, 1))  # weighted by position, since a queue may turn
        weighted = [int((torch.arange(1, len(each) + 1, device=each.device) * each).sum()) for each in sums]
        return tensor.dtype, tuple(local.shape), weighted
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return id(tensor)


def carried_by(updater: Any) -> dict[str, Carried]:
    """Return what the functions of an updater carry, by the keys under which a trainer saves it."""
    functions = {name: getattr(updater, name, None) for name in ("loss_func", "converter")}
    for stage, callbacks in getattr(getattr(updater, "callbacks", None), "__dict__", {}).items():
        if isinstance(callbacks, tuple):
            functions |= {f"{stage}:{index}": callback for index, callback in enumerate(callbacks)}
    carried = {f"carried/{name}": Carried(function) for name, function in functions.items() if function is not None}
    return {key: item for key, item in carried.items() if item.objects}


def save_carried(
    serializer: Serializer, carried: Mapping[str, Carried], trainer: Trainer, *, is_whole: bool = False
) -> None:
    """Save what functions carry, as far as nothing else has been saved with it."""
    if not carried:
        return
    updater = trainer.updater
    objects = [trainer, updater, *updater.get_all_iterators().values(), *updater.get_all_optimizers().values()]
    parts = [part for entry in trainer.entries for part in (entry.extension, entry.trigger)]
    objects += [*parts, *(getattr(part, "scheduler", None) for part in parts if defined_by(type(part)) == "library")]
    objects += [*updater.get_all_models().values(), *getattr(serializer, "visited", list)()]
    models = {id(obj): obj for obj in objects if isinstance(obj, nn.Module)}
    modules = {id(module): module for model in models.values() for module in model.modules()}.values()
    tensors = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    elsewhere = set(map(id, [*objects, *modules, *tensors]))
    for key, item in carried.items():
        item.serialize(serializer[key], elsewhere, is_whole=is_whole)
        elsewhere |= set(map(id, item.objects.values()))


def check_carried(loss_func: Any, models: Mapping[str, nn.Module]) -> None:
    """Refuse a loss with virtual ranks whose buffers each of them would change, as those of a registered model do not."""
    registered = {id(module) for model in models.values() for module in model.modules()}
    for module in Carried(loss_func).objects.values():
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
