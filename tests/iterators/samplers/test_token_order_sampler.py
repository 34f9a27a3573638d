"""TokenOrderSampler: batches of a number of tokens at most, each example once an epoch, through ranks and resumes."""

import numpy as np
import pytest
import torch
from torch import nn

from chainring.datasets import TransformDataset
from chainring.iterators import MultiprocessIterator, SerialIterator, TokenOrderSampler
from chainring.training import StandardUpdater, Trainer

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 0.8, 900), 1, 500).astype(int)


def numbers(batch):
    return np.asarray(batch.columns if batch.columns is not None else list(batch)).tolist()


@pytest.mark.parametrize("padded", [True, False])
def test_no_batch_has_more_tokens_and_each_example_comes_once_an_epoch(padded):
    """Padded to the longest, or joined; batches are nearly full, and none crosses the end of an epoch."""
    sampler = TokenOrderSampler(LENGTHS, 2000, padded=padded)
    iterator = SerialIterator(np.arange(900), 1000, order_sampler=sampler, seed=1)
    for epoch in range(2):
        seen, tokens, batches = [], 0, 0
        while iterator.epoch == epoch:
            batch = numbers(next(iterator))
            lengths = LENGTHS[batch]
            used = max(lengths) * len(lengths) if padded else sum(lengths)
            assert used <= 2000
            seen, tokens, batches = [*seen, *batch], tokens + used, batches + 1
        assert sorted(seen) == list(range(900))
        assert tokens / batches > 1800
        if padded:
            assert LENGTHS.sum() / tokens > 0.95


def test_the_batch_size_is_the_most_examples_of_a_batch():
    """A larger one is cut."""
    iterator = SerialIterator(np.arange(900), 8, order_sampler=TokenOrderSampler(LENGTHS, 2000), seed=1, repeat=False)
    batches = [numbers(batch) for batch in iterator]
    assert max(map(len, batches)) == 8
    assert sorted(number for batch in batches for number in batch) == list(range(900))


def test_it_goes_on_amid_an_epoch_and_in_workers_as_in_this_process():
    """And ranks take their shares of each batch, also of one that is smaller than their number."""
    settings = {"order_sampler": TokenOrderSampler(LENGTHS, 600), "seed": 3}
    whole = SerialIterator(np.arange(900), 50, **settings)
    batches = [numbers(next(whole)) for _ in range(200)]
    resumed = SerialIterator(np.arange(900), 50, **settings)
    first = SerialIterator(np.arange(900), 50, **settings)
    for _ in range(90):
        next(first)
    resumed.load_state_dict(first.state_dict())
    assert [numbers(next(resumed)) for _ in range(110)] == batches[90:]
    with MultiprocessIterator(TransformDataset(np.arange(900), int), 50, n_processes=1, **settings) as workers:
        assert [numbers(next(workers)) for _ in range(40)] == batches[:40]
    ranks = [SerialIterator(np.arange(900), 50, **settings) for _ in range(3)]
    for rank, iterator in enumerate(ranks):
        iterator.share(rank, 3)
    for batch in batches[:100]:
        for rank, iterator in enumerate(ranks):
            share = next(iterator)
            assert share.weight == len(batch[rank::3])
            assert not share.weight or numbers(share) == batch[rank::3]


@pytest.mark.parametrize("virtual_ranks", [None, 4])
def test_means_follow_the_sizes_of_batches(tmp_path, virtual_ranks):
    """Accumulated over two batches, a gradient is that of the mean over all their examples."""
    data = torch.linspace(-1, 1, 900)[:, None]
    model = nn.Linear(1, 1)
    iterator = SerialIterator(data, 50, order_sampler=TokenOrderSampler(LENGTHS, 600), seed=3)
    plain = SerialIterator(data, 50, order_sampler=TokenOrderSampler(LENGTHS, 600), seed=3)
    updater = StandardUpdater(
        iterator, torch.optim.SGD(model.parameters(), 0.1), model, accumulate=2, virtual_ranks=virtual_ranks,
        loss_func=lambda model, x: (model(x) - 3 * x).square().mean(),
    )  # fmt: skip
    other = nn.Linear(1, 1)
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    Trainer(updater, (20, "iteration"), out=str(tmp_path)).run()
    for _ in range(20):
        x = torch.cat([next(plain).columns for _ in range(2)])
        optimizer.zero_grad()
        (other(x) - 3 * x).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


@pytest.mark.parametrize(
    ("lengths", "settings", "text"),
    [
        ([3, 9], {"max_tokens": 8}, "example 1 has 9 tokens for max_tokens=8"),
        ([3], {"max_tokens": 0}, "max_tokens"),
        ([3], {"max_tokens": 8, "pool": 0}, "pool"),
        ([-1], {"max_tokens": 8}, "lengths"),
    ],
)
def test_what_fits_into_no_batch_is_refused(lengths, settings, text):
    """When it is made."""
    with pytest.raises(ValueError, match=text):
        TokenOrderSampler(lengths, **settings)


def test_ends_that_are_none_are_refused():
    """Of a sampler of a user's own."""

    class Own:
        def __call__(self, seed, epoch, size):
            return np.arange(size)

        def batch_ends(self, seed, epoch, size):
            return [2]

    iterator = SerialIterator(np.arange(5), 4, order_sampler=Own())
    assert numbers(next(iterator)) == [0, 1]
    with pytest.raises(ValueError, match="none after 2"):
        next(iterator)
