"""Throughput, SystemMetrics, Profiler and Timer: the speed of training, what it takes of the machine, and its time there."""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chainring._checks import is_integer, is_number, plain
from chainring._files import atomic_write, replace_file
from chainring._messages import info
from chainring.serializers.protocol import AbstractSerializer, visit_optional
from chainring.training._entry import Observer
from chainring.training._run_directory import read_record
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.extensions._phases import PHASES, PhaseWatch, accelerator_of, report_as
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.training.triggers.base import never
from chainring.training.updaters._balance import seconds_between, time_on
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, undo_if_computed_again

if TYPE_CHECKING:
    from chainring.training.extensions._flops import UpdateFlops


class Throughput(Extension):
    """Reports the speed of training since the last report, and the peak memory, for a `LogReport`.

    Keys begin with the name of the extension, for example ``throughput/examples_per_second``:

    - ``iterations_per_second``.
    - ``examples_per_second``: of the batches that the updater converted, if it has `UpdateCallbacks` and knows their sizes.
    - ``tokens_per_second``: the weight of the losses, if a loss function returns a ``"weight"``, and its sum is not the
      number of examples.
    - ``model_flops_per_second``, with ``flops=True``: the floating-point operations of an update in those products and
      convolutions for which ``torch.utils.flop_counter`` has a formula, an addition and a multiplication being two, times
      the updates a second. They are counted in the first update after a start, over all ranks, and follow the number of
      examples where batches differ. What gradient checkpointing computes again does not count.
    - ``mfu``, if the peak of the device is known: model FLOPs utilization, the part that they are of its peak.
    - ``goodput``: the part of the time since the run was first started that went into updates which were kept, and not into
      those that a kill or a rollback has undone, the time in between, evaluations or snapshots.
    - ``peak_memory_mib``: the peak since the process started, of the memory allocated on the accelerator of the models, or
      of this process if they are on the CPU, for which Windows needs ``chainring[system]``.

    Times are those of the whole loop, including evaluations and snapshots. The accelerator is synchronized only when the
    trigger fires. Over ranks, examples and tokens are summed, and memory is the maximum.

    Example::

        trainer.extend(extensions.Throughput(trigger=(100, "iteration"), flops=True))

    Args:
        trigger: when to report. ``extend(..., trigger=t)`` means the same and takes precedence.
        flops: True to count operations, by which the update takes longer, with the same bits; by default they are counted
            if ``peak_flops`` is given.
        peak_flops: the operations a second that one device can do, as its data sheet says of dense matrices in the
            precision of the model. By default it is known of some GPUs, by the precision of each operation.

    Raises:
        TypeError: ``flops`` is not True, False or ``None``.
        ValueError: ``peak_flops`` is not a number above 0, or is given with ``flops=False``.
    """

    priority = PRIORITY_WRITER
    skip_on_resume = True
    default_name = "throughput"
    reported_keys: Sequence[str] = ()

    def __init__(
        self, trigger: TriggerLike = (1, "epoch"), *, flops: bool | None = None, peak_flops: float | None = None
    ) -> None:
        if flops is not None and not isinstance(flops, bool):
            raise TypeError(f"flops is True to count the operations of an update, or False; got {flops!r}")
        if peak_flops is not None and (flops is False or not is_number(peak_flops) or not 0 < peak_flops < math.inf):
            raise ValueError(
                "peak_flops is the operations a second that one device can do, a number above 0, of which flops=True takes "
                f"the part; got peak_flops={peak_flops!r}, flops={flops!r}"
            )
        self.trigger = get_trigger(trigger)
        self._accelerator: torch.device | None = None  # that of the models
        self._callbacks: UpdateCallbacks | None = None
        self._kept, self._batches = _KeptTime(), _Batches()
        self._flops: UpdateFlops | None = None
        self._undo = ExitStack()
        if flops or peak_flops is not None:
            from chainring.training.extensions._flops import UpdateFlops  # which imports much of torch

            self._flops = UpdateFlops(plain(peak_flops))

    def _reset(self) -> None:
        self._started_at = time.monotonic()
        self._iterations = self._examples = 0
        self._tokens: Any = 0  # a tensor if weights are, so that none of them is read
        self._batches.of_update, self._batches.are_counted = 0, True

    def initialize(self, trainer: Trainer) -> None:
        self._accelerator = accelerator_of(trainer)
        _peak_memory(self._accelerator)  # says now what is missing
        callbacks = getattr(trainer.updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            self._callbacks = callbacks
            callbacks.add("batch_on_finish", self._batches.count)
            self._undo.callback(callbacks.remove, "batch_on_finish", self._batches.count)
        if self._flops is not None:
            name = trainer.extension_name or self.default_name
            self.reported_keys = (f"{name}/model_flops_per_second", f"{name}/mfu")
            self._batches.flops = self._flops
            self._flops.begin(trainer)
            self._undo.callback(trainer.watch(self._flops))
        self._kept.begin(trainer, self._accelerator)
        self._undo.callback(trainer.watch(self._kept))
        self._examples_of_first = 0
        self._reset()

    def finalize(self) -> None:
        self._undo.close()
        self._callbacks = None

    def observe(self, trainer: Trainer) -> None:
        self._iterations += 1
        if self._callbacks is None:
            return
        self._examples_of_first = self._examples_of_first or self._batches.of_update
        self._examples, self._batches.of_update = self._examples + self._batches.of_update, 0
        weight = trainer.updater.weight
        self._tokens = self._tokens + (weight.detach() if isinstance(weight, Tensor) else weight)

    def __call__(self, trainer: Trainer) -> None:
        if self._accelerator is not None:
            torch.accelerator.synchronize(self._accelerator)
        seconds = time.monotonic() - self._started_at
        if not self._iterations or seconds <= 0:
            return
        flops = (0, 0.0) if self._flops is None else (self._flops.count, self._flops.seconds)
        counts = self._examples, float(self._tokens), _peak_memory(self._accelerator) / 2**20, self._kept.part()
        gathered = trainer.comm.world.gather_object((*counts, *flops, self._examples_of_first))
        sums = [sum(gathered[rank][kind] for rank in trainer.comm.data_ranks) for kind in range(7)]
        examples, tokens, _, _, flops_of_first, least_seconds, examples_of_first = sums
        if trainer.comm.survives:  # each rank counts those of all
            tokens = gathered[0][1]
        values = {"iterations_per_second": self._iterations / seconds}
        # What the updates weigh that have neither batches nor weights.
        units = self._iterations * (getattr(trainer.updater, "virtual_ranks", None) or len(trainer.comm.data_ranks))
        if self._callbacks is not None and self._batches.are_counted:
            values["examples_per_second"] = examples / seconds
        if self._callbacks is not None and tokens not in (examples, units):
            values["tokens_per_second"] = tokens / seconds
        if all(gathered[rank][4] for rank in trainer.comm.data_ranks):
            is_in_proportion = self._batches.are_counted and examples_of_first > 0
            updates = examples / examples_of_first if is_in_proportion else self._iterations
            values["model_flops_per_second"] = flops_of_first * updates / seconds
            if all(gathered[rank][5] for rank in trainer.comm.data_ranks):
                values["mfu"] = least_seconds * updates / seconds / trainer.comm.world.size
        values["goodput"] = gathered[0][3]
        values["peak_memory_mib"] = max(row[2] for row in gathered)
        report_as(self, trainer, values)
        self._reset()

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._kept.serialize(serializer)


class _Batches:
    """Counts the examples of an update, apart: a function of an update that carries state forbids a retry of its parts."""

    of_update = 0
    are_counted = True
    flops: UpdateFlops | None = None

    def count(self, context: UpdateContext) -> None:
        if self.flops is not None:
            self.flops.count_batch(context)
        if context.examples is None:
            self.are_counted = False
        else:
            self._add(context.examples)
            undo_if_computed_again(functools.partial(self._add, -context.examples))

    def _add(self, examples: int) -> None:
        self.of_update += examples


class _KeptTime(Observer):
    """The seconds of the updates that were kept, as a part of all since the run was first started.

    On an accelerator, seconds are between events there, which are read when they have passed: nobody waits for it.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: float | None = None  # the first start, on the monotonic clock of this process
        self._device: torch.device | None = None
        self._spans = deque[tuple[Any, Any]]()

    def begin(self, trainer: Trainer, device: torch.device | None) -> None:
        """Count the updates of this start, after what was loaded."""
        self._device = device
        self._spans.clear()
        if not trainer.is_resumed:
            self._seconds, self._began = 0.0, None
        if self._began is None:  # otherwise the run has gone back in this process
            self._began = time.monotonic() - max(trainer.elapsed_time, _seconds_since_first_start(trainer))

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        began = time_on(self._device)
        update()
        self._spans.append((began, time_on(self._device)))
        self._read()

    def _read(self) -> None:
        while self._spans and (self._device is None or self._spans[0][1].query()):
            began, ended = self._spans.popleft()
            self._seconds += seconds_between(began, ended)

    def part(self) -> float:
        """Return what part of the time since the first start they are."""
        self._read()
        seconds = 0.0 if self._began is None else time.monotonic() - self._began
        return min(self._seconds / seconds, 1.0) if seconds > 0 else 0.0

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._read()
        self._seconds = visit_optional(serializer["elapsed_time"], "updates", self._seconds)


def _seconds_since_first_start(trainer: Trainer) -> float:
    """Return those by the clock of the machine, which goes on between two processes; 0 where no start is recorded."""
    with suppress(LookupError, TypeError, ValueError):  # a person may have edited it
        first = read_record(Path(trainer.out))["starts"][0]["time"]
        return time.time() - datetime.datetime.fromisoformat(first).timestamp() - 1  # of whole seconds
    return 0.0


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


class SystemMetrics(Extension):
    """Reports the use of CPU, memory and the accelerator (GPU), for a `LogReport`.

    Keys begin with the name of the extension, for example ``system/cpu_percent``:

    - ``cpu_percent``: the utilization of all processors of the machine since the last report.
    - ``process_cpu_percent``: that of this process; 100 is one processor.
    - ``memory_percent``, ``process_memory_mib``: the memory in use now of the machine, and of this process.
    - ``accelerator_percent``: the utilization of the models' accelerator over the last second or less, if its driver tells.
    - ``accelerator_memory_mib``: the memory that this process has allocated there now.

    It measures when its trigger fires; if that is more often than the log's, a row contains the mean of several
    measurements. A report takes less than a millisecond, and waits for nobody: each rank reports its own values, and a log
    contains their means. Worker processes are in the values of the machine only; in a container, the machine is the host.

    Example::

        trainer.extend(extensions.SystemMetrics(trigger=(100, "iteration")))

    Args:
        trigger: when to report. ``extend(..., trigger=t)`` means the same and takes precedence.

    Raises:
        ImportError: psutil is not installed.
    """

    priority = PRIORITY_WRITER
    skip_on_resume = True
    default_name = "system"

    def __init__(self, trigger: TriggerLike = (1, "epoch")) -> None:
        self.trigger = get_trigger(trigger)
        self._psutil = _import_psutil("SystemMetrics")

    def initialize(self, trainer: Trainer) -> None:
        self._accelerator = accelerator_of(trainer)
        self._process = self._psutil.Process()
        self._tells_utilization = True
        self._machine = self._machine_times()
        self._process_times = time.process_time(), time.monotonic()

    def __call__(self, trainer: Trainer) -> None:
        values = {}
        # Since the last call, or since an earlier one where the clocks have not moved on since then.
        (busy, whole), (busy_before, whole_before) = self._machine_times(), self._machine
        if whole > whole_before:
            values["cpu_percent"] = min(max(100 * (busy - busy_before) / (whole - whole_before), 0.0), 100.0)
            self._machine = busy, whole
        (used, now), (used_before, before) = (time.process_time(), time.monotonic()), self._process_times
        if now > before:
            values["process_cpu_percent"] = 100 * (used - used_before) / (now - before)
            self._process_times = used, now
        values["memory_percent"] = self._psutil.virtual_memory().percent
        values["process_memory_mib"] = self._process.memory_info().rss / 2**20
        if (device := self._accelerator) is not None:
            module = torch.get_device_module(device)
            if (allocated := getattr(module, "memory_allocated", None)) is not None:
                values["accelerator_memory_mib"] = allocated(device) / 2**20
            if self._tells_utilization and hasattr(module, "utilization"):
                try:
                    values["accelerator_percent"] = module.utilization(device)
                except Exception:  # no nvidia-ml-py; or an error of the driver, as for a part of a GPU: each has its class
                    self._tells_utilization = False
        report_as(self, trainer, values)

    def _machine_times(self) -> tuple[float, float]:
        """Return the seconds of all processors: those that they were busy, and all."""
        times = self._psutil.cpu_times()._asdict()
        whole = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # are in user and nice too
        return whole - times["idle"] - times.get("iowait", 0.0), whole


_TABLE = "profile.txt"
_DATA = "profile.json"
_TRACE = "profile_trace.json"


class Profiler(PhaseWatch):
    """Measures how long each phase of an iteration takes, and writes ``profile.txt`` and ``profile.json`` when the run ends.

    The phases are ``data`` (fetching and converting a batch; ``first batch`` that of the first update, for which workers
    start), ``forward``, ``backward``, ``communication`` between ranks, ``step`` of the optimizer, ``update`` (what is around
    it, such as callbacks), each extension (``extension:LogReport``), and ``loop`` (everything else, such as triggers). In
    another updater than a `StandardUpdater` what cannot be assigned to another phase counts as ``update``. The profiler
    never synchronizes: on an accelerator, a phase is the time until its work was submitted. It costs less than a microsecond
    a phase.

    Example::

        trainer.extend(extensions.Profiler(trace=(10, 12)))

    Args:
        trace: the first and the last iteration, counted from 1, in which ``torch.profiler`` records every operation into
            ``profile_trace.json``, a Chrome trace (open it at https://ui.perfetto.dev). ``None`` records none.

    Attributes:
        seconds: the time of each phase in this run so far.
        iterations: the number of updates measured.
    """

    writes: Sequence[str] = ()

    def __init__(self, *, trace: tuple[int, int] | None = None) -> None:
        rule = "trace is the first and the last iteration to record, counted from 1, such as (10, 12)"
        if trace is not None:
            if not isinstance(trace, (tuple, list)) or len(trace) != 2 or not all(map(is_integer, trace)):
                raise TypeError(f"{rule}; got {trace!r}")
            if not 1 <= trace[0] <= trace[1]:
                raise ValueError(f"{rule}; got {trace!r}")
        super().__init__()
        self.trigger = never
        self.writes = (_TABLE, _DATA) if trace is None else (_TABLE, _DATA, _TRACE)
        self._trace = trace
        self._out: Path | None = None
        self._recorder: Any = None

    def __call__(self, trainer: Trainer) -> None:
        """Do nothing: the profiler measures all the time, and its trigger never fires."""

    def initialize(self, trainer: Trainer) -> None:
        self.seconds, self.iterations = dict.fromkeys(PHASES, 0.0), 0
        self._out = Path(trainer.out) if trainer.comm.is_main else None
        super().initialize(trainer)

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        super().around_update(trainer, functools.partial(self._trace_update, trainer.updater.iteration + 1, update))

    def _trace_update(self, iteration: int, update: Callable[[], None]) -> None:
        if self._trace is not None:
            first, last = self._trace
            if self._recorder is None and first <= iteration <= last and self._out is not None:
                self._recorder = torch.profiler.profile(acc_events=True)  # else PyTorch 2.11 warns at the end of each trace
                self._recorder.start()
            elif iteration > last:
                self._end_trace()
        update()

    def _end_trace(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None and self._out is not None:
            recorder.stop()
            with atomic_write(self._out / _TRACE) as file:
                recorder.export_chrome_trace(file.name)

    def finalize(self) -> None:
        super().finalize()
        self._end_trace()
        if self.iterations and self._out is not None:
            data = {"iterations": self.iterations, "seconds": self.seconds}
            replace_file(self._out / _TABLE, self.table())
            replace_file(self._out / _DATA, json.dumps(data, indent=1) + "\n")

    def table(self) -> str:
        """Return a table of the phases so far as text: share, milliseconds per iteration, and seconds of each."""
        total = sum(self.seconds.values())
        rows = [(phase, seconds) for phase, seconds in self.seconds.items() if seconds] + [("all", total)]
        width = max(len(phase) for phase, _ in rows) + 2
        lines = [f"{self.iterations} iterations", f"{'phase':<{width}}{'share':>7}{'ms/iteration':>15}{'seconds':>12}"]
        for phase, seconds in rows:
            share, milliseconds = seconds / (total or 1), 1000 * seconds / (self.iterations or 1)
            lines.append(f"{phase:<{width}}{share:>7.1%}{milliseconds:>15.3f}{seconds:>12.3f}")
        return "\n".join(lines) + "\n"


class Timer(Extension):
    """Ends the run before the time of its job is over, so that the next job continues it with the same command.

    It ends as by a signal: the iteration is completed, all snapshots are taken, and `Interrupted` is raised, with the code
    142 of SIGALRM; several ranks end after the same iteration. For a length of training over all jobs, give the stop
    trigger ``(3600, "second")``.

    Example::

        trainer.extend(extensions.snapshot(autoload=True))
        trainer.extend(extensions.Timer())  # in a job of Slurm

    Args:
        limit: seconds from the beginning of `Trainer.run`. By default the end of the job is read from the variable
            ``SLURM_JOB_END_TIME``, which Slurm sets; without it there is no limit, and a line says so.
        margin: how many seconds before the limit the run is asked to end: as many as the longest iteration takes, with an
            evaluation, and the snapshots.

    Raises:
        TypeError: an argument is not a number.
        ValueError: the margin is below 0, or the limit is not above it; or the variable is not a number.
    """

    def __init__(self, limit: float | None = None, margin: float = 120.0) -> None:
        longest = math.inf if limit is None else limit
        if not (is_number(longest) and is_number(margin)):
            raise TypeError(f"limit and margin of a Timer are numbers of seconds, got {limit!r} and {margin!r}")
        if not 0 <= margin < longest:
            raise ValueError(f"the margin of a Timer is at least 0 and less than its limit, got {margin!r} of {limit!r}")
        self.limit, self.margin = plain(limit), plain(margin)
        self.trigger = never
        self._ends_at: float | None = None  # on a monotonic clock
        self._thread: threading.Timer | None = None

    def __call__(self, trainer: Trainer) -> None:
        """Do nothing: the time passes by itself."""

    def initialize(self, trainer: Trainer) -> None:
        if trainer.is_replaying or trainer.is_rehearsing:
            return
        seconds, end = self.limit, os.environ.get("SLURM_JOB_END_TIME")
        if seconds is None and end is not None:
            if not end.strip().isdigit():
                raise ValueError(f"SLURM_JOB_END_TIME is the end of the job in seconds since 1970, got {end!r}; give limit=")
            seconds = int(end) - time.time()
        if seconds is None:
            if trainer.comm.is_main:
                info("Timer: there is no limit, since neither limit= nor SLURM_JOB_END_TIME is given")
            return
        self._ends_at = time.monotonic() + seconds - self.margin if self._ends_at is None else self._ends_at
        left = self._ends_at - time.monotonic()
        if left <= 0:
            self._end(trainer)
            return
        self._thread = threading.Timer(min(left, threading.TIMEOUT_MAX), self._end, [trainer])
        self._thread.daemon = True
        self._thread.start()

    def _end(self, trainer: Trainer) -> None:
        if trainer.comm.is_main:
            info(f"Timer: the run ends after this iteration, {self.margin:g} seconds before its limit")
        trainer.interruption.end_run(signal.SIGALRM)

    def finalize(self) -> None:
        if self._thread is not None:
            self._thread.cancel()
            self._thread.join()
            self._thread = None
