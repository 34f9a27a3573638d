"""How a check says what does not hold: the rule, what was found instead, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def require(holds: bool, rule: str, found: object, remedy: str) -> None:
    """Raises an `AssertionError` unless it holds."""
    if not holds:
        raise AssertionError(f"{rule}: {found}. {remedy}")


@contextmanager
def required(rule: str, remedy: str) -> Iterator[None]:
    """What is done inside does not fail; what an inner rule has found is said as it is."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{rule}: {type(error).__name__}: {error}. {remedy}") from error


def require_same(expected: Mapping[str, str], found: Mapping[str, str], rule: str, remedy: str) -> None:
    """Two collections of texts are the same; the first that differ are named."""
    paths = [path for path in {**expected, **found} if expected.get(path) != found.get(path)]
    shown = [f"{path} was {expected.get(path, 'absent')}, is {found.get(path, 'absent')}" for path in paths[:3]]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    require(not paths, rule, "; ".join(shown) + more, remedy)
