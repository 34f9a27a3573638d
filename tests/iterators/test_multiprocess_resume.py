"""A run of one number of workers continues with another, exactly."""

import ctypes
import multiprocessing
import os

import pytest
import torch
from examples_in_workers import Dataset, Noisy

from chainring.converters import concat_examples
from chainring.iterators import MultiprocessIterator, SerialIterator, epoch_order


def make(n_processes, **settings):
    """An iterator of so many workers; 0 is a SerialIterator."""
    if n_processes == 0:
        return SerialIterator(Noisy(10), 4, **settings)
    return MultiprocessIterator(Noisy(10), 4, n_processes=n_processes, n_prefetch=n_processes, **settings)


def record(iterator, number):
    return [(concat_examples(next(iterator)), iterator.epoch_detail, iterator.is_new_epoch) for _ in range(number)]


@pytest.mark.parametrize("workers", [(0, 2), (1, 3)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_continues_with_another_number_of_workers_after_every_batch(workers, shuffle):
    """The state is that of the batch last returned, whatever was fetched ahead; 0 is a SerialIterator."""
    whole, batches = record(make(0, shuffle=shuffle), 8), []
    torch.manual_seed(0)
    state = make(0, shuffle=shuffle).state_dict()
    for seed in range(7):
        torch.manual_seed(99 + seed)
        with make(workers[seed % 2], shuffle=shuffle) as iterator:
            iterator.load_state_dict(state)
            batches += record(iterator, 1)
            state = iterator.state_dict()
            if seed == 6:
                batches += record(iterator, 1)
    torch.testing.assert_close(batches, whole, rtol=0, atol=0)


def test_states_are_equal_for_any_number_of_workers():
    """Key for key, value for value."""
    states = []
    for n_processes in range(4):
        with make(n_processes, seed=5) as iterator:
            record(iterator, 3)
            states.append(iterator.state_dict())
    assert states == [states[0]] * 4


def test_a_run_continues_on_another_number_of_ranks():
    """A state of one rank is that of all; the shares of three make up the batch."""
    whole = record(make(0, seed=2), 4)
    with make(2, seed=2) as first:
        record(first, 1)
        state = first.state_dict()
    ranks = [make(1, seed=2) for _ in range(3)]
    for rank, iterator in enumerate(ranks):
        iterator.load_state_dict(state)
        iterator.share(rank, 3)
    for batch, detail, _ in whole[1:]:
        for rank, iterator in enumerate(ranks):
            torch.testing.assert_close(concat_examples(next(iterator))["i"], batch["i"][rank::3], rtol=0, atol=0)
            assert iterator.epoch_detail == detail


def test_sharing_in_mid_run_drops_what_was_fetched_for_the_whole():
    """The next batch is this rank's part."""
    with make(2, seed=2) as iterator:
        whole = record(make(0, seed=2), 3)
        record(iterator, 1)
        iterator.share(1, 2)
        assert [row["i"].tolist() for row, *_ in record(iterator, 2)] == [row["i"][1::2].tolist() for row, *_ in whole[1:]]


def test_reset_goes_on_to_an_unused_order_as_a_serial_iterator_does():
    """Amid an epoch, and at once after a reset."""
    with make(2, seed=2) as ours, make(0, seed=2) as theirs:
        for taken in (1, 0, 3):
            torch.testing.assert_close(record(ours, taken), record(theirs, taken), rtol=0, atol=0)
            ours.reset()
            theirs.reset()
        torch.testing.assert_close(record(ours, 3), record(theirs, 3), rtol=0, atol=0)


def test_resuming_late_in_an_epoch_of_a_billion_fetches_nothing():
    """At 90 % of 10^9 examples, in under two seconds of a processor; only the first batch and what is ahead are fetched."""
    size, fetched = 10**9, multiprocessing.Value(ctypes.c_long, 0)

    def get(i):
        with fetched:
            fetched.value += 1
        return i

    began = os.times()
    with MultiprocessIterator(Dataset(size, get), 8, n_processes=2, seed=1) as iterator:
        state = iterator.state_dict() | {"position": size // 10 * 9}
        iterator.load_state_dict(state)
        assert fetched.value == 0
        batch = next(iterator)
        assert batch.columns.tolist() == epoch_order(1, 0, size, size // 10 * 9, size // 10 * 9 + 8).tolist()
        assert iterator.epoch_detail == 0.900000008
    assert fetched.value <= 8 * 2 * 2 + 8
    assert sum(os.times()[:4]) - sum(began[:4]) < 2  # in this process and in its workers, which have ended
