"""A snapshot of a model in any layout is loaded in any other, with the same bits, and read once by all ranks together."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from layouts import EVERY, a_trainer, whole_state
from torch import nn

from chainring import serializers
from chainring.cli import main
from chainring.parallel import RankFailed
from chainring.serializers import CorruptError
from chainring.serializers._loading import read_state
from rank_pair import on_ranks

WIDTH = 16384  # so that tensors are read in parts, and not at once as small ones are
NAMES = [f"{module}/{name}" for module in (0, 2, 3, 4) for name in ("weight", "bias")]


def saved_state(snapshot, names=NAMES):
    """The parameters and the optimizer's state of a snapshot, as a reader that knows of no ranks finds them."""
    state = read_state(Path(snapshot))
    moments = state["updater/optimizer:main/state"]
    found = {}
    for number, name in enumerate(names):
        found[f"{number}/value"] = state[f"updater/model:main/{name}"]
        found |= {f"{number}/{key}": value for key, value in moments[f"main/{name}"].items()}
    return found


def different(found, wanted):
    return [name for name in wanted.keys() | found.keys() if name not in found or not torch.equal(found[name], wanted[name])]


def bytes_read():
    """How many bytes this thread has read so far: others answer ranks, and look whether their processes live."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])


def moved(world, directory):
    """What differs in each layout after a snapshot of each was loaded, and how many bytes this rank has read for each."""
    for layout in EVERY:
        a_trainer(layout, f"{directory}/{layout}", WIDTH, lr=0.01).run()
    wrong, read = {}, {}
    for target in EVERY:
        first, trainer = [a_trainer(target, f"{directory}/other", WIDTH, seed=4) for _ in range(2)]
        serializers.load(f"{directory}/one/snapshot_iter_1", first)  # at which Python loads modules, and is not measured
        for source in ("one", *EVERY):
            snapshot = f"{directory}/{source}/snapshot_iter_1"
            before = bytes_read()
            serializers.load(snapshot, trainer)
            read[f"{source} -> {target}"] = bytes_read() - before
            if names := different(whole_state(trainer), saved_state(snapshot)):
                wrong[f"{source} -> {target}"] = names
    return wrong, read


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("moves")


@pytest.fixture(scope="module")
def ranks(directory):
    a_trainer(None, directory / "one", WIDTH, lr=0.01).run()
    return on_ranks(4, moved, str(directory))


def test_a_snapshot_of_any_layout_is_loaded_in_any_other_bit_for_bit(ranks):
    """Parameters and the optimizer's state, on every rank."""
    assert [wrong for wrong, _ in ranks] == [{}] * 4


def test_all_ranks_together_read_a_snapshot_once(ranks, directory):
    """At most a hundredth more than its files, in every layout, also where every rank needs everything."""
    for move in ranks[0][1]:
        size = sum(path.stat().st_size for path in (directory / move.partition(" ->")[0] / "snapshot_iter_1").iterdir())
        assert size <= sum(read[move] for _, read in ranks) <= 1.01 * size, move


def loaded_twice(world, out):
    """How many bytes this rank has read in a second load of a DDP model of many small tensors."""
    nets = [nn.Sequential(*[nn.Linear(6, 6) for _ in range(200)]) for _ in range(2)]
    saved, trainer = [a_trainer("ddp", out, net=net) for net in nets]
    saved.run()
    world.barrier()
    for _ in range(2):  # Python loads modules at the first
        before = bytes_read()
        serializers.load(f"{out}/snapshot_iter_1", trainer)
        read = bytes_read() - before
    return read


def test_the_header_of_a_file_that_all_ranks_share_is_read_once(tmp_path):
    """It is half of a file of many small tensors."""
    size = sum(on_ranks(4, loaded_twice, str(tmp_path)))
    assert size <= 1.01 * sum(path.stat().st_size for path in (tmp_path / "snapshot_iter_1").iterdir())


