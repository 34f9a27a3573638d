"""The order of an epoch: a permutation that is a pure function of (seed, epoch, position)."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

import chainring
from chainring import _random
from chainring.iterators import epoch_order

SIZES = [*range(1, 301), 65_536, 65_537, 100_003]


def test_every_index_comes_exactly_once_for_every_size():
    """The order is a bijection of 0 to n - 1, also if n is not a power of two."""
    for size in SIZES:
        counts = np.bincount(epoch_order(7, 3, size), minlength=size)
        assert len(counts) == size
        assert counts.min() == counts.max() == 1, size


@pytest.mark.parametrize("size", [0, 1, 2])
def test_the_smallest_sizes_have_an_order(size):
    """No example, one and two."""
    assert sorted(epoch_order(0, 0, size).tolist()) == list(range(size))


def test_any_span_is_the_slice_of_the_whole():
    """Indices asked for in pieces are those asked for at once."""
    whole = epoch_order(5, 2, 1000)
    for start, stop in [(0, 0), (0, 1), (999, 1000), (250, 750), (1000, 1000), (17, 1000)]:
        assert epoch_order(5, 2, 1000, start, stop).tolist() == whole[start:stop].tolist()


def test_orders_that_are_computed_together_are_those_of_each_alone():
    """Of any sizes, as a mixture of short sources has them. Spans of a fifth are computed without the whole order."""
    passes = [(seed, epoch, size) for seed in (0, -3) for epoch in range(4) for size in (1, 5, 8, 9, 100, 127, 1000, 1023)]
    orders = _random.epoch_orders(passes)
    assert set(orders) == set(passes)
    for (seed, epoch, size), order in orders.items():
        step = size // 5 + 1
        spans = [epoch_order(seed, epoch, size, start, min(start + step, size)) for start in range(0, size, step)]
        assert order.tolist() == np.concatenate(spans).tolist()


def test_indices_are_int64():
    """Arrays and tensors can be gathered with them as they are."""
    assert epoch_order(0, 0, 10).dtype == np.int64


def test_the_order_is_the_same_for_ever():
    """Saved runs continue in this order, so these numbers must never change: a changed one breaks every snapshot."""
    assert epoch_order(0, 0, 10).tolist() == GOLDEN_10
    assert epoch_order(42, 7, 100_003, 50_000, 50_006).tolist() == GOLDEN_100003
    assert epoch_order(-1, 1, 10**12, 5, 8).tolist() == GOLDEN_BIG


# Computed once, by the first version of the function. They are the format of every saved position: whoever changes them
# makes runs resume in another order than they were killed in.
GOLDEN_10 = [7, 2, 9, 4, 3, 1, 0, 5, 6, 8]
GOLDEN_100003 = [37209, 19153, 56164, 8625, 91163, 73625]
GOLDEN_BIG = [24355892295, 144931372514, 483506435151]


def test_seeds_and_epochs_have_orders_of_their_own():
    """Two seeds, or two epochs of one, do not share an order."""
    orders = {tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(-5, 15) for epoch in range(20)}
    assert len(orders) == 400


def test_all_six_orders_of_three_examples_come_about_equally_often():
    """A chi-squared of 5 degrees of freedom stays below its 0.001 quantile over 3,000 epochs."""
    counts = Counter(tuple(epoch_order(1, epoch, 3).tolist()) for epoch in range(3000))
    assert len(counts) == 6
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5


@pytest.mark.parametrize("size", [5, 10, 17])
def test_every_example_comes_at_every_position_about_equally_often(size):
    """Each cell of position by index counts as uniform shuffles would have it, within six standard deviations."""
    epochs = 1000
    table = np.zeros((size, size))
    for epoch in range(epochs):
        table[np.arange(size), epoch_order(9, epoch, size)] += 1
    expected = epochs / size
    assert np.abs(table - expected).max() < 6 * np.sqrt(expected)


def test_neighbours_are_unrelated():
    """The correlation of an index with its position, and with the next index, is that of noise."""
    order = epoch_order(3, 0, 100_003).astype(float)
    positions = np.arange(len(order))
    assert abs(np.corrcoef(order, positions)[0, 1]) < 0.015
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.015


def test_a_span_of_a_vast_epoch_costs_only_the_span():
    """Ten positions in the middle of 10^15, past 32 bits: distinct indices in range."""
    part = epoch_order(0, 0, 10**15, 5 * 10**14, 5 * 10**14 + 10)
    assert len(set(part.tolist())) == 10
    assert 0 <= part.min() <= part.max() < 10**15


def test_no_global_generator_is_drawn_from():
    """The order neither depends on nor disturbs random, numpy.random and torch."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = epoch_order(1, 1, 100)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert epoch_order(1, 1, 100).tolist() == first.tolist()


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 11)])
def test_positions_outside_the_epoch_are_refused(start, stop):
    """The error gives the rule and the values."""
    with pytest.raises(ValueError, match=rf"0 <= start <= stop <= size, got {start}, {stop}, 10"):
        epoch_order(0, 0, 10, start, stop)


