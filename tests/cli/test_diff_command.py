"""chainring diff: where two runs part, by what they have left."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import planted
from chainring.cli import main
from chainring.converters import concat_examples

FIRST, LAST, BIAS = (f"updater/model:main/{name}" for name in ("first/weight", "last/weight", "last/bias"))
AVERAGE = "extensions/ExponentialMovingAverage/model/first/weight"
MEAN, VARIANCE = (f"updater/model:main/norm/{name}" for name in ("running_mean", "running_var"))
MOMENT = "updater/optimizer:main/state/main/last/bias/exp_avg"


def doubled(batch, device=None):
    """A converter."""
    x, t = concat_examples(batch, device)
    return 2 * x, t


def model_of(trainer):
    return trainer.updater.get_model("main")


def optimizer_of(trainer):
    return trainer.updater.get_optimizer("main")


def decay_more(trainer):
    optimizer_of(trainer).param_groups[0]["weight_decay"] = 0.5


def change_weight(trainer):
    planted.ulp(model_of(trainer).last.weight, 3)


def change_variance(trainer):
    planted.ulp(model_of(trainer).norm.running_var, 3)


def change_moment(trainer):
    planted.ulp(optimizer_of(trainer).state[model_of(trainer).last.bias]["exp_avg"], 0)


# What is changed; the first iteration that differs, what differs there, and the first tensor that does, of those that are
# recorded after every fourth iteration; a part of the name of a setting that differs.
DIFFERENCES = {
    "learning rate": ({"lr": 0.021}, 2, "loss", FIRST, "lr"),
    "momentum of the optimizer": ({"betas": (0.9, 0.99)}, 3, "loss", FIRST, "betas"),
    "epsilon": ({"eps": 1e-7}, 2, "loss", FIRST, "eps"),
    "weight decay": ({"weight_decay": 0.02}, 2, "loss", FIRST, "weight_decay"),
    "variant of the optimizer": ({"amsgrad": True}, 3, "loss", FIRST, "amsgrad"),
    "another optimizer": ({"optimizer": "sgd"}, 2, "loss", FIRST, "momentum"),
    "one example": ({"example": 7}, 1, "loss", FIRST, ""),
    "one pixel": ({"pixel": 7}, 1, "loss", FIRST, ""),
    "one pixel that comes later": ({"pixel": 3}, 10, "loss", FIRST, ""),
    "one label": ({"label": 7}, 1, "loss", FIRST, ""),
    "the seed": ({"seed": 1}, 0, "tensor", FIRST, "seeds.torch"),
    "the order of the data": ({"order": 2}, 1, "batch", FIRST, "seeds.iterators"),
    "data that are not shuffled": ({"shuffle": False}, 1, "batch", FIRST, ""),
    "the size of batches": ({"batch": 5}, 1, "batch", FIRST, "batch_size"),
    "an example less": ({"examples": 39}, 6, "batch", FIRST, "iterator:main.size"),
    "augmentation": ({"noise": 0.1001}, 1, "loss", FIRST, ""),
    "an example that draws more": ({"draws": "torch"}, 1, "loss", FIRST, ""),
    "one ulp of a weight": ({"ulp": "first.weight"}, 0, "tensor", FIRST, ""),
    "one ulp of a bias": ({"ulp": "last.bias"}, 0, "tensor", BIAS, ""),
    "one ulp of a scale": ({"ulp": "norm.weight"}, 0, "tensor", "updater/model:main/norm/weight", ""),
    "one ulp in the middle": ({"later": (13, change_weight)}, 16, "tensor", FIRST, "once"),
    "one ulp of a buffer": ({"later": (9, change_variance)}, 12, "tensor", VARIANCE, "once"),
    "one ulp of a moment": ({"later": (5, change_moment)}, 8, "tensor", MOMENT, "once"),
    "weight decay in the middle": ({"later": (11, decay_more)}, 12, "tensor", FIRST, "once"),
    "a number drawn in the middle": ({"later": (17, lambda t: torch.rand(1))}, 18, "loss", FIRST, "once"),
    "a number that nothing uses": ({"later": (17, lambda t: np.random.rand())}, 18, "generators", None, "once"),
    "a kernel": ({"kernel": True}, 4, "", FIRST, ""),  # in which iteration the loss shows it depends on the processor
    "an activation": ({"activation": lambda by_hand: nn.Tanh()}, 1, "loss", FIRST, ""),
    "the rate of dropout": ({"dropout": 0.31}, 1, "loss", FIRST, ""),
    "no dropout": ({"dropout": 0.0}, 1, "loss", FIRST, ""),
    "the momentum of running statistics": ({"momentum": 0.2}, 4, "tensor", MEAN, ""),
    "the epsilon of a norm": ({"norm_eps": 1e-6}, 1, "loss", FIRST, ""),
    "the width of a layer": ({"width": 9}, 0, "tensor", FIRST, "models.main.parameters.first/weight"),
    "a layer without a bias": ({"bias": False}, 0, "tensor", BIAS, "models.main.parameters.last/bias"),
    "a loss": ({"smoothing": 0.01}, 1, "loss", FIRST, ""),
    "a penalty": ({"penalty": 1e-6}, 1, "loss", FIRST, ""),
    "the initial values": ({"init": True}, 0, "tensor", LAST, ""),
    "a frozen layer": ({"frozen": "first"}, 2, "loss", FIRST, "frozen"),
    "another frozen layer": ({"frozen": "last"}, 2, "loss", FIRST, "frozen"),
    "the steps of a schedule": ({"step": 9}, 11, "loss", FIRST, ""),
    "the factor of a schedule": ({"gamma": 0.7}, 12, "loss", FIRST, ""),
    "the decay of an average": ({"decay": 0.99}, 8, "tensor", AVERAGE, ""),
    "the precision": ({"precision": "bf16"}, 1, "loss", FIRST, "settings.precision"),
    "a converter": ({"converter": doubled}, 1, "loss", FIRST, ""),
    "accumulation": ({"accumulate": 2}, 1, "batch", FIRST, "settings.accumulate"),
    "virtual ranks": ({"virtual_ranks": 2}, 1, "loss", FIRST, "settings.virtual_ranks"),
}  # fmt: skip
SAME = {
    "nothing": ({}, ""),
    "a number of NumPy's that an example draws": ({"draws": "numpy"}, ""),
    "a number of Python's that an example draws": ({"draws": "python"}, ""),
    "a note in config": ({"config": {"note": "again"}}, "config.note"),
    "a value that only one run reports": ({"evaluated": 6, "score": 1.0}, "once"),
    "a run that ends before": ({"length": 20}, "stop_trigger"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with a recorder and one without, to which others are compared."""
    root = tmp_path_factory.mktemp("runs")
    planted.make_trainer(str(root / "recorded")).run()
    planted.make_trainer(str(root / "plain"), recorded=False).run()
    return root


