"""SerialIterator: which examples come when, and what is asked of the dataset for them."""

import time

import numpy as np
import pytest
import torch

from chainring.iterators import SerialIterator, epoch_order


def walk(iterator, number):
    rows = []
    for _ in range(number):
        batch = list(next(iterator))
        rows.append((batch, iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail, iterator.is_new_epoch))
    return rows


def in_order(size, batch_size, **kwargs):
    return SerialIterator(list(range(1, size + 1)), batch_size, shuffle=False, **kwargs)


def test_an_epoch_of_whole_batches_is_counted_exactly():
    """Chainer's vector for six examples in pairs."""
    iterator = in_order(6, 2)
    assert (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail) == (0, 0.0, None)
    assert walk(iterator, 4) == [
        ([1, 2], 0, 2 / 6, 0.0, False),
        ([3, 4], 0, 4 / 6, 2 / 6, False),
        ([5, 6], 1, 6 / 6, 4 / 6, True),
        ([1, 2], 1, 1 + 2 / 6, 6 / 6, False),
    ]


def test_a_batch_that_crosses_the_end_is_completed_from_the_next_epoch():
    """Chainer's vector for five examples in pairs: the third batch is [5, 1] at 6/5."""
    assert walk(in_order(5, 2), 5) == [
        ([1, 2], 0, 2 / 5, 0.0, False),
        ([3, 4], 0, 4 / 5, 2 / 5, False),
        ([5, 1], 1, 6 / 5, 4 / 5, True),
        ([2, 3], 1, 8 / 5, 6 / 5, False),
        ([4, 5], 2, 10 / 5, 8 / 5, True),
    ]


def test_a_batch_larger_than_the_dataset_spans_several_epochs():
    """Three examples in batches of eight: epochs 2, 5, 8."""
    iterator = in_order(3, 8)
    assert [(epoch, detail, new) for _, epoch, detail, _, new in walk(iterator, 3)] == [
        (2, 2 + 2 / 3, True),
        (5, 5 + 1 / 3, True),
        (8, 8.0, True),
    ]
    assert list(next(iterator)) == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(("size", "last"), [(6, [5, 6]), (5, [5])])
@pytest.mark.parametrize("seed", [None, 3])
def test_without_repeat_it_ends_after_one_epoch_and_stays_ended(size, last, seed):
    """The last batch may be short; then StopIteration again and again, and the attributes stay as they are."""
    iterator = in_order(size, 2, repeat=False, seed=seed)
    assert walk(iterator, 3)[-1] == (last, 1, 1.0, 4 / size, True)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    assert (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail) == (1, 1.0, 4 / size)
    assert iterator.is_new_epoch


@pytest.mark.parametrize("repeat", [True, False])
def test_reset_counts_from_zero_with_an_order_not_used_before(repeat):
    """Four resets give the orders 0 to 4 of the seed, also where an epoch was only begun."""
    iterator = SerialIterator(list(range(20)), 10, repeat=repeat, seed=1)
    for number in range(4):
        assert (iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail) == (0, 0.0, None)
        assert not iterator.is_new_epoch
        assert list(next(iterator)) == epoch_order(1, number, 20).tolist()[:10]
        if number % 2:
            next(iterator)
        iterator.reset()


def test_a_reset_of_an_untouched_iterator_uses_no_order_up():
    """The next unused order is still the first."""
    iterator = SerialIterator(list(range(20)), 20, seed=1)
    iterator.reset()
    assert list(next(iterator)) == epoch_order(1, 0, 20).tolist()


def test_rewind_begins_the_same_order_again():
    """An evaluation sees the same every time."""
    iterator = SerialIterator(list(range(20)), 7, repeat=False, seed=1)
    first = [list(batch) for batch in iterator]
    iterator.rewind()
    assert [list(batch) for batch in iterator] == first


