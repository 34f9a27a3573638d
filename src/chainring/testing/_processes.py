"""A script, or a function that makes a trainer, in a process of its own: what starts it, and what runs in it.

The task is given as JSON. What the process has found lies in files with the name of the task, which its parent reads.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import inspect
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from chainring._checks import find_call_error
from chainring._files import is_regular, is_temporary
from chainring._places.base import MANIFEST
from chainring.training._run_directory import RECORD
from chainring.training.trainer import Trainer

MARK = "CHAINRING_VERIFY_RESUME"  # in the environment of whatever a task starts
_MAX_LINES = 40
_LOCK = ".lock"
_OF_OTHERS = ("previous", "abandoned", _LOCK)  # in the directory of a run
_POLL = 0.02  # seconds
_GRACE = 3.0  # seconds for a process to end once its run is saved


@dataclass(frozen=True)
class ProcessTask:
    """What one process does, in a directory that it shares with others."""

    run: str  # the name of the task, and of its files
    directory: str
    out: str  # of the trainer
    mark: str  # in the environment of its processes, by which they are found
    place: str = field(default="", kw_only=True)  # the working directory, if it is another one
    copies: list[str] = field(default_factory=list, kw_only=True)  # of directories of runs, for what a script writes there
    deadline: float = field(default=float("inf"), kw_only=True)  # on the monotonic clock; before, it tells where it stands

    def path(self, suffix: str) -> Path:
        return Path(self.directory) / f"{self.run}.{suffix}"

    def lines(self, suffix: str) -> list[str]:
        """Return the lines of a file of this task, none where it has not written it."""
        path = self.path(suffix)
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def records(self, suffix: str) -> list[Any]:
        """Return the JSON in each line of a file of this task."""
        return [json.loads(line) for line in self.lines(suffix)]

    def read(self, suffix: str) -> Any:
        """Return the JSON in a file of this task."""
        return json.loads(self.path(suffix).read_text())

    @property
    def is_done(self) -> bool:
        """True if the run has ended, is saved, and everything in it is finalized."""
        return self.path("done").exists()

    def exit_with_reason(self, reason: str) -> NoReturn:
        """Leave the reason why this task cannot be done, and end the process."""
        self.path("refusal").write_text(reason)
        sys.exit(1)


class HungError(Exception):
    """A process had not ended in time."""


# --- in the process that starts it ---


Poll = Callable[[], int | None]
"""Returns the exit code of a process, negative for a signal, or ``None`` while it runs."""
Start = Callable[[Any], tuple[int, Poll]]
"""Starts a fresh process for a task, and returns its number."""


def script_starter(module: str, script: str, arguments: Sequence[str], runs: Iterable[str | Path]) -> Start:
    """Return a function that starts a module, which runs a script; what that writes into ``runs`` goes into copies."""
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}")
    place, copies, arguments = _protect({os.path.realpath(run) for run in runs}, arguments)
    script = os.path.abspath(script) if place else script
    return command_starter([sys.executable, "-m", module], [script, *arguments], os.environ, place=place, copies=copies)


def command_starter(
    command: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], /, **settings: Any
) -> Start:
    """Return a function that starts a command with a task as JSON, which has these settings besides, and arguments."""

    def start(task: ProcessTask) -> tuple[int, Poll]:
        text = json.dumps(asdict(replace(task, **settings)))
        with open(task.path("output"), "ab") as output:
            process = subprocess.Popen(
                [*command, text, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**environment, MARK: task.mark}, start_new_session=True,
            )  # fmt: skip
        return process.pid, process.poll

    return start


def runs_in_sight(arguments: Sequence[str]) -> list[str]:
    """Return the directories of runs in the working directory, in those there, and among the arguments of a script."""
    near = [path for pattern in ("*", "*/*") for path in glob.glob(pattern)]
    given = [argument.rpartition("=")[2] for argument in arguments]
    return [path for path in (*near, *given) if os.path.isfile(os.path.join(path, RECORD))]


def _protect(runs: Set[str], arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return a working directory in which those of runs are copies, the copies, and the arguments with paths in them.

    All else in it is a link to what it is. Snapshots, in which no program writes, are links too.
    """
    here = os.path.realpath(os.getcwd())
    if not runs or any(f"{here}{os.sep}".startswith(f"{run}{os.sep}") for run in runs):
        return "", [], list(arguments)  # it works in the directory of a run itself
    place = os.path.realpath(tempfile.mkdtemp(prefix="chainring-working-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    work, copies = os.path.join(place, os.path.basename(here) or "root"), dict[str, str]()

    def imitate(source: str, target: str) -> None:
        os.mkdir(target)
        for entry in os.scandir(source):
            real, copy = os.path.realpath(entry.path), os.path.join(target, entry.name)
            if real in runs:
                copies[real] = copy
            elif any(run.startswith(f"{real}{os.sep}") for run in runs):
                imitate(real, copy)
            else:
                os.symlink(os.path.abspath(entry.path), copy)

    def copy_file(source: str, target: str) -> None:
        with contextlib.suppress(OSError):  # the run may still be running, and has removed it
            if is_regular(Path(source)):
                shutil.copy2(source, target)

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if os.path.exists(os.path.join(folder, n, MANIFEST)) or n in _OF_OTHERS or is_temporary(n)]

    imitate(here, work)
    for number, run in enumerate(sorted(runs)):
        copy = copies.setdefault(run, os.path.join(place, f"run {number}"))
        with contextlib.suppress(shutil.Error):
            shutil.copytree(run, copy, symlinks=True, ignore=left_out, copy_function=copy_file)
        for name in left_out(run, os.listdir(run)):
            if name != _LOCK and not is_temporary(name):
                os.symlink(os.path.join(run, name), os.path.join(copy, name))

    moved = list(arguments)
    for run, copy in copies.items():  # a relative path leads to a copy in the working directory anyway
        is_elsewhere = copy.startswith(os.path.join(place, "run "))
        moved = [moved_argument(argument, run, copy, absolute_only=not is_elsewhere) for argument in moved]
    return work, list(copies.values()), moved


def moved_argument(argument: str, run: str, copy: str, *, absolute_only: bool) -> str:
    """Return an argument with a path inside of the directory of a run as one inside of another directory."""
    option, equals, path = argument.rpartition("=")
    real = os.path.realpath(path)
    is_inside = f"{real}{os.sep}".startswith(f"{run}{os.sep}") and (os.path.isabs(path) or not absolute_only)
    return f"{option}{equals}{copy}{real.removeprefix(run)}" if is_inside else argument


def function_starter(function: Callable[..., None], context: Any) -> Start:
    """Return a function that calls ``function`` with a task in a process of a ``multiprocessing`` context."""

    def start(task: ProcessTask) -> tuple[int, Poll]:
        process = context.Process(target=_call_apart, args=(function, task))
        process.start()
        return process.pid, lambda: process.exitcode

    return start


def run(start: Start, task: ProcessTask, watch: Callable[[], None] = lambda: None) -> int:
    """Do a task and return its exit code, with 0 for a process that was saved and did not end; end what it has started.

    ``watch`` is called again and again meanwhile. After the deadline a `HungError` is raised.
    """
    pid, poll = start(task)
    try:
        done_at: float | None = None
        while (code := poll()) is None:
            time.sleep(_POLL)
            watch()
            now = time.monotonic()
            if done_at is None and task.is_done:
                done_at = now
            if done_at is not None and now > done_at + _GRACE:
                return 0
            if now > task.deadline:
                raise HungError
        return code
    finally:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            if poll() is None:
                os.kill(pid, signal.SIGKILL)
        while poll() is None:
            time.sleep(_POLL)
        until = time.monotonic() + _GRACE
        while (left := _started(pid, task.mark)) and time.monotonic() < until:
            for started in left:
                with contextlib.suppress(OSError):
                    os.kill(started, signal.SIGKILL)
            time.sleep(_POLL)


def _started(group: int, mark: str) -> list[int]:
    """Return the processes that are in a group or carry the mark, where the system has ``/proc``."""
    entry, pids = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if state != "Z" and (int(its_group) == group or entry in (process / "environ").read_bytes().split(b"\0")):
                pids.append(int(process.name))
    return [pid for pid in pids if pid != os.getpid()]


def where_it_hung(task: ProcessTask) -> str:
    """Return after which iteration a process hung, and in which lines, as far as it has written them down."""
    iterations = [record["iteration"] for record in task.records("jsonl")]
    where = f"after iteration {iterations[-1]}" if iterations else "before the first iteration"
    threads = "\n".join(task.lines("stack")).split("\n\n")
    frames = [line.strip() for line in threads[-1].splitlines() if line.lstrip().startswith("File ")]
    return f"it hung {where}" + "".join(f"\n  {frame}" for frame in frames[:12])


def failure_of(task: ProcessTask, code: int, summary: str) -> str:
    """Return the reason that a process has given for its failure, or the end of its output."""
    if task.path("refusal").exists():
        return task.path("refusal").read_text()
    shown = "\n".join(task.lines("output")[-_MAX_LINES:])
    if not shown and code > 0:
        shown = "it has printed nothing; a script that calls verify_resume does so under if __name__ == '__main__'"
    end = f"was ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with {code}"
    return f"{summary}; its process {end}:\n{shown}".rstrip(":\n")


# --- in the started process ---


def call_make_trainer(make_trainer: Callable[..., Any], out: str) -> Trainer:
    """Call ``make_trainer`` with the ``out`` that the trainer is to use, or without, if it takes none."""
    if "out" in inspect.signature(make_trainer).parameters:
        trainer = make_trainer(out=out)
    else:
        trainer = make_trainer() if find_call_error(make_trainer) is None else make_trainer(out)
    if not isinstance(trainer, Trainer):
        raise TypeError(f"make_trainer returns a Trainer that has not run, and returned a {type(trainer).__name__}")
    return trainer


class _RunEnded(BaseException):
    """Ends a script whose trainer has run."""


def _call_apart(function: Callable[..., None], task: ProcessTask) -> None:
    if hasattr(os, "setsid"):
        os.setsid()  # so that its processes can be ended with it
    with open(task.path("output"), "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    function(task)


def run_script(task: ProcessTask, run_trainer: Callable[[Trainer, Callable[[Trainer], None]], None], caller: str) -> None:
    """Execute the script of the command line as Python would, up to the end of its trainer's run.

    ``run_trainer`` takes the place of ``Trainer.run``, and is given that too. A script that makes two trainers is refused:
    ``caller`` is the name of the function that takes a function which makes one.
    """
    if task.place:
        os.chdir(task.place)
    sys.argv = sys.argv[2:]
    script = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    construct, original = Trainer.__init__, Trainer.run
    constructed: list[int] = []

    @functools.wraps(construct)
    def counting_init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        constructed.append(id(trainer))
        construct(trainer, *args, **kwargs)

    @functools.wraps(original)
    def replaced_run(trainer: Trainer) -> None:
        if len(constructed) > 1:
            remedy = f"write a function that makes the one, for chainring.testing.{caller}"
            task.exit_with_reason(f"{script} has made two Trainers, and one alone is run here: {remedy}")
        run_trainer(trainer, original)
        raise _RunEnded

    trainer_class: Any = Trainer
    trainer_class.__init__, trainer_class.run = counting_init, replaced_run
    folder, module = os.path.dirname(os.path.realpath(script)), Path(script).stem
    is_in_package = os.path.exists(os.path.join(folder, "__init__.py")) and module.isidentifier()
    try:
        if is_in_package:  # as ``python -m`` would, with imports relative to it
            while os.path.exists(os.path.join(folder, "__init__.py")):
                folder, package = os.path.split(folder)
                module = f"{package}.{module}"
            sys.path.append(folder)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except _RunEnded:
        return
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    task.exit_with_reason(f"{script} has ended and no Trainer in it has run; give the arguments with which it trains")
