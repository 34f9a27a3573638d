"""chainring verify-resume compares a script as it is."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import forked
from chainring.cli import main

pytestmark = pytest.mark.usefixtures("forked_scripts")
PROGRAMS = Path(__file__).parent.parent / "testing"
MNIST = Path(__file__).parent.parent.parent / "examples" / "mnist" / "train_mnist.py"

SCRIPT = """
import sys
import torch
import chainring
from chainring import iterators, training
from parts import Counting

if __name__ == "__main__":
    chainring.deterministic(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = iterators.SerialIterator([torch.full((2,), float(i)) for i in range(6)], 2)
    trainer = training.Trainer(training.StandardUpdater(data, optimizer, model), (100, "iteration"), out=sys.argv[1])
    trainer.run()
    open(f"{sys.argv[1]}.model", "w").close()
"""

PARTS = """
import torch

class Counting(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x).square().mean() / self.calls
"""


def test_the_example_continues_bit_for_bit(tmp_path, capsys):
    """The digits script with its evaluation, log and snapshots, which leaves no file behind; the result is JSON."""
    arguments = ["--iterations", "18", "--kill-after", "16", str(MNIST), "-e", "3", "-o", str(tmp_path / "result")]
    assert main(["verify-resume", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["same"], found["iterations"]) == ("exact", True, 18)
    assert [kill["at"] for kill in found["kills"]] == [16]
    assert (found["not_reached"], found["unsaved"]) == ([], {})
    assert found["arguments"] == ["-e", "3", "-o", str(tmp_path / "result")]
    assert "bit for bit the uninterrupted one" in found["report"]
    assert not list(tmp_path.iterdir())


def test_a_script_that_forgets_something_fails_with_1_and_is_explained(tmp_path, capsys):
    """It imports from its own directory and has an argument; what comes after its run is not executed."""
    script, kept = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(SCRIPT)
    (tmp_path / "parts.py").write_text(PARTS)
    numbers = ["--iterations", "4", "--kill-after", "2", "--keep", str(kept)]
    assert main(["verify-resume", *numbers, str(script), str(tmp_path / "result")]) == 1
    shown = capsys.readouterr().out
    assert "differs first in iteration 3, in the observation: observation/main/loss: " in shown
    assert "updater.model:main.calls: 2 -> 0" in shown
    assert (kept / "out of the first run" / "run.json").exists()
    assert not (tmp_path / "result.model").exists()
    assert not (tmp_path / "result").exists()


def test_a_script_of_which_two_runs_differ_is_inconclusive_and_fails_with_3(tmp_path, capsys):
    """Seeded by the clock; the line to add is named, and what it forgets is listed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("chainring.deterministic(0)", "torch.seed()"))
    (tmp_path / "parts.py").write_text(PARTS)
    assert (
        main(["verify-resume", "--json", "--iterations", "4", "--kill-after", "2", str(script), str(tmp_path / "result")])
        == 3
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["same"]) == ("inconclusive", False)
    assert "torch.manual_seed(0)" in found["report"]
    assert found["unsaved"] == {"updater.model:main.calls": "2 -> 0"}


def test_a_script_that_does_not_end_in_time_is_inconclusive_and_fails_with_3(tmp_path, capsys):
    """The verdict says where it hung; nothing stays behind."""
    script = tmp_path / "train.py"
    script.write_text("import threading\nthreading.Event().wait()\n")
    assert main(["verify-resume", "--timeout", "5", str(script)]) == 3
    assert "had not ended after 5 seconds; it hung before the first iteration" in capsys.readouterr().out


def test_a_command_that_is_terminated_ends_the_script_too(tmp_path):
    """SIGTERM leaves no process behind."""
    script, pid = tmp_path / "train.py", tmp_path / "pid"
    script.write_text(
        "import os, sys, threading\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nthreading.Event().wait()\n"
    )
    os.mkfifo(pid)
    with forked.Forked(["-m", "chainring", "verify-resume", script, pid], stdout=subprocess.DEVNULL) as command:
        running = int(pid.read_text())
        command.send_signal(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('nothing to train')", "no Trainer in it has run"),
        (
            "from chainring import training\nupdater = training.Updater()\n"
            "first, second = training.Trainer(updater), training.Trainer(updater)\nfirst.run()",
            "made two Trainers",
        ),
        ("raise LookupError('no data')", "LookupError: no data"),
    ],
)
def test_a_script_that_cannot_be_compared_fails_with_2_and_a_reason(tmp_path, capsys, script, reason):
    """Without a trainer, with two, or with an error, whose traceback is shown."""
    path = tmp_path / "script.py"
    path.write_text(script)
    assert main(["verify-resume", str(path)]) == 2
    assert reason in capsys.readouterr().err


