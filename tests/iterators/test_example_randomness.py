"""Random numbers drawn by datasets, and datasets that are gathered and draw none."""

import hashlib
import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from chainring.converters import concat_examples
from chainring.datasets import DatasetMixin, SubDataset, TransformDataset, TupleDataset
from chainring.iterators import MultiprocessIterator, SerialIterator, epoch_order


def draw(x):
    return x, random.random(), float(np.random.rand()), float(torch.rand(()))


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.initial_seed()


def drawing(size=6, **kwargs):
    return SerialIterator(TransformDataset(range(size), draw), **kwargs)


def test_what_an_example_draws_is_a_function_of_seed_epoch_and_index():
    """Neither the batch size, nor the order, nor what ran before changes it; epoch, index and seed do."""
    by_two = drawing(batch_size=2, seed=1)
    first = {(k // 3, example[0]): example for k in range(6) for example in next(by_two)}
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    by_six = drawing(batch_size=6, seed=1, shuffle=False)
    second = {(k, example[0]): example for k in range(2) for example in next(by_six)}
    assert first == second
    assert len({value for example in first.values() for value in example[1:]}) == 36
    assert not set(next(drawing(batch_size=6, seed=2))) & set(first.values())


def test_the_generators_of_an_example_are_seeded_by_a_known_hash():
    """63 bits of BLAKE2b of seed, epoch and index as text: what was drawn in a saved run is drawn in a resumed one."""
    iterator = drawing(batch_size=12, seed=1, shuffle=False)
    expected = []
    for epoch in range(2):
        for index in range(6):
            digest = hashlib.blake2b(f"1\x1f{epoch}\x1f{index}".encode(), digest_size=8).digest()
            key = int.from_bytes(digest, "little") >> 1
            torch_generator = torch.Generator().manual_seed(key)
            numpy_draw = float(np.random.RandomState(key % 2**32).rand())
            expected.append(
                (index, random.Random(key).random(), numpy_draw, float(torch.rand((), generator=torch_generator)))
            )
    assert list(next(iterator)) == expected


def test_generators_are_put_back_after_each_batch():
    """random, numpy.random and torch stand where they stood, torch's initial seed too."""
    iterator = drawing(batch_size=2)
    before = states()
    for _ in range(4):
        next(iterator)
        assert states() == before


def test_generators_are_put_back_when_an_example_fails():
    """A dataset that raises leaves nothing disturbed, and its own error comes out."""

    def fail(x):
        draw(x)
        raise OSError("no such image")

    iterator = SerialIterator(TransformDataset(range(3), fail), 2)
    before = states()
    with pytest.raises(OSError, match="no such image"):
        next(iterator)
    assert states() == before


def test_example_rng_false_leaves_the_generators_to_the_dataset():
    """Draws then come from the global stream, one after the other."""
    random.seed(4)
    expected = [random.random() for _ in range(3)]
    random.seed(4)
    iterator = SerialIterator(TransformDataset(range(3), lambda x: random.random()), 3, shuffle=False, example_rng=False)
    assert list(next(iterator)) == expected


class Of(DatasetMixin):
    """The values of a function of the index, which may draw."""

    def __init__(self, function):
        self.function = function

    def __len__(self):
        return 60

    def get_example(self, i):
        return i, self.function(i)


def save_draw_restore(i):
    state, of_numpy = random.getstate(), np.random.get_state()
    drawn = random.random(), float(np.random.rand())
    random.setstate(state), np.random.set_state(of_numpy)
    return drawn


def seed_itself(i):
    before = random.getrandbits(32) if i % 7 == 0 else 0
    random.seed(i), np.random.seed(i)
    return before, random.random(), float(np.random.rand())


DRAWS = {
    "always": lambda i: draw(i),
    "rarely": lambda i: draw(i) if i % 9 == 5 else None,
    "as many words as NumPy has": lambda i: np.random.bytes(4 * 624)[:9],
    "one normal of two": lambda i: (random.gauss(0, 1), float(np.random.randn())) if i % 2 else None,
    "from its own seed": seed_itself,
    "and restores": save_draw_restore,
    "by the state": lambda i: (random.getstate()[1][5], int(np.random.get_state()[1][5]), torch.initial_seed()),
}


def seed_by_hand(seed, epoch, index):
    key = int.from_bytes(hashlib.blake2b(f"{seed}\x1f{epoch}\x1f{index}".encode(), digest_size=8).digest(), "little") >> 1
    random.seed(key), np.random.seed(key % 2**32), torch.default_generator.manual_seed(key)


@pytest.mark.parametrize("workers", [0, 2])
def test_examples_draw_in_whatever_way_from_generators_seeded_for_each(workers):
    """By methods, by the state, ahead, or after a seed of their own: each example gets what it gets alone."""
    for function in DRAWS.values():
        dataset, expected = Of(function), []
        for index in range(len(dataset)):
            seed_by_hand(1, 0, index)
            expected.append(dataset[index])
        if workers:
            settings = {"shuffle": False, "seed": 1, "repeat": False, "converter": None}
            with MultiprocessIterator(dataset, 20, n_processes=workers, **settings) as iterator:
                examples = [example for batch in iterator for example in batch]
        else:
            examples = [example for batch in SerialIterator(dataset, 20, False, False, seed=1) for example in batch]
        assert examples == expected


def test_generators_are_put_back_with_the_normals_drawn_ahead():
    """Each batch leaves the stream of the training as it was, whether a dataset draws or not."""
    for function in abs, DRAWS["one normal of two"]:
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
        before, of_numpy = states(), np.random.get_state()
        for number, _ in enumerate(SerialIterator(Of(function), 10, False, False)):
            assert states() == before
            assert np.random.get_state()[2:] == of_numpy[2:]
            if number == 3:
                random.gauss(0, 1), np.random.randn()
                before, of_numpy = states(), np.random.get_state()


def draw_in_converter(examples, device):
    return np.array([[random.random(), np.random.rand(), float(torch.rand(()))]] * len(examples))


def test_a_converter_in_a_worker_draws_what_follows_the_last_example():
    """Which nothing has drawn from: so it draws the same for any number of workers."""
    settings = {"shuffle": False, "seed": 1, "repeat": False, "converter": draw_in_converter}
    with MultiprocessIterator(Of(abs), 20, n_processes=2, **settings) as iterator:
        for last, batch in zip((19, 39, 59), iterator, strict=True):
            seed_by_hand(1, 0, last)
            assert concat_examples(batch)[0].tolist() == draw_in_converter([0], None)[0].tolist()


def test_evaluations_of_one_pass_draw_the_same_each_time():
    """After rewind the augmentation repeats; after reset it does not."""
    iterator = drawing(batch_size=4, repeat=False, shuffle=False)
    passes = []
    for _ in range(2):
        passes.append([example for batch in iterator for example in batch])
        iterator.rewind()
    iterator.reset()
    next(iterator)
    iterator.reset()
    assert passes[0] == passes[1]
    assert list(next(iterator)) != passes[0][:4]


ARRAY = np.arange(24, dtype=np.float32).reshape(8, 3)
ENTIRE = {
    "float32 array": ARRAY,
    "float64 vector": np.linspace(0, 1, 8),
    "int8 vector": np.arange(8, dtype=np.int8),
    "bool vector": np.arange(8) % 3 == 0,
    "big-endian array": ARRAY.astype(">f4"),
    "strided array": np.arange(48, dtype=np.int64).reshape(8, 6)[:, ::2],
    "tensor": torch.arange(16).reshape(8, 2),
    "half vector": torch.arange(8, dtype=torch.float16),
    "bfloat16 tensor": torch.arange(8, dtype=torch.bfloat16).reshape(8, 1),
    "TensorDataset": TensorDataset(torch.from_numpy(ARRAY), torch.arange(8)),
    "TupleDataset": TupleDataset(ARRAY, torch.arange(8), np.arange(8, dtype=np.int32)),
    "TupleDataset in itself": TupleDataset(TupleDataset(ARRAY), np.arange(8)),
    "SubDataset": SubDataset(TupleDataset(np.arange(20), torch.arange(20.0)), 5, 13),
    "ordered SubDataset": SubDataset(np.arange(10), 1, 9, [9, 0, 8, 1, 7, 2, 6, 3, -6, -5]),
    "SubDataset of TensorDataset": SubDataset(TensorDataset(torch.arange(9)), 1, 9),
}


@pytest.mark.parametrize("name", ENTIRE)
def test_gathered_columns_equal_examples_asked_one_by_one(name):
    """Bit for bit, in values, dtypes, shapes and structure."""
    dataset = ENTIRE[name]
    batch = SerialIterator(dataset, 5, seed=1).next()
    assert batch.columns is not None
    asked = concat_examples([dataset[i] for i in epoch_order(1, 0, 8).tolist()[:5]])
    gathered = concat_examples(batch)
    pairs = [(gathered, asked)]
    while pairs:
        one, other = pairs.pop()
        assert type(one) is type(other)
        if isinstance(one, tuple):
            pairs += zip(one, other, strict=True)
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


class Doubled(TupleDataset):
    def get_example(self, i):
        x, t = super().get_example(i)
        return 2 * x, t


class Indexed(TupleDataset):
    def __getitem__(self, index):
        return 2 * self.datasets[0][index], 0


class Shifted(SubDataset):
    def get_example(self, i):
        return super().get_example(i)[0] * 2, 0


class Augmented(TensorDataset):
    def __getitem__(self, index):
        return 2 * self.tensors[0][index], 0


class Wrapper:
    """Passes on what it does not know, as wrappers often do."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return 2 * self.inner[i][0], 0


class Twice(np.ndarray):
    def __getitem__(self, i):
        return 2 * int(np.asarray(self)[i]), 0


OVERRIDDEN = {
    "get_example of TupleDataset": Doubled(np.arange(8), np.zeros(8)),
    "__getitem__ of TupleDataset": Indexed(np.arange(8)),
    "get_example of SubDataset": Shifted(TupleDataset(np.arange(8)), 0, 8),
    "__getitem__ of TensorDataset": Augmented(torch.arange(8)),
    "a wrapper that delegates attributes": Wrapper(TupleDataset(np.arange(8))),
    "a subclass of ndarray": np.arange(8).view(Twice),
    "a part of an overridden one": SubDataset(Doubled(np.arange(8), np.zeros(8)), 0, 8),
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_example_is_never_passed_by(name):
    """A dataset that computes its examples is asked for each, even where arrays lie underneath."""
    batch = SerialIterator(OVERRIDDEN[name], 8, shuffle=False).next()
    assert batch.columns is None
    assert [int(example[0]) for example in batch] == [2 * i for i in range(8)]


class Asked(DatasetMixin):
    def __init__(self):
        self.asked = []

    def __len__(self):
        return 4

    def get_example(self, i):
        self.asked.append(i)
        return float(i)


def test_a_users_dataset_is_asked_for_exactly_the_examples_of_the_batch():
    """Once each, with plain integers, in the order of the epoch."""
    dataset = Asked()
    SerialIterator(dataset, 3, seed=1).next()
    assert dataset.asked == epoch_order(1, 0, 4).tolist()[:3]
    assert all(type(i) is int for i in dataset.asked)


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([None, 1]), np.array(["2020-01-01"], "M8[D]")])
def test_arrays_of_other_things_than_numbers_are_asked_one_by_one(array):
    """So that a converter says what is wrong with an example."""
    batch = SerialIterator(array, 1, shuffle=False).next()
    assert batch.columns is None
    with pytest.raises(TypeError, match=r"example 0|dtype"):
        concat_examples(batch)
