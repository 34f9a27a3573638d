"""State as a flat dictionary: keys are paths with slashes, values are copies."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from chainring.serializers.base import Deserializer, Serializer


class DictionarySerializer(Serializer):
    """Saves into ``target``, a dictionary from path to value.

    Tensors, arrays and containers are copied, so that what was saved does not follow the training that goes on.
    """

    def __init__(self, target: dict[str, Any] | None = None) -> None:
        self.target: dict[str, Any] = {} if target is None else target
        self._path = ""

    def __getitem__(self, key: str) -> DictionarySerializer:
        child = DictionarySerializer(self.target)
        child._path = f"{self._path}{key}/"
        return child

    def __call__(self, key: str, value: Any) -> Any:
        self.target[self._path + key] = copied(value)
        return value


class DictionaryDeserializer(Deserializer):
    """Loads from ``source``, what a `DictionarySerializer` filled; what it hands out is a copy.

    Raises:
        KeyError: with ``strict``, a key is asked for that ``source`` lacks.
    """

    def __init__(self, source: Mapping[str, Any], strict: bool = True) -> None:
        self.source = source
        self.strict = strict
        self._path = ""

    def __getitem__(self, key: str) -> DictionaryDeserializer:
        child = DictionaryDeserializer(self.source, self.strict)
        child._path = f"{self._path}{key}/"
        return child

    def __call__(self, key: str, value: Any) -> Any:
        path = self._path + key
        if path in self.source:
            return copied(self.source[path])
        if self.strict:
            raise KeyError(
                f"the saved state has no {path!r}. It comes from an object of another kind or version; "
                "load it into what it was saved from, or with strict=False to keep what is missing as it is"
            )
        return value

    def paths(self) -> Iterator[str]:
        start = len(self._path)
        return (path[start:] for path in self.source if path.startswith(self._path))


def copied(value: Any) -> Any:
    """A copy that shares no memory with ``value``; tensors leave their graph, keep dtype, device and strides."""
    if hasattr(value, "detach"):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return copy.deepcopy(value)
