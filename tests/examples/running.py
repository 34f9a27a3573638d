"""Runs the examples as their users run them: each in a process of its own, on a small setting."""

import json
import os
from pathlib import Path

import forked

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments, check=True, processes=1):
    """What an example printed, of several processes the first; with ``check`` off, the process, which may have failed."""
    ended = started(script, *arguments, processes=processes, start=forked.run)
    assert not check or all(done.returncode == 0 for done in ended), "\n".join(done.stderr for done in ended)
    return ended[0].stdout if check else ended[0]


def started(script, *arguments, processes=1, start=forked.Forked):
    """The processes of an example, which run; or what ``start`` returns for each.

    Several find in the environment what torchrun would put there, which starts others in test_distributed_examples.py.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [EXAMPLES / script, *map(str, arguments)]
    if processes == 1:
        return [start(command, env=environment)]
    ranks = forked.started(processes, lambda rank: start(command, env={**environment, **rank}))
    return [rank.result() for rank in ranks]


def log(out):
    """The rows of a run's log without the times, which differ between runs."""
    rows = json.loads((out / "log").read_text())
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows]
