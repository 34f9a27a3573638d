"""Worlds of several sizes take one path, or at least the same examples, or refuse on every rank."""

from program import Options
from worlds import MESHES, Row, close_rows, close_values, consumed, drawn, same

from tries import WrongEndError

WORLDS = [("plain", 2), ("plain", 3), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3)]
SETTINGS = [
    {},
    {"held_out": 2},  # fewer than ranks
    {"batch": 32},  # which three ranks do not divide
    {"accumulate": 2},
    {"examples": 101, "repeat": False},  # the last batch is of one example: some shares are empty
    {"examples": 101, "repeat": False, "accumulate": 2},
]
ON_MESHES = [
    {"clip": 0.1, "batch": 24, "accumulate": 2, "extended": True},
    {},
    {"batch": 31, "held_out": 2, "optimizer": "SGD"},
    # Adam would enlarge the rounding of the gradients in few steps where they are no larger than its eps.
    {"examples": 101, "repeat": False, "optimizer": "Adagrad"},
]
RANDOM = [(net, *world) for net in ("dropout", "batchnorm") for world in WORLDS]


def one_path(bench, number, draw, place):
    """The losses of one rank to float tolerance, and its examples in its order."""
    kind, size = WORLDS[number % len(WORLDS)]
    settings = SETTINGS[number // len(WORLDS) % len(SETTINGS)]
    options = Options(kind=kind, **settings)
    told = bench.run(place, size, options).outcomes()
    _, alone = bench.known("plain", 1, **settings)
    same("the examples", consumed(told), consumed(alone))
    close_rows(told[0]["log"], alone[0]["log"])
    close_values(told[0], alone[0])
    return kind


def on_a_mesh(bench, number, draw, place):
    """The gradients and the losses of one process, and its examples in its order, with its parameters in the end."""
    kind, size = MESHES[-1 - number % len(MESHES)]  # the largest first
    settings = {"net": "blocks", "gradients": True, **ON_MESHES[number // len(MESHES) % len(ON_MESHES)]}
    told = bench.run(place, size, Options(kind=kind, **settings)).outcomes()
    _, alone = bench.known("plain", 1, **settings)
    same("the examples", consumed(told), consumed(alone))
    close_values(told[0], alone[0], 1e-6, "gradients")
    close_rows(told[0]["log"], alone[0]["log"])
    close_values(told[0], alone[0], 1e-5)
    return kind


def same_examples(bench, number, draw, place):
    """A net that draws, or has statistics of the batch: the examples and their order, and streams of their own."""
    net, kind, size = RANDOM[number % len(RANDOM)]
    told = bench.run(place, size, Options(kind=kind, net=net)).outcomes()
    _, alone = bench.known("plain", 1, net=net)
    same("the examples", consumed(told), consumed(alone))
    streams = {each["drawn"] for each in told}
    same("the number of streams", len(streams), size)
    if told[0]["log"][-1]["main/loss"] > 0.8 * told[0]["log"][0]["main/loss"]:
        raise WrongEndError(f"nothing was learned: {told[0]['log'][-1]}")
    return net


def too_small(bench, number, draw, place):
    """A batch of one example less than there are ranks to share it: an error that says what to do, on every rank."""
    kind, size = drawn(number, [("plain", 3), ("ddp", 3), ("fsdp", 3)], [("dp2tp2", 4), ("hsdp2x2", 4), ("fsdp2tp2", 4)])
    share = 2 if "tp2" in kind else size  # the others compute a model with one of them
    world = bench.run(place, size, Options(kind=kind, batch=share - 1))
    same("the exit codes", world.codes, [1] * size)
    for rank in range(size):
        if f"ValueError: a batch of {share - 1} examples cannot be shared by {share} ranks" not in world.output(rank):
            raise WrongEndError(f"rank {rank} does not say why: {world.output(rank)[-2000:]}")
    return kind


ROWS = [
    Row(
        "path", "plain, DDP, FSDP2 with 2 and 3 ranks: batches and held-out sets of all sizes, accumulation",
        "the losses of one rank to 1e-5, its examples in its order",
        4 * len(WORLDS) * len(SETTINGS), one_path,
    ),
    Row(
        "meshes",
        "meshes of 2x1, 1x2, 2x2: tensor parallel with and without FSDP2, HSDP; clipping, accumulation, averages, tails",
        "gradients of one process to 1e-6, its examples in its order; after 20 updates parameters and losses to 1e-5",
        4 * len(MESHES), on_a_mesh,
    ),
    Row(
        "examples", "the same with dropout, with BatchNorm", "its examples in its order; a stream of draws for each rank",
        4 * len(RANDOM), same_examples,
    ),
    Row("refused", "a batch smaller than the world", "every rank says so, and what to do", 16, too_small),
]  # fmt: skip
