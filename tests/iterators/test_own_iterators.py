"""An iterator of one's own: a class derived from Iterator, which counts epochs in whatever way it does."""

import pytest
import torch
from torch import nn

from chainring import training
from chainring.iterators import Batch, Iterator, as_iterator
from chainring.training import extensions

LENGTH = 4  # batches of an epoch


class Detailed(Iterator):
    """Sets ``epoch_detail`` alone, in each batch."""

    batch_size = 2

    def __init__(self, repeat=True):
        self.repeat, self.at = repeat, 0

    def __next__(self):
        if not self.repeat and self.at >= LENGTH:
            raise StopIteration
        self.at += 1
        self.count()
        return Batch([torch.ones(1) * self.at] * 2)

    def count(self):
        self.epoch_detail = self.at / LENGTH

    def reset(self):
        self.at = 0

    def serialize(self, serializer):
        self.at = serializer("at", self.at)
        self.count()


class Whole(Detailed):
    """Sets ``epoch`` and ``is_new_epoch`` alone."""

    def count(self):
        self.epoch, self.is_new_epoch = self.at // LENGTH, self.at % LENGTH == 0


class Computed(Detailed):
    """Computes ``epoch_detail`` when it is asked, as iterators of Chainer do."""

    def count(self):
        self.epoch = self.at // LENGTH

    @property
    def epoch_detail(self):
        return self.at / LENGTH


class ComputedEpoch(Detailed):
    """Computes ``epoch`` when it is asked."""

    def count(self):
        pass

    @property
    def epoch(self):
        return self.at // LENGTH


class Exact(Detailed):
    """Has ``progress`` too."""

    def count(self):
        self.epoch, self.epoch_detail = self.at // LENGTH, self.at / LENGTH

    @property
    def progress(self):
        return self.epoch, self.at % LENGTH, LENGTH


class Unknowing(Exact):
    """Declares that it has no ``progress``."""

    progress = None


class Foreign:
    """Derives from nothing."""

    batch_size, previous_epoch_detail, is_new_epoch, repeat = 2, None, False, True
    __init__, __next__, count = Detailed.__init__, Detailed.__next__, Computed.count
    serialize, reset, __iter__ = Detailed.serialize, Detailed.reset, Iterator.__iter__
    epoch_detail = Computed.epoch_detail


class Uncounted(Detailed):
    """Counts nothing."""

    def count(self):
        pass


WHOLE = [Whole, ComputedEpoch]
COUNTED = [Detailed, Computed, Exact, Unknowing, Foreign]


def rows_of(make, out, stop=(3, "epoch"), trigger=(1, "epoch")):
    """The iterations of the rows of the log, of a run with everything at its default, which is continued where it was."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    loss = lambda model, x: {"loss": model(x).square().mean()}  # noqa: E731
    updater = training.StandardUpdater(make(), torch.optim.SGD(model.parameters(), 0.1), model, loss_func=loss)
    trainer = training.Trainer(updater, stop, out=str(out))
    trainer.extend(extensions.Evaluator(make(repeat=False), model, eval_func=lambda x: loss(model, x)))
    trainer.extend(log := extensions.LogReport(), trigger=trigger)
    trainer.extend(extensions.snapshot(autoload=True))
    trainer.run()
    return [(row["iteration"], round(row["epoch"]), "validation/main/loss" in row) for row in log.log]


@pytest.mark.parametrize("make", COUNTED + WHOLE)
def test_epochs_are_counted_by_whatever_counter_it_sets(make, tmp_path):
    """The log, an evaluation, a snapshot and the stop of a run fire at each epoch, and go on after a resume."""
    assert [row[0] for row in rows_of(make, tmp_path, (2, "epoch"))] == [4, 8]
    rows = rows_of(make, tmp_path)
    assert [row[0] for row in rows] == [4, 8, 12]
    assert all(evaluated for *_, evaluated in rows)


@pytest.mark.parametrize("make", COUNTED)
def test_fractions_of_an_epoch_are_counted_by_epoch_detail(make, tmp_path):
    """Half an epoch is two of four batches."""
    assert [row[0] for row in rows_of(make, tmp_path, (2, "epoch"), (0.5, "epoch"))] == [2, 4, 6, 8]


@pytest.mark.parametrize("make", WHOLE)
def test_fractions_are_refused_where_it_counts_whole_epochs_alone(make, tmp_path):
    """With the line to write."""
    with pytest.raises(ValueError, match=r"fraction of an epoch \(0.5\).*Set its epoch_detail"):
        rows_of(make, tmp_path, (2, "epoch"), (0.5, "epoch"))


def test_one_that_counts_nothing_runs_and_says_that_epochs_never_come(tmp_path):
    """Before the first update; triggers in iterations work."""
    with pytest.warns(UserWarning, match="a trigger in epochs never fires: Uncounted sets neither epoch nor epoch_detail"):
        assert rows_of(Uncounted, tmp_path / "epochs", (4, "iteration")) == []


def test_one_that_derives_from_nothing_and_has_no_epoch_detail_is_refused():
    """It would be taken for a loader of one pass."""
    kind = type("Old", (), {"__init__": Detailed.__init__, "__next__": Detailed.__next__, "is_new_epoch": False})
    with pytest.raises(TypeError, match=r"Old counts epochs.*derive it from chainring.iterators.Iterator"):
        as_iterator(kind())
