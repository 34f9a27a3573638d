"""MlflowWriter: what MLflow's own client finds in a database of SQLite."""

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from written import LATE, LOSSES, SEEN, KilledError, Showing, train

from chainring.writers import MlflowWriter, Record, Run

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # of MLflow's own tables


def client_of(database):
    from mlflow import MlflowClient  # takes a second, which no other file of tests needs

    return MlflowClient(database)


def runs_of(database, experiment):
    client = client_of(database)
    found = client.get_experiment_by_name(experiment)
    return client.search_runs([found.experiment_id], order_by=["attributes.start_time"])


def points(database, run, key):
    return [(metric.step, metric.value) for metric in client_of(database).get_metric_history(run.info.run_id, key)]


def test_each_number_of_a_row_is_a_metric_at_its_iteration(tmp_path, database):
    """In the experiment of that name, with the config as parameters; infinity is the largest double."""
    log = train(tmp_path, MlflowWriter(database, "whole"), config={"lr": 0.5, "sizes": [1, 2]})
    (run,) = runs_of(database, "whole")
    assert points(database, run, "main/loss") == LOSSES
    assert points(database, run, "main/late") == LATE
    odd = dict(points(database, run, "odd"))
    assert math.isnan(odd[6])
    assert odd[8] == sys.float_info.max
    assert points(database, run, "elapsed_time") == [(row["iteration"], row["elapsed_time"]) for row in log.log]
    assert run.data.params == {"lr": "0.5", "sizes": "[1, 2]"}
    assert run.info.status == "FINISHED"


STRANGE = [
    "top@5",
    "f1%",
    "val(loss)",
    "a//b",
    "..a",
    "/a",
    "../a",
    "a/./b",
    "ünï=1",
    "\ud800",
    "",
    "a\n",
    "x" * 300,
    "a|b",
    "a;b",
]


@pytest.mark.parametrize("key", STRANGE)
def test_a_key_that_mlflow_refuses_is_sent_under_a_name_that_it_takes(tmp_path, database, key):
    """One such key loses no rows; other keys keep their names, and so do two strange ones of one spelling."""
    writer = MlflowWriter(database, "strange")
    with pytest.warns(UserWarning, match="MLflow takes letters, digits.* is sent as "):
        writer.begin(Run(tmp_path, {key: 1, "lr": 0.5}))
    with pytest.warns(UserWarning, match="is sent as ") as caught:
        writer.write(Record(0, 1, 1.0, {"main/loss": 0.5, key: 1, f"{key}?": 7}))
    assert len(caught) == 1  # of the second key
    writer.write(Record(0, 2, 1.0, {"main/loss": 0.5, key: 2, f"{key}?": 7}))
    writer.close()
    run = max(runs_of(database, "strange"), key=lambda run: run.info.start_time)
    assert points(database, run, "main/loss") == [(1, 0.5), (2, 0.5)]
    names = sorted(run.data.metrics.keys() - {"main/loss", "epoch", "elapsed_time"})
    assert sorted(points(database, run, name) for name in names) == [[(1, 1.0), (2, 2.0)], [(1, 7.0), (2, 7.0)]]
    assert sorted(run.data.params.values()) == ["0.5", "1"]


def test_a_resumed_run_goes_on_under_its_id(tmp_path, database):
    """Each row is there once; a parameter stays what it was at the first start."""
    train(tmp_path, MlflowWriter(database, "resumed"), length=4, config={"lr": 0.5})
    (first,) = runs_of(database, "resumed")
    train(tmp_path, MlflowWriter(database, "resumed"), config={"lr": 0.25, "new": 1})
    (run,) = runs_of(database, "resumed")
    assert run.info.run_id == first.info.run_id
    assert (points(database, run, "main/loss"), points(database, run, "main/late")) == (LOSSES, LATE)
    assert run.data.params == {"lr": "0.5", "new": "1"}


def test_a_run_that_goes_back_behind_rows_is_replaced(tmp_path, database, capsys):
    """MLflow takes none back: a run with all rows so far has its name, tags and parameters; it can be restored."""
    with pytest.raises(KilledError):
        train(tmp_path, MlflowWriter(database, "back"), kill=7, config={"lr": 0.5})
    (first,) = runs_of(database, "back")
    client_of(database).set_tag(first.info.run_id, "note", "mine")
    train(tmp_path, MlflowWriter(database, "back"), config={"lr": 0.25, "new": 1})
    (run,) = runs_of(database, "back")
    assert f"run {first.info.run_id} there is replaced by {run.info.run_id}, and deleted" in capsys.readouterr().out
    assert (run.info.run_name, run.data.tags["note"]) == (first.info.run_name, "mine")
    assert (points(database, run, "main/loss"), points(database, run, "main/late")) == (LOSSES, LATE)
    assert run.data.params == {"lr": "0.5", "new": "1"}


def test_rows_that_it_lacks_are_sent_when_the_run_is_resumed(tmp_path, database):
    """After a kill, an outage, or a start without a writer."""
    with pytest.raises(KilledError):
        train(tmp_path, kill=7)
    train(tmp_path, MlflowWriter(database, "late"))
    (run,) = runs_of(database, "late")
    assert points(database, run, "main/loss") == LOSSES


