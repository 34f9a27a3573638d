"""The page of one run, or of several beside one another, in one HTML file.

A run is read into plain values (`_run`, its logs and their curves by `_log`), and the page is made of them (`_content`),
beside those of others if there are several. A page that follows runs is served by `_watch`. The name is not ``report``,
because `chainring.report` is the function that reports values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chainring._files import is_url, replace_file
from chainring.html_report._content import (
    SIGN,
    Content,
    Parting,
    content_of,
    content_of_several,
    drawn_run,
    names_of,
    page_of,
)
from chainring.html_report._run import DAMAGED, read_run, runs_in
from chainring.html_report._watch import watch
from chainring.serializers._store import Place

__all__ = ["Page", "Parting", "names_of", "runs_in", "watch", "write", "write_several"]


@dataclass(frozen=True, slots=True)
class Page:
    """A page that was written, and the number of rows of logs and of snapshots on it."""

    file: Path
    size: int  # bytes
    rows: int
    snapshots: int = 0
    damaged: tuple[str, ...] = ()  # names of snapshots whose bytes are not those that were written


def write(place: Place, file: Path | None = None, *, verify: bool = True) -> Page:
    """Write the page of a run, which may still be running; an earlier page is replaced by one rename.

    By default it is ``report.html`` in the directory of the run, or in the current directory for a run at an address.
    With ``verify``, every byte of the snapshots is compared with its checksum. No run, and another file with the name of
    the page, are an `OSError`; a snapshot is a `ValueError`.
    """
    run = read_run(place, verify=verify)
    damaged = tuple(snapshot.name for snapshot in run.snapshots if snapshot.state == DAMAGED)
    path = file or Path("" if is_url(place) else place, "report.html")
    return Page(path, *_write(content_of(drawn_run(run)), path), len(run.snapshots), damaged)


def write_several(places: Sequence[Place], file: Path | None = None, partings: Sequence[Parting] = ()) -> Page:
    """Write a page of several runs beside one another, by default ``report.html`` in the current directory; see `write`.

    Snapshots are not shown. ``partings`` are the points where runs diverge from the first. A run that is given twice is
    refused with a `ValueError`.
    """
    names, count = names_of(places), len(places)
    drawn = [drawn_run(read_run(place, verify=False, number_of_runs=count), count) for place in places]
    path = file or Path("report.html")
    return Page(path, *_write(content_of_several(names, drawn, partings), path))


def _write(content: Content, path: Path) -> tuple[int, int]:
    """Write a page; return its bytes, and the rows on it."""
    text = page_of(content).encode()
    if os.path.lexists(path):
        start = b""
        if path.is_file():
            with open(path, "rb") as file:
                start = file.read(1000)
        if SIGN.encode() not in start:
            raise FileExistsError(f"{path} exists and is not the page of a run; move it, or give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    return len(text), content.rows
