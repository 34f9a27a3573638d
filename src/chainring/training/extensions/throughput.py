"""Throughput: how fast training goes, and how much memory it takes."""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chainring.reporting.reporter import report
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.triggers import get_trigger
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_MIB = 2**20


class Throughput(Extension):
    """Reports the speed of the loop since it last did so, and the peak of memory, for a `LogReport` to take down.

    Under the name of the extension, ``throughput/examples_per_second`` for example:

    - ``iterations_per_second``.
    - ``examples_per_second``: those of the batches that the updater converted; left out for an updater without
      `UpdateCallbacks`.
    - ``tokens_per_second``: the weight of the losses, where one returns a ``"weight"`` that is not its number of examples.
    - ``peak_memory_mib``: MiB allocated on the accelerator of the models at most, or held by this process where they are on
      the host; since the process began.

    Time is that of a monotonic clock and of the whole loop, evaluations and snapshots included. Where an accelerator works
    behind the loop, it is waited for when the trigger fires, and at no other time. Of several ranks examples and tokens are
    added up, and memory is that of the rank that took the most. What lies before a resume does not count.

    Args:
        trigger: when to report. ``extend(..., trigger=t)`` means the same and comes first.

    Raises:
        TypeError, ValueError: the trigger is none, see `get_trigger`.
    """

    priority = PRIORITY_WRITER
    default_name = "throughput"
    skip_on_resume = True

    def __init__(self, trigger: Any = (1, "epoch")) -> None:
        self.trigger = get_trigger(trigger)
        self._callbacks: UpdateCallbacks | None = None
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._iterations = self._examples = self._examples_of_update = 0
        self._tokens: Any = 0  # a tensor where weights are, so that none of them is read
        self._is_weighted = False

    def initialize(self, trainer: Trainer) -> None:
        updater = trainer.updater
        self._device = _device_of(updater)
        callbacks = getattr(updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            self._callbacks = callbacks
            callbacks.add("batch_on_finish", self._count)
        self._begin()

    def finalize(self) -> None:
        if self._callbacks is not None:
            self._callbacks.remove("batch_on_finish", self._count)
        self._callbacks = None

    def _count(self, context: UpdateContext) -> None:
        self._examples_of_update += context.examples

    def observe(self, trainer: Trainer) -> None:
        self._iterations += 1
        if self._callbacks is None:
            return
        number, self._examples_of_update = self._examples_of_update, 0
        weight = trainer.updater.weight
        self._examples += number
        self._tokens = self._tokens + (weight.detach() if isinstance(weight, Tensor) else weight)
        self._is_weighted = self._is_weighted or isinstance(weight, Tensor) or weight not in (1, number)

    def __call__(self, trainer: Trainer) -> None:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        seconds = time.monotonic() - self._since
        if not self._iterations or seconds <= 0:
            return
        own = self._examples, float(self._tokens) if self._is_weighted else 0.0, _peak_memory(self._device) / _MIB
        examples, tokens, memory = zip(*trainer.comm.gather_object(own), strict=True)
        values = {"iterations_per_second": self._iterations / seconds}
        if self._callbacks is not None:
            values["examples_per_second"] = sum(examples) / seconds
        if self._is_weighted:
            values["tokens_per_second"] = sum(tokens) / seconds
        values["peak_memory_mib"] = max(memory)
        name = trainer.extension_name or self.default_name
        report({f"{name}/{key}": value for key, value in values.items()})
        self._begin()


def _device_of(updater: Any) -> torch.device | None:
    """The accelerator on which the models are; ``None`` on the host."""
    devices = (parameter.device for model in updater.get_all_models().values() for parameter in model.parameters())
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def _peak_memory(device: torch.device | None) -> int:
    """In bytes."""
    peak = None if device is None else getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if peak is not None:
        return int(peak(device))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # getrusage(2): bytes there, KiB on Linux
