"""observe_value and observe_lr: into the observation, for whoever reads it."""

import pytest
import torch
from schedules import PER_EPOCH, Line, sgd, trainer_of
from scripted import Counting, run

from chainring import training
from chainring.training import extensions
from chainring.training.extensions import ExponentialShift, LogReport, observe_lr, observe_value


def test_a_value_is_in_the_row_of_its_epoch(tmp_path):
    """Although the log is registered before it: it has a writer's priority."""
    log = LogReport()
    run(Counting(epoch_length=2), 4, tmp_path, log, observe_value("twice", lambda trainer: 2 * trainer.updater.iteration))
    assert [row["twice"] for row in log.log] == [4, 8]


def test_the_rate_in_a_row_is_that_of_the_last_update(tmp_path):
    """The shift that changes it comes later in the same iteration."""
    log = LogReport(trigger=(1, "iteration"))
    trainer = trainer_of(tmp_path, 3, ExponentialShift("lr", 0.5), log, lr=0.8)
    trainer.extend(observe_lr(), trigger=(1, "iteration"))
    trainer.run()
    assert [row["lr"] for row in log.log] == [0.8, 0.4, 0.2]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_the_rate_is_there_before_the_first_update(tmp_path, kind):
    """Also of optimizers that have no state before their first step."""
    trainer = trainer_of(tmp_path, 1, optimizer=lambda model: kind(model.parameters(), lr=0.25))
    rows = []
    trainer.extend(observe_lr(), invoke_before_training=True)
    trainer.extend(lambda t: rows.append(dict(t.observation)), invoke_before_training=True)
    trainer.run()
    assert rows[0] == {"lr": 0.25}


def test_every_group_has_its_rate(tmp_path):
    """The first under the key itself, the others under their number."""
    trainer = trainer_of(tmp_path, PER_EPOCH, split=True)
    trainer.updater.get_optimizer("main").param_groups[1]["lr"] = 0.0625
    trainer.extend(observe_lr(observation_key="rate"))
    trainer.run()
    assert {key: value for key, value in trainer.observation.items() if "rate" in key} == {"rate": 0.1, "rate/1": 0.0625}


def test_a_rate_that_is_a_tensor_is_reported_as_it_was(tmp_path):
    """A later change in place does not reach it."""
    rate = torch.tensor(0.5)
    trainer = trainer_of(tmp_path, 1, optimizer=lambda model: sgd(model, lr=rate))
    trainer.extend(observe_lr(), trigger=(1, "iteration"))
    trainer.run()
    rate.fill_(7)
    assert trainer.observation["lr"] == 0.5


def test_two_values_have_names_of_their_own(tmp_path):
    """As any two extensions of one name."""
    trainer = trainer_of(tmp_path, PER_EPOCH, observe_value("a", lambda _: 1), observe_value("b", lambda _: 2))
    trainer.run()
    assert (trainer.observation["a"], trainer.observation["b"]) == (1, 2)
    assert trainer.get_extension("observe_value") is not trainer.get_extension("observe_value_1")


def test_bad_settings_are_refused(tmp_path):
    """An unknown optimizer when the run starts, before the first update."""
    with pytest.raises(TypeError, match="target_func"):
        observe_value("lr", 3)
    with pytest.raises(TypeError, match="a key is that of a reported value"):
        observe_value(3, lambda _: 3)
    with pytest.raises(TypeError, match="optimizer_name"):
        extensions.observe_lr(sgd(Line()))
    trainer = trainer_of(tmp_path, 1, observe_lr("second"))
    with pytest.raises(KeyError, match="no optimizer 'second'"):
        trainer.run()
    assert trainer.updater.iteration == 0


def test_it_is_an_extension_without_state(tmp_path):
    """A resumed run observes what is there."""
    assert training.get_trigger(observe_lr().trigger)
    first = run(Counting(), 1, tmp_path, observe_value("n", lambda trainer: trainer.updater.iteration))
    again = observe_value("n", lambda trainer: trainer.updater.iteration)
    second = run(Counting(), 2, tmp_path, again, state=first.state_dict())
    assert second.observation["n"] == 2
