"""The rules of iterators, for every public one over every source: those of `check_iterator`, and those of ours alone."""

import inspect
import random

import numpy as np
import pytest
import torch

from chainring import iterators
from chainring.converters import concat_examples
from chainring.iterators import Batch, Iterator
from chainring.testing import check_iterator
from iterator_sources import ALL, BATCH, KINDS, ONCE, SERIAL, SIZE, STATELESS, WORKERS

pytestmark = pytest.mark.filterwarnings("ignore:iterator 'main' fetches")


def content(batch):
    columns = concat_examples(batch)
    return [column.tolist() for column in (columns.values() if isinstance(columns, dict) else columns)]


def record(iterator, count):
    rows = []
    for _ in range(count):
        batch = content(next(iterator))
        rows.append((batch, iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail, iterator.is_new_epoch))
    return rows


@pytest.fixture(params=ALL)
def make(request):
    return ALL[request.param]


@pytest.mark.parametrize("name", KINDS)
def test_it_is_resumed_anywhere_counts_epochs_and_disturbs_no_generator(name):
    """With everything else that an iterator of a user's own keeps, over two epochs, or one."""
    check_iterator((ALL | ONCE)[name])


@pytest.mark.parametrize("name", [name for name in ALL | ONCE if name not in KINDS])
def test_it_goes_on_from_one_iterator_to_the_next(name):
    """Saved after each batch and loaded into a new one, whose seed is another: errors would add up over two epochs."""
    make = (ALL | ONCE)[name]
    torch.manual_seed(1)
    whole = make()
    rows, expected = [], [*record(whole, 3 if name in ONCE else 6)]
    torch.manual_seed(1)
    iterator = make()
    while len(rows) < len(expected):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        rows += record(iterator, 1)
        state = iterator.state_dict()
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
        iterator.finalize()
        torch.manual_seed(2)
        iterator = make()
        iterator.load_state_dict(state)
    assert rows == expected


def test_every_public_iterator_is_tried():
    """None is left out."""
    classes = [cls for name in iterators.__all__ if inspect.isclass(cls := getattr(iterators, name))]
    public = {cls for cls in classes if issubclass(cls, Iterator)} - {Iterator}
    assert public == {type(make()) for make in ALL.values()}


def test_batches_are_sequences_of_examples(make):
    """next() and next(iterator) return a Batch of a known length."""
    iterator = make()
    assert iter(iterator) is iterator
    for batch in (next(iterator), iterator.next()):
        assert type(batch) is Batch
        assert len(batch) == batch.weight == BATCH
        assert len([*batch]) == BATCH


def test_progress_is_the_exact_form_of_epoch_detail(make):
    """Before the first batch and after each of more than two epochs."""
    iterator = make()
    for _ in range(10):
        epoch, position, size = iterator.progress
        assert (epoch, epoch if size is None else epoch + position / size) == (iterator.epoch, iterator.epoch_detail)
        next(iterator)
    assert iterator.epoch >= 2


def test_saving_does_not_disturb_the_global_generators(make):
    """Neither before the first batch nor amid an epoch."""
    iterator = make()
    for _ in range(3):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        iterator.state_dict()
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
        next(iterator)


def test_state_is_loaded_into_a_used_iterator_too(make):
    """Batches fetched, marked or returned before leave no trace."""
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


def test_counters_go_back_with_the_batches_of_a_failed_update(make):
    """Also across the end of an epoch."""
    for first in (0, 2, 4):
        iterator = make()
        rows = record(iterator, first)
        mark = iterator.mark()
        record(iterator, 3)
        iterator.return_to(mark)
        expected = (rows[-1][2], rows[-1][3]) if rows else (0.0, None)
        assert (iterator.epoch_detail, iterator.previous_epoch_detail) == expected


@pytest.mark.parametrize("name", STATELESS)
def test_a_run_saved_after_a_failed_update_continues_with_its_batches(name):
    """The state is that of the position gone back to, not of what was fetched ahead of it."""
    whole = record(ALL[name](), 9)
    for first in (0, 1, 2, 3) if name in KINDS else (2,):
        iterator = ALL[name]()
        record(iterator, first)
        mark = iterator.mark()
        record(iterator, 3)
        iterator.return_to(mark)
        resumed = ALL[name]()
        resumed.load_state_dict(iterator.state_dict())
        assert record(resumed, 9 - first) == whole[first:]


def test_as_many_ranks_as_examples_share_every_batch(make):
    """Each returns one example and counts the same epochs; one without a share returns an example of weight 0."""
    whole, ranks = make(), [make() for _ in range(BATCH)]
    for rank, iterator in enumerate(ranks):
        iterator.share(rank, BATCH)
    for _ in range(7):
        columns = content(next(whole))
        for rank, iterator in enumerate(ranks):
            batch = next(iterator)
            assert len(batch) == 1
            assert batch.weight == len(columns[0][rank::BATCH])
            assert not batch.weight or content(batch) == [column[rank::BATCH] for column in columns]
            assert iterator.epoch_detail == whole.epoch_detail


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_outside_the_world_is_refused(name):
    """With the rule and both values."""
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
            (ALL | ONCE)[name]().share(rank, size)


def test_leaving_a_with_block_finalizes(make):
    """After use, and again."""
    with make() as iterator:
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


@pytest.mark.parametrize("name", STATELESS)
def test_rewind_repeats_the_first_pass(name):
    """The same batches, with the same draws."""
    iterator = ALL[name]()
    first = record(iterator, 5)
    iterator.rewind()
    assert record(iterator, 5) == first
