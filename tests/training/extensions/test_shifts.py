"""The shifts: the value of an attribute as a function of the number of calls."""

import math

import pytest
import torch
from schedules import PER_EPOCH, Line, run, sgd, trainer_of

from chainring import training
from chainring.training import extensions
from chainring.training.extensions import (
    ExponentialShift,
    InverseShift,
    LinearShift,
    MultistepShift,
    PolynomialShift,
    StepShift,
    WarmupShift,
)

TABLE = [
    (ExponentialShift("lr", 0.5, 2), [2, 1, 0.5, 0.25]),
    (ExponentialShift("lr", 0.5, 2, 1.2), [2, 1.2, 1.2]),
    (ExponentialShift("lr", 0.5, -2, -1.2), [-2, -1.2, -1.2]),
    (ExponentialShift("lr", 2, 2, 3), [2, 3, 3]),
    (ExponentialShift("lr", 2, -2, -3), [-2, -3, -3]),
    (ExponentialShift("lr", 1, 2, 2), [2, 2, 2]),
    (ExponentialShift("lr", 0, 2), [2, 0, 0]),
    (ExponentialShift("lr", 3, 0, 5), [0, 0, 0]),
    (LinearShift("lr", (2, 6), (1, 3)), [2, 2, 4, 6, 6]),
    (LinearShift("lr", (6, 2), (2, 2)), [6, 6, 6, 2]),
    (InverseShift("lr", 1, 1, 3), [3, 1.5, 1, 0.75]),
    (InverseShift("lr", 3, 0.5, 6, 2.5), [6, 3, 2.5]),
    (InverseShift("lr", 1, -1, 2, 5), [2, 4, 5, 5]),
    (PolynomialShift("lr", 1, 4, 2), [2, 1.5, 1, 0.5, 0, 0]),
    (PolynomialShift("lr", 2, 2, 4, 1.5), [4, 1.5, 1.5, 1.5]),
    (PolynomialShift("lr", 1, 2, -4, -1), [-4, -2, -1, -1]),
    (PolynomialShift("lr", 0, 2, 4), [4, 4, 4, 4]),
    (StepShift("lr", 0.5, 2, 4), [4, 4, 2, 2, 1]),
    (StepShift("lr", 2, 2, 4, 6), [4, 4, 6, 6]),
    (MultistepShift("lr", 0.5, [1, 3, 3], 8), [8, 4, 4, 1, 1]),
    (MultistepShift("lr", 2, (), 8), [8, 8]),
    (WarmupShift("lr", 1, 2, 3), [1, 2, 3, 3]),
    (WarmupShift("lr", 0.1, 3, 0.1), [0.1, 0.1, 0.1, 0.1, 0.1]),
]
IDS = [f"{type(shift).__name__}-{number}" for number, (shift, _) in enumerate(TABLE)]


@pytest.mark.parametrize(("shift", "values"), TABLE, ids=IDS)
def test_the_value_follows_from_the_number_of_calls(tmp_path, shift, values):
    """The first update is made with the initial value, the next with that of one call."""
    assert run(tmp_path, len(values) - 1, shift, split=True) == pytest.approx(values)


def test_without_init_it_begins_with_the_value_of_the_groups(tmp_path):
    """One float is read, and it is that of the script."""
    assert run(tmp_path, 2, ExponentialShift("lr", 0.5), lr=0.8) == [0.8, 0.4, 0.2]
    assert run(tmp_path, 2, MultistepShift("lr", 0.5, [2], None), lr=0.8) == [0.8, 0.8, 0.4]
    assert run(tmp_path, 2, WarmupShift("lr", 0, 2, None), lr=0.8) == [0, 0.4, 0.8]


@pytest.mark.parametrize("attr", ["momentum", "weight_decay", "dampening"])
def test_any_number_of_the_groups_is_shifted(tmp_path, attr):
    """Not the learning rate alone."""
    assert run(tmp_path, 3, LinearShift(attr, (0.5, 0.25), (0, 2)), attr=attr) == [0.5, 0.375, 0.25, 0.25]


def test_every_group_gets_the_value(tmp_path):
    """Also where they differed before, if there is an init."""
    trainer = trainer_of(tmp_path, 2, StepShift("lr", 0.5, 1, 0.4), split=True)
    groups = trainer.updater.get_optimizer("main").param_groups
    groups[1]["lr"] = 7
    trainer.run()
    assert [group["lr"] for group in groups] == [0.1, 0.1]


def test_calls_are_counted_and_not_iterations(tmp_path):
    """With an epoch as trigger it moves after each."""
    trainer = trainer_of(tmp_path, 2 * PER_EPOCH + 1)
    trainer.extend(ExponentialShift("lr", 0.5, 1), trigger=(1, "epoch"))
    trainer.run()
    assert trainer.updater.get_optimizer("main").param_groups[0]["lr"] == 0.25


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path):
    """What a compiled step reads is written in place, and the formula is not computed from what was rounded."""
    rate = torch.tensor(0.1)
    trainer = trainer_of(tmp_path, 3, ExponentialShift("lr", 0.1), optimizer=lambda m: sgd(m, lr=rate, split=True))
    trainer.run()
    groups = trainer.updater.get_optimizer("main").param_groups
    assert all(group["lr"] is rate for group in groups)
    assert rate.item() == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize("by", ["name", "object"])
def test_the_optimizer_is_given_by_name_or_itself(tmp_path, by):
    """Others keep their values."""
    model = Line()
    first, second = (torch.optim.SGD([parameter], lr=1.0) for parameter in model.parameters())

    class Alternating(training.Updater):
        def get_optimizer(self, name):
            return {"main": first, "second": second}[name]

        def update_core(self):
            pass

    trainer = training.Trainer(Alternating(), (2, "iteration"), out=str(tmp_path))
    trainer.extend(ExponentialShift("lr", 0.5, optimizer="second" if by == "name" else second))
    trainer.run()
    assert (first.param_groups[0]["lr"], second.param_groups[0]["lr"]) == (1.0, 0.25)


