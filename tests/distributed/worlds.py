"""Ranks that are processes, forked from one that has imported torch, and what must be true when they are over."""

import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import layouts
import program
import torch
from torch.distributed import TCPStore

from chainring.serializers._store import open_store
from ports import free_port
from tries import WrongEndError

LIMIT = 240.0  # seconds that a world may take
AT_ONCE = 30.0  # seconds in which all have stopped after one has failed, on a busy machine
MESHES = [(kind, rows * columns) for kind, (rows, columns) in layouts.MESHES.items()]
KINDS = [("plain", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3)]


@dataclass
class Row:
    """A line of the table.

    Attributes:
        name: on the command line.
        done: what is done.
        expected: what must be true afterwards.
        large: how many in ``make faults``.
        attempt: ``attempt(bench, number, draw, place)`` makes one try in an empty directory and returns what it was.
        small: how many in ``make check``.
    """

    name: str
    done: str
    expected: str
    large: int
    attempt: Callable
    small: int = 1

    def make(self, bench, number, draw, place):
        """One try; counts it by what it was."""
        return Counter([self.attempt(bench, number, draw, place)])

    def has_enough(self, counts, wanted):
        return counts.total() >= wanted

    def said(self, counts):
        kinds = ", ".join(f"{value} {key}" for key, value in sorted(counts.items()))
        return f"{counts.total()} tries" + (f" ({kinds})" if 1 < len(counts) < 8 else "")


def drawn(number, worlds, meshes=MESHES):
    """The world of a try: every fourth is on a mesh, the largest first."""
    turn, rest = divmod(number, 4)
    return meshes[-1 - turn % len(meshes)] if rest == 3 else worlds[(number - turn) % len(worlds)]


def set_up(output, environment):
    """Gives this process a file for what it prints, and an environment."""
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    os.environ.update(environment)
    tempfile.tempdir = None  # the variables say where it is


def live(rank, size, port, place, options):
    """The life of a rank."""
    os.setsid()
    set_up(f"{place}/output-{rank}", options.environment)
    warnings.simplefilter("error", UserWarning)
    if size > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in where.items()})
        if options.survive:  # as torchrun's agent, which has the store
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    program.train(options, place)


def forget(place):
    """Removes what the ranks of an earlier run in this place have told."""
    for told in Path(place).glob("outcome-*"):
        told.unlink()


class World:
    """What has become of some ranks.

    Attributes:
        codes: the exit code of each.
        ended: when each ended, in seconds from the start.
        place: where they ran.
    """

    def __init__(self, place, codes, ended):
        self.place, self.codes, self.ended = Path(place), codes, ended

    def output(self, rank):
        """What a rank has printed, in all runs in this place."""
        return (self.place / f"output-{rank}").read_text(errors="replace")

    def outputs(self):
        return "\n".join(f"rank {rank}: {self.output(rank)[-1500:]}" for rank in range(len(self.codes)))

    def outcomes(self, code=0):
        """What the ranks tell, after they all ended with a code.

        Raises:
            WrongEndError: some did not, or they tell different things.
        """
        if self.codes != [code] * len(self.codes):
            raise WrongEndError(f"the ranks ended with codes {self.codes}: {self.outputs()}")
        told = [json.loads((self.place / f"outcome-{rank}.json").read_text()) for rank in range(len(self.codes))]
        for name in ("started", "at load", "iteration", "parameters", "optimizer", "log"):
            if any(each[name] != told[0][name] for each in told):
                raise WrongEndError(f"the ranks differ in {name!r}: {[each[name] for each in told]}")
        return told


