"""A snapshot of several ranks is complete or absent on all alike, and the parts of its tensors make the whole."""

import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chainring._places.base import Directory
from chainring.parallel import Communicator
from chainring.serializers import _loading, _safetensors, _saving
from chainring.serializers._store import CorruptError, Snapshots, open_store

SIZE, PATIENCE = 3, 20.0


class Threads(Communicator):
    """Ranks that are threads of this process. One that waits for another in vain gets an error."""

    def __init__(self, rank, held, barrier):
        self.rank, self.size, self.held, self._barrier = rank, SIZE, held, barrier

    def gather_object(self, obj):
        self.held[self.rank] = obj
        self._barrier.wait(PATIENCE)
        gathered = list(self.held)
        self._barrier.wait(PATIENCE)
        return gathered


def world():
    held, barrier = [None] * SIZE, threading.Barrier(SIZE)
    return [Threads(rank, held, barrier) for rank in range(SIZE)]


def part_of(rank):
    """A tensor of 2 rows on each rank, and rows of which rank 2 has none."""
    tensors = {"weight": torch.full((2, 4), float(rank))}
    places = {"weight": ((2 * rank, 0), (2 * SIZE, 4))}
    if rank != 2:
        tensors["bias"] = torch.full((1,), float(rank))
        places["bias"] = ((rank,), (2,))
    if rank == 0:
        tensors["step"] = torch.tensor(7.0)
    return tensors, places


def writer(rank):
    tensors, places = part_of(rank)
    return lambda place: _safetensors.write(place, tensors, shard_offsets=places)


def text_writer(*names):
    """Writes the state of a snapshot that has tensors of these names."""
    content = json.dumps({"format": 1, "state": {name: {"$here": 0} for name in names}}).encode()

    def write(file):
        file.write(content)
        return len(content), zlib.crc32(content)

    return write


def saved(store, writers=writer, at_rank_0=None):
    """What each rank's part in the snapshot has raised, ``None`` where nothing."""

    def take_part(comm):
        try:
            if comm.rank == 0:
                files = {"state.json": text_writer("weight", "bias", "step")}
                _saving.coordinate(comm, at_rank_0 or store, "snapshot_iter_5", writers(0), files, 5, {})
            else:
                _saving.participate(comm, store, writers(comm.rank))
        except OSError as error:
            return error
        return None

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(take_part, world()))


def test_every_rank_writes_a_file_and_together_they_hold_the_whole(tmp_path):
    store = open_store(tmp_path)
    assert saved(store) == [None] * SIZE
    manifest = store.snapshot("snapshot_iter_5").verify()
    files = [f"rank{rank:05d}-of-00003.safetensors" for rank in range(SIZE)]
    assert sorted(manifest.files) == [*files, "state.json"]
    tensors = _loading.read_state(tmp_path / "snapshot_iter_5")
    assert tensors["weight"].tolist() == [[float(row // 2)] * 4 for row in range(2 * SIZE)]
    assert tensors["bias"].tolist() == [0.0, 1.0]
    assert tensors["step"].item() == 7


@pytest.mark.parametrize("broken", range(SIZE))
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no tensor")], ids=repr)
def test_a_rank_that_cannot_write_leaves_no_snapshot_on_any(tmp_path, broken, error):
    """Every rank raises, with the name of the one that has failed and why; nothing lies beside."""

    def failing(place):
        raise error

    raised = saved(open_store(tmp_path), lambda rank: failing if rank == broken else writer(rank))
    assert all(f"rank {broken}: {type(error).__name__}" in str(each) for each in raised)
    assert all(error.args[-1] in str(each) for each in raised)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("point", ["begun", "wrote state.json", "wrote manifest.json", "flushed"])
def test_a_failure_of_rank_0_is_raised_by_all(tmp_path, point):
    """Before the files of the others are asked for, and after."""

    def fail(passed):
        if passed == point:
            raise OSError(5, "broken disk")

    raised = saved(open_store(tmp_path), at_rank_0=Snapshots(Directory(tmp_path, at=fail)))
    assert all("broken disk" in str(each) for each in raised)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused_by_all(tmp_path):
    """And what is there stays as it was."""
    store = open_store(tmp_path)
    saved(store)
    raised = saved(store)
    assert all("is there already" in str(each) for each in raised)
    assert store.snapshot("snapshot_iter_5").verify().iteration == 5


def read_back(directory, *places):
    """The state of a snapshot with the tensor ``weight`` of shape (2, 4) in each file, as a shard where it has a place."""

    def writer(place):
        return lambda file: _safetensors.write(file, {"weight": torch.ones(2, 4)}, {"weight": place} if place else {})

    files = {f"{number}.safetensors": writer(place) for number, place in enumerate(places)}
    open_store(directory).commit("snapshot", {"state.json": text_writer("weight"), **files}, 5)
    return _loading.read_state(directory / "snapshot")


BROKEN = {
    "a part is missing": [((0, 0), (6, 4)), ((2, 0), (6, 4))],
    "a part is there twice": [((0, 0), (6, 4)), ((2, 0), (6, 4)), ((2, 0), (6, 4)), ((4, 0), (6, 4))],
    "one part is missing and another there twice": [((0, 0), (6, 4)), ((2, 0), (6, 4)), ((2, 0), (6, 4))],
    "parts overlap": [((0, 0), (6, 4)), ((1, 0), (6, 4)), ((4, 0), (6, 4))],
    "a part lies before the beginning": [((0, 0), (6, 4)), ((2, 0), (6, 4)), ((-2, 0), (6, 4))],
    "a part lies outside": [((0, 0), (6, 4)), ((2, 0), (6, 4)), ((5, 0), (6, 4))],
    "shapes differ": [((0, 0), (6, 4)), ((2, 0), (6, 4)), ((4, 0), (8, 4))],
    "offsets of another dimension": [((0, 0), (6, 4)), ((2, 0), (6, 4)), ((4,), (6, 4))],
    "a huge shape": [((0, 0), (10**9, 10**9))],
}


@pytest.mark.parametrize("places", BROKEN.values(), ids=BROKEN)
def test_parts_that_are_no_whole_are_refused(tmp_path, places):
    """And no memory is taken for what they claim."""
    with pytest.raises(CorruptError, match="weight"):
        read_back(tmp_path, *places)


@pytest.mark.parametrize("second", [None, ((0, 0), (2, 4))], ids=["whole twice", "whole and in parts"])
def test_a_tensor_of_two_origins_is_refused(tmp_path, second):
    with pytest.raises(CorruptError, match="weight"):
        read_back(tmp_path, None, second)
