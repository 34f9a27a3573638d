"""SerialIterator: what is refused at construction."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

from chainring.iterators import SerialIterator


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, "2", None])
def test_a_batch_size_is_an_integer_of_at_least_one(batch_size):
    """Refused at construction, with the value."""
    with pytest.raises(ValueError, match=f"batch size.*{batch_size}"):
        SerialIterator([1, 2], batch_size)


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("dataset", [5, iter([1]), DataLoader([1, 2]), Stream(), {"x": [1]}, "abc"])
def test_what_is_no_dataset_is_refused_with_the_remedy(dataset):
    """The error names the kind and LoaderIterator."""
    with pytest.raises(TypeError, match=rf"got {type(dataset).__name__}; .*LoaderIterator"):
        SerialIterator(dataset, 2)


@pytest.mark.parametrize("kwargs", [{"seed": 1.5}, {"seed": True}, {"order_sampler": [0, 1]}])
def test_settings_of_another_kind_are_refused(kwargs):
    """A seed is an integer, a sampler is called."""
    with pytest.raises(TypeError, match="got"):
        SerialIterator([1, 2], 1, **kwargs)
