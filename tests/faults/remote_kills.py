"""SIGKILL of runs in an object store: at random instants, inside uploads, with requests that fail on their way."""

import signal
from collections import Counter

import attempts
from bench import Row

from tries import WrongEndError

MOST = {False: 12, True: 4}  # kills of one run, after which it is left in peace; of one with ballast, which takes long
AIMED = 0.35  # of the kills, at an upload


def at_random(bench, number, draw, place):
    """Kills a run again and again until it completes; in every second try requests of it fail as well."""
    from objects import BALLAST, check, unfinished

    objects, counts = bench.objects, Counter()
    ballast = BALLAST if number % 6 == 3 else 0
    whole, url, earlier = objects.seconds() * (1 + (ballast > 0)), objects.url(place), set()
    while True:
        if number % 2:
            _break(objects.proxy, draw, counts, ballast)
        is_left_alone = counts["kills"] >= MOST[ballast > 0]
        aim = _aim(objects, draw, ballast) if not is_left_alone and draw.random() < AIMED else None
        delay = attempts.LIMIT if is_left_alone else draw.uniform(0, whole * 0.45)
        with objects.attempt(place, url, ballast=ballast) as attempt:
            if not (aim(attempt) if aim else attempt.wait_for("ended", delay)):
                counts["inside a write"] += objects.is_uploading()
                attempt.kill()
                attempt.wait_for()
            has_started = "running" in attempt.messages
            _count_faults(objects.proxy, counts)
            if attempt.code != -signal.SIGKILL:
                objects.compare(attempt.completed(), ballast)
                break
        objects.proxy.heal()
        counts["kills"] += 1
        counts["of large uploads"] += bool(ballast)
        if draw.random() < 0.2:  # the next attempt begins beside what the store still receives of this one
            counts["restarted at once"] += 1
            earlier = set()
            continue
        objects.settle()
        found = check(url)
        left = unfinished(url)
        if has_started and (unswept := left & earlier):
            raise WrongEndError(f"a start has left what was unfinished before: {sorted(unswept)}")
        counts["unfinished snapshots"] += len(left)
        earlier = left
        counts["with a snapshot to verify"] += bool(found)
    objects.proxy.heal()
    objects.settle()
    objects.complete(place, url, ballast)  # once more: a run that is complete does nothing
    counts["runs completed"] += 1
    objects.clear(url)
    return counts


def _break(proxy, draw, counts, ballast):
    """Lets requests of the next attempt fail: before and after they were carried out, cut, unanswered, or slowly sent."""
    from objects import RATE

    proxy.fail_at_random(RATE, seed=draw.randrange(2**30))
    if draw.random() < 0.3:
        fault = draw.choice(["stall", "stall after", "stall response"])
        proxy.fail(fault, method="GET" if fault == "stall response" else None, skip=draw.randrange(100))
    if draw.random() < 0.2:
        proxy.bytes_per_second = draw.choice([1_000_000, 5_000_000]) * (20 if ballast else 1)
        counts["over slow links"] += 1


def _count_faults(proxy, counts):
    for request in list(proxy.requests):
        if request.fault is not None:
            kind = request.fault.split()[0]
            counts[{"stall": "time-outs", "cut": "cut connections"}.get(kind, f"answers {kind}")] += 1


def _aim(objects, draw, ballast):
    """Returns what waits until an upload is under way, and false when that is so; true if the run has ended before."""
    nth, pause = draw.randint(1, 8), draw.uniform(0, 0.02)
    is_stalled = draw.random() < 0.7
    if is_stalled:
        keys = ["/rank", "/state.json", *(["partNumber=1", "partNumber=2", "uploadId"] if ballast else [])]
        fault = draw.choice(["stall", "stall after"])
        objects.proxy.fail(fault, method="PUT", key=draw.choice(keys), skip=nth - 1)
    else:
        objects.proxy.bytes_per_second = 20_000_000 if ballast else 200_000

    def is_there():
        uploads = objects.uploads()
        return any((each.fault or "").startswith("stall") for each in uploads) if is_stalled else len(uploads) >= nth

    def wait(attempt):
        while not is_there():
            if attempt.wait_for("ended", 0.002) or attempt.code is not None:
                return True
        return attempt.wait_for("ended", pause)

    return wait


ROWS = [
    Row(
        "remote", "SIGKILL of runs in an object store at random instants, in every second try with 500, 503, time-outs, cut "
        "connections and slow links",
        "the outcome of the uninterrupted run on a disk; no unreadable snapshot",
        "kills", 1000, at_random, inside=5,
    ),
]  # fmt: skip
