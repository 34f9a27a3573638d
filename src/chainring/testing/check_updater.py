"""check_updater: what every updater keeps to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from chainring.testing._harness import Course, Planned, require, require_finalized, require_resumed, required, seen_of
from chainring.training.trainer import Trainer

_SAVE = (
    "What get_iterator, get_model and get_optimizer return is saved; all else that it remembers is saved by its "
    "serialize(serializer), which begins with super().serialize(serializer)"
)
_ENDS = "Let finalize() do nothing when it is called again, and end what it can whatever has failed"


def check_updater(make: Callable[[], Any], *, iterations: int = 6) -> None:
    """Proves that an updater counts, can be resumed, and is finalized.

    Each update adds one to ``iteration``, and the epochs agree with one another. A run that is saved after any iteration
    and continued with everything made anew must be the uninterrupted one: what is reported, iterators, models, optimizers,
    the updater's state and random generators after each iteration. ``finalize`` may be called again, and changes no error.

    Args:
        make: makes the updater, with all that belongs to it: data, model, optimizer. The random generators begin where they
            were at first, so that models are alike.
        iterations: the length of the runs; more than an epoch shows more. The data last for at least as long.

    Raises:
        AssertionError: a rule does not hold.
    """

    def build(out: str) -> tuple[Trainer, Any]:
        updater = make()
        with required("a trainer takes it as its updater", "Derive it from chainring.training.Updater"):
            return Trainer(updater, out=out), updater

    details: dict[int, tuple[float, int]] = {}

    def see(trainer: Trainer, updater: Any) -> dict[str, str]:
        if details and getattr(updater, "counts_epochs", True):
            _require_epochs(updater, details)
        return seen_of(trainer, updater)

    def course(cuts: Iterable[int]) -> Course:
        resumed_after = [*cuts]
        details.clear()
        if not resumed_after:  # a resumed run is compared with this one
            details[0] = (0.0, 0)
        return Course(build, iterations, see, None, resumed_after)

    seen = require_resumed(course, _SAVE, "An updater")
    remedy = "Give data that are repeated, or fewer iterations="
    require(len(seen) == iterations, "the data last for the whole trial", f"they end after {len(seen)} updates", remedy)
    for planned in Planned:
        require_finalized(build, planned, _ENDS)


def _require_epochs(updater: Any, details: dict[int, tuple[float, int]]) -> None:
    """The epochs of an update go on from those of the one before."""
    iteration = updater.iteration
    before, epoch = details[iteration - 1]
    now = details[iteration] = (updater.epoch_detail, updater.epoch)
    remedy = "Leave them to get_iterator('main'), from whose epochs they come, or define all four"
    found = f"epoch_detail {now[0]} and epoch {now[1]} in iteration {iteration}, after {before} and {epoch}"
    require(before <= now[0] and int(now[0]) == now[1], "epoch is epoch_detail without its fraction", found, remedy)
    rule = "previous_epoch_detail is epoch_detail before the update"
    require(updater.previous_epoch_detail == before, rule, f"{updater.previous_epoch_detail}; {found}", remedy)
    rule = "is_new_epoch says that the update has ended an epoch"
    require(updater.is_new_epoch == (now[1] > epoch), rule, f"{updater.is_new_epoch}; {found}", remedy)
