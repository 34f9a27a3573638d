"""A run of a trainer: what it continues, how it starts, and how it ends come what may."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from chainring import _random
from chainring._distributed.sharding import is_tensor_parallel
from chainring._distributed.watchdog import reporting_position
from chainring._hints import find_hint
from chainring._messages import info, warn
from chainring._naming import named_submodules
from chainring.iterators.base import share_among_ranks
from chainring.serializers import CorruptError
from chainring.serializers._changes import ChangedSetting, recording_changes, telling_changes
from chainring.serializers.protocol import Deserializer, conclude_reading, visit_if_stateful
from chainring.training._agreement import check_agreement, check_generators, check_out
from chainring.training._run_directory import RECORD, RunDirectory, create_out, read_record, write_record
from chainring.training.extension import RollBack
from chainring.training.triggers import IntervalTrigger
from chainring.training.triggers.base import describe_setting, serialize_extension_trigger

if TYPE_CHECKING:
    from chainring.serializers._store import Store
    from chainring.training._remote_run import RemoteRun
    from chainring.training.extension import Entry
    from chainring.training.trainer import Trainer

logger = logging.getLogger("chainring")


class LoadedState:
    """The saved run that was loaded into a trainer, as far as it waits: for extensions not registered yet, for the start."""

    def __init__(self) -> None:
        self.exists = False  # True once anything was loaded, so that the run continues an earlier one
        self.gives_way = False  # True if it came from another library: snapshots of the run itself are newer
        self.generators: Any = None  # the state of the random generators, put back immediately before the first update
        self.directory: Path | None = None  # with the files beside the snapshot that was loaded, unless it came from memory
        self.place: str | None = None  # of the run that has saved it
        self.changes: dict[str, list[Any]] = {}  # by name, the old and the new value of settings that the script changes
        self.untold: list[ChangedSetting] = []  # changes that are not printed yet
        self._source: Deserializer | None = None
        self._saved: list[Identity] = []  # the extensions of the saved run
        self._pairs: dict[str, str] = {}  # by the name of an extension here, the one in the saved run that it continues

    def begin(self, source: Deserializer, saved: list[Identity], generators: Any, trainer: Trainer) -> None:
        """Take over a saved run, which had these extensions, and restore those that are registered."""
        self.exists = True
        self.gives_way = source.gives_way
        self.generators = generators
        self.directory, self.place = source.directory, source.place
        self._source, self._saved, self._pairs = source, saved, {}
        self.restore(trainer)

    def restore(self, trainer: Trainer, *, is_complete: bool = True) -> list[Identity]:
        """Load the state of extensions and triggers where it is certain whose it is; return the extensions that there are.

        With ``is_complete=False`` more of them may be registered, and only what is the same in everything is certain.
        """
        source = self._source
        if source is None:
            return []
        current = [identify(entry, trainer) for entry in trainer.entries]
        pairs = _match(self._saved, current, self._pairs, self._has_state, is_complete)
        saved = {one.name: one for one in self._saved}
        for entry in trainer.entries:
            if entry.name in pairs and entry.name not in self._pairs:
                self._restore(source, entry, saved[pairs[entry.name]])
        self._pairs = pairs
        return current

    def _restore(self, source: Deserializer, entry: Entry, saved: Identity) -> None:
        """Load the state of an extension and of its trigger, each unless its class is another one now."""
        extension_class, trigger_class = entry.class_names
        with recording_changes(self.changes):
            if saved.extension_class == extension_class:
                visit_if_stateful(source["extensions"], saved.name, entry.extension)
            is_same = saved.trigger_class == trigger_class
            serialize_extension_trigger(source, entry.name, entry.trigger, saved_name=saved.name, is_same_class=is_same)

    def _has_state(self, saved: Identity) -> bool:
        """Return whether the state of an extension of the saved run matters; an interval trigger does without its own."""
        keys = ["extensions"] if saved.trigger_class == IntervalTrigger.__name__ else ["extensions", "extension_triggers"]
        assert self._source is not None
        return any(next(self._source[key][saved.name].paths(), None) is not None for key in keys)

    def conclude(self, trainer: Trainer) -> None:
        """Restore all that can be, and warn of the extensions that differ; called when a run starts."""
        current = self.restore(trainer)
        there = [one for one in self._saved if one.name not in self._pairs.values()]
        here = [one for one in current if one.name not in self._pairs]
        doubtful = {one.kind for one in there if self._has_state(one)} & {one.kind for one in here}
        for kind in sorted(doubtful):
            _warn_of_doubt([one for one in here if one.kind == kind], [one for one in there if one.kind == kind])
        classes = {one.name: one.extension_class for one in self._saved}
        only_there = [one.name for one in there if one.kind not in doubtful]
        only_here = [
            one.name
            for one in current
            if one.kind not in doubtful and classes.get(self._pairs.get(one.name, "")) != one.extension_class
        ]
        if (only_there or only_here) and not self.gives_way:
            warn(
                f"this run has different extensions from the saved run: only there {only_there}, only here {only_here}. "
                "The state of those only there is dropped; those only here start from now",
            )
        if self._source is not None:
            conclude_reading(self._source)
        self._source, self._saved, self._pairs = None, [], {}


class Identity(NamedTuple):
    """What an extension of one run is recognized by in another."""

    name: str
    base_name: str  # without the number of the second of a name
    extension_class: str
    trigger_class: str
    identity: tuple[str, ...] | None  # of the extension; None in a run of an earlier version
    trigger_identity: tuple[str, ...]
    trigger: str

    @property
    def kind(self) -> tuple[str, str]:
        """What extensions have in common among which one has to be found."""
        return self.base_name, self.extension_class

    @property
    def identifiers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the extension and its trigger are known by."""
        return self.identity or (), self.trigger_identity


