"""fired and check_trigger: the iterations at which a trigger fires, and the rules for every trigger."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from chainring._checks import is_integer
from chainring.testing._resumed_runs import accepts, require, resume_points_of, run_resumed, uneven_values
from chainring.testing.fakes import FakeUpdater, Values
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_trigger

_SAVE = (
    "Give the trigger serialize(serializer), which saves all that its answer follows from, its last answer and the "
    "iteration of it included; or derive it from chainring.training.triggers.Trigger and begin with super().serialize"
)
_REPEAT = (
    "Asked again in the same iteration a trigger repeats its answer: write ask(trainer) in a subclass of "
    "chainring.training.triggers.Trigger"
)


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

    The run uses a trainer with a `FakeUpdater` and a `ManualClock`; its files are removed.

    Example::

        assert fired((2, "epoch"), iterations=12, epoch_length=3) == [6, 12]

    Args:
        trigger: anything that `get_trigger` accepts, or a class or function without arguments that creates it.
        iterations: the length of the run.
        epoch_length: the number of iterations in an epoch.
        values: the values that each iteration reports, see `FakeUpdater`.
        seconds: the duration of an iteration.
        resumed_after: the iterations after which the run is saved, and resumed by a new trainer with a new trigger; 0 is
            before the first.

    Raises:
        TypeError: the trigger has another form, or is to be resumed and cannot be created again.
        ValueError: an argument is out of range.
        AssertionError: the state of the trigger cannot be saved and loaded.
    """
    resume_points = list(resumed_after)
    make = _trigger_factory(trigger, is_resumed=bool(resume_points))
    outside = [point for point in resume_points if not 0 <= point <= iterations]
    if outside:
        raise ValueError(f"a run of {iterations} iterations is resumed after 0 to {iterations} of them, got {outside}")
    (found,) = _call_iterations(make, 1, iterations, epoch_length, values, seconds, resume_points, strict=False)
    return found


def check_trigger(
    make: Any,
    *,
    iterations: int = 12,
    epoch_length: float = 3,
    values: Values = uneven_values,
    seconds: float = 1.0,
) -> None:
    """Check that a trigger can be shared, saved and resumed.

    In runs with a `FakeUpdater`, it must fire at the same iterations with one extension or two, at whatever iteration the
    run is saved and resumed, and each time it is created again.

    Args:
        make: a class, or a function without arguments, that creates the trigger; or ``(period, unit)``.
        iterations: the length of the runs.
        epoch_length: the number of iterations in an epoch.
        values: the values that each iteration reports, see `FakeUpdater`; by default varying values of ``main/loss`` and
            ``main/accuracy``.
        seconds: the duration of an iteration on a `ManualClock`.

    Raises:
        AssertionError: a rule is violated, or the trigger never fires, so that nothing is tested.
        TypeError: ``make`` does not create a trigger, or returns the same object each time.
    """
    factory = _trigger_factory(make, is_resumed=True)
    settings = (iterations, epoch_length, values, seconds)
    (alone,) = _call_iterations(factory, 1, *settings)
    remedy = "Give iterations=, epoch_length=, values= or seconds= with which it does"
    require(bool(alone), "the trial shows something only if the trigger fires", f"never in {iterations} iterations", remedy)
    (again,) = _call_iterations(factory, 1, *settings)
    remedy = "Nothing is kept in the class, the module, or what make() shares"
    require(again == alone, "a trigger created again starts again", f"it fired at {alone}, then at {again}", remedy)
    for calls in _call_iterations(factory, 2, *settings):
        found = f"one of the two is called at {calls}, and alone it would be at {alone}"
        require(calls == alone, "two extensions that share a trigger are both called when it fires", found, _REPEAT)
    for resume_points, when in resume_points_of(iterations):
        rule = f"a run saved {when} and continued fires when the uninterrupted one does"
        for calls in _call_iterations(factory, 2, *settings, resume_points):
            require(calls == alone, rule, f"it fires at {calls} instead of {alone}", _SAVE)


def _trigger_factory(trigger: Any, is_resumed: bool) -> Callable[[], Any]:
    """Return a function that calls a class, or a function without arguments; any other callable is the trigger itself."""
    if isinstance(trigger, type) or (callable(trigger) and accepts(trigger, 0) and not accepts(trigger, 1)):
        return lambda: get_trigger(trigger())
    get_trigger(trigger)  # refuses other forms
    if is_resumed and callable(trigger):
        raise TypeError(f"a resumed run has a new trigger, and {trigger!r} is one object; give lambda: ..., which makes it")
    return lambda: get_trigger(trigger)


def _call_iterations(
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

    run_resumed(build, iterations, lambda *_: {}, seconds, resume_points, strict)
    return calls


def _recorder(calls: list[int]) -> Callable[[Trainer], None]:
    return lambda trainer: calls.append(trainer.updater.iteration)
