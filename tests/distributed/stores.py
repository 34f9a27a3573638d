"""Ranks that share a sharded model save to an object store; one is killed, and the run goes on from what is there."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from program import Fault, Options
from worlds import Row, close_rows, close_values, same

sys.path.append(str(Path(__file__).parents[1] / "remote"))  # where the server and the proxy are

PERIOD = 4


def killed(bench, number, draw, place):
    """A rank is killed near a snapshot, half of the tries with requests that fail; two go on, or one alone."""
    from faulty_proxy import FaultyProxy
    from object_server import environment_for, make_bucket, running_server

    with running_server() as server, FaultyProxy(server) as proxy:
        make_bucket(server, "ranks")
        os.environ.update(environment_for(server))  # of this process, which looks at what is there
        (place / "tmp").mkdir()
        environment = environment_for(proxy.url) | {"TMPDIR": str(place / "tmp")}
        size = 1 + (number % 3 != 1)
        net = "dropout" if size == 2 else ""  # whose masks depend on the number of ranks
        options = Options(kind="fsdp", net=net, period=PERIOD, url="s3://ranks/run", environment=environment)
        if number % 2:
            proxy.fail_at_random(0.03, seed=number)
        fault = Fault("kill", draw.randrange(2), PERIOD * draw.randint(1, 4), draw.uniform(0, 0.05))
        world = bench.run(place, 2, replace(options, fault=fault))
        bench.ended_at_once(world, fault.rank)
        there = newest(options.url)
        if size == 2:
            bench.exact(place, size, options, there)
        else:
            told = bench.run(place, size, replace(options, kind="plain")).outcomes()
            same("the iteration from which it went on", told[0]["started"], there)
            _, expected = bench.known("fsdp", 2, net=net, period=PERIOD)
            close_rows(told[0]["log"], expected[0]["log"])
            close_values(told[0], expected[0])
    return f"resumed by {size}"


def newest(url):
    """The iteration of the newest snapshot, after all were verified; 0 where there is none."""
    from chainring.serializers._store import open_store

    store = open_store(url)
    return max((store.snapshot(name).verify().iteration for name in store.names()), default=0)


ROWS = [
    Row(
        "stored", "SIGKILL of a rank of FSDP2 x2 near a snapshot in an object store, in half of the tries with requests "
        "that fail; continued by two or by one",
        "the others end at once; continued, bit for bit the same, or losses to 1e-5 by one", 60, killed,
    ),
]  # fmt: skip
