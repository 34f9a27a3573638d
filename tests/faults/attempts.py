"""One attempt at the run, in a process and a session of its own, and what must be true when it is over."""

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import injected
import program
import torch

from chainring._files import is_temporary
from chainring.serializers._store import open_store
from tries import WrongEndError

LIMIT = 240.0  # seconds that an attempt may take
OTHERS = (".", "previous", "abandoned", "wandb", "comet")  # how the names of directories that are no snapshots begin
LEFT = 60.0  # seconds in which the workers of a killed process must be gone


@dataclass
class Settings:
    """How an attempt is made; see `program.build` and `injected.Plan`.

    Attributes:
        url: the address of the run, if it is not in the directory of the try.
        environment: variables of the process.
        added: called with the trainer, before it runs, and a function that tells messages.
    """

    workers: int = 0
    start: str = "autoload"
    plan: injected.Plan = field(default_factory=injected.Plan)
    fault: Any = None
    timeout: float = 30.0
    may_warn: bool = False
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    ballast: int = 0
    added: Any = None


def live(pipe, out, output, settings):
    """The life of the process: tells ``ready``, ``running``, and ``ended`` with the outcome, or ``interrupted``."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    os.environ.update(settings.environment)
    tempfile.tempdir = None  # the variables say where it is
    if not settings.may_warn:
        warnings.simplefilter("error", UserWarning)
    lock = threading.Lock()

    def tell(message):
        with lock:
            pipe.send(message)

    faults = injected.Injected(settings.plan, tell)
    faults.install()
    tell(("ready",))
    fault = settings.fault() if settings.fault is not None else None
    at = {}

    def ended(trainer):
        trainer.updater.inside = False
        if fault is not None:
            fault.ended(trainer)

    def started():
        tell(("running", len(faults.operations)))
        if settings.plan.holds:
            time.sleep(LIMIT)

    arguments = settings.workers, settings.start, fault, settings.timeout, started, ended, settings.ballast
    trainer = program.build(settings.url or out, *arguments)
    if settings.added is not None:
        settings.added(trainer, tell)

    def signalled(number, frame):
        at.setdefault("begun", trainer.updater.begun)
        at.setdefault("inside", trainer.updater.inside)

    signal.signal(signal.SIGTERM, signalled)
    try:
        trainer.run()
    except SystemExit:
        tell(("interrupted", {**at, "iteration": trainer.updater.iteration}))
        raise
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _check_threads()
    tell(("ended", program.outcome(trainer), faults.passed))


def _check_threads():
    """Of the threads of the run none is left a while after its end."""
    gc.collect()
    until = time.monotonic() + LEFT
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("chainring")]:
        if time.monotonic() >= until:
            raise WrongEndError(f"{LEFT:g} s after the end of the run, its threads {left} were still there")
        time.sleep(0.001)


class Attempt:
    """A started process. Used in a ``with``, at whose end it is over; workers that it leaves are `gone` a moment later.

    Args:
        context: of multiprocessing, a fork server.
        place: the directory of the try; the run writes to ``out`` in it, and its output goes to ``output``.
        settings: see `Settings`.

    Attributes:
        pid: of the process, whose session and process group have the same number.
        messages: what the process has told, by the first word of each.
        code: its exit code, once its end was waited for.
    """

    def __init__(self, context, place, settings):
        self.place, self.out = Path(place), Path(place) / "out"
        self.messages: dict[str, tuple[Any, ...]] = {}
        self.code: int | None = None
        self._deadline = time.monotonic() + LIMIT
        self._pipe, far = context.Pipe(duplex=False)
        arguments = (far, str(self.out), str(self.place / "output"), settings)
        self._process = context.Process(target=live, args=arguments)
        self._process.start()
        far.close()
        self.pid = self._process.pid

    def __enter__(self):
        try:
            self.wait_for("ready")  # it has a session of its own
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, kind, error, traceback):
        self._process.kill()
        self._process.join()
        self.code = self._process.exitcode
        self._pipe.close()
        self._process.close()
        if error is not None:
            end(self.pid)

    @property
    def output(self):
        """What all attempts in this place have printed."""
        return (self.place / "output").read_text(errors="replace")

    def wait_for(self, word=None, seconds=None):
        """Waits for a message, or for the end of the process where ``word`` is none; false when the time was over first."""
        until = self._deadline if seconds is None else min(self._deadline, time.monotonic() + seconds)
        while word not in self.messages:
            ready = multiprocessing.connection.wait([self._pipe, self._process.sentinel], max(0.0, until - time.monotonic()))
            if not ready and time.monotonic() >= self._deadline:
                raise WrongEndError(f"the attempt had not ended after {LIMIT:g} s")
            if not ready:
                return False
            if self._pipe in ready and self._receive():
                continue
            if self._process.sentinel in ready:
                self._process.join()
                self.code = self._process.exitcode
                while self._pipe.poll() and self._receive():
                    pass
                return word is None or word in self.messages
            time.sleep(0.001)  # the end of the pipe came first
        return True

    def _receive(self):
        try:
            word, *rest = self._pipe.recv()
        except EOFError:
            return False
        self.messages[word] = tuple(rest)
        return True

    def kill(self, number=signal.SIGKILL, group=False):
        """Sends a signal to the process, or to its group; one that has ended already is left alone."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def completed(self):
        """Waits for the end of the run and returns its outcome."""
        self.wait_for()
        if "ended" not in self.messages or self.code != 0:
            raise WrongEndError(f"the run ended with code {self.code}: {self.output[-3000:]}")
        return self.messages["ended"][0]


def gone(group):
    """Waits until no process of a group is there, as it must be soon after its leader has ended.

    Raises:
        WrongEndError: some were still there, and have been killed.
    """
    until = time.monotonic() + LEFT
    while left := processes_of(group):
        if time.monotonic() >= until:
            end(group)
            raise WrongEndError(f"{LEFT:g} s after the end of the run, processes {left} of it were still there")
        time.sleep(0.01)


def end(group):
    """Kills what is there of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def processes_of(group):
    """The processes of a group that are alive; one that only waits to be buried is not."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                state, _, pgrp = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def check_directory(out):
    """Every directory with a visible name is a whole snapshot, the link and the log are valid; the iterations by name."""
    found = check_snapshots(out)
    if os.path.lexists(out / "best") and os.readlink(out / "best") not in found:
        raise WrongEndError("the link best leads nowhere")
    if (out / "log").exists():
        json.loads((out / "log").read_text())
    return found


def check_snapshots(out):
    """Every directory with a visible name is a whole snapshot; the iterations by name."""
    found = {}
    if not out.is_dir():
        return found
    store = open_store(out)
    for entry in out.iterdir():
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(OTHERS):
            found[entry.name] = store.snapshot(entry.name).verify().iteration
    return found


def unfinished(out):
    """What killed processes have left in the midst of being written or removed."""
    return [name for name in os.listdir(out) if is_temporary(name)] if out.is_dir() else []


def newest_of(found):
    """The iteration of the newest snapshot of the run, 0 where there is none."""
    return max((iteration for name, iteration in found.items() if name.startswith("snapshot_iter_")), default=0)


def started_at(out):
    """The iteration from which the last start at a path or an address went on."""
    return json.loads(program.content_of(out, "run.json"))["starts"][-1]["iteration"]
