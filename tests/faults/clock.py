"""The wall clock is moved by a year, and the times of files with it."""

import os
from collections import Counter

from attempts import Settings, check_directory, newest_of, started_at
from bench import Row
from injected import Plan

from tries import WrongEndError

YEAR = 365 * 86400.0


def moved(bench, number, draw, place):
    """Kills a run three times, each time with another clock, the newest file being the oldest by its time."""
    out = place / "out"
    counts, year = Counter(), YEAR if number % 2 else -YEAR
    for clock in (0.0, year, -year):
        with bench.attempt(place, Settings(plan=Plan(clock=clock, slow=0.005))) as attempt:
            if attempt.wait_for("ended", draw.uniform(0.1, 0.6) * bench.whole[0]):
                break
            attempt.kill()
            attempt.wait_for()
        counts["kills"] += 1
        found = check_directory(out)
        for path in out.rglob("*"):
            age = year * found.get(path.name, found.get(path.parent.name, 1))
            os.utime(path, times=(1.7e9 - age / 12, 1.7e9 - age / 12), follow_symlinks=False)
    before = newest_of(check_directory(out))
    bench.complete(place, plan=Plan(clock=year))
    if started_at(out) != before:
        raise WrongEndError(f"the run went on from {started_at(out)} and not from {before}")
    return counts + Counter({"moves": 1, "forward" if year > 0 else "back": 1})


ROWS = [
    Row("clock", "clock and times of files moved by a year either way", "nothing depends on it", "moves", 6, moved),
]
