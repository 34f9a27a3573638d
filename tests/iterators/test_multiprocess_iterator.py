"""MultiprocessIterator: the batches of SerialIterator, made in worker processes."""

import copy
import functools
import multiprocessing
import os
import pickle
import random

import numpy as np
import pytest
import torch
from examples_in_workers import Dataset, Noisy, what_is_held
from torch.utils.data import TensorDataset

from chainring import report
from chainring.converters import concat_examples
from chainring.iterators import MultiprocessIterator, SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions

NOISE = torch.arange(6.0)
STRUCTURES = {
    "tuples": lambda i: (np.full(3, i, np.float32), i, NOISE * i),
    "mappings": lambda i: {"x": np.full((2, 2), i, np.int16), "y": i * 0.5},
    "arrays": lambda i: np.full(4, i, np.float64),
    "numbers": lambda i: i,
    "booleans": lambda i: i % 2 == 0,
    "bfloat16": lambda i: (NOISE * i).to(torch.bfloat16),
    "complex": lambda i: torch.complex(NOISE, NOISE * i),
    "no numbers at all": lambda i: torch.ones(0),
}


def assert_same(ours, theirs):
    torch.testing.assert_close(concat_examples(ours), concat_examples(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("n_processes", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 3])
def test_batches_are_those_of_a_serial_iterator(n_processes, seed):
    """Bit for bit, draws included, for any number of workers."""
    serial = SerialIterator(Noisy(10), 4, seed=seed)
    with MultiprocessIterator(Noisy(10), 4, n_processes=n_processes, n_prefetch=2, seed=seed) as iterator:
        for _ in range(9):
            assert_same(next(iterator), next(serial))
            assert (iterator.epoch_detail, iterator.is_new_epoch) == (serial.epoch_detail, serial.is_new_epoch)


@pytest.mark.parametrize("name", STRUCTURES)
def test_columns_are_what_concat_examples_gives(name):
    """Whatever the examples are made of; and the batch is a sequence of examples still."""
    dataset = Dataset(5, STRUCTURES[name])
    serial = SerialIterator(dataset, 5, shuffle=False)
    with MultiprocessIterator(dataset, 5, shuffle=False, n_processes=1) as iterator:
        batch = next(iterator)
        assert batch.columns is not None
        assert_same(batch, next(serial))
        assert len(batch) == len([*batch]) == batch.weight == 5
        assert_same(batch[1::2], [*batch][1::2])


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 1), lambda x: {"x": x}], ids=["bare", "tuple", "mapping"])
def test_large_columns_come_through_shared_memory(wrap):
    """Also those of examples that are bare arrays or mappings; they may be written to."""
    with MultiprocessIterator(Dataset(4, lambda i: wrap(np.full((256, 256), i))), 4, n_processes=1) as iterator:
        columns = next(iterator).columns
        large = columns if torch.is_tensor(columns) else columns[0] if isinstance(columns, tuple) else columns["x"]
        assert large.is_shared()
        large += 1


@pytest.mark.parametrize(
    "get",
    [
        lambda i: np.arange(i),
        lambda i: f"example {i}",
        lambda i: {"x": torch.ones(i), "name": str(i)},
        lambda i: torch.ones(i, dtype=torch.bfloat16),
        lambda i: None,
    ],
    ids=["ragged arrays", "strings", "ragged tensors with names", "ragged bfloat16", "nothing"],
)
def test_what_cannot_be_collated_comes_as_examples(get):
    """The examples are those of the dataset."""
    with MultiprocessIterator(Dataset(4, get), 4, shuffle=False, n_processes=1) as iterator:
        batch = next(iterator)
        assert batch.columns is None
        assert repr([*batch]) == repr([get(i) for i in range(4)])


def test_ragged_examples_can_be_padded_in_the_worker_or_by_the_updater():
    """Both give the same tensor."""
    pad = functools.partial(concat_examples, padding=-1)
    dataset = Dataset(4, lambda i: np.arange(i))
    with (
        MultiprocessIterator(dataset, 4, shuffle=False, n_processes=1, converter=pad) as there,
        MultiprocessIterator(dataset, 4, shuffle=False, n_processes=1) as here,
    ):
        assert torch.equal(next(there).columns, pad(next(here)))


def test_a_converter_of_ones_own_runs_in_the_worker():
    """It is called with the examples and no device, and what it returns is passed on."""
    with MultiprocessIterator(Dataset(4, int), 2, converter=lambda xs, device: (xs, os.getpid(), device)) as iterator:
        examples, pid, device = concat_examples(next(iterator))
        assert (len(examples), device) == (2, None)
        assert pid in [child.pid for child in multiprocessing.active_children()]


