"""One method for both directions: an object declares its changing state once, in ``serialize(serializer)``.

    def serialize(self, serializer):
        self.iteration = serializer("iteration", self.iteration)
        serializer.visit("iterator", self.iterator)

While saving, a serializer hands back the value that it was given; while loading, the value that was saved. So the line
reads the same both ways and the two directions cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class AbstractSerializer:
    """Where state goes to or comes from. ``serializer[key]`` is a child, ``serializer(key, value)`` is one value."""

    def __getitem__(self, key: str) -> AbstractSerializer:
        raise NotImplementedError

    def __call__(self, key: str, value: Any) -> Any:
        """Saves ``value`` under ``key`` and returns it, or returns what was saved there.

        A value is a number, a string, bytes, ``None``, a tensor, an array, or a list, tuple or dict of such.
        """
        raise NotImplementedError

    def visit(self, key: str, obj: Any) -> None:
        """Saves or loads a whole object under ``key``: by its ``serialize``, or its ``state_dict``/``load_state_dict``.

        A module's entries become one key each, with slashes for dots, so that a part can be found by its path.

        Raises:
            TypeError: the object has neither.
        """
        method = serialize_method(obj)
        if method is not None:
            method(self[key])
        elif hasattr(obj, "named_parameters") and has_state(obj):
            self._visit_module(key, obj)
        elif has_state(obj):
            self._visit_state(key, obj)
        else:
            raise TypeError(
                f"{type(obj).__name__} has no state to visit at {key!r}: "
                "give it serialize(serializer), or state_dict() and load_state_dict(state)"
            )

    def _visit_module(self, key: str, module: Any) -> None:
        raise NotImplementedError

    def _visit_state(self, key: str, obj: Any) -> None:
        raise NotImplementedError


class Serializer(AbstractSerializer):
    """Saves. ``isinstance(serializer, Serializer)`` is how an object asks which way it goes."""

    def _visit_module(self, key: str, module: Any) -> None:
        child = self[key]
        for name, value in module.state_dict().items():
            child(name.replace(".", "/"), value)

    def _visit_state(self, key: str, obj: Any) -> None:
        self[key]("state_dict", obj.state_dict())


class Deserializer(AbstractSerializer):
    """Loads. With ``strict`` a key that was not saved is an error, else the value at hand is kept."""

    strict: bool = True

    def __getitem__(self, key: str) -> Deserializer:
        raise NotImplementedError

    def paths(self) -> Iterator[str]:
        """Every key saved below here, as paths relative to here."""
        raise NotImplementedError

    def _visit_module(self, key: str, module: Any) -> None:
        child = self[key]
        names = {name.replace(".", "/"): name for name in module.state_dict()}  # a name may hold slashes of its own
        saved = {names.get(path, path.replace("/", ".")): child(path, None) for path in child.paths()}
        module.load_state_dict(saved, strict=self.strict)

    def _visit_state(self, key: str, obj: Any) -> None:
        state = self[key]("state_dict", None)
        if state is not None:
            obj.load_state_dict(state)


def has_state(obj: Any) -> bool:
    """Whether an object has PyTorch's pair ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def serialize_method(obj: Any) -> Callable[[AbstractSerializer], None] | None:
    """An object's ``serialize``, unless its class declares the PyTorch pair on top of one that it inherits."""
    method: Callable[[AbstractSerializer], None] | None = getattr(obj, "serialize", None)
    if not callable(method):
        return None
    for kind in type(obj).__mro__:  # whichever is declared by the more derived class speaks for the object
        if "serialize" in vars(kind):
            return method
        if "state_dict" in vars(kind) and has_state(obj):
            return None
    return method
