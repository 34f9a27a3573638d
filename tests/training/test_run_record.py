"""run.json: with what settings a run was made, when it was started and resumed, and what had changed by then."""

import argparse
import datetime
import functools
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from counting import CountingUpdater, DataUpdater
from toys import updater_of

import chainring
from chainring import _version, serializers, training
from chainring.training import extensions
from chainring.training._provenance import provenance
from chainring.training._run_directory import match_name


class Opaque:
    """Has no text but its address."""


def trainer_of(out, stop=1, updater=None, **config):
    trainer = training.Trainer(
        CountingUpdater() if updater is None else updater, (stop, "iteration"), str(out), config=config
    )
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    return trainer


def run(out, stop=1, load=None, updater=None, **config):
    trainer = trainer_of(out, stop, updater, **config)
    if load is not None:
        serializers.load(Path(out) / load, trainer)
    trainer.run()
    return record(out)


def record(out):
    """The record, which a strict reader accepts."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((Path(out) / "run.json").read_text(), parse_constant=refuse)


def changes(found):
    """What had changed at each start, but for the stop trigger, which these tests set further."""
    return [{key: pair for key, pair in start["changed"].items() if key != "stop trigger"} for start in found["starts"]]


@pytest.fixture
def commit():
    """Asks again for the commit of the running script, which a process asks for once."""
    provenance.cache_clear()
    yield
    provenance.cache_clear()


def git(place, *arguments):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=place, check=True, capture_output=True, text=True, env=clean()
    ).stdout.strip()


def clean():
    """The environment without what would lead git to another repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


