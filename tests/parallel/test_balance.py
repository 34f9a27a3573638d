"""Virtual ranks are dealt by the speed of the ranks: the slowest takes few, and no bit depends on it."""

import itertools
import random
import time

import pytest
import torch
from torch import nn

from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import Deal
from chainring.datasets import TupleDataset
from chainring.iterators import Iterator, LoaderIterator, MultiprocessIterator, SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from chainring.training.updaters._balance import Balance, fastest
from rank_pair import on_ranks, on_two_ranks

COUNT, ROWS, ITERATIONS = 8, 48, 30


@pytest.mark.parametrize("seconds", [(1, 1), (1, 3), (3, 1), (1, 1, 2), (1, 100), (2, 3, 5, 7)])
@pytest.mark.parametrize("count", [4, 7, 8])
def test_no_other_deal_is_faster(seconds, count):
    """Of all contiguous deals in which each rank has one or more."""

    def slowest(deal):
        return max(len(block) * each for block, each in zip(deal.blocks, seconds, strict=True))

    cuts = itertools.combinations(range(1, count), len(seconds) - 1)
    best = min(slowest(Deal((0, *bounds, count))) for bounds in cuts)
    found = fastest(seconds, count)
    assert slowest(found) == best
    assert (found.count, min(map(len, found.blocks)) >= 1) == (count, True)


class Slow(nn.Module):
    """A model that takes a number of milliseconds for each call, and counts the calls."""

    def __init__(self, milliseconds):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.seconds, self.calls = milliseconds / 1000, []

    def forward(self, x, t):
        time.sleep(self.seconds)
        self.calls.append(len(x))
        return nn.functional.cross_entropy(self.net(x), t)


class TwoSteps(StandardUpdater):
    """An ``update_core`` that continues after a step, and takes two batches."""

    def update_core(self):
        for _ in range(2):
            loss = self.get_model("main")(*self.next_batch())
            self.backward(loss)
            self.step()


class Around(Iterator):
    """Returns the batches of another iterator; the class below tells that of each deal, and the last keeps one ahead."""

    serves_virtual_ranks = True

    def __init__(self, inner):
        self.inner, self.batch_size = inner, inner.batch_size

    def use_virtual_ranks(self, count):
        super().use_virtual_ranks(count)
        self.inner.use_virtual_ranks(count)

    def share(self, rank, size):
        super().share(rank, size)
        self.inner.share(rank, size)

    def __next__(self):
        return next(self.inner)

    def serialize(self, serializer):
        serializer.visit("inner", self.inner)


class Told(Around):
    serves_virtual_ranks = True

    def __next__(self):
        self.inner.deal = self.deal
        return super().__next__()


class Ahead(Told):
    serves_virtual_ranks = True

    def __next__(self):
        batch = getattr(self, "batch", None) or super().__next__()
        self.batch = super().__next__()
        return batch


def train(comm, out, balance, milliseconds, kind="serial", cls=StandardUpdater, iterations=ITERATIONS, **settings):
    """The calls in the last ten updates, and the bits of everything that the run has made."""
    torch.manual_seed(3)
    data = TupleDataset(torch.randn(ROWS, 5), torch.randint(0, 3, (ROWS,)))
    iterators = {
        "serial": lambda: SerialIterator(data, 16, seed=5),
        "processes": lambda: MultiprocessIterator(data, 16, seed=5, n_processes=2),
        "loader": lambda: LoaderIterator(torch.utils.data.DataLoader(data, 16)),
        "around": lambda: Around(SerialIterator(data, 16, seed=5)),
        "told": lambda: Told(SerialIterator(data, 16, seed=5)),
        "ahead": lambda: Ahead(SerialIterator(data, 16, seed=5)),
    }
    model = Slow(milliseconds[comm.rank])
    optimizer = torch.optim.Adam(model.parameters())
    updater = cls(iterators[kind](), optimizer, model, comm=comm, virtual_ranks=COUNT, balance=balance, **settings)
    trainer = Trainer(updater, (iterations, "iteration"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    counts = []
    trainer.extend(lambda trainer: counts.append(len(model.calls)), trigger=(1, "iteration"))
    trainer.run()
    rows = [
        {key: value for key, value in row.items() if key != "elapsed_time"} for row in trainer.get_extension("LogReport").log
    ]
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return counts[-1] - counts[-11], [value.numpy().tobytes() for value in tensors], rows if comm.rank == 0 else None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("serial", {}),
        ("serial", {"cls": TwoSteps}),
        ("serial", {"accumulate": 2}),
        ("processes", {}),
        ("loader", {}),
        ("told", {}),
        ("serial", {"audit": 2}),
    ],
    ids=["plain", "two steps", "accumulate", "processes", "loader", "an iterator around another", "audit"],
)
def test_a_slow_rank_computes_fewer_virtual_ranks_and_no_bit_differs(tmp_path, kind, settings):
    """It has fewer than half soon, and the other the rest; parameters, moments and rows are the same."""
    arguments = (kind, settings.pop("cls", StandardUpdater)), settings
    even = on_two_ranks(_train, tmp_path / "even", "even", (0, 0), *arguments)
    updates = 10 * max(settings.get("accumulate", 1), 2 if arguments[0][1] is TwoSteps else 1)
    every, audited = COUNT * updates, settings.get("audit", 0) * updates
    for attempt in range(3):  # a machine that stands still makes the other rank slow
        found = on_two_ranks(_train, tmp_path / f"speed-{attempt}", "speed", (30, 0), *arguments)
        slow, fast = (calls for calls, *_ in found)
        assert slow + fast == every + audited
        assert [rest for _, *rest in found] == [rest for _, *rest in even]
        if slow <= 3 * updates + audited:
            break
    assert slow <= 3 * updates + audited
    assert all(abs(calls - every // 2) <= audited for calls, *_ in even)


def _train(comm, out, balance, milliseconds, kind_and_class, settings):
    return train(comm, out, balance, milliseconds, *kind_and_class, **settings)


@pytest.mark.parametrize("kind", ["around", "ahead"])
def test_an_iterator_that_returns_the_rows_of_an_earlier_deal_is_refused(tmp_path, kind):
    """One around another that does not tell it the deal, and one that has cut a batch before the deal was made."""
    errors = on_two_ranks(_train, tmp_path, "speed", (30, 0), (kind, StandardUpdater), {"iterations": 1000})
    words = f"iterator 'main' ({kind.title()}) has returned [8, 8] rows to the ranks, of which"
    assert [(words in error, "self.take_share(batch)" in error) for error in errors] == [(True, True)] * 2


def test_of_three_ranks_the_fast_one_has_most(tmp_path):
    """The fast rank has more of eight virtual ranks than either of the others."""
    for attempt in range(3):  # as above
        found = on_ranks(3, train, tmp_path / str(attempt), "speed", (40, 40, 8))
        slow, other, fast = (calls for calls, *_ in found)
        assert slow + other + fast == 10 * COUNT
        if max(slow, other) < fast:
            break
    assert max(slow, other) < fast


class Layers(nn.Module):
    """Two layers, each larger than the first bucket of gradients, which note when their gradients come."""

    def __init__(self, events):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(600, 600) for _ in range(2)])
        for number, layer in enumerate(self.layers):
            layer.weight.register_hook(lambda gradient, number=number: events.append(number))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def order_of_events(comm, out):
    """In which order, in each of some updates, the gradients of the layers come and something is sent."""
    events, updates, start_sum = [], [], comm.start_sum
    comm.start_sum = lambda tensor: events.append("sent") or start_sum(tensor)
    model = Layers(events)
    data = SerialIterator(torch.ones(16, 600), 8, shuffle=False)
    updater = StandardUpdater(
        data, torch.optim.SGD(model.parameters(), lr=0.1), model, comm=comm, virtual_ranks=4, balance="speed"
    )
    trainer = Trainer(updater, (8, "iteration"), out=str(out))
    trainer.extend(lambda trainer: updates.append(events[:]) or events.clear(), trigger=(1, "iteration"))
    trainer.run()
    return updates


