"""``device="auto"``: the accelerator if there is one, the rank's own under ranks, else the host.

The meta device stands in for an accelerator, in processes where torch's questions about accelerators are answered so.
"""

import json

import pytest
import torch
from torch import nn

import forked
from chainring import converters, training
from rank_pair import on_two_ranks

WITH_ACCELERATORS = """
import types
import torch
from torch import nn
from chainring import converters, iterators, parallel, training
from chainring.training import extensions
torch.meta = types.SimpleNamespace(is_initialized=lambda: False)  # the module of such an accelerator, unused
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: torch.device("meta")
torch.accelerator.device_count = lambda: 3
torch.accelerator.current_device_index = lambda: 1
torch.accelerator.set_device_index = lambda index: None
def make_updater(**settings):
    model = nn.Linear(2, 1)
    return training.StandardUpdater(None, torch.optim.SGD(model.parameters()), model, **settings)
class OnSecond(parallel.Communicator):
    rank, size, device = 1, 2, torch.device("meta", 2)
"""
WITHOUT_ACCELERATOR = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def printed(program):
    """What a program prints on a machine with three accelerators, of which the second is current."""
    done = forked.run(["-c", WITH_ACCELERATORS + program])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_the_current_accelerator():
    """Wherever a device is taken: conversion, updaters, evaluation, parts of a batch."""
    program = """
data = [(torch.zeros(2), 0.0)] * 4
print(converters.as_device("auto"))
print(converters.concat_examples(data, "auto")[0].device.type, converters.to_device("auto", torch.ones(1)).device.type)
updater = make_updater(device="auto")
print(updater.device, next(updater.get_model("main").parameters()).device.type)
test = iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
print(extensions.Evaluator(test, nn.Linear(2, 1), device="auto").device)
model = nn.Linear(2, 1)
replicas = {"main": "auto", "second": "auto"}
train = iterators.SerialIterator(data, 2)
optimizer = torch.optim.SGD(model.parameters())
print(training.ParallelUpdater(train, optimizer, model, devices=replicas).device)
parts = parallel.scatter(torch.ones(2, 1), ["auto", "cpu"])
print(parts[0].device.type, parallel.gather(parts, "auto").device.type)
"""
    assert printed(program) == ["meta:1", "meta meta", "meta:1 meta", "meta:1", "meta:1", "meta meta"]


def test_it_is_the_device_of_the_communicator_of_several_ranks():
    """For an updater and for an evaluation of one's own communicator; a communicator of one says nothing."""
    program = """
print(make_updater(device="auto", comm=OnSecond()).device, make_updater(device="auto", comm=parallel.Communicator()).device)
trainer = training.Trainer(make_updater(device="auto", comm=OnSecond()), (1, "iteration"))
test = iterators.SerialIterator([0.0] * 4, 2, repeat=False, shuffle=False)
evaluator = extensions.Evaluator(test, nn.Linear(2, 1), device="auto")
evaluator.initialize(trainer)
print(evaluator.device)
"""
    assert printed(program) == ["meta:2 meta:1", "meta:2"]


@pytest.mark.parametrize(("setting", "device"), [("'auto'", "meta:0"), ("'cpu'", "cpu"), ("2", "meta:2")])
def test_after_create_communicator_it_is_the_device_of_that(setting, device):
    """Also in what is made without a communicator, such as a conversion."""
    program = f"""
print(parallel.create_communicator({setting}).device, converters.as_device("auto"))
"""
    assert printed(program) == [f"{device} {device}"]


def converted_on_a_rank(comm):
    return str(converters.as_device("auto")), str(comm.device)


@WITHOUT_ACCELERATOR
def test_ranks_without_accelerators_take_the_host():
    """Two processes of a group."""
    assert on_two_ranks(converted_on_a_rank) == [("cpu", "cpu")] * 2


def test_a_rank_whose_device_was_taken_before_it_was_known_is_refused():
    """Rather than that all ranks of a machine compute on its first accelerator: the message says what to call first."""
    program = """
import os
os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
print(converters.as_device("auto"))
try:
    parallel.create_communicator()
except RuntimeError as error:
    print(error)
"""
    assert printed(program) == [
        "meta:1",
        'device="auto" is the device of the rank, which is meta:0, and became meta:1 before the rank was known; call '
        "create_communicator() before the iterators, updaters and extensions that take a device",
    ]


@WITHOUT_ACCELERATOR
def test_without_an_accelerator_it_is_the_host():
    """Nothing is moved, and a run is the one with ``device="cpu"``."""
    tensor = torch.ones(1)
    assert converters.to_device("auto", tensor) is tensor


def test_the_record_has_what_it_became(tmp_path):
    """``run.json`` names the device that computes, also where the machine has another one."""
    model = nn.Linear(1, 1)
    parameters = torch.optim.SGD(model.parameters())
    for setting in ("auto", "cpu"):
        updater = training.StandardUpdater(
            None,
            parameters,
            model,
            device=setting,
            loss_func=lambda model: sum(map(torch.sum, model.parameters())),
        )
        training.Trainer(updater, (1, "iteration"), str(tmp_path), config={"device": setting}).run()
        recorded = json.loads((tmp_path / "run.json").read_text())
        assert recorded["device"].split()[0] == updater.device.type
        assert recorded["config"] == {"device": setting}


def test_on_a_machine_with_accelerators_a_run_on_the_host_is_recorded_as_that(tmp_path):
    """And not as one on the accelerator at hand."""
    program = f"""
updater = make_updater(device="cpu", loss_func=lambda model: model(torch.ones(2)).sum())
training.Trainer(updater, (1, "iteration"), {str(tmp_path)!r}).run()
"""
    printed(program)
    assert json.loads((tmp_path / "run.json").read_text())["device"] == "cpu"
