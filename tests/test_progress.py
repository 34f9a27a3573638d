"""Exact progress: a number means the simplest fraction that rounds to it."""

import math
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from chainring import iterators, training
from chainring._progress import to_fraction
from chainring.iterators.base import check_epoch_period
from chainring.training.triggers.base import count_progress


class Reading(training.Updater):
    """Reads whole numbers; epochs are the iterator's unless it is told its own."""

    def __init__(self, examples=7, batch_size=3):
        self.source = iterators.SerialIterator(list(range(examples)), batch_size, seed=0)

    def get_iterator(self, name):
        return {"main": self.source}[name]

    def update_core(self):
        self.source.next()


class OwnEpochs(training.Updater):
    """Counts epochs by itself: a tenth at each update, as a float."""

    @property
    def epoch_detail(self):
        return self.iteration / 10

    def update_core(self):
        pass


class NoEpochs(training.Updater):
    """Has neither iterator nor epochs."""

    def update_core(self):
        pass


@pytest.mark.parametrize(
    ("value", "fraction"),
    [
        (0.1, Fraction(1, 10)),
        (0.2, Fraction(1, 5)),
        (0.29, Fraction(29, 100)),
        (0.3, Fraction(3, 10)),
        (0.25, Fraction(1, 4)),
        (1.5, Fraction(3, 2)),
        (5 / 6, Fraction(5, 6)),
        (1 / 3, Fraction(1, 3)),
        (1 / 1437, Fraction(1, 1437)),
        (100 / 1437, Fraction(100, 1437)),
        (-0.1, Fraction(-1, 10)),
        (0, Fraction(0)),
        (0.0, Fraction(0)),
        (2, Fraction(2)),
        (1e300, Fraction(10**300)),
        (Fraction(22, 7), Fraction(22, 7)),
        (Decimal("0.1"), Fraction(1, 10)),
        (np.float64(0.7), Fraction(7, 10)),
        (np.int64(3), Fraction(3)),
    ],
)
def test_a_number_is_the_simplest_fraction_that_rounds_to_it(value, fraction):
    """A decimal or a quotient that a person wrote is taken as what they meant."""
    assert to_fraction(value) == (fraction if value != 1e300 else Fraction(1e300))


def test_every_float_is_what_its_fraction_rounds_to():
    """The fraction of a float, rounded, is that float, from the smallest to the largest."""
    draw = random.Random(1)
    values = [math.ldexp(draw.random(), draw.randint(-1060, 1000)) for _ in range(500)]
    values += [5e-324, 2.2250738585072014e-308, math.nextafter(1, 0), math.nextafter(1, 2), 1.7976931348623157e308]
    assert [float(to_fraction(value)) for value in values] == values


def test_no_fraction_with_a_smaller_denominator_rounds_to_the_same_float():
    """Simplest means the smallest denominator of all fractions that round to the float."""
    draw = random.Random(2)
    for value in [draw.randint(1, 400) / draw.randint(1, 200) for _ in range(60)]:
        denominator = to_fraction(value).denominator
        nearest = [round(value * smaller) / smaller for smaller in range(1, denominator)]
        assert value not in nearest


@pytest.mark.parametrize("size", [1, 3, 7, 1437, 60_000, 94_906_265])
def test_a_quotient_of_two_integers_comes_back(size):
    """Position over size, divided as floats, gives position over size again."""
    for position in {1, size // 3, size // 2, size - 1, size + 1} - {0}:
        assert to_fraction(position / size) == Fraction(position, size)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_without_a_fraction_is_refused_by_its_value(value):
    """NaN and infinity raise a ValueError that shows them."""
    with pytest.raises(ValueError, match=f"finite number is needed, got {value}"):
        to_fraction(value)


@pytest.mark.parametrize("value", ["0.1", None, b"1", [1], 1j, True])
def test_what_is_no_real_number_is_refused_with_its_type(value):
    """A string is not a number, even if it could be read as one; nor is True, of which an interval would be 1."""
    with pytest.raises(TypeError, match=f"a number is needed.*{type(value).__name__}"):
        to_fraction(value)


def test_epochs_come_from_the_iterators_integers():
    """After k batches of b out of n examples, k * b / n epochs are complete, exactly."""
    updater = Reading(examples=7, batch_size=3)
    seen = []
    for _ in range(50):
        updater.update()
        seen.append(count_progress(updater, "epoch"))
    assert seen == [Fraction(3 * k, 7) for k in range(1, 51)]


def test_an_updater_that_counts_its_own_epochs_is_taken_at_its_word():
    """Where the updater sets epoch_detail, the iterator's integers do not overrule it."""
    updater = Reading()
    updater.update()
    updater.epoch_detail = 0.3
    assert count_progress(updater, "epoch") == Fraction(3, 10)


def test_epochs_counted_in_floats_are_exact_tenths():
    """A foreign epoch_detail of 0.1, 0.2, 0.3 and so on is read as tenths for 100 epochs."""
    updater = OwnEpochs()
    seen = []
    for _ in range(1000):
        updater.update()
        seen.append(count_progress(updater, "epoch"))
    assert seen == [Fraction(k, 10) for k in range(1, 1001)]


def test_an_epoch_period_without_epochs_is_refused_with_the_remedies():
    """The error names the updater's class and says what to give it."""
    with pytest.raises(ValueError, match=r'NoEpochs has no iterator "main".*epoch_detail.*"iteration"'):
        check_epoch_period(NoEpochs(), Fraction(1))


@pytest.mark.parametrize("updater", [Reading(), OwnEpochs()])
def test_an_updater_that_counts_epochs_may_have_any_period(updater):
    """Epochs of an iterator and epochs of the updater's own both do, whole or in parts."""
    assert check_epoch_period(updater, Fraction(1, 3)) is None


def test_a_part_of_an_epoch_of_unknown_length_is_refused():
    """A loader without a length has whole epochs only, and the error says how to give it one."""
    updater = Reading()
    updater.source = iterators.LoaderIterator(lambda: iter([1]))
    with pytest.raises(ValueError, match=r"fraction of an epoch \(0.5\).*epoch_length"):
        check_epoch_period(updater, Fraction(1, 2))
