"""The files beside the snapshots of a run in a store are those of its working directory."""

import contextlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from stepped import TimedBucket, World

import forked
from chainring._files import replace_file
from chainring._places.bucket import PART, Bucket, RemoteError
from chainring._places.index import Index, LeaseLostError, seal
from chainring._places.mirror import Mirror, working_directory

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
    lease = Index(bucket, period=None)
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
    again = folder.with_name("again")
    Mirror(bucket, again, lease, look=None).fetch()
    assert files(again) == {"log": "[1]", "plots": None, "plots/loss": "png"}


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
    lease = Index(bucket, period=None)
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


def wait_until(condition):
    """Waits for what threads do."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def take_away(bucket):
    """Lets another process have the lease, without a look at when that may."""
    document = json.loads(bucket.get(".lease").content) | {"holder": "0" * 16, "pid": 4711, "host": "elsewhere", "token": 2}
    del document["crc"]
    bucket.put(".lease", seal(document))


@pytest.mark.parametrize("deed", ["persist", "put", "put_due"])
def test_rows_of_an_earlier_run_are_put_into_the_archive_before_others_take_their_place(folder, clock, deed):
    """So a run that is killed at any request loses none; while the archive cannot be written nothing is written over."""
    bucket = SlowBucket(next(URLS), clock)
    bucket.goes_on.set()
    lease = Index(bucket, period=None)
    bucket.put("log", b"earlier")
    mirror = Mirror(bucket, folder, lease, look=None, clock=clock)
    mirror.fetch()
    for archive in "previous/1", "abandoned/1":
        (folder / archive).mkdir(parents=True)
        shutil.copy(folder / "log", folder / archive / "log")
    replace_file(folder / "previous/1/large", "l" * (9 << 20))
    write(folder, log="new")
    bucket.refused = "abandoned/1/log"
    write_files = {"persist": lambda: mirror.persist(folder / "log"), "put": mirror.put, "put_due": mirror.put_due}[deed]
    with pytest.raises(RemoteError):
        write_files()
    assert bucket.get("log").content == b"earlier"
    bucket.refused = None
    write_files()
    assert objects(bucket).keys() == {"abandoned/1/log", "log", "previous/1/large", "previous/1/log"}
    assert bucket.keys[-1] == "log"
    mirror.close()
    lease.release()


def test_a_writer_that_has_lost_the_lease_writes_nothing(bucket, tmp_path, folder, clock):
    """Neither a new file nor over one of the next run, and it removes none. Its files are kept, and it says where."""
    mirror = Mirror(bucket, folder, Index(bucket, period=None, clock=clock), look=None)
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
    with pytest.raises(LeaseLostError, match=f"process 4711 on elsewhere.* kept in {folder}"):
        mirror.close()
    assert objects(bucket) == before
    assert files(folder) == {"log": "[1, 2]", "new": "y"}


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


ODD = ["a b", "50%", "%0A", "é", "e\u0301", "a#?*", "c/0123456789abcdef", "~"]
REFUSED = ["a\nb", "a\\b", "\x7f", "c d/0123456789abcdef/x", os.fsdecode(b"not \xff text")]


def test_a_name_comes_back_or_is_left_out_with_a_warning(s3, folder):
    """One that no object can have, and one of a folder that a store of snapshots would take for its own."""
    bucket = Bucket(f"{s3}/run")
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=None)
    mirror.fetch()
    write(folder, **{name: f"content of {name!a}" for name in (*ODD, *REFUSED)})
    with pytest.warns(UserWarning, match="can have such a name; rename it") as caught:
        mirror.close()
    assert sorted(str(warning.message).split(" of s3")[0] for warning in caught) == sorted(map(repr, REFUSED))
    again = folder.with_name("again")
    mirror = Mirror(bucket, again, lease, look=None)
    mirror.fetch()
    assert {name for name, content in files(again).items() if content is not None} == {*ODD}
    for name in ODD:
        assert (again / name).read_text() == f"content of {name!a}"
        (again / name).unlink()
    mirror.close()
    assert objects(bucket) == {}
    lease.release()


def test_a_file_is_put_again_only_after_the_pause(s3, proxy, folder, clock):
    """Whatever it does meanwhile; a new file does not wait for it, and what has not changed is not put."""
    bucket = Bucket(f"{s3}/run")
    lease = Index(bucket, period=None, clock=lambda: 0.0)
    mirror = Mirror(bucket, folder, lease, look=None, pause=30, clock=clock)
    mirror.fetch()
    for second in range(1, 200):
        clock.seconds = second
        write(folder, log="." * second, once="x")
        mirror.put_due()
    assert (proxy.count("PUT", "/log"), proxy.count("PUT", "/once")) == (7, 1)
    mirror.close()
    assert objects(bucket)["log"] == "." * 199
    lease.release()


def test_a_file_on_which_a_snapshot_rests_is_put_at_once(s3, proxy, folder, tmp_path):
    """As far as it is written; if it has not changed without a request. What lies elsewhere is the user's."""
    bucket = Bucket(f"{s3}/run")
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=None)
    mirror.fetch()
    with open(folder / "log", "w") as file:
        file.write("[1]")
        file.flush()
        file.write("[2]")
        mirror.persist(folder / "log")
        assert objects(bucket) == {"log": "[1]"}
    mirror.persist(str(folder / "log"))
    count = len(proxy.requests)
    (tmp_path / "other").mkdir()
    write(tmp_path, other__log="of another")
    (folder / "link").symlink_to(tmp_path / "other")
    for path in "log", "../other/log", "none", ".", "..":
        mirror.persist(folder / path)
    for path in "link", "link/log", ".hidden":
        with pytest.warns(UserWarning, match=f"'{path}' of .* is left out: links, and names that begin with a dot"):
            mirror.persist(folder / path)
    assert len(proxy.requests) == count
    assert objects(bucket) == {"log": "[1][2]"}
    mirror.close()
    lease.release()


