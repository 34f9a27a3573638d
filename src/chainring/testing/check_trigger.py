"""check_trigger: what every trigger keeps to."""

from __future__ import annotations

from typing import Any

from chainring.testing._harness import require, uneven
from chainring.testing.fakes import Values
from chainring.testing.fired import maker_of, timelines

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
    values: Values = uneven,
    seconds: float = 1.0,
) -> None:
    """Proves that a trigger can be shared, saved and resumed.

    In runs with a `FakeUpdater` it must fire at the same iterations whether it serves one extension or two, whenever the
    run is saved and continued, and each time that it is made anew.

    Args:
        make: a class, or a function without arguments, that makes the trigger; or ``(period, unit)``.
        iterations: the length of the runs.
        epoch_length: iterations in an epoch.
        values: what each iteration reports, see `FakeUpdater`; by default an uneven ``main/loss`` and ``main/accuracy``.
        seconds: what an iteration takes on a `ManualClock`.

    Raises:
        AssertionError: a rule does not hold, or the trigger never fires, so that nothing is shown.
        TypeError: ``make`` makes no trigger, or always the same object.
    """
    function, is_made_anew = maker_of(make)
    if not is_made_anew:
        raise TypeError(f"a resumed run has a new trigger, and {make!r} is one object; give lambda: ..., which makes it")
    settings = (iterations, epoch_length, values, seconds)
    (alone,) = timelines(function, 1, *settings)
    remedy = "Give iterations=, epoch_length=, values= or seconds= with which it does"
    require(bool(alone), "the trial shows something only if the trigger fires", f"never in {iterations} iterations", remedy)
    (again,) = timelines(function, 1, *settings)
    shared = "Nothing is kept in the class, the module, or what make() shares"
    require(again == alone, "a trigger made anew begins anew", f"it fired at {alone}, then at {again}", shared)
    for each in timelines(function, 2, *settings):
        found = f"one of the two is called at {each}, and alone it would be at {alone}"
        require(each == alone, "two extensions that share a trigger are both called when it fires", found, _REPEAT)
    for cuts in [*([k] for k in range(iterations)), [*range(iterations)]]:
        where = f"after iteration {cuts[0]}" if len(cuts) == 1 else "after every iteration"
        for each in timelines(function, 2, *settings, cuts):
            rule = f"a run saved {where} and continued fires when the uninterrupted one does"
            require(each == alone, rule, f"it fires at {each} instead of {alone}", _SAVE)
