"""A disk that is full, or fails, at any call of a save: what was there stays, and the error says where and why."""

import builtins
import errno
import io
import os

import pytest
import torch
from torch import nn

import resume_program
from chainring import serializers
from chainring.iterators import SerialIterator
from chainring.serializers._store import find_snapshot

PATHS = ("open", "mkdir", "rename", "replace")  # of the others' errors Python names no path


class Writing:
    """A file that tells the disk of each call that writes."""

    def __init__(self, file, path, disk):
        self._file, self._path, self._disk = file, path, disk

    def __getattr__(self, name):
        if name in ("write", "flush", "truncate"):
            self._disk.passes(name, self._path)
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


class Disk:
    """Stands before the calls of the standard library that change a disk: records them, and fails the one of a number."""

    def __init__(self, monkeypatch):
        self.calls, self.failing, self.error = [], None, errno.ENOSPC
        self._open = open
        for module in (builtins, io):
            monkeypatch.setattr(module, "open", self._opened)
        for name in ("mkdir", "rename", "replace", "symlink", "link"):
            monkeypatch.setattr(os, name, self._before(name, getattr(os, name)))
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda file: (self.passes("fsync", self._path_of(file)), fsync(file))[1])

    def passes(self, call, *paths):
        """Takes down a call, or fails it."""
        if self.failing == len(self.calls):
            self.failing = None
            raise OSError(self.error, os.strerror(self.error), *([str(paths[0])] if call in PATHS else []))
        self.calls.append((call, *map(str, paths)))

    def _opened(self, path, mode="r", *arguments, **options):
        if isinstance(path, int) or not set(mode) & set("wxa+"):
            return self._open(path, mode, *arguments, **options)
        self.passes("open", path)
        return Writing(self._open(path, mode, *arguments, **options), path, self)

    def _before(self, name, call):
        def called(path, *arguments, **options):
            if name != "mkdir" or not os.path.isdir(path):
                self.passes(name, path, *arguments[: name in ("rename", "replace")])
            return call(path, *arguments, **options)

        return called

    @staticmethod
    def _path_of(file):
        return os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")


def an_iterator(epoch=0):
    iterator = SerialIterator(list(range(5)), 2, seed=0)
    iterator.epoch = epoch
    return iterator


def a_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def bytes_under(root):
    """Every file below a directory with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def failed(path, obj, failing, number=errno.ENOSPC):
    """The calls of a save before the one that failed, and its error, or ``None`` where there was no such call."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        disk.failing, disk.error = failing, number
        try:
            serializers.save(path, obj)
        except OSError as error:
            return disk.calls, error
    return disk.calls, None


def words_of(error):
    return " ".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("beside", [[], ["earlier"]], ids=["over nothing", "beside an earlier one"])
def test_a_disk_that_fails_at_any_call_of_a_save_leaves_what_was_there(tmp_path, beside, number):
    """Each call in turn. Only where the last failed, to flush the name, is the new snapshot there: it is whole."""
    for name in beside:
        serializers.save(tmp_path / name, an_iterator())
    before, failing = bytes_under(tmp_path), 0
    while True:
        calls, error = failed(tmp_path / "new", an_iterator(), failing, number)
        if error is None:
            break
        assert error.errno == number
        assert str(tmp_path / "new") in words_of(error)
        assert "free" in words_of(error)
        published = ["new"] if any(call[0] == "rename" for call in calls) else []
        assert sorted(os.listdir(tmp_path)) == sorted(beside + published)
        for name in beside + published:
            find_snapshot(tmp_path / name).verify()
        if published:
            serializers.load(tmp_path / "new", an_iterator(3))
            os.rename(tmp_path / "new", tmp_path.parent / f"{tmp_path.name}-new")
        assert bytes_under(tmp_path) == before
        failing += 1
    assert failing == len(calls) > 10
    assert find_snapshot(tmp_path / "new").verify().files


@pytest.mark.parametrize("before", [False, True], ids=["over nothing", "over an earlier one"])
def test_a_disk_that_fails_at_any_call_of_the_save_of_a_model_leaves_the_old_or_the_new(tmp_path, before):
    """The file is whole at every moment, and nothing lies beside it."""
    old, new, failing = a_module(1), a_module(2), 0
    path = tmp_path / "mlp.model"
    while True:
        path.unlink(missing_ok=True)
        if before:
            serializers.save(path, old)
        calls, error = failed(path, new, failing)
        if error is None:
            break
        assert error.errno == errno.ENOSPC
        assert str(path) in words_of(error)
        assert "free" in words_of(error)
        renamed = any(call[0] == "replace" for call in calls)
        assert os.listdir(tmp_path) == (["mlp.model"] if renamed or before else [])
        if renamed or before:
            serializers.load(path, found := a_module(3))
            expected = new if renamed else old
            assert all(torch.equal(value, found.state_dict()[name]) for name, value in expected.state_dict().items())
        failing += 1
    assert failing == len(calls) > 5


