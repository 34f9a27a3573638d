"""snapshot: the state of a run on the disk, from which it continues."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from chainring._naming import name_cleaner
from chainring.serializers._background import BackgroundWriter, StagingBuffers
from chainring.serializers._checkpoint import Checkpoint, capture, is_module, load, module_tensors, save_tensors
from chainring.serializers._store import Manifest, Store, find_newest
from chainring.serializers.base import StateCollector, has_state, serialize_method
from chainring.training._run_directory import compile_template
from chainring.training.extension import Extension

if TYPE_CHECKING:
    from chainring.serializers._checkpoint import Checkpoint
    from chainring.training.trainer import Trainer


KEY = "series"
"""Under this key a manifest says to which series a snapshot belongs."""
OUT_OF_TURN = "out of turn"
"""Under this key it says that it was taken because the run ended."""


class Series:
    """A name that holds ``{.updater.iteration}`` is a snapshot's own; any other is a link to ``<name>_iter_<iteration>``.

    Args:
        filename: a format string of the trainer, or a function of it.
        n_retains: how many to keep, -1 for all, or for one where the name is fixed.

    Attributes:
        label: by which manifests name the series; that of a function is given when a run starts.
        is_fixed: whether every snapshot has the same name.

    Raises:
        TypeError: the name is neither a string nor a function.
        ValueError: the name is no format string or leads elsewhere, or ``n_retains`` is neither -1 nor at least 1.
    """

    def __init__(self, filename: Any, n_retains: int = -1) -> None:
        fields = [] if callable(filename) else fields_of(filename)
        if isinstance(n_retains, bool) or not isinstance(n_retains, int) or (n_retains != -1 and n_retains < 1):
            raise ValueError(f"n_retains is how many snapshots to keep, at least 1, or -1 for all; got {n_retains!r}")
        self.filename = filename
        self.label: str | None = None if callable(filename) else filename
        self.is_fixed = not fields and not callable(filename)
        self._has_links = not any(field.endswith(".iteration") for field in fields)
        self._n_retains = 1 if self.is_fixed and n_retains == -1 else n_retains

    @property
    def templates(self) -> Sequence[str]:
        """The names of all that it writes, with fields; of a function none is known, and the manifests tell."""
        if callable(self.filename):
            return ()
        return [self.filename, f"{self.filename}_iter_{{.iteration}}"] if self._has_links else [self.filename]

    def name(self, trainer: Trainer) -> str:
        """What a snapshot is called that is taken now."""
        return str(self.filename(trainer) if callable(self.filename) else self.filename.format(trainer))

    def own(self, store: Store) -> list[str]:
        """The snapshots that may be continued from: first those that cannot be read, then the newest, and so on."""
        return [name for name, _ in self._listing(store)]

    def _listing(self, store: Store, without: str | None = None) -> list[tuple[str, Manifest | None]]:
        """Its snapshots in that order but the one ``without``, each with its manifest if that can be read."""
        patterns = [compile_template(template) for template in self.templates]
        found = []
        for name, manifest in store.listing(without):
            if manifest is None:
                is_own = any(pattern.fullmatch(name) for pattern in patterns)
            else:
                is_own = manifest.about.get(KEY) == self.label and "error" not in manifest.about
            if is_own:
                found.append((name, manifest))
        return found

    def real(self, name: str, iteration: int) -> str:
        """The directory of the snapshot of that name."""
        return f"{name}_iter_{iteration}" if self._has_links else name

    def publish(
        self, store: Store, encoded: Checkpoint, name: str, iteration: int, in_turn: bool = True, comm: Any = None
    ) -> None:
        """Writes a snapshot, links it, and then removes those that are not to be kept.

        One that is taken because the run ends, and not because it is the best, does not take the fixed name.
        """
        real = self.real(name, iteration)
        takes_name = in_turn or not self.is_fixed
        about = {KEY: self.label} if takes_name else {KEY: self.label, OUT_OF_TURN: True}
        encoded.commit(store, real, iteration, about, comm)
        if not takes_name:
            return
        replaced = None
        if real != name:
            replaced = store.link_target(name)
            store.link(name, real)
        self._retain(store, real, None if self.is_fixed else replaced)

    def mend(self, store: Store) -> None:
        """Leads a fixed name to its newest snapshot, where a kill came between the two, or the link went with later ones."""
        if not self.is_fixed:
            return
        newest = next((name for name, is_named in self._readable(store) if is_named), None)
        if newest is not None and store.link_target(self.filename) != newest:
            store.link(self.filename, newest)

    def _retain(self, store: Store, newest: str, replaced: str | None) -> None:
        """Removes what is older than the ``n_retains`` newest, and what a link has left; never the one just committed."""
        own = self._readable(store, without=newest)
        named = [name for name, is_named in own if is_named]
        old = named[self._n_retains - 1 :] if self._n_retains > 0 else []
        for name, is_named in own:
            if name in old or name == replaced or not is_named:
                link = name.rpartition("_iter_")[0]
                if self._has_links and store.link_target(link) == name:
                    os.unlink(store.root / link)
                store.remove(name)

    def _readable(self, store: Store, without: str | None = None) -> list[tuple[str, bool]]:
        """Its snapshots but the one ``without``, the newest first, and whether each has had the fixed name in its turn."""
        listed = self._listing(store, without)
        return [(name, OUT_OF_TURN not in manifest.about) for name, manifest in listed if manifest is not None]


def fields_of(filename: Any) -> list[str]:
    """The fields of a format string that names a file in ``out``.

    Raises:
        TypeError: it is no string.
        ValueError: it is no format string, or leads elsewhere.
    """
    rule = 'filename is a name in out, such as "snapshot_iter_{.updater.iteration}" or "best", or a function of the trainer'
    if not isinstance(filename, str):
        raise TypeError(f"{rule}; got {filename!r}")
    try:
        parts = list(Formatter().parse(filename))
    except ValueError as error:
        raise ValueError(f"{rule}; got {filename!r}: {error}") from None
    if not filename or filename.startswith(".") or any("/" in literal for literal, *_ in parts):
        raise ValueError(f"{rule}; without a slash or a dot at its beginning; got {filename!r}")
    fields = [field for _, field, _, _ in parts if field is not None]
    heads = [re.split(r"[.\[]", field)[0] for field in fields]
    if not set(heads) <= {"", "0"} or (len(heads) > 1 and "" in heads):
        raise ValueError(
            f"{rule}; several fields of it are written {{0.updater.epoch}}_{{0.updater.iteration}}; got {filename!r}"
        )
    return fields


Write = Callable[[], None]


class Snapshot(Extension):
    """Saves the state of the run when its trigger fires, in a directory that is complete or absent.

    It is taken after the last extension of an iteration, so that a run continued from it is bit for bit the run that went
    on. Writing goes on beside the training, which stops only for one copy of the state; one write is under way at a time.
    A write that fails is raised at the next snapshot, or at the end; `on_failure` may let the training go on instead.

    A name that holds ``{.updater.iteration}`` is the snapshot's own. Any other, such as ``"best"``, is a symbolic link to
    the snapshot ``<name>_iter_<iteration>``: the next of the same name is committed first, then the link is replaced by one
    rename, then the one before is removed.

    Args:
        filename: the name in the trainer's ``out``: a format string of the trainer, or a function of it.
        target: what to save in place of the whole trainer.
        condition: called without arguments; where it returns false, nothing is saved.
        n_retains: how many to keep, -1 for all, or for one where the name is fixed. Older ones are removed after the next is
            on the disk; nothing is removed that this extension has not written.
        autoload: whether a run begins with the newest one that is sound, before anything is initialized. Damaged ones are
            warned about. One is then also taken when the stop trigger ends the run.
        snapshot_on_error: whether the state is also saved when the run fails, as ``<name>_error``, which is never loaded by
            itself: an update may have been cut in half.
        asynchronous: whether it is written beside the training.
        frozen: whether parameters that need no gradient are saved. Left out, they stay what they are when it is loaded.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: ``n_retains`` is neither -1 nor at least 1, or the file name is none.
    """

    trigger = (1, "epoch")
    priority = -100
    skip_on_resume = True
    is_snapshot = True
    default_name = "snapshot"

    def __init__(
        self,
        filename: Any = "snapshot_iter_{.updater.iteration}",
        *,
        target: Any = None,
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
        self._series = Series(filename, n_retains)
        self.has_fixed_name = self._series.is_fixed
        self.target = target
        self._condition = condition
        self._saves_errors = snapshot_on_error
        self._asynchronous = asynchronous
        self._frozen = frozen
        self._staging = StagingBuffers()
        self._background = BackgroundWriter()
        self._has_started = False
        self._comm: Any = None

    @property
    def writes(self) -> Sequence[str]:
        return self._series.templates

    def newest(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        self._series.label = self._series.label or trainer.extension_name
        self._guarded(self._background.wait)
        store, name = Store(trainer.out), None
        if trainer.comm.rank == 0:
            name = find_newest(store, self._series.own(store), lambda text: warnings.warn(text, stacklevel=4))
        name = trainer.comm.broadcast_object(name)
        if name is None:
            return None
        path = store.root / name
        if self.target is not None:
            load(path, self.target)
            return None
        return store.manifest(name).iteration, lambda: load(path, trainer)

    def initialize(self, trainer: Trainer) -> None:
        self._series.label = self._series.label or trainer.extension_name
        self._has_started = True
        if trainer.comm.size > 1 and self._comm is None:
            self._comm = trainer.comm.beside()
        place = Path(trainer.out) / self._series.filename if self._series.is_fixed else None
        if place is not None and os.path.lexists(place) and not place.is_symlink():
            raise FileExistsError(f"{place} is in the way of the snapshots of that name; move it, or give another filename")
        if trainer.comm.rank == 0:
            self._series.mend(Store(trainer.out))

    def __call__(self, trainer: Trainer) -> None:
        if not trainer.comm.broadcast_object(self._condition is None or bool(self._condition())):
            return
        self._guarded(self._background.wait)
        os.makedirs(trainer.out, exist_ok=True)  # called by hand before the run, to keep the state that it starts from
        write = self._prepared(trainer)
        if write is None:
            return
        # Who continues from this one does not take the others of its iteration again: they are on the disk before it.
        others = [other._background for other in trainer.snapshots if isinstance(other, Snapshot)]
        if self._asynchronous and self._has_started:  # called by hand, nobody waits, and a run sweeps what is unfinished
            self._background.start(write, after=others)
        else:
            BackgroundWriter.wait_for(others)
            self._guarded(write)

    def _prepared(self, trainer: Trainer) -> Write | None:
        """Takes the state down and returns what writes it; ``None`` where it has been saved already."""
        iteration, store, comm = trainer.updater.iteration, Store(trainer.out), trainer.comm
        name = comm.broadcast_object(self._series.name(trainer))
        if comm.broadcast_object(store.holds(self._series.real(name, iteration), iteration)):
            return None  # at the end of this very iteration, by the run before or out of turn
        encoded = self._encoded(trainer, comm)
        if comm.rank != 0 and not encoded.is_sharded:
            return None
        encoded.tensors = self._staged(encoded.tensors)
        if comm.rank != 0:
            return lambda: encoded.commit(store, name, iteration, comm=self._comm)
        in_turn = not trainer.is_final_snapshot
        return lambda: self._series.publish(store, encoded, name, iteration, in_turn, self._comm)

    def _staged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._staging.copy(tensors) if self._asynchronous else tensors

    def _guarded(self, call: Write) -> None:
        try:
            call()
        except OSError as error:
            self.on_failure(error)

    def _encoded(self, trainer: Trainer, comm: Any = None) -> Checkpoint:
        whole = trainer if self.target is None else self.target
        state = capture(whole, Path(trainer.out), comm)
        left_out = 0 if self._frozen else _leave_out_frozen(state, whole)
        encoded = Checkpoint(state)
        if left_out:
            encoded.about["left out"] = f"{left_out} parameters that need no gradient, by frozen=False"
        return encoded

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        if self._saves_errors and trainer.comm.rank == 0:
            store, iteration = Store(trainer.out), trainer.updater.iteration
            wanted = free = f"{self._series.real(self._series.name(trainer), iteration)}_error"
            number = 0
            while os.path.lexists(store.root / free):  # of an earlier attempt
                number += 1
                free = f"{wanted}_{number}"
            about = {KEY: self._series.label, "error": f"{type(exception).__name__}: {exception}"}
            encoded = self._encoded(trainer)
            if encoded.is_sharded:
                raise RuntimeError("snapshot_on_error cannot save parts of tensors, because the other ranks have stopped")
            encoded.commit(store, free, iteration, about)

    def finalize(self) -> None:
        self._has_started = False
        self._guarded(self._background.close)

    def on_failure(self, error: OSError) -> None:
        """What is done about a snapshot that could not be written: the error is raised, and the training stops.

        Override it, or assign a function, to let the training go on::

            taken = extensions.snapshot()
            taken.on_failure = lambda error: warnings.warn(f"{error}; training goes on")
        """
        raise error


class ModelFile(Snapshot):
    """Saves a model as `serializers.save` does, in one safetensors file that replaces an earlier one of that name."""

    @property
    def writes(self) -> Sequence[str]:
        return (self._series.filename,) if isinstance(self._series.filename, str) else ()

    def initialize(self, trainer: Trainer) -> None:
        """A file of that name is replaced."""
        self._has_started = True

    def _prepared(self, trainer: Trainer) -> Write | None:
        path = Path(trainer.out) / self._series.name(trainer)
        tensors = module_tensors(self.target)  # on every rank, each of which may hold parts of them
        if trainer.comm.rank != 0:
            return None
        tensors = self._staged(tensors)
        return lambda: save_tensors(path, tensors)


def _check_target(target: Any) -> None:
    if serialize_method(target) is None and not has_state(target):
        raise TypeError(
            "target is what to save: it has serialize, or state_dict and load_state_dict, and "
            f"{type(target).__name__} has neither"
        )


def _leave_out_frozen(state: StateCollector, whole: Any) -> int:
    """Puts ``None`` in the place of parameters that need no gradient, whose number is returned.

    Where it is loaded later these stay what they are.
    """
    count = 0
    models = {"": whole} if is_module(whole) else {}
    if hasattr(whole, "updater"):
        models = {f"updater/model:{name}/": model for name, model in whole.updater.get_all_models().items()}
    for prefix, model in models.items():
        clean = name_cleaner(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            path = prefix + clean(name).replace(".", "/")
            if not parameter.requires_grad and path in state.target:
                state.target[path] = None
                count += 1
    return count


def snapshot_object(target: Any, filename: Any, *, asynchronous: bool = True) -> Snapshot:
    """Saves one object when its trigger fires: a model as one file, anything else as a directory, see `serializers.save`.

    Args:
        target: a module, or what has ``serialize``, or ``state_dict`` and ``load_state_dict``.
        filename: the name in the trainer's ``out``: a format string of the trainer, or a function of it. What has that name
            already is replaced.
        asynchronous: whether it is written beside the training.

    Raises:
        TypeError: the target has no state, or the file name is of another kind.
    """
    _check_target(target)
    kind = ModelFile if is_module(target) else Snapshot
    extension = kind(filename, target=target, asynchronous=asynchronous)
    extension.default_name = "snapshot_object"
    return extension


snapshot = Snapshot
