"""The interface of writers, which receive the rows of a log, and the records that they receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from chainring.reporting.media import Media

COUNTERS = ("epoch", "iteration", "elapsed_time")
"""The keys of a row that are not means of reported values."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a log.

    Example::

        record = Record(epoch=1, iteration=500, elapsed_time=2.5, values={"main/loss": 0.3})
        record.values["main/loss"]

    Attributes:
        epoch: the number of completed epochs.
        iteration: the number of completed updates.
        elapsed_time: the seconds of training, including those before a resume.
        values: the means of the interval by key.
        media: the images, texts and histograms of the interval by key.
    """

    epoch: int
    iteration: int
    elapsed_time: float
    values: Mapping[str, float]
    media: Mapping[str, Media] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """The run whose rows a writer will receive.

    Example::

        CsvWriter().begin(Run(Path("result"), config={"lr": 0.1}))

    Attributes:
        out: the directory of the run. A relative file name is resolved there.
        config: the settings of the run.
        iteration: the number of completed updates. Existing rows of later iterations belong to updates that this run does
            not continue from.
        records: the rows so far, if the run continues an earlier one.
    """

    out: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)
    iteration: int = 0
    records: Sequence[Record] = ()


class Writer:
    """Base class of writers, which receive the rows of a `LogReport` one by one. Define `write`; all else is optional.

    Example::

        class Printer(Writer):
            def write(self, record):
                print(record.iteration, dict(record.values))

        extensions.LogReport(writers=[Printer()])

    Attributes:
        writes: the names of the files that it writes into the run's directory, as in `Extension.writes`.
    """

    writes: Sequence[str] = ()

    def begin(self, run: Run) -> None:
        """Prepare for the first row; called again after `close` if the same run returns to a snapshot."""

    def write(self, record: Record) -> None:
        """Write one row.

        Raises:
            NotImplementedError: a subclass has not defined it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write(record)")

    def close(self) -> None:
        """Close files and connections; called once, when the run ends."""


def counters_of(record: Record) -> dict[str, float]:
    """Return epoch, iteration and elapsed time by key."""
    return {key: getattr(record, key) for key in COUNTERS}


def media_of(record: Record) -> dict[str, Media]:
    """Return the images, texts and histograms of a row by key, with their kind where a number has the key too."""
    taken = {*record.values, *COUNTERS}
    return {f"{key}/{media.kind}" if key in taken else key: media for key, media in record.media.items()}


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a row by key, epoch and time included, for services that take nothing but numbers."""
    row = {**record.values, **counters_of(record)}
    return {key: float(value) for key, value in row.items() if isinstance(value, Real) and key != "iteration"}
