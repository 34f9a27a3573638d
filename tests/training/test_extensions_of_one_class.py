"""Extensions of one class share a name, and are recognized in a resumed run although their order has changed."""

import json
import warnings

import pytest
import torch
from counting import CountingUpdater, a_trainer
from torch import nn

from chainring import report, serializers, training
from chainring.training import extensions, triggers
from chainring.training.extensions import LogReport


class Calls(training.Extension):
    """Counts its calls, and is recognized by nothing but its trigger."""

    def __init__(self, default_name="Calls"):
        self.calls = 0
        self.named = default_name

    @property
    def default_name(self):
        return self.named

    def __call__(self, trainer):
        self.calls += 1

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


class Labelled(Calls):
    """Says what it is recognized by."""

    def __init__(self, label, detail=""):
        super().__init__()
        self.label, self.detail = label, detail

    def identity(self, trainer):
        return (self.label, self.detail)


class Reporting(CountingUpdater):
    """Reports how far it is, upwards and downwards."""

    def update_core(self):
        report({"up": self.iteration, "down": -self.iteration})


def run(out, *parts, load=None, late=False, stop=4):
    """Run with these extensions, each alone or with its trigger, and without a warning."""
    trainer = a_trainer(out, Reporting(), (stop, "iteration"))
    if late and load is not None:
        trainer.load_state_dict(load)
    for part in parts:
        trainer.extend(*part[:1], trigger=part[1]) if isinstance(part, tuple) else trainer.extend(part)
    if not late and load is not None:
        trainer.load_state_dict(load)
    trainer.run()
    return trainer


def every(n):
    return n, "iteration"


when_extended = pytest.mark.parametrize("late", [False, True], ids=["extended before loading", "extended after loading"])


@when_extended
@pytest.mark.parametrize("names", [("b", "a"), ("b",), ("c", "a", "b"), ("a", "b"), ("a", "c", "b")])
def test_a_log_keeps_its_rows_whatever_logs_are_added_before_it_removed_or_swapped(tmp_path, names, late, recwarn):
    """By the name of its file, in the attribute and in the file; an added one begins with its first row."""

    def logs(names):
        return [LogReport([name], every(1), filename=name) for name in names]

    state = run(tmp_path, *logs("ab")).state_dict()
    now = dict(zip(names, logs(names), strict=True))
    run(tmp_path, *now.values(), load=state, late=late, stop=6)
    for name, log in now.items():
        expected = [5, 6] if name == "c" else [1, 2, 3, 4, 5, 6]
        assert [row["iteration"] for row in log.log] == expected
        assert [row["iteration"] for row in json.loads((tmp_path / name).read_text())] == expected
    assert [str(w.message).partition(". The state")[0] for w in recwarn] == [
        f"this run has different extensions from the saved run: only there {there}, only here {here}"
        for there, here in {
            ("b",): [(["LogReport"], [])],
            ("c", "a", "b"): [([], ["LogReport"])],
            ("a", "c", "b"): [([], ["LogReport_1"])],
        }.get(names, [])
    ]


@when_extended
def test_extensions_are_recognized_by_the_keys_of_their_triggers(tmp_path, late):
    """Swapped, and with other intervals."""

    def parts(interval):
        return [(Calls(), triggers.MaxValueTrigger("up", interval)), (Calls(), triggers.MaxValueTrigger("down", interval))]

    first = parts(every(1))
    state = run(tmp_path, *first).state_dict()
    assert [part.calls for part, _ in first] == [4, 1]
    for interval in (every(1), every(2)):
        (up, _), (down, _) = swapped = parts(interval)
        run(tmp_path, *reversed(swapped), load=state, late=late, stop=6)
        assert (up.calls, down.calls) == (6 if interval == every(1) else 5, 1)  # the best of "down" came back too


@when_extended
def test_a_changed_interval_loses_no_state(tmp_path, late, capsys):
    """Of the only one of its class, of one of two that only their names tell apart, and of two that say what they are."""
    state = run(tmp_path, Calls(), Calls("pair"), Calls("pair"), Labelled("x"), Labelled("y")).state_dict()
    parts = [Calls(), Calls("pair"), Calls("pair"), Labelled("x", "new"), Labelled("y", "new")]
    rare = [0, 2, 3, 4]
    run(tmp_path, *((part, every(2 if i in rare else 1)) for i, part in enumerate(parts)), load=state, late=late, stop=6)
    assert [part.calls for part in parts] == [5, 6, 5, 5, 5]
    assert capsys.readouterr().out.count("  trigger of extension") == len(rare)


@when_extended
def test_what_says_what_it_is_keeps_its_state_when_swapped(tmp_path, late):
    """By identity(trainer), of which the first part is enough where no two have it."""
    state = run(tmp_path, (Labelled("x"), every(1)), (Labelled("y"), every(2))).state_dict()
    parts = [Labelled("y", "new"), Labelled("x")]
    run(tmp_path, *((part, every(1)) for part in parts), load=state, late=late, stop=5)
    assert [part.calls for part in parts] == [3, 5]


