"""A process that is killed in the middle of an update, and another that goes on: what each kind of writer then holds."""

import signal
from pathlib import Path

import pandas
import pytest
from killed_program import writers
from offline import read
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from written import LOSSES, train

import chainring
import forked

PROGRAM = Path(__file__).with_name("killed_program.py")


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_after_a_kill_files_and_services_have_each_row_once(tmp_path, database, offline, monkeypatch):
    """The snapshot is of iteration 4; row 6 was written before the kill, and is computed again."""
    import wandb
    from mlflow import MlflowClient

    monkeypatch.setenv("PYTHONPATH", str(Path(chainring.__file__).parent.parent))
    out = tmp_path / "out"
    killed = forked.run([PROGRAM, out, database, "6"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(pandas.read_csv(out / "log.csv")["iteration"]) == [2, 4, 6]

    train(out, *writers(database), config={"lr": 0.5})
    table = pandas.read_csv(out / "log.csv")
    assert list(zip(table["iteration"], table["main/loss"], strict=True)) == LOSSES
    curves = EventAccumulator(str(out / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in curves.Scalars("main/loss")] == LOSSES
    wandb.teardown()  # its process writes the last rows
    rows = [row for path in out.glob("wandb/offline-run-*") for row in read(path)[2]]
    assert [(row["iteration"], row["main/loss"]) for row in rows] == LOSSES
    client = MlflowClient(database)
    (run,) = client.search_runs([client.get_experiment_by_name("killed").experiment_id])
    found = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "main/loss")]
    assert found == LOSSES
