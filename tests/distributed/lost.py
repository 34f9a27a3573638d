"""Ranks that are lost at random moments, where the others go on: to the bits, rows and files of the run that loses none."""

import csv
import json
import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import mlflow
import stores
from program import Options
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import Bench, Row, close_rows, close_values, newest, same

from tries import WrongEndError

KINDS = [
    {},
    {"balance": "speed"},
    {"own_core": True},
    {"two": True},
    {"virtual_ranks": None},
    {"virtual_ranks": None, "own_core": True},
    {"audit": 2},
]
NETS = ["", "dropout", "batchnorm", "batchnorm dropout"]


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]


def written(place):
    """What the log, its writers and the recorder of a run have, by name; with the step of each row, image and histogram."""
    out = place / "out"
    found = {"files": sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(("snapshot", ".")))}
    for name in ("log.media.jsonl", "recorder.bin"):
        if (out / name).exists():
            found[name] = (out / name).read_bytes()
    if (out / "log.csv").exists():
        with open(out / "log.csv", newline="") as file:
            found["csv"] = [(row["iteration"], row["main/loss"]) for row in csv.DictReader(file)]
    if (out / "tensorboard").exists():
        sizes = dict.fromkeys(("scalars", "images", "histograms"), 0)
        reader = EventAccumulator(str(out / "tensorboard"), sizes).Reload()
        events = {"loss": reader.Scalars("main/loss"), "image": reader.Images("seen"), "sums": reader.Histograms("weights")}
        found["tensorboard"] = {name: [event.step for event in of_name] for name, of_name in events.items()}
    if (place / "mlflow.db").exists():
        client = mlflow.MlflowClient(f"sqlite:///{place}/mlflow.db")
        (run,) = client.search_runs(["0"])
        found["mlflow"] = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "main/loss")]
        found["artifacts"] = [file.path for file in client.list_artifacts(run.info.run_id, "media")]
    return found


def closely(rows):
    """What follows to rounding: but for what each rank draws by itself."""
    rows = without_time(rows)
    return [{key: value for key, value in row.items() if not key.endswith("/drawn")} for row in rows]


@contextmanager
def in_a_store(number, place):
    """The settings of a run in an object store, where in half of the tries one of thirty requests fails."""
    sys.path.append(str(Path(__file__).parents[1] / "remote"))
    from faulty_proxy import FaultyProxy
    from object_server import environment_for, make_bucket, running_server

    with running_server() as server, FaultyProxy(server) as proxy:
        make_bucket(server, "ranks")
        os.environ.update(environment_for(server))  # of this process, which looks at what is there
        (place / "tmp").mkdir()
        if number % 2:
            proxy.fail_at_random(0.03, seed=number)
        yield {"url": "s3://ranks/run", "environment": environment_for(proxy.url) | {"TMPDIR": str(place / "tmp")}}


def bring(url, out):
    """Copies what is in a store to a directory; of snapshots, which are verified, the names."""
    from chainring._places.bucket import Bucket
    from chainring.serializers._store import open_store

    bucket, snapshots = Bucket(url), set(open_store(url).names())
    for entry in bucket.list():
        path = out / entry.key
        if (name := entry.key.split("/")[0]) in snapshots:
            (out / name).mkdir(parents=True, exist_ok=True)
        elif not name.startswith("."):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bucket.get(entry.key).content)
    return stores.newest(url)


def lost(bench, number, draw, place, start=Bench.run, stops=20):
    """In two of eleven tries of ranks without a `torchrun` the run is in an object store."""
    is_stored = start is Bench.run and number % 11 in (3, 8)
    with in_a_store(number, place) if is_stored else nullcontext({}) as where:
        return lose(bench, number, draw, place, start, stops, where)