@pytest.mark.parametrize("trigger", [(1, "iteration"), (1, "epoch")])
def test_a_warm_up_leaves_the_attribute_to_another_shift_when_it_is_over(tmp_path, trigger):
    """The steps of the second hold, although the first goes on being called."""
    trainer = trainer_of(tmp_path, 2 * PER_EPOCH + 1, WarmupShift("lr", 0, 2, 1.0))
    trainer.extend(MultistepShift("lr", 0.5, [2], 1.0), trigger=(1, "epoch"))
    trainer.run()
    assert trainer.updater.get_optimizer("main").param_groups[0]["lr"] == 0.5


def test_a_value_too_large_for_a_float_is_cut_to_the_target(tmp_path):
    """The run does not end with an OverflowError after hours."""
    shift = ExponentialShift("lr", 1e200, 1.0, 2.0)
    assert shift.value(5, 1.0) == 2.0
    assert ExponentialShift("lr", 1e200, 1.0).value(5, 1.0) == math.inf


def test_a_call_before_training_counts_once(tmp_path):
    """A resumed run does not repeat it."""
    first = trainer_of(tmp_path / "first", 1)
    first.extend(ExponentialShift("lr", 0.5, 1), invoke_before_training=True)
    first.run()
    second = trainer_of(tmp_path / "second", 2)
    second.extend(ExponentialShift("lr", 0.5, 1), invoke_before_training=True)
    second.load_state_dict(first.state_dict())
    second.run()
    assert second.updater.get_optimizer("main").param_groups[0]["lr"] == 0.125


REFUSED = {
    "a negative rate": (ValueError, "rate", lambda: ExponentialShift("lr", -1)),
    "a rate of NaN": (ValueError, "finite", lambda: ExponentialShift("lr", math.nan)),
    "a rate of text": (TypeError, "rate is a number", lambda: ExponentialShift("lr", "0.5")),
    "a negative gamma": (ValueError, "gamma", lambda: InverseShift("lr", -1, 1)),
    "a negative gamma of steps": (ValueError, "gamma", lambda: StepShift("lr", -1, 1)),
    "a step of zero": (ValueError, "step counts calls", lambda: StepShift("lr", 0.5, 0)),
    "a step of 1.5": (TypeError, "step counts calls", lambda: StepShift("lr", 0.5, 1.5)),
    "a negative power": (ValueError, "rate", lambda: PolynomialShift("lr", -1, 5)),
    "a count of zero": (ValueError, "max_count", lambda: PolynomialShift("lr", 1, 0)),
    "steps that fall": (ValueError, "ascends", lambda: MultistepShift("lr", 0.1, [5, 3], 1)),
    "steps of zero": (ValueError, "step_value", lambda: MultistepShift("lr", 0.1, [0, 3], 1)),
    "steps that are one": (TypeError, "step_value", lambda: MultistepShift("lr", 0.1, 30, 1)),
    "a warm-up of no calls": (ValueError, "warmup_iter", lambda: WarmupShift("lr", 0.1, 0, 1)),
    "times that go back": (ValueError, "time_range", lambda: LinearShift("lr", (1, 2), (5, 3))),
    "values of three": (TypeError, "value_range", lambda: LinearShift("lr", (1, 2, 3), (0, 3))),
    "a target behind": (ValueError, "never reaches", lambda: ExponentialShift("lr", 0.5, 1, 2)),
    "a target behind, growing": (ValueError, "never reaches", lambda: StepShift("lr", 2, 3, 1, 0.5)),
    "no name": (TypeError, "attr", lambda: ExponentialShift(None, 0.5)),
    "an optimizer of another kind": (TypeError, "optimizer is", lambda: ExponentialShift("lr", 0.5, optimizer=3)),
    "an attribute that an optimizer lacks": (
        ValueError, "no 'rate'", lambda: ExponentialShift("rate", 0.5, optimizer=sgd(Line())),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("error", "text", "make"), REFUSED.values(), ids=REFUSED)
def test_bad_settings_are_refused_at_construction(error, text, make):
    """With the rule and the value."""
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("error", "text", "shift"),
    [
        (ValueError, "no 'rate'", LinearShift("rate", (0, 1), (0, 1))),
        (TypeError, "'nesterov' of SGD is False", LinearShift("nesterov", (0, 1), (0, 1))),
        (KeyError, "no optimizer 'second'", LinearShift("lr", (0, 1), (0, 1), "second")),
        (ValueError, "several values", extensions.ExponentialShift("lr", 0.5)),
        (ValueError, "never reaches", extensions.ExponentialShift("momentum", 0.5, target=1)),
    ],
)
def test_what_the_optimizer_does_not_fit_is_refused_when_the_run_starts(tmp_path, error, text, shift):
    """Before the first update."""
    trainer = trainer_of(tmp_path, 3, shift, split=True)
    trainer.updater.get_optimizer("main").param_groups[1]["lr"] = 0.7
    with pytest.raises(error, match=text):
        trainer.run()
    assert trainer.updater.iteration == 0


def test_a_tuple_is_no_number(tmp_path):
    """The betas of Adam are two, and none of them is meant."""
    trainer = trainer_of(
        tmp_path, 1, LinearShift("betas", (0, 1), (0, 1)), optimizer=lambda m: torch.optim.Adam(m.parameters())
    )
    with pytest.raises(TypeError, match="betas"):
        trainer.run()
