"""LRScheduler: when a scheduler of torch is stepped, by what, and what is refused."""

import math

import pytest
import torch
from schedules import PER_EPOCH, Line, sgd, trainer_of, updater_of
from scripted import Counting
from scripted import run as run_counting
from torch.optim import lr_scheduler

from chainring import training
from chainring.training.extensions import LRScheduler


def plateau_over(**settings):
    optimizer = sgd(Line(), lr=1.0)
    return optimizer, lr_scheduler.ReduceLROnPlateau(optimizer, **{"factor": 0.5, "patience": 0, **settings})


def rates_of(tmp_path, observations, every=1, monitor="loss", weights=None, **settings):
    """The learning rate after each iteration in which these were reported."""
    optimizer, scheduler = plateau_over(**settings)
    rates = []
    trainer = training.Trainer(Counting(observations, weights=weights), (len(observations), "iteration"), str(tmp_path))
    trainer.extend(LRScheduler(scheduler, monitor=monitor), trigger=(every, "iteration"))
    trainer.extend(lambda _: rates.append(optimizer.param_groups[0]["lr"]))
    trainer.run()
    return rates


def losses(*values):
    return [{"loss": value} for value in values]


def exponential(tmp_path, stop, trigger=None, gamma=0.5):
    def optimizer(model):
        made.append(sgd(model, lr=1.0, split=True))
        return made[0]

    made = []
    trainer = trainer_of(tmp_path, stop, optimizer=optimizer)
    trainer.extend(LRScheduler(lr_scheduler.ExponentialLR(made[0], gamma)), trigger=trigger)
    trainer.run()
    return made[0].param_groups[0]["lr"]


def test_it_steps_after_every_epoch(tmp_path):
    """Unless extend says otherwise."""
    assert exponential(tmp_path, 3 * PER_EPOCH - 1) == 0.25
    assert exponential(tmp_path, 3, (1, "iteration")) == 0.125


def test_a_scheduler_may_be_made_before_the_updater(tmp_path):
    """The first update is made with what the scheduler has written at once."""

    def optimizer(model):
        made = sgd(model, lr=1.0)
        schedulers.append(lr_scheduler.LinearLR(made, 0.25, total_iters=3))
        return made

    schedulers = []
    trainer = trainer_of(tmp_path, 2, optimizer=optimizer)
    trainer.extend(LRScheduler(schedulers[0]), trigger=(1, "iteration"))
    trainer.run()
    assert trainer.updater.get_optimizer("main").param_groups[0]["lr"] == pytest.approx(0.75)


def test_a_rate_becomes_a_tensor_on_the_device(tmp_path, device):
    """The run that is resumed with it goes on with the rate of the scheduler."""

    def make(stop, rate):
        model = Line().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        trainer = training.Trainer(updater_of(model, optimizer, device=device), (stop, "iteration"), out=str(tmp_path))
        trainer.extend(LRScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5)), trigger=(1, "iteration"))
        return trainer

    first, second = make(2, 0.5), make(3, torch.tensor(0.5, device=device))
    first.run()
    second.load_state_dict(first.state_dict())
    second.run()
    assert second.updater.get_optimizer("main").param_groups[0]["lr"].item() == 0.0625


def test_a_plateau_is_seen_in_the_reported_value(tmp_path):
    """The rate is halved where the value has not fallen."""
    assert rates_of(tmp_path, losses(3, 2, 2, 1, 1)) == [1, 1, 0.5, 0.5, 0.25]


def test_of_several_values_since_the_last_step_it_takes_the_weighted_mean(tmp_path):
    """Not the last one, which is of a single batch."""
    assert rates_of(tmp_path, losses(4, 2, 5, 0), every=2) == [1, 1, 1, 1]
    assert rates_of(tmp_path, losses(4, 2, 5, 0), every=2, weights=[1, 1, 3, 1]) == [1, 1, 1, 0.5]


def test_a_value_of_the_evaluation_in_the_same_iteration_is_seen(tmp_path):
    """Writers come first."""
    optimizer, scheduler = plateau_over()
    trainer = training.Trainer(Counting(), (3, "iteration"), str(tmp_path))
    trainer.extend(LRScheduler(scheduler, monitor="validation/main/loss"))

    @training.make_extension(trigger=(1, "epoch"), priority=training.PRIORITY_WRITER)
    def evaluate(trainer):
        trainer.reporter.report({"validation/main/loss": torch.tensor(1.0)})

    trainer.extend(evaluate)
    trainer.run()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_nan_is_no_improvement(tmp_path):
    """It counts as an epoch without one."""
    assert rates_of(tmp_path, losses(3, math.nan, 2)) == [1, 0.5, 0.5]


def test_a_missing_value_is_no_step_and_warned_about_once(tmp_path):
    """The message names the key, and what there was."""
    with pytest.warns(UserWarning, match="'loss' was not reported.*\\['los'\\]") as caught:
        rates = rates_of(tmp_path, [{"los": 1}, {"loss": 2}, {"los": 2}, {"loss": 2}])
    assert rates == [1, 1, 1, 0.5]
    assert len(caught) == 1


def test_a_first_step_that_the_loss_scaler_leaves_out_is_no_reason_to_warn(tmp_path):
    """With fp16 the first updates are often left out until the scale fits."""

    class Left(training.Updater):
        def update_core(self):
            pass

    optimizer = sgd(Line(), lr=1.0)
    run_counting(Left(), 2, tmp_path, _each(LRScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5))))
    assert optimizer.param_groups[0]["lr"] == 0.25


def _each(extension):
    extension.trigger = (1, "iteration")
    return extension


