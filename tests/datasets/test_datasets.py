"""Datasets: indexing, parts, and the digits."""

import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from chainring.datasets import (
    ConcatenatedDataset,
    DatasetMixin,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
    get_digits,
    split_dataset,
    split_dataset_n,
    split_dataset_n_random,
    split_dataset_random,
)


def joined(parts):
    return [x for part in parts for x in part]


class Squares(DatasetMixin):
    def __len__(self):
        return 5

    def get_example(self, i):
        assert type(i) is int
        assert 0 <= i < 5
        return i * i


ALIKE = {
    "DatasetMixin": Squares(),
    "SubDataset": SubDataset([9, 0, 1, 4, 9, 16, 7], 1, 6),
    "ordered SubDataset": SubDataset(np.array([16, 4, 0, 9, 1]), 0, 5, [2, -1, 1, -2, 0]),
    "TransformDataset": TransformDataset(range(5), lambda i: i * i),
    "ConcatenatedDataset": ConcatenatedDataset([0, 1], [], np.array([4]), [9, 16]),
    "DictDataset": TransformDataset(DictDataset(n=range(5), square=[k * k for k in range(5)]), lambda one: one["square"]),
    "TupleDataset": TransformDataset(TupleDataset(range(5), [k * k for k in range(5)]), lambda pair: pair[1]),
}


@pytest.mark.parametrize("dataset", ALIKE.values(), ids=ALIKE)
class TestIndexing:
    @pytest.mark.parametrize(
        ("index", "expected"),
        [
            (2, 4),
            (-1, 16),
            (-5, 0),
            (np.int64(3), 9),
            (torch.tensor(3), 9),
            (slice(None), [0, 1, 4, 9, 16]),
            (slice(1, -1, 2), [1, 9]),
            (slice(None, None, -2), [16, 4, 0]),
            (slice(3, 99), [9, 16]),
            ([0, -1, 0], [0, 16, 0]),
            (np.array([4, 1]), [16, 1]),
            (torch.tensor([4, 1]), [16, 1]),
            ([True, False, False, False, True], [0, 16]),
            ([], []),
        ],
    )
    def test_every_form_of_index_is_understood(self, dataset, index, expected):
        """Negative numbers, slices, lists and arrays of integers or booleans, alike for all datasets."""
        assert dataset[index] == expected

    @pytest.mark.parametrize("index", [5, -6, [0, 5], [True]])
    def test_an_index_out_of_range_is_refused(self, dataset, index):
        """With the number of examples."""
        with pytest.raises(IndexError, match="5 examples"):
            dataset[index]

    @pytest.mark.parametrize("index", [1.0, "a", None, [0.5], [[0, 1]]])
    def test_an_index_of_another_kind_is_refused(self, dataset, index):
        """With the forms that there are."""
        with pytest.raises(TypeError, match="an index is an integer, a slice"):
            dataset[index]

    def test_iteration_ends_with_the_last_example(self, dataset):
        """As for any sequence."""
        assert list(dataset) == [0, 1, 4, 9, 16]
        assert len(dataset) == 5


@pytest.mark.parametrize(
    ("method", "call"), [("__len__", len), ("get_example", lambda one: DatasetMixin.get_example(one, 0))]
)
def test_a_dataset_says_what_it_must_define(method, call):
    """By the method's name."""
    with pytest.raises(NotImplementedError, match=f"DatasetMixin must define {method}"):
        call(DatasetMixin())


def test_a_tuple_dataset_gives_tuples_for_every_index():
    """A slice, a list and an array of indices give lists of tuples alike."""
    dataset = TupleDataset([1, 2, 3], "abc")
    assert dataset[0] == (1, "a")
    assert dataset[1:] == dataset[[1, 2]] == dataset[np.array([1, 2])] == [(2, "b"), (3, "c")]


def test_a_tuple_dataset_of_different_lengths_is_refused():
    """Naming them."""
    with pytest.raises(ValueError, match=r"same length, got \[3, 2\]"):
        TupleDataset([1, 2, 3], [1, 2])


def test_a_tuple_dataset_of_nothing_is_refused():
    """It needs one."""
    with pytest.raises(ValueError, match="at least one dataset"):
        TupleDataset()


def test_a_transform_is_computed_when_asked_for():
    """Each time, for the one example."""
    asked = []
    dataset = TransformDataset([1, 2, 3], lambda x: asked.append(x) or -x)
    assert (dataset[1], dataset[1], asked) == (-2, -2, [2, 2])


def test_a_transform_that_cannot_be_called_is_refused():
    """At construction, with its kind."""
    with pytest.raises(TypeError, match="transform is a function of one example, got int"):
        TransformDataset([1], 5)


