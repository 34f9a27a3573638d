"""What is seen of a trainer after an iteration, as texts that differ where the bits differ.

Nothing is serialized for it, so that the run that is looked at is the run as it always is.
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
from chainring.reporting._scalars import is_scalar
from chainring.training.updaters._optimizer_state import parameter_names

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer
    from chainring.training.updaters.callbacks import UpdateContext

Look = dict[str, dict[str, str]]
"""By kind (``"parameters"``), what stands at each path."""

_COUNTS = ("progress", "epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch")
_FEW = 4  # elements of a tensor that are written out


class Batches:
    """The fingerprints of the batches that an updater converted: a callback for ``batch_on_finish``."""

    def __init__(self) -> None:
        self._seen: list[dict[str, str]] = []

    def __call__(self, context: UpdateContext) -> None:
        self._seen.append({path: text(leaf) for path, leaf in leaves("", context.batch)})

    def taken(self) -> dict[str, str]:
        """The batches since this was last called."""
        seen, self._seen = self._seen, []
        return {f"batch {n}{path}": shown for n, batch in enumerate(seen) for path, shown in batch.items()}


def look(trainer: Trainer, batches: Batches | None) -> Look:
    """What the trainer consists of now."""
    seen: Look = {"iterator": {}, "batch": {} if batches is None else batches.taken(), "observation": {}}
    for name, source in trainer.updater.get_all_iterators().items():
        for count in _COUNTS:
            seen["iterator"][f"updater/iterator:{name}/{count}"] = repr(getattr(source, count, None))
    for key, value in trainer.observation.items():
        if is_scalar(value):
            seen["observation"][f"observation/{key}"] = text(float(value))
    place = f"generators/{trainer.comm.rank}"
    seen["generators"] = {f"{place}/{name}": checksum(state) for name, state in _random.get_rng_state().items()}
    return seen | _models(trainer) | {"optimizer": dict(_optimizers(trainer))}


def _models(trainer: Trainer) -> Look:
    seen: Look = {"parameters": {}, "buffers": {}}
    for name, model in trainer.updater.get_all_models().items():
        inner = unwrap(model)
        parameters = {path for path, _ in inner.named_parameters(remove_duplicate=False)}
        for path, value in inner.state_dict().items():
            kind = "parameters" if path in parameters else "buffers"
            for inside, leaf in leaves(f"updater/model:{name}/{path.replace('.', '/')}", value):
                seen[kind][inside] = text(leaf)
    return seen


def _optimizers(trainer: Trainer) -> Iterator[tuple[str, str]]:
    names = parameter_names(trainer.updater.get_all_models())
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        place = f"updater/optimizer:{name}"
        for parameter, entries in optimizer.state.items():
            for path, leaf in leaves(f"{place}/state/{names.get(id(parameter), 'parameter')}", entries):
                yield path, text(leaf)
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for path, leaf in leaves(f"{place}/param_groups/{number}", settings):
                yield path, text(leaf)


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in nested containers that is none itself, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(f"{path}/{number}", item)
    elif isinstance(value, (set, frozenset)):
        yield from leaves(path, sorted(value, key=repr))
    else:
        yield path, value


def text(value: Any) -> str:
    """A plain value as Python writes it, a large array by its type, shape and CRC-32; the class of anything else."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(value.copy()) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_meta:
            return f"{kind} {tuple(value.shape)} without data"
        if value.numel() <= _FEW and not value.is_complex():
            return f"{kind} {value.tolist()}"
        return f"{kind} {tuple(value.shape)} of CRC {zlib.crc32(octets(value).numpy().data):08x}"
    if isinstance(value, (bool, int, float, complex, str, bytes, list, type(None), np.generic)):
        return repr(value)
    return type(value).__name__


def checksum(value: Any) -> str:
    """Everything in nested containers as one number."""
    return f"{zlib.crc32(repr([(path, text(leaf)) for path, leaf in leaves('', value)]).encode()):08x}"


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, one dimension of uint8."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def numbers(tensor: Tensor) -> Tensor:
    """The elements as complex or double numbers, one dimension."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().cpu().to(wide).reshape(-1)


def difference(one: Any, other: Any) -> str | None:
    """In what two values differ, ``None`` where they are the same bits: NaN is NaN, and -0.0 is not 0.0."""
    if (
        isinstance(one, np.ndarray)
        and isinstance(other, np.ndarray)
        and one.dtype.kind in "biufc"
        and one.dtype == other.dtype
    ):
        one, other = torch.from_numpy(one.copy()), torch.from_numpy(other.copy())
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return None if (type(one), text(one)) == (type(other), text(other)) else f"{text(one)} -> {text(other)}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{text(one)} -> {text(other)}"
    if torch.equal(octets(one), octets(other)):
        return None
    if one.numel() == 1:
        return f"{text(one)} -> {text(other)}"
    apart = (numbers(one) - numbers(other)).abs()
    largest = apart.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
    if largest == 0:
        return "the same numbers in other bits, such as -0.0 for 0.0"
    return f"by at most {largest:.3g}, in {int((apart != 0).sum())} of {apart.numel()} elements"
