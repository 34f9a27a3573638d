"""RunningAverage: a mean in which older values count less, the same in a run of several pieces."""

import pytest
import torch
from scripted import Counting, run, trainer_of

from chainring.training.extensions import LogReport, PrintReport, RunningAverage

SEEN = [{"loss": value} for value in (4.0, 2.0, 1.0)] + [{}, {"loss": 0.5}, {"loss": torch.tensor(0.1)}, {"loss": 8}]


def average(**settings):
    return RunningAverage("loss", decay=0.5, **{"trigger": (1, "iteration"), **settings})


def results(tmp_path, seen, stop=None, state=None, **settings):
    found = {}
    trainer = trainer_of(Counting(seen), len(seen) if stop is None else stop, tmp_path, average(**settings))
    trainer.extend(lambda t: found.update({t.updater.iteration: float(t.observation["loss/average"])}), name="found")
    if state is not None:
        trainer.load_state_dict(state)
    trainer.run()
    return found, trainer


def test_what_is_older_counts_less_and_the_first_values_are_no_exception(tmp_path):
    """By half each time, divided by the sum of the weights; an iteration without the value changes nothing."""
    found, _ = results(tmp_path, SEEN[:5])
    assert found[1] == 4.0
    assert found[2] == pytest.approx((2 + 4 / 2) / 1.5)
    assert found[3] == found[4] == pytest.approx((1 + 2 / 2 + 4 / 4) / 1.75)
    assert found[5] == pytest.approx((0.5 + 1 / 2 + 2 / 4 + 4 / 8) / 1.875)


def test_a_tensor_is_added_where_it_lies_and_not_kept(tmp_path):
    """One that is changed in place afterwards does not change the average, nor is a graph kept."""
    value = torch.tensor(3.0, requires_grad=True) * 1
    extension = average()
    trainer = run(Counting([{"loss": value}, {}]), 1, tmp_path, extension)
    assert float(trainer.observation["loss/average"]) == 3.0
    assert not trainer.observation["loss/average"].requires_grad


@pytest.mark.parametrize("tensors", [False, True])
def test_cut_after_any_iteration_the_averages_are_those_of_the_whole(tmp_path, tensors):
    """To the last bit, of numbers and of tensors."""
    seen = [{key: torch.tensor(float(value) / 3) for key, value in each.items()} for each in SEEN] if tensors else SEEN
    whole, _ = results(tmp_path, seen)
    for cut in range(1, len(seen)):
        first, trainer = results(tmp_path, seen, cut)
        second, _ = results(tmp_path, seen, state=trainer.state_dict())
        assert first | second == whole


def test_the_log_and_the_table_have_the_last_average_of_an_interval(tmp_path, capsys):
    """And not the mean of those in it."""
    log = LogReport(trigger=(3, "iteration"))
    table = PrintReport(["iteration", "loss/average"], log_report=log)
    run(Counting(SEEN[:3]), 3, tmp_path, log, table, average(trigger=(3, "iteration")))
    assert log.log[0]["loss/average"] == pytest.approx(3 / 1.75)
    assert "1.71429" in capsys.readouterr().out


def test_an_average_of_another_value_is_not_taken_over(tmp_path):
    """The key is a setting."""
    first = run(Counting([{"loss": 9.0}]), 1, tmp_path, RunningAverage("loss", "a", trigger=(1, "iteration")))
    make = RunningAverage("other", "a", trigger=(1, "iteration"))
    second = run(Counting([{}, {"other": 1.0}]), 2, tmp_path, make, state=first.state_dict())
    assert second.observation["a"] == 1.0


@pytest.mark.parametrize("decay", [1, -0.1, "0.9", None])
def test_it_refuses_a_decay_that_forgets_nothing(decay):
    """Or is no number."""
    with pytest.raises(ValueError, match="at least 0 and less than 1"):
        RunningAverage("loss", decay=decay)
