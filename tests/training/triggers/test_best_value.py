"""BestValueTrigger, MaxValueTrigger and MinValueTrigger: they fire when a mean is better than ever before."""

import math
import warnings

import numpy as np
import pytest
import torch
from counting import CountingUpdater, Fires, UncountedUpdater, a_trainer

from chainring import report
from chainring.training import extensions, triggers

MaxValue, MinValue = triggers.MaxValueTrigger, triggers.MinValueTrigger
NAN, INF = math.nan, math.inf


class Reporting(CountingUpdater):
    """Reports one given observation an update, with a weight if weights are given."""

    def __init__(self, observations, per_epoch=2, weights=None):
        super().__init__(per_epoch)
        self.observations, self.weights = observations, weights

    def update_core(self):
        report(self.observations[self.iteration])
        if self.weights is not None:
            self.weight = self.weights[self.iteration]


def scores(*values):
    return [{"score": value} for value in values]


def fires(out, trigger, observations, weights=None):
    """The iterations at which a trigger fires in a run over the observations."""
    trainer, fired = a_trainer(out, Reporting(observations, weights=weights), (len(observations), "iteration")), Fires()
    trainer.extend(fired, trigger=trigger)
    trainer.run()
    return fired.iterations


def every(iterations):
    return (iterations, "iteration")


@pytest.mark.parametrize(
    ("values", "interval", "at_max", "at_min"),
    [
        ([0.5, 0.5, 0.4, 0.6], every(1), [1, 4], [1, 3]),
        ([0.5, 0.5, 0.5, 0.5, 0.4, 0.4, 0.6, 0.6], every(2), [2, 8], [2, 6]),
        ([0.5, 0.5, 0.5, 0.5, 0.4, 0.4, 0.6, 0.6], (1, "epoch"), [2, 8], [2, 6]),
        ([9, 1, 0, 2, 6, 4], every(3), [3, 6], [3]),
    ],
)
def test_it_fires_where_the_mean_of_an_interval_is_better_than_all_before(tmp_path, values, interval, at_max, at_min):
    """The first mean is the best so far; an equal one is not better."""
    assert fires(tmp_path, MaxValue("score", interval), scores(*values)) == at_max
    assert fires(tmp_path, MinValue("score", interval), scores(*values)) == at_min


@pytest.mark.parametrize("kind", [MaxValue, MinValue])
def test_the_interval_is_an_epoch_unless_another_is_given(tmp_path, kind):
    """Of two iterations here."""
    assert fires(tmp_path, kind("score"), scores(1, 2, 1, 2)) == [2]


def test_compare_is_called_with_the_best_so_far_and_the_new_mean(tmp_path):
    """In this order, as upstream; not for the first mean, which has nothing to be compared with."""
    calls = []

    def is_closer_to_ten(best, new):
        calls.append((best, new))
        return abs(new - 10) < abs(best - 10)

    trigger = triggers.BestValueTrigger("score", is_closer_to_ten, every(1))
    assert fires(tmp_path, trigger, scores(3, 25, 11, 9.5)) == [1, 3, 4]
    assert calls == [(3.0, 25.0), (3.0, 11.0), (11.0, 9.5)]


def test_an_equal_mean_is_no_improvement_whatever_compare_says(tmp_path):
    """Only strict improvement fires."""
    trigger = triggers.BestValueTrigger("score", lambda best, new: new >= best, every(1))
    assert fires(tmp_path, trigger, scores(1, 1, 2, 2, INF, INF)) == [1, 3, 5]


@pytest.mark.parametrize("kind", [MaxValue, MinValue])
def test_one_value_under_different_weights_is_no_improvement(tmp_path, kind):
    """0.1 x 3 / 3 is not 0.1 in floats, which must not make a new best model."""
    weights = [4, 3, 7, 57, 113, 3, 6, 1000]
    for value in np.random.default_rng(0).uniform(-1, 1, 50).tolist():
        assert fires(tmp_path, kind("score", every(1)), scores(*[value] * 8), weights) == [1]


def test_the_smallest_improvements_that_are_not_rounding_count(tmp_path):
    """A part in 10^14 does."""
    assert fires(tmp_path, MaxValue("score", every(1)), scores(1.0, 1 + 1e-14, 1.0, 1 + 2e-14)) == [1, 2, 4]


def test_means_are_weighted_as_the_updates_are(tmp_path):
    """An update of three examples counts three times as much as one of one; a tensor will do."""
    observations, weights = scores(4.0, 0.0, 0.0, 4.0), [1, 1, 1, torch.tensor(3.0)]
    assert fires(tmp_path, MaxValue("score", every(2)), observations, weights) == [2, 4]
    assert fires(tmp_path, MaxValue("score", every(2)), observations) == [2]


