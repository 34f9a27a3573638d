"""The LogReport: its rows, its two files, and that both survive a resume."""

import io
import json
import math
import time
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted import Counting, StateAt, run, trainer_of

from chainring import training
from chainring.training.extensions import LogReport, PlotReport, PrintReport
from chainring.writers import Writer


def losses(*numbers):
    return [{"loss": number} for number in numbers]


def timeless(rows):
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]


def array(path):
    """The rows of the JSON array, which a strict reader accepts."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(Path(path).read_text(), parse_constant=refuse)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rows_of(tmp_path, observations, every=2, **settings):
    weights = settings.pop("weights", None)
    log = LogReport(trigger=(every, "iteration"), **settings)
    run(Counting(observations, weights=weights), len(observations), tmp_path, log)
    return log.log


def test_a_row_is_the_means_of_its_interval_then_epoch_iteration_and_time(tmp_path):
    """Each interval by itself, keys in the order in which they were first seen."""
    log = LogReport(trigger=(2, "iteration"))
    run(Counting([{"b": 1, "a": 2}, {"b": 3, "a": 4}, {"b": 10, "a": 0}, {"b": 0, "a": 0}], 4), 4, tmp_path, log)
    assert [list(row) for row in log.log] == [["b", "a", "epoch", "iteration", "elapsed_time"]] * 2
    assert timeless(log.log) == [
        {"b": 2.0, "a": 3.0, "epoch": 0, "iteration": 2},
        {"b": 5.0, "a": 0.0, "epoch": 1, "iteration": 4},
    ]


NO_NUMBERS = {
    "a tensor of one element": torch.ones(1),
    "a vector": torch.ones(3),
    "an array of one element": np.ones(1, np.float32),
    "a matrix": np.ones((2, 2)),
    "Decimal": Decimal("0.5"),
    "complex": 1j,
    "a complex tensor": torch.tensor(1j),
    "a list": [1.0, 2.0],
    "a mapping": {"loss": 1.0},
    "a pair with a vector": (torch.ones(3), 2),
    "a function that is called later": partial(float, 1),
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_a_value_that_has_no_mean_is_said_once_with_its_key(tmp_path, value):
    """Before, it was missing in the row and nothing told why; the other keys are averaged."""
    with pytest.warns(UserWarning, match="'b' is not averaged: a mean is of single numbers, and it is") as caught:
        rows = rows_of(tmp_path, [{"a": 1.0, "b": value}] * 8)
    assert len(caught) == 1
    assert [set(row) for row in rows] == [{"a", "epoch", "iteration", "elapsed_time"}] * 4


def test_a_text_none_and_what_keys_leave_out_need_no_word(tmp_path):
    """Of them nobody expects a mean."""
    observations = [{"a": 1.0, "b": "text", "c": None}] * 2
    assert rows_of(tmp_path / "all", observations)[0]["a"] == 1.0
    assert rows_of(tmp_path / "some", [{"a": 1.0, "b": torch.ones(3)}] * 2, keys=["a"])[0]["a"] == 1.0


def test_elapsed_time_grows_and_is_not_negative(tmp_path):
    """Seconds of training at the moment of the row."""
    times = [row["elapsed_time"] for row in rows_of(tmp_path, losses(1, 2, 3), every=1)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_means_are_weighted_as_the_updates_are(tmp_path):
    """An update of three examples counts three times as much as one of one."""
    rows = rows_of(tmp_path, losses(4.0, 8.0, 1.0, 3.0), weights=[3, 1, 1, 1])
    assert [row["loss"] for row in rows] == [(3 * 4 + 8) / 4, 2.0]


def test_a_key_missing_in_an_iteration_does_not_count_as_zero(tmp_path):
    """A key that is reported once an interval is its own mean, and in an interval without it the row has no such key."""
    rows = rows_of(tmp_path, [{"loss": 1, "score": 7}, {"loss": 3}, {"loss": 5}, {"loss": 7}])
    assert timeless(rows) == [
        {"loss": 2.0, "score": 7.0, "epoch": 2, "iteration": 2},
        {"loss": 6.0, "epoch": 4, "iteration": 4},
    ]


def test_keys_limits_what_is_averaged(tmp_path):
    """Other keys are left out; one that is not reported is no error."""
    rows = rows_of(tmp_path, [{"loss": 1, "score": 7}] * 2, keys=["loss", "absent"])
    assert timeless(rows) == [{"loss": 1.0, "epoch": 2, "iteration": 2}]


def test_keys_given_as_one_string_is_refused():
    """It would be taken for its letters."""
    with pytest.raises(TypeError, match=r"write \['main/loss'\]"):
        LogReport(keys="main/loss")


@pytest.mark.parametrize("spelling", ["own", "extend", "both"])
def test_both_spellings_of_the_trigger_mean_the_same(tmp_path, spelling):
    """The mean is over the interval in either case; given both, extend's holds."""
    own = {"own": (3, "iteration"), "extend": (1, "epoch"), "both": (2, "iteration")}[spelling]
    trainer = training.Trainer(Counting(losses(1, 2, 6, 4, 4, 10)), (6, "iteration"), out=tmp_path)
    trainer.extend(LogReport(trigger=own), trigger=None if spelling == "own" else (3, "iteration"))
    trainer.run()
    rows = trainer.get_extension("LogReport").log
    assert [(row["iteration"], row["loss"]) for row in rows] == [(3, 3.0), (6, 6.0)]


