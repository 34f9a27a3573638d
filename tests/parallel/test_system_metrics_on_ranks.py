"""SystemMetrics on two ranks, each of which looks at its own process and machine."""

from types import SimpleNamespace

import psutil
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_two_ranks


def logged(comm, out):
    """The row of a run in which the machine of rank 1 is another one, and the clock of rank 0 stands still."""
    torch.manual_seed(0)
    psutil.virtual_memory = lambda: SimpleNamespace(percent=[10.0, 30.0][comm.rank])
    if comm.rank == 0:
        times = psutil.cpu_times()
        psutil.cpu_times = lambda: times
    net = nn.Linear(3, 1)
    iterator = SerialIterator([(torch.full((3,), float(i)), torch.tensor([1.0])) for i in range(8)], 4, seed=0)
    loss = lambda net, x, t: ((net(x) - t) ** 2).mean()  # noqa: E731
    updater = StandardUpdater(iterator, torch.optim.SGD(net.parameters(), 0.01), net, loss_func=loss, comm=comm)
    trainer = Trainer(updater, (4, "iteration"), out=out)
    trainer.extend(extensions.SystemMetrics((2, "iteration")))
    trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    trainer.run()
    comm.barrier()
    return trainer.get_extension("LogReport").log


def test_the_log_has_the_mean_of_the_ranks(tmp_path):
    """Also of a key that one of them has not reported."""
    rank, _ = on_two_ranks(logged, str(tmp_path))
    (row,) = rank
    assert row["system/memory_percent"] == 20.0
    assert row["system/process_memory_mib"] > 0
