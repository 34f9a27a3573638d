"""A StopIteration ends a run if an iterator of the updater has raised it; anywhere else it is an error."""

import pytest
import torch
from toys import Regression, regression_data, same_regression, updater_of

from chainring.iterators import LoaderIterator, SerialIterator
from chainring.training import StandardUpdater, Trainer, Updater, extensions


def stop(*_):
    return next(iter(()))


class Stopping(torch.utils.data.Dataset):
    """Its fifth example is missing."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return next(iter(())) if index == 5 else (torch.ones(3).double(), torch.ones(1).double())


class StoppingModel(Regression):
    def forward(self, x, t):
        return stop()


class Bare(StandardUpdater):
    def update_core(self):
        self.next_batch()
        raise StopIteration


class Unknown(StandardUpdater):
    """Takes from an iterator that it has not been given."""

    def update_core(self):
        self.next_batch()
        next(iter(()))


def stopping(**settings):
    model = same_regression()
    return StandardUpdater(
        SerialIterator(Stopping(), 4, shuffle=False, **settings), torch.optim.SGD(model.parameters()), model
    )


def loaded(**settings):
    model = same_regression()
    loader = torch.utils.data.DataLoader(Stopping(), 4, **settings)
    return StandardUpdater(loader, torch.optim.SGD(model.parameters()), model)


CODE = {
    "dataset": (stopping, "the dataset Stopping of iterator 'main'"),
    "dataset without seeding": (lambda: stopping(example_rng=False), "the dataset Stopping of iterator 'main'"),
    "dataset of a loader": (loaded, "of the loader of iterator 'main'"),
    "dataset in a worker": (lambda: loaded(num_workers=1), "of the loader of iterator 'main'"),
    "collate_fn": (lambda: loaded(collate_fn=stop, sampler=[0] * 8), "of the loader of iterator 'main'"),
    "function of a map": (
        lambda: StandardUpdater(lambda: map(stop, range(3)), torch.optim.SGD(MODEL.parameters()), MODEL),
        "of the loader of iterator 'main'",
    ),
    "converter": (lambda: updater_of(converter=stop), "in stop "),
    "model": (lambda: updater_of(model=StoppingModel()), "in stop "),
    "loss": (lambda: updater_of(loss_func=stop), "in stop "),
    "loss in a micro-batch": (lambda: updater_of(loss_func=stop, accumulate=2), "in stop "),
    "loss without data": (
        lambda: StandardUpdater(None, torch.optim.SGD(MODEL.parameters()), MODEL, loss_func=stop),
        "in stop ",
    ),
    "update_core": (lambda: updater_of(kind=Bare), "in update_core "),
    "iterator that the updater does not know": (lambda: updater_of(kind=Unknown), "in update_core "),
}
MODEL = same_regression()


@pytest.mark.parametrize("name", CODE)
def test_a_stop_iteration_from_other_code_is_an_error(tmp_path, name):
    """It names where, and keeps the original as its cause; the run does not end as if the data had."""
    make, text = CODE[name]
    trainer = Trainer(make(), (10, "iteration"), str(tmp_path))
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        trainer.run()
    assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_loss_that_stops_in_a_later_micro_batch_is_an_error():
    """It is not taken for the end of the data inside of an accumulation."""
    losses = iter([1.0])
    updater = updater_of(loss_func=lambda model, x, t: model(x, t) * next(losses), accumulate=3)
    with pytest.raises(RuntimeError, match="StopIteration was raised in <lambda>"):
        updater.update()


def test_the_end_of_an_iterator_of_the_updater_ends_the_run(tmp_path):
    """By whichever name, in whichever way it is asked, and of whichever kind it is."""

    class Asking(StandardUpdater):
        def update_core(self):
            self.next_batch()
            fetch(self.get_iterator("other"))
            for _ in map(len, self.get_iterator("third")):
                break

    def fetch(iterator):
        return iterator.next()

    others = {
        "other": SerialIterator(regression_data(), 4, repeat=False),
        "third": LoaderIterator(torch.utils.data.DataLoader(regression_data(), 4)),
    }
    model = same_regression()
    iterators = {"main": SerialIterator(regression_data(), 4), **others}
    updater = Asking(iterators, torch.optim.SGD(model.parameters()), model)
    Trainer(updater, out=str(tmp_path)).run()
    assert updater.iteration == 3


class Listed(Updater):
    """Knows nothing of iterators but Python's."""

    def __init__(self, source):
        self.source = source

    def update_core(self):
        self.take()

    def take(self):
        return next(self.source)


class Registered(Listed):
    def get_iterator(self, name):
        return {"main": self.source}[name]


class Counting:
    """An iterator of one's own, in Python."""

    count = 0

    def __next__(self):
        self.count += 1
        return self.check()

    def check(self):
        if self.count > 3:
            raise StopIteration
        return self.count


@pytest.mark.parametrize("kind", [Listed, Registered])
@pytest.mark.parametrize("make", [lambda: iter([1, 2, 3]), lambda: (i for i in range(3)), Counting])
def test_an_updater_of_ones_own_ends_with_its_iterator(tmp_path, kind, make):
    """Whether or not it tells which that is; a list's, a generator, an object with ``__next__``."""
    updater = kind(make())
    Trainer(updater, out=str(tmp_path)).run()
    assert updater.iteration == 3


def test_a_pass_may_end_with_an_iterator_inside_of_another(tmp_path):
    """``map`` over an object with ``__next__``, which ends after three."""
    model = same_regression()
    rows = [part[:4] for part in regression_data().tensors]

    def take(number):
        return rows

    class Wrapping(Counting):
        def __iter__(self):
            return self

    for loader in (lambda: map(take, iter(Counting().__next__, None)), lambda: map(take, Wrapping())):
        iterator = LoaderIterator(loader, repeat=False)
        updater = StandardUpdater(iterator, torch.optim.SGD(model.parameters()), model)
        Trainer(updater, out=str(tmp_path)).run()
        assert updater.iteration == 3


@pytest.mark.parametrize("kind", [Listed, Registered])
def test_code_that_an_updater_of_ones_own_calls_does_not_end_the_run(kind):
    """Only a ``next`` in its own methods does."""
    own = type("Own", (kind,), {"update_core": lambda self: stop(self.take())})
    with pytest.raises(RuntimeError, match="StopIteration was raised in stop"):
        own(iter([1, 2, 3])).update()


def test_an_updater_of_another_class_ends_as_one_of_ours(tmp_path):
    """The trainer asks no more of it than ``update`` and ``iteration``."""

    class Foreign:
        iteration = 0
        comm = Updater.comm
        source = iter([1, 2])
        get_all_models = get_all_iterators = get_all_optimizers = staticmethod(dict)

        def update(self):
            next(self.source)
            self.iteration += 1

        def serialize(self, serializer):
            pass

    updater = Foreign()
    Trainer(updater, out=str(tmp_path)).run()
    assert updater.iteration == 2


def test_an_evaluation_whose_data_raise_stop_iteration_is_an_error(tmp_path):
    """It does not evaluate a part of the data without a word."""
    updater = updater_of()
    trainer = Trainer(updater, (1, "iteration"), str(tmp_path))
    held_out = SerialIterator(Stopping(), 4, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(held_out, updater.get_model("main")), trigger=(1, "iteration"))
    with pytest.raises(RuntimeError, match="the dataset Stopping"):
        trainer.run()
