"""A run at an address keeps what a run in a directory keeps: it goes on to the same bits, and nobody else writes there."""

import contextlib
import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import chainring
from chainring import serializers
from chainring._places.bucket import MISSING, Bucket, RemoteError
from chainring._places.index import Index, LeaseLostError, seal
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.serializers import CorruptError
from chainring.serializers._store import open_store
from chainring.training import StandardUpdater, Trainer, extensions, triggers

ROWS, BATCH = 40, 10  # four iterations an epoch


@pytest.fixture(params=["s3", "memory"])
def place(request, tmp_path):
    """The address of a run that is not there yet, in a store that speaks S3 and in memory."""
    return f"{request.getfixturevalue('s3')}/run" if request.param == "s3" else f"memory:///{tmp_path.name}"


def trainer_of(out, epochs=3, **settings):
    torch.manual_seed(3)
    data = TupleDataset(torch.randn(ROWS, 6), torch.randint(0, 3, (ROWS,)))
    model = Classifier(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    trainer = Trainer(
        StandardUpdater(SerialIterator(data, BATCH, seed=5), optimizer, model), (epochs, "epoch"), out=str(out)
    )
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(**{"n_retains": 2, "autoload": True} | settings), trigger=(1, "epoch"))
    return trainer


def state_of(trainer):
    state = trainer.updater.get_optimizer("main").state_dict()["state"]
    return [
        *trainer.updater.get_model("main").state_dict().values(),
        *(value for each in state.values() for value in each.values()),
    ]


def is_same(one, other):
    return all(torch.equal(a, b) for a, b in zip(state_of(one), state_of(other), strict=True))


def keys_of(place):
    return [entry.key for entry in Bucket(place).list()]


def rows_of(trainer):
    return [
        {key: value for key, value in row.items() if key != "elapsed_time"} for row in trainer.get_extension("LogReport").log
    ]


def resumed(place, epochs, **settings):
    """A later part of the run, which has other limits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(place, epochs, **settings)
        trainer.run()
    return trainer


def test_a_run_in_parts_ends_as_the_one_on_a_disk(place, tmp_path):
    """Parameters, moments of Adam and the rows of the log."""
    trainer_of(place, 2).run()
    parts, whole = resumed(place, 5), trainer_of(tmp_path / "whole", 5)
    whole.run()
    assert is_same(parts, whole)
    assert rows_of(parts) == rows_of(whole)


def test_a_recorder_has_the_file_of_the_run_on_a_disk(place, tmp_path):
    """Byte for byte, where the run went on in the middle of a block and in another working directory."""

    def recorded(out, epochs):
        trainer = trainer_of(out, epochs)
        trainer.extend(extensions.Recorder((3, "iteration")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.run()

    chainring.deterministic(0)
    recorded(tmp_path / "whole", 10)
    chainring.deterministic(0)
    recorded(place, 3)
    recorded(place, 10)
    assert Bucket(place).get("recorder.bin").content == (tmp_path / "whole/recorder.bin").read_bytes()


def test_what_a_run_leaves_lies_beside_its_snapshots(place):
    """The log, the record of the run and a stranger's file; of snapshots as many as are to be kept."""
    trainer = trainer_of(place)
    trainer.extend(
        lambda t: Path(t.out, f"seen {t.updater.iteration}%.txt").write_text("x"), name="stranger", trigger=(2, "epoch")
    )
    trainer.run()
    bucket = Bucket(place)
    rows = json.loads(bucket.get("log").content)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [json.loads(line)["epoch"] for line in bucket.get("log.jsonl").content.splitlines()] == [1, 2, 3]
    assert len(json.loads(bucket.get("run.json").content)["starts"]) == 1
    assert sum(key.startswith("seen") for key in keys_of(place)) == 1
    assert open_store(place).names() == ["snapshot_iter_12", "snapshot_iter_8"]


def test_a_manifest_names_every_object_with_its_size_and_checksum(place):
    """And nothing lies below a snapshot's name that the manifest does not name."""
    trainer_of(place).run()
    snapshot = open_store(place).snapshot("snapshot_iter_12")
    manifest = snapshot.verify()
    keys = [key for key in keys_of(place) if key.startswith("snapshot_iter_12/")]
    assert len(keys) == 1 + len(manifest.files)


def test_a_fixed_name_is_a_link_that_is_followed(place):
    """Only the best snapshot is kept under it."""
    trainer = trainer_of(place)
    trainer.extend(extensions.snapshot("best"), trigger=triggers.ManualScheduleTrigger([4, 8], "iteration"))
    trainer.run()
    store = open_store(place)
    assert store.link_target("best") == "best_iter_8"
    assert "best_iter_4" not in store.names()
    loaded = trainer_of("unused")
    serializers.load(f"{place}/best", loaded)
    assert loaded.updater.iteration == 8


