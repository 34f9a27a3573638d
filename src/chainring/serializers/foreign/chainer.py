"""An npz file of Chainer: a model, or a snapshot of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chainring.serializers.foreign.content import Entries, ForeignCheckpoint, SavedOptimizer, count
from chainring.serializers.npz import read_arrays

_NAMES = {
    "W": "weight", "b": "bias", "gamma": "weight", "beta": "bias",
    "avg_mean": "running_mean", "avg_var": "running_var", "N": "num_batches_tracked",
}  # fmt: skip
_MODEL, _OPTIMIZER, _ITERATOR = "updater/model:", "updater/optimizer:", "updater/iterator:main/"
_RULES: dict[frozenset[str], tuple[str, dict[str, str]]] = {
    frozenset("mv"): ("betas", {"m": "exp_avg", "v": "exp_avg_sq"}),
    frozenset(("m", "v", "vhat")): ("betas", {"m": "exp_avg", "v": "exp_avg_sq", "vhat": "max_exp_avg_sq"}),
    frozenset("v"): ("momentum", {"v": "momentum_buffer"}),
    frozenset(("ms",)): ("alpha", {"ms": "square_avg"}),
    frozenset("h"): ("lr_decay", {"h": "sum"}),
    frozenset(("msg", "msdx")): ("rho", {"msg": "square_avg", "msdx": "acc_delta"}),
    frozenset(): ("lr", {}),
}
"""By the names of the arrays of a parameter in Chainer: a setting by which torch's optimizer is known, and its names."""


def is_of_chainer(names: list[str]) -> bool:
    """Return whether the names in an npz file are those that Chainer gives."""
    return any(name.startswith(_MODEL) or name.rpartition("/")[2] in _NAMES for name in names)


def read(path: Path) -> ForeignCheckpoint | None:
    """Return what such a file holds; ``None`` if it is not of Chainer.

    Raises:
        ValueError: it is damaged, or has a pickled array, or of an optimizer that torch lacks.
    """
    arrays = read_arrays(path, is_of_chainer)
    if arrays is None:
        return None
    if not any(name.startswith(_MODEL) for name in arrays):
        return ForeignCheckpoint("a model of Chainer", {"main": _entries(arrays)}, is_ordered=False)
    models = {name: _entries(below) for name, below in _parts(arrays, _MODEL).items()}
    checkpoint = ForeignCheckpoint("a snapshot of Chainer", models, is_ordered=False)
    parts = _parts(arrays, _OPTIMIZER)
    checkpoint.optimizers = {name: _optimizer(f"{path}: optimizer {name!r}", below) for name, below in parts.items()}
    checkpoint.iteration = _count(path, arrays, "updater/iteration")
    checkpoint.epoch = _count(path, arrays, f"{_ITERATOR}epoch")
    checkpoint.examples = _count(path, arrays, f"{_ITERATOR}current_position")
    taken = (
        _MODEL,
        _OPTIMIZER,
        "updater/iteration",
        *(_ITERATOR + key for key in ("epoch", "current", "previous", "is_new")),
    )
    left = ["/".join(name.split("/")[:2]) for name in arrays if not name.startswith(taken)]
    checkpoint.left = list(dict.fromkeys(left))
    return checkpoint


def _count(path: Path, arrays: Mapping[str, Any], name: str) -> int | None:
    value = arrays.get(name)
    return None if value is None else count(_tensor(name, value), f"{path}: {name!r}")


def _parts(arrays: Mapping[str, Any], start: str) -> dict[str, dict[str, Any]]:
    """Return by the name of a model or an optimizer the arrays below it."""
    parts: dict[str, dict[str, Any]] = {}
    for path, array in arrays.items():
        if path.startswith(start):
            name, _, below = path.removeprefix(start).partition("/")
            parts.setdefault(name, {})[below] = array
    return parts


def _name(path: str) -> str:
    """Return the dotted name that PyTorch's modules have for a parameter."""
    *parents, last = path.split("/")
    return ".".join([*parents, _NAMES.get(last, last)])


def _entries(arrays: Mapping[str, Any]) -> Entries:
    """Return parameters and buffers; one that is ``None``, not yet initialized, is left out."""
    return {_name(path): _tensor(path, array) for path, array in arrays.items() if array is not None}


def _tensor(path: str, array: Any) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path!r} is an array of {array.dtype}, and a model of Chainer holds numbers")
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _optimizer(where: str, arrays: Mapping[str, Any]) -> SavedOptimizer:
    """Return the state by PyTorch's names. Chainer saves no settings: those of the script hold.

    Of MomentumSGD and NesterovAG Chainer keeps the negative step, ``-lr`` times PyTorch's buffer.

    Raises:
        ValueError: it is of a rule that torch lacks.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for path, array in arrays.items():
        parameter, _, key = path.rpartition("/")
        if parameter and array is not None:
            found.setdefault(_name(parameter), {})[key] = _tensor(path, array)
    state: dict[str, dict[str, Tensor]] = {}
    settings = set()
    for name, entries in found.items():
        step = entries.pop("t", torch.tensor(0))
        if frozenset(entries) not in _RULES:
            raise ValueError(
                f"{where} has {sorted(entries)} of {name!r}, as no optimizer of torch has: start with a new one"
            )
        setting, names = _RULES[frozenset(entries)]
        settings.add(setting)
        state[name] = {names[key]: value for key, value in entries.items()}
        if setting == "momentum":
            state[name]["momentum_buffer"] = -state[name]["momentum_buffer"]
        elif names:
            state[name]["step"] = step.to(torch.float32)
    if len(settings) > 1:
        raise ValueError(f"{where} has parameters with several update rules: start with a new optimizer")
    kept = {name: entries for name, entries in state.items() if entries}
    return SavedOptimizer(kept, [], [list(state)], required=next(iter(settings), None))
