"""The examples of several processes, started by torchrun or as it starts them, end as in one process."""

import ast
import difflib
import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch import nn

import forked
from chainring import serializers
from chainring.nn import Classifier

EXAMPLES = Path(__file__).parent.parent / "examples"
DIGITS = EXAMPLES / "distributed" / "train_digits.py"
LANGUAGE_MODEL = EXAMPLES / "distributed" / "train_language_model.py"
SMALL = ["-e", 3, "--sentences", 66, "-b", 11, "--accumulate", 2]  # 22 sentences an update, odd parts
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"]


def alone(command, environment):
    """One process runs a script."""
    return [forked.run(command, env=environment)]


def by_torchrun(command, environment):
    """Two processes run it, which torchrun starts."""
    command = [sys.executable, *TORCHRUN, *command]
    return [subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)]


def two(command, environment):
    """Two processes run it, which find in the environment what torchrun would put there."""
    return on_ranks(2, command, environment)


def on_ranks(number, command, environment):
    """As many processes as are asked for run it."""
    ranks = forked.started(number, lambda rank: forked.run(command, env={**environment, **rank}, timeout=600))
    return [rank.result() for rank in ranks]


def losses_of(run, script, out, *arguments):
    """Runs an example and returns the losses and accuracies in the rows of its log."""
    for done in run([str(script), "-o", str(out), *map(str, arguments)], ENVIRONMENT):
        assert done.returncode == 0, done.stderr
    rows = json.loads((out / "log").read_text())
    return [{key: value for key, value in row.items() if key.endswith(("/loss", "/accuracy"))} for row in rows]


def code_of(path):
    """The lines of a script without its docstring."""
    lines = path.read_text().splitlines()
    docstring = ast.parse(path.read_text()).body[0]
    return lines[docstring.end_lineno :]


@pytest.fixture(scope="module")
def digits_alone(tmp_path_factory):
    return losses_of(alone, DIGITS, tmp_path_factory.mktemp("digits") / "alone", "-e", 1)


@pytest.mark.parametrize(("parallel", "run"), [("none", by_torchrun), ("fsdp", two)])
def test_digits_end_with_two_processes_as_with_one(digits_alone, tmp_path, parallel, run):
    """Losses and accuracies of training and validation agree to 1e-5; in the end the model is one plain file."""
    assert len(digits_alone) == 1
    assert len(digits_alone[0]) == 4
    losses = losses_of(run, DIGITS, tmp_path / "two", "-e", 1, "--parallel", parallel)
    assert losses == [pytest.approx(row, abs=1e-5) for row in digits_alone]
    model = Classifier(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)))
    serializers.load(tmp_path / "two" / "mlp.model", model)


@pytest.fixture(scope="module")
def language_model_alone(tmp_path_factory):
    return losses_of(alone, LANGUAGE_MODEL, tmp_path_factory.mktemp("language") / "alone", *SMALL)


@pytest.mark.parametrize("arguments", [("--parallel", "ddp"), ("--tensor", 2, "--checkpoint")])
def test_the_language_model_ends_with_two_processes_as_with_one(language_model_alone, tmp_path, arguments):
    """Its loss is a mean over tokens, of which each process and each part of an update has another number.

    It learns: in nine updates the perplexity is below that of a guess, the number of words.
    """
    losses = losses_of(two, LANGUAGE_MODEL, tmp_path / "two", *SMALL, *arguments)
    assert losses == [pytest.approx(row, abs=1e-4) for row in language_model_alone]
    assert math.exp(losses[-1]["validation/main/loss"]) < 70


def test_the_language_model_is_killed_on_a_mesh_and_continues_on_another_as_in_one_process(language_model_alone, tmp_path):
    """Four processes, two by two, with shards along the data; then two that compute the model together, without shards.

    The four are killed when they have printed the row of the second of three epochs.
    """
    command = [str(LANGUAGE_MODEL), "-o", str(tmp_path), *map(str, SMALL), "--tensor", "2"]
    start = lambda place: forked.Forked([*command, "--parallel", "fsdp"], env={**ENVIRONMENT, **place})  # noqa: E731
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank.result()) for rank in forked.started(4, start)]
        assert any(line.startswith("2 ") for line in iter(ranks[0].stdout.readline, "")), ranks[0].stderr.read()
        for rank in ranks:
            rank.kill()
    assert [*tmp_path.glob("snapshot_iter_*")]
    losses = losses_of(two, LANGUAGE_MODEL, tmp_path, *SMALL, "--tensor", 2)
    assert losses == [pytest.approx(row, abs=1e-4) for row in language_model_alone]


def test_the_script_for_several_processes_differs_in_five_lines():
    """From that for one, docstrings aside, in the code as it is written."""
    alone, several = code_of(EXAMPLES / "mnist" / "train_mnist.py"), code_of(DIGITS)
    changes = [line for line in difflib.ndiff(alone, several) if line[0] in "+-"]
    assert 0 < len([line for line in changes if line[0] == "+"]) <= 5
    assert len([line for line in changes if line[0] == "-"]) <= 5


def test_the_language_model_mentions_several_processes_in_seven_lines():
    """Of its code."""
    found = [line for line in code_of(LANGUAGE_MODEL) if any(word in line for word in ("comm", "distribute", "parallel"))]
    assert len(found) <= 7
