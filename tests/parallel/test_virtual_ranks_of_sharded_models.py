"""Virtual ranks of sharded models: equal to the last bit to the plain model in one process, on two ranks and on three."""

import math
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from chainring import report
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm, clip_grad_value, extensions
from rank_pair import on_ranks

ROWS = torch.linspace(-2, 2, 26 * 5).reshape(26, 5) ** 3
LABELS = torch.arange(26) * 7 % 3
OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "RAdam", "Adamax", "Adadelta", "ASGD"]


class Net(nn.Module):
    """Dropout, running statistics, and a layer that only some virtual ranks, or none, go through."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(7, 3)
        self.rare = nn.Linear(1, 1)
        self.threshold = 0.5

    def forward(self, x, t):
        y = self.head(self.body(x) if len(x) > 1 else self.body[2](self.body[0](x)))
        loss = nn.functional.cross_entropy(y, t)
        if torch.rand(()) < self.threshold:
            loss = loss + self.rare(y[:, :1]).square().mean()
        report({"loss": loss, "accuracy": (y.argmax(1) == t).float().mean()}, self)
        return loss


class Overflowing(Net):
    """Of some virtual ranks one element of a gradient, which one rank holds, is infinite."""

    def forward(self, x, t):
        loss = super().forward(x, t)
        return loss + self.head.weight[0, 0] * math.inf if torch.rand(()) < 0.1 else loss


class Many(nn.Module):
    """Layers for each optimizer and their part of the loss, on which no others depend; of some tensors one rank has all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 3)) for name in OPTIMIZERS})

    def forward(self, x, t):
        loss = torch.stack([nn.functional.cross_entropy(layer(x), t) for layer in self.layers.values()]).sum()
        report({"loss": loss}, self)
        return loss


class Tied(Net):
    """A layer that shares its weight with another, and weights that are not trained."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(7, 3)
        self.other.weight = self.head.weight
        self.body[0].weight.requires_grad_(False)

    def forward(self, x, t):
        return super().forward(x, t) + self.other(self.body[0](x)).square().mean()


class LowInside(Net):
    """For a policy by which parameters are gathered in another precision, in which there are no running statistics."""

    def forward(self, x, t):
        return nn.functional.cross_entropy(self.head(self.body[3](self.body[0](x))).float(), t)


class InTurn(StandardUpdater):
    """Each optimizer takes a batch of its own and steps before the next one's forward."""

    def update_core(self):
        for name in self.get_all_optimizers():
            with self.autocast():
                loss = self.get_model("main")(*self.next_batch())
            self.backward(loss)
            self.step(name)
            report({"drawn": torch.rand(())})


class Clearing(StandardUpdater):
    """Throws the gradients of a batch away, and adds those of another one twice."""

    def update_core(self):
        self.backward(self.get_model("main")(*self.next_batch()))
        self.get_optimizer("main").zero_grad()
        loss = self.get_model("main")(*self.next_batch())
        self.backward(loss, retain_graph=True)
        self.backward(loss)
        self.step()


class Halves(StandardUpdater):
    """Adds the gradients of so many equal parts of the loss."""

    parts = 2

    def update_core(self):
        loss = self.get_model("main")(*self.next_batch()) / self.parts
        for _ in range(self.parts):
            self.backward(loss, retain_graph=True)
        self.step()


class Whole(Halves):
    parts = 1


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def of_many(net, **settings):
    return {name: _make(name, settings, layer) for name, layer in net.layers.items()}


def made_by(name, **settings):
    return partial(_make, name, settings)


def _make(name, settings, net):
    return getattr(torch.optim, name)(net.parameters(), lr=0.02, **settings)


class Own(torch.optim.SGD):
    """Nobody knows what it does."""


def own(net):
    return Own(net.parameters(), lr=0.1)


def of_two(net):
    return {
        "body": torch.optim.SGD(net.body.parameters(), lr=0.1, momentum=0.9),
        "head": torch.optim.Adam([*net.head.parameters(), *net.rare.parameters()], lr=0.02),
    }


def shard_all(net, mesh):
    fully_shard(net.body[0], mesh=mesh)
    fully_shard(net, mesh=mesh)


def shard_whole(net, mesh):
    fully_shard(net, mesh=mesh)


def shard_a_part(net, mesh):
    fully_shard(net.head, mesh=mesh)


def shard_and_keep(net, mesh):
    fully_shard(net.body[0], mesh=mesh, reshard_after_forward=False)
    fully_shard(net, mesh=mesh, reshard_after_forward=True)


def shard_hybrid(net, mesh):
    from torch.distributed.device_mesh import init_device_mesh

    fully_shard(net, mesh=init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("copies", "shards")))


