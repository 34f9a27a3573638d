"""What two processes exchange, each by its own communicator, for test_process_group.py."""

import tempfile

import torch
import torch.distributed as dist

from chainring.parallel import RankFailed, create_communicator
from chainring.training import StandardUpdater, Trainer
from chainring.training.extensions import snapshot


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


def exchange_in_a_group(comm):
    """The same failure over a communicator for a process group that it has not made; whether that group is left."""
    assert dist.is_initialized()
    other = create_communicator("cpu")
    under_way = other.start_max(comm.rank)  # as a run has it, which asks in each iteration for signals of any rank
    found = other.gather_object(comm.rank), _fail(other)
    other.close()
    after = comm.gather_object(comm.rank)  # when each rank has learnt of the failure
    del under_way
    return *found, dist.is_initialized(), after


class Telling:
    """An object that tells when it is sent."""

    sent = 0

    def __reduce__(self):
        Telling.sent += 1
        return str, ("content",)


def broadcast_one(comm):
    """What comes from rank 1, and how often this rank has sent its own."""
    return comm.broadcast_object(Telling(), root=1), Telling.sent


def count_groups(comm):
    """How many process groups a run with three snapshots makes beside the one that it is given."""
    made, new_group = [], dist.new_group
    dist.new_group = lambda *args, **kwargs: made.append(new_group(*args, **kwargs)) or made[-1]
    own = create_communicator("cpu")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = StandardUpdater([torch.ones(2, 2)], optimizer, model, loss_func=lambda _, x: model(x).sum(), comm=own)
    out = comm.broadcast_object(tempfile.mkdtemp())
    trainer = Trainer(updater, (2, "iteration"), out)
    for name in ("first", "second", "third"):
        trainer.extend(snapshot(name), name=name, trigger=(1, "iteration"))
    trainer.run()
    own.close()
    return len(made)


def _fail(comm):
    try:
        if comm.rank == 1:
            raise ValueError("broken")
        comm.barrier()
    except (ValueError, RuntimeError) as error:
        failure = comm.failed(error)
        return type(failure).__name__, isinstance(failure, RankFailed), str(failure)
    return None