def diff(capsys, one, other):
    """The exit status, and what is printed with --json."""
    capsys.readouterr()
    status = main(["diff", "--json", str(one), str(other)])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_found_where_it_is_first_felt(base, tmp_path, capsys, name):
    """The first iteration, what differs in it, the first tensor; and the setting, of those that a run records."""
    changes, iteration, what, tensor, setting = DIFFERENCES[name]
    planted.make_trainer(str(tmp_path / "run"), **changes).run()
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"]) == (1, False)
    assert (found["iteration"], found["what"]) == (iteration, what) if what else 0 < found["iteration"] <= iteration
    assert found["tensor"] == tensor
    assert any(setting in name for name in found["settings"]) or not setting


@pytest.mark.parametrize("name", DIFFERENCES)
def test_without_a_recorder_logs_and_snapshots_tell_it(base, tmp_path, capsys, name):
    """In the interval of a row, or by a snapshot, but for what has died away until then; a tensor is named as well."""
    changes, iteration, _, _, _ = DIFFERENCES[name]
    planted.make_trainer(str(tmp_path / "run"), recorded=False, **changes).run()
    status, found = diff(capsys, base / "plain", tmp_path / "run")
    has_gone = name == "one ulp of a buffer"
    assert (status, found["same"]) == ((0, True) if has_gone else (1, False))
    if not has_gone and name != "a kernel":
        assert (found["after"] or 0) <= iteration <= found["iteration"] <= iteration + planted.SNAPSHOTS
        assert found["tensor"] is not None or found["what"] == "generators"


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_is_the_same_and_said(base, tmp_path, capsys, name):
    """Settings that differ are listed all the same, and of a longer run what both have is compared."""
    changes, setting = SAME[name]
    planted.make_trainer(str(tmp_path / "run"), **changes).run()
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"], found["iteration"], found["tensor"]) == (0, True, None, None)
    assert any(setting in name for name in found["settings"]) if setting else found["settings"] == {}


