"""Which keys share a chart, which of many points are drawn, and where."""

import base64
import json
import math
import random
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest

from chainring.html_report._log import MAX_CURVE_POINTS, LogFile, curves_of, packed, sample, script_data
from report_runs import falling


def found(rows, room=12_000):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.jsonl")
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return curves_of(LogFile(path, path.name).read(), room)


def kept_of(values, most):
    return sample(np.array(values, float), most)[0].tolist()


def keys(rows):
    charts = {}
    for curve in found(rows).curves:
        charts.setdefault(curve.chart, []).append(curve.key)
    return charts


def test_training_and_validation_of_a_metric_share_a_chart():
    """The second evaluator's too; a metric of the validation alone has the name without that."""
    row = dict.fromkeys(["main/loss", "validation/main/loss", "validation_1/main/loss", "validation/main/f1", "lr"], 1.0)
    assert keys([row]) == {
        "main/loss": ["main/loss", "validation/main/loss", "validation_1/main/loss"],
        "main/f1": ["validation/main/f1"],
        "lr": ["lr"],
    }


def test_an_evaluator_of_another_name_shares_the_chart():
    """`test/main/loss` is `main/loss`, because there is one."""
    assert keys([{"main/loss": 1.0, "test/main/loss": 1.0, "test/other": 1.0}]) == {
        "main/loss": ["main/loss", "test/main/loss"],
        "test/other": ["test/other"],
    }


def test_what_is_no_number_has_no_curve():
    """Texts, lists, true and false, and the counters."""
    assert (
        keys([{"epoch": 1, "iteration": 1, "elapsed_time": 1.0, "text": "x", "list": [1], "flag": True, "none": None}]) == {}
    )


def test_a_curve_has_the_rows_that_have_its_key():
    """A validation every third row."""
    rows = [{"a": 1.0, "iteration": i} | ({"b": 2.0} if i % 3 == 0 else {}) for i in range(9)]
    _, b = found(rows).curves
    assert b.rows.tolist() == [0, 3, 6]


def test_what_is_not_finite_is_a_gap_and_counted():
    """NaN and both infinities, also an integer that no float can hold."""
    values = [1.0, math.nan, math.inf, -math.inf, 10**400, 2.0]
    (curve,) = found([{"a": value, "iteration": i} for i, value in enumerate(values)]).curves
    assert curve.gaps == {"NaN": 1, "Infinity": 2, "-Infinity": 1}
    assert [math.isnan(value) for value in curve.values] == [False, True, True, True, True, False]


def test_few_values_are_all_kept():
    """Up to the number that there is room for."""
    assert kept_of([1.0] * 50, 50) == list(range(50))


@pytest.mark.parametrize("count", [51, 99, 1000, 100_000])
@pytest.mark.parametrize("most", [24, 50])
def test_many_values_are_cut_to_what_there_is_room_for(count, most):
    """In their order, the first and the last among them."""
    values = [random.random() for _ in range(count)]
    kept = kept_of(values, most)
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, count - 1)


@pytest.mark.parametrize("spike", [math.inf, -math.inf])
@pytest.mark.parametrize("place", [1, 777, 4998])
def test_a_spike_of_one_value_is_never_lost(spike, place):
    """Nor is a dip."""
    values = [math.sin(i / 100) for i in range(5000)]
    values[place] = math.copysign(50.0, spike)
    assert place in kept_of(values, 100)


def test_a_gap_is_never_lost():
    """Also where a whole stretch is one."""
    values = [1.0] * 5000
    values[1234] = math.nan
    assert 1234 in kept_of(values, 100)
    kept = kept_of([math.nan] * 5000, 100)
    assert 2 <= len(kept) <= 100


def test_a_page_of_many_curves_draws_fewer_points_of_each_and_then_fewer_curves():
    """The points of all stay below what there is room for; what has no room is named."""
    rows = [{"iteration": i} | {f"k{k}": float(i % 7) for k in range(60)} for i in range(300)]
    curves = found(rows, room=1200)
    assert curves.drawn <= 1200
    assert len(curves.curves) == 50
    assert curves.left_out == [f"k{k}" for k in range(50, 60)]
    assert found(falling(100_000)).drawn <= MAX_CURVE_POINTS


