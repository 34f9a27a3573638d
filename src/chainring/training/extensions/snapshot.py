"""snapshot: the state of a run on the disk, from which it continues."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from chainring.names import without_wrappers
from chainring.serializers.background import Background, Staging
from chainring.serializers.base import has_state, serialize_method
from chainring.serializers.dictionary import References
from chainring.serializers.saving import Encoded, is_module, load, save_tensors, state_of, tensors_of
from chainring.serializers.store import Store, newest
from chainring.training.extension import Extension
from chainring.training.extensions._series import KEY, Series

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

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
        self._staging = Staging()
        self._background = Background()
        self._has_started = False
        self._comm: Any = None

    @property
    def writes(self) -> Sequence[str]:
        return self._series.templates

    def offer(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        self._series.label = self._series.label or trainer.extension_name
        if not self.autoload or trainer.is_resumed:  # who has loaded a snapshot by its name means that one
            return None
        return self.newest(trainer)

    def newest(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        self._guarded(self._background.wait)
        store, name = Store(trainer.out), None
        if trainer.comm.rank == 0:
            name = newest(store, self._series.own(store), lambda text: warnings.warn(text, stacklevel=4))
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
            Background.let_end(others)
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
        in_turn = not trainer.is_out_of_turn
        return lambda: self._series.publish(store, encoded, name, iteration, in_turn, self._comm)

    def _staged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._staging.copy(tensors) if self._asynchronous else tensors

    def _guarded(self, call: Write) -> None:
        try:
            call()
        except OSError as error:
            self.on_failure(error)

    def _encoded(self, trainer: Trainer, comm: Any = None) -> Encoded:
        whole = trainer if self.target is None else self.target
        state = state_of(whole, Path(trainer.out), comm)
        left_out = 0 if self._frozen else _leave_out_frozen(state, whole)
        encoded = Encoded(state)
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
        tensors = tensors_of(self.target)  # on every rank, each of which may hold parts of them
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


def _leave_out_frozen(state: References, whole: Any) -> int:
    """Puts ``None`` in the place of parameters that need no gradient, whose number is returned.

    Where it is loaded later these stay what they are.
    """
    count = 0
    models = {"": whole} if is_module(whole) else {}
    if hasattr(whole, "updater"):
        models = {f"updater/model:{name}/": model for name, model in whole.updater.get_all_models().items()}
    for prefix, model in models.items():
        clean = without_wrappers(model)
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
