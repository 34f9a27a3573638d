"""chainring diff of runs on other numbers of ranks: the same with virtual ranks, whatever the layout."""

import json

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import planted
from chainring.cli import main
from rank_pair import on_ranks


def sharded(model):
    """By FSDP2, over all ranks of the process."""
    from torch.distributed import get_world_size

    return fully_shard(model, mesh=init_device_mesh("cpu", (get_world_size(),)))


WRAPPERS = {"plain": None, "ddp": DistributedDataParallel, "fsdp": sharded}


def train(comm, kind, out, virtual_ranks):
    """Train on these ranks, in batches that every number of them divides."""
    planted.make_trainer(out, comm=comm, wrap=WRAPPERS[kind], batch=8, virtual_ranks=virtual_ranks).run()


def diff(capsys, one, other):
    status = main(["diff", "--json", str(one), str(other)])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4)])
def test_another_number_of_ranks_is_the_same_run_with_virtual_ranks(tmp_path, capsys, kind, size):
    """By the recorder, the log and the snapshots; the number is a setting that differs."""
    on_ranks(1, train, "plain", str(tmp_path / "one"), 4)
    on_ranks(size, train, kind, str(tmp_path / "many"), 4)
    status, found = diff(capsys, tmp_path / "one", tmp_path / "many")
    assert (status, found["same"]) == (0, True), found
    assert found["settings"]["ranks"] == [1, size]
    assert any("the snapshots of iterations 8, 16, 24" in text for text in found["compared"])


def test_without_virtual_ranks_another_number_is_found_in_the_first_iteration(tmp_path, capsys):
    """The examples are the same, and the loss is that of one rank."""
    on_ranks(1, train, "plain", str(tmp_path / "one"), None)
    on_ranks(2, train, "ddp", str(tmp_path / "two"), None)
    status, found = diff(capsys, tmp_path / "one", tmp_path / "two")
    assert (status, found["iteration"], found["what"]) == (1, 1, "loss")
    assert found["settings"]["ranks"] == [1, 2]
    assert found["tensor"] is not None
