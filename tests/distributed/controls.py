"""Commands to a run of 1 to 4 ranks, between kills: each is carried out once, to the bits of a run without kills.

The run is in a directory, or in an object store.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
from worlds import Row

import chainring
from chainring._runs.finished import FinishedRun
from chainring.parallel import Communicator, create_communicator
from ports import free_port
from tries import WrongEndError

sys.path += [str(Path(__file__).parents[1] / name) for name in ("training", "remote")]  # the run, and the server

import commanded

KILLS, RANKS = 4, 4  # a try; the most ranks
REST = 30  # iterations after the last command
SECONDS = 1.5  # in which a process is killed, at most, after its run has begun
LIMIT = 120.0
COMMANDS = (
    lambda draw: f"lr={draw.choice([0.1, 0.05, 0.02, 0.01])}",
    lambda draw: f"lr:main={draw.choice([0.1, 0.03])}",
    lambda draw: f"weights=web:{draw.randint(1, 9)},code:{draw.randint(1, 9)}",
    lambda draw: "call=count",
    lambda draw: "snapshot",
    lambda draw: f'stop=({draw.randint(10**8, 10**9)}, "iteration")',
)


def train(comm, out, wanted):
    """A run that ends some iterations after so many commands are recorded; an iteration takes a while."""

    def is_over(trainer):
        done = commanded.recorded(trainer.out) if trainer.comm.is_main and trainer.updater.iteration % 20 == 0 else []
        is_told = "stop" in chainring.control(out).split() if len(done) == wanted else False
        if len(done) == wanted and not is_told and trainer.updater.iteration >= done[-1]["iteration"] + REST:
            chainring.control(out, "stop")

    def rest(trainer):
        time.sleep(0.003)
        is_over(trainer)

    trainer = commanded.build(out, 10**7, rest, comm=comm, virtual_ranks=4, saves=is_fortieth)
    trainer.run()
    return trainer


def is_fortieth(trainer):
    """The trigger of the snapshots."""
    return trainer.updater.iteration % 40 == 0


def rank(number, size, port, place, out, wanted, environment):
    """One rank of the run."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), **environment)
    sys.stdout = sys.stderr = open(place / f"output-{number}", "a")  # noqa: SIM115 - to the end
    comm = create_communicator("cpu") if size > 1 else Communicator()
    trainer = train(comm, out, wanted)
    if number == 0:
        (place / "bits").write_text(json.dumps(commanded.bits(trainer)))
    comm.close()


def start(size, *settings):
    """The processes of the ranks."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    ranks = [context.Process(target=rank, args=(number, size, port, *settings)) for number in range(size)]
    for process in ranks:
        process.start()
    return ranks


def begins(out, starts):
    """Waits until the record has so many starts and there is a snapshot, from which a killed run goes on."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            run = FinishedRun.open(out)
            if len(run.record.get("starts", ())) > starts and any(name.startswith("later") for name in run.store.names()):
                return
        time.sleep(0.02)
    raise WrongEndError("the run has not begun")


def controlled_in_a_store(bench, number, draw, place):
    """The run is at an address, and in half of the tries some requests of its ranks fail."""
    from faulty_proxy import FaultyProxy
    from object_server import environment_for, make_bucket, running_server

    with running_server() as server, FaultyProxy(server) as proxy:
        make_bucket(server, "ranks")
        os.environ.update(environment_for(server))  # of this process, which gives the commands
        (place / "tmp").mkdir()
        if number % 2:
            proxy.fail_at_random(0.03, seed=number)
        environment = environment_for(proxy.url) | {"TMPDIR": str(place / "tmp")}
        return controlled(bench, number, draw, place, "s3://ranks/run", environment)


def controlled(bench, number, draw, place, out=None, environment=None):
    """A run is given commands and killed, again and again, on 1 to 4 ranks; then it goes on to its end."""
    out, given, ranks = out or str(place / "out"), [], []
    try:
        for attempt in range(KILLS + 1):
            size = draw.randint(1, RANKS)
            wanted = 10**9 if attempt < KILLS else sum(map(len, given)) + 5
            ranks = start(size, place, out, wanted, environment or {})
            begins(out, attempt)
            until = time.monotonic() + draw.uniform(0.1, SECONDS)
            for _ in range(5):
                time.sleep(draw.uniform(0, max(until - time.monotonic(), 0) / 2))
                commands = [draw.choice(COMMANDS)(draw)]
                chainring.control(out, *commands)
                given.append(commands)
            if attempt < KILLS:
                time.sleep(max(until - time.monotonic(), 0))
                for process in draw.sample(ranks, len(ranks)):
                    os.kill(process.pid, signal.SIGKILL)
            for process in ranks:
                process.join(LIMIT)
    finally:
        for process in ranks:
            process.kill()
    told = "".join(file.read_text()[-2000:] for file in place.glob("output-*"))
    if any(process.exitcode for process in ranks):
        raise WrongEndError(f"{[process.exitcode for process in ranks]} {told}")
    run = FinishedRun.open(out)
    entries = run.record.get("commands", [])
    commands = [command for each in given for command in each]
    if [entry["command"] for entry in entries] != [*commands, "stop"] or any("refused" in entry for entry in entries):
        raise WrongEndError(f"{commands} were given, and carried out: {entries}")
    bits = json.loads((place / "bits").read_text())
    plain = alone(place / "plain", entries)
    if json.loads(json.dumps(commanded.bits(plain))) != bits:
        raise WrongEndError(f"other bits than without kills: {entries} {told}")
    if run.file("recorder.bin").read_bytes() != (place / "plain" / "recorder.bin").read_bytes():
        raise WrongEndError("recorder.bin is not that of a run without kills")
    return f"runs with {KILLS} kills and {len(commands)} commands"


def alone(out, entries):
    """The run in one process and without kills, in which a function does what the record says."""

    def do(trainer):
        updater = trainer.updater
        for entry in (entry for entry in entries if entry["iteration"] == updater.iteration):
            kind, _, value = entry["command"].partition("=")
            if kind.startswith("lr"):
                updater.get_optimizer("main").param_groups[0]["lr"] = float(value)
            elif kind == "weights":
                weights = dict(pair.split(":") for pair in value.split(","))
                updater.get_iterator("main").change_weights({name: float(weight) for name, weight in weights.items()})
            elif kind == "call":
                trainer.get_extension("count").calls += 1

    trainer = commanded.build(out, entries[-1]["iteration"], do, virtual_ranks=4, loads=None)
    trainer.run()
    return trainer


ROWS = [
    Row(
        "controls",
        f"{KILLS * 5 + 5} commands to a run that is killed {KILLS} times, on another number of 1 to 4 ranks each time",
        "each is carried out once, in their order; all bits, and what the recorder has, as in one process without kills",
        25,
        controlled,
    ),
    Row(
        "orders",
        "the same to a run in an object store, in half of the tries with requests that fail",
        "the same",
        20,
        controlled_in_a_store,
    ),
]
