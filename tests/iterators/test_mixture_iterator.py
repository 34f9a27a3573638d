"""MixtureIterator mixes datasets by weight: exact shares at every prefix, each example once a pass, through any resume."""

import pickle
import random
import time
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from chainring.converters import concat_examples
from chainring.datasets import SubDataset, TransformDataset, TupleDataset
from chainring.iterators import MixtureIterator, SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions

STEP = 1_000_000  # between the values of two sources


def sources(sizes):
    return {f"s{k}": np.arange(size) + k * STEP for k, size in enumerate(sizes)}


def taken(iterator, count):
    """The values of so many batches, or of all that there are."""
    batches = [concat_examples(batch) for _, batch in zip(range(count), iterator, strict=False)]
    return np.concatenate([batch.numpy() if hasattr(batch, "numpy") else batch for batch in batches])


def deviation(values, weights):
    """How far the count of any source is from its share, at the prefix where that is most."""
    names = list(weights)
    counts = np.cumsum(values[:, None] // STEP == np.arange(len(names)), axis=0)
    shares = np.array([float(weights[name]) for name in names]) / sum(map(float, weights.values()))
    return np.abs(counts - np.arange(1, len(values) + 1)[:, None] * shares).max()


def random_weights(drawn, count):
    kinds = [lambda: drawn.random(), lambda: drawn.random() ** 8, lambda: drawn.randint(0, 9), lambda: 0.01]
    weights = {f"s{k}": drawn.choice(kinds)() for k in range(count)}
    return weights if any(weights.values()) else {**weights, "s0": 1}


def test_every_prefix_has_the_shares_within_one_example():
    """Of 100 random weight vectors over 1 to 60 sources, also of one large and many equal ones; a weight of 0 has none."""
    drawn = random.Random(0)
    for trial in range(100):
        count = drawn.choice([1, 2, 3, 5, 8, 60])
        weights = random_weights(drawn, count)
        if trial % 20 == 0:
            weights = {"s0": 0.5} | {f"s{k}": 0.01 for k in range(1, 51)}
        iterator = MixtureIterator(sources([7] * len(weights)), 50, weights=weights, seed=trial)
        values = taken(iterator, 20)
        assert deviation(values, weights) <= 1
        assert {f"s{k}" for k in np.unique(values // STEP)} <= {name for name, weight in weights.items() if weight}


def test_shares_are_counted_from_the_last_change_of_the_weights():
    """50 sequences of changes, which a function makes between two batches."""
    drawn = random.Random(1)
    for trial in range(50):
        count = drawn.choice([2, 3, 6])
        changes = sorted({0, *(10 * drawn.randrange(1, 60) for _ in range(drawn.randrange(5)))})
        sequence = {at: random_weights(drawn, count) for at in changes}
        iterator = MixtureIterator(
            sources([9] * count), 10, seed=trial,
            weights=lambda so_far, sequence=sequence: sequence[max(at for at in sequence if at <= so_far)],
        )  # fmt: skip
        values = taken(iterator, 60)
        for first, last in pairwise([*changes, 600]):
            assert deviation(values[first:last], sequence[first]) <= 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_inside_a_source_the_order_is_that_of_a_serial_iterator(shuffle):
    """So each pass of a source is a permutation, many of a small one while a large one is in its first."""
    data = sources([5, 300])
    iterator = MixtureIterator(data, 8, weights={"s0": 1, "s1": 1}, shuffle=shuffle, seed=4)
    values = taken(iterator, 50)
    for k, name in enumerate(data):
        alone = taken(SerialIterator(data[name], 1, shuffle=shuffle, seed=4), 200)
        assert values[values // STEP == k].tolist() == alone.tolist()
    assert iterator.passes == {"s0": 40, "s1": 0}
    assert (iterator.epoch, iterator.epoch_detail) == (1, 1 + 95 / 305)


def test_weights_are_ratios_and_decimals_are_what_they_are_written_as():
    """The sequence repeats after ten examples at 0.7 and 0.3, which no binary number is."""
    by = [{"s0": 0.7, "s1": 0.3}, {"s0": 7, "s1": 3}, {"s1": np.float32(0.3), "s0": Fraction(7, 10)}]
    first, *others = (taken(MixtureIterator(sources([4, 4]), 10, weights=weights, seed=0), 9) for weights in by[:2])
    assert all(first.tolist() == other.tolist() for other in others)
    kinds = (first // STEP).reshape(9, 10)
    assert (kinds == kinds[0]).all()
    assert MixtureIterator(sources([4, 4]), 10, weights=by[1]).weights == {"s0": 0.7, "s1": 0.3}


def test_weights_are_numbers_of_any_library_and_names_of_any_type():
    """Decimals of NumPy are what they are written as too; names may be numbers, and no number is too large."""
    data = {0: range(100), 1: range(100, 200)}
    expected = taken(MixtureIterator(data, 10, weights={0: 0.75, 1: 0.25}, seed=0), 30).tolist()
    for convert in (
        np.float32,
        np.float64,
        torch.tensor,
        np.array,
        lambda x: Fraction(int(4 * x), 3),
        lambda x: int(4 * x) * 10**400,
    ):
        weights = {0: convert(0.75), 1: convert(0.25)}
        assert taken(MixtureIterator(data, 10, weights=weights, seed=0), 30).tolist() == expected
        assert taken(MixtureIterator(data, 10, weights=lambda count, w=weights: w, seed=0), 30).tolist() == expected
    tenths = MixtureIterator({"a": [1], "b": [2]}, 1, weights={"a": np.float32(0.7), "b": np.float32(0.3)})
    assert tenths.weights == {"a": 0.7, "b": 0.3}


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("drop_finished", [False, True])
def test_without_repeats_it_ends_with_the_first_source_or_goes_on_with_the_others(drop_finished, is_asked):
    """In the ratios of those; each example came at most once, and with ``drop_finished`` all did."""
    data = sources([30, 100, 60])
    weights = {"s0": 2, "s1": 2, "s2": 1}
    given = (lambda count: weights) if is_asked else weights
    iterator = MixtureIterator(data, 7, weights=given, repeat=False, drop_finished=drop_finished, seed=0)
    values = taken(iterator, 1000)
    assert len(np.unique(values)) == len(values)
    assert len(values) == 190 if drop_finished else 75 <= len(values) <= 77
    assert deviation(values[:75], weights) <= 1
    if drop_finished:
        assert deviation(values[77:150], {"s0": 0, "s1": 2, "s2": 1}) <= 2
    with pytest.raises(StopIteration):
        next(iterator)
    assert iterator.weights == {"s0": 0, "s1": 0, "s2": 0}
    iterator.reset()
    assert len(taken(iterator, 1000)) == len(values)


def test_a_source_that_has_ended_is_no_change_of_the_weights():
    """A function that returns the same weights gives what the weights themselves give, to the end."""
    data, weights = sources([30, 100, 61]), {"s0": 2, "s1": 2, "s2": 1}
    settings = {"repeat": False, "drop_finished": True, "seed": 0}
    whole = taken(MixtureIterator(data, 7, weights=weights, **settings), 1000)
    asked = taken(MixtureIterator(data, 7, weights=lambda count: weights, **settings), 1000)
    assert asked.tolist() == whole.tolist()


def test_cut_anywhere_it_goes_on_with_the_same_examples():
    """200 cuts, on 1 to 5 ranks, with other weights at half of them: nothing is lost, and nothing comes twice."""
    drawn = random.Random(2)
    for trial in range(20):
        sizes = [drawn.randrange(5, 40) for _ in range(3)]
        whole, rows, weights = None, [], random_weights(drawn, 3)
        for _ in range(10):
            size = drawn.randrange(1, 6)
            ranks = [MixtureIterator(sources(sizes), 10, weights=weights, seed=trial) for _ in range(size)]
            for rank, iterator in enumerate(ranks):
                if whole is not None:
                    iterator.load_state_dict(whole)
                iterator.share(rank, size)
            for _ in range(drawn.randrange(1, 5)):
                batch = np.empty(10, np.int64)
                for rank, iterator in enumerate(ranks):
                    batch[rank::size] = concat_examples(next(iterator))
                rows.append(batch)
            states = [iterator.state_dict() for iterator in ranks]
            assert all(str(state) == str(states[0]) for state in states)
            whole = states[-1]
            weights = random_weights(drawn, 3) if drawn.random() < 0.5 else weights
        values = np.concatenate(rows)
        for k in range(3):
            alone = SerialIterator(sources(sizes)[f"s{k}"], 1, seed=trial)
            own = values[values // STEP == k]
            assert own.tolist() == (taken(alone, len(own)).tolist() if len(own) else [])


def test_a_copy_goes_on_as_the_iterator_itself():
    """At any distance from the beginning, where examples are computed some thousands at once."""
    iterator = MixtureIterator(sources([50, 30]), 16, weights={"s0": 2, "s1": 1}, seed=0)
    for number in range(700):
        copied = pickle.loads(pickle.dumps(iterator)) if number % 90 == 50 else None
        values = concat_examples(next(iterator))
        assert copied is None or concat_examples(next(copied)).tolist() == values.tolist()


def test_weights_that_change_in_each_batch_take_no_longer_the_more_digits_they_have():
    """The sequence of sources is computed for the examples of the batch alone, and not until it repeats."""

    def ramp(count):
        return {"s0": 0.5 + count / 1e6, "s1": 0.5 - count / 1e6}

    iterator = MixtureIterator(sources([50, 50]), 32, weights=ramp, seed=0)
    began = time.process_time()
    taken(iterator, 300)
    assert time.process_time() - began < 1  # of which 0.1 are needed


def test_other_weights_at_a_resume_are_announced_and_counted_from_there(capsys):
    """One line has both; those of a function that gives the same are none."""
    iterator = MixtureIterator(sources([50, 50]), 10, weights={"s0": 1, "s1": 1}, seed=0)
    taken(iterator, 3)
    changed = MixtureIterator(sources([50, 50]), 10, weights={"s0": 9, "s1": 1})
    changed.load_state_dict(iterator.state_dict())
    assert "weights of iterator 'main'" in capsys.readouterr().out
    assert deviation(taken(changed, 5), {"s0": 9, "s1": 1}) <= 1
    again = MixtureIterator(sources([50, 50]), 10, weights={"s0": 9, "s1": 1})
    again.load_state_dict(changed.state_dict())
    assert "weights" not in capsys.readouterr().out


def test_weights_of_the_script_take_the_place_of_those_of_a_function_at_a_resume(capsys):
    """Said if they are others than those that it gave last."""
    iterator = MixtureIterator(sources([50, 50]), 10, weights=lambda count: {"s0": 1, "s1": 1}, seed=0)
    taken(iterator, 3)
    for share, says in ((1, False), (9, True)):
        again = MixtureIterator(sources([50, 50]), 10, weights={"s0": share, "s1": 1})
        again.load_state_dict(iterator.state_dict())
        assert ("weights of iterator 'main'" in capsys.readouterr().out) == says
        assert deviation(taken(again, 5), {"s0": share, "s1": 1}) <= 1


def test_a_position_of_a_trillion_examples_is_reached_by_its_state():
    """At once, where to walk there would take a year."""
    iterator = MixtureIterator(sources([1000, 3000]), 10, weights={"s0": 0.123456789, "s1": 0.876543211}, seed=0)
    state = iterator.state_dict()
    given = [123_456_789_000, 876_543_211_000]
    far = {**state, "position": 10**12, "given": given}
    began = time.process_time()
    iterator.load_state_dict(far)
    values = taken(iterator, 1)
    assert time.process_time() - began < 0.5
    assert len(values) == 10
    assert iterator.passes == {"s0": given[0] // 1000, "s1": given[1] // 3000}


def test_examples_of_a_later_pass_are_transformed_by_other_random_numbers():
    """Each time that an example comes it has its own, the same whatever the batch size is."""

    def noisy(example):
        return example, random.random()

    data = {name: TransformDataset(values, noisy) for name, values in sources([3, 50]).items()}
    rows = []
    for size in (4, 6):
        iterator = MixtureIterator(data, size, weights={"s0": 1, "s1": 1}, seed=0)
        rows.append([tuple(example) for _ in range(12 // size * 3) for example in next(iterator)])
    assert rows[0] == rows[1]
    assert len({noise for _, noise in rows[0]}) == len(rows[0])


@pytest.mark.parametrize("virtual_ranks", [None, 5])
def test_the_shares_of_a_batch_are_reported_by_an_updater(tmp_path, virtual_ranks):
    """By the names of the sources; a log has the mean since its last row."""
    data = {name: TupleDataset(torch.ones(50, 2), torch.ones(50, 1)) for name in ("s0", "s1")}
    iterator = MixtureIterator(data, 10, weights=lambda count: {"s0": 7 if count < 20 else 3, "s1": 3}, seed=0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updater = StandardUpdater(
        iterator, optimizer, model, loss_func=lambda model, x, t: (model(x) - t).square().mean(), virtual_ranks=virtual_ranks
    )
    trainer = Trainer(updater, (4, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    trainer.run()
    assert trainer.get_extension("LogReport").log[-1]["mixture/s0"] == pytest.approx(0.6)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    "gathered",
    [
        lambda x, y: TupleDataset(x, y),
        lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
        lambda x, y: TransformedTuple(x, y),
        lambda x, y: SubDataset(TupleDataset(x, y), 0, len(x)),
    ],
    ids=["arrays", "tensors", "a subclass with another example", "a part"],
)
def test_arrays_of_equal_columns_are_gathered_and_others_come_one_by_one(gathered, count):
    """With the same examples, also across the ends of passes and of what is computed at once, and of all that there is."""
    sizes = [17, 900, 1, 64, 5, 2000, 30][:count]
    columns = {name: (values, np.stack([values, values * 0.5], 1)) for name, values in sources(sizes).items()}
    kinds = (
        {name: gathered(*of_source) for name, of_source in columns.items()},
        {name: [*zip(*map(list, of_source), strict=True)] for name, of_source in columns.items()},
    )
    weights = {name: 1 + number % 3 for number, name in enumerate(columns)}
    for settings in ({}, {"repeat": False, "drop_finished": True}):
        by_kind = [MixtureIterator(data, 48, weights=weights, seed=0, **settings) for data in kinds]
        for _, batch, other in zip(range(250), *by_kind, strict=False):
            (x, half), (y, other_half) = concat_examples(batch), concat_examples(other)
            assert torch.equal(torch.as_tensor(x), y)
            assert torch.equal(torch.as_tensor(half), other_half)
            assert (batch.columns is None) == (gathered(*columns["s0"]).__class__ is TransformedTuple)
        assert settings == {} or [*by_kind[0], *by_kind[1]] == []


def test_arrays_anywhere_in_memory_are_mixed(tmp_path):
    """Cut out of others at any byte, of one row, or with large rows so far apart that no view of NumPy's holds both."""
    buffer, table = np.arange(4000, dtype=np.uint8), np.arange(80, dtype=np.uint8).reshape(20, 4)
    width, path = 2**20 + 1, tmp_path / "rows"
    with path.open("wb") as file:
        for row, start in enumerate((0, width, 2**43 - width)):
            file.seek(start)
            file.write(bytes([row]) * width)
    rows = np.memmap(path, np.uint8, "r")
    for low, high in [
        (table[::2][:1], table[5:]),
        (table[3:9], table[11:]),
        (np.ndarray((7, 3), "f4", buffer, 1), np.ndarray((50, 3), "f4", buffer, 1010)),
        (np.ndarray(7, "f4", buffer, 2), np.ndarray(50, "f4", buffer, 1013)),
        (np.ndarray((7, 3), "f4", rows, 1), np.ndarray((50, 3), "f4", rows, 1 + 12 * (2**43 // 12 - 60))),
        (np.ndarray(7, "f4", rows, 1), np.ndarray(50, "f4", rows, 2**43 - 203)),
        (rows[: 2 * width].reshape(2, width), rows[-width:].reshape(1, width)),
    ]:
        for data in ({"a": low, "b": high}, {"a": high, "b": low}):
            by_kind = data, {name: list(array) for name, array in data.items()}
            arrays, examples = (MixtureIterator(kind, 8, weights={"a": 2, "b": 1}, seed=0) for kind in by_kind)
            for _ in range(4):
                columns = next(arrays).columns
                assert columns.dtype == low.dtype
                assert columns.tobytes() == np.stack([*next(examples)]).tobytes()


class TransformedTuple(TupleDataset):
    def get_example(self, i):
        return tuple(column[i] for column in self.datasets)


@pytest.mark.parametrize("virtual_ranks", [None, 5])
def test_each_rank_gathers_its_rows_of_a_batch(virtual_ranks):
    """Of arrays, while the shares of the ranks change."""
    whole = MixtureIterator(sources([90, 40]), 10, weights={"s0": 2, "s1": 1}, seed=0)
    parts = [MixtureIterator(sources([90, 40]), 10, weights={"s0": 2, "s1": 1}, seed=0) for _ in range(3)]
    for number in range(90):
        batch, size = concat_examples(next(whole)), 3 - number // 30
        for rank, iterator in enumerate(parts[:size]):
            if number % 30 == 0:
                if virtual_ranks is not None:
                    iterator.use_virtual_ranks(virtual_ranks)
                iterator.share(rank, size)
            rows = iterator.rows_of_share(10) if size > 1 else slice(None)
            assert concat_examples(next(iterator)).tolist() == batch[rows].tolist()


def test_arrays_are_read_when_their_batch_is_due():
    """What is written into them before is in it."""
    data = {"a": np.zeros((50, 2)), "b": np.zeros((50, 2))}
    iterator = MixtureIterator(data, 10, weights={"a": 1, "b": 1}, seed=0)
    next(iterator)
    data["a"][:] = data["b"][:] = 1
    assert concat_examples(next(iterator)).min() == 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"datasets": [np.arange(3)]}, TypeError, "datasets is a mapping"),
        ({"datasets": {}}, ValueError, "at least one dataset"),
        ({"datasets": {"s0": iter(()), "s1": [1]}}, TypeError, "have __len__"),
        ({"weights": [1, 2]}, TypeError, "weights is a mapping"),
        ({"weights": {"s0": 1}}, ValueError, "names of the datasets"),
        ({"weights": {"s0": 1, "s1": 1, "s2": 1}}, ValueError, "names of the datasets"),
        ({"weights": {"s0": -1, "s1": 1}}, ValueError, "at least 0; that of 's0' is -1"),
        ({"weights": {"s0": float("nan"), "s1": 1}}, ValueError, "finite number"),
        ({"weights": {"s0": "1", "s1": 1}}, ValueError, "finite number"),
        ({"weights": {"s0": True, "s1": 1}}, ValueError, "finite number"),
        ({"datasets": {"s0": {"train": [1, 2]}, "s1": [1]}}, TypeError, r"got dict; .*splits\[.train.\]"),
        ({"weights": {"s0": 0, "s1": 0.0}}, ValueError, "above 0"),
        ({"weights": lambda count: [1, 2]}, TypeError, "weights is a mapping"),
        ({"datasets": {"s0": [], "s1": [1]}}, ValueError, "'s0' has no examples"),
        ({"drop_finished": True}, ValueError, "repeat=False"),
        ({"batch_size": 0}, ValueError, "batch size"),
        ({"n_processes": -1}, ValueError, "n_processes"),
    ],
)
def test_what_cannot_be_mixed_is_refused_when_it_is_made(change, error, text):
    """With the rule, the value and the remedy."""
    settings = {"datasets": sources([3, 3]), "batch_size": 2, "weights": {"s0": 1, "s1": 1}} | change
    with pytest.raises(error, match=text):
        MixtureIterator(settings.pop("datasets"), settings.pop("batch_size"), **settings)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_dataset_names_the_source_and_the_index_there(workers):
    """As its user knows the example, whose number in the mixture is another; a worker's has it in its traceback."""
    data = {"s0": list(range(9)), "s1": TransformDataset([4, 2, 0, 1], lambda example: 1 // example)}
    with (
        MixtureIterator(data, 8, weights={"s0": 1, "s1": 1}, shuffle=False, n_processes=workers) as iterator,
        pytest.raises(ZeroDivisionError) as raised,
    ):
        next(iterator)
    assert "raised by s1[2]" in "".join(raised.value.__notes__)


def test_a_function_of_weights_that_has_no_more_is_not_the_end_of_the_data():
    """Such as one that takes the next of a list: a run that ended there would look complete."""
    each = iter([{"s0": 1, "s1": 1}] * 5)
    iterator = MixtureIterator(sources([3, 3]), 2, weights=lambda count: next(each), seed=0)
    taken(iterator, 2)
    with pytest.raises(RuntimeError, match="the function of the weights raised StopIteration"):
        next(iterator)


def test_a_function_of_weights_that_draws_is_refused():
    """At construction, by two calls between which the generators differ; the run's own numbers stay as they are."""
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    for draw in (random.random, np.random.random, lambda: torch.rand(()).item()):
        with pytest.raises(ValueError, match=r"nothing but the number of examples.*default_rng"):
            MixtureIterator(sources([3, 3]), 2, weights=lambda count, draw=draw: {"s0": 1, "s1": draw()}, seed=0)
    assert torch.equal(torch.rand(1), expected)


def test_a_function_may_return_one_mapping_that_it_changes():
    """The weights of a batch are those that it has then."""
    weights = {"s0": 1.0, "s1": 0.0}

    def weights_at(count):
        weights["s1"] = float(count >= 20)
        return weights

    asked = taken(MixtureIterator(sources([30, 30]), 10, weights=weights_at, shuffle=False), 4)
    made_anew = lambda count: {"s0": 1.0, "s1": float(count >= 20)}  # noqa: E731
    assert asked.tolist() == taken(MixtureIterator(sources([30, 30]), 10, weights=made_anew, shuffle=False), 4).tolist()


def test_other_sources_at_a_resume_are_refused():
    """By their names and sizes, and by their order, in which they are counted."""
    state = MixtureIterator(sources([3, 3]), 2, weights={"s0": 1, "s1": 1}).state_dict()
    with pytest.raises(ValueError, match=r"'s1': 4.*'s1': 3"):
        MixtureIterator(sources([3, 4]), 2, weights={"s0": 1, "s1": 1}).load_state_dict(state)
    with pytest.raises(ValueError, match="in the same order"):
        MixtureIterator(dict(reversed(sources([3, 3]).items())), 2, weights={"s0": 1, "s1": 1}).load_state_dict(state)


def test_shuffle_that_changes_at_a_resume_is_refused():
    """As by a SerialIterator, since the examples of the pass would come twice; before the first there are none."""
    iterator, other = (MixtureIterator(sources([9]), 2, weights={"s0": 1}, shuffle=value) for value in (True, False))
    other.load_state_dict(iterator.state_dict())
    next(iterator)
    with pytest.raises(ValueError, match="the saved run had shuffle=True"):
        other.load_state_dict(iterator.state_dict())
