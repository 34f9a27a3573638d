"""States of DDP's communication hooks are saved by rank and continue to the bit, or it is said that they do not."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from chainring import serializers
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks, on_two_ranks


class Residual:
    """A state of a user's own: what rounding has left over, of each rank, with the pair of PyTorch."""

    def __init__(self):
        self.left = {}

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = dict(state["left"])


class Declared(Residual):
    """The same, declared once."""

    state_dict = load_state_dict = None

    def serialize(self, serializer):
        self.left = serializer("left", self.left)


class Unknown(Residual):
    """The same, of which nobody can know what it keeps."""

    state_dict = load_state_dict = None


def rounding_hook(state, bucket):
    """Send what is rounded to a half, and keep the rest for the next time."""
    index = str(bucket.index())
    left = state.left.get(index)
    is_known = left is not None and left.shape == bucket.buffer().shape  # DDP lays out its buckets again after a backward
    wanted = bucket.buffer() + left if is_known else bucket.buffer()
    rounded = (wanted * 64).round() / 64
    state.left[index] = wanted - rounded
    dist.all_reduce(rounded)
    future = torch.futures.Future()
    future.set_result(rounded / dist.get_world_size())
    return future


HOOKS = {
    "powersgd": lambda: (powersgd.PowerSGDState(None, start_powerSGD_iter=3), powersgd.powerSGD_hook),
    "local": lambda: (local.PostLocalSGDState(None, dist.group.WORLD, 4), local.post_localSGD_hook),
    "state_dict": lambda: (Residual(), rounding_hook),
    "serialize": lambda: (Declared(), rounding_hook),
    "unknown": lambda: (Unknown(), rounding_hook),
}


