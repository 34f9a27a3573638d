"""snapshot: saves the state of a run as a checkpoint, from which the run can be resumed."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, Literal, NamedTuple

import torch

from chainring._checks import is_integer, plain
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import is_sharded
from chainring._hints import SNAPSHOT, hinting
from chainring._messages import OneTimeWarning, info, warn
from chainring.serializers._loading import load_snapshot
from chainring.serializers._models import weights_to_use
from chainring.serializers._saving import (
    BackgroundWriter,
    Checkpoint,
    StagingBuffers,
    capture,
    checkpoint_of_copies,
    is_saved_as_file,
    module_tensors,
    save_tensors,
)
from chainring.serializers._store import CorruptError, Manifest, SavedSnapshot, Snapshots, find_newest
from chainring.serializers.protocol import has_state, is_module, name_cleaner, serialize_method, without_collections
from chainring.training._entry import Entry
from chainring.training._run_directory import match_name
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.triggers.base import TriggerLike
from chainring.training.triggers.best_value import RankingTrigger, require_mode

Filename = str | Callable[[Trainer], str]
Write = Callable[[], None]

# Keys of a manifest.
_SERIES = "series"
_FINAL = "out of turn"  # only because the run ended, and not because a trigger fired
_TAKERS = "taken by"  # where several extensions have one name, those whose triggers fired
_NAN = "NaN"  # where a parameter or buffer of a model is
_VALUES = "values"  # by key, the means by which the best are kept

_WITH_NAN = torch.float16, torch.bfloat16, torch.float32, torch.float64

_RULE = (
    'filename is a name in out, without a slash or a dot at its beginning, such as "snapshot_iter_{.updater.iteration}", '
    '"best" or, with several fields, "{0.updater.epoch}_{0.updater.iteration}", or a function of the trainer'
)


class Snapshot(Extension):
    """Saves the state of the run as a checkpoint when its trigger fires, in a directory that is complete or absent.

    It is taken after the last extension of an iteration, so that a run resumed from it is bit-exact with an uninterrupted
    one. Files are written in the background, one snapshot at a time, and training pauses only to copy the state. An error
    of a write is raised at the next snapshot, or at the end of the run; with `on_failure`, training can continue instead.
    State that cannot be saved ends the run after its first update.

    A name with ``{.updater.iteration}`` belongs to one snapshot. Any other name, such as ``"best"``, is a symbolic link
    to the snapshot ``<name>_iter_<iteration>``, which is replaced by a rename when the next one is committed. Several
    extensions may have the same name and different triggers: if they fire in the same iteration, one snapshot is written,
    which is kept while at least one of them retains it.

    Example::

        trainer.extend(extensions.snapshot(n_retains=3, autoload=True), trigger=(1, "epoch"))
        best = triggers.MinValueTrigger("validation/main/loss")
        trainer.extend(extensions.snapshot("best"), trigger=best)

    Args:
        filename: the name in the trainer's ``out``: a format string of the trainer, or a function of it.
        target: the object to save instead of the whole trainer; a model with the weights of its optimizer's ``eval()``, if
            the optimizer, as a schedule-free one, trains others.
        condition: called without arguments; nothing is saved if it returns false.
        n_retains: the number of snapshots to keep; -1 keeps all, or one if the name is fixed. Older ones are removed
            after the next is on the disk; only snapshots that this extension has written are removed.
        autoload: True to resume from the newest undamaged snapshot when a run starts, with a warning of damaged ones, and
            to take one also when the stop trigger ends the run.
        snapshot_on_error: True to save the state also when the run fails, as ``<name>_error``, which is never loaded
            automatically: the update may be incomplete.
        asynchronous: True to write the files in the background.
        frozen: False to leave out parameters that need no gradient; loading then does not change them.
        keep_best: the key of a reported value and a number, such as ``("validation/main/loss", 3)``: so many are kept of all
            that were taken, those with the best means of the value since the trigger last fired. Of equal ones the earlier
            is better, and what is not finite never is. A fixed name leads to the best, and is absent as long as none has a
            value. One that is not among them is not written, except for the newest ``n_retains``, by default none, or with
            ``autoload`` one.
        mode: ``"max"`` if greater is better, ``"min"`` if less; ``"auto"`` where the key of ``keep_best`` says it, as for
            `EarlyStoppingTrigger`.

    Raises:
        TypeError: ``keep_best`` is not a key and an integer.
        ValueError: a number is below 1, or whether greater or less is better does not follow from the key; or, when the run
            starts, ``snapshot_on_error`` with a sharded model, since the other ranks have stopped by the time of an error.

    Attributes:
        saved_iteration: that of the newest snapshot of the trainer that this run has completely written, or ``None``.
    """

    trigger: TriggerLike = (1, "epoch")
    priority = -100
    skip_on_resume = True
    is_snapshot = True
    default_name = "snapshot"
    writes: Sequence[str] = ()

    @hinting(SNAPSHOT)
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
        keep_best: tuple[str, int] | None = None,
        mode: Literal["auto", "max", "min"] = "auto",
    ) -> None:
        if condition is not None and not callable(condition):
            raise TypeError(f"condition is a function without arguments, got {type(condition).__name__}")
        if target is not None:
            _check_target(target)
        if not is_integer(n_retains) or (n_retains != -1 and n_retains < 1):
            raise ValueError(f"n_retains is how many snapshots to keep, at least 1, or -1 for all; got {n_retains!r}")
        if keep_best is None and mode != "auto":
            raise ValueError(
                f'mode says how keep_best ranks: give keep_best=("validation/main/loss", 3), or no mode; got {mode!r}'
            )
        self.autoload = autoload
        self.n_retains = plain(n_retains)
        self.keep_best = None if keep_best is None else _best_of(keep_best, mode, self.n_retains, autoload)
        self.target = target
        self.snapshot_on_error = snapshot_on_error
        self.asynchronous = asynchronous
        self.frozen = frozen
        self.saved_iteration: int | None = None
        self._condition = condition
        self._series = Series(filename)  # of several with one name, each has that of the first
        self.writes, self.has_fixed_name = self._series.templates, self._series.is_fixed
        self._staging = StagingBuffers()
        self._background = BackgroundWriter()
        self._has_started = False

    @property
    def ranked_key(self) -> str | None:
        return None if self.keep_best is None else self.keep_best.key

    def newest(self, trainer: Trainer) -> tuple[int, Callable[[], None]] | None:
        self._join_series(trainer)
        self.wait()
        store, comm = trainer.store, trainer.comm
        while True:
            name = find_newest(store, self._series.listing(store), warn, self._series.damaged) if comm.is_main else None
            name = comm.broadcast_object(name)
            if name is None:
                return None
            saved = store.snapshot(name)
            if self.target is None:
                return saved.read_manifest().iteration, partial(self._load, saved, trainer, comm)
            with suppress(CorruptError):
                self._load(saved, self.target, comm)
                return None

    def _load(self, saved: SavedSnapshot, obj: Any, comm: Communicator) -> None:
        """Load a snapshot, or note that it is damaged, on all ranks alike."""
        try:
            load_snapshot(saved, obj, comm)
            if self.target is None and comm.is_main:
                updater = obj.updater
                nan = ", with NaN among its parameters" * (_NAN in saved.read_manifest().about)
                info(f"resumed from {saved}, after iteration {updater.iteration}, epoch {updater.epoch_detail:.4g}{nan}")
        except CorruptError as error:
            self._series.damaged.add(saved.name)
            if comm.is_main:
                warn(f"snapshot {saved.name!r} is skipped: {error}")
            raise
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            error.add_note(
                f"while {saved} was loaded, from which the run would continue. If the script has changed: give another out "
                "to begin again, and serializers.load(snapshot, model, strict=False) for the parameters that fit"
            )
            raise

    def initialize(self, trainer: Trainer) -> None:
        siblings, series, world = self._join_series(trainer), self._series, trainer.comm.world
        try:
            _ = callable(series.filename) or series.filename.format(trainer)
        except (AttributeError, LookupError) as error:
            example = '"snapshot_iter_{.updater.iteration}"'
            raise ValueError(
                f"filename={series.filename!r} has a field that a trainer lacks: {error}; write {example}"
            ) from None
        self._has_started = True
        for name, model in trainer.updater.get_all_models().items() if self.snapshot_on_error and world.size > 1 else ():
            if any(map(is_sharded, model.parameters())):
                raise ValueError(
                    f"snapshot_on_error=True saves the state when a rank has failed, and model {name!r} is sharded over "
                    f"{world.size} ranks, of which the others have stopped then; leave it out, and take snapshots more often"
                )
        if world.size > 1 and series.comm is None:
            # One for all snapshots of a run, which are written one after the other, in the same order on each rank.
            shared = (entry.extension._series.comm for entry in trainer.entries if isinstance(entry.extension, Snapshot))
            series.comm = next((comm for comm in shared if comm is not None), None) or world.beside()
        if any(entry.extension.frozen != self.frozen for entry in siblings):
            raise ValueError(f"snapshots of one name save the same: give frozen= to all of {series.label!r}, or to none")
        if siblings[0].extension is not self:
            return
        begun, series.asked, series.begun = series.begun, set(), None
        if trainer.comm.survives and begun is not None:
            is_lost = trainer.comm.is_main and not trainer.store.holds(*begun)  # with rank 0, before it was written
            if trainer.comm.broadcast_object(is_lost):
                trainer.interruption.replace_snapshot()
        if not trainer.comm.is_main:
            return
        store, link = trainer.store, str(series.filename)
        if series.is_fixed and store.files.exists(link) and store.link_target(link) is None:
            raise FileExistsError(
                f"{store}/{link} is in the way of the snapshots of that name; move it, or give another filename"
            )
        series.known = None  # of another run, or before later ones were moved away
        known = {} if series.keeps_all else series.there(store)  # now, and not while the run goes on
        leading = series.leading(known) if series.is_fixed else None
        if leading is not None and store.link_target(link) != leading:  # a kill or a person undid that
            store.link(link, leading)

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
        kept = {entry.name: entry.extension for entry in siblings} or {str(trainer.extension_name): self}  # by hand
        series.retention = {name: each.keep_best or Retention(each.n_retains) for name, each in kept.items()}
        limits = [retention.newest for retention in series.retention.values()]
        series.keeps_all = not series.has_links and max(limits) < 0
        series.label = series.label or next(iter(series.retention))
        return siblings

    def __call__(self, trainer: Trainer) -> None:
        siblings, name, series = self._join_series(trainer), str(trainer.extension_name), self._series
        if name in series.asked:
            series.asked.discard(name)
            return
        # The first extension of a series that is due asks all of them, and takes one snapshot for those that want it.
        due = {name: self} | {entry.name: entry.extension for entry in siblings if entry.is_due}
        series.asked, series.values = due.keys() - {name}, {}
        choosy = [taker for taker, extension in due.items() if extension._condition is not None or extension.keep_best]
        takers = [taker for taker in due if taker not in choosy or due[taker]._is_wanted(trainer, taker)]
        if not takers:
            return
        self._guard(self._background.wait)
        if trainer.comm.is_main:  # it may be called by hand before the run, to keep the state that it starts from
            os.makedirs(trainer.out, exist_ok=True)
        write = self._prepare(trainer, siblings, takers)
        if write is None:
            return
        # A run that continues from this one does not take the others of its iteration again: they are on the disk before it.
        others = [entry.extension._background for entry in trainer.entries if isinstance(entry.extension, Snapshot)]
        if self.asynchronous and self._has_started:  # called by hand, nobody waits, and a run removes what is unfinished
            self._background.start(write, after=others)
        else:
            BackgroundWriter.wait_for(others)
            self._guard(write)

    def _is_wanted(self, trainer: Trainer, name: str) -> bool:
        """Return whether a snapshot is to be taken now that it is due."""
        condition, iteration, comm = self._condition, trainer.updater.iteration, trainer.comm
        if condition is not None and not comm.broadcast_object(bool(condition())):
            return False
        if self.keep_best is None or trainer.is_final_snapshot:
            return True
        trigger = next((entry.trigger for entry in trainer.entries if entry.name == name), None)
        value = trigger.value_of(iteration) if isinstance(trigger, RankingTrigger) else None
        if value is None:
            return True
        if math.isfinite(value):
            self._series.values[self.keep_best.key] = value
        if not comm.is_main:
            return bool(comm.broadcast_object(None))
        BackgroundWriter.wait_for([entry.extension._background for entry in self._join_series(trainer)])
        return bool(comm.broadcast_object(self._series.would_keep(trainer.store, iteration, name)))

    def wait(self) -> None:
        """Wait until the current snapshot is on the disk; if it cannot be written, `on_failure` is called."""
        self._guard(self._background.wait)

    def _prepare(self, trainer: Trainer, siblings: list[Entry], takers: list[str]) -> Write | None:
        """Copy the state and return the call that writes it for all ``takers``; ``None`` if it has been saved already."""
        iteration, store, comm, series = trainer.updater.iteration, trainer.store, trainer.comm, self._series
        (name, directory), is_final = series.names(trainer), trainer.is_final_snapshot
        is_saved = False
        if series.begun in (None, (directory, iteration)):  # since the run before, or a final one of this very iteration
            BackgroundWriter.wait_for([entry.extension._background for entry in siblings])
            is_saved = comm.is_main and store.holds(directory, iteration)
        if comm.world.size > 1:
            directory, is_saved = comm.broadcast_object((directory, is_saved))
        if is_saved:
            self.saved_iteration = iteration if self.target is None else None
            return None
        series.begun = directory, iteration
        weights = weights_to_use(trainer.updater) if is_module(self.target) else nullcontext(False)
        with without_collections(), weights as is_changed:
            checkpoint = self._capture(trainer, comm, is_copied=self.asynchronous or is_changed)
        values = series.values

        def write_part() -> None:
            checkpoint.commit(store, directory, iteration, comm=series.comm)

        def write() -> None:
            series.publish(store, checkpoint, name, directory, iteration, takers, is_final, values)
            self.saved_iteration = iteration if self.target is None else None

        if comm.is_main:
            return write
        return write_part if checkpoint.is_sharded else None

    def _capture(self, trainer: Trainer, comm: Communicator | None = None, is_copied: bool = False) -> Checkpoint:
        root = trainer if self.target is None else self.target
        state = capture(root, Path(trainer.out), comm)
        models: dict[str, Any] = {}
        if not self.frozen and hasattr(root, "updater"):
            models = {f"updater/model:{name}/": model for name, model in root.updater.get_all_models().items()}
        elif not self.frozen and is_module(root):
            models = {"": root}
        left_out = 0
        for prefix, model in models.items():
            clean = name_cleaner(model)
            for name, parameter in model.named_parameters(remove_duplicate=False):
                path = prefix + clean(name).replace(".", "/")
                if not parameter.requires_grad and path in state.target:
                    state.target[path] = None  # which leaves the parameter alone on loading
                    left_out += 1
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
            store, (_, directory) = trainer.store, self._series.names(trainer)
            about = {_SERIES: self._series.label, "error": f"{type(exception).__name__}: {exception}"}
            checkpoint, name = self._capture(trainer), f"{directory}_error"
            counts = itertools.count(1)
            while store.files.exists(name):  # that of an earlier attempt
                name = f"{directory}_error_{next(counts)}"
            checkpoint.commit(store, name, trainer.updater.iteration, about)

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
    """
    _check_target(target)
    cls = ModelFile if is_saved_as_file(target) else Snapshot
    extension = cls(filename, target=target, asynchronous=asynchronous)
    extension.default_name = "snapshot_object"
    return extension