def test_postprocess_changes_the_row_before_it_is_stored(tmp_path):
    """In the log and in both files; arrays are written as lists."""

    def postprocess(row):
        row["double"] = np.float32(2 * row["loss"])
        row["shape"] = torch.tensor([1.5, math.inf])
        del row["elapsed_time"]

    rows = rows_of(tmp_path, losses(1, 2), postprocess=postprocess)
    assert rows[0]["double"] == 3.0
    expected = [{"loss": 1.5, "epoch": 2, "iteration": 2, "double": 3.0, "shape": [1.5, "Infinity"]}]
    assert array(tmp_path / "log") == lines(tmp_path / "log.jsonl") == expected


def test_both_files_are_valid_and_complete_whenever_they_are_opened(tmp_path):
    """After every iteration the lines and the array hold the rows so far; before the first row the array is empty."""
    log, seen = LogReport(trigger=(2, "iteration")), []

    def look(trainer):
        seen.append((array(tmp_path / "log"), lines(tmp_path / "log.jsonl"), list(log.log)))

    run(Counting(losses(*range(7))), 7, tmp_path, log, look)
    assert all(whole == appended == rows for whole, appended, rows in seen)
    assert [len(rows) for _, _, rows in seen] == [0, 1, 1, 2, 2, 3, 3]


def test_a_large_array_is_replaced_every_30_seconds_at_each_snapshot_and_at_the_end(tmp_path, monkeypatch):
    """Beyond 1 MB; the lines are complete after every row, and the array is valid and at most so old."""
    now, seen, kept = [1000.0], [], StateAt(6)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def look(trainer):
        seen.append((len(array(tmp_path / "log")), len(lines(tmp_path / "log.jsonl"))))
        now[0] += 11.0

    def look_after_the_snapshot(trainer):
        seen[-1] += (len(array(tmp_path / "log")),)

    look_after_the_snapshot.is_snapshot = True
    log = LogReport(trigger=(1, "iteration"), postprocess=lambda row: row.update(text="x" * 400_000))
    run(Counting(losses(*range(8))), 8, tmp_path, log, look, kept, look_after_the_snapshot)
    assert seen == [(1, 1, 1), (2, 2, 2), (2, 3, 2), (2, 4, 2), (5, 5, 5), (5, 6, 6), (6, 7, 6), (6, 8, 6)]
    assert len(array(tmp_path / "log")) == 8


