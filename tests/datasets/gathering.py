"""The batches of a dataset, gathered as columns and asked for one by one."""

import torch

from chainring.converters import concat_examples
from chainring.datasets.base import make_gather
from chainring.iterators import Batch


def assert_gathers_alike(dataset, indices):
    """A gather gives bit for bit what the examples one by one give, dtypes and structure too."""
    gathered = concat_examples(Batch(columns=make_gather(dataset)(indices), length=len(indices)))
    _assert_same(gathered, concat_examples([dataset[int(i)] for i in indices]))


def _assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = tuple(one.values()), tuple(other.values())
    if isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_same(a, b)
    else:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
