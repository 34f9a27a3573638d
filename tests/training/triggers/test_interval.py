"""IntervalTrigger: it fires when a multiple of its period was crossed, exactly, also after a resume."""

import math
from fractions import Fraction
from itertools import product

import pytest
from counting import CountingUpdater, DataUpdater, Fires, UncountedUpdater, a_trainer, answers, fires_in_run, pattern

from chainring import iterators
from chainring.training import triggers

VECTORS = [  # iterations an epoch, trigger, answers in iterations 1 to 7
    (5, (2, "iteration"), "F T F T F T F"),
    (1, (3, "epoch"), "F F T F F T F"),
    (2, (1.5, "epoch"), "F F T F F T F"),
    (2.5, (1, "epoch"), "F F T F T F F"),
    (0.5, (1, "epoch"), "T T T T T T T"),
    (5, (2.5, "iteration"), "F F T F T F F"),
    (5, (0.5, "iteration"), "T T T T T T T"),
]
vectors = pytest.mark.parametrize(("per_epoch", "setting", "expected"), VECTORS)


def reloaded(trigger, setting):
    """A fresh trigger of the same setting with the state of another."""
    fresh = triggers.IntervalTrigger(*setting)
    fresh.load_state_dict(trigger.state_dict())
    return fresh


@vectors
def test_it_fires_at_the_first_iteration_at_or_after_each_multiple(tmp_path, per_epoch, setting, expected):
    """A boundary between two iterations fires at the later one, several boundaries at once fire once."""
    trainer = a_trainer(tmp_path, CountingUpdater(per_epoch))
    assert answers(triggers.IntervalTrigger(*setting), trainer, 7) == pattern(expected)


@vectors
def test_a_fresh_trigger_with_saved_state_goes_on_as_the_first(tmp_path, per_epoch, setting, expected):
    """Saved and loaded after every iteration, it fires at the same iterations."""
    for saved_after in range(8):
        trainer, trigger = a_trainer(tmp_path, CountingUpdater(per_epoch)), triggers.IntervalTrigger(*setting)
        given = answers(trigger, trainer, saved_after)
        given += answers(reloaded(trigger, setting), trainer, 7 - saved_after)
        assert given == pattern(expected), saved_after


@vectors
def test_asked_sparsely_it_fires_at_the_next_question(tmp_path, per_epoch, setting, expected):
    """Whichever iterations it is asked in, it fires if a boundary lies since the last question; also when reloaded."""
    for asked in product((False, True), repeat=7):
        trainer, trigger = a_trainer(tmp_path, CountingUpdater(per_epoch)), triggers.IntervalTrigger(*setting)
        given, wanted, missed = [], [], False
        for is_asked, would_fire in zip(asked, pattern(expected), strict=True):
            trainer.updater.update()
            missed = missed or would_fire
            if is_asked:
                trigger = reloaded(trigger, setting)
                given.append(trigger(trainer))
                wanted.append(missed)
                missed = False
        assert given == wanted, asked


