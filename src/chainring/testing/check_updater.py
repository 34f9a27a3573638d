"""check_updater: the rules for every updater."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainring.testing import _harness
from chainring.training.trainer import Trainer

_SAVE = (
    "The objects that get_iterator, get_model and get_optimizer return are saved; all else that it remembers is saved by "
    "its serialize(serializer), which begins with super().serialize(serializer)"
)
_FINALIZE = "Let finalize() do nothing when it is called again, and end what it can whatever has failed"


def check_updater(make: Callable[[], Any], *, iterations: int = 6) -> None:
    """Check that an updater counts, can be resumed, and is finalized.

    Each update adds one to ``iteration``, and the epochs agree with one another. A run that is saved after any iteration
    and continued with everything created again must be the uninterrupted one: reported values, iterators, models,
    optimizers, the updater's state and random generators after each iteration. ``finalize`` may be called again, and changes
    no error.

    Args:
        make: makes the updater, with all that belongs to it: data, model, optimizer. The random generators begin where they
            were at first, so that models are alike.
        iterations: the length of the runs; more than an epoch shows more. The data last for at least as long.

    Raises:
        AssertionError: a rule does not hold.
    """

    def build(out: str) -> tuple[Trainer, Any]:
        updater = make()
        with _harness.require_no_error("a trainer takes it as its updater", "Derive it from chainring.training.Updater"):
            return Trainer(updater, out=out), updater

    epochs: dict[int, tuple[float, int]] = {}

    def observe(trainer: Trainer, updater: Any) -> dict[str, str]:
        if epochs and getattr(updater, "counts_epochs", True):
            _require_epochs(updater, epochs)
        return _harness.fingerprint_with_state(trainer, updater)

    def run(resume_points: list[int]) -> _harness.Observations:
        epochs.clear()
        if not resume_points:  # a resumed run is compared with this one
            epochs[0] = (0.0, 0)
        return _harness.run_resumed(build, iterations, observe, resume_points=resume_points)

    observations = _harness.require_resumable(run, iterations, _SAVE, "An updater")
    found = f"they end after {len(observations)} updates"
    remedy = "Give data that are repeated, or fewer iterations="
    _harness.require(len(observations) == iterations, "the data last for the whole trial", found, remedy)
    for failure in (0, 4, None):
        _harness.require_finalized(build, failure, _FINALIZE)


def _require_epochs(updater: Any, epochs: dict[int, tuple[float, int]]) -> None:
    """Require the epochs of an update to continue from those of the one before."""
    iteration = updater.iteration
    previous_detail, previous_epoch = epochs[iteration - 1]
    detail, epoch = epochs[iteration] = (updater.epoch_detail, updater.epoch)
    remedy = "Leave them to get_iterator('main'), from whose epochs they come, or define all four"
    found = f"epoch_detail {detail} and epoch {epoch} in iteration {iteration}, after {previous_detail} and {previous_epoch}"
    is_whole_part = previous_detail <= detail and int(detail) == epoch
    _harness.require(is_whole_part, "epoch is epoch_detail without its fraction", found, remedy)
    rule = "previous_epoch_detail is epoch_detail before the update"
    is_previous = updater.previous_epoch_detail == previous_detail
    _harness.require(is_previous, rule, f"{updater.previous_epoch_detail}; {found}", remedy)
    rule = "is_new_epoch says that the update has ended an epoch"
    _harness.require(updater.is_new_epoch == (epoch > previous_epoch), rule, f"{updater.is_new_epoch}; {found}", remedy)
