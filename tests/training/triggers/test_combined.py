"""any_of and all_of: several triggers as one, each with its own state."""

import pytest
from counting import CountingUpdater, DataUpdater, a_trainer, fires_in_run

from chainring import report
from chainring.training import triggers

TWO, THREE = (2, "iteration"), (3, "iteration")


class Falling(CountingUpdater):
    """Reports a value that is least in the iterations 1, 4 and 5."""

    def update_core(self):
        report({"x": [5, 6, 7, 4, 3, 8, 9, 3, 3, 3, 3, 3][self.iteration]})


def test_any_of_fires_when_one_or_more_do(tmp_path):
    """Once where several fire at the same time."""
    assert fires_in_run(tmp_path, triggers.any_of(TWO, THREE), 8) == [2, 3, 4, 6, 8]


def test_all_of_fires_when_all_do(tmp_path):
    """In the same iteration."""
    assert fires_in_run(tmp_path, triggers.all_of(TWO, THREE, lambda trainer: trainer.updater.iteration > 6), 12) == [12]


def test_each_is_asked_in_every_iteration(tmp_path):
    """So that the mean of another interval is not in its value, whatever the others answer."""
    least = triggers.MinValueTrigger("x", (1, "iteration"))
    assert fires_in_run(tmp_path / "any", triggers.any_of(TWO, least), 8, Falling()) == [1, 2, 4, 5, 6, 8]
    least = triggers.MinValueTrigger("x", (1, "iteration"))
    assert fires_in_run(tmp_path / "all", triggers.all_of(TWO, least), 8, Falling()) == [4]


def test_combinations_are_combined_again(tmp_path):
    """As any trigger."""
    both = triggers.all_of(triggers.any_of(TWO, THREE), triggers.any_of((4, "iteration"), THREE))
    assert fires_in_run(tmp_path, both, 9) == [3, 4, 6, 8, 9]


def test_one_of_the_users_own_may_keep_another_as_it_likes(tmp_path):
    """In an attribute of any name that a trigger around another is likely to have."""

    class Odd(triggers.Trigger):
        def __init__(self, trigger):
            self._inner = self._trigger = self._triggers = triggers.get_trigger(trigger)

        def ask(self, trainer):
            return self._inner(trainer) and trainer.updater.iteration % 2 == 1

    assert fires_in_run(tmp_path, triggers.any_of((4, "iteration"), Odd(THREE)), 9) == [3, 4, 8, 9]


@pytest.mark.parametrize("cut", range(1, 8))
def test_resumed_run_goes_on_with_the_state_of_each(tmp_path, cut):
    """Of an inner trigger too, such as the best value so far."""

    def trigger():
        return triggers.any_of(THREE, triggers.all_of((1, "iteration"), triggers.MinValueTrigger("x", (1, "iteration"))))

    first, second = trigger(), trigger()
    trainer = a_trainer(tmp_path, Falling())
    expected = fires_in_run(tmp_path / "whole", trigger(), 8, Falling())
    found = []
    for iteration in range(1, 9):
        trainer.updater.update()
        with trainer.reporter.scope(trainer.observation):
            report({"x": [5, 6, 7, 4, 3, 8, 9, 3][iteration - 1]})
        found += [iteration] * (first if iteration <= cut else second)(trainer)
        if iteration == cut:
            second.load_state_dict(first.state_dict())
    assert found == expected


def test_pair_in_a_stop_trigger_is_a_length_to_be_reached(tmp_path):
    """Also deep inside, and where a run is resumed behind it."""
    early = triggers.EarlyStoppingTrigger((1, "iteration"), "x", 2, "min", max_trigger=None)
    trainer = a_trainer(tmp_path, Falling(), triggers.all_of((4, "iteration"), early))
    trainer.run()
    assert trainer.updater.iteration == 7  # the patience was exhausted at 3 and is again at 7
    trainer = a_trainer(tmp_path / "any", Falling(), triggers.any_of(triggers.any_of((4, "iteration")), early))
    trainer.run()
    assert trainer.updater.iteration == 3


def test_length_of_training_is_known_where_one_trigger_has_one():
    """For bars of progress and the time that is left."""
    early = triggers.EarlyStoppingTrigger(max_trigger=None)
    stop = triggers.get_stop_trigger(triggers.any_of((20, "epoch"), early))
    assert stop.get_training_length() == (20, "epoch")
    assert triggers.get_stop_trigger(triggers.all_of((20, "epoch"), early)).get_training_length() is None


def test_plan_of_a_run_knows_when_they_fire(tmp_path):
    """Where all of them follow from iterations and epochs; else it says that they are asked."""
    trainer = a_trainer(tmp_path, DataUpdater(4), (8, "iteration"))
    trainer.extend(lambda trainer: None, name="planned", trigger=triggers.any_of((1, "epoch"), THREE))
    trainer.extend(lambda trainer: None, name="asked", trigger=triggers.any_of((1, "second"), THREE))
    plan = trainer.explain(8)
    assert "any_of(IntervalTrigger(1, 'epoch'), IntervalTrigger(3, 'iteration'))  at 3, 4, 6, 8" in plan
    assert "any_of(TimeTrigger(1), IntervalTrigger(3, 'iteration'))               asked each iteration" in plan


def test_rehearsal_finds_a_misspelled_key_inside(tmp_path):
    """The keys that each watches are those of the whole."""
    trainer = a_trainer(tmp_path, Falling(), (3, "iteration"))
    trainer.extend(lambda trainer: None, name="it", trigger=triggers.any_of(TWO, triggers.MinValueTrigger("xx")))
    with pytest.raises(ValueError, match="watches 'xx'"):
        trainer.rehearse()


@pytest.mark.parametrize("combine", [triggers.any_of, triggers.all_of])
def test_what_is_no_trigger_is_refused(combine):
    """And none at all."""
    with pytest.raises(TypeError, match="takes one trigger or more"):
        combine()
    with pytest.raises(TypeError, match="a trigger is None"):
        combine((1, "epoch"), 3)
    with pytest.raises(ValueError, match="the unit of a trigger"):
        combine((1, "epochs"))
