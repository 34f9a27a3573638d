"""Runs of audited virtual ranks in which a device computes wrong: a bit is flipped on one rank, once or each time."""

import shutil
import warnings
from functools import partial

import torch
from torch import nn

from chainring.converters import concat_examples
from chainring.datasets import TupleDataset
from chainring.iterators import LoaderIterator, MultiprocessIterator, SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions

COUNT, BATCH, ROWS, ITERATIONS = 8, 32, 64, 7
PLACES = ("gradient", "activation", "batch", "parameter", "moment")


def flip(tensor, index=1, bit=20):
    """Flip one bit of one number, in memory and so that PyTorch does not count it."""
    tensor.detach().view(-1).view(torch.uint8).numpy()[4 * index + bit // 8] ^= 1 << bit % 8


class Fault:
    """A bit that is flipped on one rank when it computes one virtual rank of one update."""

    def __init__(self, place, rank, iteration, number, lasts=False, index=1, bit=20):
        self.place, self.rank, self.iteration, self.number, self.lasts = place, rank, iteration, number, lasts
        self.flip = partial(flip, index=index, bit=bit)
        self.times = 0

    def comes(self, place, comm, iteration, number):
        """True where a bit is flipped now."""
        rank = 0 if comm is None else comm.rank
        here = (self.place, self.rank, self.iteration, self.number) == (place, rank, iteration, number)
        if not here or (self.times and not self.lasts):
            return False
        self.times += 1
        return True


class Net(nn.Module):
    """Dropout, running statistics, and a first column that tells which row of the data a row is."""

    def __init__(self, comes=lambda place, number: None, has_norm=True):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8) if has_norm else nn.Tanh(), nn.Linear(8, 3)
        self.comes, self.number = comes, None
        self.last.weight.register_hook(self._spoil)

    def forward(self, x, t):
        self.number = int(x[0, 0]) % COUNT
        if spoil := self.comes("parameter", self.number):
            spoil(self.first.weight)
        h = nn.functional.dropout(self.norm(self.first(x[:, 1:])), 0.3)
        if spoil := self.comes("activation", self.number):
            spoil(h)
        return nn.functional.cross_entropy(self.last(h), t)

    def _spoil(self, gradient):
        if spoil := self.comes("gradient", self.number):
            gradient = gradient.clone()
            spoil(gradient)
        return gradient


class Around(SerialIterator):
    """An iterator that returns what another one does, which it does not tell of audits."""

    serves_virtual_ranks = True

    def share(self, rank, size):
        super().share(rank, size)
        self.inner = SerialIterator(self.dataset, self.batch_size, shuffle=False)
        self.inner.use_virtual_ranks(self.virtual_ranks)
        self.inner.share(rank, size)

    def __next__(self):
        return next(self.inner)


class OwnCore(StandardUpdater):
    """The default update, as the user's own."""

    def update_core(self):
        self.backward(self.get_model("main")(*self.next_batch()))
        self.step()


def iterator_of(kind, rows):
    """An iterator over rows whose first number is their index, in that order."""
    torch.manual_seed(3)
    x, t = torch.randn(rows, 6), torch.randint(0, 3, (rows,))
    x[:, 0] = torch.arange(rows)
    data = TupleDataset(x, t)
    return {
        "serial": lambda: SerialIterator(data, BATCH, shuffle=False),
        "around": lambda: Around(data, BATCH, shuffle=False),
        "once": lambda: SerialIterator(data, BATCH, shuffle=False, repeat=False),
        "processes": lambda: MultiprocessIterator(data, BATCH, shuffle=False, n_processes=2),
        "loader": lambda: LoaderIterator(torch.utils.data.DataLoader(data, BATCH)),
    }[kind]()


def train(
    comm,
    out,
    *faults,
    kind="serial",
    rows=ROWS,
    cls=StandardUpdater,
    snapshots=None,
    stop=ITERATIONS,
    has_norm=True,
    **settings,
):
    """All bits that a run has made, what it has warned of, and the error that has ended it."""
    faults = [Fault(*fault) if isinstance(fault, tuple) else fault for fault in faults]
    made = {}

    def comes(place, number):
        """What flips a bit now, if a fault is planted here."""
        iteration = made["updater"].iteration
        return next((fault.flip for fault in faults if fault.comes(place, comm, iteration, number)), None)

    def convert(batch, device):
        x, t = concat_examples(batch, device)
        if spoil := comes("batch", int(x[0, 0]) % COUNT):
            x = x.clone()
            spoil(x)
        return x, t

    iterator = iterator_of(kind, rows)
    torch.manual_seed(4)
    model = Net(comes, has_norm)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    updater = made["updater"] = cls(
        iterator, optimizer, model, converter=convert, comm=comm, virtual_ranks=COUNT, **settings
    )
    trainer = Trainer(updater, (stop, "iteration"), out=str(out))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.Recorder((1, "iteration")))
    if snapshots is not None:
        trainer.extend(extensions.snapshot(), trigger=(snapshots, "iteration"))

    def spoil_moment(trainer):
        if spoil := comes("moment", -1):
            spoil(optimizer.state[model.first.weight]["exp_avg"])

    trainer.extend(spoil_moment, trigger=(1, "iteration"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        try:
            trainer.run()
        except RuntimeError as reason:  # a CorruptionError of the first rank, RankFailed of the others
            error = f"{type(reason).__name__}: {reason}"
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    log = [
        {key: value for key, value in row.items() if key != "elapsed_time"}
        for row in trainer.get_extension("LogReport").log
        if comm is None or comm.rank == 0
    ]
    bits = [value.numpy().tobytes() for value in tensors], log
    said = [str(item.message) for item in caught if "comput" in str(item.message)]
    return bits, said, error


def train_all(comm, out, runs):
    """Several runs one after the other, each by its arguments."""
    results = []
    for index, (arguments, settings) in enumerate(runs):
        results.append(train(comm, f"{out}/{index}", *arguments, **settings))
        if comm is not None:
            if results[-1][-1] is not None:  # the ranks have parted
                break
            comm.barrier()
        if comm is None or comm.rank == 0:
            shutil.rmtree(f"{out}/{index}", ignore_errors=True)
    return results