def test_gradients_are_sent_in_the_backward_also_while_ranks_are_measured(tmp_path):
    """Of the last virtual rank of each, which is not measured, in five of eight updates."""
    for updates in on_two_ranks(order_of_events, tmp_path):
        assert [events[:4] for events in updates] == [[1, 0, 1, "sent"]] * 8


class Measured(Communicator):
    """Two ranks, of which each measurement is told: seconds for a virtual rank."""

    size = 2

    def __init__(self, measurements):
        self.measurements = iter(measurements)

    def gather_object(self, obj):
        return list(next(self.measurements))


def deals_of(measurements, updates, count=COUNT):
    """The deals after each of so many updates, by which the next is computed."""
    balance, deal, deals = Balance(Measured(measurements), torch.device("cpu"), True), Deal.even(2, count), []
    for _ in range(updates + 1):
        deal = balance.begin(deal)
        with balance.computing():
            pass
        balance.end()
        deals.append(deal.bounds)
    del deals[0]
    return deals


def test_noise_and_single_delays_move_nothing():
    """Times that differ by up to a fifth from measurement to measurement, and now and then tenfold."""
    draw = random.Random(0)
    noise = [[draw.uniform(0.9, 1.1), draw.uniform(0.9, 1.1)] for _ in range(200)]
    for late in range(5, 200, 20):
        noise[late][late % 2] *= 10
    assert set(deals_of(noise, 1000)) == {(0, 4, 8)}


def test_ranks_that_are_now_and_then_interrupted_stay_as_they_are():
    """On a machine that others use, either of two equal ranks takes twice the time in two of five measurements."""
    draw = random.Random(0)
    noise = [[1 + (draw.random() < 0.4), 1 + (draw.random() < 0.4)] for _ in range(200)]
    assert set(deals_of(noise, 1000)) == {(0, 4, 8)}


def test_a_change_of_speed_is_followed_within_fifty_updates():
    """Speeds of 1 : 3, and after a hundred updates of 3 : 1."""
    changed = itertools.chain([[3, 1]] * 16, itertools.repeat([1, 3]))
    deals = deals_of(changed, 150)
    assert deals[:8].index((0, 2, 8)) < 8
    assert deals[49] == deals[99] == (0, 2, 8)
    assert deals[149] == (0, 6, 8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"balance": "speed"}, "give virtual_ranks too"),
        ({"balance": "fast", "virtual_ranks": 2}, '"even" or "speed", got \'fast\''),
    ],
)
def test_a_deal_that_cannot_be_made_is_refused_at_construction(settings, words):
    model = Slow(0)
    with pytest.raises(ValueError, match=words):
        StandardUpdater(None, torch.optim.SGD(model.parameters(), 0.1), model, **settings)


def test_one_process_has_nothing_to_deal(tmp_path):
    """The setting changes nothing there."""
    speed, even = (train(Communicator(), tmp_path / way, way, (0,)) for way in ("speed", "even"))
    assert speed[1:] == even[1:]
