"""The processes of `verify_resume`: each ends in time, with everything that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from chainring.testing._subprocess import MARK, ProcessTask, Task, run_made_trainer

_MAX_LINES = 40
_POLL = 0.02  # seconds
_GRACE = 3.0  # seconds for a process to end once its run is saved


class Process(Protocol):
    """A started process."""

    pid: int | None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while it runs."""


Start = Callable[[Any], Process]
"""Starts a fresh process for a task."""


class HungError(Exception):
    """A process had not ended in time."""


def script_starter(module: str, script: str, arguments: Sequence[str]) -> Start:
    """Return what starts a module that runs a script with its arguments, see `run_script`."""

    def start(task: ProcessTask) -> Process:
        command = [sys.executable, "-m", module, task.to_json(), script, *arguments]
        environment = {**os.environ, MARK: task.mark}
        with open(task.path("output"), "ab") as output:
            process: Any = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        return process  # type: ignore[no-any-return]

    return start


def function_starter(make_trainer: Callable[..., Any], context: Any) -> Start:
    """Return what calls a function in a process of a context of ``multiprocessing``."""

    class Started:
        def __init__(self, task: Task) -> None:
            self._process = context.Process(target=run_made_trainer, args=(make_trainer, task))
            self._process.start()
            self.pid = self._process.pid

        def poll(self) -> int | None:
            code: int | None = self._process.exitcode
            return code

    return Started


def run(start: Start, task: ProcessTask, watch: Callable[[], None] = lambda: None) -> int:
    """Run a task and return its exit code, with 0 for a process that was saved and did not end; end what it has started.

    ``watch`` is called again and again meanwhile.

    Raises:
        HungError: its deadline has passed.
    """
    process = start(task)
    try:
        done_at: float | None = None
        while (code := process.poll()) is None:
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
        _end(process, task.mark)


def _end(process: Process, mark: str) -> None:
    """Kill a process with its group, and whatever it has started that carries the mark, and wait until they are gone."""
    if process.pid is None:
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    while process.poll() is None:
        time.sleep(_POLL)
    until = time.monotonic() + _GRACE
    while (left := _started(process.pid, mark)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL)


def _started(group: int, mark: str) -> list[int]:
    """Return the processes that are in a group or carry the mark, where the system has ``/proc``."""
    entry, found = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if state != "Z" and (int(its_group) == group or entry in (process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def where_it_hung(task: ProcessTask) -> str:
    """Return after which iteration a process hung, and in which lines, as far as it has written them down."""
    iterations = [json.loads(line)["iteration"] for line in task.lines("jsonl")]
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