def test_each_epoch_is_the_order_of_seed_and_epoch():
    """Over epochs the indices are those of epoch_order, which differ from epoch to epoch."""
    iterator = SerialIterator(list(range(10)), 4, seed=3)
    taken = [index for _ in range(10) for index in next(iterator)]
    orders = [epoch_order(3, epoch, 10).tolist() for epoch in range(4)]
    assert taken == [index for order in orders for index in order]
    assert orders[0] != orders[1]


def test_blocks_of_the_order_meet_without_a_seam():
    """A batch across position 65,536 of one epoch is what the whole order has there."""
    size = 70_000
    iterator = SerialIterator(np.arange(size), 65_530, seed=1)
    taken = np.concatenate([next(iterator).columns, next(iterator).columns])
    assert taken[:size].tolist() == epoch_order(1, 0, size).tolist()


def test_seed_none_is_derived_from_torch_and_the_name():
    """The derived seed follows torch.initial_seed() and the name at first use, and changes with either."""

    def seed(initial, name):
        torch.manual_seed(initial)
        iterator = SerialIterator([1, 2, 3], 2)
        iterator.name = name
        return iterator.seed

    assert seed(1, "main") == seed(1, "main")
    assert len({seed(1, "main"), seed(2, "main"), seed(1, "second")}) == 3


def test_a_derived_seed_is_saved_and_wins_over_none():
    """A resumed script that gives no seed goes on with the saved one, whatever torch's seed is by then."""
    iterator = SerialIterator(list(range(10)), 4)
    next(iterator)
    state = iterator.state_dict()
    torch.manual_seed(12345)
    resumed = SerialIterator(list(range(10)), 4)
    resumed.load_state_dict(state)
    assert resumed.seed == iterator.seed
    assert [list(next(resumed)) for _ in range(9)] == [list(next(iterator)) for _ in range(9)]


def test_another_explicit_seed_on_resume_begins_at_the_next_epoch(capsys):
    """The epoch under way keeps its order; a line says so; and a second resume keeps to both."""
    iterator = SerialIterator(list(range(10)), 5, seed=1)
    next(iterator)
    resumed = SerialIterator(list(range(10)), 5, seed=2)
    resumed.load_state_dict(iterator.state_dict())
    assert "seed of iterator 'main' 1 -> 2 (" in " ".join(capsys.readouterr().out.split())
    again = SerialIterator(list(range(10)), 5)
    again.load_state_dict(resumed.state_dict())
    expected = epoch_order(1, 0, 10).tolist()[5:] + epoch_order(2, 1, 10).tolist()
    for one in (resumed, again):
        assert [index for _ in range(3) for index in next(one)] == expected


def test_another_seed_at_the_end_of_an_epoch_holds_at_once():
    """Between two epochs the next is the one of the new seed."""
    iterator = SerialIterator(list(range(10)), 10, seed=1)
    next(iterator)
    resumed = SerialIterator(list(range(10)), 10, seed=2)
    resumed.load_state_dict(iterator.state_dict())
    assert list(next(resumed)) == epoch_order(2, 1, 10).tolist()


def test_the_state_is_a_few_plain_numbers():
    """No order is stored, nor anything of NumPy's."""
    iterator = SerialIterator(list(range(10)), np.int64(3), seed=np.int64(5))
    next(iterator)
    assert all(type(value) in (int, float, bool, type(None)) for value in iterator.state_dict().values())


class Vast:
    """10^9 examples, none of which may be fetched while resuming."""

    asked = 0

    def __len__(self):
        return 10**9

    def __getitem__(self, i):
        self.asked += 1
        return i


def test_resuming_amid_a_billion_examples_takes_milliseconds_and_fetches_nothing():
    """The position alone is enough."""
    iterator = SerialIterator(Vast(), 10, seed=1)
    state = iterator.state_dict() | {"position": 123_456_780, "epoch": 2}
    resumed = SerialIterator(Vast(), 10, seed=1)
    start = time.process_time()
    resumed.load_state_dict(state)
    assert resumed.dataset.asked == 0
    batch = list(next(resumed))
    assert time.process_time() - start < 0.1
    assert batch == epoch_order(1, 2, 10**9, 123_456_780, 123_456_790).tolist()
    assert resumed.dataset.asked == 10


