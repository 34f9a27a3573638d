"""DevicePrefetcher on CUDA: what arrives is what was sent, whatever the two streams do when."""

import pytest
import torch
from torch.utils.data import TensorDataset

from chainring.converters import concat_examples
from chainring.iterators import DevicePrefetcher, SerialIterator

ROWS, BATCH, CYCLES = 64, 8, 20_000_000


def dataset():
    return TensorDataset(torch.arange(ROWS * 4096.0).reshape(ROWS, 4096), torch.arange(ROWS))


@pytest.fixture
def expected():
    alone = SerialIterator(dataset(), BATCH, seed=1)
    return [concat_examples(next(alone)) for _ in range(40)]


def test_every_batch_is_whole_when_kernels_read_it_late(expected):
    """Each step sleeps before it reads its batch, which the host has let go of and followed by others meanwhile."""
    ahead = DevicePrefetcher(SerialIterator(dataset(), BATCH, seed=1), "cuda")
    read = []
    for _ in range(40):
        x, t = concat_examples(next(ahead), "cuda")
        torch.cuda._sleep(CYCLES)
        read.append((x * 1, t * 1))
        del x, t
    for ours, theirs in zip(read, expected, strict=True):
        torch.testing.assert_close([part.cpu() for part in ours], list(theirs), rtol=0, atol=0)


def test_every_batch_is_whole_when_the_copy_is_late(expected):
    """The side stream is held up by large copies; what is read at once on the current stream is there."""
    large = torch.zeros(32 << 20)
    ahead = DevicePrefetcher(
        SerialIterator(dataset(), BATCH, seed=1), "cuda", converter=lambda batch, device: (large, *concat_examples(batch))
    )
    for theirs in expected:
        _, x, t = next(ahead).columns
        torch.testing.assert_close([x.cpu(), t.cpu()], list(theirs), rtol=0, atol=0)


def test_the_host_never_waits_for_the_device():
    """Neither for the copy nor for the steps before it."""
    ahead = DevicePrefetcher(SerialIterator(dataset(), BATCH, seed=1), "cuda")
    next(ahead)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(100 * CYCLES)
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        next(ahead)
        next(ahead)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not done.query()


def test_what_lies_on_the_device_is_left_alone():
    """Columns gathered there are handed over as they are."""
    data = dataset()
    there = TensorDataset(*[tensor.to("cuda") for tensor in data.tensors])
    x, t = next(DevicePrefetcher(SerialIterator(there, BATCH, shuffle=False), "cuda")).columns
    torch.testing.assert_close([x.cpu(), t.cpu()], [tensor[:BATCH] for tensor in data.tensors], rtol=0, atol=0)
