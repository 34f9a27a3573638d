"""check_extension: what every extension keeps to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from chainring.testing._fingerprint import leaves, text
from chainring.testing._harness import (
    Course,
    Planned,
    made,
    require,
    require_finalized,
    require_resumed,
    required,
    seen_of,
    uneven,
)
from chainring.testing.fakes import FakeUpdater
from chainring.training.trainer import Trainer
from chainring.training.triggers.base import never

_SAVE = "Give it serialize(serializer), which saves all that it remembers: self.x = serializer('x', self.x)"
_ENDS = "Let finalize() do nothing where there is nothing to let go of: before initialize, and when it is called again"


def check_extension(
    make: Callable[..., Any],
    *,
    iterations: int = 6,
    updater: Callable[[], Any] | None = None,
    trigger: Any = None,
    result: Callable[[Any], Any] = lambda extension: None,
) -> None:
    """Proves that an extension can be registered, resumed and finalized.

    A run that is saved after any iteration and continued with everything made anew must be the uninterrupted one: when the
    extension is called, what is reported, the extension's state and ``result``, models, optimizers and random generators
    after each iteration. A failure of the training, before the extension was initialized or after it was called, must come
    out unchanged; ``finalize`` may be called again. An iteration takes one second on a `ManualClock`.

    Args:
        make: makes the extension; a function that needs an argument is given the updater.
        iterations: the length of the runs.
        updater: makes the updater; by default a `FakeUpdater` of 3 iterations an epoch, which reports an uneven
            ``main/loss`` and ``main/accuracy``.
        trigger: when it is called; by default the extension's own.
        result: what of the extension is compared besides, such as ``lambda extension: extension.rows``.

    Raises:
        AssertionError: a rule does not hold, or the extension is never called, so that nothing is shown.
    """
    trial = _Trial(make, iterations, updater or (lambda: FakeUpdater(3, uneven)), trigger, result)
    require_resumed(trial.course, _SAVE, "An extension")
    remedy = "Give trigger= or iterations= with which it is"
    is_tried = bool(trial.calls) or trial.is_beside
    found = f"not in {iterations} iterations"
    require(is_tried, "the trial shows something only if the extension is called", found, remedy)
    require_finalized(trial.build, Planned.BEFORE, _ENDS)
    require_finalized(trial.build, Planned.AFTER, _ENDS)


@dataclass
class _Trial:
    """The runs of an extension.

    Attributes:
        calls: the iterations of its calls.
        is_beside: whether it works beside the loop, as a profiler does, and is never called.
    """

    make: Callable[..., Any]
    iterations: int
    updater: Callable[[], Any]
    trigger: Any
    result: Callable[[Any], Any]
    calls: list[int] = field(default_factory=list)
    is_beside: bool = False

    def build(self, out: str) -> tuple[Trainer, Any]:
        """A trainer with the extension, whose calls are noted."""
        updater = self.updater()
        extension = made(self.make, updater)
        trainer = Trainer(updater, out=out)
        with required("an extension can be registered", "It is a callable of one argument, the trainer"):
            trainer.extend(extension, trigger=self.trigger)
        (entry,) = trainer.entries
        self.is_beside = entry.trigger is never
        own = entry.call

        def call(trainer: Trainer) -> Any:
            self.calls.append(trainer.updater.iteration)
            return own(trainer)

        entry.call = call
        return trainer, extension

    def see(self, trainer: Trainer, extension: Any) -> dict[str, str]:
        """What is compared after an iteration."""
        is_called = str(trainer.updater.iteration in self.calls[-1:])
        own = {path: text(leaf) for path, leaf in leaves("result", self.result(extension))}
        return seen_of(trainer, extension) | own | {"whether it is called": is_called}

    def course(self, cuts: Iterable[int]) -> Course:
        """A new run."""
        self.calls.clear()
        return Course(self.build, self.iterations, self.see, 1.0, cuts)
