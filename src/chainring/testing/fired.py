"""fired: the iterations at which a trigger fires."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from chainring._checks import is_integer
from chainring.testing._harness import ResumeScenario
from chainring.testing.fakes import FakeUpdater, Values
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_trigger


def fired(
    trigger: Any,
    *,
    iterations: int,
    epoch_length: float = 1,
    values: Values | None = None,
    seconds: float = 1.0,
    resumed_after: Iterable[int] = (),
) -> list[int]:
    """Return the iterations at which a trigger fires in a run.

    The run is a trainer's, with a `FakeUpdater` and a `ManualClock`; the files that it writes are removed.

    Example::

        assert fired((2, "epoch"), iterations=12, epoch_length=3) == [6, 12]

    Args:
        trigger: whatever `get_trigger` accepts, or a function without arguments, or a class, that makes such.
        iterations: the length of the run.
        epoch_length: iterations in an epoch.
        values: the values that each iteration reports, see `FakeUpdater`.
        seconds: the duration of an iteration.
        resumed_after: iterations after which the run is saved, and continued by a new trainer with a new trigger that
            loads the saved state; 0 is before the first.

    Raises:
        TypeError: the trigger is of another form, or is resumed and cannot be made anew.
        ValueError: an argument is out of range.
        AssertionError: the state of the trigger cannot be saved and loaded.
    """
    make, makes_new = trigger_factory(trigger)
    resume_points = list(resumed_after)
    if resume_points and not makes_new:
        raise TypeError(
            f"a resumed run has a new trigger, and {trigger!r} is one object; give a function that makes it: lambda: ..."
        )
    outside = [point for point in resume_points if not 0 <= point <= iterations]
    if outside:
        raise ValueError(f"a run of {iterations} iterations is resumed after 0 to {iterations} of them, got {outside}")
    (found,) = call_iterations(make, 1, iterations, epoch_length, values, seconds, resume_points, strict=False)
    return found


def trigger_factory(trigger: Any) -> tuple[Callable[[], Any], bool]:
    """Return a function that makes a trigger, and whether it makes a new one at each call.

    A class, or a function that can be called without arguments and not with one, is called; any other callable is the
    trigger itself.
    """
    if isinstance(trigger, type) or (callable(trigger) and _takes(trigger, 0) and not _takes(trigger, 1)):
        return lambda: get_trigger(trigger()), True
    get_trigger(trigger)  # refuses other forms
    return lambda: get_trigger(trigger), not callable(trigger)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except ValueError:
        return count == 1  # some callables of C have no signature
    except TypeError:
        return False
    return True


def call_iterations(
    make: Callable[[], Any],
    extensions: int,
    iterations: int,
    epoch_length: float,
    values: Values | None,
    seconds: float,
    resume_points: Iterable[int] = (),
    strict: bool = True,
) -> list[list[int]]:
    """Return the iterations at which each of so many extensions that share a trigger is called, see `fired`."""
    if not is_integer(iterations) or iterations < 1:
        raise ValueError(f"a run has at least 1 iteration, got iterations={iterations!r}")
    calls: list[list[int]] = [[] for _ in range(extensions)]

    def build(out: str) -> tuple[Trainer, Any]:
        trigger = make()
        trainer = Trainer(FakeUpdater(epoch_length, values), out=out)
        for record in calls:
            trainer.extend(_recorder(record), name="recorder", trigger=trigger)
        return trainer, trigger

    ResumeScenario(build, iterations, lambda *_: {}, seconds, resume_points, strict).run()
    return calls


def _recorder(calls: list[int]) -> Callable[[Trainer], None]:
    return lambda trainer: calls.append(trainer.updater.iteration)
