"""The examples run as their users run them."""

import json
import os
from pathlib import Path

import pytest

import forked

MNIST = Path(__file__).parent.parent / "examples" / "mnist"


def run(script, *arguments):
    """Runs an example in a process of its own and returns what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run([MNIST / script, *map(str, arguments)], env=environment, timeout=600)
    done.check_returncode()
    return done.stdout


def test_the_plain_loop_reaches_the_same_numbers(tmp_path):
    """Every row of the log of train_mnist.py equals that of the same training written without the library."""
    run("train_mnist.py", "-e", 3, "-o", tmp_path / "ours")
    run("train_plain.py", "-e", 3, "-o", tmp_path / "plain")
    ours, plain = (json.loads((tmp_path / name / "log").read_text()) for name in ("ours", "plain"))
    assert len(ours) == 3
    for row, other in zip(ours, plain, strict=True):
        del row["elapsed_time"], other["elapsed_time"]
        assert row == pytest.approx(other, rel=1e-12)


def test_a_second_run_prints_and_writes_the_same(tmp_path):
    """The example is repeatable: two runs differ in nothing but their times."""
    logs = []
    for name in ("first", "second"):
        table = run("train_mnist.py", "-e", 2, "-o", tmp_path / name)
        assert table.splitlines()[0].split() == [
            "epoch", "main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy", "elapsed_time",
        ]  # fmt: skip
        rows = json.loads((tmp_path / name / "log").read_text())
        logs.append([{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows])
    assert logs[0] == logs[1]
