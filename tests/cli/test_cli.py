"""The commands read the files of a run without the code that wrote them."""

import json
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import forked
import resume_program
from chainring import serializers
from chainring.cli import main
from chainring.training.extensions import snapshot


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four iterations, saved into the directory of a run, and its model."""
    out = tmp_path_factory.mktemp("out")
    trainer, *_ = resume_program.build(str(out), stop=(4, "iteration"))
    trainer.run()
    serializers.save(out / "state", trainer)
    return out / "state", trainer.updater.get_model("main")


def test_inspect_names_every_tensor_with_shape_dtype_and_size(saved, capsys):
    """Also iteration, epoch and versions."""
    directory, model = saved
    assert main(["inspect", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "iteration 4" in shown
    assert f"torch {torch.__version__}" in shown
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith("  ")}
    assert lines["updater/model:main/body/0/weight"] == ["F32", "8x4", "128"]
    assert lines["updater/model:main/body/1/num_batches_tracked"] == ["I64", "scalar", "8"]
    assert len(model.state_dict()) == sum(name.startswith("updater/model:main/") for name in lines)


def test_inspect_as_json_of_the_directory_of_a_run_shows_its_newest(saved, capsys):
    """The same as plain values."""
    directory, _ = saved
    assert main(["inspect", "--json", str(directory.parent)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["iteration"] == 4
    assert about["directory"] == str(directory)
    assert set(about["files"]) == {"state.json", "rank00000-of-00001.safetensors"}
    assert {"name": "updater/model:main/body/0/bias", "dtype": "F32", "shape": [8], "bytes": 32} in about["tensors"]


def test_verify_fails_with_1_on_damage(saved, tmp_path, capsys):
    """One flipped byte in a copy."""
    directory, _ = saved
    assert main(["verify", str(directory)]) == 0
    assert "is what was written" in capsys.readouterr().out
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in directory.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-1] ^= 1
        (copy / file.name).write_bytes(content)
    assert main(["verify", str(copy)]) == 1
    assert "other bytes" in capsys.readouterr().err


def test_verify_of_the_directory_of_a_run_reads_all_of_its_snapshots(saved, tmp_path, capsys):
    """Also those after a damaged one; the exit status tells that there was one."""
    directory, _ = saved
    for name in ("a", "b", "c"):
        shutil.copytree(directory, tmp_path / name)
    (tmp_path / "b" / "state.json").write_bytes(b"{}")
    assert main(["verify", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("is what was written") == 2
    assert "state.json" in shown.err


def test_verify_of_a_models_file_compares_it_with_its_checksum(saved, tmp_path, capsys):
    """A file of another program has none, and the result says so."""
    _, model = saved
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    serializers.save(ours, model)
    safetensors.torch.save_file(model.state_dict(), theirs)
    assert main(["verify", str(ours)]) == 0
    assert "is what was written" in capsys.readouterr().out
    assert main(["verify", str(theirs)]) == 0
    assert "no checksum" in capsys.readouterr().out
    content = bytearray(ours.read_bytes())
    content[-1] ^= 1
    ours.write_bytes(content)
    assert main(["verify", str(ours)]) == 1


def test_parameters_that_a_snapshot_leaves_out_are_named(tmp_path, capsys):
    """By inspect, and by export, whose file lacks it."""
    trainer, *_ = resume_program.build(str(tmp_path / "out"), stop=(1, "iteration"))
    trainer.updater.get_model("main").body[0].requires_grad_(False)
    trainer.extend(snapshot("taken", frozen=False), trigger=(1, "iteration"))
    trainer.run()
    assert main(["inspect", str(tmp_path / "out" / "taken")]) == 0
    assert "left out: 2 parameters" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "out" / "taken"), str(tmp_path / "model")]) == 0
    assert "2 parameters are not in it" in capsys.readouterr().out
    assert "body.0.weight" not in safetensors.torch.load_file(tmp_path / "model")


def test_export_writes_the_plain_model(saved, tmp_path, capsys):
    """Under the names of its state_dict, for any reader of the format; a file that is there stays."""
    directory, model = saved
    file = tmp_path / "models" / "net.safetensors"
    assert main(["export", str(directory), str(file)]) == 0
    exported = safetensors.torch.load_file(file)
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in exported.items())
    assert main(["export", str(directory), str(file)]) == 2
    assert main(["export", "--model", "other", str(directory), str(tmp_path / "no")]) == 2
    assert "no model other" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["export"]])
def test_a_directory_that_is_not_a_run_is_refused(tmp_path, command, capsys):
    """Exit status 2 and a sentence, no traceback."""
    more = [str(tmp_path / "file")] if command == ["export"] else []
    assert main([*command, str(tmp_path), *more]) == 2
    assert "is not a snapshot and holds none" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "nowhere"), *more]) == 2


def test_it_runs_as_a_module_and_teaches(tmp_path):
    """`python -m chainring --help` lists the commands and the exit statuses."""
    done = subprocess.run([sys.executable, "-m", "chainring", "--help"], capture_output=True, text=True, check=True)
    assert all(word in done.stdout for word in ("inspect", "verify", "export", "exit status"))
    assert forked.run(["-m", "chainring"]).returncode == 2
