"""The page of a run: its curves, log, settings, plan, times, parameters, graph and snapshots in one HTML file.

A run's directory is read into plain values (`_run`), the points of its curves are chosen (`_curves`), and the template
``page.html`` becomes the page (`_page`). The name is not ``report``, because `chainring.report` is the function that reports
values.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from chainring._files import is_url, replace_file
from chainring.html_report._page import SIGN, page_of
from chainring.html_report._run import DAMAGED, directory_of, read_run
from chainring.serializers._store import Place


@dataclass(frozen=True, slots=True)
class Page:
    """A page that was written, and the number of rows of logs and of snapshots on it."""

    file: Path
    size: int  # bytes
    rows: int
    snapshots: int
    damaged: list[str]  # names of snapshots whose bytes are not those that were written


def write(place: Place, file: Path | None = None, *, verify: bool = True) -> Page:
    """Write the page of a run, which may still be going on; an earlier page is replaced by one rename.

    By default it is ``report.html`` in the directory of the run, or of one at an address in the current directory. With
    ``verify``, every byte of the snapshots is compared with its checksum. Where there is no run, or where something else has
    the name of the page, an `OSError` is raised.
    """
    with directory_of(place) as (directory, store):
        run = read_run(directory, store, verify=verify)
        text = page_of(run, datetime.datetime.now().astimezone()).encode()
    path = Path("" if is_url(place) else place, "report.html") if file is None else file
    if os.path.lexists(path) and not _is_page(path):
        raise FileExistsError(f"{path} exists and is not the page of a run; move it, or give another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    damaged = [snapshot.name for snapshot in run.snapshots if snapshot.state == DAMAGED]
    return Page(path, len(text), sum(len(log.rows) for log in run.logs), len(run.snapshots), damaged)


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        return SIGN in file.read(1000)
