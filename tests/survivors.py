"""Ranks of which some are lost, with a store that outlives them."""

import multiprocessing
import os

import torch
from torch.distributed import TCPStore

from chainring.parallel import create_communicator


def live(rank, size, where, before, function, *arguments):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", **where}
    os.environ.update({name: str(value) for name, value in where.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    before(rank)
    function(create_communicator("cpu", survive=True), *arguments)


def end_of(size, function, *arguments, told=lambda port: {"MASTER_PORT": port}, before=int):
    """How each of some ranks ends, whose store is in this process as that of torchrun is in its agent, as they are told.

    ``before`` is called with each rank before it meets the others.
    """
    context = multiprocessing.get_context("forkserver")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = os.environ | told(store.port)  # which the server that forks them may not have
    ranks = [context.Process(target=live, args=(rank, size, where, before, function, *arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(60)
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
