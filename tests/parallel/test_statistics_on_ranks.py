"""Statistics of parameters on two ranks, each of which has the same ones."""

import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_two_ranks


def reported(comm, out, length):
    """What is reported at the end of an interval of four updates, of a run that is stopped after ``length`` of them."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    iterator = SerialIterator([(torch.full((3,), float(i)), torch.tensor([1.0])) for i in range(8)], 4, seed=0)
    loss = lambda net, x, t: ((net(x) - t) ** 2).mean()  # noqa: E731
    updater = StandardUpdater(iterator, torch.optim.SGD(net.parameters(), 0.01), net, loss_func=loss, comm=comm)
    trainer, rows = Trainer(updater, (length, "iteration"), out=out), []
    trainer.extend(extensions.ParameterStatistics(net, {"mean": torch.mean}, trigger=(4, "iteration")), name="statistics")
    trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
    trainer.extend(
        lambda trainer: rows.append({k: float(v) for k, v in trainer.observation.items() if "mean" in k}), priority=0
    )
    trainer.run()
    comm.barrier()
    return rows[-1]


def both(comm, out):
    whole = reported(comm, f"{out}/whole", 4)
    reported(comm, f"{out}/cut", 3)
    return whole, reported(comm, f"{out}/cut", 4)


def test_a_run_resumed_inside_an_interval_reports_the_mean_of_the_whole_interval(tmp_path):
    """Updates from before the resume weigh as much as those after it."""
    ranks = on_two_ranks(both, str(tmp_path))
    assert not any(isinstance(rank, str) for rank in ranks), ranks
    for whole, resumed in ranks:
        assert whole
        assert whole == resumed
