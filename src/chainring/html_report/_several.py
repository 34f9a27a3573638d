"""What several runs have beside one another: names to tell them apart, the settings that differ, and what they came to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chainring.html_report._run import Run
from chainring.serializers._store import Place
from chainring.training._recorded_settings import recorded_settings
from chainring.writers.base import COUNTERS

_MAX_RUNS_AS_COLUMNS = 5
_MAX_SETTINGS = 60
_MAX_VALUES = 6  # last values of each run in a table


@dataclass(frozen=True, slots=True)
class Parting:
    """The point at which a run diverges from the first run of a page.

    Attributes:
        run: its index on the page.
        iteration: the first in which they differ, ``None`` if all that was compared is the same or nothing could be.
        text: what is known about it, in words.
    """

    run: int
    iteration: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of a table: a title for each column and row."""

    heads: list[str]
    titles: list[str]
    cells: list[list[Any]]


def names_of(places: Sequence[Place]) -> list[str]:
    """Return a name for each run: the last part of its path, and as many before it as tell it from the others.

    Raises:
        ValueError: a run is given twice.
    """
    parts = [os.path.abspath(place).split(os.sep) if "://" not in str(place) else str(place).split("/") for place in places]
    parts = [[part for part in each if part] or ["/"] for each in parts]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    twice = next(place for index, place in enumerate(places) if names[index] in names[:index])
    raise ValueError(f"{twice} is given twice; give each run once")


def differing_settings(names: Sequence[str], runs: Sequence[Run]) -> tuple[Table, int]:
    """Return the settings that not all runs share, and how many there are; of few runs each is a column, of many a row."""
    settings = [dict(recorded_settings(run.record)) if run.record else {} for run in runs]
    names_of_all = dict.fromkeys(name for each in settings for name in each)
    differing = [name for name in names_of_all if _differs([each.get(name) for each in settings if each])]
    shown = differing[:_MAX_SETTINGS]
    cells = [[each.get(name) for each in settings] for name in shown]
    if len(runs) <= _MAX_RUNS_AS_COLUMNS:
        return Table(["setting", *names], shown, cells), len(differing)
    return Table(["run", *shown], list(names), list(map(list, zip(*cells, strict=True))) or [[] for _ in runs]), len(
        differing
    )


def _differs(values: Sequence[Any]) -> bool:
    return len({json.dumps(value, sort_keys=True) for value in values}) > 1


def last_values(runs: Sequence[Run]) -> tuple[list[str], list[list[float | None]]]:
    """Return some keys of the logs, and for each run the last value of each."""
    logs = [run.logs[0] if run.logs else None for run in runs]
    found = dict.fromkeys(key for log in logs if log for key in log.keys if key in log.columns and key not in COUNTERS)
    keys = sorted(found, key=lambda key: not key.startswith("validation"))[:_MAX_VALUES]  # else in the order of the log
    values = [[float(log.columns[key].values[-1]) if log and key in log.columns else None for key in keys] for log in logs]
    return keys, values