def test_a_batch_size_changed_on_resume_goes_on_at_the_same_position():
    """The batch size is a setting."""
    iterator = SerialIterator(list(range(10)), 2, seed=1)
    next(iterator)
    resumed = SerialIterator(list(range(10)), 5, seed=1)
    resumed.load_state_dict(iterator.state_dict())
    assert list(next(resumed)) == epoch_order(1, 0, 10).tolist()[2:7]


@pytest.mark.parametrize("size", [6, 8])
def test_a_dataset_of_another_size_is_refused_on_resume(size):
    """The error names both sizes, and the iterator."""
    state = SerialIterator(list(range(7)), 2).state_dict()
    with pytest.raises(ValueError, match=f"'main' has {size} examples an epoch, the saved run had 7"):
        SerialIterator(list(range(size)), 2).load_state_dict(state)


@pytest.mark.parametrize("shuffles", [(True, False), (False, True)])
def test_shuffling_is_a_setting_that_may_change_on_resume(shuffles):
    """From the end of an epoch on; neither direction fails for want of a saved order."""
    iterator = SerialIterator(list(range(4)), 2, shuffle=shuffles[0], seed=1)
    next(iterator)
    next(iterator)
    resumed = SerialIterator(list(range(4)), 2, shuffle=shuffles[1], seed=1)
    resumed.load_state_dict(iterator.state_dict())
    assert list(next(resumed)) == ([0, 1] if shuffles[0] else epoch_order(1, 1, 4).tolist()[:2])


def test_an_empty_dataset_ends_at_once_without_repeat():
    """No division by its size."""
    iterator = SerialIterator([], 3, repeat=False)
    with pytest.raises(StopIteration):
        next(iterator)
    assert (iterator.epoch, iterator.epoch_detail) == (0, 0.0)


def test_an_empty_dataset_cannot_be_repeated():
    """It is refused at construction."""
    with pytest.raises(ValueError, match="at least one example"):
        SerialIterator([], 3)


def test_an_order_sampler_defines_the_epoch():
    """Six indices over three examples make an epoch of six."""
    asked = []

    def sampler(seed, epoch, size):
        asked.append((seed, epoch, size))
        return [0, 1, 2, 2, 1, epoch % 3]

    iterator = SerialIterator(["a", "b", "c"], 4, order_sampler=sampler, seed=9)
    assert "".join(x for _ in range(3) for x in next(iterator)) == "abccba" + "abccbb"
    assert (iterator.epoch, iterator.progress) == (2, (2, 0, 6))
    assert {(9, 0, 3), (9, 1, 3)} <= set(asked)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (lambda seed, epoch, size: [0, 3], "from 0 to 2, got some from 0 to 3"),
        (lambda seed, epoch, size: [-1, 0], "from -1"),
        (lambda seed, epoch, size: [0.5], "integer indices"),
        (lambda seed, epoch, size: [[0, 1]], "one dimension"),
    ],
)
def test_an_order_that_is_none_is_refused_at_construction(sampler, message):
    """The error gives the rule and the value."""
    with pytest.raises(ValueError, match=message):
        SerialIterator([1, 2, 3], 2, order_sampler=sampler)


def test_an_order_sampler_that_changes_its_length_is_refused():
    """The epoch's size is that of the first."""
    iterator = SerialIterator([1, 2, 3], 3, order_sampler=lambda seed, epoch, size: range(3 - epoch))
    next(iterator)
    with pytest.raises(ValueError, match="3 for the first and 2 for epoch 1"):
        next(iterator)


def test_an_example_that_fails_is_named():
    """The dataset's own error is raised, and a note says at which index."""

    class Failing:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            if index == 3:
                raise OSError("no such image")
            return index

    iterator = SerialIterator(Failing(), 2, shuffle=False)
    next(iterator)
    with pytest.raises(OSError, match="no such image") as caught:
        next(iterator)
    assert any("dataset[3]" in note for note in caught.value.__notes__)
