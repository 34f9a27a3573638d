"""snapshot: saves the state of a run as a checkpoint, from which the run can be resumed."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Protocol

from chainring._checks import is_integer
from chainring._distributed.sharding import is_sharded
from chainring._messages import warn
from chainring._naming import name_cleaner
from chainring.serializers._loading import load_snapshot
from chainring.serializers._saving import (
    BackgroundWriter,
    Checkpoint,
    StagingBuffers,
    checkpoint_of_copies,
    is_saved_as_file,
    module_tensors,
    save_tensors,
)
from chainring.serializers._store import CorruptError, Manifest, SavedSnapshot, Snapshots, find_newest
from chainring.serializers._values import without_collections
from chainring.serializers.protocol import StateCollector, capture, has_state, is_module, serialize_method
from chainring.training._run_directory import NamePattern
from chainring.training.extension import Extension

if TYPE_CHECKING:
    from chainring.parallel import Communicator
    from chainring.training._entry import Entry
    from chainring.training.trainer import Trainer

Filename = str | Callable[["Trainer"], str]
Write = Callable[[], None]


class Snapshot(Extension):
    """Saves the state of the run as a checkpoint when its trigger fires, in a directory that is complete or absent.

    It is taken after the last extension of an iteration, so that a run resumed from it is bit-exact with an uninterrupted
    one. Files are written in the background, and training pauses only to copy the state; only one write runs at a time.
    An error of a write is raised at the next snapshot, or at the end of the run; with `on_failure`, training can continue
    instead.

    A name with ``{.updater.iteration}`` belongs to one snapshot. Any other name, such as ``"best"``, is a symbolic link
    to the snapshot ``<name>_iter_<iteration>``: the next snapshot of this name is committed first, then the link is
    replaced by a rename, then the previous snapshot is removed.

    Several snapshot extensions may have the same name and different triggers. If they fire in the same iteration, one
    snapshot is written, which is kept while at least one of them retains it.

    Example::

        trainer.extend(extensions.snapshot(n_retains=3, autoload=True), trigger=(1, "epoch"))
        best = triggers.MinValueTrigger("validation/main/loss")
        trainer.extend(extensions.snapshot("best"), trigger=best)

    Args:
        filename: the name in the trainer's ``out``: a format string of the trainer, or a function of it.
        target: the object to save instead of the whole trainer.
        condition: called without arguments; nothing is saved if it returns false.
        n_retains: the number of snapshots to keep; -1 keeps all, or one if the name is fixed. Older ones are removed
            after the next is on the disk; only snapshots that this extension has written are removed.
        autoload: True to resume from the newest undamaged snapshot when a run starts, before anything is initialized; a
            warning names damaged ones. A snapshot is then also taken when the stop trigger ends the run.
        snapshot_on_error: True to save the state also when the run fails, as ``<name>_error``, which is never loaded
            automatically: the update may be incomplete.
        asynchronous: True to write the files in the background.
        frozen: False to leave out parameters that need no gradient; loading then does not change them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``n_retains`` is neither -1 nor at least 1, or the file name is not valid. When the run starts:
            ``snapshot_on_error`` with a sharded model, since the other ranks have stopped by the time of an error.

    Attributes:
        saved_iteration: the iteration of the newest snapshot of the trainer that this run has completely written;
            ``None`` before the first, and if the target is not the trainer.
    """

    trigger = (1, "epoch")
    priority = -100
    skip_on_resume = True
    is_snapshot = True
    default_name = "snapshot"

    def __init__(
        self,
        filename: Filename = "snapshot_iter_{.updater.iteration}",
        *,
        target: object = None,
        condition: Callable[[], bool] | None = None,
        n_retains: int = -1,
        autoload: bool = False,
        snapshot_on_error: bool = False,
        asynchronous: bool = True,
        frozen: bool = True,
    ) -> None:
        if condition is not None and not callable(condition):
            raise TypeError(f"condition is a function without arguments, got {type(condition).__name__}")
        if target is not None:
            _check_target(target)
        if not is_integer(n_retains) or (n_retains != -1 and n_retains < 1):
            raise ValueError(f"n_retains is how many snapshots to keep, at least 1, or -1 for all; got {n_retains!r}")
        self.autoload = autoload
        self.n_retains = n_retains
        self.target = target
        self.snapshot_on_error = snapshot_on_error
        self.asynchronous = asynchronous
        self.frozen = frozen
        self.saved_iteration: int | None = None
        self._condition = condition
        self._series = Series(filename)  # of several with one name, each has that of the first
        self.retention = self._series.retention(n_retains)
        self._staging = StagingBuffers()
        self._background = BackgroundWriter()
        self._has_started = False
        self._damaged: set[str] = set()  # snapshots that proved to be so when they were loaded
        self._comm: Communicator | None = None

    @property
    def has_fixed_name(self) -> bool:  # type: ignore[override]
        return self._series.is_fixed

    @property
    def writes(self) -> Sequence[str]:
        return self._series.templates

    def newest(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        self._join_series(trainer)
        self._guard(self._background.wait)
        store = trainer.store
        while True:
            name = None
            if trainer.comm.is_main:
                name = find_newest(store, [name for name, _ in self._series.listing(store)], warn, self._damaged)
            name = trainer.comm.broadcast_object(name)
            if name is None:
                return None
            saved = store.snapshot(name)
            if self.target is None:
                return saved.read_manifest().iteration, partial(self._load, saved, trainer, trainer.comm)
            with suppress(CorruptError):
                self._load(saved, self.target, trainer.comm)
                return None

    def _load(self, saved: SavedSnapshot, obj: Any, comm: Communicator) -> None:
        """Load a snapshot, or note that it is damaged, on all ranks alike."""
        try:
            load_snapshot(saved, obj, comm)
        except CorruptError as error:
            self._damaged.add(saved.name)
            if comm.is_main:
                warn(f"snapshot {saved.name!r} is skipped: {error}")
            raise

    def initialize(self, trainer: Trainer) -> None:
        siblings = self._join_series(trainer)
        series, store = self._series, trainer.store
        series.check_fields(trainer)
        self._has_started = True
        if self.snapshot_on_error:
            _refuse_sharded(trainer)
        if trainer.comm.world.size > 1 and self._comm is None:
            # One for all snapshots of a run, which are written one after the other, in the same order on each rank.
            shared = (entry.extension._comm for entry in trainer.entries if isinstance(entry.extension, Snapshot))
            self._comm = next((comm for comm in shared if comm is not None), None) or trainer.comm.world.beside()
        if any(entry.extension.frozen != self.frozen for entry in siblings):
            raise ValueError(f"snapshots of one name save the same: give frozen= to all of {series.label!r}, or to none")
        if not trainer.comm.is_main:
            series.begin(None)
        elif siblings[0].extension is self:
            if series.is_fixed and store.exists(name := str(series.filename)) and store.link_target(name) is None:
                raise FileExistsError(
                    f"{store}/{name} is in the way of the snapshots of that name; move it, or give another filename"
                )
            series.begin(store)

    def _join_series(self, trainer: Trainer) -> list[Entry]:
        """Return the registered extensions that save the same under the same name; from now on they share one series."""
        siblings = [
            entry
            for entry in trainer.entries
            if isinstance(entry.extension, Snapshot)
            and entry.extension._series.filename == self._series.filename
            and entry.extension.target is self.target
        ]
        for entry in siblings:
            entry.extension._series = siblings[0].extension._series
        series = self._series
        series.retentions = {entry.name: entry.extension.retention for entry in siblings}
        if not siblings:  # called by hand, and not registered
            series.retentions = {str(trainer.extension_name): self.retention}
        series.label = series.label or next(iter(series.retentions))
        return siblings

    def __call__(self, trainer: Trainer) -> None:
        siblings, name, wanted = self._join_series(trainer), str(trainer.extension_name), self._series.wanted
        if name not in wanted:  # the first of those that are due
            due = {name: self} | {entry.name: entry.extension for entry in siblings if entry.is_due}
            wanted |= {each: extension._is_wanted(trainer) for each, extension in due.items()}
        if not wanted.pop(name):
            return
        takers = [name, *(each for each, is_wanted in wanted.items() if is_wanted)]
        self._guard(self._background.wait)
        if trainer.comm.is_main:  # it may be called by hand before the run, to keep the state that it starts from
            os.makedirs(trainer.out, exist_ok=True)
        write = self._prepare(trainer, siblings, takers)
        wanted |= dict.fromkeys(wanted, False)  # the others need not take it too
        if write is None:
            return
        # A run that continues from this one does not take the others of its iteration again: they are on the disk before it.
        others = [entry.extension._background for entry in trainer.entries if isinstance(entry.extension, Snapshot)]
        if self.asynchronous and self._has_started:  # called by hand, nobody waits, and a run removes what is unfinished
            self._background.start(write, after=others)
        else:
            BackgroundWriter.wait_for(others)
            self._guard(write)

    def _is_wanted(self, trainer: Trainer) -> bool:
        return self._condition is None or trainer.comm.broadcast_object(bool(self._condition()))

    def wait(self) -> None:
        """Wait until the current snapshot is on the disk; if it cannot be written, `on_failure` is called."""
        self._guard(self._background.wait)

    def _prepare(self, trainer: Trainer, siblings: list[Entry], takers: list[str]) -> Write | None:
        """Copy the state and return the call that writes it for all ``takers``; ``None`` if it has been saved already."""
        iteration, store, comm, series = trainer.updater.iteration, trainer.store, trainer.comm, self._series
        name, is_final = series.name(trainer), trainer.is_final_snapshot
        if series.begun_iteration == iteration:
            BackgroundWriter.wait_for([entry.extension._background for entry in siblings])
        is_saved = comm.is_main and store.holds(series.directory(name, iteration), iteration)
        if comm.world.size > 1:
            name, is_saved = comm.broadcast_object((name, is_saved))
        if is_saved:  # at the end of this very iteration, by the run before or as a final snapshot
            self.saved_iteration = iteration if self.target is None else None
            return None
        series.begun_iteration = iteration
        with without_collections():
            checkpoint = self._capture(trainer, comm, is_copied=self.asynchronous)
        if not comm.is_main:
            return (lambda: checkpoint.commit(store, name, iteration, comm=self._comm)) if checkpoint.is_sharded else None

        def write() -> None:
            series.publish(store, checkpoint, name, iteration, takers, is_final, self._comm)
            self.saved_iteration = iteration if self.target is None else None

        return write

    def _capture(self, trainer: Trainer, comm: Communicator | None = None, is_copied: bool = False) -> Checkpoint:
        root = trainer if self.target is None else self.target
        state = capture(root, Path(trainer.out), comm)
        left_out = 0 if self.frozen else _leave_out_frozen(state, root)
        checkpoint = checkpoint_of_copies(state, self._staging, self._background) if is_copied else Checkpoint(state)
        if left_out:
            checkpoint.about["left out"] = f"{left_out} parameters that need no gradient, by frozen=False"
        return checkpoint

    def _guard(self, call: Write) -> None:
        try:
            call()
        except OSError as error:
            self.on_failure(error)

    def on_failure(self, error: OSError) -> None:
        """Handle a snapshot that could not be written: by default the error is raised, and the training stops.

        Override it, or assign a function, to let the training continue::

            taken = extensions.snapshot()
            taken.on_failure = lambda error: warnings.warn(f"{error}; training continues")

        Raises:
            OSError: the error.
        """
        raise error

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        if self.snapshot_on_error and trainer.comm.is_main:
            store, iteration = trainer.store, trainer.updater.iteration
            name = f"{self._series.directory(self._series.name(trainer), iteration)}_error"
            names = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(1)))  # of an earlier attempt
            checkpoint = self._capture(trainer)
            about = {_SERIES: self._series.label, "error": f"{type(exception).__name__}: {exception}"}
            free = next(name for name in names if not store.exists(name))
            checkpoint.commit(store, free, iteration, about)

    def finalize(self) -> None:
        self._has_started = False
        self._guard(self._background.close)


snapshot = Snapshot


def snapshot_object(target: object, filename: Filename, *, asynchronous: bool = True) -> Snapshot:
    """Save one object when the trigger fires, such as a model, as a file or a directory; see `serializers.save`.

    Example::

        trainer.extend(extensions.snapshot_object(model, "model_{.updater.epoch}"), trigger=(1, "epoch"))

    Args:
        target: a module, or an object with ``serialize``, or ``state_dict`` and ``load_state_dict``.
        filename: the name in the trainer's ``out``: a format string of the trainer, or a function of it. An earlier file or
            snapshot of that name is replaced.
        asynchronous: True to write the files in the background.

    Returns:
        The extension.

    Raises:
        TypeError: the target has no state, or the file name has the wrong type.
    """
    _check_target(target)
    cls = ModelFile if is_saved_as_file(target) else Snapshot
    extension = cls(filename, target=target, asynchronous=asynchronous)
    extension.default_name = "snapshot_object"
    return extension


class ModelFile(Snapshot):  # snapshots record this name as the class of the extension
    """Saves a model like `serializers.save`, as one safetensors file that replaces an earlier one of that name."""

    @property
    def writes(self) -> Sequence[str]:
        return (self._series.filename,) if isinstance(self._series.filename, str) else ()

    def initialize(self, trainer: Trainer) -> None:
        self._has_started = True

    def _prepare(self, trainer: Trainer, siblings: list[Entry], takers: list[str]) -> Write | None:
        path = Path(trainer.out) / self._series.name(trainer)
        tensors = module_tensors(self.target)
        if any(map(is_sharded, tensors.values())):  # written at once: the next update would change it
            self._guard(lambda: save_tensors(path, tensors, path.name))
            return None
        if not trainer.comm.is_main:
            return None
        staged = self._staging.copy(tensors) if self.asynchronous else tensors
        return lambda: save_tensors(path, staged)


def _check_target(target: object) -> None:
    if serialize_method(target) is None and not has_state(target):
        raise TypeError(
            "target is an object with serialize, or with state_dict and load_state_dict, and "
            f"{type(target).__name__} has neither"
        )


def _refuse_sharded(trainer: Trainer) -> None:
    models = trainer.updater.get_all_models()
    sharded = next((name for name, model in models.items() if any(map(is_sharded, model.parameters()))), None)
    if sharded is not None and trainer.comm.world.size > 1:
        raise ValueError(
            f"snapshot_on_error=True saves the state when a rank has failed, and model {sharded!r} is sharded over "
            f"{trainer.comm.world.size} ranks, of which the others have stopped then; leave it out, and take snapshots "
            "more often"
        )


def _leave_out_frozen(state: StateCollector, root: Any) -> int:
    """Replace parameters that need no gradient by ``None``, which leaves them alone on loading; return their number."""
    count = 0
    models = {"": root} if is_module(root) else {}
    if hasattr(root, "updater"):
        models = {f"updater/model:{name}/": model for name, model in root.updater.get_all_models().items()}
    for prefix, model in models.items():
        clean = name_cleaner(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            path = prefix + clean(name).replace(".", "/")
            if not parameter.requires_grad and path in state.target:
                state.target[path] = None
                count += 1
    return count


# Keys of a manifest: the series of a snapshot, that it was taken because the run ended, and of several extensions with one
# name those that have taken it.
_SERIES = "series"
_FINAL = "out of turn"
_TAKERS = "taken by"


class Retention(Protocol):
    """Says which snapshots to keep."""

    def keep(self, taken: Sequence[str], series: Sequence[str]) -> set[str]:
        """Return the names to keep of those that an extension has taken, of all of a ``series``; both the newest first."""
        ...


@dataclass(frozen=True)
class Latest:
    """Keeps the newest: so many, or all."""

    count: int | None = None

    def keep(self, taken: Sequence[str], series: Sequence[str]) -> set[str]:
        return set(taken[: self.count])


@dataclass(frozen=True)
class Linked:
    """Keeps those to which their links lead: of each link the newest, and so many of these, or all."""

    count: int | None = None

    def keep(self, taken: Sequence[str], series: Sequence[str]) -> set[str]:
        targets = {_link_of(name): name for name in reversed(series)}
        return set([name for name in taken if targets[_link_of(name)] == name][: self.count])


class Series:
    """The snapshots of one name and target, which one or several extensions take, and what is kept of them.

    Attributes:
        filename: as an extension was given it.
        label: the name of the series in manifests; of a function, that of the first extension.
        is_fixed: whether all snapshots have the same name, a link to the newest.
        retentions: what to keep, by the names of the extensions.
        wanted: while the snapshots of an iteration are taken, of each extension that is still to be called whether it is
            to take one.
        begun_iteration: that of the snapshot that was begun last.
    """

    def __init__(self, filename: Filename) -> None:
        fields = [] if callable(filename) else _fields_of(filename)
        self.filename = filename
        self.label: str | None = None if callable(filename) else filename
        self.is_fixed = not fields and not callable(filename)
        self.retentions: dict[str, Retention] = {}
        self.wanted: dict[str, bool] = {}
        self.begun_iteration: int | None = None
        self._has_links = not any(field.endswith(".iteration") for field in fields)
        # By name, since the run began: a commit that read every manifest would cost the more, the more are kept.
        self._known: dict[str, Manifest] | None = None

    def retention(self, n_retains: int) -> Retention:
        """Return what ``n_retains`` keeps."""
        count = None if n_retains == -1 else n_retains
        if self.is_fixed:
            return Latest(count or 1)
        return Linked(count) if self._has_links else Latest(count)

    @property
    def templates(self) -> Sequence[str]:
        """The names of all that it writes, with fields; none for a function, whose snapshots the manifests tell."""
        if callable(self.filename):
            return ()
        return [self.filename, f"{self.filename}_iter_{{.iteration}}"] if self._has_links else [self.filename]

    def check_fields(self, trainer: Trainer) -> None:
        """Refuse, before the first update, a field that the trainer does not have."""
        try:
            _ = callable(self.filename) or self.filename.format(trainer)
        except (AttributeError, LookupError) as error:
            example = '"snapshot_iter_{.updater.iteration}"'
            raise ValueError(
                f"filename={self.filename!r} has a field that a trainer lacks: {error}; write {example}"
            ) from None

    def name(self, trainer: Trainer) -> str:
        """Return the name of a snapshot that is taken now: its own, or that of its link."""
        return str(self.filename(trainer) if callable(self.filename) else self.filename.format(trainer))

    def directory(self, name: str, iteration: int) -> str:
        return f"{name}_iter_{iteration}" if self._has_links else name

    def begin(self, store: Snapshots | None) -> None:
        """Read the manifests once, and link a fixed name to its newest snapshot, if a kill or a person undid that."""
        self.wanted, self.begun_iteration = {}, None
        if store is None:
            return
        self._known = {name: manifest for name, manifest in self.listing(store) if manifest is not None}
        if self.is_fixed:
            newest = next((name for name, manifest in self._known.items() if _FINAL not in manifest.about), None)
            if newest is not None and store.link_target(str(self.filename)) != newest:
                store.link(str(self.filename), newest)

    def publish(
        self,
        store: Snapshots,
        checkpoint: Checkpoint,
        name: str,
        iteration: int,
        takers: Sequence[str],
        is_final: bool,
        comm: Communicator | None,
    ) -> None:
        """Write a snapshot that the extensions ``takers`` take, link it, and then remove those that none is to keep.

        One that is taken because the run ends, and not because it is the best, does not take the fixed name.
        """
        directory = self.directory(name, iteration)
        is_linked = not (is_final and self.is_fixed)
        about: dict[str, Any] = {_SERIES: self.label} if is_linked else {_SERIES: self.label, _FINAL: True}
        if len(self.retentions) > 1:
            about[_TAKERS] = sorted(takers)
        checkpoint.commit(store, directory, iteration, about, comm)
        if self._known is not None:
            self._known[directory] = Manifest(iteration, {}, about)
        if is_linked:
            if directory != name:
                store.link(name, directory)
            self._remove_unwanted(store, directory)

    def _remove_unwanted(self, store: Snapshots, newest: str) -> None:
        known = self._known
        if known is None:  # called by hand before the run
            known = {name: manifest for name, manifest in self.listing(store) if manifest is not None}
        unwanted = known.keys() - self._kept(known) - {newest}
        if unwanted and (missing := known.keys() - store.files.folders()):  # which a person has removed: they do not count
            for name in missing:
                del known[name]
            unwanted = known.keys() - self._kept(known) - {newest}
        for name in sorted(unwanted, key=lambda name: known[name].iteration):
            del known[name]
            if self._has_links and store.link_target(_link_of(name)) == name:
                store.files.link(_link_of(name), None)
            store.remove(name)

    def _kept(self, known: Mapping[str, Manifest]) -> set[str]:
        """Return the snapshots that one of the extensions is to keep.

        Each keeps of what it has taken itself, and of what none of those that are registered has taken.
        """
        names = sorted(known, key=lambda name: (-known[name].iteration, name))
        in_turn = [name for name in names if _FINAL not in known[name].about]
        takers = {name: self.retentions.keys() & _texts(known[name].about.get(_TAKERS)) for name in in_turn}
        kept = set[str]()
        for extension, retention in self.retentions.items():
            taken = [name for name in in_turn if not takers[name] or extension in takers[name]]
            kept |= retention.keep(taken, in_turn)
        return kept

    def listing(self, store: Snapshots) -> list[tuple[str, Manifest | None]]:
        """Return the snapshots to continue from: first those without a readable manifest, then the newest, and so on."""

        def belongs(name: str, manifest: Manifest | None) -> bool:
            if manifest is None:
                return any(NamePattern(template).match(name) for template in self.templates)
            return manifest.about.get(_SERIES) == self.label and "error" not in manifest.about

        return [(name, manifest) for name, manifest in store.listing() if belongs(name, manifest)]


def _link_of(name: str) -> str:
    """Return the link under which a snapshot stands, or has stood."""
    return name.rpartition("_iter_")[0]


def _texts(value: object) -> set[str]:
    return {each for each in value if isinstance(each, str)} if isinstance(value, list) else set()


def _fields_of(filename: str) -> list[str]:
    """Return the fields of a format string that names a file in ``out``."""
    rule = 'filename is a name in out, such as "snapshot_iter_{.updater.iteration}" or "best", or a function of the trainer'
    if not isinstance(filename, str):
        raise TypeError(f"{rule}; got {filename!r}")
    try:
        parsed = list(Formatter().parse(filename))
    except ValueError as error:
        raise ValueError(f"{rule}; got {filename!r}: {error}") from None
    if not filename or filename.startswith(".") or any("/" in literal for literal, *_ in parsed):
        raise ValueError(f"{rule}; without a slash or a dot at its beginning; got {filename!r}")
    fields = [field for _, field, _, _ in parsed if field is not None]
    heads = [re.split(r"[.\[]", field)[0] for field in fields]
    if not set(heads) <= {"", "0"} or (len(heads) > 1 and "" in heads):
        raise ValueError(
            f"{rule}; several fields of it are written {{0.updater.epoch}}_{{0.updater.iteration}}; got {filename!r}"
        )
    return fields
