"""Whole runs and the same runs cut into parts, each part continued by a trainer that was made anew."""

from __future__ import annotations

import enum
import inspect
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainring import _random
from chainring.serializers._checkpoint import load, save
from chainring.serializers.base import DictionarySerializer
from chainring.testing._fingerprint import leaves, look, text
from chainring.testing.fakes import ManualClock
from chainring.training._trainer_state import visit_part
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_stop_trigger

if TYPE_CHECKING:
    from chainring.training.updaters.base import Updater


def require(holds: bool, rule: str, found: object, remedy: str) -> None:
    """Raises an `AssertionError` unless it holds."""
    if not holds:
        raise AssertionError(f"{rule}: {found}. {remedy}")


@contextmanager
def required(rule: str, remedy: str) -> Iterator[None]:
    """What is done inside does not fail; what an inner rule has found is said as it is."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{rule}: {type(error).__name__}: {error}. {remedy}") from error


def require_same(expected: Mapping[str, str], found: Mapping[str, str], rule: str, remedy: str) -> None:
    """Two collections of texts are the same; the first that differ are named."""
    paths = [path for path in {**expected, **found} if expected.get(path) != found.get(path)]
    shown = [f"{path} was {expected.get(path, 'absent')}, is {found.get(path, 'absent')}" for path in paths[:3]]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    require(not paths, rule, "; ".join(shown) + more, remedy)


_FIRST, _LAST = 10**9, -(10**9)
_PART = 1000.0  # seconds between the clocks of two parts: that of another process stands anywhere

Build = Callable[[str], tuple[Trainer, Any]]
"""Makes a trainer that writes into a directory, and the part of it that is tried."""
See = Callable[[Trainer, Any], dict[str, str]]
"""What is compared after each iteration, given the trainer and the part that is tried."""


@dataclass
class Course:
    """A run, whole or cut.

    Attributes:
        build: makes its trainer; called for each part of the run, with the random generators where they were at first.
        iterations: its length.
        see: what is taken down after each iteration.
        seconds: what an iteration takes on a manual clock; ``None`` where time is the real one.
        resumed_after: iterations after which it is saved and continued.
        proves: whether loading must give back the very state that was saved, and an error in the run is the part's fault.
        seen: what was taken down, by iteration.
    """

    build: Build
    iterations: int
    see: See
    seconds: float | None = None
    resumed_after: Iterable[int] = ()
    proves: bool = True
    seen: dict[int, dict[str, str]] = field(default_factory=dict)

    def run(self) -> dict[int, dict[str, str]]:
        """Runs it in a directory that is removed afterwards."""
        start = _random.get_rng_state()
        state: dict[str, str] = {}
        cuts = sorted(set(self.resumed_after))
        with tempfile.TemporaryDirectory(prefix="chainring-testing-") as directory, _random.preserve_rng():
            for number, stop in enumerate([*cuts, self.iterations]):
                saved = Path(directory) / "saved" / str(number)
                with ExitStack() as inside:
                    clock = None if self.seconds is None else inside.enter_context(ManualClock(_PART * number))
                    _random.set_rng_state(start)
                    trainer, part = self.build(str(Path(directory) / "out"))
                    self._watch(trainer, part, clock)
                    trainer.stop_trigger = get_stop_trigger((stop, "iteration"))
                    if number:
                        self._load(saved.with_name(str(number - 1)), trainer, part, state)
                    self._run(trainer)
                    if stop != self.iterations or number < len(cuts):
                        state = state_of(part)
                        _save(saved, trainer)
        return self.seen

    def _run(self, trainer: Trainer) -> None:
        rule = f"a run of {self.iterations} iterations does not fail"
        with required(rule, "See the error that is named as its cause") if self.proves else nullcontext():
            trainer.run()

    def _load(self, saved: Path, trainer: Trainer, part: Any, state: dict[str, str]) -> None:
        with required("state that was saved can be loaded into a new object", "serialize reads the keys that it writes"):
            load(saved, trainer)
        after = max(self.seen, default=0)
        require(
            trainer.updater.iteration == after,
            "an updater saves its iteration",
            f"it is {trainer.updater.iteration} after loading, and was {after}",
            "A serialize of one's own begins with super().serialize(serializer)",
        )
        if not self.proves:
            return
        rule = f"a new object that loads the state saved after iteration {after} has that state"
        require_same(state, state_of(part), rule, "Assign what the serializer returns: self.x = serializer('x', self.x)")

    def _watch(self, trainer: Trainer, part: Any, clock: ManualClock | None) -> None:
        if clock is not None and self.seconds is not None:
            seconds = self.seconds
            trainer.extend(lambda _: clock.advance(seconds), name="a manual clock", priority=_FIRST)

        def watch(trainer: Trainer) -> None:
            iteration = trainer.updater.iteration
            counted = max(self.seen, default=0) + 1
            remedy = "update() counts after update_core(), and nothing else does"
            require(iteration == counted, "an update adds one to iteration", f"{iteration} after {counted} updates", remedy)
            self.seen[iteration] = self.see(trainer, part)

        trainer.extend(watch, name="what is seen", trigger=_always, priority=_LAST)


def _always(trainer: Trainer) -> bool:
    return True  # also where an updater does not count


def _save(path: Path, trainer: Trainer) -> None:
    remedy = "State is numbers, strings, bytes, None, tensors, arrays, and lists, tuples and dicts of such"
    with required("state can be saved", remedy):
        path.parent.mkdir(exist_ok=True)
        save(path, trainer)


def require_resumed(course: Callable[[Iterable[int]], Course], remedy: str, before: str = "") -> dict[int, dict[str, str]]:
    """Two runs are alike, and so is one that is saved and continued after any iteration, and after every one.

    Args:
        course: a new run, continued after those iterations.
        remedy: for a run that is not the same once it was continued.
        before: who is tried, as a sentence begins with it.

    Returns:
        What was seen in the uninterrupted run.
    """
    first = course(())
    whole = first.run()
    every = range(first.iterations)
    alike = f"{before} made anew behaves alike"
    _require_equal(whole, course(()).run(), alike, "Nothing is kept in the class, the module, or what make() shares")
    for cuts in [*([k] for k in every), [*every]]:
        where = f"after iteration {cuts[0]}" if len(cuts) == 1 else "after every iteration"
        rule = f"a run that is saved {where} and continued with {before[0].lower()}{before[1:]} made anew is the same run"
        _require_equal(whole, course(cuts).run(), rule, remedy)
    return whole


def _require_equal(whole: dict[int, dict[str, str]], other: dict[int, dict[str, str]], rule: str, remedy: str) -> None:
    require(len(other) == len(whole), rule, f"it has {len(other)} iterations instead of {len(whole)}", remedy)
    for iteration, seen in whole.items():
        require_same(seen, other[iteration], f"{rule}; in iteration {iteration}", remedy)


def state_of(part: Any) -> dict[str, str]:
    """The state of an object, by path; empty where it has none."""
    serializer = DictionarySerializer()
    with required("the state of an object can be asked for at any time", "See serialize, or state_dict"):
        visit_part(serializer, "state", part)
    return {path: text(leaf) for key, value in serializer.target.items() for path, leaf in leaves(key, value)}


def seen_of(trainer: Trainer, part: Any) -> dict[str, str]:
    """Counters, observation, generators, models and optimizers of a trainer, and the state of the part that is tried."""
    kinds = look(trainer, None).values()
    return {path: shown for kind in kinds for path, shown in kind.items()} | state_of(part)


def made(make: Callable[..., Any], updater: Updater) -> Any:
    """What ``make`` makes, which is given the updater where it asks for it."""
    if not callable(make):
        raise TypeError(f"make is a function that makes a new object at each call, got {make!r}; write lambda: ...")
    try:
        inspect.signature(make).bind()
    except TypeError:
        return make(updater)
    except ValueError:
        pass  # some callables of C have no signature
    return make()


def uneven(iteration: int) -> dict[str, float]:
    """What is reported where nothing else is asked for: a loss that falls, with steps back, and an accuracy."""
    loss = 1 / iteration + 0.25 * (iteration % 3)
    return {"main/loss": loss, "main/accuracy": 1 - loss / 2}


class Planned(enum.Enum):
    """Where a run fails, as a sentence ends with it."""

    BEFORE = "that fails before it is initialized"
    AFTER = "that fails in its fourth iteration"
    NOT = "that does not fail"


class _Failure(RuntimeError):  # noqa: N818 - it is wanted
    """The planned failure of a run."""


class _Fails(Extension):
    """Raises before all others are initialized, or after all others were called."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.priority = 10**9 if planned is Planned.BEFORE else -(10**9)

    def initialize(self, trainer: Trainer) -> None:
        if self.planned is Planned.BEFORE:
            raise _Failure

    def __call__(self, trainer: Trainer) -> None:
        if self.planned is Planned.AFTER and trainer.updater.iteration == 4:
            raise _Failure


def require_finalized(build: Build, planned: Planned, remedy: str) -> None:
    """After a run that ends so, no ``on_error`` or ``finalize`` has added an error, and ``finalize`` may be called again."""
    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as out, _random.preserve_rng(), ManualClock():
        trainer, part = build(out)
        trainer.extend(_Fails(planned), name="fails")
        trainer.stop_trigger = get_stop_trigger((5, "iteration"))
        rule = f"a run {planned.value} ends with that error alone, and finalize is called"
        with required(rule, remedy):
            added = _notes_of(trainer)
        require(not added, rule, "; ".join(added), remedy)
        finalize: Any = getattr(part, "finalize", None)
        if callable(finalize):
            with required(f"after a run {planned.value} finalize may be called again", remedy):
                finalize()


def _notes_of(trainer: Trainer) -> list[str]:
    """Runs it; the errors that came after the planned one."""
    try:
        with _unsaid():
            trainer.run()
    except _Failure as failure:
        return [note for note in getattr(failure, "__notes__", []) if note.startswith("afterwards")]
    return []


@contextmanager
def _unsaid() -> Iterator[None]:
    """What a failing run logs is not logged, because the failure is planned."""
    logger = logging.getLogger("chainring")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
