"""Ranks that compute one model together, on the same rows: what they have alike, and what is refused where they have not."""

import json
import re
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from chainring.iterators import FunctionIterator, SerialIterator
from chainring.parallel import create_communicator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm
from chainring.training.extensions import LogReport
from rank_pair import on_ranks

WORDS, UNITS, LENGTH, UPDATES = 16, 8, 8, 5
TOKENS = torch.arange(16 * (LENGTH + 1)).reshape(16, LENGTH + 1) ** 2 % 17 % WORDS


class Net(nn.Module):
    """Predicts each token from those before it; with a mesh, each of its ranks computes on a part of the sequence."""

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(3)
        self.mesh = mesh
        self.embedding, self.norm = nn.Embedding(WORDS, UNITS), nn.RMSNorm(UNITS)
        self.queries, self.keys = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)
        self.scores = nn.Linear(UNITS, WORDS, bias=False)

    def forward(self, tokens):
        given, wanted, begin = tokens[:, :-1], tokens[:, 1:], 0
        if self.mesh is not None:
            given, wanted = (part.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()] for part in (given, wanted))
            begin = given.shape[1] * self.mesh.get_local_rank()
        x = self.embedding(given)
        keys = self._gathered(self.keys(x))
        mask = torch.arange(keys.shape[1]) <= begin + torch.arange(given.shape[1])[:, None]
        x = x + scaled_dot_product_attention(self.queries(x), keys, keys, attn_mask=mask)
        return self._total(cross_entropy(self.scores(self.norm(x)).flatten(0, 1), wanted.flatten(), reduction="sum"), tokens)

    def _gathered(self, part):
        if self.mesh is None:
            return part
        whole = DTensor.from_local(part, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def _total(self, part, tokens):
        """The loss of all parts, of which each rank has the gradient of its own."""
        loss = part / tokens[:, 1:].numel()
        if self.mesh is None:
            return loss
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return loss + (total - loss.detach())


class Separate(Net):
    """Each rank reports the mean of its own part."""

    def _total(self, part, tokens):
        return part / tokens[:, 1:].numel() * self.mesh.size()


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().tolist()


def rows_of(trainer, world):
    """Run it, and return the losses in its log, on every rank."""
    with tempfile.TemporaryDirectory() as out:
        trainer.out = out if world is None else world.broadcast_object(out)
        trainer.extend(LogReport(trigger=(1, "iteration")))
        trainer.run()
        rows = None
        if world is None or world.is_main:
            with open(f"{out}/log") as file:
                rows = [row["main/loss"] for row in json.load(file)]
        return rows if world is None else world.broadcast_object(rows)


def an_updater(net, comm=None, iterator=None, **callbacks):
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    iterator = SerialIterator(list(TOKENS), 8, seed=1) if iterator is None else iterator
    callbacks = UpdateCallbacks(**{"update_on_start": clip_grad_norm(1.0), **callbacks})
    return StandardUpdater(iterator, optimizer, net, comm=comm, callbacks=callbacks)


def trained(net, world=None, comm=None, **callbacks):
    """The losses of each update, and the parameters after all."""
    losses = rows_of(Trainer(an_updater(net, comm, **callbacks), (UPDATES, "iteration")), world)
    return losses, [whole(parameter) for parameter in net.parameters()]


def a_mesh(shape, second):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", second))


def assert_follow(net, ranks):
    """Of each rank, losses and parameters within 1e-5 of those of one process."""
    losses, parameters = trained(net)
    for rank in ranks:
        assert not isinstance(rank, str), rank
        assert rank[0] == pytest.approx(losses, abs=1e-5)
        for one, other in zip(rank[1], parameters, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-5)


class Bigram(Net):
    """Predicts each token from the one before it."""

    def forward(self, tokens):
        scores = self.scores(self.norm(self.embedding(tokens[:, :-1])))
        return cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def by_sequence(world, is_lost_in_parts):
    """Norms work on parts of the sequence, so that their gradients are parts of a sum; the loss may be a DTensor, too."""
    mesh, net, placed = a_mesh((1, 2), "tp"), Bigram(), []
    scores = (
        {"output_layouts": Shard(-1), "use_local_output": False} if is_lost_in_parts else {"output_layouts": Replicate()}
    )
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "scores": ColwiseParallel(input_layouts=Shard(1), **scores),
    }
    parallelize_module(net, mesh["tp"], plan)

    def note(context):
        used = [parameter for parameter in net.parameters() if parameter.grad is not None]
        placed.append([getattr(parameter.grad, "placements", None) == parameter.placements for parameter in used])

    with loss_parallel():
        callbacks = [note, clip_grad_norm(1.0)]
        losses, parameters = trained(net, world, create_communicator(mesh=mesh["dp"]), update_on_start=callbacks)
    return losses, parameters, placed