def test_no_other_file_is_left_behind(tmp_path):
    """What the array is replaced by lies beside it only for a moment."""
    rows_of(tmp_path, losses(1, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "log", "log.jsonl", "run.json"]


def test_nan_and_infinities_are_strings_in_the_files(tmp_path):
    """A bare NaN is no JSON; in memory they stay floats."""
    rows = rows_of(tmp_path, losses(math.nan, math.inf, -math.inf), every=1)
    assert [row["loss"] for row in array(tmp_path / "log")] == ["NaN", "Infinity", "-Infinity"]
    assert [row["loss"] for row in lines(tmp_path / "log.jsonl")] == ["NaN", "Infinity", "-Infinity"]
    assert math.isnan(rows[0]["loss"])


def test_filename_none_writes_no_file(tmp_path):
    """And the rows are kept all the same."""
    assert len(rows_of(tmp_path, losses(1, 2), filename=None)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "run.json"]


@pytest.mark.parametrize("name", ["x", "logs/x.json"])
def test_filename_names_the_array_and_with_jsonl_the_lines(tmp_path, name):
    """Relative to the trainer's out."""
    rows = rows_of(tmp_path, losses(1, 2), filename=name)
    assert array(tmp_path / name) == lines(tmp_path / f"{name}.jsonl") == rows


@pytest.mark.parametrize("where", ["same out", "other out"])
def test_a_resumed_run_has_the_rows_and_files_of_the_uninterrupted_one(tmp_path, where):
    """Resumed after every iteration, twice; rows that the killed run wrote after its snapshot are cut off."""
    observations = [{"loss": value, "t": torch.tensor(value)} for value in (0.1, 0.7, 1e9, -1e9, 0.3, 0.2, 5.0, 1e-9)]
    full = LogReport(trigger=(3, "iteration"))
    run(Counting(observations), 8, tmp_path / "whole", full, StateAt(0))
    state = None
    for stop in range(1, 9):
        out = tmp_path / "out" if where == "same out" else tmp_path / f"out-{stop}"
        again, kept = LogReport(trigger=(3, "iteration")), StateAt(stop)
        run(Counting(observations), 8, out, again, kept, state=state)
        assert timeless(again.log) == timeless(full.log)
        assert array(out / "log") == lines(out / "log.jsonl") == again.log
        state = kept.state
        with (out / "log.jsonl").open("a") as file:
            file.write('{"loss": 0.')
    assert [row["iteration"] for row in again.log] == [3, 6]


def test_the_files_of_a_resumed_run_are_cut_back_before_the_first_update(tmp_path):
    """From the start on they hold the rows of the run that is continued, and no others."""
    kept = StateAt(3)
    run(Counting(losses(*range(6))), 6, tmp_path, LogReport(trigger=(2, "iteration")), kept)
    seen = []
    look = training.make_extension(initializer=lambda trainer: seen.append(lines(tmp_path / "log.jsonl")))(lambda _: None)
    log = LogReport(trigger=(2, "iteration"))
    trainer = trainer_of(Counting(losses(*range(6))), 6, tmp_path, log, StateAt(3))
    trainer.load_state_dict(kept.state)
    trainer.extend(look, name="look")
    with pytest.warns(UserWarning, match="look"):
        trainer.run()
    assert [[row["iteration"] for row in rows] for rows in seen] == [[2]]


def test_a_fresh_run_does_not_keep_the_rows_of_an_earlier_one(tmp_path):
    """Its files begin empty."""
    rows_of(tmp_path, losses(1, 2, 3, 4))
    rows = rows_of(tmp_path, losses(5, 6))
    assert array(tmp_path / "log") == lines(tmp_path / "log.jsonl") == rows


def test_a_call_before_training_gives_a_row_of_iteration_0(tmp_path):
    """With what extensions before it reported; a resumed run does not repeat it."""

    def before(trainer):
        trainer.reporter.report({"score": 0.5})

    def trained(length, state=None):
        trainer = trainer_of(Counting(losses(1, 3)), length, tmp_path)
        trainer.extend(before, trigger=lambda _: False, priority=300, invoke_before_training=True)
        trainer.extend(LogReport(trigger=(2, "iteration")), invoke_before_training=True)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run()
        return trainer

    full = timeless(trained(2).get_extension("LogReport").log)
    assert full == [{"score": 0.5, "epoch": 0, "iteration": 0}, {"loss": 2.0, "epoch": 2, "iteration": 2}]
    assert timeless(trained(2, trained(1).state_dict()).get_extension("LogReport").log) == full


def test_strings_and_arrays_in_the_observation_are_passed_over(tmp_path):
    """They stay in the observation and do not stop the training."""
    seen = []
    row = {"loss": 1.0, "name": "abc", "all": np.arange(3), "vector": torch.ones(2), "nothing": None}
    log = LogReport(trigger=(1, "iteration"))
    with pytest.warns(UserWarning, match="is not averaged") as caught:
        run(Counting([row]), 1, tmp_path, log, lambda trainer: seen.append(set(trainer.observation)))
    assert [str(each.message).split("'")[1] for each in caught] == ["all", "vector"]
    assert timeless(log.log) == [{"loss": 1.0, "epoch": 1, "iteration": 1}]
    assert seen == [set(row)]


def test_a_mean_is_that_of_the_values_and_not_of_running_sums(tmp_path):
    """Compared with the correctly rounded sum: 1e16 + 1 - 1e16 is lost in a running sum."""
    values = [1e16, 1.0, -1e16, 1.0]
    assert rows_of(tmp_path, losses(*values), every=4)[0]["loss"] == math.fsum(values) / 4


class Kept(Writer):
    """Keeps the records."""

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)


