"""What users expect of any trainer, on several ranks."""

import os
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chainring import report, training
from chainring.iterators import LoaderIterator, SerialIterator
from chainring.training import extensions
from chainring.training.extensions import predict
from rank_pair import on_ranks

DATA = TensorDataset(torch.arange(22.0).view(11, 2))


def in_order(batch_size):
    return SerialIterator(DATA, batch_size, repeat=False, shuffle=False)


def predictions(comm):
    net = nn.BatchNorm1d(2)
    net.running_mean.fill_(comm.rank)  # each rank has seen other examples
    tests = in_order(5)
    tests.use_virtual_ranks(5)  # as an evaluation of virtual ranks has left it
    found = predict(net, tests, comm=comm, predict_func=lambda net, x: {"x": x, "y": net(x)})
    refusal = None
    try:
        predict(net, LoaderIterator(DataLoader(DATA, 4), per_rank=True, repeat=False), comm=comm)
    except ValueError as error:
        refusal = str(error)
    return found["x"], found["y"], tests.virtual_ranks, refusal


def test_ranks_share_what_is_predicted_and_each_returns_all_in_order():
    """Three, of batches that they do not divide, the last with fewer examples than ranks; buffers are those of rank 0."""
    expected = predict(nn.BatchNorm1d(2), in_order(5))
    for x, y, virtual_ranks, refusal in on_ranks(3, predictions):
        assert torch.equal(x, DATA.tensors[0])
        assert torch.equal(y, expected)
        assert virtual_ranks == 5
        assert "not per_rank" in refusal


class Line(nn.Module):
    """Returns and reports a loss of one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        loss = (x * self.weight - 1).square().mean()
        report({"loss": loss}, self)
        return loss


def trainer_of(comm, out, stop=(9, "iteration"), **settings):
    model = Line()
    updater = training.StandardUpdater(
        SerialIterator(DATA, 4), torch.optim.SGD(model.parameters(), 1e-4), model, comm=comm, **settings
    )
    trainer = training.Trainer(updater, stop, out=out)
    trainer.extend(extensions.snapshot(autoload=True), trigger=(100, "iteration"))
    return trainer, model


def searched(comm, out):
    """The losses of a search, and the parameters of the run after it and of one without it."""
    found, trained = None, []
    for searches in (True, False):
        torch.manual_seed(0)
        trainer, model = trainer_of(comm, f"{out}/{searches}")
        if searches:
            found = extensions.find_learning_rate(trainer, count=20)
        trainer.run()
        trained.append(model.weight.tolist())
    return found.losses, trained


def test_ranks_search_a_learning_rate_together(tmp_path):
    """Each sees the mean of their losses, that of one process, and the run is the one without the search."""
    alone, _ = searched(None, str(tmp_path / "alone"))
    (losses, (with_it, without)), (others, _) = on_ranks(2, searched, str(tmp_path))
    assert losses == others
    assert losses == pytest.approx(alone)
    assert with_it == without


def timed(comm, out):
    """The first job ends by the clock of rank 0 alone, and the second trains five updates more."""
    found = []
    for seconds in (1e5 if comm.rank else 0, 1e5):
        os.environ["SLURM_JOB_END_TIME"] = str(int(time.time() + seconds))
        trainer, _ = trainer_of(comm, out, (found[1] + 5 if found else 1000, "iteration"))
        trainer.extend(extensions.Timer(margin=0))
        try:
            trainer.run()
        except training.Interrupted as error:
            found.append(error.code)
        found.append(trainer.updater.iteration)
    return found


def test_ranks_end_after_the_same_iteration_when_one_has_no_time_left(tmp_path):
    """And the next job continues from there."""
    first, second = on_ranks(2, timed, str(tmp_path))
    assert first == second, first
    code, ended, continued = first
    assert (code, continued) == (142, ended + 5)


def asked(comm, out):
    trainer, _ = trainer_of(comm, out, (9, "epoch"))

    def ask(trainer):
        if trainer.updater.iteration == 4:
            trainer.stop_at_epoch_end()

    trainer.extend(ask)
    trainer.run()
    return trainer.updater.iteration


def test_ranks_stop_with_the_epoch_under_way(tmp_path):
    """All after the same iteration as one would: the sixth, with which the second pass over eleven examples is over."""
    assert on_ranks(2, asked, str(tmp_path)) == [6, 6]


def growing(comm, out):
    trainer, model = trainer_of(comm, out, virtual_ranks=4)

    def choose(trainer):
        trainer.updater.accumulate = 1 if trainer.updater.iteration < 4 else 3

    trainer.extend(training.make_extension(initializer=choose)(choose), "choose")
    trainer.extend(extensions.RunningAverage("main/loss", trigger=(9, "iteration")))
    log = extensions.LogReport(trigger=(9, "iteration"))
    trainer.extend(log)
    trainer.run()
    return model.weight.tolist(), log.log[-1]["main/loss/average"], trainer.updater.epoch_detail


def test_batches_that_grow_and_running_averages_are_the_same_on_two_ranks(tmp_path):
    """To the last bit of parameters and averages, with virtual ranks."""
    torch.manual_seed(0)
    alone = growing(None, str(tmp_path / "alone"))
    assert alone[2] == (4 + 5 * 3) * 4 / 11
    first, second = on_ranks(2, seeded, str(tmp_path / "two"))
    assert first == second == alone


def seeded(comm, out):
    torch.manual_seed(0)
    return growing(comm, out)


def averaged(comm, out, stop):
    """The rows of a run whose ranks see other values, which continues the one in ``out``."""
    torch.manual_seed(0)
    model = Line()
    updater = training.StandardUpdater(SerialIterator(DATA, 4), torch.optim.SGD(model.parameters(), 1e-3), model, comm=comm)
    trainer = training.Trainer(updater, (stop, "iteration"), out=out)
    trainer.extend(extensions.RunningAverage("main/loss", trigger=(1, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(3, "iteration"))
    trainer.extend(log := extensions.LogReport(trigger=(1, "iteration")))
    trainer.run()
    return [row["main/loss/average"] for row in log.log]


def test_a_running_average_of_ranks_that_see_other_values_resumes_to_the_same_bits(tmp_path):
    """Each continues its own; on another number of ranks the average goes on from their mean."""
    whole, _ = on_ranks(2, averaged, str(tmp_path / "whole"), 8)
    on_ranks(2, averaged, str(tmp_path / "cut"), 3)
    assert on_ranks(2, averaged, str(tmp_path / "cut"), 8) == [whole, whole]
    on_ranks(2, averaged, str(tmp_path / "fewer"), 3)
    assert averaged(None, str(tmp_path / "fewer"), 8) == pytest.approx(whole, rel=1e-5)
