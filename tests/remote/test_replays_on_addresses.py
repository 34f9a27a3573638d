"""Replays of runs in an object store: what they are of the same runs on a disk."""

import json
import shutil
import sys

import pytest
import torch
from synced import keys, sync_down, sync_up, write

import planted
from chainring.cli import main
from chainring.testing import replay

pytestmark = pytest.mark.usefixtures("forked_scripts")
SCRIPT = planted.__file__


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Two runs on the disk, with the arguments that a script would have had."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name, changes in (("one", {}), ("other", {"lr": 0.03})):
            patch.setattr(sys, "argv", [SCRIPT, str(root / "again"), json.dumps(changes)])
            planted.make_trainer(str(root / name), **changes).run()
    return root


@pytest.fixture
def there(s3, here):
    """The address of a place with the same runs."""
    for name in ("one", "other"):
        sync_up(here / name, f"{s3}/{name}")
    return s3


def shown(capsys, *arguments, status=0):
    """What a command prints with --json; where it fails, on the output of errors."""
    capsys.readouterr()
    assert main([arguments[0], "--json", *arguments[1:]]) == status
    printed = capsys.readouterr()
    return " ".join(printed.err.split()) if status == 2 else {**json.loads(printed.out), "run": None}


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "{run}", "--to", "13", SCRIPT),
        ("batch", "{run}", "21", SCRIPT),
        ("bisect", "{run}", "--bad", "main/loss < 1", SCRIPT),
        ("bisect", "{run}", "--bad", "main/accuracy >= 0", "--monotone", SCRIPT),
    ],
)
def test_the_commands_say_of_an_address_what_they_say_of_a_directory(there, here, capsys, arguments):
    """From the same snapshot, compared with the same recorder."""
    found = [shown(capsys, *(each.format(run=run) for each in arguments)) for run in (here / "one", f"{there}/one")]
    assert found[0] == found[1]
    assert found[0]["same"] is True
    assert found[0]["from"] is not None or "bisect" in arguments


def test_a_run_that_trained_in_a_store_is_replayed_with_its_own_arguments(s3, here, tmp_path, monkeypatch, capsys):
    """Which name the address; nothing is written there. A copy of it on the disk is replayed from the same snapshot."""
    monkeypatch.setattr(sys, "argv", [SCRIPT, f"{s3}/run", "{}"])
    planted.make_trainer(f"{s3}/run").run()
    before = keys(f"{s3}/run")
    found = shown(capsys, "replay", f"{s3}/run", "--to", "13", SCRIPT)
    assert (found["from"], found["replayed"], found["same"]) == ("snapshot_iter_8", 5, True)
    assert found["observation"] == shown(capsys, "replay", str(here / "one"), "--to", "13", SCRIPT)["observation"]
    assert keys(f"{s3}/run") == before
    copy = sync_down(f"{s3}/run", tmp_path / "copy")
    assert shown(capsys, "replay", str(copy), "--to", "13", SCRIPT) == found


def test_diff_replays_runs_where_they_are(there, here, capsys):
    """One in the store and one on the disk, or both."""
    for one in (here / "one", f"{there}/one"):
        found = shown(capsys, "diff", "--script", SCRIPT, str(one), f"{there}/other", status=1)
        assert (found["iteration"], found["module"], found["module_iteration"]) == (2, "main/first", 2)
        assert found["replayed"]["notes"][-1].startswith("settings of the optimizer after iteration 0: main/0/lr")


def test_in_python_the_trainer_is_the_same_and_of_one_snapshot_the_tensors_are_read(there, here, proxy):
    """Of the others manifests and values."""
    trainers = [replay(planted.make_trainer, run, 13) for run in (here / "one", f"{there}/one")]
    states = [trainer.updater.get_model("main").state_dict() for trainer in trainers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    read = {request.path for request in proxy.requests if request.method == "GET" and ".safetensors" in request.path}
    assert {path.split("/")[-2] for path in read} == {"snapshot_iter_8"}


def test_a_damaged_snapshot_is_passed_over(there, capsys):
    """For the one before."""
    (name,) = (key for key in keys(f"{there}/one/snapshot_iter_16") if key.endswith(".safetensors"))
    write(f"{there}/one/snapshot_iter_16/{name}", b"nothing")
    with pytest.warns(UserWarning, match=f"{there}/one/snapshot_iter_16 is skipped"):
        found = shown(capsys, "replay", f"{there}/one", "--to", "17", SCRIPT)
    assert (found["from"], found["same"]) == ("snapshot_iter_8", True)


def test_what_cannot_be_replayed_is_refused_with_its_address(there, tmp_path, capsys):
    """And nothing is left on the disk."""
    said = {
        f"{there}/nothing": "holds no run: neither run.json nor a snapshot",
        f"{there}/one/snapshot_iter_8": f"is a snapshot; give its run, such as {there}/one",
    }
    for run, words in said.items():
        assert f"{run} {words}" in shown(capsys, "replay", run, "--to", "3", SCRIPT, status=2)
    target = f"{there}/state"
    assert "is an address" in shown(capsys, "replay", f"{there}/one", "--to", "3", "--save", target, SCRIPT, status=2)
    shutil.copy(SCRIPT, tmp_path / "short.py")
    short = [str(tmp_path / "short.py"), str(tmp_path / "out"), '{"length": 10}']
    assert "ends after iteration 16, before 20" in shown(capsys, "batch", f"{there}/one", "20", *short, status=2)
