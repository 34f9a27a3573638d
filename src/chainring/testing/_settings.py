"""The settings in which two runs differ, by what they have left in run.json and in their snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chainring.testing._run_files import RunFiles

_PLAIN = ("argv", "git_commit", "device", "threads", "ranks")
_NESTED = ("config", "versions", "seeds", "optimizers", "models")
_DEEPEST = 20


def differing_settings(one: RunFiles, other: RunFiles) -> dict[str, tuple[Any, Any]]:
    """Return by name both values of each setting that differs, ``None`` where one run has none."""
    records = (one.record, other.record) if one.record and other.record else ({}, {})
    flat, flat_other = (dict(_settings(record)) for record in records)
    if flat.get("ranks") is None or flat_other.get("ranks") is None:  # earlier versions have not written it
        flat["ranks"] = flat_other["ranks"] = None
    saved, saved_other = one.saved_settings(), other.saved_settings()
    if saved and saved_other:
        flat |= saved
        flat_other |= saved_other
    pairs = {name: (flat.get(name), flat_other.get(name)) for name in dict.fromkeys([*flat, *flat_other])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _settings(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
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
