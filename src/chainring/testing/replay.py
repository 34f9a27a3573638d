"""replay: restores a trainer as it was at any iteration of an earlier run, which is only read.

A new trainer begins with the nearest snapshot of that run, in an ``out`` of its own, and repeats the iterations from there.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from chainring._checks import is_integer
from chainring._distributed.sharding import to_local
from chainring._messages import info, warn
from chainring._random import preserve_rng, put_generators, take_generators
from chainring._runs.comparison import differing_digests, digests_of, first_recorded_difference
from chainring._runs.finished import Condition, FinishedRun, saved_trainers
from chainring.datasets._batches import count_examples, take_examples
from chainring.iterators.base import find_main_iterator
from chainring.iterators.loader import LoaderIterator
from chainring.iterators.serial import IndexedIterator
from chainring.reporting._metrics import fresh_metrics
from chainring.reporting.reporter import report_scope
from chainring.reporting.summary import is_scalar, weighted_mean
from chainring.serializers._loading import load
from chainring.serializers._saving import save
from chainring.serializers._store import CorruptError, find_snapshot, open_store
from chainring.serializers.protocol import parameter_names
from chainring.testing._processes import call_make_trainer
from chainring.training._entry import Entry, Observer
from chainring.training._run_directory import read_record
from chainring.training.extensions import FailOnNonNumber, LogReport
from chainring.training.trainer import Trainer
from chainring.training.triggers import ReachedTrigger, TimeTrigger
from chainring.training.updaters import ParallelUpdater, StandardUpdater
from chainring.training.updaters._update import Precision, compute_loss

UNCHECKED = (
    "the loss of iteration {0} is the recorded one, and what its update has changed is not recorded: replay to the "
    "iteration after it, or record digests then by Recorder(parameters=...)"
)
"""Of the last iteration of a replay, in words."""


_CHANGED = (
    "The script, its arguments, its data, a version or the number of threads have changed, or something is remembered that "
    "is not saved: `chainring verify-resume` finds that"
)


class NoReplay(ValueError):  # noqa: N818 - it is read as an answer
    """An iteration cannot be replayed; the text says why, and what to do.

    Example::

        with pytest.raises(NoReplay):
            replay(make_trainer, "result", 10**9)
    """


class ReplayDiffers(AssertionError):  # noqa: N818 - it is read as a finding
    """The replay differs from the recorded run; the text names the iteration and what differs.

    Example::

        with pytest.raises(ReplayDiffers):
            replay(make_trainer_with_another_learning_rate, "result", 100)
    """


def replay(make_trainer: Callable[..., Any], out: str | os.PathLike[str], iteration: int) -> Trainer:
    """Return the trainer as it was after an iteration of an earlier run, bit for bit.

    It is a new trainer, which starts from the last snapshot of the run at or before that iteration, or from the beginning
    if there is none, and repeats the iterations from there, with its own extensions. The run may have ended, been killed,
    or still be running: it is only read, and the trainer's ``out`` is a separate directory, which is removed with it. No
    rows are sent to services. If a `Recorder` has recorded the run, each iteration is compared with the record; of the
    last, whose update shows in the loss of the next, it is printed that this is not checked. A state of which ``chainring
    thin`` has left the digests is compared with these.

    The returned trainer has run: its observation, its gradients, unless the run has a snapshot of that very iteration, and
    Python's, NumPy's and torch's generators are those of the iteration, so ``trainer.updater.update()`` computes the next
    update. To continue training, load ``trainer.state_dict()`` into a new trainer.

    Example::

        trainer = replay(make_trainer, "result", 48_123)
        trainer.updater.get_model("main").predictor.l1.weight.grad.abs().max()

    Args:
        make_trainer: a function that returns a trainer that has not run, created as in the run. It is called with the
            ``out`` to use, or without arguments if it has no such parameter; the trainer's ``out`` is set in any case.
        out: the directory of the run, or its address in an object store.
        iteration: the iteration; 0 is the state before the first.

    Raises:
        ReplayDiffers: the replay differs from a recorded iteration, or from the digests of a thinned snapshot.
        NoReplay: the run, or the new trainer, does not reach that iteration; or the run had several ranks and computed
            other bits than one process does.
        FileNotFoundError: there is no such run.
        TypeError: the function does not return a trainer, or the iteration is not an integer.
        ValueError: the iteration is negative.
    """
    if not is_integer(iteration):
        raise TypeError(f"an iteration is an integer, got {iteration!r}")
    if iteration < 0:
        raise ValueError(f"an iteration is 0, the state before the first, or more; got {iteration}")
    iteration = int(iteration)
    directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="chainring-replay-")))
    try:
        try:
            run = FinishedRun.open(out, directory / "run")
        except ValueError as error:  # it is a snapshot
            raise NoReplay(str(error)) from error
        run.copy_files()
        run.copy_nearest(iteration)
        with recorded_threads(read_record(run.directory).get("threads")):
            trainer = call_make_trainer(make_trainer, str(directory / "out"))
            bar: Any = tqdm(desc=f"replay to iteration {iteration}", unit="it", delay=3.0, mininterval=0.5, disable=None)
            thinned: list[dict[str, Any] | None] = []
            with bar:
                replaying = Replay(
                    trainer, run.directory, directory, ReplaySettings(latest=iteration, until=iteration),
                    at_end=lambda trainer: thinned.append(compare_with_thinned(run, trainer, directory / "state")),
                    on_iteration=lambda reached: bar.update(reached - replaying.origin.iteration - bar.n),
                )  # fmt: skip
                bar.total = iteration - replaying.origin.iteration
                replaying.run(type(trainer).run)
        comparison = compare_with_record(run, trainer, replaying.origin, iteration)
        for compared in (comparison, *thinned):
            if compared is not None and compared["difference"] is not None:
                raise ReplayDiffers(compared["difference"])
        if comparison is not None and comparison["unchecked"] is not None:
            info(UNCHECKED.format(iteration))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(trainer, shutil.rmtree, directory, ignore_errors=True)
    return trainer


@contextlib.contextmanager
def recorded_threads(threads: Any) -> Iterator[None]:
    """Inside, let torch use as many threads as the run did, because sums over other numbers of them round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads if isinstance(threads, int) and threads > 0 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Origin:
    """Where a replay begins."""

    snapshot: str | None  # its name; None for the beginning of the run
    iteration: int
    ranks: int  # on how many the run was there
    is_exact: bool  # False if those were several, and one process computes other bits


