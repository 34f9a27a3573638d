"""The Recorder on several ranks: one of them writes, and digests do not depend on who holds which part of a tensor."""

import pytest
import torch
from layouts import EVERY, a_trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import chainring
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, Updater, extensions
from chainring.training._digests import StateDigests
from chainring.training._ledger import Ledger
from rank_pair import on_ranks


class Net(nn.Module):
    """Dropout, running statistics, and widths that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 3))

    def forward(self, x, t):
        loss = nn.functional.cross_entropy(self.layers(x), t)
        chainring.report({"loss": loss}, self)
        return loss


def trained(comm, kind, out, length=40):
    """Train with virtual ranks, dropout and BatchNorm, from the newest snapshot if there is one."""
    chainring.deterministic(0)
    net = Net()
    if kind == "ddp":
        net = DistributedDataParallel(net)
    elif kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (comm.size,)))
    x, t = torch.linspace(-1, 1, 200).reshape(40, 5), torch.arange(40) % 3
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    updater = StandardUpdater(
        SerialIterator(list(zip(x, t, strict=True)), 8, seed=1), optimizer, net, comm=comm, virtual_ranks=4
    )
    trainer = Trainer(updater, (length, "iteration"), out=out)
    trainer.extend(extensions.snapshot(autoload=True), trigger=(7, "iteration"))
    trainer.extend(extensions.Recorder((4, "iteration")))
    trainer.run()
    return sorted(Ledger.read(f"{out}/recorder.bin").digests)


@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp", 3)])
def test_virtual_ranks_write_the_file_of_one_process_whatever_the_ranks(tmp_path, kind, size):
    """Byte for byte: losses, batches, generators and every digest, also where the run is stopped in between."""
    assert on_ranks(1, trained, "plain", str(tmp_path / "one")) == [[0, *range(4, 41, 4)]]
    for length in (17, 40):
        on_ranks(size, trained, kind, str(tmp_path / "many"), length)
    assert (tmp_path / "many/recorder.bin").read_bytes() == (tmp_path / "one/recorder.bin").read_bytes()


class Odd(nn.Module):
    """Tensors that ranks share in every way: columns, rows, none of them, of each size of an element, tied, a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 7), nn.Linear(7, 10)
        self.wide = nn.Linear(70, 90, bias=False)  # of more elements than one row of numbers
        self.first.register_buffer("mean", torch.arange(10.0))
        self.tied = nn.Linear(10, 7, bias=False)
        self.tied.weight = self.first.weight
        self.low = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.high = nn.Parameter(torch.randn(3, 2, 2, dtype=torch.complex128))
        self.one = nn.Parameter(torch.randn(1))


def digests_of(comm, layout):
    """The digests of a model in a layout of the ranks, by name; of this rank."""
    torch.manual_seed(5)
    net = Odd()
    mesh = init_device_mesh("cpu", (1, comm.size), mesh_dim_names=("dp", "tp"))
    if layout == "tp":
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel(), "wide": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
    elif layout == "fsdp":
        fully_shard(net, mesh=mesh["tp"])
    updater = Updater()
    updater.get_all_models = lambda: {"main": net}
    digests = StateDigests(updater, comm)
    return dict(zip(digests.names, digests.read().tolist(), strict=True))


@pytest.mark.parametrize(("layout", "size"), [("fsdp", 2), ("fsdp", 3), ("tp", 3)])
def test_a_sharded_tensor_has_the_digest_of_the_whole_one(layout, size):
    """By rows and by columns, in shards of different sizes, with a rank that has none, of every size of an element."""
    (whole,) = on_ranks(1, digests_of, "")
    assert len(whole) == 10
    assert on_ranks(size, digests_of, layout)[0] == whole


def in_layouts(comm, out):
    """The digests before the first update and after one that changes nothing, in each layout of four ranks."""
    found = {}
    for layout in EVERY:
        trainer = a_trainer(layout, f"{out}/{layout}", lr=0.0)
        trainer.extend(extensions.Recorder((1, "iteration")))
        trainer.run()
        found[layout] = Ledger.read(f"{out}/{layout}/recorder.bin").digests
    return found


def test_every_layout_of_four_ranks_has_the_digests_of_one_process(tmp_path):
    """DDP, FSDP2, tensor parallelism, and two of them on one mesh; the optimizer's counts of steps as well."""
    trainer = a_trainer(None, tmp_path / "one")
    trainer.extend(extensions.Recorder((1, "iteration")))
    trainer.run()
    wanted = Ledger.read(tmp_path / "one/recorder.bin").digests
    for found in on_ranks(4, in_layouts, str(tmp_path)):
        for layout in EVERY:
            assert found[layout][0] == wanted[0], layout
            exact = {name: value for name, value in wanted[1].items() if "exp_avg" not in name}
            assert {name: found[layout][1][name] for name in exact} == exact, layout
            assert found[layout][1].keys() == wanted[1].keys()
