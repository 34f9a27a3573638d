"""Functions of a communicator that are called in two processes, each with its own."""

import multiprocessing
import os
import socket

import torch

from chainring.parallel import RankFailed, create_communicator


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def on_two_ranks(function, *arguments):
    """What ``function(comm, *arguments)`` returns on rank 0 and on rank 1; the function of a module, for it is pickled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["two_ranks"])
    results, port = context.Queue(), free_port()
    ranks = [context.Process(target=_live, args=(rank, port, results, function, arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        found = dict(results.get(timeout=60) for _ in ranks)
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return [found[0], found[1]]


def _live(rank, port, results, function, arguments):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    try:
        found = function(create_communicator("cpu"), *arguments)
    except BaseException as error:
        found = {"error": repr(error)}
    results.put((rank, found))


def exchange(comm):
    """Each way to exchange; at the end rank 1 fails while rank 0 waits for it."""
    rank, found = comm.rank, {"place": (comm.rank, comm.size, comm.local_rank, str(comm.device))}
    tensors = [torch.full((2, 3), float(rank)), torch.tensor([rank], dtype=torch.int64), torch.ones(2).double() * rank]
    comm.all_reduce(tensors[1:], average=False)
    comm.all_reduce(tensors[:1])
    found["reduced"] = [tensor.tolist() for tensor in tensors]
    strided = torch.arange(6.0).reshape(2, 3).t().contiguous().t() + rank
    comm.broadcast([strided], root=1)
    found["broadcast"] = strided.tolist()
    found["objects"] = comm.gather_object({"rank": rank}), comm.broadcast_object(f"from {rank}", root=1)
    started = comm.start_max(15 * rank)
    comm.barrier()  # may be called in between, by which nothing is mixed up
    found["largest"] = started()
    found["beside"] = comm.beside().gather_object(rank)
    found["failure"] = _fail(comm)
    comm.close()
    return found


def _fail(comm):
    try:
        if comm.rank == 1:
            raise ValueError("broken")
        comm.barrier()
    except (ValueError, RuntimeError) as error:
        failure = comm.failed(error)
        return type(failure).__name__, isinstance(failure, RankFailed), str(failure)
    return None
