"""The points at which a run is killed: within an epoch, after its end, after an evaluation, and after a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WITHIN, END, EVALUATION, REDONE = (
    "within an epoch",
    "right after the end of an epoch",
    "right after an evaluation",
    "some iterations after a snapshot, so that work is redone",
)
_MOST_REDONE = 5  # iterations


@dataclass
class Kill:
    """A kill: the iteration after which it comes and that of the snapshot from which the run is resumed, and why there."""

    at: int
    saved_at: int
    reasons: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        resumed = f", resumed from a snapshot of iteration {self.saved_at}" if self.saved_at != self.at else ""
        return f"after iteration {self.at}{resumed}" + (f" ({' and '.join(self.reasons)})" if self.reasons else "")


def choose_kills(events: Mapping[int, list[str]]) -> tuple[list[Kill], list[str]]:
    """Return the kills of one run that is resumed after each, and which kinds of points the run does not reach.

    Args:
        events: what each iteration of the uninterrupted run ended with, from where it began to its last.
    """
    first, last = min(events), max(events)
    inner = range(first + 1, last)
    epochs = [at for at in inner if "epoch" in events[at]]
    evaluations = [at for at in inner if "evaluation" in events[at]]
    kills: dict[int, Kill] = {}
    if epochs:
        kills[epochs[0]] = Kill(epochs[0], epochs[0], [END])
    if evaluations:
        apart = [at for at in evaluations if at not in epochs]
        at = apart[0] if apart else evaluations[0]
        kills.setdefault(at, Kill(at, at)).reasons.append(EVALUATION)
    if (within := _within(first, last, epochs)) is not None:
        kills.setdefault(within, Kill(within, within)).reasons.append(WITHIN)
    latest = max(kills, default=first)
    is_second_end_reached = len(epochs) > 1 and epochs[1] + 2 < last
    _add_redone(
        kills, first, epochs[1] + 2 if is_second_end_reached else min(last - 1, max(latest + 3, (latest + last) // 2))
    )
    reached = {reason for kill in kills.values() for reason in kill.reasons}
    return [kills[at] for at in sorted(kills)], [kind for kind in (WITHIN, END, EVALUATION, REDONE) if kind not in reached]


def _within(first: int, last: int, epochs: list[int]) -> int | None:
    """Return an iteration in the midst of the second epoch, or as near to it as the run has one that ends no epoch."""
    begin, end = epochs[0] if epochs else first, epochs[1] if len(epochs) > 1 else last
    middle = (begin + end) // 2 if epochs or last - first > 2 * _MOST_REDONE else first + 1
    candidates = [at for at in range(first + 1, last) if at not in epochs]
    return min(candidates, key=lambda at: (abs(at - middle), at), default=None)


def _add_redone(kills: dict[int, Kill], first: int, at: int) -> None:
    """Add a kill some iterations after a snapshot, or have another one resumed from an earlier snapshot."""
    before = max((other for other in kills if other < at), default=first)
    if at in kills or before + 1 >= at:
        at = max(kills, default=first)
        before = max((other for other in kills if other < at), default=first)
    if before + 1 < at:
        kill = kills.setdefault(at, Kill(at, at))
        kill.saved_at = max(at - _MOST_REDONE, before + 1)
        kill.reasons.append(REDONE)
