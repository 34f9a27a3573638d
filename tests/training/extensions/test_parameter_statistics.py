"""ParameterStatistics: parameters and gradients in numbers, averaged over the updates of an interval."""

import math

import pytest
import torch
from regressions import same_regression, updater_of
from resuming import chained, differences, whole
from torch import nn

from chainring import training
from chainring.training import extensions
from chainring.training.triggers import ManualScheduleTrigger

Statistics = extensions.ParameterStatistics
PLACES = [f"main/predictor/{name}/{kind}" for name in ("weight", "bias") for kind in ("data", "grad")]


def rows_of(out, statistics, model, length=4, **settings):
    """What was reported in each iteration beside the loss."""
    rows = []

    def look(trainer):
        rows.append({key: value for key, value in trainer.observation.items() if key != "main/loss"})

    trainer = training.Trainer(updater_of(model, **settings), (length, "iteration"), out=str(out))
    trainer.extend(look, priority=0)
    trainer.extend(statistics)
    trainer.run()
    return rows


def means_only(model, period=1, **settings):
    return Statistics(model, {"mean": torch.mean}, trigger=(period, "iteration"), **settings)


def test_the_keys_name_model_parameter_kind_and_statistic(tmp_path):
    """By default five statistics of data and gradients, an epoch's means at its end: of three iterations here."""
    model = same_regression()
    rows = rows_of(tmp_path, Statistics(model), model, 3)
    assert rows[:2] == [{}, {}]
    expected = [f"{place}/{name}" for place in PLACES for name in ("mean", "std", "min", "max", "zeros")]
    assert sorted(rows[2]) == sorted(expected)


def test_the_numbers_are_those_after_the_update(tmp_path):
    """Of the parameters after the step, and of the gradients with which it was made."""
    model = same_regression()
    (row,) = rows_of(tmp_path, Statistics(model, trigger=(1, "iteration")), model, 1)
    weight = model.predictor.weight
    for kind, tensor in (("data", weight.detach()), ("grad", weight.grad)):
        place = f"main/predictor/weight/{kind}"
        assert row[f"{place}/mean"] == pytest.approx(tensor.mean().item())
        assert row[f"{place}/std"] == pytest.approx(tensor.std(correction=0).item())
        assert row[f"{place}/min"] == tensor.min().item()
        assert row[f"{place}/max"] == tensor.max().item()
        assert row[f"{place}/zeros"] == 0
    assert row["main/predictor/bias/data/std"] == 0


def test_an_interval_has_the_mean_over_its_updates(tmp_path):
    """All updates count alike."""
    single, several = same_regression(), same_regression()
    each = rows_of(tmp_path / "a", means_only(single), single, 6)
    blocks = rows_of(tmp_path / "b", means_only(several, 3), several, 6)
    key = "main/predictor/weight/grad/mean"
    assert [bool(row) for row in blocks] == [False, False, True] * 2
    assert blocks[2][key] == pytest.approx(math.fsum(row[key] for row in each[:3]) / 3, rel=1e-12)
    assert blocks[5][key] == pytest.approx(math.fsum(row[key] for row in each[3:]) / 3, rel=1e-12)


def test_what_is_looked_at_and_the_prefix_are_settings(tmp_path):
    """Several models by name, only parameters or only gradients."""
    model, other = same_regression(), nn.Linear(2, 1)
    both = means_only({"gen": model, "dis": other}, report_grads=False, prefix="stats")
    (row,) = rows_of(tmp_path / "a", both, model, 1)
    assert sorted(row) == [
        "stats/dis/bias/data/mean",
        "stats/dis/weight/data/mean",
        "stats/gen/predictor/bias/data/mean",
        "stats/gen/predictor/weight/data/mean",
    ]
    (row,) = rows_of(tmp_path / "b", means_only(model, report_params=False), model, 1)
    assert sorted(row) == ["main/predictor/bias/grad/mean", "main/predictor/weight/grad/mean"]


def test_a_statistic_of_ones_own_may_give_several_numbers(tmp_path):
    """They are numbered; what it returns may be part of the parameter, and one may be registered late."""
    model, before = same_regression(), same_regression().predictor.weight.detach().reshape(-1)
    statistics = Statistics(model, {"first": lambda x: x[0]}, report_grads=False, trigger=(2, "iteration"))
    statistics.register_statistics("quantile", lambda x: x.quantile(x.new_tensor([0.0, 0.5, 1.0])))
    seen = [before]
    trainer = training.Trainer(updater_of(model), (2, "iteration"), out=str(tmp_path))
    trainer.extend(lambda trainer: seen.append(model.predictor.weight.detach().clone().reshape(-1)), "look", priority=900)
    trainer.extend(statistics)
    trainer.run()
    row, place = trainer.observation, "main/predictor/weight/data"
    assert row[f"{place}/first"] == pytest.approx(sum(each[0].item() for each in seen[1:]) / 2)
    assert [row[f"{place}/quantile/{i}"] for i in range(3)] == [
        pytest.approx(sum(each.sort().values[i].item() for each in seen[1:]) / 2) for i in range(3)
    ]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of PyTorch 2.11
