"""snapshot: saves the state of a run as a checkpoint, from which the run can be resumed."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from chainring._checks import is_integer
from chainring._distributed.sharding import is_sharded
from chainring._messages import warn
from chainring._naming import name_cleaner
from chainring.serializers._background import BackgroundWriter, StagingBuffers
from chainring.serializers._checkpoint import (
    Checkpoint,
    capture,
    checkpoint_of_copies,
    is_saved_as_file,
    load_snapshot,
    module_tensors,
    save_tensors,
)
from chainring.serializers._objects import has_state, is_module, serialize_method
from chainring.serializers._restoring import without_collections
from chainring.serializers._store import CorruptError, Manifest, SavedSnapshot, Store, find_newest
from chainring.serializers.protocol import StateCollector
from chainring.training._run_directory import NamePattern
from chainring.training.extension import Extension

if TYPE_CHECKING:
    from chainring.parallel import Communicator
    from chainring.training.extension import Entry
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
        self.autoload = autoload
        self.n_retains = n_retains
        self._series = _Series(filename, n_retains)
        self.has_fixed_name = self._series.is_fixed
        self.target = target
        self._condition = condition
        self.snapshot_on_error = snapshot_on_error
        self.asynchronous = asynchronous
        self.frozen = frozen
        self._staging = StagingBuffers()
        self._background = BackgroundWriter()
        self._has_started = False
        self._damaged: set[str] = set()  # snapshots that proved to be so when they were loaded
        self._comm: Communicator | None = None
        self.saved_iteration: int | None = None
        self._begun_iteration: int | None = None  # of the snapshot that was begun last
        self._answer: bool | None = None  # of the condition, as long as it holds
        self._taken_as: set[str] = set()  # names under which another of the same file name has taken the snapshot

    @property
    def writes(self) -> Sequence[str]:
        return self._series.templates

    def newest(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        self._set_label(trainer)
        self._guard(self._background.wait)
        store = trainer.store
        while (
            name := trainer.comm.broadcast_object(self._find_newest(store) if trainer.comm.is_main else None)
        ) is not None:
            saved = store.snapshot(name)
            if self.target is None:
                return saved.read_manifest().iteration, partial(self._load, saved, trainer, trainer.comm)
            with suppress(CorruptError):
                self._load(saved, self.target, trainer.comm)
                break
        return None

    def _find_newest(self, store: Store) -> str | None:
        names = [name for name, _ in self._series.listing(store)]
        return find_newest(store, names, warn, self._damaged)

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
        self._set_label(trainer)
        self._series.check_fields(trainer)
        self._answer, self._taken_as = None, set()
        self._has_started = True
        if self.snapshot_on_error:
            _refuse_sharded(trainer)
        if trainer.comm.world.size > 1 and self._comm is None:
            # One for all snapshots of a run, which are written one after the other, in the same order on each rank.
            shared = (entry.extension._comm for entry in trainer.entries if isinstance(entry.extension, Snapshot))
            self._comm = next((comm for comm in shared if comm is not None), None) or trainer.comm.world.beside()
        if self._series.is_fixed and trainer.comm.is_main:
            name = str(self._series.filename)
            if trainer.store.exists(name) and trainer.store.link_target(name) is None:
                place = f"{trainer.store}/{name}"
                raise FileExistsError(
                    f"{place} is in the way of the snapshots of that name; move it, or give another filename"
                )
        siblings = self._siblings(trainer)
        if any(entry.extension.frozen != self.frozen for entry in siblings):
            raise ValueError(
                f"snapshots of one name save the same: give frozen= to all of {self._series.label!r}, or to none"
            )
        if trainer.comm.is_main:
            names = {id(entry.extension): entry.name for entry in siblings}
            self._series.begin(trainer.store, names.get(id(self)), set(names.values()))

    def _set_label(self, trainer: Trainer) -> None:
        """Name the series of a function after the first extension that has it."""
        first = next((entry.name for entry in self._siblings(trainer)), trainer.extension_name)
        self._series.label = self._series.label or first

    def _siblings(self, trainer: Trainer) -> list[Entry]:
        """Return the registered extensions that save the same under the same name, this one included."""
        snapshots = [entry for entry in trainer.entries if isinstance(entry.extension, Snapshot)]
        mine = self._series.filename, id(self.target)
        return [entry for entry in snapshots if (entry.extension._series.filename, id(entry.extension.target)) == mine]

    def __call__(self, trainer: Trainer) -> None:
        if trainer.extension_name in self._taken_as:
            self._taken_as.remove(trainer.extension_name)
            self._answer = None
            return
        is_wanted = self._is_wanted(trainer)
        due = [
            entry for entry in self._siblings(trainer) if entry.is_due and is_wanted and entry.extension._is_wanted(trainer)
        ]
        self._answer = None
        if not is_wanted:
            return
        self._guard(self._background.wait)
        os.makedirs(trainer.out, exist_ok=True)  # called by hand before the run, to keep the state that it starts from
        write = self._prepare(trainer, due)
        for entry in due:
            if entry.name != trainer.extension_name:
                entry.extension._taken_as.add(entry.name)
        if write is None:
            return
        # A run that continues from this one does not take the others of its iteration again: they are on the disk before it.
        others = [e.extension._background for e in trainer.entries if isinstance(e.extension, Snapshot)]
        if self.asynchronous and self._has_started:  # called by hand, nobody waits, and a run removes what is unfinished
            self._background.start(write, after=others)
        else:
            BackgroundWriter.wait_for(others)
            self._guard(write)

    def _is_wanted(self, trainer: Trainer) -> bool:
        """Ask the condition, once for each time that the extension is due."""
        if self._answer is None:
            self._answer = self._condition is None or trainer.comm.broadcast_object(bool(self._condition()))
        return self._answer

    def wait(self) -> None:
        """Wait until the current snapshot is on the disk; if it cannot be written, `on_failure` is called."""
        self._guard(self._background.wait)

    def _prepare(self, trainer: Trainer, due: list[Entry]) -> Write | None:
        """Copy the state and return the call that writes it for all that are due; ``None`` if it has been saved already."""
        iteration, store, comm = trainer.updater.iteration, trainer.store, trainer.comm
        name, siblings = self._series.name(trainer), [entry.extension for entry in self._siblings(trainer)]
        BackgroundWriter.wait_for([each._background for each in siblings if each._begun_iteration == iteration])
        is_saved = comm.is_main and store.holds(self._series.directory(name, iteration), iteration)
        if comm.world.size > 1:
            name, is_saved = comm.broadcast_object((name, is_saved))
        if is_saved:  # at the end of this very iteration, by the run before or as a final snapshot
            self._note_saved(iteration)
            return None
        self._begun_iteration = iteration
        with without_collections():
            checkpoint = self._capture(trainer, comm, is_copied=self.asynchronous)
        if not comm.is_main and not checkpoint.is_sharded:
            return None
        if not comm.is_main:
            return lambda: checkpoint.commit(store, name, iteration, comm=self._comm)
        takers = {entry.name: entry.extension._series for entry in due} or {str(trainer.extension_name): self._series}
        others, is_final = [each._series for each in siblings], trainer.is_final_snapshot

        def write() -> None:
            self._series.publish(store, checkpoint, name, iteration, is_final, self._comm, takers, others)
            self._note_saved(iteration)

        return write

    def _note_saved(self, iteration: int) -> None:
        if self.target is None:
            self.saved_iteration = iteration

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

    def _prepare(self, trainer: Trainer, due: list[Entry]) -> Write | None:
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


class _Series:
    """The snapshots of one extension, by their names and manifests; see `Snapshot` for the arguments."""

    def __init__(self, filename: Filename, n_retains: int) -> None:
        fields = [] if callable(filename) else _fields_of(filename)
        if not is_integer(n_retains) or (n_retains != -1 and n_retains < 1):
            raise ValueError(f"n_retains is how many snapshots to keep, at least 1, or -1 for all; got {n_retains!r}")
        self.filename = filename
        # The name of the series in manifests; of a function, that of the extension, which is set when a run starts.
        self.label: str | None = None if callable(filename) else filename
        self.is_fixed = not fields and not callable(filename)
        self._has_links = not any(field.endswith(".iteration") for field in fields)
        self._n_retains = 1 if self.is_fixed and n_retains == -1 else n_retains
        # Since the run began: a commit that read every manifest would cost the more, the more are kept.
        self._known: dict[str, Manifest] | None = None

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
        return str(self.filename(trainer) if callable(self.filename) else self.filename.format(trainer))

    def directory(self, name: str, iteration: int) -> str:
        return f"{name}_iter_{iteration}" if self._has_links else name

    def publish(
        self,
        store: Store,
        checkpoint: Checkpoint,
        name: str,
        iteration: int,
        is_final: bool,
        comm: Communicator | None,
        takers: Mapping[str, _Series],
        siblings: Sequence[_Series],
    ) -> None:
        """Write a snapshot for its ``takers``, link it, and then remove those that none of the ``siblings`` is to keep.

        One that is taken because the run ends, and not because it is the best, does not take the fixed name.
        """
        directory = self.directory(name, iteration)
        is_linked = not (is_final and self.is_fixed)
        about: dict[str, Any] = {_SERIES: self.label} if is_linked else {_SERIES: self.label, _FINAL: True}
        if len(siblings) > 1:
            about[_TAKERS] = sorted(takers)
        checkpoint.commit(store, directory, iteration, about, comm)
        for series in takers.values():
            if series._known is not None:
                series._known[directory] = Manifest(iteration, {}, about)
        if not is_linked:
            return
        replaced = None
        if directory != name:
            replaced = store.link_target(name)
            store.link(name, directory)
        for series in takers.values():
            series._retain(store, directory, None if self.is_fixed else replaced, siblings)

    def begin(self, store: Store, name: str | None, names: set[str]) -> None:
        """Read the manifests once, and link a fixed name to its newest snapshot, if a kill or a person undid that.

        The extension ``name`` keeps what it has taken itself, and what none of those registered under ``names`` has taken.
        """
        readable = self._readable(store)
        takers = [manifest.about.get(_TAKERS) for _, manifest in readable]
        known = [names.intersection(filter(_is_text, each)) if isinstance(each, list) else set() for each in takers]
        self._known = {
            item[0]: item[1] for item, each in zip(readable, known, strict=True) if not each or name is None or name in each
        }
        if self.is_fixed:
            newest = next((each for each, manifest in readable if _FINAL not in manifest.about), None)
            if newest is not None and store.link_target(str(self.filename)) != newest:
                store.link(str(self.filename), newest)

    def _retain(self, store: Store, newest: str, replaced: str | None, siblings: Sequence[_Series]) -> None:
        """Let go of those older than the ``n_retains`` newest and of those that lost their link, but the newest."""
        unwanted: list[str] = []
        if self._n_retains > 0 or self._known is None:
            present = set(store.candidates())  # others may have removed some
            known = self._readable(store, newest) if self._known is None else sorted(self._known.items(), key=_newest_first)
            others = [(name, manifest) for name, manifest in known if name in present and name != newest]
            linked = [name for name, manifest in others if _FINAL not in manifest.about]
            kept = set(linked[: self._n_retains - 1] if self._n_retains > 0 else linked) - {replaced}
            unwanted = [name for name, _ in others if name not in kept]
        if replaced not in unwanted and any(replaced in (series._known or ()) for series in siblings):
            unwanted += [name for name in (replaced,) if name is not None and store.exists(name)]
        for name in unwanted:
            self._forget(name)
            if name == replaced or not any(name in (series._known or ()) for series in siblings):
                link = name.rpartition("_iter_")[0]
                if self._has_links and store.link_target(link) == name:
                    store.unlink(link)
                store.remove(name)
                for series in siblings:
                    series._forget(name)

    def _forget(self, name: str) -> None:
        if self._known is not None:
            self._known.pop(name, None)

    def listing(self, store: Store, without: str | None = None) -> list[tuple[str, Manifest | None]]:
        """Return the snapshots to continue from: first those without a readable manifest, then the newest, and so on."""

        def belongs(name: str, manifest: Manifest | None) -> bool:
            if manifest is None:
                return any(NamePattern(template).match(name) for template in self.templates)
            return manifest.about.get(_SERIES) == self.label and "error" not in manifest.about

        return [(name, manifest) for name, manifest in store.listing(without) if belongs(name, manifest)]

    def _readable(self, store: Store, without: str | None = None) -> list[tuple[str, Manifest]]:
        return [(name, manifest) for name, manifest in self.listing(store, without) if manifest is not None]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _newest_first(item: tuple[str, Manifest]) -> tuple[int, str]:
    name, manifest = item
    return -manifest.iteration, name


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