def test_the_digest_of_the_generators_changes_with_their_states_and_comes_back_with_them():
    """After any draws, of pairs of normals one by one too, and across the points where all words are made anew."""
    draws = [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.randn,
        lambda: torch.rand(1),
        lambda: torch.randn(3),
        lambda: torch.empty(1, dtype=torch.float64).normal_(),
        lambda: [random.random() for _ in range(700)],
        lambda: np.random.rand(700),
        lambda: torch.rand(700),
    ]
    choose = random.Random(0)
    seen = {_random.digest_generators()}
    for number in range(1, 100):
        choose.choice(draws)()
        seen.add(digest := _random.digest_generators())
        assert len(seen) == number + 1
        with _random.preserve_host_rng():
            for draw in draws:
                draw()
            assert _random.digest_generators() != digest
        assert _random.digest_generators() == digest


@pytest.mark.parametrize("drawn_ahead", [(), ("python",), ("numpy",), ("torch",), ("python", "numpy", "torch")])
def test_states_are_put_back_with_the_normals_that_were_drawn_ahead(drawn_ahead):
    """Whatever was drawn and seeded since, the next numbers are those that would have come; as often as it is asked."""
    draw_normals = {
        "python": lambda: random.gauss(0, 1),
        "numpy": np.random.standard_normal,
        "torch": lambda: float(torch.empty(1, dtype=torch.float64).normal_()),
    }
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    for name in drawn_ahead:
        draw_normals[name]()
    state, expected = _random.take_generators(), None
    for _ in range(3):
        _random.put_generators(state)
        drawn = [draw() for _ in range(3) for draw in draw_normals.values()]
        assert expected is None or drawn == expected
        expected = drawn
        random.seed(9), np.random.seed(9), torch.manual_seed(9)
        for draw in draw_normals.values():
            draw()


def test_a_bit_generator_of_numpy_that_a_block_replaces_is_put_back():
    """It is the same object in the same state; what was drawn from the other one does not matter."""
    before = np.random.get_bit_generator()
    np.random.seed(4)
    expected = np.random.RandomState(4).rand(5).tolist()
    try:
        with _random.preserve_host_rng():
            np.random.rand()
            np.random.set_bit_generator(np.random.PCG64(3))
            np.random.rand()
        assert np.random.get_bit_generator() is before
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_the_state_of_another_bit_generator_is_put_back():
    """Of one whose memory is not known."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        expected = np.random.RandomState(np.random.PCG64(3)).rand(2).tolist()
        np.random.rand()
        with _random.preserve_host_rng():
            np.random.rand(7)
        assert np.random.rand() == expected[1]
    finally:
        np.random.set_bit_generator(before)


def test_another_bit_generator_of_numpy_is_digested_too():
    """From the moment on in which it is set, and that of before when it is back."""
    before = np.random.get_bit_generator()
    digests = [_random.digest_generators()]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        digests.append(_random.digest_generators())
        np.random.rand()
        digests.append(_random.digest_generators())
    finally:
        np.random.set_bit_generator(before)
    assert len(set(digests)) == 3
    assert _random.digest_generators() == digests[0]


def test_kernels_of_an_accelerator_are_deterministic_where_there_is_one(device):
    """As a model there needs, and on the host all are."""
    torch.use_deterministic_algorithms(False)
    chainring.deterministic(0)
    assert torch.are_deterministic_algorithms_enabled() == (device != "cpu")
