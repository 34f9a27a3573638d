"""RankTimes says where the time of each rank goes, and names the rank that the others wait for."""

import contextlib
import io
import json
import re
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from chainring import html_report
from chainring._distributed.communicator import Communicator
from chainring.datasets import TupleDataset
from chainring.iterators import LoaderIterator, SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions
from rank_pair import on_ranks, on_two_ranks
from slow_stages import Data, Model, Steps, spin


class TwoSteps(StandardUpdater):
    def update_core(self):
        for _ in range(2):
            self.backward(self.get_model("main")(*self.next_batch()))
            self.step()


def train(comm, out, slow, virtual_ranks=None, everywhere=2, kind=None):
    """What was reported last, and what rank 0 has printed; each stage takes 2 ms, and that of the slow rank many."""
    times = dict.fromkeys(("data", "forward", "backward", "step", "other"), everywhere)
    if slow is not None and comm.rank == slow[0]:
        times[slow[1]] = 150
    torch.manual_seed(0)
    model = Model(times)
    model.register_buffer("mean", torch.zeros(1))
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = Steps(model.parameters(), times)
    data = Data(times, torch.randn(32, 3))
    iterator = SerialIterator(data, 4 * comm.size)
    if kind == "a share by the loader":
        iterator = LoaderIterator(DataLoader(data, 4, sampler=range(comm.rank, 32, comm.size)), per_rank=True)
    cls = TwoSteps if kind == "two steps" else StandardUpdater
    updater = cls(iterator, optimizer, model, comm=comm, virtual_ranks=virtual_ranks)
    trainer = Trainer(updater, (8, "iteration"), out=str(out))
    trainer.extend(lambda trainer: spin(times["other"]), name="mine", trigger=(1, "iteration"))
    rank_times = extensions.RankTimes(trigger=(4, "iteration"))
    trainer.extend(rank_times)
    if kind == "gathered":
        trainer.extend(lambda trainer: trainer.comm.gather_object(0), name="gather", trigger=(1, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.run()
    return trainer.get_extension("LogReport").log[-1] if comm.is_main else {}, printed.getvalue(), rank_times.ranks


@pytest.mark.parametrize("virtual_ranks", [None, 4])
@pytest.mark.parametrize("stage", ["data", "forward", "backward", "step", "other"])
def test_the_slow_rank_and_its_stage_are_named_and_not_who_waits(tmp_path, stage, virtual_ranks):
    (row, printed, ranks), (_, nothing, same) = on_two_ranks(train, tmp_path, (1, stage), virtual_ranks)
    assert row["rank_times/slowest"] == 1
    assert row["rank_times/spread"] > 1.2
    assert printed.count("others wait for it") == 1
    assert "rank 1 (cpu of " in printed
    assert f"most of it is {stage}, " in printed
    assert (nothing, ranks) == ("", same)
    waiting, busy = (seconds["waiting"] for seconds in ranks)
    assert (waiting > busy, row["rank_times/waiting"] > 0.05) == (True, True)
    assert row[f"rank_times/{stage}"] > 1.5 * ranks[0][stage]


@pytest.mark.parametrize(
    ("kind", "stage", "virtual_ranks"),
    [
        ("DDP", "data", None),
        ("DDP", "backward", None),
        ("DDP", "step", None),
        ("two steps", "forward", 4),
        ("a share by the loader", "data", None),
        ("gathered", "other", None),
    ],
)
def test_what_a_rank_waits_for_in_any_exchange_is_not_its_work(tmp_path, kind, stage, virtual_ranks):
    """In a model of DDP, between steps of virtual ranks, at the end of a loader's pass, and in an extension."""
    (row, printed, ranks), _ = on_two_ranks(train, tmp_path, (1, stage), virtual_ranks, 2, kind)
    assert (row["rank_times/slowest"], f"most of it is {stage}, " in printed) == (1, True)
    of_waiting, of_slow = (sum(seconds for name, seconds in rank.items() if name != "waiting") for rank in ranks)
    assert (ranks[0]["waiting"] > 0.1, of_waiting < of_slow / 2) == (True, True)


def test_a_model_that_exchanges_amid_its_work_is_warned_about(tmp_path):
    """Of ``fully_shard``, whose waits are not told apart."""
    assert all("counts as its work" in text for text in on_two_ranks(shard, tmp_path))


def shard(comm, out):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Model(dict.fromkeys(("forward", "backward"), 0)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    updater = StandardUpdater(SerialIterator(TupleDataset(torch.randn(8, 3)), 4), optimizer, model, comm=comm)
    trainer = Trainer(updater, (1, "iteration"), out=str(out))
    trainer.extend(extensions.RankTimes())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    return " ".join(str(warning.message) for warning in caught)


def test_a_slow_rank_of_three_is_compared_with_the_median(tmp_path):
    (row, printed, _), *_ = on_ranks(3, train, tmp_path, (0, "forward"))
    assert (row["rank_times/slowest"], "rank 0 (cpu of " in printed) == (0, True)


def test_seconds_are_those_that_a_stage_takes(tmp_path):
    """At least what is spent there, and all of them together no more than the time of an update."""
    began = time.perf_counter()
    (row, _, ranks), _ = on_two_ranks(train, tmp_path, None, None, 5)
    elapsed = time.perf_counter() - began
    for seconds in ranks:
        assert all(seconds[stage] >= 0.005 for stage in ("data", "forward", "backward", "step"))
        assert 4 * sum(seconds.values()) < elapsed
    assert row["rank_times/spread"] >= 1


def test_the_page_of_the_run_draws_the_stages_of_each_rank(tmp_path):
    """From ``rank_times.json``, which has those of the last report."""
    (_, _, ranks), _ = on_two_ranks(train, tmp_path, (1, "forward"))
    data = json.loads((tmp_path / "rank_times.json").read_text())
    assert (data["iteration"], data["ranks"]) == (8, ranks)
    html_report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    (rows,) = re.findall("<caption>Time by rank</caption>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    shown = [dict(re.findall(r'<i class="(\w+)" style="width:([\d.]+)%"', row)) for row in rows.split("<tr>")[1:]]
    longest = max(sum(stages.values()) for stages in ranks)
    for widths, stages in zip(shown, ranks, strict=True):
        assert {name: pytest.approx(100 * seconds / longest, abs=0.1) for name, seconds in stages.items() if seconds} == {
            name: float(width) for name, width in widths.items()
        }


@pytest.mark.parametrize("virtual_ranks", [None, 4])
def test_one_process_has_nobody_to_wait_for(tmp_path, virtual_ranks):
    """Not even in the sum of its virtual ranks."""
    row, printed, _ = train(Communicator(), tmp_path, None, virtual_ranks)
    assert (row["rank_times/slowest"], row["rank_times/spread"], row["rank_times/waiting"]) == (0, 1, 0)
    assert "others wait" not in printed