def test_a_file_that_changes_without_another_size_is_put(bucket, folder, mirror):
    """Also right after it was put, when its time may be the same."""
    for number in range(200):
        write(folder, counter=f"{number:03}")
        mirror.put()
        assert bucket.get("counter").content == b"%03d" % number


def test_what_is_not_a_file_or_is_hidden_is_left_out(bucket, folder, tmp_path, mirror):
    """Links are not followed, to files or folders; nobody waits for a pipe."""
    write(tmp_path, secret="s", secrets__secret="s")
    write(folder, log="[1]", **{".lock": "1", ".chainring-0123456789abcdef.tmp": "x", ".hidden/file": "x"})
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "links").symlink_to(tmp_path / "secrets")
    os.mkfifo(folder / "pipe")
    mirror.put()
    assert objects(bucket) == {"log": "[1]"}


@contextlib.contextmanager
def as_somebody_who_may_not_read_everything():
    """A folder of another user than root, and this process as that user."""
    with tempfile.TemporaryDirectory() as place:
        if os.geteuid():
            yield Path(place)
            return
        os.chown(place, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(place)
        finally:
            os.seteuid(0)


def test_what_cannot_be_read_is_left_out_with_one_warning(bucket, lease):
    """The others are put. It is put when it can be read; objects of files in a folder that is closed for a while stay."""
    with as_somebody_who_may_not_read_everything() as place:
        folder = place / "run"
        mirror = Mirror(bucket, folder, lease, look=None)
        mirror.fetch()
        write(folder, log="[1]", closed="x", closed_folder__x="x")
        mirror.put()
        (folder / "closed").write_text("changed")
        (folder / "closed").chmod(0)
        (folder / "closed_folder").chmod(0)
        write(folder, log="[1, 2]")
        with pytest.warns(UserWarning, match="it cannot be read") as caught:
            mirror.put()
        reasons = sorted(str(warning.message) for warning in caught)
        for name, reason in zip(("closed", "closed_folder/"), reasons, strict=True):
            assert re.fullmatch(f"'{name}' of memory://.* is left out: it cannot be read .Permission denied.", reason)
        mirror.put()
        assert objects(bucket) == {"log": "[1, 2]", "closed": "x", "closed_folder/x": "x"}
        (folder / "closed").chmod(0o600)
        (folder / "closed_folder").chmod(0o700)
        mirror.close()
    assert objects(bucket) == {"log": "[1, 2]", "closed": "changed", "closed_folder/x": "x"}


def test_a_file_may_become_a_folder_and_a_folder_a_file(bucket, folder, mirror):
    """The objects follow."""
    write(folder, log="file", plots__a="a")
    mirror.put()
    (folder / "log").unlink()
    shutil.rmtree(folder / "plots")
    write(folder, log__x="x", plots="file")
    mirror.put()
    assert objects(bucket) == {"log/x": "x", "plots": "file"}


def test_an_object_that_is_a_folder_too_is_left_out_with_a_warning(bucket, folder, lease):
    """No disk holds both. An empty object by which consoles mark a folder is passed over."""
    for key, content in {"log": b"file", "log/x": b"x", "empty": b"", "empty/x": b"x"}.items():
        bucket.put(key, content)
    with pytest.warns(UserWarning, match="'log' of memory://.* is left out: it is a folder too.*rename") as caught:
        Mirror(bucket, folder, lease, look=None).fetch()
    assert len(caught) == 1
    assert files(folder) == {"log": None, "log/x": "x", "empty": None, "empty/x": "x"}


def test_a_large_file_goes_and_comes_in_parts(s3, proxy, folder):
    """No request has more of it than a part; what is cut off is tried again."""
    bucket = Bucket(f"{s3}/run")
    lease = Index(bucket, period=None)
    content = random.Random(0).randbytes(20 << 20)
    mirror = Mirror(bucket, folder, lease, look=None)
    mirror.fetch()
    (folder / "big").write_bytes(content)
    proxy.fail("500", times=2, method="PUT", key="/big")
    mirror.close()
    again = folder.with_name("again")
    Mirror(bucket, again, lease, look=None).fetch()
    assert (again / "big").read_bytes() == content
    assert max(request.received for request in proxy.requests) <= 8 << 20
    assert max(request.sent for request in proxy.requests) <= 8 << 20
    lease.release()


@pytest.mark.parametrize("more", [1, PART, 2 * PART + 1, -1, -PART - 6], ids=str)
@pytest.mark.parametrize("after", ["list ", "head log"], ids=["before it is read", "while it is read"])
def test_an_object_that_is_written_while_it_is_fetched_comes_whole_or_is_refused(folder, more, after):
    """By an earlier writer that does not know that it has lost; it is never cut to the size of the listing."""
    world, url = World(), next(URLS)
    size, content = 2 * PART + 5, b"b" * (2 * PART + 5 + more)
    Bucket(url).put("log", b"a" * size)

    def write_after():
        if world.requests[-1:] == [after]:
            Bucket(url).put("log", content)

    reader = TimedBucket(url, world, write_after)
    lease = Index(reader, period=None)
    mirror = Mirror(reader, folder, lease, look=None)
    if after == "list ":
        mirror.fetch()
        assert (folder / "log").read_bytes() == content
    else:
        with pytest.raises(RemoteError, match="log was replaced while it was read"):
            mirror.fetch()
        assert not (folder / "log").exists()
    lease.release()


def test_a_snapshot_that_a_program_has_saved_there_is_put_with_its_manifest_last(s3, proxy, folder, clock):
    """And not while a file of it waits."""
    bucket = Bucket(f"{s3}/run")
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=None, clock=clock)
    mirror.fetch()
    write(folder, final__model="m" * (9 << 20), final__trainer="t", **{"final/manifest.json": "{}"})
    proxy.fail("stall", method="POST", key="/model")
    mirror.put_due()
    assert objects(bucket).keys() == {"final/trainer"}
    proxy.heal()
    mirror.put()
    puts = [request.path for request in proxy.requests if request.method in ("PUT", "POST") and "final" in request.path]
    assert "manifest" in puts[-1]
    assert objects(bucket).keys() == {"final/model", "final/trainer", "final/manifest.json"}
    mirror.close()
    lease.release()