def identify(entry: Entry, trainer: Trainer) -> Identity:
    """Return what an extension is recognized by in another run."""
    return Identity(
        entry.name,
        entry.base_name,
        entry.class_names[0],
        entry.class_names[1],
        _parts(getattr(entry.extension, "writes", ()) if entry.identity is None else entry.identity(trainer)),
        _parts(() if entry.trigger_identity is None else entry.trigger_identity(trainer)),
        describe_setting(entry.trigger),
    )


def _parts(identity: Any) -> tuple[str, ...]:
    return tuple(map(str, identity)) if isinstance(identity, (tuple, list)) else ()


def _match(
    saved: list[Identity],
    current: list[Identity],
    pairs: Mapping[str, str],
    has_state: Callable[[Identity], bool],
    is_complete: bool,
) -> dict[str, str]:
    """Return by the name of each extension the one in the saved run that it continues, where that is certain.

    An extension that has a name to itself is known by it, as long as it has the class. Those that share one, of which all
    but the first got a number, are known by what identifies them, because their numbers change with their order.
    """
    found = dict(pairs)
    if any(one.identity is None for one in saved):  # by a version that saved names and classes alone
        return found | {one.name: one.name for one in current if any(one.name == other.name for other in saved)}
    _pair(saved, current, found, lambda one: one[1:], only_single=not is_complete)
    if is_complete:
        _pair(saved, current, found, lambda one: any(one.identifiers) and (one.kind, one.identifiers))
        for length in range(max((len(one.identity or ()) for one in saved), default=0), 0, -1):
            _pair(saved, current, found, partial(_beginning, length))
        _pair_by_name(saved, current, found, has_state)
    return found


def _pair(
    saved: list[Identity],
    current: list[Identity],
    found: dict[str, str],
    key: Callable[[Identity], Any],
    only_single: bool = True,
) -> None:
    """Pair the extensions of equal keys, if as many there as here have it; ``only_single`` if it is one."""
    there, here = _group(saved, key), _group(current, key)
    for value, ones in here.items():
        others = there.get(value, [])
        if value and len(ones) == len(others) and (len(ones) == 1 or not only_single):
            for one, other in zip(ones, others, strict=True):
                if other.name not in found.values():
                    found.setdefault(one.name, other.name)


def _beginning(length: int, one: Identity) -> Any:
    """Return so much of what identifies an extension, the most significant first; nothing if nothing does."""
    return one.identity and (one.kind, one.identity[:length])


