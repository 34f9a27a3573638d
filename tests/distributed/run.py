"""Runs of several ranks beside runs of one: the same path, the same examples, and what happens to one happens to all.

python tests/distributed/run.py                       one try of each row, in minutes
python tests/distributed/run.py --large               many of each
python tests/distributed/run.py --only killed --try 7 one try again

A try is drawn from the row, ``--seed`` and its number; at which instruction a signal arrives is up to the machine.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where tries.py is, which both tables share

import agreement
import bits
import controls
import corruption
import elastic
import launched
import lost
import machines
import mishaps
import resumes
import slow
import stores
from worlds import Bench

import tries

PARTS = (agreement, resumes, stores, mishaps, elastic, launched, lost, machines, bits, corruption, slow, controls)

if __name__ == "__main__":
    sys.exit(tries.main(__doc__, [row for part in PARTS for row in part.ROWS], Bench))
