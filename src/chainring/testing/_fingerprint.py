"""Fingerprints of a trainer after an iteration: texts that differ where the bits differ.

Nothing is serialized for a fingerprint, so that the observed run does exactly what it does without an observer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from chainring import _random
from chainring._naming import unwrap
from chainring.reporting.summary import is_scalar
from chainring.training.updaters._optimizer_state import parameter_names

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer
    from chainring.training.updaters.callbacks import UpdateContext

Fingerprint = dict[str, dict[str, str]]
"""By category (``"parameters"``), the text of each value by its path."""

_COUNTERS = ("progress", "epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")
_SHORT = 4  # elements up to which a tensor is written out


class BatchRecorder:
    """The descriptions of the batches that an updater converted: a callback for ``batch_on_finish``."""

    def __init__(self) -> None:
        self._batches: list[dict[str, str]] = []

    def __call__(self, context: UpdateContext) -> None:
        self._batches.append({path: describe(leaf) for path, leaf in leaves("", context.batch)})

    def pop(self) -> dict[str, str]:
        """Return the batches since the last call, and forget them."""
        batches, self._batches = self._batches, []
        return {f"batch {index}{path}": text for index, batch in enumerate(batches) for path, text in batch.items()}


def fingerprint(trainer: Trainer, batches: BatchRecorder | None) -> Fingerprint:
    """Return the fingerprint of a trainer's present state, observation and batches."""
    found: Fingerprint = {"iterator": {}, "batch": {} if batches is None else batches.pop(), "observation": {}}
    for name, iterator in trainer.updater.get_all_iterators().items():
        for counter in _COUNTERS:
            found["iterator"][f"updater/iterator:{name}/{counter}"] = repr(getattr(iterator, counter, None))
    for key, value in trainer.observation.items():
        if is_scalar(value):
            found["observation"][f"observation/{key}"] = describe(float(value))
    prefix = f"generators/{trainer.comm.rank}"
    found["generators"] = {f"{prefix}/{name}": checksum(state) for name, state in _random.get_rng_state().items()}
    return found | _of_models(trainer) | {"optimizer": dict(_of_optimizers(trainer))}


def _of_models(trainer: Trainer) -> Fingerprint:
    found: Fingerprint = {"parameters": {}, "buffers": {}}
    for name, model in trainer.updater.get_all_models().items():
        module = unwrap(model)
        parameters = {path for path, _ in module.named_parameters(remove_duplicate=False)}
        for path, value in module.state_dict().items():
            category = "parameters" if path in parameters else "buffers"
            for leaf_path, leaf in leaves(f"updater/model:{name}/{path.replace('.', '/')}", value):
                found[category][leaf_path] = describe(leaf)
    return found


def _of_optimizers(trainer: Trainer) -> Iterator[tuple[str, str]]:
    names = parameter_names(trainer.updater.get_all_models())
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        prefix = f"updater/optimizer:{name}"
        for parameter, state in optimizer.state.items():
            for path, leaf in leaves(f"{prefix}/state/{names.get(id(parameter), 'parameter')}", state):
                yield path, describe(leaf)
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for path, leaf in leaves(f"{prefix}/param_groups/{index}", settings):
                yield path, describe(leaf)


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value in nested containers that is not a container itself, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(f"{path}/{index}", item)
    elif isinstance(value, (set, frozenset)):
        yield from leaves(path, sorted(value, key=repr))
    else:
        yield path, value


def describe(value: Any) -> str:
    """Return a plain value as Python writes it, a large array as dtype, shape and CRC-32, anything else as its class."""
    value = _as_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.tolist()
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_meta:
            return f"{dtype} {tuple(value.shape)} without data"
        if value.numel() <= _SHORT and not value.is_complex():
            return f"{dtype} {value.tolist()}"
        return f"{dtype} {tuple(value.shape)} of CRC {zlib.crc32(_bytes_of(value).numpy().data):08x}"
    if isinstance(value, (bool, int, float, complex, str, bytes, list, type(None), np.generic)):
        return repr(value)
    return type(value).__name__


def checksum(value: Any) -> str:
    """Return one CRC-32 of everything in nested containers."""
    return f"{zlib.crc32(repr([(path, describe(leaf)) for path, leaf in leaves('', value)]).encode()):08x}"


def difference(one: Any, other: Any) -> str | None:
    """Return how two values differ, ``None`` where they are the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    texts = f"{describe(one)} -> {describe(other)}"
    same_class = type(one) is type(other)
    one, other = _as_tensor(one), _as_tensor(other)
    if not (same_class and isinstance(one, Tensor)):
        return None if same_class and describe(one) == describe(other) else texts
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return texts
    if torch.equal(_bytes_of(one), _bytes_of(other)):
        return None
    if one.numel() == 1:
        return texts
    distances = (_in_double(one) - _in_double(other)).abs()
    largest = distances.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    if largest == 0:
        return "the same numbers in other bits, such as -0.0 for 0.0"
    return f"by at most {largest:.3g}, in {int((distances != 0).sum())} of {distances.numel()} elements"


def _as_tensor(value: Any) -> Any:
    """Return a numeric array as a tensor, and anything else as it is."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.from_numpy(value.copy()) if is_numeric else value


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 in one dimension."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def _in_double(tensor: Tensor) -> Tensor:
    """Return the elements in double precision, real or complex, in one dimension."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().cpu().to(dtype).reshape(-1)
