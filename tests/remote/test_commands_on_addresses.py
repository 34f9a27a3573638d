"""Commands to a run in an object store lie there, and its record tells what was done."""

import json

import pytest
from commanded import Commands, bits, build, commanded_at_its_end

import chainring
from chainring._places.bucket import Bucket
from chainring.cli import main


@pytest.fixture(params=["s3", "memory"])
def place(request, tmp_path):
    """The address of a run that is not there yet, in a store that speaks S3 and in memory."""
    return f"{request.getfixturevalue('s3')}/run" if request.param == "s3" else f"memory:///{tmp_path.name}"


def test_a_run_at_an_address_is_commanded_there(place, capsys):
    """The record is there before anything changes; a run that is resumed on another machine goes on with it."""
    commands = Commands(place, "lr=0.05", "call=count")
    trainer = build(place, commanded_at_its_end(place, commands.ends, "lr=0.01"), commands)
    trainer.run()
    assert (bits(trainer)[2], bits(trainer)[-1]) == ([0.05], 1)
    entries = json.loads(Bucket(place).get("run.json").content)["commands"]
    assert [entry["command"] for entry in entries] == ["lr=0.05", "call=count"]
    capsys.readouterr()
    assert main(["control", place, "stop"]) == 2
    assert "has ended, and a command is for one that trains: start it again" in capsys.readouterr().err
    assert main(["control", place]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"lr=0.05 (was 0.1) after iteration {entries[0]['iteration']}"
    assert lines[-1] == "lr=0.01 waits"
    commands = Commands(place, *"123", after=-1)
    resumed = build(place, commands.ends)
    resumed.run()
    assert resumed.updater.iteration > trainer.updater.iteration
    assert bits(resumed)[2] == [0.01]
    assert len(chainring.control(place).splitlines()) == 3


def test_a_run_at_an_address_that_goes_back_does_them_again(place):
    """From the record in the store."""
    commands = Commands(place, "lr=0.05", "weights=web:0.9,code:0.1")
    trainer = build(place, commands.ends, commands)
    trainer.run()
    resumed = build(place, trainer.updater.iteration, loads="early")
    resumed.run()
    assert bits(resumed) == bits(trainer)
