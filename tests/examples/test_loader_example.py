"""examples/loader: the steps from a loop of one's own change no number that they need not change."""

import difflib
import re

import pytest
import torch
from running import EXAMPLES, log, run

STEPS = ("step0_plain.py", "step1_trainer.py", "step2_extensions.py", "step3_iterator.py")


def parameters(out):
    return torch.load(out / "model.pt", weights_only=True)


@pytest.fixture(scope="module")
def outs(tmp_path_factory):
    """The directory of five epochs of each step, and what it printed."""
    directory = tmp_path_factory.mktemp("loader")
    printed = [run(f"loader/{step}", "--epoch", 5, "--out", directory / step) for step in STEPS]
    return [directory / step for step in STEPS], printed


@pytest.mark.parametrize("step", [1, 2])
def test_a_trainer_around_the_same_loader_reaches_the_same_parameters(outs, step):
    """Every parameter is equal to the last bit."""
    plain, moved = (parameters(outs[0][number]) for number in (0, step))
    assert plain.keys() == moved.keys()
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


def test_the_losses_and_the_accuracy_are_those_of_the_plain_loop(outs):
    """The last line of the plain loop has the numbers that are in the logs of steps 1 and 2, to six decimals."""
    directories, printed = outs
    plain = [float(number) for number in re.findall(r"\d\.\d{6}", printed[0].splitlines()[-1])]
    for number, prefix in ((1, "test"), (2, "test/main")):
        row = log(directories[number])[-1]
        values = (row["main/loss"], row[f"{prefix}/loss"], row[f"{prefix}/accuracy"])
        assert plain == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("step", [2, 3])
def test_a_stopped_run_goes_on_to_the_same_parameters(outs, step, tmp_path):
    """In two parts, three epochs and two, the log and the parameters are those of five at once."""
    for epoch in (3, 5):
        run(f"loader/{STEPS[step]}", "--epoch", epoch, "--out", tmp_path)
    assert log(tmp_path) == log(outs[0][step])
    whole, parts = parameters(outs[0][step]), parameters(tmp_path)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_page_shows_what_changes():
    """The README has the difference of each two steps as it is."""
    page = (EXAMPLES / "loader/README.md").read_text()
    texts = [(EXAMPLES / "loader" / step).read_text().splitlines() for step in STEPS]
    for number in range(3):
        lines = difflib.unified_diff(texts[number], texts[number + 1], *STEPS[number : number + 2], n=0, lineterm="")
        assert "\n".join(lines) in page
