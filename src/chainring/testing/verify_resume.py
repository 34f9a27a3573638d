"""verify_resume: kills and resumes your own program, and compares it with an uninterrupted run."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from chainring._messages import info
from chainring.serializers._store import STATE
from chainring.testing import _resume_findings
from chainring.testing._processes import HungError, Start, failure_of, function_starter, run, where_it_hung
from chainring.testing._resume_findings import Files, Findings, Repetition
from chainring.testing._verified_run import Task, run_made_trainer

_TIMEOUT, _SECONDS = 120.0, 20.0
_MARGIN = 10  # iterations, by which another run may exceed one that ended by itself
_WITHIN, _END, _EVALUATION, _REDONE = (
    "within an epoch",
    "right after the end of an epoch",
    "right after an evaluation",
    "some iterations after a snapshot, so that work is redone",
)
_LATER = "later in the run"
_MOST_REDONE = 5  # iterations
_LONG, _MOST_PHASES = 16, 4  # iterations that are left after the first kills; phases in which it is killed


class ResumeDiffers(AssertionError):  # noqa: N818 - it is read as a finding
    """The resumed run differs from the uninterrupted one; the text names the first difference and its possible causes.

    Example::

        with pytest.raises(ResumeDiffers):
            verify_resume(make_trainer_that_draws_outside_of_the_state)
    """


class NotTried(RuntimeError):  # noqa: N818 - it is read as a finding
    """The program could not be compared; the text says why, with the traceback if it has failed.

    Example::

        with pytest.raises(NotTried):
            verify_resume(make_trainer_of_three_iterations, kill_after=7)
    """


class Inconclusive(NotTried):
    """Two uninterrupted runs already differ, or a process hung; the text names the line to add, or where it hung.

    Example::

        with pytest.raises(Inconclusive):
            verify_resume(make_trainer_seeded_by_the_clock)
    """


def verify_resume(
    make_trainer: Callable[..., Any],
    *,
    iterations: int | None = None,
    kill_after: int | Sequence[int] | None = None,
    timeout: float = _TIMEOUT,
    directory: str | os.PathLike[str] | None = None,
    start_method: Literal["spawn", "forkserver"] = "spawn",
    seconds: float | None = None,
) -> str:
    """Kill a training run, resume it, and compare it bit for bit with an uninterrupted run.

    Each run creates the trainer again in a new process. Two runs are not interrupted, and must be equal; another is saved
    and killed by SIGKILL within an epoch, right after the end of one, right after an evaluation, in each phase of the run,
    which begins where an attribute changes that seldom does, and shortly before its end, some iterations after a snapshot,
    and is resumed each time. Compared are the batches, random generators, reported values, models and optimizers of each
    iteration; and at the end the state, the rows of the logs, the files beside them, and what objects and modules hold.
    The trainer keeps its own extensions and stop trigger, and gets a separate ``out``. Python's, NumPy's and torch's
    generators are seeded before ``make_trainer`` is called: differently in a resumed process.

    Times are not compared: ``elapsed_time``, speeds, the state of a `TimeTrigger`, and values that two uninterrupted runs
    write differently although everything else is equal; the report names those.

    Example::

        verify_resume(make_trainer)  # in a test

    Args:
        make_trainer: a function at the top level of a module, which returns a trainer that has not run. It is called with
            the ``out`` to use, or without arguments if it has no such parameter; the trainer's ``out`` is set in any
            case.
        iterations: the length of the uninterrupted run; by default to its own end, as far as ``seconds`` go.
        kill_after: the iteration after which to kill the run, or several, instead of those points.
        timeout: the time limit of each process, in seconds.
        directory: a new or empty directory for the files of all runs; by default they are removed.
        start_method: how processes are started, see ``multiprocessing``. Under ``"forkserver"`` they share the imports of
            the server and start sooner; the order of sets is then the same in all.
        seconds: the time for which the uninterrupted run trains, unless ``iterations`` are given; by default 20. The whole
            takes three times as long, and a start of the program for each run and kill.

    Returns:
        The report, with the kills, the number of values compared, the keys left out, changes that are not part of any
        state, and what was not tried or looked into.

    Raises:
        ResumeDiffers: the runs differ.
        Inconclusive: two uninterrupted runs already differ, or a process did not end in time.
        NotTried: the program fails, or ends before it could be killed.
        TypeError: ``make_trainer`` cannot be called in another process.
        ValueError: there is nothing to resume with these numbers.
        FileExistsError: ``directory`` is not empty.
    """
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
    start = function_starter(functools.partial(run_made_trainer, make_trainer), multiprocessing.get_context(start_method))
    verdict = verify_program(start, "", iterations, kill_after, timeout, directory, seconds)
    if verdict.name == "differs":
        raise ResumeDiffers(verdict.report)
    if verdict.name == "inconclusive":
        raise Inconclusive(verdict.report)
    return verdict.report


@dataclass
class Kill:
    """A kill: the iteration after which it comes and that of the snapshot from which the run is resumed, and why there."""

    at: int
    saved_at: int
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        resumed = f", resumed from a snapshot of iteration {self.saved_at}" if self.saved_at != self.at else ""
        return f"after iteration {self.at}{resumed}" + (f" ({' and '.join(self.reasons)})" if self.reasons else "")


@dataclass
class Verdict:
    """The result of a verification."""

    name: str  # "exact", "differs" or "inconclusive"
    report: str = ""
    iterations: int = 0
    kills: list[Kill] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)  # kinds of points, and phases
    unsaved: dict[str, str] = field(default_factory=dict)  # by path, what changes: uninterrupted, or saved -> resumed
    caches: dict[str, str] = field(default_factory=dict)  # the same of what may be a cache, or is of an installed package
    unseen: dict[str, str] = field(default_factory=dict)  # by path, what could not be looked into
    is_whole: bool = False  # whether the run has come to its own end
    continues: bool = False  # whether the program continues by itself


def verify_program(
    start: Start,
    name: str,  # in what is printed before each run; empty to print nothing
    iterations: int | None,
    kill_after: int | Sequence[int] | None,
    timeout: float,
    directory: str | os.PathLike[str] | None,
    seconds: float | None,
) -> Verdict:
    """Run a program several times in a directory, removed by default, and compare what its runs did; see `verify_resume`."""
    points = [] if kill_after is None else [kill_after] if isinstance(kill_after, int) else sorted(set(kill_after))
    if iterations is not None and iterations < 2:
        raise ValueError(f"a run that is killed and resumed has 2 iterations or more, got iterations={iterations}")
    for point in points:
        if point < 1 or (iterations is not None and point >= iterations):
            most = "" if iterations is None else f" to {iterations - 1}"
            raise ValueError(f"a run of {iterations or 'some'} iterations is killed after 1{most}, got kill_after={point}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, got {timeout!r}")
    seconds = min(_SECONDS, timeout / 3) if seconds is None else seconds
    if not 0 < seconds < timeout:
        raise ValueError(f"a run trains for more than 0 and less than its timeout of {timeout:g} seconds, got {seconds!r}")
    removed = functools.partial(tempfile.TemporaryDirectory, prefix="verify-resume-", ignore_cleanup_errors=True)
    with removed() if directory is None else contextlib.nullcontext(os.path.abspath(directory)) as path:
        os.makedirs(path, exist_ok=True)
        if os.listdir(path):
            raise FileExistsError(f"{path} is not empty; give a new directory")
        return _Verification(start, name, path, timeout, seconds).judge(iterations, points)


class _Verification:
    """The runs of one program, and what was found in them."""

    def __init__(self, start: Start, name: str, directory: str, timeout: float, seconds: float) -> None:
        self._start, self._name, self._directory, self._timeout, self._seconds = start, name, directory, timeout, seconds
        self._length: int | None = None  # of the runs after the first
        self._mark = secrets.token_hex(16)
        self._seeds = secrets.randbits(32), secrets.randbits(32)
        self._whole_files: list[Files] = []  # of the two uninterrupted runs, read before another run adds to them
        self._verdict = Verdict("exact")
        self._whole: list[Task] = []  # those that are not interrupted
        self._has_searched = False  # in a resumed run, for what no state holds

    def judge(self, iterations: int | None, points: list[int]) -> Verdict:
        verdict = self._verdict
        try:
            lines = self._compare(iterations, points)
        except HungError as hung:
            verdict.name = "inconclusive"
            lines = [f"inconclusive: {hung}"]
        if verdict.not_reached:
            lines.append(f"Not reached in {verdict.iterations} iterations: {'; '.join(verdict.not_reached)}")
        if self._has_searched:
            lines += _resume_findings.format_forgotten(verdict.unsaved, verdict.caches, verdict.unseen)
        verdict.report = "\n".join(lines)
        return verdict

    def _compare(self, iterations: int | None, points: list[int]) -> list[str]:
        verdict = self._verdict
        first = self._run_whole("first", "the uninterrupted run", iterations)
        facts = first.read("facts")
        events = {record["iteration"]: record["events"] for record in first.records("jsonl")}
        begin = min(events)
        length = verdict.iterations = max(events) - begin
        if points and length <= points[-1]:
            raise NotTried(
                f"the run ended after {length} iterations by itself, and was to be killed after {points[-1]}: "
                "kill it earlier, or let it train for longer"
            )
        if points:
            verdict.kills = [Kill(begin + point, begin + point) for point in points]
        else:
            verdict.kills, verdict.not_reached = _choose_kills(events, facts["phases"])
            looks, left_out = facts["looks"]
            if left_out:
                verdict.not_reached.append(
                    f"phases in which attributes were not compared, which was done {looks} of {looks + left_out} times to "
                    "save time; more --seconds (seconds=) allow more"
                )
        kills = verdict.kills
        if not kills:
            raise NotTried(f"the run ended after {length} iterations by itself: let it train for longer, to be killed")
        verdict.is_whole, verdict.continues = facts["ended_itself"], facts["continues"]
        self._length = iterations or length + (_MARGIN if facts["ended_itself"] else 0)
        second = self._run_whole("second", "the second uninterrupted run", self._length)
        repetition = _resume_findings.compare_repeated(first, second)
        if repetition.differs:
            verdict.name = "inconclusive"
            self._resume(first, kills[:1], repetition, self._seeds[0], "")  # for what it forgets
            shared = list(filter(os.path.isabs, self._whole_files[0]))
            return _resume_findings.format_repetition(repetition, facts, shared)
        findings, kill, resumed = self._resume(first, kills, repetition, self._seeds[1], "")
        if not findings.differs:
            # Results that are collected matter where the script goes on with them after the run.
            unsaved = [*verdict.unsaved, *(path for path in verdict.caches if "variable " in path)]
            return _resume_findings.format_exact(findings, list(map(str, kills)), repetition, first, unsaved)
        if generators := _resume_findings.differing_generators(first, resumed):
            again = self._resume(first, kills, repetition, self._seeds[0], " with the same draws")
            if not again[0].differs:
                verdict.name = "inconclusive"
                return _resume_findings.format_unseeded(findings, generators)
            findings, kill, resumed = again
        verdict.name = "differs"
        resumed_facts = resumed.read("facts") if resumed.is_done else None
        return _resume_findings.format_difference(findings, str(kill), repetition, facts, resumed_facts)

    def _run_whole(self, run: str, name: str, length: int | None) -> Task:
        task = self._task(run, length=length)
        code = self._launch(task, name)
        if code != 0 or not _is_saved(task):
            raise NotTried(failure_of(task, code, f"{name} failed"))
        self._whole.append(task)
        self._whole_files.append(_resume_findings.read_files([task], task.read("facts")["logs"]))
        return task

    def _resume(
        self, first: Task, kills: list[Kill], repetition: Repetition, seed: int, suffix: str
    ) -> tuple[Findings, Kill, Task]:
        """Kill and resume a run until it differs; return how, or that it does not, after which kill and in which run."""
        task = self._task(f"killed{suffix}", length=self._length, save_at=kills[0].saved_at, kill_at=kills[0].at)
        code = self._launch(task, f"a run that is killed {kills[0]}")
        if code != -signal.SIGKILL or not (task.snapshot / STATE).exists():
            raise NotTried(failure_of(task, code, "the run that was to be killed ended before"))
        runs = [task]
        for index, kill in enumerate(kills):
            following = kills[index + 1] if index + 1 < len(kills) else None
            resumed = replace(
                task, run=f"resumed{suffix} {index + 1}", seed=seed, resume_from=runs[-1].snapshot.name,
                save_at=following.saved_at if following else None, kill_at=following.at if following else None,
            )  # fmt: skip
            then = f", then killed {following}" if following else ""
            code = self._launch(resumed, f"resumed from iteration {kill.saved_at}{then}")
            if not (_is_saved(resumed) if following is None else (resumed.snapshot / STATE).exists()):
                return Findings(failure=failure_of(resumed, code, "the killed run cannot be resumed")), kill, resumed
            findings = _resume_findings.compare_resumed(first, runs[-1], resumed, repetition)
            self._verdict.unsaved |= _resume_findings.forgotten(runs[-1], resumed)
            self._has_searched = True
            runs.append(resumed)
            if findings.differs:
                break
        if not findings.first:
            files, files_again = self._whole_files
            resumed_files = _resume_findings.read_files(runs, first.read("facts")["logs"])
            _resume_findings.compare_files(findings, files, files_again, resumed_files)
        if not findings.differs:
            verdict = self._verdict
            lost, caches, verdict.unseen = _resume_findings.compare_attributes(first, self._whole[1], resumed)
            verdict.unsaved = lost | verdict.unsaved
            verdict.caches = {path: text for path, text in caches.items() if path not in verdict.unsaved}
        return findings, kill, resumed

    def _launch(self, task: Task, text: str) -> int:
        if self._name:
            info(f"{self._name}: {text}")
        task = replace(task, deadline=time.monotonic() + self._timeout)
        try:
            return run(self._start, task)
        except HungError:
            raise HungError(f"{text} had not ended after {self._timeout:g} seconds; {where_it_hung(task)}") from None

    def _task(self, run: str, **settings: Any) -> Task:
        out = os.path.join(self._directory, f"out of the {run} run")
        return Task(run, self._directory, out, self._mark, self._seeds[0], self._seconds, **settings)


def _is_saved(task: Task) -> bool:
    return task.is_done and (task.path("state") / STATE).exists()


def _choose_kills(events: Mapping[int, list[str]], phases: Sequence[int]) -> tuple[list[Kill], list[str]]:
    """Return the kills of a run, of which phases begin at some iterations, and which kinds of points it does not reach."""
    first, last = min(events), max(events)
    inner = range(first + 1, last)
    epochs, evaluations = ([at for at in inner if event in events[at]] for event in ("epoch", "evaluation"))
    kills: dict[int, Kill] = {}

    def add(at: int, reason: str) -> None:
        kills.setdefault(at, Kill(at, at)).reasons.append(reason)

    if epochs:
        add(epochs[0], _END)
    if evaluations:
        add(next((at for at in evaluations if at not in epochs), evaluations[0]), _EVALUATION)
    # In the midst of the second epoch, or as near to it as the run has an iteration that ends no epoch.
    begin, end = epochs[0] if epochs else first, epochs[1] if len(epochs) > 1 else last
    middle = (begin + end) // 2 if epochs or last - first > 2 * _MOST_REDONE else first + 1
    candidates = [at for at in inner if at not in epochs]
    if candidates:
        add(min(candidates, key=lambda at: (abs(at - middle), at)), _WITHIN)
    latest = max(kills, default=first)
    if last - latest > _LONG:
        add((latest + last) // 2, _LATER)
    begins = [at for at in phases if at > latest]
    for begin, end in pairwise(begins[:: -(-len(begins) // _MOST_PHASES) or 1]):
        if not any(begin <= at < end for at in kills):
            add((begin + end) // 2, _LATER)
    # Shortly before the end, some iterations after a snapshot; or the latest of these is resumed from an earlier snapshot.
    latest = max(kills, default=first)
    for point in (max(last - 2, min(last - 1, latest + 3)), latest):
        before = max((other for other in kills if other < point), default=first)
        if before + 1 < point and (point not in kills or point == latest):
            add(point, _REDONE)
            kills[point].saved_at = max(point - _MOST_REDONE, before + 1)
            break
    reached = {reason for kill in kills.values() for reason in kill.reasons}
    missing = [kind for kind in (_WITHIN, _END, _EVALUATION, _REDONE) if kind not in reached]
    return [kills[at] for at in sorted(kills)], missing
