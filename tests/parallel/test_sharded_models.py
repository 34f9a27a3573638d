"""Models of which only a part is sharded, and what cannot be saved of sharded state, on two processes."""

import math
import tempfile
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from chainring import serializers
from chainring.iterators import SerialIterator
from chainring.parallel import RankFailed
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm, clip_grad_value, extensions
from rank_pair import on_two_ranks

X = torch.linspace(-2, 2, 24).reshape(8, 3) ** 3
T = torch.linspace(5, 9, 8).reshape(8, 1)


def a_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def an_updater(net, clip, comm=None):
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    iterator = SerialIterator(list(zip(X, T, strict=True)), 8, shuffle=False)
    callbacks = UpdateCallbacks(update_on_start=clip)
    loss = lambda net, x, t: ((net(x) - t) ** 2).mean()  # noqa: E731
    return StandardUpdater(iterator, optimizer, net, loss_func=loss, callbacks=callbacks, comm=comm)


def clipped(comm, clips, sharded):
    """What one update of a model makes of its parameters, by the clipping; its last layer is sharded or it is plain."""
    found = []
    for make, *arguments in clips:
        net = a_net()
        if sharded:
            fully_shard(net[2])
        updater = an_updater(net, make(*arguments), comm)
        updater.start()
        updater.update()
        found.append([getattr(p, "full_tensor", lambda p=p: p)().detach().tolist() for p in net.parameters()])
    return found


CLIPS = [(clip_grad_norm, 0.5), (clip_grad_norm, 0.5, 1.0), (clip_grad_norm, 0.5, math.inf), (clip_grad_value, 0.25)]


def test_a_partly_sharded_model_is_clipped_as_a_plain_one():
    """By the norm of all gradients together, sharded and plain ones, and by value."""
    expected = clipped(None, CLIPS, sharded=False)
    ranks = on_two_ranks(clipped, CLIPS, True)
    assert [type(rank) for rank in ranks] == [list, list], ranks
    for rank in ranks:
        for (clip, *_), found, wanted in zip(CLIPS, rank, expected, strict=True):
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(torch.tensor(one), torch.tensor(other), msg=clip.__name__)


def refused(comm, out):
    """The words with which the start of a run, and the construction of an updater, are refused."""
    net = a_net()
    fully_shard(net)
    trainer = Trainer(an_updater(net, (), comm), (1, "iteration"), out=out)
    trainer.extend(extensions.snapshot(snapshot_on_error=True))
    words = []
    for call in (lambda: zero(comm), trainer.run):
        try:
            call()
        except (ValueError, RankFailed) as error:  # or of the other rank's error, if that came first
            words.append(str(error))
    return words


def zero(comm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer
    net = a_net()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=1e-3)
    StandardUpdater(SerialIterator([0.0] * 4, 2), optimizer, net, comm=comm)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    return on_two_ranks(refused, str(tmp_path_factory.mktemp("refused")))


def test_a_snapshot_on_error_of_a_sharded_model_is_refused_at_the_start(refusals):
    """And not when the error has happened, when there is nothing left to save it with."""
    for words in refusals:
        assert "snapshot_on_error=True saves the state when a rank has failed" in words[-1]


def test_an_optimizer_whose_state_cannot_be_saved_is_refused(refusals):
    """ZeroRedundancyOptimizer keeps a part of the state on each rank; the words name what to use in its place."""
    for words in refusals:
        assert "fully_shard" in words[0]


def tensor_parallel(comm, out):
    """With a communicator the words of the refusal; without one the parameters after two updates, and the warnings."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = a_net()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    try:
        an_updater(net, (), comm)
    except ValueError as error:
        words = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(an_updater(net, ()), (2, "iteration"), out=f"{out}/{comm.rank}").run()
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().tolist() for p in net.parameters()]
    return words, whole, [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def in_parallel(tmp_path_factory):
    return on_two_ranks(tensor_parallel, str(tmp_path_factory.mktemp("parallel")))


def test_tensor_parallelism_over_the_ranks_that_share_a_batch_is_refused(in_parallel):
    """Each of them would see other rows, and the gradients would be those of nothing."""
    for words, _, _ in in_parallel:
        assert "would see different rows" in words
        assert "fully_shard(model, mesh=" in words


def test_tensor_parallelism_without_a_communicator_is_exact_and_needs_none(in_parallel, tmp_path):
    """All ranks see the same rows; nothing advises to give each a share of them."""
    net = a_net()
    Trainer(an_updater(net, ()), (2, "iteration"), out=str(tmp_path)).run()
    for _, whole, said in in_parallel:
        assert not [text for text in said if "has no comm" in text]
        for one, other in zip(whole, net.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(one), other.detach())


def statistics(comm):
    """The keys of statistics in an epoch with an evaluation in the middle."""
    net = a_net()
    fully_shard(net[0])
    fully_shard(net)
    found = extensions.ParameterStatistics(net, {"norm": torch.norm}, trigger=(2, "iteration"))
    with tempfile.TemporaryDirectory() as out:
        out = comm.broadcast_object(out)
        trainer = Trainer(an_updater(net, (), comm), (2, "iteration"), out=out)
        keys = []
        held_out = SerialIterator(list(zip(X, T, strict=True)), 4, repeat=False, shuffle=False)
        loss = lambda x, t: ((net(x) - t) ** 2).mean()  # noqa: E731
        trainer.extend(extensions.Evaluator(held_out, net, eval_func=loss), trigger=(1, "iteration"))
        trainer.extend(found)
        trainer.extend(lambda trainer: keys.append(sorted(k for k in trainer.observation if k.startswith("main/"))))
        trainer.run()
        comm.barrier()
    return keys[-1]


def test_statistics_of_a_sharded_model_are_complete_after_an_evaluation():
    """An evaluation leaves parameters of the root gathered, which are other objects than those that have gradients."""
    wanted = {
        f"main/{layer}/{name}/{kind}/norm" for layer in (0, 2) for name in ("weight", "bias") for kind in ("data", "grad")
    }
    for keys in on_two_ranks(statistics):
        assert wanted <= set(keys), keys


def saved_alone(comm, out):
    """The words with which the state of a sharded training is refused that each rank would save by itself."""
    net = a_net()
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    updater = StandardUpdater(SerialIterator([(x, t) for x, t in zip(X, T, strict=True)], 8), optimizer, net)
    words = []
    for target, name in ((updater, f"updater-{comm.rank}"), (net, f"model-{comm.rank}"), (net, "model")):
        try:
            serializers.save(f"{out}/{name}", target)
        except ValueError as error:
            words.append(str(error))
    return words


def test_shards_that_are_not_the_whole_are_not_saved(tmp_path):
    """A training whose updater knows of no other ranks; the model alone is gathered, and one rank saves it, in one place."""
    for words in on_two_ranks(saved_alone, str(tmp_path)):
        assert len(words) == 2, words
        assert "this process would write" in words[0]
        assert "give all ranks the same path" in words[1]
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