def test_an_iteration_without_the_key_does_not_count_as_zero(tmp_path):
    """A key reported once an interval is its own mean."""
    observations = [{"score": 4.0}, {}, {"other": 9.0}, {"score": 3.0}]
    assert fires(tmp_path, MinValue("score", every(2)), observations) == [2, 4]


@pytest.mark.parametrize("of", [float, np.float32, np.asarray, torch.tensor, lambda value: (torch.tensor(value), 2)])
def test_any_kind_of_single_number_will_do(tmp_path, of):
    """Numbers, arrays and tensors without dimensions, and a value with its own weight."""
    assert fires(tmp_path, MaxValue("score", every(1)), scores(*map(of, (1.0, 3.0, 2.0, 4.0)))) == [1, 2, 4]


def test_nan_is_never_best(tmp_path):
    """Neither first nor later, and what comes after it is compared with the best before it."""
    assert fires(tmp_path, MaxValue("score", every(1)), scores(NAN, 1, NAN, 1, 2)) == [2, 5]
    assert fires(tmp_path, MinValue("score", every(1)), scores(NAN, 2, NAN, 2, 1)) == [2, 5]
    assert fires(tmp_path, triggers.BestValueTrigger("score", lambda *_: True, every(1)), scores(1, NAN, 2)) == [1, 3]


def test_infinities_are_compared_as_numbers(tmp_path):
    """Nothing is greater than infinity."""
    assert fires(tmp_path, MaxValue("score", every(1)), scores(-INF, 1, INF, 5)) == [1, 2, 3]


def test_an_interval_without_the_key_does_not_fire_and_warns_once_with_the_keys_seen(tmp_path):
    """Upstream it ends training with a bare KeyError; a value that comes later is the first."""
    observations = [{"loss": 1, "score": 2}, {"lr": 1}, {"loss": 1}, {"lr": 2}, {"x": 1}, {}, {"score": 5}, {"score": 1}]
    with pytest.warns(UserWarning, match=r"'score' was not reported; reported were \['loss', 'lr'\]") as caught:
        assert fires(tmp_path, MaxValue("score", every(2)), observations) == [2, 8]
    assert len(caught) == 1
    assert "MaxValueTrigger('score', IntervalTrigger(2, 'iteration')) has nothing to compare at iteration 4" in str(
        caught[0].message
    )


def test_a_heading_in_place_of_a_key_is_told_the_key(tmp_path):
    """``val/loss``, as a narrow table has it, is not the loss of training."""
    observations = [{"main/loss": 1, "main/accuracy": 0, "validation/main/loss": 2, "validation/main/accuracy": 0}]
    with pytest.warns(UserWarning, match=r"did you mean 'validation/main/loss'\?"):
        assert fires(tmp_path, MinValue("val/loss", every(1)), observations) == []


@pytest.mark.parametrize("value", ["good", None, [1.0], np.ones(2), torch.ones(2)])
def test_what_is_no_single_number_is_passed_over(tmp_path, value):
    """Beside numbers silently; an interval without any number warns that this is so."""
    assert fires(tmp_path, MaxValue("score", every(2)), scores(1, value, value, 2)) == [2, 4]
    with pytest.warns(UserWarning, match="the value reported as 'score' is not a single number"):
        assert fires(tmp_path, MaxValue("score", every(2)), scores(value, value, 1, value)) == [4]


def test_it_sees_what_extensions_before_its_own_reported(tmp_path):
    """The value of this very iteration, so the best model is saved in the iteration in which it was found."""
    fired, values = Fires(), iter([3, 5, 4, 6])
    trainer = a_trainer(tmp_path, stop=every(8))
    trainer.extend(lambda _: report({"validation/score": next(values)}), "validate", (2, "iteration"), priority=200)
    trainer.extend(fired, trigger=MaxValue("validation/score", every(2)))
    trainer.run()
    assert fired.iterations == [2, 4, 8]


def test_as_a_stop_trigger_it_sees_the_whole_observation(tmp_path):
    """It is asked at the head of the loop, where the first update has not been made yet."""
    trainer = a_trainer(tmp_path, Reporting(scores(3, 4, 2, 1)), MinValue("score", every(3)))
    trainer.run()
    assert trainer.updater.iteration == 3


