"""check_extension, check_trigger, fired and check_updater: the rules for these parts of a trainer, tried in short runs."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from chainring import _random
from chainring._checks import find_call_error, is_integer
from chainring.serializers._loading import load
from chainring.serializers._saving import save
from chainring.serializers.protocol import DictionarySerializer, visit_if_stateful
from chainring.testing._live_traces import fingerprint
from chainring.testing.fakes import FakeUpdater, ManualClock, Values
from chainring.training._digests import describe_leaves
from chainring.training._entry import Entry, Observer
from chainring.training.extension import make_extension
from chainring.training.trainer import Trainer
from chainring.training.triggers import get_stop_trigger, get_trigger
from chainring.training.triggers.base import never

_SAVE_EXTENSION = "Give it serialize(serializer), which saves all that it remembers: self.x = serializer('x', self.x)"
_FINALIZE_EXTENSION = (
    "Let finalize() do nothing where nothing is to be released: before initialize, and when it is called again"
)
_SAVE_TRIGGER = (
    "Give the trigger serialize(serializer), which saves all that its answer follows from, its last answer and the "
    "iteration of it included; or derive it from chainring.training.triggers.Trigger and begin with super().serialize"
)
_REPEAT = (
    "Asked again in the same iteration a trigger repeats its answer: write ask(trainer) in a subclass of "
    "chainring.training.triggers.Trigger"
)
_SAVE_UPDATER = (
    "The objects that get_iterator, get_model and get_optimizer return are saved; all else that it remembers is saved by "
    "its serialize(serializer), which begins with super().serialize(serializer)"
)
_FINALIZE_UPDATER = "Let finalize() do nothing when it is called again, and end what it can whatever has failed"
_FIRST, _LAST = 10**9, -(10**9)  # priorities
_PLAIN_VALUES = "State is numbers, strings, bytes, None, tensors, arrays, and lists, tuples and dicts of such"
_ASSIGN = "Assign the value that the serializer returns: self.x = serializer('x', self.x)"
_CLOCK_OFFSET = 1000.0  # seconds between the clocks of two segments of a run: that of another process stands anywhere
_FAILURES = {0: "that fails before it is initialized", 4: "that fails in its fourth iteration", None: "that does not fail"}


def uneven_values(iteration: int) -> dict[str, float]:
    """Return the values reported by default: a loss that falls, with steps back, and an accuracy."""
    loss = 1 / iteration + 0.25 * (iteration % 3)
    return {"main/loss": loss, "main/accuracy": 1 - loss / 2}


def check_extension(
    make: Callable[..., Any],
    *,
    iterations: int = 6,
    updater: Callable[[], Any] | None = None,
    trigger: Any = None,
    result: Callable[[Any], Any] = lambda extension: None,
) -> None:
    """Check that an extension can be registered, resumed and finalized.

    A run that is saved after any iteration, and resumed with all objects created again, must equal the uninterrupted run:
    in the calls of the extension, the reported values, the extension's state and ``result``, models, optimizers and
    random generators after each iteration. An error of the training, before the extension was initialized or after it was
    called, must be raised unchanged; ``finalize`` may be called again. An iteration takes one second on a `ManualClock`.

    Args:
        make: a function that creates the extension; if it needs an argument, it gets the updater.
        iterations: the length of the runs.
        updater: a function that creates the updater; by default a `FakeUpdater` with 3 iterations per epoch, which
            reports varying values of ``main/loss`` and ``main/accuracy``.
        trigger: the trigger that calls it; by default the extension's own.
        result: a function that returns another value of the extension to compare, such as its rows.

    Raises:
        AssertionError: a rule is violated, or the extension is never called, so that nothing is tested.
    """
    if not callable(make):
        raise TypeError(f"make is a function that makes a new object at each call, got {make!r}; write lambda: ...")
    calls: list[int] = []
    never_called = False

    def build(out: str) -> tuple[Trainer, Any]:
        nonlocal never_called
        own_updater = FakeUpdater(3, uneven_values) if updater is None else updater()
        extension = make() if find_call_error(make) is None else make(own_updater)
        trainer = Trainer(own_updater, out=out)
        with require_no_error("an extension can be registered", "It is a callable of one argument, the trainer"):
            trainer.extend(extension, trigger=trigger)
        (entry,) = trainer.entries
        never_called = entry.trigger is never  # it works beside the loop, as a profiler does
        trainer.watch(_CallRecorder(entry, calls))
        return trainer, extension

    def observe(trainer: Trainer, extension: Any) -> dict[str, str]:
        is_called = str(trainer.updater.iteration in calls[-1:])
        results = describe_leaves("result", result(extension))
        return _fingerprint_with_state(trainer, extension) | results | {"whether it is called": is_called}

    def run(resume_points: list[int]) -> _Observations:
        calls.clear()
        return _run_resumed(build, iterations, observe, 1.0, resume_points)

    _require_resumable(run, iterations, _SAVE_EXTENSION, "An extension")
    rule, found = "the trial shows something only if the extension is called", f"not in {iterations} iterations"
    require(bool(calls) or never_called, rule, found, "Give trigger= or iterations= with which it is")
    for failure in (0, 4):
        _require_finalized(build, failure, _FINALIZE_EXTENSION)


class _CallRecorder(Observer):
    def __init__(self, entry: Entry, calls: list[int]) -> None:
        self._entry, self._calls = entry, calls

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        if entry is self._entry:
            self._calls.append(trainer.updater.iteration)
        call()


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
    for resume_points, when in _resume_points_of(iterations):
        rule = f"a run saved {when} and continued fires when the uninterrupted one does"
        for calls in _call_iterations(factory, 2, *settings, resume_points):
            require(calls == alone, rule, f"it fires at {calls} instead of {alone}", _SAVE_TRIGGER)


def _trigger_factory(trigger: Any, is_resumed: bool) -> Callable[[], Any]:
    """Return a function that calls a class, or a function without arguments; any other callable is the trigger itself."""
    is_function = callable(trigger) and find_call_error(trigger) is None and find_call_error(trigger, None) is not None
    if isinstance(trigger, type) or is_function:
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

    def note(record: list[int], trainer: Trainer) -> None:
        record.append(trainer.updater.iteration)

    def build(out: str) -> tuple[Trainer, Any]:
        trigger = make()
        trainer = Trainer(FakeUpdater(epoch_length, values), out=out)
        for record in calls:
            trainer.extend(partial(note, record), name="recorder", trigger=trigger)
        return trainer, trigger

    _run_resumed(build, iterations, lambda *_: {}, seconds, resume_points, strict)
    return calls


def check_updater(make: Callable[[], Any], *, iterations: int = 6) -> None:
    """Check that an updater counts correctly, can be resumed, and can be finalized.

    Each update must add one to ``iteration``, and the epoch attributes must be consistent. A run that is saved after any
    iteration, and resumed with all objects created again, must equal the uninterrupted run: in reported values,
    iterators, models, optimizers, the updater's state and random generators after each iteration. ``finalize`` may be
    called again, and must not replace an error.

    Args:
        make: a function that creates the updater with its data, model and optimizer. The random generators are in the
            same state at each call, so that the models are equal.
        iterations: the length of the runs; more than an epoch tests more. The data must last at least as long.

    Raises:
        AssertionError: a rule is violated.
    """

    def build(out: str) -> tuple[Trainer, Any]:
        updater = make()
        with require_no_error("a trainer takes it as its updater", "Derive it from chainring.training.Updater"):
            return Trainer(updater, out=out), updater

    epochs: dict[int, tuple[float, int]] = {}

    def observe(trainer: Trainer, updater: Any) -> dict[str, str]:
        if epochs and getattr(updater, "counts_epochs", True):
            before, where = epochs[updater.iteration - 1], f"iteration {updater.iteration}"
            counters = updater.epoch_detail, updater.epoch, updater.previous_epoch_detail, updater.is_new_epoch
            remedy = "Leave them to get_iterator('main'), from whose epochs they come, or define all four"
            require_epochs(counters, before, "update", where, remedy)
            epochs[updater.iteration] = counters[:2]
        return _fingerprint_with_state(trainer, updater)

    def run(resume_points: list[int]) -> _Observations:
        epochs.clear()
        if not resume_points:  # a resumed run is compared with this one
            epochs[0] = (0.0, 0)
        return _run_resumed(build, iterations, observe, resume_points=resume_points)

    observations = _require_resumable(run, iterations, _SAVE_UPDATER, "An updater")
    found, remedy = f"they end after {len(observations)} updates", "Give data that are repeated, or fewer iterations="
    require(len(observations) == iterations, "the data last for the whole trial", found, remedy)
    for failure in (0, 4, None):
        _require_finalized(build, failure, _FINALIZE_UPDATER)


# --- the runs ---


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


def require_epochs(
    counters: tuple[float, int, float | None, bool], before: tuple[float, int], what: str, where: str, remedy: str
) -> None:
    """Require ``epoch_detail``, ``epoch``, ``previous_epoch_detail`` and ``is_new_epoch`` to continue those ``before``."""
    detail, epoch, previous_detail, is_new = counters
    found = f"epoch_detail {detail} and epoch {epoch} in {where}, after {before[0]} and {before[1]}"
    is_whole_part = before[0] <= detail and int(detail) == epoch
    require(is_whole_part, "epoch is epoch_detail without its fraction", found, remedy)
    rule = f"previous_epoch_detail is epoch_detail before the {what}"
    require(previous_detail == before[0], rule, f"{previous_detail}; {found}", remedy)
    rule = f"is_new_epoch says that the {what} has ended an epoch"
    require(is_new == (epoch > before[1]), rule, f"{is_new}; {found}", remedy)


_Build = Callable[[str], tuple[Trainer, Any]]
"""Makes a trainer that writes into a directory, and returns it with the object under test, the subject."""
_Observations = dict[int, dict[str, str]]
"""By iteration, the texts that are compared."""


def _run_resumed(
    build: _Build,  # called for each segment of the run, with the random generators where they were at first
    iterations: int,
    observe: Callable[[Trainer, Any], dict[str, str]],  # returns the texts after an iteration, given the subject too
    seconds: float | None = None,  # the duration of an iteration on a manual clock; None where time is the real one
    resume_points: Iterable[int] = (),
    strict: bool = True,  # loading must restore the saved state exactly, and an error in the run is the subject's fault
) -> _Observations:
    """Run a trainer that is saved after each resume point and continued by a new one, and return the observations."""
    observations: _Observations = {}
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
                    require_equal(state, _state_of(subject), rule, _ASSIGN)
            rule = f"a run of {iterations} iterations does not fail"
            with require_no_error(rule, "See the error that is named as its cause") if strict else nullcontext():
                trainer.run()
            if segment < len(saves):
                state = _state_of(subject)
                with require_no_error("state can be saved", _PLAIN_VALUES):
                    save(snapshot, trainer)
    return observations


def _require_resumable(
    run: Callable[[list[int]], _Observations], iterations: int, remedy: str, subject: str
) -> _Observations:
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
    for resume_points, when in _resume_points_of(iterations):
        require_same(resume_points, f"a run that is saved {when} and {continued} is the same run", remedy)
    return expected


def _resume_points_of(iterations: int) -> Iterator[tuple[list[int], str]]:
    """Yield each single iteration to resume after, then all of them, with words that say which."""
    for iteration in range(iterations):
        yield [iteration], f"after iteration {iteration}"
    yield [*range(iterations)], "after every iteration"


def _state_of(subject: Any) -> dict[str, str]:
    """Return the state of an object by path, empty where it has none."""
    serializer = DictionarySerializer()
    with require_no_error("the state of an object can be asked for at any time", "See serialize, or state_dict"):
        visit_if_stateful(serializer, "state", subject)
    return {path: text for key, value in serializer.target.items() for path, text in describe_leaves(key, value).items()}


def _fingerprint_with_state(trainer: Trainer, subject: Any) -> dict[str, str]:
    categories = fingerprint(trainer).values()
    return {path: text for category in categories for path, text in category.items()} | _state_of(subject)


class _PlannedError(RuntimeError):
    """The planned failure of a run."""


def _require_finalized(build: _Build, iteration: int | None, remedy: str) -> None:
    """Require a run that fails in an iteration to add no error to that one, and ``finalize`` to be repeatable."""
    with tempfile.TemporaryDirectory(prefix="chainring-testing-") as out, _random.preserve_rng(), ManualClock():

        def fail(trainer: Trainer) -> None:
            if trainer.updater.iteration == iteration:
                raise _PlannedError

        trainer, subject = build(out)
        priority = _FIRST if iteration == 0 else _LAST  # before all others are initialized, or after all were called
        trainer.extend(make_extension(initializer=fail, priority=priority)(fail), name="fails")
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
