"""Ranks that go on when others are lost, with a run in an object store: with the objects of the run that loses none."""

import json
import signal

import pytest
import torch
from torch import nn

from chainring import iterators, training
from chainring._places.bucket import Bucket
from chainring._places.index import Index, LeaseLostError, read_record, seal
from chainring.serializers._store import open_store
from chainring.training import extensions
from chainring.writers import CsvWriter, TensorBoardWriter
from survivors import EXAMPLES, Killing, Showing, die, end_of


class Fatal(training.Extension):
    """Kills its process when it is initialized, after an iteration, or at the end of the run, where others wait for it."""

    trigger = (1, "iteration")
    priority = -200

    def __init__(self, at):
        self.at = at

    def initialize(self, trainer):
        self.comm, self.url = trainer.comm, trainer.url
        self(trainer)

    def __call__(self, trainer):
        if trainer.updater.iteration == self.at:
            die()

    def finalize(self):
        if self.at == "end":
            die()
        assert read_record(Bucket(self.url)).is_held
        self.comm.barrier()


def break_put(at):
    """Kills this process when it puts an object whose key has ``at`` in it."""
    put = Bucket.put

    def putting(bucket, key, *arguments):
        if at in key:
            die()
        return put(bucket, key, *arguments)

    Bucket.put = putting


def train(comm, url, moments=(), iterations=12):
    """A rank dies after an iteration, with a row, or when it puts an object, as a pair with its number says."""
    torch.manual_seed(0)
    at = None if comm is None else dict(moments).get(comm.rank)
    model = Showing(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)))
    iterator = iterators.SerialIterator(EXAMPLES, 8, shuffle=True, seed=0)
    updater = training.StandardUpdater(iterator, torch.optim.Adam(model.parameters()), model, comm=comm, virtual_ranks=4)
    trainer = training.Trainer(updater, (iterations, "iteration"), url)
    trainer.extend(extensions.Evaluator(iterators.SerialIterator(EXAMPLES, 6, repeat=False, shuffle=False), model))
    writers = [CsvWriter(), TensorBoardWriter(), Killing(at[0] if isinstance(at, tuple) else -1)]
    trainer.extend(extensions.LogReport(trigger=(1, "iteration"), writers=writers))
    trainer.extend(extensions.Recorder((3, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(4, "iteration"))
    trainer.extend(extensions.snapshot_object(model, "model_{.updater.iteration}"), trigger=(3, "iteration"))
    trainer.extend(Fatal(at))
    if isinstance(at, str):
        break_put(at)
    trainer.run()


def found(url, tmp_path):
    """What is under an address: the keys but for drafts, rows, tables, steps, and the bytes of the others."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # which no rank imports

    bucket, folder = Bucket(url), tmp_path / url.rpartition("/")[2]
    keys = [entry.key for entry in bucket.list()]
    (folder / "tensorboard").mkdir(parents=True)
    for key in keys:
        if key.startswith("tensorboard/"):
            (folder / key).write_bytes(bucket.get(key).content)
    reader = EventAccumulator(str(folder / "tensorboard"), {"images": 0, "histograms": 0}).Reload()
    steps = {tag: [event.step for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    shown = [[event.step for event in events] for events in (reader.Images("image"), reader.Histograms("weights"))]
    lines = bucket.get("log.jsonl").content.splitlines()
    rows = [json.loads(line) for line in lines]
    assert json.loads(bucket.get("log").content) == rows
    table = [line.split(",")[:2] for line in bucket.get("log.csv").content.decode().splitlines()]
    values = [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]
    names = [key for key in keys if not key.startswith(("tensorboard", "snapshot", "."))]
    others = {key: bucket.get(key).content for key in names if key not in ("log", "log.jsonl", "log.csv", "run.json")}
    store = open_store(url)
    assert all(store.snapshot(name).verify().iteration for name in store.names())
    assert not read_record(bucket).is_held
    return names, values, table, steps, shown, others, max(store.snapshot(n).verify().iteration for n in store.names())


@pytest.mark.parametrize(
    ("moments", "saved"),
    [
        ({0: 7, 1: 10}, 0),
        ({0: (6,)}, 0),
        ({0: "snapshot_iter_8"}, 0),
        ({0: "model_6"}, 0),
        ({0: 0}, 0),
        ({0: 5}, 4),
        ({0: "end", 1: "end"}, 0),
        ({2: "end"}, 0),
    ],
    ids=["iterations", "row", "snapshot", "model", "start", "resumed", "end", "other"],
)
def test_the_lease_moves_with_the_files_of_the_run(s3, tmp_path, moments, saved):
    """Nothing that a lost rank 0 had not put is missing or there twice: rows, media, records, models, snapshots."""
    for name in ("alone", "three") if saved else ():
        train(None, f"{s3}/{name}", iterations=saved)
    train(None, f"{s3}/alone")
    codes = end_of(3, train, f"{s3}/three", list(moments.items()))
    assert codes == [-signal.SIGKILL if rank in moments else 0 for rank in range(3)]
    assert found(f"{s3}/three", tmp_path) == found(f"{s3}/alone", tmp_path)
    starts = json.loads(Bucket(f"{s3}/three").get("run.json").content)["starts"]
    assert starts[-1]["lost"].startswith("rank ")


def test_a_lost_process_that_may_still_write_is_waited_for(s3):
    """Of another machine nobody knows whether it has ended; one that comes back has lost the lease."""
    first = Index(Bucket(s3), period=None)
    document = json.loads(Bucket(s3).get(".lease").content) | {"seconds": 1, "pid": 4711, "host": "elsewhere"}
    del document["crc"]
    Bucket(s3).put(".lease", seal(document))
    with pytest.raises(BlockingIOError):
        Index(Bucket(s3), period=None, lost=[(4711, "another")])
    second = Index(Bucket(s3), period=None, lost=[(4711, "elsewhere")])
    with pytest.raises(LeaseLostError, match="has taken its lease"):
        first.change()
    second.release()