def _pair_by_name(
    saved: list[Identity], current: list[Identity], found: dict[str, str], has_state: Callable[[Identity], bool]
) -> None:
    """Pair what is left over by name, where nothing else could tell it apart or nothing depends on it."""
    there, here = _group(saved, lambda one: one.kind), _group(current, lambda one: one.kind)
    for kind, ones in here.items():
        others = there.get(kind, [])
        if len(ones) == len(others) == 1:
            found.setdefault(ones[0].name, others[0].name)
            continue
        left = {one.name: one for one in ones if one.name not in found}
        candidates = {other.name: other for other in others if other.name not in found.values()}
        common = [name for name in left if name in candidates]
        is_same = len(common) == len(left) == len(candidates) and all(
            left[name].identifiers == candidates[name].identifiers for name in common
        )
        is_known = len({other[1:] for other in candidates.values()}) == 1  # by nothing but the name, or it is the only one
        if (is_same and is_known) or not any(map(has_state, candidates.values())):
            found.update((name, name) for name in common)
    names = {other.name: other for other in saved if other.name not in found.values()}
    for one in current:  # a name that was a number's before, or another class, whose trigger may be the same
        other = names.get(one.name)
        if other is None or one.kind == other.kind:
            continue
        if one.extension_class != other.extension_class or one[2:] == other[2:]:
            found.setdefault(one.name, one.name)


def _group(identities: list[Identity], key: Callable[[Identity], Any]) -> dict[Any, list[Identity]]:
    groups: dict[Any, list[Identity]] = {}
    for one in sorted(identities, key=lambda one: (len(one.name), one.name)):  # "log_2" before "log_10"
        groups.setdefault(key(one), []).append(one)
    return groups


def _warn_of_doubt(here: list[Identity], there: list[Identity]) -> None:
    def shown(ones: list[Identity]) -> str:
        return ", ".join(f"{one.name!r} ({', '.join([*(one.identity or ()), one.trigger])})" for one in ones)

    warn(
        "extensions start without their saved state, because they cannot be matched with certainty: here "
        f"{shown(here)}, in the saved run {shown(there)}. Register them as in the saved run to restore all; from now on, "
        "a different extend(..., name=) for each avoids this",
    )


