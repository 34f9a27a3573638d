"""Tables of tries, for programs that print what was done how often: tests/faults/run.py and tests/distributed/run.py.

Without ``--large``, one try of each row is made, or as many as its ``small`` says. A row has ``name``, ``done``,
``expected``, and ``large``, the number of tries; ``make(bench, number, draw, place)`` makes one try and returns its counts,
``has_enough(counts, wanted)`` ends the row, ``said(counts)`` puts them into words. A bench is a context that has
``place(name)``, an empty directory, and ``end()``, which ends what a try that has failed has left.
"""

import argparse
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter

MOST_FAILURES = 5


class WrongEndError(Exception):
    """A try that did not end as it must."""


def run_row(bench, row, wanted, seed, only, first=0, every=1):
    """Makes one try, or tries until as many are counted as wanted; returns the counts and the number of failures."""
    counts, failures, wanted = Counter(), 0, -(-wanted // every)
    for number in range(first, 20 * wanted * every, every) if only is None else [only]:
        if failures == MOST_FAILURES:
            break
        place = bench.place(f"{row.name}-{number}")
        try:
            counts += row.make(bench, number, random.Random(f"{row.name}/{seed}/{number}"), place)
        except Exception as error:
            bench.end()
            failures += 1
            print(f"FAILED  {row.name}, try {number}: {type(error).__name__}: {error}")
            if not isinstance(error, WrongEndError):
                traceback.print_exc()
            print(f"        again: python {sys.argv[0]} --only {row.name} --seed {seed} --try {number}", flush=True)
        shutil.rmtree(place)
        if only is None and (wanted == 1 or row.has_enough(counts, wanted)):
            break
    return counts, failures


def main(text, rows, make_bench):
    """Runs a table as the command line asks; returns the exit status."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the large numbers")
    names = [row.name for row in rows]
    parser.add_argument("--only", metavar="ROW", choices=names, nargs="+", help="these rows of the table")
    parser.add_argument("--but", metavar="ROW", choices=names, nargs="+", default=(), help="every row but these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="every Nth try, from the Kth")
    parser.add_argument("--try", type=int, dest="number", help="one try of the row")
    arguments = parser.parse_args()
    if arguments.number is not None and arguments.only is None:
        parser.error("--try needs --only, the row that it is of")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and tidy up on the way
    lines, failed = [], 0
    with make_bench() as bench:
        for row in rows:
            if (arguments.only and row.name not in arguments.only) or row.name in arguments.but:
                continue
            began = time.monotonic()
            wanted = row.large if arguments.large else getattr(row, "small", 1)
            counts, failures = run_row(bench, row, wanted, arguments.seed, arguments.number, *arguments.share)
            failed += failures
            state, seconds, said = "FAILED" if failures else "ok", time.monotonic() - began, row.said(counts)
            print(f"{state:8}{row.name:10}{seconds:6.0f} s  {failures} failures; {said}", flush=True)
            lines.append(f"| {row.done} | {row.expected} | {said}; {failures or 'no'} failures |")
    print("\n| done | expected | how often |\n|---|---|---|", *lines, sep="\n")
    return 1 if failed else 0
