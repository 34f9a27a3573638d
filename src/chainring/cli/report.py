"""``chainring report RUN...``: write the page of a run, or of several beside one another."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chainring._files import is_url
from chainring._messages import list_names, printable
from chainring._runs.comparison import compare_runs
from chainring._runs.finished import FinishedRun
from chainring.cli._common import add_command, ended_by_sigterm, show
from chainring.html_report import Parting, names_of, runs_in, watch, write, write_several

_PORT = 8642
_MOST_COMPARED = 6  # runs of which it is looked up where each parts from the first

_HELP = """
Write one HTML file that shows a run: curves, rows, images and texts, memory,
settings and their changes at each resume, the plan of extensions, the time by
phase, parameters, the graph and snapshots. Of several runs the curves are laid
over one another, and a line marks where they part. The file needs no network,
no other file, and not the code that trained. A run may still be running: write
the page again to see more.

With --watch nothing is written: the page is served to browsers on this
machine, at 127.0.0.1, and follows runs that are running, until Ctrl-C.

examples:
  chainring report result                  then open result/report.html
  chainring report runs                    all runs there; open report.html
  chainring report result --out page.html --no-verify
  chainring report s3://bucket/run         then open report.html
  chainring report --watch runs/*          then open the address it prints
  chainring report --json result | jq .damaged

exit status:
  0  the page is written, even if a snapshot is damaged; Ctrl-C ended --watch
  1  never
  2  there is no run, the file cannot be written, or the port is in use"""


def add_to(commands: Any) -> None:
    purpose = "write a page of one or more runs: curves, log, settings, times, in one HTML file"
    parser = add_command(commands, "report", run, purpose, _HELP)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run: its directory or address; or a directory of runs")
    text = "the file to write (default: RUN/report.html; of several runs, or one at an address, report.html)"
    parser.add_argument("--out", metavar="FILE", help=text)
    text = "compare only names and sizes of the snapshots' files, without reading every byte (about 1 s per gigabyte)"
    parser.add_argument("--no-verify", action="store_true", help=text)
    parser.add_argument("--watch", action="store_true", help="serve the page on this machine and follow the runs")
    parser.add_argument("--port", metavar="N", type=int, help=f"of --watch (default: {_PORT}); 0 takes one that is free")


def run(options: argparse.Namespace) -> None:
    runs, others = runs_in(options.runs)
    skipped = [str(place) for place in others if runs and os.path.exists(place)]  # what is not there is a slip
    options.runs = [*runs, *(place for place in others if str(place) not in skipped)]
    notes = [f"skipped, because there is no run: {list_names(skipped, 4)}"] if skipped else []
    if options.watch:
        _watch(options)
        return
    if options.port is not None:
        raise ValueError("--port is that of the server of --watch; add --watch, or leave it out")
    if is_url(options.out):
        raise ValueError(f"--out is a file on the disk, and {options.out} is an address; give a path, and copy it there")
    file = options.out and Path(options.out)
    facts: dict[str, Any] = {}
    if len(options.runs) > 1:
        written = write_several(options.runs, file, _partings(options.runs))
        counts = {"runs": len(options.runs)}
    else:
        written = write(options.runs[0], file, verify=not options.no_verify)
        counts, facts = {"snapshots": written.snapshots}, {"damaged": list(written.damaged)}
    counts = {"bytes": written.size, "rows": written.rows, **counts}
    counted = ", ".join(f"{count:,} {name if count != 1 else name.removesuffix('s')}" for name, count in counts.items())
    facts |= {"skipped": skipped} if skipped else {}
    lines = [*notes, f"{printable(written.file)}: {counted}", *(f"damaged: {printable(name)}" for name in written.damaged)]
    show(options, {"file": str(written.file), **counts, **facts}, lines)


def _watch(options: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    if options.out is not None or options.no_verify:
        raise ValueError("--watch writes no file and reads no bytes of snapshots; leave --out and --no-verify out")
    port = _PORT if options.port is None else options.port
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port is a number from 0 to 65535; got {port}")
    with (
        suppress(KeyboardInterrupt),
        ended_by_sigterm(),
        watch(options.runs, port, lambda: _partings(options.runs)) as (address, follow, _),
    ):
        show(options, {"address": address}, [f"{address} shows the runs as they continue; Ctrl-C ends it"])
        sys.stdout.flush()
        follow()


def _partings(places: Sequence[str]) -> list[Parting]:
    """Return where each run parts from the first, by what was recorded and logged; of many runs nothing is compared."""
    if len(places) > _MOST_COMPARED:
        return []
    first, *others = names_of(places)
    return [_parting(places, index, f"{first} and {name}") for index, name in enumerate(others, 1)]


def _parting(places: Sequence[str], index: int, pair: str) -> Parting:
    try:
        comparison = compare_runs(FinishedRun.open(places[0]), FinishedRun.open(places[index]), with_snapshots=False)
    except (OSError, ValueError) as error:
        return Parting(index, None, f"Where {pair} part is not known: {error}")
    first = comparison.first
    return Parting(index, None if first is None else first.iteration, f"{pair}: {comparison.answer}")
