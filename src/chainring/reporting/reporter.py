"""Names values and collects them into one observation an iteration."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class _Current(threading.local):
    """Of each thread its own. A class attribute, so that compiled models may read it."""

    reporter: Reporter | None = None


current = _Current()
"""``current.reporter`` is the reporter that `report` writes to in this thread, or ``None``."""


class Reporter:
    """Takes reported values, puts the name of who reports before their keys, and adds them to the current observation.

    The trainer owns one; `report` reaches it from inside a model. Observers are held weakly: one that is gone takes its
    name along, and no later object can inherit it.

    Attributes:
        observation: what is written into.
        watchers: called with the full name and the value of each report, the value as it was given, with its graph.
    """

    def __init__(self) -> None:
        self.observation: dict[str, Any] = {}
        self.watchers: tuple[Callable[[str, Any], None], ...] = ()
        self._names: dict[int, tuple[Any, str]] = {}

    def add_observer(self, name: str, observer: Any) -> None:
        """From now on the keys that ``observer`` reports become ``<name>/<key>``."""
        key = id(observer)
        try:
            held: Any = weakref.ref(observer, lambda _: self._names.pop(key, None))
        except TypeError:  # an object without weak references is kept alive instead, so that its id stays its own
            held = lambda: observer  # noqa: E731
        self._names[key] = (held, name)

    def add_observers(self, prefix: str, observers: Iterable[tuple[str, Any]]) -> None:
        """Adds each of ``(path, observer)`` as ``<prefix>/<path>``, dots as slashes; an empty path is the prefix itself.

        ``add_observers("main", model.named_modules())`` names every part of a model.
        """
        for path, observer in observers:
            self.add_observer(f"{prefix}/{path.replace('.', '/')}" if path else prefix, observer)

    def report(self, values: Mapping[str, Any], observer: Any = None) -> None:
        """Adds values to the current observation, under the observer's name if one is given.

        A scalar tensor is detached and copied where it is: a later change in place does not alter what was reported,
        and no graph is kept alive.

        Raises:
            KeyError: the observer is not registered.
            TypeError: ``values`` is no mapping.
        """
        prefix = ""
        if observer is not None:
            entry = self._names.get(id(observer))
            if entry is None:
                raise KeyError(self._unknown(observer))
            prefix = entry[1] + "/"
        observation = self.observation
        try:
            items = values.items()
        except AttributeError:
            raise TypeError(f'report takes a mapping, such as {{"loss": loss}}; got {type(values).__name__}') from None
        for key, value in items:
            observation[prefix + key] = _kept(value)
        if self.watchers:
            for key, value in items:
                for watch in self.watchers:
                    watch(prefix + key, value)

    def _unknown(self, observer: Any) -> str:
        known = sorted({name for _, name in self._names.values()})
        return (
            f"{type(observer).__name__} is not registered as an observer; registered are {known}. "
            "The trainer registers the updater's models and their submodules; "
            "for another object call reporter.add_observer(name, it)"
        )

    def scope(self, observation: dict[str, Any]) -> AbstractContextManager[None]:
        """Inside, this reporter is the current one and writes into ``observation``; both are put back, come what may."""
        return _Scope(self, observation)


class _Scope:
    """A plain class, because a generator-based context manager costs a microsecond an iteration more."""

    __slots__ = ("_observation", "_outer", "_reporter")

    def __init__(self, reporter: Reporter, observation: dict[str, Any]) -> None:
        self._reporter = reporter
        self._observation = observation

    def __enter__(self) -> None:
        reporter = self._reporter
        self._outer = current.reporter
        self._observation, reporter.observation = reporter.observation, self._observation
        current.reporter = reporter

    def __exit__(self, *error: object) -> None:
        self._reporter.observation = self._observation
        current.reporter = self._outer


def _kept(value: Any) -> Any:
    """A reported value, safe from what happens to it later."""
    kind = type(value)
    if kind is float or kind is int or kind is str:
        return value
    if kind is tuple:
        return tuple([_kept(item) for item in value])
    detach = getattr(value, "detach", None)  # a tensor has it; what decides does not import torch
    if detach is not None:
        if value.requires_grad:
            value = detach()
        return value.clone() if value.ndim == 0 else value
    return value.copy() if getattr(value, "ndim", None) == 0 else value


def report(values: Mapping[str, Any], observer: Any = None) -> None:
    """Reports values from anywhere inside an iteration: ``report({"loss": loss}, self)`` in a model.

    With no reporter current it does nothing, so a model that reports also runs outside a trainer.

    Args:
        values: a mapping from key to value: numbers, scalar tensors, or anything an extension understands.
        observer: who reports; its registered name goes before the keys.

    Raises:
        KeyError: the observer is not registered with the current reporter.
    """
    reporter = current.reporter
    if reporter is not None:
        reporter.report(values, observer)


@contextmanager
def report_scope(observation: dict[str, Any]) -> Iterator[None]:
    """Inside, the current reporter writes into ``observation``; afterwards into what it wrote into before.

    Raises:
        RuntimeError: there is no current reporter.
    """
    with get_current_reporter().scope(observation):
        yield


def get_current_reporter() -> Reporter:
    """The reporter that `report` writes to in this thread.

    Raises:
        RuntimeError: there is none.
    """
    if current.reporter is None:
        raise RuntimeError("no reporter is current: report inside Trainer.run, or inside `with reporter.scope({})`")
    return current.reporter


def current_observation() -> dict[str, Any] | None:
    """What the current reporter writes into, or ``None`` where there is no reporter."""
    reporter = current.reporter
    return None if reporter is None else reporter.observation
