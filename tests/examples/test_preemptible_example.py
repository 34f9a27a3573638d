"""examples/preemptible: killed and started again, the run is the same."""

import sys

from running import run


def test_a_run_that_is_killed_is_the_run_that_is_left_alone():
    """SIGTERM once and SIGKILL once: the script compares every row of the logs, and the models byte for byte."""
    printed = run("preemptible/prove.py", "--kills", 2, "--epoch", 12, "--seed", 1)
    codes = [line.split()[4] for line in printed.splitlines() if line.startswith("start ")]
    assert codes == ["143", "-9", "0"]
    assert "killed 2 times, the run has the same 12 rows and the same model" in printed


def test_a_run_that_loses_a_machine_is_the_run_of_one_process():
    """One of two torchruns is killed with its rank: the script compares every row of the logs, and the models."""
    printed = run("preemptible/lose.py", "--epoch", 12, "--after", 4)
    assert "with one machine lost, the run has the same 12 rows and the same model" in printed


def test_a_supervisor_starts_again_what_a_signal_has_ended(tmp_path):
    """A program that is killed in its first start, and whose second one ends well, is started twice."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, signal, sys\n"
        "began = pathlib.Path(sys.argv[1])\n"
        "if not began.exists():\n"
        "    began.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    printed = run("preemptible/supervise.py", sys.executable, program, tmp_path / "began")
    assert printed.splitlines() == ["start 1 was ended by a signal (-9); again", "done after 2 starts"]


def test_a_supervisor_does_not_repeat_an_error():
    """Another failure would come again: its code is said, and nothing is started anew."""
    done = run("preemptible/supervise.py", sys.executable, "-c", "raise SystemExit(3)", check=False)
    assert done.returncode == 1
    assert "start 1 failed with 3" in done.stderr