@pytest.mark.parametrize("layout", EVERY)
def test_one_process_loads_and_exports_a_snapshot_of_any_layout(ranks, directory, layout):
    trainer = a_trainer(None, directory / "alone", WIDTH, seed=4)
    snapshot = directory / layout / "snapshot_iter_1"
    serializers.load(snapshot, trainer)
    wanted = saved_state(snapshot)
    assert different(whole_state(trainer), wanted) == []
    assert main(["export", str(directory / layout), str(directory / f"{layout}.safetensors")]) == 0
    again = a_trainer(None, directory / "alone", WIDTH, seed=5)
    serializers.load(directory / f"{layout}.safetensors", again.updater.get_model("main"))
    for parameter, name in zip(again.updater.get_model("main").parameters(), range(len(NAMES)), strict=True):
        assert torch.equal(parameter, wanted[f"{name}/value"])


HARMS = {
    "a bit of a large tensor": lambda path: flip(path, path.stat().st_size // 2),
    "a bit of the header": lambda path: flip(path, 100),
    "the last byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "missing": Path.unlink,
}


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def harmed(world, directory):
    """What a load of a snapshot raises that is harmed, and where a run goes on of which it is the newest, by the harm."""
    a_trainer("tp and fsdp", f"{directory}/first", WIDTH, lr=0.01, stop=2).run()
    found = {}
    for number, (name, harm) in enumerate(HARMS.items()):
        out = Path(directory, str(number))
        if world.rank == 0:
            shutil.copytree(f"{directory}/first", out)
            harm(out / "snapshot_iter_2" / "rank00002-of-00004.safetensors")
        world.barrier()
        words = None
        try:
            serializers.load(out / "snapshot_iter_2", a_trainer("fsdp", out, WIDTH))
        except CorruptError as error:
            words = str(error)
        trainer = a_trainer("fsdp", out, WIDTH, autoload=True, seed=4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.run()
        same = different(whole_state(trainer), saved_state(out / "snapshot_iter_1"))
        told = [str(warning.message) for warning in caught if "is skipped" in str(warning.message)]
        found[name] = words, trainer.updater.iteration, same, told
    return found


def test_what_is_damaged_is_noticed_by_all_ranks_which_go_on_from_the_snapshot_before(tmp_path):
    """A part that one rank reads, a header, and a file that is cut or missing; one rank says it, and none waits."""
    ranks = on_ranks(4, harmed, str(tmp_path))
    for name in HARMS:
        raised = {rank[name][0] for rank in ranks}
        assert len(raised) == 1, raised
        assert "rank00002-of-00004.safetensors" in raised.pop(), name
        for rank in ranks:
            assert rank[name][1:3] == (1, []), name
        told = [len(rank[name][3]) for rank in ranks]
        assert told == [1, 0, 0, 0], name


class Table:
    """An object with large state, which rank 0 alone asks for, or which rank 2 fails to load."""

    def __init__(self, comm, fault=None):
        self.comm, self.fault = comm, fault
        self.table = torch.full((100, 100), float(comm.rank + 1))

    def serialize(self, serializer):
        if self.fault == "apart" and self.comm.rank > 0:
            return
        serializer("table", self.table)
        if self.fault == "fails" and self.comm.rank == 2:
            raise KeyError("no such key")


def asked_apart(world, directory):
    """What each rank raises where rank 0 alone asks for a tensor, and where rank 2 fails meanwhile."""
    if world.rank == 0:
        serializers.save(f"{directory}/saved", Table(world))
    world.barrier()
    raised = []
    for fault in ("apart", "fails"):
        with pytest.raises((KeyError, RankFailed, ValueError)) as caught:
            serializers.load(f"{directory}/saved", Table(world, fault))
        raised.append(f"{caught.typename}: {caught.value}")
    loaded = Table(world)
    serializers.load(f"{directory}/saved", loaded)
    return raised, loaded.table.unique().tolist()


def test_where_a_rank_asks_for_another_tensor_or_fails_all_ranks_raise(tmp_path):
    """The error names what is asked for; none waits for one that has failed, and all can load again."""
    ranks = on_ranks(4, asked_apart, str(tmp_path))
    for rank, ((apart, fails), table) in enumerate(ranks):
        assert apart.startswith("ValueError: ranks load the same state in the same order"), apart
        assert "rank 0 reads table, rank 1 nothing" in apart
        assert fails.startswith("KeyError: " if rank == 2 else "RankFailed: "), fails
        assert rank == 2 or "by rank 2: KeyError: 'no such key'" in fails
        assert table == [1.0]