@dataclass
class Watch:
    """Looks at each iteration of a replay, until a condition holds for a reported value."""

    condition: Condition | None = None  # None to look at nothing
    match: dict[str, Any] | None = None  # the iteration, its value, and its batches by the name of the iterator
    not_finite: tuple[int, list[str]] | None = None  # the first iteration after which parameters were not, and which
    seen: set[str] = field(default_factory=set)  # the keys that were reported

    def look(self, trainer: Trainer, iteration: int, batches: BatchIndices, *, is_undone: bool = False) -> None:
        """Look at an iteration, as far as it has come; its update may have failed, and is undone then."""
        if self.match is not None or self.condition is None:
            return
        self.seen.update(trainer.observation)
        value: Any = trainer.observation.get(self.condition.key)
        value = value[0] if type(value) is tuple and len(value) == 2 else value  # with its weight
        if is_scalar(value) and self.condition.holds(float(value)):
            taken = batches.taken(is_undone=is_undone)
            self.match = {"iteration": iteration, "value": float(value), "batches": taken}

    def look_at_parameters(self, trainer: Trainer, iteration: int) -> None:
        """Remember the first iteration after which parameters were not finite."""
        if self.condition is None or self.not_finite is not None:
            return
        models = trainer.updater.get_all_models()
        parameters = {id(p): p.detach() for model in models.values() for p in model.parameters() if not is_lazy(p)}
        values = {key: to_local(p.coalesce().values() if p.is_sparse else p) for key, p in parameters.items()}
        wrong = [key for key, v in values.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
        if wrong:
            names = parameter_names(models)
            self.not_finite = iteration, [names.get(key, "?") for key in wrong]


def ends_by_the_clock(trainer: Trainer) -> bool:
    """Return whether it is the time that ends a run, if something does, and no signal."""
    trigger = trainer.stop_trigger
    follows_clock = isinstance(trigger, TimeTrigger) or (isinstance(trigger, ReachedTrigger) and trigger.unit == "second")
    return follows_clock and trainer.interruption.signum is None


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Which iterations a replay repeats, and how."""

    latest: int  # the iteration of the latest snapshot with which it may begin
    until: int  # the iteration with which it ends
    goes_on: bool = False  # after it, as far as the run may have come: until a row or a snapshot would be there
    needs_same_bits: bool = True  # a run of several ranks is refused where one process computes other bits
    checks_last: bool = False  # computes one iteration more, whose loss shows what the last update has made


class Replay(Observer):
    """Repeats iterations of a run with a trainer that has not run, and ends after one of them."""

    is_replay = True

    def __init__(
        self,
        trainer: Trainer,
        run: Path,  # the directory of the earlier run, of which nothing is changed
        directory: Path,  # an empty one for what the replay writes, the ``out`` of the trainer too
        settings: ReplaySettings,
        *,
        watch: Watch | None = None,
        at_end: Callable[[Trainer], None],  # called with the trainer as it was at the end
        on_iteration: Callable[[int], None],  # called after each
    ) -> None:
        if trainer.comm.world.size > 1:
            raise NoReplay("a replay runs in one process; start it without a launcher of ranks")
        self._trainer, self._watch, self._at_end, self._on_iteration = trainer, watch or Watch(), at_end, on_iteration
        self._until, self._goes_on, self._checks_last = settings.until, settings.goes_on, settings.checks_last
        self._reached: int | None = None  # None before the first iteration
        self._newest_written = 0  # the last iteration with a row or a snapshot
        self._is_over = False
        self._batches = BatchIndices(trainer.updater)
        self.last_batches: dict[str, Any] = {}  # what the iteration with which it ends has taken
        checks = [entry.extension for entry in trainer.entries if isinstance(entry.extension, FailOnNonNumber)]
        may_go_back = any(check.policy != "skip" for check in checks)  # to a snapshot
        self.commands = [command for command in read_record(run).get("commands", ()) if "refused" not in command]
        trainer.out = str(directory / "out")
        os.makedirs(trainer.out)
        self._staged = directory / "snapshot" if may_go_back else None  # has a copy, to which a rollback may go back
        self.origin = _load_nearest(trainer, run, settings.latest, self._staged, settings.needs_same_bits)
        if trainer.updater.iteration > self._until:
            raise NoReplay(
                f"the trainer begins after iteration {trainer.updater.iteration}, and there is no snapshot of iteration "
                f"{self._until} or before in {run}: the script loads a state itself; give the arguments with which it began"
            )

    def run(self, run_trainer: Callable[[Trainer], None]) -> None:
        """Run the trainer by its own ``run`` until the iteration is over; raise `NoReplay` where it ends before."""
        trainer = self._trainer
        stop_watching = trainer.watch(self)
        try:
            run_trainer(trainer)
        except BaseException as error:
            is_beyond = self._is_over and self._checks_last and isinstance(error, Exception)
            if self._watch.match is None and not is_beyond:
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
        iteration, watch = trainer.updater.iteration, self._watch
        if self._is_over:
            return True
        if self._reached is None:
            watch.look_at_parameters(trainer, iteration)
            if self._staged is not None and self.origin.snapshot is not None:
                with contextlib.suppress(OSError):  # the run has one of that name there
                    os.rename(self._staged / self.origin.snapshot, Path(trainer.out) / self.origin.snapshot)
        elif iteration > self._reached:
            watch.look(trainer, iteration, self._batches)
        elif watch.not_finite is not None and watch.not_finite[0] > iteration:
            watch.not_finite = None  # the run has gone back
        self._reached = iteration
        self._on_iteration(iteration)
        if watch.match is not None:
            return True
        if iteration == self._until and not self._goes_on:
            for entry in trainer.entries:  # as before a snapshot, where a check of its numbers may send the run back
                if entry.before_snapshot is not None and not entry.is_snapshot:
                    entry.before_snapshot(trainer)
            self._is_over = True
            self._at_end(trainer)
            return not self._checks_last or iteration == self.origin.iteration or ends()
        would_end = ends()
        if self._goes_on and iteration > self._until and self._newest_written > self._until:
            return True
        return would_end and not (ends_by_the_clock(trainer) and iteration < self._until)  # here iterations may take longer

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        iteration = trainer.updater.iteration + 1
        self._batches.mark()
        try:
            update()
        except BaseException:
            self._watch.look(trainer, iteration, self._batches, is_undone=True)
            raise
        self._watch.look_at_parameters(trainer, iteration)
        self._watch.look(trainer, iteration, self._batches)
        if iteration == self._until:
            self.last_batches = self._batches.taken()

    def around_call(self, trainer: Trainer, entry: Entry, call: Callable[[], None]) -> None:
        """Call an extension; a snapshot is written only if a rollback may go back to it."""
        if entry.is_snapshot or isinstance(entry.extension, LogReport):
            self._newest_written = trainer.updater.iteration  # where all can see how far the run has come
        if self._staged is not None or not entry.is_snapshot:
            call()


def _load_nearest(trainer: Trainer, run: Path, latest: int, staged: Path | None, needs_same_bits: bool) -> Origin:
    """Load the latest sound snapshot of a run up to an iteration, with a copy of it in ``staged``; return where that is."""
    began: tuple[str | None, int]  # the name of the snapshot, and its ranks
    for saved, _, of_ranks in saved_trainers(open_store(run), latest):
        began, snapshot = (saved.name, of_ranks), run / saved.name
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
        # A log looks for the images, texts and histograms of earlier rows beside its rows.
        logs = [entry.extension for entry in trainer.entries if isinstance(entry.extension, LogReport)]
        for media in (file for log in logs for file in log.writes if file.endswith(".media.jsonl")):
            if (run / media).is_file() and not Path(media).is_absolute():
                target = Path(trainer.out) / media
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(run / media, target)
        break
    else:
        later = (of_ranks for _, _, of_ranks in saved_trainers(open_store(run)))
        began = None, next(later, read_record(run).get("ranks", 1))
    name, ranks = began
    is_exact = ranks == 1 or getattr(trainer.updater, "virtual_ranks", None) is not None
    if not is_exact and needs_same_bits:
        raise NoReplay(
            f"{run} was trained on {ranks} ranks, and one process computes the same examples in the same order with other "
            "last bits; with StandardUpdater(..., virtual_ranks=) they are the same on any number of ranks. "
            "`chainring batch` and `chainring bisect` work without"
        )
    return Origin(name, trainer.updater.iteration, ranks, is_exact)


def compare_with_record(run: FinishedRun, trainer: Trainer, origin: Origin, until: int) -> dict[str, Any] | None:
    """Compare the iterations of a replay with what a `Recorder` has recorded of the run; ``None`` if either has nothing.

    The iteration after the last counts too, where it was computed: a loss is recorded before its update. Return the
    ``count`` of iterations that are the same, the ``last`` that is recorded, the first ``iteration`` that differs, the
    ``difference`` in a sentence, and ``unchecked``, the last iteration if what its update has computed is in neither that
    loss nor a digest. Of several ranks the generators are those of one, and are not compared.
    """
    recorded, replayed = run.sound_recorder(), FinishedRun(trainer.out).sound_recorder()
    if recorded is None or replayed is None or not len(recorded.iterations):
        return None
    last, after = int(recorded.iterations[-1]), until + 1
    is_checked = until in recorded.digests.keys() & replayed.digests.keys() or all(
        row is not None and row.losses for row in (recorded.row(after), replayed.row(after))
    )
    count, first = first_recorded_difference(recorded, replayed, origin.iteration, after, with_generators=origin.ranks == 1)
    count = min(count, until - origin.iteration)
    found = {"count": count, "last": last, "iteration": None, "difference": None, "unchecked": None}
    if first is None:
        found["unchecked"] = until if origin.iteration < until <= last and not is_checked else None
        return found if count or until == origin.iteration else None
    what = "the state of the random generators" if first.what == "generators" else first.words
    text = f"the replay differs from the run: {what} of iteration {first.iteration} is not the one that was recorded"
    return found | {"iteration": first.iteration, "difference": f"{text}. {_CHANGED}"}


def compare_with_thinned(run: FinishedRun, trainer: Trainer, saved: Path) -> dict[str, Any] | None:
    """Save a replayed state, and compare it with the digests of the snapshot of its iteration that was thinned.

    Return the ``count`` of these, and the ``difference`` in a sentence; ``None`` if there are no digests.
    """
    iteration = trainer.updater.iteration
    if (digests := run.thinned(iteration)) is None:
        return None
    if not saved.exists():
        save(saved, trainer)
    difference = None
    if names := differing_digests(digests, digests_of(find_snapshot(saved))):
        more = f" and {len(names) - 1} more of {len(digests)} values" if len(names) > 1 else ""
        difference = f"the replay differs from the snapshot of iteration {iteration} that was thinned: {names[0]}{more}"
        difference += f". {_CHANGED}"
    return {"count": len(digests), "difference": difference}


# --- the examples that an update has taken from its iterators ---


class BatchIndices:
    """Tells which examples an update has taken, from where the iterators stood before it and where they stand now.

    An order is a function of seed, epoch and position, so nothing is fetched again, and the iterators are left alone. Of a
    `DataLoader` over a dataset with indices, what its sampler of batches draws is noted; of other loaders the places in
    the pass are told.
    """

    def __init__(self, updater: Any) -> None:
        self._updater, iterators = updater, updater.get_all_iterators().values()
        self._passes = {id(iterator): _LoaderPasses(iterator) for iterator in iterators if _has_plain_sampler(iterator)}
        self._marks: dict[str, tuple[Any, Any, Any]] = {}  # iterator, where its last batch ended, epoch and position

    def mark(self) -> None:
        """Note where the iterators stand, before an update."""
        self._marks = {}
        for name, iterator in self._updater.get_all_iterators().items():
            begin = iterator.batch_end if isinstance(iterator, IndexedIterator) else lambda: None
            passes = self._passes.get(id(iterator))
            self._marks[name] = (iterator, begin() if passes is None else passes.begin(), _position(iterator))

    def taken(self, *, is_undone: bool = False) -> dict[str, Any]:
        """Return what was taken since the mark, by the name of the iterator.

        It is the list of the indices; or a mapping of ``"from"`` and ``"to"``, positions in the data as (epoch, position),
        where the indices are not known; or ``None`` where nothing is known. With ``is_undone`` the update has failed, and
        the iterators stand again where they stood before it.
        """
        taken: dict[str, Any] = {}
        for name, (iterator, batch_end, before) in self._marks.items():
            after, indices = _position(iterator), None
            if id(iterator) in self._passes:
                indices = self._passes[id(iterator)].since(batch_end)
            elif isinstance(iterator, IndexedIterator) and is_undone:
                batches = islice(copy.copy(iterator).iterate_segments(), getattr(self._updater, "accumulate", 1))
                indices = [name for batch in batches for _, segment in batch for name in iterator.names_of(segment)]
            elif isinstance(iterator, IndexedIterator):
                since = iterator.indices_since(batch_end)
                indices = None if since is None else iterator.names_of(since)
            if indices:
                taken[name] = indices
            elif before is None or after is None:
                taken[name] = None
            else:
                taken[name] = [] if before == after else {"from": list(before), "to": list(after)}
        return taken


class _LoaderPasses:
    """Notes the indices that the sampler of batches of a DataLoader draws, pass by pass."""

    def __init__(self, iterator: LoaderIterator) -> None:
        self._iterator = iterator
        self._passes: list[list[Any]] = []
        self._first: int | None = None  # the number of the first pass that was noted
        sampler, cls = iterator.loader.batch_sampler, type(iterator.loader.batch_sampler)

        def iterate(sampler: Any) -> Iterator[Any]:
            drawn: list[Any] = []
            self._passes.append(drawn)
            for earlier in self._passes[-3:-2]:  # an update takes from two of them at most
                earlier.clear()
            for batch in cls.__iter__(sampler):
                drawn.append(list(batch))  # a sampler may use its list again
                yield batch

        # A DataLoader takes no other sampler later, so that the class of the one that it has is replaced.
        sampler.__class__ = type(cls.__name__, (cls,), {"__iter__": iterate, "__module__": cls.__module__})

    def begin(self) -> tuple[int, int]:
        """Return the number of the pass in which the iterator is, and how many batches of it were returned."""
        at = self._iterator.place_in_passes
        self._first = at[0] if self._first is None else self._first
        return at

    def since(self, before: tuple[int, int]) -> list[int] | None:
        """Return the indices from a place on; ``None`` where it is not certain which pass they were drawn for."""
        after, indices = self._iterator.place_in_passes, list[int]()
        number, position = before
        last = after[0] if after[1] else after[0] - 1
        if self._first is None or len(self._passes) != last - self._first + 1:
            return None
        while (number, position) < after:
            drawn = self._passes[number - self._first]
            for batch in drawn[position : after[1]] if number == after[0] else drawn[position:]:
                if not all(isinstance(index, Integral) for index in batch):
                    return None
                indices += map(int, batch)
            number, position = number + 1, 0
        return indices


def _has_plain_sampler(iterator: Any) -> bool:
    """Return whether a loader's batch sampler yields the indices of batches, and an epoch is one pass over it."""
    if not isinstance(iterator, LoaderIterator) or type(iterator.loader) is not DataLoader:
        return False
    if isinstance(iterator.loader.dataset, IterableDataset):
        return False
    sampler = iterator.loader.batch_sampler
    is_plain = sampler is not None and isinstance(getattr(type(sampler), "__iter__", None), FunctionType)
    return is_plain and iterator.epoch_length is None and not iterator.per_rank


def _position(iterator: Any) -> Any:
    """Return the epoch of an iterator and the position in it, ``None`` if it does not tell them."""
    progress = getattr(iterator, "progress", None)
    return progress[:2] if isinstance(progress, tuple) and len(progress) == 3 else None


# --- the loss of each of them ---


_BY_HAND = "compute it from chainring.testing.replay(make_trainer, RUN, K - 1), the trainer as it was before update K"
_ROUNDING = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}  # of what autocast computes
_TF32 = 2.0**-11  # of what accelerators may compute in float32


