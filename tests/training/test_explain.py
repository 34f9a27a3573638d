"""`Trainer.explain`: the plan is what the run then does."""

import re

import pytest
import torch
from counting import CountingUpdater, DataUpdater, Fires, UncountedUpdater, a_trainer
from IPython.lib.pretty import pretty

from chainring import iterators, training
from chainring.training import extensions, triggers


class Said:
    """An extension that writes its name when it is called."""

    def __init__(self, called):
        self.called = called

    def __call__(self, trainer):
        self.called.append(trainer.extension_name)


class Snapshot(Said):
    """One that takes down the state of the run."""

    is_snapshot = True


def planned(trainer, iterations=20):
    """The fires of each extension in a plan, in the order of the plan."""
    rows = {}
    for line in trainer.explain(iterations).splitlines()[2:]:
        name, fires = line.split()[0], re.split(r"  +", line)[-1]
        rows[name] = [int(number) for number in re.findall(r"\d+", fires)] if fires.startswith("at ") else fires
    return rows


def ran(trainer, fires):
    """The same of a run."""
    trainer.run()
    return {name: each.iterations for name, each in fires.items()}


TRIGGERS = {
    "interval": lambda: triggers.IntervalTrigger(3, "iteration"),
    "fraction": lambda: triggers.IntervalTrigger(2.5, "iteration"),
    "epochs": lambda: triggers.IntervalTrigger(1, "epoch"),
    "tenths": lambda: triggers.IntervalTrigger(0.7, "epoch"),
    "schedule": lambda: triggers.ManualScheduleTrigger([2, 7], "iteration"),
    "points": lambda: triggers.ManualScheduleTrigger([0.5, 2.2], "epoch"),
    "once": triggers.OnceTrigger,
}


def extended(trainer):
    """A trainer with an extension for each kind of trigger, and the extensions."""
    fires = {name: Fires() for name in TRIGGERS}
    for name, make in TRIGGERS.items():
        trainer.extend(fires[name], name, trigger=make())
    return trainer, fires


@pytest.mark.filterwarnings("ignore:a batch of 8 is more than an epoch")
@pytest.mark.parametrize(("examples", "batch_size"), [(10, 3), (7, 2), (3, 8), (1, 1)])
def test_the_plan_of_a_fresh_run_is_what_fires(tmp_path, examples, batch_size):
    """Interval, schedule and once triggers, of iterations and epochs, fire where the plan says."""
    trainer, fires = extended(a_trainer(tmp_path, DataUpdater(examples, batch_size), (12, "iteration")))
    plan = planned(trainer)
    assert plan == ran(trainer, fires)


@pytest.mark.parametrize("is_loaded_first", [False, True])
@pytest.mark.parametrize("saved_after", [1, 2, 3, 6, 7, 9])
def test_the_plan_of_a_resumed_run_is_what_fires(tmp_path, saved_after, is_loaded_first):
    """From where the saved run stood, with the state of its triggers, whether these were there before it was loaded."""
    saved, _ = extended(a_trainer(tmp_path, DataUpdater(7, 2), (saved_after, "iteration")))
    saved.run()
    trainer = a_trainer(tmp_path, DataUpdater(7, 2), (14, "iteration"))
    if is_loaded_first:
        trainer.load_state_dict(saved.state_dict())
    trainer, fires = extended(trainer)
    if not is_loaded_first:
        trainer.load_state_dict(saved.state_dict())
    plan = planned(trainer)
    assert plan == ran(trainer, fires)


@pytest.mark.parametrize("saved_after", [1, 3, 4, 5, 10])
def test_the_plan_of_triggers_that_are_new_on_resume_is_what_fires(tmp_path, saved_after):
    """A trigger without saved state starts from there, in the plan as in the run."""
    saved = a_trainer(tmp_path, DataUpdater(7, 2), (saved_after, "iteration"))
    saved.run()
    trainer, fires = extended(a_trainer(tmp_path, DataUpdater(7, 2), (14, "iteration")))
    trainer.load_state_dict(saved.state_dict())
    plan = planned(trainer)
    with pytest.warns(UserWarning, match="only here"):
        assert plan == ran(trainer, fires)


def test_the_plan_of_a_shared_trigger_is_what_fires(tmp_path):
    """One object for two extensions and the stop: each fires, then the run ends."""
    trigger = triggers.ManualScheduleTrigger([4], "iteration")
    trainer, fires = a_trainer(tmp_path, stop=trigger), {"first": Fires(), "second": Fires()}
    for name, each in fires.items():
        trainer.extend(each, name, trigger=trigger)
    plan = planned(trainer)
    assert plan == ran(trainer, fires) == {"first": [4], "second": [4]}


def test_the_plan_ends_where_the_data_end(tmp_path):
    """An iterator that does not repeat gives one epoch, whose last batch is short."""
    trainer, fires = extended(a_trainer(tmp_path, DataUpdater(7, 2, repeat=False)))
    plan, headline = planned(trainer), trainer.explain().splitlines()[0]
    assert plan == ran(trainer, fires)
    assert headline.startswith("Iterations 1 to 4, then the end of the data stops training.")