class ModelFile(Snapshot):  # snapshots record this name as the class of the extension
    """Saves a model like `serializers.save`, as one safetensors file that replaces an earlier one of that name."""

    def __init__(self, filename: Filename, **settings: Any) -> None:
        super().__init__(filename, **settings)
        self.writes = self.writes[:1]  # and no snapshots to which it links

    def initialize(self, trainer: Trainer) -> None:
        self._has_started = True

    def _prepare(self, trainer: Trainer, siblings: list[Entry], takers: list[str]) -> Write | None:
        path = Path(trainer.out) / self._series.names(trainer)[0]
        with weights_to_use(trainer.updater) as is_changed:
            tensors = module_tensors(self.target)
            if any(map(is_sharded, tensors.values())):  # written at once: the next update would change it
                self._guard(lambda: save_tensors(path, tensors, path.name))
                return None
            if trainer.comm.survives:  # nobody could write it later, if rank 0 is lost before it is there
                if trainer.comm.is_main:
                    self._guard(lambda: save_tensors(path, tensors))
                    trainer.store.files.persist(path)
                trainer.comm.barrier()
                return None
            if not trainer.comm.is_main:
                return None
            staged = self._staging.copy(tensors) if self.asynchronous or is_changed else tensors
        return lambda: save_tensors(path, staged)


