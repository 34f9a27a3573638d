"""CometWriter: what the real comet_ml writes in its offline mode."""

import json
import signal
import sys
import zipfile
from pathlib import Path

import pytest
from written import LATE, LOSSES, SEEN, KilledError, Showing, train

import chainring
import forked
from chainring.writers import CometWriter, Record

QUIET = {"log_code": False, "log_git_metadata": False, "log_env_details": False, "display_summary_level": 0}


def writer(**settings):
    return CometWriter(**{"project_name": "digits", "online": False, **QUIET, **settings})


def archives(out):
    return sorted((out / "comet").glob("*.zip"))


def messages(path):
    """The experiment of an archive, and what was sent to it."""
    with zipfile.ZipFile(path) as archive:
        sent = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
        return json.loads(archive.read("experiment.json")), sent


def metrics(path, key="main/loss"):
    """The steps and values of a metric."""
    sent = [message["payload"]["metric"] for message in messages(path)[1] if message["type"] == "metric_msg"]
    return [(metric["step"], metric["metricValue"]) for metric in sent if metric["metricName"] == key]


def test_each_number_of_a_row_is_a_metric_at_the_step_of_its_iteration(tmp_path):
    """Time included; NaN and infinity are words; the config is the parameters."""
    log = train(tmp_path, writer(), config={"lr": 0.5})
    (path,) = archives(tmp_path)
    assert (metrics(path), metrics(path, "main/late")) == (LOSSES, LATE)
    assert [value for _, value in metrics(path, "elapsed_time")] == [row["elapsed_time"] for row in log.log]
    assert [value for _, value in metrics(path, "odd")] == [0.5, 0.5, "NaN", "Infinity"]
    experiment, sent = messages(path)
    assert experiment["project_name"] == "digits"
    parameters = [message["payload"]["param"] for message in sent if message["type"] == "parameter_msg"]
    assert [(each["paramName"], each["paramValue"]) for each in parameters if each["source"] == "manual"] == [("lr", 0.5)]


@pytest.mark.parametrize("kill", [5, 7])
def test_the_archive_of_a_resumed_run_has_each_row_once(tmp_path, kill):
    """It is an experiment with all rows so far; the earlier archive, whose rows it has, is removed."""
    with pytest.raises(KilledError):
        train(tmp_path, writer(), kill=kill)
    (before,) = archives(tmp_path)
    train(tmp_path, writer())
    (path,) = archives(tmp_path)
    assert path != before
    assert metrics(path) == LOSSES
    assert messages(path)[0]["offline_id"] == json.loads((tmp_path / "comet_run.json").read_text())["key"]


def test_a_killed_process_goes_on_with_each_row_once(tmp_path, monkeypatch):
    """What it left was no archive yet."""
    monkeypatch.setenv("PYTHONPATH", str(Path(chainring.__file__).parent.parent))
    killed = forked.run([Path(__file__).with_name("killed_service.py"), tmp_path, "comet"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    train(tmp_path, writer())
    (path,) = archives(tmp_path)
    assert metrics(path) == LOSSES


def test_another_run_in_the_directory_leaves_the_archive_of_the_earlier_one(tmp_path):
    """It is another experiment."""
    for _ in range(2):
        with pytest.raises(KilledError):
            train(tmp_path, writer(), kill=3)
    assert [metrics(path) for path in archives(tmp_path)] == [LOSSES[:1]] * 2


def test_settings_are_of_start_and_of_the_config_of_an_experiment(tmp_path):
    """Others are refused at once."""
    train(tmp_path / "out", writer(name="mine", tags=["a"], offline_directory=str(tmp_path / "comet")))
    (path,) = archives(tmp_path)
    assert messages(path)[0]["tags"] == ["a"]
    with pytest.raises(TypeError, match=r"and \['projekt'\] are of neither"):
        CometWriter(projekt="digits")


def test_a_writer_by_itself_needs_no_run(tmp_path):
    """Outside a run there is no directory for its key."""
    alone = writer(offline_directory=str(tmp_path / "comet"))
    alone.write(Record(0, 3, 0.5, {"a": 1.0}))
    alone.close()
    (path,) = archives(tmp_path)
    assert metrics(path, "a") == [(3, 1.0)]
    assert [each.name for each in tmp_path.iterdir()] == ["comet"]


def test_without_the_package_the_extra_is_named(monkeypatch):
    """At construction."""
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ImportError, match=r"CometWriter writes with comet_ml.*pip install 'chainring\[comet\]'"):
        CometWriter()


def test_images_texts_and_histograms_are_there(tmp_path):
    """After a kill each once."""
    with pytest.raises(KilledError):
        train(tmp_path, writer(), kill=7, updater=Showing())
    train(tmp_path, writer(), updater=Showing())
    (path,) = archives(tmp_path)
    sent = [message["payload"] for message in messages(path)[1] if message["type"] == "file_upload"]
    for kind in ("visualization", "text-sample", "asset"):
        assert [each["additional_params"]["step"] for each in sent if each["upload_type"] == kind] == SEEN


def test_an_archive_of_a_start_that_is_killed_at_its_beginning_is_removed_too(tmp_path, monkeypatch):
    """Comet begins one at once; here the process ends when it was made, before anything else is done with it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(chainring.__file__).parent.parent))
    train(tmp_path, writer(), length=4)
    program = f"""
import functools, os, sys
import comet_ml
sys.path.insert(0, {str(Path(__file__).parent)!r})
from killed_service import SERVICES
from written import train
start = comet_ml.start
@functools.wraps(start)
def killed(**settings):
    start(**settings)
    os.kill(os.getpid(), 9)
comet_ml.start = killed
train({str(tmp_path)!r}, SERVICES["comet"](), config={{"lr": 0.5}})
"""
    killed = forked.run(["-c", program])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    train(tmp_path, writer())
    (path,) = archives(tmp_path)
    assert metrics(path) == LOSSES
