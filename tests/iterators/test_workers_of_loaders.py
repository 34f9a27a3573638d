"""The worker processes of a DataLoader: none is left when a run has ended, however it ended."""

import multiprocessing
import os
import random
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from chainring.iterators import LoaderIterator, MultiprocessIterator
from chainring.training import StandardUpdater, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Augmented(Dataset):
    """Examples that draw; one may fail."""

    def __init__(self, failing=None):
        self.failing = failing

    def __len__(self):
        return 24

    def __getitem__(self, i):
        if i == self.failing:
            raise OSError("no such image")
        return torch.full((2,), float(i)) + random.random() + torch.rand(2)


def persistent(data):
    return DataLoader(data, 4, num_workers=2, persistent_workers=True)


SOURCES = {
    "DataLoader": lambda data: DataLoader(data, 4, num_workers=2),
    "persistent": persistent,
    "stateful": lambda data: StatefulDataLoader(data, 4, num_workers=2),
    "stateful, persistent": lambda data: StatefulDataLoader(data, 4, num_workers=2, persistent_workers=True),
    "function": lambda data: lambda: persistent(data),
    "MultiprocessIterator": lambda data: MultiprocessIterator(data, 4, n_processes=2),
}


def train(source, out, iterations=4):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    updater = StandardUpdater(source, optimizer, model, loss_func=lambda model, x: model(x).mean())
    Trainer(updater, (iterations, "iteration"), out=out).run()


@pytest.fixture
def left():
    """The child processes that have been started since, and not those of an iterator of another test."""
    before = multiprocessing.active_children()
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


@pytest.mark.parametrize("kind", SOURCES)
def test_none_is_left_after_a_run(tmp_path, kind, left):
    """That ended in the middle of an epoch, while the loader is still referred to."""
    source = SOURCES[kind](Augmented())
    train(source, tmp_path)
    assert left() == []


@pytest.mark.parametrize("kind", SOURCES)
def test_none_is_left_after_a_run_that_failed(tmp_path, kind, left):
    """Even while the error, whose traceback refers to the loader's iterator, is kept."""
    source = SOURCES[kind](Augmented(failing=13))
    with pytest.raises(OSError, match="no such image") as caught:
        train(source, tmp_path, 30)
    assert left() == []
    assert caught.value.__traceback__ is not None


def _train_in_process(kind, out, sender):
    torch.set_num_threads(1)
    source = SOURCES[kind](Augmented())
    train(source, out)
    sender.send([child.pid for child in multiprocessing.active_children()])


def _iterate_in_process(kind, out, sender):
    torch.set_num_threads(1)
    source = SOURCES[kind](Augmented())
    iterator = source if isinstance(source, MultiprocessIterator) else LoaderIterator(source)
    next(iterator)  # and is not finalized
    sender.send([child.pid for child in multiprocessing.active_children()])
    globals()["kept"] = iterator


def in_process(function, kind, out):
    """The exit code of a ``multiprocessing.Process``, in which no function that was registered with atexit is called."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(kind, out, sender))
    process.start()
    try:
        sender.close()
        assert receiver.poll(60)
        children = receiver.recv()
        process.join(120)
        return process.exitcode, children
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*use of fork")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_process_in_which_a_run_has_ended_ends(tmp_path, kind):
    """And none of its workers was left after the run."""
    assert in_process(_train_in_process, kind, tmp_path) == (0, [])


@pytest.mark.filterwarnings("ignore:.*use of fork")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_process_that_does_not_finalize_its_iterator_ends(tmp_path, kind):
    """With its workers, which otherwise ignore the signal by which multiprocessing ends them."""
    code, children = in_process(_iterate_in_process, kind, tmp_path)
    assert (code, len(children)) == (0, 2)
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)