@when_extended
def test_state_of_which_it_is_not_certain_whose_it_is_is_warned_about_and_not_given(tmp_path, late):
    """One of two is gone that nothing told apart; or two are others now."""
    twins = run(tmp_path, Calls(), Calls(), (Calls("other"), every(2))).state_dict()
    left, other = Calls(), Calls("other")
    with pytest.warns(UserWarning, match=r"start without their saved state.*here 'Calls' \(.*'Calls' \(.*, 'Calls_1' \("):
        run(tmp_path, left, (other, every(2)), load=twins, late=late, stop=5)
    assert (left.calls, other.calls) == (1, 2)
    state = run(tmp_path, Labelled("x"), Labelled("y")).state_dict()
    parts = [Labelled("z"), Labelled("x"), Labelled("w")]
    with pytest.warns(
        UserWarning, match=r"start without.*here 'Calls' \(z.*'Calls_2' \(w, .*in the saved run 'Calls_1' \(y"
    ):
        run(tmp_path, *parts, load=state, late=late, stop=5)
    assert [part.calls for part in parts] == [1, 5, 1]


def test_twins_that_nothing_tells_apart_continue_where_the_script_is_the_same(tmp_path):
    """Each with its own state, by their order."""
    first = [Calls() for _ in range(12)]
    first[7].calls = 100
    state = run(tmp_path, *first).state_dict()
    parts = [Calls() for _ in range(12)]
    run(tmp_path, *parts, load=state, stop=5)
    assert [part.calls for part in parts] == [5] * 7 + [105] + [5] * 4


def test_doubt_about_functions_of_which_nothing_depends_is_not_warned_about_as_lost_state(tmp_path):
    """Three functions of one name in place of two: the third is new, and nothing is lost."""
    state = run(tmp_path, lambda trainer: None, lambda trainer: None).state_dict()
    with pytest.warns(UserWarning, match=r"only there \[\], only here \['<lambda>_2'\]"):
        run(tmp_path, *[lambda trainer: None] * 3, load=state)


def test_schedulers_of_two_optimizers_keep_their_own_state_when_swapped(tmp_path):
    """A scheduler is known by the optimizer that it steps, so that none gets the learning rate of the other."""

    class Two(training.Updater):
        def __init__(self):
            self.parts = {name: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr) for name, lr in (("a", 0.1), ("b", 9.0))}

        def get_all_optimizers(self):
            return self.parts

        def get_optimizer(self, name):
            return self.parts[name]

        def update_core(self):
            for optimizer in self.parts.values():
                optimizer.step()

    def rates(names, load=None, stop=4):
        trainer = a_trainer(tmp_path, updater := Two(), (stop, "iteration"))
        for name in names:
            scheduler = torch.optim.lr_scheduler.StepLR(updater.parts[name], 1, 0.5 if name == "a" else 0.25)
            trainer.extend(extensions.LRScheduler(scheduler), trigger=every(1))
            trainer.extend(extensions.ExponentialShift("momentum", 0.5, 1.0 if name == "a" else 8.0, optimizer=name))
        if load is not None:
            trainer.load_state_dict(load)
        trainer.run()
        groups = {name: optimizer.param_groups[0] for name, optimizer in updater.parts.items()}
        return trainer, {name: (group["lr"], group["momentum"]) for name, group in groups.items()}

    trainer, _ = rates("ab")
    assert rates("ba", trainer.state_dict(), 6)[1] == rates("ab", stop=6)[1]


def test_an_identity_of_another_meaning_is_left_alone(tmp_path):
    """Of a user's class that has an attribute or a method of this name for something else."""

    class Own(Calls):
        def identity(self):
            raise AssertionError

    class Number(Calls):
        identity = 3

    class Itself(Calls):
        def identity(self, value):
            return value

    kinds = Own, Number, Itself
    state = run(tmp_path, *(kind() for kind in kinds)).state_dict()
    parts = [kind() for kind in kinds]
    run(tmp_path, *reversed(parts), load=state, stop=5)
    assert [part.calls for part in parts] == [5, 5, 5]


def test_swapped_logs_continue_from_a_snapshot_on_the_disk(tmp_path):
    """The second file is appended to with its own rows, and not cut back to those of the other."""

    def start(names, stop):
        trainer = a_trainer(tmp_path, Reporting(), (stop, "iteration"))
        for name in names:
            trainer.extend(LogReport([name], every(1), filename=name))
        trainer.extend(extensions.snapshot(autoload=True), trigger=every(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.run()

    start(["up", "down"], 4)
    start(["down", "up"], 6)
    for name, sign in (("up", 1), ("down", -1)):
        assert [row[name] for row in json.loads((tmp_path / name).read_text())] == [sign * i for i in range(6)]
    fresh = a_trainer(tmp_path / "other", Reporting(), (6, "iteration"))
    fresh.extend(logs := LogReport(filename="up"))
    serializers.load(tmp_path / "snapshot_iter_4", fresh)
    assert [row["up"] for row in logs.log] == [0, 1, 2, 3]
