"""Runs go on in other worlds with the same examples, and in the same world bit for bit."""

import contextlib
import io
import shutil
from dataclasses import replace

import numpy as np
import torch
from program import Fault, Options, digest, model_of
from worlds import KINDS, MESHES, Row, close_rows, close_values, consumed, drawn, newest, same

from chainring import cli, serializers
from chainring.parallel import Communicator
from tries import WrongEndError

LAYOUTS = [*MESHES, ("plain", 1), ("ddp", 2), ("fsdp", 2)]
SAVED_AT, RELAID_AT = 9, 10  # in the midst of the second epoch; of a quotient of means, which counts ranks, none is open
EXACT = [(kind, size, net) for size in (3, 2) for kind in ("plain", "ddp", "fsdp") for net in ("dropout", "batchnorm", "")]
EXACT_MESHES = [(kind, size, net) for net in ("", "dropout") for kind, size in MESHES]


def elsewhere(bench, number, draw, place):
    """A run of one world, continued in another: one cell of the matrix."""
    (kind, size), (other_kind, other_size) = KINDS[number // len(KINDS) % len(KINDS)], KINDS[number % len(KINDS)]
    moved(bench, place, (kind, size), (other_kind, other_size), SAVED_AT)
    return f"{kind} {size} to {other_kind} {other_size}"


def relaid(bench, number, draw, place):
    """A run in one layout, continued in another: of all pairs, each turn begins in each layout and ends in each."""
    first = number % len(LAYOUTS)
    second = (first + 1 + 3 * (number // len(LAYOUTS))) % len(LAYOUTS)
    moved(bench, place, LAYOUTS[first], LAYOUTS[second], RELAID_AT, net="blocks", iterations=14, batch=48, extended=True)
    return f"{LAYOUTS[first][0]} to {LAYOUTS[second][0]}"


def moved(bench, place, first, second, iteration, **settings):
    """A run of one world and layout, continued in another; export of its snapshot, and the average of both."""
    first_place, saved = bench.known(*first, **settings | {"iterations": iteration})
    _, alone = bench.known("plain", 1, **settings)
    shutil.copytree(first_place / "out", place / "out")
    told = bench.run(place, second[1], Options(kind=second[0], **settings)).outcomes()
    same("the iteration", told[0]["started"], iteration)
    same("parameters and optimizer at load", told[0]["at load"], [saved[0]["parameters"], saved[0]["optimizer"]])
    same("the examples", consumed(told), consumed(alone)[iteration:])
    close_rows(told[0]["log"], alone[0]["log"])
    close_values(told[0], alone[0])
    runs, net = [str(first_place / "out"), str(place / "out")], settings.get("net", "")
    before, after = (written(net, "export", run, place / f"{number}.safetensors") for number, run in enumerate(runs))
    same("the exported parameters", digest(before.values()), saved[0]["parameters"])
    mean = written(net, "average", *runs, place / "mean.safetensors")
    expected = [of_mean(before[name].numpy(), value.numpy()) for name, value in after.items()]
    same("the averaged parameters", digest(mean.values()), digest(map(torch.from_numpy, expected)))


def written(net, *command):
    """The state of the plain model, loaded from the file that a command of ``chainring`` writes."""
    with contextlib.redirect_stdout(io.StringIO()):
        if code := cli.main(list(map(str, command))):
            raise WrongEndError(f"chainring {command[0]} ended with {code}")
    model = model_of(Options(net=net), Communicator())
    serializers.load(command[-1], model)
    return model.state_dict()


def of_mean(before, after):
    """The mean of numbers in float64; of a counter the last."""
    if before.dtype.kind != "f":
        return after
    return ((before.astype(np.float64) + after.astype(np.float64)) / 2).astype(after.dtype)


def killed(bench, number, draw, place):
    """A rank is killed at a random moment, and the others end; the same world goes on from the newest snapshot."""
    kind, size, net = drawn(number, EXACT, EXACT_MESHES)
    options = Options(kind=kind, net=net, extended=(kind, size) in MESHES)
    fault = Fault("kill", draw.randrange(size), draw.randrange(options.iterations - 1), draw.uniform(0, 0.01))
    world = bench.run(place, size, replace(options, fault=fault))
    bench.ended_at_once(world, fault.rank)
    there = newest(place / "out")
    bench.exact(place, size, options, there)
    return kind


ROWS = [
    Row(
        "elsewhere", "saved by 1, DDP x2, x3, FSDP2 x2, x3, and continued in each",
        "all equal at load, then the same examples, losses to 1e-5; export gives the plain model, average the mean",
        100, elsewhere,
    ),
    Row(
        "relayouts", "saved by 1, DDP, FSDP2, TP, DP x TP, FSDP2 x TP, HSDP of 2 or 4 ranks, and continued in each",
        "all and the averages equal at load, then the same examples, losses to 1e-5; export gives the plain model, average "
        "the mean",
        len(LAYOUTS) ** 2, relaid,
    ),
    Row(
        "killed", "SIGKILL of a rank at a random moment", "the others end at once; continued, bit for bit the same",
        240, killed,
    ),
]  # fmt: skip
