"""Ranks that do not arrive where others wait, and errors in process groups that the script has made: nothing hangs."""

import gc
import importlib
import multiprocessing
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from chainring import training
from chainring._distributed.group import BACKGROUND_GROUP, MAIN_GROUP, is_connection_error, is_timeout
from chainring._distributed.heartbeat import find_late
from chainring._distributed.progress import Record
from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from ports import free_port

TIMEOUT = 6.0  # two busy processes beside a rank are not taken for a late one
AT_MOST = TIMEOUT + 60  # of a busy machine
SHORT = "a group with a timeout of its own"


class Ranks:
    """Two ranks or more that train; to one of them something happens in its sixth update."""

    def __init__(self, place, size, kind, fault, group=""):
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        self.place, self.size = place, size
        self.ready = context.Barrier(size)  # held, or it is gone before the processes open it
        self.processes = [
            context.Process(target=_live, args=(rank, size, port, place, kind, fault, group, self.ready))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def ended(self, ranks, within=AT_MOST):
        """Their exit codes and what each has said, when they have ended: soon enough after it has happened."""
        for rank in ranks:
            self.processes[rank].join(120)
        codes = [self.processes[rank].exitcode for rank in ranks]
        assert (self.place / "happened").exists(), (codes, [self.said(rank) for rank in ranks])
        since = time.monotonic() - float((self.place / "happened").read_text())
        assert since < within, (codes, [self.said(rank) for rank in ranks])
        return codes, [self.said(rank) for rank in ranks]

    def said(self, rank):
        return (self.place / f"said-{rank}").read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()


def _live(rank, size, port, place, kind, fault, group, ready):
    os.dup2(os.open(place / f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    import faulthandler

    faulthandler.dump_traceback_later(40)
    importlib.import_module("torch._dynamo")  # as the first step of an optimizer does, which takes seconds
    ready.wait()  # their imports may end further apart than the timeout
    _make_group(group, rank, size, port, place)
    comm = create_communicator("cpu", timeout=None if group == SHORT else TIMEOUT)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    befall = fault if fault.rank in (rank, None) else Fault(-1, "")
    data = Data(befall)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    updater = training.StandardUpdater(SerialIterator(data, 8), optimizer, net, comm=comm, loss_func=_square)
    trainer = training.Trainer(updater, (8, "iteration"), out=str(place / "out"))
    befall.begin(updater, place)
    if kind == "script":
        updater.iteration = 5
        befall("in the data set")
        comm.barrier()
    trainer.extend(lambda trainer: befall("in an extension"), name="mine", trigger=(1, "iteration"))
    try:
        trainer.run()
    finally:
        (place / f"finally-{rank}").touch()
        if fault.lives_on and rank == fault.rank:
            threading.Event().wait()
    comm.close()


def _make_group(group, rank, size, port, place):
    if group == "file://":
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=size)
    elif group in ("tcp://", SHORT):
        seconds = timedelta(seconds=TIMEOUT if group == SHORT else 600)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", seconds, rank=rank, world_size=size)
    elif group == "env://":
        dist.init_process_group("gloo")
    elif group == "FileStore":
        dist.init_process_group("gloo", store=dist.FileStore(f"{place}/store", size), rank=rank, world_size=size)
    elif group == "TCPStore":
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    elif group == "a store of one's own":
        global own_store  # torch forgets the Python of it with its last reference
        own_store = OwnStore(f"{place}/store", size)
        dist.init_process_group("gloo", store=own_store, rank=rank, world_size=size)


class OwnStore(dist.Store):
    """A store in Python, which has what a process group needs and no more."""

    def __init__(self, path, size):
        super().__init__()
        self.inner = dist.FileStore(path, size)

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, number):
        return self.inner.add(key, number)

    def check(self, keys):
        return self.inner.check(keys)

    def wait(self, keys, timeout=timedelta(minutes=1)):
        self.inner.wait(keys, timeout)

    def set_timeout(self, timeout):
        self.inner.set_timeout(timeout)


def _square(model, inputs, targets):
    return ((model(inputs) - targets) ** 2).mean()


class Fault:
    """What happens to a rank, in its data set or in an extension, once it has done five updates."""

    def __init__(self, rank, kind, where="in the data set", lives_on=False):
        self.rank, self.kind, self.where, self.lives_on = rank, kind, where, lives_on

    def begin(self, updater, place):
        self.updater, self.place = updater, place

    def __call__(self, where):
        if where == self.where and self.kind and self.updater.iteration == 5:
            (self.place / "happened").write_text(str(time.monotonic()))
            getattr(self, self.kind)()

    def sleeps(self):
        time.sleep(1000)

    def is_stopped(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def deadlocks(self):
        lock = threading.Lock()
        with lock, lock:
            pass

    def holds_the_interpreter(self):
        re.match("(a+)+$", "a" * 100 + "b")

    def computes(self):
        time.sleep(TIMEOUT + 2)

    def raises(self):
        raise ValueError("broken")


class Data:
    def __init__(self, befall):
        self.befall = befall

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.befall("in the data set")
        return torch.ones(4), torch.ones(1)


@pytest.mark.parametrize(
    ("kind", "size", "late", "fault", "where"),
    [
        ("plain", 3, 0, "deadlocks", "in an extension"),
        ("plain", 2, 1, "holds_the_interpreter", "in the data set"),
        ("ddp", 2, 0, "sleeps", "in the data set"),
        ("fsdp", 2, 1, "sleeps", "in the data set"),
    ],
)
def test_a_rank_that_does_not_arrive_is_named_with_its_iteration_and_its_stack(tmp_path, kind, size, late, fault, where):
    """Whether the others wait for it in the updater's exchange or in torch's own, they raise RankFailed."""
    others = [rank for rank in range(size) if rank != late]
    with Ranks(tmp_path, size, kind, Fault(late, fault, where)) as ranks:
        codes, words = ranks.ended(others)
    assert codes == [1] * len(others)
    for rank, text in zip(others, words, strict=True):
        assert f"RankFailed: rank {late} has not arrived" in text
        assert "has iteration 5 as its last" in text
        assert f"in {fault}" in text  # the stack
        assert ("in extension 'mine'" in text) == (where == "in an extension")
        assert (tmp_path / f"finally-{rank}").exists()


@pytest.mark.parametrize(("kind", "late", "group"), [("plain", 1, ""), ("ddp", 0, ""), ("fsdp", 0, "env://")])
def test_a_rank_that_is_stopped_is_named_with_its_iteration_also_where_it_has_the_store(tmp_path, kind, late, group):
    """Rank 0 has the store through which the ranks have met, so that none of them can write to another."""
    with Ranks(tmp_path, 2, kind, Fault(late, "is_stopped"), group) as ranks:
        codes, words = ranks.ended([1 - late])
    assert codes == [1]
    assert f"rank {late} has not arrived" in words[0]
    assert f"process {ranks.processes[late].pid} on" in words[0]
    assert "has iteration 5 as its last" in words[0]
    assert "Its process is stopped" in words[0]


def test_a_rank_that_was_late_ends_by_itself_with_what_the_others_say(tmp_path):
    with Ranks(tmp_path, 2, "plain", Fault(0, "sleeps")) as ranks:
        codes, words = ranks.ended([0, 1])
    assert codes == [1, 1]
    assert "rank 0 stops, because it had not arrived" in words[0]
    assert "rank 1 waited" in words[0]
    assert "RankFailed: rank 0 has not arrived" in words[1]


def test_a_rank_is_also_named_where_the_group_of_the_script_has_the_shorter_timeout(tmp_path):
    """DDP's exchange then ends with an error of gloo, before this library would have asked."""
    with Ranks(tmp_path, 2, "ddp", Fault(1, "sleeps"), SHORT) as ranks:
        codes, words = ranks.ended([0])
    assert codes == [1]
    assert "RankFailed: rank 1 has not arrived" in words[0]
    assert "in sleeps" in words[0]


def test_a_rank_that_does_not_arrive_outside_of_a_run_is_named_too(tmp_path):
    """As where rank 0 prepares the data before the others begin."""
    with Ranks(tmp_path, 2, "script", Fault(0, "sleeps")) as ranks:
        codes, words = ranks.ended([1])
    assert codes == [1]
    assert "RankFailed: rank 0 has not arrived" in words[0]
    assert "is outside of a run" in words[0]
    assert "in sleeps" in words[0]


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_nobody_can_keep_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout is a number of seconds above 0"):
        create_communicator("cpu", timeout=timeout)


@pytest.mark.parametrize("timeout", ["60", True, timedelta(minutes=1)])
def test_a_timeout_that_is_no_number_is_refused(timeout):
    with pytest.raises(TypeError, match="timeout is a number of seconds"):
        create_communicator("cpu", timeout=timeout)


@pytest.mark.parametrize("group", ["file://", "tcp://", "env://", "FileStore", "TCPStore", "a store of one's own"])
@pytest.mark.parametrize(("kind", "failing"), [("plain", 1), ("ddp", 0)])
def test_an_error_reaches_all_ranks_of_a_group_that_the_script_has_made(tmp_path, group, kind, failing):
    with Ranks(tmp_path, 2, kind, Fault(failing, "raises"), group) as ranks:
        codes, words = ranks.ended([0, 1], within=60)
    assert codes == [1, 1]
    assert "ValueError: broken" in words[failing]
    assert f"RankFailed: rank {failing} has failed" in words[1 - failing]
    assert "in raises" in words[1 - failing]  # the traceback


def test_an_error_reaches_a_rank_that_waits_in_ddp_though_the_failed_process_lives_on(tmp_path):
    """As a worker of Ray does: its connections stay open, and DDP would wait for it."""
    with Ranks(tmp_path, 2, "ddp", Fault(1, "raises", lives_on=True), "tcp://") as ranks:
        codes, words = ranks.ended([0])
    assert codes == [1]
    assert "rank 1 has failed, and all stop with it" in words[0]
    assert "in raises" in words[0]


def test_ranks_that_all_compute_longer_than_the_timeout_are_not_late(tmp_path):
    """Nobody waits for another, so nobody is late."""
    with Ranks(tmp_path, 2, "ddp", Fault(None, "computes", "in an extension")) as ranks:
        for process in ranks.processes:
            process.join(60)
    assert [process.exitcode for process in ranks.processes] == [0, 0], ranks.said(0)


def pair_of_gloo():
    """Two ranks of gloo in this process."""
    store, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, limit), (0, 1)))


