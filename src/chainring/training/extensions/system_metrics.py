"""SystemMetrics: reports the load and the memory use of the machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from chainring.reporting.reporter import report
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.triggers import TriggerLike, get_trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class SystemMetrics(Extension):
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

    priority = PRIORITY_WRITER
    default_name = "system"
    skip_on_resume = True

    def __init__(self, trigger: TriggerLike = (1, "epoch")) -> None:
        self.trigger = get_trigger(trigger)
        try:
            import psutil
        except ImportError as error:
            raise ImportError(
                f"SystemMetrics reads with psutil, which cannot be imported ({error}): pip install 'chainring[system]'"
            ) from error
        self._psutil: Any = psutil
        self._reset()

    def _reset(self) -> None:
        self._process = self._psutil.Process()
        self._device: torch.device | None = None
        self._tells_utilization = True
        self._machine = self._machine_times()
        self._own = time.process_time(), time.monotonic()

    def initialize(self, trainer: Trainer) -> None:
        self._reset()
        parameters = (p for model in trainer.updater.get_all_models().values() for p in model.parameters())
        self._device = next((p.device for p in parameters if p.device.type not in ("cpu", "meta")), None)

    def __call__(self, trainer: Trainer) -> None:
        values = self._processors() | {
            "memory_percent": self._psutil.virtual_memory().percent,
            "process_memory_mib": self._process.memory_info().rss / 2**20,
        }
        if self._device is not None:
            values |= self._accelerator(self._device)
        name = trainer.extension_name or self.default_name
        report({f"{name}/{key}": float(value) for key, value in values.items()})

    def _processors(self) -> dict[str, float]:
        """Return the use since the last call, or since an earlier one where the clocks have not moved on since then."""
        values = {}
        (busy, whole), (busy_before, whole_before) = self._machine_times(), self._machine
        if whole > whole_before:
            values["cpu_percent"] = min(max(100 * (busy - busy_before) / (whole - whole_before), 0.0), 100.0)
            self._machine = busy, whole
        (used, now), (used_before, before) = (time.process_time(), time.monotonic()), self._own
        if now > before:
            values["process_cpu_percent"] = 100 * (used - used_before) / (now - before)
            self._own = used, now
        return values

    def _machine_times(self) -> tuple[float, float]:
        """Return the seconds of all processors: those that they were busy, and all."""
        times = self._psutil.cpu_times()._asdict()
        whole = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # are in user and nice too
        return whole - times["idle"] - times.get("iowait", 0.0), whole

    def _accelerator(self, device: torch.device) -> dict[str, float]:
        module, values = torch.get_device_module(device), {}
        if (allocated := getattr(module, "memory_allocated", None)) is not None:
            values["accelerator_memory_mib"] = allocated(device) / 2**20
        if self._tells_utilization and hasattr(module, "utilization"):
            try:
                values["accelerator_percent"] = module.utilization(device)
            except Exception:  # no nvidia-ml-py; or an error of the driver, as for a part of a GPU: each has its class
                self._tells_utilization = False
        return values
