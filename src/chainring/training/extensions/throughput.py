"""Throughput: reports the speed of training and its peak memory."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chainring.reporting.reporter import report
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class Throughput(Extension):
    """Reports the speed of training since the last report, and the peak memory, for a `LogReport`.

    Keys begin with the name of the extension, for example ``throughput/examples_per_second``:

    - ``iterations_per_second``.
    - ``examples_per_second``: of the batches that the updater converted, if it has `UpdateCallbacks` and their numbers of
      examples are known.
    - ``tokens_per_second``: the weight of the losses, if a loss function returns a ``"weight"`` that is not its number of
      examples.
    - ``peak_memory_mib``: the peak since the process started, in MiB: of the memory allocated on the accelerator of the
      models, or of the memory of this process if they are on the CPU, for which Windows needs ``chainring[system]``.

    Times are those of the whole loop, including evaluations and snapshots, on a monotonic clock. The accelerator is
    synchronized only when the trigger fires. Over ranks, examples and tokens are summed, and memory is the maximum. Time
    before a resume does not count.

    Example::

        trainer.extend(extensions.Throughput(trigger=(100, "iteration")))

    Args:
        trigger: when to report. ``extend(..., trigger=t)`` means the same and takes precedence.

    Raises:
        TypeError, ValueError: ``trigger`` is not a trigger, see `get_trigger`.
    """

    priority = PRIORITY_WRITER
    default_name = "throughput"
    skip_on_resume = True

    def __init__(self, trigger: TriggerLike = (1, "epoch")) -> None:
        self.trigger = get_trigger(trigger)
        self._callbacks: UpdateCallbacks | None = None
        self._reset()

    def _reset(self) -> None:
        self._started_at = time.monotonic()
        self._iterations = self._examples = self._examples_of_update = 0
        self._tokens: Any = 0  # a tensor if weights are, so that none of them is read
        self._is_weighted = False
        self._are_counted = True

    def initialize(self, trainer: Trainer) -> None:
        parameters = (p for model in trainer.updater.get_all_models().values() for p in model.parameters())
        self._device = next((p.device for p in parameters if p.device.type not in ("cpu", "meta")), None)
        _peak_memory(self._device)  # says now what is missing
        callbacks = getattr(trainer.updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            self._callbacks = callbacks
            callbacks.add("batch_on_finish", self._count_examples)
        self._reset()

    def finalize(self) -> None:
        if self._callbacks is not None:
            self._callbacks.remove("batch_on_finish", self._count_examples)
        self._callbacks = None

    def _count_examples(self, context: UpdateContext) -> None:
        if context.examples is None:
            self._are_counted = False
        else:
            self._examples_of_update += context.examples

    def observe(self, trainer: Trainer) -> None:
        self._iterations += 1
        if self._callbacks is None:
            return
        examples, self._examples_of_update = self._examples_of_update, 0
        weight = trainer.updater.weight
        self._examples += examples
        self._tokens = self._tokens + (weight.detach() if isinstance(weight, Tensor) else weight)
        self._is_weighted = self._is_weighted or isinstance(weight, Tensor) or weight not in (1, examples)

    def __call__(self, trainer: Trainer) -> None:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        seconds = time.monotonic() - self._started_at
        if not self._iterations or seconds <= 0:
            return
        counts = self._examples, float(self._tokens) if self._is_weighted else 0.0, _peak_memory(self._device) / 2**20
        gathered = trainer.comm.world.gather_object(counts)
        examples, tokens, _ = zip(*(gathered[rank] for rank in trainer.comm.data_ranks), strict=True)
        values = {"iterations_per_second": self._iterations / seconds}
        if self._callbacks is not None and self._are_counted:
            values["examples_per_second"] = sum(examples) / seconds
        if self._is_weighted:
            values["tokens_per_second"] = sum(tokens) / seconds
        values["peak_memory_mib"] = max(memory for _, _, memory in gathered)
        name = trainer.extension_name or self.default_name
        report({f"{name}/{key}": value for key, value in values.items()})
        self._reset()


def _peak_memory(device: torch.device | None) -> int:
    """Return the peak of memory in bytes."""
    peak = None if device is None else getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if peak is not None:
        return int(peak(device))
    try:
        import resource
    except ImportError:  # Windows
        return _peak_by_psutil()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # getrusage(2): bytes there, KiB on Linux


def _peak_by_psutil() -> int:
    try:
        import psutil
    except ImportError as error:
        rule = f"Throughput reads the memory of this process with psutil, which cannot be imported ({error})"
        raise ImportError(f"{rule}: pip install 'chainring[system]'") from error
    return int(psutil.Process().memory_info().peak_wset)