@pytest.mark.parametrize(("start", "finish"), [(-1, 2), (3, 2), (0, 4)])
def test_a_part_outside_the_dataset_is_refused(start, finish):
    """Rule and values."""
    with pytest.raises(ValueError, match=f"0 <= start <= finish <= 3, got {start} and {finish}"):
        SubDataset([1, 2, 3], start, finish)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 3], "from 0 to 2, got some from 0 to 3"),
        ([0, 1, -4], "got some from -4 to 1"),
        ([0, 1], "each of the 3 examples"),
        ([0.0, 1.0, 2.0], "integers, got float64"),
        ([True, False, True], "integers, got bool"),
        ([[0], [1], [2]], "each of the 3 examples"),
    ],
)
def test_an_order_that_is_none_of_the_dataset_is_refused_at_construction(order, message):
    """Before the first epoch comes to the index, and not wrapped around."""
    with pytest.raises(ValueError, match=message):
        SubDataset(np.arange(3), 0, 3, order)


def test_a_dataset_is_split_in_two():
    """In its own order or a given one."""
    first, second = split_dataset([0, 10, 20, 30], 1)
    assert (list(first), list(second)) == ([0], [10, 20, 30])
    first, second = split_dataset([0, 10, 20, 30], 3, order=[3, 0, 2, 1])
    assert (list(first), list(second)) == ([30, 0, 20], [10])


@pytest.mark.parametrize("at", [-1, 5])
def test_a_split_outside_the_dataset_is_refused(at):
    """Rule and value."""
    with pytest.raises(ValueError, match=f"from 0 to 4, the number of examples, got {at}"):
        split_dataset([1, 2, 3, 4], at)


@pytest.mark.parametrize(("size", "n", "sizes"), [(10, 3, [4, 3, 3]), (3, 3, [1, 1, 1]), (7, 1, [7]), (0, 1, [0])])
def test_parts_hold_every_example(size, n, sizes):
    """No remainder is dropped; sizes differ by at most one."""
    parts = split_dataset_n(list(range(size)), n)
    assert [len(part) for part in parts] == sizes
    assert [x for part in parts for x in part] == list(range(size))


@pytest.mark.parametrize("n", [0, 4])
def test_as_many_parts_as_there_cannot_be_are_refused(n):
    """Rule and value."""
    with pytest.raises(ValueError, match=f"n is from 1 to 3, the number of examples, got {n}"):
        split_dataset_n([1, 2, 3], n)


@pytest.mark.parametrize("split", [split_dataset_random, split_dataset_n_random])
class TestRandomSplits:
    def test_a_seed_fixes_the_split(self, split):
        """Every example once; another seed gives another split."""
        contents = [[list(part) for part in split(list(range(50)), 20, seed=seed)] for seed in (1, 1, 2)]
        assert contents[0] == contents[1] != contents[2]
        assert sorted(joined(contents[0])) == list(range(50))
        assert joined(contents[0]) != list(range(50))

    def test_without_a_seed_it_follows_torchs_and_draws_from_no_generator(self, split):
        """A script that seeds torch splits alike whatever was drawn before."""
        torch.manual_seed(5)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        first = [list(part) for part in split(list(range(50)), 20)]
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
        torch.rand(3)
        assert [list(part) for part in split(list(range(50)), 20)] == first


class TestDigits:
    @pytest.mark.parametrize(("ndim", "shape"), [(1, (64,)), (2, (8, 8)), (3, (1, 8, 8))])
    def test_forms_and_dtypes(self, ndim, shape):
        """1,437 and 360 pairs of a float32 image and an int64 label."""
        train, test = get_digits(ndim=ndim)
        assert (len(train), len(test)) == (1437, 360)
        image, label = train[0]
        assert (image.shape, image.dtype, label.dtype) == (shape, np.float32, np.int64)

    def test_images_alone(self):
        """Without labels, the same images."""
        (images, _), (pairs, _) = get_digits(withlabel=False), get_digits()
        assert images.shape == (1437, 64)
        assert np.array_equal(images[7], pairs[7][0])

    def test_pixels_reach_from_zero_to_scale(self):
        """16 grey levels."""
        for scale in (1.0, 255.0):
            images = get_digits(withlabel=False, scale=scale)[0]
            assert (images.min(), images.max()) == (0, scale)
            assert np.array_equal(images, np.round(images / scale * 16) / np.float32(16) * np.float32(scale))

    def test_the_split_is_fixed_and_disjoint(self):
        """Every fifth image of scikit-learn's file is a test image, and each image is in one part."""
        from sklearn.datasets import load_digits

        images = load_digits().images.reshape(-1, 64)
        train, test = get_digits(withlabel=False, scale=16.0)
        assert np.array_equal(test, images[::5])
        assert np.array_equal(train, np.delete(images, np.s_[::5], axis=0))

    def test_loading_draws_nothing_from_the_generators(self):
        """Not even in a process that has not imported scikit-learn, which draws from Python's generator when it is."""
        program = """
            import random, numpy, torch
            from chainring.datasets import get_digits
            random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
            get_digits()
            print(random.random(), numpy.random.rand(), torch.rand(()).item())
        """
        run = [sys.executable, "-c", textwrap.dedent(program)]
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        drawn = f"{random.random()} {np.random.rand()} {torch.rand(()).item()}\n"
        assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == drawn

    @pytest.mark.parametrize("ndim", [0, 4, "2"])
    def test_another_form_is_refused(self, ndim):
        """Rule and value."""
        with pytest.raises(ValueError, match=f"ndim is 1, 2 or 3, got {ndim!r}"):
            get_digits(ndim=ndim)