def a_trainer(comm, kind, stop, out, static_graph=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    # Several buckets, but for PowerSGD, which waits for ever on gloo when two of its buckets meet.
    cap = 0.002 if kind in ("state_dict", "serialize") else 25
    net = DistributedDataParallel(net, bucket_cap_mb=cap, static_graph=static_graph)
    if kind is not None:
        net.register_comm_hook(*HOOKS[kind]())
    data = list(zip(torch.randn(40, 20), torch.randn(40, 1), strict=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loss = lambda net, x, t: (net(x) - t).square().mean()  # noqa: E731
    updater = StandardUpdater(SerialIterator(data, 8, seed=1), optimizer, net, loss_func=loss, comm=comm)
    trainer = Trainer(updater, (stop, "iteration"), out=out)
    trainer.extend(extensions.snapshot(autoload=True), trigger=(5, "iteration"))
    return trainer


def run(comm, kind, stop, out, *settings):
    """The parameters after a run, which continues the one in ``out`` if there is one, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = a_trainer(comm, kind, stop, out, *settings)
        trainer.run()
    parameters = [parameter.detach().double().tolist() for parameter in trainer.updater.get_model("main").parameters()]
    return parameters, [str(warning.message) for warning in caught if "communication hook" in str(warning.message)]


def compare(comm, kinds, out):
    """Whether runs of ten updates and such that were resumed after five, or rolled back by hand, end in the same bits."""
    found = {}
    for kind in kinds:
        straight, warned = run(comm, kind, 10, f"{out}/{kind}-straight")
        run(comm, kind, 5, f"{out}/{kind}-resumed")
        resumed, warned_later = run(comm, kind, 10, f"{out}/{kind}-resumed")
        found[kind] = straight == resumed, warned, warned_later
    return found


def in_memory(comm, kind, out):
    """Whether a run that continues from a state in memory ends in the same bits."""
    straight, _ = run(comm, kind, 10, f"{out}/straight")
    first = a_trainer(comm, kind, 5, f"{out}/first")
    first.run()
    second = a_trainer(comm, kind, 10, f"{out}/second")
    second.load_state_dict(first.state_dict())
    second.run()
    return straight == [parameter.detach().double().tolist() for parameter in second.updater.get_model("main").parameters()]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return on_two_ranks(compare, list(HOOKS), str(tmp_path_factory.mktemp("hooks")))


@pytest.mark.parametrize("kind", ["powersgd", "state_dict", "serialize"])
def test_a_resumed_run_continues_the_state_of_each_rank_to_the_bit(compared, kind):
    """Error feedback, warm start, generator and counters; also a state of one's own that says what it is."""
    for of_rank in compared:
        assert isinstance(of_rank, dict), of_rank
        assert of_rank[kind] == (True, [], [])


def alone(comm, kinds, out):
    """The same of one rank, in a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return compare(comm, kinds, out)


def test_one_rank_continues_its_state_to_the_bit(tmp_path):
    """The residuals are those of buckets that DDP has laid out alike."""
    (found,) = on_ranks(1, alone, ["powersgd", "state_dict"], str(tmp_path))
    assert found == dict.fromkeys(["powersgd", "state_dict"], (True, [], []))


def test_a_state_that_nobody_knows_is_warned_of_at_each_start(compared):
    """No snapshot has it, so that a resumed run differs."""
    for of_rank in compared:
        is_same, *starts = of_rank["unknown"]
        assert not is_same
        for (text,) in starts:
            assert "rounding_hook of DDP keeps a Unknown, which no snapshot holds" in text


def test_ranks_that_average_only_now_and_then_are_warned_of(compared):
    """The parameters of the other ranks are not saved."""
    for of_rank in compared:
        for (text,) in of_rank["local"][1:]:
            assert "post_localSGD_hook of DDP lets ranks have parameters of their own" in text


def test_a_state_in_memory_continues_to_the_bit(tmp_path):
    """`Trainer.state_dict` has that of its rank."""
    assert on_two_ranks(in_memory, "powersgd", str(tmp_path)) == [True, True]


def described(comm, out):
    """What the snapshots of runs say of themselves."""
    found = {}
    for kind, static_graph in (("powersgd", False), ("powersgd", True), ("unknown", False), (None, False)):
        place = f"{out}/{kind}-{static_graph}"
        _, warned = run(comm, kind, 5, place, static_graph)
        manifest, _ = json.JSONDecoder().raw_decode(Path(place, "snapshot_iter_5", "manifest.json").read_text())
        found[f"{kind} {static_graph}"] = manifest["about"].get("not bit-exact"), warned
    return found


def test_a_snapshot_without_the_state_says_that_it_is_not_exact(tmp_path):
    """In its manifest, which `chainring inspect` shows; with a static graph DDP lays out its buckets otherwise at first."""
    for found in on_two_ranks(described, str(tmp_path)):
        assert found["powersgd False"] == (None, [])
        assert found["None False"] == (None, [])
        for kind, words in (("unknown False", "keeps a Unknown"), ("powersgd True", "static_graph=True")):
            about, (text,) = found[kind]
            assert about == text
            assert words in text


def one_more_rank(comm, out):
    return run(comm, "powersgd", 10, out)[1]


def test_on_another_number_of_ranks_a_new_state_begins_with_a_warning(tmp_path):
    """Error feedback is what each rank has not sent."""
    on_two_ranks(run, "powersgd", 5, str(tmp_path))
    for warned in on_ranks(3, one_more_rank, str(tmp_path)):
        (text,) = warned
        assert "powerSGD_hook of DDP begins with a new PowerSGDState on 3 ranks" in text
        assert "PowerSGDState by 2 ranks" in text


def counted(comm, out):
    """How many updates PowerSGD has counted."""
    trainer = a_trainer(comm, "powersgd", 2, out)
    trainer.run()
    ((_, state),) = trainer.updater.get_model("main")._comm_hooks
    return state.iter, len(state.error_dict)


def test_laying_out_buckets_counts_as_no_update(tmp_path):
    """Compression starts after as many updates as its state says."""
    assert on_two_ranks(counted, str(tmp_path)) == [(2, 0)] * 2


def test_a_snapshot_with_states_of_ranks_is_read_without_them(tmp_path):
    """In one process, by a model that is not wrapped."""
    on_two_ranks(run, "powersgd", 5, str(tmp_path))
    net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    serializers.load(tmp_path / "snapshot_iter_5", net)
    updater = StandardUpdater(SerialIterator([0] * 40, 8), torch.optim.SGD(net.parameters(), lr=0.05), net)
    serializers.load(tmp_path / "snapshot_iter_5", Trainer(updater, out=tmp_path / "out"))
    assert updater.iteration == 5
