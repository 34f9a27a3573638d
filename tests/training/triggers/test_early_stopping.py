"""EarlyStoppingTrigger: training ends when a reported value has not become better for a while."""

import io
import math
import warnings

import pytest
import torch
from counting import CountingUpdater, Fires, a_trainer

from chainring import report, serializers
from chainring.training import extensions, triggers

Early = triggers.EarlyStoppingTrigger
NAN = math.nan
EVERY, EVERY_2 = (1, "iteration"), (2, "iteration")
MAX = (100, "iteration")


class Reporting(CountingUpdater):
    """Reports one given observation an update, under weights that change."""

    def __init__(self, observations, weights=None):
        super().__init__(per_epoch=2)
        self.observations, self.weights = observations, weights

    def update_core(self):
        if self.iteration < len(self.observations):
            report(self.observations[self.iteration])
        self.weight = 1 if self.weights is None else self.weights[self.iteration]


def of(key, values):
    return [{key: value} for value in values]


def stopped_at(out, trigger, observations, weights=None):
    """After how many updates a run ends that has this stop trigger."""
    trainer = a_trainer(out, Reporting(observations, weights), trigger)
    trainer.run()
    return trainer.updater.iteration


ACCURACY = [0.5, 0.5, 0.6, 0.7, 0.6, 0.4, 0.3, 0.2]
LOSS = [100, 80, 30, 10, 20, 24, 30, 35]


@pytest.mark.parametrize(("key", "values"), [("main/accuracy", ACCURACY), ("main/loss", LOSS)])
def test_it_stops_when_patience_checks_in_a_row_brought_no_improvement(tmp_path, key, values):
    """Three by default; whether greater is better follows from the key."""
    assert stopped_at(tmp_path, Early(EVERY, key, max_trigger=MAX), of(key, values)) == 7


def test_the_defaults_check_the_main_loss_each_epoch(tmp_path):
    """Epochs of two iterations here: three without improvement after the second."""
    losses = [5, 5, 4, 4, 4, 5, 5, 5, 6, 6, 1, 1]
    assert stopped_at(tmp_path, Early(), of("main/loss", losses)) == 10


@pytest.mark.parametrize(
    ("mode", "key", "expected"),
    [("max", "loss", 3), ("min", "accuracy", 5), ("auto", "loss", 5), ("auto", "a/accuracy_5", 3)],
)
def test_the_mode_says_what_is_better(tmp_path, mode, key, expected):
    """Given, it holds whatever the key is called."""
    trigger = Early(EVERY, key, patience=2, mode=mode, max_trigger=MAX)
    assert stopped_at(tmp_path, trigger, of(key, [5, 4, 3, 3, 3, 3])) == expected


SAYS_IT = {
    "min": ["loss", "main/loss", "validation/main/loss_1", "valLoss", "top5_error", "bits perplexity", "nll_loss",
            "main/mse", "valRMSE", "mae", "PPL", "test/wer", "cer_1", "cross_entropy", "CrossEntropy", "loss_total"],
    "max": ["accuracy", "validation/main/accuracy", "top-5 accuracy", "valAccuracy", "ACCURACY", "accuracy_top5",
            "val/auc", "AUROC", "main/f1", "valF1", "mIoU", "bleu", "BLEU-4"],
}  # fmt: skip
LEAVES_DOUBT = (
    "acc mAP psnr reward r2 x fid accuracy_loss error_accuracy negative_loss neg_loss loss_scale acc_error acc_loss f1_loss "
    "auc_error neg_mse entropy f12 total top5 conf1 score loss_accuracy_total"
)


@pytest.mark.parametrize(("mode", "key"), [(mode, key) for mode, keys in SAYS_IT.items() for key in keys])
def test_a_key_that_says_what_is_better_needs_no_mode(mode, key):
    """Its last word is that of a loss, an error or a score that is never meant otherwise."""
    assert Early(monitor=key).mode == mode


@pytest.mark.parametrize("key", [f"validation/main/{key}" for key in LEAVES_DOUBT.split()])
def test_a_key_that_leaves_doubt_asks_for_the_mode(key):
    """A rising score that was taken for a loss would end the run early; the given mode holds."""
    with pytest.raises(ValueError, match=f"'{key}'; write EarlyStoppingTrigger.*mode=\"max\""):
        Early(monitor=key)
    assert [Early(monitor=key, mode=mode).mode for mode in ("min", "max")] == ["min", "max"]


def test_an_improvement_begins_the_count_anew(tmp_path):
    """Two bad checks, a good one, and then three bad ones."""
    assert stopped_at(tmp_path, Early(EVERY, "loss", max_trigger=MAX), of("loss", [5, 6, 6, 4, 4, 4, 4, 0])) == 7


