"""The end of a run of several ranks, which do not end in one moment."""

import os
import time

from rank_pair import on_two_ranks


def test_a_rank_that_closes_later_finds_what_the_others_have_left(tmp_path):
    """Rank 0, whose process has the store, waits for it a moment; otherwise torch prints its own stack on the other."""
    on_two_ranks(_closes, str(tmp_path))
    assert (tmp_path / "words").read_text() == ""


def _closes(comm, place):
    os.dup2(os.open(f"{place}/words", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.4)  # it has more to do, while the other closes
    comm.close()