def shard_low(net, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net.body[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(net, mesh=mesh, mp_policy=policy)


def with_extensions(trainer, net):
    data = TupleDataset(ROWS[:23], LABELS[:23])
    evaluator = extensions.Evaluator(SerialIterator(data, 5, repeat=False, shuffle=False), net)
    trainer.extend(evaluator, trigger=(2, "iteration"))
    trainer.extend(extensions.FailOnNonNumber())
    trainer.extend(extensions.ParameterStatistics(net), trigger=(2, "iteration"))
    trainer.extend(extensions.ExponentialMovingAverage(net, decay=0.9))


def draw_a_factor(context):
    """What is drawn in a step is the same on all ranks, whichever virtual ranks these have computed before."""
    factor = float(torch.rand(()))
    for parameter in context.updater.get_model("main").parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def case(virtual_ranks=4, *, net=Net, make=StandardUpdater, optimizer=adam, shard=shard_all, threshold=0.5, **settings):
    return {
        "make_net": net,
        "virtual_ranks": virtual_ranks,
        "make": make,
        "optimizer": optimizer,
        "shard": shard,
        "threshold": threshold,
        "settings": settings,
    }


CASES = {
    "four virtual ranks, of which the last batch leaves two without rows": case(),
    "virtual ranks that do not divide by the ranks": case(5),
    "a part of the model": case(shard=shard_a_part),
    "parameters that no virtual rank has touched": case(threshold=0.0),
    "several micro-batches": case(accumulate=2),
    "autocast": case(precision="bf16"),
    "a loss scaler": case(precision="fp16"),
    "a loss scaler, and a gradient that overflows on one rank": case(net=Overflowing, precision="fp16"),
    "two optimizers that step together, and what is drawn for them": case(
        optimizer=of_two, callbacks=UpdateCallbacks(update_on_start=draw_a_factor)
    ),
    "two optimizers in an update_core of one's own": case(5, make=InTurn, optimizer=of_two),
    "an update_core of one's own with several micro-batches": case(make=InTurn, optimizer=of_two, accumulate=2),
}
CASES |= {
    "hybrid sharding": case(shard=shard_hybrid),
    "parameters that stay gathered after the forward": case(5, shard=shard_and_keep),
    "tied and frozen parameters": case(net=Tied),
    "gradients that update_core clears": case(5, make=Clearing),
    "gradients that update_core clears, in several micro-batches": case(make=Clearing, accumulate=2),
    "evaluation, statistics, checks and an average": case(3) | {"extend": with_extensions},
}
CLIPS = {
    "norm": clip_grad_norm(0.3),
    "sum of magnitudes": clip_grad_norm(0.5, 1.0),
    "largest magnitude": clip_grad_norm(0.05, math.inf),
    "value": clip_grad_value(0.02),
}
for how, clip in CLIPS.items():
    callbacks = UpdateCallbacks(update_on_start=clip)
    CASES |= {
        f"clipping by {how}": case(5, callbacks=callbacks),
        f"clipping by {how}, of a part": case(callbacks=callbacks, shard=shard_a_part),
    }
clip_first = UpdateCallbacks(update_on_start=clip_grad_norm(0.3))
CASES["clipping of two optimizers in turn"] = case(3, make=InTurn, optimizer=of_two, callbacks=clip_first)
CASES["clipping with a loss scaler"] = case(3, precision="fp16", callbacks=clip_first)
CASES["every optimizer whose elements are on their own"] = case(3, net=Many, optimizer=of_many, shard=shard_whole)
CASES["these, of lists of tensors"] = case(3, net=Many, optimizer=partial(of_many, foreach=True), shard=shard_whole)


def trained(comm, out, names):
    """For each case the bits of what three updates make of a model; sharded with a communicator, and plain without."""
    return {name: bits_of(*train(comm, f"{out}/{name}", **CASES[name])) for name in names}


def train(
    comm,
    out,
    virtual_ranks,
    make_net,
    make,
    optimizer,
    shard,
    threshold,
    settings,
    updates=3,
    saves=False,
    seed=3,
    extend=None,
):
    torch.manual_seed(seed)
    net = make_net()
    net.threshold = threshold
    if comm is not None:
        from torch.distributed.device_mesh import init_device_mesh

        shard(net, init_device_mesh("cpu", (comm.size,)))
    iterator = SerialIterator(
        TupleDataset(ROWS, LABELS), 12, seed=1, repeat=make is not StandardUpdater or "accumulate" in settings
    )
    updater = make(iterator, optimizer(net), net, comm=comm, virtual_ranks=virtual_ranks, **settings)
    trainer = Trainer(updater, (updates, "iteration"), out=out)
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    if saves:
        trainer.extend(extensions.snapshot(autoload=True), trigger=(2, "iteration"))
    if extend is not None:
        extend(trainer, net)
    trainer.run()
    return net, updater, trainer.get_extension("LogReport").log


def bits_of(net, updater, rows):
    """Parameters, buffers, the state of optimizers and rows of the log; tensors as bytes."""
    tensors = dict(net.state_dict())
    for name, optimizer in updater.get_all_optimizers().items():
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{name} {index} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in tensors.items()}
    logged = [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]
    return {name: tensor.detach().numpy().tobytes() for name, tensor in whole.items()}, logged


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(None, tmp_path_factory.mktemp("plain"), CASES)


@pytest.fixture(scope="module", params=[2, 3])
def sharded(request, tmp_path_factory):
    return on_ranks(request.param, trained, str(tmp_path_factory.mktemp("sharded")), list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_has_the_bits_of_the_plain_one(plain, sharded, name):
    """Of parameters, buffers, optimizer state and log rows, on every rank."""
    for rank in sharded:
        assert isinstance(rank, dict), rank
        assert rank[name] == plain[name]


RESUMED = {
    "a loss scaler": {**CASES["a loss scaler"], "virtual_ranks": 5},
    "two optimizers in turn": CASES["clipping of two optimizers in turn"],
    "several micro-batches": CASES["several micro-batches"],
}


def interrupted(comm, out):
    """Two updates of each case, of which snapshots are taken."""
    for name, settings in RESUMED.items():
        train(comm, f"{out}/{name}", **settings, updates=2, saves=True)


def resumed(comm, out, begun):
    """The bits after another update, in copies of the directories of the first two; alone they would be others."""
    if comm is None or comm.rank == 0:
        shutil.copytree(begun, out, dirs_exist_ok=True)
    if comm is not None:
        comm.barrier()
    return {
        name: bits_of(*train(comm, f"{out}/{name}", **settings, saves=True, seed=4)) for name, settings in RESUMED.items()
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    return {name: bits_of(*train(None, out / name, **settings)) for name, settings in RESUMED.items()}


@pytest.fixture(scope="module")
def after_the_resume(tmp_path_factory):
    """By the ranks before and after: what each rank ends with; one rank has the plain model."""
    plain, of_two = str(tmp_path_factory.mktemp("plain")), str(tmp_path_factory.mktemp("two"))
    interrupted(None, plain)
    assert on_ranks(2, interrupted, of_two) == [None, None]
    copies = [str(tmp_path_factory.mktemp("copy")) for _ in range(3)]
    return {
        "from one rank to two": on_ranks(2, resumed, copies[0], plain),
        "from two ranks to three": on_ranks(3, resumed, copies[1], of_two),
        "from two ranks to one": [resumed(None, copies[2], of_two)],
    }


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("move", ["from one rank to two", "from two ranks to three", "from two ranks to one"])
def test_a_run_that_goes_on_with_other_ranks_has_the_bits_of_the_uninterrupted_one(
    uninterrupted, after_the_resume, move, name
):
    """A snapshot of the plain model goes on sharded, one of shards goes on in others, and in the plain model."""
    for rank in after_the_resume[move]:
        assert isinstance(rank, dict), rank
        assert rank[name] == uninterrupted[name]


low = partial(case, 3, net=LowInside, shard=shard_low)
LOW = low(), low(accumulate=2), low(make=Whole), low(make=Halves)


def trained_low(comm, out):
    return [bits_of(*train(comm, f"{out}/{index}", **settings)) for index, settings in enumerate(LOW)]


def test_sharded_models_in_mixed_precision_have_the_same_bits_on_one_rank_two_and_three(tmp_path):
    """A policy decides in which precision a rank computes, so a plain model has others. Halves of a loss add up to it."""
    found = [rank for size in (1, 2, 3) for rank in on_ranks(size, trained_low, str(tmp_path / str(size)))]
    assert all(isinstance(rank, list) for rank in found), found
    assert all(rank == found[0] for rank in found)
    assert found[0][2][0] == found[0][3][0]


REFUSED = {
    "fused": ("with virtual_ranks each rank .* has fused=True.*: take foreach=True", made_by("Adam", fused=True)),
    "norms": ("is Adafactor, which may .*: take one of torch.optim's SGD, Adam", made_by("Adafactor")),
    "one's own": ("is Own, which may use more than one element.* wrap it in DistributedDataParallel", own),
    "low precision": ('steps in torch.bfloat16 on the host.* precision="bf16"', adam),
}


def refused(comm, names):
    return {name: refusal(comm, *REFUSED[name]) for name in names}


def refusal(comm, words, optimizer):
    net = Net().to(torch.bfloat16 if "bfloat16" in words else torch.float32)
    fully_shard(net)
    with pytest.raises(ValueError, match=words):
        StandardUpdater(SerialIterator([0.0] * 4, 4), optimizer(net), net, comm=comm, virtual_ranks=2)
    StandardUpdater(SerialIterator([0.0] * 4, 4), optimizer(net), net, comm=comm)
    return "refused"


@pytest.fixture(scope="module")
def refusals():
    return on_ranks(2, refused, list(REFUSED))


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_whose_bits_depend_on_the_shards_is_refused(refusals, name):
    """Where the updater is made, and only with virtual ranks; the words say what to take instead."""
    for rank in refusals:
        assert isinstance(rank, dict), rank
        assert rank[name] == "refused"
