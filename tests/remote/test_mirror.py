"""The files beside the snapshots of a run in a store are those of its working directory."""

import itertools
import json
import os

import pytest

from chainring._remote.bucket import Bucket
from chainring._remote.lease import Lease, LeaseLostError
from chainring._remote.mirror import Mirror

URLS = (f"memory:///mirror-{number}" for number in itertools.count())


class Clock:
    """Tells the seconds that a test says."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def bucket():
    return Bucket(next(URLS))


@pytest.fixture
def lease(bucket):
    """A lease that nothing renews but the mirror, and that anybody takes at once when it is released."""
    lease = Lease(bucket, list, period=None)
    yield lease
    lease.release()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def mirror(bucket, folder, lease, clock):
    mirror = Mirror(bucket, folder, lease, look=None, clock=clock)
    mirror.fetch()
    yield mirror
    mirror.close()


def objects(bucket):
    """The objects but for internal ones, as text by key."""
    return {entry.key: bucket.get(entry.key).content.decode() for entry in bucket.list() if entry.key[0] != "."}


def files(folder):
    """All that is in a folder; what is not a file is None."""
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.read_text() if path.is_file() else None for path in paths}


def write(folder, **contents):
    """Writes files; ``__`` in a name stands for a slash, ``_`` before the last letters for a dot."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_files_become_objects_and_come_back(bucket, folder, lease, mirror):
    """With the folders they lie in; the next run has them before it begins."""
    write(folder, log="[1]", plots__loss="png")
    mirror.put()
    assert objects(bucket) == {"log": "[1]", "plots/loss": "png"}
    mirror.close()
    write(folder, leftover="of a killed run")
    Mirror(bucket, folder, lease, look=None).fetch()
    assert files(folder) == {"log": "[1]", "plots": None, "plots/loss": "png"}


def test_only_what_belongs_to_no_snapshot_is_fetched(bucket, folder, lease):
    """Of archives only the numbers, so that the next one has the next."""
    draft = "0123456789abcdef"
    for key in (
        "log", "deep/er/row", "snapshot_1/manifest.json", f"snapshot_1/{draft}/model", f"unfinished/{draft}/model",
        "previous/3/log", "previous/3/a/b", "abandoned/12/snapshot_9/manifest.json", ".lease-clock", "previous.txt",
    ):  # fmt: skip
        bucket.put(key, b"content")
    bucket.put("best", b'{"chainring": "link", "target": "snapshot_1"}')
    Mirror(bucket, folder, lease, look=None).fetch()
    assert files(folder) == {
        "abandoned": None, "abandoned/12": None, "previous": None, "previous/3": None,
        "deep": None, "deep/er": None, "deep/er/row": "content", "log": "content", "previous.txt": "content",
    }  # fmt: skip


def test_what_was_appended_is_put_and_what_has_not_changed_is_not(s3, proxy, folder):
    """One request for the file that grew, none for the other."""
    bucket = Bucket(f"{s3}/run")
    lease = Lease(bucket, list, period=None)
    mirror = Mirror(bucket, folder, lease, look=None)
    mirror.fetch()
    write(folder, log="[1]", other="same")
    mirror.put()
    with open(folder / "log", "a") as file:
        file.write(" [2]")
    mirror.put()
    mirror.put()
    assert objects(bucket) == {"log": "[1] [2]", "other": "same"}
    assert (proxy.count("PUT", "/log"), proxy.count("PUT", "/other")) == (2, 1)
    mirror.close()
    lease.release()


def test_a_renamed_file_is_put_under_its_new_name_and_gone_under_its_old(bucket, folder, mirror):
    """As when an earlier run is moved to ``previous/1``; what is there already stays."""
    bucket.put("previous/0/log", b"older")
    write(folder, log="[1]")
    mirror.put()
    (folder / "previous" / "1").mkdir(parents=True)
    os.rename(folder / "log", folder / "previous/1/log")
    mirror.put()
    assert objects(bucket) == {"previous/0/log": "older", "previous/1/log": "[1]"}


def take_away(bucket):
    """Lets another process have the lease, without a look at when that may."""
    document = json.loads(bucket.get(".lease").content)
    bucket.put(".lease", json.dumps(document | {"pid": 4711, "host": "elsewhere", "token": 2}).encode())


def test_a_writer_that_has_lost_the_lease_writes_nothing(bucket, tmp_path, folder, clock):
    """Neither a new file nor over one of the next run, and it removes none. Its files are kept, and it says where."""
    mirror = Mirror(bucket, folder, Lease(bucket, list, period=None, clock=clock), look=None)
    mirror.fetch()
    write(folder, log="[1]", gone="x")
    mirror.put()
    clock.seconds = 31
    take_away(bucket)
    before = objects(bucket)
    write(folder, log="[1, 2]", new="y")
    (folder / "gone").unlink()
    for write_files in mirror.put, mirror.put_due, lambda: mirror.persist(folder / "log"):
        with pytest.raises(LeaseLostError, match="process 4711 on elsewhere"):
            write_files()
    with pytest.raises(LeaseLostError, match=f"process 4711 on elsewhere.* kept in {tmp_path}/run-kept-1"):
        mirror.close()
    assert objects(bucket) == before
    assert files(tmp_path / "run-kept-1") == {"log": "[1, 2]", "new": "y"}


def test_an_object_that_the_next_run_has_written_is_not_written_over(bucket, folder, lease, mirror):
    """Even if the lease, by the clock of the one who has lost it, is fresh."""
    write(folder, log="[1]")
    mirror.put()
    take_away(bucket)
    bucket.put("log", b"of the next run")
    write(folder, log="[1, 2]")
    with pytest.raises(LeaseLostError):
        mirror.put()
    assert objects(bucket) == {"log": "of the next run"}
    with pytest.raises(LeaseLostError):
        mirror.close()


def test_the_holder_of_the_lease_writes_over_what_came_late_from_an_earlier_one(bucket, folder, mirror):
    """Over an object that it has not fetched too, and one that somebody has deleted is put again."""
    write(folder, log="[1]", rows="1")
    mirror.put()
    bucket.put("log", b"late")
    bucket.put("new", b"late")
    bucket.delete(["rows"])
    write(folder, log="[1, 2]", rows="1 2", new="mine")
    mirror.put()
    assert objects(bucket) == {"log": "[1, 2]", "rows": "1 2", "new": "mine"}
