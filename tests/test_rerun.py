"""Whole scripts that are run again in the same directory: continued, stopped, edited and killed as their users do."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import forked

TESTS = Path(__file__).parent
PROGRAM = TESTS / "rerun_program.py"
MNIST = TESTS.parent / "examples" / "mnist" / "train_mnist.py"


def start(script, *arguments):
    """Runs a script in a process of its own; what became of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return forked.run([script, *map(str, arguments)], env=environment, timeout=600)


def run(script, *arguments):
    """The same; what it printed, when it has succeeded."""
    done = start(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(out):
    """The rows of a log without their times; both files have the same."""
    read = json.loads((out / "log").read_text())
    assert read == [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in read]


def snapshots(out):
    return sorted(path.name for path in out.glob("snapshot_iter_*"))


def starts(out):
    """The iterations at which a run was started and resumed."""
    return [start["iteration"] for start in json.loads((out / "run.json").read_text())["starts"]]


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run of the program that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(PROGRAM, out)
    return out


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of that directory."""
    return shutil.copytree(whole, tmp_path / "out")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The directory of the example, run for two epochs and then for one; and what the second run printed."""
    out = tmp_path_factory.mktemp("digits") / "result"
    run(MNIST, "-e", 2, "-o", out)
    return out, run(MNIST, "-e", 1, "-o", out)


def test_the_example_run_twice_moves_its_first_run_away_and_says_so(digits):
    """Two runs, each whole, and neither has anything of the other; the model that the script saves is that of the last."""
    out, printed = digits
    first, second = contents(out / "previous" / "1"), contents(out)
    assert f"{out} holds an earlier run: cg.dot" in printed
    assert f"moved to {out / 'previous' / '1'}" in printed
    assert {Path("log"), Path("log.jsonl"), Path("run.json"), Path("cg.dot")} < first.keys() & second.keys()
    assert Path("mlp.model") in second.keys() - first.keys()
    assert [len(rows(place)) for place in (out / "previous" / "1", out)] == [2, 1]
    assert [len(snapshots(place)) for place in (out / "previous" / "1", out)] == [2, 1]
    assert starts(out) == starts(out / "previous" / "1") == [0]


def test_the_example_given_a_model_to_resume_says_that_it_is_one(digits):
    """With the remedy, and before anything has been touched."""
    out, _ = digits
    before = contents(out)
    done = start(MNIST, "-o", out, "--resume", out / "mlp.model")
    assert done.returncode == 1
    assert f"{out}/mlp.model holds a model, and a Trainer is loaded from a snapshot directory" in done.stderr
    assert contents(out) == before


def test_the_example_continued_from_a_snapshot_logs_what_it_would_have_logged(digits, tmp_path):
    """Two epochs, the second of them after a stop, beside two in one go."""
    out = shutil.copytree(digits[0], tmp_path / "out")
    (snapshot,) = snapshots(out)
    printed = " ".join(run(MNIST, "-e", 2, "-o", out, "--resume", out / snapshot).split())
    assert rows(out) == rows(out / "previous" / "1")
    assert "config epoch 1 -> 2" in printed
    assert starts(out) == [0, int(snapshot.rpartition("_")[2])]


def test_a_learning_rate_that_is_not_edited_comes_from_the_snapshot(finished, whole):
    """Which a scheduler has lowered since; every later row, and the model, are those of the run that went on."""
    printed = run(PROGRAM, finished, "--resume", finished / "snapshot_iter_3")
    assert "lr" not in printed
    assert "resumed at iteration 3: the later snapshot_iter_4, snapshot_iter_5" in printed
    assert rows(finished) == rows(whole)
    assert rows(whole)[3]["lr"] == 0.1 * 0.5**3
    assert (finished / "trained.model").read_bytes() == (whole / "trained.model").read_bytes()
    assert snapshots(finished / "abandoned" / "1") == [f"snapshot_iter_{iteration}" for iteration in range(4, 9)]


def test_an_edited_learning_rate_holds_and_is_printed(finished, whole):
    """It is used from the first update on, and the scheduler goes on from there."""
    printed = " ".join(run(PROGRAM, finished, "--lr", 0.5, "--stop", 5, "--resume", finished / "snapshot_iter_3").split())
    assert [row["lr"] for row in rows(finished)[3:]] == [0.5, 0.25]
    assert rows(finished)[:3] == rows(whole)[:3]
    assert "config lr 0.1 -> 0.5" in printed
    assert "lr of optimizer 'main', group 0 0.1 -> 0.5" in printed


def test_a_snapshot_of_another_model_is_refused_by_the_name_of_a_parameter_and_the_number_of_others(finished):
    """Nothing is changed: neither the snapshot nor what else is in the directory."""
    before = contents(finished)
    done = start(PROGRAM, finished, "--units", 5, "--resume", finished / "snapshot_iter_3")
    assert done.returncode == 1
    assert "0.weight" in done.stderr
    assert "And 2 more differences" in done.stderr
    assert contents(finished) == before


def test_the_same_command_after_kill_9_goes_on_where_it_was(tmp_path, whole):
    """Rows and model equal those of the run that was not killed; what the killed one left unfinished is gone."""
    out = tmp_path / "out"
    (tmp_path / "out.kill").touch()
    assert start(PROGRAM, out, "--autoload").returncode == -signal.SIGKILL
    assert snapshots(out)
    run(PROGRAM, out, "--autoload")
    assert rows(out) == rows(whole)
    assert (out / "trained.model").read_bytes() == (whole / "trained.model").read_bytes()
    first, second = starts(out)
    assert first == 0 < second < 5
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".lock"]
    assert "\nalready finished at epoch 2, iteration 8: " in run(PROGRAM, out, "--autoload")
    assert rows(out) == rows(whole)