@pytest.fixture
def script(tmp_path, monkeypatch, commit):
    """A script in a git repository of one commit, which is the one that runs."""
    place = tmp_path / "repository"
    place.mkdir()
    (place / "train.py").touch()
    git(place, "init", "--quiet")
    git(place, "add", ".")
    git(place, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(sys, "argv", [str(place / "train.py"), "--epoch", "3"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(place / "train.py"), raising=False)
    return place / "train.py"


def test_a_run_on_the_host_is_one_where_there_is_an_accelerator_too(tmp_path, device):
    """And one on that has its name."""
    for number, name in enumerate(["cpu", device]):
        model = torch.nn.Linear(1, 1)
        updater = training.StandardUpdater(
            [torch.ones(1)],
            torch.optim.SGD(model.parameters()),
            model,
            loss_func=lambda model, x: model(x).sum(),
            device=name,
        )
        assert run(tmp_path / str(number), updater=updater)["device"].partition(" ")[0] == name


def test_the_record_says_with_what_the_run_was_made(tmp_path, monkeypatch):
    """Arguments, versions, device, threads and seeds."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--epoch", "3"])
    found = run(tmp_path, updater=DataUpdater(), epoch=3)
    assert found["format"] == 1
    assert found["config"] == {"epoch": 3}
    assert found["argv"] == ["train.py", "--epoch", "3"]
    assert found["versions"] == {
        "chainring": chainring.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    assert found["device"] == _version.device_name()
    assert (found["threads"], found["ranks"]) == (1, 1)
    assert found["seeds"]["torch"] == 0


def test_the_seeds_of_the_iterators_are_recorded(tmp_path):
    """By their names."""
    assert run(tmp_path, updater=updater_of())["seeds"]["iterators"].keys() == {"main"}


def test_a_start_says_when_where_and_from_which_iteration(tmp_path):
    """The time with its zone, in whole seconds."""
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    (start,) = run(tmp_path)["starts"]
    assert before <= datetime.datetime.fromisoformat(start.pop("time")) <= datetime.datetime.now(datetime.UTC)
    assert len(start.pop("run")) == 16  # by which commands know it
    assert sorted(start.pop("generators")) == ["numpy", "python", "torch"]  # digests of their states
    expected = {"iteration": 0, "host": socket.gethostname(), "pid": os.getpid(), "argv": sys.argv, "changed": {}}
    assert start == expected


def test_the_plan_is_recorded_in_the_order_in_which_extensions_run(tmp_path):
    """By priority, snapshots last; what stops the run; the same text in every process."""
    trainer = trainer_of(tmp_path, 2)
    trainer.extend(lambda trainer: None, "late", priority=1)
    trainer.extend(extensions.LogReport(), trigger=(2, "iteration"), priority=200)
    trainer.run()
    plan = record(tmp_path)["plan"]
    assert plan["stop_trigger"] == "ReachedTrigger(2, 'iteration')"
    assert [each["name"] for each in plan["extensions"]] == ["LogReport", "late", "snapshot"]
    assert plan["extensions"][0] == {
        "name": "LogReport",
        "class": "LogReport",
        "priority": 200,
        "trigger": "IntervalTrigger(2, 'iteration')",
        "before_training": False,
        "observes": True,
    }


def test_a_trigger_without_a_text_of_its_own_is_recorded_without_its_address(tmp_path):
    """So two records of one script are the same."""

    class Never(Opaque):
        def __call__(self, trainer):
            return False

    trainer = trainer_of(tmp_path)
    trainer.extend(lambda trainer: None, "idle", trigger=Never())
    trainer.run()
    (trigger,) = [each["trigger"] for each in record(tmp_path)["plan"]["extensions"] if each["name"] == "idle"]
    assert "Never object" in trigger
    assert "0x" not in trigger


def test_the_parameters_of_every_model_are_recorded(tmp_path):
    """Their shapes by the names under which they are saved, and which of them need no gradient; a lazy one has none."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.LazyLinear(1))
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    model[0].bias.requires_grad_(False)
    updater = training.StandardUpdater([[(torch.ones(2), 1)]], torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    trainer = training.Trainer(updater, (0, "iteration"), str(tmp_path))
    trainer.run()
    assert record(tmp_path)["models"] == {
        "main": {
            "class": "Sequential",
            "parameters": {
                "scale": "scalar", "0/weight": "3x2", "0/bias": "3", "1/weight": "3", "1/bias": "3",
                "2/weight": "not known before the first update", "2/bias": "not known before the first update",
            },
            "frozen": ["0/bias"],
        }
    }  # fmt: skip


def with_sgd(out, stop, lr, load=None):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    updater = training.StandardUpdater([torch.ones(1, 2)] * 9, optimizer, model, loss_func=lambda m, x: m(x).sum())
    return run(out, stop, load, updater)


def test_another_learning_rate_is_recorded_and_printed_once(tmp_path, capsys):
    """With the values that the script had constructed, and not with those that a schedule had reached."""
    assert with_sgd(tmp_path, 1, 0.1)["optimizers"]["main"][0]["lr"] == 0.1
    found = with_sgd(tmp_path, 2, 0.5, load="snapshot_iter_1")
    assert found["optimizers"]["main"][0]["lr"] == 0.5
    assert changes(found) == [{}, {"lr of optimizer 'main', group 0": [0.1, 0.5]}]
    assert capsys.readouterr().out.count("0.5") == 1


@pytest.mark.parametrize("edited", [None, 3, [], {"main": 3}, {"main": [3]}, {"main": [{"lr": {}}]}, {"other": []}])
def test_a_run_goes_on_from_a_record_whose_optimizers_a_person_has_edited(tmp_path, edited):
    """What their settings were is in the snapshot; the record only shows them."""
    content = with_sgd(tmp_path, 1, 0.1)
    (tmp_path / "run.json").write_text(json.dumps({**content, "optimizers": edited}))
    found = with_sgd(tmp_path, 2, 0.1, load="snapshot_iter_1")
    assert changes(found) == [{}, {}]


def test_every_value_of_a_config_becomes_plain_json(tmp_path):
    """What an argparse namespace may hold, and what scripts put beside it; NaN and infinities are strings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=Path("result"))
    parser.add_argument("--lr", type=float, default=math.nan)
    parser.set_defaults(func=run)
    config = {
        **vars(parser.parse_args([])),
        "bound": np.float32(math.inf),
        "low": [-math.inf, np.float64(0.5), np.int64(3)],
        "array": np.arange(3),
        "tensor": torch.tensor([[1.5]]),
        "nested": {"a": {"b": (1, None, True)}, 3: "three", Path("x"): 4, ("a", 1): 5},
        "set": {"c", "a", "b"},
        "types": [np.float32, torch.nn.ReLU, torch.float64, torch.device("cpu")],
        "reduction": max,
        "bytes": b"x",
        "partial": functools.partial(max, 3),
    }
    found = run(tmp_path, **config)["config"]
    assert found == {
        "results": "result",
        "lr": "NaN",
        "func": "test_run_record.run",
        "bound": "Infinity",
        "low": ["-Infinity", 0.5, 3],
        "array": [0, 1, 2],
        "tensor": [[1.5]],
        "nested": {"a": {"b": [1, None, True]}, "3": "three", "x": 4, "('a', 1)": 5},
        "set": ["a", "b", "c"],
        "types": ["numpy.float32", "torch.nn.modules.activation.ReLU", "torch.float64", "cpu"],
        "reduction": "builtins.max",
        "bytes": "b'x'",
        "partial": "functools.partial(<built-in function max>, 3)",
    }


def test_the_config_is_copied_when_the_trainer_is_made(tmp_path):
    """A later change of the arguments is not what the run was made with."""
    config = {"epoch": 3}
    trainer = training.Trainer(CountingUpdater(), (1, "iteration"), str(tmp_path), config=config)
    config["epoch"] = 4
    trainer.run()
    assert record(tmp_path)["config"] == {"epoch": 3}


def test_the_commit_is_that_of_the_script_and_not_of_the_working_directory(tmp_path, script):
    """So a run says which code it was."""
    assert run(tmp_path / "out")["git_commit"] == git(script.parent, "rev-parse", "HEAD")


def test_a_script_outside_a_repository_or_without_git_has_no_commit(tmp_path, monkeypatch, script):
    """Neither is an error."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert run(tmp_path / "without git")["git_commit"] is None
    provenance.cache_clear()
    outside = tmp_path / "outside.py"
    outside.touch()
    monkeypatch.setattr(sys, "argv", [str(outside)])
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run(tmp_path / "outside")["git_commit"] is None


def test_a_resumed_run_adds_a_start_and_prints_nothing_where_nothing_has_changed(tmp_path, said):
    """Also where the config has values whose plain text would be another in every process."""
    config = {"epoch": 3, "lr": math.nan, "func": lambda: None, "data": {"a", "b"}, "object": Opaque()}
    run(tmp_path, **config)
    found = run(tmp_path, 3, load="snapshot_iter_1", **{**config, "object": Opaque()})
    assert [start["iteration"] for start in found["starts"]] == [0, 1]
    assert changes(found) == [{}, {}]
    assert said() == []


def test_a_changed_config_is_printed_and_recorded_and_the_new_value_holds(tmp_path, said):
    """Also of an argument that is new or gone; each start says what had changed since the one before."""
    run(tmp_path, epoch=3, gone="x", same=1)
    run(tmp_path, 2, load="snapshot_iter_1", epoch=4, same=1, new=[1])
    assert said() == [
        "config epoch 3 -> 4",
        "config gone 'x' -> None",
        "config new None -> [1]",
    ]
    found = run(tmp_path, 3, load="snapshot_iter_2", epoch=5, same=1, new=[1])
    assert found["config"] == {"epoch": 5, "same": 1, "new": [1]}
    assert changes(found) == [
        {},
        {"config.epoch": [3, 4], "config.gone": ["x", None], "config.new": [None, [1]]},
        {"config.epoch": [4, 5]},
    ]


def test_another_number_of_threads_is_printed_and_recorded(tmp_path, said):
    """The results may differ in the last bits."""
    run(tmp_path)
    torch.set_num_threads(2)
    found = run(tmp_path, 2, load="snapshot_iter_1")
    assert changes(found) == [{}, {"threads": [1, 2]}]
    assert said() == ["threads 1 -> 2 (the run continues, and may differ in the last bits)"]


def test_another_commit_is_printed_and_recorded(tmp_path, script, said):
    """The code of now runs."""
    first = run(tmp_path / "out")["git_commit"]
    git(script.parent, "commit", "--quiet", "--allow-empty", "--message", "second")
    provenance.cache_clear()
    found = run(tmp_path / "out", 2, load="snapshot_iter_1")
    second = git(script.parent, "rev-parse", "HEAD")
    assert changes(found) == [{}, {"git_commit": [first, second]}]
    line = f"git_commit {first!r} -> {second!r} (the code of now runs)"
    assert said() == [line]


def test_a_version_that_has_changed_is_printed_and_recorded(tmp_path, capsys):
    """As a run finds it that was begun under another version of torch."""
    run(tmp_path)
    path = tmp_path / "run.json"
    content = json.loads(path.read_text())
    content["versions"]["torch"] = "0.1"
    path.write_text(json.dumps(content))
    found = run(tmp_path, 2, load="snapshot_iter_1")
    assert changes(found) == [{}, {"versions.torch": ["0.1", torch.__version__]}]
    assert "version of torch '0.1' ->" in " ".join(capsys.readouterr().out.split())


def test_a_fresh_run_begins_a_new_record(tmp_path, capsys):
    """What is otherwise than in the run before is no change of a setting."""
    run(tmp_path, epoch=3)
    capsys.readouterr()
    found = run(tmp_path, epoch=4)
    assert [start["changed"] for start in found["starts"]] == [{}]
    assert "resumed" not in capsys.readouterr().out


def test_a_run_continued_elsewhere_goes_on_with_the_record_beside_its_snapshot(tmp_path, capsys):
    """And not with that of a run that happens to be in its directory."""
    run(tmp_path / "source", 2, epoch=3)
    run(tmp_path / "out", 1, epoch=8)
    trainer = trainer_of(tmp_path / "out", 3, epoch=4)
    serializers.load(tmp_path / "source" / "snapshot_iter_2", trainer)
    trainer.run()
    found = record(tmp_path / "out")
    assert [start["iteration"] for start in found["starts"]] == [0, 2]
    assert changes(found) == [{}, {"config.epoch": [3, 4]}]
    assert "config epoch 3 -> 4" in " ".join(capsys.readouterr().out.split())
    assert len(record(tmp_path / "source")["starts"]) == 1


def test_the_record_is_replaced_by_one_rename(tmp_path, monkeypatch):
    """It is whole whenever it is opened."""
    run(tmp_path)
    seen, replace = [], os.replace

    def recorded(source, target):
        if Path(target).name == "run.json":
            seen.append((len(json.loads(Path(source).read_text())["starts"]), len(record(tmp_path)["starts"])))
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    run(tmp_path, 2, load="snapshot_iter_1")
    assert seen == [(2, 1)]


def test_a_rehearsal_writes_nothing_into_out(tmp_path):
    """No record, no lock, and what lies there stays."""
    run(tmp_path / "out", epoch=3)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    for out in ("out", "new"):
        trainer = trainer_of(tmp_path / out, epoch=4)
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
        trainer.rehearse()
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert not (tmp_path / "new").exists()


DAMAGED = {
    "a flipped bit": lambda text: text.replace('"files"', '"fileq"'),
    "a flipped bit in a name": lambda text: text.replace('"snapshot_iter_{', '"snapshot_iter_}'),
    "a flipped bit in a start": lambda text: text.replace('"starts": [\n  {', '"starts": [ 1,{'),
    "deep": lambda text: "[" * 1_000_000,
    "huge": lambda text: text + " " * (17 << 20),
    "names of no text": lambda text: text.replace('"log"', "3"),
    "a name that takes a regular expression for ever": lambda text: text.replace('"log"', json.dumps("{}x" * 2000)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_set_aside_with_a_warning_and_the_run_goes_on(tmp_path, damage):
    """Whatever a disk, a person or a stranger has made of it."""
    run(tmp_path)
    content = json.loads((tmp_path / "run.json").read_text())
    text = DAMAGED[damage](json.dumps({**content, "files": [*content["files"], "log"]}, indent=1))
    (tmp_path / "run.json").write_text(text)
    with pytest.warns(UserWarning, match=r"run\.json is skipped and moved to .*abandoned/1/run\.json"):
        found = run(tmp_path, 2, load="snapshot_iter_1")
    assert [start["iteration"] for start in found["starts"]] == [1]
    assert (tmp_path / "abandoned" / "1" / "run.json").read_text() == text


@pytest.mark.parametrize(
    "put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink("x", path)]
)
def test_what_lies_in_the_place_of_the_record_is_neither_read_nor_waited_for(tmp_path, put):
    """A pipe, a directory, a link to a device, a dangling link."""
    run(tmp_path)
    (tmp_path / "run.json").unlink()
    put(tmp_path / "run.json")
    with pytest.warns(UserWarning, match=r"run\.json is skipped and moved to "):
        found = run(tmp_path, 2, load="snapshot_iter_1")
    assert [start["iteration"] for start in found["starts"]] == [1]


def test_names_of_any_form_are_compared_in_no_time():
    """What would take a regular expression longer than anybody waits is compared field by field."""
    for template, name in [("{}a" * 40, "a" * 100 + "b"), ("{.iteration}{.epoch}" * 60 + "x", "1" * 250)]:
        began = time.process_time()
        assert match_name(template, name) is None
        assert time.process_time() - began < 1
    match = functools.partial(match_name, "a{.epoch}_{.updater.iteration}.{}")
    assert match("a1_23.txt").iteration == 23
    assert [match(name) for name in ("a1_23.", "a1_2x.txt", "a_23.txt", "b1_23.txt", "")] == [None] * 5
    assert match_name("{}", "anything") is None
    assert match_name("{.iteration}", "12").iteration == 12
    assert match_name("log", "log").iteration is None