def test_the_plan_counts_accumulated_batches(tmp_path):
    """An update of k batches advances the epoch k times as far."""
    model = torch.nn.Linear(1, 1)
    source = iterators.SerialIterator([(torch.zeros(1),)] * 12, 2, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = training.StandardUpdater(source, optimizer, model, loss_func=lambda model, x: model(x).sum(), accumulate=3)
    trainer, fires = extended(a_trainer(tmp_path, updater, (8, "iteration")))
    plan = planned(trainer)
    assert plan == ran(trainer, fires)


def test_a_plan_changes_nothing(tmp_path):
    """The run after many plans fires as the run after none, and state and iteration are untouched."""
    trainer, fires = extended(a_trainer(tmp_path, DataUpdater(7, 2), (12, "iteration")))
    plans = [trainer.explain(length) for length in (12, 1, 100, 12)]
    untouched = a_trainer(tmp_path, DataUpdater(7, 2), (12, "iteration"))
    assert (plans[0], trainer.updater.iteration) == (plans[3], 0)
    assert ran(trainer, fires) == ran(*extended(untouched))


def test_a_plan_made_in_the_run_goes_on_from_there(tmp_path):
    """An extension that asks for the plan at iteration 5 is told what the rest of the run does."""
    trainer, fires = extended(a_trainer(tmp_path, DataUpdater(7, 2), (12, "iteration")))
    plans = []
    trainer.extend(lambda trainer: plans.append(planned(trainer)), "plan", trigger=(5, "iteration"), priority=1)
    later = {name: [k for k in iterations if k > 5] for name, iterations in ran(trainer, fires).items()}
    assert plans[0] == {**later, "plan": [10]}


def test_the_order_of_the_plan_is_the_order_of_the_calls(tmp_path):
    """Descending priority, ties as registered, snapshots last whatever their priority."""
    trainer, called = a_trainer(tmp_path, stop=(1, "iteration")), []
    for kind, name, priority in [(Said, "c", 1), (Snapshot, "s", 9), (Said, "a", 2), (Said, "d", 1), (Snapshot, "z", 5)]:
        trainer.extend(kind(called), name, priority=priority)
    plan = list(planned(trainer))
    trainer.run()
    assert plan == called == ["a", "c", "d", "s", "z"]


@pytest.mark.parametrize("trigger", [(5, "second"), lambda trainer: False], ids=["seconds", "callable"])
def test_a_trigger_that_cannot_be_foretold_is_asked_each_iteration(tmp_path, trigger):
    """The clock's and a user's own."""
    trainer = a_trainer(tmp_path, stop=(3, "iteration"))
    trainer.extend(Fires(), trigger=trigger)
    assert planned(trainer) == {"Fires": "asked each iteration"}


@pytest.mark.parametrize("updater", [UncountedUpdater(), CountingUpdater()], ids=["none", "its own"])
def test_epochs_that_cannot_be_foretold_are_asked_each_iteration(tmp_path, updater):
    """Where no iterator tells the length of an epoch, iterations are still foretold."""
    trainer = a_trainer(tmp_path, updater, (3, "epoch"))
    trainer.extend(Fires(), "epochs", trigger=(1, "epoch"))
    trainer.extend(Fires(), "iterations", trigger=(4, "iteration"))
    assert planned(trainer) == {"epochs": "asked each iteration", "iterations": [4, 8, 12, 16, 20]}


def test_the_headline_says_where_the_run_stops(tmp_path):
    """By the stop trigger, in numbers of iterations."""
    trainer = a_trainer(tmp_path, DataUpdater(10, 4), (3, "epoch"))
    assert trainer.explain().startswith("Iterations 1 to 8, then ReachedTrigger(3, 'epoch') stops training.")


def test_without_a_stop_trigger_the_headline_says_that_the_data_end_it(tmp_path):
    """None trains until then."""
    assert a_trainer(tmp_path, DataUpdater()).explain(5).startswith("Iterations 1 to 5, until the data end.")


def test_a_finished_run_has_no_more_iterations(tmp_path):
    """The plan of a run that would do nothing says so, and why."""
    saved = a_trainer(tmp_path, stop=(3, "iteration"))
    saved.run()
    trainer = a_trainer(tmp_path, stop=(2, "iteration"))
    trainer.load_state_dict(saved.state_dict())
    headline = "No more iterations: ReachedTrigger(2, 'iteration') has stopped training after iteration 3."
    assert trainer.explain().splitlines()[0] == headline


def test_a_row_says_what_happens_besides_its_fires(tmp_path):
    """Priority, trigger, the call before training, observing, and how many fires were left out of a long list."""
    trainer = a_trainer(tmp_path)
    trainer.extend(extensions.LogReport(filename=None), trigger=(2, "iteration"), invoke_before_training=True)
    row = r"LogReport +\d+ +IntervalTrigger\(2, 'iteration'\) +at 2, 4, .*, 24, ... \(50 times\)"
    shown = row + "; once before training; observes"
    assert re.search(shown, trainer.explain(100))


def test_a_call_before_training_that_is_skipped_on_resume_is_not_planned(tmp_path):
    """LogReport makes no such call in a resumed run."""
    trainer = a_trainer(tmp_path)
    trainer.extend(extensions.LogReport(filename=None), trigger=(2, "iteration"), invoke_before_training=True)
    trainer.load_state_dict(trainer.state_dict())
    assert "before training" not in trainer.explain()


@pytest.mark.parametrize("iterations", [0, -3, 1.5, "3", True, None])
def test_a_plan_of_no_number_of_iterations_is_refused(tmp_path, iterations):
    """The error shows what was given."""
    with pytest.raises(ValueError, match=f"an integer of at least 1, got {iterations!r}$"):
        a_trainer(tmp_path).explain(iterations)


def test_a_notebook_shows_the_plan_in_lines(tmp_path):
    """As print does, and not as a string; it is one all the same."""
    plan = a_trainer(tmp_path, stop=(3, "iteration")).explain()
    assert pretty(plan) == plan
    assert isinstance(plan, str)
