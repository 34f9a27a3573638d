"""The settings of a run by path: those that its record tells, and how two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from chainring.training._run_directory import leaves

_RECORDED = ("argv", "git_commit", "device", "threads", "ranks", "config", "versions", "seeds", "optimizers", "models")


class Change(NamedTuple):
    """A setting in which two runs, or two ranks, differ; ``None`` where one of them has none."""

    path: str
    value: Any
    other: Any


class Settings(dict[str, Any]):
    """Settings by path, such as ``config.lr``."""

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Settings:
        """Return those that the record of a run has, with those that a resume has changed."""
        settings = cls(leaf for name in _RECORDED for leaf in leaves(name, record.get(name)))
        plan, needed = record.get("plan"), record.get("reproduction")
        if isinstance(needed, dict):
            settings |= [leaf for name in ("distributions", "environment") for leaf in leaves(name, needed.get(name))]
        if isinstance(plan, dict):
            settings["plan.stop_trigger"] = plan.get("stop_trigger")
            entries = plan.get("extensions")
            for entry in entries if isinstance(entries, list) else ():
                if isinstance(entry, dict):
                    text = f"{entry.get('class')} with {entry.get('trigger')}, priority {entry.get('priority')}"
                    settings[f"plan.{entry.get('name')}"] = text
        for command in record.get("commands", ()):
            if "refused" not in command:
                settings.setdefault(f"commanded after iteration {command['iteration']}", []).append(command["command"])
        for start in record.get("starts", ()):
            changed = start.get("changed")
            for name, values in changed.items() if isinstance(changed, dict) else ():
                settings[f"{name}, changed at iteration {start.get('iteration')}"] = values
        return settings

    def differences(self, other: Mapping[str, Any]) -> list[Change]:
        """Return the settings in which another run differs."""
        pairs = (Change(path, self.get(path), other.get(path)) for path in dict.fromkeys([*self, *other]))
        return [pair for pair in pairs if pair.value != pair.other]