@pytest.mark.parametrize("is_lost_in_parts", [False, True])
def test_norms_on_parts_of_a_sequence_follow_one_process(is_lost_in_parts):
    """Callbacks get gradients placed as their parameters are, also where no other rank shares the data."""
    ranks = on_ranks(2, by_sequence, is_lost_in_parts)
    assert_follow(Bigram(), ranks)
    assert [placed for _, _, placed in ranks] == [[[True] * 3] * UPDATES] * 2


def in_parts(world, shape, is_sharded):
    """Each rank computes on a part of the sequence; gradients are added up over those that see the same rows."""
    mesh = a_mesh(shape, "cp")
    net = Net(mesh["cp"])
    if is_sharded:
        fully_shard(net, mesh=mesh["dp"])

    def add_up(context):
        for parameter in net.parameters():
            gradient = parameter.grad.to_local() if is_sharded else parameter.grad
            dist.all_reduce(gradient, group=mesh["cp"].get_group())

    return trained(net, world, create_communicator(mesh=mesh["dp"]), comm_on_start=add_up)


@pytest.mark.parametrize(("shape", "is_sharded"), [((1, 2), False), ((2, 2), True)])
def test_parts_of_a_sequence_follow_one_process_where_gradients_are_added_up(shape, is_sharded):
    assert_follow(Net(), on_ranks(shape[0] * shape[1], in_parts, shape, is_sharded))


def refusals(world):
    """What is said of ranks that differ in what they should have alike, and whether parameters have changed before."""
    mesh = a_mesh((2, 2), "cp")
    comm = create_communicator(mesh=mesh["dp"])
    rows = FunctionIterator(lambda index: TOKENS[world.rank % 2 :][:8])
    calls = {
        "plain": lambda: an_updater(Net(mesh["cp"]), comm),
        "losses": lambda: an_updater(Separate(mesh["cp"]), comm, comm_on_start=add_up_of(mesh["cp"])),
        "rows": lambda: an_updater(Bigram(), comm, rows),
        "sharded over both": lambda: an_updater(fully_shard(Net(mesh["cp"]), mesh=mesh._flatten()), comm),
    }
    found = {}
    for name, call in calls.items():
        updater = None
        try:
            updater = call()
            updater.update()
        except (ValueError, RuntimeError) as error:
            is_unchanged = updater is None or all(
                map(torch.equal, updater.get_model("main").parameters(), Net().parameters())
            )
            found[name] = (str(error), is_unchanged)
    return found


def add_up_of(mesh):
    """A callback that takes the mean of gradients over a mesh."""

    def add_up(context):
        for parameter in context.updater.get_model("main").parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group())
            parameter.grad /= mesh.size()

    return add_up


def test_ranks_of_one_model_that_differ_are_refused_before_the_first_step():
    """Parts of a sequence without an exchange of gradients, or of losses; other rows; shards over both kinds of ranks."""
    for found in on_ranks(4, refusals):
        assert not isinstance(found, str), found
        assert all(is_unchanged for _, is_unchanged in found.values())
        words = {name: text for name, (text, _) in found.items()}
        assert re.search("ranks 0 and 1 compute a model together.* a sum over the gradient of 'embedding", words["plain"])
        assert "UpdateCallbacks(comm_on_start=...)" in words["plain"]
        assert "the loss is" in words["losses"]
        assert "give both the same rows" in words["rows"]
        assert 'fully_shard mesh["dp"]' in words["sharded over both"]


