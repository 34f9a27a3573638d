"""What only POSIX has is not needed to import the package, nor to train, save and resume."""

import json
import subprocess
import sys

HIDE = """
import sys
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
"""

IMPORT_ALL = """
import importlib, json, pkgutil
import chainring
names = [module.name for module in pkgutil.walk_packages(chainring.__path__, "chainring.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps(names))
"""

REMOVE = """
import getpass, os, signal
import filelock, torch  # before: they take what the system has
for name in (
    "O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK fork geteuid getuid killpg memfd_create mkfifo pread preadv pwrite "
    "register_at_fork sched_getaffinity setsid"
).split():
    delattr(os, name)
for name in ("SIGKILL", "SIGRTMAX", "SIGSTOP", "pthread_sigmask"):
    delattr(signal, name)
"""

TRAIN = """
from torch import nn
from chainring import iterators, training
from chainring.training import extensions

def run(out, epochs):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    data = [(torch.full((2,), i / 8), torch.zeros(1)) for i in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    updater = training.StandardUpdater(
        iterators.SerialIterator(data, 4), optimizer, model, loss_func=lambda m, x, t: (m(x) - t).square().mean()
    )
    trainer = training.Trainer(updater, (epochs, "epoch"), out)
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.Recorder())
    trainer.extend(extensions.snapshot(autoload=True))
    trainer.extend(refuse_another, name="another", trigger=(1, "epoch"))
    trainer.run()
    return model.weight.tolist()

def refuse_another(trainer):
    try:
        training.Trainer(trainer.updater, (1, "epoch"), trainer.out).run()
    except BlockingIOError as error:
        print(error)

run(sys.argv[1], 2)
print(run(sys.argv[1], 3) == run(sys.argv[2], 3))
"""


def run(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_module_is_imported_where_modules_of_posix_are_missing():
    """As on Windows; no module is left out."""
    names = json.loads(run(HIDE + IMPORT_ALL)[-1])
    assert {"chainring._files", "chainring._places.mirror", "chainring.training.extensions.performance"} <= {*names}


def test_a_run_is_locked_saved_and_resumed_where_functions_of_posix_are_missing(tmp_path):
    """Files are read and written at their position, directories are not flushed, and the lock is that of filelock."""
    lines = run(REMOVE + HIDE + TRAIN, tmp_path / "a", tmp_path / "b")
    assert lines[-1] == "True"
    assert sum("is being written by another run: process " in line for line in lines) == 6
