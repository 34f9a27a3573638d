"""A snapshot is complete or absent, and says so when it is not what was written."""

import os
import warnings
import zlib

import pytest

from chainring._files import temporary_path
from chainring._places.base import MANIFEST, Directory
from chainring.serializers._store import CorruptError, Snapshots, find_newest, open_store

FILES = {"a.bin": b"alpha" * 7, "b.bin": b"", "state.json": b'{"x": 1}'}


def write(file, text):
    file.write(text)
    return len(text), zlib.crc32(text)


def writers(files=None):
    return {name: lambda file, text=text: write(file, text) for name, text in (files or FILES).items()}


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def watched(root, at):
    """A store that calls a function at each point of a commit."""
    return Snapshots(Directory(root, at=at))


POINTS = [
    "begun",
    "wrote a.bin",
    "wrote b.bin",
    "wrote state.json",
    "wrote manifest.json",
    "flushed",
    "renamed",
    "committed",
]


def test_what_was_committed_verifies_and_tells_its_iteration(store):
    """The manifest names every file with its size and checksum."""
    store.commit("snapshot_iter_7", writers(), 7, {"torch": "2.13"})
    manifest = store.snapshot("snapshot_iter_7").verify()
    assert manifest.iteration == 7
    assert manifest.about == {"torch": "2.13"}
    assert manifest.files == {name: (len(text), zlib.crc32(text)) for name, text in FILES.items()}


def test_each_single_bit_that_is_flipped_is_noticed(store):
    """In every file, the manifest included."""
    store.commit("one", writers(), 1)
    for path in (store.files.root / "one").iterdir():
        sound = path.read_bytes()
        for bit in range(8 * len(sound)):
            flipped = bytearray(sound)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises((CorruptError, ValueError)):
                store.snapshot("one").verify()
        path.write_bytes(sound)
    store.snapshot("one").verify()


@pytest.mark.parametrize("file", [*FILES, MANIFEST])
@pytest.mark.parametrize("harm", ["cut", "missing", "zeroed", "link", "longer"])
def test_a_file_that_is_harmed_is_noticed(store, file, harm):
    """Cut, missing, zeroed, replaced by a link to the same content, or longer."""
    store.commit("one", writers(), 1)
    path = store.files.root / "one" / file
    text = path.read_bytes()
    if harm == "cut" and text:
        path.write_bytes(text[:-1])
    elif harm == "zeroed" and text:
        path.write_bytes(bytes(len(text)))
    elif harm == "link":
        path.rename(store.files.root / "elsewhere")
        path.symlink_to(store.files.root / "elsewhere")
    elif harm == "longer":
        path.write_bytes(text + b"\n")
    else:
        path.unlink()
    with pytest.raises(CorruptError):
        store.snapshot("one").verify()


def test_an_extra_file_is_noticed(store):
    """A snapshot holds its own files only."""
    store.commit("one", writers(), 1)
    (store.files.root / "one" / "extra").touch()
    with pytest.raises(CorruptError, match="extra"):
        store.snapshot("one").verify()


@pytest.mark.parametrize("point", POINTS)
def test_an_end_at_any_point_leaves_the_old_or_the_new_snapshot(tmp_path, point):
    """A process that dies is imitated by a fork that exits there: nothing in it is cleaned up."""
    open_store(tmp_path).commit("old", writers(), 1)
    child = os.fork()
    if child == 0:
        watched(tmp_path, lambda passed: os._exit(9) if passed == point else None).commit("new", writers(), 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    store = open_store(tmp_path)
    expected = ["new", "old"] if point in ("renamed", "committed") else ["old"]
    assert store.names() == expected
    for name in expected:
        store.snapshot(name).verify()
    assert len(store.files.sweep(store.folders_of)) == (0 if len(expected) == 2 else 1)
    assert sorted(os.listdir(tmp_path)) == sorted(expected)


@pytest.mark.parametrize("point", POINTS[:6])
def test_a_write_that_fails_publishes_nothing_and_leaves_nothing(tmp_path, point):
    """A full disk, say: what was there before is as it was."""
    open_store(tmp_path).commit("old", writers(), 1)

    def fail(passed):
        if passed == point:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        watched(tmp_path, fail).commit("new", writers(), 2)
    assert os.listdir(tmp_path) == ["old"]
    open_store(tmp_path).snapshot("old").verify()


def test_nothing_is_renamed_before_what_it_publishes_is_flushed(tmp_path, monkeypatch):
    """Every file, then the directory, then the rename, then the parent: the order that survives a loss of power."""
    calls = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(("rename", str(b))), rename(a, b)))
    open_store(tmp_path).commit("one", writers(), 1)
    names = [(what, path.rpartition("/")[2]) for what, path in calls]
    assert [name for _, name in names[:4]] == [*FILES, MANIFEST]
    assert names[4][0] == "fsync"
    assert names[4][1].endswith(".tmp")
    assert names[5:] == [("rename", "one"), ("fsync", tmp_path.name)]


