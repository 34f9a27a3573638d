"""What every iterator keeps, run over every kind of source."""

import random

import numpy as np
import pytest
import torch
from iterator_sources import ALL, BATCH, SERIAL, SIZE, STATELESS, WORKERS

from chainring.converters import concat_examples
from chainring.iterators import Batch, Iterator


def content(batch):
    return [part.tolist() for part in concat_examples(batch)]


def record(iterator, number):
    rows = []
    for _ in range(number):
        batch = content(next(iterator))
        rows.append((batch, iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail, iterator.is_new_epoch))
    return rows


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.initial_seed()


def loaded(make, state):
    iterator = make()
    iterator.load_state_dict(state)
    return iterator


@pytest.fixture(params=ALL)
def make(request):
    return ALL[request.param]


def test_it_describes_itself_before_the_first_batch(make):
    """Epoch 0, nothing before, not at a new epoch."""
    iterator = make()
    assert isinstance(iterator, Iterator)
    assert (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail) == (0, 0.0, None)
    assert iterator.is_new_epoch is False
    assert iter(iterator) is iterator


def test_batches_are_sequences_of_examples(make):
    """next() and next(iterator) return a Batch of a known length."""
    iterator = make()
    for batch in (next(iterator), iterator.next()):
        assert type(batch) is Batch
        assert len(batch) == batch.weight == BATCH
        assert len([*batch]) == BATCH


def test_epochs_are_counted_when_their_last_batch_comes(make):
    """epoch_detail grows, is the exact form of progress, and is_new_epoch marks where epoch grew."""
    iterator = make()
    before, detail = 0, 0.0
    for _ in range(9):
        next(iterator)
        assert iterator.previous_epoch_detail == detail
        assert iterator.epoch_detail >= detail
        assert iterator.is_new_epoch == (iterator.epoch > before)
        epoch, position, size = iterator.progress
        assert (epoch, epoch if size is None else epoch + position / size) == (iterator.epoch, iterator.epoch_detail)
        before, detail = iterator.epoch, iterator.epoch_detail
    assert iterator.epoch >= 2


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
def test_a_run_saved_and_loaded_after_every_batch_continues_with_identical_batches(make):
    """Over two epochs, into a fresh iterator, whatever torch's seed is by then."""
    whole = record(make(), 9)
    for taken in range(8):
        torch.manual_seed(0)
        iterator = make()
        assert record(iterator, taken) == whole[:taken]
        state = iterator.state_dict()
        next(iterator)
        torch.manual_seed(4321)
        assert record(loaded(make, state), 9 - taken) == whole[taken:]
        torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
def test_state_is_loaded_into_a_used_iterator_too(make):
    """What it had fetched, marked or returned before leaves no trace."""
    whole = record(make(), 7)
    iterator = make()
    record(iterator, 2)
    state = iterator.state_dict()
    mark = iterator.mark()
    record(iterator, 3)
    iterator.return_to(mark)
    next(iterator)
    iterator.load_state_dict(state)
    assert record(iterator, 5) == whole[2:]


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
def test_saving_changes_nothing(make):
    """A run that saves after every batch takes the same batches as one that never does."""
    whole = record(make(), 8)
    iterator = make()
    rows = []
    for _ in range(8):
        iterator.state_dict()
        rows += record(iterator, 1)
    assert rows == whole


def test_global_generators_are_neither_used_nor_disturbed(make):
    """Making, fetching and saving leave them as they were; what they hold does not change the batches."""
    whole = record(make(), 6)
    iterator = make()
    iterator.state_dict()
    random.seed(7)
    np.random.seed(7)
    before = states()[:3]
    rows = []
    for _ in range(6):
        rows += record(iterator, 1)
        iterator.state_dict()
        assert states()[:3] == before
    assert rows == whole


def test_batches_of_a_failed_update_are_returned_again(make):
    """Batches and counters go back to the mark, also across the end of an epoch."""
    whole = record(make(), 9)
    for first in range(5):
        iterator = make()
        rows = record(iterator, first)
        mark = iterator.mark()
        record(iterator, 3)
        iterator.return_to(mark)
        assert (iterator.epoch_detail, iterator.previous_epoch_detail) == (
            (rows[-1][2], rows[-1][3]) if rows else (0.0, None)
        )
        assert record(iterator, 9 - first) == whole[first:]


@pytest.mark.filterwarnings("ignore:iterator 'main' fetches")
@pytest.mark.parametrize("name", STATELESS)
def test_a_run_saved_after_a_failed_update_continues_with_its_batches(name):
    """The state is that of the place gone back to, not of what was fetched ahead of it."""
    whole = record(ALL[name](), 9)
    for first in range(5):
        iterator = ALL[name]()
        record(iterator, first)
        mark = iterator.mark()
        record(iterator, 3)
        iterator.return_to(mark)
        resumed = loaded(ALL[name], iterator.state_dict())
        assert record(resumed, 9 - first) == whole[first:]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_every_batch(make, size):
    """Rank r of n returns every n-th example from number r on; all count the same epochs."""
    whole = make()
    ranks = [make() for _ in range(size)]
    for rank, iterator in enumerate(ranks):
        iterator.share(rank, size)
    for _ in range(7):
        columns = content(next(whole))
        for rank, iterator in enumerate(ranks):
            batch = next(iterator)
            if batch.weight:  # otherwise it holds one example that does not count
                assert content(batch) == [column[rank::size] for column in columns]
            assert batch.weight == len(columns[0][rank::size])
            assert iterator.epoch_detail == whole.epoch_detail


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(make, rank, size):
    """With the rule and both values."""
    with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
        make().share(rank, size)


def test_finalize_may_be_called_again(make):
    """Before, amid and after use, and by leaving a with block."""
    with make() as iterator:
        iterator.finalize()
        next(iterator)
        iterator.finalize()
    iterator.finalize()


@pytest.mark.parametrize("name", [*SERIAL, *WORKERS, "DataLoader"])
def test_another_number_of_examples_is_refused_on_resume(name):
    """An error that names both sizes."""
    iterator = ALL[name]()
    next(iterator)
    with pytest.raises(ValueError, match=r"1[02].*1[13]|1[13].*1[02]"):
        ALL[name](SIZE + 1).load_state_dict(iterator.state_dict())


@pytest.mark.parametrize("name", ["a list of batches", "a function with epoch_length"])
def test_another_number_of_batches_is_refused_amid_an_epoch(name):
    """An error that names both lengths."""
    iterator = ALL[name]()
    next(iterator)
    with pytest.raises(ValueError, match=r"= 5, the saved run had [23]"):
        ALL[name](18).load_state_dict(iterator.state_dict())


def test_reset_counts_epochs_from_zero_again(make):
    """And the next pass is a whole one."""
    iterator = make()
    record(iterator, 2)
    iterator.reset()
    assert (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail) == (0, 0.0, None)
    next(iterator)
    assert iterator.previous_epoch_detail == 0.0


@pytest.mark.parametrize("name", STATELESS)
def test_rewind_repeats_the_first_pass(name):
    """The same batches, with the same draws."""
    iterator = ALL[name]()
    first = record(iterator, 5)
    iterator.rewind()
    assert record(iterator, 5) == first
