"""Stateful: an object that declares its state in ``serialize`` also has PyTorch's ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chainring.serializers.base import AbstractSerializer
from chainring.serializers.dictionary import DictionaryDeserializer, DictionarySerializer


class Stateful:
    """Derives ``state_dict`` and ``load_state_dict`` from ``serialize``, which does nothing until it is overridden."""

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Declares the state that changes while training; settings are never state."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, keyed by path (``"updater/iteration"``): later training does not change it."""
        serializer = DictionarySerializer()
        self.serialize(serializer)
        return serializer.target

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Puts back what ``state_dict`` returned. A missing key raises a ``KeyError`` that names it."""
        self.serialize(DictionaryDeserializer(state_dict))
