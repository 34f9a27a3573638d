"""PhaseWatch: notes where the time of a run goes, at the callbacks of an update and around extensions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from chainring.reporting.reporter import report
from chainring.training._entry import Entry, Observer
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext

PHASES = ("first batch", "data", "forward", "backward", "communication", "step", "update", "loop")
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


def accelerator_of(trainer: Trainer) -> torch.device | None:
    """Return the accelerator on which the models are; ``None`` if they are on the host."""
    parameters = (p for model in trainer.updater.get_all_models().values() for p in model.parameters())
    return next((p.device for p in parameters if p.device.type not in ("cpu", "meta")), None)


def report_as(extension: Extension, trainer: Trainer, values: Mapping[str, Any]) -> None:
    name = trainer.extension_name or extension.default_name
    report({f"{name}/{key}": float(value) for key, value in values.items()})


class PhaseWatch(Extension, Observer):
    """Counts the seconds of each phase of the iterations on this rank, on the host."""

    def __init__(self) -> None:
        self.seconds, self.iterations = dict.fromkeys(PHASES, 0.0), 0
        self._undo = ExitStack()  # what takes the measuring out of the trainer again
        self._last: Any = None  # the time of the last mark
        self._has_stages = False  # True if callbacks have been called in this update
        self._has_stepped = False  # True after the first step of this update
        self._open_steps = 0  # of which one may call that of its base class, which calls the hooks too
        self._is_first = True  # until an update has ended: for its batches workers start
        self._is_on_host = True  # else a phase ends when its work was submitted

    def initialize(self, trainer: Trainer) -> None:
        updater: Any = trainer.updater
        self._is_first, self._is_on_host = True, accelerator_of(trainer) is None
        self._undo.callback(trainer.watch(self))
        if isinstance(getattr(updater, "callbacks", None), UpdateCallbacks):
            stages = _STAGES if trainer.comm.world.size > 1 else {**_STAGES, "comm_on_finish": "update"}  # alone, none waits
            for stage, phase in stages.items():  # before the others when a stage finishes, after them when one starts
                mark = functools.partial(self._mark_stage, stage, phase)
                updater.callbacks.add(stage, mark, first=stage.endswith("finish"))
                self._undo.callback(updater.callbacks.remove, stage, mark)
        for optimizer in updater.get_all_optimizers().values():
            self._undo.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._undo.callback(optimizer.register_step_post_hook(self._after_step).remove)
        self.seconds |= {f"extension:{entry.name}": 0.0 for entry in trainer.entries if entry.extension is not self}
        reporter, watch = trainer.reporter, self._watch
        reporter.watchers += (watch,)
        self._undo.callback(lambda: setattr(reporter, "watchers", tuple(f for f in reporter.watchers if f != watch)))

    @property
    def measured_phases(self) -> tuple[Mapping[str, float], int]:
        """The seconds of each phase, if they are known, and the number of updates."""
        return self.seconds, self.iterations if self._is_on_host else 0

    def finalize(self) -> None:
        self._undo.close()
        if self.iterations:
            self._mark("loop")
        self._last = None

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        self._has_stages, self._has_stepped, self._open_steps = False, False, 0
        self._mark("loop")
        update()
        self._mark("update")
        self._is_first = False
        self.iterations += 1

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        self._mark("loop")
        if entry.extension is self:  # which may wait for other ranks
            call()
            return
        try:
            call()
        finally:
            self._mark(f"extension:{entry.name}")

    around_observe = around_call

    def _mark(self, phase: str) -> None:
        """Count the time since the last mark as that of this phase."""
        now = time.perf_counter()
        if self._last is not None:
            self.seconds[phase] += now - self._last
        self._last = now

    def _mark_stage(self, stage: str, phase: str, context: UpdateContext) -> None:
        # An update_core of one's own may fetch batches by next_batch, and do the rest in no stages.
        self._has_stages = self._has_stages or stage != "batch_on_finish"
        self._mark("first batch" if self._is_first and phase == "data" else phase)

    def _watch(self, key: str, value: Any) -> None:
        # Without stages, the loss that is reported with its graph is the end of the forward.
        if not self._has_stages and isinstance(value, Tensor) and value.requires_grad:
            self._mark("forward")

    def _before_step(self, *_: Any) -> None:
        self._mark("step" if self._open_steps else "update" if self._has_stages or self._has_stepped else "backward")
        self._open_steps += 1

    def _after_step(self, *_: Any) -> None:
        self._mark("step")
        self._open_steps, self._has_stepped = self._open_steps - 1, True
