"""RankTimes: where the time of each rank goes, and which of them the others wait for."""

from __future__ import annotations

import json
import socket
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chainring._distributed.sharding import is_sharded
from chainring._files import replace_file
from chainring._messages import info, warn
from chainring.training.extension import PRIORITY_WRITER
from chainring.training.extensions._phases import PHASES, PhaseWatch, accelerator_of, report_as
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_trigger
from chainring.training.updaters._balance import seconds_between, time_on
from chainring.training.updaters.callbacks import UpdateContext

DATA = "rank_times.json"
_SLOW = 1.2  # times the median of all ranks, beyond which a rank is named
_STAGES = {
    "first batch": "data", "data": "data", "forward": "forward", "backward": "backward", "step": "step", "update": "step",
    "communication": "waiting",
}  # fmt: skip


class RankTimes(PhaseWatch):
    """Measures on every rank the seconds in data, forward, backward, step and waiting for others, and names slow ranks.

    Keys begin with the name of the extension:

    - ``rank_times/slowest``: the number of the rank that took the most time without waiting.
    - ``rank_times/spread``: its time over the median of all ranks; 1 if all are equally fast.
    - ``rank_times/waiting``: the part of the time of all ranks in which they waited for others.
    - ``rank_times/data``, ``forward``, ``backward``, ``step``, ``other``: the seconds in an update of the slowest rank;
      ``other`` is what it takes in extensions more than the rank that takes least, since they wait for one another there.

    A rank that takes over 1.2 times the median is named in a line, with the stage that differs most, once until another
    rank or stage is. On an accelerator the times are between events there, for which nobody waits. Ranks exchange gradients
    after the backward instead of within it, so that waiting is not taken for work; nor is it where data, a step, an
    extension or a model of DDP waits in an exchange. It is where the script calls ``torch.distributed`` itself, and, with a
    warning, in models of ``fully_shard`` and ``parallelize_module``, and compiled ones of DDP.

    Example::

        trainer.extend(extensions.RankTimes(trigger=(100, "iteration")))

    Args:
        trigger: when to report. ``extend(..., trigger=t)`` means the same and takes precedence.

    Attributes:
        ranks: of the last report, by rank, the seconds in an update by stage.
    """

    default_name = "rank_times"
    priority = PRIORITY_WRITER
    skip_on_resume = True
    writes: Sequence[str] = (DATA,)

    def __init__(self, trigger: TriggerLike = (1, "epoch")) -> None:
        super().__init__()
        self.trigger = get_trigger(trigger)
        self.ranks: list[dict[str, float]] = []
        self._device: torch.device | None = None  # that of the models, if it is an accelerator
        self._notes = deque[list[Any]]()  # phases, each with the time at which it has ended
        self._unnamed: list[list[Any]] = []  # notes of parts of a phase that has not ended yet
        self._gradient: Any = None  # the time of the last gradient in this backward
        self._named: tuple[int, str] | None = None
        self._reported: tuple[Mapping[str, float], int] = {}, 0  # the seconds of all reports so far, and the updates in them

    @property
    def measured_phases(self) -> tuple[Mapping[str, float], int]:
        """The seconds of each phase, on the accelerator if there is one, and the number of updates."""
        return Counter(self._reported[0]) + Counter(self.seconds), self._reported[1] + self.iterations

    def initialize(self, trainer: Trainer) -> None:
        self._device = accelerator_of(trainer)
        self._notes.clear()
        self.seconds, self.iterations = dict.fromkeys(PHASES, 0.0), 0
        world: Any = trainer.comm.world
        if world.size > 1 and hasattr(world, "watchers"):  # otherwise it is alone, or one of the user's
            world.watchers += (self._wait,)
            self._undo.callback(lambda: setattr(world, "watchers", tuple(f for f in world.watchers if f != self._wait)))
            for name, model in trainer.updater.get_all_models().items():
                self._watch_exchanges(name, model)
        super().initialize(trainer)

    def _watch_exchanges(self, name: str, model: nn.Module) -> None:
        """Tell what a model waits for in exchanges of its own from its work."""
        modules = list(model.modules())
        replicated = [module for module in modules if isinstance(module, DistributedDataParallel)]
        is_compiled = any(hasattr(module, "_orig_mod") for module in modules)  # to graphs that hooks would change
        if any(map(is_sharded, model.parameters())) or (replicated and is_compiled):
            warn(
                f"model {name!r} exchanges amid forward and backward, and what a rank waits for there counts as its work: a "
                "slow rank may not be named. RankTimes tells them apart where the model is plain, or in "
                "DistributedDataParallel and not compiled"
            )
            return
        for module in replicated:
            hooks: list[Any] = [module.register_forward_pre_hook(lambda *_: self._note(None))]
            hooks.append(module.module.register_forward_pre_hook(lambda *_: self._note("communication")))
            trained: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
            hooks += [parameter.register_post_accumulate_grad_hook(self._note_gradient) for parameter in trained]
            for hook in hooks:
                self._undo.callback(hook.remove)

    @contextmanager
    def _wait(self) -> Generator[None]:
        """Return the context in which this rank waits for others, in whichever phase."""
        self._note(None)
        try:
            yield
        finally:
            self._note("communication")

    def _note(self, phase: str | None) -> None:
        """Count the time since the last note as that of a phase, or of the one that ends next."""
        if self._notes:
            self._notes.append([phase, time_on(self._device)])
            if phase is None:
                self._unnamed.append(self._notes[-1])

    def _note_gradient(self, _: Tensor) -> None:
        if self._gradient is None or self._device is None:
            self._gradient = time_on(self._device)
        else:
            self._gradient.record()

    def _mark_stage(self, stage: str, phase: str, context: UpdateContext) -> None:
        if stage == "backward_on_start":
            self._gradient = None
        elif stage == "backward_on_finish" and self._gradient is not None:  # DDP waits after the last one
            self._unnamed.append([None, self._gradient])
            self._notes.append(self._unnamed[-1])
            self._note("communication")
        super()._mark_stage(stage, phase, context)

    def _mark(self, phase: str) -> None:
        self._notes.append([phase, time_on(self._device)])
        for note in self._unnamed:
            note[0] = phase
        self._unnamed.clear()
        while len(self._notes) > 1 and (self._device is None or self._notes[1][1].query()):
            _, began = self._notes.popleft()
            ended_phase, ended = self._notes[0]
            self.seconds[ended_phase] += seconds_between(began, ended)

    def __call__(self, trainer: Trainer) -> None:
        if not self.iterations:
            return
        stages = dict.fromkeys(_STAGES.values(), 0.0)
        for phase, name in _STAGES.items():
            stages[name] += self.seconds[phase] / self.iterations
        stages["other"] = sum(s for phase, s in self.seconds.items() if phase not in PHASES) / self.iterations
        gathered = trainer.comm.world.gather_object((stages, socket.gethostname(), str(trainer.comm.world.device)))
        self._reported = self.measured_phases
        self.seconds, self.iterations = dict.fromkeys(self.seconds, 0.0), 0
        self.ranks = [stages for stages, _, _ in gathered]
        least = min(stages["other"] for stages in self.ranks)
        for stages in self.ranks:
            stages["other"] -= least
        if trainer.comm.is_main:
            data = {"iteration": trainer.updater.iteration, "hosts": [host for _, host, _ in gathered], "ranks": self.ranks}
            data |= {"seconds": self._reported[0], "iterations": self._reported[1]}  # of this rank, in all reports
            replace_file(Path(trainer.out) / DATA, json.dumps(data, indent=1) + "\n")
        seconds = [sum(_work(stages).values()) for stages in self.ranks]
        slowest, usual = int(np.argmax(seconds)), float(np.median(seconds))
        work, spread = self.ranks[slowest], seconds[slowest] / usual if usual else 1.0
        total, waiting = sum(sum(stages.values()) for stages in self.ranks), sum(stages["waiting"] for stages in self.ranks)
        values = {**work, "slowest": slowest, "spread": spread, "waiting": waiting / total if total else 0.0}
        report_as(self, trainer, values)
        if spread <= _SLOW or len(self.ranks) == 1:
            self._named = None
            return
        stage = max(_work(work), key=lambda stage: work[stage] - np.median([stages[stage] for stages in self.ranks]))
        if self._named != (slowest, stage) and trainer.comm.is_main:
            _, host, device = gathered[slowest]
            others = np.median([stages[stage] for stages in self.ranks if stages is not work])
            info(
                f"rank {slowest} ({device} of {host}) takes {spread:.1f} times the median of {len(self.ranks)} ranks, and "
                f"others wait for it; most of it is {stage}, {1000 * work[stage]:.1f} ms an update, and {1000 * others:.1f} "
                "ms on others"
            )
        self._named = slowest, stage


def _work(stages: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in stages.items() if name != "waiting"}
