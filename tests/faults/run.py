"""Does to a run what machines do, and sees that its end is that of the run to which nothing was done.

    python tests/faults/run.py                     a few of each fault, in minutes
    python tests/faults/run.py --large             many of each, in hours
    python tests/faults/run.py --only kill --try 7 one try again

A try is drawn from the row, ``--seed`` and its number; at which instruction a signal arrives is up to the machine.
"""

import argparse
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter

import clock
import damage
import data
import kills
import signals
from attempts import WrongEndError
from bench import Bench

ROWS = [*kills.ROWS, *signals.ROWS, *damage.ROWS, *data.ROWS, *clock.ROWS]
MOST_FAILURES = 5


def run_row(bench, row, wanted, seed, only):
    """Makes tries until as many are counted as wanted; returns the counts and the number of failures."""
    counts, failures, number = Counter(), 0, 0 if only is None else only
    while failures < MOST_FAILURES and number < (only + 1 if only is not None else 20 * wanted):
        place = bench.place(f"{row.name}-{number}")
        try:
            done = row.attempt(bench, number, random.Random(f"{row.name}/{seed}/{number}"), place)
            bench.settle()
            counts += done
        except Exception as error:
            bench.end()
            failures += 1
            print(f"FAILED  {row.name}, try {number}: {type(error).__name__}: {error}")
            if not isinstance(error, WrongEndError):
                traceback.print_exc()
            print(f"        again: python {sys.argv[0]} --only {row.name} --seed {seed} --try {number}", flush=True)
        shutil.rmtree(place)
        number += 1
        if only is None and row.has_enough(counts, wanted):
            break
    return counts, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the large numbers")
    parser.add_argument("--only", metavar="ROW", choices=[row.name for row in ROWS], help="one row of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--try", type=int, dest="number", help="one try of the row")
    arguments = parser.parse_args()
    if arguments.number is not None and arguments.only is None:
        parser.error("--try needs --only, the row that it is of")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and tidy up on the way
    lines, failed = [], 0
    with Bench() as bench:
        for row in ROWS:
            if arguments.only not in (None, row.name):
                continue
            began = time.monotonic()
            counts, failures = run_row(
                bench, row, row.large if arguments.large else row.check, arguments.seed, arguments.number
            )
            failed += failures
            seconds = time.monotonic() - began
            ordered = sorted(counts.items(), key=lambda item: item[0] != row.counted)
            said = ", ".join(f"{value:,} {key}" for key, value in ordered if value)
            print(
                f"{'FAILED' if failures else 'ok':8}{row.name:10}{seconds:6.0f} s  {failures} failures; {said}", flush=True
            )
            lines.append(f"| {row.fault} | {row.expected} | {said}; {failures or 'no'} failures |")
    print("\n| fault | expected | done |\n|---|---|---|", *lines, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
