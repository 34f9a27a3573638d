"""examples/same_bits: what is learned does not depend on the number of processes."""

import pytest
from running import log, run

SCRIPT = "same_bits/train_same_bits.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The directory of two epochs in one process, and the digest that they printed."""
    out = tmp_path_factory.mktemp("alone")
    return out, digest(out, "--epoch", 2)


def digest(out, *arguments, processes=1):
    """The last line that the example prints: a SHA-256."""
    last = run(SCRIPT, "--out", out, *arguments, processes=processes).splitlines()[-1]
    assert len(last) == 64
    return last


def test_two_processes_learn_the_bits_of_one(alone, tmp_path):
    """The same digest of the model, and the same numbers in every row of the log, with DDP beside a plain model."""
    out, expected = alone
    assert digest(tmp_path, "--epoch", 2, "--parallel", "ddp", processes=2) == expected
    assert len(log(out)) == 2
    assert log(tmp_path) == log(out)


def test_another_number_of_processes_goes_on_with_the_same_bits(alone, tmp_path):
    """One epoch on three processes and another on one end like two on one."""
    out, expected = alone
    assert digest(tmp_path, "--epoch", 1, processes=3) != expected
    assert digest(tmp_path, "--epoch", 2) == expected
    assert log(tmp_path) == log(out)


def test_another_number_of_virtual_ranks_is_another_run(alone, tmp_path):
    """It is a setting, as the batch size is: with 4 of them the bits are others."""
    assert digest(tmp_path, "--epoch", 2, "--virtual-ranks", 4) != alone[1]
