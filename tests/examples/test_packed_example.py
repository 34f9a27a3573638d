"""examples/gpt/train_packed.py: two texts by changing weights, packed; killed, and taken up by other ranks."""

import contextlib
import shutil
import signal

from running import log, run, started

SCRIPT = "gpt/train_packed.py"
SMALL = ("--batchsize", 8, "--length", 32, "--unit", 16, "--snapshot", 2)


def test_killed_on_two_ranks_it_goes_on_on_one_or_three_to_the_same_bits(tmp_path):
    """In the middle of a document, and of the documents that were fetched."""
    arguments = (SCRIPT, *SMALL, "--iteration", 60, "--out")
    whole = run(*arguments, tmp_path / "whole").splitlines()
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(rank) for rank in started(*arguments, tmp_path / "on 1", processes=2)]
        next(line for line in ranks[0].stdout if line.split()[:1] == ["6"])
        for rank in ranks:
            rank.kill()
        assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    shutil.copytree(tmp_path / "on 1", tmp_path / "on 3")
    for processes in (1, 3):
        again = run(*arguments, tmp_path / f"on {processes}", processes=processes).splitlines()
        assert again[-2:] == whole[-2:]
        assert log(tmp_path / f"on {processes}") == log(tmp_path / "whole")
    assert len(whole[-1]) == 64
