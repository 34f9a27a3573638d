"""SIGKILL: at random instants, at each point of the commit protocol, and while a run starts again."""

import shutil
import signal
from collections import Counter

import attempts
from attempts import Settings, check_directory, check_snapshots, newest_of, started_at, unfinished
from bench import Row
from injected import Plan

from tries import WrongEndError

MOST = 15  # kills of one run, after which it is left in peace

GOLDEN = 0.6180339887498949  # its multiples fill the interval from 0 to 1 evenly

POINTS = [
    "begun", "wrote rank00000-of-00001.safetensors", "wrote state.json", "wrote manifest.json", "flushed", "renamed",
    "committed",
    *(
        f"{when} {what}"
        for what in (
            "making the link", "replacing the link", "putting an old one aside",
            "unlink in an old one", "rmdir in an old one",
        )
        for when in ("before", "after")
    ),
]  # fmt: skip
AFTER = POINTS.index("renamed")


def at_random(bench, number, draw, place):
    """Kills a run at random instants again and again, with the same or changing workers, until it completes."""
    counts = Counter()
    choices = [(0,), (2,), (0, 2)][number % 3]
    while True:
        workers = draw.choice(choices)
        plan = Plan(slow=draw.choice([0.0, 0.005, 0.02]), seed=draw.randrange(2**30))
        delay = draw.uniform(0, bench.whole[workers] * 0.8) if counts["kills"] < MOST else attempts.LIMIT
        with bench.attempt(place, Settings(workers=workers, plan=plan)) as attempt:
            if not attempt.wait_for("ended", delay):
                attempt.kill()
                attempt.wait_for()
            if attempt.code != -signal.SIGKILL:  # else, even if it had ended by then, the next attempt compares it
                bench.compare(attempt.completed())
                break
        counts["kills"] += 1
        left = unfinished(place / "out")
        counts["inside a write"] += any(name.endswith(".tmp") for name in left)
        counts["inside a removal"] += any(name.endswith(".old") for name in left)
        counts["with workers"] += workers > 0
        if len(left) > 2:  # one for each of the two snapshots of the run
            raise WrongEndError(f"more is left unfinished than one process can have begun: {left}")
        check_directory(place / "out")
    bench.complete(place)  # once more: a run that is complete does nothing
    counts["runs completed"] += 1
    return counts


def at_points(bench, number, draw, place):
    """Kills a run at one point: what is there afterwards is exactly the old or exactly the new."""
    point = POINTS[number % len(POINTS)]
    occurrence = draw.randint(1, bench.passed[point])
    with bench.attempt(place, Settings(plan=Plan(point=(point, occurrence)))) as attempt:
        attempt.wait_for()
        if "killed" not in attempt.messages:
            raise WrongEndError(f"the run did not pass {point!r}, code {attempt.code}: {attempt.output[-2000:]}")
        name = attempt.messages["killed"][1]
    found = check_directory(place / "out")
    if (name in found) != (POINTS.index(point) >= AFTER):
        raise WrongEndError(f"killed at {point!r}, snapshot {name!r} {'is' if name in found else 'is not'} there")
    if name in found and found[name] != int(name.rpartition("_")[2]):
        raise WrongEndError(f"{name} is of iteration {found[name]}")
    bench.complete(place)
    if (start := started_at(place / "out")) != newest_of(found):
        raise WrongEndError(f"killed at {point!r}, the run went on from {start} and not {newest_of(found)}")
    return Counter({"kills": 1, "points": number < len(POINTS)})


def at_restart(bench, number, draw, place):
    """Kills a run while it starts again, one to three times, at a random instant or operation on the file system."""
    out = bench.interrupted(place)
    there = check_directory(out)
    older = min((name for name in there if name.startswith("snapshot")), key=there.__getitem__)
    start = ["autoload", older, "anew"][number % 3]
    counts = Counter()
    for attempt_number in range(draw.randint(1, 3)):
        plan = Plan(holds=True)
        if attempt_number == 0 or draw.random() < 0.5:
            plan.operation = _spread(number // 3 if attempt_number == 0 else draw.random(), _operations(bench, place, start))
        with bench.attempt(place, Settings(start=start, plan=plan)) as attempt:
            if plan.operation is None:
                attempt.wait_for("running", draw.uniform(0, bench.starting[0] * 1.2))
            else:
                attempt.wait_for("running")  # which does not come, if the operation does
            if attempt.code is not None and attempt.code != -signal.SIGKILL:
                raise WrongEndError(f"the start ended with code {attempt.code}: {attempt.output[-2000:]}")
            counts["kills at an operation"] += "killed" in attempt.messages
            attempt.kill()
        counts["kills"] += 1
        _check_nothing_lost(out, there)
    bench.complete(place, start=start)
    if started_at(out) != {"autoload": newest_of(there), older: there[older], "anew": 0}[start]:
        raise WrongEndError(f"started {start}, the run went on from {started_at(out)}")
    counts[{"autoload": "newest", older: "an older one", "anew": "anew"}[start]] += 1
    return counts + Counter({"tries": 1})


def _spread(number, operations):
    """One of the operations, before or after it; whole numbers come to all of them in turn, evenly."""
    place = int(number * GOLDEN % 1 * 2 * operations)
    return place // 2 + 1, ("before", "after")[place % 2]


def _operations(bench, place, start):
    """How many operations on the file system a start makes."""
    trial = place / "counted"
    shutil.copytree(place / "out", trial / "out", symlinks=True)
    with bench.attempt(trial, Settings(start=start, plan=Plan(holds=True))) as attempt:
        if not attempt.wait_for("running"):
            raise WrongEndError(f"the run did not start: {attempt.output[-2000:]}")
        operations = attempt.messages["running"][0]
    shutil.rmtree(trial)
    return operations


def _check_nothing_lost(out, there):
    """Every snapshot is still whole, in its place or in one of those to which a start moves what it does not continue."""
    places = [out, *out.glob("previous/*"), *out.glob("abandoned/*")]
    check_directory(out)
    found = Counter(name for where in places for name in check_snapshots(where))
    if found != Counter(list(there)):
        raise WrongEndError(f"of the snapshots {sorted(there)} there are now {dict(found)}")


ROWS = [
    Row(
        "kill", "SIGKILL at random instants, with 0 and 2 workers",
        "the outcome of the uninterrupted run; no unreadable snapshot",
        "kills", 1000, at_random, inside=5,
    ),
    Row(
        "points", "SIGKILL at each point of the commit protocol", "exactly the old or exactly the new snapshot is chosen",
        "kills", 20 * len(POINTS), at_points,
    ),
    Row(
        "restart", "SIGKILL during resume, the sweep, the log's repair, moves", "idempotent: nothing lost, the same outcome",
        "tries", 400, at_restart,
    ),
]  # fmt: skip
