"""The process of a replay of a script, and what starts it and waits for its result.

``python -m chainring.testing._replay_process TASK SCRIPT [ARGUMENTS]`` runs a script so.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chainring import serializers
from chainring._files import from_json, to_json
from chainring._runs.finished import Condition, FinishedRun
from chainring.reporting.summary import is_scalar
from chainring.testing._live_traces import Capture
from chainring.testing._processes import ProcessTask, failure_of, run, run_script, script_starter
from chainring.testing.replay import (
    ExampleLosses,
    NoReplay,
    Replay,
    ReplaySettings,
    Watch,
    compare_with_record,
    compare_with_thinned,
    recorded_threads,
)
from chainring.training.trainer import Trainer

_SECONDS = 0.1  # between two notes of where a replay is


@dataclass(frozen=True, kw_only=True)
class ReplayTask(ReplaySettings, ProcessTask):
    """A replay in a process of its own."""

    source: str  # the directory of the run
    condition: Any = None  # that ends it; where the task was read, its attributes
    save: str | None = None  # where the state is saved at the end
    threads: int | None = None  # of torch
    capture: tuple[int, int, bool] | None = None  # the first and last iteration to take down, and whether in detail
    losses: bool = False  # computes that of each example of the last iteration


def main() -> None:
    """Replay with the script of the command line, up to the end of its trainer's run."""
    task = ReplayTask(**json.loads(sys.argv[1]))
    load, places = serializers.load, [Path(run).resolve() for run in (task.source, *task.copies)]

    @functools.wraps(load)
    def loading(path: str | os.PathLike[str], obj: Any, *args: Any, **kwargs: Any) -> None:
        # A script that continues its run from a snapshot begins before it: the replay chooses the snapshot.
        begins = isinstance(obj, Trainer) and not obj.is_replaying
        if not (begins and any(map(Path(path).resolve().is_relative_to, places))):
            load(path, obj, *args, **kwargs)

    serializers.load = loading
    with recorded_threads(task.threads):
        run_script(task, functools.partial(_replay, task), "replay")


def _replay(task: ReplayTask, trainer: Trainer, run_trainer: Callable[[Trainer], None]) -> None:
    watch = Watch(task.condition and Condition(**task.condition))
    facts: dict[str, Any] = {"error": None, "thinned": None}
    capture = None if task.capture is None else Capture(trainer, *task.capture[:2], in_detail=task.capture[2])
    due = 0.0

    def on_iteration(iteration: int) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + _SECONDS
            task.path("position").write_text(f"{origin.iteration} {iteration}")
        if capture is not None:
            capture.look(iteration)

    try:
        replaying = Replay(
            trainer, Path(task.source), Path(task.directory), task, watch=watch,
            at_end=functools.partial(_describe, task, facts), on_iteration=on_iteration,
        )  # fmt: skip
        origin = replaying.origin
        losses = ExampleLosses(trainer.updater, task.until) if task.losses else None
        if losses is not None:
            trainer.watch(losses)
        facts["origin"] = asdict(origin)
        replaying.run(run_trainer)
        facts["losses"] = losses and losses.result()
    except NoReplay as error:
        task.exit_with_reason(str(error))
    except Exception as error:
        if watch.condition is None:
            raise
        facts["error"] = f"{type(error).__name__}: {error}"
    at_end = task.until if task.checks_last else trainer.updater.iteration
    reached = watch.match["iteration"] if watch.match else at_end
    facts |= {
        "iteration": reached,
        "batches": replaying.last_batches,
        "captured": capture and capture.steps,
        "match": watch.match,
        "not_finite": watch.not_finite,
        "seen": sorted(watch.seen),
        "comparison": compare_with_record(FinishedRun(task.source), trainer, origin, reached),
    }
    task.path("result").write_text(json.dumps(to_json(facts)))
    task.path("done").touch()


def _describe(task: ReplayTask, facts: dict[str, Any], trainer: Trainer) -> None:
    """Write down the trainer as it is at the end, and save it."""
    facts["observation"] = {key: float(value) for key, value in trainer.observation.items() if is_scalar(value)}
    if task.save is not None:
        serializers.save(task.save, trainer)
    facts["thinned"] = compare_with_thinned(FinishedRun(task.source), trainer, Path(task.save or task.path("state")))


# --- in the process that starts it ---


def replay_script(run_directory: Path, script: str, arguments: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Replay a run with the script that trained it, with settings of a `ReplayTask`; return the facts about it."""
    start = script_starter("chainring.testing._replay_process", script, arguments, [run_directory])
    with tempfile.TemporaryDirectory(prefix="chainring-replay-", ignore_cleanup_errors=True) as directory:
        out = os.path.join(directory, "out")
        task = ReplayTask("replay", directory, out, secrets.token_hex(16), source=str(run_directory), **settings)
        bar: Any = tqdm(desc="replay", unit="it", delay=3.0, mininterval=0.5, file=sys.stderr, disable=None)

        def show() -> None:
            if len(position := "".join(task.lines("position")).split()) == 2:
                begin, iteration = map(int, position)
                bar.total = task.until - begin
                bar.update(iteration - begin - bar.n)

        with bar:
            code = run(start, task, show)
            if not task.path("result").exists():
                raise NoReplay(failure_of(task, code, "the script failed in the replay"))
            facts: dict[str, Any] = from_json(task.read("result"))
            bar.total = bar.n = facts["iteration"] - facts["origin"]["iteration"]
        return facts


if __name__ == "__main__":
    main()
