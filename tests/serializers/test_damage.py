"""What is on the disk is what was saved, or loading it is an error that names the file and changes nothing."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import resume_program
from chainring import serializers
from chainring.iterators import SerialIterator
from chainring.serializers._store import CorruptError
from chainring.serializers.protocol import Stateful


class Tiny(Stateful):
    """A few values and two tensors; it counts what was put into it."""

    def __init__(self):
        self.loaded, self.values, self.tensors = 0, {"n": 3, "x": (0.5, float("inf"))}, [torch.arange(6.0), torch.eye(2) > 0]

    def serialize(self, serializer):
        self.loaded += serializer("loaded", 1)
        self.values = serializer("values", self.values)
        self.tensors = serializer("tensors", self.tensors)


@pytest.fixture
def saved(tmp_path):
    serializers.save(tmp_path / "saved", Tiny())
    return tmp_path / "saved"


@pytest.fixture
def model(tmp_path):
    serializers.save(tmp_path / "mlp.model", nn.Linear(2, 1))
    return tmp_path / "mlp.model"


FILES = ["manifest.json", "state.json", "rank00000-of-00001.safetensors"]


def refused(source, obj, file, kind=CorruptError):
    """Loading is an error that names the file."""
    with pytest.raises(kind) as caught:
        serializers.load(source, obj)
    assert file in str(caught.value)


def unchanged(module):
    return module.weight.detach().tolist() == [[7, 7]] and module.bias.tolist() == [7]


def sevens():
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, 7)
    nn.init.constant_(module.bias, 7)
    return module


def test_a_snapshot_is_these_files(saved):
    """So that the tests below miss none; each of them is sound when nothing is done to it."""
    assert sorted(os.listdir(saved)) == sorted(FILES)
    serializers.load(saved, tiny := Tiny())
    assert tiny.loaded == 1


@pytest.mark.parametrize("file", FILES)
def test_each_single_bit_of_a_snapshot_that_is_flipped_is_noticed(saved, file):
    """Nothing is put into the object, and the error names the file."""
    path, tiny = saved / file, Tiny()
    sound = path.read_bytes()
    with path.open("r+b", buffering=0) as stream:
        for place, byte in enumerate(sound):
            for bit in range(8):
                os.pwrite(stream.fileno(), bytes([byte ^ 1 << bit]), place)
                refused(saved, tiny, file)
            os.pwrite(stream.fileno(), bytes([byte]), place)
    assert tiny.loaded == 0
    serializers.load(saved, tiny)


def test_each_single_bit_of_a_model_that_is_flipped_is_noticed(model):
    """None of its tensors is changed, and the error names the file."""
    sound, module = model.read_bytes(), sevens()
    with model.open("r+b", buffering=0) as stream:
        for place, byte in enumerate(sound):
            for bit in range(8):
                os.pwrite(stream.fileno(), bytes([byte ^ 1 << bit]), place)
                refused(model, module, str(model), ValueError)
            os.pwrite(stream.fileno(), bytes([byte]), place)
    assert unchanged(module)
    serializers.load(model, module)


def test_a_bit_of_every_seventh_byte_of_the_snapshot_of_a_trainer_is_noticed(tmp_path):
    """Whatever is in it: the trainer stays where it is."""
    trainer, *_ = resume_program.build(str(tmp_path / "first"), stop=(1, "iteration"))
    trainer.run()
    serializers.save(tmp_path / "saved", trainer)
    fresh, *_ = resume_program.build(str(tmp_path / "second"))
    for path in (tmp_path / "saved").iterdir():
        sound = path.read_bytes()
        with path.open("r+b", buffering=0) as stream:
            for place in range(0, len(sound), 7):
                os.pwrite(stream.fileno(), bytes([sound[place] ^ 1 << place % 8]), place)
                refused(tmp_path / "saved", fresh, path.name)
                os.pwrite(stream.fileno(), sound[place : place + 1], place)
    assert fresh.updater.iteration == 0
    serializers.load(tmp_path / "saved", fresh)
    assert fresh.updater.iteration == 1


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_cut_is_noticed_at_every_length(saved, file):
    """Down to nothing."""
    path, tiny = saved / file, Tiny()
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        refused(saved, tiny, file)
    assert tiny.loaded == 0


def test_a_model_that_is_cut_is_noticed_at_every_length(model):
    """Down to nothing."""
    module = sevens()
    for length in reversed(range(model.stat().st_size)):
        os.truncate(model, length)
        refused(model, module, str(model), ValueError)
    assert unchanged(module)


def zeroed(path):
    path.write_bytes(bytes(path.stat().st_size))


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def linked(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def looping(path):
    path.unlink()
    path.symlink_to(path.name)


def folder(path):
    path.unlink()
    path.mkdir()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def other(path):
    """What another snapshot has under that name."""
    changed = Tiny()
    changed.tensors[0] += 1
    changed.values["n"] = 4
    serializers.save(path.parent.parent / "other", changed)
    path.write_bytes((path.parent.parent / "other" / path.name).read_bytes())


HARMS = [Path.unlink, zeroed, longer, linked, dangling, looping, folder, pipe, device]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_harmed_is_noticed(saved, file, harm):
    """Missing, zeroed, longer, or no file of the snapshot's own: a pipe is not waited for, a link is not followed."""
    harm(saved / file)
    tiny = Tiny()
    refused(saved, tiny, file)
    assert tiny.loaded == 0


@pytest.mark.parametrize("file", FILES[1:])
def test_a_file_of_another_snapshot_is_noticed(saved, file):
    """Sound by itself, and not what was written here."""
    other(saved / file)
    tiny = Tiny()
    refused(saved, tiny, file)
    assert tiny.loaded == 0


@pytest.mark.parametrize("harm", [zeroed, longer, dangling, looping, pipe, device], ids=lambda harm: harm.__name__)
def test_a_model_that_is_harmed_is_noticed(model, harm):
    """Also one that is no file at all: a pipe is not waited for."""
    harm(model)
    module = sevens()
    refused(model, module, str(model), (ValueError, OSError))
    assert unchanged(module)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo, dangling], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["extra", ".hidden", "rank00001-of-00002.safetensors", "state.json.bak"])
def test_an_extra_file_is_noticed(saved, name, make):
    """Whatever it is and whatever its name."""
    if make is dangling:
        (saved / name).touch()
    make(saved / name)
    tiny = Tiny()
    refused(saved, tiny, name)
    assert tiny.loaded == 0


def test_a_missing_snapshot_and_one_that_is_a_pipe_are_said(tmp_path):
    """Neither is waited for."""
    refused(tmp_path / "nowhere", Tiny(), "nowhere", FileNotFoundError)
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", Tiny(), "pipe", ValueError)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", Tiny(), "empty")


def test_a_link_to_a_sound_snapshot_or_model_is_followed(saved, model, tmp_path):
    """The fixed names of snapshots are such links."""
    for name, source, obj in (("latest", saved, Tiny()), ("latest.model", model, sevens())):
        (tmp_path / name).symlink_to(source.name)
        serializers.load(tmp_path / name, obj)
    assert not unchanged(obj)


@pytest.mark.parametrize("file", FILES)
def test_damage_between_two_loads_is_noticed(tmp_path, file):
    """Nothing of an earlier look at a snapshot is remembered; nothing but the error is said."""
    serializers.save(tmp_path / "saved", SerialIterator(list(range(5)), 2, seed=0))
    iterator = SerialIterator(list(range(5)), 2, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        serializers.load(tmp_path / "saved", iterator)
        (tmp_path / "saved" / file).write_bytes(b"?")
        refused(tmp_path / "saved", iterator, file)
