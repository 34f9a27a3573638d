"""The help of the commands, and their errors where they are given something else than a snapshot or a run."""

import fcntl
import io
import json
import os
import pty
import shutil
import struct
import sys
import termios
import zlib

import numpy
import pytest
import safetensors.torch
import torch

import chainring
import forked
import resume_program
from chainring import serializers
from chainring.cli import main
from chainring.training.extensions import snapshot

COMMANDS = [
    "report",
    "inspect",
    "verify",
    "export",
    "verify-resume",
    "diff",
    "replay",
    "batch",
    "bisect",
    "reproduce",
    "thin",
]
COMMAND = ["-m", "chainring"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A run with two snapshots, the file of its model, and other files and directories that a user may give."""
    root = tmp_path_factory.mktemp("paths")
    trainer, *_ = resume_program.build(str(root / "result"), stop=(4, "iteration"))
    trainer.extend(snapshot(), trigger=(2, "iteration"))
    trainer.run()
    serializers.save(root / "model", trainer.updater.get_model("main"))
    sound = root / "result" / "snapshot_iter_4"
    shutil.copytree(sound, root / "newer")
    body = (sound / "manifest.json").read_bytes().rpartition(b"\n")[0].replace(b'"format": 1', b'"format": 2')
    (root / "newer" / "manifest.json").write_bytes(body + b"\n%08x" % zlib.crc32(body))
    shutil.copytree(sound, root / "torn")
    (root / "torn" / "manifest.json").unlink()
    shutil.copytree(root / "result", root / "none")
    for each in (root / "none").glob("snapshot_iter_*"):
        shutil.rmtree(each)
    (root / "empty").mkdir()
    (root / "other").mkdir()
    (root / "other" / "notes.txt").write_text("no run")
    torch.save(torch.nn.Linear(2, 2).state_dict(), root / "model.pt")
    torch.save([1], root / "old.pt", _use_new_zipfile_serialization=False)
    numpy.savez(root / "model.npz", weight=numpy.ones(3))
    (root / "link").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    return root


ERRORS = {
    "empty": (2, "is not a snapshot and holds none: it is empty"),
    "other": (2, "is not a snapshot and holds none: it has notes.txt, and no manifest.json"),
    "none": (2, "a run that has taken no snapshot. In the script, trainer.extend(extensions.snapshot()"),
    ".": (2, "There are runs in it: give {root}/none or {root}/result"),
    "absent": (2, "there is no {root}/absent"),
    "result/snapshot_iter_5": (
        2,
        "there is no {root}/result/snapshot_iter_5; {root}/result has snapshot_iter_4, snapshot_iter_2",
    ),
    "link": (2, "is a link to nowhere, which is not there"),
    "pipe": (2, "is neither a regular file nor a directory"),
    "model.pt": (2, "a file such as torch.save or NumPy write, which is not opened, because a pickle can run code"),
    "old.pt": (2, "chainring.serializers.load(path, model) reads its tensors alone, and serializers.save writes them again"),
    "model.npz": (2, "a file such as torch.save or NumPy write"),
    "result/log": (2, "is text, not a model; to look at the run it belongs to, give {root}/result"),
    "result/snapshot_iter_4/state.json": (
        2,
        "is one file of the snapshot {root}/result/snapshot_iter_4; give the directory",
    ),
    "newer": (2, "is of a newer Chainring, which writes format 2; this one reads 1: update it"),
    "torn": (1, "has files of a snapshot and no manifest.json: it is damaged, or was copied in part"),
}


@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
@pytest.mark.parametrize("given", list(ERRORS))
def test_a_path_that_is_not_a_snapshot_is_described(paths, tmp_path, command, given, capsys):
    """In one line with a remedy, and an exit status."""
    if given == ".":  # the directory above runs, without what else the fixture puts there
        for name in ("result", "none"):
            (tmp_path / name).symlink_to(paths / name)
    root = tmp_path if given == "." else paths
    status, words = ERRORS[given]
    more = [str(tmp_path / "file")] if command == "export" else []
    assert main([command, str(root / given), *more]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("chainring: ")
    assert shown.err.count("\n") == 1
    assert words.format(root=root) in shown.err


def test_an_empty_path_is_not_the_current_directory(capsys):
    """Such as an unset variable of the shell expands to."""
    assert main(["inspect", ""]) == 2
    assert "the path is empty" in capsys.readouterr().err


def test_inspect_shows_the_file_of_a_model(paths, capsys):
    """Its tensors, and as JSON the same."""
    assert main(["inspect", str(paths / "model")]) == 0
    shown = capsys.readouterr().out
    assert "model: the file of a model" in shown
    assert main(["inspect", "--json", str(paths / "model")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bytes"] == (paths / "model").stat().st_size
    assert {"name": "body.0.bias", "dtype": "F32", "shape": [8], "bytes": 32} in facts["tensors"]
    assert all(tensor["name"] in shown for tensor in facts["tensors"])


def test_the_file_of_a_model_is_not_exported_again(paths, tmp_path, capsys):
    """It is already the file that export writes."""
    assert main(["export", str(paths / "model"), str(tmp_path / "x")]) == 2
    assert "is the file of a model, not a snapshot" in capsys.readouterr().err


def test_inspect_of_a_run_names_its_other_snapshots(paths, capsys):
    """The newest is shown."""
    assert main(["inspect", str(paths / "result")]) == 0
    assert "also there: snapshot_iter_2\n" in capsys.readouterr().out


def test_verify_as_json_gives_the_result_of_each_snapshot(paths, tmp_path, capsys):
    """Sound, damaged, or of a newer format, which is neither; the exit status is the same as without --json."""
    for name in ("result/snapshot_iter_4", "result/snapshot_iter_2", "newer"):
        shutil.copytree(paths / name, tmp_path / name.rpartition("/")[2])
    assert main(["verify", "--json", str(tmp_path)]) == 2
    assert json.loads(capsys.readouterr().out)["sound"] is False
    (tmp_path / "snapshot_iter_2" / "state.json").write_bytes(b"{}")
    assert main(["verify", "--json", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] is False
    checked = {os.path.basename(each["path"]): each for each in found["checked"]}
    assert {name: each["sound"] for name, each in checked.items()} == {
        "snapshot_iter_4": True, "snapshot_iter_2": False, "newer": None,
    }  # fmt: skip
    assert (checked["snapshot_iter_4"]["iteration"], checked["snapshot_iter_4"]["error"]) == (4, None)
    assert "state.json" in checked["snapshot_iter_2"]["error"]


def test_verify_as_json_of_a_models_file(paths, capsys):
    """The result says that it has a checksum."""
    assert main(["verify", "--json", str(paths / "model")]) == 0
    found = json.loads(capsys.readouterr().out)
    (checked,) = found["checked"]
    assert (found["sound"], checked["has_checksum"], checked["error"]) == (True, True, None)


def test_export_as_json_lists_the_names_of_its_tensors(paths, tmp_path, capsys):
    """And of which snapshot and model they are."""
    file = tmp_path / "net.safetensors"
    assert main(["export", "--json", str(paths / "result"), str(file)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tensors"] == sorted(safetensors.torch.load_file(file))
    assert (facts["file"], facts["bytes"], facts["model"]) == (str(file), file.stat().st_size, "main")
    assert facts["directory"].endswith("snapshot_iter_4")


def test_an_existing_file_is_not_overwritten(paths, tmp_path, capsys):
    """The error names the file and the remedy."""
    (tmp_path / "net").write_text("mine")
    assert main(["export", str(paths / "result"), str(tmp_path / "net")]) == 2
    assert "net exists and is not overwritten; give another name" in capsys.readouterr().err
    assert (tmp_path / "net").read_text() == "mine"


def test_verify_resume_as_json_keeps_its_steps_off_stdout(tmp_path, capsys):
    """They go to stderr, with the reason where the script cannot be compared."""
    script = tmp_path / "train.py"
    script.write_text("raise LookupError('no data')")
    assert main(["verify-resume", "--json", str(script)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the uninterrupted run" in shown.err
    assert "LookupError: no data" in shown.err


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS]], ids=["chainring", *COMMANDS])
def test_help_has_examples_and_exit_statuses_and_fits(command, columns, monkeypatch, capsys):
    """At 80 columns, and at 200 columns no wider than 100."""
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert max(map(len, shown.splitlines())) < min(int(columns), 100)
    examples = shown.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) >= 3
    assert all(line.strip().startswith(" ".join(["chainring", *command])) for line in examples)
    statuses = shown.partition("exit status:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in statuses][:3] == ["0", "1", "2"]


def test_alone_it_shows_the_whole_help_on_stderr(capsys):
    """With the exit status of wrong arguments."""
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(f"    {name}" in shown.err for name in COMMANDS)
    assert "examples:" in shown.err


def test_the_version_is_that_of_the_package(capsys):
    """On stdout."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"chainring {chainring.__version__}\n"


def to_output(paths, output):
    """The command with its output there, which Python collects until the end, as in any shell."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [*COMMAND, "inspect", paths / "result"]
    with forked.Forked(command, env=environment, stdout=output) as process:
        return process.wait(), process.stderr.read()


def test_a_reader_that_closes_the_pipe_is_not_an_error(paths):
    """As in `chainring inspect result | head -1`: nothing on stderr, exit status 0."""
    reading, writing = os.pipe()
    os.close(reading)
    done = to_output(paths, writing)
    os.close(writing)
    assert done == (0, "")


def test_a_path_that_the_output_cannot_show_is_escaped(paths, tmp_path, monkeypatch):
    """Where the locale has no such letters, as in many containers and services."""
    (tmp_path / "Läufe").symlink_to(paths / "result")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["inspect", str(tmp_path / "Läufe")]) == 0
    output.seek(0)
    assert "L\\xe4ufe/snapshot_iter_" in output.read()


def test_an_output_that_cannot_be_written_is_an_error_of_one_line(paths):
    """A full disk, say; here a file that is open for reading only."""
    with open(paths / "model", "rb") as output:
        done = to_output(paths, output)
    assert done == (2, "chainring: the output: Bad file descriptor\n")


def test_on_a_terminal_it_prints_lines_that_fit_and_no_codes(paths):
    """What inspect prints has no escape sequence, so NO_COLOR has nothing to turn off; long names lose their middle."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [*COMMAND, "inspect", paths / "result"]
    with forked.Forked(command, env=environment, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        shown = b""
        while chunk := _read(master):
            shown += chunk
    os.close(master)
    assert process.returncode == 0
    assert shown.decode().replace("\r\n", "").isprintable()
    table = [line for line in shown.decode().split("\r\n") if line.startswith("  ")]
    assert max(map(len, table)) <= 60
    assert any("..." in line for line in table)


def _read(master):
    try:
        return os.read(master, 65536)
    except OSError:  # how Linux says that nobody holds the other end any more
        return b""
