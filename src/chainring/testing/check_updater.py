"""check_updater: the rules for every updater."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainring.testing import _resumed_runs
from chainring.training.trainer import Trainer

_SAVE = (
    "The objects that get_iterator, get_model and get_optimizer return are saved; all else that it remembers is saved by "
    "its serialize(serializer), which begins with super().serialize(serializer)"
)
_FINALIZE = "Let finalize() do nothing when it is called again, and end what it can whatever has failed"


def check_updater(make: Callable[[], Any], *, iterations: int = 6) -> None:
    """Check that an updater counts correctly, can be resumed, and can be finalized.

    Each update must add one to ``iteration``, and the epoch attributes must be consistent. A run that is saved after any
    iteration, and resumed with all objects created again, must equal the uninterrupted run: in reported values,
    iterators, models, optimizers, the updater's state and random generators after each iteration. ``finalize`` may be
    called again, and must not replace an error.

    Args:
        make: a function that creates the updater with its data, model and optimizer. The random generators are in the
            same state at each call, so that the models are equal.
        iterations: the length of the runs; more than an epoch tests more. The data must last at least as long.

    Raises:
        AssertionError: a rule is violated.
    """

    def build(out: str) -> tuple[Trainer, Any]:
        updater = make()
        with _resumed_runs.require_no_error(
            "a trainer takes it as its updater", "Derive it from chainring.training.Updater"
        ):
            return Trainer(updater, out=out), updater

    epochs: dict[int, tuple[float, int]] = {}

    def observe(trainer: Trainer, updater: Any) -> dict[str, str]:
        if epochs and getattr(updater, "counts_epochs", True):
            _require_epochs(updater, epochs)
        return _resumed_runs.fingerprint_with_state(trainer, updater)

    def run(resume_points: list[int]) -> _resumed_runs.Observations:
        epochs.clear()
        if not resume_points:  # a resumed run is compared with this one
            epochs[0] = (0.0, 0)
        return _resumed_runs.run_resumed(build, iterations, observe, resume_points=resume_points)

    observations = _resumed_runs.require_resumable(run, iterations, _SAVE, "An updater")
    found = f"they end after {len(observations)} updates"
    remedy = "Give data that are repeated, or fewer iterations="
    _resumed_runs.require(len(observations) == iterations, "the data last for the whole trial", found, remedy)
    for failure in (0, 4, None):
        _resumed_runs.require_finalized(build, failure, _FINALIZE)


def _require_epochs(updater: Any, epochs: dict[int, tuple[float, int]]) -> None:
    """Require the epochs of an update to continue from those of the one before."""
    iteration = updater.iteration
    previous_detail, previous_epoch = epochs[iteration - 1]
    detail, epoch = epochs[iteration] = (updater.epoch_detail, updater.epoch)
    remedy = "Leave them to get_iterator('main'), from whose epochs they come, or define all four"
    found = f"epoch_detail {detail} and epoch {epoch} in iteration {iteration}, after {previous_detail} and {previous_epoch}"
    is_whole_part = previous_detail <= detail and int(detail) == epoch
    _resumed_runs.require(is_whole_part, "epoch is epoch_detail without its fraction", found, remedy)
    rule = "previous_epoch_detail is epoch_detail before the update"
    is_previous = updater.previous_epoch_detail == previous_detail
    _resumed_runs.require(is_previous, rule, f"{updater.previous_epoch_detail}; {found}", remedy)
    rule = "is_new_epoch says that the update has ended an epoch"
    _resumed_runs.require(updater.is_new_epoch == (epoch > previous_epoch), rule, f"{updater.is_new_epoch}; {found}", remedy)
