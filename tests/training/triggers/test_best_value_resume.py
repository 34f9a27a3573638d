"""The state of value triggers: a run that is continued fires where the uninterrupted one does, and warns as it does."""

import math
import time
import warnings

import pytest
import torch
from counting import CountingUpdater, Fires, a_trainer

from chainring import report, serializers
from chainring.training import triggers

NAN, INF = math.nan, math.inf
VALUES = [0.5, 0.7, NAN, 0.1, "?", 0.9, 0.3, INF, 0.3, 0.3, 0.2, -INF]


class Reporting(CountingUpdater):
    """Reports a score an update, tensors every second time, under weights that change."""

    def __init__(self, values=VALUES, key="score", per_epoch=3):
        super().__init__(per_epoch)
        self.values, self.key = values, key

    def update_core(self):
        value = self.values[self.iteration]
        is_tensor = self.iteration % 2 and not isinstance(value, str)
        self.weight = torch.tensor(self.iteration + 1.0) if is_tensor else self.iteration + 1
        report({self.key: torch.tensor(value, dtype=torch.float64) if is_tensor else value})


def run(out, make, until, state=None, **settings):
    """Trains on to an iteration: where each of two extensions that share the trigger was called, the warnings, the state."""
    trainer, fired, trigger = a_trainer(out, Reporting(**settings), (until, "iteration")), [Fires(), Fires()], make()
    for number, each in enumerate(fired):
        trainer.extend(each, f"fires{number}", trigger=trigger)
    if state is not None:
        trainer.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    return [each.iterations for each in fired], [str(warning.message) for warning in caught], trainer.state_dict()


def trigger_state(state):
    return {key: value for key, value in state.items() if key.startswith("extension_triggers/")}


INTERVALS = [(1, "iteration"), (2, "iteration"), (5, "iteration"), (1, "epoch"), (0.5, "epoch")]
MAKES = {
    "max": triggers.MaxValueTrigger,
    "min": triggers.MinValueTrigger,
    "best": lambda key, trigger: triggers.BestValueTrigger(key, lambda best, new: abs(new) < abs(best), trigger),
    "nested": lambda key, trigger: triggers.MinValueTrigger(key, triggers.MaxValueTrigger(key, trigger)),
    "schedule": lambda key, trigger: triggers.MaxValueTrigger(key, triggers.ManualScheduleTrigger([2, 7, 9], "iteration")),
}


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_saved_and_loaded_after_any_iteration_the_timeline_is_unchanged(tmp_path, make, interval):
    """Fires, warnings and the last state are equal, at the bounds of intervals and between them."""
    fired, warned, last = run(tmp_path, lambda: make("score", interval), len(VALUES))
    for k in range(len(VALUES)):
        before, warned_before, state = run(tmp_path, lambda: make("score", interval), k)
        after, warned_after, resumed = run(tmp_path, lambda: make("score", interval), len(VALUES), state)
        assert [one + two for one, two in zip(before, after, strict=True)] == fired, k
        assert warned_before + warned_after == warned, k
        assert str(trigger_state(resumed)) == str(trigger_state(last)), k


@pytest.mark.parametrize("k", range(8))
def test_a_warning_after_a_resume_names_all_keys_of_its_interval(tmp_path, k):
    """Those seen before the resume too, and it is said once in both runs together."""

    def part(until, state=None):
        return run(tmp_path, lambda: triggers.MaxValueTrigger("absent", (3, "iteration")), until, state, key=f"key{until}")

    before, warned, state = part(k)
    after, warned_later, _ = part(8, state)
    names = sorted({f"key{k}"} if k >= 3 else {"key8"} | ({f"key{k}"} if k else set()))
    assert before == after == [[], []]
    assert [message.partition("reported were ")[2].partition(".")[0] for message in warned + warned_later] == [str(names)]


@pytest.mark.parametrize("k", range(6))
def test_a_snapshot_on_disk_keeps_the_state(tmp_path, k):
    """Through a real file: infinities, names with slashes and a half interval."""
    make, values = (lambda: triggers.MaxValueTrigger("a/b", (2, "iteration"))), [-INF, -INF, 2, 3, 1, 3.5]
    trigger, trainer, given = make(), a_trainer(tmp_path, Reporting(values, "a/b")), []
    for iteration in range(6):
        if iteration == k:
            serializers.save(tmp_path / "saved", trigger)
            trigger = make()
            serializers.load(tmp_path / "saved", trigger)
        with trainer.reporter.scope(trainer.observation):
            trainer.updater.update()
        given.append(trigger(trainer))
    assert given == [False, True, False, True, False, False]


