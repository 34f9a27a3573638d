"""chainring diff --script: both runs are replayed where they part, and the first module whose output differs is named."""

import json
import shutil

import pytest

import forked
import planted
from chainring.cli import main
from chainring.training._ledger import Ledger

pytestmark = pytest.mark.usefixtures("forked_scripts")
SPARSE = {"recorded": False, "length": 80, "rows": 80, "every": 100}  # but for the last row nothing is there
RUNS = {
    "base": {},
    "kernel": {"kernel": 1},
    "rate": {"lr": 0.03},
    "average": {"decay": 0.99},
    "sparse": SPARSE,
    "pixel": {**SPARSE, "pixel": 3},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A script and runs of it."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copy(planted.__file__, root / "train.py")
    for name, changes in RUNS.items():
        forked.run([str(root / "train.py"), str(root / name), json.dumps(changes)])
    return root


def diff(capsys, place, one, other, *options):
    """The exit status, and what is printed."""
    capsys.readouterr()
    status = main(["diff", *options, "--script", str(place / "train.py"), str(place / one), str(place / other)])
    return status, capsys.readouterr().out


def test_a_kernel_that_rounds_otherwise_is_named(place, capsys):
    """The module differs in the first iteration, of the same input; the runs do where a loss shows it, or the replays."""
    ledgers = [Ledger.read(place / name / "recorder.bin") for name in ("base", "kernel")]
    shown = next((i for i in range(1, planted.DIGESTS + 1) if ledgers[0].row(i) != ledgers[1].row(i)), 1)
    status, text = diff(capsys, place, "base", "kernel", "--json")
    found = json.loads(text)
    assert (status, found["same"], found["module"], found["module_iteration"]) == (1, False, "main/act", 1)
    assert (found["iteration"], found["tensor"], found["tensor_iteration"]) == (shown, planted.FIRST, 1)
    assert found["replayed"]["module"]["text"] == "of the same input"
    assert found["replayed"]["notes"] == []


def test_the_answer_in_words_says_what_differed_before(place, capsys):
    """After the first update the weights, by the learning rate; then the loss, which is what the recorder has."""
    status, text = diff(capsys, place, "base", "rate")
    lines = text.splitlines()
    assert status == 1
    assert lines[0].startswith("different from iteration 2 on: the loss main/loss: ")
    assert lines[1].startswith(f"the first tensor that differs, after iteration 1: {planted.FIRST}: ")
    assert lines[2:4] == [
        "the first module whose output differs, in iteration 2: main/first, of the same input and with other parameters",
        "settings of the optimizer after iteration 0: main/0/lr: 0.02 -> 0.03, main/0/initial_lr: 0.02 -> 0.03",
    ]


def test_what_no_module_computes_is_said_to_be_the_same_in_the_replays(place, capsys):
    """An average of the parameters, which only a snapshot shows."""
    status, text = diff(capsys, place, "base", "average")
    assert status == 1
    assert text.startswith("different by iteration 8, the first to compare: the tensor extensions/ExponentialMovingAverage/")
    assert "the replays compute the same in iterations 8 to 9: what differs is kept by an extension" in text


def test_among_many_iterations_the_first_is_found(place, capsys):
    """All that the runs have left is a mean of 80 iterations."""
    status, text = diff(capsys, place, "sparse", "pixel", "--json")
    found = json.loads(text)
    assert (status, found["iteration"], found["exact"]) == (1, 10, True)
    assert (found["module"], found["module_iteration"], found["tensor_iteration"]) == ("main/first", 10, 10)
    assert found["replayed"]["module"]["text"] == "of another input"


def test_runs_that_are_the_same_are_not_replayed(place, capsys):
    """There is nothing to find."""
    status, text = diff(capsys, place, "base", "base", "--json")
    assert (status, json.loads(text)["replayed"]) == (0, None)


def test_a_script_that_is_not_there_is_trouble(place, capsys):
    """And so is one that trains nothing."""
    (place / "nothing.py").write_text("")
    for name, words in (("gone.py", "there is no script"), ("nothing.py", "chainring")):
        assert main(["diff", "--script", str(place / name), str(place / "base"), str(place / "rate")]) == 2
        assert words in capsys.readouterr().err
    assert main(["diff", "--script", str(place / "gone.py"), str(place / "base"), str(place / "base")]) == 2