def test_a_run_that_starts_anew_moves_the_earlier_one_away(place):
    """Its snapshots stay readable, with the log beside them, also when the new ones have their names."""
    first = trainer_of(place)
    first.run()
    trainer_of(place, autoload=False).run()
    store = open_store(place)
    assert store.names() == ["snapshot_iter_12", "snapshot_iter_8"]
    assert store.snapshot("previous/1/snapshot_iter_12").verify().iteration == 12
    assert len(json.loads(Bucket(place).get("previous/1/log").content)) == 3
    loaded = trainer_of("unused")
    serializers.load(f"{place}/previous/1/snapshot_iter_12", loaded)
    assert is_same(loaded, first)


def test_a_run_that_starts_anew_is_not_warned_of_what_was_moved(place):
    """The files of moved snapshots stay where they were, and are no damaged snapshots."""
    for _ in range(2):
        trainer_of(place, 2, autoload=False).run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_of(place, 3).run()


def test_snapshots_of_iterations_to_come_are_abandoned(place):
    """A run that goes back to an earlier snapshot cuts the log, and keeps what it leaves."""
    trainer_of(place, n_retains=-1).run()
    again = trainer_of(place, 2, n_retains=-1, autoload=False)
    serializers.load(f"{place}/snapshot_iter_4", again)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.run()
    assert sorted(open_store(place).names()) == ["snapshot_iter_4", "snapshot_iter_8"]
    assert "abandoned/1/snapshot_iter_12/manifest.json" in keys_of(place)
    assert [row["epoch"] for row in json.loads(Bucket(place).get("log").content)] == [1, 2]


def test_a_second_run_is_refused_with_the_name_of_the_first(place):
    """At once, with the process, the host, and how long to wait; the first goes on."""
    lease = Index(Bucket(place))
    with pytest.raises(BlockingIOError, match=f"{os.getpid()}"):
        trainer_of(place).run()
    lease.check()
    lease.release()
    trainer_of(place).run()


def test_a_run_that_has_lost_its_lease_cannot_commit(place):
    """It ends with an error, and what it has put is not valid for anybody."""

    def lose(trainer):
        if trainer.updater.iteration == 6:
            bucket = Bucket(place)
            held = json.loads(bucket.get(".lease").content)
            taken = held | {"token": held["token"] + 1, "holder": "another", "host": "elsewhere"}
            del taken["crc"]
            bucket.put(".lease", seal(taken))

    trainer = trainer_of(place, n_retains=-1, asynchronous=False)
    trainer.extend(lose, trigger=(1, "iteration"))
    with pytest.raises(LeaseLostError, match="elsewhere"):
        trainer.run()
    assert open_store(place).names() == ["snapshot_iter_4"]


@pytest.mark.parametrize("ends", ["removed", "moved"])
def test_a_manifest_that_an_earlier_writer_puts_again_does_not_count(place, ends):
    """A process that was stopped while it waited for the answer repeats its request when it wakes up."""
    key = "snapshot_iter_4/manifest.json"
    trainer_of(place, 1).run()
    late = Bucket(place).get(key).content
    if ends == "removed":
        resumed(place, 3)
    else:
        trainer_of(place, 3, autoload=False, n_retains=1).run()
    names = open_store(place).names()
    Bucket(place).put(key, late, MISSING)
    store = open_store(place)
    assert "snapshot_iter_4" not in names
    assert store.names() == names
    with pytest.raises(CorruptError, match="lost its lease"):
        store.snapshot("snapshot_iter_4").read_manifest()
    assert ends == "removed" or store.snapshot("previous/1/snapshot_iter_4").verify().iteration == 4
    resumed(place, 4)
    assert key not in keys_of(place)


@pytest.mark.parametrize("damage", ["removed", "truncated", "replaced", "manifest"])
def test_a_damaged_snapshot_is_passed_over(place, damage):
    """The run goes on from the one before, says so, and ends with the same bits."""
    trainer_of(place, 2).run()
    bucket = Bucket(place)
    newest = [key for key in keys_of(place) if key.startswith("snapshot_iter_8/")]
    tensors = next(key for key in newest if key.endswith(".safetensors"))
    content = bucket.get(tensors).content
    if damage == "removed":
        bucket.delete([tensors])
    elif damage == "truncated":
        bucket.put(tensors, content[:-1])
    elif damage == "replaced":
        bucket.put(tensors, content[:-1] + bytes([content[-1] ^ 1]))
    else:
        bucket.put("snapshot_iter_8/manifest.json", b"{}")
    trainer = trainer_of(place, 4)
    with pytest.warns(UserWarning, match="snapshot_iter_8") as warned:
        trainer.run()
    assert any("is skipped" in str(each.message) for each in warned)
    whole = trainer_of("memory:///whole-of-damaged", 4, autoload=False)
    whole.run()
    assert is_same(trainer, whole)


def test_where_no_snapshot_is_sound_the_run_is_refused(place):
    """To begin anew would bury what may still be saved."""
    trainer_of(place, 1).run()
    bucket = Bucket(place)
    bucket.delete(key for key in keys_of(place) if key.endswith(".safetensors"))
    with pytest.warns(UserWarning, match="is skipped"), pytest.raises(CorruptError, match="none of the snapshots"):
        trainer_of(place, 2).run()


