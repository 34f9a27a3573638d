"""check_updater finds each defect that an updater can have, and passes one that has none."""

import pytest
import torch
from torch import nn

from chainring import report, training
from chainring.iterators import SerialIterator
from chainring.serializers import Serializer
from chainring.testing import check_updater


class Sound(training.Updater):
    """As it should be: follows the sign of the gradient, and reports a running mean of the loss."""

    def __init__(self, repeat=True):
        self.batches = SerialIterator(list(torch.arange(12.0).reshape(6, 2)), 2, repeat=repeat)
        self.model = nn.Linear(2, 1)
        self.mean = 0.0

    def get_iterator(self, name):
        return {"main": self.batches}[name]

    def get_model(self, name):
        return {"main": self.model}[name]

    def update_core(self):
        self.model.zero_grad()
        loss = self.model(torch.stack([*next(self.batches)])).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.01 * parameter.grad.sign()
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        report({"mean": self.mean})

    def serialize(self, serializer):
        super().serialize(serializer)
        self.mean = serializer("mean", self.mean)


class SavesNoMean(Sound):
    def serialize(self, serializer):
        training.Updater.serialize(self, serializer)


class SavesTheMeanOnly(Sound):
    def serialize(self, serializer):
        self.mean = serializer("mean", self.mean)


class SavesTheCountOnly(Sound):
    def serialize(self, serializer):
        self.iteration = serializer("iteration", self.iteration)
        self.mean = serializer("mean", self.mean)


class HidesItsIterator(Sound):
    def get_iterator(self, name):
        raise KeyError(name)


class HidesItsModel(Sound):
    def get_model(self, name):
        raise KeyError(name)


class CountsTwice(Sound):
    def update_core(self):
        super().update_core()
        self.iteration += 1


class CountsNothing(Sound):
    def update(self):
        self.update_core()


class EndsOnce(Sound):
    is_open = True

    def finalize(self):
        if not self.is_open:
            raise RuntimeError("not open")
        self.is_open = False


class CannotEnd(Sound):
    def finalize(self):
        raise RuntimeError("held by another")


class CountsEpochsLate(Sound):
    @property
    def previous_epoch_detail(self):
        return self.epoch_detail


class CountsNoEpoch(Sound):
    @property
    def epoch(self):
        return 0


class IsAlwaysNew(Sound):
    @property
    def is_new_epoch(self):
        return True


class EndsAfterLoading(Sound):
    is_loaded = False

    def update_core(self):
        if self.is_loaded:
            self.batches = SerialIterator([], 2, repeat=False)
        super().update_core()

    def serialize(self, serializer):
        super().serialize(serializer)
        self.is_loaded = self.is_loaded or not isinstance(serializer, Serializer)


class KeepsInTheClass(Sound):
    means = [0.0]  # noqa: RUF012 - the defect

    def update_core(self):
        super().update_core()
        self.means[0] += 1
        report({"mean": self.means[0]})


class NoUpdater:
    pass


def test_a_sound_updater_passes():
    """Which needs no model from outside."""
    check_updater(Sound)


@pytest.mark.filterwarnings("ignore:the training iterator ended")
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (SavesNoMean, r"saved after iteration 1 .*in iteration 2: observation/mean was .*super\(\)\.serialize"),
        (SavesTheMeanOnly, r"saves its iteration: it is 0 after loading, and was 1.*super\(\)\.serialize"),
        (SavesTheCountOnly, r"saved after iteration 1 .*epoch"),
        (HidesItsIterator, r"saved after iteration 1 .*in iteration 2: observation/mean was"),
        (HidesItsModel, r"saved after iteration 1 .*in iteration 2: observation/mean was"),
        (CountsTwice, r"an update adds one to iteration: 2 after 1 updates"),
        (CountsNothing, r"an update adds one to iteration: 0 after 1 updates"),
        (EndsOnce, r"finalize may be called again: RuntimeError: not open"),
        (CannotEnd, r"does not fail: RuntimeError: held by another"),
        (CountsEpochsLate, r"previous_epoch_detail is epoch_detail before the update"),
        (CountsNoEpoch, r"epoch is epoch_detail without its fraction: epoch_detail 1.0 and epoch 0 in iteration 3"),
        (IsAlwaysNew, r"is_new_epoch says that the update has ended an epoch: True"),
        (EndsAfterLoading, r"saved after iteration 0 .*is the same run: it has 0 iterations instead of 6"),
        (KeepsInTheClass, r"created again behaves alike; in iteration 1: observation/mean was 1.0, is 7.0"),
        (NoUpdater, r"a trainer takes it as its updater: TypeError"),
    ],
)
def test_a_broken_one_does_not(broken, said):
    """The rule, what was found, and what to do."""
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        check_updater(broken)


@pytest.mark.filterwarnings("ignore:the training iterator ended")
def test_data_that_end_show_too_little():
    """With the remedy."""
    with pytest.raises(AssertionError, match=r"they end after 3 updates\. Give data that are repeated"):
        check_updater(lambda: Sound(repeat=False))