def test_a_parameter_without_a_gradient_has_no_statistics_of_it(tmp_path):
    """Nor has one without any number; sparse gradients, complex and half-precision parameters have."""
    model = same_regression()
    model.frozen = nn.Parameter(torch.tensor([60000.0, -60000.0], dtype=torch.float16), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(0))
    model.wave = nn.Parameter(torch.tensor([3 + 4j]))
    model.table = nn.Embedding(5, 2, sparse=True)
    model.table.weight.grad = torch.sparse_coo_tensor([[0, 0]], [[1.0, 2.0], [3.0, 2.0]], (5, 2), check_invariants=True)
    statistics = Statistics(model, trigger=(1, "iteration"))
    trainer = training.Trainer(updater_of(), out=str(tmp_path))
    statistics.observe(trainer)
    with trainer.reporter.scope(trainer.observation):
        statistics(trainer)
    row = trainer.reporter.observation or trainer.observation
    assert row["main/frozen/data/std"] == 60000
    assert row["main/wave/data/max"] == 4
    assert (row["main/table/weight/grad/max"], row["main/table/weight/grad/zeros"]) == (4, 8)
    assert not any(key.startswith(("main/frozen/grad", "main/empty", "main/predictor/bias/grad")) for key in row)


def test_nan_is_reported_as_nan(tmp_path):
    """It is what one looks for."""
    model = same_regression()
    model.predictor.bias.data.fill_(math.nan)
    (row,) = rows_of(tmp_path, means_only(model), model, 1)
    assert math.isnan(row["main/predictor/bias/data/mean"])


def test_a_log_report_has_them_in_its_rows(tmp_path):
    """It runs later in the same iteration."""
    model, log = same_regression(), extensions.LogReport(trigger=(2, "iteration"))
    trainer = training.Trainer(updater_of(model), (4, "iteration"), out=str(tmp_path), extensions=[log])
    trainer.extend(means_only(model, 2))
    trainer.run()
    assert ["main/predictor/bias/grad/mean" in row for row in log.log] == [True, True]


def test_a_compiled_model_has_the_names_of_what_was_compiled(tmp_path):
    """No wrapper shows in a key."""
    model = same_regression()
    (row,) = rows_of(tmp_path, means_only(torch.compile(model, backend="eager")), model, 1)
    assert "main/predictor/weight/data/mean" in row


def test_no_value_is_read_from_its_device_before_the_trigger_fires(tmp_path):
    """Tensors without data stand in for those on an accelerator: to read one is an error."""
    statistics = Statistics(nn.Linear(3, 3, device="meta"))
    trainer = training.Trainer(updater_of(), out=str(tmp_path))
    for _ in range(100):
        statistics.observe(trainer)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        statistics(trainer)


@pytest.mark.parametrize("way", ["load", "extend", "file"])
def test_cut_in_two_after_any_iteration_it_reports_the_same(tmp_path, way):
    """Half intervals are saved, and the interval of its trigger."""
    key = "main/predictor/weight/grad/mean"

    def make():
        model, rows = same_regression(), []
        statistics = means_only(model)
        statistics.trigger = ManualScheduleTrigger([3, 5], "iteration")
        look = training.make_extension()(lambda trainer: rows.append(trainer.observation.get(key)))
        look.rows = rows
        return updater_of(model), [statistics, look]

    trainer, _, (_, look) = whole(tmp_path, make, 6)
    assert [row is not None for row in look.rows] == [False, False, True, False, True, False]
    runs = chained(tmp_path, make, 6, way=way)
    assert [row for _, _, (_, part) in runs for row in part.rows] == look.rows
    assert differences(trainer, runs[-1][0]) == []


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Statistics([nn.Linear(1, 1)]), TypeError, "a mapping of several by name; model 'main' is list"),
        (lambda: Statistics({"a": None}), TypeError, "model 'a' is NoneType"),
        (lambda: Statistics(nn.Linear(1, 1), {"mean": "mean"}), TypeError, "statistic 'mean' is a function of a tensor"),
        (lambda: Statistics(nn.Linear(1, 1), None, False, False), ValueError, "nothing to report"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, error, message):
    """The error gives the rule and the value."""
    with pytest.raises(error, match=message):
        make()
