"""Checkpoints of other libraries, each format recognised by what is in it; `plan_loading` is the door to all of them.

First all is checked, then all is changed. Nothing is unpickled but by torch's reader of weights alone, and the metadata
of ``torch.distributed.checkpoint`` by a reader of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from chainring._messages import list_names, printable
from chainring.serializers._saving import capture
from chainring.serializers._values import copy_value, digest_value, is_same_value
from chainring.serializers.foreign import directories, files
from chainring.serializers.foreign._matching import ModelPlan, plan_models, plan_optimizer
from chainring.serializers.foreign.content import ForeignCheckpoint
from chainring.serializers.protocol import DictionaryDeserializer, has_state, is_module, unwrap

_ITERATOR = "updater/iterator:main/"
_COUNTS = {"last_epoch", "last_lr", "num_bad_epochs", "best", "cooldown_counter"}  # of a scheduler, and no settings


def plan_loading(path: Path, obj: Any, path_in_snapshot: str, strict: bool) -> ForeignPlan | None:
    """Return how what another library has saved is loaded into a model or a trainer; ``None`` for what is not recognised."""
    saved = directories.read(path) if path.is_dir() else files.read(path)
    return None if saved is None else ForeignPlan(path, saved, obj, path_in_snapshot, strict)


class ForeignPlan:
    """What will be loaded of a checkpoint of another library into a model or a trainer, which fits.

    Nothing is changed, and no other rank asked, until `apply`, which all ranks call, or none. ``part`` is the dotted or
    slashed prefix of the names in the checkpoint that are meant, of several models the name of one. Unless ``strict``, what
    does not fit is left as it is.
    """

    def __init__(self, path: Path, saved: ForeignCheckpoint, obj: Any, part: str, strict: bool) -> None:
        self._path, self._saved, self._obj, self._strict = path, saved, obj, strict
        if is_module(obj):
            models = {"main": unwrap(obj)}
        elif hasattr(getattr(obj, "updater", None), "get_all_models") and hasattr(obj, "entries") and has_state(obj):
            models = {name: unwrap(model) for name, model in obj.updater.get_all_models().items()}
        else:
            raise TypeError(
                f"{path} is {saved.kind}, which is loaded into a model or a trainer, not into a {type(obj).__name__}"
            )
        self._changes: dict[str, Any] = {}  # in the state of a trainer
        plans = plan_models(path, saved, models, part.strip("/").replace("/", "."), strict)
        self._loads: list[Callable[[], Any]] = [plan.load for plan in plans]
        self._report = [f"loaded {path}, {saved.kind}", *(line for plan in plans for line in plan.report)]
        if is_module(obj):
            self._report += [f"not loaded: the state of optimizer {name!r}" for name in saved.optimizers]
        else:
            self._plan_optimizers(plans)
            self._plan_schedulers()
            self._plan_counts()
        if left := saved.left:
            self._report.append(f"not loaded: {list_names(left, 12)}")

    def fingerprint(self) -> bytes:
        """Return a digest of all that is taken of the checkpoint."""
        optimizers = {name: vars(optimizer) for name, optimizer in self._saved.optimizers.items()}
        return digest_value("checkpoint", {**vars(self._saved), "optimizers": optimizers, "left": None})

    def apply(self) -> str:
        """Load it; return in words what was taken and what was not."""
        for action in self._loads:
            action()
        if not is_module(self._obj):
            own = capture(self._obj, comm=self._obj.comm).target
            loaded = DictionaryDeserializer(own | self._changes)
            loaded.comm, loaded.gives_way = self._obj.comm, True
            loaded.visit("", self._obj)
        return "\n  ".join(map(printable, self._report))

    def _plan_optimizers(self, models: list[ModelPlan]) -> None:
        own, theirs = self._obj.updater.get_all_optimizers(), self._saved.optimizers
        if not theirs:
            self._report.append("missing: the state of an optimizer, which starts again")
            return
        is_named = len(theirs) > 1 and not all(name.isdecimal() or name.startswith("optimizer") for name in theirs)
        if len(own) != len(theirs) or (is_named and own.keys() != theirs.keys()):
            self._leave_out(
                f"the state of the optimizers {', '.join(theirs)}, and the updater has {', '.join(own)}: make as many with "
                "the same names, or in the same order"
            )
            return
        names = own if own.keys() == theirs.keys() else theirs
        for label, name in zip(own, names, strict=True):
            action, report = plan_optimizer(self._path, label, own[label], theirs[name], models, self._strict)
            self._loads.append(action)
            self._report += report

    def _leave_out(self, reason: str) -> None:
        """Refuse what is in the checkpoint and does not fit, or say that it is not loaded."""
        if self._strict:
            raise ValueError(f"{self._path} has {reason}. Or leave it out by strict=False")
        self._report.append(f"not loaded: {reason}")

    def _plan_schedulers(self) -> None:
        saved, report = self._saved.schedulers, self._report
        extensions = [entry.extension for entry in self._obj.entries]
        own = [scheduler for extension in extensions if has_state(scheduler := getattr(extension, "scheduler", None))]
        if len(own) == len(saved):
            for scheduler, state in zip(own, saved, strict=True):
                self._plan_scheduler(scheduler, state)
        elif not saved:
            report.append("missing: the state of a scheduler, which starts again")
        elif not own:
            report.append(
                "not loaded: the state of a scheduler; to continue it, extend the trainer with LRScheduler(...) before load"
            )
        else:
            self._leave_out(
                f"the state of {len(saved)} schedulers, and the trainer has {len(own)}: extend it with as many in the same "
                "order"
            )

    def _plan_scheduler(self, scheduler: Any, saved: Any) -> None:
        """Plan to load the state of a scheduler, which is of the same kind if it has the same entries."""
        own, name = scheduler.state_dict(), type(scheduler).__name__
        theirs = saved if isinstance(saved, Mapping) else {}
        differ = [key for key in own.keys() ^ theirs.keys() if not str(key).startswith("_")]
        for key in ("base_lrs", "lr_lambdas", "_schedulers"):
            if isinstance(own.get(key), list) and key in theirs:
                is_as_long = isinstance(theirs[key], (list, tuple)) and len(theirs[key]) == len(own[key])
                differ += [] if is_as_long else [key]
        if differ:
            self._leave_out(
                f"the state of another scheduler than the {name} here, which differs in {min(map(str, differ))!r}: make the "
                "one that was saved"
            )
            return
        self._report.append(f"scheduler: {name} after {theirs.get('last_epoch')} steps")
        for key in own:
            if not str(key).startswith("_") and key not in _COUNTS and not is_same_value(own[key], theirs[key]):
                self._report.append(f"scheduler: {key} {theirs[key]!r:.60} is taken, the script has {own[key]!r:.60}")
        self._loads.append(partial(scheduler.load_state_dict, {**own, **copy_value(dict(theirs))}))

    def _plan_counts(self) -> None:
        """Plan to set the counts of a trainer, which are the same on all ranks, and its loss scaler."""
        saved, report, state = self._saved, self._report, capture(self._obj).target
        iteration = saved.iteration
        if iteration is None and len(steps := {optimizer.step for optimizer in saved.optimizers.values()} - {None}) == 1:
            (iteration,) = steps
            report.append(f"counts: the iteration is {iteration}, as the optimizer counts its updates")
        if iteration is not None:
            self._changes["updater/iteration"] = iteration
        self._plan_position(state, iteration)
        scaler = "updater/precision/scaler"
        if saved.scaler is not None and state.get(scaler) is not None:
            self._changes[scaler] = saved.scaler
            report.append("loss scaler: taken")
        report.append(
            "missing: random generators, the order of the data, the state of extensions; these begin as the script says"
        )

    def _plan_position(self, state: Mapping[str, Any], iteration: int | None) -> None:
        """Plan to bring the iterator to where the saved run was.

        It may count examples, as `SerialIterator` does, or batches of a loader; any other begins as it is.
        """
        saved, report = self._saved, self._report
        own: dict[str, Any] = {key.removeprefix(_ITERATOR): v for key, v in state.items() if key.startswith(_ITERATOR)}
        size: Any = own.get("size")
        batch_size: Any = own.get("batch_size")
        counts_examples = size is not None and bool(batch_size)
        counts_batches = not counts_examples and {"passes", "taken", "batches", "epoch_length"} <= own.keys()
        number = math.ceil(size / batch_size) if counts_examples else own.get("batches")  # of batches in an epoch
        epoch, batches = saved.epoch, saved.batches
        if epoch is None and iteration is not None and number and state.get("updater/settings/accumulate", 1) == 1:
            epoch, batches = divmod(iteration, number)
            report.append(
                f"missing: the epoch; {epoch} follows from the iteration and the {number} batches of an epoch here"
            )
        counts = {"iteration": iteration, "epoch": epoch, "batches of the next epoch": batches or None}
        known = ", ".join(f"{name} {count}" for name, count in counts.items() if count is not None)
        report.append(f"counts: {known}" if known else "missing: iteration and epoch, which begin at 0")
        if batches is None and saved.fraction is not None and number is not None:
            batches = round(saved.fraction * number)
        if epoch is None:
            report += ["missing: the place in the data, which begin with a first epoch"] if own else []
        elif counts_examples:
            taken = (batches or 0) * batch_size if saved.examples is None else saved.examples
            self._set_position(epoch, taken, size, batch_size, "examples")
        elif counts_batches:
            taken = batches or 0 if saved.examples is None or not batch_size else saved.examples // batch_size
            if taken and (own.get("loader") is not None or own["epoch_length"] not in (None, number)):
                report.append(
                    "not loaded: the place in the epoch, because the loader keeps its own; it begins that epoch again"
                )
                taken = 0
            self._set_position(epoch, taken, number, 1, "batches")
            detail = epoch + (taken / number if number else 0.0)
            counted = {"epoch_detail": detail, "passes": epoch + (taken > 0), "taken": taken}
            self._changes |= {f"{_ITERATOR}{key}": value for key, value in counted.items()}
        elif own:
            report.append(
                "not loaded: the place in the data, because the iterator counts in another way; it begins as it is"
            )

    def _set_position(self, epoch: int, taken: int, length: int | None, step: int, unit: str) -> None:
        """Set the epochs done, and how many examples or batches of the next were taken; a batch is a ``step`` of them."""
        if length is not None and taken and taken >= length:
            raise ValueError(
                f"{self._path}: the saved run had taken {taken} {unit} of an epoch, which has {length} here: use the same "
                "data and the same batch size"
            )
        previous = max(0.0, epoch + (taken - step) / length) if length and (epoch or taken) else None
        position: dict[str, Any] = {"epoch": epoch, "position": taken, "is_new_epoch": taken == 0 and epoch > 0}
        position["previous_epoch_detail"] = previous
        self._changes |= {f"{_ITERATOR}{key}": value for key, value in position.items()}
