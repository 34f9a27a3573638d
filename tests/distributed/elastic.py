"""torchrun replaces a killed rank, and the run goes on from the newest snapshot."""

import subprocess
import sys
from pathlib import Path

import program
from program import Fault, Options
from worlds import Row, World, same

from tries import WrongEndError

LIMIT = 150.0  # seconds: torch is imported by seven processes
SIZE = 3


def replaced(bench, number, draw, place):
    """A rank is killed once under ``torchrun --max-restarts 2``, with its own rendezvous or c10d's."""
    kind = ("ddp", "fsdp", "plain")[number % 3]
    rendezvous = ["--standalone"] if number // 3 % 2 else ["--master-port", str(bench.free_port())]
    # The snapshot of iteration 4 is there for sure when that of 8 is begun.
    fault = Fault("kill", draw.randrange(SIZE), draw.randrange(9, 18), draw.uniform(0, 0.01))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE), "--max-restarts", "2", *rendezvous,
        program.__file__, str(place), program.as_json(Options(kind=kind, fault=fault)),
    ]  # fmt: skip
    with Path(place, "output").open("w+") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = launcher.wait(LIMIT)
        except BaseException:
            launcher.terminate()  # it ends its ranks
            launcher.wait()
            raise
        finally:
            output.seek(0)
            said = output.read()
    if code != 0 or not (place / "happened").exists():
        raise WrongEndError(f"torchrun ended with {code}: {said[-3000:]}")
    told = World(place, [0] * SIZE, []).outcomes()
    same("whether it has gone on from a snapshot", told[0]["started"] > 0, True)
    bench.compare(told, bench.known(kind, SIZE)[1])
    return f"{kind} {rendezvous[0]}"


ROWS = [
    Row(
        "restarts", "SIGKILL of a rank under torchrun --max-restarts 2",
        "it is replaced, and the run goes on from the newest snapshot to the same end, bit for bit", 1, 20, replaced,
    ),
]  # fmt: skip
