"""With virtual ranks a run has the same bits on any number of ranks."""

import hashlib
import json
import re
from dataclasses import replace

import torch
from program import Fault, Options
from worlds import Row, first_difference, newest

from chainring.serializers._loading import read_state
from tries import WrongEndError

BOTH = {"net": "batchnorm dropout"}
COLUMNS = {
    "dropout": {"net": "dropout"},
    "BatchNorm": {"net": "batchnorm"},
    "clipping": {**BOTH, "clip": 0.1},
    "bf16": {**BOTH, "precision": "bf16"},
    "fp16": {**BOTH, "precision": "fp16"},
    "accumulate": {**BOTH, "accumulate": 3},
    "update_core": {**BOTH, "own_core": True},
    "token weights": {**BOTH, "tokens": True},
    "metrics": {**BOTH, "counts": True, "held_out": 33, "precision": "bf16"},
    "uneven": {
        "net": "dropout",
        "counts": True,
        "examples": 203,
        "batch": 20,
        "repeat": False,
    },  # the last batch is of three
    "uneven BatchNorm": {**BOTH, "examples": 196, "batch": 20, "repeat": False, "accumulate": 2},  # of 16
    "DDP": {**BOTH, "kind": "ddp", "clip": 0.1},
    "DDP accumulates": {**BOTH, "kind": "ddp", "accumulate": 2, "own_core": True, "precision": "bf16"},
    "extensions": {**BOTH, "extended": True, "counts": True, "period": 3},  # saved in the middle of their intervals
    "FSDP2 extensions": {**BOTH, "extended": True, "kind": "fsdp"},
    "FSDP2": {**BOTH, "kind": "fsdp", "clip": 0.1},
    "FSDP2 accumulates": {**BOTH, "kind": "fsdp", "accumulate": 2, "own_core": True, "precision": "bf16"},
    "FSDP2 uneven": {
        "net": "dropout",
        "counts": True,
        "kind": "fsdp",
        "examples": 203,
        "batch": 20,
        "repeat": False,
        "precision": "fp16",
    },
}
OF_A_WORLD = re.compile(r"elapsed_time|extensions/LogReport/file|generators/[1-9]")  # the file of the log has times in it
MOVING = {
    "plain": {"clip": 0.1},
    "ddp": {"clip": 0.1},
    "fsdp": {"clip": 0.1},
    "plain update_core": {"own_core": True, "precision": "bf16"},
    "ddp accumulates": {"accumulate": 2},
}
FEW, MANY = (1, 2, 3), (1, 2, 3, 4, 5, 7)


def any_size(bench, number, draw, place):
    """A column of the matrix: one digest on all numbers of ranks."""
    name = list(COLUMNS)[number % len(COLUMNS)]
    turn = number // len(COLUMNS)
    options = Options(virtual_ranks=7 + (number + turn) % 2, iterations=10, **COLUMNS[name])
    ends = {}
    for size in MANY if turn else FEW:
        where = place / str(size)
        where.mkdir()
        ends[size] = end_of(where, bench.run(where, size, options).outcomes()[0])
        compare(size, ends[size], ends[1])
    return name


def mixed(bench, number, draw, place):
    """Settings drawn at random, on one rank and on another number of them."""
    options = random_options(draw)
    ends = {}
    for size in (1, draw.randint(2, min(options.virtual_ranks, 6))):
        where = place / str(size)
        where.mkdir()
        ends[size] = end_of(where, bench.run(where, size, options).outcomes()[0])
        try:
            compare(size, ends[size], ends[1])
        except WrongEndError as error:
            raise WrongEndError(f"{options}: {error}") from None
    return options.kind


