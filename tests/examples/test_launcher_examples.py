"""The examples that hand a script to Ray and to submitit: it trains there as it stands, and ends as alone."""

import json
import os
import subprocess
import sys

import pytest
import torch
from running import EXAMPLES, log, run
from torch import nn

from chainring import serializers
from chainring.nn import Classifier

FOLDER = EXAMPLES / "distributed"


def launch(place, *command):
    """What a launcher has printed, started in a directory."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""}
    variables["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "600"
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of the log of one process."""
    out = tmp_path_factory.mktemp("digits") / "alone"
    run("distributed/train_digits.py", "-e", 2, "-o", out)
    return log(out)


def test_submitit_trains_a_script_as_it_stands(rows, tmp_path):
    """In two tasks on this machine."""
    script = [FOLDER / "train_digits.py", "-e", 2, "--parallel", "ddp", "-o", "result"]
    launch(tmp_path, FOLDER / "launch_submitit.py", "--tasks", 2, *script)
    assert log(tmp_path / "result") == [pytest.approx(row, abs=1e-5) for row in rows]


def test_ray_trains_a_script_as_it_stands_and_is_handed_its_rows_and_snapshots(rows, tmp_path):
    """Two lines more hand them over; the snapshot that Ray keeps is one to continue from."""
    script, run_line = tmp_path / "train_digits.py", "    trainer.run()\n"
    text = (FOLDER / "train_digits.py").read_text()
    assert run_line in text
    reporting = (
        "    from launch_ray import report_to_ray\n"
        '    trainer.extend(report_to_ray, trigger=(1, "epoch"))\n' + run_line + "    report_to_ray(trainer)\n"
    )
    script.write_text(text.replace(run_line, reporting))
    said = launch(tmp_path, FOLDER / "launch_ray.py", "--workers", 2, script, "-e", 2, "--parallel", "ddp", "-o", "result")
    assert log(tmp_path / "result") == [pytest.approx(row, abs=1e-5) for row in rows]
    result = json.loads(said.splitlines()[-1])
    assert {key: result["metrics"][key] for key in rows[-1]} == log(tmp_path / "result")[-1]
    kept, trained = model_of(result["checkpoint"]), model_of(tmp_path / "result" / "mlp.model")
    assert all(map(torch.equal, kept.parameters(), trained.parameters()))


def model_of(path):
    """The model in a snapshot or a file."""
    model = Classifier(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)))
    serializers.load(path, model)
    return model