def test_nan_is_no_improvement(tmp_path):
    """Neither first nor later; a number after it is compared with the best before it."""
    assert stopped_at(tmp_path, Early(EVERY, "loss", 2, max_trigger=MAX), of("loss", [3, NAN, 3, 1])) == 3
    assert stopped_at(tmp_path, Early(EVERY, "loss", 2, max_trigger=MAX), of("loss", [NAN, 3, NAN, NAN])) == 4
    assert stopped_at(tmp_path, Early(EVERY, "loss", 2, max_trigger=MAX), of("loss", [NAN, NAN, 1])) == 2


def test_a_check_compares_the_weighted_mean_of_its_interval(tmp_path):
    """Tensors will do for values and weights."""
    values, trigger = of("loss", [1, 1, 0, torch.tensor(1.5), 0, 1.5]), Early(EVERY_2, "loss", 1, max_trigger=MAX)
    assert stopped_at(tmp_path, trigger, values) == 6
    assert stopped_at(tmp_path, trigger, values, [1, 1, 1, torch.tensor(3.0), 1, 3]) == 4


def test_a_check_without_the_key_neither_counts_nor_resets_and_warns_once(tmp_path):
    """A validation less often than the check does not end training, and does not keep it going."""
    observations = [
        {"loss": 3, "error": 1},
        {"error": 1},
        {"loss": 3},
        {"z": 1},
        {"loss": "?"},
        {"loss": 3},
        {},
        {"loss": 3},
    ]
    with pytest.warns(UserWarning, match=r"'loss' was not reported; reported were \['error'\]") as caught:
        assert stopped_at(tmp_path, Early(EVERY, "loss", 3, max_trigger=MAX), observations) == 8
    assert len(caught) == 1
    assert "has nothing to compare at iteration 2" in str(caught[0].message)


@pytest.mark.parametrize("maximum", [(3, "epoch"), (6, "iteration"), triggers.IntervalTrigger(3, "epoch")])
def test_max_trigger_means_reached(tmp_path, maximum):
    """As the stop trigger of a trainer does, also for a run that begins behind it."""
    trigger = Early(EVERY, "loss", max_trigger=maximum)
    assert stopped_at(tmp_path, trigger, of("loss", range(20, 0, -1))) == 6
    trainer = a_trainer(tmp_path, Reporting([]), Early(EVERY, "loss", max_trigger=maximum))
    trainer.updater.iteration = 7
    with pytest.warns(UserWarning, match="nothing to compare"):
        trainer.run()
    assert trainer.updater.iteration == 7


def test_without_a_max_trigger_only_patience_ends_training(tmp_path):
    """None never fires."""
    assert stopped_at(tmp_path, Early(EVERY, "loss", 1, max_trigger=None), of("loss", [*range(150, 0, -1), 9])) == 151


def test_a_progress_bar_takes_its_length_from_max_trigger(tmp_path):
    """And has no total where it does not say one."""
    assert Early(max_trigger=(7, "epoch")).get_training_length() == (7, "epoch")
    for maximum, shown in [((4, "iteration"), "iteration 3/4"), (lambda trainer: False, "iteration 3,")]:
        trigger, out = Early(EVERY, "loss", 2, max_trigger=maximum), io.StringIO()
        trainer = a_trainer(tmp_path, Reporting(of("loss", [1, 1, 1])), trigger)
        trainer.extend(extensions.ProgressBar(out=out, update_interval=1))
        trainer.run()
        assert shown in out.getvalue()


def test_two_extensions_that_share_it_get_the_same_answer(tmp_path):
    """From the check that ends its patience on, until an improvement; a value counts once an iteration."""
    shared, fired = Early(EVERY_2, "loss", 1, max_trigger=None), [Fires(), Fires()]
    trainer = a_trainer(tmp_path, Reporting(of("loss", [3, 3, 3, 3, 9, 9, 1, 1])), (8, "iteration"))
    for each in fired:
        trainer.extend(each, trigger=shared)
    trainer.run()
    assert [each.iterations for each in fired] == [[4, 5, 6, 7]] * 2


def test_verbose_says_why_it_stops(tmp_path, capsys):
    """Once, with the best value; without it nothing is printed."""
    stopped_at(tmp_path / "a", Early(EVERY, "loss", 2, max_trigger=MAX), of("loss", [5, 6, 7]))
    assert capsys.readouterr().out == ""
    stopped_at(tmp_path / "b", Early(EVERY, "loss", 2, verbose=True, max_trigger=MAX), of("loss", [5, 6, 7]))
    assert capsys.readouterr().out == (
        "training stops early, at epoch 1, iteration 3: loss has been no better than 5.0 in 2 checks, and was 7.0 in the "
        "last\n"
    )