def test_a_row_that_was_sent_in_part_is_not_there_twice(tmp_path, database):
    """A kill between two requests for the numbers of a row leaves those of the first."""
    train(tmp_path, MlflowWriter(database, "part"), length=4)
    (first,) = runs_of(database, "part")
    client_of(database).log_metric(first.info.run_id, "epoch", 0, step=3)
    train(tmp_path, MlflowWriter(database, "part"))
    (run,) = runs_of(database, "part")
    assert points(database, run, "epoch") == [(step, 0) for step in (2, 4, 6, 8)]
    assert points(database, run, "main/loss") == LOSSES


def test_a_run_whose_id_a_kill_has_lost_is_removed(tmp_path, database):
    """It is known by a tag, which was saved before."""
    train(tmp_path, MlflowWriter(database, "lost"), length=4)
    description = json.loads((tmp_path / "mlflow_run.json").read_text())
    (tmp_path / "mlflow_run.json").write_text(json.dumps({**description, "run_id": None}))
    train(tmp_path, MlflowWriter(database, "lost"))
    (run,) = runs_of(database, "lost")
    assert run.info.run_id != description["run_id"]
    assert points(database, run, "main/loss") == LOSSES


def test_another_run_in_the_directory_is_another_run_there(tmp_path, database):
    """And so is one that goes to another experiment."""
    for name in ("first", "first", "second"):
        with pytest.raises(KilledError):
            train(tmp_path, MlflowWriter(database, name), kill=3)
    assert [len(runs_of(database, name)) for name in ("first", "second")] == [2, 1]
    with pytest.raises(KilledError):
        train(tmp_path, MlflowWriter(database, "second"), kill=5)
    train(tmp_path, MlflowWriter(database, "third"))
    (run,) = runs_of(database, "third")
    assert points(database, run, "main/loss") == LOSSES


def test_many_settings_and_keys_take_several_requests(tmp_path, database):
    """MLflow takes 1000 metrics and 100 parameters in one."""
    settings = {f"s{number}": number for number in range(120)}
    writer = MlflowWriter(database, "many")
    train(tmp_path, writer, config=settings, postprocess=lambda row: row.update({f"k{n}": n for n in range(1100)}), length=2)
    (run,) = runs_of(database, "many")
    assert run.data.params == {key: str(value) for key, value in settings.items()}
    assert run.data.metrics.items() >= {f"k{n}": n for n in range(1100)}.items()


def test_a_run_with_it_draws_what_the_run_without_it_draws(tmp_path, database):
    """MLflow draws the name of a run from Python's generator."""
    drawn = []
    for writers in ((), (MlflowWriter(database, "drawn"),)):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        train(tmp_path / str(len(writers)), *writers, length=2)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_a_strange_key_of_a_run_loses_no_rows(tmp_path, database):
    """All of them are there, under both keys."""
    with pytest.warns(UserWarning, match="'a@b' is sent as 'a_b-e5913774'") as caught:
        train(tmp_path, MlflowWriter(database, "refused"), postprocess=lambda row: row.update({"a@b": 1.0}))
    assert len(caught) == 1
    (run,) = runs_of(database, "refused")
    assert points(database, run, "main/loss") == LOSSES
    assert points(database, run, "a_b-e5913774") == [(iteration, 1.0) for iteration, _ in LOSSES]


def test_the_environment_names_the_experiment_where_nothing_else_does(tmp_path, database, monkeypatch):
    """And the place of the runs, as for the rest of MLflow."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    monkeypatch.chdir(tmp_path)
    writer = MlflowWriter()
    writer.write(Record(0, 3, 0.5, {"a": 1.0, "note": "text"}))
    writer.close()
    (run,) = runs_of(database, "of the environment")
    assert points(database, run, "a") == [(3, 1.0)]
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_extra_is_named(monkeypatch):
    """At construction."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"MlflowWriter writes with mlflow.*pip install 'chainring\[mlflow\]'"):
        MlflowWriter()


def test_images_texts_and_histograms_are_artifacts(tmp_path, database):
    """PNG, text and JSON files in a folder of their iteration, the same after a resume."""
    client_of(database).create_experiment("media", str(tmp_path / "artifacts"))
    with pytest.raises(KilledError):
        train(tmp_path / "out", MlflowWriter(database, "media"), kill=7, updater=Showing())
    train(tmp_path / "out", MlflowWriter(database, "media"), updater=Showing())
    (run,) = runs_of(database, "media")
    assert points(database, run, "main/loss") == LOSSES
    found = Path(client_of(database).download_artifacts(run.info.run_id, "media", str(tmp_path)))
    assert sorted(path.name for path in found.iterdir()) == [f"{step:08d}" for step in SEEN]
    for step in SEEN:
        patterns = ("weights.json", "main_loss*.txt", "seen_image*.png")
        histogram, text, image = (next((found / f"{step:08d}").glob(pattern)) for pattern in patterns)
        assert sum(json.loads(histogram.read_text())["counts"]) == step
        assert text.read_text() == f"<b> of {step}"
        assert image.read_bytes().startswith(b"\x89PNG")