def test_an_evaluation_before_training_is_a_row_of_iteration_0(tmp_path):
    """Whether or not the log is asked before training; the value counts once, and is not in the first interval."""
    written = Kept()

    def evaluate(trainer):
        if trainer.updater.iteration in (0, 2):
            trainer.reporter.report({"score": torch.tensor(0.5 + trainer.updater.iteration), "text": "no number"})

    rows = []
    for settings in ({}, {"invoke_before_training": True}):
        updater = Counting(losses(1, 3), weights=[1, 1])
        updater.weight = 0  # as that of a StandardUpdater before its first update
        trainer = trainer_of(updater, 2, tmp_path)
        trainer.extend(evaluate, priority=300, invoke_before_training=True)
        trainer.extend(LogReport(trigger=(2, "iteration"), writers=[written]), **settings)
        trainer.run()
        rows.append(timeless(trainer.get_extension("LogReport").log))
    first = {"score": 0.5, "epoch": 0, "iteration": 0}
    assert rows[0] == rows[1] == [first, {"loss": 2.0, "score": 2.5, "epoch": 2, "iteration": 2}]
    assert [dict(record.values) for record in written.records][:2] == [{"score": 0.5}, {"loss": 2.0, "score": 2.5}]


def test_nothing_reported_before_training_is_no_row(tmp_path):
    """Neither without values nor with text alone."""
    trainer = trainer_of(Counting(losses(1, 3)), 2, tmp_path)
    trainer.extend(lambda trainer: trainer.reporter.report({"text": "no number"}), name="text", invoke_before_training=True)
    trainer.extend(LogReport(trigger=(2, "iteration")), invoke_before_training=True)
    trainer.run()
    assert [row["iteration"] for row in trainer.get_extension("LogReport").log] == [2]


def test_the_row_of_iteration_0_is_printed_and_drawn(tmp_path):
    """A PrintReport shows it before the first update, a PlotReport begins its curve there."""
    table, seen = io.StringIO(), []
    trainer = trainer_of(Counting(losses(1, 3)), 2, tmp_path)
    trainer.extend(lambda trainer: trainer.reporter.report({"loss": 9.0}), "score", lambda _: False, 300, True)
    trainer.extend(LogReport(trigger=(2, "iteration")))
    trainer.extend(PrintReport(["iteration", "loss"], out=table))
    plot = PlotReport(
        "loss", trigger=(2, "iteration"), postprocess=lambda _, axes, __: seen.append(axes.lines[0].get_xydata())
    )
    trainer.extend(plot)
    trainer.extend(lambda _: seen.append(table.getvalue().split()), name="look", trigger=(1, "iteration"))
    trainer.run()
    assert seen[0].tolist() == [[0, 9]]
    assert seen[1] == ["iteration", "loss", "0", "9"]
    assert seen[-2].tolist() == [[0, 9], [2, 2]]