def test_no_value_is_read_from_its_device_before_a_check(tmp_path):
    """Tensors without data stand in for those on an accelerator: to read one is an error."""
    values = of("loss", torch.empty(9, device="meta"))
    assert stopped_at(tmp_path, Early((50, "iteration"), "loss", max_trigger=(9, "iteration")), values) == 9


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"patience": 0}, ValueError, "patience is the number of checks.*at least 1; got 0"),
        ({"patience": 2.5}, TypeError, "an integer; got 2.5"),
        ({"patience": True}, TypeError, "an integer; got True"),
        ({"mode": "maximum"}, ValueError, 'mode is "auto", "max" or "min", got \'maximum\''),
        ({"monitor": None}, TypeError, "the key is that of a reported value.*got None"),
        ({"check_trigger": (0, "epoch")}, ValueError, "above 0, got 0"),
        ({"max_trigger": (1, "epochs")}, ValueError, "'epochs'"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(settings, error, message):
    """The error gives the rule and the value."""
    with pytest.raises(error, match=message):
        Early(**settings)


def test_it_is_shown_as_it_was_made(tmp_path):
    """With the mode that it took."""
    assert str(Early()) == "EarlyStoppingTrigger(IntervalTrigger(1, 'epoch'), 'main/loss', 3, 'min')"


VALUES = [5, 4, NAN, 6, 3, 3, 9, 3, 2, 4, 4, 4, 4, 4, 0]


def run(out, trigger, until=None, state=None, observations=None):
    """Trains to the end or to an iteration: where it ended, the warnings, and the state, of which the trigger is part."""
    observations = of("loss", VALUES) if observations is None else observations
    trainer = a_trainer(out, Reporting(observations, range(1, len(observations) + 1)), trigger)
    trainer.extend(lambda trainer: None, "until")
    if until is not None:
        trainer.stop_trigger = _Until(trigger, until)
    if state is not None:
        trainer.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    return trainer.updater.iteration, [str(warning.message) for warning in caught], trainer.state_dict()


class _Until(Early):
    """The same trigger, cut short: where a snapshot falls it has not been asked at the last iteration."""

    def __init__(self, trigger, until):
        vars(self).update(vars(trigger))
        self.until = until

    def __call__(self, trainer):
        return trainer.updater.iteration >= self.until or super().__call__(trainer)


_Until.__name__ = "EarlyStoppingTrigger"  # so that the whole run takes over its state


@pytest.mark.parametrize(
    "make",
    [
        lambda: Early(EVERY, "loss", 5, max_trigger=MAX),
        lambda: Early(EVERY_2, "loss", 3, max_trigger=(2, "second")),
        lambda: Early(triggers.ManualScheduleTrigger([1, 4, 7, 8], "iteration"), "loss", 2, max_trigger=(13, "iteration")),
        lambda: Early(EVERY, "error", 5, max_trigger=triggers.MinValueTrigger("loss", (3, "iteration"))),
        lambda: Early(triggers.MaxValueTrigger("loss", EVERY_2), "loss", 1, max_trigger=None),
        lambda: Early(EVERY, "loss", 2, max_trigger=MAX, min_delta=0.5, min_iterations=6, check_finite=True),
        lambda: Early(EVERY_2, "loss", 9, max_trigger=MAX, threshold=3.2, min_iterations=4),
    ],
)
def test_saved_and_loaded_after_any_iteration_it_stops_where_it_would_have(tmp_path, make):
    """With the same best value, count and half interval, and the warnings of both runs together are those of one."""
    end, warned, last = run(tmp_path, make())
    for k in range(end + 1):
        _, warned_before, state = run(tmp_path, make(), k)
        ended, warned_after, resumed = run(tmp_path, make(), None, state)
        assert (ended, warned_before + warned_after) == (end, warned), k
        own = [{key: value for key, value in each.items() if key.startswith("stop_trigger/")} for each in (resumed, last)]
        assert str(own[0]) == str(own[1]), k


@pytest.mark.parametrize("k", range(1, 6))
def test_saved_to_a_file_it_comes_back(tmp_path, k):
    """The best value and the count, NaN and infinities."""
    trigger, given = Early(EVERY, "loss", 2, max_trigger=None), []
    trainer = a_trainer(tmp_path, Reporting(of("loss", [NAN, math.inf, 2, math.inf, NAN, 1])))
    for iteration in range(6):
        if iteration == k:
            serializers.save(tmp_path / "saved", trigger)
            trigger = Early(EVERY, "loss", 2, max_trigger=None)
            serializers.load(tmp_path / "saved", trigger)
        with trainer.reporter.scope(trainer.observation):
            trainer.updater.update()
        given.append(trigger(trainer))
    assert given == [False, False, False, False, True, False]


def test_patience_and_length_are_settings(tmp_path):
    """A run that has ended does nothing more when it is resumed; with more patience, or a later end, it goes on."""
    values = of("loss", [5, 6, 6, 6, 6, 6, 6])
    end, _, state = run(tmp_path, Early(EVERY, "loss", 2, max_trigger=MAX), observations=values)
    assert end == run(tmp_path, Early(EVERY, "loss", 2, max_trigger=MAX), None, state, values)[0] == 3
    assert run(tmp_path, Early(EVERY, "loss", 4, max_trigger=MAX), None, state, values)[0] == 5
    _, _, state = run(tmp_path, Early(EVERY, "loss", 4, max_trigger=(2, "iteration")), observations=values)
    assert run(tmp_path, Early(EVERY, "loss", 4, max_trigger=MAX), None, state, values)[0] == 5


def test_resumed_with_another_key_or_mode_it_starts_anew(tmp_path):
    """The best value of another says nothing."""
    values = of("loss", [5, 6, 6, 6, 6, 6, 6])
    _, _, state = run(tmp_path, Early(EVERY, "loss", 3, max_trigger=(3, "iteration")), observations=values)
    assert run(tmp_path, Early(EVERY, "loss", 3, "max", max_trigger=MAX), None, state, values)[0] == 7
    observations = [{"loss": 0, "error": 1}] * 8
    assert run(tmp_path, Early(EVERY, "error", 3, max_trigger=MAX), None, state, observations)[0] == 7


LESS_AND_LESS = [10, 9, 8.6, 8.3, 8.1, 8.0, 7.9, 7.8]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 8),
        ({"min_delta": 0.5}, 6),  # neither 8.1 nor 8.0 is better than 8.3 by more
        ({"min_delta": 0.5, "min_iterations": 7}, 7),
        ({"min_delta": 0.5, "min_iterations": 8}, 8),  # and 7.8 is better again
        ({"threshold": 8.3}, 4),
        ({"threshold": 8.3, "min_iterations": 6}, 6),
        ({"min_iterations": 100}, 8),
    ],
)
def test_small_improvement_and_a_mean_that_is_good_enough_stop_training(tmp_path, settings, expected):
    """But not before the least number of iterations, until which checks are counted; the limit holds in any case."""
    trigger = Early(EVERY, "main/loss", 2, max_trigger=(8, "iteration"), **settings)
    assert stopped_at(tmp_path, trigger, of("main/loss", LESS_AND_LESS)) == expected


