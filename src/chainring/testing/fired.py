"""fired: the iterations at which a trigger fires."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chainring.testing._fake_updater import Values
from chainring.testing._timelines import maker_of, timelines


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
