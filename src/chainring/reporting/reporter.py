"""The reporter: names reported values and collects them into one observation per iteration."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from chainring._distributed.sharding import to_full

_dtype = attrgetter("dtype")
_MANY = 8
"""The number of values from which tensors are copied together."""


class Stack:
    """Copies of tensors that were reported together: one tensor, and the key of each of its elements."""

    # hot path: "keys in the log": a tensor for each of a hundred keys takes more than all else that is done with them
    __slots__ = ("keys", "values")

    def __init__(self, keys: list[str], values: Tensor) -> None:
        self.keys = keys
        self.values = values

    def __getitem__(self, key: str) -> Tensor:
        return self.values[self.keys.index(key)]


class Reported:
    """What has been reported in an iteration. Stacks stay whole until somebody asks for the observation."""

    __slots__ = ("stacks", "values")

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = {} if values is None else values  # a stack stands in the place of each of its elements
        # Those in values; None if the observation has been handed out, which then gets no more of them.
        self.stacks: list[Stack] | None = [] if values is None else None

    def __getitem__(self, key: str) -> Any:
        value = self.values[key]
        return value[key] if type(value) is Stack else value

    def observation(self) -> dict[str, Any]:
        """Return the values, in which each stack is replaced by its elements from now on."""
        values, stacks, self.stacks = self.values, self.stacks, None
        for stack in stacks or ():
            for key, value in zip(stack.keys, stack.values.unbind(), strict=True):
                if values[key] is stack:  # and has not been reported again since
                    values[key] = value
        return values


class _Current(threading.local):
    def __init__(self) -> None:  # a default of the class would be what a model compiled by PyTorch 2.11 takes it for
        self.reporter: Reporter | None = None


current = _Current()
"""``current.reporter`` is the reporter that `report` writes to in this thread, or ``None``."""
_by_thread: dict[int, Reporter] = {}
"""The same of all threads, by their ids."""


def find_reporter(observer: Any = None) -> Reporter | None:
    """Return the reporter that an object reports to here.

    A hook of a backward runs on an accelerator in a thread of autograd, and reports to the run that has begun the backward.

    Raises:
        RuntimeError: several threads train, and it is not known to which of them the hook belongs.
    """
    if current.reporter is not None or torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
        return current.reporter
    if not isinstance(threading.current_thread(), threading._DummyThread):  # a backward of a thread that does not train
        return None
    reporters = set(_by_thread.values())
    if len(reporters) > 1:
        reporters = {reporter for reporter in reporters if id(observer) in reporter._names}
        if len(reporters) != 1:
            raise RuntimeError(
                "a hook of a backward on an accelerator reports while several threads train, and it is not known for which; "
                "give report() the module that reports, or train in processes"
            )
    return next(iter(reporters), None)


class Reporter:
    """Adds reported values to the current observation, with the name of the reporting object as prefix of each key.

    Each trainer has one; `report` uses it from inside a model. Observers are held by weak references: the name of a
    deleted observer is deleted too, and no later object can inherit it.

    Example::

        reporter, observation = Reporter(), {}
        reporter.add_observer("main", model)
        with reporter.scope(observation):
            report({"loss": 0.5}, model)  # observation is {"main/loss": 0.5}

    Attributes:
        reported: the values reported so far, and how they are kept.
        watchers: called with the full key and the value of each report; the value is the original one, with its graph.
        media_watchers: called with the key and the content of each `report_image`, `report_text` and `report_histogram`.
        said: the keys, or beginnings of keys such as ``validation/``, of which a warning has said why they have no mean.
    """

    def __init__(self) -> None:
        self.reported = Reported({})
        self.said: set[str] = set()
        self.watchers: tuple[Callable[[str, Any], None], ...] = ()
        self.media_watchers: tuple[Callable[[str, Any], None], ...] = ()
        self._names: dict[int, tuple[Any, str]] = {}  # by id, with a reference that keeps the id from being reused

    @property
    def observation(self) -> dict[str, Any]:
        """The values reported so far, by key."""
        return self.reported.observation()

    @observation.setter
    def observation(self, values: dict[str, Any]) -> None:
        self.reported = Reported(values)

    def add_observer(self, name: str, observer: Any) -> None:
        """Register an object under a name: the keys that it reports from now on become ``<name>/<key>``."""
        key = id(observer)
        try:
            reference: Any = weakref.ref(observer, lambda _: self._names.pop(key, None))
        except TypeError:  # an object without weak references is kept alive
            reference = observer
        self._names[key] = (reference, name)

    def add_observers(self, prefix: str, observers: Iterable[tuple[str, Any]]) -> None:
        """Register each ``(path, observer)`` as ``<prefix>/<path>``, dots as slashes; an empty path is the prefix itself.

        ``add_observers("main", model.named_modules())`` registers every submodule of a model.
        """
        for path, observer in observers:
            self.add_observer(f"{prefix}/{path.replace('.', '/')}" if path else prefix, observer)

    def report(self, values: Mapping[str, Any], observer: Any = None) -> None:
        """Add values to the current observation, under the observer's name if one is given.

        A scalar tensor is detached and copied on its device: later in-place changes do not affect the reported value, and
        no graph is kept alive.

        Raises:
            KeyError: the observer is not registered.
            TypeError: ``values`` is not a mapping, or a value is a function.
        """
        prefix = ""
        if observer is not None:
            entry = self._names.get(id(observer))
            if entry is None:
                names = sorted({name for _, name in self._names.values()})
                raise KeyError(
                    f"{type(observer).__name__} is not registered as an observer; registered are {names}. "
                    "The trainer registers the updater's models and their submodules; "
                    "for another object call reporter.add_observer(name, it)"
                )
            prefix = entry[1] + "/"
        try:
            items = values.items()
        except AttributeError:
            raise TypeError(f'report takes a mapping, such as {{"loss": loss}}; got {type(values).__name__}') from None
        reported = self.reported
        if len(items) < _MANY or torch.compiler.is_compiling():  # which fuses the copies by itself
            for key, value in items:
                reported.values[prefix + key] = _snapshot(value)
        else:  # hot path: "keys in the log": to copy each tensor takes three times as long as all that are alike at once
            keys, given = [prefix + key for key in values] if prefix else list(values), list(values.values())
            are_tensors = set(map(type, given)) == {Tensor}
            stacked = stack_tensors(given if are_tensors else [value for value in given if type(value) is Tensor])
            if stacked is not None and are_tensors and reported.stacks is not None:
                stack = Stack(keys, stacked)
                reported.stacks.append(stack)
                reported.values.update(dict.fromkeys(keys, stack))
            else:
                copies = None if stacked is None else iter(stacked.unbind())
                copied = [next(copies) if copies and type(value) is Tensor else _snapshot(value) for value in given]
                reported.values.update(zip(keys, copied, strict=True))
        if self.watchers:
            for key, value in items:
                for watch in self.watchers:
                    watch(prefix + key, value)

    @contextmanager
    def scope(self, observation: dict[str, Any]) -> Iterator[None]:
        """Return a context in which this reporter is the current one and writes into ``observation``."""
        outer, current.reporter = current.reporter, self
        if outer is not self:
            _by_thread[threading.get_ident()] = self
        around, self.reported = self.reported, Reported(observation)
        try:
            yield
        finally:
            self.reported, current.reporter = around, outer
            if outer is None:
                del _by_thread[threading.get_ident()]
            elif outer is not self:
                _by_thread[threading.get_ident()] = outer


def stack_tensors(tensors: list[Tensor]) -> Tensor | None:
    """Return copies of scalars as one tensor, out of their graphs; ``None`` if they are not alike."""
    if not tensors or tensors[0].ndim or len(set(map(_dtype, tensors))) > 1:
        return None
    try:
        with torch.no_grad():
            return torch.stack(tensors)
    except RuntimeError:  # some have dimensions, or lie on another device
        return None


def _snapshot(value: Any) -> Any:
    """Return a reported value as it is now, detached from its graph."""
    # hot path: "keys in the log"
    cls = type(value)
    if cls is float or cls is int or cls is str:
        return value
    if cls is tuple:
        return tuple([_snapshot(item) for item in value])
    if cls is Tensor or hasattr(value, "detach"):
        if value.requires_grad:
            value = value.detach()
        if value.ndim:
            return value
        return value.clone() if cls is Tensor else to_full(value).clone()
    if inspect.isroutine(value):
        raise TypeError(
            f"values are reported, and {value!r} is a function, which is not called later; report what it returns"
        )
    return value.copy() if getattr(value, "ndim", None) == 0 else value


def report(values: Mapping[str, Any], observer: Any = None) -> None:
    """Report values from anywhere inside an iteration, a hook of a backward too; without a current reporter, do nothing.

    So a model that reports values also works outside of a trainer.

    Example::

        report({"loss": loss, "accuracy": accuracy}, self)  # in the forward of a model

    Args:
        values: a mapping from key to value: numbers, scalar tensors, or anything that an extension understands.
        observer: the object that reports, such as ``self`` in a model; its registered name is the prefix of the keys.

    Raises:
        KeyError: the observer is not registered with the current reporter.
        TypeError: ``values`` is not a mapping, or a value is a function.
        RuntimeError: a hook on an accelerator reports without an observer, while several threads train.
    """
    reporter = find_reporter(observer)
    if reporter is not None:
        reporter.report(values, observer)


@contextmanager
def report_scope(observation: dict[str, Any]) -> Iterator[None]:
    """Make the current reporter write into ``observation`` until the end of the context.

    Raises:
        RuntimeError: there is no current reporter.
    """
    with get_current_reporter().scope(observation):
        yield


def get_current_reporter() -> Reporter:
    """Return the reporter that `report` writes to in this thread.

    Raises:
        RuntimeError: there is no current reporter.
    """
    if (reporter := find_reporter()) is None:
        raise RuntimeError("no reporter is current: report inside Trainer.run, or inside `with reporter.scope({})`")
    return reporter


def current_observation() -> dict[str, Any] | None:
    """Return the observation of the current reporter, or ``None`` without one."""
    return None if current.reporter is None else current.reporter.observation
