"""fired: the iterations at which a trigger fires."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from chainring.testing._harness import Course
from chainring.testing.fakes import FakeUpdater, Values
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_trigger


def maker_of(trigger: Any) -> tuple[Callable[[], Any], bool]:
    """A function that makes a trigger, and whether it makes a new one at each call.

    A class, or a function that can be called without arguments and not with one, is called; any other callable is the
    trigger itself.
    """
    if isinstance(trigger, type) or (callable(trigger) and _takes(trigger, 0) and not _takes(trigger, 1)):
        return lambda: get_trigger(trigger()), True
    get_trigger(trigger)  # refuses other forms
    return lambda: get_trigger(trigger), not callable(trigger)


def _takes(function: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * number)
    except ValueError:
        return number == 1  # some callables of C have no signature
    except TypeError:
        return False
    return True


def timelines(
    make: Callable[[], Any],
    extensions: int,
    iterations: int,
    epoch_length: float,
    values: Values | None,
    seconds: float,
    resumed_after: Iterable[int] = (),
    proves: bool = True,
) -> list[list[int]]:
    """The iterations at which each of so many extensions is called that share a trigger; see `fired`."""
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"a run has at least 1 iteration, got iterations={iterations!r}")
    fires: list[list[int]] = [[] for _ in range(extensions)]

    def build(out: str) -> tuple[Trainer, Any]:
        trigger = make()
        trainer = Trainer(FakeUpdater(epoch_length, values), out=out)
        for each in fires:
            trainer.extend(_noting(each), name="fires", trigger=trigger)
        return trainer, trigger

    Course(build, iterations, lambda *_: {}, seconds, resumed_after, proves).run()
    return fires


def _noting(fires: list[int]) -> Callable[[Trainer], None]:
    return lambda trainer: fires.append(trainer.updater.iteration)


def fired(
    trigger: Any,
    *,
    iterations: int,
    epoch_length: float = 1,
    values: Values | None = None,
    seconds: float = 1.0,
    resumed_after: Iterable[int] = (),
) -> list[int]:
    """The iterations at which a trigger fires in a run.

    ``assert fired((2, "epoch"), iterations=12, epoch_length=3) == [6, 12]``. The run is a trainer's, with a `FakeUpdater`
    and a `ManualClock`; what it writes is removed.

    Args:
        trigger: whatever `get_trigger` accepts, or a function without arguments, or a class, that makes such.
        iterations: the length of the run.
        epoch_length: iterations in an epoch.
        values: what each iteration reports, see `FakeUpdater`.
        seconds: what an iteration takes.
        resumed_after: iterations after which the run is saved, and continued by a new trainer with a new trigger that
            loads what was saved; 0 is before the first.

    Raises:
        TypeError: the trigger is of another form, or is resumed and cannot be made anew.
        ValueError: a number is out of range.
        AssertionError: the state of the trigger cannot be saved and loaded.
    """
    make, is_made_anew = maker_of(trigger)
    cuts = list(resumed_after)
    if cuts and not is_made_anew:
        raise TypeError(
            f"a resumed run has a new trigger, and {trigger!r} is one object; give a function that makes it: lambda: ..."
        )
    wrong = [cut for cut in cuts if not 0 <= cut <= iterations]
    if wrong:
        raise ValueError(f"a run of {iterations} iterations is resumed after 0 to {iterations} of them, got {wrong}")
    (found,) = timelines(make, 1, iterations, epoch_length, values, seconds, cuts, proves=False)
    return found
