"""Files are written whole or not at all, under temporary names that nobody can guess and that carry our mark."""

import os
import stat

import pytest

from chainring._files import DirectoryLock, atomic_write, is_temporary, temporary_path


def write(path, content, **options):
    with atomic_write(path, **options) as file:
        file.write(content)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_created_and_replaced_and_nothing_lies_beside_it(tmp_path, durable):
    """An open reader of the earlier file keeps it."""
    path = tmp_path / "file"
    write(path, b"old", durable=durable)
    with path.open("rb") as reader:
        write(path, b"new", durable=durable)
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path, umask):
    """It is not private, as the temporary files of the standard library are."""
    write(tmp_path / "file", b"")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [ValueError("half way"), KeyboardInterrupt()], ids=repr)
def test_a_failure_leaves_the_old_content_and_no_temporary_file(tmp_path, error):
    """Also where the program is interrupted."""
    path = tmp_path / "file"
    write(path, b"old")

    def write_half():
        with atomic_write(path) as file:
            file.write(b"ne")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_error_of_a_disk_names_the_file_and_the_free_space(tmp_path):
    """The temporary name would tell the reader nothing."""
    with (
        pytest.raises(OSError, match=r"No space left.*; [\d,]+ bytes are free there: .*file'"),
        atomic_write(tmp_path / "file"),
    ):
        raise OSError(28, "No space left on device")


def test_only_a_durable_write_waits_for_the_disk(tmp_path, monkeypatch):
    """The file before its rename, the directory after it."""
    calls = []
    for call in (os.fsync, os.replace):
        monkeypatch.setattr(os, call.__name__, lambda *given, call=call: (calls.append(call.__name__), call(*given)))
    write(tmp_path / "file", b"", durable=True)
    write(tmp_path / "file", b"")
    assert calls == ["fsync", "replace", "fsync", "replace"]


def test_links_that_others_have_planted_are_not_followed(tmp_path):
    """Neither at the names that earlier versions used for the temporary file, nor at the name of the file itself."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    directory = tmp_path / "out"
    directory.mkdir()
    for name in ("file", ".file.tmp", f".file-{os.getpid()}-1.tmp"):
        (directory / name).symlink_to(victim)
    write(directory / "file", b"new")
    assert victim.read_bytes() == b"mine"
    assert not (directory / "file").is_symlink()
    assert (directory / "file").read_bytes() == b"new"


def test_a_link_at_the_temporary_name_itself_is_refused(tmp_path, monkeypatch):
    """Should it be guessed all the same."""
    (tmp_path / "victim").write_bytes(b"mine")
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    temporary_path(tmp_path).symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", b"new")
    assert (tmp_path / "victim").read_bytes() == b"mine"


def test_temporary_names_differ_and_are_known_by_their_mark(tmp_path):
    """Names of earlier versions too; those of other programs are not ours."""
    names = {temporary_path(tmp_path, suffix).name for suffix in (".tmp", ".old") for _ in range(100)}
    assert len(names) == 200
    assert all(map(is_temporary, [*names, ".snapshot_iter_3-41-5200000000.tmp", ".mlp.model-41-123456789012345.old"]))
    others = [
        ".x.tmp", ".log.json.tmp", ".x-1-2.tmp", "x-1-5200000000.tmp", ".chainring-1.tmp", ".chainring-.tmp",
        ".chainring-0123456789abcdef.txt", "chainring-0123456789abcdef.tmp", ".chainring-0123456789abcdeg.tmp",
    ]  # fmt: skip
    assert not any(map(is_temporary, others))


def test_a_lock_does_not_write_through_a_link(tmp_path):
    """The file of the lock has a name that anybody knows."""
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"\.lock"):
        DirectoryLock(tmp_path)
    assert (tmp_path / "victim").read_bytes() == b"mine"
