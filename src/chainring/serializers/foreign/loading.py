"""Loading a checkpoint of another library into a model or a trainer: first all is checked, then all is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from chainring._naming import unwrap
from chainring.serializers._checkpoint import capture
from chainring.serializers._objects import has_state, is_module
from chainring.serializers.foreign._models import ModelPlan, plan_model
from chainring.serializers.foreign._optimizers import OptimizerPlan, plan_optimizer
from chainring.serializers.foreign._positions import set_position
from chainring.serializers.foreign._schedulers import plan_scheduler
from chainring.serializers.foreign.content import ForeignCheckpoint, checksum
from chainring.serializers.protocol import DictionaryDeserializer

_SEVERAL = "give the updater the same models, or load each model alone by path_in_snapshot"


class _StateOfForeign(DictionaryDeserializer):
    """Loads a trainer from its own state, in which the counts are those of another library's run."""

    gives_way = True


class ForeignPlan:
    """What will be loaded of a checkpoint of another library into a model or a trainer, which fits.

    Nothing is changed, and no other rank asked, until `apply`, which all ranks call, or none.

    Args:
        path: where it was read.
        saved: what was read.
        obj: the model or the trainer.
        part: the dotted or slashed prefix of the names in the checkpoint that are meant; of several models, the name of one.
        strict: whether what does not fit is an error; otherwise it is left as it is.

    Raises:
        TypeError: ``obj`` is neither a model nor a trainer.
        ValueError, RuntimeError: something does not fit.
    """

    def __init__(self, path: Path, saved: ForeignCheckpoint, obj: Any, part: str, strict: bool) -> None:
        self._saved, self._obj = saved, obj
        if is_module(obj):
            models = {"main": unwrap(obj)}
        elif is_trainer(obj):
            models = {name: unwrap(model) for name, model in obj.updater.get_all_models().items()}
        else:
            raise TypeError(
                f"{path} is {saved.kind}, which is loaded into a model or a trainer, not into a {type(obj).__name__}"
            )
        self._parts: list[Any] = []
        self._changes: dict[str, Any] = {}
        plans = _plan_models(path, saved, models, part.strip("/").replace("/", "."), strict)
        self._parts += plans
        self._report = [f"loaded {path}, {saved.kind}", *(line for plan in plans for line in plan.report)]
        if is_module(obj):
            self._report.append(_nothing_of("optimizer", saved.optimizers) or "")
        else:
            self._plan_trainer(path, plans, strict)
        if saved.left:
            self._report.append(f"not loaded: {_listed(saved.left)}")

    def _plan_trainer(self, path: Path, models: list[ModelPlan], strict: bool) -> None:
        saved, trainer, report = self._saved, self._obj, self._report
        self._parts += _plan_optimizers(path, saved, trainer.updater, models, strict, report)
        self._parts += _plan_schedulers(path, saved, trainer, strict, report)
        state = capture(trainer).target  # for the counts, which are the same on all ranks
        iteration = saved.iteration
        if iteration is None and len(steps := {one.step for one in saved.optimizers.values()} - {None}) == 1:
            (iteration,) = steps
            report.append(f"counts: the iteration is {iteration}, as the optimizer counts its updates")
        self._changes = set_position(path, state, saved, iteration, report)
        scaler = "updater/precision/scaler"
        if saved.scaler is not None and state.get(scaler) is not None:
            self._changes[scaler] = saved.scaler
            report.append("loss scaler: taken")
        report.append(
            "missing: random generators, the order of the data, the state of extensions; these begin as the script says"
        )

    def fingerprint(self) -> int:
        """Return a checksum of all that is taken of the checkpoint."""
        return checksum({**vars(self._saved), "left": None})

    def apply(self) -> str:
        """Load it; return in words what was taken and what was not."""
        for part in self._parts:
            part.apply()
        if not is_module(self._obj):
            loaded = _StateOfForeign({**capture(self._obj, comm=self._obj.comm).target, **self._changes})
            loaded.comm = self._obj.comm
            loaded.visit("", self._obj)
        return "\n  ".join(filter(None, self._report))


