"""A function of a communicator, called in two processes or more that train together."""

import multiprocessing
import os
import pickle
import queue
import traceback

import torch
from torch.distributed import TCPStore

from chainring.parallel import create_communicator
from ports import free_port


def on_two_ranks(function, *arguments):
    """What ``function(comm, *arguments)`` returns on rank 0 and on rank 1, or the error that it raises, as text."""
    return on_ranks(2, function, *arguments)


def on_ranks(size, function, *arguments, seconds=300, device="cpu", survive=False):
    """What ``function(comm, *arguments)`` returns on each of ``size`` ranks, or the error that it raises, as text.

    Ranks that ``survive`` the loss of others meet through a store of this process, as that of torchrun is in its agent.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if survive else None
    shared = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port() if store is None else store.port}
    shared |= {} if store is None else {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return in_environments(environments, function, *arguments, seconds=seconds, device=device, survive=survive)


def in_environments(environments, function, *arguments, seconds=300, device="cpu", survive=False):
    """What ``function(comm, *arguments)`` returns in a process with each of the variables, or its error, as text."""
    context = multiprocessing.get_context("forkserver")
    size = len(environments)
    results, found = context.Queue(), {}
    ranks = [
        context.Process(target=_live, args=(number, variables, results, device, survive, function, arguments))
        for number, variables in enumerate(environments)
    ]
    for rank in ranks:
        rank.start()
    try:
        while len(found) < size:
            rank, told = results.get(timeout=seconds)
            found[rank] = pickle.loads(told)
    except queue.Empty:
        raise TimeoutError(f"of {size} ranks only these have answered, and with this: {found}") from None
    finally:
        for rank in ranks:
            rank.join(60)
            rank.kill()
    return [found[rank] for rank in range(size)]


def _live(rank, variables, results, device, survive, function, arguments):
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    comm = None
    try:
        comm = create_communicator(device, survive=survive)
        found = function(comm, *arguments)
    except BaseException as error:
        found = "".join(traceback.format_exception(error if comm is None else comm.failed(error)))
    results.put((rank, pickle.dumps(found)))  # tensors with their numbers: the memory of a rank that has ended is gone
    if comm is not None:
        comm.close()
