"""chainring replay, batch and bisect: any iteration of a run, its examples, and where it went wrong."""

import fcntl
import json
import math
import os
import pty
import re
import shutil
import struct
import sys
import termios
from pathlib import Path

import pytest
import torch

import forked
from chainring import serializers
from chainring.cli import main
from chainring.serializers._store import find_snapshot

pytestmark = pytest.mark.usefixtures("forked_scripts")
SCRIPT = """
import argparse
import time
import torch
from torch import nn
import chainring
from chainring import iterators, training
from chainring.training import extensions

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="result")
parser.add_argument("--poison", type=int)
parser.add_argument("--value", type=float, default=1e3)
parser.add_argument("--length", type=int, default=120)
parser.add_argument("--policy")
parser.add_argument("--note")
parser.add_argument("--recorded", action="store_true")
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=0.02)
arguments = parser.parse_args()
chainring.deterministic(3)


class Data(chainring.datasets.DatasetMixin):
    def __len__(self):
        return 400

    def get_example(self, i):
        time.sleep(arguments.seconds)
        return torch.randn(4) + i / 400 * (arguments.value if i == arguments.poison else 1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 1), nn.Dropout(0.3)

    def forward(self, x):
        loss = nn.functional.smooth_l1_loss(self.layer(self.dropout(x)), x[:, :1])
        chainring.report({"loss": loss}, self)
        return loss


model = Net()
data = iterators.SerialIterator(Data(), 4, seed=1)
updater = training.StandardUpdater(data, torch.optim.SGD(model.parameters(), lr=arguments.lr), model)
trainer = training.Trainer(updater, (arguments.length, "iteration"), out=arguments.out)
trainer.extend(extensions.LogReport(trigger=(20, "iteration")))
trainer.extend(extensions.snapshot(autoload=True), trigger=(25, "iteration"))
trainer.extend(lambda trainer: chainring.report({"count": trainer.updater.iteration}), "count", (10, "iteration"))
if arguments.policy:
    trainer.extend(extensions.FailOnNonNumber(arguments.policy))
if arguments.recorded:
    trainer.extend(extensions.Recorder())
trainer.run()
"""
KILLED = "trainer.extend(lambda trainer: __import__('signal').raise_signal(9), 'killed', (60, 'iteration'))\ntrainer.run()"
POISON = 77  # of which the batch is that of iteration 8 in this order


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A script, and runs of it: one, one with an example that is too large, and one in which it is not a number."""
    root = tmp_path_factory.mktemp("runs")
    (root / "train.py").write_text(SCRIPT)
    poisoned = ["--poison", str(POISON)]
    runs = {
        "sound": [],
        "large": poisoned,
        "recorded": [*poisoned, "--recorded"],
        "nan": [*poisoned, "--value", "nan", "--policy", "stop"],
    }
    for name, arguments in runs.items():
        forked.run([str(root / "train.py"), "--out", str(root / name), *arguments])
    return root


def content(directory):
    """Every file of a directory, with its bytes and when it was written."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def state_in(snapshot):
    """The parameters in a snapshot."""
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 1)})
    serializers.load(snapshot, model)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def test_replay_saves_the_state_of_an_iteration_without_a_snapshot(place, tmp_path, capsys):
    """It is that from which the run came to its next snapshot; the arguments are those of the run, which is only read."""
    out, script = place / "large", str(place / "train.py")
    before = content(out)
    assert main(["replay", str(out), "--to", "49", "--save", str(tmp_path / "state"), script]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("iteration 49, replayed from snapshot_iter_25: nothing of it is recorded")
    assert find_snapshot(tmp_path / "state").read_manifest().iteration == 49
    later = tmp_path / "later"
    later.mkdir()
    shutil.copytree(tmp_path / "state", later / "snapshot_iter_49")
    shutil.copy(out / "run.json", later)
    assert main(["replay", str(later), "--to", "50", "--save", str(tmp_path / "next"), script]) == 0
    assert capsys.readouterr().out.startswith("iteration 50, replayed from snapshot_iter_49")
    assert state_in(tmp_path / "next") == state_in(out / "snapshot_iter_50")
    assert content(out) == before


def test_replay_prints_json_and_takes_a_snapshot_as_it_is(place, capsys):
    """No iteration is computed where one was saved."""
    assert main(["replay", "--json", str(place / "sound"), "--to", "75", str(place / "train.py")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iteration"], found["from"], found["replayed"]) == (75, "snapshot_iter_75", 0)
    assert (found["same"], found["saved"], list(found["observation"])) == (None, None, ["main/loss"])


def test_each_part_of_a_run_is_replayed_with_the_arguments_that_it_had(place, tmp_path, capsys):
    """Those of the start that computed the iteration; where a replay crosses a start, it says so."""
    out, script = tmp_path / "result", str(place / "train.py")
    for length in ("60", "120"):
        forked.run([script, "--out", str(out), "--length", length])
    assert main(["replay", str(out), "--to", "110", script]) == 0
    assert capsys.readouterr().out.startswith("iteration 110, replayed from snapshot_iter_100")
    assert main(["replay", str(out), "--to", "60", script]) == 0
    assert "started again" not in capsys.readouterr().out
    shutil.rmtree(out / "snapshot_iter_60")
    assert main(["replay", str(out), "--to", "70", script]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("iteration 70, replayed from snapshot_iter_50")
    assert lines[1] == "The run was started again in between, at iteration 60, with other settings or arguments"


RESUMED = """if arguments.note:
    chainring.serializers.load(arguments.note, trainer)
trainer.run()
"""


def run_in_parts(tmp_path):
    """A run of 30 iterations that was continued to 60 by an argument; return its script and directory."""
    script, out = tmp_path / "resumed.py", tmp_path / "result"
    script.write_text(SCRIPT.replace(", autoload=True", "").removesuffix("trainer.run()\n") + RESUMED)
    forked.run([str(script), "--out", str(out), "--length", "30"])
    forked.run([str(script), "--out", str(out), "--length", "60", "--note", str(out / "snapshot_iter_25")])
    return str(script), out


def test_a_script_that_loads_a_snapshot_itself_is_searched_from_the_beginning(tmp_path, capsys):
    """The arguments of the last start would load a snapshot after the iteration that is sought."""
    script, out = run_in_parts(tmp_path)
    assert main(["bisect", "--json", str(out), "--bad", "count == 10", script]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["iteration"], answer["assumed"], answer["looked_at"]) == (10, 0, [1, 10])
    shutil.rmtree(out / "snapshot_iter_25")  # which the arguments name
    assert main(["replay", str(out), "--to", "28", script]) == 0
    assert capsys.readouterr().out.startswith("iteration 28, replayed from the beginning")


def test_bisect_says_which_iterations_it_cannot_reach(tmp_path, capsys):
    """Those before a state that the script loads, which lies elsewhere: the remedy are other arguments."""
    script, out = run_in_parts(tmp_path)
    shutil.move(out / "snapshot_iter_25", tmp_path / "moved")
    arguments = [script, "--length", "60", "--note", str(tmp_path / "moved")]
    assert main(["bisect", str(out), "--bad", "count >= 10", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "iteration 30 is the first with count >= 10: it is 30.0"
    assert (
        "It was not looked for in the 25 iterations before 26: the script loads a state itself; give the arguments with "
        "which it began"
    ) in lines
    assert not any("--monotone" in line for line in lines)


def test_a_script_of_a_package_is_replayed_as_python_dash_m_runs_it(tmp_path, capsys):
    """It imports its package from anywhere, and relative to itself; what lies beside it as well."""
    package = tmp_path / "grünes_paket" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package.parent / "settings.py").write_text("SEED = 3\n")
    (package / "beside.py").touch()
    imports = "import beside\nfrom ..settings import SEED\nfrom grünes_paket.settings import SEED\n"
    script, out = package / "train.py", tmp_path / "result"
    script.write_text(SCRIPT)
    forked.run([str(script), "--out", str(out), "--length", "20"])
    script.write_text(imports + SCRIPT)
    assert main(["replay", str(out), "--to", "7", str(script)]) == 0
    assert capsys.readouterr().out.startswith("iteration 7, replayed from the beginning")


def test_batch_prints_the_indices_of_the_examples(place, capsys):
    """On the first line; those of the order of the data."""
    assert main(["batch", str(place / "sound"), "26", str(place / "train.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    indices = list(map(int, lines[0].split()))
    assert len(indices) == 4
    assert lines[1].startswith("iteration 26, replayed from snapshot_iter_25")
    assert main(["batch", "--json", str(place / "sound"), "1", str(place / "train.py")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iteration"], found["from"], len(found["indices"])) == (1, None, 4)
    assert found["batches"] == {"main": found["indices"]}
    assert not set(found["indices"]) & set(indices)


def test_batch_prints_the_loss_of_each_example_the_largest_first(place, capsys):
    """It is on top that made the loss of the batch large, and the run is only read."""
    run, script = str(place / "recorded"), str(place / "train.py")
    before = content(run)
    assert main(["batch", run, "8", "--losses", script]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(": the same as the recorder says in 8 iterations")
    header, *table, means = lines[-6:]
    assert [lines[-7], header] == ["the loss of each in evaluation mode, before the update:", "  example    row  loss"]
    names, rows, losses = zip(*map(str.split, table), strict=True)
    assert names == tuple(lines[0].split()[int(row)] for row in rows)
    assert names[0] == str(POISON)
    losses = list(map(float, losses))
    assert losses == sorted(losses, reverse=True)
    mean, batch = map(float, re.fullmatch(r"mean: (\S+); of the batch at once: (\S+)", means).groups())
    assert mean == pytest.approx(batch, rel=1e-5) == pytest.approx(sum(losses) / 4, rel=1e-4)
    assert main(["batch", "--json", "--losses", run, "8", script]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["indices"][int(rows[0])] == POISON
    assert [found["losses"]["losses"][int(row)] for row in rows] == pytest.approx(losses, rel=1e-4)
    assert (found["losses"]["is_mean"], found["same"]) == (True, True)
    assert content(run) == before


SUMMED = """

def loss_func(model, x):
    return model.layer(x)[:, 0].pow(2).sum()


model = Net()
"""


def test_batch_says_that_a_loss_is_not_the_mean_of_the_examples_and_what_has_none(tmp_path, capsys):
    """A sum; and an updater with an update of its own, whose examples are printed without."""
    script, out = tmp_path / "train.py", str(tmp_path / "result")
    program = SCRIPT.replace("\nmodel = Net()\n", SUMMED).replace(
        "lr=arguments.lr), model)", "lr=1e-6), model, loss_func=loss_func)"
    )
    script.write_text(program)
    forked.run([str(script), "--out", out, "--length", "10"])
    assert main(["batch", out, "4", "--losses", str(script)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("The loss of this batch is not the mean of its examples")
    own = "class Twice(training.StandardUpdater):\n    def update_core(self):\n        super().update_core()\n\n\nmodel"
    script.write_text(program.replace("\nmodel", f"\n{own}", 1).replace("training.StandardUpdater(data", "Twice(data"))
    assert main(["batch", out, "4", "--losses", str(script)]) == 2
    assert "Twice has its own update_core, so that the loss of one example is not known" in capsys.readouterr().err
    assert main(["batch", out, "4", str(script)]) == 0


def test_batch_prints_the_source_and_the_index_of_each_example_of_a_mixture(tmp_path, capsys):
    """And a replay of it, with weights that change, is the same as the recorder says."""
    script, out = tmp_path / "train.py", tmp_path / "result"
    serial = "data = iterators.SerialIterator(Data(), 4, seed=1)"
    assert serial in SCRIPT
    weights = "weights=lambda count: {'a': 3, 'b': 1} if count < 90 else {'a': 1, 'b': 1}"
    script.write_text(
        SCRIPT.replace(serial, f"data = iterators.MixtureIterator({{'a': Data(), 'b': Data()}}, 4, {weights}, seed=1)")
    )
    forked.run([str(script), "--out", str(out), "--length", "40", "--recorded"])
    for iteration, shares in ((2, {"a": 3, "b": 1}), (38, {"a": 2, "b": 2})):
        assert main(["batch", str(out), str(iteration), str(script)]) == 0
        lines = capsys.readouterr().out.splitlines()
        names = re.findall(r"(?:^| )([ab])\[\d+\](?= |$)", lines[0])
        assert (len(lines[0].split()), {name: names.count(name) for name in "ab"}) == (4, shares)
        assert f"the same as the recorder says in {iteration - 25 if iteration > 25 else iteration} iteration" in lines[1]


def test_bisect_names_the_iteration_and_the_batch_of_an_example_that_is_too_large(place, capsys):
    """The value was as before some iterations later; only the mean of its interval, and no snapshot, shows it."""
    arguments = ["--bad", "main/loss > 20", str(place / "train.py")]
    assert main(["bisect", "--json", str(place / "large"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert POISON in found["indices"]
    assert found["value"] > 20
    assert (found["not_finite"], found["replays"], found["assumed"]) == (None, 1, 0)
    assert found["replays"] <= math.log2(120) + 1
    assert main(["bisect", str(place / "sound"), *arguments]) == 1
    assert capsys.readouterr().out.startswith("never: main/loss > 20 does not hold in iterations 1 to 120\n")


def test_bisect_names_the_parameters_that_were_first_not_finite(place, capsys):
    """The run has ended with the error before it wrote anything; every condition holds for what is not a number."""
    assert main(["bisect", str(place / "nan"), "--bad", "main/loss == 1e9", str(place / "train.py")]) == 0
    lines = capsys.readouterr().out.splitlines()
    iteration = lines[0].split()[1]
    assert lines[0] == f"iteration {iteration} is the first with main/loss == 1e+09: it is nan"
    assert str(POISON) in lines[1].split()
    assert lines[2] == f"Parameters were first not finite after iteration {iteration}: main/layer/weight, main/layer/bias"


def test_bisect_looks_after_the_last_good_snapshot_alone_where_that_is_enough(place, capsys):
    """With --monotone; it says which iterations it has not looked at. The mean of an interval shows that it has come."""
    shown = ["--monotone", "--bad", "main/loss > 5", str(place / "train.py")]
    assert main(["bisect", "--json", str(place / "large"), *shown]) == 0
    found = json.loads(capsys.readouterr().out)
    assert POISON in found["indices"]
    assert found["replays"] == 1
    assert found["from"] == (f"snapshot_iter_{found['assumed']}" if found["assumed"] else None)
    assert found["assumed"] == (found["iteration"] - 1) // 25 * 25
    assert main(["bisect", str(place / "large"), "--monotone", "--bad", "main/loss > 20", str(place / "train.py")]) == 1
    assert capsys.readouterr().out.startswith("not found: main/loss > 20 does not hold in iterations 101 to 120\n")


def test_bisect_finds_what_an_extension_reports(place, capsys):
    """It is not there in every iteration."""
    assert main(["bisect", "--json", str(place / "sound"), "--bad", "count >= 30", str(place / "train.py")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["iteration"], found["value"], len(found["indices"])) == (30, 30.0, 4)


def test_bisect_computes_nothing_again_that_is_recorded(place, capsys):
    """It begins with the snapshot before the iteration, which the recorder knows, and nothing is replayed before it."""
    run, script = str(place / "recorded"), str(place / "train.py")
    assert main(["bisect", "--json", run, "--bad", "main/loss > 20", script]) == 0
    found = json.loads(capsys.readouterr().out)
    assert POISON in found["indices"]
    before = (found["iteration"] - 1) // 25 * 25
    assert (found["from"], found["replays"], found["same"]) == (f"snapshot_iter_{before}" if before else None, 1, True)
    assert main(["bisect", run, "--to", "120", "--bad", "main/loss > 1e9", script]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "never: main/loss > 1e+09 does not hold in iterations 1 to 120",
        "All of them are recorded, and nothing was replayed",
    ]


POSTPROCESSED = SCRIPT.replace(
    'LogReport(trigger=(20, "iteration"))',
    'LogReport(trigger=(1, "iteration"), postprocess=lambda row: row.update(CHANGE))',
)


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ('{"main/loss": 0.0}', "main/loss > 20"),
        ('{"main/loss": row["main/loss"] * 1000}', "main/loss > 20"),
        ('{"main/loss": -row["main/loss"]}', "main/loss > 20"),
        ('{"count": 99}', "count >= 30"),
        ('{"main/loss": float("nan")}', "main/loss == inf"),
        ('{"count": None}', "count >= 30"),
    ],
)
def test_bisect_looks_at_what_was_reported_and_not_at_what_rows_were_made_into(tmp_path, capsys, change, bad):
    """A LogReport whose postprocess changes its rows tells nothing; the iterations are replayed."""
    script = tmp_path / "train.py"
    script.write_text(POSTPROCESSED.replace("CHANGE", change))
    arguments = ["--poison", str(POISON), "--length", "40"]
    forked.run([str(script), "--out", str(tmp_path / "result"), *arguments])
    status = main(["bisect", "--json", str(tmp_path / "result"), "--bad", bad, str(script)])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["known_to"]) == (1 if bad == "main/loss == inf" else 0, 40)
    if status == 0:
        assert POISON in found["indices"] if "loss" in bad else found["iteration"] == 30


WRITING = SCRIPT.replace(
    "trainer.run()",
    """
import sqlite3, subprocess
from pathlib import Path
import numpy as np
from safetensors.torch import save_file


def write(trainer):
    for place in PLACES:
        torch.save(model.state_dict(), f"{place}/best.pt")
        save_file(model.state_dict(), f"{place}/best.safetensors")
        np.save(f"{place}/best.npy", np.random.rand(3))
        Path(place, "notes").write_text("other")
        with sqlite3.connect(f"{place}/best.sqlite") as database:
            database.execute("create table if not exists t (x)")
            database.execute("insert into t values (random())")
        subprocess.run(["sh", "-c", f"date +%N > {place}/dated; mkdir -p {place}/plots; echo > {place}/plots/a"], check=True)
        Path(place, "gone").unlink(missing_ok=True)
        torch.save(model, f"{place}/new")


trainer.extend(write, trigger=(10, "iteration"))
trainer.run()
""",
)


@pytest.mark.parametrize(
    ("out", "spelled"),
    [
        ("result", ["result"]),
        ("./result", ["./result"]),
        ("runs/nested/first", ["runs/nested/first", "./runs/nested/../nested/first"]),
        ("runs/first", ["runs/first"]),
        ("{root}/result", [None]),
        ("{root}/elsewhere/result", [None]),
        ("../beside", [None]),
    ],
)
def test_what_a_script_writes_into_the_run_goes_elsewhere_in_a_replay(tmp_path, capsys, monkeypatch, out, spelled):
    """By torch, safetensors, NumPy, sqlite, a subprocess: under the name of the directory or under that of its ``--out``."""
    root = tmp_path / "work"
    (root / "runs").mkdir(parents=True)
    monkeypatch.chdir(root)
    out = out.format(root=root)
    (root / "train.py").write_text(WRITING.replace("PLACES", repr(spelled).replace("None", "arguments.out")))
    assert forked.run(["train.py", "--out", out, "--length", "30"]).returncode == 0
    Path(out, "gone").touch()
    Path(out, "new").unlink()
    before = content(tmp_path)
    assert main(["replay", out, "--to", "21", "train.py"]) == 0
    assert capsys.readouterr().out.startswith("iteration 21, replayed from")
    assert content(tmp_path) == before
    assert {path.name for path in root.iterdir()} <= {"train.py", "result", "runs", "elsewhere"}


def test_a_replay_that_goes_another_way_than_was_recorded_fails_with_1(place, tmp_path, capsys):
    """With another learning rate; its state is not kept."""
    run, script = str(place / "recorded"), str(place / "train.py")
    assert main(["replay", run, "--to", "20", script]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": the same as the recorder says in 20 iterations")
    assert not any("Not checked" in line for line in lines)
    other = [script, "--recorded", "--lr", "0.03", "--poison", str(POISON)]
    assert main(["replay", run, "--to", "20", "--save", str(tmp_path / "state"), *other]) == 1
    assert "differs from the run: the loss main/loss of iteration 2 is not the one" in capsys.readouterr().out
    assert not (tmp_path / "state").exists()
    assert main(["batch", "--json", run, "3", *other]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["difference"].startswith("the replay differs from the run")) == (False, True)


EDITED = """def clip(optimizer, *_):
    if updater.iteration == 19:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


updater.get_optimizer("main").register_step_pre_hook(clip)
trainer.run()
"""


def test_the_update_of_the_last_iteration_is_checked_by_the_loss_of_the_one_after_it(place, tmp_path, capsys):
    """A loss is recorded before its update, which is another in iteration 20 alone; where the recording ends, it says so."""
    run, script = str(place / "recorded"), tmp_path / "edited.py"
    script.write_text(SCRIPT.removesuffix("trainer.run()\n") + EDITED)
    for last, differs in ((19, 0), (20, 1)):
        save = ["--save", str(tmp_path / f"state {last}")]
        assert main(["replay", "--json", run, "--to", str(last), *save, str(script)]) == differs
        found = json.loads(capsys.readouterr().out)
        assert (found["iteration"], found["replayed"], found["same"], found["notes"]) == (last, last, not differs, [])
    assert found["differs_at"] == 21
    assert find_snapshot(tmp_path / "state 19").read_manifest().iteration == 19
    script.write_text(SCRIPT)
    shutil.copytree(run, tmp_path / "last", ignore=shutil.ignore_patterns("snapshot_iter_1[02]?"))
    assert main(["replay", str(tmp_path / "last"), "--to", "120", str(script)]) == 0
    assert "Not checked: the loss of iteration 120 is the recorded one, and what its update" in capsys.readouterr().out


def test_a_script_that_is_killed_is_named_with_the_signal(place, tmp_path, capsys):
    """It may have printed nothing."""
    script = tmp_path / "killed.py"
    script.write_text(SCRIPT.replace("trainer.run()", KILLED))
    assert main(["replay", str(place / "sound"), "--to", "70", str(script)]) == 2
    assert "the script failed in the replay; its process was ended by signal 9 (Killed)" in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_replay_of_more_than_three_seconds_shows_a_bar_on_a_terminal_alone(place, monkeypatch, is_terminal):
    """On the output of errors."""
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with open(theirs, "w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        command = ["replay", str(place / "sound"), "--to", "80", str(place / "train.py"), "--seconds", "0.2"]
        assert main(command) == 0
        errors.write("end")
        errors.flush()
        shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert ("| 5/5 [" in shown) == is_terminal
    assert is_terminal or shown == "end"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["replay", "{run}", "--to", "999", "{script}"], "ends after iteration 120, before 999"),
        (["replay", "{run}", "--to", "-1", "{script}"], "an iteration is a whole number of 0 or more, got '-1'"),
        (["replay", "{run}", "--to", "5", "{run}/nothing.py"], "there is no script"),
        (
            ["replay", "{run}", "--to", "5", "--save", "{run}/state", "{script}"],
            "where nothing is changed; give another directory",
        ),
        (["replay", "{run}", "--to", "5", "--save", "{script}", "{script}"], "is there already"),
        (["replay", "{run}", "--to", "5", "--save", "{link}", "{script}"], "is there already; give a new directory"),
        (["replay", "nowhere", "--to", "5", "{script}"], "there is no directory nowhere"),
        (["batch", "{run}", "0", "{script}"], "the first iteration is 1"),
        (["bisect", "{run}", "--bad", "main/loss", "{script}"], 'KEY <, <=, >, >= or == NUMBER, such as "main/loss > 10"'),
        (["bisect", "{run}", "--bad", "main/loss >> 3", "{script}"], "got 'main/loss >> 3'"),
        (["bisect", "{run}", "--bad", "main/loss => 3", "{script}"], "got 'main/loss => 3'"),
        (["bisect", "{run}", "--bad", "main/loss > > 3", "{script}"], "got 'main/loss > > 3'"),
        (["bisect", "{run}", "--to", "0", "--bad", "main/loss > 3", "{script}"], "and the first is 1"),
        (["bisect", "{run}", "--bad", "main/loss > much", "{script}"], "got 'main/loss > much'"),
        (
            ["bisect", "{run}", "--bad", "mian/loss > 3", "{script}"],
            "has mian/loss; did you mean main/loss? it is looked for in a replay ... nothing has reported 'mian/loss'; "
            "reported: main/loss",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_2(place, capsys, arguments, text):
    """And says why; a link to an empty directory is not removed for it."""
    (place / "empty").mkdir(exist_ok=True)
    if not (link := place / "link").is_symlink():
        link.symlink_to(place / "empty")
    given = [each.format(run=place / "sound", script=place / "train.py", link=link) for each in arguments]
    try:
        status = main(given)
    except SystemExit as error:
        status = error.code
    assert status == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert all(words in printed for words in text.split(" ... "))
