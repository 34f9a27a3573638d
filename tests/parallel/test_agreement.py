"""Ranks whose scripts differ are stopped before the first update, and told what differs."""

import warnings

import pytest
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.parallel import RankFailed
from chainring.training import StandardUpdater, Trainer, extensions
from chainring.training._agreement import check_agreement
from rank_pair import on_two_ranks

CASES = {
    "batch_size": ("6", "8"),
    "length of an epoch": ("24", "30"),
    "accumulate": ("1", "2"),
    "precision": ("fp32", "bf16"),
    "lr of group 0": ("0.1", "0.2"),
    "class": ("SGD", "Adam"),
    "weight": ("(1, 3)", "(2, 3)"),
    "stop trigger": ("2, 'iteration'", "3, 'iteration'"),
    "extensions": ("LogReport", "observe_lr"),
    "trigger": ("1, 'epoch'", "2, 'epoch'"),
    "seed": ("3", "4"),
}


def a_trainer(comm, out, different):
    """A run in which rank 1 differs in one setting."""
    differs = comm.rank == 1 and different
    setting = lambda name, one, other: other if differs == name else one  # noqa: E731
    torch.manual_seed(0)
    net = nn.Linear(3, setting("weight", 1, 2))
    data = [(torch.ones(3), torch.ones(1))] * setting("length of an epoch", 24, 30)
    iterator = SerialIterator(data, setting("batch_size", 6, 8), seed=setting("seed", 3, 4))
    cls = setting("class", torch.optim.SGD, torch.optim.Adam)
    optimizer = cls(net.parameters(), lr=setting("lr of group 0", 0.1, 0.2))
    updater = StandardUpdater(
        iterator,
        optimizer,
        net,
        loss_func=lambda net, x, t: (net(x) - t).square().mean(),
        precision=setting("precision", "fp32", "bf16"),
        accumulate=setting("accumulate", 1, 2),
        comm=comm,
    )
    trainer = Trainer(updater, (setting("stop trigger", 2, 3), "iteration"), out=out)
    trainer.extend(setting("extensions", extensions.LogReport, extensions.observe_lr)())
    trainer.extend(extensions.FailOnNonNumber(), trigger=(setting("trigger", 1, 2), "epoch"))
    return trainer


def run(comm, different, out):
    """What a run ends with: its error, or its iterations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = a_trainer(comm, out[comm.rank], different)
    try:
        trainer.run()
    except (ValueError, RankFailed) as error:
        return str(error)
    return trainer.updater.iteration


def compare(comm, out):
    """What is said of each setting."""
    words = {}
    for different in [case for case in CASES if case != "seed"]:
        try:
            check_agreement(a_trainer(comm, out, different))
        except ValueError as error:
            words[different] = str(error)
    return words


def test_a_setting_that_differs_between_ranks_is_named_with_both_values(tmp_path):
    """On both ranks."""
    for words in on_two_ranks(compare, str(tmp_path)):
        for different in [case for case in CASES if case != "seed"]:
            assert different in words[different]
            assert all(value in words[different] for value in CASES[different]), words[different]


@pytest.mark.parametrize("different", ["batch_size", "seed"])
def test_ranks_that_differ_do_not_begin_to_train(tmp_path, different):
    """A run ends on both with the difference, before the first update."""
    for words in on_two_ranks(run, different, [str(tmp_path)] * 2):
        assert isinstance(words, str), words
        assert all(value in words for value in (different, *CASES[different])), words


def test_ranks_that_agree_train(tmp_path):
    """To the end."""
    assert on_two_ranks(run, None, [str(tmp_path)] * 2) == [2, 2]


def test_an_out_that_is_not_shared_is_refused(tmp_path):
    """Before anything is written there: a rank could not resume from it."""
    for words in on_two_ranks(run, None, [str(tmp_path / "one"), str(tmp_path / "two")]):
        assert "out is one directory for all ranks" in words
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".chainring")]


def hooked(comm):
    """The warnings at the start of a run with PowerSGD."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        net.register_comm_hook(powersgd.PowerSGDState(None, start_powerSGD_iter=10), powersgd.powerSGD_hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        StandardUpdater(SerialIterator([0] * 4, 2), optimizer, net, comm=comm).start()
    with warnings.catch_warnings(record=True) as silent:
        warnings.simplefilter("always")
        net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        StandardUpdater(SerialIterator([0] * 4, 2), optimizer, net, comm=comm).start()
    return [[str(warning.message) for warning in each] for each in (caught, silent)]


def test_a_communication_hook_with_a_state_is_warned_about():
    """No snapshot has it, so that a resumed run would differ; DDP without one is silent."""
    for caught, silent in on_two_ranks(hooked):
        assert any("powerSGD_hook" in text and "PowerSGDState" in text for text in caught)
        assert not silent
