"""The runs behind the checks: whole, or saved and continued at any point by a trainer that was made anew."""

from __future__ import annotations

import enum
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainring import _random
from chainring.serializers._checkpoint import load, save
from chainring.serializers.base import DictionarySerializer, visit_if_stateful
from chainring.testing._fingerprint import describe, fingerprint, leaves
from chainring.testing.fakes import ManualClock
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_stop_trigger

_FIRST, _LAST = 10**9, -(10**9)  # priorities
_PLAIN_VALUES = "State is numbers, strings, bytes, None, tensors, arrays, and lists, tuples and dicts of such"
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
Observe = Callable[[Trainer, Any], dict[str, str]]
"""Returns the texts that are compared after each iteration, given the trainer and the subject."""


@dataclass
class ResumeScenario:
    """A run that may be saved and continued.

    Attributes:
        build: makes its trainer; called for each segment of the run, with the random generators where they were at first.
        iterations: its length.
        observe: returns the texts that are recorded after each iteration.
        seconds: the duration of an iteration on a manual clock; ``None`` where time is the real one.
        resume_points: iterations after which it is saved, and continued by a new trainer.
        strict: True if loading must restore the very state that was saved, and an error in the run is the subject's fault.
        observations: the recorded texts by iteration.
    """

    build: Build
    iterations: int
    observe: Observe
    seconds: float | None = None
    resume_points: Iterable[int] = ()
    strict: bool = True
    observations: dict[int, dict[str, str]] = field(default_factory=dict)

    def run(self) -> dict[int, dict[str, str]]:
        """Run it in a directory that is removed afterwards, and return the observations."""
        generators = _random.get_rng_state()
        state: dict[str, str] = {}
        resume_points = sorted(set(self.resume_points))
        with tempfile.TemporaryDirectory(prefix="chainring-testing-") as directory, _random.preserve_rng():
            for segment, stop in enumerate([*resume_points, self.iterations]):
                snapshot = Path(directory) / "saved" / str(segment)
                with ExitStack() as stack:
                    clock = None if self.seconds is None else stack.enter_context(ManualClock(_CLOCK_OFFSET * segment))
                    _random.set_rng_state(generators)
                    trainer, subject = self.build(str(Path(directory) / "out"))
                    self._add_observer(trainer, subject, clock)
                    trainer.stop_trigger = get_stop_trigger((stop, "iteration"))
                    if segment:
                        self._load(snapshot.with_name(str(segment - 1)), trainer, subject, state)
                    rule = f"a run of {self.iterations} iterations does not fail"
                    with (
                        require_no_error(rule, "See the error that is named as its cause") if self.strict else nullcontext()
                    ):
                        trainer.run()
                    if segment < len(resume_points):
                        state = state_of(subject)
                        with require_no_error("state can be saved", _PLAIN_VALUES):
                            snapshot.parent.mkdir(exist_ok=True)
                            save(snapshot, trainer)
        return self.observations

    def _load(self, snapshot: Path, trainer: Trainer, subject: Any, state: dict[str, str]) -> None:
        remedy = "serialize reads the keys that it writes"
        with require_no_error("state that was saved can be loaded into a new object", remedy):
            load(snapshot, trainer)
        last = max(self.observations, default=0)
        require(
            trainer.updater.iteration == last,
            "an updater saves its iteration",
            f"it is {trainer.updater.iteration} after loading, and was {last}",
            "A serialize of one's own begins with super().serialize(serializer)",
        )
        if self.strict:
            rule = f"a new object that loads the state saved after iteration {last} has that state"
            remedy = "Assign the value that the serializer returns: self.x = serializer('x', self.x)"
            require_equal(state, state_of(subject), rule, remedy)

    def _add_observer(self, trainer: Trainer, subject: Any, clock: ManualClock | None) -> None:
        if clock is not None:
            trainer.extend(lambda _: clock.advance(self.seconds or 0), name="manual clock", priority=_FIRST)

        def observe(trainer: Trainer) -> None:
            iteration = trainer.updater.iteration
            updates = max(self.observations, default=0) + 1
            remedy = "update() counts after update_core(), and nothing else does"
            require(iteration == updates, "an update adds one to iteration", f"{iteration} after {updates} updates", remedy)
            self.observations[iteration] = self.observe(trainer, subject)

        # A trigger of its own also calls it where an updater does not count.
        trainer.extend(observe, name="observer", trigger=lambda trainer: True, priority=_LAST)


