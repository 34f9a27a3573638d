"""Files are written whole or not at all, under temporary names that nobody can guess and that carry our mark."""

import errno
import os
import stat
import zlib

import pytest

from chainring._files import AppendOnly, DirectoryLock, atomic_write, flush, is_temporary, make_folder, temporary_path


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
    """Those of other programs are not ours."""
    names = {temporary_path(tmp_path, suffix).name for suffix in (".tmp", ".old") for _ in range(100)}
    assert len(names) == 200
    assert all(map(is_temporary, names))
    others = [
        ".x.tmp", ".x-41-1700000000.tmp", ".log.json.tmp", "x-1-5200000000.tmp", ".chainring-1.tmp", ".chainring-.tmp",
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


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_a_directory_does_not_stop_a_write(tmp_path, monkeypatch, number):
    """It says so by an error, which is none for the file."""

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "file", b"new", durable=True)
    assert (tmp_path / "file").read_bytes() == b"new"
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        flush(tmp_path)


def test_a_file_is_appended_to_only_where_it_is_a_file_of_its_own(tmp_path):
    """Not through a link, a hard link or a pipe, which is not waited for either."""
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"mine")
    for put in (lambda: path.symlink_to(victim), lambda: os.link(victim, path), lambda: os.mkfifo(path), path.mkdir):
        put()
        with pytest.raises(OSError, match="left alone"):
            AppendOnly(path).append(b"more")
        path.rmdir() if path.is_dir() else path.unlink()
    file = AppendOnly(path)
    file.append(b"a")
    file.append(b"b")
    assert (victim.read_bytes(), path.read_bytes()) == (b"mine", b"ab")


def test_a_folder_is_not_made_through_a_link(tmp_path):
    """One that the user has given as a path elsewhere is."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="a link or a file is in the way"):
        make_folder(tmp_path / "out", "link/below")
    assert os.listdir(tmp_path / "elsewhere") == []
    assert make_folder(tmp_path / "out", "a/b") == tmp_path / "out" / "a" / "b"
    assert make_folder(tmp_path / "out", tmp_path / "own").is_dir()
    assert make_folder(tmp_path / "out", "../also own").is_dir()


def begun(path, size, content=b"abcdef", more=b""):
    """A file with this content, of which a snapshot knows the first bytes, as a resumed run goes on in it."""
    path.write_bytes(content)
    file = AppendOnly(path, size, zlib.crc32(b"abcdef"[:size]))
    return file, file.begin(path, more, loss="the test goes on without its beginning")


def test_a_file_is_cut_back_to_what_a_snapshot_knows(tmp_path):
    """What follows is appended there; it stays the same file."""
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    inode = path.stat().st_ino
    file, was_kept = begun(path, 3)
    file.append(b"xyz")
    assert was_kept
    assert (path.read_bytes(), path.stat().st_ino, file.read()) == (b"abcxyz", inode, b"abcxyz")
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_with_another_beginning_is_set_aside_with_a_warning(tmp_path):
    """Of the same length too; the run goes on without what is lost."""
    path = tmp_path / "file"
    with pytest.warns(UserWarning, match="without its beginning: .*file does not begin with the 3 bytes"):
        file, was_kept = begun(path, 3, b"aBcdef", more=b"new")
    assert not was_kept
    assert (path.read_bytes(), file.size, file.is_intact()) == (b"new", 3, True)
    assert (tmp_path / "abandoned" / "1" / "file").read_bytes() == b"aBcdef"


def test_a_file_elsewhere_is_copied_up_to_what_a_snapshot_knows(tmp_path):
    """It stays as it is."""
    (tmp_path / "old").write_bytes(b"abcdef")
    file = AppendOnly(tmp_path / "old", 4, zlib.crc32(b"abcd"))
    assert file.begin(tmp_path / "new", b"x", loss="")
    file.append(b"y")
    assert ((tmp_path / "old").read_bytes(), (tmp_path / "new").read_bytes()) == (b"abcdef", b"abcdxy")


def test_a_tail_is_replaced_by_the_next_write(tmp_path):
    """A shorter one leaves nothing of it behind, and it does not count."""
    file = AppendOnly(tmp_path / "file")
    file.append(b"ab")
    file.append(b"tail", counts=False)
    file.append(b"t", counts=False)
    assert ((tmp_path / "file").read_bytes(), file.size) == (b"abt", 2)
    file.append(b"c")
    assert ((tmp_path / "file").read_bytes(), file.is_intact()) == (b"abc", True)


def test_a_snapshot_beside_a_file_has_its_name_size_and_checksum(tmp_path):
    """One elsewhere has none of it; a directory that was moved as a whole is found."""
    referred = []
    file = AppendOnly(tmp_path / "file")
    file.append(b"abc")
    assert file.state(tmp_path / "elsewhere", referred.append) is None
    state = file.state(tmp_path, referred.append)
    assert referred == [tmp_path / "file"]
    assert AppendOnly.restore([*state, "more"], tmp_path).read() == b"abc"
    assert AppendOnly.restore(state, tmp_path / "elsewhere").read() is None
