"""FunctionIterator: an endless stream whose batches are made by a function of their index."""

import inspect
import random

import numpy as np
import pytest
import torch

import forked
from chainring.iterators import Batch, FunctionIterator
from chainring.training import StandardUpdater, Trainer, extensions


def draw(index):
    return torch.rand(4) + random.random() + np.random.rand() + index


def rows(iterator, count):
    return [next(iterator).columns.tolist() for _ in range(count)]


def generators():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_batch_is_the_same_whatever_ran_before_and_in_any_process():
    """All generators are seeded from (seed, index) for the call, and restored after it."""
    before = generators()
    whole = rows(FunctionIterator(draw, seed=5), 4)
    assert generators() == before
    iterator = FunctionIterator(draw, seed=5)
    for expected in whole:
        random.random(), np.random.rand(), torch.rand(3)
        assert next(iterator).columns.tolist() == expected
    program = "import random\nimport numpy as np\nimport torch\nfrom chainring.iterators import FunctionIterator\n"
    program += (
        inspect.getsource(draw)
        + "iterator = FunctionIterator(draw, seed=5)\nprint([next(iterator).columns.tolist() for _ in range(4)])"
    )
    other = forked.run(["-c", program])
    assert other.stdout.strip() == str(whole)
    assert rows(FunctionIterator(draw, seed=6), 4) != whole
    assert len({str(batch) for batch in whole}) == 4


def test_a_resumed_run_makes_no_batch_again():
    """The state is a position and the seed; the calls go on with the next index."""
    asked = []

    def make(index):
        asked.append(index)
        return torch.rand(3)

    iterator = FunctionIterator(make, 4)
    whole = rows(iterator, 6)
    state = iterator.state_dict()
    whole += rows(iterator, 3)
    asked.clear()
    torch.manual_seed(99)
    again = FunctionIterator(make, 4)
    again.load_state_dict(state)
    assert (rows(again, 3), asked) == (whole[6:], [6, 7, 8])
    assert (again.epoch, again.epoch_detail) == (2, 2.25)


def test_epochs_are_counted_by_epoch_length():
    """As of any iterator; progress is exact."""
    iterator = FunctionIterator(draw, 2)
    found = []
    for _ in range(3):
        next(iterator)
        found.append((iterator.epoch, iterator.epoch_detail, iterator.previous_epoch_detail, iterator.is_new_epoch))
    assert found == [(0, 0.5, 0.0, False), (1, 1.0, 0.5, True), (1, 1.5, 1.0, False)]
    assert iterator.progress == (1, 1, 2)


def test_without_epoch_length_there_are_no_epochs_and_triggers_in_epochs_are_refused(tmp_path):
    """Otherwise a run to (2, "epoch") would never end; iterations work."""
    model = torch.nn.Linear(4, 1)

    def train(stop):
        updater = StandardUpdater(
            FunctionIterator(lambda index: torch.rand(2, 4)),
            torch.optim.SGD(model.parameters(), 0.1),
            model,
            loss_func=lambda model, x: model(x).mean(),
        )
        trainer = Trainer(updater, stop, out=tmp_path)
        trainer.extend(extensions.LogReport(), trigger=(2, "iteration"))
        trainer.run()
        return updater

    updater = train((3, "iteration"))
    assert (updater.iteration, updater.epoch, updater.epoch_detail) == (3, 0, 0.0)
    with pytest.raises(
        ValueError, match=r"iterator that counts epochs, and FunctionIterator has none. Give it an epoch_length"
    ):
        train((2, "epoch"))


def test_an_error_of_the_function_names_the_index_and_is_tried_again():
    """The generators are restored, and nothing is counted."""

    def make(index):
        if index == 1 and failures:
            raise OSError(failures.pop())
        return torch.rand(2)

    failures = []
    whole = rows(FunctionIterator(make, seed=1), 2)
    failures.append("no simulator")
    iterator, before = FunctionIterator(make, seed=1), generators()
    next(iterator)
    with pytest.raises(OSError, match="no simulator") as caught:
        next(iterator)
    assert any("function(1)" in note for note in caught.value.__notes__)
    assert generators() == before
    assert next(iterator).columns.tolist() == whole[1]


