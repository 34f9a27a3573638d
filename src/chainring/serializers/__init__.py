"""How state is declared, saved and put back."""

from chainring.serializers.base import AbstractSerializer, Deserializer, Serializer
from chainring.serializers.dictionary import DictionaryDeserializer, DictionarySerializer
from chainring.serializers.manifest import CorruptError
from chainring.serializers.npz import load_npz, save_npz
from chainring.serializers.saving import load, save

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
