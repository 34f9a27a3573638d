"""examples/text: it beats the frequencies of characters, and carries its state over a stop."""

import re

import pytest
from running import log, run

SMALL = ("--characters", 60_000, "--unit", 64, "--batchsize", 16, "--length", 25)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run of three epochs, and what it printed."""
    out = tmp_path_factory.mktemp("text")
    return out, run("text/train_text.py", *SMALL, "--epoch", 3, "--out", out)


def test_the_perplexity_is_below_that_of_pairs_of_characters(whole):
    """After three epochs over 54,000 characters it knows more than how often a character follows another."""
    out, printed = whole
    bigram = float(re.search(r"'bigram': ([\d.]+)", printed)[1])
    assert log(out)[-1]["perplexity"] < bigram < 20
    assert len(printed.rsplit("\n3 ", 1)[1]) > 500  # the sample, behind the last row of the table


def test_a_run_in_two_parts_has_the_same_log_and_sample(whole, tmp_path):
    """Stopped in the middle of the second epoch, where a state is carried, it goes on to the same rows and sample."""
    out, printed = whole
    run("text/train_text.py", *SMALL, "--epoch", 1.5, "--out", tmp_path)
    continued = run("text/train_text.py", *SMALL, "--epoch", 3, "--out", tmp_path)
    assert log(tmp_path) == log(out)
    assert continued[-500:] == printed[-500:]
