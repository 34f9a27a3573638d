"""examples/same_bits, and the program of the page on virtual ranks: the number of processes changes no bit."""

import re

import pytest
from running import EXAMPLES, log, run

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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_the_bits_of_one(alone, tmp_path, parallel):
    """The same digest of the model, and the same numbers in every row of the log, whoever exchanges the gradients."""
    out, expected = alone
    assert digest(tmp_path, "--epoch", 2, "--parallel", parallel, processes=2) == expected
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


def test_the_program_of_the_page_prints_one_digest_on_one_process_and_on_three(tmp_path, monkeypatch):
    """Copied out as it stands; beside it, the table that it prints."""
    page = (EXAMPLES.parent / "docs" / "same-bits.md").read_text()
    program = tmp_path / "train.py"
    program.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1))
    monkeypatch.chdir(tmp_path)
    alone, three = run(program), run(program, processes=3)
    assert re.search(r"^[0-9a-f]{64}$", alone, re.MULTILINE)
    assert alone in three  # below it: the files of the earlier run make room