def test_what_gloo_says_of_a_timeout_is_taken_for_one_also_of_the_exchanges_that_it_ends():
    """Of several that wait for one rank, only the first to end is said to have timed out."""
    waiting, _other = pair_of_gloo()
    receives = [waiting.recv([torch.zeros(1)], 1, tag) for tag in (1, 2)]
    first = partial(receives[0].wait, timedelta(seconds=0.1))
    said = []
    for wait in (first, receives[1].wait, lambda: waiting.send([torch.zeros(1)], 1, 3).wait()):
        with pytest.raises(RuntimeError) as failure:
            wait()
        assert is_timeout(failure.value)
        assert is_connection_error(failure.value)
        said.append(str(failure.value))
    assert "Timed out" in said[0]
    assert "Timed out" not in said[1]


@pytest.mark.parametrize("end", ["timed out in blocking wait.", "ran for 4031 milliseconds before timing out."])
def test_what_nccl_says_of_a_timeout_is_taken_for_one(end):
    assert is_timeout(dist.DistBackendError(f"WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=4000) {end}"))


class Stuck:
    """Data whose worker never returns an example."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        threading.Event().wait()


def test_a_loader_that_waits_too_long_for_its_worker_fails_on_its_own_rank():
    """The other ranks get its error, and not that a rank is late."""
    with pytest.raises(RuntimeError, match="DataLoader timed out") as failure:
        next(iter(DataLoader(Stuck(), num_workers=1, timeout=1)))
    assert not is_timeout(failure.value)
    assert not is_connection_error(failure.value)


def test_a_rank_that_has_left_gloo_is_not_one_that_is_late():
    waiting, other = pair_of_gloo()
    receive = waiting.recv([torch.zeros(1)], 1, 1)
    del other
    gc.collect()
    with pytest.raises(RuntimeError) as failure:
        receive.wait()
    assert is_connection_error(failure.value)
    assert not is_timeout(failure.value)


def records(*counts):
    """Of each rank, by the name of a group, how many collectives it has begun there and who belongs to it."""
    members = {}
    for rank, groups in enumerate(counts):
        for name in groups:
            members.setdefault(name, []).append(rank)
    return {
        rank: Record(rank, collectives={name: (number, members[name], name) for name, number in groups.items()})
        for rank, groups in enumerate(counts)
    }


def test_of_a_chain_of_waits_the_rank_at_its_end_is_late():
    """Rank 0 waits for rank 2, whose data it shares, and that one for rank 3, with which it computes a layer."""
    found = records({"tp 0": 9, "dp 0": 4}, {"tp 0": 9, "dp 1": 4}, {"tp 1": 8, "dp 0": 3}, {"tp 1": 7, "dp 1": 3})
    assert find_late(found[0], found, is_beside=False) == [3]


def test_ranks_that_wait_for_each_other_are_not_late():
    found = records({"one": 2, "other": 1}, {"one": 1, "other": 2})
    assert find_late(found[0], found, is_beside=False) == []


def test_a_rank_that_has_begun_an_exchange_ahead_of_others_does_not_wait_yet():
    """The communicator starts exchanges and waits for them later, so that only those count in which it waits."""
    found = records({MAIN_GROUP: 2}, {MAIN_GROUP: 1})
    assert find_late(found[0], found, is_beside=False) == []
    found[0].waited = 1.0
    assert find_late(found[0], found, is_beside=False) == [1]


def test_a_rank_whose_snapshot_is_late_is_found_in_the_exchange_of_snapshots_alone():
    found = records({MAIN_GROUP: 7, BACKGROUND_GROUP: 3}, {MAIN_GROUP: 9, BACKGROUND_GROUP: 2})
    assert find_late(found[0], found, is_beside=True) == [1]


def test_a_rank_of_which_nothing_is_known_is_late():
    found = records({"dp": 2}, {"dp": 2}, {"dp": 2})
    found[1] = Record(1, state="It does not answer.")
    assert find_late(found[0], found, is_beside=False) == [1]
