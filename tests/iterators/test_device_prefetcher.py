"""DevicePrefetcher: one batch ahead, and nothing that shows it but the device."""

import multiprocessing

import numpy as np
import pytest
import torch

from chainring.converters import concat_examples
from chainring.iterators import DevicePrefetcher, Iterator, LoaderIterator, MultiprocessIterator, SerialIterator
from iterator_sources import ALL, BATCH, LOADER, SERIAL, SIZE, WORKERS, Counting, Drawn

BARE = SERIAL | WORKERS | LOADER
COUNTS = ("epoch", "epoch_detail", "previous_epoch_detail", "is_new_epoch", "progress")


class Watched:
    """A dataset that keeps the indices it was asked for, and fails at some as often as told."""

    def __init__(self, size=SIZE, failures=()):
        self.size, self.asked, self.failures = size, [], list(failures)

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.asked.append(i)
        if i in self.failures:
            self.failures.remove(i)
            raise ArithmeticError(f"example {i} is broken")
        return np.float32(i)


def in_order(dataset, repeat=False):
    return SerialIterator(dataset, BATCH, repeat=repeat, shuffle=False)


def content(batch):
    return [part.tolist() for part in concat_examples(batch)]


def record(iterator, number):
    rows = []
    for _ in range(number):
        batch = next(iterator)
        rows.append((content(batch), batch.weight, [getattr(iterator, name) for name in COUNTS]))
    return rows


def assert_same_state(one, other):
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", BARE)
def test_batches_counters_and_state_are_those_of_the_iterator_alone(name):
    """After every batch over several epochs, key for key and value for value."""
    with BARE[name]() as alone, DevicePrefetcher(BARE[name](), "cpu") as ahead:
        for _ in range(8):
            assert_same_state(ahead, alone)
            assert record(ahead, 1) == record(alone, 1)
        assert_same_state(ahead, alone)


def test_the_tensors_are_on_the_device_and_pass_the_updaters_converter_as_they_are():
    """The meta device stands in for an accelerator; the default converter copies nothing."""
    batch = next(DevicePrefetcher(ALL["arrays"](), "meta"))
    assert [column.device.type for column in batch.columns] == ["meta", "meta"]
    converted = concat_examples(batch, "meta")
    assert all(one is other for one, other in zip(converted, batch.columns, strict=True))
    assert len(batch) == BATCH


def test_one_batch_is_fetched_ahead():
    """The first call fetches two, each other one, and resuming none."""
    data = Watched(40)
    iterator = DevicePrefetcher(in_order(data), "cpu")
    assert data.asked == []
    for number in range(2, 6):
        next(iterator)
        assert data.asked == list(range(number * BATCH))
    data.asked.clear()
    resumed = DevicePrefetcher(in_order(data), "cpu")
    resumed.load_state_dict(iterator.state_dict())
    assert data.asked == []
    assert next(resumed)[0] == 4 * BATCH


MAKERS = {
    "serial": lambda: SerialIterator(Drawn(), BATCH),
    "ahead": lambda: DevicePrefetcher(SerialIterator(Drawn(), BATCH), "cpu"),
    "workers": lambda: MultiprocessIterator(Drawn(), BATCH, n_processes=2),
    "workers, ahead": lambda: DevicePrefetcher(MultiprocessIterator(Drawn(), BATCH, n_processes=2), "cpu"),
}


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("serial", "ahead"), ("ahead", "serial"), ("ahead", "workers"), ("workers", "ahead"), ("workers, ahead", "serial")],
)
def test_a_run_continues_with_it_or_without(saved, resumed):
    """After every batch of two epochs, with the same batches."""
    whole = record(MAKERS["serial"](), 7)
    for taken in range(6):
        torch.manual_seed(0)
        with MAKERS[saved]() as first, MAKERS[resumed]() as second:
            record(first, taken)
            state = first.state_dict()
            torch.manual_seed(99)
            second.load_state_dict(state)
            assert record(second, 7 - taken) == whole[taken:]


def test_a_loader_with_a_state_of_its_own_fetches_nothing_again():
    """Its state is taken before the batch ahead is."""
    iterator = DevicePrefetcher(LoaderIterator(Counting(5)), "cpu")
    record(iterator, 2)
    loader = Counting(5)
    resumed = DevicePrefetcher(LoaderIterator(loader), "cpu")
    resumed.load_state_dict(iterator.state_dict())
    assert content(next(resumed))[0] == [30, 31, 32, 33]
    assert loader.fetched == 2


