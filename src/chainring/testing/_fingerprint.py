"""Fingerprints of a trainer after an iteration, and how two values differ.

Nothing is serialized for them, so that the observed run does exactly what it does without an observer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chainring import _random
from chainring._naming import parameter_names, unwrap
from chainring.reporting.summary import is_scalar
from chainring.training._unsaved import as_tensor, bytes_of, checksum, describe, describe_leaves, is_time, leaves

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

Fingerprint = dict[str, dict[str, str]]
"""By category (``"parameters"``), the text of each value by its path."""

_COUNTERS = ("progress", "epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")


def fingerprint(trainer: Trainer, batches: Iterable[Mapping[str, str]] = ()) -> Fingerprint:
    """Return the fingerprint of a trainer's present state and observation, and of described batches."""
    generators, observation = _random.get_rng_state(), trainer.observation
    found: Fingerprint = {
        "iterator": {},
        "batch": {path: text for batch in batches for path, text in batch.items()},
        "observation": {f"observation/{k}": describe(float(v)) for k, v in observation.items() if is_scalar(v)},
        "generators": {f"generators/{trainer.comm.rank}/{name}": checksum(state) for name, state in generators.items()},
        "parameters": {},
        "buffers": {},
        "optimizer": {},
    }
    for name, iterator in trainer.updater.get_all_iterators().items():
        for counter in _COUNTERS:
            found["iterator"][f"updater/iterator:{name}/{counter}"] = repr(getattr(iterator, counter, None))
    models = trainer.updater.get_all_models()
    for name, model in models.items():
        module = unwrap(model)
        parameters = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        for path, value in module.state_dict().items():
            leaf_path = f"updater/model:{name}/{path.replace('.', '/')}"
            if path in parameters:
                found["parameters"] |= describe_leaves(leaf_path, value)
            else:
                found["buffers"] |= {
                    at: "a time" if is_time(leaf) else describe(leaf) for at, leaf in leaves(leaf_path, value)
                }
    names = parameter_names(models)
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        prefix = f"updater/optimizer:{name}"
        for parameter, state in optimizer.state.items():
            path = f"{prefix}/state/{names.get(id(parameter), 'parameter')}"
            found["optimizer"] |= describe_leaves(path, state)
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found["optimizer"] |= describe_leaves(f"{prefix}/param_groups/{index}", settings)
    return found


def difference(one: Any, other: Any) -> str | None:
    """Return how two values differ, ``None`` where they are the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    texts = f"{describe(one)} -> {describe(other)}"
    same_class = type(one) is type(other)
    one, other = as_tensor(one), as_tensor(other)
    if not (same_class and isinstance(one, Tensor)):
        return None if same_class and describe(one) == describe(other) else texts
    is_comparable = (one.dtype, one.shape) == (other.dtype, other.shape)
    if is_comparable and torch.equal(bytes_of(one), bytes_of(other)):
        return None
    if not is_comparable or one.numel() == 1:
        return texts
    dtype = torch.complex128 if one.is_complex() else torch.float64
    distances = (one.detach().cpu().to(dtype) - other.detach().cpu().to(dtype)).abs()
    largest = distances.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    if largest == 0:
        return "the same numbers in other bits, such as -0.0 for 0.0"
    return f"by at most {largest:.3g}, in {int((distances != 0).sum())} of {distances.numel()} elements"
