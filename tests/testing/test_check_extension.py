"""check_extension finds each defect that an extension can have, and passes one that has none."""

import pytest
import torch
from torch import nn

from chainring import iterators, report, training
from chainring.testing import FakeUpdater, check_extension


class Total(training.Extension):
    """As it should be: reports the sum of the losses."""

    total = 0.0

    def __call__(self, trainer):
        self.total += trainer.observation["main/loss"]
        report({"total": self.total})

    def serialize(self, serializer):
        self.total = serializer("total", self.total)


class SavesNothing(Total):
    def serialize(self, serializer):
        pass


class LoadsNothing(Total):
    def serialize(self, serializer):
        serializer("total", self.total)


class BeginsAnew(Total):
    """Loses in initialize what was loaded."""

    def initialize(self, trainer):
        self.total = 0.0


class KeepsRows(training.Extension):
    """Shows what it forgets in an attribute only."""

    def __init__(self):
        self.rows = []

    def __call__(self, trainer):
        self.rows.append(trainer.observation["main/loss"])


class KeepsInTheClass(Total):
    totals = [0.0]  # noqa: RUF012 - the defect

    def __call__(self, trainer):
        self.totals[0] += 1
        report({"total": self.totals[0]})


class EndsWhatItHasNotBegun(Total):
    def initialize(self, trainer):
        self.file = 1

    def finalize(self):
        del self.file


class EndsOnce(Total):
    held = True

    def finalize(self):
        if not self.held:
            raise RuntimeError("not open")
        self.held = False


class FailsToo(Total):
    def on_error(self, trainer, exception):
        raise OSError("the disk")


class SetsTheRate(training.Extension):
    """Changes the optimizer by a count of its own, which it does not save."""

    calls = 0

    def __call__(self, trainer):
        self.calls += 1
        trainer.updater.get_optimizer("main").param_groups[0]["lr"] = 0.1 / self.calls


class TwoArguments:
    def __call__(self, trainer, more):
        pass


def trained():
    net = nn.Linear(2, 1)
    source = iterators.SerialIterator(list(torch.ones(6, 2)), 2)
    loss = lambda model, x: model(x).mean()  # noqa: E731
    return training.StandardUpdater(source, torch.optim.SGD(net.parameters(), 0.1), net, loss_func=loss)


def test_a_sound_extension_passes():
    """Of one's own, a function, and one that is made of the updater."""
    check_extension(Total)
    check_extension(lambda: lambda trainer: None)
    check_extension(Total, updater=lambda: FakeUpdater(2, {"main/loss": [1.0] * 9}), trigger=(2, "iteration"))
    made = []
    check_extension(lambda updater: made.append(updater) or Total(), iterations=2)
    assert {type(updater) for updater in made} == {FakeUpdater}


@pytest.mark.parametrize(
    ("broken", "settings", "said"),
    [
        (SavesNothing, {}, r"saved after iteration 1 .*in iteration 2: observation/total was .*, is .*serialize"),
        (LoadsNothing, {}, r"state saved after iteration 1 has that state: state/total was .*self\.x = serializer"),
        (BeginsAnew, {}, r"saved after iteration 1 .*total was"),
        (KeepsRows, {"result": lambda own: own.rows}, r"saved after iteration 1 .*result/0 was"),
        (KeepsInTheClass, {}, r"created again behaves alike; in iteration 1: observation/total was 1.0, is 7.0"),
        (
            EndsWhatItHasNotBegun,
            {},
            r"fails before it is initialized ends with that error alone.*AttributeError.*finalize\(\)",
        ),
        (EndsOnce, {}, r"finalize may be called again: RuntimeError: not open"),
        (FailsToo, {}, r"fails in its fourth iteration ends with that error alone.*OSError: the disk"),
        (SetsTheRate, {"updater": trained}, r"updater/optimizer:main/param_groups/0/lr was"),
        (TwoArguments, {}, r"an extension can be registered: TypeError.*more"),
        (Total, {"trigger": (9, "iteration")}, r"only if the extension is called: not in 6 iterations. Give trigger="),
    ],
)
def test_a_broken_one_does_not(broken, settings, said):
    """The rule, what was found, and what to do."""
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        check_extension(broken, **settings)


def test_the_failures_on_purpose_are_not_logged(logged):
    """What a trainer says when a run fails would look like a defect."""
    check_extension(Total)
    assert logged == []
