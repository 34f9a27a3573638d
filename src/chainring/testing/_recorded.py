"""The record that a `Recorder` has written of a run, compared with a replay of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chainring._messages import warn
from chainring.training._ledger import Ledger, LedgerError, Row
from chainring.training.extensions import Recorder

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

_DEFAULT = "recorder.bin"


@dataclass(frozen=True)
class Comparison:
    """A comparison of a replay with the ledger of the run.

    Attributes:
        count: the iterations that were compared.
        last: the last iteration in the ledger of the run.
        iteration: the first that differs, ``None`` if all are the same.
        what: what differs there, such as ``"the loss main/loss"``.
        difference: the same in a sentence.
    """

    count: int
    last: int
    iteration: int | None = None
    what: str | None = None

    @property
    def difference(self) -> str | None:
        if self.iteration is None:
            return None
        return (
            f"the replay differs from the run: {self.what} of iteration {self.iteration} is not the one that was "
            "recorded. The script, its arguments, its data, a version or the number of threads have "
            "changed, or something is remembered that is not saved: `chainring verify-resume` finds that"
        )


def ledger_of(run: Path, trainer: Trainer | None = None) -> Ledger | None:
    """Return the ledger of a run, ``None`` if it has none that can be read; a damaged one is warned about."""
    path = run / (_DEFAULT if trainer is None else _filename(trainer))
    try:
        return Ledger.read(path) if path.is_file() else None
    except LedgerError as error:
        warn(f"what is recorded is skipped: {error}")
        return None


def compare(run: Path, trainer: Trainer, after: int, until: int, *, ranks: int = 1) -> Comparison | None:
    """Compare the iterations of a replay, ``None`` if the run or the replay has recorded none of them.

    Of a run of several ``ranks`` the generators are those of one of them, and are not compared.
    """
    recorded, replayed = ledger_of(run, trainer), ledger_of(Path(trainer.out), trainer)
    if recorded is None or replayed is None or not len(recorded.iterations):
        return None
    last, count = int(recorded.iterations[-1]), 0
    for one, other in _pairs(recorded, replayed, after, until):
        what = _difference(one, other, ranks > 1) or _differing_tensor(
            recorded.digests.get(one.iteration), replayed.digests.get(one.iteration)
        )
        if what is not None:
            return Comparison(count, last, one.iteration, what)
        count += 1
    return Comparison(count, last) if count or until == after else None


def _pairs(recorded: Ledger, replayed: Ledger, after: int, until: int) -> Iterator[tuple[Row, Row]]:
    for iteration in np.intersect1d(recorded.iterations, replayed.iterations).tolist():
        if after < iteration <= until:
            one, other = recorded.row(iteration), replayed.row(iteration)
            if one is not None and other is not None:
                yield one, other


def _difference(one: Row, other: Row, ignores_generators: bool) -> str | None:
    if None not in (one.batch, other.batch) and one.batch != other.batch:
        return "the batch"
    for name, loss in one.losses.items():
        if loss != other.losses.get(name):
            return f"the loss {name}"
    generators = one.generators, other.generators
    if not ignores_generators and None not in generators and generators[0] != generators[1]:
        return "the state of the random generators"
    return None


def _differing_tensor(one: Mapping[str, int] | None, other: Mapping[str, int] | None) -> str | None:
    if one is None or other is None:
        return None
    return next((f"the tensor {name}" for name in one if one[name] != other.get(name)), None)


def _filename(trainer: Trainer) -> str:
    names = [name for entry in trainer.entries if isinstance(entry.extension, Recorder) for name in entry.extension.writes]
    return names[0] if names else _DEFAULT
