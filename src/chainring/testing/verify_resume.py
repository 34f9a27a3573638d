"""verify_resume: compares one's own program, killed and resumed, with its uninterrupted run."""

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
from chainring.testing._diff import compare, format_report, read_fingerprints
from chainring.testing._subprocess import SNAPSHOT, Run, Task, run_made_trainer

_MAX_LINES = 40
Launch = Callable[[Task], int]
"""Runs a task in a fresh process and returns its exit code, negative for a signal."""


class ResumeDiffers(AssertionError):  # noqa: N818 - it is read as a finding
    """The resumed run is not the uninterrupted one; the text names the first difference and its possible causes.

    Example::

        with pytest.raises(ResumeDiffers):
            verify_resume(make_trainer_that_draws_outside_of_the_state)
    """


class NotTried(RuntimeError):  # noqa: N818 - it is read as a finding
    """The program could not be compared; the text says why, with the traceback where it has failed.

    Example::

        with pytest.raises(NotTried):
            verify_resume(make_trainer_of_three_iterations, iterations=20)
    """


def verify_resume(
    make_trainer: Callable[..., Any],
    *,
    iterations: int = 20,
    kill_after: int = 7,
    directory: str | os.PathLike[str] | None = None,
    start_method: Literal["spawn", "forkserver"] = "spawn",
) -> str:
    """Kill a training, resume it, and compare it bit for bit with one that was not interrupted.

    Three fresh processes each make the trainer anew: one runs all iterations; the second is saved and killed by SIGKILL on
    the way; the third loads that snapshot and runs to the end. After each iteration the batches, the random generators,
    the reported values, the models and the optimizers are compared, and at the end every tensor and value of the state and
    every row of the logs. The trainer's own extensions and its stop trigger stay, in an ``out`` of its own.

    Times are not compared: ``elapsed_time`` in rows and state, the state of a `TimeTrigger`, and values that two starts of
    the program report differently while all else is the same, such as a speed; the report names those.

    Example::

        verify_resume(make_trainer, iterations=20, kill_after=7)  # in a test

    Args:
        make_trainer: a function at the top level of a module, which returns a trainer that has not run. It is called with
            the ``out`` that it is to use, or without, if it has no such parameter; the trainer's ``out`` is set in any case.
        iterations: of the uninterrupted run.
        kill_after: iterations until the kill. Where an epoch is as short as that, one in the second epoch tells more.
        directory: for the files of all runs, new or empty; by default they are removed.
        start_method: of the processes, see ``multiprocessing``. Under ``"forkserver"`` they share the imports of the server
            and start sooner; the order of sets is then the same in all three.

    Returns:
        The report, with the number of values compared and the keys left out.

    Raises:
        ResumeDiffers: the runs differ.
        NotTried: the program fails, or ends before it could be killed.
        TypeError: ``make_trainer`` cannot be called in another process.
        ValueError: there is nothing to resume with these numbers.
        FileExistsError: ``directory`` is not empty.
    """
    _check_importable(make_trainer)
    context: Any = multiprocessing.get_context(start_method)

    def launch(task: Task) -> int:
        process = context.Process(target=run_made_trainer, args=(make_trainer, task))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        return process.exitcode or 0

    return _verify(launch, iterations, kill_after, directory)


def verify_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    iterations: int = 20,
    kill_after: int = 7,
    directory: str | os.PathLike[str] | None = None,
) -> str:
    """Verify a script that runs one trainer as `verify_resume` does a function; the rest of it is not executed.

    Raises:
        FileNotFoundError: there is no such script.
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}")

    def launch(task: Task) -> int:
        command = [sys.executable, "-m", "chainring.testing._subprocess", json.dumps(vars(task)), script, *arguments]
        with open(task.path("output"), "ab") as output:
            info(f"{script}: the {Run(task.run).name.lower()} run")
            return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode

    return _verify(launch, iterations, kill_after, directory)


def _verify(launch: Launch, iterations: int, kill_after: int, directory: str | os.PathLike[str] | None) -> str:
    """Launch the three runs, compare them, and return the report."""
    if not 1 <= kill_after < iterations:
        raise ValueError(
            f"a run of {iterations} iterations is killed after 1 to {iterations - 1}, got kill_after={kill_after}"
        )
    path = tempfile.mkdtemp(prefix="verify-resume-") if directory is None else os.path.abspath(directory)
    try:
        os.makedirs(path, exist_ok=True)
        if os.listdir(path):
            raise FileExistsError(f"{path} is not empty; give a new directory")
        whole, killed, resumed = (Task(run, path, iterations, kill_after) for run in Run)
        if (code := launch(whole)) != 0 or not (whole.path("state") / STATE).exists():
            raise NotTried(_failure(whole, code, "the uninterrupted run failed"))
        observed = list(read_fingerprints(whole))
        if (length := observed[-1] - observed[0]) <= kill_after:
            raise NotTried(
                f"the run ended after {length} iterations by itself, and was to be killed after {kill_after}: "
                "kill it earlier, or let it train for longer"
            )
        if (code := launch(killed)) != -signal.SIGKILL or not (Path(killed.out) / SNAPSHOT).exists():
            raise NotTried(_failure(killed, code, "the run that was to be killed ended before"))
        if (code := launch(resumed)) != 0 or not (resumed.path("state") / STATE).exists():
            raise ResumeDiffers(_failure(resumed, code, "the killed run cannot be resumed"))
        findings = compare(whole, killed, resumed)
        report = format_report(findings, kill_after)
        if findings.differs:
            raise ResumeDiffers(report)
        return report
    finally:
        if directory is None:
            shutil.rmtree(path, ignore_errors=True)


def _failure(task: Task, code: int, summary: str) -> str:
    """Return the reason that a process has given for its failure, or the end of its output."""
    if task.path("refusal").exists():
        return task.path("refusal").read_text()
    shown = "\n".join(task.lines("output")[-_MAX_LINES:])
    if not shown and code != 0:
        shown = "it has printed nothing; a script that calls verify_resume does so under if __name__ == '__main__'"
    return f"{summary}; its process ended with {code}:\n{shown}".rstrip(":\n")


def _check_importable(make_trainer: Any) -> None:
    rule = "make_trainer is called in fresh processes, which import it by its name"
    if not callable(make_trainer):
        raise TypeError(f"{rule}; got {make_trainer!r}, which is not a function")
    remedy = "define it at the top level of a module"
    try:
        multiprocessing.reduction.ForkingPickler.dumps(make_trainer)
    except Exception as error:
        raise TypeError(f"{rule}, and {make_trainer!r} cannot be: {error}; {remedy}") from error
    if getattr(make_trainer, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise TypeError(f"{rule}, and a function that was typed in is not in a file; {remedy}")