def test_an_error_of_the_dataset_comes_at_the_turn_of_its_batch_and_is_tried_again():
    """The batch before it comes first; after the error the same batch is fetched once more."""
    iterator = DevicePrefetcher(in_order(Watched(failures=[5])), "cpu")
    assert next(iterator)[3] == 3
    with pytest.raises(ArithmeticError, match="example 5"):
        next(iterator)
    assert iterator.epoch_detail == 0.4
    assert [*next(iterator)] == [4, 5, 6, 7]


def test_a_batch_that_could_not_be_converted_is_tried_again():
    """It is not lost, the state stays at the batch before it, and the dataset is not asked again."""
    data, calls = Watched(), []

    def convert(batch, device):
        calls.append(batch[0])
        if len(calls) == 2:
            raise ArithmeticError("not this time")
        return concat_examples(batch, device)

    iterator = DevicePrefetcher(in_order(data), "cpu", converter=convert)
    next(iterator)
    state = iterator.state_dict()
    with pytest.raises(ArithmeticError):
        next(iterator)
    assert iterator.state_dict() == state
    assert [*next(iterator)] == [4, 5, 6, 7]
    assert calls == [0, 4, 4, 8]
    assert data.asked == list(range(SIZE))


@pytest.mark.parametrize(
    "source", [lambda: in_order(Watched()), lambda: LoaderIterator(LOADER["a function"]().loader, repeat=False)]
)
def test_the_end_comes_after_the_last_batch_and_again(source):
    """All batches, StopIteration until reset(), then all of them again."""
    iterator, alone = DevicePrefetcher(source(), "cpu"), source()
    number = len([*alone])
    assert len([*iterator]) == number == 3
    assert_same_state(iterator, alone)
    assert [*iterator] == []
    iterator.reset()
    assert len([*iterator]) == number


# A generator of the loader's own stands, amid a pass, where the batch ahead has left it.
AFTER = {"DataLoader with a generator": (0, 3)}


@pytest.mark.parametrize("name", BARE)
def test_reset_goes_on_to_the_order_that_the_iterator_alone_goes_on_to(name):
    """Batches only fetched ahead do not count as used, wherever in an epoch reset() is called."""
    for taken in AFTER.get(name, range(6)):
        with BARE[name]() as alone, DevicePrefetcher(BARE[name](), "cpu") as ahead:
            for iterator in (alone, ahead):
                record(iterator, taken)
                iterator.reset()
            assert record(ahead, 3) == record(alone, 3)


def test_a_user_iterator_without_marks_is_put_back_too():
    """By its state: reset and return_to ask nothing else of it."""

    class Letters(Iterator):
        batch_size, at, round = 1, 0, 0

        def __next__(self):
            self.at += 1
            return [torch.tensor([self.round, self.at])]

        def reset(self):
            self.round, self.at = self.round + self.at, 0

        def serialize(self, serializer):
            self.at, self.round = serializer("at", self.at), serializer("round", self.round)

    iterator = DevicePrefetcher(Letters(), "cpu")
    next(iterator)
    mark = iterator.mark()
    next(iterator)
    iterator.return_to(mark)
    assert iterator.state_dict() == {"at": 1, "round": 0}
    assert concat_examples(next(iterator)).tolist() == [[0, 2]]
    iterator.reset()
    assert concat_examples(next(iterator)).tolist() == [[2, 1]]


def test_another_share_holds_from_the_next_batch_on():
    """Batches fetched ahead for one rank are fetched again for another."""
    iterator = DevicePrefetcher(in_order(Watched()), "cpu")
    next(iterator)
    iterator.share(1, 2)
    assert [*next(iterator)] == [5, 7]
    with pytest.raises(ValueError, match="rank 2 of 2"):
        iterator.share(2, 2)


def test_the_filler_of_an_empty_share_counts_nothing():
    """Its weight is passed on."""
    iterator = DevicePrefetcher(in_order(Watched(9)), "cpu")
    iterator.share(3, 4)
    assert [(len(batch), batch.weight) for batch in iterator] == [(1, 1), (1, 1), (1, 0)]


def test_it_bears_the_name_and_the_seed_of_its_iterator():
    """The name that an updater gives reaches the iterator, whose seed follows from it."""
    alone, ahead = MAKERS["serial"](), MAKERS["ahead"]()
    alone.name = ahead.name = "other"
    assert ahead.name == ahead.iterator.name == "other"
    assert ahead.seed == alone.seed
    assert not hasattr(DevicePrefetcher([torch.zeros(2)], "cpu"), "seed")


def test_finalize_ends_the_workers():
    """It reaches the iterator, and what was ahead is returned when it goes on."""
    whole = record(MAKERS["serial"](), 3)
    iterator = MAKERS["workers, ahead"]()
    rows = record(iterator, 1)
    iterator.finalize()
    assert multiprocessing.active_children() == []
    with iterator:
        assert rows + record(iterator, 2) == whole