def test_a_command_runs_in_another_thread_too(tmp_path, capsys):
    """Where Python sets no handler: SIGTERM is then for the program whose thread it is."""
    path, codes = tmp_path / "script.py", []
    path.write_text("print('nothing to train')")
    thread = threading.Thread(target=lambda: codes.append(main(["verify-resume", str(path)])))
    thread.start()
    thread.join(60)
    assert codes == [2]
    assert "no Trainer in it has run" in capsys.readouterr().err


AFTERWARDS = """
import sys, torch, chainring
from chainring import iterators, training

LOSSES, largest = [], 0.0

def collect(trainer):
    global largest
    {change}

if __name__ == "__main__":
    chainring.deterministic(0)
    model = torch.nn.Linear(2, 1)
    data = iterators.SerialIterator([torch.full((2,), float(i)) for i in range(6)], 2)
    loss = lambda model, x: model(x).square().mean()
    updater = training.StandardUpdater(data, torch.optim.SGD(model.parameters(), lr=0.01), model, loss_func=loss)
    trainer = training.Trainer(updater, (8, "iteration"), out=sys.argv[1])
    trainer.extend(collect, trigger=(1, "iteration"))
    trainer.run()
    print(largest, LOSSES)
"""


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("largest = max(largest, float(trainer.observation['main/loss']))", "'largest'"),
        ("LOSSES.append(float(trainer.observation['main/loss']))", "'LOSSES'"),
        ("pass", None),
    ],
)
def test_the_first_line_says_that_what_follows_the_run_may_be_another(tmp_path, capsys, change, name):
    """Where the training changes a variable that no state holds."""
    script = tmp_path / "train.py"
    script.write_text(AFTERWARDS.format(change=change))
    assert main(["verify-resume", "--kill-after", "4", str(script), str(tmp_path / "result")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("exact"))
    assert (name is not None) == ("only for the run itself" in line)
    assert name is None or ("no state holds what it has changed in " in line and f"variable {name}" in line)


def test_a_script_that_is_not_there_fails_with_2(tmp_path, capsys):
    """As do numbers that leave nothing to resume."""
    assert main(["verify-resume", str(tmp_path / "absent.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
    assert main(["verify-resume", "--iterations", "20", "--kill-after", "20", str(MNIST)]) == 2
    assert "killed after 1 to 19" in capsys.readouterr().err


LOST = {
    ", variable 'counter'", ", variable 'listed'", ", variable 'content'", ", variable 'numbered'", ", variable 'names'.at",
    ", variable 'generator', variable 'number'", ", variable 'generator', position", ".shared", ".phase",
}  # fmt: skip
COLLECTED = {", variable 'many'", ", variable 'costly'", ".by_iteration", ".cache"}
CLOSED = {", variable 'cycle'", ", variable 'zipped'", ", variable 'file'", ", variable 'waiting'"}
ELSEWHERE = {
    "updater.model:main.layer, hooks", "updater.optimizer:main, hooks", "variable borderline_programs.COUNT",
    "variable __main__.remembering, variable 'Settings'.step", "os.environ.ITERATION",
}  # fmt: skip


def test_state_in_any_form_is_named_or_named_as_not_looked_into(tmp_path, capsys):
    """Of iterators, hooks, containers, namespaces, classes, other modules, the environment, files and queues."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.append({str(PROGRAMS)!r})\nfrom borderline_programs import remembering\n"
        "if __name__ == '__main__':\n    remembering('result').run()\n"
    )
    assert main(["verify-resume", "--json", str(script)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["whole"], found["continues"]) == (True, False)
    assert found["report"].startswith("exact, but only if its state is loaded")
    listed = {f"extensions.it{path}" for path in COLLECTED} | {"variable __main__.remembering, variable 'COLLECTED'"}
    assert found["unsaved"].keys() == {f"extensions.it{path}" for path in LOST} | ELSEWHERE
    assert found["caches"].keys() == listed
    assert found["not_looked_into"].keys() == {f"extensions.it{path}" for path in CLOSED}
