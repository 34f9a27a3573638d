"""Gradients of a plain model, which ranks send while the backward runs: the same bits as after it."""

import hashlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks
from rank_pair import on_ranks

WIDTH = 600  # a layer has more bytes than the first bucket


class Net(nn.Module):
    """Three layers; ``kind`` is what becomes of them in the forward."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.seldom = nn.Linear(1, 1) if kind == "left out by a rank" else None

    def forward(self, x):
        first, second, third = self.layers
        x = first(x).relu()
        if self.kind == "reached twice":  # a nested backward adds to the gradients of the first layer, and another later
            x = checkpoint(lambda x: first(x).relu(), x, use_reentrant=True)
        x = third(second(x).relu())
        if self.seldom is not None and x.sum() > 0:
            x = x + self.seldom(torch.ones(1))
        return x.square().mean()


def digest_of(comm, kind, out, callbacks=None):
    """What three updates make of the parameters, and of which parameters an optimizer has state."""
    torch.manual_seed(0)
    model = Net(kind)
    if kind == "channels last":
        model.layers[0] = nn.Sequential(nn.Unflatten(1, (6, 10, 10)), nn.Conv2d(6, 6, 1), nn.Flatten())
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    iterator = SerialIterator(TupleDataset(torch.randn(60, WIDTH)), 10, seed=0)
    updater = StandardUpdater(iterator, optimizer, model, comm=comm, callbacks=callbacks, accumulate=2)
    Trainer(updater, (3, "iteration"), out=f"{out}/{kind}").run()
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.blake2b(content).hexdigest(), len(optimizer.state)


def both(comm, kind, out):
    """The digests with and without a callback between the backward and the exchange, which then waits for it."""
    waiting = UpdateCallbacks(backward_on_finish=lambda context: None)
    return digest_of(comm, kind, out), digest_of(comm, kind, out, waiting)


KINDS = ["plain", "reached twice", "left out by a rank", "channels last"]


def all_kinds(comm, out):
    return {kind: both(comm, kind, out) for kind in KINDS}


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """Of three ranks, on which the bits of a sum depend on what is sent together."""
    return on_ranks(3, all_kinds, str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_have_the_same_bits_whenever_they_are_sent(digests, kind):
    """In the backward, or after it; also of parameters whose gradients change again, and of those that a rank leaves out."""
    pairs = [found[kind] for found in digests]
    assert len({one for pair in pairs for one in pair}) == 1


def test_ranks_that_may_be_lost_compute_the_same_bits(digests, tmp_path):
    """They sum weights after the gradients, and not beside them, with what each has to know of the others."""
    assert on_ranks(3, all_kinds, str(tmp_path), survive=True) == digests


def order_of_events(comm, out):
    """In which order the gradients of the layers come, and something is sent, in an update."""
    events, own = [], create_communicator("cpu")
    start_sum = own.start_sum
    own.start_sum = lambda tensor: events.append("sent") or start_sum(tensor)
    model = Net("plain")
    for number, layer in enumerate(model.layers):
        layer.weight.register_hook(lambda gradient, number=number: events.append(number))
    updater = StandardUpdater([torch.ones(6, WIDTH)], torch.optim.SGD(model.parameters(), lr=0.1), model, comm=own)
    Trainer(updater, (1, "iteration"), out=out).run()
    own.close()
    return events


def test_gradients_are_sent_while_the_backward_runs(tmp_path):
    """Those of the last layer before the gradients of the first are computed."""
    for events in on_ranks(2, order_of_events, str(tmp_path)):
        assert events.index("sent") < events.index(0)


def order_of_exchanges(comm, out):
    """In the second update: what is begun, and what is waited for, "gradients" or the "numbers" beside them."""
    events, updates = [], []

    def noted(start):
        def call(tensor):
            what = "gradients" if tensor.numel() > WIDTH else "numbers"
            events.append(("begun", what))
            wait = start(tensor)
            return lambda: events.append(("waited", what)) or wait()

        return call

    comm.start_sum, comm.start_all_gather = noted(comm.start_sum), noted(comm.start_all_gather)
    model = Net("plain")
    updater = StandardUpdater([torch.ones(6, WIDTH)] * 2, torch.optim.SGD(model.parameters(), lr=0.1), model, comm=comm)
    trainer = Trainer(updater, (2, "iteration"), out=out)
    trainer.extend(lambda trainer: updates.append(events[:]) or events.clear(), trigger=(1, "iteration"))
    trainer.run()
    return updates[1]


@pytest.mark.parametrize("size", [2, 3])
def test_no_message_follows_the_gradients_unless_ranks_may_lack_them(tmp_path, size):
    """Of three ranks two may be left, of which one lacks what the other has; of two ranks one is left."""
    for events in on_ranks(size, order_of_exchanges, str(tmp_path), survive=True):
        begun, waited = events.index(("begun", "numbers")), events.index(("waited", "gradients"))
        assert ({"begun", "waited"}, begun < waited) == ({kind for kind, _ in events}, size == 2)