def test_a_directory_above_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    """Of a snapshot and of a model."""
    for obj in (an_iterator(), a_module(1)):
        with monkeypatch.context() as patch:
            Disk(patch).failing = 0
            with pytest.raises(OSError, match="No space left") as caught:
                serializers.save(tmp_path / "above" / "saved", obj)
        assert str(tmp_path / "above") in words_of(caught.value)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", [an_iterator, lambda: a_module(1)], ids=["snapshot", "model"])
def test_a_place_that_takes_no_files_is_said(tmp_path, make):
    """A file where a directory should be, and a file system that takes none; root is stopped by these too."""
    (tmp_path / "file").write_bytes(b"mine")
    for parent in (tmp_path / "file", tmp_path / "file" / "deeper", "/proc", "/proc/self/deeper"):
        with pytest.raises(OSError, match=str(parent)):
            serializers.save(f"{parent}/saved", make())
    assert bytes_under(tmp_path) == {"file": b"mine"}


def test_a_model_is_not_saved_over_a_directory(tmp_path):
    """What is in it stays."""
    (tmp_path / "mlp.model").mkdir()
    (tmp_path / "mlp.model" / "mine").write_bytes(b"mine")
    with pytest.raises(OSError, match=r"mlp\.model"):
        serializers.save(tmp_path / "mlp.model", a_module(1))
    assert bytes_under(tmp_path) == {"mlp.model/mine": b"mine"}


def unflushed(calls, final):
    """What a loss of power could undo in the end; by the one rename, to ``final``, nothing of what it publishes could be."""
    flushed, dirty, renamed = set(), set(), []
    for call, *paths in calls:
        if call in ("open", "write", "mkdir"):
            dirty |= {paths[0], os.path.dirname(paths[0])}
        elif call == "fsync":
            dirty.discard(paths[0])
            flushed.add(paths[0])
        elif call in ("rename", "replace"):
            renamed.append(paths)
            assert not [path for path in dirty if path == paths[0] or path.startswith(f"{paths[0]}/")]
            assert paths[0] in flushed
            dirty = {path for path in dirty if path != paths[0]}
            dirty.add(os.path.dirname(paths[1]))
    assert [target for _, target in renamed] == [final]
    return dirty


def recorded(path, obj):
    """The calls of a save, in order, each with its path."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        serializers.save(path, obj)
    return disk.calls


def test_no_rename_of_a_save_of_a_trainer_precedes_the_flush_of_what_it_publishes(tmp_path):
    """Every file, then their directory, then one rename, then the directory above: every call of it, in order."""
    trainer, *_ = resume_program.build(str(tmp_path / "out"), stop=(1, "iteration"))
    trainer.run()
    (tmp_path / "root").mkdir()
    calls = recorded(tmp_path / "root" / "saved", trainer)
    assert unflushed(calls, str(tmp_path / "root" / "saved")) == set()
    kinds = [call for call, *_ in calls if call in ("open", "fsync", "rename", "mkdir")]
    assert kinds == ["mkdir", "open", "fsync", "open", "fsync", "open", "fsync", "fsync", "rename", "fsync"]
    opened = [os.path.basename(path) for call, path, *_ in calls if call == "open"]
    assert opened == ["rank00000-of-00001.safetensors", "state.json", "manifest.json"]
    assert calls[-1] == ("fsync", str(tmp_path / "root"))


def test_no_rename_of_a_save_of_a_model_precedes_the_flush_of_the_file(tmp_path):
    """Also over one that is there."""
    for seed in (1, 2):
        calls = recorded(tmp_path / "mlp.model", a_module(seed))
        assert unflushed(calls, str(tmp_path / "mlp.model")) == set()
        assert [call for call, *_ in calls if call != "write"] == [
            "open",
            "flush",
            "fsync",
            "replace",
            "fsync",
        ]
        assert not [path for call, path, *_ in calls if call in ("open", "write") and path == str(tmp_path / "mlp.model")]
