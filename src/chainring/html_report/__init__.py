"""The page of a run: its curves, log, settings, plan, times, parameters, graph and snapshots in one HTML file.

A run's directory is read into plain values (`_run`, `_logs`, `_snapshots`), of the points of long curves a few thousand are
chosen (`_curves`), and one template becomes the page (`_page`). The name is not ``report``, because `chainring.report` is
the function that reports values.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from chainring._files import atomic_write
from chainring.html_report._page import SIGN, page_of
from chainring.html_report._run import DAMAGED, read_run


@dataclass(frozen=True, slots=True)
class Written:
    """A page that was written.

    Attributes:
        file: where.
        size: of the file in bytes.
        rows: of the logs.
        snapshots: how many there are.
        damaged: the names of those that are not what was written.
    """

    file: Path
    size: int
    rows: int
    snapshots: int
    damaged: list[str]


def write(directory: Path, file: Path | None = None, *, verify: bool = True) -> Written:
    """Writes the page of a run, which may still be going on, in the place of an earlier one by one rename.

    Args:
        directory: the trainer's ``out``.
        file: the page; ``report.html`` in the directory by default.
        verify: whether every byte of the snapshots is compared with its checksum.

    Raises:
        FileNotFoundError: there is no run.
        FileExistsError: something that is no such page is in the way.
        OSError: the page cannot be written.
    """
    run = read_run(directory, verify=verify)
    text = page_of(run, datetime.datetime.now().astimezone()).encode()
    place = directory / "report.html" if file is None else file
    _refuse_other(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(place) as output:
        output.write(text)
    damaged = [snapshot.name for snapshot in run.snapshots if snapshot.state == DAMAGED]
    return Written(place, len(text), sum(len(log.rows) for log in run.logs), len(run.snapshots), damaged)


def _refuse_other(place: Path) -> None:
    if not os.path.lexists(place):
        return
    if place.is_file():
        with open(place, encoding="utf-8", errors="replace") as file:
            if SIGN in file.read(1000):
                return
    raise FileExistsError(f"{place} is there already and is no page of a run; move it, or give another --out")