def random_options(draw):
    options = Options(
        kind=draw.choice(["plain", "ddp", "fsdp"]),
        net=draw.choice(["", "dropout", "batchnorm", "batchnorm dropout"]),
        batch=draw.choice([20, 50]),
        accumulate=draw.choice([1, 1, 2, 3]),
        held_out=draw.randint(1, 40),
        virtual_ranks=draw.randint(2, 9),
        precision=draw.choice(["fp32", "bf16", "fp16"]),
        clip=draw.choice([None, 0.1]),
        tokens=draw.random() < 0.5,
        own_core=draw.random() < 0.3,
        counts=draw.random() < 0.5,
        extended=draw.random() < 0.3,
        across=draw.random() < 0.7,
        optimizer=draw.choice(["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"]),
        iterations=6,
        period=3,
    )
    if options.own_core:
        options.tokens = options.extended = False
    if draw.random() < 0.3:
        options.repeat = False
        # BatchNorm has no statistics of a share of one example.
        options.examples = 5 * options.batch + (0 if "batchnorm" in options.net else draw.randrange(options.batch))
    return options


def moves(bench, number, draw, place):
    """A run is killed again and again, each time goes on with another number of ranks, and ends like one that was not."""
    name = list(MOVING)[number % len(MOVING)]
    settings = {"virtual_ranks": 8, **BOTH, **MOVING[name]}
    options = Options(kind=name.split()[0], **settings)
    known_place, known = bench.known("plain", 1, **settings)
    size, sizes = 0, []
    for _ in range(3):
        size = draw.choice([other for other in range(1, 6) if other != size])
        sizes.append(str(size))
        there = newest(place / "out") if (place / "out").exists() else 0
        fault = Fault("kill", draw.randrange(size), draw.randrange(there, options.iterations - 1), draw.uniform(0, 0.01))
        world = bench.run(place, size, replace(options, fault=fault))
        bench.ended_at_once(world, fault.rank)
        (place / "happened").unlink()
    size = draw.choice([other for other in range(1, 6) if other != size])
    told = bench.run(place, size, options).outcomes()
    compare(f"{', '.join(sizes)} and {size}", end_of(place, told[0]), end_of(known_place, known[0]))
    return name


def end_of(place, told):
    """What a run has come to, as rank 0 tells, and what its last snapshot holds, as read in one process."""
    state = read_state(place / "out" / f"snapshot_iter_{newest(place / 'out')}")
    saved = {f"snapshot {name}": in_words(value) for name, value in state.items() if not OF_A_WORLD.match(name)}
    return {name: told[name] for name in ("iteration", "parameters", "optimizer", "log")} | saved


def in_words(value):
    """A value of a snapshot, of an array its dtype, shape and digest."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    elements = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(elements).hexdigest()}"


def sha256(end):
    return hashlib.sha256(json.dumps(end, sort_keys=True).encode()).hexdigest()


def compare(size, end, expected):
    """Raises if a run on so many ranks has not come to the same as another, to the last bit."""
    if sha256(end) == sha256(expected):
        return
    differing = [name for name in sorted({*end, *expected}) if end.get(name) != expected.get(name)]
    row, other = first_difference(end["log"], expected["log"]) or ({}, {})
    values = {key: (row.get(key), other.get(key)) for key in {*row, *other} if row.get(key) != other.get(key)}
    raise WrongEndError(f"on {size} ranks these differ from one rank: {differing}; and first in the log {values}")


ROWS = [
    Row(
        "bits", "virtual_ranks=7 and 8, each column on 1, 2, 3 ranks, in the large table on 1, 2, 3, 4, 5, 7",
        "one SHA-256 of parameters, optimizer, log and the last snapshot",
        5 * len(COLUMNS), any_size,
    ),
    Row(
        "mixed", "settings drawn at random, on one rank and on 2 to 6", "the same SHA-256", 150, mixed,
    ),
    Row(
        "moves", "virtual_ranks=8, SIGKILL of a rank at three random moments, gone on each time with 1 to 5 ranks",
        "the same SHA-256 as of one process that nothing happened to", 20 * len(MOVING), moves,
    ),
]  # fmt: skip