def test_greater_values_reach_a_threshold_from_below(tmp_path):
    """As the mode says."""
    trigger = Early(EVERY, "main/accuracy", threshold=0.7, max_trigger=MAX)
    assert stopped_at(tmp_path, trigger, of("main/accuracy", ACCURACY)) == 4


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_mean_that_is_not_finite_stops_training_where_that_is_asked(tmp_path, value):
    """Otherwise it is one check without improvement."""
    losses = of("main/loss", [3, 2, value, 1, 1, 1])
    assert stopped_at(tmp_path, Early(EVERY, "main/loss", check_finite=True, max_trigger=MAX), losses) == 3
    if value != -math.inf:
        assert stopped_at(tmp_path, Early(EVERY, "main/loss", 2, max_trigger=MAX), losses) == 6


def test_verbose_run_says_which_rule_has_stopped_it(tmp_path, capsys):
    """Once, with the value."""
    trigger = Early(EVERY, "main/loss", threshold=8.3, verbose=True, max_trigger=MAX)
    stopped_at(tmp_path, trigger, of("main/loss", LESS_AND_LESS))
    assert "iteration 4: main/loss was 8.3, as good as the threshold 8.3" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"min_delta": -1}, ValueError),
        ({"min_delta": NAN}, ValueError),
        ({"threshold": NAN}, ValueError),
        ({"threshold": "low"}, ValueError),
        ({"min_iterations": -1}, ValueError),
        ({"min_iterations": 1.5}, TypeError),
    ],
)
def test_limits_that_are_none_are_refused(settings, error):
    """At construction, by name."""
    with pytest.raises(error, match=next(iter(settings))):
        Early(**settings)
