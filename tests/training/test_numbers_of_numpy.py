"""A number of NumPy is taken wherever one of Python is, and is one of Python from then on; a truth value is none."""

import json
import re

import numpy as np
import pytest
import torch

import chainring
from chainring import iterators, training
from chainring.nn import Classifier
from chainring.parallel import create_communicator
from chainring.serializers import save_npz
from chainring.training import extensions, triggers, updaters

EXAMPLES = [(torch.linspace(0, 1 + i % 3, 4), i % 3) for i in range(12)]


def train(out, real, whole):
    """The trainer of a run in which every number that a script may set is made by these."""
    chainring.deterministic(whole(3))
    model = Classifier(torch.nn.Linear(4, 3))
    updater = training.StandardUpdater(
        iterators.SerialIterator(EXAMPLES, whole(2), seed=whole(1)),
        torch.optim.SGD(model.parameters(), 0.1),
        model,
        accumulate=whole(2),
        callbacks=updaters.UpdateCallbacks(update_on_start=updaters.clip_grad_norm(real(0.5), real(2))),
    )
    stop = triggers.EarlyStoppingTrigger(
        (real(0.5), "epoch"),
        "main/loss",
        whole(9),
        min_delta=real(0.25),
        threshold=real(-1),
        max_trigger=(whole(4), "epoch"),
    )
    trainer = training.Trainer(updater, stop, out=str(out), config={"scale": real(0.5)})
    evaluated = iterators.SerialIterator(EXAMPLES, 4, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(evaluated, model, limit=whole(2)), priority=whole(250))
    trainer.extend(extensions.ExponentialMovingAverage(model, real(0.75), start=whole(2)))
    trainer.extend(extensions.RunningAverage("main/loss", decay=real(0.5)))
    trainer.extend(
        extensions.ExponentialShift("lr", real(0.5)), trigger=triggers.ManualScheduleTrigger([whole(3)], "iteration")
    )
    trainer.extend(extensions.Timer(real(1000), real(0.5)))
    trainer.extend(extensions.LogReport(trigger=(real(0.5), "epoch")))
    trainer.extend(extensions.ProgressBar((whole(4), "epoch"), whole(100), whole(30)))
    trainer.extend(extensions.snapshot(n_retains=whole(2)), trigger=(real(1), "epoch"))
    trainer.run()
    return trainer


@pytest.mark.parametrize(("real", "whole"), [(np.float32, np.int64), (np.float64, np.int16), (np.float16, np.uint16)])
def test_a_run_of_numbers_of_numpy_is_that_of_pythons(tmp_path, real, whole):
    """Its record, the state that is saved, with the settings and the log in it, and what its trigger is called."""
    found = []
    for name, of_run in (("python", (float, int)), ("numpy", (real, whole))):
        trainer = train(tmp_path / name, *of_run)
        record = json.loads((tmp_path / name / "run.json").read_text())
        save_npz(tmp_path / f"{name}.npz", trainer)
        with np.load(tmp_path / f"{name}.npz") as file:
            state = re.sub(r'"elapsed_time": [^,}]+', "", file["chainring.json"].tobytes().decode())
        found.append(([record[key] for key in ("config", "plan", "optimizers")], state, str(trainer.stop_trigger)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda number: training.extension.make_extension(priority=number),
        lambda number: updaters.clip_grad_value(number),
        lambda number: updaters.clip_grad_norm(1, number),
        lambda number: extensions.Timer(margin=number),
        lambda number: extensions.Throughput(peak_flops=number),
        lambda number: extensions.RunningAverage("main/loss", decay=number / 2 if number.dtype.kind == "f" else number),
        lambda number: triggers.EarlyStoppingTrigger(min_delta=number),
        lambda number: triggers.EarlyStoppingTrigger(threshold=number),
        lambda number: iterators.MultiprocessIterator(EXAMPLES, 2, n_processes=1, dataset_timeout=number),
        lambda number: extensions.ProgressBar((number, "epoch")),
        lambda number: create_communicator("cpu", timeout=number),
    ],
)
def test_a_number_of_numpy_is_accepted_and_a_truth_value_is_not(make):
    """In every setting that is a number."""
    make(np.float32(1))
    with pytest.raises((TypeError, ValueError)):
        make(np.True_)
