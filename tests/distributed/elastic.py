"""torchrun replaces a killed rank, or does without a lost machine, and the run goes on from the newest snapshot."""

import signal
import subprocess
import sys

import bits
import program
from program import Fault, Options
from worlds import Row, World, drawn, same

from ports import free_port
from tries import WrongEndError

LIMIT = 600.0  # seconds: torch is imported by seven processes


class Agent:
    """A torchrun: the agent of a machine, which starts ranks and starts them again."""

    def __init__(self, output, settings, options):
        self.output = output
        command = [
            sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2", *settings,
            program.__file__, str(output.parent), program.as_json(options),
        ]  # fmt: skip
        with output.open("w") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)

    def wait(self):
        """Waits until it has ended; what was to happen to its ranks must have happened.

        Raises:
            WrongEndError: it has not, or the agent has failed.
        """
        try:
            code = self.process.wait(LIMIT)
        finally:
            self.end()
        if code != 0 or not (self.output.parent / "happened").exists():
            raise WrongEndError(f"torchrun ended with {code}: {self.output.read_text(errors='replace')[-3000:]}")

    def end(self):
        self.process.terminate()  # it ends its ranks
        self.process.wait()


def replaced(bench, number, draw, place):
    """A rank is killed once under ``torchrun --max-restarts 2``, with its own rendezvous or c10d's."""
    kind, size = drawn(number, [("ddp", 3), ("fsdp", 3), ("plain", 3)])
    rendezvous = ["--standalone"] if number // 4 % 2 else ["--master-port", str(free_port())]
    # The snapshot of iteration 4 is there for sure when that of 8 is begun.
    fault = Fault("kill", draw.randrange(size), draw.randrange(9, 18), draw.uniform(0, 0.01))
    agent = Agent(place / "output", ["--nproc-per-node", str(size), *rendezvous], Options(kind=kind, fault=fault))
    agent.wait()
    told = World(place, [0] * size, []).outcomes()
    same("whether it has gone on from a snapshot", told[0]["started"] > 0, True)
    bench.compare(told, bench.known(kind, size)[1])
    return f"{kind} {rendezvous[0]}"


def alone(bench, number, draw, place):
    """Of a machine with two ranks and one with one, the second is lost with all on it, and the first goes on without it."""
    kind = ("plain", "ddp")[number % 2]
    settings = {"virtual_ranks": 8, "net": "batchnorm dropout"}
    where = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf"]
    # Seconds: a machine whose process comes late, or stands still for ten, is not taken for one that is lost.
    patience = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=15"
    fault = Fault("machine", None, draw.randrange(9, 18), draw.uniform(0, 0.01))
    options = Options(kind=kind, **settings)
    first = Agent(place / "first", ["--nproc-per-node", "2", *where, f"{patience},is_host=1"], options)
    options = Options(kind=kind, **settings, fault=fault)
    second = Agent(place / "second", ["--nproc-per-node", "1", *where, f"{patience},is_host=0"], options)
    try:
        first.wait()
    finally:
        second.end()
    same("how the second has ended", second.process.returncode, -signal.SIGKILL)
    told = World(place, [0, 0], []).outcomes()
    same("whether it has gone on from a snapshot", told[0]["started"] > 0, True)
    known_place, known = bench.known("plain", 1, **settings)
    bits.compare("3 and then 2", bits.end_of(place, told[0]), bits.end_of(known_place, known[0]))
    return kind


ROWS = [
    Row(
        "restarts", "SIGKILL of a rank under torchrun --max-restarts 2",
        "it is replaced, and the run goes on from the newest snapshot to the same end, bit for bit", 28, replaced,
    ),
    Row(
        "alone", "virtual_ranks=8 under torchrun --nnodes 1:2, of which the second is lost with all its processes",
        "the first goes on without it, to the bits of one process", 10, alone,
    ),
]  # fmt: skip
