"""``chainring report RUN...``: write the page of a run, or of several beside one another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainring.cli._common import add_command, print_json, printable
from chainring.html_report import Parting, write, write_several
from chainring.testing._parting import compare_runs
from chainring.testing._run_files import read_run_files

_MOST_COMPARED = 6  # runs of which it is looked up where each parts from the first

_HELP = """
Write one HTML file that shows a run: the curves of its log, the rows, images,
texts and histograms, CPU, GPU and memory, the settings and their changes at
each resume, the plan of extensions, the time by phase, parameters, the graph,
and snapshots with their state. Of several runs the curves are laid over one
another, beside a table of the settings that differ, and a line marks where
runs part. The file needs no network, no other file, and not the code that
trained. A run may still be going on: write the page again to see more.
Long curves are drawn with some thousand points. Of a run in an object store
the page is written into the current directory; its snapshots are read there,
and not copied.

examples:
  chainring report result                  then open result/report.html
  chainring report runs/*                  then open report.html
  chainring report result --out page.html --no-verify
  chainring report s3://bucket/run         then open report.html
  chainring report --json result | jq .damaged

exit status:
  0  the page is written, even if a snapshot is damaged
  1  never
  2  there is no run, or the file cannot be written"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands, "report", run, "write a page of one or more runs: curves, log, settings, times, in one HTML file", _HELP
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the directory or the address of a run (its out)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file to write (default: RUN/report.html; of several runs, or one at an address, report.html)",
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="compare only names and sizes of the snapshots' files, without reading every byte (about 1 s per gigabyte)",
    )


def run(options: argparse.Namespace) -> None:
    """Write the page and print its path."""
    file = options.out and Path(options.out)
    if len(options.runs) > 1:
        written = write_several(options.runs, file, _partings(options.runs))
        facts = {"runs": len(options.runs)}
    else:
        written = write(options.runs[0], file, verify=not options.no_verify)
        facts = {"snapshots": written.snapshots}
    if options.json:
        damaged = {} if len(options.runs) > 1 else {"damaged": list(written.damaged)}
        print_json({"file": str(written.file), "bytes": written.size, "rows": written.rows, **facts, **damaged})
        return
    counted = ", ".join(f"{count:,} {name}" for name, count in facts.items())
    print(f"{printable(written.file)}: {written.size:,} bytes, {written.rows:,} rows, {counted}")
    for name in written.damaged:
        print(f"damaged: {printable(name)}")


def _partings(places: Sequence[str]) -> list[Parting]:
    """Return where each run parts from the first, by what was recorded and logged; of many runs nothing is compared."""
    return [_parting(places, index) for index in range(1, len(places))] if len(places) <= _MOST_COMPARED else []


def _parting(places: Sequence[str], index: int) -> Parting:
    pair = f"{places[0]} and {places[index]}"
    try:
        with read_run_files(places[0]) as one, read_run_files(places[index]) as other:
            found = compare_runs(one, other, with_snapshots=False)
    except (OSError, ValueError) as error:
        return Parting(index, None, f"Where {pair} part is not known: {error}")
    first = found.first
    if first is None:
        text = f"the same up to iteration {found.same_until}" if found.is_same else "not comparable: nothing is in both"
        return Parting(index, None, f"{pair} are {text}.")
    what = f"{first.what} {first.name}".rstrip()
    if first.is_exact:
        return Parting(index, first.iteration, f"{pair} part in iteration {first.iteration}, by the {what}")
    since = "" if first.after is None else f" and are the same in iteration {first.after}"
    return Parting(index, first.iteration, f"{pair} differ in iteration {first.iteration}{since}, by the {what}")
