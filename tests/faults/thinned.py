"""A run that was killed is thinned, and thinning is killed: what is not there any more is made again, and is the same.

python tests/faults/thinned.py OUT KEPT KILL_AT LENGTH    the run
python tests/faults/thinned.py OUT OPERATION              it is thinned, and killed there
"""

import contextlib
import functools
import io
import json
import random
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import injected
from bench import Row

import forked
import replay_program
from chainring.cli import main
from chainring.serializers._store import Thinned, open_store
from chainring.testing import replay
from chainring.training import extensions
from tries import WrongEndError

LENGTH, SHORT, EVERY = 150, 45, "20 iteration"  # iterations of the run, and of one that is thinned often
STEPS = 8  # operations on the file system for one snapshot, and those around them


def make_trainer(out, length):
    """The trainer, which takes a snapshot after every iteration, and goes back to the newest where a loss is NaN."""
    trainer = replay_program.make_trainer(out, workers=0, length=length)
    trainer.extend(extensions.snapshot("t_{.updater.iteration}"), trigger=(1, "iteration"))
    return trainer


def made_again(bench, number, draw, place):
    """Makes a snapshot again that was thinned, and compares all of its state with what the run had there."""
    whole, kept = _killed_run(bench, LENGTH)
    out = bench.root / "thinned"
    if not out.exists():
        shutil.copytree(whole, out, symlinks=True)
        _thin(out)
    gone = _thinned_in(out)
    iteration = gone[number * 7 % len(gone)]
    trainer = _replayed(out, iteration, LENGTH)
    found, expected = replay_program.state_of(trainer), kept[iteration]
    differing = [path for path in found | expected if found.get(path) != expected.get(path)]
    if differing:
        raise WrongEndError(f"iteration {iteration} is made again, and these differ from the run: {differing[:5]}")
    return Counter({"snapshots": 1})


def killed(bench, number, draw, place):
    """Kills `chainring thin` at an operation on the file system; whatever is gone then is made again."""
    whole, kept = _killed_run(bench, SHORT)
    out = shutil.copytree(whole, place / "out", symlinks=True)
    operation = (number + 1 if number < STEPS else draw.randint(1, 5 * SHORT)), "before"
    process = forked.run([__file__, out, json.dumps(operation)])
    if process.returncode not in (0, -signal.SIGKILL):
        raise WrongEndError(f"it ended with {process.returncode}: {process.stderr[-2000:]}")
    gone = _thinned_in(out)
    _thin(out)
    again = _thinned_in(out)
    if not set(gone) <= set(again) or any(len([*(out / f"t_{iteration}").iterdir()]) > 1 for iteration in again):
        raise WrongEndError(f"killed at operation {operation}, {len(gone)} were thinned, and then {len(again)}")
    for iteration in {*gone[-1:], draw.choice(again)}:
        if replay_program.state_of(_replayed(out, iteration, SHORT)) != kept[iteration]:
            raise WrongEndError(f"killed at operation {operation}, iteration {iteration} is another one")
    return Counter({"kills": process.returncode != 0, "in the middle": 0 < len(gone) < len(again), "tries": 1})


def _killed_run(bench, length):
    """The directory of a run that was killed twice, and what it had after each iteration."""
    place = bench.root / f"to-be-thinned-{length}"
    if not place.exists():
        place.mkdir()
        for kill in (*sorted(random.Random(0).sample(range(1, length), 2)), length + 1):
            code = forked.run([__file__, place / "out", place / "kept", str(kill), str(length)]).returncode
            if code != (-signal.SIGKILL if kill <= length else 0):
                raise WrongEndError(f"the run that was to be killed after iteration {kill} ended with {code}")
    return place / "out", replay_program.read_kept(place / "kept")


def _thin(out):
    with contextlib.redirect_stdout(io.StringIO()):
        if main(["thin", str(out), "--every", EVERY]) != 0:
            raise WrongEndError(f"{out} cannot be thinned")


def _thinned_in(out):
    """The iterations of the snapshots that were thinned; every other one is verified."""
    gone, store = [], open_store(out)
    for name in store.names():
        try:
            store.snapshot(name).verify()
        except Thinned as error:
            gone.append(error.manifest.iteration)
    return sorted(gone)


def _replayed(out, iteration, length):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return replay(functools.partial(make_trainer, length=length), out, iteration)


ROWS = [
    Row(
        "thinned", "snapshots of a run that was killed and has gone back are thinned, and made again",
        "the digests that are left, and all of the run's state, to the last bit", "snapshots", 100, made_again, small=3,
    ),
    Row(
        "thin", "SIGKILL of `chainring thin` at each of its operations on the file system",
        "every snapshot is whole, or its digests are there; a second call ends it; what is gone is made again",
        "tries", 60, killed, small=STEPS,
    ),
]  # fmt: skip

if __name__ == "__main__":
    if len(sys.argv) == 3:
        operation = json.loads(sys.argv[2])
        injected.Injected(injected.Plan(operation=tuple(operation)), lambda message: None).install()
        sys.exit(main(["thin", sys.argv[1], "--every", EVERY]))
    trainer = make_trainer(sys.argv[1], int(sys.argv[4]))
    trainer.watch(replay_program.Keeping(sys.argv[2], int(sys.argv[3])))
    trainer.run()
