"""Runs of several ranks beside runs of one: the same path, the same examples, and what happens to one happens to all.

python tests/distributed/run.py                       a few of each, in minutes
python tests/distributed/run.py --large               many of each
python tests/distributed/run.py --only killed --try 7 one try again

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

import agreement
import elastic
import mishaps
import resumes
from worlds import Bench, WrongEndError

ROWS = [*agreement.ROWS, *resumes.ROWS, *mishaps.ROWS, *elastic.ROWS]
MOST_FAILURES = 5


def run_row(bench, row, numbers, seed):
    """Makes tries; returns the counts by what each was, and the number of failures."""
    counts, failures = Counter(), 0
    for number in numbers:
        place = bench.place(f"{row.name}-{number}")
        try:
            counts[row.attempt(bench, number, random.Random(f"{row.name}/{seed}/{number}"), place)] += 1
        except Exception as error:
            failures += 1
            print(f"FAILED  {row.name}, try {number}: {type(error).__name__}: {error}")
            if not isinstance(error, WrongEndError):
                traceback.print_exc()
            print(f"        again: python {sys.argv[0]} --only {row.name} --seed {seed} --try {number}", flush=True)
        shutil.rmtree(place)
        if failures == MOST_FAILURES:
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
            wanted = range(row.large if arguments.large else row.check)
            numbers = wanted if arguments.number is None else [arguments.number]
            counts, failures = run_row(bench, row, numbers, arguments.seed)
            failed += failures
            kinds = ", ".join(f"{value} {key}" for key, value in sorted(counts.items()))
            said = f"{counts.total()} tries" + (f" ({kinds})" if 1 < len(counts) < 8 else "")
            seconds = time.monotonic() - began
            print(
                f"{'FAILED' if failures else 'ok':8}{row.name:10}{seconds:6.0f} s  {failures} failures; {said}", flush=True
            )
            lines.append(f"| {row.done} | {row.expected} | {said}; {failures or 'no'} failures |")
    print("\n| done | expected | how often |\n|---|---|---|", *lines, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
