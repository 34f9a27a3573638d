"""Where log rows go besides the log: an interface of two methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a log.

    Attributes:
        epoch: epochs completed.
        iteration: updates completed.
        elapsed_time: seconds of training, those before a resume included.
        values: the means of the interval by key.
    """

    epoch: int
    iteration: int
    elapsed_time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """The run whose rows a writer is about to be given.

    Attributes:
        out: the directory of the run. A relative name of a file lies there.
        config: the settings of the run.
        iteration: updates completed; rows of later iterations that lie there are of a part that this run does not continue.
        records: the rows so far, where the run continues an earlier one.
    """

    out: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)
    iteration: int = 0
    records: Sequence[Record] = ()


class Writer:
    """Takes the rows of a `LogReport`, one by one. Write `write`; everything else is optional.

    Attributes:
        writes: the names of the files that it writes into the run's directory, as in `Extension.writes`.
    """

    writes: Sequence[str] = ()

    def begin(self, run: Run) -> None:
        """Called before the first row, and again after `close` where the same run goes back to a snapshot."""

    def write(self, record: Record) -> None:
        """Writes one row."""
        raise NotImplementedError(f"{type(self).__name__} must define write(record)")

    def close(self) -> None:
        """Called once, when the run ends."""


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a row by key, epoch and time among them, for where a row can hold nothing else."""
    row = {**record.values, "epoch": record.epoch, "elapsed_time": record.elapsed_time}
    return {key: float(value) for key, value in row.items() if isinstance(value, Real)}
