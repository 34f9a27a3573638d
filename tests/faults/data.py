"""What happens to data: a worker is killed, the dataset raises, an example never comes."""

import functools
import os
import signal
import time
from collections import Counter
from multiprocessing import RawValue

import program
from attempts import Settings, check_directory, newest_of, processes_of, started_at
from bench import Row

from tries import WrongEndError

STALL = 3.0  # seconds that an example may take
AT_ONCE = 30.0  # seconds in which an error must have ended the process, on a busy machine
KINDS = ("killed", "killed by itself", "raises", "stalls")


class Slow:
    """Each example takes a moment, so that the run waits for its workers."""

    def ended(self, trainer):
        pass

    def __call__(self, i):
        time.sleep(0.003)


class Fault:
    """Of a dataset, at one index, from an iteration on."""

    def __init__(self, kind, index, iteration):
        self.kind, self.index, self.iteration = kind, index, iteration
        self._armed = RawValue("i", 0)

    def ended(self, trainer):
        """An iteration is over, in the main process."""
        self._armed.value = trainer.updater.iteration >= self.iteration

    def __call__(self, i):
        if not self._armed.value or i != self.index:
            return
        if self.kind == "raises":
            raise ValueError(f"broken example {i}")
        if self.kind == "stalls":
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)


def at_random(bench, number, draw, place):
    """Lets it happen, looks at the error, and continues without it."""
    kind = KINDS[number % len(KINDS)]
    index, iteration = draw.randrange(program.EXAMPLES), draw.randrange(program.ITERATIONS // 2)
    workers = 0 if kind == "raises" and draw.random() < 0.3 else 2
    fault = None if kind == "killed" else functools.partial(Fault, kind, index, iteration)
    settings = Settings(workers=workers, fault=fault, timeout=STALL if kind == "stalls" else 600.0)
    with bench.attempt(place, settings) as attempt:
        if kind == "killed":
            _kill_a_worker(bench, draw, attempt)
        began = time.monotonic()
        attempt.wait_for()
        seconds = time.monotonic() - began
        if "ended" in attempt.messages:  # the worker had made all that was wanted of it
            bench.compare(attempt.completed())
            return Counter({"too late": 1})
        code, output = attempt.code, attempt.output
    if code != 1 or seconds > AT_ONCE + bench.whole[2]:
        raise WrongEndError(f"{kind}: the run ended after {seconds:.1f} s with code {code}: {output[-2000:]}")
    _check_error(kind, index, workers, output)
    found = check_directory(place / "out")
    bench.complete(place, workers=draw.choice([0, 2]))
    if started_at(place / "out") != newest_of(found):
        raise WrongEndError(f"the run went on from {started_at(place / 'out')}, and there were {found}")
    return Counter({"faults": 1, kind: 1})


def _kill_a_worker(bench, draw, attempt):
    attempt.wait_for("running")
    attempt.wait_for("ended", draw.uniform(0, 0.9 * bench.running[2]))
    while "ended" not in attempt.messages and attempt.code is None:
        workers = sorted(set(processes_of(attempt.pid)) - {attempt.pid})
        if workers:
            os.kill(draw.choice(workers), signal.SIGKILL)
            return
        attempt.wait_for("ended", 0.002)  # they start with the first batch


def _check_error(kind, index, workers, output):
    said = {
        "killed": ["RuntimeError", "was killed by SIGKILL"],
        "killed by itself": ["RuntimeError", "was killed by SIGKILL", f"dataset[{index}]"],
        "raises": [f"ValueError: broken example {index}", *([f"raised by dataset[{index}]"] if workers else [])],
        "stalls": ["TimeoutError", f"dataset[{index}]", f"{STALL:g} seconds"],
    }[kind]
    if missing := [text for text in said if text not in output]:
        raise WrongEndError(f"{kind} at index {index}: {missing} is not in the error: {output[-3000:]}")


ROWS = [
    Row(
        "data", "worker killed; dataset raises at a random index; stalled dataset",
        "the original error with the index, at once; resume exact", "faults", 100, at_random,
    ),
]  # fmt: skip
