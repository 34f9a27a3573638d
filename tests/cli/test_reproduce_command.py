"""chainring reproduce: a whole run once more, from its record alone, with the same bits or with the reason why not."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import chainring
import forked
from chainring.cli import main

pytestmark = pytest.mark.usefixtures("forked_scripts")
SCRIPT = """
import argparse
import os
import time
import numpy
import torch
from torch import nn
import chainring
from chainring import datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import extensions

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="result")
parser.add_argument("--length", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--kill", type=int)
parser.add_argument("--data")
parser.add_argument("--unseeded", action="store_true")
parser.add_argument("--slow", action="store_true")
parser.add_argument("--silent", action="store_true")
parser.add_argument("--token")
parser.add_argument("--parts", type=int)
arguments = parser.parse_args()
if arguments.unseeded:
    torch.seed()
else:
    chainring.deterministic(3)
scale = 1.0  # SCALE
x = torch.arange(40.0).reshape(20, 2) / 40 * scale
if arguments.data:
    x = x + torch.from_numpy(numpy.load(arguments.data))
data = datasets.TupleDataset(x, torch.arange(20) % 3)
model = Classifier(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
comm = None
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    from chainring.parallel import create_communicator
    comm = create_communicator()
optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
settings = {} if arguments.parts is None else {"virtual_ranks": arguments.parts}
updater = training.StandardUpdater(iterators.SerialIterator(data, 4), optimizer, model, comm=comm, **settings)
stop = (0.3, "second") if arguments.slow else (arguments.length, "iteration")
trainer = training.Trainer(updater, stop, out=arguments.out)
if not arguments.silent:
    trainer.extend(extensions.LogReport(trigger=(5, "iteration")))
    trainer.extend(extensions.Recorder())
trainer.extend(extensions.snapshot(autoload=True), trigger=(8, "iteration"))
if arguments.kill:
    trainer.extend(lambda trainer: os.kill(os.getpid(), 9), "kill", (arguments.kill, "iteration"))
trainer.run()
"""


def git(*arguments):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True, env=environment)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, with the script."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(directory)
    return directory


def commit():
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")


def train(*arguments, code=0):
    done = forked.run(["train.py", *arguments])
    assert done.returncode == code, done.stderr


def reproduced(capsys, *arguments):
    """The status, and what is printed; to stderr too."""
    status = main(["reproduce", *arguments])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def edit(change):
    """Changes what the record has to repeat the run."""
    record = json.loads(Path("result/run.json").read_text())
    change(record["reproduction"])
    Path("result/run.json").write_text(json.dumps(record))


def content_of(directory):
    """A digest of every file."""
    files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_of_uncommitted_code_is_made_again_with_the_same_bits(place, capsys):
    """Though the code, the commit and the imported file are others now; in the run's directory nothing is changed."""
    commit()
    (place / "sizes.py").write_text("SCALE = 3.0\n")
    text = SCRIPT.replace("scale = 1.0", "from sizes import SCALE as scale")
    (place / "train.py").write_text(text.replace("out=arguments.out", "out=arguments.out, config=vars(arguments)"))
    train("--out", str(place / "result"))
    (place / "train.py").write_text("raise SystemExit('other code')\n")
    (place / "sizes.py").write_text("SCALE = 4.0\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "second")
    edit(lambda needed: needed["distributions"].update(pip="1.0"))
    before = content_of("result")
    status, shown = reproduced(capsys, "--here", "--out", str(place / "again"), "result")
    assert status == 0, shown
    assert shown.startswith("the same bits, up to iteration 20")
    assert "settings that differ" not in shown  # though --out does, and pip, which an environment has of its own
    assert content_of("result") == before
    assert json.loads((place / "again" / "run.json").read_text())["reproduction"]["source"]["files"] == {
        "sizes.py": "SCALE = 3.0\n"
    }


def test_inspect_says_of_which_code_a_run_is(place, capsys):
    """The script, the commit, and whether there were changes."""
    commit()
    (place / "train.py").write_text(SCRIPT + "# changed\n")
    train("--length", "8")
    assert main(["inspect", "result"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("code: "))
    assert line.startswith("code: train.py, commit ")
    assert line.endswith(" with changes; `chainring reproduce` makes the run again")


def test_without_a_repository_the_text_of_the_script_is_enough(place, capsys):
    """The script itself is gone; what it reads lies where it lay, and is named."""
    import numpy

    numpy.save(place / "data.npy", numpy.ones((20, 2), numpy.float32))
    train("--data", "data.npy")
    (place / "train.py").unlink()
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 0, shown
    assert "used as it is now" in shown
    assert "data.npy" in shown


def test_a_killed_run_that_was_continued_with_other_arguments_is_made_again(place, capsys):
    """Each command line up to the iteration with which the next one began, and a killed run as far as it came."""
    train("--kill", "11", code=-signal.SIGKILL)
    train("--lr", "0.05", "--kill", "19", "--length", "40", code=-signal.SIGKILL)
    status, shown = reproduced(capsys, "--here", "--json", "result")
    assert status == 0, shown
    found = json.loads(shown[shown.index("{") : shown.rindex("}") + 1])
    assert (found["status"], found["same"]) == (0, True)


def test_a_run_that_went_on_with_other_code_is_made_again_up_to_there(place, capsys):
    """The answer says from which iteration on it ran with other code."""
    train("--length", "8")
    (place / "train.py").write_text(SCRIPT.replace("scale = 1.0", "scale = 2.0"))
    train()
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 2
    assert "the same bits up to iteration 8, and no further: from iteration 8 on it ran with other code" in shown


def test_a_run_without_a_seed_is_said_to_part_and_why(place, capsys):
    """The new run is kept, and named; the exit status is 1."""
    train("--unseeded")
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 1
    assert "different from" in shown
    assert "did not begin alike: chainring.deterministic(seed)" in shown
    kept = next(line for line in shown.splitlines() if line.startswith("the new run is in ")).split()[-1]
    assert (Path(kept) / "run.json").exists()


@pytest.mark.parametrize("value", ["time.time() % 1", "hash('text') / 2**63"])
def test_a_program_that_does_not_repeat_itself_is_said_to_part_from_itself(place, monkeypatch, capsys, value):
    """Which a second run of it proves; the one that is kept is the first, whole."""
    (place / "train.py").write_text(SCRIPT.replace("scale = 1.0", f"scale = 1 + {value}"))
    if value.startswith("hash"):  # for which a Python that starts, and is not forked, has a seed of its own
        monkeypatch.setattr(subprocess, "Popen", forked.START)
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        subprocess.run([sys.executable, "train.py"], check=True)
    else:
        train()
    status, shown = reproduced(capsys, "--here", "--out", str(place / "again"), "result")
    assert status == 1
    assert "made here once more, it parts from itself too (different from iteration 1 on: the loss main/loss" in shown
    assert (place / "again" / "snapshot_iter_20").is_dir()
    assert sorted(path.name for path in place.iterdir()) == ["again", "result", "train.py"]


@pytest.mark.parametrize("changed", ["data", "variable"])
def test_what_has_changed_since_is_told_from_a_program_that_does_not_repeat_itself(place, monkeypatch, capsys, changed):
    """A file beside the code is named, and is the data of both; a variable that is not recorded is not known."""
    import numpy

    (place / "train.py").write_text(SCRIPT.replace("scale = 1.0", "scale = float(os.environ.get('SCALE', 1))"))
    numpy.save(place / "data.npy", numpy.ones((20, 2), numpy.float32))
    train("--data", "data.npy")
    if changed == "data":
        numpy.save(place / "data.npy", numpy.zeros((20, 2), numpy.float32))
        os.utime(place / "data.npy", (later := time.time() + 60, later))
    else:
        monkeypatch.setenv("SCALE", "2")
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 1
    assert "made here once more, it has the same bits up to iteration 1: something outside of the program" in shown
    assert ("changed since the run began: data.npy" in shown) == (changed == "data")


def test_a_run_that_a_clock_has_ended_is_made_again_to_its_last_iteration(place, capsys):
    """However long that takes."""
    train("--slow")
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 0, shown


def test_a_secret_argument_is_not_there_and_said_to_be_missing(place, capsys):
    """A run that does not need it has the same bits."""
    train("--token", "kfhrwzqpx-unguessable")
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 0, shown
    assert "arguments that look like secrets" in shown


def gone(place):
    import numpy

    numpy.save(place / "data.npy", numpy.ones((20, 2), numpy.float32))
    train("--data", "data.npy")
    (place / "data.npy").unlink()


def commit_gone(place):
    commit()
    train()
    edit(lambda needed: needed["source"].update(commit="0" * 40, root=str(place.parent / "nowhere")))


def typed_in(place):
    train()
    edit(lambda needed: needed["source"].update(script=None, text=None))


def with_a_key(place):
    (place / "train.py").write_text(SCRIPT + "API_KEY = 'kfhrwzqpx-unguessable'\n")
    train()


def of_other_types(place):
    train()
    edit(lambda needed: needed["source"].update(files=[1]))


def of_an_earlier_record(place):
    train()
    path = Path("result/run.json")
    record = json.loads(path.read_text())
    del record["reproduction"]
    path.write_text(json.dumps(record))


def outside(place):
    train()
    edit(lambda needed: needed["source"]["files"].update({"../outside.py": "x = 1\n"}))


def without_anything_to_compare(place):
    train("--silent", "--length", "7")
    for snapshot in Path("result").glob("snapshot_iter_*"):
        snapshot.rename(place / snapshot.name)


def of_accelerators(place):
    train()
    edit(lambda needed: needed.update(ranks=64, device="cuda NVIDIA H100"))


def with_two_trainers(place):
    (place / "train.py").write_text(
        SCRIPT.replace("trainer.run()", "training.Trainer(updater, stop, out='o2')\ntrainer.run()")
    )
    train()


def the_second_of_its_script(place):
    text = SCRIPT.replace("trainer.run()", "trainer.out = 'first'\ntrainer.run()")
    again = SCRIPT.partition("arguments = parser")[2].partition("\n")[2]
    (place / "train.py").write_text(f"{text}\n{again}")
    train()


REFUSALS = {
    gone: "No such file or directory: 'data.npy'",
    commit_gone: "is neither in",
    typed_in: "the program was no file",
    with_a_key: "train.py was left out, because it has something that looks like a secret",
    of_other_types: "is not of the types that were written",
    of_an_earlier_record: "does not have what repeats a run",
    outside: "of a name outside of its directory",
    without_anything_to_compare: "has not come to an iteration",
    of_accelerators: "the run had 64 ranks, each with an accelerator (cuda), and",
    with_two_trainers: "has made two Trainers",
    the_second_of_its_script: "result is that of run 2 of its script, and the first alone is made again",
}


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.__name__)
def test_what_cannot_be_made_again_is_refused_with_the_reason(place, monkeypatch, capsys, case):
    """The exit status is 2, and nothing is left behind."""
    case(place)
    monkeypatch.setenv("TMPDIR", str(place.parent))
    monkeypatch.setattr("tempfile.tempdir", None)
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 2, shown
    assert REFUSALS[case] in shown
    assert not list(place.parent.glob("chainring-*"))


def test_a_record_gives_no_variables_but_those_of_the_list(place, capsys):
    """One that a stranger has written cannot load a library."""
    (place / "train.py").write_text(SCRIPT.replace("scale = 1.0", "scale = float(os.environ.get('OTHER', 1))"))
    train()
    edit(lambda needed: needed["environment"].update(OTHER="5"))
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 0, shown


def wheel(directory, version, scale, project="tinyscale"):
    """A distribution that is one module."""
    directory.mkdir(exist_ok=True)
    info = f"{project}-{version}.dist-info"
    files = {
        f"{project}.py": f"SCALE = {scale}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{project}-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return directory / f"{project}-{version}-py3-none-any.whl"


def train_with(wheels, place, monkeypatch):
    """Trains with the distributions of wheels, which an environment then has from the directory of those alone."""
    monkeypatch.setattr(subprocess, "Popen", forked.START)
    here, names = place.parent / "site-packages", [path.name.partition("-")[0] for path in wheels]
    scale = f"import {', '.join(names)}; scale = {' * '.join(f'{name}.SCALE' for name in names)}"
    (place / "train.py").write_text(SCRIPT.replace("scale = 1.0", scale))
    commit()
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(here)
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "train.py"], check=True, env={**os.environ, "PYTHONPATH": path})
    packages = [
        sysconfig.get_path("purelib"),
        str(Path(chainring.__file__).parents[1]),  # where an editable installation has it
        *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path),
    ]
    edit(lambda needed: needed.update(distributions={name: needed["distributions"][name] for name in names}))
    edit(lambda needed: needed["source"].update(paths=packages))  # all else, instead of installing it
    index = place.parent / "index"
    index.mkdir()
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(wheels[0].parent))
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, index.as_uri())
    for name in ("PIP_RETRIES", "UV_HTTP_RETRIES"):
        monkeypatch.setenv(name, "0")


