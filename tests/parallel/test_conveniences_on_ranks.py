"""What users expect of any trainer, on several ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chainring.iterators import LoaderIterator, SerialIterator
from chainring.training.extensions import predict
from rank_pair import on_ranks

DATA = TensorDataset(torch.arange(22.0).view(11, 2))


def in_order(batch_size):
    return SerialIterator(DATA, batch_size, repeat=False, shuffle=False)


def predictions(comm):
    net = nn.BatchNorm1d(2)
    net.running_mean.fill_(comm.rank)  # each rank has seen other examples
    tests = in_order(5)
    tests.use_virtual_ranks(5)  # as an evaluation of virtual ranks has left it
    found = predict(net, tests, comm=comm, predict_func=lambda net, x: {"x": x, "y": net(x)})
    refusal = None
    try:
        predict(net, LoaderIterator(DataLoader(DATA, 4), per_rank=True, repeat=False), comm=comm)
    except ValueError as error:
        refusal = str(error)
    return found["x"], found["y"], tests.virtual_ranks, refusal


def test_ranks_share_what_is_predicted_and_each_returns_all_in_order():
    """Three, of batches that they do not divide, the last with fewer examples than ranks; buffers are those of rank 0."""
    expected = predict(nn.BatchNorm1d(2), in_order(5))
    for x, y, virtual_ranks, refusal in on_ranks(3, predictions):
        assert torch.equal(x, DATA.tensors[0])
        assert torch.equal(y, expected)
        assert virtual_ranks == 5
        assert "not per_rank" in refusal