def _check_target(target: object) -> None:
    if serialize_method(target) is None and not has_state(target):
        raise TypeError(
            "target is an object with serialize, or with state_dict and load_state_dict, and "
            f"{type(target).__name__} has neither"
        )


class Series:
    """The snapshots of one name and target, which one or several extensions take, and what is kept of them."""

    def __init__(self, filename: Filename) -> None:
        fields: list[str] = []
        if not callable(filename):
            if not isinstance(filename, str):
                raise TypeError(f"{_RULE}; got {filename!r}")
            try:
                parsed = list(Formatter().parse(filename))
            except ValueError as error:
                raise ValueError(f"{_RULE}; got {filename!r}: {error}") from None
            fields = [field for _, field, _, _ in parsed if field is not None]
            heads = [re.split(r"[.\[]", field)[0] for field in fields]
            is_name = filename and not filename.startswith(".") and not any("/" in literal for literal, *_ in parsed)
            if not is_name or not set(heads) <= {"", "0"} or (len(heads) > 1 and "" in heads):
                raise ValueError(f"{_RULE}; got {filename!r}")
        self.filename = filename
        # The name of the series in manifests; of a function, whose snapshots these tell, that of the first extension.
        self.label: str | None = None if callable(filename) else filename
        self.is_fixed = not fields and not callable(filename)  # all have the same name, a link to the newest
        # The names of its snapshots lack the iteration, so that each is a link to the newest of that name.
        self.has_links = not any(field.endswith(".iteration") for field in fields)
        names = [] if callable(filename) else [filename, f"{filename}_iter_{{.iteration}}"]
        self.templates: Sequence[str] = names if self.has_links else names[:1]
        self.retention: dict[str, Retention] = {}  # by the names of the extensions
        self.keeps_all = False  # and nothing leads to the newest
        self.values: dict[str, float] = {}  # by key, the means with which those of an iteration are ranked
        self.asked: set[str] = set()  # extensions for which another has asked, and taken one, in this iteration
        self.begun: tuple[str, int] | None = None  # the name and the iteration of the newest that the run takes
        self.comm: Communicator | None = None  # of the ranks while they write
        self.damaged: set[str] = set()  # as was found when they were loaded
        self._warning = OneTimeWarning()
        # By name, since the run began: a commit that read every manifest would cost the more, the more are kept.
        self.known: dict[str, Manifest] | None = None

    def names(self, trainer: Trainer) -> tuple[str, str]:
        """Return the name of a snapshot that is taken now, or that of its link, and the name of its directory."""
        name = str(self.filename(trainer) if callable(self.filename) else self.filename.format(trainer))
        return name, f"{name}_iter_{trainer.updater.iteration}" if self.has_links else name

    def publish(
        self,
        store: Snapshots,
        checkpoint: Checkpoint,
        name: str,
        directory: str,
        iteration: int,
        takers: Sequence[str],
        is_final: bool,
        values: Mapping[str, float],
    ) -> None:
        """Write a snapshot that the extensions ``takers`` take, link it, and then remove those that none is to keep.

        One that is taken because the run ends, and not because it is the best, does not take the fixed name.
        """
        is_linked = not (is_final and self.is_fixed)
        about: dict[str, Any] = {_SERIES: self.label} if is_linked else {_SERIES: self.label, _FINAL: True}
        if len(self.retention) > 1:
            about[_TAKERS] = sorted(takers)
        if values:
            about[_VALUES] = dict(values)
        if (nan := _find_nan(checkpoint)) is not None:
            about[_NAN] = nan
            self._warning.give(
                f"{nan} is NaN in snapshot {directory!r}, of iteration {iteration}. The newest without NaN is kept "
                "besides; extensions.FailOnNonNumber() ends a run, or goes back, at the first"
            )
        checkpoint.commit(store, directory, iteration, about, self.comm)
        if self.known is not None:
            self.known[directory] = Manifest(directory, iteration, {}, about)
        if not is_linked or self.keeps_all:
            return
        known = self.there(store) if self.known is None else self.known
        leading = self.leading(known) if self.is_fixed else directory
        if leading not in (None, name):
            store.link(name, leading)
        unwanted = known.keys() - self._kept(known) - {directory}
        if not unwanted:
            return
        number = len(known)
        known = self.there(store)
        if len(known) < number:  # a person has removed some, in whose place older ones are kept
            unwanted = known.keys() - self._kept(known) - {directory}
        for old in sorted(unwanted, key=lambda old: known[old].iteration):
            del known[old]
            if self.has_links and store.link_target(_link_of(old)) == old:
                store.files.link(_link_of(old), None)
            store.remove(old)

    def would_keep(self, store: Snapshots, iteration: int, taker: str) -> bool:
        """Return whether a snapshot that an extension takes now, with the values at hand, would be kept."""
        about = {_SERIES: self.label, _TAKERS: [taker], _VALUES: self.values}
        return "" in self._kept(self.there(store) | {"": Manifest("", iteration, {}, about)})

    def leading(self, known: Mapping[str, Manifest]) -> str | None:
        """Return the snapshot to which a fixed name leads: the best where they are ranked, else the newest."""
        in_turn = _in_turn(known)
        ranked = [retention.rank(in_turn, known) for retention in self.retention.values() if retention.best]
        return next((best[0] for best in ranked or [in_turn] if best), None)

    def _kept(self, known: Mapping[str, Manifest]) -> set[str]:
        """Return the snapshots that one of the extensions is to keep: the newest, the best, or all.

        Each keeps of what it has taken itself, and of what none of those that are registered has taken. A name that is not
        fixed, and a link, leads to one of its snapshots, the newest, which alone counts.
        """
        in_turn = _in_turn(known)
        if self.has_links and not self.is_fixed:
            newest_of = {_link_of(name): name for name in reversed(in_turn)}
            in_turn = [name for name in in_turn if newest_of[_link_of(name)] == name]
        kept = set[str]()
        for extension, retention in self.retention.items():
            taken = []
            for name in in_turn:
                takers = self.retention.keys() & known[name].about.get(_TAKERS, ())
                if not takers or extension in takers:
                    taken.append(name)
            newest = retention.newest if retention.newest >= 0 else 1 if self.is_fixed else len(taken)
            sound = (name for name in taken if _NAN not in known[name].about)
            best = retention.rank(taken, known)[: retention.best] if retention.best else []
            kept.update(taken[:newest], itertools.islice(sound, min(newest, 1)), best)
        return kept

    def there(self, store: Snapshots) -> dict[str, Manifest]:
        """Return the manifests of its snapshots, read once in a run, without those that a person has removed since."""
        if self.known is None:
            self.known = {name: manifest for name, manifest in self.listing(store).items() if manifest is not None}
        for removed in self.known.keys() - store.files.folders():
            del self.known[removed]
        return self.known

    def listing(self, store: Snapshots) -> dict[str, Manifest | None]:
        """Return the snapshots to continue from: first those without a readable manifest, then the newest, and so on."""
        return {
            name: manifest
            for name, manifest in store.listing(copies=False)
            if (manifest is None and any(match_name(template, name) for template in self.templates))
            or (manifest is not None and manifest.about.get(_SERIES) == self.label and "error" not in manifest.about)
        }


