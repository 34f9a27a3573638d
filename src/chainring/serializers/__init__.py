"""How state is declared, saved and put back."""

from chainring.serializers.base import AbstractSerializer, Deserializer, Serializer
from chainring.serializers.dictionary import DictionaryDeserializer, DictionarySerializer

__all__ = ["AbstractSerializer", "Deserializer", "DictionaryDeserializer", "DictionarySerializer", "Serializer"]