def test_another_version_and_another_commit_are_settings(base, tmp_path, capsys):
    """A run of the same numbers is the same run; the versions are listed."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["versions"]["torch"], record["git_commit"] = "2.6.0", "0" * 40
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"]) == (0, True)
    assert found["settings"]["versions.torch"][1] == "2.6.0"
    assert found["settings"]["git_commit"][1] == "0" * 40


def test_another_number_of_threads_is_a_setting(base, tmp_path, capsys):
    """Whether sums round otherwise depends on the machine."""
    planted.make_trainer(str(tmp_path / "run"), threads=2).run()
    torch.set_num_threads(1)
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert found["settings"]["threads"] == [1, 2]
    assert status == 0 or found["tensor"] is not None


def test_the_first_line_is_the_answer(base, tmp_path, capsys):
    """Then come settings, and what was compared and what was not."""
    planted.make_trainer(str(tmp_path / "run"), lr=0.5, length=20).run()
    assert main(["diff", str(base / "recorded"), str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("different from iteration 2 on: the loss main/loss: ")
    assert lines[1].startswith(f"the first tensor that differs, after iteration 4: {FIRST}: ")
    assert lines[2:5] == [
        "settings that differ:",
        "  optimizers.main[0].lr: 0.02 -> 0.5",
        "  plan.stop_trigger: \"ReachedTrigger(24, 'iteration')\" -> \"ReachedTrigger(20, 'iteration')\"",
    ]
    assert "compared: batches, main/loss, generators of iterations 1 to 20, as recorded" in lines
    assert lines[-1] == f"not compared: iterations 21 to 24, which only {base / 'recorded'} has"
    assert main(["diff", str(base / "recorded"), str(base / "plain")]) == 0
    assert capsys.readouterr().out.startswith("same up to iteration 24\n")


def test_a_run_that_was_killed_and_resumed_is_the_same(base, tmp_path, capsys):
    """From a snapshot before the end; the start is not a difference."""
    planted.make_trainer(str(tmp_path / "run"), length=11).run()
    shutil.rmtree(tmp_path / "run/snapshot_iter_11")
    planted.make_trainer(str(tmp_path / "run")).run()
    assert len(json.loads((tmp_path / "run/run.json").read_text())["starts"]) == 2
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"], found["iterations"]) == (0, True, [24, 24])


def test_by_how_much_a_tensor_of_a_snapshot_differs_is_said(base, tmp_path, capsys):
    """In numbers, in elements, and in units of the last place."""
    shutil.copytree(base / "plain", tmp_path / "run")
    change = {"later": (24, change_weight)}
    planted.make_trainer(str(tmp_path / "other"), recorded=False, **change).run()
    assert main(["diff", str(base / "plain"), str(tmp_path / "other")]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"different by iteration 24, and the same in iteration 16: the tensor {LAST}: by at most ")
    assert first.endswith(" in 1 of 24 elements, at most 1 ulp")


def nothing_recorded(run):
    for name in ("log.jsonl", "recorder.bin"):
        (run / name).unlink()
    for snapshot in run.glob("snapshot_iter_*"):
        shutil.rmtree(snapshot)


def write(name, content):
    return lambda run: (run / name).write_bytes(content)


def in_the_middle(run):
    path = run / "recorder.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 255
    path.write_bytes(content)


def pipe(run):
    (run / "log.jsonl").unlink()
    os.mkfifo(run / "log.jsonl")


HOSTILE = {
    "nothing in common": (nothing_recorded, "not known: the two runs have left nothing that can be compared"),
    "an empty directory": (lambda run: [shutil.rmtree(run), run.mkdir()], "holds no run"),
    "no directory": (shutil.rmtree, "there is no directory"),
    "a record that is no JSON": (write("run.json", b"{"), "run.json"),
    "a record that is nested too deep": (write("run.json", b"[" * 10**6), "nested too deep"),
    "a record of something else": (write("run.json", b"[]"), "not a record"),
    "a record that leads elsewhere": (write("run.json", b'{"format": 1, "files": 3}'), "not of the type"),
    "a log of something else": (write("log.jsonl", b'{"iteration": 6}\nnull\n'), "line 2 is not a row"),
    "a log that goes back": (write("log.jsonl", b'{"iteration": 6}\n{"iteration": 5}\n'), "line 2 is not a row"),
    "a log without iterations": (write("log.jsonl", b'{"iteration": "6"}\n'), "line 1 is not a row"),
    "a log that is nested too deep": (write("log.jsonl", b"[" * 10**6 + b"\n"), "line 1 is not a row"),
    "a log of bytes": (write("log.jsonl", b"\xff\xfe\0\n"), "line 1 is not a row"),
    "a ledger of something else": (write("recorder.bin", b"something else"), "is not a ledger"),
    "a damaged ledger": (in_the_middle, "damaged"),
    "a ledger that is cut off": (write("recorder.bin", b"\x89led"), "cut off"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_were_not_written_so_are_trouble_and_no_answer(base, tmp_path, capsys, name):
    """The status is 2, and the words say which file."""
    damage, words = HOSTILE[name]
    shutil.copytree(base / "recorded", tmp_path / "run")
    damage(tmp_path / "run")
    for pair in ((base / "recorded", tmp_path / "run"), (tmp_path / "run", base / "recorded")):
        assert main(["diff", *map(str, pair)]) == 2
        printed = capsys.readouterr()
        assert words in printed.out + printed.err
        assert "Traceback" not in printed.err


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(base, tmp_path, capsys):
    """It is left out, as what is no file."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    pipe(tmp_path / "run")
    assert main(["diff", str(base / "recorded"), str(tmp_path / "run")]) == 0
    assert "rows of log.jsonl" not in capsys.readouterr().out


