"""examples/gpt/train_packed.py: two texts by changing weights, packed; killed, and taken up by other ranks."""

from running import log, run

SMALL = ("--batchsize", 8, "--length", 32, "--unit", 16, "--snapshot", 2)


def test_a_run_on_two_ranks_is_ended_by_one_with_the_same_bits(tmp_path):
    """In the middle of a document, and of the documents that were fetched."""
    whole = run("gpt/train_packed.py", *SMALL, "--iteration", 8, "--out", tmp_path / "whole").splitlines()
    run("gpt/train_packed.py", *SMALL, "--iteration", 4, "--out", tmp_path / "cut", processes=2)
    again = run("gpt/train_packed.py", *SMALL, "--iteration", 8, "--out", tmp_path / "cut").splitlines()
    assert again[-2:] == whole[-2:]
    assert len(whole[-1]) == 64
    assert log(tmp_path / "cut") == log(tmp_path / "whole")
