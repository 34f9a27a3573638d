"""A run has the same bits however it was run: killed, replayed, continued elsewhere, on any number of devices and of ranks.

The operators of the stand-in are those of the host: a run that draws nothing on its device has the bits of the CPU too.
"""

import functools
import json
import os
import signal

import pytest
import ranks_program
import stand_in
from ranks_program import SAVED, end_of, make_trainer

import forked
import replay_program
from chainring import serializers
from chainring.cli import main
from chainring.parallel import Communicator
from chainring.testing import replay

pytestmark = pytest.mark.skipif(stand_in.NAME != "cuda", reason="it is said with the device of that name")
RANKS = {
    "plain": {},
    "virtual ranks": {"virtual_ranks": 4},
    "DDP": {"kind": "DDP"},
    "FSDP2": {"kind": "FSDP2"},
    "FSDP2, virtual ranks": {"kind": "FSDP2", "virtual_ranks": 4},
}
DRAWING = {f"{kind} that draws": {"kind": kind, "virtual_ranks": 4, "draws": True} for kind in ("plain", "DDP", "FSDP2")}
RESUMED = RANKS | DRAWING | {"each rank draws by itself": {"draws": True}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Trainings of three ranks, with what torchrun tells them: on three devices, and on the CPU."""
    root = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([os.environ["PYTHONPATH"], os.path.dirname(replay_program.__file__)])
    environment = {**os.environ, "PYTHONPATH": paths}
    for device, cases in {"cuda": RESUMED, "cpu": RANKS}.items():
        given = [ranks_program.__file__, device, str(root / device), json.dumps(cases)]
        for rank in forked.started(3, lambda own, given=given: forked.run(given, env={**environment, **own})):
            assert rank.result().returncode == 0, rank.result().stderr
    return root


@pytest.mark.parametrize("name", RANKS)
def test_three_ranks_on_devices_have_the_bits_of_ranks_on_the_cpu(ranks, name):
    """Rows, parameters, running statistics and the optimizer's state."""
    devices = [json.loads((ranks / where / name / "run.json").read_text())["device"] for where in ("cuda", "cpu")]
    assert devices == ["cuda a stand-in", "cpu"]
    assert end_of(ranks / "cuda" / name) == end_of(ranks / "cpu" / name)


@pytest.mark.parametrize("name", RESUMED)
def test_three_ranks_on_devices_resume_bit_for_bit(ranks, name):
    assert end_of(ranks / "cuda" / f"{name}, resumed")[1] == end_of(ranks / "cuda" / name)[1]


@pytest.mark.parametrize("name", DRAWING)
def test_virtual_ranks_that_draw_have_the_same_bits_on_one_device_and_on_three(ranks, tmp_path, name):
    """Plain, in DDP, and sharded."""
    run_alone(tmp_path, virtual_ranks=4, draws=True)
    assert end_of(tmp_path) == end_of(ranks / "cuda" / name)


def run_alone(out, device="cuda", **settings):
    make_trainer(Communicator(), out, device=device, **settings).run()


ALONE = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "virtual_ranks=1": {"virtual_ranks": 1},
    "virtual_ranks=2": {"virtual_ranks": 2},
    "virtual_ranks=4": {"virtual_ranks": 4},
}


@pytest.mark.parametrize("settings", ALONE.values(), ids=ALONE)
def test_a_device_has_the_bits_of_the_cpu_and_continues_its_snapshots(tmp_path, settings):
    """In both directions, where nothing is drawn on a device."""
    for device in ("cpu", "cuda"):
        run_alone(tmp_path / device, device, **settings)
    expected = end_of(tmp_path / "cpu")
    assert end_of(tmp_path / "cuda") == expected
    for device, other in (("cpu", "cuda"), ("cuda", "cpu")):
        trainer = make_trainer(Communicator(), tmp_path / f"on {device}", device=device, **settings)
        serializers.load(tmp_path / other / f"snapshot_iter_{SAVED}", trainer)
        trainer.run()
        assert end_of(tmp_path / f"on {device}")[1] == expected[1]


@pytest.mark.parametrize("kind", ["ParallelUpdater", "DataParallel"])
def test_replicas_on_two_devices_have_the_bits_of_two_on_the_cpu(tmp_path, kind):
    for name, devices in {"cuda": ["cuda:0", "cuda:1"], "cpu": ["cpu", "cpu"]}.items():
        named = dict(zip(("main", "second"), devices, strict=True))
        run_alone(tmp_path / name, name, kind=kind, devices=devices if kind == "DataParallel" else named)
    assert end_of(tmp_path / "cuda") == end_of(tmp_path / "cpu")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run on the device that was killed twice; it draws, and leaves out what is not a number."""
    root = tmp_path_factory.mktemp("killed")
    for kill in ("9", "18", ""):
        command = [replay_program.__file__, str(root / "result"), str(root / "kept"), kill, "24", "cuda"]
        assert forked.run(command).returncode == (-signal.SIGKILL if kill else 0)
    return root


def test_a_killed_run_is_on_a_device_the_run_that_was_not(killed, tmp_path):
    command = [replay_program.__file__, str(tmp_path / "result"), str(tmp_path / "kept"), "", "24", "cuda"]
    assert forked.run(command).returncode == 0
    assert replay_program.read_kept(killed / "kept") == replay_program.read_kept(tmp_path / "kept")


@pytest.mark.filterwarnings("ignore:.*running_mean is NaN in snapshot")  # of the forward of an update that is left out
@pytest.mark.parametrize("iteration", [0, 5, 13, 24])
def test_any_iteration_of_a_killed_run_on_a_device_is_replayed_to_the_last_bit(killed, iteration):
    make = functools.partial(replay_program.make_trainer, length=24, device="cuda")
    trainer = replay(make, killed / "result", iteration)
    assert replay_program.state_of(trainer) == replay_program.read_kept(killed / "kept")[iteration]


def test_chainring_replay_finds_on_a_device_what_was_recorded_there(killed, tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, replay_program\nreplay_program.make_trainer(sys.argv[1], length=24, device='cuda').run()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], os.path.dirname(replay_program.__file__)]))
    command = ["replay", str(killed / "result"), "--to", "13", str(script), str(killed / "result")]
    assert main(command) == 0, capsys.readouterr()
    assert "replayed from snapshot_iter_7: the same as the recorder says in 6 iterations" in capsys.readouterr().out