def test_without_a_converter_examples_are_those_of_a_serial_iterator():
    """Python numbers stay Python numbers, for a converter in the updater that wants them."""
    with MultiprocessIterator(Dataset(4, lambda i: (i, i / 3)), 2, n_processes=1, seed=1, converter=None) as iterator:
        assert list(next(iterator)) == list(next(SerialIterator(Dataset(4, lambda i: (i, i / 3)), 2, seed=1)))


def test_whole_arrays_are_gathered_and_start_no_worker():
    """A gather costs less than handing it over."""
    data = TensorDataset(torch.arange(10), torch.rand(10, 3))
    iterator, serial = MultiprocessIterator(data, 4, n_processes=2, seed=1), SerialIterator(data, 4, seed=1)
    for _ in range(4):
        assert_same(next(iterator), next(serial))
    assert multiprocessing.active_children() == []


def test_without_example_rng_each_worker_draws_from_a_stream_of_its_own():
    """Each worker draws random numbers of its own."""
    draws = Dataset(8, lambda i: (random.random(), float(np.random.rand()), float(torch.rand(()))))
    with MultiprocessIterator(draws, 1, n_processes=2, example_rng=False) as iterator:
        rows = [tuple(value.item() for value in concat_examples(next(iterator))) for _ in range(8)]
    assert len({value for row in rows for value in row}) == 24


def test_workers_use_one_thread_each():
    """They share the machine with one another."""
    with MultiprocessIterator(Dataset(2, lambda i: torch.get_num_threads()), 2, n_processes=1) as iterator:
        assert next(iterator).columns.tolist() == [1, 1]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_other_start_methods_give_the_same_batches(start_method):
    """And leave nothing behind either."""
    serial = SerialIterator(Noisy(6), 4)
    with MultiprocessIterator(Noisy(6), 4, n_processes=1, start_method=start_method) as iterator:
        for _ in range(3):
            assert_same(next(iterator), next(serial))
    assert multiprocessing.active_children() == []


def test_a_dataset_that_cannot_be_pickled_is_refused_where_it_must_be():
    """The error says what failed and what to do."""
    iterator = MultiprocessIterator(Dataset(4, lambda i: i), 2, n_processes=2, start_method="spawn")
    with pytest.raises(TypeError, match=r"'spawn' are sent the dataset.*lambda.*start_method=\"fork\""):
        next(iterator)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_goes_on_by_itself_and_leaves_the_original_alone(make_copy):
    """Both return what comes after the place of the copying."""
    serial = SerialIterator(Noisy(10), 4, seed=1)
    iterator = MultiprocessIterator(Noisy(10), 4, n_processes=1, seed=1)
    assert_same(next(iterator), next(serial))
    other = make_copy(iterator)
    for _ in range(3):
        expected = next(serial)
        assert_same(next(iterator), expected)
        assert_same(next(other), expected)
        assert iterator.epoch_detail == other.epoch_detail == serial.epoch_detail


def test_an_error_of_the_order_sampler_is_raised_when_its_epoch_comes():
    """Not when it is fetched ahead."""

    def order(seed, epoch, size):
        return range(size - epoch)

    with MultiprocessIterator(Dataset(4, int), 2, n_processes=2, n_prefetch=3, order_sampler=order) as iterator:
        assert [next(iterator).columns.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"gave 4 for the first and 3 for epoch 1"):
                next(iterator)


def test_a_pass_without_repeat_ends_and_begins_again():
    """As of an Evaluator's iterator: the same processes, and the same draws each time."""
    with MultiprocessIterator(Noisy(10), 4, False, False, n_processes=2) as iterator:
        first = [concat_examples(batch) for batch in iterator]
        workers = {child.pid for child in multiprocessing.active_children()}
        assert next(iterator, None) is None
        iterator.rewind()
        torch.testing.assert_close([concat_examples(batch) for batch in iterator], first, rtol=0, atol=0)
        assert {child.pid for child in multiprocessing.active_children()} == workers
    assert [len(batch["i"]) for batch in first] == [4, 4, 2]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"n_processes": 0}, ValueError, "n_processes is an integer of at least 1, got 0"),
        ({"n_prefetch": -1}, ValueError, "n_prefetch is an integer of at least 0, got -1"),
        ({"dataset_timeout": 0}, ValueError, "a positive number of seconds .* got 0"),
        ({"dataset_timeout": float("nan")}, ValueError, "a positive number of seconds .* got nan"),
        ({"start_method": "thread"}, ValueError, "one of .*'spawn'.* got 'thread'"),
        ({"converter": "concat"}, TypeError, "called with \\(examples, device\\), got str"),
    ],
)
def test_settings_out_of_range_are_refused(settings, error, says):
    """At construction, with the rule and the value."""
    with pytest.raises(error, match=says):
        MultiprocessIterator(Noisy(4), 2, **settings)


