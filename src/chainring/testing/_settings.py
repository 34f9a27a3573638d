"""The settings in which two runs differ, by what they have left in run.json and in their snapshots."""

from __future__ import annotations

from typing import Any

from chainring._runs.finished import FinishedRun
from chainring.training._recorded_settings import recorded_settings


def differing_settings(one: FinishedRun, other: FinishedRun) -> dict[str, tuple[Any, Any]]:
    """Return by name both values of each setting that differs, ``None`` where one run has none."""
    records = (one.record, other.record) if one.record and other.record else ({}, {})
    flat, flat_other = (dict(recorded_settings(record)) for record in records)
    if flat.get("ranks") is None or flat_other.get("ranks") is None:  # earlier versions have not written it
        flat["ranks"] = flat_other["ranks"] = None
    saved, saved_other = one.saved_settings(), other.saved_settings()
    if saved and saved_other:
        flat |= saved
        flat_other |= saved_other
    pairs = {name: (flat.get(name), flat_other.get(name)) for name in dict.fromkeys([*flat, *flat_other])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
