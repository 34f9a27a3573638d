"""Where log rows go besides the log: an interface of two methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


class Writer:
    """Takes the rows of a `LogReport`, one by one."""

    def write(self, record: Record) -> None:
        """Writes one row."""
        raise NotImplementedError(f"{type(self).__name__} must define write(record)")

    def close(self) -> None:
        """Called once, when the run ends."""
