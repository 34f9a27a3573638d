"""A function of a communicator, called in two processes or more that train together."""

import multiprocessing
import os
import queue
import socket
import traceback

import torch

from chainring.parallel import create_communicator


def on_two_ranks(function, *arguments):
    """What ``function(comm, *arguments)`` returns on rank 0 and on rank 1, or the error that it raises, as text."""
    return on_ranks(2, function, *arguments)


def on_ranks(size, function, *arguments):
    """What ``function(comm, *arguments)`` returns on each of ``size`` ranks, or the error that it raises, as text."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    results, found = context.Queue(), {}
    ranks = [context.Process(target=_live, args=(rank, size, port, results, function, arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        while len(found) < size:
            rank, told = results.get(timeout=60)
            found[rank] = told
    except queue.Empty:
        raise TimeoutError(f"of {size} ranks only these have answered, and with this: {found}") from None
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return [found[rank] for rank in range(size)]


def _live(rank, size, port, results, function, arguments):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    comm = None
    try:
        comm = create_communicator("cpu")
        found = function(comm, *arguments)
    except BaseException as error:
        found = "".join(traceback.format_exception(error if comm is None else comm.failed(error)))
    results.put((rank, found))
    if comm is not None:
        comm.close()
