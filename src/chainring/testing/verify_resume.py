"""verify_resume: whether one's own program, killed and resumed, ends where the uninterrupted one does."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from chainring._messages import info
from chainring.serializers._checkpoint import STATE
from chainring.testing._diff import compare, iterations_of, told
from chainring.testing._subprocess import KILLED, RESUMED, SNAPSHOT, WHOLE, Task, run_made

_LINES = 40
_SAID = {WHOLE: "the uninterrupted run", KILLED: "the run that is killed", RESUMED: "the run that continues it"}

Launch = Callable[[Task], int]
"""Runs a task in a fresh process and returns its exit code, negative for a signal."""


class ResumeDiffers(AssertionError):  # noqa: N818 - it is read as a finding
    """The resumed run is not the uninterrupted one; the text says what differs first, and why it might."""


class NotTried(RuntimeError):  # noqa: N818 - it is read as a finding
    """The program could not be tried; the text says why, with the traceback where it has failed."""


def verify_resume(
    make_trainer: Callable[..., Any],
    *,
    iterations: int = 20,
    kill_after: int = 7,
    directory: str | os.PathLike[str] | None = None,
    start_method: Literal["spawn", "forkserver"] = "spawn",
) -> str:
    """Kills a training, resumes it, and compares it bit for bit with one that was not interrupted.

    Three fresh processes each make the trainer anew: one runs all iterations; the second is saved and killed by SIGKILL in
    the midst; the third loads that snapshot and runs to the end. After each iteration the batches, the random generators,
    what was reported, the models and the optimizers are compared, and at the end every tensor and value of the state and
    every row of the logs. The trainer's own extensions and its stop trigger stay, in an ``out`` of its own.

    Not compared are times: ``elapsed_time`` in rows and state, the state of a `TimeTrigger`, and what is reported otherwise
    by two starts of the program while all else is the same, such as a speed; the report names those.

    Args:
        make_trainer: a function at the top level of a module, which returns a trainer that has not run. It is called with
            the ``out`` that it is to use, or without, if it has no such parameter; the trainer's ``out`` is set in any case.
        iterations: of the whole run.
        kill_after: iterations until the kill. Where an epoch is as short as that, one in the second epoch tells more.
        directory: where everything is left to be looked at, new or empty; by default it is removed.
        start_method: of the processes, see ``multiprocessing``. Under ``"forkserver"`` they share what the server has
            imported and are there sooner; the order of sets is then the same in all three.

    Returns:
        What was compared, and how many values.

    Raises:
        ResumeDiffers: the runs differ.
        NotTried: the program fails, or ends before it could be killed.
        TypeError: ``make_trainer`` cannot be called in another process.
        ValueError: the numbers leave nothing to resume.
        FileExistsError: ``directory`` is not empty.
    """
    _check_importable(make_trainer)
    context: Any = multiprocessing.get_context(start_method)

    def launch(task: Task) -> int:
        process = context.Process(target=run_made, args=(make_trainer, task))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        return process.exitcode or 0

    return tried(launch, iterations, kill_after, directory)


def verify_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    iterations: int = 20,
    kill_after: int = 7,
    directory: str | os.PathLike[str] | None = None,
) -> str:
    """`verify_resume` for a script that runs one trainer, which is tried in place of that run; the rest is not executed.

    Args:
        script: the file.
        arguments: its arguments.
        iterations: of the whole run.
        kill_after: iterations until the kill.
        directory: where everything is left to be looked at.

    Raises:
        FileNotFoundError: there is no such script.
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}")

    def launch(task: Task) -> int:
        command = [sys.executable, "-m", "chainring.testing._subprocess", json.dumps(vars(task)), script, *arguments]
        with open(task.place("output"), "ab") as output:
            info(f"{script}: {_SAID[task.part]}")
            return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode

    return tried(launch, iterations, kill_after, directory)


def tried(launch: Launch, iterations: int, kill_after: int, directory: str | os.PathLike[str] | None) -> str:
    """The three runs and their comparison, see `verify_resume`."""
    if not 1 <= kill_after < iterations:
        raise ValueError(
            f"a run of {iterations} iterations is killed after 1 to {iterations - 1}, got kill_after={kill_after}"
        )
    place = tempfile.mkdtemp(prefix="verify-resume-") if directory is None else os.path.abspath(directory)
    try:
        os.makedirs(place, exist_ok=True)
        if os.listdir(place):
            raise FileExistsError(f"{place} is not empty; give a new directory")
        whole, killed, resumed = (Task(part, place, iterations, kill_after) for part in (WHOLE, KILLED, RESUMED))
        _run_whole(launch, whole)
        if (code := launch(killed)) != -signal.SIGKILL or not (Path(killed.out) / SNAPSHOT).exists():
            raise NotTried(_failure(killed, code, "the run that was to be killed ended before"))
        if (code := launch(resumed)) != 0 or not (resumed.place("state") / STATE).exists():
            raise ResumeDiffers(_failure(resumed, code, "the killed run cannot be resumed"))
        found = compare(place, whole)
        report = told(found, whole)
        if found.differs:
            raise ResumeDiffers(report)
        return report
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)


def _run_whole(launch: Launch, task: Task) -> None:
    code = launch(task)
    if code != 0 or not (task.place("state") / STATE).exists():
        raise NotTried(_failure(task, code, "the uninterrupted run failed"))
    seen = iterations_of(task)
    if seen[-1] - seen[0] <= task.kill_after:
        raise NotTried(
            f"the run ended after {seen[-1] - seen[0]} iterations by itself, and was to be killed after {task.kill_after}: "
            "kill it earlier, or let it train for longer"
        )


def _failure(task: Task, code: int, what: str) -> str:
    """What a process has said before it failed."""
    if task.place("refusal").exists():
        return task.place("refusal").read_text()
    output = task.place("output").read_text(errors="replace") if task.place("output").exists() else ""
    shown = "\n".join(output.splitlines()[-_LINES:])
    if not shown and code != 0:
        shown = "it has printed nothing; a script that calls verify_resume does so under if __name__ == '__main__'"
    return f"{what}; its process ended with {code}:\n{shown}".rstrip(":\n")


def _check_importable(make_trainer: Any) -> None:
    rule = "make_trainer is called in fresh processes, which import it by its name"
    if not callable(make_trainer):
        raise TypeError(f"{rule}; got {make_trainer!r}, which is no function")
    remedy = "define it at the top level of a module"
    try:
        multiprocessing.reduction.ForkingPickler.dumps(make_trainer)
    except Exception as error:
        raise TypeError(f"{rule}, and {make_trainer!r} cannot be: {error}; {remedy}") from error
    if getattr(make_trainer, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise TypeError(f"{rule}, and what was typed in is in no file; {remedy}")
