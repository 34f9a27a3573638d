"""Processes that want to write to the same place in a store of objects at once, with requests that fail on their way."""

import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from bench import Row

sys.path.append(str(Path(__file__).parents[1] / "remote"))  # where the server, the proxy and the racers are

RACES = 20


def races(bench, number, draw, place):
    """Lets two processes race for places; now and then one is killed that has won, and its place is raced for again."""
    from faulty_proxy import FaultyProxy
    from object_server import environment_for, make_bucket, running_server
    from races import Racer, race

    counts = Counter()
    with running_server() as server, FaultyProxy(server) as proxy, ExitStack() as stack:
        make_bucket(server, "races")
        if number % 2:
            proxy.fail_at_random(0.1, seed=number)
        environment = os.environ | environment_for(proxy.url)
        racers = [stack.enter_context(Racer(environment)) for _ in range(2)]
        for place_number in range(RACES):
            place = f"s3://races/{place_number}"
            winner = race(place, racers)
            counts["races"] += 1
            if place_number % 5 == 4:
                winner.kill()
                racers[racers.index(winner)] = stack.enter_context(Racer(environment))
                race(place, racers)
                counts.update({"races": 1, "for the lease of a killed process": 1})
        counts["failed requests"] += sum(request.fault is not None for request in proxy.requests)
    return counts


ROWS = [
    Row(
        "races", "two processes that begin to write to the same place in an object store at once",
        "one goes on, the other is refused with its name", "races", 200, races,
    ),
]  # fmt: skip
