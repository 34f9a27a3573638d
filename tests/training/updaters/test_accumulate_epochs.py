"""``accumulate_across_epochs=False``: an epoch ends with an update of the micro-batches that are left."""

import math

import pytest
import torch
from closure_ranks import REPLICATED
from epoch_ranks import train_on_rank, updater_over
from toys import ByClosure, assert_close, observed_update, parameters_of, regression_data, same_regression

from chainring.iterators import LoaderIterator, SerialIterator
from chainring.testing import check_updater
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm, extensions
from rank_pair import on_two_ranks


def by_hand(size, batch_size, accumulate, epochs):
    """The parameters after some epochs over rows in order; each update is on the rows of its micro-batches as one batch."""
    model, (x, t) = same_regression(), regression_data(size).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for first in range(0, size, batch_size * accumulate):
            optimizer.zero_grad()
            rows = slice(first, first + batch_size * accumulate)
            model(x[rows], t[rows]).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


SIZES = [(12, 2, 4), (10, 2, 4), (11, 2, 3), (12, 4, 8), (7, 7, 2)]


@pytest.mark.parametrize(("size", "batch_size", "accumulate"), SIZES)
def test_an_epoch_has_as_many_updates_as_groups_of_micro_batches_begin_in_it(size, batch_size, accumulate):
    """ceil(batches / accumulate), the last of what is left, short batches included, each averaged by its examples."""
    updater = updater_over(size, batch_size, accumulate)
    updates = math.ceil(math.ceil(size / batch_size) / accumulate)
    for number in range(1, 3 * updates + 1):
        updater.update()
        assert (updater.epoch, updater.is_new_epoch) == (number // updates, number % updates == 0)
    assert updater.epoch_detail == 3.0
    assert_close(parameters_of(updater), by_hand(size, batch_size, accumulate, 3))


def test_by_default_the_next_epoch_completes_an_update():
    """7 updates of 2 micro-batches in 3 epochs of 5 batches, and not 9."""
    updater = updater_over(10, 2, 2, accumulate_across_epochs=True)
    for _ in range(7):
        updater.update()
    assert (updater.epoch, updater.epoch_detail) == (2, 2.8)


def test_weight_and_reports_are_those_of_the_micro_batches_that_there_are():
    """The third update has one of five batches, of which the row of the log is the loss."""
    updater = updater_over(10, 2, 2)
    updater.update()
    updater.update()
    model, (x, t) = updater.get_model("main"), regression_data(10).tensors
    expected = (model.predictor(x[8:]) - t[8:]).square().mean().detach()
    assert_close(observed_update(updater), {"main/loss": expected})
    assert updater.weight == 2


def test_a_batch_that_crosses_the_end_of_an_epoch_is_the_last_of_its_update():
    """SerialIterator completes such a batch from the next epoch: 5 batches of 4 rows end one of 18."""
    model = same_regression()
    iterator = SerialIterator(regression_data(18), 4, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = StandardUpdater(iterator, optimizer, model, accumulate=2, accumulate_across_epochs=False)
    weights = []
    for _ in range(5):
        updater.update()
        weights.append((updater.weight, updater.is_new_epoch))
    assert weights == [(8, False), (8, False), (4, True), (8, False), (8, True)]


def test_the_end_of_data_that_are_not_repeated_is_the_end_of_an_update():
    """The next update finds no batch."""
    model = same_regression()
    iterator = SerialIterator(regression_data(10), 2, repeat=False, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    updater = StandardUpdater(iterator, optimizer, model, accumulate=4, accumulate_across_epochs=False)
    Trainer(updater, (1, "epoch")).extend(print, trigger=(1, "epoch"))
    updater.update()
    updater.update()
    assert (updater.is_new_epoch, updater.weight) == (True, 2)
    with pytest.raises(StopIteration):
        updater.update()
    assert_close(parameters_of(updater), by_hand(10, 2, 4, 1))


class TakesItself(StandardUpdater):
    """Fetches without `next_batch`, so that the end of the epoch shows only afterwards."""

    def update_core(self):
        x, t = self.converter(next(self.get_iterator("main")), self.device)
        self.backward(self.get_model("main")(x, t), len(x))
        self.step()


class StepsInBetween(StandardUpdater):
    """Steps by one batch, and then fetches another, at which the epoch may end."""

    def update_core(self):
        x, t = self.next_batch()
        self.backward((self.get_model("main").predictor(x) - t).square().mean())
        self.step()
        self.next_batch()


@pytest.mark.parametrize("kind", [TakesItself, ByClosure])
def test_an_update_core_of_ones_own_ends_with_the_epoch_too(kind):
    """However it fetches and steps."""
    updater = updater_over(11, 2, 4, kind=kind)
    for _ in range(4):
        updater.update()
    assert updater.epoch_detail == 2.0
    assert_close(parameters_of(updater), by_hand(11, 2, 4, 2))


def test_an_optimizer_that_has_stepped_before_the_epoch_was_known_to_end_still_steps():
    """Of 6 batches each second is used: those of rows 0, 1, 4, 5, 8, 9 in one update, and not in none."""
    updater = updater_over(12, 2, 4, kind=StepsInBetween)
    updater.update()
    model, (x, t) = same_regression(), regression_data(12).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = [0, 1, 4, 5, 8, 9]
    model(x[rows], t[rows]).backward()
    optimizer.step()
    assert_close(parameters_of(updater), [parameter.detach() for parameter in model.parameters()])


def test_the_end_of_a_loader_without_a_length_ends_an_update():
    """It is found by reading one batch ahead."""
    data = regression_data(10)
    model = same_regression()

    def batches():
        for first in range(0, 10, 2):
            yield data[first : first + 2]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    updater = StandardUpdater(LoaderIterator(batches), optimizer, model, accumulate=2, accumulate_across_epochs=False)
    for _ in range(6):
        updater.update()
    assert (updater.epoch, updater.is_new_epoch) == (2, True)
    assert_close(parameters_of(updater), by_hand(10, 2, 2, 2))


@pytest.mark.parametrize("settings", [{}, {"callbacks": UpdateCallbacks(update_on_start=clip_grad_norm(0.1))}])
def test_a_run_whose_epochs_end_with_short_updates_resumes_bit_for_bit(settings):
    """After each update of two epochs."""
    check_updater(lambda: updater_over(10, 2, 2, shuffle=True, **settings), iterations=7)


def test_triggers_in_epochs_fire_where_explain_says(tmp_path):
    """After 3, 6 and 9 updates."""
    trainer = Trainer(updater_over(10, 2, 2), (3, "epoch"), str(tmp_path))
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    assert "Iterations 1 to 9" in trainer.explain()
    assert "at 3, 6, 9" in trainer.explain()
    trainer.run()
    assert [row["iteration"] for row in trainer.get_extension("LogReport").log] == [3, 6, 9]


def test_another_setting_is_announced_at_a_resume(tmp_path, capsys):
    """As a changed number of micro-batches is."""
    for number, settings in enumerate(({}, {"accumulate_across_epochs": True})):
        trainer = Trainer(updater_over(10, 2, 2, shuffle=True, **settings), (number + 1, "iteration"), str(tmp_path))
        trainer.extend(extensions.snapshot(filename="state", autoload=True), trigger=(1, "iteration"))
        trainer.run()
    assert "accumulate_across_epochs" in capsys.readouterr().out


def test_what_is_no_truth_value_is_refused():
    """A number could be meant as a number of epochs."""
    with pytest.raises(TypeError, match="accumulate_across_epochs is True or False, got 1"):
        updater_over(10, 2, 2, accumulate_across_epochs=1)


@pytest.mark.parametrize("wrapping", REPLICATED)
def test_ranks_end_an_update_with_the_epoch_together(wrapping):
    """As one process; DDP knows before the backward of the last micro-batch that it is the last."""
    first, second = on_two_ranks(train_on_rank, wrapping)
    assert first == second
    parameters, updates, epoch = first
    assert (updates, epoch) == (6, 2.0)
    torch.testing.assert_close(parameters, [value.tolist() for value in by_hand(11, 2, 2, 2)])