def test_a_snapshot_is_never_written_over(store):
    """A second commit of a name is refused, and the first stays."""
    store.commit("one", writers(), 1)
    with pytest.raises(FileExistsError, match="never written over"):
        store.commit("one", writers(), 2)
    assert store.snapshot("one").verify().iteration == 1


def test_names_come_by_iteration_and_not_by_time_or_spelling(store):
    """The highest iteration first; one whose manifest cannot be read is tried last."""
    for iteration in (9, 100, 20):
        store.commit(f"s{iteration}", writers(), iteration)
    os.utime(store.files.root / "s9")
    (store.files.root / "s20" / MANIFEST).write_bytes(b"?")
    (store.files.root / "not_a_snapshot").mkdir()
    assert store.names() == ["s100", "s9", "s20"]


def test_the_newest_that_verifies_is_chosen_and_the_others_are_warned_about(store):
    """A fallback is loud."""
    for iteration in (1, 2, 3):
        store.commit(f"s{iteration}", writers(), iteration)
    for name in ("s3", "s2"):
        (store.files.root / name / "a.bin").write_bytes(b"x")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert find_newest(store, store.names(), warnings.warn) == "s1"
    assert [str(warning.message).split("'")[1] for warning in caught] == ["s3", "s2"]


def test_no_snapshot_at_all_is_no_error_but_none_that_verifies_is(store):
    """A fresh start is silent; a silent fresh start over damaged snapshots would lose them."""
    assert find_newest(store, store.names(), pytest.fail) is None
    store.commit("s1", writers(), 1)
    (store.files.root / "s1" / "a.bin").unlink()
    with pytest.raises(CorruptError, match="none of the snapshots"):
        find_newest(store, store.names(), lambda message: None)


def test_removing_and_sweeping_touch_nothing_else(store):
    """Files of others, also with similar names, stay."""
    store.commit("s1", writers(), 1)
    store.commit("s2", writers(), 2)
    (store.files.root / ".hidden.tmp").write_text("a file")
    (store.files.root / "s1.tmp").mkdir()
    store.remove("s1")
    assert store.files.sweep(store.folders_of) == []
    assert sorted(os.listdir(store.files.root)) == [".hidden.tmp", "s1.tmp", "s2"]


def test_sweeping_reaches_folders_below_but_not_those_of_another_run(tmp_path):
    """A log in a folder of its own is written by a rename too; a folder with a lock may be in use."""
    store = open_store(tmp_path)
    left = [tmp_path / folder / temporary_path(tmp_path).name for folder in ("logs", "logs/deep", "other")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "logs" / "log.json").touch()
    (tmp_path / "other" / ".lock").touch()
    assert sorted(store.files.sweep(store.folders_of)) == sorted(path.name for path in left[:2])
    assert [path.exists() for path in left] == [False, False, True]
    assert (tmp_path / "logs" / "log.json").exists()


@pytest.mark.parametrize("name", ["", ".s", "a/b", "../s", "a\0b"])
def test_names_that_could_lead_elsewhere_are_refused(store, name):
    """Also those inside a manifest."""
    with pytest.raises(ValueError, match="no slash"):
        store.commit(name, writers(), 1)


def test_the_checksum_of_a_file_of_several_pieces_is_of_every_byte(store):
    """It is read in pieces, and computed at once by zlib here."""
    content = os.urandom((16 << 20) + 1)
    store.commit("large", writers({"a.bin": content}), 1)
    assert store.snapshot("large").verify().files == {"a.bin": (len(content), zlib.crc32(content))}
    (store.files.root / "large" / "a.bin").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptError, match="other bytes"):
        store.snapshot("large").verify()
