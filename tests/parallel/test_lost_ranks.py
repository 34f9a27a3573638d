"""Ranks whose process ends without its connections being closed: the others do not wait for them."""

import multiprocessing
import os
import signal

import torch
import torch.distributed as dist

from chainring.parallel import create_communicator
from ports import free_port
from rank_pair import on_two_ranks


def test_a_rank_ends_when_another_was_killed_whose_child_holds_its_connections(tmp_path):
    """A process that a rank has forked keeps the connections open, so that no exchange fails: the others end with words."""
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    ranks = [context.Process(target=_live, args=(rank, port, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [1, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    words = (tmp_path / "words").read_text()
    assert f"rank 0 stops: the process of rank 1 (pid {ranks[1].pid}) has ended" in words
    assert "gather_object" in words  # the stack of the thread that waited


def _live(rank, port, place):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    comm = create_communicator("cpu")
    comm.barrier()
    if rank == 1:
        child = os.fork()
        if not child:
            while True:
                signal.pause()  # until the test kills it
        (place / "child").write_text(str(child))
        comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    os.dup2(os.open(place / "words", os.O_WRONLY | os.O_CREAT), 2)
    comm.barrier()
    comm.gather_object("this never ends")


def test_a_rank_that_fails_does_not_wait_for_what_others_never_begin():
    """It ends while a maximum is under way; the other, which waits for it elsewhere, then fails too."""
    first, other = on_two_ranks(_ends_amid_exchanges)
    assert "RuntimeError: Connection closed by peer" in first
    assert "RuntimeError" in other


def _ends_amid_exchanges(comm):
    model, both = dist.new_group(), dist.new_group()  # such as those of a mesh
    if comm.rank == 0:
        comm.start_max(1)
    dist.barrier(both)  # it is under way
    if comm.rank == 1:
        dist.all_reduce(torch.ones(1), group=model)
    raise RuntimeError("Connection closed by peer")  # by a third one, which was killed