def train(make, out):
    """Three epochs with an evaluation and a snapshot each; the rows of the log."""
    torch.manual_seed(1)
    data = Dataset(12, lambda i: (torch.rand(3) + i, torch.ones(1) * i))
    model = torch.nn.Linear(3, 1)

    def loss(model, x, t):
        return {"loss": (model(x) - t).abs().mean()}

    updater = StandardUpdater(make(data, 4), torch.optim.SGD(model.parameters(), 1e-3), model, loss_func=loss)
    trainer = Trainer(updater, (3, "epoch"), out=out)
    evaluator = extensions.Evaluator(make(data, 5, False, False), model, eval_func=functools.partial(_evaluate, model))
    trainer.extend(evaluator)
    trainer.extend(extensions.snapshot(n_retains=1))
    trainer.extend(log := extensions.LogReport())
    trainer.run()
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in log.log]


def _evaluate(model, x, t):
    report({"error": (model(x) - t).square().mean()}, model)
    return {"loss": (model(x) - t).abs().mean()}


def test_it_serves_a_trainer_with_an_evaluator_and_snapshots(tmp_path):
    """The log is that of a run with serial iterators; nothing is left behind."""
    before = what_is_held()
    ours = train(functools.partial(MultiprocessIterator, n_processes=2), tmp_path / "ours")
    assert what_is_held() == before
    assert ours == train(SerialIterator, tmp_path / "theirs")
    assert len(ours) == 3
    assert {"main/loss", "validation/main/error"} <= set(ours[0])


class Converter:
    """Keeps the examples that it is given, with their types."""

    def __init__(self):
        self.seen = []

    def __call__(self, batch, device):
        self.seen.append([[(type(item), str(item)) for item in example] for example in batch])
        return torch.ones(len(batch))


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (self.factor * x).mean()


def raw(i):
    return i, np.float32(i), np.int16(i), i % 2 == 0, 0.5 * i, np.full(2, i), torch.tensor([i]), {"i": i}


def seen_by(iterator, use):
    converter, model = Converter(), Plain()
    with iterator:
        if use == "updater":
            updater = StandardUpdater(iterator, torch.optim.SGD(model.parameters()), model, converter=converter)
            for _ in range(3):
                updater.update()
        else:
            extensions.Evaluator(iterator, model, converter).evaluate()
    return converter.seen


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("use", ["updater", "evaluator"])
def test_a_converter_of_the_updaters_own_gets_the_examples_as_the_dataset_gives_them(start_method, use):
    """Numbers stay numbers of their type, so that a mapping finds them: as from a SerialIterator, values and types."""
    settings = {"repeat": use == "updater", "shuffle": False}
    iterator = MultiprocessIterator(Dataset(5, raw), 2, n_processes=1, start_method=start_method, **settings)
    assert seen_by(iterator, use) == seen_by(SerialIterator(Dataset(5, raw), 2, **settings), use)


def test_workers_that_have_begun_to_collate_begin_again_for_another_converter():
    """Batches that were taken by hand before came as tensors."""
    with MultiprocessIterator(Dataset(6, STRUCTURES["numbers"]), 2, shuffle=False, n_processes=1) as iterator:
        assert next(iterator).columns is not None
        model = Plain()
        seen = []
        updater = StandardUpdater(
            iterator,
            torch.optim.SGD(model.parameters()),
            model,
            converter=lambda batch, device: seen.extend(batch) or torch.ones(2),
        )
        updater.update()
        assert seen == [2, 3]
        assert all(type(example) is int for example in seen)


def test_a_converter_in_the_workers_still_makes_the_columns():
    """The one that the iterator is given; the updater's sees their rows."""
    seen, model = [], Plain()
    with MultiprocessIterator(Dataset(4, STRUCTURES["numbers"]), 2, shuffle=False, n_processes=1, converter=doubled) as it:
        convert = lambda batch, device: seen.extend(batch) or torch.ones(2)  # noqa: E731
        StandardUpdater(it, torch.optim.SGD(model.parameters()), model, converter=convert).update()
    assert [int(example) for example in seen] == [0, 2]
    assert all(isinstance(example, torch.Tensor) for example in seen)


def doubled(batch, device):
    return 2 * concat_examples(batch, device)
