"""RankTimes: where the time of each rank goes, and which of them the others wait for."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chainring._files import replace_file
from chainring._messages import info
from chainring.reporting.reporter import report
from chainring.training.extension import PRIORITY_WRITER
from chainring.training.extensions._phases import PHASES, PhaseWatch, accelerator_of
from chainring.training.trainer import Trainer
from chainring.training.triggers import TriggerLike, get_trigger

DATA = "rank_times.json"
_SLOW = 1.2  # times the median of all ranks, beyond which a rank is named
_STAGES = {"data": "data", "forward": "forward", "backward": "backward", "update": "step", "communication": "waiting"}


class RankTimes(PhaseWatch):
    """Measures on every rank the seconds in data, forward, backward, step and waiting for others, and names slow ranks.

    Keys begin with the name of the extension:

    - ``rank_times/slowest``: the number of the rank that took the most time without waiting.
    - ``rank_times/spread``: its time over the median of all ranks; 1 if all are equally fast.
    - ``rank_times/waiting``: the part of the time of all ranks in which they waited for others.
    - ``rank_times/data``, ``forward``, ``backward``, ``step``, ``other``: the seconds in an update of the slowest rank;
      ``other`` is what it takes in extensions more than the rank that takes least, since they wait for one another there.

    A rank that takes over 1.2 times the median is named in a line, with the stage that differs most, once until another
    rank or stage is. On an accelerator the times are between events there, which are read when they have passed: nobody
    waits for it. Ranks exchange gradients after the backward instead of within it, so that waiting is not taken for work.

    ``rank_times.json`` has the seconds of the last report by rank and stage, which the page of the run draws.

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
        self._events = deque[tuple[str, Any]]()  # on it, with the phases that they end
        self._named: tuple[int, str] | None = None

    def initialize(self, trainer: Trainer) -> None:
        self._device = accelerator_of(trainer)
        self._events.clear()
        self.seconds, self.iterations = dict.fromkeys(PHASES, 0.0), 0
        super().initialize(trainer)

    def _mark(self, phase: str) -> None:
        if self._device is None:
            super()._mark(phase)
        else:
            event = torch.Event(device=self._device, enable_timing=True)
            event.record()
            self._events.append((phase, event))
            while len(self._events) > 1 and self._events[1][1].query():
                _, began = self._events.popleft()
                ended_phase, ended = self._events[0]
                self.seconds[ended_phase] += began.elapsed_time(ended) / 1000

    def __call__(self, trainer: Trainer) -> None:
        if not self.iterations:
            return
        stages = {name: self.seconds[phase] / self.iterations for phase, name in _STAGES.items()}
        stages["other"] = sum(s for phase, s in self.seconds.items() if phase not in PHASES) / self.iterations
        gathered = trainer.comm.world.gather_object((stages, socket.gethostname(), str(trainer.comm.world.device)))
        self.seconds, self.iterations = dict.fromkeys(self.seconds, 0.0), 0
        self.ranks = [stages for stages, _, _ in gathered]
        least = min(stages["other"] for stages in self.ranks)
        for stages in self.ranks:
            stages["other"] -= least
        if trainer.comm.is_main:
            data = {"iteration": trainer.updater.iteration, "hosts": [host for _, host, _ in gathered], "ranks": self.ranks}
            replace_file(Path(trainer.out) / DATA, json.dumps(data, indent=1) + "\n")
        slowest, spread = _slowest(self.ranks)
        work = self.ranks[slowest]
        total, waiting = sum(sum(stages.values()) for stages in self.ranks), sum(stages["waiting"] for stages in self.ranks)
        name = trainer.extension_name or self.default_name
        values = {**work, "slowest": slowest, "spread": spread, "waiting": waiting / total if total else 0.0}
        report({f"{name}/{key}": float(value) for key, value in values.items()})
        if spread <= _SLOW or len(self.ranks) == 1:
            self._named = None
            return
        stage = max(_work(work), key=lambda stage: work[stage] - np.median([stages[stage] for stages in self.ranks]))
        if self._named != (slowest, stage) and trainer.comm.is_main:
            _, host, device = gathered[slowest]
            usual = np.median([stages[stage] for stages in self.ranks if stages is not work])
            info(
                f"rank {slowest} ({device} of {host}) takes {spread:.1f} times the median of {len(self.ranks)} ranks, and "
                f"others wait for it; most of it is {stage}, {1000 * work[stage]:.1f} ms an update, and {1000 * usual:.1f} "
                "ms on others"
            )
        self._named = slowest, stage


def _work(stages: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in stages.items() if name != "waiting"}


def _slowest(ranks: Sequence[Mapping[str, float]]) -> tuple[int, float]:
    """Return the rank with the most work, and its time over the median."""
    seconds = [sum(_work(stages).values()) for stages in ranks]
    slowest = max(range(len(ranks)), key=seconds.__getitem__)
    usual = float(np.median(seconds))
    return slowest, seconds[slowest] / usual if usual else 1.0
