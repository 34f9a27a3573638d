"""MicroAverage: sums over sums, in the intervals of the uninterrupted run."""

import math
import warnings

import pytest
import torch
from scripted import Counting, run, trainer_of

from chainring import serializers
from chainring.training.extensions import LogReport, MicroAverage


def observations(*pairs):
    return [{"right": right, "words": words} for right, words in pairs]


def average(trigger=(2, "iteration")):
    return MicroAverage("right", "words", "accuracy", trigger)


def rows(tmp_path, seen, **settings):
    """The results by iteration."""
    found = {}
    trainer = trainer_of(Counting(seen, **settings), len(seen), tmp_path, average())
    trainer.extend(lambda t: found.update({t.updater.iteration: t.observation.get("accuracy")}))
    trainer.run()
    return {iteration: value for iteration, value in found.items() if value is not None}


def test_it_is_the_sum_over_the_sum_since_it_last_fired(tmp_path):
    """And not the mean of the quotients, which a short batch would distort."""
    assert rows(tmp_path, observations((1, 1), (1, 3), (0, 5), (2, 3))) == {2: 0.5, 4: 0.25}


def test_weights_of_updates_do_not_matter(tmp_path):
    """The values are counts already."""
    assert rows(tmp_path, observations((1, 1), (1, 3)), weights=[5, 1]) == {2: 0.5}


def test_tensors_are_summed_where_they_lie(tmp_path):
    """In double precision, whatever their own."""
    seen = [{"right": torch.tensor(float(2**24)), "words": torch.tensor(1)}, {"right": torch.tensor(1.0), "words": 1.0}]
    assert rows(tmp_path, seen) == {2: (2**24 + 1) / 2}


def test_an_iteration_with_one_of_the_two_does_not_count(tmp_path):
    """Nor one whose value is not a single number; the interval ends all the same."""
    seen = [{"right": 1, "words": 2}, {"right": 1}, {"right": "many", "words": 3}, {"right": 3, "words": 3}]
    assert rows(tmp_path, seen) == {2: 0.5, 4: 1.0}


def test_an_interval_without_the_two_has_no_result_and_is_warned_about_once(tmp_path):
    """The message names the keys, and what there was."""
    with pytest.warns(UserWarning, match="'right' and 'words' were not reported together.*\\['word'\\]") as caught:
        assert rows(tmp_path, [{"word": 1}] * 4 + observations((1, 2), (1, 2))) == {6: 0.5}
    assert len(caught) == 1


def test_over_a_sum_of_zero_it_is_nan(tmp_path):
    """No such words in the interval are no error."""
    assert math.isnan(rows(tmp_path, observations((0, 0), (0, 0)))[2])


def test_the_trigger_of_extend_comes_first(tmp_path):
    """As for LogReport."""
    trainer = trainer_of(Counting(observations((1, 4), (1, 4), (2, 4))), 3, tmp_path)
    trainer.extend(average(), trigger=(3, "iteration"))
    trainer.run()
    assert trainer.observation["accuracy"] == 1 / 3


def test_a_log_that_is_registered_before_it_has_the_result(tmp_path):
    """An editor comes before readers."""
    log = LogReport(trigger=(2, "iteration"))
    run(Counting(observations((1, 1), (1, 3))), 2, tmp_path, log, average())
    assert log.log[0]["accuracy"] == 0.5


SEEN = [
    *observations((1, 3), (2, 5), (3, 4)),
    {"right": 1},
    *observations((0.1, 0.7), (5, 9), (1, 1), (2, 8)),
    {},
    {},
    {},
    {},
]


@pytest.mark.parametrize("trigger", [(1, "iteration"), (2, "iteration"), (3, "iteration"), (0.5, "epoch")])
@pytest.mark.parametrize("way", ["extend, load", "load, extend", "file"])
def test_cut_after_any_iteration_the_results_and_warnings_are_those_of_the_whole(tmp_path, trigger, way):
    """Its trigger and its sums are saved, also in the middle of an interval."""

    def part(stop, saved=None):
        found, trainer = {}, trainer_of(Counting(SEEN, epoch_length=5), stop, tmp_path)
        if saved is not None and way == "load, extend":
            trainer.load_state_dict(saved.state_dict())
        trainer.extend(average(trigger))
        trainer.extend(lambda t: found.update({t.updater.iteration: t.observation.get("accuracy")}), name="found")
        if saved is not None and way == "extend, load":
            trainer.load_state_dict(saved.state_dict())
        if saved is not None and way == "file":
            serializers.save(tmp_path / f"saved-{saved.updater.iteration}", saved)
            serializers.load(tmp_path / f"saved-{saved.updater.iteration}", trainer)
        trainer.run()
        return found, trainer

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole, _ = part(len(SEEN))
        said = [str(warning.message) for warning in caught]
        caught.clear()
        found, trainer = part(0)
        for k in range(1, len(SEEN) + 1):
            after, trainer = part(k, trainer)
            found |= after
        assert found == whole
        assert [str(warning.message) for warning in caught] == said


def test_sums_of_other_values_are_not_taken_over(tmp_path):
    """The keys are settings."""
    first = run(Counting(observations((9, 1))), 1, tmp_path, average())
    seen = [{}, {"wrong": 1, "words": 4}]
    make = MicroAverage("wrong", "words", "accuracy", (2, "iteration"))
    second = run(Counting(seen), 2, tmp_path, make, state=first.state_dict())
    assert second.observation["accuracy"] == 0.25


def test_bad_settings_are_refused_at_construction():
    """With the rule and the value."""
    with pytest.raises(TypeError, match="a key is that of a reported value"):
        MicroAverage("right", None, "accuracy")
    with pytest.raises(TypeError, match="a trigger is"):
        MicroAverage("right", "words", "accuracy", 3)
    with pytest.raises(ValueError, match="above 0"):
        MicroAverage("right", "words", "accuracy", (0, "epoch"))