def test_a_damaged_snapshot_is_not_compared_and_said(base, tmp_path, capsys):
    """The others are."""
    shutil.copytree(base / "plain", tmp_path / "run")
    file = next((tmp_path / "run/snapshot_iter_8").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    status, found = diff(capsys, base / "plain", tmp_path / "run")
    assert (status, found["same"]) == (0, True)
    assert any("the snapshots of iteration 8: " in text for text in found["not_compared"])
    assert any("the snapshots of iterations 16, 24" in text for text in found["compared"])


def test_a_run_that_is_being_written_is_read_as_far_as_it_is_there(base, tmp_path, capsys):
    """The last row and the last block may be incomplete."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    log, ledger = tmp_path / "run/log.jsonl", tmp_path / "run/recorder.bin"
    log.write_bytes(log.read_bytes()[:-20])
    ledger.write_bytes(ledger.read_bytes()[:-20])
    status, found = diff(capsys, base / "recorded", tmp_path / "run")
    assert (status, found["same"]) == (0, True)
    assert any("is incomplete" in text for text in found["not_compared"])


def test_a_snapshot_in_place_of_a_run_is_refused_with_the_run(base, capsys):
    """Two snapshots have no iterations between them."""
    assert main(["diff", str(base / "plain"), str(base / "plain/snapshot_iter_8")]) == 2
    assert f"give its run, such as {base / 'plain'}" in capsys.readouterr().err


def test_names_in_a_record_lead_nowhere_else(base, tmp_path, capsys):
    """A log outside of the run is not read."""
    shutil.copytree(base / "recorded", tmp_path / "run")
    (tmp_path / "other.jsonl").write_text("not a row\n")
    record = json.loads((tmp_path / "run/run.json").read_text())
    record["files"] += ["../other", "../other.jsonl", str(tmp_path / "other"), str(tmp_path / "other.jsonl")]
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    assert Path(tmp_path / "run/../other.jsonl").exists()
    assert main(["diff", str(base / "recorded"), str(tmp_path / "run")]) == 0
