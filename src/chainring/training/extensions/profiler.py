"""Profiler: measures the time of each phase of an iteration."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chainring._files import atomic_write, replace_file
from chainring.training._entry import Entry, Observer
from chainring.training.extension import Extension
from chainring.training.triggers.base import never
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_PHASES = ("data", "forward", "backward", "communication", "update", "loop")
_TABLE = "profile.txt"
_DATA = "profile.json"
_TRACE = "profile_trace.json"

_STAGES = {
    "batch_on_finish": "data",
    "forward_on_start": "data",
    "forward_on_finish": "forward",
    "backward_on_start": "forward",
    "backward_on_finish": "backward",
    "comm_on_start": "update",
    "comm_on_finish": "communication",
    "update_on_start": "update",
    "update_on_finish": "update",
}
"""At each callback of an updater, the phase that has just ended."""


class Profiler(Extension, Observer):
    """Measures how long each phase of an iteration takes, and writes ``profile.txt`` and ``profile.json`` when the run ends.

    The phases are ``data`` (fetching and converting a batch), ``forward``, ``backward``, ``communication`` between ranks,
    ``update`` (the optimizer's step), each extension (``extension:LogReport``), and ``loop`` (everything else between two
    updates, such as triggers). Times are seconds of this process on a monotonic clock. An accelerator works
    asynchronously, so a phase is the time until its work was submitted; the trace shows the rest. The profiler never
    synchronizes, and costs less than a microsecond per phase.

    The phases are those of a `StandardUpdater`; for any other updater, all time that cannot be assigned to another phase
    counts as ``update``.

    Example::

        trainer.extend(extensions.Profiler(trace=(10, 12)))

    Args:
        trace: the first and the last iteration, counted from 1, in which ``torch.profiler`` records every operation into
            ``profile_trace.json``, a Chrome trace (open it at https://ui.perfetto.dev). ``None`` records none.

    Attributes:
        seconds: the time of each phase in this run so far.
        iterations: the number of updates measured.

    Raises:
        TypeError: ``trace`` is not a pair of integers.
        ValueError: ``trace`` is not a range of iterations.
    """

    def __init__(self, *, trace: tuple[int, int] | None = None) -> None:
        self.trigger = never
        self._trace = None if trace is None else _check_trace(trace)
        self._undo = ExitStack()  # what takes the measuring out of the trainer again
        self._out: Path | None = None
        self._recorder: Any = None
        self._reset()

    def _reset(self) -> None:
        self.seconds = dict.fromkeys(_PHASES, 0.0)
        self.iterations = 0
        self._last: float | None = None
        self._has_stages = False  # True if callbacks have been called in this update
        self._is_stepping = False  # True after the first step of this update

    @property
    def writes(self) -> Sequence[str]:
        return (_TABLE, _DATA) if self._trace is None else (_TABLE, _DATA, _TRACE)

    def __call__(self, trainer: Trainer) -> None:
        """Do nothing: the profiler measures all the time, and its trigger never fires."""

    def initialize(self, trainer: Trainer) -> None:
        self._reset()
        self._out = Path(trainer.out) if trainer.comm.is_main else None
        updater: Any = trainer.updater
        self._undo.callback(trainer.watch(self))
        if isinstance(getattr(updater, "callbacks", None), UpdateCallbacks):
            self._mark_stages(updater.callbacks)
        for optimizer in updater.get_all_optimizers().values():
            self._undo.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._undo.callback(optimizer.register_step_post_hook(lambda *_: self._mark("update")).remove)
        self.seconds |= {_phase_of(entry): 0.0 for entry in trainer.entries if entry.extension is not self}
        reporter = trainer.reporter
        reporter.watchers += (self._watch,)

        def stop_watching() -> None:
            reporter.watchers = tuple(watcher for watcher in reporter.watchers if watcher != self._watch)

        self._undo.callback(stop_watching)

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        self._has_stages = self._is_stepping = False
        self._mark("loop")
        if self._trace is not None:
            self._record(trainer.updater.iteration + 1, *self._trace)
        update()
        self._mark("update")
        self.iterations += 1

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        if entry.extension is self:
            return
        self._mark("loop")
        try:
            call()
        finally:
            self._mark(_phase_of(entry))

    around_observe = around_call

    def _mark(self, phase: str) -> None:
        """Count the time since the last mark as that of this phase."""
        now = time.perf_counter()
        if self._last is not None:
            self.seconds[phase] += now - self._last
        self._last = now

    def _mark_stages(self, callbacks: UpdateCallbacks) -> None:
        """Add marks to the updater's callbacks: before the others when a stage finishes, after them when one starts."""
        for stage, phase in _STAGES.items():
            mark = functools.partial(self._mark_stage, stage, phase)
            callbacks.add(stage, mark, first=stage.endswith("finish"))
            self._undo.callback(callbacks.remove, stage, mark)

    def _mark_stage(self, stage: str, phase: str, context: UpdateContext) -> None:
        # An update_core of one's own may fetch batches by next_batch, and do the rest in no stages.
        self._has_stages = self._has_stages or stage != "batch_on_finish"
        self._mark(phase)

    def _watch(self, key: str, value: Any) -> None:
        # Without stages, the loss that is reported with its graph is the end of the forward.
        if not self._has_stages and isinstance(value, Tensor) and value.requires_grad:
            self._mark("forward")

    def _before_step(self, *_: Any) -> None:
        # A step that calls the step of its base class comes here twice.
        self._mark("update" if self._has_stages or self._is_stepping else "backward")
        self._is_stepping = True

    def _record(self, iteration: int, first: int, last: int) -> None:
        """Start the trace before its first iteration, end it before the one after its last."""
        if self._recorder is None and first <= iteration <= last and self._out is not None:
            self._recorder = torch.profiler.profile()
            self._recorder.start()
        elif iteration > last:
            self._end_trace()

    def _end_trace(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None and self._out is not None:
            recorder.stop()
            with atomic_write(self._out / _TRACE) as file:
                recorder.export_chrome_trace(file.name)

    def finalize(self) -> None:
        self._undo.close()
        if self.iterations:
            self._mark("loop")
        self._last = None
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


def _phase_of(entry: Entry) -> str:
    return f"extension:{entry.name}"


def _check_trace(trace: tuple[int, int]) -> tuple[int, int]:
    rule = "trace is the first and the last iteration to record, counted from 1, such as (10, 12)"
    if not isinstance(trace, (tuple, list)) or len(trace) != 2 or not all(type(limit) is int for limit in trace):
        raise TypeError(f"{rule}; got {trace!r}")
    if not 1 <= trace[0] <= trace[1]:
        raise ValueError(f"{rule}; got {trace!r}")
    return trace[0], trace[1]
