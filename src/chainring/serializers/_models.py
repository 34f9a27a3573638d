"""What a run has changed in a model since the script made it: the shapes of buffers, and which parts are trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._naming import has_buffers, name_cleaner, submodules
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_optional

Layouts = dict[str, Any]
"""By the path of a buffer its dtype and shape, or ``None``."""
_ABSENT, _LAZY = "absent", "lazy"


def _buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return by path the modules that have a saved buffer, and its name there."""
    clean = name_cleaner(model)
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                found[clean(f"{path}.{name}" if path else name).replace(".", "/")] = module, name
    return found


def buffer_layouts(model: nn.Module) -> Layouts:
    """Return the dtype and shape of each saved buffer of a model."""
    if not has_buffers(model):
        return {}
    return {path: _layout_of(module._buffers[name]) for path, (module, name) in _buffers(model).items()}


def _layout_of(buffer: Tensor | None) -> Any:
    if buffer is None or is_lazy(buffer):
        return None if buffer is None else _LAZY
    return [str(buffer.dtype), *buffer.shape]


def serialize_layouts(serializer: AbstractSerializer, name: str, model: nn.Module, initial: Layouts) -> None:
    """Save which buffers of a model have changed their shape or dtype since the script made them, or make them so."""
    current = buffer_layouts(model)
    changed: dict[str, Any] = {
        path: [initial.get(path, _ABSENT), current.get(path, _ABSENT)]
        for path in {**initial, **current}
        if current.get(path, _ABSENT) != initial.get(path, _ABSENT) != _LAZY
    }
    key = f"changed_buffers:{name}"
    if isinstance(serializer, Serializer):
        if changed:
            serializer(key, changed)
        return
    recorded, below = visit_optional(serializer, key, {}), serializer[f"model:{name}"]
    for path in changed.keys() - recorded.keys():
        # It has changed here before state is loaded, as in a rehearsal, and becomes again what the script had made.
        first, saved = initial.get(path, _ABSENT), visit_optional(below, path, None)
        if saved is None or _layout_of(saved) == first:
            _replace_buffer(model, path, saved, first == _ABSENT)
    restore_layouts(model, initial, recorded, lambda path: visit_optional(below, path, None))


def restore_layouts(
    model: nn.Module, initial: Layouts, recorded: Mapping[str, Any], read: Callable[[str], Tensor | None]
) -> None:
    """Replace the buffers that changed in the saved run by what ``read`` returns, where the script makes them as it did."""
    current = buffer_layouts(model)
    for path, (before, after) in recorded.items():
        if before == initial.get(path, _ABSENT) and after != current.get(path, _ABSENT):
            _replace_buffer(model, path, read(path), after == _ABSENT)


def _replace_buffer(model: nn.Module, path: str, value: Tensor | None, is_absent: bool) -> None:
    clean = name_cleaner(model)
    modules = {clean(name).replace(".", "/"): module for name, module in model.named_modules()}
    place, _, name = path.rpartition("/")
    module, name = _buffers(model).get(path, (modules.get(place), name))
    if module is None:  # the module that has it was added too, which no state can make
        return
    like = module._buffers.get(name)
    if like is None:
        like = next(itertools.chain(module.parameters(), module.buffers(), model.parameters(), model.buffers()), None)
    if name in module._buffers:
        delattr(module, name)
    vars(module).pop(name, None)
    if not is_absent:
        module.register_buffer(name, value if value is None or like is None else value.to(like.device))


_Flag = tuple[str, str]
"""``requires_grad`` and the path of a parameter, or ``training`` and the path of a module."""


class Flags:
    """Which parameters of a model are trained and which modules are in training mode: as the script says, and now.

    Changes during a run, such as parameters that an extension has unfrozen, are saved and restored. Everything else is as
    the script of the resumed run sets it.
    """

    def __init__(self, model: nn.Module, iteration: int) -> None:
        self._made = self._known = self._read(model)
        self._iteration = iteration  # up to which the script has set what has changed
        self._values: list[bool] | None = _flag_values(model)  # without names, which take time; None where some have changed

    def note(self, model: nn.Module, iteration: int) -> None:
        """Note what the script has set since; after an update it may have been an extension."""
        if iteration == self._iteration and _flag_values(model) != self._values:
            current = self._read(model)
            self._made = self._made | {key: value for key, value in current.items() if self._known.get(key) is not value}
            self._known = current
            self._values = _flag_values(model) if current == self._made else None

    def serialize(self, serializer: AbstractSerializer, name: str, model: nn.Module, iteration: int) -> None:
        """Save what has changed since the script had set it, or put all back."""
        key = f"changed_flags:{name}"
        if isinstance(serializer, Serializer):
            if _flag_values(model) == self._values:
                return
            changed: dict[str, dict[str, bool]] = {}
            for (flag, path), value in self._read(model).items():
                if self._made.get((flag, path)) is not value:
                    changed.setdefault(flag, {})[path] = value
            if changed:
                serializer(key, changed)
            return
        changed = visit_optional(serializer, key, {})
        for (flag, path), owners in _flag_owners(model).items():
            saved = changed.get(flag, {}).get(path, self._made.get((flag, path)))
            for owner in owners:
                if saved is not None and getattr(owner, flag) is not saved:
                    setattr(owner, flag, saved)
        self._known, self._iteration = self._read(model), iteration
        self._values = _flag_values(model) if self._known == self._made else None

    @staticmethod
    def _read(model: nn.Module) -> dict[_Flag, bool]:
        return {key: getattr(owners[0], key[0]) for key, owners in _flag_owners(model).items()}


def _flag_values(model: nn.Module) -> list[bool]:
    values = []
    for module in submodules(model):
        values.append(module.training)
        values += [parameter.requires_grad for parameter in module._parameters.values() if parameter is not None]
    return values


def _flag_owners(model: nn.Module) -> dict[_Flag, list[Any]]:
    """Return what has each flag; a wrapper has the path of the module inside."""
    clean = name_cleaner(model)
    owners: dict[_Flag, list[Any]] = {}
    for name, module in model.named_modules():
        path = clean(name).replace(".", "/")
        owners.setdefault(("training", path), []).append(module)
        for own_name, parameter in module._parameters.items():
            if parameter is not None:
                owners["requires_grad", f"{path}/{own_name}".removeprefix("/")] = [parameter]
    return owners