def test_a_file_that_a_link_in_the_store_hides_is_left_out_with_a_warning(bucket, folder, mirror):
    """The link stays: it says which snapshot is the best."""
    link = b'{"chainring": "link", "target": "snapshot_1"}'
    bucket.put("best", link)
    write(folder, best="mine", log="[1]")
    with pytest.warns(UserWarning, match="'best' of .* is left out: in the store a link to a snapshot has its name; rename"):
        mirror.put()
    mirror.put()
    assert objects(bucket) == {"best": link.decode(), "log": "[1]"}


def test_a_name_that_is_too_long_for_the_store_or_the_disk_is_left_out_with_a_warning(bucket, folder, lease):
    """The others are there."""
    bucket.put("x" * 300, b"too long for a file")
    mirror = Mirror(bucket, folder, lease, look=None)
    with pytest.warns(UserWarning, match=r"'x+' of .* is left out: it cannot be written to .*File name too long"):
        mirror.fetch()
    write(folder, log="[1]", **{"/".join(["y" * 200] * 6): "too long for an object"})
    with pytest.warns(UserWarning, match="more than 1024 bytes; give it a shorter name"):
        mirror.close()
    assert objects(bucket) == {"x" * 300: "too long for a file", "log": "[1]"}


def test_the_files_of_a_run_that_could_not_put_them_are_kept(folder):
    """The error says where, and the next run has another directory."""
    bucket = TimedBucket(next(URLS), World())
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=None)
    mirror.fetch()
    write(folder, log="[1]")
    bucket.fault = "away"
    with pytest.raises(RemoteError, match=f"last files of .* the store is away. .*kept in {folder}"):
        mirror.close()
    bucket.fault = None
    mirror.close()
    assert files(folder) == {"log": "[1]"}
    assert objects(bucket) == {}
    lease.release()