def test_a_scheduler_of_ones_own_may_step_by_a_value(tmp_path):
    """Whatever has torch's three methods will do."""

    class Follows:
        def __init__(self, optimizer):
            self.optimizer, self.last = optimizer, None

        def step(self, value=1.0):
            self.last = self.optimizer.param_groups[0]["lr"] = value

        def state_dict(self):
            return {"last": self.last}

        def load_state_dict(self, state):
            self.last = state["last"]

    optimizer = sgd(Line())
    run_counting(Counting(losses(3, 2)), 2, tmp_path, LRScheduler(Follows(optimizer), monitor="loss"))
    assert optimizer.param_groups[0]["lr"] == 2
    run_counting(Counting(losses(3, 2)), 2, tmp_path, LRScheduler(Follows(optimizer)))
    assert optimizer.param_groups[0]["lr"] == 1


class Counted:
    """A scheduler as timm's are: it keeps no count, and is told the epoch or the update that comes next."""

    def __init__(self, optimizer, t_in_epochs=True, mode=None):
        self.optimizer, self.t_in_epochs, self.metric, self.told = optimizer, t_in_epochs, None, []
        self.mode = mode
        self.base_values = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state):
        vars(self).update(state)

    def step(self, epoch, metric=None):
        self._set(epoch, metric, self.t_in_epochs)

    def step_update(self, num_updates, metric=None):
        self._set(num_updates, metric, not self.t_in_epochs)

    def _set(self, count, metric, counts):
        self.metric = metric
        if counts:
            self.told.append(count)
            for group, value in zip(self.optimizer.param_groups, self.base_values, strict=True):
                group["lr"] = value * 0.5**count


class CountedWithoutValue(Counted):
    def step(self, epoch):
        super().step(epoch)


@pytest.mark.parametrize("monitor", [None, "main/loss"])
@pytest.mark.parametrize(
    ("t_in_epochs", "every", "told"),
    [
        (True, None, [1, 2]),
        (False, None, [1, 2, 3, 4, 5, 6]),
        (True, (1, "iteration"), [0, 0, 1, 1, 1, 2]),
        (False, (1, "epoch"), [3, 6]),
    ],
)
def test_a_scheduler_that_is_told_how_far_training_is_gets_the_epochs_or_updates(
    tmp_path, monitor, t_in_epochs, every, told
):
    """The numbers that are completed, as timm's scripts count them; after each update where it counts updates."""
    parts = []
    for stop in (4, 6):  # in two runs, of which the second goes on
        made = []
        trainer = trainer_of(tmp_path, stop, optimizer=lambda model, made=made: made.append(sgd(model, lr=1.0)) or made[0])
        scheduler = Counted(made[0], t_in_epochs)
        trainer.extend(LRScheduler(scheduler, monitor=monitor), trigger=every)
        if parts:
            trainer.load_state_dict(parts[0].state_dict())
        trainer.run()
        parts.append(trainer)
    assert scheduler.told == told
    assert made[0].param_groups[0]["lr"] == 0.5 ** told[-1]
    assert (scheduler.metric is None) == (monitor is None)


def test_one_that_is_told_the_epoch_alone_steps_by_no_value():
    """So a key is refused; without one it is taken."""
    LRScheduler(CountedWithoutValue(sgd(Line())))
    with pytest.raises(ValueError, match="CountedWithoutValue does not step by a value"):
        LRScheduler(CountedWithoutValue(sgd(Line())), monitor="main/loss")


def test_a_wrapper_that_saves_a_part_of_the_state_of_a_plateau_is_refused():
    """That of timm saves the best value and not the number of bad epochs."""
    optimizer, plateau = plateau_over()
    wrapper = Counted(optimizer)
    wrapper.lr_scheduler = plateau
    with pytest.raises(ValueError, match=r"bad epochs.*; use torch.optim.lr_scheduler.ReduceLROnPlateau, which it wraps"):
        LRScheduler(wrapper, monitor="main/accuracy")


@pytest.mark.parametrize(
    ("key", "mode", "better"),
    [
        ("main/accuracy", "min", "max"),
        ("validation/main/top1_accuracy", "min", "max"),
        ("main/f1", "min", "max"),
        ("main/loss", "max", "min"),
    ],
)
def test_a_mode_that_contradicts_the_key_is_said(key, mode, better):
    """The mode of torch's plateau is min unless the script says otherwise."""
    _, plateau = plateau_over(mode=mode)
    with pytest.warns(UserWarning, match=f"mode '{mode}', and of '{key}' '{better}' is better: .*mode='{better}'"):
        LRScheduler(plateau, monitor=key)


@pytest.mark.parametrize("key", ["main/loss", "main/reward", "accuracy_loss", "x"])
def test_a_mode_that_the_key_does_not_contradict_is_taken(key, recwarn):
    """Of these keys less is better, or may be."""
    LRScheduler(plateau_over()[1], monitor=key)
    assert not recwarn.list


def test_bad_settings_are_refused_at_construction():
    """Not after the first epoch."""
    optimizer, plateau = plateau_over()
    step = lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(ValueError, match="ReduceLROnPlateau steps by a value"):
        LRScheduler(plateau)
    with pytest.raises(ValueError, match="StepLR does not step by a value"):
        LRScheduler(step, monitor="main/loss")
    with pytest.raises(ValueError, match="ChainedScheduler does not step by a value"):
        LRScheduler(lr_scheduler.ChainedScheduler([step], optimizer), monitor="main/loss")
    with pytest.raises(TypeError, match="monitor is the key"):
        LRScheduler(plateau, monitor=3)
    with pytest.raises(TypeError, match="the class StepLR"):
        LRScheduler(lr_scheduler.StepLR)
    with pytest.raises(TypeError, match="got SGD"):
        LRScheduler(optimizer)
