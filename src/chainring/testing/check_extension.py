"""check_extension: the rules for every extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainring.testing import _resumed_runs
from chainring.testing.fakes import FakeUpdater
from chainring.training._observer import Observer
from chainring.training._unsaved import describe_leaves
from chainring.training.extension import Entry
from chainring.training.trainer import Trainer
from chainring.training.triggers.base import never

_SAVE = "Give it serialize(serializer), which saves all that it remembers: self.x = serializer('x', self.x)"
_FINALIZE = "Let finalize() do nothing where nothing is to be released: before initialize, and when it is called again"


def check_extension(
    make: Callable[..., Any],
    *,
    iterations: int = 6,
    updater: Callable[[], Any] | None = None,
    trigger: Any = None,
    result: Callable[[Any], Any] = lambda extension: None,
) -> None:
    """Check that an extension can be registered, resumed and finalized.

    A run that is saved after any iteration, and resumed with all objects created again, must equal the uninterrupted run:
    in the calls of the extension, the reported values, the extension's state and ``result``, models, optimizers and
    random generators after each iteration. An error of the training, before the extension was initialized or after it was
    called, must be raised unchanged; ``finalize`` may be called again. An iteration takes one second on a `ManualClock`.

    Args:
        make: a function that creates the extension; if it needs an argument, it gets the updater.
        iterations: the length of the runs.
        updater: a function that creates the updater; by default a `FakeUpdater` with 3 iterations per epoch, which
            reports varying values of ``main/loss`` and ``main/accuracy``.
        trigger: the trigger that calls it; by default the extension's own.
        result: a function that returns another value of the extension to compare, such as its rows.

    Raises:
        AssertionError: a rule is violated, or the extension is never called, so that nothing is tested.
    """
    calls: list[int] = []
    never_called = False

    def build(out: str) -> tuple[Trainer, Any]:
        nonlocal never_called
        own_updater = FakeUpdater(3, _resumed_runs.uneven_values) if updater is None else updater()
        extension = _resumed_runs.call_factory(make, own_updater)
        trainer = Trainer(own_updater, out=out)
        with _resumed_runs.require_no_error(
            "an extension can be registered", "It is a callable of one argument, the trainer"
        ):
            trainer.extend(extension, trigger=trigger)
        (entry,) = trainer.entries
        never_called = entry.trigger is never  # it works beside the loop, as a profiler does
        trainer.watch(_CallRecorder(entry, calls))
        return trainer, extension

    def observe(trainer: Trainer, extension: Any) -> dict[str, str]:
        is_called = str(trainer.updater.iteration in calls[-1:])
        results = describe_leaves("result", result(extension))
        return _resumed_runs.fingerprint_with_state(trainer, extension) | results | {"whether it is called": is_called}

    def run(resume_points: list[int]) -> _resumed_runs.Observations:
        calls.clear()
        return _resumed_runs.run_resumed(build, iterations, observe, 1.0, resume_points)

    _resumed_runs.require_resumable(run, iterations, _SAVE, "An extension")
    found = f"not in {iterations} iterations"
    remedy = "Give trigger= or iterations= with which it is"
    _resumed_runs.require(
        bool(calls) or never_called, "the trial shows something only if the extension is called", found, remedy
    )
    for failure in (0, 4):
        _resumed_runs.require_finalized(build, failure, _FINALIZE)


class _CallRecorder(Observer):
    def __init__(self, entry: Entry, calls: list[int]) -> None:
        self._entry, self._calls = entry, calls

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        if entry is self._entry:
            self._calls.append(trainer.updater.iteration)
        call()