def test_a_put_whose_answer_was_lost_is_no_other_writer(folder):
    """The file may grow before it is put again."""
    bucket = TimedBucket(next(URLS), World())
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=None)
    mirror.fetch()
    for content in "1", "12", "123":
        write(folder, log=content)
        bucket.fault = "silent"
        with pytest.raises(RemoteError):
            mirror.put()
        bucket.fault = None
    write(folder, log="1234")
    mirror.put()
    assert objects(bucket) == {"log": "1234"}
    (folder / "log").unlink()
    mirror.close()
    assert objects(bucket) == {}
    lease.release()


def test_the_files_wait_while_the_store_is_away_and_that_is_said_once(folder):
    """They are put when it is back."""
    world = World()
    bucket = TimedBucket(next(URLS), world)
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=0.01, pause=0)
    mirror.fetch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bucket.fault = "away"
        write(folder, log="[1]")
        wait_until(lambda: world.requests.count("put log") > 5)
        bucket.fault = None
        wait_until(lambda: "log" in objects(bucket))
    (warning,) = caught
    assert re.fullmatch(f"the files of memory://.* wait in {folder}: the store is away", str(warning.message))
    mirror.close()
    lease.release()


ENDS = """
import sys
from chainring._places.bucket import Bucket
from chainring._places.index import Index
from chainring._places.mirror import Mirror, working_directory
bucket = Bucket(sys.argv[1])
mirror = Mirror(bucket, working_directory(bucket.url), Index(bucket))
mirror.fetch()
(mirror.folder / "log").write_text("[1]")
mirror.close()
print(oct(mirror.folder.stat().st_mode), mirror.folder)
"""


def test_each_run_has_a_directory_of_its_own_that_others_cannot_enter_and_that_ends_with_the_process():
    """Below the temporary directory, with the name of the run."""
    told = forked.run(["-c", ENDS, "memory:///rün 1"], timeout=600)
    mode, path = told.stdout.split()
    assert mode == "0o40700"
    assert re.fullmatch(rf"{tempfile.gettempdir()}/chainring-r_n_1-[0-9a-f]{{16}}", path)
    assert not Path(path).exists()
    assert working_directory("memory:///run") != working_directory("memory:///run")


def test_nothing_is_deleted_when_the_directory_is_removed(bucket, folder, mirror):
    """By somebody who tidies up, say."""
    write(folder, log="[1]")
    mirror.put()
    shutil.rmtree(folder)
    with pytest.raises(OSError, match="the working directory of the run was removed"):
        mirror.put()
    with pytest.raises(OSError, match="They are lost"):
        mirror.close()
    assert objects(bucket) == {"log": "[1]"}


class SignallingBucket(Bucket):
    """Says when an object was put."""

    def __init__(self, url):
        super().__init__(url)
        self.puts = queue.SimpleQueue()

    def put(self, key, content, expected=None):
        tag = super().put(key, content, expected)
        if key[0] != ".":
            self.puts.put((key, content))
        return tag


def test_threads_put_what_changes_while_the_program_goes_on(folder):
    """They end with it."""
    bucket = SignallingBucket(next(URLS))
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=0.01, pause=0)
    mirror.fetch()
    for content in "1", "2":
        write(folder, log=content)
        assert bucket.puts.get(timeout=60) == ("log", content.encode())
    mirror.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("chainring-mirror")]
    lease.release()


def test_a_child_process_leaves_the_files_to_its_parent(bucket, folder, mirror):
    """It neither puts them when it closes all it has, nor keeps the directory from the next run."""
    write(folder, log="[1]")
    if (child := os.fork()) == 0:
        mirror.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert objects(bucket) == {}
    mirror.close()
    assert objects(bucket) == {"log": "[1]"}


