"""The state of another library's scheduler of learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chainring.serializers._restoring import copy_value, is_same_value

_COUNTS = {"last_epoch", "last_lr", "num_bad_epochs", "best", "cooldown_counter"}


@dataclass
class SchedulerPlan:
    """What will be loaded into a scheduler, which fits."""

    scheduler: Any
    state: Any
    report: list[str]

    def apply(self) -> None:
        """Load it."""
        if self.state is not None:
            self.scheduler.load_state_dict(self.state)


def plan_scheduler(path: Path, scheduler: Any, saved: Any, strict: bool) -> SchedulerPlan:
    """Return the saved state of a scheduler of the same kind.

    Raises:
        ValueError: it is of another kind: it has not the same entries.
    """
    own, name = scheduler.state_dict(), type(scheduler).__name__
    theirs = saved.keys() if isinstance(saved, Mapping) else set()
    differ = {str(key) for key in own.keys() ^ theirs if not str(key).startswith("_")}
    if differ or not _has_same_form(own, saved):
        reason = f"only one of them has {min(differ)!r}" if differ else "its lists have another length"
        text = f"the saved scheduler is another one than the {name} here: {reason}; make the one that was saved"
        if strict:
            raise ValueError(f"{path}: {text}, or leave it out by strict=False")
        return SchedulerPlan(scheduler, None, [f"not loaded: {text}"])
    report = [f"scheduler: {name} after {saved.get('last_epoch')} steps"]
    settings = [key for key in own if not str(key).startswith("_") and key not in _COUNTS]
    report += [
        f"scheduler: {key} {saved[key]!r:.60} is taken, the script has {own[key]!r:.60}"
        for key in settings
        if not is_same_value(own[key], saved[key])
    ]
    return SchedulerPlan(scheduler, {**own, **copy_value(dict(saved))}, report)


def _has_same_form(own: Mapping[str, Any], saved: Any) -> bool:
    return all(
        isinstance(saved[key], (list, tuple)) and len(saved[key]) == len(value)
        for key, value in own.items()
        if isinstance(value, list) and key in saved and key in ("base_lrs", "lr_lambdas", "_schedulers")
    )