class Retention(NamedTuple):
    """Which snapshots an extension keeps: the newest, and the best of those that have a value."""

    newest: int  # their number, -1 for all
    key: str = ""  # of the value by which they are ranked
    best: int = 0
    sign: int = 1  # -1 if less is better

    def rank(self, names: Iterable[str], known: Mapping[str, Manifest]) -> list[str]:
        """Return those with a value that is a number, the best first, and of equal ones the earlier."""
        values = {}
        for name in names:
            value = known[name].about.get(_VALUES, {}).get(self.key)
            if value is not None:
                values[name] = -self.sign * value, known[name].iteration
        return sorted(values, key=values.__getitem__)


def _in_turn(known: Mapping[str, Manifest]) -> list[str]:
    """Return the snapshots that a trigger has asked for, the newest first."""
    names = [name for name, manifest in known.items() if _FINAL not in manifest.about]
    return sorted(names, key=lambda name: (-known[name].iteration, name))


def _find_nan(checkpoint: Checkpoint) -> str | None:
    """Return the name of the first tensor with NaN of a model, among those that this rank writes; infinity may be a mask."""
    prefix = "updater/model:" if any(name.startswith("updater/") for name in checkpoint.tensors) else ""
    for name, tensor in checkpoint.tensors.items():
        if name.startswith(prefix) and tensor.dtype in _WITH_NAN and tensor.numel() and bool(tensor.amax().isnan()):
            return name.partition("\0")[0]
    return None


def _best_of(keep_best: object, mode: str, n_retains: int, autoload: bool) -> Retention:
    rule = 'keep_best is the key of a reported value and how many to keep, such as ("validation/main/loss", 3)'
    key, count = keep_best if isinstance(keep_best, (tuple, list)) and len(keep_best) == 2 else (None, None)
    if not isinstance(key, str) or not is_integer(count):
        raise TypeError(f"{rule}; got {keep_best!r}")
    if count < 1:
        raise ValueError(f"{rule}, at least 1; got {keep_best!r}")
    sign = 1 if require_mode(key, mode, f"snapshot(keep_best=({key!r}, {count})") == "max" else -1
    return Retention(n_retains if n_retains > 0 else int(autoload), key, int(count), sign)


def _link_of(name: str) -> str:
    """Return the link under which a snapshot stands, or has stood."""
    return name.rpartition("_iter_")[0]