def lose(bench, number, draw, place, start, stops, where):
    """Of 2 to 5 ranks, 1 or more are killed, in every third try rank 0, two at once in every fifth; or one is stopped.

    In some tries they are lost while they form their first group, or the run starts, as a new one or from a snapshot, and in
    some when it ends. `start`
    runs the ranks; one is stopped in one of so many tries.
    """
    size = 2 + number % 4
    count = 2 if size > 2 and number % 5 == 4 else draw.randint(1, size - 1)
    victims = draw.sample(range(1, size), count) if number % 3 else [0, *draw.sample(range(1, size), count - 1)]
    moment = draw.randrange(18), draw.uniform(0, 0.05)
    losses = []
    for victim in victims:
        is_stopped = number % stops == stops // 2 and not losses
        losses.append((victim, *moment, signal.SIGSTOP if is_stopped else signal.SIGKILL))
        # At once, while the others form their group, or later.
        moment = (moment[0], moment[1] + draw.choice([draw.uniform(0, 0.1), draw.uniform(0.1, 0.6)]))
        if number % 5 != 4 and draw.random() < 0.4:
            moment = min(moment[0] + draw.randrange(6), 18), draw.uniform(0, 0.05)
    settings = {
        "net": draw.choice(NETS),
        "virtual_ranks": 6,
        "accumulate": draw.randint(1, 2),
        "clip": draw.choice([None, 1.0]),
        "extended": draw.random() < 0.3,
        **KINDS[number % len(KINDS)],
        "written": "csv tensorboard mlflow" if number % 20 == 5 else "csv tensorboard recorder" if number % 4 == 1 else "",
    }
    at, resumed = draw.choice(["first", "start", "end", "", "", "", "", ""]), draw.choice([1, size, 0, 0])
    if at:
        moments = {
            "first": (-1, draw.uniform(0, 0.1)),
            "start": (0, draw.uniform(0, 0.3)),
            "end": (20, draw.uniform(0, 0.1)),
        }
        moment = moments[at]
        first = losses[0][2]
        losses = [(victim, moment[0], moment[1] + max(delay - first, 0), number) for victim, _, delay, number in losses]
    elif resumed:
        losses = [(victim, iteration and max(iteration, 8), *rest) for victim, iteration, *rest in losses]
    is_exact = settings["virtual_ranks"] is not None
    if not is_exact:  # what ranks draw, and the statistics of their shares, follow their number
        settings |= {"net": "", "batch": 60, "written": ""}
    if resumed:
        settings["written"] = ""
    expected_place, expected = bench.known("plain", 1, **{**settings, "balance": "even", "audit": 0})
    if resumed:
        never = [(0, 1000, 0.0, 0)]  # with the same extensions
        bench.run(place, resumed, Options(survive=resumed > 1, losses=never, iterations=8, **settings, **where)).outcomes()
    world = start(bench, place, size, Options(survive=True, losses=losses, **settings, **where))
    for rank, code in enumerate(world.codes):
        if code != 0 and not (rank in victims and code == -signal.SIGKILL):
            raise WrongEndError(f"with {losses} the ranks ended with codes {world.codes}: {world.outputs()}")
    last = bring(where["url"], place / "out") if where else newest(place / "out")
    told = [json.loads(file.read_text()) for file in sorted(place.glob("outcome-*.json"))]
    for each in told:
        names = ("iteration", "parameters", "optimizer", "log") if is_exact else ("iteration",)
        if differing := [name for name in names if each[name] != expected[0][name]]:
            raise WrongEndError(f"with {losses} these differ: {differing}: {world.outputs()}")
        same("the parameters of the ranks", each["parameters"], told[0]["parameters"])
        if not is_exact:
            close_values(each, expected[0], 1e-3)
            close_rows(closely(each["log"]), closely(expected[0]["log"]), 1e-3)
    for name in ("log", "log.jsonl"):
        texts = [(there / "out" / name).read_text() for there in (place, expected_place)]
        rows = [json.loads(text) if name == "log" else list(map(json.loads, text.splitlines())) for text in texts]
        if is_exact:
            same(f"the rows of {name} with {losses}", *map(without_time, rows))
        else:
            close_rows(*map(closely, rows), 1e-3)
    found, usual = (
        {file.name for file in (there / "out").iterdir() if not file.name.startswith(".")}
        for there in (place, expected_place)
    )
    missing, more = usual - found, found - usual  # a snapshot that a lost rank 0 has not completed, and those in its place
    if len(missing) > len(losses) or not all(name.startswith("snapshot") for name in missing | more) or 0 not in victims:
        same(f"the files with {losses}", sorted(found), sorted(usual))
    if settings["written"]:
        found, usual = written(place), written(expected_place)
        same(f"what is written with {losses}", found, usual)
    same("the newest snapshot", last, 20)
    return f"{world.codes.count(-signal.SIGKILL)} of {size}"


ROWS = [
    Row(
        "lost",
        "1 or more of 2 to 5 ranks are killed or stopped, in two of eleven tries over an object store",
        "the others go on to the same bits, without virtual ranks to rounding",
        1000,
        lost,
        small=40,
    )
]