def test_no_value_is_read_from_its_device_before_the_interval_ends(tmp_path):
    """Tensors without data stand in for those on an accelerator: to read one is an error."""
    values = scores(*torch.empty(101, device="meta"))
    assert fires(tmp_path, MaxValue("score", every(102)), values, list(torch.ones(101, device="meta"))) == []
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        fires(tmp_path, MaxValue("score", every(101)), values)


@pytest.mark.parametrize("interval", [lambda trainer: trainer.updater.iteration in (3, 4), None])
def test_the_interval_may_be_any_trigger(tmp_path, interval):
    """A callable of the trainer, or None, which never fires; then nothing is compared."""
    expected = [] if interval is None else [3, 4]
    assert fires(tmp_path, MaxValue("score", interval), scores(1, 3, 2, 4, 9)) == expected


def test_an_epoch_on_an_updater_without_is_refused_at_the_start(tmp_path):
    """As for an interval trigger by itself."""
    trainer = a_trainer(tmp_path, UncountedUpdater(), every(3))
    trainer.extend(Fires(), trigger=MaxValue("score"))
    with pytest.raises(ValueError, match=r'UncountedUpdater has no iterator "main".*use "iteration"'):
        trainer.run()


def test_two_extensions_that_share_it_get_the_same_answer(tmp_path):
    """The value counts once an iteration, and both are called."""
    shared, first, second = MaxValue("score", every(2)), Fires(), Fires()
    trainer = a_trainer(tmp_path, Reporting(scores(1, 3, 2, 2, 4, 2)), every(6))
    trainer.extend(first, trigger=shared)
    trainer.extend(second, trigger=shared)
    trainer.run()
    assert first.iterations == second.iterations == [2, 6]


def test_another_run_starts_anew(tmp_path):
    """Neither the best value, nor a half interval, nor the warning of an earlier run counts."""
    trigger = MaxValue("score", every(2))
    for values in ([9, 9, 9], [1, 1, 2, 2], [0, 2, 1, 3]):
        assert fires(tmp_path, trigger, scores(*values)) == [2, 4][: len(values) // 2]
    for _ in range(2):
        with pytest.warns(UserWarning, match="not reported"):
            assert fires(tmp_path, trigger, [{}, {}, {}]) == []


def test_a_run_that_never_lacks_the_key_warns_of_nothing(tmp_path):
    """With the LogReport beside it, over the same intervals."""
    log = extensions.LogReport(trigger=every(2))
    trainer, fired = a_trainer(tmp_path, Reporting(scores(1, 3, 2, 2)), every(4)), Fires()
    trainer.extend(log)
    trainer.extend(fired, trigger=MinValue("score", every(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run()
    assert (fired.iterations, [row["score"] for row in log.log]) == ([2], [2.0, 2.0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MaxValue(7), TypeError, "the key is that of a reported value.*got 7"),
        (lambda: MinValue(["loss"]), TypeError, r"the key.*got \['loss'\]"),
        (lambda: MaxValue("loss", "epoch"), TypeError, "a trigger is .*'epoch'"),
        (lambda: MaxValue("loss", (0, "epoch")), ValueError, "above 0, got 0"),
        (lambda: MinValue("loss", (1, "epochs")), ValueError, "'epochs'"),
        (lambda: triggers.BestValueTrigger("loss", None), TypeError, "compare is called with.*got None.*lambda best, new"),
        (lambda: triggers.BestValueTrigger("loss", lambda new: True), TypeError, "cannot be called so: too many"),
        (lambda: triggers.BestValueTrigger("loss", max), TypeError, r"max returns a number: use MaxValueTrigger\(key\)"),
        (lambda: triggers.BestValueTrigger("loss", min), TypeError, r"min returns a number: use MinValueTrigger\(key\)"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, error, message):
    """The error gives the rule and the value, and where it can the remedy."""
    with pytest.raises(error, match=message):
        make()


def test_it_is_shown_as_it_was_made_and_its_fires_are_not_foretold(tmp_path):
    """In errors, warnings and the plan of a run."""

    def is_nearer(best, new):
        return abs(new) < abs(best)

    shown = [str(MaxValue("a/b")), repr(MinValue("c", every(2))), str(triggers.BestValueTrigger("d", is_nearer, None))]
    assert shown == [
        "MaxValueTrigger('a/b', IntervalTrigger(1, 'epoch'))",
        "MinValueTrigger('c', IntervalTrigger(2, 'iteration'))",
        "BestValueTrigger('d', is_nearer, never)",
    ]
    trainer = a_trainer(tmp_path, stop=every(4))
    trainer.extend(Fires(), trigger=MaxValue("a/b"))
    assert "asked each iteration" in trainer.explain(4).splitlines()[-1]
