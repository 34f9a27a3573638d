"""Directories of ``torch.distributed.checkpoint`` are loaded and continued; nothing in their metadata runs."""

import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_runs import Net, assert_close, assert_same, make, moments, train, trainer_of
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from chainring import serializers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)|TypedStorage is")


@pytest.mark.parametrize("form", ["by name", "flattened", "by number"])
def test_the_continued_run_follows_the_loop_that_goes_on(tmp_path, capsys, form):
    """Optimizers with the names of parameters, with one key for each entry, and with numbers."""
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 20)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    states = (
        (model.state_dict(), optimizer.state_dict())
        if form == "by number"
        else get_state_dict(model, optimizer, options=options)
    )
    state = {"model": states[0], "optimizer": states[1], "scheduler": scheduler.state_dict(), "iteration": 20, "epoch": 2}
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    own = make(1)
    trainer = trainer_of(*own, tmp_path / "out")
    serializers.load(tmp_path / "saved", trainer)
    assert_same(dict(own[0].state_dict()), dict(model.state_dict()))
    assert_same(moments(own[1]), moments(optimizer))
    assert (trainer.updater.iteration, trainer.updater.epoch, own[2].last_epoch) == (20, 2, 2)
    assert "a directory of torch.distributed.checkpoint" in capsys.readouterr().out
    train(model, optimizer, scheduler, 20)
    trainer.run()
    assert_close(own[0], model)


def test_an_optimizer_without_state_is_taken_too(tmp_path):
    """Of plain SGD nothing is left of it but its settings."""
    model, optimizer, _ = make(optimizer=torch.optim.SGD)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "saved")
    own = make(1, torch.optim.SGD)
    serializers.load(tmp_path / "saved", trainer_of(*own, tmp_path / "out"))
    assert_same(dict(own[0].state_dict()), dict(model.state_dict()))


def save_plain(tmp_path):
    model = Net()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved")
    return model, tmp_path / "saved" / ".metadata"


def test_a_tensor_in_chunks_is_put_together(tmp_path):
    """As several ranks write their shards: here one file has the halves of a tensor."""
    model, path = save_plain(tmp_path)
    metadata = pickle.loads(path.read_bytes())
    name, size = "first.weight", torch.Size([4, 4])
    file = path.parent / "__1_0.distcp"
    chunks, start = [], 0
    with file.open("wb") as stream:
        for offset in (0, 4):
            torch.save(model.first.weight.detach()[offset : offset + 4].clone(), stream)
            chunks.append(ChunkStorageMetadata(torch.Size([offset, 0]), size))
            place = next(iter(metadata.storage_data.values()))
            index = MetadataIndex(name, torch.Size([offset, 0]))
            metadata.storage_data[index] = type(place)("__1_0.distcp", start, stream.tell() - start)
            start = stream.tell()
    metadata.state_dict_metadata[name].chunks = chunks
    path.write_bytes(pickle.dumps(metadata))
    other = Net()
    serializers.load(path.parent, other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def changed(path, change):
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def set_place(**values):
    def change(metadata):
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = type(place)(**{**vars(place), **values})

    return change


def set_size(*size):
    def change(metadata):
        tensor = metadata.state_dict_metadata["first.weight"]
        tensor.size = torch.Size(size)
        tensor.chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_place(relative_path="../../outside"), "which is not in it"),
        (set_place(relative_path="/etc/passwd"), "which is not in it"),
        (set_place(relative_path="other.distcp"), "lacks 'other.distcp'"),
        (set_place(offset=2**60), "does not lie in it"),
        (set_place(length=2**60), "does not lie in it"),
        (set_place(offset=-1), "does not lie in it"),
        (set_place(offset=0), "has another size or dtype|does not lie in it|cannot be read"),
        (set_size(2**40, 2**20), "has another size or dtype"),
        (set_size(8, 5), "has another size or dtype"),
        (lambda metadata: setattr(metadata, "storage_data", {}), "do not say where"),
        (lambda metadata: metadata.state_dict_metadata.update({"a": print}), "builtins.print"),
        (lambda metadata: setattr(metadata, "planner_data", {"first.weight": ("a", None)}), "neither text nor a number"),
        (lambda metadata: metadata.planner_data.update({"first.weight": ("a",) * 5000}), "without end"),
    ],
)
def test_metadata_that_say_something_else_than_the_files_are_refused(tmp_path, change, message):
    """Nothing outside the directory is opened, and no more memory is asked for than the files have."""
    _, path = save_plain(tmp_path)
    changed(path, change)
    with pytest.raises(ValueError, match=message):
        serializers.load(path.parent, Net())


def test_a_missing_file_is_named(tmp_path):
    """Of several, that which the metadata name."""
    _, path = save_plain(tmp_path)
    shutil.move(path.parent / "__0_0.distcp", tmp_path)
    with pytest.raises(ValueError, match=r"lacks '__0_0\.distcp'"):
        serializers.load(path.parent, Net())
