"""When a trigger fires for each of the extensions that share it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from chainring.testing._courses import Course
from chainring.testing._fake_updater import FakeUpdater, Values
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