class ExampleLosses(Observer):
    """Computes the loss of each example of an update, as a batch of one, with the models as they were before it.

    They are in evaluation mode, and called by the updater's converter, loss function and precision. This is done after the
    update, which so has the bits of the run, and then everything is put back.
    """

    def __init__(self, updater: Any, iteration: int) -> None:
        self._iteration, self._result, self._refusal = iteration, dict[str, Any](), ""
        cls, iterator = type(updater), find_main_iterator(updater)
        own = [name for name in ("next_batch", "autocast") if getattr(cls, name, None) is not getattr(StandardUpdater, name)]
        if cls.update_core not in (StandardUpdater.update_core, ParallelUpdater.update_core) or own:
            name = [*own, "update_core"][0]
            raise NoReplay(f"{cls.__name__} has its own {name}, so that the loss of one example is not known; {_BY_HAND}")
        if not isinstance(iterator, IndexedIterator) and not _has_plain_sampler(iterator):
            what = "without an iterator" if iterator is None else f"from {type(iterator).__name__} {iterator.name!r}"
            raise NoReplay(f"updates {what} have no examples of a dataset, which have a loss each; {_BY_HAND}")

    def result(self) -> dict[str, Any]:
        """Return the losses of the examples in the order of the batches, or raise `NoReplay`.

        Beside ``losses`` these are their ``mean`` and the loss of the whole ``batch``, both as the updater weighs them, and
        ``is_mean``: whether the two are equal to rounding.
        """
        if self._refusal:
            raise NoReplay(self._refusal)
        return self._result

    def around_update(self, trainer: Trainer, update: Callable[[], None]) -> None:
        updater: Any = trainer.updater
        tensors = [t for model in updater.get_all_models().values() for t in (*model.parameters(), *model.buffers())]
        if updater.iteration + 1 != self._iteration or any(map(is_lazy, tensors)):
            self._refusal = "this update makes the parameters of a lazy module; take a later iteration"
            update()
            return
        iterator, before = updater.get_iterator("main"), [t.detach().clone() for t in tensors]
        mark, generators = iterator.mark(), take_generators()
        converted, given = list[Any](), list[Any]()  # before the other callbacks and after them

        def note(batches: list[Any], context: Any) -> None:
            batches.append((context.micro_step, _versions(context.batch)))

        first, last = partial(note, converted), partial(note, given)
        updater.callbacks.add("batch_on_finish", first, first=True)
        updater.callbacks.add("batch_on_finish", last)
        try:
            update()
        finally:
            updater.callbacks.remove("batch_on_finish", first)
            updater.callbacks.remove("batch_on_finish", last)
        self._refusal, after = "", [t.detach().clone() for t in tensors]
        if converted != given:
            self._refusal = f"a callback of batch_on_finish changes batches, which may need all of one; {_BY_HAND}"
            return
        with preserve_rng(), torch.no_grad():
            put_generators(generators)
            iterator.return_to(mark)
            batches = [next(iterator) for _ in range(converted[-1][0] + 1)]
            try:
                torch._foreach_copy_(tensors, before)
                self._result = _losses_of(updater, batches)
            except Exception as error:
                text = f"the loss of an example alone cannot be computed in evaluation mode: {type(error).__name__}: {error}"
                self._refusal = f"{text}\nLet the model take a batch of one there; or {_BY_HAND}"
            finally:
                torch._foreach_copy_(tensors, after)


