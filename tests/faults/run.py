"""Does to a run what machines do, and sees that its end is that of the run to which nothing was done.

    python tests/faults/run.py                     one try of each row, in minutes
    python tests/faults/run.py --large             many of each, in hours
    python tests/faults/run.py --only kill --try 7 one try again

A try is drawn from the row, ``--seed`` and its number; at which instruction a signal arrives is up to the machine.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where tries.py is, which both tables share

import clock
import cuts
import damage
import data
import kills
import memory
import partings
import programs
import remote_damage
import remote_kills
import remote_races
import remote_writers
import replays
import services
import signals
import thinned
from bench import Bench

import tries

PARTS = (
    kills,
    signals,
    damage,
    data,
    cuts,
    clock,
    replays,
    thinned,
    memory,
    programs,
    partings,
    remote_races,
    remote_kills,
    remote_damage,
    remote_writers,
    services,
)

if __name__ == "__main__":
    sys.exit(tries.main(__doc__, [row for part in PARTS for row in part.ROWS], Bench))
