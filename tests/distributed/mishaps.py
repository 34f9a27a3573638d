"""What happens to one rank, and what becomes of the others: none waits, none is left, and the run goes on exactly."""

import shutil
import time
from dataclasses import replace

from program import CODE, Fault, Options
from worlds import MESHES, Row, drawn, newest, same

from tries import WrongEndError

TIMEOUT = 10.0  # seconds for which others wait for a rank that stalls, and no other is late on a busy machine
WORLDS = [(kind, size) for size in (2, 3) for kind in ("plain", "ddp", "fsdp")]
SHARDED = [("fsdp", 2), ("fsdp", 3)]
SHARDED_MESHES = [("hsdp2x2", 4), ("dp1tp2", 2), ("fsdp2tp2", 4)]  # of which each rank writes a part


def raises(bench, number, draw, place):
    """A rank raises in its dataset or its loss: all end with its traceback."""
    kind, size = drawn(number, WORLDS)
    fault = Fault(("example", "loss")[number // len(WORLDS) % 2], draw.randrange(size), draw.randrange(20))
    options = Options(kind=kind, fault=fault)
    world = bench.run(place, size, options)
    same("the exit codes", world.codes, [1] * size)
    bench.ended_at_once(world, fault.rank, code=1)
    for rank in range(size):
        said = [
            "in_" + fault.kind,
            f"broken {fault.kind}",
            *([f"rank {fault.rank} has failed"] if rank != fault.rank else []),
        ]
        if missing := [text for text in said if text not in world.output(rank)]:
            raise WrongEndError(f"rank {rank} does not say {missing}: {world.output(rank)[-3000:]}")
    bench.exact(place, size, options, newest(place / "out"))
    return fault.kind


def killed_in_write(bench, number, draw, place):
    """Of ranks that each write a part, one is killed before a flush: that snapshot is absent, those before are whole."""
    kind, size = drawn(number, SHARDED, SHARDED_MESHES)
    rank = draw.randrange(size)
    fault = Fault("write", rank, draw.randrange(4, 15), number=1 if rank else draw.randint(1, 4))
    options = Options(kind=kind, fault=fault)
    world = bench.run(place, size, options)
    bench.ended_at_once(world, rank)
    bench.exact(place, size, options, newest(place / "out"))
    return "of rank 0" if rank == 0 else "of another"


def held_up(bench, number, draw, place):
    """Snapshots are written late, when the parameters are others already: each has the state of its own iteration."""
    kind, size = drawn(number, SHARDED, SHARDED_MESHES)
    options = Options(kind=kind, fault=Fault("hold", 0, 0, delay=draw.uniform(0.02, 0.1)))
    bench.compare(bench.run(place, size, options).outcomes(), bench.known(kind, size)[1])
    start = draw.choice([4, 8, 12])
    for later in range(start + 4, 21, 4):
        shutil.rmtree(place / "out" / f"snapshot_iter_{later}")
    bench.exact(place, size, options, start)
    return f"{kind} {size}"


def slow(bench, number, draw, place):
    """A rank is slow in every update: the others wait, and nothing else happens."""
    kind, size = drawn(number, WORLDS)
    fault = Fault("slow", draw.randrange(size), 0, delay=0.05)
    told = bench.run(place, size, Options(kind=kind, fault=fault)).outcomes()
    bench.compare(told, bench.known(kind, size)[1])
    return kind


def terminated(bench, number, draw, place):
    """SIGTERM to one rank at a random moment: all end after the same iteration, with one snapshot of it."""
    kind, size = drawn(number, WORLDS)
    options = Options(kind=kind, period=7)
    while True:
        fault = Fault("term", draw.randrange(size), draw.randrange(options.iterations), draw.uniform(0, 0.02))
        world = bench.run(place, size, replace(options, fault=fault))
        if world.codes != [0] * size:
            break
        bench.compare(world.outcomes(), bench.known(kind, size, period=7)[1])  # it came too late
        shutil.rmtree(place)
        place.mkdir()
    told = world.outcomes(CODE)
    iteration, came = told[0]["iteration"], told[fault.rank]["signalled"]
    if came is None or iteration > came + 2:
        raise WrongEndError(f"the signal came after iteration {came}, and all ended after {iteration}")
    taken = sorted(int(found.name.rpartition("_")[2]) for found in (place / "out").glob("snapshot*"))
    same("the snapshots", taken, sorted({*range(7, iteration + 1, 7), iteration}))
    bench.exact(place, size, options, iteration)
    return kind


def stalls(bench, number, draw, place):
    """A rank stalls at a random moment: the others name it, its last iteration and its stack, and all end; then exact."""
    kind, size = [*WORLDS, *MESHES][number // 3 % (len(WORLDS) + len(MESHES))]
    options = Options(kind=kind, timeout=TIMEOUT)
    stall = ("stop", "asleep", "deadlock")[number % 3]
    late = []
    while True:
        delay = draw.uniform(0, 0.02) if stall == "stop" else 0.0
        fault = Fault(stall, draw.randrange(size), draw.randrange(options.iterations), delay)
        began = time.time()
        world = bench.run(place, size, replace(options, fault=fault))
        others = [rank for rank in range(size) if rank != fault.rank]
        if any(world.codes[rank] for rank in others):
            stalled_at = (place / "happened").stat().st_mtime - began + delay
            late.append(max(world.ended[rank] for rank in others) - stalled_at)
            if late[-1] <= TIMEOUT + 10:
                break
            if len(late) == 3:  # which no machine is by itself so often
                raise WrongEndError(f"the others ended {late} s later: {world.outputs()}")
        shutil.rmtree(place)  # it came too late
        place.mkdir()
    same("the exit codes of the others", [world.codes[rank] for rank in others], [1] * len(others))
    iterations = [fault.iteration]
    if stall == "stop":
        seen = int((place / "iteration").read_text())  # in an extension, which comes after the update
        iterations = [seen, seen + 1]
    where = {"stop": "Its process is stopped", "asleep": "in in_example", "deadlock": "in deadlock"}[stall]
    for rank in others:
        text = world.output(rank)
        named = [f"has iteration {iteration} as its last" for iteration in iterations]
        if f"rank {fault.rank} has not arrived" not in text or where not in text or not any(name in text for name in named):
            raise WrongEndError(f"rank {rank} does not say {where!r} and one of {named}: {text[-3000:]}")
    bench.exact(place, size, options, newest(place / "out"))
    return stall


ROWS = [
    Row("raises", "a rank raises in its dataset or its loss", "all end at once with its traceback", 80, raises),
    Row(
        "write", "SIGKILL of a rank in its write, of sharded models",
        "the others end at once; no unreadable snapshot; resume exact",
        80, killed_in_write,
    ),
    Row(
        "late", "writes that begin late, of sharded models", "each snapshot has the state of its iteration; resume exact",
        28, held_up,
    ),
    Row("slow", "a slow rank", "nothing but that", 28, slow),
    Row(
        "sigterm", "SIGTERM to one rank at a random moment",
        "all end after the same iteration with one snapshot and exit 143; resume exact", 268, terminated,
    ),
    Row(
        "stalls", "SIGSTOP, a data set that sleeps, a deadlock in an extension",
        f"named with its last iteration and its stack within {TIMEOUT:g} s + 10 s; resume exact", 50, stalls,
    ),
]  # fmt: skip
