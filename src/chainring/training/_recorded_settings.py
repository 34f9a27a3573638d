"""The settings of a run that its record ``run.json`` has, as plain values by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = ("argv", "git_commit", "device", "threads", "ranks")
_NESTED = ("config", "versions", "seeds", "optimizers", "models")
_DEEPEST = 20


def recorded_settings(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting, with those that a resume has changed."""
    for name in _PLAIN:
        yield name, record.get(name)
    for name in _NESTED:
        yield from _leaves(name, record.get(name))
    plan = record.get("plan")
    if isinstance(plan, dict):
        yield "plan.stop_trigger", plan.get("stop_trigger")
        entries = plan.get("extensions")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                text = f"{entry.get('class')} with {entry.get('trigger')}, priority {entry.get('priority')}"
                yield f"plan.{entry.get('name')}", text
    for start in record.get("starts", ()):
        changed = start.get("changed")
        for name, values in changed.items() if isinstance(changed, dict) else ():
            yield f"{name}, changed at iteration {start.get('iteration')}", values


def _leaves(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested containers by their paths; a list of plain values is one value."""
    if isinstance(value, dict) and value and depth < _DEEPEST:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item, depth + 1)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value) and depth < _DEEPEST:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item, depth + 1)
    elif value != {}:
        yield path, value
