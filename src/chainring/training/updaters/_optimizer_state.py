"""The state of torch optimizers by the names of the parameters, so that their order does not matter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from chainring._distributed.sharding import is_sharded, shard_like
from chainring._messages import announce_change
from chainring._naming import name_cleaner
from chainring.serializers.base import AbstractSerializer, Serializer


class OptimizerState:
    """An optimizer's state as an object with ``serialize``.

    ``state`` maps a parameter's name to its entries; a parameter that never got a gradient has none. ``param_groups``
    are the hyperparameters, with names in place of positions.

    Args:
        optimizer: the optimizer, which is not changed by saving.
        names: `parameter_names` of the models that it trains.
        label: its name in the updater.
        constructed: `hyperparameters` as they were when the script had made the optimizer; ``None`` where that is not
            known. A value that the script of a resumed run makes another is a changed setting and holds; all others, which
            a scheduler or an extension may have written since, come from the saved run.
    """

    def __init__(
        self, optimizer: Optimizer, names: Mapping[int, str], label: str = "main", constructed: list[Any] | None = None
    ) -> None:
        self._optimizer = optimizer
        self._label = label
        self._constructed = constructed
        self._names = [names.get(id(p), f"parameter {i}") for i, p in enumerate(_parameters(optimizer))]

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save the state as it is, or put saved state back, each tensor in the dtype in which it was saved."""
        live = self._optimizer.state_dict()
        named = {self._names[index]: entries for index, entries in live["state"].items()}
        groups = [{**group, "params": [self._names[i] for i in group["params"]]} for group in live["param_groups"]]
        for group in groups:
            group.pop("param_names", None)  # torch's own names follow the order at hand
        extra = {key: value for key, value in live.items() if key not in ("state", "param_groups")}
        state = serializer("state", named)
        saved_groups = serializer("param_groups", groups)
        extra = serializer("extra", extra)
        constructed = serializer("constructed", self._constructed)
        if not isinstance(serializer, Serializer):
            self._load(state, saved_groups, extra, groups)
            self._apply_changes(constructed)

    def _load(self, state: dict[str, Any], saved: list[Any], extra: dict[str, Any], live: list[Any]) -> None:
        _require_same(saved, live)
        index_of = {name: index for index, name in enumerate(self._names)}
        positions = iter(range(len(self._names)))
        counts = [len(group["params"]) for group in live]
        groups = [
            {**group, "params": [next(positions) for _ in range(count)]} for group, count in zip(saved, counts, strict=True)
        ]
        parameters = list(_parameters(self._optimizer))
        state = {name: _shard_like(entries, parameters[index_of[name]]) for name, entries in state.items()}
        by_index = {index_of[name]: entries for name, entries in state.items()}
        self._optimizer.load_state_dict({**extra, "state": by_index, "param_groups": groups})
        self._restore_dtypes(state)

    def _apply_changes(self, saved: list[Any] | None) -> None:
        """Apply the hyperparameters that the script now constructs otherwise than the script of the saved run."""
        for index, (settings, before) in enumerate(zip(self._constructed or (), saved or (), strict=False)):
            group = self._optimizer.param_groups[index]
            for key, value in settings.items():
                if key in before and before[key] != value:
                    group[key] = value
                    if key == "lr" and "initial_lr" in group:
                        group["initial_lr"] = value
                    announce_change(f"{key} of optimizer {self._label!r}, group {index},", before[key], value)

    def _restore_dtypes(self, state: Mapping[str, Any]) -> None:
        """Undo the cast of ``Optimizer.load_state_dict``, which gives float state the dtype of its parameter."""
        for name, parameter in zip(self._names, _parameters(self._optimizer), strict=True):
            loaded = self._optimizer.state.get(parameter, {})
            for key, value in state.get(name, {}).items():
                loaded[key] = _with_dtypes(loaded[key], value)


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id, such as ``main/predictor/l1/weight``; of a tied one the first."""
    names: dict[int, str] = {}
    for model_name, model in models.items():
        clean = name_cleaner(model)
        for path, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{model_name}/{clean(path).replace('.', '/')}")
    return names


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the plain settings of each parameter group; the learning rate is that before a scheduler wrote to it."""
    plain = (bool, int, float, str, tuple, type(None))
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "initial_lr" and isinstance(value, plain)}
        groups.append({**settings, "lr": group["initial_lr"]} if "initial_lr" in group else settings)
    return groups


def _shard_like(entries: Any, parameter: Tensor) -> Any:
    """Shard entries that are as large as a sharded parameter in the same way."""
    if not is_sharded(parameter) or not isinstance(entries, dict):
        return entries

    def fits(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == parameter.shape and not is_sharded(value)

    return {key: shard_like(value, parameter) if fits(value) else value for key, value in entries.items()}


def _with_dtypes(loaded: Any, saved: Any) -> Any:
    """Return ``loaded`` in the types of ``saved``: torch also splits a str into letters, and makes a dict of a Counter."""
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        restored = copy.copy(saved)
        for key, value in saved.items():
            restored[key] = _with_dtypes(loaded[key], value)
        return restored
    if type(saved) in (list, tuple):
        return type(saved)(map(_with_dtypes, loaded, saved))
    return saved if isinstance(saved, str) else loaded


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _require_same(saved: list[Any], live: list[Any]) -> None:
    ours, theirs = ([sorted(group["params"]) for group in groups] for groups in (live, saved))
    if ours != theirs:
        had, has = ({name for group in groups for name in group} for groups in (theirs, ours))
        raise ValueError(
            f"the saved optimizer has {len(theirs)} groups of parameters and this one {len(ours)}; "
            f"only in the saved one: {sorted(had - has)}; only here: {sorted(has - had)}. "
            "Resume with the same model and the same groups of parameters"
        )
