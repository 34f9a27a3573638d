"""Machines that are lost: torchruns of one rank each, which are killed or stopped with it, and the others go on.

The torchruns are forked, and their ranks from them, so that none imports torch; they meet at a store of this process.
"""

import multiprocessing.connection
import os
import signal
import time
import traceback
from functools import partial

import lost
import program
from torch.distributed import TCPStore, run
from torch.distributed.launcher.api import elastic_launch
from worlds import LIMIT, Row, World, forget, set_up

from tries import WrongEndError

ARGUMENTS = ["--nproc-per-node", "1", "--max-restarts", "0", "--rdzv-backend", "c10d", "--rdzv-conf", "is_host=0"]


def be_machine(name, size, port, place, options, told):
    """The life of a torchrun, in a process group with its rank."""
    os.setsid()
    set_up(f"{place}/torchrun-{name}", options.environment)
    os.environ["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
    arguments = ["--nnodes", f"1:{size}", *ARGUMENTS, "--start-method", "fork", program.__file__]
    config, *_ = run.config_from_args(run.parse_args(arguments))
    elastic_launch(config, be_rank)(place, options, told)


def be_rank(place, options, told):
    """The life of a rank, which tells how it ends."""
    rank = int(os.environ["RANK"])
    told.send(rank)
    set_up(f"{place}/output-{rank}", {})
    try:
        program.train(options, place)
    except BaseException:
        traceback.print_exc()
        told.send(1)
        raise
    told.send(0)


def run_machines(bench, place, size, options):
    """Runs a world to the end of its ranks: torchrun itself would wait for those that are lost, five minutes."""
    forget(place)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    machines, ends, codes = [], {}, {}
    until = time.monotonic() + LIMIT
    stopped = {rank for rank, *_, number in options.losses if number == signal.SIGSTOP}
    try:
        for name in range(size):
            end, told = multiprocessing.Pipe(duplex=False)
            arguments = (name, size, store.port, str(place), options, told)
            machines.append(bench.start(be_machine, *arguments))
            told.close()
            ends[end] = None  # the rank, as soon as that is known
        while not stopped.issuperset(ends.values()):
            ready = multiprocessing.connection.wait(list(ends), max(0.0, until - time.monotonic()))
            if not ready:
                raise WrongEndError(f"ranks {list(ends.values())} had not ended after {LIMIT:g} s")
            for end in ready:
                try:
                    said = end.recv()
                except EOFError:
                    said = -signal.SIGKILL
                if ends[end] is None:
                    ends[end] = said
                else:
                    codes[ends.pop(end)] = said
    finally:
        for machine in machines:
            if machine.is_alive():
                os.killpg(machine.pid, signal.SIGKILL)
            machine.join()
        del store
    return World(place, [codes.get(rank, -signal.SIGKILL) for rank in range(size)], [])


ROWS = [
    Row(
        "machines",
        "of 2 to 5 torchruns with a rank each, 1 or more are killed with it, or one stops answering",
        "the others go on to the same bits, without virtual ranks to rounding",
        100,
        partial(lost.lost, start=run_machines, stops=2),
        small=2,
    )
]
