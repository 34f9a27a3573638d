"""SIGTERM at random instants: the iteration ends, one snapshot is taken, and the run continues from there."""

import shutil
import signal
from collections import Counter

import program
from attempts import Settings, check_directory, newest_of, started_at, unfinished
from bench import Row
from data import Slow
from injected import Plan

from tries import WrongEndError

CODE = 128 + signal.SIGTERM


def at_random(bench, number, draw, place):
    """Ends a run by SIGTERM to its process or its group, in one of two tries twice, and continues it."""
    counts = Counter()
    out = place / "out"
    workers, group = (0, 2, 2)[number % 3], number % 2 == 1
    while True:
        plan = Plan(slow=draw.choice([0.0, 0.01]), seed=draw.randrange(2**30))
        fault = Slow if group and workers else None  # so that the workers are waited for, and an end of theirs would show
        with bench.attempt(place, Settings(workers=workers, plan=plan, fault=fault)) as attempt:
            attempt.wait_for("running")
            if not attempt.wait_for("ended", draw.uniform(0, bench.running[workers])):
                counts["inside a write"] += any(name.endswith(".tmp") for name in unfinished(out))
                attempt.kill(signal.SIGTERM, group)
                if draw.random() < 0.5:
                    attempt.kill(signal.SIGTERM, group)
                attempt.wait_for()
            if "ended" not in attempt.messages:
                break
        counts["too late"] += 1  # the run was over before the signal came
        bench.compare(attempt.messages["ended"][0])
        shutil.rmtree(out)
    _check_end(attempt, out)
    bench.complete(place, workers=draw.choice([0, 2]))
    if started_at(out) != attempt.messages["interrupted"][0]["iteration"]:
        raise WrongEndError(f"the run went on from {started_at(out)}, and was ended by {attempt.messages['interrupted'][0]}")
    kind = f"to the {'group' if group else 'process'}"
    return counts + Counter({"signals": 1, kind: 1, "with workers": workers > 0})


def _check_end(attempt, out):
    if attempt.code != CODE or "interrupted" not in attempt.messages:
        raise WrongEndError(f"the run ended with code {attempt.code}: {attempt.output[-2000:]}")
    said = attempt.messages["interrupted"][0]
    iteration, begun = said["iteration"], said["begun"]
    if not (iteration == begun or (iteration == begun + 1 and not said["inside"])):
        raise WrongEndError(f"it did not end at the end of the iteration in which the signal came: {said}")
    found = check_directory(out)
    taken = [name for name, saved in found.items() if saved == iteration and name.startswith("snapshot")]
    if newest_of(found) != iteration or len(taken) != 1 or max(found.values()) > iteration:
        raise WrongEndError(f"after iteration {iteration} there are the snapshots {found}")
    if unfinished(out):
        raise WrongEndError(f"unfinished: {unfinished(out)}")
    if iteration < program.ITERATIONS and "SIGTERM ends the run after iteration" not in attempt.output:
        raise WrongEndError("nothing was said about it")


ROWS = [
    Row(
        "sigterm", "SIGTERM at random instants, to the process and to its group",
        "one snapshot at the end of that iteration, exit 143, resume exact", "signals", 300, at_random,
    ),
]  # fmt: skip
