"""Where the time of a run went, and what to do first, in one line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from chainring._messages import list_names, printable
from chainring.iterators.base import find_main_iterator
from chainring.training.triggers.base import IntervalTrigger

if TYPE_CHECKING:
    from chainring._progress import Trainer
    from chainring.training._entry import Entry

_LEAST_SECONDS = 10.0  # of which something is said
_LEAST_SHARE = 0.25
_SMALL = 0.001  # seconds of an update, most of which are Python's and not the model's
_SEVERAL = re.compile(r"(extension:(?:validation|snapshot|LogReport))_\d+")
_COMPUTING = ("forward", "backward", "update", "step")
_REMEDIES = {
    "data": (
        "waiting for data",
        "more workers (MultiprocessIterator, which takes your converter= too), or a faster transform",
    ),
    "communication": (
        "exchanging with other ranks, or waiting for them",
        "if RankTimes names a slow rank, a look at that, otherwise accumulate=k, to exchange less often",
    ),
    "step": ("in the step of the optimizer", "fused=True, if the optimizer has it, or less in its hooks"),
    "update": ("around the step of the optimizer", "less in callbacks, in clipping, and in checks of gradients"),
    "loop": ("between updates", "fewer or faster triggers"),
    "extension:validation": ("evaluating", "a less frequent trigger, or fewer examples"),
    "extension:snapshot": ("taking snapshots", "a less frequent trigger, or a faster disk"),
    "extension:LogReport": ("in the log", "fewer reported values, a less frequent trigger, or faster writers"),
}


def advise(seconds: Mapping[str, float], iterations: int) -> str | None:
    """Return the line about the seconds of each phase of some iterations; ``None`` if nothing is worth saying.

    Time in the model is where it should be, unless updates are so small that most of it is Python's. The first batch, for
    which workers start, comes once. What is around the step is known where forward and backward are.
    """
    total = sum(seconds.values())
    if total < _LEAST_SECONDS or not iterations:
        return None
    computing = sum(seconds.get(phase, 0.0) for phase in _COMPUTING)
    phases: defaultdict[str, float] = defaultdict(float)  # extensions of one kind together
    for phase, spent in seconds.items():
        several = _SEVERAL.fullmatch(phase)
        phases[several[1] if several else phase] += spent
    is_small = computing / iterations < _SMALL
    own = set(_COMPUTING) if is_small or phases["forward"] + phases["backward"] == 0 else {"forward", "backward"}
    others = phases.keys() - own - {"first batch"}
    largest = max(sorted(others), key=phases.__getitem__, default="")
    share = phases[largest] / total
    if is_small and computing / total > max(share, _LEAST_SHARE):
        where = f"in updates of {1000 * computing / iterations:.2f} ms, which are mostly Python's"
        share, remedy = computing / total, "larger batches, or compile=True"
    elif share < _LEAST_SHARE:
        return None
    elif largest in _REMEDIES:
        where, remedy = _REMEDIES[largest]
    else:
        where = f"in extension {printable(largest.removeprefix('extension:'))!r}"
        remedy = "less to do in it, or a less frequent trigger"
    return f"{100 * share:.0f} % of the time {where}; what helps first: {remedy}"


def opening_line(trainer: Trainer) -> str | None:
    """Return what a run says at its start of extensions that wait for the end of a stream, which may never come."""
    if not (waiting := _waiting(trainer)):
        return None
    names, iterations = list_names([entry.name for entry in waiting], 4), trainer.stop_trigger.get_training_length()[0]
    return (
        f"the length of an epoch of these data is not known: until they end, nothing calls {names}; give a trigger that "
        f'fires before, to extend or defaults, such as trigger=({max(int(iterations) // 10, 1)}, "iteration")'
    )


def _waiting(trainer: Trainer) -> list[Entry]:
    """Return what has a trigger in epochs, if they are of unknown length, none has ended, and the run counts iterations."""
    _, unit = getattr(trainer.stop_trigger, "get_training_length", lambda: None)() or (None, None)
    progress = getattr(find_main_iterator(trainer.updater), "progress", None)
    is_unknown = isinstance(progress, tuple) and progress[2] is None  # else it is a user's own
    if unit != "iteration" or not is_unknown or trainer.updater.epoch:
        return []
    return [e for e in trainer.entries if isinstance(e.trigger, IntervalTrigger) and e.trigger.unit == "epoch"]


def closing_lines(trainer: Trainer, seconds: float, spent: Mapping[str, float], is_interrupted: bool) -> Iterator[str]:
    """Yield what a run of so many seconds says at its end: what it never did, does not leave, and where its time went.

    In ``spent`` are the extensions that were called, but for those that are called in every iteration.
    """
    idle = [entry for entry in trainer.entries if isinstance(entry.trigger, IntervalTrigger) and entry.fires]
    logs = [entry for entry in idle if hasattr(entry.extension, "rows_from")]
    told = _waiting(trainer)  # by the opening line
    idle = [e for e in idle if e.name not in spent and (e.observe is None or e in logs) and e not in told]
    if idle and trainer.updater.iteration and not trainer.is_resumed and not is_interrupted:
        names, iteration = list_names([entry.name for entry in idle], 4), trainer.updater.iteration
        yield (
            f"never called, because the run has ended after iteration {iteration}: {names}; give a trigger that fires "
            f'before, such as trigger=({max(iteration // 10, 1)}, "iteration"), to extend or defaults'
        )
    if seconds >= _LEAST_SECONDS and not any(entry.is_snapshot or entry.optional("writes") for entry in trainer.entries):
        yield (
            "this run has written neither a log nor a snapshot: extensions.defaults() are both, and "
            'chainring.serializers.save("mlp.model", model) saves the model as it is now'
        )
    if (line := _advise_on(trainer, seconds, spent)) is not None:
        yield line


def _advise_on(trainer: Trainer, seconds: float, spent: Mapping[str, float]) -> str | None:
    """Return the line about a run of so many seconds, by the phases that an extension has measured.

    Otherwise by the seconds ``spent`` in extensions whose triggers do not fire in every iteration.
    """
    if seconds < _LEAST_SECONDS:
        return None
    for entry in trainer.entries:
        phases, iterations = entry.optional("measured_phases")
        if iterations:
            return advise(phases, iterations)
    models = trainer.updater.get_all_models().values()
    if any(parameter.device.type != "cpu" for model in models for parameter in model.parameters()):
        return None  # what an extension waits for there may be the work of updates
    phases = {f"extension:{name}": of_extension for name, of_extension in spent.items()}
    return advise({**phases, "forward": max(seconds - sum(phases.values()), 0.0)}, 1)
