"""Runs the examples as their users run them: each in a process of its own, on a small setting."""

import json
import os
from pathlib import Path

import forked

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments, check=True, processes=1):
    """What an example printed, of several processes the first; with ``check`` off, the process, which may have failed.

    Several find in the environment what torchrun would put there, which starts others in test_distributed_examples.py.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [EXAMPLES / script, *map(str, arguments)]
    if processes == 1:
        ended = [forked.run(command, env=environment)]
    else:
        ranks = forked.started(processes, lambda rank: forked.run(command, env={**environment, **rank}))
        ended = [rank.result() for rank in ranks]
    assert not check or all(done.returncode == 0 for done in ended), "\n".join(done.stderr for done in ended)
    return ended[0].stdout if check else ended[0]


def log(out):
    """The rows of a run's log without the times, which differ between runs."""
    rows = json.loads((out / "log").read_text())
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]