class Run:
    """The start and the end of a run, and the saved run that it continues."""

    def __init__(self) -> None:
        self.has_begun = False  # True once Trainer.run was called
        self.loaded_state = LoadedState()
        self.earlier_time = 0.0  # seconds of training in the runs before a resume
        self.started_at: float | None = None  # on a monotonic clock; None as long as state may be loaded
        self.ended_at: float | None = None
        self.store: Store | None = None  # in which this process alone writes, while the run continues
        self._directory: RunDirectory | None = None
        self._remote: RemoteRun | None = None
        self._initialized: list[Entry] = []  # extensions
        self._started_triggers: list[Any] = []
        self._rollback: str | None = None  # the reason, if the run has gone back to a snapshot

    def reporting_position(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Return a context in which this rank can say where it is, for one that waits for it."""
        if trainer.comm.world.size == 1:
            return nullcontext()
        return reporting_position(lambda: (trainer.updater.iteration, trainer.extension_name))

    def open(self, trainer: Trainer) -> None:
        """Take ``out`` for this process, compare the ranks, load the newest state, and start from it."""
        self.has_begun = True
        several = trainer.comm.world.size > 1
        if several or not any(map(is_tensor_parallel, trainer.updater.get_all_models().values())):
            trainer.comm.begin()  # ranks that compute a model together need no comm
        if trainer.comm.is_main:  # the only rank that writes there
            if trainer.url is not None:
                from chainring.training._remote_run import RemoteRun  # which few programs need

                self._remote = RemoteRun(trainer.url, trainer.out)
                self.store = self._remote.store
            create_out(trainer.out)
            self._directory = RunDirectory(trainer.out, trainer.store)
        if several:
            check_agreement(trainer)
            check_out(trainer.store, trainer.comm)
        if trainer.comm.world.size > trainer.comm.size and not trainer.is_resumed:
            check_generators(trainer.comm)
        self._start(trainer, lambda: _load_newest(trainer, self.loaded_state))

    def roll_back(self, trainer: Trainer, reason: RollBack) -> None:
        """Start the run again from its newest snapshot; raise ``reason`` if there is none."""
        if (state := _newest_state(trainer, trainer.entries)) is None:
            raise reason
        info(f"{reason}; the run goes back to iteration {state[0]}")
        for entry in trainer.entries:
            optional_method(entry, "finalize")()
        self._rollback = str(reason)
        self._start(trainer, lambda: _load_sound(trainer, trainer.entries, state))

    def explain(self, trainer: Trainer, error: BaseException) -> BaseException:
        """Return the error that ends the run, with notes that say where it was raised and what helps."""
        reason = getattr(error, "otherwise", None) if isinstance(error, RollBack) else None
        reason = error if reason is None else reason
        reason.__suppress_context__ |= reason is not error  # which would be printed with the same words
        reason.add_note(f"raised {_position(trainer)}")
        if (hint := find_hint(reason)) is not None:
            reason.add_note(hint)
        return trainer.comm.failed(reason)

    def close(self, trainer: Trainer, failure: BaseException | None) -> BaseException | None:
        """Call every ``on_error`` and every ``finalize``, and give ``out`` back, come what may.

        Return the first error, with the later ones as its notes; without one `Interrupted`, if a signal has ended the run.
        """
        position = _position(trainer)
        for entry in self._initialized if failure is not None else ():
            trainer.extension_name = entry.name
            failure = _try_call(f"on_error of {entry.name!r}", failure, entry.on_error, trainer, failure)
        # Now, because finalizing may take long or hang; without a log, the error is printed once, with its traceback.
        if isinstance(failure, Exception) and logger.hasHandlers():
            logger.error("training stops %s: %s: %s", position, type(failure).__name__, failure)
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            failure = _try_call(f"finalize of {entry.name!r}", failure, optional_method(entry, "finalize"))
        trainer.extension_name = None
        failure = _try_call("finalize of the updater", failure, getattr(trainer.updater, "finalize", lambda: None))
        if self._remote is not None:
            failure = _try_call(f"the last files of {trainer.url}", failure, self._remote.close)
        trainer.comm.end()
        self.ended_at = time.monotonic()
        if self._directory is not None:
            self._directory.release()
        if failure is None and trainer.interruption.signum is not None and not trainer.interruption.is_nested:
            return trainer.interruption.error()
        return failure

    def initialize_trigger(self, trigger: Any, trainer: Trainer) -> None:
        """Initialize a trigger once a run, however many extensions and other triggers share it."""
        if hasattr(trigger, "initialize") and all(other is not trigger for other in self._started_triggers):
            self._started_triggers.append(trigger)
            trigger.initialize(trainer)

    def _start(self, trainer: Trainer, load: Callable[[], None]) -> None:
        """Load a state if there is one, and start from it."""
        self.started_at = None  # state may be loaded until it is set
        with telling_changes(self.loaded_state.untold):
            load()
            self.loaded_state.conclude(trainer)
            trainer.comm.barrier()  # rank 0 may move later snapshots, and cuts the log back, when all have loaded
            self.started_at = time.monotonic()
            if self._directory is not None:
                self._claim_directory(trainer, self._directory)
        prepare(trainer)
        self._started_triggers = []
        self.initialize_trigger(trainer.stop_trigger, trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name  # which an error names
            self.initialize_trigger(entry.trigger, trainer)
        for entry in trainer.entries:
            trainer.extension_name = entry.name
            optional_method(entry, "initialize")(trainer)
            if entry not in self._initialized:
                self._initialized.append(entry)
        trainer.extension_name = None
        _call_before_training(trainer)
        self._restore_generators(trainer)

    def _claim_directory(self, trainer: Trainer, directory: RunDirectory) -> None:
        """Move away in ``out`` what belongs to other runs, and record this start there."""
        _check_names(trainer.entries)
        trainer.store.renew_links()  # before it is seen which of them belong to other runs
        loaded = self.loaded_state
        earlier = read_record(directory.path, moves_damaged=loaded.exists)
        names = {name for entry in trainer.entries for name in getattr(entry.extension, "writes", ())} | {RECORD}
        known = names.union(earlier.get("files", ()))
        if not loaded.exists:
            directory.archive_earlier_run(known)
            write_record(trainer, {}, names, loaded.changes)
            return
        if loaded.directory is not None and loaded.place not in (None, trainer.store.place):
            directory.archive_other_snapshots(known, loaded.place)
            earlier = read_record(loaded.directory) or earlier
        else:
            directory.archive_later_snapshots(known, trainer.updater.iteration)
        write_record(trainer, earlier, known, loaded.changes, self._rollback)

    def _restore_generators(self, trainer: Trainer) -> None:
        loaded, rank = self.loaded_state, trainer.comm.rank
        if loaded.generators is not None:
            _random.set_rng_state(loaded.generators)
            loaded.generators = None
        elif loaded.exists:  # saved by fewer ranks
            _random.seed_all("rank", rank, trainer.updater.iteration)
        elif rank > 0:  # each rank draws from its own stream, and rank 0 from the one that the script has seeded
            _random.seed_all("rank", rank, torch.initial_seed())


def prepare(trainer: Trainer) -> None:
    """Prepare what extensions find when they are initialized: the names of models, the ranks, the shares of data."""
    updater, comm = trainer.updater, trainer.comm
    for name, model in updater.get_all_models().items():
        for path, module in named_submodules(name, model):
            trainer.reporter.add_observer(path, module)
    for iterator in updater.get_all_iterators().values():
        share_among_ranks(iterator, comm, getattr(updater, "virtual_ranks", None))
    if hasattr(updater, "start"):
        updater.start()


def optional_method(entry: Entry, name: str) -> Callable[..., Any]:
    """Return a method of an extension, which need not define it."""
    method = getattr(entry.extension, name, None)
    return method if callable(method) else lambda *_: None


def _load_newest(trainer: Trainer, loaded: LoadedState) -> None:
    """Load the newest state that an extension with ``autoload`` has saved, unless the script has loaded one."""
    entries = [entry for entry in trainer.entries if getattr(entry.extension, "autoload", False)]
    if (not trainer.is_resumed or loaded.gives_way) and (state := _newest_state(trainer, entries)) is not None:
        _load_sound(trainer, entries, state)


def _load_sound(trainer: Trainer, entries: list[Entry], state: tuple[int, Callable[[], None]]) -> None:
    """Load a state; where it proves to be damaged, which its extension remembers, the newest of the others."""
    tried: list[int] = []
    while True:
        iteration, load = state
        try:
            return load()
        except CorruptError:
            tried.append(iteration)
            following = _newest_state(trainer, entries)
            if following is None or tried.count(following[0]) > len(entries):
                raise
            state = following


def _newest_state(trainer: Trainer, entries: list[Entry]) -> tuple[int, Callable[[], None]] | None:
    states, name = [], trainer.extension_name
    for entry in entries:
        trainer.extension_name = entry.name
        states.append(optional_method(entry, "newest")(trainer))
    trainer.extension_name = name
    return max(filter(None, states), key=lambda state: state[0], default=None)


def _check_names(entries: list[Entry]) -> None:
    """Refuse two snapshots of different targets under one name."""
    targets: dict[str, Any] = {}
    for entry in entries:
        for name in getattr(entry.extension, "writes", ()) if entry.is_snapshot else ():
            target = getattr(entry.extension, "target", None)
            if targets.setdefault(name, target) is not target:
                raise ValueError(f"two snapshots of other targets have the name {name!r}; give filename= to one of them")


def _call_before_training(trainer: Trainer) -> None:
    """Call the extensions with ``invoke_before_training``; in a resumed run, discard what they report."""
    observation, watchers = trainer.observation, trainer.reporter.media_watchers
    trainer.observation = {}
    if trainer.is_resumed:
        trainer.reporter.media_watchers = ()
    with trainer.reporter.scope(trainer.observation):
        for entry in trainer.entries:
            skipped = trainer.is_resumed and getattr(entry.extension, "skip_on_resume", False)
            if entry.invoke_before_training and entry.observe_start is None and not skipped:
                if entry.observe is not None:
                    entry.observe(trainer)
                trainer.extension_name = entry.name
                entry.extension(trainer)
        if trainer.observation and not trainer.is_resumed:
            for entry in filter(lambda entry: entry.observe_start is not None, trainer.entries):
                trainer.extension_name = entry.name
                entry.extension.observe_start(trainer)
    trainer.extension_name = None
    if trainer.is_resumed:
        trainer.observation, trainer.reporter.media_watchers = observation, watchers


def _position(trainer: Trainer) -> str:
    extension = "" if trainer.extension_name is None else f"in extension {trainer.extension_name!r} "
    return f"{extension}after iteration {trainer.updater.iteration}"


def _try_call(name: str, failure: BaseException | None, call: Callable[..., None], *arguments: Any) -> BaseException | None:
    """Call a function; return the first error so far, with one that the call raises as its note."""
    try:
        call(*arguments)
    except BaseException as error:
        if failure is None:
            failure = error
            failure.add_note(f"raised in {name}")
        elif error is not failure:
            failure.add_note(f"afterwards {name} raised {type(error).__name__}: {error}")
    return failure
