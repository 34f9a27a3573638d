"""What virtual ranks exchange: few bytes, in the backward already, and never what changes after that."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.parallel import Communicator
from chainring.training import StandardUpdater, UpdateCallbacks
from rank_pair import on_ranks

UPDATES = 3
ROWS = torch.linspace(-2, 2, 48 * 20).reshape(48, 20) ** 3
LABELS = torch.arange(48) * 7 % 5


class Net(nn.Module):
    """The gradients of its last layer, of more than a megabyte, are there before those of the others."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(20, width), nn.Linear(width, width)

    def forward(self, x, t):
        return cross_entropy(self.last(torch.relu(self.first(x))), t)


class Empty(Net):
    """It has parameters without elements, one of another dtype."""

    def __init__(self, width):
        super().__init__(width)
        self.nothing, self.exact = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x, t):
        return super().forward(x, t) * 0.9 + self.nothing.sum() + self.exact.sum()


class Unused(Net):
    """Some virtual ranks do not go through the last layer."""

    def forward(self, x, t):
        hidden = self.first(x)
        return cross_entropy(self.last(hidden) if torch.rand(()) < 0.5 else hidden, t)


class Reentrant(Net):
    """The last layer is gone through again in a part that is computed again in the backward."""

    def forward(self, x, t):
        hidden = checkpoint(lambda each: linear(each, self.last.weight).tanh(), self.first(x), use_reentrant=True)
        return cross_entropy(self.last(hidden), t)


class Hooked(Net):
    """The gradient of the first layer changes that of the last, of some virtual ranks."""

    def __init__(self, width):
        super().__init__(width)
        self.first.weight.register_post_accumulate_grad_hook(self.change)

    def change(self, _):
        if torch.rand(()) < 0.5:
            self.last.weight.grad.mul_(0.5)


class Replaced(Hooked):
    """The same by another tensor."""

    def change(self, _):
        self.last.weight.grad = self.last.weight.grad * 0.5


def halve(context):
    net = context.updater.get_model("main")
    for parameter in getattr(net, "module", net).parameters():
        parameter.grad.data.mul_(0.5)


def updater_of(comm, net, wrap, virtual_ranks, width=600, **settings):
    """An updater that has started."""
    torch.manual_seed(0)
    model = net(width)
    wrapped = DistributedDataParallel(model) if wrap and comm.size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batches = SerialIterator(TupleDataset(ROWS, LABELS), 12, seed=1)
    updater = StandardUpdater(batches, optimizer, wrapped, comm=comm, virtual_ranks=virtual_ranks, **settings)
    batches.share(comm.rank, comm.size)  # as a Trainer does
    updater.start()
    return updater


def bits_of(comm, net, wrap=False, **settings):
    """The parameters after some updates of three virtual ranks."""
    updater = updater_of(comm, net, wrap, 3, **settings)
    for _ in range(UPDATES):
        updater.update()
    return [parameter.detach().numpy().tobytes() for parameter in updater.get_model("main").parameters()]


CASES = {
    "gradients that are final": (Net, {}),
    "gradients that are final, in DDP": (Net, {"wrap": True}),
    "several micro-batches": (Net, {"accumulate": 2}),
    "parameters without elements": (Empty, {}),
    "a layer that some virtual ranks do not use": (Unused, {}),
    "a layer whose gradient is computed in two parts": (Reentrant, {}),
    "a hook that changes a gradient": (Hooked, {}),
    "a hook that replaces a gradient": (Replaced, {}),
    "a callback that changes gradients": (Net, {"callbacks": UpdateCallbacks(backward_on_finish=halve)}),
}


def bits_of_cases(comm):
    return {name: bits_of(comm, net, **settings) for name, (net, settings) in CASES.items()}


@pytest.fixture(scope="module")
def on_one():
    return bits_of_cases(Communicator())


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def on_several(request):
    return on_ranks(request.param, bits_of_cases)


@pytest.mark.parametrize("name", CASES)
def test_gradients_that_are_sent_in_the_backward_give_the_same_bits(on_one, on_several, name):
    for rank in on_several:
        assert not isinstance(rank, str), rank
        assert rank[name] == on_one[name]


def test_cases_differ_in_what_they_compute(on_one):
    assert len({tuple(bits) for bits in on_one.values()}) == len(CASES) - 1  # DDP computes the same


def order_of_messages(comm):
    """How many messages of an update begin before the first layer's gradient is there, and after it."""
    updater = updater_of(comm, Net, False, comm.size)
    before = []
    updater.get_model("main").first.weight.register_hook(lambda _: before.append(len(sizes)))
    with counted() as sizes:
        updater.update()
    return before[-1], len(sizes) - before[-1]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_the_last_layers_are_sent_before_those_of_the_first_are_there(size):
    assert all(before > 0 for before, _ in on_ranks(size, order_of_messages))


@contextmanager
def counted():
    """The bytes of each message of this rank, as the usual algorithms send it: rings, and each part to its place."""
    world, rank, sizes = dist.get_world_size(), dist.get_rank(), []

    def of_all_to_all(_, tensor, __, parts, **___):
        return sum(size for other, size in enumerate(parts) if other != rank) * tensor.itemsize

    ways = {
        "all_reduce": lambda tensor, *_, **__: 2 * (world - 1) / world * tensor.nbytes,
        "all_gather": lambda _, tensor, *__, **___: (world - 1) * tensor.nbytes,
        "broadcast": lambda tensor, *_, **__: (world - 1) / world * tensor.nbytes,
        "all_to_all_single": of_all_to_all,
    }
    modules = dist, dist.distributed_c10d  # objects are gathered by functions of the second
    originals = {name: getattr(dist, name) for name in ways}

    def counting(name):
        def call(*args, **kwargs):
            sizes.append(ways[name](*args, **kwargs))
            return originals[name](*args, **kwargs)

        return call

    try:
        for module in modules:
            for name in ways:
                setattr(module, name, counting(name))
        yield sizes
    finally:
        for module in modules:
            for name, original in originals.items():
                setattr(module, name, original)


def bytes_sent(comm, counts):
    """The bytes of some updates for each number of virtual ranks, and those of their gradients."""
    found = []
    for count in counts:
        updater = updater_of(comm, Net, False, count, width=200)
        with counted() as sizes:
            for _ in range(UPDATES):
                updater.update()
        found.append(sum(sizes))
    return found, UPDATES * sum(parameter.nbytes for parameter in updater.get_model("main").parameters())


def times_a_ring(size, counts):
    """Bytes of all ranks over those of a ring all-reduce of the gradients, by the number of virtual ranks."""
    told = on_ranks(size, bytes_sent, counts)
    assert not isinstance(told[0], str), told
    ring = 2 * (size - 1) * told[0][1]
    return {count: sum(found[place] for found, _ in told) / ring for place, count in enumerate(counts)}


@pytest.mark.parametrize(("size", "counts"), [(2, [2, 4, 8]), (4, [4, 8])])
def test_a_power_of_two_of_virtual_ranks_is_hardly_more_bytes_than_a_ring(size, counts):
    assert max(times_a_ring(size, counts).values()) <= 1.1


@pytest.mark.parametrize(("size", "counts"), [(2, [3, 5, 6, 7]), (3, [3, 4, 5, 6, 7, 8])])
def test_any_number_of_virtual_ranks_up_to_eight_is_at_most_twice_the_bytes_of_a_ring(size, counts):
    assert max(times_a_ring(size, counts).values()) <= 2
