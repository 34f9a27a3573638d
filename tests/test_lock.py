"""One run at a time in a directory."""

import os
import subprocess
import sys

import pytest

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
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        pid = int(holder.stdout.readline())
        with pytest.raises(BlockingIOError, match=f"process {pid} on "):
            DirectoryLock(tmp_path)
        holder.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        DirectoryLock(tmp_path).release()


def test_links_to_the_same_directory_are_the_same_directory(tmp_path):
    """What counts is the place and not its spelling."""
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    lock = DirectoryLock(tmp_path / "out")
    with pytest.raises(BlockingIOError):
        DirectoryLock(tmp_path / "link")
    lock.release()