def require_resumable(
    scenario: Callable[[Iterable[int]], ResumeScenario], remedy: str, subject: str
) -> dict[int, dict[str, str]]:
    """Require two runs to be alike, and one that is saved and continued after any iteration, and after every one.

    Args:
        scenario: makes a new run with those resume points.
        remedy: for a run that is not the same once it was continued.
        subject: the name of the subject, as a sentence begins with it: ``"An extension"``.

    Returns:
        The observations of the uninterrupted run.
    """
    uninterrupted = scenario(())
    expected = uninterrupted.run()
    rule = f"{subject} made anew behaves alike"
    _require_equal_runs(
        expected, scenario(()).run(), rule, "Nothing is kept in the class, the module, or what make() shares"
    )
    for resume_points, when in resume_points_of(uninterrupted.iterations):
        rule = f"a run that is saved {when} and continued with {subject[0].lower()}{subject[1:]} made anew is the same run"
        _require_equal_runs(expected, scenario(resume_points).run(), rule, remedy)
    return expected


def resume_points_of(iterations: int) -> Iterator[tuple[list[int], str]]:
    """Yield each single iteration to resume after, then all of them, with words that say which."""
    for iteration in range(iterations):
        yield [iteration], f"after iteration {iteration}"
    yield [*range(iterations)], "after every iteration"


def _require_equal_runs(
    expected: dict[int, dict[str, str]], found: dict[int, dict[str, str]], rule: str, remedy: str
) -> None:
    require(len(found) == len(expected), rule, f"it has {len(found)} iterations instead of {len(expected)}", remedy)
    for iteration, texts in expected.items():
        require_equal(texts, found[iteration], f"{rule}; in iteration {iteration}", remedy)


def state_of(subject: Any) -> dict[str, str]:
    """Return the state of an object by path, empty where it has none."""
    serializer = DictionarySerializer()
    with require_no_error("the state of an object can be asked for at any time", "See serialize, or state_dict"):
        visit_if_stateful(serializer, "state", subject)
    return {path: describe(leaf) for key, value in serializer.target.items() for path, leaf in leaves(key, value)}


def fingerprint_with_state(trainer: Trainer, subject: Any) -> dict[str, str]:
    """Return the fingerprint of a trainer and the state of the subject."""
    categories = fingerprint(trainer, None).values()
    return {path: text for category in categories for path, text in category.items()} | state_of(subject)


def call_factory(make: Callable[..., Any], argument: Any) -> Any:
    """Call ``make``, with the argument only if it needs one."""
    if not callable(make):
        raise TypeError(f"make is a function that makes a new object at each call, got {make!r}; write lambda: ...")
    try:
        inspect.signature(make).bind()
    except TypeError:
        return make(argument)
    except ValueError:
        pass  # some callables of C have no signature
    return make()


def uneven_values(iteration: int) -> dict[str, float]:
    """Return the values reported by default: a loss that falls, with steps back, and an accuracy."""
    loss = 1 / iteration + 0.25 * (iteration % 3)
    return {"main/loss": loss, "main/accuracy": 1 - loss / 2}


class FailurePoint(enum.Enum):
    """The point at which a run fails, as a sentence ends with it."""

    BEFORE_INITIALIZE = "that fails before it is initialized"
    FOURTH_ITERATION = "that fails in its fourth iteration"
    NEVER = "that does not fail"


class _PlannedError(RuntimeError):
    """The planned failure of a run."""


class _FailingExtension(Extension):
    """Raises before all others are initialized, or after all others were called."""

    def __init__(self, point: FailurePoint) -> None:
        self.point = point
        self.priority = _FIRST if point is FailurePoint.BEFORE_INITIALIZE else _LAST

    def initialize(self, trainer: Trainer) -> None:
        if self.point is FailurePoint.BEFORE_INITIALIZE:
            raise _PlannedError

    def __call__(self, trainer: Trainer) -> None:
        if self.point is FailurePoint.FOURTH_ITERATION and trainer.updater.iteration == 4:
            raise _PlannedError


def require_finalized(build: Build, point: FailurePoint, remedy: str) -> None:
    """Require ``on_error`` and ``finalize`` to add no error to the planned one, and ``finalize`` to be repeatable."""
    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as out, _random.preserve_rng(), ManualClock():
        trainer, subject = build(out)
        trainer.extend(_FailingExtension(point), name="fails")
        trainer.stop_trigger = get_stop_trigger((5, "iteration"))
        rule = f"a run {point.value} ends with that error alone, and finalize is called"
        with require_no_error(rule, remedy):
            later_errors = _run_until_planned_error(trainer)
        require(not later_errors, rule, "; ".join(later_errors), remedy)
        finalize: Any = getattr(subject, "finalize", None)
        if callable(finalize):
            with require_no_error(f"after a run {point.value} finalize may be called again", remedy):
                finalize()


def _run_until_planned_error(trainer: Trainer) -> list[str]:
    """Run the trainer without its log of the planned error, and return the errors that came after it."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("chainring")
    logger.addFilter(drop)
    try:
        trainer.run()
    except _PlannedError as error:
        return [note for note in getattr(error, "__notes__", []) if note.startswith("afterwards")]
    finally:
        logger.removeFilter(drop)
    return []
