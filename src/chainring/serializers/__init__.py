"""Saving and loading state: declared once by an object, and stored in memory, npz files and snapshots (checkpoints)."""

from chainring.serializers._loading import load
from chainring.serializers._saving import save
from chainring.serializers._store import CorruptError
from chainring.serializers.npz import load_npz, save_npz
from chainring.serializers.protocol import (
    AbstractSerializer,
    Deserializer,
    DictionaryDeserializer,
    DictionarySerializer,
    Serializer,
)

__all__ = [
    "AbstractSerializer",
    "CorruptError",
    "Deserializer",
    "DictionaryDeserializer",
    "DictionarySerializer",
    "Serializer",
    "load",
    "load_npz",
    "save",
    "save_npz",
]