def test_stop_iteration_raised_by_the_function_is_an_error():
    """It does not look like the end of the data."""
    with pytest.raises(RuntimeError, match=r"function\(0\) of iterator 'main' raised StopIteration; its stream is endless"):
        next(FunctionIterator(lambda index: next(iter(()))))


@pytest.mark.parametrize(("result", "name"), [(None, "NoneType"), (iter([1]), "list_iterator")])
def test_a_function_that_returns_no_batch_is_refused(result, name):
    """A missing return, or a generator."""
    with pytest.raises(TypeError, match=rf"function\(0\) of iterator 'main' returned {name}; it returns one batch"):
        next(FunctionIterator(lambda index: result))


def test_ranks_share_the_rows_of_the_same_batch():
    """Each calls function(index) and takes every size-th row; a Batch of examples is cut too."""
    for make in (draw, lambda index: Batch([index + k + random.random() for k in range(4)])):
        whole = FunctionIterator(make, seed=1)
        shares = [FunctionIterator(make, seed=1) for _ in range(3)]
        for rank, share in enumerate(shares):
            share.share(rank, 3)
        for _ in range(2):
            batch = [*next(whole)]
            for rank, share in enumerate(shares):
                assert [*next(share)] == batch[rank::3]


def test_ranks_cannot_share_what_cannot_be_cut():
    """Refused with the remedy: each would train on all of it."""

    class Graphs:
        def __len__(self):
            return 5

    iterator = FunctionIterator(lambda index: Graphs())
    assert len(next(iterator)) == 5
    iterator.share(0, 2)
    with pytest.raises(ValueError, match="the batch is a Graphs, which cannot be cut into rows; return a tuple"):
        next(iterator)


def test_what_has_no_rows_counts_as_one_example_of_the_first_rank():
    """A number, say."""
    iterators = [FunctionIterator(lambda index: 0.5) for _ in range(2)]
    for rank, iterator in enumerate(iterators):
        iterator.share(rank, 2)
    assert [(batch.columns, batch.weight) for batch in map(next, iterators)] == [(0.5, 1), (0.5, 0)]


def test_reset_goes_on_with_batches_that_were_not_used_and_rewind_repeats():
    """From the beginning of the next epoch."""
    iterator = FunctionIterator(lambda index: torch.tensor([index]), 3)
    rows(iterator, 4)
    iterator.reset()
    assert (iterator.epoch_detail, rows(iterator, 2)) == (0.0, [[6], [7]])
    iterator.rewind()
    assert rows(iterator, 2) == [[6], [7]]


def test_another_epoch_length_begins_at_the_end_of_an_epoch_only():
    """The error has both lengths."""
    iterator = FunctionIterator(draw, 3)
    rows(iterator, 3)
    at_end = iterator.state_dict()
    rows(iterator, 1)
    other = FunctionIterator(draw, 2)
    other.load_state_dict(at_end)
    rows(other, 2)
    assert other.epoch == 2
    with pytest.raises(ValueError, match="epoch_length = 2, the saved run had 3; another length can begin at the end"):
        FunctionIterator(draw, 2).load_state_dict(iterator.state_dict())


def test_another_seed_holds_from_the_next_batch_on_and_is_announced(capsys):
    """Without a seed the saved one holds."""
    iterator = FunctionIterator(draw, seed=1)
    rows(iterator, 2)
    for seed, expected in ((7, 7), (None, 1)):
        other = FunctionIterator(draw, seed=seed)
        other.load_state_dict(iterator.state_dict())
        assert other.seed == expected
        assert ("seed of iterator 'main'" in capsys.readouterr().out) == (seed is not None)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (([1],), TypeError, "called with an index, function.0.: got list"),
        ((lambda: 1,), TypeError, "too many positional arguments"),
        ((draw, 0), ValueError, "epoch_length counts batches and is at least 1, got 0"),
        ((draw, 2.5), ValueError, "got 2.5"),
    ],
)
def test_other_arguments_are_refused_at_construction(arguments, error, says):
    """With the rule and the value."""
    with pytest.raises(error, match=says):
        FunctionIterator(*arguments)
    with pytest.raises(TypeError, match=r"a seed is an integer or None, got 1\.5"):
        FunctionIterator(draw, seed=1.5)
