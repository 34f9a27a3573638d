"""``chainring report DIR``: write the page of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from chainring.cli._common import add_command, print_json, printable
from chainring.html_report import write

_HELP = """
Write one HTML file that shows a run: the curves of its log, the rows, the
settings and their changes at each resume, the plan of extensions, the time by
phase, parameters, the graph, and snapshots with their state. It needs no
network, no other file, and not the code that trained. The run may still be
going on: write the page again to see more. Long curves are drawn with a few
thousand points. Of a run in an object store the page is written into the
current directory; its snapshots are read there, and not copied.

examples:
  chainring report result                  then open result/report.html
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
        commands, "report", run, "write a page of a run: curves, log, settings, times, snapshots, in one HTML file", _HELP
    )
    parser.add_argument("directory", metavar="DIR", help="the directory or the address of a run (its out)")
    parser.add_argument(
        "--out", metavar="FILE", help="the file to write (default: DIR/report.html; of a run at an address report.html)"
    )
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="compare only names and sizes of the snapshots' files, without reading every byte (about 1 s per gigabyte)",
    )


def run(options: argparse.Namespace) -> None:
    """Write the page and print its path."""
    written = write(options.directory, options.out and Path(options.out), verify=not options.no_verify)
    if options.json:
        about = {"file": str(written.file), "bytes": written.size, "rows": written.rows}
        print_json({**about, "snapshots": written.snapshots, "damaged": written.damaged})
        return
    print(f"{printable(written.file)}: {written.size:,} bytes, {written.rows:,} rows, {written.snapshots:,} snapshots")
    for name in written.damaged:
        print(f"damaged: {printable(name)}")
