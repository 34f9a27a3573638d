"""Checks of arguments that many constructors share. Callers word the errors: they know the rule and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import numpy as np

T = TypeVar("T")


def is_integer(value: Any) -> TypeGuard[int]:
    """Return True for a Python or NumPy integer that is not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for a real number of Python or NumPy that is not a bool."""
    return is_integer(value) or isinstance(value, (float, np.floating))


def plain(value: T) -> T:
    """Return a number of NumPy as one of Python, which messages, JSON and snapshots have, and all else as it is."""
    if not isinstance(value, (np.integer, np.floating)):
        return value
    return int(value) if isinstance(value, np.integer) else float(value)  # type: ignore[return-value]


def find_call_error(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str | None:
    """Return why a function cannot be called with these arguments; None if it can, or if its signature is unknown.

    So what would fail at the first call, which may come after hours, is refused when the function is given.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:
        return None  # some callables of C have no signature
    except TypeError as error:
        return str(error)
    return None
