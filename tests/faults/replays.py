"""Iterations of a run that was killed are replayed, and the batch is looked for in which a run went wrong."""

import contextlib
import functools
import io
import json
import math
import random
import signal
from collections import Counter

import poisoned_program
from bench import Row

import forked
import replay_program
from chainring.testing import replay
from tries import WrongEndError

LENGTH, TRIES_OF_A_RUN = 150, 25
COMMAND = ["-m", "chainring", "bisect", "--json"]


def any_iteration(bench, number, draw, place):
    """Replays an iteration, and compares all of its state with what the run had there."""
    out, kept = _killed_run(bench, number // TRIES_OF_A_RUN)
    iteration = draw.randint(0, LENGTH)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = replay(functools.partial(replay_program.make_trainer, length=LENGTH), out, iteration)
    found, expected = replay_program.state_of(trainer), kept[iteration]
    differing = [path for path in found | expected if found.get(path) != expected.get(path)]
    if differing:
        raise WrongEndError(f"replayed to iteration {iteration}, these differ from the run: {differing[:5]}")
    return Counter({"iterations": 1})


def _killed_run(bench, number):
    """The directory of a run that was killed three times, and what it had after each iteration."""
    place = bench.root / f"replayed-{number}"
    if not place.exists():
        place.mkdir()
        kills = sorted(random.Random(number).sample(range(1, LENGTH), 3))
        for kill in (*kills, LENGTH + 1):
            command = [replay_program.__file__, place / "out", place / "kept", str(kill), str(LENGTH)]
            code = forked.run(command).returncode
            if code != (-signal.SIGKILL if kill <= LENGTH else 0):
                raise WrongEndError(f"the run that was to be killed after iteration {kill} ended with {code}")
    return place / "out", replay_program.read_kept(place / "kept")


def poisoned(bench, number, draw, place):
    """Trains with a wrong example, and finds it again."""
    example = draw.randrange(poisoned_program.ITERATIONS * poisoned_program.BATCH)
    value, is_recorded = draw.choice(["1e4", "nan"]), number % 2 == 0
    script, arguments = poisoned_program.__file__, [str(place / "out"), str(example), value]
    arguments += ["--recorded"] if is_recorded else []
    forked.run([script, *arguments]).check_returncode()
    result = forked.run([*COMMAND, place / "out", "--bad", "main/loss > 100", script])
    if result.returncode != 0:
        raise WrongEndError(
            f"example {example} was not found: {result.returncode}, {result.stdout}, {result.stderr[-2000:]}"
        )
    found = json.loads(result.stdout)
    if example not in found["indices"] or found["same"] != (True if is_recorded else None):
        raise WrongEndError(f"in place of example {example} this was found: {found}")
    if (found["not_finite"] or {}).get("iteration") != (found["iteration"] if value == "nan" else None):
        raise WrongEndError(f"the parameters that were first not finite are wrong: {found}")
    if found["replays"] > math.log2(poisoned_program.ITERATIONS) + 1:
        raise WrongEndError(f"it took {found['replays']} replays")
    return Counter({"batches": 1, "recorded": is_recorded, "replays": found["replays"]})


ROWS = [
    Row(
        "replay", "any iteration of a run that was killed three times is replayed, NaN that were rolled back included",
        "its state is that of the run, to the last bit", "iterations", 200, any_iteration,
    ),
    Row(
        "poison", f"one wrong example in {poisoned_program.ITERATIONS:,} iterations",
        "`chainring bisect` names its iteration and it", "batches", 50, poisoned,
    ),
]  # fmt: skip
