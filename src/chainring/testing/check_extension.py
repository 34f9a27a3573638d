"""check_extension: the rules for every extension."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from chainring.testing._fingerprint import describe, leaves
from chainring.testing._harness import (
    FailurePoint,
    ResumeScenario,
    call_factory,
    fingerprint_with_state,
    require,
    require_finalized,
    require_no_error,
    require_resumable,
    uneven_values,
)
from chainring.testing.fakes import FakeUpdater
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

    A run that is saved after any iteration and continued with everything made anew must be the uninterrupted one: the
    calls of the extension, the reported values, the extension's state and ``result``, models, optimizers and random
    generators after each iteration. A failure of the training, before the extension was initialized or after it was
    called, must come out unchanged; ``finalize`` may be called again. An iteration takes one second on a `ManualClock`.

    Example::

        check_extension(lambda: MyExtension(), trigger=(2, "iteration"), result=lambda extension: extension.rows)

    Args:
        make: makes the extension; a function that needs an argument is given the updater.
        iterations: the length of the runs.
        updater: makes the updater; by default a `FakeUpdater` of 3 iterations an epoch, which reports an uneven
            ``main/loss`` and ``main/accuracy``.
        trigger: the trigger that calls it; by default the extension's own.
        result: returns a value of the extension that is compared besides, such as its rows.

    Raises:
        AssertionError: a rule does not hold, or the extension is never called, so that nothing is shown.
    """
    trial = _Trial(make, updater or (lambda: FakeUpdater(3, uneven_values)), trigger, result)

    def scenario(resume_points: Iterable[int]) -> ResumeScenario:
        trial.calls.clear()
        return ResumeScenario(trial.build, iterations, trial.observe, 1.0, resume_points)

    require_resumable(scenario, _SAVE, "An extension")
    shows_something = bool(trial.calls) or trial.never_called
    found = f"not in {iterations} iterations"
    remedy = "Give trigger= or iterations= with which it is"
    require(shows_something, "the trial shows something only if the extension is called", found, remedy)
    require_finalized(trial.build, FailurePoint.BEFORE_INITIALIZE, _FINALIZE)
    require_finalized(trial.build, FailurePoint.FOURTH_ITERATION, _FINALIZE)


class _Trial:
    """The runs of an extension.

    Attributes:
        calls: the iterations of its calls.
        never_called: True if it works beside the loop, as a profiler does.
    """

    def __init__(
        self, make: Callable[..., Any], updater: Callable[[], Any], trigger: Any, result: Callable[[Any], Any]
    ) -> None:
        self._make = make
        self._updater = updater
        self._trigger = trigger
        self._result = result
        self.calls: list[int] = []
        self.never_called = False

    def build(self, out: str) -> tuple[Trainer, Any]:
        """Return a trainer with the extension, whose calls are recorded."""
        updater = self._updater()
        extension = call_factory(self._make, updater)
        trainer = Trainer(updater, out=out)
        with require_no_error("an extension can be registered", "It is a callable of one argument, the trainer"):
            trainer.extend(extension, trigger=self._trigger)
        (entry,) = trainer.entries
        self.never_called = entry.trigger is never
        call_extension = entry.call

        def call(trainer: Trainer) -> Any:
            self.calls.append(trainer.updater.iteration)
            return call_extension(trainer)

        entry.call = call
        return trainer, extension

    def observe(self, trainer: Trainer, extension: Any) -> dict[str, str]:
        """Return the texts that are compared after an iteration."""
        is_called = str(trainer.updater.iteration in self.calls[-1:])
        result = {path: describe(leaf) for path, leaf in leaves("result", self._result(extension))}
        return fingerprint_with_state(trainer, extension) | result | {"whether it is called": is_called}
