"""The end of a run of several ranks, which do not end in one moment."""

import os

import forked

PROGRAM = """
import time
from chainring.parallel import create_communicator
comm = create_communicator("cpu")
comm.barrier()
if comm.rank == 1:
    time.sleep(0.4)  # it has more to do, while the other ends
"""


def test_a_rank_that_ends_later_finds_what_the_others_have_left():
    """Rank 0, whose process has the store, waits for it a moment; otherwise torch prints its own stack on the other."""
    for rank in forked.started(2, lambda own: forked.run(["-c", PROGRAM], env={**os.environ, **own})):
        assert (rank.result().returncode, rank.result().stderr) == (0, "")
