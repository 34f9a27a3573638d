"""Iterators: batches of examples, in an order that is determined by the seed, or by a loader."""

from typing import TYPE_CHECKING

from chainring._random import epoch_order
from chainring.iterators.base import Batch, Iterator
from chainring.iterators.function_iterator import FunctionIterator
from chainring.iterators.loader import LoaderIterator, as_iterator
from chainring.iterators.mixture import MixtureIterator
from chainring.iterators.multiprocess import MultiprocessIterator
from chainring.iterators.packing import PackingIterator
from chainring.iterators.samplers import BucketOrderSampler, NoRepeatOrderSampler, TokenOrderSampler, WeightedOrderSampler
from chainring.iterators.serial import SerialIterator

__all__ = [
    "Batch", "BucketOrderSampler", "FunctionIterator", "Iterator", "LoaderIterator", "MixtureIterator",
    "MultiprocessIterator", "NoRepeatOrderSampler", "PackingIterator", "SerialIterator", "TokenOrderSampler",
    "WeightedOrderSampler", "as_iterator", "epoch_order",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from chainring._hints import find_missing

        return find_missing(__name__, name)
