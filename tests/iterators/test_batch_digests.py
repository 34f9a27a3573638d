"""What iterators tell of the batches that they have returned: the indices of the examples, or a digest."""

import numpy as np
import pytest
import torch

from chainring.iterators import FunctionIterator, LoaderIterator, MultiprocessIterator, SerialIterator


def backwards(seed, epoch, size):
    return np.arange(size)[::-1] + 0 * (seed + epoch)


@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": False}, {"order_sampler": backwards}, {"repeat": False}, {"batch_size": 23}],
    ids=["shuffled", "in order", "sampled", "one epoch", "more than two epochs in a batch"],
)
def test_the_indices_are_those_of_the_examples_that_came(settings):
    """Of one batch, and of several, within epochs and across their ends, in the order in which they came."""
    iterator = SerialIterator(list(range(10)), **{"batch_size": 4, "seed": 3} | settings)
    first, came = iterator.batch_end(), []
    for _ in range(3):
        end = iterator.batch_end()
        batch = list(iterator.next())
        came += batch
        assert iterator.indices_since(end).tolist() == batch
    assert iterator.indices_since(first).tolist() == came
    assert iterator.indices_since(iterator.batch_end()).tolist() == []


def test_another_order_after_a_reset_has_indices_of_its_own():
    """An end counts orders and not epochs, which begin again."""
    iterator = SerialIterator(list(range(10)), 5, seed=3)
    iterator.next()
    iterator.reset()
    end = iterator.batch_end()
    batch = list(iterator.next())
    assert iterator.indices_since(end).tolist() == batch


def test_an_iterator_that_was_set_back_tells_nothing_of_what_was_before():
    """No digest is better than one of other examples."""
    iterator = SerialIterator(list(range(10)), 5, seed=3)
    iterator.next()
    end = iterator.batch_end()
    iterator.rewind()
    assert iterator.indices_since(end) is None
    assert iterator.batch_digest(end, iterator.batch_end()) is None


def test_a_share_has_the_digest_of_the_whole_batch():
    """As that does not depend on the number of ranks, nor on which of them this is."""
    digests = []
    for rank, size in ((0, 1), (0, 2), (1, 2), (2, 3)):
        iterator = SerialIterator(list(range(10)), 6, seed=3)
        iterator.share(rank, size)
        end = iterator.batch_end()
        iterator.next()
        digests.append(iterator.batch_digest(end, iterator.batch_end()))
    assert digests[1:] == digests[:1] * 3


def test_whatever_is_fetched_ahead_only_returned_batches_count():
    """By worker processes."""

    def digests_of(iterator):
        found = []
        for _ in range(4):
            end = iterator.batch_end()
            iterator.next()
            found.append(iterator.batch_digest(end, iterator.batch_end()))
        return found

    expected = digests_of(SerialIterator(list(range(10)), 4, seed=3))
    with MultiprocessIterator(list(range(10)), 4, seed=3, n_processes=1, n_prefetch=2) as workers:
        assert digests_of(workers) == expected


def test_a_loader_tells_its_batches_by_their_content():
    """Another number, dtype or shape is another digest; without a mark, or with nothing on the host, there is none."""

    def digest_of(*batch):
        iterator = LoaderIterator([batch])
        end = iterator.batch_end()
        iterator.mark()
        iterator.next()
        return iterator.batch_digest(end, iterator.batch_end())

    x = torch.arange(12.0).reshape(6, 2)
    digests = [digest_of(each) for each in (x, x + 1, x.to(torch.float64), x[:3], x.numpy(), ["a"] * 6, ["b"] * 6)]
    assert None not in digests
    assert len(set(digests)) == 7 - (digests[0] == digests[4])
    assert digest_of(x.to("meta")) is None
    unmarked = LoaderIterator([x])
    end = unmarked.batch_end()
    unmarked.next()
    assert unmarked.batch_digest(end, unmarked.batch_end()) is None


def test_a_sample_of_a_large_batch_has_something_of_every_example():
    """Every example of a batch of a hundred has some of the numbers that are looked at."""
    x = torch.zeros(100, 10_000)
    other = x.clone()
    other[57] = 1

    def digest_of(batch):
        iterator = LoaderIterator([batch])
        iterator.mark()
        iterator.next()
        return iterator.batch_digest(None, iterator.batch_end())

    assert digest_of(x) != digest_of(other)


def test_a_function_tells_its_batches_by_their_numbers():
    """And by the seed that it is given."""

    def digests(seed):
        iterator = FunctionIterator(lambda index: torch.zeros(2, 2), seed=seed)
        found = []
        for _ in range(3):
            end = iterator.batch_end()
            iterator.next()
            found.append(iterator.batch_digest(end, iterator.batch_end()))
        return found

    assert digests(1) == digests(1)
    assert len({*digests(1), *digests(2)}) == 6