class _NothingReached(BaseHTTPRequestHandler):
    """A proxy that reaches no host."""

    def do_CONNECT(self):
        self.server.asked.append(self.path)
        self.send_error(502)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def asked(monkeypatch):
    """The hosts that are asked for by HTTPS, of which none is reached."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _NothingReached) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
        yield server.asked
        server.shutdown()


def test_the_recorded_versions_are_installed_into_an_environment(place, monkeypatch, capsys, asked):
    """Here newer ones are at hand too; the index of PyTorch is not asked for a build of it that is."""
    wheels = place.parent / "wheels"
    recorded = [wheel(wheels, "1.0+cpu", 3.0), wheel(wheels, "2.0", 5.0, "another")]
    for project in ("tinyscale", "another"):
        assert wheel(wheels, "3.0", 7.0, project).exists()
    train_with(recorded, place, monkeypatch)
    status, shown = reproduced(capsys, "result")
    assert (status, asked) == (0, []), shown
    assert "installed into a new environment, which takes minutes; --here needs none" in shown


@pytest.mark.parametrize(("version", "hosts"), [("1.0", []), ("1.0+cpu", ["download.pytorch.org:443"])])
def test_a_version_that_is_no_longer_there_is_named_and_the_index_of_pytorch_asked_for_its_builds_alone(
    place, monkeypatch, capsys, asked, version, hosts
):
    """Each request there costs time, minutes of it where that index cannot be reached, as behind a mirror."""
    wheels = place.parent / "wheels"
    recorded, newer = wheel(wheels, version, 3.0), wheel(wheels, "2.0", 5.0)
    train_with([recorded], place, monkeypatch)
    recorded.unlink()
    assert newer.exists()
    status, shown = reproduced(capsys, "result")
    assert (status, asked) == (2, hosts), shown
    assert f"tinyscale=={version}" in shown


@pytest.mark.parametrize("virtual", [False, True])
def test_a_run_of_two_ranks_is_made_again_on_two_or_with_virtual_ranks_on_one(place, capsys, virtual):
    """With the same bits."""
    program = ["train.py", *(["--parts", "2"] if virtual else [])]
    ranks = forked.started(2, lambda rank: forked.run(program, env={**os.environ, **rank}))
    assert [rank.result().returncode for rank in ranks] == [0, 0]
    status, shown = reproduced(capsys, "--here", "result")
    assert status == 0, shown
    assert f"the run had 2 ranks, and is made again on {1 if virtual else 2}" in shown
