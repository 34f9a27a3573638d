"""`serializers.save` of models of which each rank holds a part: one file, written once, one tensor at a time."""

import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chainring import serializers
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks, on_two_ranks


class Net(nn.Module):
    """Layers that no number of ranks divides, a tied weight, a buffer, one parameter in a layout of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 7), nn.Linear(7, 10)
        self.first.register_buffer("mean", torch.arange(10.0))
        self.tied = nn.Linear(10, 7, bias=False)
        self.tied.weight = self.first.weight
        self.low = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.high = nn.Parameter(torch.randn(3, 2, 2, dtype=torch.complex128))
        self.one = nn.Parameter(torch.randn(1))


class Counter(nn.Module):
    """A module with state of its own, so that a model that has it becomes a directory."""

    def __init__(self):
        super().__init__()
        self.calls = 3
        self.weight = nn.Parameter(torch.randn(9, 2))

    def serialize(self, serializer):
        self.calls = serializer("calls", self.calls)


def a_net(with_state):
    torch.manual_seed(5)
    net = Net()
    if with_state:
        net.counter = Counter()
    return net


def place(net, layout, size):
    """Shard a model over ``size`` ranks."""
    if layout == "fsdp":
        fully_shard(net.first, mesh=(mesh := init_device_mesh("cpu", (size,))))
        return fully_shard(net, mesh=mesh)
    if layout == "hsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards")))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return net if layout == "tp" else fully_shard(net, mesh=mesh["dp"])


def saved(comm, layouts, with_state, out):
    """Save a model in each layout."""
    for layout in layouts:
        net = place(a_net(with_state), layout, comm.size)
        serializers.save(f"{out}/{layout}", net)
        assert Path(out, layout).exists(), "a rank returned before it was there"
    return True


@pytest.mark.parametrize("with_state", [False, True], ids=["file", "directory"])
@pytest.mark.parametrize(("size", "layouts"), [(2, ["fsdp", "tp"]), (4, ["fsdp", "hsdp", "tp", "tp x fsdp"])])
def test_a_model_in_any_layout_is_saved_as_the_plain_one(tmp_path, size, layouts, with_state):
    """Every tensor, to the bit; also shards of other sizes, none, replicas, tied and complex ones, state of its own."""
    assert on_ranks(size, saved, layouts, with_state, str(tmp_path)) == [True] * size
    for layout in layouts:
        net = a_net(with_state)
        wanted = {name: value.clone() for name, value in net.state_dict().items()}
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
        if with_state:
            net.counter.calls = 0
        serializers.load(tmp_path / layout, net)
        for name, value in net.state_dict().items():
            assert torch.equal(value, wanted[name]), (layout, name)
        assert not with_state or net.counter.calls == 3


ROWS, COLUMNS = 4096, 2048  # 32 MB of float32
TENSOR = 4 * ROWS * COLUMNS


def peak_of_saving(comm, layout, out):
    """The bytes that saving a large model takes beside what the rank has, and how many files it has opened to write."""
    with torch.device("meta"):
        net = nn.Sequential(*[nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(4)])
    mesh = init_device_mesh("cpu", (comm.size,))
    if layout == "columns":
        parallelize_module(net, mesh, {str(i): RowwiseParallel() for i in range(4)})
    else:
        fully_shard(net, mesh=mesh)
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    serializers.save(f"{out}/small", fully_shard(nn.Linear(10, 10), mesh=mesh))  # what is allocated once
    opened = []
    sys.addaudithook(
        lambda event, arguments: opened.append(arguments) if event == "open" and "x" in str(arguments[1]) else None
    )
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory so far is what there is now
    before = memory()
    serializers.save(f"{out}/{layout}", net)
    return memory("VmHWM") - before, len(opened)


def memory(kind="VmRSS"):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[kind].split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_saving_takes_memory_for_one_tensor_and_one_rank_writes(tmp_path, layout):
    """A model of 128 MB in tensors of 32 MB: the first rank adds one of them, the other ranks pieces of one MB."""
    (first, opened), *others = on_ranks(3, peak_of_saving, layout, str(tmp_path))
    slack = 4 << 20
    assert first < TENSOR + slack
    assert opened == 1
    for peak, opened in others:
        assert peak < slack
        assert opened == 0
    assert (tmp_path / layout).stat().st_size > 4 * TENSOR


def failing(comm, out, with_state):
    """What is raised where the disk of the rank that writes is full."""
    net = place(a_net(with_state), "fsdp", comm.size)
    Path(out, "model").write_text("earlier")
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # bytes of a file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        serializers.save(Path(out, "directory" if with_state else "model"), net)
    except OSError as error:
        return str(error)


@pytest.mark.parametrize("with_state", [False, True], ids=["file", "directory"])
def test_what_the_first_rank_cannot_write_is_raised_on_all(tmp_path, with_state):
    """None waits, and the file that was there stays."""
    first, *others = on_ranks(3, failing, str(tmp_path), with_state)
    assert "File too large" in first
    for other in others:
        assert "rank 0, which writes for all, has failed" in other
        assert "File too large" in other
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model").read_text() == "earlier"


def different(comm, out):
    """What is raised where the ranks save other models."""
    net = nn.Linear(4, 6 + comm.rank)
    fully_shard(net, mesh=init_device_mesh("cpu", (comm.size,)))
    try:
        serializers.save(f"{out}/model", net)
    except ValueError as error:
        return str(error)


def test_ranks_that_save_different_models_are_refused_on_all(tmp_path):
    """With what is different."""
    for words in on_two_ranks(different, str(tmp_path)):
        assert "all ranks save the same model" in words
        assert "(6, 4)" in words
        assert "(7, 4)" in words
    assert not list(tmp_path.iterdir())


def kept(comm, out):
    """What a model was after each update, while an extension saved it, and which failures to do so there were."""
    net, whole = nn.Linear(3, 1), []
    torch.manual_seed(0)
    fully_shard(net, mesh=init_device_mesh("cpu", (comm.size,)))
    data = [(torch.ones(3), torch.ones(1))] * 8
    loss = lambda net, x, t: (net(x) - t).square().mean()  # noqa: E731
    updater = StandardUpdater(
        SerialIterator(data, 4), torch.optim.SGD(net.parameters(), 0.1), net, loss_func=loss, comm=comm
    )
    trainer = Trainer(updater, (3, "iteration"), out=out)
    trainer.extend(lambda trainer: whole.append(net.weight.full_tensor().tolist()), name="whole")
    saving, failures = extensions.snapshot_object(net, "model_{.updater.iteration}"), []
    saving.on_failure = lambda error: failures.append(str(error))
    trainer.extend(saving, trigger=(1, "iteration"))
    in_the_way = lambda trainer: Path(out, "model_3").mkdir(exist_ok=True)  # noqa: E731
    trainer.extend(in_the_way, name="in the way", trigger=(3, "iteration"))
    trainer.run()
    return whole, failures


def test_an_extension_saves_a_sharded_model_as_it_is_after_each_update(tmp_path):
    """A model whose parts are written on one rank; where that fails, on every rank `on_failure` decides."""
    wanted = None
    for whole, failures in on_two_ranks(kept, str(tmp_path)):
        assert wanted in (None, whole)
        wanted = whole
        assert len(failures) == 1
    for iteration in (1, 2):
        net = nn.Linear(3, 1)
        serializers.load(tmp_path / f"model_{iteration}", net)
        assert net.weight.tolist() == wanted[iteration - 1]
