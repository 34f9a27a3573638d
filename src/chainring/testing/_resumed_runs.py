"""The runs behind the checks: whole, or saved and continued at any point by a trainer that was created again."""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from chainring import _random
from chainring._checks import find_call_error
from chainring.serializers._loading import load
from chainring.serializers._saving import save
from chainring.serializers.protocol import DictionarySerializer, visit_if_stateful
from chainring.testing._live_traces import fingerprint
from chainring.testing.fakes import ManualClock
from chainring.training._unsaved import describe_leaves
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_stop_trigger

_FIRST, _LAST = 10**9, -(10**9)  # priorities
_PLAIN_VALUES = "State is numbers, strings, bytes, None, tensors, arrays, and lists, tuples and dicts of such"
_ASSIGN = "Assign the value that the serializer returns: self.x = serializer('x', self.x)"
_CLOCK_OFFSET = 1000.0  # seconds between the clocks of two segments of a run: that of another process stands anywhere


def require(holds: bool, rule: str, found: object, remedy: str) -> None:
    """Raise an `AssertionError` with rule, value and remedy unless the rule holds."""
    if not holds:
        raise AssertionError(f"{rule}: {found}. {remedy}")


@contextmanager
def require_no_error(rule: str, remedy: str) -> Iterator[None]:
    """Raise an `AssertionError` where the body fails; one that the body raises is left as it is."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{rule}: {type(error).__name__}: {error}. {remedy}") from error


def require_equal(expected: Mapping[str, str], found: Mapping[str, str], rule: str, remedy: str) -> None:
    """Require two collections of texts to be the same, and name the first that differ."""
    paths = [path for path in {**expected, **found} if expected.get(path) != found.get(path)]
    shown = [f"{path} was {expected.get(path, 'absent')}, is {found.get(path, 'absent')}" for path in paths[:3]]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    require(not paths, rule, "; ".join(shown) + more, remedy)


Build = Callable[[str], tuple[Trainer, Any]]
"""Makes a trainer that writes into a directory, and returns it with the object under test, the subject."""
Observations = dict[int, dict[str, str]]
"""By iteration, the texts that are compared."""


def run_resumed(
    build: Build,  # called for each segment of the run, with the random generators where they were at first
    iterations: int,
    observe: Callable[[Trainer, Any], dict[str, str]],  # returns the texts after an iteration, given the subject too
    seconds: float | None = None,  # the duration of an iteration on a manual clock; None where time is the real one
    resume_points: Iterable[int] = (),
    strict: bool = True,  # loading must restore the saved state exactly, and an error in the run is the subject's fault
) -> Observations:
    """Run a trainer that is saved after each resume point and continued by a new one, and return the observations."""
    observations: Observations = {}
    state: dict[str, str] = {}
    generators = _random.get_rng_state()
    clock = ManualClock()
    clocked = nullcontext() if seconds is None else clock
    saves = sorted(set(resume_points))

    def record(trainer: Trainer) -> None:
        iteration, updates = trainer.updater.iteration, max(observations, default=0) + 1
        remedy = "update() counts after update_core(), and nothing else does"
        require(iteration == updates, "an update adds one to iteration", f"{iteration} after {updates} updates", remedy)
        observations[iteration] = observe(trainer, subject)

    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as directory, _random.preserve_rng(), clocked:
        for segment, stop in enumerate([*saves, iterations]):
            snapshot = Path(directory) / "saved" / str(segment)
            clock.now = _CLOCK_OFFSET * segment
            _random.set_rng_state(generators)
            trainer, subject = build(str(Path(directory) / "out"))
            trainer.extend(lambda _: clock.advance(seconds or 0), name="manual clock", priority=_FIRST)
            # A trigger of its own also calls it where an updater does not count.
            trainer.extend(record, name="observer", trigger=lambda trainer: True, priority=_LAST)
            trainer.stop_trigger = get_stop_trigger((stop, "iteration"))
            if segment:
                rule = "state that was saved can be loaded into a new object"
                with require_no_error(rule, "serialize reads the keys that it writes"):
                    load(snapshot.with_name(str(segment - 1)), trainer)
                iteration, last = trainer.updater.iteration, max(observations, default=0)
                remedy = "Your own serialize begins with super().serialize(serializer)"
                found = f"it is {iteration} after loading, and was {last}"
                require(iteration == last, "an updater saves its iteration", found, remedy)
                if strict:
                    rule = f"a new object that loads the state saved after iteration {last} has that state"
                    require_equal(state, state_of(subject), rule, _ASSIGN)
            rule = f"a run of {iterations} iterations does not fail"
            with require_no_error(rule, "See the error that is named as its cause") if strict else nullcontext():
                trainer.run()
            if segment < len(saves):
                state = state_of(subject)
                with require_no_error("state can be saved", _PLAIN_VALUES):
                    save(snapshot, trainer)
    return observations


def require_resumable(run: Callable[[list[int]], Observations], iterations: int, remedy: str, subject: str) -> Observations:
    """Require a run to be the same again, and resumed after any or every iteration, and return its observations."""
    expected = run([])

    def require_same(resume_points: list[int], rule: str, remedy: str) -> None:
        found = run(resume_points)
        require(len(found) == len(expected), rule, f"it has {len(found)} iterations instead of {len(expected)}", remedy)
        for iteration, texts in expected.items():
            require_equal(texts, found[iteration], f"{rule}; in iteration {iteration}", remedy)

    shared = "Nothing is kept in the class, the module, or what make() shares"
    require_same([], f"{subject} created again behaves alike", shared)
    continued = f"continued with {subject[0].lower()}{subject[1:]} created again"
    for resume_points, when in resume_points_of(iterations):
        require_same(resume_points, f"a run that is saved {when} and {continued} is the same run", remedy)
    return expected


def resume_points_of(iterations: int) -> Iterator[tuple[list[int], str]]:
    """Yield each single iteration to resume after, then all of them, with words that say which."""
    for iteration in range(iterations):
        yield [iteration], f"after iteration {iteration}"
    yield [*range(iterations)], "after every iteration"


def state_of(subject: Any) -> dict[str, str]:
    """Return the state of an object by path, empty where it has none."""
    serializer = DictionarySerializer()
    with require_no_error("the state of an object can be asked for at any time", "See serialize, or state_dict"):
        visit_if_stateful(serializer, "state", subject)
    return {path: text for key, value in serializer.target.items() for path, text in describe_leaves(key, value).items()}


def fingerprint_with_state(trainer: Trainer, subject: Any) -> dict[str, str]:
    """Return the fingerprint of a trainer and the state of the subject."""
    categories = fingerprint(trainer).values()
    return {path: text for category in categories for path, text in category.items()} | state_of(subject)


def call_factory(make: Callable[..., Any], argument: Any) -> Any:
    """Call ``make``, with the argument only if it needs one."""
    if not callable(make):
        raise TypeError(f"make is a function that makes a new object at each call, got {make!r}; write lambda: ...")
    return make() if find_call_error(make) is None else make(argument)


def call_make_trainer(make_trainer: Callable[..., Any], out: str) -> Any:
    """Call ``make_trainer`` with the ``out`` that the trainer is to use, or without, if it has no such parameter."""
    takes_out = "out" in inspect.signature(make_trainer).parameters
    return make_trainer(out=out) if takes_out else call_factory(make_trainer, out)


_FAILURES = {0: "that fails before it is initialized", 4: "that fails in its fourth iteration", None: "that does not fail"}


class _PlannedError(RuntimeError):
    """The planned failure of a run."""


class _FailingExtension(Extension):
    """Raises before all others are initialized, if the iteration is 0, or after all others were called in it."""

    def __init__(self, iteration: int | None) -> None:
        self.iteration = iteration
        self.priority = _FIRST if iteration == 0 else _LAST

    def initialize(self, trainer: Trainer) -> None:
        if self.iteration == 0:
            raise _PlannedError

    def __call__(self, trainer: Trainer) -> None:
        if trainer.updater.iteration == self.iteration:
            raise _PlannedError


def require_finalized(build: Build, iteration: int | None, remedy: str) -> None:
    """Require a run that fails in an iteration to add no error to that one, and ``finalize`` to be repeatable."""
    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as out, _random.preserve_rng(), ManualClock():
        trainer, subject = build(out)
        trainer.extend(_FailingExtension(iteration), name="fails")
        trainer.stop_trigger = get_stop_trigger((5, "iteration"))
        rule = f"a run {_FAILURES[iteration]} ends with that error alone, and finalize is called"
        logger, later_errors = logging.getLogger("chainring"), []
        logger.addFilter(hide := lambda record: False)  # the planned error is not for the log
        with require_no_error(rule, remedy):
            try:
                trainer.run()
            except _PlannedError as error:
                later_errors = [note for note in getattr(error, "__notes__", []) if note.startswith("afterwards")]
            finally:
                logger.removeFilter(hide)
        require(not later_errors, rule, "; ".join(later_errors), remedy)
        finalize: Any = getattr(subject, "finalize", None)  # None also in what make_extension returns
        if callable(finalize):
            with require_no_error(f"after a run {_FAILURES[iteration]} finalize may be called again", remedy):
                finalize()
