"""JSON that every reader takes: numbers without NaN and infinity, and documents in which no key occurs twice."""

from __future__ import annotations

import json
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


def parse_strict(text: bytes) -> Any:
    """Return the value of a JSON document in UTF-8 that may come from anywhere.

    Raises:
        ValueError: it is not JSON, it is nested too deep to be read, a key occurs twice in an object (readers would differ
            on which counts), or a number is not finite.
    """
    try:
        decoded = text.decode("utf-8")  # json.loads would take bytes for UTF-16 where they look like it
        return json.loads(decoded, object_pairs_hook=_unique_keys, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("the document is nested too deep; the file is damaged") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice in an object; the file is damaged")
    return found


def _finite(word: str) -> float:
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word[:40]} is not a finite number; the file is damaged")
    return value
