"""An epoch of a loader is a pass: its end counts, whatever the loader says of its length."""

import random

import pytest
import torch
from torch.utils.data import DataLoader

from chainring.iterators import LoaderIterator

pytestmark = pytest.mark.filterwarnings("ignore:iterator 'main' fetches")


class Passes:
    """A loader of passes of given lengths, with a length of its own that may be another."""

    def __init__(self, lengths, says):
        self.lengths, self.says, self.epoch = lengths, says, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.says(self.lengths[self.epoch])

    def __iter__(self):
        return (torch.tensor([k]) for k in range(self.lengths[self.epoch]))


class Stateful(Passes):
    """The same with a state, by which a pass is taken up again."""

    at = 0

    def __iter__(self):
        while self.at < self.lengths[self.epoch]:
            self.at += 1
            yield torch.tensor([self.at - 1])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Batches:
    """A sampler of batches whose number follows from what it draws, as where batches have as many tokens each."""

    def __init__(self):
        self.rng, self.count = random.Random(1), 2

    def __len__(self):
        return self.count

    def __iter__(self):
        self.count = self.rng.randrange(1, 5)
        return iter([[k] for k in range(self.count)])


class Growing(list):
    """Data that become more with each pass."""

    def __init__(self, step, first):
        super().__init__(range(first))
        self.step = step

    def set_epoch(self, epoch):
        self[:] = range(5 + self.step * epoch)


def exactly(length):
    return length


CHANGING = {
    "by epoch": lambda: Passes([3, 2, 4, 1, 3, 3], exactly),
    "by epoch, with a state": lambda: Stateful([3, 2, 4, 1, 3, 3], exactly),
    "data that grow": lambda: DataLoader(Growing(1, 5), 1, collate_fn=torch.tensor),
    "drawn": lambda: DataLoader([torch.tensor([k]) for k in range(5)], batch_sampler=Batches()),
    "data that shrink": lambda: DataLoader(Growing(-1, 5), 1, collate_fn=torch.tensor),
}
WRONG = {
    "too short": lambda: Passes([3, 2, 4, 1, 3, 3], lambda length: 1),
    "one too short": lambda: Passes([3, 2, 4, 2, 3, 3], lambda length: length - 1),
    "too long": lambda: Passes([3, 2, 4, 1, 3, 3], lambda length: 7),
    "one too long": lambda: Passes([3, 2, 4, 1, 3, 3], lambda length: length + 1),
    "too short, with a state": lambda: Stateful([3, 2, 4, 1, 3, 3], lambda length: 2),
    "too long, with a state": lambda: Stateful([3, 2, 4, 1, 3, 3], lambda length: 7),
}


def rows_of(iterator, number):
    """Of each batch: its place in the pass, the completed epochs, whether one was completed with it, and where it is."""
    rows = []
    for _ in range(number):
        place = int(next(iterator).columns.flatten()[0])
        rows.append((place, iterator.epoch, iterator.is_new_epoch, iterator.epoch_detail))
    return rows


@pytest.mark.parametrize("form", CHANGING)
def test_a_length_that_changes_is_that_of_each_pass(form):
    """Every epoch ends with the last batch of a pass, and goes on so after a resume at any batch."""
    rows = rows_of(LoaderIterator(CHANGING[form]()), 12)
    begins = [k for k, (place, *_) in enumerate(rows) if place == 0]
    assert [k for k, (*_, is_new, _) in enumerate(rows[:-1]) if is_new] == [k - 1 for k in begins[1:]]
    for at in range(1, 12):
        iterator, again = LoaderIterator(CHANGING[form]()), LoaderIterator(CHANGING[form]())
        rows_of(iterator, at)
        again.load_state_dict(iterator.state_dict())
        assert rows_of(again, 12 - at) == rows[at:]


@pytest.mark.parametrize("form", WRONG)
def test_a_wrong_length_is_said_once_and_the_end_of_the_pass_counts(form):
    """From the first pass, or where it was shorter than it said with the next batch; at a resume too."""
    make = lambda: LoaderIterator(WRONG[form]())  # noqa: E731
    with pytest.warns(UserWarning, match=r"has a len of \d, and a pass had (\d|more) batches. An epoch is a pass") as warned:
        rows = rows_of(make(), 12)
    assert len(warned) == 1
    ends = [k for k, (*_, is_new, _) in enumerate(rows[:-1]) if is_new]
    begins = [k for k, (place, *_) in enumerate(rows) if place == 0]
    assert ends[0] - begins[1] in (-1, 0)
    assert ends[1:] == [k - 1 for k in begins[2:]]
    details = [detail for *_, detail in rows]
    assert details == sorted(details)
    assert all(epoch <= detail < epoch + 1 for _, epoch, _, detail in rows)
    for at in (2, 5, 8):
        iterator, again = make(), make()
        with pytest.warns(UserWarning, match="An epoch is a pass"):
            rows_of(iterator, max(at, 4))
        again.load_state_dict(iterator.state_dict())
        assert rows_of(again, 12 - max(at, 4)) == rows[max(at, 4) :]


def test_epoch_length_counts_whatever_a_pass_has():
    """It is the setting for those who do not mean passes."""
    iterator = LoaderIterator(Passes([3, 2, 4, 1, 3, 3], lambda length: 7), epoch_length=2)
    assert [epoch for _, epoch, *_ in rows_of(iterator, 6)] == [0, 1, 1, 2, 2, 3]


def test_an_evaluation_ends_with_its_pass():
    """However long it says that it is, and each time."""
    iterator = LoaderIterator(Passes([3], lambda length: 7), repeat=False)
    for _ in range(2):
        iterator.rewind()
        assert len(list(iterator)) == 3
