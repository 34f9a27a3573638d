"""examples/demo, which `make demo` runs: the script of the README, killed, continued and compared."""

import os
import re
import signal
import subprocess
import sys

import pytest
from running import EXAMPLES, log, run

SMALL = ("--epoch", "12", "--after", "4")


def test_the_demo_trains_the_script_of_the_readme():
    """Its lines, but for the number of epochs and the directory, which are arguments."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    script = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    script = re.sub(r"\A(#.*\n)*", "", script)  # which `uv run` reads
    script = script.replace("import torch\n", "import sys\n\nimport torch\n", 1)
    script = script.replace('(20, "epoch"), out="result"', '(int(sys.argv[1]), "epoch"), out=sys.argv[2]')
    demo = (EXAMPLES / "demo" / "train.py").read_text().partition('"""\n\n')[2]
    assert "".join(demo.split()) == "".join(script.split())  # in lines of another length


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """The directory of two demos, how many epochs the first had done when Ctrl-C stopped it, and what both then printed."""
    place = tmp_path_factory.mktemp("demos")
    command = [sys.executable, EXAMPLES / "demo" / "demo.py", *SMALL[:2], "--after", "12"]
    alike = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `run` has it
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True, "env": alike}
    with subprocess.Popen(command, cwd=place, **options) as process:
        for line in process.stdout:
            if line.split()[4:5] == ["3"]:  # the column of epochs
                os.killpg(process.pid, signal.SIGINT)
        assert "the same command continues it" in process.stderr.read()
    done = len(log(place / "result"))
    with open(place / "result" / "log.jsonl", "a") as file:
        file.write('{"main/loss": 2')  # as one sees a row that is being written, or that a kill has cut
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return place, done, run("demo/demo.py", *SMALL), run("demo/demo.py", *SMALL)


def test_a_demo_that_is_stopped_by_ctrl_c_continues(demos):
    """It says how many epochs are done, whatever the row that is being written, and comes to the same end."""
    _, done, printed, _ = demos
    assert 3 <= done < 12
    assert f"result has a run that was stopped after epoch {done}: it continues" in printed
    assert "it has the same bits" in printed


def test_the_demo_kills_a_run_continues_it_and_finds_the_same_bits(demos):
    """And done again, it begins anew and says where the first is now."""
    place, _, _, printed = demos
    assert "result has an earlier run, which is in result.1 from now on" in printed
    assert "which SIGKILL will end after epoch 4" in printed
    assert re.search(r"resumed from \S*snapshot_iter_\d+", printed)
    assert re.search("compared: the snapshots of iterations .*, bit for bit", printed)
    assert "killed and continued, it has the same bits" in printed
    assert log(place / "result") == log(place / "result.1")
    assert len(log(place / "result")) == 12