def _versions(batch: Any) -> list[Any]:
    """Return what changes where a batch is replaced, or one of its tensors is written."""
    return [(id(x), x._version if isinstance(x, Tensor) and not x.is_inference() else 0) for x in tree_leaves(batch)]


def _losses_of(updater: Any, batches: list[Any]) -> dict[str, Any]:
    models = list(updater.get_all_models().values())
    modes = [(module, module.training) for model in models for module in model.modules()]
    main = updater.get_model("main")
    parts = updater.virtual_ranks or len(getattr(updater, "replica_devices", "1"))  # of a batch, each with its mean

    def compute(rows: Any) -> tuple[float, float]:
        inputs = updater.converter(rows, updater.device)
        loss, weight = compute_loss(main, updater.loss_func, inputs)
        if not isinstance(loss, Tensor) or loss.ndim:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise TypeError(f"there the model returns a {type(loss).__name__}{shape}, and no loss")
        return float(loss), float(count_examples(rows) if weight is None else weight)

    try:
        for model in models:
            model.eval()
        with fresh_metrics(models), report_scope({}), Precision(updater.precision, models).autocast():
            rows = [take_examples(batch, slice(i, i + 1)) for batch in batches for i in range(len(batch))]
            shares = [take_examples(batch, slice(part, None, parts)) for batch in batches for part in range(parts)]
            each, whole = list(map(compute, rows)), [compute(share) for share in shares if count_examples(share)]
            for p in filter(Tensor.is_floating_point, main.parameters()):  # how much of the losses is rounding
                rounding = max(torch.finfo(p.dtype).eps, _ROUNDING[updater.precision], 0.0 if p.is_cpu else _TF32)
                p.mul_(1 + rounding * torch.randn_like(p).sign())
            noise = [abs(compute(row)[0] - loss) for row, (loss, _) in zip(rows, each, strict=True)]
    finally:
        for module, training in modes:
            module.training = training
    (mean, _), (of_batch, _) = weighted_mean(each), weighted_mean(whole)
    is_mean = math.isclose(mean, of_batch, rel_tol=1e-5, abs_tol=8 * sum(noise) / len(noise))
    is_mean = is_mean or (math.isnan(mean) and math.isnan(of_batch))
    return {"losses": [loss for loss, _ in each], "mean": mean, "batch": of_batch, "is_mean": is_mean}
