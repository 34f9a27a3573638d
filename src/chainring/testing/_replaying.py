"""A replay: a new trainer is brought to an iteration of an earlier run, which is only read.

It begins with the nearest snapshot of that run, in an ``out`` of its own, and repeats the iterations from there.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from chainring._distributed.sharding import to_local
from chainring._messages import warn
from chainring._naming import parameter_names
from chainring._runs.comparison import first_recorded_difference
from chainring._runs.finished import FinishedRun, saved_trainers
from chainring.reporting.summary import is_scalar
from chainring.serializers._loading import load
from chainring.serializers._store import CorruptError, open_store
from chainring.testing._batches import BatchIndices
from chainring.training._observer import Observer
from chainring.training._run_directory import read_record
from chainring.training.extensions import FailOnNonNumber, LogReport
from chainring.training.triggers import ReachedTrigger, TimeTrigger

if TYPE_CHECKING:
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer


class NoReplay(ValueError):  # noqa: N818 - it is read as an answer
    """An iteration cannot be replayed; the text says why, and what to do.

    Example::

        with pytest.raises(NoReplay):
            replay(make_trainer, "result", 10**9)
    """


@dataclass(frozen=True)
class Origin:
    """Where a replay begins.

    Attributes:
        snapshot: the snapshot; ``None`` for the beginning of the run.
        iteration: that of the snapshot.
        ranks: on how many ranks the run was there.
        is_exact: False if those were several, and one process computes other bits.
    """

    snapshot: Path | None = None
    iteration: int = 0
    ranks: int = 1
    is_exact: bool = True


def origins(run: Path, latest: int | None = None) -> Iterator[Origin]:
    """Yield the snapshots of the trainer up to an iteration, the latest first; see `saved_trainers`."""
    for saved, manifest, ranks in saved_trainers(open_store(run), latest):
        yield Origin(run / saved.name, manifest.iteration, ranks)


@dataclass(frozen=True)
class Match:
    """The iteration that was looked for, and what was there.

    Attributes:
        iteration: the iteration.
        value: that of the watched key.
        batches: by the name of an iterator, what it gave to this iteration, see `BatchIndices`.
    """

    iteration: int
    value: float | None
    batches: dict[str, Any]


@dataclass
class Watch:
    """Looks at each iteration of a replay, until one matches.

    Attributes:
        key: of the value that is looked at; ``None`` to look at the last iteration alone.
        holds: whether this is the iteration, given the value.
        match: the iteration, when it has come.
        not_finite: the first iteration after which parameters were not finite, and their names.
        seen: the keys that were reported.
    """

    key: str | None = None
    holds: Callable[[float], bool] = bool
    match: Match | None = None
    not_finite: tuple[int, list[str]] | None = None
    seen: set[str] = field(default_factory=set)

    def look(self, trainer: Trainer, iteration: int, batches: BatchIndices, *, is_undone: bool = False) -> None:
        """Look at an iteration, as far as it has come; its update may have failed, and is undone then."""
        if self.match is not None or self.key is None:
            return
        self.seen.update(trainer.observation)
        value: Any = trainer.observation.get(self.key)
        value = value[0] if type(value) is tuple and len(value) == 2 else value  # with its weight
        if not is_scalar(value):
            return
        number = float(value)
        if self.holds(number):
            self.match = Match(iteration, number, batches.taken(is_undone=is_undone))

    def forget_after(self, iteration: int) -> None:
        """Forget what was after an iteration to which the run has gone back."""
        if self.not_finite is not None and self.not_finite[0] > iteration:
            self.not_finite = None

    def look_at_parameters(self, trainer: Trainer, iteration: int) -> None:
        """Remember the first iteration after which parameters were not finite."""
        if self.key is not None and self.not_finite is None and (names := not_finite_parameters(trainer)):
            self.not_finite = iteration, names


def not_finite_parameters(trainer: Trainer) -> list[str]:
    """Return the names of the parameters that hold NaN or infinity."""
    models = trainer.updater.get_all_models()
    parameters = {id(p): p for model in models.values() for p in model.parameters() if not is_lazy(p)}
    values = {key: to_local(p.detach().coalesce().values() if p.is_sparse else p.detach()) for key, p in parameters.items()}
    numbers = {key: value for key, value in values.items() if value.numel() and value.is_floating_point()}
    largest = [torch.linalg.vector_norm(value, math.inf).double().cpu() for value in numbers.values()]
    if not largest or bool(torch.isfinite(torch.stack(largest)).all()):
        return []
    names = parameter_names(models)
    return [names.get(key, "?") for key, value in numbers.items() if not bool(torch.isfinite(value).all())]


class Replay(Observer):
    """Repeats iterations of a run with a trainer that has not run, and ends after one of them.

    Args:
        trainer: it gets an ``out`` of its own in the directory.
        run: the directory of the earlier run, of which nothing is changed.
        directory: an empty one for what the replay writes.
        latest: the iteration of the latest snapshot with which it may begin.
        until: the iteration with which it ends.
        goes_on: True to continue after it as far as the run may have come: until a row or a snapshot would be there.
        watch: looks at each iteration.
        at_end: called when the last iteration is over, with the trainer as it was there.
        on_iteration: called after each.
        needs_same_bits: whether a run of several ranks is refused where one process computes other bits.

    Attributes:
        origin: where it begins.
        batches: what the last update has taken from the iterators.
        last_batches: what the iteration with which it ends has taken.
        may_go_back: whether an extension may send the run back to a snapshot.
    """

    is_replay = True

    def __init__(
        self,
        trainer: Trainer,
        run: Path,
        directory: Path,
        *,
        latest: int,
        until: int,
        goes_on: bool = False,
        watch: Watch | None = None,
        at_end: Callable[[Trainer], None] = lambda trainer: None,
        on_iteration: Callable[[int], None] = lambda iteration: None,
        needs_same_bits: bool = True,
    ) -> None:
        if trainer.comm.world.size > 1:
            raise NoReplay("a replay runs in one process; start it without a launcher of ranks")
        self._trainer, self._until, self._goes_on, self._watch = trainer, until, goes_on, watch or Watch()
        self._at_end, self._on_iteration = at_end, on_iteration
        self._reached: int | None = None  # None before the first iteration
        self._newest_written = 0  # the last iteration with a row or a snapshot
        self._is_over = False
        self.batches = BatchIndices(trainer.updater)
        self.last_batches: dict[str, Any] = {}
        self.may_go_back = any(
            isinstance(entry.extension, FailOnNonNumber) and entry.extension.policy != "skip" for entry in trainer.entries
        )
        trainer.out = str(directory / "out")
        os.makedirs(trainer.out)
        self._staged = directory / "snapshot" if self.may_go_back else None  # has a copy, to which a rollback may go back
        self.origin = _load_nearest(trainer, run, latest, self._staged, needs_same_bits)
        if trainer.updater.iteration > until:
            raise NoReplay(
                f"the trainer begins after iteration {trainer.updater.iteration}, and there is no snapshot of iteration "
                f"{until} or before in {run}: the script loads a state itself; give the arguments with which it began"
            )

    def run(self, run_trainer: Callable[[Trainer], None]) -> None:
        """Run the trainer until the iteration is over, by its own ``run``.

        Raises:
            NoReplay: the run ends before.
        """
        trainer = self._trainer
        stop_watching = trainer.watch(self)
        try:
            run_trainer(trainer)
        except BaseException:
            if self._watch.match is None:
                raise
        finally:
            stop_watching()
        is_over = self._is_over or self._watch.match is not None
        if not is_over and not (self._goes_on and trainer.updater.iteration >= self._until):
            raise NoReplay(
                f"the trainer ends after iteration {trainer.updater.iteration}, before {self._until}; give the arguments "
                "with which it continues for longer"
            )

    def ends(self, trainer: Trainer, ends: Callable[[], bool]) -> bool:
        """Return whether the replay ends at the head of this iteration."""
        iteration = trainer.updater.iteration
        if self._reached is None:
            self._watch.look_at_parameters(trainer, iteration)
            if self._staged is not None and self.origin.snapshot is not None:
                with contextlib.suppress(OSError):  # the run has one of that name there
                    os.rename(self._staged / self.origin.snapshot.name, Path(trainer.out) / self.origin.snapshot.name)
        elif iteration <= self._reached:
            self._watch.forget_after(iteration)  # the run goes back
        else:
            self._watch.look(trainer, iteration, self.batches)
        self._reached = iteration
        self._on_iteration(iteration)
        if self._watch.match is not None:
            return True
        if iteration == self._until and not self._goes_on:
            for entry in trainer.entries:  # as before a snapshot, where a check of its numbers may send the run back
                if entry.before_snapshot is not None and not entry.is_snapshot:
                    entry.before_snapshot(trainer)
            self._is_over = True
            self._at_end(trainer)
            return True
        would_end = ends()
        if self._goes_on and iteration > self._until and self._newest_written > self._until:
            return True
        is_by_the_clock = _follows_clock(trainer.stop_trigger) and trainer.interruption.signum is None
        return would_end and not (is_by_the_clock and iteration < self._until)  # here iterations may take longer

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        """Do an update, and look at what it has reported."""
        iteration = trainer.updater.iteration + 1
        self.batches.mark()
        try:
            update()
        except BaseException:
            self._watch.look(trainer, iteration, self.batches, is_undone=True)
            raise
        self._watch.look_at_parameters(trainer, iteration)
        self._watch.look(trainer, iteration, self.batches)
        if iteration == self._until:
            self.last_batches = self.batches.taken()

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        """Call an extension; a snapshot is written only if a rollback may go back to it."""
        if entry.is_snapshot or isinstance(entry.extension, LogReport):
            self._newest_written = trainer.updater.iteration  # where all can see how far the run has come
        if self.may_go_back or not entry.is_snapshot:
            call()


def _load_nearest(trainer: Trainer, run: Path, latest: int, staged: Path | None, needs_same_bits: bool) -> Origin:
    """Load the latest sound snapshot of a run up to an iteration, with a copy of it in ``staged``; return where that is."""
    for origin in origins(run, latest):
        assert origin.snapshot is not None
        snapshot, origin = origin.snapshot, _check_ranks(origin, trainer, run, needs_same_bits)
        try:
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)
                shutil.copytree(snapshot, staged / snapshot.name)
            load(snapshot, trainer)
        except FileNotFoundError:  # removed by the run, which continues
            continue
        except CorruptError as error:
            if snapshot.exists():
                warn(f"snapshot {snapshot.name!r} is skipped: {error}")
            continue
        _copy_media(trainer, run)
        return origin
    ranks = read_record(run).get("ranks", 1)
    later = (origin.ranks for origin in origins(run))
    beginning = Origin(None, trainer.updater.iteration, next(later, ranks if isinstance(ranks, int) else 1))
    return _check_ranks(beginning, trainer, run, needs_same_bits)


def _check_ranks(origin: Origin, trainer: Trainer, run: Path, needs_same_bits: bool) -> Origin:
    """Return the origin with `Origin.is_exact`."""
    is_exact = origin.ranks == 1 or getattr(trainer.updater, "virtual_ranks", None) is not None
    if not is_exact and needs_same_bits:
        raise NoReplay(
            f"{run} was trained on {origin.ranks} ranks, and one process computes the same examples in the same order with "
            "other last bits; with StandardUpdater(..., virtual_ranks=) they are the same on any number of ranks. "
            "`chainring batch` and `chainring bisect` work without"
        )
    return replace(origin, is_exact=is_exact)


def _copy_media(trainer: Trainer, run: Path) -> None:
    """Copy the images, texts and histograms of earlier rows, which a log looks for beside its rows."""
    logs = [entry.extension for entry in trainer.entries if isinstance(entry.extension, LogReport)]
    for name in (name for log in logs for name in log.writes if name.endswith(".media.jsonl")):
        if (run / name).is_file() and not Path(name).is_absolute():
            target = Path(trainer.out) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / name, target)


def _follows_clock(trigger: Any) -> bool:
    return isinstance(trigger, TimeTrigger) or (isinstance(trigger, ReachedTrigger) and trigger.unit == "second")


# --- the record of the run ---


@dataclass(frozen=True)
class RecordedComparison:
    """A comparison of a replay with what a `Recorder` has recorded of the run.

    Attributes:
        count: the iterations that are the same.
        last: the last iteration that is recorded.
        iteration: the first that differs, ``None`` if all are the same.
        what: what differs there, such as ``"the loss main/loss"``.
    """

    count: int
    last: int
    iteration: int | None = None
    what: str | None = None

    @property
    def difference(self) -> str | None:
        """The same in a sentence."""
        if self.iteration is None:
            return None
        return (
            f"the replay differs from the run: {self.what} of iteration {self.iteration} is not the one that was "
            "recorded. The script, its arguments, its data, a version or the number of threads have "
            "changed, or something is remembered that is not saved: `chainring verify-resume` finds that"
        )


def compare_with_record(run: FinishedRun, trainer: Trainer, origin: Origin, until: int) -> RecordedComparison | None:
    """Compare the iterations of a replay, ``None`` if the run or the replay has recorded none of them.

    Of a run of several ranks the generators are those of one of them, and are not compared.
    """
    recorded, replayed = run.sound_recorder(), FinishedRun(trainer.out).sound_recorder()
    if recorded is None or replayed is None or not len(recorded.iterations):
        return None
    last = int(recorded.iterations[-1])
    count, first = first_recorded_difference(recorded, replayed, origin.iteration, until, with_generators=origin.ranks == 1)
    if first is None:
        return RecordedComparison(count, last) if count or until == origin.iteration else None
    what = "the state of the random generators" if first.what == "generators" else f"the {first.what} {first.name}".rstrip()
    return RecordedComparison(count, last, first.iteration, what)