class SlowBucket(Bucket):
    """Takes a second of a clock for each object, and until it is told to for the parts of a large one."""

    def __init__(self, url, clock):
        super().__init__(url)
        self.clock, self.goes_on, self.keys, self.refused = clock, threading.Event(), [], None

    def put(self, key, content, expected=None):
        if key == self.refused:
            raise RemoteError("the store is away")
        if key[0] != ".":
            self.keys.append(key)
            self.clock.seconds += 1
        return super().put(key, content, expected)

    @contextlib.contextmanager
    def upload(self, key):
        self.goes_on.wait()
        with super().upload(key) as file:
            yield file


def test_rows_do_not_wait_for_many_new_files(folder, clock):
    """Every ten seconds what grows comes first."""
    bucket = SlowBucket(next(URLS), clock)
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=None, pause=1, clock=clock)
    mirror.fetch()
    write(folder, log="1")
    mirror.put()
    write(folder, **{f"picture-{number}": "." * number for number in range(100)})
    looks = 0
    while len(objects(bucket)) < 101:
        clock.seconds += 2
        looks += 1
        write(folder, log="1" * looks * 2)
        before = len(bucket.keys)
        mirror.put_due()
        assert "log" in bucket.keys[before:]
        assert len(bucket.keys) - before <= 20
    assert 5 <= looks <= 11
    mirror.close()
    lease.release()


def test_rows_do_not_wait_for_a_large_file(folder, clock):
    """It is sent beside."""
    bucket = SlowBucket(next(URLS), clock)
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=0.01, pause=0, clock=clock)
    mirror.fetch()
    replace_file(folder / "big", "b" * (9 << 20))
    for content in "1", "2":
        write(folder, log=content)
        wait_until(lambda content=content: objects(bucket) == {"log": content})
    bucket.goes_on.set()
    mirror.close()
    assert objects(bucket).keys() == {"big", "log"}
    lease.release()


class AskedWhileItDeletes(Bucket):
    """Runs a function in a thread when an object is about to be deleted, and goes on when that waits or has ended."""

    def __init__(self, url, asks):
        super().__init__(url)
        self.asks, self.threads = asks, []

    def delete(self, keys):
        if keys := list(keys):
            self.threads.append(threading.Thread(target=self.asks))
            self.threads[-1].start()
            self.threads[-1].join(0.5)
        super().delete(keys)


def test_a_file_that_is_written_again_while_its_object_is_deleted_is_there_when_it_is_persisted(folder):
    """The request to delete what was there before does not come after what is put."""

    def write_again():
        write(folder, log="2")
        mirror.persist(folder / "log")

    bucket = AskedWhileItDeletes(next(URLS), write_again)
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=None, pause=0)
    mirror.fetch()
    write(folder, log="1")
    mirror.put()
    (folder / "log").unlink()
    mirror.put()
    (thread,) = bucket.threads
    thread.join()
    assert bucket.get("log").content == b"2"
    mirror.close()
    assert objects(bucket) == {"log": "2"}
    lease.release()


def test_the_store_has_what_the_disk_has_after_any_faults(s3, proxy, folder):
    """While files grow, are replaced, renamed and removed, and a snapshot's thread asks for some of them."""
    bucket = Bucket(f"{s3}/run")
    lease = Index(bucket, period=None)
    mirror = Mirror(bucket, folder, lease, look=0.01, pause=0)
    mirror.fetch()
    proxy.fail_at_random(0.1, seed=1)
    choose = random.Random(2)
    for step in range(100):
        name = f"{choose.choice('abc')}/{choose.randrange(5)}"
        deed = choose.choice(["append", "replace", "rename", "remove", "persist"])
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if deed in ("append", "persist"):
            with open(path, "a") as file:
                file.write(f"{step} ")
        elif deed == "replace":
            replace_file(path, f"replaced {step}")
        elif path.exists() and deed == "rename":
            path.rename(folder / f"{name} {step}")
        elif deed == "remove":
            path.unlink(missing_ok=True)
        if deed == "persist":
            content = path.read_text()
            mirror.persist(path)
            assert bucket.get(name).content.decode() == content
    mirror.close()
    proxy.heal()
    assert objects(bucket) == {name: content for name, content in files(folder).items() if content is not None}
    lease.release()