class Bench:
    """Starts worlds, and knows how runs end to which nothing happens."""

    def __init__(self):
        folders = map(str, Path(__file__).parents[:2])
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))
        os.environ["OMP_NUM_THREADS"] = "1"
        # One process imports torch, and all of run.py, for all ranks.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["run", "torch._dynamo", "sklearn.datasets"])
        self.root = Path(tempfile.mkdtemp(prefix="chainring-ranks-"))
        self._known = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.root)

    def end(self):
        """Nothing is left of a try that has failed: `run` ends its ranks, come what may."""

    def place(self, name):
        """An empty directory."""
        place = self.root / name
        place.mkdir(parents=True)
        return place

    def start(self, function, *arguments):
        """A process that calls a function."""
        process = self._context.Process(target=function, args=arguments)
        process.start()
        return process

    def run(self, place, size, options):
        """Runs a world to the end of all its ranks; one that is stopped is killed when the others have ended.

        Raises:
            WrongEndError: it took longer than any may.
        """
        forget(place)
        port, began = free_port(), time.monotonic()
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if options.survive else None
        ranks = [self.start(live, rank, size, port, str(place), options) for rank in range(size)]
        ended = [0.0] * size
        try:
            alive = {rank.sentinel: number for number, rank in enumerate(ranks)}
            while alive:
                if options.fault is not None and options.fault.kind == "stop":
                    stopped = {options.fault.rank}
                else:
                    stopped = {rank for rank, *_, number in options.losses if number == signal.SIGSTOP}
                if stopped.issuperset(alive.values()):
                    for rank in stopped:
                        ranks[rank].kill()
                ready = multiprocessing.connection.wait(list(alive), max(0.0, began + LIMIT - time.monotonic()))
                if not ready:
                    raise WrongEndError(f"ranks {list(alive.values())} had not ended after {LIMIT:g} s")
                for sentinel in ready:
                    ended[alive.pop(sentinel)] = time.monotonic() - began
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
            del store
        return World(place, [rank.exitcode for rank in ranks], ended)

    def known(self, kind, size, **settings):
        """The place of an uninterrupted run and what its ranks told; it is made once."""
        options = program.Options(kind=kind, **settings)
        key = size, program.as_json(options)
        if key not in self._known:
            place = Path(tempfile.mkdtemp(prefix="known-", dir=self.root))
            self._known[key] = place, self.run(place, size, options).outcomes()
        return self._known[key]

    def exact(self, place, size, options, start):
        """Goes on in a place without a fault, from an iteration, to the end of the run to which nothing happens."""
        told = self.run(place, size, replace(options, fault=None)).outcomes()
        same("the iteration from which it went on", told[0]["started"], start)
        known = {name: value for name, value in asdict(options).items() if name in ("net", "period", "extended")}
        self.compare(told, self.known(options.kind, size, **known)[1])

    def compare(self, told, expected):
        """The ranks tell the same as others, those examples left out that were consumed before they went on."""
        for rank, other in zip(told, expected, strict=True):
            differing = [name for name in ("parameters", "optimizer", "log", "drawn") if rank[name] != other[name]]
            if rank["parts"] != other["parts"][rank["started"] :]:
                differing.append("examples")
            if differing:
                raise WrongEndError(
                    f"these differ from the uninterrupted run: {differing}; gone on after {rank['started']}, and the first "
                    f"rows that differ are {first_difference(rank['log'], other['log'])}"
                )

    def ended_at_once(self, world, first, code=-signal.SIGKILL):
        """All ranks have ended soon after the first, which has a code, and the others with an error."""
        same("the exit codes", world.codes, [code if rank == first else 1 for rank in range(len(world.codes))])
        if (seconds := max(world.ended) - min(world.ended)) > AT_ONCE:
            raise WrongEndError(f"the last rank ended {seconds:.1f} s after the first: {world.outputs()}")


def consumed(told):
    """The examples of each part of each update in their global order, of which rank r of n has had ``[r::n]``.

    Ranks that compute one model together have had the same.
    """
    merged, of_ranks = [], {}
    for each in told:
        same("the examples of ranks of one model", each["parts"], of_ranks.setdefault(each["data"], each["parts"]))
    for parts in zip(*(of_ranks[rank] for rank in sorted(of_ranks)), strict=True):
        whole = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            if len(whole[rank :: len(parts)]) != len(part):
                raise WrongEndError(f"the ranks have had {[len(part) for part in parts]} examples of a batch")
            whole[rank :: len(parts)] = part
        merged.append(whole)
    return merged


def same(what, found, expected):
    """Raises where two things differ."""
    if found != expected:
        raise WrongEndError(f"{what}: {found}, and expected was {expected}")


def first_difference(rows, others):
    """The first rows of two logs that are not the same, or ``None``."""
    return next((pair for pair in zip(rows, others, strict=False) if pair[0] != pair[1]), None)


def close_rows(found, expected, tolerance=1e-5):
    """The rows of two logs have the same keys, and numbers that differ by no more than the tolerance."""
    same("the rows of the log", [sorted(row) for row in found], [sorted(row) for row in expected])
    for row, other in zip(found, expected, strict=True):
        for key, value in row.items():
            if abs(value - other[key]) > tolerance:
                raise WrongEndError(f"{key} at iteration {row['iteration']} is {value}, and expected was {other[key]}")


def close_values(told, expected, tolerance=1e-4, name="values"):
    """The parameters, or the gradients, are the same to a tolerance."""
    for value, other in zip(told[name], expected[name], strict=True):
        difference = (torch.tensor(value) - torch.tensor(other)).abs().max().item()
        if difference > tolerance:
            raise WrongEndError(f"{name} differ by up to {difference:g}")


def newest(out):
    """The iteration of the newest of the snapshots in a directory, each of which must be whole; 0 where there is none."""
    store = open_store(out)
    return max((store.snapshot(entry.name).verify().iteration for entry in out.glob("snapshot_iter_*")), default=0)
