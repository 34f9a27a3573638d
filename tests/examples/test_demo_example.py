"""examples/demo, which `make demo` runs: the script of the README, killed, continued and compared."""

import os
import re
import signal
import subprocess
import sys

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


def test_the_demo_kills_a_run_continues_it_and_finds_the_same_bits(tmp_path, monkeypatch):
    """And done again, it begins anew and says where the first is now."""
    monkeypatch.chdir(tmp_path)
    printed = run("demo/demo.py", *SMALL)
    assert "which SIGKILL will end after epoch 4" in printed
    assert re.search(r"resumed from \S*snapshot_iter_\d+", printed)
    assert re.search("compared: the snapshots of iterations .*, bit for bit", printed)
    assert "killed and continued, it has the same bits" in printed
    first = log(tmp_path / "result")
    assert len(first) == 12
    assert "result has an earlier run, which is in result.1 from now on" in run("demo/demo.py", *SMALL)
    assert log(tmp_path / "result") == log(tmp_path / "result.1") == first


def test_a_demo_that_is_stopped_by_ctrl_c_continues(tmp_path, monkeypatch):
    """It says how many epochs are done, and comes to the same end."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, EXAMPLES / "demo" / "demo.py", *SMALL[:2], "--after", "12"]
    alike = {**os.environ, "OMP_NUM_THREADS": "1"}  # as `run` has it
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True, "env": alike}
    with subprocess.Popen(command, **options) as process:
        for line in process.stdout:
            if line.split()[4:5] == ["3"]:  # the column of epochs
                os.killpg(process.pid, signal.SIGINT)
        assert "the same command continues it" in process.stderr.read()
    done = len(log(tmp_path / "result"))
    assert 3 <= done < 12
    printed = run("demo/demo.py", *SMALL)
    assert f"result has a run that was stopped after epoch {done}: it continues" in printed
    assert "it has the same bits" in printed
