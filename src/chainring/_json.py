"""Numbers in JSON that every reader takes: infinity and NaN, for which JSON has no word, are strings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any) -> Any:
    """Return a value in the types of JSON: mappings become dicts, arrays and tensors lists, infinity and NaN strings."""
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and tensors, with or without dimensions
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(value: Any) -> Any:
    """Return the numbers and containers from which `to_json` made ``value``."""
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value
