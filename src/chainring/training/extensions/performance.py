"""Throughput and SystemMetrics: the speed of training, and the load and the memory use of the machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chainring.reporting.reporter import report
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class _Measurement(Extension):
    """Reports numbers under the name of the extension."""

    priority = PRIORITY_WRITER
    skip_on_resume = True

    def __init__(self, trigger: TriggerLike) -> None:
        self.trigger = get_trigger(trigger)
        self._accelerator: torch.device | None = None  # that of the models

    def initialize(self, trainer: Trainer) -> None:
        parameters = (p for model in trainer.updater.get_all_models().values() for p in model.parameters())
        self._accelerator = next((p.device for p in parameters if p.device.type not in ("cpu", "meta")), None)

    def _report(self, trainer: Trainer, values: Mapping[str, Any]) -> None:
        name = trainer.extension_name or self.default_name
        report({f"{name}/{key}": float(value) for key, value in values.items()})


class Throughput(_Measurement):
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

    default_name = "throughput"

    def __init__(self, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(trigger)
        self._callbacks: UpdateCallbacks | None = None
        self._reset()

    def _reset(self) -> None:
        self._started_at = time.monotonic()
        self._iterations = self._examples = self._examples_of_update = 0
        self._tokens: Any = 0  # a tensor if weights are, so that none of them is read
        self._is_weighted = False
        self._are_counted = True

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        _peak_memory(self._accelerator)  # says now what is missing
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
        if self._accelerator is not None:
            torch.accelerator.synchronize(self._accelerator)
        seconds = time.monotonic() - self._started_at
        if not self._iterations or seconds <= 0:
            return
        counts = self._examples, float(self._tokens) if self._is_weighted else 0.0, _peak_memory(self._accelerator) / 2**20
        gathered = trainer.comm.world.gather_object(counts)
        examples, tokens, _ = zip(*(gathered[rank] for rank in trainer.comm.data_ranks), strict=True)
        values = {"iterations_per_second": self._iterations / seconds}
        if self._callbacks is not None and self._are_counted:
            values["examples_per_second"] = sum(examples) / seconds
        if self._is_weighted:
            values["tokens_per_second"] = sum(tokens) / seconds
        values["peak_memory_mib"] = max(memory for _, _, memory in gathered)
        self._report(trainer, values)
        self._reset()


def _peak_memory(device: torch.device | None) -> int:
    """Return the peak of memory in bytes."""
    peak = None if device is None else getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if peak is not None:
        return int(peak(device))
    try:
        import resource
    except ImportError:  # Windows
        return int(_import_psutil("Throughput").Process().memory_info().peak_wset)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # getrusage(2): bytes there, KiB on Linux


def _import_psutil(extension: str) -> Any:
    try:
        import psutil
    except ImportError as error:
        rule = f"{extension} reads with psutil, which cannot be imported ({error})"
        raise ImportError(f"{rule}: pip install 'chainring[system]'") from error
    return psutil


class SystemMetrics(_Measurement):
    """Reports the use of CPU, memory and the accelerator (GPU), for a `LogReport`.

    Keys begin with the name of the extension, for example ``system/cpu_percent``:

    - ``cpu_percent``: the utilization of all processors of the machine since the last report.
    - ``process_cpu_percent``: that of this process; 100 is one processor.
    - ``memory_percent``: the memory of the machine that is in use now.
    - ``process_memory_mib``: that of this process, in MiB.
    - ``accelerator_percent``: the utilization of the accelerator of the models over the last second or less, if its
      driver provides it.
    - ``accelerator_memory_mib``: the memory that this process has allocated there now.

    It measures when its trigger fires and has no thread; if its trigger is more frequent than the log's, a row contains
    the mean of several measurements. A report takes less than a millisecond, and neither waits for the accelerator nor
    communicates with other ranks: each rank reports its own values, and a log contains their means, as for all values.
    Worker processes are included in the values of the machine only; in a container, the machine is the host.

    Example::

        trainer.extend(extensions.SystemMetrics(trigger=(100, "iteration")))

    Args:
        trigger: when to report. ``extend(..., trigger=t)`` means the same and takes precedence.

    Raises:
        ImportError: psutil is not installed.
        TypeError, ValueError: ``trigger`` is not a trigger, see `get_trigger`.
    """

    default_name = "system"

    def __init__(self, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__(trigger)
        self._psutil = _import_psutil("SystemMetrics")
        self._reset()

    def _reset(self) -> None:
        self._process = self._psutil.Process()
        self._tells_utilization = True
        self._machine = self._machine_times()
        self._process_times = time.process_time(), time.monotonic()

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        self._reset()

    def __call__(self, trainer: Trainer) -> None:
        values = self._processors() | {
            "memory_percent": self._psutil.virtual_memory().percent,
            "process_memory_mib": self._process.memory_info().rss / 2**20,
        }
        if self._accelerator is not None:
            values |= self._measure_accelerator(self._accelerator)
        self._report(trainer, values)

    def _processors(self) -> dict[str, float]:
        """Return the use since the last call, or since an earlier one where the clocks have not moved on since then."""
        values = {}
        (busy, whole), (busy_before, whole_before) = self._machine_times(), self._machine
        if whole > whole_before:
            values["cpu_percent"] = min(max(100 * (busy - busy_before) / (whole - whole_before), 0.0), 100.0)
            self._machine = busy, whole
        (used, now), (used_before, before) = (time.process_time(), time.monotonic()), self._process_times
        if now > before:
            values["process_cpu_percent"] = 100 * (used - used_before) / (now - before)
            self._process_times = used, now
        return values

    def _machine_times(self) -> tuple[float, float]:
        """Return the seconds of all processors: those that they were busy, and all."""
        times = self._psutil.cpu_times()._asdict()
        whole = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # are in user and nice too
        return whole - times["idle"] - times.get("iowait", 0.0), whole

    def _measure_accelerator(self, device: torch.device) -> dict[str, float]:
        module, values = torch.get_device_module(device), {}
        if (allocated := getattr(module, "memory_allocated", None)) is not None:
            values["accelerator_memory_mib"] = allocated(device) / 2**20
        if self._tells_utilization and hasattr(module, "utilization"):
            try:
                values["accelerator_percent"] = module.utilization(device)
            except Exception:  # no nvidia-ml-py; or an error of the driver, as for a part of a GPU: each has its class
                self._tells_utilization = False
        return values
