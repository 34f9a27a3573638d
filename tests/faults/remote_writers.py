"""Two whole runs that write to one place in an object store: one goes on, also when the other was stopped and wakes up."""

import signal
import socket
import time
from collections import Counter
from contextlib import contextmanager

from bench import Row
from injected import Plan

from chainring.serializers._store import open_store
from tries import WrongEndError

LEASE = 2  # seconds of the lease of runs that are stopped for longer


def races(bench, number, draw, place):
    """Starts two runs at once: one ends as ever, the other does not begin, and says which process it was."""
    objects, url = bench.objects, bench.objects.url(place)
    if number % 2:
        objects.proxy.fail_at_random(0.03, seed=number)
    with objects.attempt(_beside(place, "one"), url) as one, objects.attempt(_beside(place, "two"), url) as two:
        for attempt in (one, two):
            attempt.wait_for()
        winners = [attempt for attempt in (one, two) if "running" in attempt.messages]
        if len(winners) == 2:  # one after the other
            return Counter({"too late": 1})
        if not winners:
            raise WrongEndError(f"neither goes on: {one.output[-1500:]} {two.output[-1500:]}")
        objects.compare(winners[0].completed())
        _check_refusal(two if winners == [one] else one, winners[0], "is being written by another run")
    objects.clear(url)
    return Counter({"races": 1, "with failed requests": number % 2})


def _beside(place, name):
    """A place of one of two runs, each with temporary files of its own as on a machine of its own."""
    (place / name).mkdir(exist_ok=True)
    return place / name


def _check_refusal(loser, winner, said):
    name = f"process {winner.pid} on {socket.gethostname()}"
    if loser.code != 1 or said not in loser.output or name not in loser.output:
        raise WrongEndError(f"the other run ended with code {loser.code}, and does not say {name!r}: {loser.output[-2000:]}")


def stopped(bench, number, draw, place):
    """Stops a run for longer than its lease, lets another take over, and wakes the first while it runs or after its end."""
    objects, url = bench.objects, bench.objects.url(place)
    whole, counts = objects.seconds(), Counter()
    with objects.attempt(_beside(place, "one"), url, plan=Plan(lease=LEASE)) as first:
        first.wait_for("running")
        if first.wait_for("ended", draw.uniform(0, whole * 0.7)):
            return Counter({"too late": 1})
        first.kill(signal.SIGSTOP)
        counts["inside a write"] += objects.is_uploading()
        with _taking_over(objects, _beside(place, "two"), url, first, counts) as second:
            if is_during := number % 2:
                second.wait_for("ended", draw.uniform(0, whole * 0.7))
            else:
                second.wait_for()
            before = None if is_during else _valid(url)
            first.kill(signal.SIGCONT)
            objects.compare(second.completed())
        first.wait_for()
        if "ended" in first.messages:
            return Counter({"too late": 1})  # it had released its lease already
        _check_refusal(first, second, "has taken its lease")
    objects.settle()
    if not is_during and _valid(url) != before:
        raise WrongEndError(f"what was valid has changed: {before} before, {_valid(url)} after it went on")
    objects.complete(place, url)
    objects.clear(url)
    return counts + Counter({"stops": 1, "woken beside the other": is_during})


@contextmanager
def _taking_over(objects, place, url, first, counts):
    """A run that has the lease; those before it were refused."""
    while True:
        with objects.attempt(place, url, plan=Plan(lease=LEASE)) as attempt:
            if attempt.wait_for("running"):
                yield attempt
                return
        _check_refusal(attempt, first, "is being written by another run")
        counts["refused meanwhile"] += 1
        time.sleep(0.2)


def _valid(url):
    """The snapshots that a reader takes for valid, with the folders of their files."""
    store = open_store(url)
    return {(name, store.snapshot(name).read_manifest().folder) for name in store.names()}


ROWS = [
    Row(
        "writers", "two runs that begin to write to the same place in an object store at once",
        "one ends as ever, the other says which process writes there", "races", 50, races,
    ),
    Row(
        "stopped", "SIGSTOP of a run in an object store for longer than its lease, another takes over, SIGCONT",
        "the other ends as ever; the first says who has taken its lease, and commits nothing", "stops", 50, stopped,
    ),
]  # fmt: skip