@pytest.mark.parametrize("per_epoch", [3, 7, 10, 100, 1437])
@pytest.mark.parametrize("period", [0.1, 0.2, 0.25, 0.29, 1 / 3, 0.7, 5 / 6, 1.1])
@pytest.mark.parametrize("of_data", [False, True], ids=["counted in floats", "counted by an iterator"])
def test_fractions_of_an_epoch_fire_at_their_exact_iterations(tmp_path, per_epoch, period, of_data):
    """Iteration k fires if floor(k / (n * period)) grew there, in exact fractions, for several epochs."""
    exact = Fraction(period).limit_denominator(1000)
    length = Fraction(per_epoch) * exact
    iterations = min(40 * per_epoch, 3000)
    expected = [k for k in range(1, iterations + 1) if k // length != (k - 1) // length]
    updater = DataUpdater(per_epoch) if of_data else CountingUpdater(per_epoch)
    given = answers(triggers.IntervalTrigger(period, "epoch"), a_trainer(tmp_path, updater), iterations)
    assert [k for k, fires in enumerate(given, 1) if fires] == expected


def test_a_tenth_of_an_epoch_of_ten_iterations_fires_at_every_one(tmp_path):
    """The upstream floats fire at 1, 2, 4, 6, 7, 8, 10, 11, 13; here none is late or lost."""
    assert all(answers(triggers.IntervalTrigger(0.1, "epoch"), a_trainer(tmp_path, DataUpdater(10)), 1000))


@pytest.mark.parametrize("setting", [(2, "iteration"), (1, "epoch"), (0.1, "epoch")])
def test_it_never_fires_before_the_first_update(tmp_path, setting):
    """At iteration 0 nothing has been crossed."""
    assert triggers.IntervalTrigger(*setting)(a_trainer(tmp_path)) is False


@vectors
def test_asked_again_in_the_same_iteration_it_repeats_its_answer(tmp_path, per_epoch, setting, expected):
    """The second question of an iteration gets the first one's answer, also after a reload in between."""
    trainer, trigger = a_trainer(tmp_path, CountingUpdater(per_epoch)), triggers.IntervalTrigger(*setting)
    for wanted in pattern(expected):
        trainer.updater.update()
        assert [trigger(trainer), trigger(trainer), reloaded(trigger, setting)(trainer)] == [wanted] * 3


def test_one_trigger_object_serves_two_extensions(tmp_path):
    """Both extensions are called at every multiple, where upstream only the first ever is."""
    trainer, first, second = a_trainer(tmp_path, stop=(7, "iteration")), Fires(), Fires()
    shared = triggers.IntervalTrigger(3, "iteration")
    trainer.extend(first, "first", trigger=shared)
    trainer.extend(second, "second", trigger=shared)
    trainer.run()
    assert (first.iterations, second.iterations) == ([3, 6], [3, 6])


@pytest.mark.parametrize("length", range(1, 8))
def test_a_trigger_object_reused_in_a_second_trainer_starts_anew(tmp_path, length):
    """However long the first run was, the second fires as with a fresh object."""
    trigger = triggers.IntervalTrigger(3, "iteration")
    fires_in_run(tmp_path, trigger, length)
    assert fires_in_run(tmp_path, trigger, 7) == [3, 6]


def test_a_reused_trigger_without_saved_state_starts_where_the_resumed_run_is(tmp_path):
    """What an earlier trainer asked says nothing about a run that is resumed further on: no fire at its first iteration."""
    trigger = triggers.IntervalTrigger(3, "iteration")
    fires_in_run(tmp_path, trigger, 4)
    updater = CountingUpdater()
    updater.iteration = 10
    assert fires_in_run(tmp_path, trigger, 16, updater) == [12, 15]


@pytest.mark.parametrize("setting", [(3, "iteration"), (2.5, "iteration"), (0.1, "epoch"), (0.3, "epoch"), (1, "epoch")])
@pytest.mark.parametrize("extend_first", [True, False], ids=["extend, load", "load, extend"])
def test_a_resumed_run_fires_where_the_uninterrupted_one_does(tmp_path, setting, extend_first):
    """Stopped after every iteration, at and off a boundary, whichever of load and extend comes first."""
    whole = fires_in_run(tmp_path, setting, 12, DataUpdater(7, 2))
    for saved_after in range(13):
        saved, before = a_trainer(tmp_path, DataUpdater(7, 2), (saved_after, "iteration")), Fires()
        saved.extend(before, trigger=setting)
        saved.run()
        resumed, after = a_trainer(tmp_path, DataUpdater(7, 2), (12, "iteration")), Fires()
        if extend_first:
            resumed.extend(after, trigger=setting)
        resumed.load_state_dict(saved.state_dict())
        if not extend_first:
            resumed.extend(after, trigger=setting)
        resumed.run()
        assert before.iterations + after.iterations == whole, saved_after


@pytest.mark.parametrize("saved_after", range(1, 7))
def test_a_state_taken_between_load_and_run_changes_nothing(tmp_path, saved_after):
    """Saved once more before it runs, a loaded trigger still goes on where the saved run was."""
    saved, resumed = (a_trainer(tmp_path, stop=(length, "iteration")) for length in (saved_after, 9))
    before, after = Fires(), Fires()
    saved.extend(before, trigger=triggers.OnceTrigger())
    saved.run()
    resumed.extend(after, trigger=triggers.OnceTrigger())
    resumed.load_state_dict(saved.state_dict())
    resumed.state_dict()
    resumed.run()
    assert (before.iterations, after.iterations) == ([1], [])


@pytest.mark.parametrize(
    ("saved_after", "setting", "expected"),
    [
        (3, (3, "iteration"), [6, 9]),
        (4, (3, "iteration"), [6, 9]),
        (5, (3, "iteration"), [6, 9]),
        (4, (0.3, "epoch"), [6, 9]),
        (5, (0.25, "epoch"), [8, 10]),
        (5, (1, "epoch"), [10]),
    ],
)
def test_resumed_with_another_period_it_fires_at_the_new_multiples(tmp_path, saved_after, setting, expected):
    """A period is a setting and never state; what lies behind the resume fires no more."""
    saved, resumed, fires = (
        a_trainer(tmp_path, stop=(saved_after, "iteration")),
        a_trainer(tmp_path, stop=(10, "iteration")),
        Fires(),
    )
    saved.extend(Fires(), trigger=(2, "iteration"))
    saved.run()
    resumed.extend(fires, trigger=setting)
    resumed.load_state_dict(saved.state_dict())
    resumed.run()
    assert fires.iterations == expected


def test_a_trigger_new_on_resume_starts_from_there(tmp_path):
    """An extension that the saved run lacked does not fire for the multiples before the resume."""
    saved, resumed, fires = a_trainer(tmp_path, stop=(4, "iteration")), a_trainer(tmp_path, stop=(9, "iteration")), Fires()
    saved.run()
    resumed.load_state_dict(saved.state_dict())
    resumed.extend(fires, trigger=(3, "iteration"))
    with pytest.warns(UserWarning, match=r"only here \['Fires'\]"):
        resumed.run()
    assert fires.iterations == [6, 9]


@pytest.mark.parametrize("period", [0, -1, 0.0, -0.5])
def test_a_period_that_is_not_above_zero_is_refused(period):
    """The error shows the period and says what never firing is called; upstream divides by zero in the loop."""
    with pytest.raises(ValueError, match=rf"period of an interval is above 0, got {period}.*None"):
        triggers.IntervalTrigger(period, "iteration")


@pytest.mark.parametrize("unit", ["epochs", "second", "", None, 1])
def test_a_unit_that_is_none_is_refused(unit):
    """The error names the two units and shows the one given."""
    with pytest.raises(ValueError, match=rf'"iteration" or "epoch", got {unit!r}'):
        triggers.IntervalTrigger(1, unit)


@pytest.mark.parametrize(
    ("period", "error"), [(math.nan, ValueError), (math.inf, ValueError), ("1", TypeError), (None, TypeError)]
)
def test_a_period_that_is_no_finite_number_is_refused(period, error):
    """The error shows the value."""
    with pytest.raises(error, match=f"number is needed.*{period}"):
        triggers.IntervalTrigger(period, "epoch")


def test_its_text_is_its_construction():
    """`str` and `repr` can be read back."""
    assert (
        str(triggers.IntervalTrigger(2, "epoch"))
        == repr(triggers.IntervalTrigger(2, "epoch"))
        == "IntervalTrigger(2, 'epoch')"
    )


def test_its_training_length_is_its_period():
    """An extension that shows progress can ask how long training is."""
    assert triggers.IntervalTrigger(0.5, "epoch").get_training_length() == (0.5, "epoch")


def test_an_epoch_trigger_on_an_updater_without_epochs_is_refused_at_the_start(tmp_path):
    """The run ends before its first update, with the remedies in the error."""
    trainer = a_trainer(tmp_path, UncountedUpdater(), (3, "iteration"))
    trainer.extend(Fires(), trigger=(1, "epoch"))
    with pytest.raises(ValueError, match=r'UncountedUpdater has no iterator "main".*use "iteration"'):
        trainer.run()
    assert trainer.updater.iteration == 0


def test_a_fraction_of_an_epoch_of_unknown_length_is_refused_at_the_start(tmp_path):
    """A loader without a length has no tenths; the error says how to give it one."""
    updater = DataUpdater()
    updater.source = iterators.LoaderIterator(lambda: iter([[1], [2]]))
    trainer = a_trainer(tmp_path, updater, (3, "iteration"))
    trainer.extend(Fires(), trigger=(0.5, "epoch"))
    with pytest.raises(ValueError, match=r"fraction of an epoch \(0.5\).*epoch_length"):
        trainer.run()


class AsksFurther(triggers.IntervalTrigger):
    """A subclass with a rule of its own in ``ask``."""

    def ask(self, trainer):
        return super().ask(trainer) and trainer.updater.iteration % 3 == 0


class CallsFurther(triggers.IntervalTrigger):
    """The same in ``__call__``."""

    def __call__(self, trainer):
        return super().__call__(trainer) and trainer.updater.iteration % 3 == 0


class Wrapping:
    """A trigger around another, whose attributes it shows."""

    def __init__(self, period, unit):
        self.inner = triggers.IntervalTrigger(period, unit)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, trainer):
        return self.inner(trainer) and trainer.updater.iteration % 3 == 0


@pytest.mark.parametrize("kind", [AsksFurther, CallsFurther, Wrapping])
def test_a_trigger_made_of_it_has_the_last_word_also_in_every_iteration(tmp_path, kind):
    """What is answered at once is only what nobody has changed."""
    assert fires_in_run(tmp_path, kind(1, "iteration"), 7) == [3, 6]