def is_trainer(obj: Any) -> bool:
    """Return whether an object has the updater and the state of a trainer."""
    return hasattr(getattr(obj, "updater", None), "get_all_models") and hasattr(obj, "entries") and has_state(obj)


def _plan_models(
    path: Path, saved: ForeignCheckpoint, models: Mapping[str, nn.Module], prefix: str, strict: bool
) -> list[ModelPlan]:
    if len(models) == 1:
        ((name, model),) = models.items()
        if prefix in saved.models:
            entries, prefix = saved.models[prefix], ""
        elif len(saved.models) == 1 or "main" in saved.models:
            entries = saved.models.get("main") or next(iter(saved.models.values()))
        else:
            raise ValueError(f"{path} has the models {sorted(saved.models)}; name one by path_in_snapshot, or {_SEVERAL}")
        return [plan_model(path, name, model, entries, prefix, saved.is_ordered, strict)]
    if saved.models.keys() == models.keys():
        parts = {name: (saved.models[name], "") for name in models}
    else:  # one state dict for all of them, each below its name
        parts = {name: (next(iter(saved.models.values())), name) for name in models}
        missing = [name for name, (entries, _) in parts.items() if not any(one.startswith(f"{name}.") for one in entries)]
        if missing or len(saved.models) != 1:
            raise ValueError(f"{path} has the models {sorted(saved.models)}, and the updater {sorted(models)}: {_SEVERAL}")
    return [plan_model(path, name, models[name], *parts[name], saved.is_ordered, strict) for name in models]


def _plan_optimizers(
    path: Path, saved: ForeignCheckpoint, updater: Any, models: list[ModelPlan], strict: bool, report: list[str]
) -> list[OptimizerPlan]:
    own, theirs = updater.get_all_optimizers(), saved.optimizers
    if not theirs:
        report.append("missing: the state of an optimizer, which starts again")
        return []
    names = own.keys() if own.keys() == theirs.keys() else theirs.keys()
    is_named = len(theirs) > 1 and not all(name.isdecimal() or name.startswith("optimizer") for name in theirs)
    if len(own) != len(theirs) or (is_named and own.keys() != theirs.keys()):
        if strict:
            named = f", with the names {', '.join(theirs)}" if is_named else ""
            raise ValueError(
                f"{path} has the state of {len(theirs)} optimizers{named}, and the updater has {len(own)}, {', '.join(own)}"
                ": make as many with the same names, or in the same order, or leave them out by strict=False"
            )
        report.append(_nothing_of("optimizer", theirs) or "")
        return []
    plans = []
    for label, name in zip(own, names, strict=True):
        plan = plan_optimizer(path, label, own[label], theirs[name], models, strict)
        report += plan.report
        plans.append(plan)
    return plans


def _plan_schedulers(path: Path, saved: ForeignCheckpoint, trainer: Any, strict: bool, report: list[str]) -> list[Any]:
    extensions = [entry.extension for entry in trainer.entries if has_state(getattr(entry.extension, "scheduler", None))]
    if not saved.schedulers and not extensions:
        return []
    if not saved.schedulers:
        report.append("missing: the state of a scheduler, which starts again")
        return []
    if not extensions:
        report.append(
            "not loaded: the state of a scheduler; to continue it, extend the trainer with LRScheduler(...) before load"
        )
        return []
    if len(extensions) != len(saved.schedulers):
        if strict:
            raise ValueError(
                f"{path} has the state of {len(saved.schedulers)} schedulers, and the trainer has {len(extensions)}: extend "
                "it with as many in the same order, or leave them out by strict=False"
            )
        report.append("not loaded: the state of the schedulers, of which the trainer has another number")
        return []
    plans = [
        plan_scheduler(path, extension.scheduler, state, strict)
        for extension, state in zip(extensions, saved.schedulers, strict=True)
    ]
    report += [line for plan in plans for line in plan.report]
    return plans


def _nothing_of(role: str, found: Mapping[str, Any]) -> str | None:
    return f"not loaded: the state of {len(found)} {role}{'s' * (len(found) > 1)}" if found else None


def _listed(names: list[str], limit: int = 12) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
