"""What all tries share: the fork server, the uninterrupted run to compare with, and an interrupted one to begin with."""

import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attempts import Attempt, Settings, check_directory, end, gone, unfinished
from injected import Plan

from tries import WrongEndError


@dataclass
class Row:
    """A line of the table.

    Attributes:
        name: on the command line.
        done: the fault.
        expected: what must be true afterwards.
        counted: the key of the counts that the numbers are of.
        large: how many in ``make faults``.
        attempt: ``attempt(bench, number, draw, place)`` makes one try in an empty directory and returns its counts.
        small: how many without ``--large``.
        inside: of how many one must have been inside a write; 0 where that is not asked.
    """

    name: str
    done: str
    expected: str
    counted: str
    large: int
    attempt: Callable
    inside: int = 0
    small: int = 1

    def make(self, bench, number, draw, place):
        """One try, after which no process is left; its counts."""
        counts = self.attempt(bench, number, draw, place)
        bench.settle()
        return counts

    def said(self, counts):
        ordered = sorted(counts.items(), key=lambda item: item[0] != self.counted)
        return ", ".join(f"{value:,} {key}" for key, value in ordered if value)

    def has_enough(self, counts, wanted):
        """Whether as many were done as wanted, and enough of them inside a write."""
        return counts[self.counted] >= wanted and counts["inside a write"] * self.inside >= wanted * bool(self.inside)


class Bench:
    """Starts attempts, and knows how the run ends when nothing happens to it.

    Attributes:
        reference: the outcome of the uninterrupted run.
        passed: how often it passes each point of the commit protocol.
        kept: the snapshots that are there at its end.
        whole: seconds of the run by the number of workers; `running` without its start, `starting` of its start.
    """

    def __init__(self):
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of the end of the first rank the others warn
        self._context = multiprocessing.get_context("forkserver")  # one process imports torch, for all attempts
        self._context.set_forkserver_preload(["attempts", "torch._dynamo", "boto3", "chainring._places.remote"])
        self.root = Path(tempfile.mkdtemp(prefix="chainring-faults-"))
        self.whole, self.running, self.starting = {}, {}, {}
        self._groups, self._template, self._stack = [], None, ExitStack()

    def __enter__(self):
        try:
            self._measure()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.end()
        self._stack.close()
        shutil.rmtree(self.root)

    def attempt(self, place, settings):
        """Starts the run in a place, where workers of the attempt before may still be dying."""
        attempt = Attempt(self._context, place, settings)
        self._groups.append(attempt.pid)
        return attempt

    def settle(self):
        """Sees that no process of any attempt is left.

        Raises:
            WrongEndError: there was one.
        """
        for group in self._groups:
            gone(group)
        self._groups = []

    def end(self):
        """Kills what is left of a try that has failed."""
        for group in self._groups:
            end(group)
        self._groups = []

    @cached_property
    def objects(self):
        """The object store of the tries, see `objects.Objects`; it is started for the first one that needs it."""
        from objects import Objects

        return self._stack.enter_context(Objects(self))

    def place(self, name):
        """An empty directory."""
        place = self.root / name
        place.mkdir(parents=True)
        return place

    def _measure(self):
        outcomes = []
        for workers in (0, 2):
            times = []
            for number in range(3):
                place = self.place(f"reference-{workers}-{number}")
                with self.attempt(place, Settings(workers=workers)) as attempt:
                    began = time.monotonic()
                    attempt.wait_for("running")
                    started = time.monotonic()
                    outcomes.append(attempt.completed())
                    times.append((time.monotonic() - began, time.monotonic() - started, started - began))
                    self.passed = attempt.messages["ended"][1]
                    self.kept = check_directory(place / "out").keys()
            self.whole[workers], self.running[workers], self.starting[workers] = map(
                statistics.median, zip(*times, strict=True)
            )
        self.reference = outcomes[0]
        for outcome in outcomes:
            self.compare(outcome)

    def compare(self, outcome, besides=()):
        """The run has ended as the uninterrupted one; parts named in ``besides`` are left out."""
        differing = [part for part in self.reference if part not in besides and outcome[part] != self.reference[part]]
        if differing:
            raise WrongEndError(f"these differ from the uninterrupted run: {differing}")

    def complete(self, place, **settings):
        """Runs to the end in a place, compares the outcome, and sees that nothing unfinished is left; returns the output."""
        with self.attempt(place, Settings(**settings)) as attempt:
            self.compare(attempt.completed())
            output = attempt.output
        self._check_kept(check_directory(place / "out"))
        left = [name for name in os.listdir(place / "out") if name.startswith(".") and name != ".lock"]
        if left:
            raise WrongEndError(f"a completed run has left {left}")
        return output

    def _check_kept(self, found):
        """What retention keeps is there: the newest two, and the best. One more of each name goes when its next comes."""
        newest = sum(name.startswith("snapshot") for name in found)  # one of them may have been taken at a signal
        best = [name for name in self.kept if name.startswith("best")]
        if newest < 2 or not found.keys() >= set(best) or len(found) > len(self.kept) + 2:
            raise WrongEndError(f"in the end there are {sorted(found)}, and without a fault {sorted(self.kept)}")

    def interrupted(self, place):
        """Copies into a place a run that was killed in a write: two snapshots, the best in between, a log beyond them."""
        if self._template is None:
            self._template = self._killed()
        shutil.copytree(self._template, place / "out", symlinks=True)
        return place / "out"

    def _killed(self):
        for number in range(20):
            place = self.place(f"killed-{number}")
            # The twelfth write is after a better best one; slow, so that the training goes on beside it.
            plan = Plan(slow=0.05, seed=number, point=("wrote state.json", 12))
            with self.attempt(place, Settings(plan=plan)) as attempt:
                attempt.wait_for()
            found = check_directory(place / "out")
            whole = (place / "out" / "log.jsonl").read_text().rpartition("\n")[0]  # the kill may have cut the last row
            rows = [json.loads(row) for row in whole.splitlines()]
            kept = sorted(iteration for name, iteration in found.items() if name.startswith("snapshot"))
            has_later = (
                max(found.values()) < rows[-1]["iteration"] and found.get(os.readlink(place / "out" / "best"), 0) > kept[0]
            )
            if len(kept) == 2 and has_later and unfinished(place / "out"):
                return place / "out"
        raise WrongEndError("no run was killed in the middle of a write in twenty tries")
