"""A run that is stopped anywhere and continued in a fresh process is bit for bit the run that was never stopped."""

import io
import json
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import chainring
import resume_program


def _send(pipe, function, arguments):
    torch.set_num_threads(1)  # as in every test: more of them wait for one another where other tests run beside
    pipe.send(function(*arguments))


@pytest.fixture(scope="module")
def in_fresh_process():
    """Calls a function of the program in a process of its own, which knows nothing of those before it."""
    context = multiprocessing.get_context("forkserver")  # forked from a server that has imported torch and done no more

    def call(function, *arguments):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(sender, function, arguments))
        process.start()
        sender.close()
        try:
            assert receiver.poll(300), "no answer within five minutes"
            return receiver.recv()
        finally:
            process.join(60)
            process.kill()

    with pytest.MonkeyPatch.context() as patch:
        here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, here)))
        yield call


@pytest.fixture(scope="module")
def reference(in_fresh_process, tmp_path_factory, request):
    """The outcome of the uninterrupted run, by the number of accumulated parts."""
    device, make = request.config.getoption("device"), tmp_path_factory.mktemp
    return {k: in_fresh_process(resume_program.uninterrupted, str(make("whole")), k, device) for k in (1, 2)}


@pytest.mark.parametrize(("accumulate", "k"), [(1, k) for k in range(11)] + [(2, k) for k in range(6)])
def test_a_run_stopped_at_any_iteration_continues_bit_for_bit(in_fresh_process, reference, tmp_path, device, accumulate, k):
    """Parameters, Adam's state, log rows, consumed indices, fires and generators equal those of the uninterrupted run."""
    whole = reference[accumulate]
    state, consumed, fired = in_fresh_process(resume_program.first_part, str(tmp_path), k, accumulate, device)
    resumed = in_fresh_process(resume_program.second_part, str(tmp_path), state, accumulate, device)
    resumed["consumed"] = consumed + resumed["consumed"]
    resumed["fired"] = fired + resumed["fired"]
    for part, value in whole.items():
        assert resumed[part] == value, f"{part} differs"


@pytest.mark.parametrize("autoload", [False, True])
@pytest.mark.parametrize("k", range(1, 9))
def test_a_run_killed_at_any_iteration_continues_from_the_disk(in_fresh_process, reference, tmp_path, device, k, autoload):
    """By SIGKILL, one iteration after the snapshot, which is loaded by its path or found by itself; bit for bit."""
    with pytest.raises(EOFError):
        in_fresh_process(resume_program.killed_at, str(tmp_path), k, device)
    start, resumed = in_fresh_process(resume_program.resumed_from_disk, str(tmp_path), k, autoload, device)
    assert start in ((k, k + 1) if autoload else (k,))  # that of k + 1 may have been on the disk already
    consumed, fired = pickle.loads((tmp_path / "so far").read_bytes())[start]
    resumed["consumed"] = consumed + resumed["consumed"]
    resumed["fired"] = fired + resumed["fired"]
    for part, value in reference[1].items():
        assert resumed[part] == value, f"{part} differs"
    for name, rows in zip(("log", "other"), reference[1]["log"], strict=True):
        written = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert written == json.loads((tmp_path / name).read_text())
        assert [{key: value for key, value in row.items() if key != "elapsed_time"} for row in written] == rows


def test_the_program_covers_what_it_is_for(reference):
    """The reference run ends by its stop trigger, after two epochs and with evaluations, rows and fires of every kind."""
    whole = reference[1]
    assert whole["iteration"] >= 9
    assert {name for name, _ in whole["fired"]} == {"fraction", "schedule", "once"}
    assert all(len(log) >= 3 for log in whole["log"])
    assert any("validation/main/loss" in row for row in whole["log"][0])


def test_state_is_plain_values_and_tensors(tmp_path):
    """PyTorch's own loader reads it back without unpickling anything else."""
    trainer, *_ = resume_program.build(str(tmp_path), stop=(3, "iteration"))
    trainer.extend(lambda t: chainring.report({"numpy": np.float32(0.5), "array": np.array(2.0)}), priority=300)
    trainer.run()
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert read["observation/numpy"] == 0.5
    resumed, *_ = resume_program.build(str(tmp_path / "resumed"), stop=(3, "iteration"))
    resumed.extend(lambda t: None, name="<lambda>", priority=300)
    resumed.load_state_dict(read)
    assert resumed.updater.iteration == 3
