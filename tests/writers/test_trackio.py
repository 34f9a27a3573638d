"""TrackioWriter: what the real trackio has in its database."""

import json
import math
import signal
import sys
from pathlib import Path

import pytest
from written import LATE, LOSSES, SEEN, KilledError, Showing, train

import chainring
import forked
from chainring.writers import Record, TrackioWriter


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """Trackio's database in the directory of the test; its name is read when it is imported."""
    import trackio.sqlite_storage
    import trackio.utils

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            for attribute in ("TRACKIO_DIR", "MEDIA_DIR"):
                if hasattr(module, attribute):
                    place = tmp_path / "trackio" / ("media" if attribute == "MEDIA_DIR" else "")
                    monkeypatch.setattr(module, attribute, place)
    (tmp_path / "trackio").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return trackio.sqlite_storage.SQLiteStorage


def writer(**settings):
    return TrackioWriter(**{"project": "digits", "auto_log_cpu": False, "auto_log_gpu": False, **settings})


def found(storage, project="digits"):
    """The rows of each run, by name and id."""
    runs = [(record["name"], record["id"]) for record in storage.get_run_records(project)]
    return {run: storage.get_logs(project, run[0], run_id=run[1]) for run in runs}


def losses(rows, key="main/loss"):
    return [(row["step"], row[key]) for row in rows if key in row]


def test_each_row_is_a_row_there_at_the_step_of_its_iteration(tmp_path, storage):
    """With the counters; NaN and infinity are themselves; the config is the trainer's."""
    log = train(tmp_path / "out", writer(), config={"lr": 0.5, "sizes": [1, 2]})
    (((name, run_id), rows),) = found(storage).items()
    assert (losses(rows), losses(rows, "main/late")) == (LOSSES, LATE)
    assert [row["iteration"] for row in rows] == [2, 4, 6, 8]
    assert [row["elapsed_time"] for row in rows] == [row["elapsed_time"] for row in log.log]
    assert math.isnan(rows[2]["odd"])
    assert rows[3]["odd"] == math.inf
    config = storage.get_run_config("digits", name, run_id=run_id)
    assert (config["lr"], config["sizes"]) == (0.5, [1, 2])


@pytest.mark.parametrize("kill", [5, 7])
def test_a_resumed_run_goes_on_with_each_row_once(tmp_path, storage, kill):
    """Also where rows had been sent of updates that are computed again; under the same name."""
    with pytest.raises(KilledError):
        train(tmp_path / "out", writer(), kill=kill)
    before = {name for name, _ in found(storage)}
    train(tmp_path / "out", writer())
    names, rows = zip(*[(name, rows) for (name, _), rows in found(storage).items()], strict=True)
    assert [losses(each) for each in rows] == [LOSSES]
    assert before == set(names)


def test_a_killed_process_goes_on_with_each_row_once(tmp_path, storage, monkeypatch):
    """Trackio writes twice a second, so rows are lost with it; others were sent of updates that are computed again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(chainring.__file__).parent.parent))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    killed = forked.run([Path(__file__).with_name("killed_service.py"), tmp_path / "out", "trackio"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    train(tmp_path / "out", writer())
    assert [losses(rows) for rows in found(storage).values()] == [LOSSES]


def test_a_run_without_rows_to_take_back_stays_the_same(tmp_path, storage):
    """With its id, and what Trackio itself has measured."""
    train(tmp_path / "out", writer(), length=4)
    first = list(found(storage))
    train(tmp_path / "out", writer())
    assert list(found(storage)) == first
    assert [losses(rows) for rows in found(storage).values()] == [LOSSES]


def test_runs_of_one_name_are_not_mixed_up(tmp_path, storage):
    """Trackio continues the newest of a name; here that is another one."""
    train(tmp_path / "one", writer(name="same"), length=4)
    train(tmp_path / "two", writer(name="same"), length=4)
    train(tmp_path / "one", writer(name="same"))
    rows = {run_id: losses(rows) for (_, run_id), rows in found(storage).items()}
    ids = [json.loads((tmp_path / out / "trackio_run.json").read_text())["run_id"] for out in ("one", "two")]
    assert rows == dict(zip(ids, [LOSSES, LOSSES[:2]], strict=True))


def test_another_run_in_the_directory_is_another_one_there(tmp_path, storage):
    """The earlier one stays."""
    for _ in range(2):
        with pytest.raises(KilledError):
            train(tmp_path / "out", writer(), kill=3)
    assert [losses(rows) for rows in found(storage).values()] == [LOSSES[:1]] * 2
    assert (tmp_path / "out" / "previous" / "1" / "trackio_run.json").exists()


def test_a_writer_by_itself_keeps_nothing_but_what_trackio_does(tmp_path, storage, monkeypatch):
    """Outside a run there is no directory for its id; without a project it is uncategorized."""
    monkeypatch.chdir(tmp_path)
    alone = TrackioWriter(auto_log_cpu=False, auto_log_gpu=False)
    alone.write(Record(0, 3, 0.5, {"a": 1.0}))
    alone.close()
    assert [losses(rows, "a") for rows in found(storage, "uncategorized").values()] == [[(3, 1.0)]]
    assert [path.name for path in tmp_path.iterdir()] == ["trackio"]


def test_without_the_package_the_extra_is_named(monkeypatch):
    """At construction."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError, match=r"TrackioWriter writes with trackio.*pip install 'chainring\[trackio\]'"):
        TrackioWriter()


def test_images_texts_and_histograms_are_its_own_of_these_kinds(tmp_path, storage):
    """A text is shown as it is, also if it looks like Markdown; after a kill each is there once."""
    with pytest.raises(KilledError):
        train(tmp_path / "out", writer(), kill=7, updater=Showing())
    train(tmp_path / "out", writer(), updater=Showing())
    (rows,) = found(storage).values()
    assert [row["step"] for row in rows] == SEEN
    for row in rows:
        assert row["seen/image"]["_type"] == "trackio.image"
        assert row["main/loss/text"] == {"_type": "trackio.markdown", "_value": f"```\n<b> of {row['step']}\n```"}
        assert sum(row["weights"]["values"]) == row["step"]