def test_state_is_a_copy(tmp_path):
    """What was saved does not follow the training that goes on."""
    trigger, trainer = triggers.MaxValueTrigger("score", (2, "iteration")), a_trainer(tmp_path, Reporting())
    saved = trigger.state_dict()
    before = str(saved)
    with trainer.reporter.scope(trainer.observation):
        trainer.updater.update()
    trigger(trainer)
    assert str(saved) == before != str(trigger.state_dict())


def test_resumed_with_another_key_it_starts_anew(tmp_path):
    """The key is a setting: the best value of another says nothing, and nor does a half interval of it."""

    def of(key):
        return lambda: triggers.MaxValueTrigger(key, (2, "iteration"))

    _, _, state = run(tmp_path, of("score"), 3, values=[9] * 3)
    assert run(tmp_path, of("other"), 8, state, values=[1] * 6 + [0, 3], key="other")[0] == [[4, 8]] * 2


@pytest.mark.parametrize(
    "other",
    [
        (3, "iteration"),
        lambda trainer: trainer.updater.iteration in (6, 9),
        triggers.ManualScheduleTrigger([6, 9], "iteration"),
    ],
)
def test_resumed_with_another_interval_it_keeps_the_best_value(tmp_path, other):
    """The interval is a setting: the new one holds from the resume on, also where it is a trigger of another class."""
    _, _, state = run(tmp_path, lambda: triggers.MaxValueTrigger("score", (2, "iteration")), 4, values=[1, 5, 1, 1])
    values = [0] * 4 + [2, 2, 3, 4, 5]
    assert run(tmp_path, lambda: triggers.MaxValueTrigger("score", other), 9, state, values=values)[0] == [[9]] * 2


def test_an_interval_by_the_clock_goes_on_where_it_was(tmp_path, monkeypatch):
    """The seconds counted before the resume count, hours between the runs do not."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def part(until, state=None):
        trainer, fired = a_trainer(tmp_path, Reporting(list(range(9))), (until, "iteration")), Fires()
        trainer.extend(lambda _: now.__setitem__(0, now[0] + 0.625), "clock", priority=500)
        trainer.extend(fired, trigger=triggers.MaxValueTrigger("score", (1, "second")))
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run()
        return fired.iterations, trainer.state_dict()

    whole, _ = part(9)
    first, state = part(5)
    now[0] += 5000
    assert first + part(9, state)[0] == whole == [2, 4, 5, 7, 8]


def test_an_object_of_an_earlier_run_starts_anew_in_one_that_resumes_without_its_state(tmp_path):
    """Also where that run goes on behind the last iteration in which the object was asked."""
    trigger, fired = triggers.MaxValueTrigger("score", (2, "iteration")), Fires()
    run(tmp_path, lambda: trigger, 3, values=[9] * 3)
    earlier = a_trainer(tmp_path, Reporting([0] * 4), (4, "iteration"))
    earlier.run()
    trainer = a_trainer(tmp_path, Reporting([0] * 4 + [1, 1, 2, 2]), (8, "iteration"))
    trainer.extend(fired, trigger=trigger)
    trainer.load_state_dict(earlier.state_dict())
    with pytest.warns(UserWarning, match="only here"):
        trainer.run()
    assert fired.iterations == [6, 8]


class EveryThird:
    """A user's trigger that counts its questions; its state is the PyTorch pair."""

    asked = 0

    def __call__(self, trainer):
        self.asked += 1
        return self.asked % 3 == 0

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


@pytest.mark.parametrize("k", range(9))
def test_the_state_of_a_users_own_interval_is_saved(tmp_path, k):
    """It is asked once in each iteration, for two extensions too."""
    make, values = (lambda: triggers.MaxValueTrigger("score", EveryThird())), [1, 2, 3, 1, 1, 1, 4, 4, 4]
    before, _, state = run(tmp_path, make, k, values=values)
    after, _, _ = run(tmp_path, make, 9, state, values=values)
    assert [one + two for one, two in zip(before, after, strict=True)] == [[3, 9]] * 2


def test_a_stop_trigger_that_has_answered_for_an_extension_repeats_its_answer_after_a_resume(tmp_path):
    """The snapshot lies between the two questions; a run whose last update was the best stops without another."""

    def part(stop_at, state=None):
        trigger = triggers.MaxValueTrigger("score", triggers.ManualScheduleTrigger([3], "iteration"))
        trainer = a_trainer(tmp_path, Reporting([1, 2, 3, 4]), stop_at or trigger)
        trainer.extend(Fires(), trigger=trigger)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run()
        return trainer

    saved = part((3, "iteration")).state_dict()
    assert part(None, saved).updater.iteration == 3
