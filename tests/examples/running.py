"""Runs the examples as their users run them: each in a process of its own, on a small setting."""

import json
import os
from pathlib import Path

import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def run(script, *arguments, check=True, processes=1):
    """What an example printed; with ``check`` off, the finished process, which may have failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [] if processes == 1 else [*TORCHRUN, f"--nproc-per-node={processes}"]
    done = forked.run([*launcher, EXAMPLES / script, *map(str, arguments)], env=environment)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout if check else done


def log(out):
    """The rows of a run's log without the times, which differ between runs."""
    rows = json.loads((out / "log").read_text())
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]