def test_rows_within_an_epoch_stand_between_its_ends():
    """The epoch is the number of complete ones, so rows of ten iterations in epochs of 18 are at tenths of eighteenths."""
    rows = [{"a": 1.0, "iteration": i, "epoch": i // 18} for i in range(10, 190, 10)]
    assert found(rows).axes["epoch"].tolist() == pytest.approx([i / 18 for i in range(10, 190, 10)])


def test_rows_at_the_ends_of_epochs_stand_there():
    """Where no two rows share an epoch nothing is computed: the length of an epoch may vary."""
    rows = [{"a": 1.0, "iteration": i, "epoch": e} for e, i in enumerate([15, 29, 44, 58], 1)]
    assert found(rows).axes["epoch"].tolist() == [1, 2, 3, 4]


def test_epochs_whose_length_has_changed_are_as_they_were_logged():
    """A run resumed with another batch size."""
    rows = [
        {"a": 1.0, "iteration": i, "epoch": e} for i, e in [(5, 0), (10, 1), (15, 1), (16, 2), (17, 2), (18, 3), (40, 3)]
    ]
    assert found(rows).axes["epoch"].tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_rows_without_counters_are_numbered():
    """A postprocess may have taken them out."""
    (axis,) = found([{"a": 1.0}, {"a": 2.0}]).axes.items()
    assert (axis[0], axis[1].tolist()) == ("row", [1.0, 2.0])


@pytest.mark.parametrize("value", ["x", None, True, math.nan, [1]])
def test_a_counter_that_is_no_number_is_no_place(value):
    """The other rows have theirs."""
    axes = found([{"a": 1.0, "iteration": 1}, {"a": 2.0, "iteration": value}]).axes
    assert list(axes) == ["iteration"]
    assert axes["iteration"][0] == 1
    assert math.isnan(axes["iteration"][1])


def test_a_smooth_curve_is_drawn_from_the_means_of_all_points():
    """And not from the least and the greatest of each section, whose middle is elsewhere."""
    rows = [{"a": 10.0 if i % 10 == 0 else 0.0, "iteration": i} for i in range(100_000)]
    (curve,) = found(rows).curves
    assert curve.means.mean() == pytest.approx(1, rel=0.01)
    assert len(curve.means) == len(curve.mean_rows) < MAX_CURVE_POINTS
    assert not len(found(rows[:100]).curves[0].means)


@pytest.mark.parametrize(
    ("values", "letter", "kept"),
    [
        ([0, 1, 2**24], "f", [0, 1, 2**24]),
        ([0, 1, 2**31 - 1], "d", [0, 1, 2**31 - 1]),
        ([0.5, math.nan], "f", [0.5, math.nan]),
        ([2.0**40, 1.0], "d", [2.0**40, 1.0]),
        ([1e300, 1e-300], "d", [1e300, 1e-300]),
        ([], "f", []),
    ],
)
def test_numbers_are_kept_as_small_as_they_can_be_read_back(values, letter, kept):
    """Counters exactly, others with seven digits, and all that a float can hold."""
    text = packed(values)
    content = base64.b64decode(text[1:])
    assert text[0] == letter
    size = 8 if letter == "d" else 4
    assert list(struct.unpack(f"<{len(content) // size}{letter}", content)) == pytest.approx(kept, nan_ok=True)


def test_the_script_is_given_the_rows_that_any_curve_needs():
    """Each once, with their positions on every axis."""
    data = script_data(found(falling(50_000, b=1.0)))
    assert list(data["axes"]) == ["iteration", "epoch", "time"]
    assert data["count"] == 50_000
    assert {curve["key"] for curve in data["curves"]} == {"main/loss", "b"}
    assert all(curve["at"][0] == "f" for curve in data["curves"])
