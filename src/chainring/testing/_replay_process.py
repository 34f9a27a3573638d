"""The process of a replay of a script, and what starts it and waits for its result.

``python -m chainring.testing._replay_process TASK SCRIPT [ARGUMENTS]`` runs a script so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
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
from chainring._runs.conditions import Condition
from chainring._runs.finished import FinishedRun
from chainring.reporting.summary import is_scalar
from chainring.testing._live_traces import Capture, fingerprint
from chainring.testing._processes import ProcessTask, failure_of, run, run_script, script_starter
from chainring.testing._replaying import NoReplay, Replay, Watch, compare_with_record
from chainring.testing.replay import recorded_threads
from chainring.training.trainer import Trainer

_MODULE = "chainring.testing._replay_process"
_SECONDS = 0.1  # between two notes of where a replay is


@dataclass(frozen=True)
class ReplayTask(ProcessTask):
    """A replay in a process of its own.

    Attributes:
        source: the directory of the run.
        latest: the iteration of the latest snapshot with which it may begin.
        until: the iteration with which it ends.
        goes_on: True to continue as far as the run may have come, see `Replay`.
        condition: the condition that ends it; where the task was read, its attributes.
        save: where the state is saved at the end.
        needs_same_bits: whether a run of several ranks is refused where one process computes other bits.
        threads: of torch.
        capture: the first and the last iteration of which it is taken down what they compute, and whether in detail.
    """

    source: str
    latest: int
    until: int
    goes_on: bool = False
    condition: Any = None
    save: str | None = None
    needs_same_bits: bool = True
    threads: int | None = None
    capture: tuple[int, int, bool] | None = None


def main() -> None:
    """Replay with the script of the command line, up to the end of its trainer's run."""
    task = ReplayTask(**json.loads(sys.argv[1]))
    _skip_loading_from(task.source)
    with recorded_threads(task.threads):
        run_script(task, functools.partial(_replay, task), "replay")


def _skip_loading_from(run_directory: str) -> None:
    """Let a script that continues its run from a snapshot begin before it: the replay chooses the snapshot."""
    load, inside = serializers.load, Path(run_directory).resolve()

    @functools.wraps(load)
    def loading(path: str | os.PathLike[str], obj: Any, *args: Any, **kwargs: Any) -> None:
        begins = isinstance(obj, Trainer) and not obj.is_replaying
        if not (begins and Path(path).resolve().is_relative_to(inside)):
            load(path, obj, *args, **kwargs)

    serializers.load = loading


def _replay(task: ReplayTask, trainer: Trainer, run_trainer: Callable[[Trainer], None]) -> None:
    condition = task.condition and Condition(**task.condition)
    watch = Watch(condition.key, condition.holds) if condition else Watch()
    facts: dict[str, Any] = {"error": None}
    capture = None if task.capture is None else Capture(trainer, *task.capture[:2], in_detail=task.capture[2])
    try:
        replaying = Replay(
            trainer, Path(task.source), Path(task.directory), latest=task.latest, until=task.until, goes_on=task.goes_on,
            watch=watch, at_end=functools.partial(_describe, task, facts), on_iteration=_position_writer(task, capture),
            needs_same_bits=task.needs_same_bits,
        )  # fmt: skip
        origin = replaying.origin
        facts["origin"] = {**asdict(origin), "snapshot": origin.snapshot and origin.snapshot.name}
        task.path("origin").write_text(str(origin.iteration))
        replaying.run(run_trainer)
    except NoReplay as error:
        task.exit_with_reason(str(error))
    except Exception as error:
        if condition is None:
            raise
        facts["error"] = f"{type(error).__name__}: {error}"
    reached = watch.match.iteration if watch.match else trainer.updater.iteration
    comparison = compare_with_record(FinishedRun(task.source), trainer, origin, reached)
    facts |= {
        "iteration": reached,
        "batches": replaying.last_batches,
        "captured": capture and capture.steps,
        "may_go_back": replaying.may_go_back,
        "match": watch.match and asdict(watch.match),
        "not_finite": watch.not_finite,
        "seen": sorted(watch.seen),
        "comparison": comparison and {**asdict(comparison), "difference": comparison.difference},
    }
    task.path("result").write_text(json.dumps(to_json(facts)))
    task.path("done").touch()


def _describe(task: ReplayTask, facts: dict[str, Any], trainer: Trainer) -> None:
    """Write down the trainer as it is at the end, and save it."""
    texts = {name: texts for name, texts in fingerprint(trainer).items() if name not in ("batch", "observation")}
    facts["digest"] = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]
    facts["observation"] = {key: float(value) for key, value in trainer.observation.items() if is_scalar(value)}
    if task.save is not None:
        serializers.save(task.save, trainer)


def _position_writer(task: ReplayTask, capture: Capture | None) -> Callable[[int], None]:
    """Return what notes the iteration, a few times a second, and lets what it has computed be taken down."""
    due = 0.0

    def write(iteration: int) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            due = now + _SECONDS
            task.path("position").write_text(str(iteration))
        if capture is not None:
            capture.look(iteration)

    return write


# --- in the process that starts it ---


def replay_script(
    run_directory: Path, script: str, arguments: Sequence[str], *, latest: int, until: int, **settings: Any
) -> dict[str, Any]:
    """Replay a run with the script that trained it, in a process of its own, with a progress bar; return its facts.

    The ``settings`` are those of a `ReplayTask`.

    Raises:
        FileNotFoundError: there is no such script.
        NoReplay: the script fails, or does not come to the iteration.
    """
    start = script_starter(_MODULE, script, arguments)
    directory = tempfile.mkdtemp(prefix="chainring-replay-")
    try:
        task = ReplayTask(
            "replay", directory, os.path.join(directory, "out"), secrets.token_hex(16), source=str(run_directory),
            latest=latest, until=until, **settings,
        )  # fmt: skip
        with tqdm(desc="replay", unit="it", delay=3.0, mininterval=0.5, file=sys.stderr, disable=None) as bar:
            code = run(start, task, functools.partial(_show, task, bar))
            if task.path("result").exists():
                bar.total = bar.n = int(task.read("result")["iteration"]) - int("".join(task.lines("origin")))
        if not task.path("result").exists():
            raise NoReplay(failure_of(task, code, "the script failed in the replay"))
        facts: dict[str, Any] = from_json(task.read("result"))
        return facts
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _show(task: ReplayTask, bar: Any) -> None:
    """Show in a bar where the process is."""
    begin, position = "".join(task.lines("origin")), "".join(task.lines("position"))
    if begin.isdigit() and position.isdigit():
        bar.total = task.until - int(begin)
        if (count := int(position) - int(begin)) != bar.n:
            bar.update(count - bar.n)


if __name__ == "__main__":
    main()
