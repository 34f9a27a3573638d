"""One run at a time in a directory."""

import os
import shutil

import pytest

import forked
from chainring._files import DirectoryLock

HOLDER = (
    "import os, sys\n"
    "from chainring._files import DirectoryLock\n"
    "lock = DirectoryLock(sys.argv[1])\n"
    "if os.fork() == 0:\n"
    "    sys.stdin.read()\n"
    "    os._exit(0)\n"
    "print(os.getpid(), flush=True)\n"
    "sys.stdin.read()\n"
)


def test_a_second_lock_in_the_same_process_is_refused_until_the_first_is_released(tmp_path):
    """POSIX would grant it, and would drop both when either is closed."""
    first = DirectoryLock(tmp_path)
    with pytest.raises(BlockingIOError, match=str(os.getpid())):
        DirectoryLock(tmp_path)
    first.release()
    first.release()
    DirectoryLock(tmp_path).release()


def test_another_process_is_named_and_a_killed_one_lets_go_at_once_though_its_workers_live(tmp_path):
    """The lock is of the process that took it, so an orphaned worker does not keep it."""
    with forked.Forked(["-c", HOLDER, tmp_path]) as holder:
        pid = int(holder.stdout.readline())
        with pytest.raises(BlockingIOError, match=f"process {pid} on "):
            DirectoryLock(tmp_path)
        holder.kill()
        holder.wait()
        DirectoryLock(tmp_path).release()


def test_links_to_the_same_directory_are_the_same_directory(tmp_path):
    """What counts is the place and not its spelling."""
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    lock = DirectoryLock(tmp_path / "out")
    with pytest.raises(BlockingIOError):
        DirectoryLock(tmp_path / "link")
    lock.release()


def test_the_lock_survives_a_copy_of_the_directory(tmp_path):
    """Which opens and closes its file, as anything in the process may."""
    out = tmp_path / "out"
    out.mkdir()
    lock = DirectoryLock(out)
    shutil.copytree(out, tmp_path / "copy")
    program = "import sys; from chainring._files import DirectoryLock; DirectoryLock(sys.argv[1])"
    other = forked.run(["-c", program, out])
    assert f"is being written by another run: process {os.getpid()} on " in other.stderr
    lock.release()
    assert forked.run(["-c", program, out]).returncode == 0


def put_pipe(path, victim):
    os.mkfifo(path)


def put_directory(path, victim):
    path.mkdir()


def put_link(path, victim):
    path.symlink_to(victim)


def put_hard_link(path, victim):
    os.link(victim, path)


@pytest.mark.parametrize("put", [put_pipe, put_directory, put_link, put_hard_link])
def test_what_others_have_put_in_the_place_of_the_lock_is_left_alone(tmp_path, put):
    """It is refused at once, and changes no file elsewhere."""
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "out").mkdir()
    put(tmp_path / "out" / ".lock", tmp_path / "victim")
    with pytest.raises(OSError, match=r"left alone; move it away.*\.lock"):
        DirectoryLock(tmp_path / "out")
    assert (tmp_path / "victim").read_bytes() == b"mine"