def test_what_a_killed_run_has_begun_is_swept(place):
    """A draft without a manifest; not the files of a snapshot that was moved."""
    trainer_of(place, 1).run()
    bucket = Bucket(place)
    bucket.put("snapshot_iter_99/0123456789abcdef/state.json", b"{}")
    trainer_of(place, 1, autoload=False).run()
    assert not any(key.startswith("snapshot_iter_99") for key in keys_of(place))
    assert open_store(place).snapshot("previous/1/snapshot_iter_4").verify().iteration == 4


def test_the_files_of_a_snapshot_with_a_damaged_manifest_are_kept_where_it_was_moved(place):
    """Also by the runs after the one that has moved it: nobody knows which they are, and a person may."""
    trainer_of(place, 2).run()
    files = {key for key in keys_of(place) if key.startswith("snapshot_iter_8/")} - {"snapshot_iter_8/manifest.json"}
    Bucket(place).put("snapshot_iter_8/manifest.json", b"{}")
    for epochs in (3, 4):
        resumed(place, epochs)
    assert files <= set(keys_of(place))
    assert "abandoned/1/snapshot_iter_8/manifest.json" in keys_of(place)


def test_retention_removes_the_files_of_old_snapshots_without_listing_the_run(s3, proxy):
    """What it costs does not grow with what is there."""
    place = f"{s3}/run"
    trainer_of(place, 8).run()
    assert {key.partition("/")[0] for key in keys_of(place) if "/" in key} == {"snapshot_iter_28", "snapshot_iter_32"}
    assert proxy.count("GET", "list-type") < 3 * 8


@pytest.mark.parametrize("fault", ["200 html", "200 empty", "200 short"])
@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "always"])
@pytest.mark.parametrize("skip", range(4))
def test_a_listing_that_is_none_hides_no_snapshot(s3, proxy, fault, times, skip):
    """At any moment of a start: the run continues where it was, or is refused, and then continues when the store answers."""
    place = f"{s3}/run"
    trainer_of(place, 1).run()
    proxy.fail(fault, method="GET", key="list-type", times=times, skip=skip)
    began = []
    trainer = trainer_of(place, 2)
    trainer.extend(lambda trainer: began.append(trainer.updater.iteration), trigger=(1, "iteration"))
    with warnings.catch_warnings(), contextlib.suppress(RemoteError):
        warnings.simplefilter("ignore")
        trainer.run()
    proxy.heal()
    assert began[:1] in ([], [5])
    assert not {"previous", "abandoned"} & {key.partition("/")[0] for key in keys_of(place)}
    trainer = resumed(place, 3)
    assert [row["iteration"] for row in rows_of(trainer)] == [4, 8, 12]


@pytest.mark.parametrize("fault", ["200 html", "200 empty", "200 short"])
def test_a_store_that_goes_on_listing_nothing_is_refused_with_what_is_lacking(s3, proxy, fault):
    place = f"{s3}/run"
    trainer_of(place, 1).run()
    proxy.fail(fault, method="GET", key="list-type", times=10**6)
    lacking = "snapshot_iter_4/manifest.json" if fault == "200 short" else ".lease"
    with pytest.raises(RemoteError, match=f"the answer is without {lacking}, which is there"):
        trainer_of(place, 2).run()


def test_a_file_of_the_run_is_not_what_something_on_the_way_has_answered(s3, proxy):
    """The page of a login has no state, which every store tells of an object: it is asked for again."""
    place = f"{s3}/run"
    trainer_of(place, 1).run()
    for key in ("run/log", "run/log.jsonl", "run/run.json", "manifest.json", ".lease"):
        proxy.fail("200 html", method="GET", key=key)
    assert [row["iteration"] for row in rows_of(resumed(place, 2))] == [4, 8]


def test_a_snapshot_that_a_person_has_removed_is_not_waited_for(place):
    """The index lists it still; it is not there, which the store says when it is asked."""
    trainer_of(place, 2).run()
    Bucket(place).delete(key for key in keys_of(place) if key.startswith("snapshot_iter_8/"))
    assert [row["iteration"] for row in rows_of(resumed(place, 3))] == [4, 8, 12]


def test_a_rehearsal_leaves_nothing_there(place):
    """Its files go to a scratch directory; the run that follows is in the store."""
    trainer = trainer_of(place)
    trainer.rehearse()
    assert keys_of(place) == []
    trainer.run()
    assert "snapshot_iter_12" in open_store(place).names()


def test_credentials_are_nowhere(s3, monkeypatch, capfd):
    """Not in an object of the run, nor in what it prints."""
    secret = "quite-secret-8f2a"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    trainer_of(f"{s3}/run").run()
    bucket = Bucket(f"{s3}/run")
    assert not any(secret.encode() in bucket.get(key).content for key in keys_of(f"{s3}/run"))
    assert secret not in "".join(capfd.readouterr())


def test_an_address_as_a_path_is_refused(tmp_path):
    """Pathlib joins the slashes, and the run would write into a folder of that name."""
    with pytest.raises(ValueError, match="given as text"):
        Trainer(trainer_of(tmp_path).updater, (1, "epoch"), out=Path("s3://bucket/run"))
