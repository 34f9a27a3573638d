"""What the commands of a replay make of a run that was commanded while it trained: they repeat what it was told."""

import json
import os
import shutil

import pytest

import forked
from chainring.cli import main
from chainring.serializers._store import open_store

pytestmark = pytest.mark.usefixtures("forked_scripts")
SCRIPT = """
import os
import sys
import time
import torch
from torch import nn
import chainring
from chainring import iterators, training
from chainring.training import extensions

COMMANDS = os.environ.pop("GIVES_COMMANDS", None)
chainring.deterministic(3)
data = {name: torch.randn(60, 4) for name in ("web", "code")}
mixture = iterators.MixtureIterator(data, 4, weights={"web": 3, "code": 1}, seed=1)
model = nn.Linear(4, 1)


def loss_func(model, x):
    return (model(x)[:, 0] - x.sum(1)).abs().mean()


def command(trainer):
    iteration = trainer.updater.iteration
    time.sleep(0.01)
    if iteration == 7:
        chainring.control(trainer.out, "lr=0.05", "weights=web:1,code:3")
    if iteration > 7 and mixture.weights["code"] > 0.5 and not iteration % 30:
        chainring.control(trainer.out, "stop")


updater = training.StandardUpdater(mixture, torch.optim.SGD(model.parameters(), lr=0.001), model, loss_func=loss_func)
trainer = training.Trainer(updater, (10**6, "iteration"), out=sys.argv[1])
trainer.extend(extensions.LogReport(trigger=(10, "iteration")))
trainer.extend(extensions.Recorder())
trainer.extend(extensions.snapshot(autoload=True, n_retains=1000), trigger=(5, "iteration"))
if COMMANDS:
    trainer.extend(command)
trainer.run()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A script, the directory of its run, after which iteration it was commanded, and after which it was told to stop."""
    root = tmp_path_factory.mktemp("commanded")
    script, out = root / "train.py", root / "result"
    script.write_text(SCRIPT)
    forked.run([str(script), str(out)], env={**os.environ, "GIVES_COMMANDS": "1"})
    done = json.loads((out / "run.json").read_text())["commands"]
    assert [entry["command"] for entry in done[:3]] == ["lr=0.05", "weights=web:1,code:3", "stop"]
    return str(script), out, done[0]["iteration"], done[2]["iteration"]


def said(capsys, *arguments, status=0):
    """What a command prints as JSON."""
    assert main([arguments[0], "--json", *map(str, arguments[1:])]) == status
    return json.loads(capsys.readouterr().out)


def test_bisect_looks_at_the_iterations_that_the_run_has_made_and_at_no_others(run, capsys):
    """What the commands have changed is there; after a stop that was commanded the replay does not go on."""
    script, out, at, end = run
    answer = said(capsys, "bisect", out, "--bad", "mixture/code > 0.7", script)
    assert (answer["iteration"], answer["value"], answer["same"]) == (at + 1, 0.75, True)
    assert sum(name.startswith("code") for name in answer["indices"]) == 3
    answer = said(capsys, "bisect", out, "--bad", "mixture/code > 0.9", script, status=1)
    assert (answer["looked_at"], answer["same"]) == ([1, end], True)
    answer = said(capsys, "bisect", out, "--bad", "main/loss > 1e9", script, status=1)
    assert (answer["looked_at"], answer["known_to"], answer["replays"]) == ([1, end], end, 0)


def test_batch_tells_the_examples_and_losses_on_both_sides_of_a_command(run, capsys):
    """Of the sources in their new shares."""
    script, out, at, _ = run
    for iteration, share in ((at, 1), (at + 1, 3)):
        found = said(capsys, "batch", out, iteration, "--losses", script)
        assert sum(name.startswith("code") for name in found["indices"]) == share
        assert (len(found["losses"]["losses"]), found["losses"]["is_mean"], found["same"]) == (4, True, True)


def test_thin_tries_a_snapshot_that_a_replay_makes_again_over_the_commands(run, tmp_path, capsys):
    """Every other script makes another state, and then nothing goes."""
    script, out, at, end = run
    shutil.copytree(out, tmp_path / "result", symlinks=True)
    out = tmp_path / "result"
    for name in open_store(out).names():
        if 5 < int(name.rpartition("_")[2]) <= at:  # so that the first that goes is after the commands
            shutil.rmtree(out / name)
    other = tmp_path / "other.py"
    other.write_text(SCRIPT.replace("lr=0.001", "lr=0.002"))
    interval = ("--every", "1000 iteration", "--script")
    assert main(["thin", str(out), *interval, str(other)]) == 1
    assert "nothing has gone: the replay differs" in capsys.readouterr().err
    assert said(capsys, "thin", out, *interval, script)["thinned"][0] == f"snapshot_iter_{at // 5 * 5 + 5}"
    assert said(capsys, "replay", out, "--to", end - end % 5 - 5, script)["same"] is True
