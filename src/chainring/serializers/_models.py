"""What a run changes in a model since the script made it, and the state of optimizers by the names of parameters."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from numbers import Real
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from chainring._distributed.sharding import is_sharded, shard_like
from chainring.serializers._values import is_same_value
from chainring.serializers.protocol import (
    AbstractSerializer,
    Serializer,
    announce_change,
    name_cleaner,
    parameter_names,
    submodules,
    visit_like,
    visit_optional,
)

Layouts = dict[str, Any]
"""By the path of a buffer its dtype and shape, or ``None``."""
_ABSENT, _LAZY = "absent", "lazy"


def _buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return by path the modules that have a saved buffer, and its name there."""
    clean = name_cleaner(model)
    return {
        clean(f"{path}.{name}" if path else name).replace(".", "/"): (module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def buffer_layouts(model: nn.Module) -> Layouts:
    """Return the dtype and shape of each saved buffer of a model."""
    if not any(module._buffers for module in submodules(model)):  # most models; names take time
        return {}
    return {path: _layout_of(module._buffers[name]) for path, (module, name) in _buffers(model).items()}


def _layout_of(buffer: Tensor | None) -> Any:
    if buffer is None or is_lazy(buffer):
        return None if buffer is None else _LAZY
    return [str(buffer.dtype), *buffer.shape]


def serialize_layouts(serializer: AbstractSerializer, name: str, model: nn.Module, initial: Layouts) -> None:
    """Save which buffers of a model have changed their shape or dtype since the script made them, or make them so."""
    current = buffer_layouts(model)
    pairs = {path: [initial.get(path, _ABSENT), current.get(path, _ABSENT)] for path in {**initial, **current}}
    changed = {path: pair for path, pair in pairs.items() if pair[1] != pair[0] != _LAZY}
    key = f"changed_buffers:{name}"
    if isinstance(serializer, Serializer):
        if changed:
            serializer(key, changed)
        return
    recorded, below = visit_optional(serializer, key, {}), serializer[f"model:{name}"]
    for path in changed.keys() - recorded.keys():
        # It has changed here before state is loaded, as in a rehearsal, and becomes again what the script had made.
        first, saved = changed[path][0], visit_optional(below, path, None)
        if saved is None or _layout_of(saved) == first:
            _replace_buffer(model, path, saved, first == _ABSENT)
    if recorded:
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
    below, _, name = path.rpartition("/")
    module, name = _buffers(model).get(path, (modules.get(below), name))
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

    def serialize(self, serializer: AbstractSerializer, name: str, model: nn.Module, before: int, iteration: int) -> None:
        """Save what has changed since the script had set it, or put all back; ``before`` it was loaded the iteration was."""
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
        self.note(model, before)
        changed, self._iteration = visit_optional(serializer, key, {}), iteration
        if not changed and _flag_values(model) == self._values:  # as in most runs; names take time
            return
        for (flag, path), owners in _flag_owners(model).items():
            saved = changed.get(flag, {}).get(path, self._made.get((flag, path)))
            for owner in owners:
                if saved is not None and getattr(owner, flag) is not saved:
                    setattr(owner, flag, saved)
        self._known = self._read(model)
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
    """Return the owners of each flag by path; a wrapper has the path of the module inside."""
    clean = name_cleaner(model)
    owners: dict[_Flag, list[Any]] = {}
    for name, module in model.named_modules():
        path = clean(name).replace(".", "/")
        owners.setdefault(("training", path), []).append(module)
        for own_name, parameter in module._parameters.items():
            if parameter is not None:
                owners["requires_grad", f"{path}/{own_name}".removeprefix("/")] = [parameter]
    return owners


class OptimizerState:
    """An optimizer's state as an object with ``serialize``, which does not change the optimizer.

    ``state`` maps the name of a parameter to its entries; a parameter that never had a gradient has none.
    ``param_groups`` are the hyperparameters, with names of parameters instead of positions. Tensors of a subclass, such as
    quantized ones, are saved as the tensors that they are made of. The state of a wrapper whose ``state_dict`` has another
    form is saved as it is, and goes by the order of the parameters.

    Args:
        optimizer: the optimizer.
        models: the models whose parameters it trains, by name.
        label: the name of the optimizer in the updater.
        constructed: `hyperparameters` as the script set them at construction, if that is known. A value that the script of
            a resumed run sets differently is a changed setting and is kept; all others, which a scheduler or an extension
            may have changed since, come from the saved run.
        groups: the names of the parameters in each group, as the script set them up, if that is known. If the groups have
            changed since, a resumed run builds those of the saved run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        models: Mapping[str, nn.Module],
        label: str = "main",
        constructed: list[Any] | None = None,
        groups: list[list[str]] | None = None,
    ) -> None:
        self._optimizer, self._models, self._label = optimizer, models, label
        self._constructed, self._groups = constructed, groups
        self._model_names = parameter_names(models)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the state as it is, or restore saved state, each tensor in the dtype in which it was saved."""
        optimizer, is_saving = self._optimizer, isinstance(serializer, Serializer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known, path = set(map(id, parameters)), f"updater/optimizer:{self._label}"
        for key in getattr(optimizer, "state", ()) if is_saving else ():
            if isinstance(key, Tensor) and id(key) not in known:
                name = self._model_names.get(id(key), f"a tensor of shape {list(key.shape)}")
                raise ValueError(
                    f"{path}/state has state of {name}, which is in no parameter group, so that it could not be loaded "
                    "again: remove it by optimizer.state.pop(tensor), or give its parameter to add_param_group"
                )
            if isinstance(key, int):
                raise ValueError(
                    f"{path}/state has the key {key!r}, which PyTorch takes for the number of a parameter; use a str"
                )
        live, members = optimizer.state_dict(), group_names(optimizer, self._model_names)
        classes = [f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}" for cls in type(optimizer).__mro__]
        kind = [classes, sorted({*itertools.chain(*optimizer.param_groups)}), live.keys() >= {"state", "param_groups"}]
        if (saved_kind := serializer("class", kind)) != kind:
            self._check_class(*saved_kind, *kind)
        if not kind[2]:
            self._serialize_as_it_is(serializer, live, members)
            return
        names = list(itertools.chain.from_iterable(members))
        named = {names[key]: entries for key, entries in live["state"].items() if type(key) is int}
        other = {key: entries for key, entries in live["state"].items() if type(key) is not int}
        groups = [{**group, "params": params} for group, params in zip(live["param_groups"], members, strict=True)]
        for index, group in enumerate(groups):
            group.pop("param_names", None)  # torch's own names follow the order at hand
            for key in [key for key, value in group.items() if isinstance(value, _CONSTANTS)]:
                group[key] = _text_of(group[key])
                first = dict(enumerate(self._constructed or ())).get(index, group)
                if is_saving and first.get(key) != group[key]:
                    raise ValueError(
                        f"{path}/param_groups/{index}/{key} was {first.get(key)} when the updater was made and is now "
                        f"{group[key]}, which a resumed run could not set: use a number or str for what changes in a run"
                    )
        extra = {key: value for key, value in live.items() if key not in ("state", "param_groups")}
        packed = {} if type(optimizer).__module__.startswith("torch.") else _pack(named)
        state = visit_like(serializer, "state", named, dict(zip(names, parameters, strict=True)))
        packed = visit_optional(serializer, "packed", packed) if packed or not is_saving else {}
        groups = serializer("param_groups", groups)
        extra = serializer("extra", extra)
        constructed = serializer("constructed", self._constructed)
        if not is_saving:
            state = _unpack(state, packed, optimizer) if packed else state
            self._restore(serializer, state, groups, extra, constructed)
            return
        if other:
            serializer("other_state", other)
        if self._groups is not None and members != self._groups:
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) not in self._model_names:
                        raise ValueError(
                            f"{path}/param_groups/{index} has changed since the trainer was made, and has a parameter of "
                            f"shape {list(parameter.shape)} that belongs to no model of the updater, so that a resumed run "
                            "could not find it: register it in a module"
                        )
            serializer("initial_groups", self._groups)

    def _restore(self, serializer: AbstractSerializer, state: Any, groups: Any, extra: Any, constructed: Any) -> None:
        """Load what was saved under these keys, and apply what the script now constructs otherwise than that run's."""
        optimizer, made = self._optimizer, [dict(group) for group in self._optimizer.param_groups]
        if groups is None:
            optimizer.load_state_dict(extra)
            check_loaded(optimizer, extra)
        else:
            ours, theirs = group_names(optimizer, self._model_names), [group["params"] for group in groups]
            names = itertools.chain.from_iterable(ours)
            if list(map(sorted, ours)) != list(map(sorted, theirs)):
                self._regroup(theirs, ours, visit_optional(serializer, "initial_groups", None) or theirs)
                names = itertools.chain.from_iterable(theirs)
            own = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
            parameters = dict(zip(names, enumerate(own), strict=True))
            by_position: dict[Any, Any] = {}
            for name, entries in state.items():
                position, parameter = parameters[name]
                if is_sharded(parameter) and isinstance(entries, dict):
                    large = {k: v for k, v in entries.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
                    entries = entries | {key: shard_like(value, parameter) for key, value in large.items()}
                by_position[position] = entries
            numbers = itertools.count()
            groups = [
                {**group, "params": _Positions(itertools.islice(numbers, len(members)))}
                for group, members in zip(groups, theirs, strict=True)
            ]
            by_position |= visit_optional(serializer, "other_state", None) or {}
            load_optimizer(optimizer, by_position, groups, extra, made)
        for index, (settings, before) in enumerate(zip(self._constructed or (), constructed or (), strict=False)):
            group = optimizer.param_groups[index]
            for key, value in settings.items():
                if key in before and before[key] != value:
                    group[key] = filled(made[index].get(key), value)
                    if key == "lr" and "initial_lr" in group:
                        group["initial_lr"] = filled(group["initial_lr"], value)
                    announce_change(f"{key} of optimizer {self._label!r}, group {index}", before[key], value)

    def _serialize_as_it_is(self, serializer: AbstractSerializer, live: Any, names: list[list[str]]) -> None:
        """Save or load a ``state_dict`` of a form of its own, which is taken to go by the order of the parameters."""
        saved_names, state = serializer("parameters", names), serializer("state_dict", live)
        constructed = serializer("constructed", self._constructed)
        if saved_names != names:
            raise ValueError(
                f"the state of optimizer {self._label!r}, a {type(self._optimizer).__name__}, goes by the order of its "
                f"parameters, which were {saved_names} and are {names}; resume with the same model and parameter groups"
            )
        if not isinstance(serializer, Serializer):
            self._restore(serializer, None, None, state, constructed)

    def _check_class(self, saved: Any, saved_keys: Any, was_plain: bool, ours: Any, keys: Any, is_plain: bool) -> None:
        """Refuse the state of an optimizer of another class, unless one is derived from the other or has its settings."""
        has_name = saved[0].partition(".")[2] == ours[0].partition(".")[2] and set(keys) <= set(saved_keys)
        is_related = saved[0] in ours or ours[0] in saved or set(saved_keys) - {"initial_lr"} == set(keys) - {"initial_lr"}
        if was_plain != is_plain or not (is_related or has_name):
            raise ValueError(
                f"the saved optimizer {self._label!r} is a {saved[0]}, and this one is a {ours[0]}, which has other state: "
                f"resume with a {saved[0]}, or start a new run in another out from the saved parameters alone, by "
                "serializers.load(snapshot, model)"
            )
        if saved[0] != ours[0] and not has_name:
            announce_change(f"class of optimizer {self._label!r}", saved[0], ours[0])

    def _regroup(self, theirs: list[list[str]], ours: list[list[str]], initial: list[list[str]]) -> None:
        """Give the optimizer the parameter groups of the saved run; their settings are not loaded."""
        if list(map(sorted, initial)) != list(map(sorted, self._groups or [])):
            had, has = (set(itertools.chain.from_iterable(groups)) for groups in (theirs, ours))
            raise ValueError(
                f"the saved optimizer has {len(theirs)} groups of parameters and this one {len(ours)}; "
                f"only in the saved one: {sorted(had - has)}; only here: {sorted(has - had)}. "
                "Resume with the same model and the same groups of parameters"
            )
        parameters = {self._model_names[id(p)]: p for model in self._models.values() for p in model.parameters()}
        if missing := [name for names in theirs for name in names if name not in parameters]:
            raise ValueError(
                f"the saved optimizer {self._label!r} has the parameters {missing}, which no model here has; "
                "resume with the same model"
            )
        groups = self._optimizer.param_groups
        is_named = any("param_names" in group for group in groups)  # by the script, which gave named_parameters()
        del groups[len(theirs) :]
        for index, names in enumerate(theirs):
            members = [parameters[name] for name in names]
            dotted = [name.partition("/")[2].replace("/", ".") for name in names]
            if index < len(groups):
                groups[index].update({"params": members, **({"param_names": dotted} if is_named else {})})
            else:
                self._optimizer.add_param_group({"params": list(zip(dotted, members, strict=True)) if is_named else members})


def load_optimizer(
    optimizer: Optimizer,
    state: Mapping[Any, Any],
    groups: list[dict[str, Any]],
    extra: Mapping[str, Any] | None = None,
    made: list[dict[str, Any]] | None = None,
) -> None:
    """Load state by the positions of parameters: PyTorch would give entries of floats the dtype of their parameter.

    Settings go into the tensors in the groups that the script has ``made``, by default those of now: a captured step reads
    these.
    """
    made = [dict(group) for group in optimizer.param_groups] if made is None else made
    for group in optimizer.param_groups[len(made) :]:  # of a saved run that has added them
        made.append({key: value for key, value in group.items() if isinstance(value, _CONSTANTS)})
    saved = {**(extra or {}), "state": state, "param_groups": groups}
    is_torch = type(optimizer).load_state_dict is Optimizer.load_state_dict  # which fails on arrays, put back below
    optimizer.load_state_dict({**saved, "state": tree_map_only(np.ndarray, lambda _: None, state)} if is_torch else saved)
    live = optimizer.state_dict()["state"]  # of a wrapper, that of the optimizer in it
    for position, entries in state.items():
        loaded = live.get(position)
        for key, value in entries.items() if isinstance(loaded, dict) and isinstance(entries, dict) else ():
            if key in loaded and (type(value) is not Tensor or getattr(loaded[key], "dtype", None) != value.dtype):
                loaded[key] = _with_dtypes(loaded[key], value)
    if not type(optimizer).__module__.startswith("torch."):
        check_loaded(optimizer, {key: value for key, value in saved.items() if key != "param_groups"})
    for group, settings in zip(optimizer.param_groups, made, strict=False):
        group.update({key: filled(settings.get(key), value) for key, value in group.items()})


def check_loaded(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse an optimizer whose own ``load_state_dict`` did not take saved state as it was."""
    current, cls = optimizer.state_dict(), type(optimizer)
    if difference := _first_difference("", {key: current.get(key) for key in saved}, saved):
        raise ValueError(
            f"{cls.__module__}.{cls.__qualname__} does not load its own state as it was saved, so that a resumed run would "
            f"not be exact: state_dict(){difference}; use another optimizer, or correct its load_state_dict"
        )


def _first_difference(path: str, current: Any, saved: Any) -> str | None:
    """Return where loaded state lacks something that was saved, or has another form of tensor, or another plain value."""
    if isinstance(saved, Tensor) and isinstance(current, Tensor):
        forms = [(type(tensor).__name__, str(tensor.dtype), tuple(tensor.shape)) for tensor in (current, saved)]
        return None if forms[0] == forms[1] else f"{path} becomes {forms[0]} and was {forms[1]}"
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        items = [(key, current.get(key), value) for key, value in saved.items()]
    elif isinstance(saved, (list, tuple, deque)) and isinstance(current, type(saved)) and len(saved) == len(current):
        items = [(index, *pair) for index, pair in enumerate(zip(current, saved, strict=True))]
    else:
        is_empty = isinstance(saved, dict) and not saved and not current
        is_same = is_empty or is_same_value(current, saved) or repr(current) == repr(saved)  # as those of NaN
        return None if is_same else f"{path} becomes {current!r:.40} and was {saved!r:.40}"
    return next(filter(None, (_first_difference(f"{path}[{key!r}]", *pair) for key, *pair in items)), None)


_CONSTANTS = (Enum, type, FunctionType, BuiltinFunctionType, torch.device, torch.memory_format)
"""Of what a group may hold beside state: settings that the script makes anew, and that are saved as a text."""


def _text_of(constant: Any) -> str:
    if isinstance(constant, Enum):
        return f"{type(constant).__qualname__}.{constant.name}"
    return str(getattr(constant, "__qualname__", constant))


def _pack(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Put in place of each tensor of a subclass those that it is made of, and return what else makes it."""
    packed: dict[str, dict[str, Any]] = {}
    for name, entries in state.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            if isinstance(value, Tensor) and not is_sharded(value) and hasattr(value, "__tensor_flatten__"):
                parts, settings = value.__tensor_flatten__()
                form = [type(value).__qualname__, settings, tuple(value.shape), value.stride()]
                packed.setdefault(name, {})[key] = form
                state[name] = {**state[name], key: {part: getattr(value, part) for part in parts}}
    return packed


def _unpack(state: dict[str, Any], packed: Mapping[str, Mapping[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
    """Make tensors of subclasses again, whose classes are looked up in the modules of the optimizer's own class alone."""
    known = {name: item for cls in type(optimizer).__mro__ for name, item in vars(sys.modules[cls.__module__]).items()}
    for name, forms in packed.items():
        for key, (class_name, settings, shape, strides) in forms.items():
            cls = known.get(class_name)
            if not (isinstance(cls, type) and issubclass(cls, Tensor) and hasattr(cls, "__tensor_unflatten__")):
                raise ValueError(
                    f"the saved {key!r} of {name} is a {class_name}, which the module of {type(optimizer).__qualname__} "
                    "does not have; resume with the class of optimizer that has saved it"
                )
            state[name][key] = cls.__tensor_unflatten__(state[name][key], settings, torch.Size(shape), tuple(strides))
    return state


def trains_other_weights(optimizer: Any) -> TypeGuard[Any]:
    """Return whether an optimizer, such as a schedule-free one, trains other weights than those to use: by eval, train."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


@contextmanager
def weights_to_use(updater: Any) -> Iterator[bool]:
    """Inside, let models have the weights to use where an optimizer trains others, and then those again bit for bit.

    Yield whether there is such an optimizer.
    """
    averaging = [optimizer for optimizer in updater.get_all_optimizers().values() if trains_other_weights(optimizer)]
    # In the mode that is set already, both calls do nothing.
    averaging = [o for o in averaging if o.param_groups[0].get("train_mode", getattr(o, "train_mode", True))]
    parameters = [p for optimizer in averaging for group in optimizer.param_groups for p in group["params"]]
    trained = [parameter.detach().clone() for parameter in parameters]
    try:
        for optimizer in averaging:
            optimizer.eval()
        yield bool(averaging)
    finally:
        for optimizer in averaging:
            optimizer.train()
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.copy_(value)


def try_loading(optimizer: Optimizer) -> None:
    """Try whether a copy of an optimizer with a ``state_dict`` or ``load_state_dict`` of its own loads its state.

    That of a large model is not copied: it is tried where a run is resumed.
    """
    own = [getattr(type(optimizer), name) is not getattr(Optimizer, name) for name in ("state_dict", "load_state_dict")]
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    size = sum(parameter.numel() for parameter in parameters.values() if not is_lazy(parameter))
    if not any(own) or type(optimizer).__module__.startswith("torch.") or size > 2**23:
        return
    try:
        other = _copy(optimizer, dict(parameters))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    except Exception:  # it cannot be copied
        return
    check_loaded(other, optimizer.state_dict())


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy with all attributes: by itself an optimizer copies groups and state alone, and no optimizer in it."""
    other: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = other
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer) and id(inner) not in memo:
            _copy(inner, memo)
    vars(other).update(copy.deepcopy(vars(optimizer), memo))
    return other


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the plain settings of each parameter group; the learning rate is the one before a scheduler changed it.

    A tensor of one number, such as a learning rate, is that number.
    """
    plain = (bool, int, float, str, tuple, type(None))
    groups = []
    for group in optimizer.param_groups:
        settings = {key: as_number(value) for key, value in group.items() if key not in ("params", "train_mode")}
        settings = {key: value for key, value in settings.items() if isinstance(value, plain)}
        initial = settings.pop("initial_lr", None)
        groups.append(settings if initial is None else {**settings, "lr": initial})
    return groups


def as_number(value: Any) -> Any:
    """Return a setting without tensors of one number, such as a learning rate, and without constants of the script."""
    if isinstance(value, tuple):
        return tuple(map(as_number, value))
    if isinstance(value, _CONSTANTS):
        return _text_of(value)
    is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta and not value.is_complex()
    return value.item() if is_number else value


def filled(setting: Any, value: Any) -> Any:
    """Return a value in the form of the setting: a tensor is filled in place, and a constant of the script stays."""
    if isinstance(setting, _CONSTANTS):
        return setting
    if isinstance(setting, tuple) and isinstance(value, (tuple, list)) and len(setting) == len(value):
        return tuple(map(filled, setting, value))
    is_number = isinstance(value, (Tensor, Real))
    if not isinstance(setting, Tensor) or not is_number:
        return value
    with torch.no_grad():
        return setting.copy_(value) if isinstance(value, Tensor) else setting.fill_(value)


def _with_dtypes(loaded: Any, saved: Any) -> Any:
    """Return ``loaded`` in the types of ``saved``: torch also splits a str into letters, and makes a dict of a Counter."""
    if isinstance(saved, Tensor):
        return saved.to(loaded.device) if isinstance(loaded, Tensor) and loaded.dtype != saved.dtype else loaded
    if isinstance(saved, dict):
        restored = copy.copy(saved)
        for key, value in saved.items():
            restored[key] = _with_dtypes(loaded[key], value)
        return restored
    if type(saved) in (list, tuple):
        return type(saved)(map(_with_dtypes, loaded, saved))
    if isinstance(saved, deque):
        return deque(map(_with_dtypes, loaded, saved), saved.maxlen)
    return saved if isinstance(saved, (str, np.ndarray)) else loaded


class _Positions(list[int]):
    """Consecutive numbers. PyTorch looks for each parameter among those of a group, which takes long in a long list."""

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and len(self) > 0 and self[0] <= number <= self[-1]


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of the parameters in each group, of one that belongs to no model its number."""
    numbers = itertools.count()
    return [
        [names.get(id(p), f"parameter {number}") for p, number in zip(group["params"], numbers, strict=False)]
        for group in optimizer.param_groups
    ]