class Pipelined(StandardUpdater):
    """Each rank computes a stage of the model."""

    schedule = None

    def update_core(self):
        x, t = self.next_batch()
        if self.comm.world.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=t, losses=[])
        self.get_optimizer("main").step()


def pipelines(world):
    """What is said of stages of one form, on a mesh and without one; and of stages that have names of their own."""
    mesh, words = a_mesh((1, 2), "pp"), []
    for name, comm in (("stage", world), ("stage", create_communicator(mesh=mesh["dp"])), (f"stage{world.rank}", world)):
        stage = nn.Sequential()
        stage.add_module(name, nn.Linear(2, 2))
        optimizer = torch.optim.SGD(stage.parameters(), 0.1)
        iterator = SerialIterator(list(zip(torch.ones(8, 2), torch.zeros(8, 2), strict=True)), 4, seed=1)
        updater = Pipelined(iterator, optimizer, stage, comm=comm)
        pipeline = PipelineStage(stage, world.rank, 2, torch.device("cpu"))
        updater.schedule = ScheduleGPipe(pipeline, 2, loss_fn=nn.functional.mse_loss)
        try:
            if name == "stage":
                updater.update()
            else:
                rows_of(Trainer(updater, (2, "iteration")), world)
        except (ValueError, RuntimeError) as error:
            words.append(str(error))
    return words


def test_the_stages_of_a_pipeline_are_refused():
    """By torch.distributed.pipelining; on a mesh whose ranks have the same rows, too."""
    for words in on_ranks(2, pipelines):
        assert isinstance(words, list), words
        assert "the 2 ranks have not exchanged its gradients, or compared them: write self.backward(loss)" in words[0]
        assert words[1] == words[0]
        assert "the stages of a pipeline, of which each rank has one, are not supported" in words[2]


class Idle(StandardUpdater):
    """Changes nothing."""

    def update_core(self):
        self.next_batch()


def idle(world):
    mesh, net = a_mesh((1, 2), "tp"), Bigram()
    parallelize_module(net, mesh["tp"], {"scores": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    updater = Idle(SerialIterator(list(TOKENS), 8), optimizer, net, comm=create_communicator(mesh=mesh["dp"]))
    updater.update()
    return updater.iteration


def test_an_update_of_ones_own_may_pass_over_a_step():
    """Ranks have divided the parameters, and have not changed them."""
    assert on_ranks(2, idle) == [1, 1]


def a_plan():
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "scores": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def tied_net():
    net = Bigram()
    net.scores.weight = net.embedding.weight
    return net


def tied(world, shape):
    """The weight is tied again when the model has been made parallel."""
    mesh, net = a_mesh(shape, "tp"), tied_net()
    parallelize_module(net, mesh["tp"], a_plan())
    net.scores.weight = net.embedding.weight
    if shape[0] > 1:
        fully_shard(net, mesh=mesh["dp"])
    return trained(net, world, create_communicator(mesh=mesh["dp"]))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_weights_that_are_tied_on_a_mesh_follow_one_process(shape):
    assert_follow(tied_net(), on_ranks(shape[0] * shape[1], tied, shape))


def untied(world):
    """What is said at the start of weights that were tied before the model was made parallel."""
    mesh, net = a_mesh((1, 2), "tp"), tied_net()
    parallelize_module(net, mesh["tp"], a_plan())
    with pytest.warns(UserWarning, match="parallelize_module has untied them") as found:
        an_updater(net, create_communicator(mesh=mesh["dp"])).start()
    return [str(each.message) for each in found]


def test_weights_that_have_been_untied_are_named():
    for warned in on_ranks(2, untied):
        assert len(warned) == 1
        assert "'embedding.weight' and 'scores.weight' are equal but not shared" in warned[0]
