"""check_trigger: the rules for every trigger."""

from __future__ import annotations

from typing import Any

from chainring.testing._harness import require, resume_points_of, uneven_values
from chainring.testing.fakes import Values
from chainring.testing.fired import call_iterations, trigger_factory

_SAVE = (
    "Give the trigger serialize(serializer), which saves all that its answer follows from, its last answer and the "
    "iteration of it included; or derive it from chainring.training.triggers.Trigger and begin with super().serialize"
)
_REPEAT = (
    "Asked again in the same iteration a trigger repeats its answer: write ask(trainer) in a subclass of "
    "chainring.training.triggers.Trigger"
)


def check_trigger(
    make: Any,
    *,
    iterations: int = 12,
    epoch_length: float = 3,
    values: Values = uneven_values,
    seconds: float = 1.0,
) -> None:
    """Check that a trigger can be shared, saved and resumed.

    In runs with a `FakeUpdater` it must fire at the same iterations with one extension or two, whenever the run is saved
    and continued, and each time that it is made anew.

    Example::

        check_trigger(lambda: MyTrigger(period=3))

    Args:
        make: a class, or a function without arguments, that makes the trigger; or ``(period, unit)``.
        iterations: the length of the runs.
        epoch_length: iterations in an epoch.
        values: the values that each iteration reports, see `FakeUpdater`; by default an uneven ``main/loss`` and
            ``main/accuracy``.
        seconds: the duration of an iteration on a `ManualClock`.

    Raises:
        AssertionError: a rule does not hold, or the trigger never fires, so that nothing is shown.
        TypeError: ``make`` does not make a trigger, or always the same object.
    """
    factory, makes_new = trigger_factory(make)
    if not makes_new:
        raise TypeError(f"a resumed run has a new trigger, and {make!r} is one object; give lambda: ..., which makes it")
    settings = (iterations, epoch_length, values, seconds)
    (alone,) = call_iterations(factory, 1, *settings)
    remedy = "Give iterations=, epoch_length=, values= or seconds= with which it does"
    require(bool(alone), "the trial shows something only if the trigger fires", f"never in {iterations} iterations", remedy)
    (again,) = call_iterations(factory, 1, *settings)
    remedy = "Nothing is kept in the class, the module, or what make() shares"
    require(again == alone, "a trigger made anew begins anew", f"it fired at {alone}, then at {again}", remedy)
    for calls in call_iterations(factory, 2, *settings):
        found = f"one of the two is called at {calls}, and alone it would be at {alone}"
        require(calls == alone, "two extensions that share a trigger are both called when it fires", found, _REPEAT)
    for resume_points, when in resume_points_of(iterations):
        rule = f"a run saved {when} and continued fires when the uninterrupted one does"
        for calls in call_iterations(factory, 2, *settings, resume_points):
            require(calls == alone, rule, f"it fires at {calls} instead of {alone}", _SAVE)
