"""What is saved comes back to the last bit, or an error says why not."""

import gc
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import resume_program
from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.nn import Classifier


def a_model(seed=0):
    torch.manual_seed(seed)
    return Classifier(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))


def equal(one, other):
    return all(torch.equal(value, other[key]) for key, value in one.items()) and one.keys() == other.keys()


class TestModels:
    def test_a_model_is_one_file_that_any_reader_of_the_format_opens(self, tmp_path):
        """The names in it are those of `state_dict`."""
        model = a_model()
        serializers.save(tmp_path / "mlp.model", model)
        assert equal(safetensors.torch.load_file(tmp_path / "mlp.model"), model.state_dict())
        assert os.listdir(tmp_path) == ["mlp.model"]

    def test_it_is_loaded_into_another_and_replaced_by_the_next_save(self, tmp_path):
        """A second save of the same name takes the place of the first by one rename."""
        for seed in (1, 2):
            serializers.save(tmp_path / "mlp.model", a_model(seed))
        model = a_model()
        serializers.load(tmp_path / "mlp.model", model)
        assert equal(model.state_dict(), a_model(2).state_dict())

    def test_a_bit_of_every_byte_of_its_data_that_is_flipped_is_noticed(self, tmp_path):
        """Its checksum stands in its metadata; a CRC-32 finds every single bit."""
        path = tmp_path / "mlp.model"
        serializers.save(path, nn.Linear(2, 1))
        sound = path.read_bytes()
        for bit in range(0, 8 * len(sound), 7):
            flipped = bytearray(sound)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises((ValueError, RuntimeError)):
                serializers.load(path, nn.Linear(2, 1))

    def test_a_model_where_a_trainer_is_wanted_is_said_so(self, tmp_path):
        """The most frequent error of users who resume."""
        serializers.save(tmp_path / "mlp.model", a_model())
        trainer, *_ = resume_program.build(str(tmp_path / "out"))
        with pytest.raises(TypeError, match="holds a model"):
            serializers.load(tmp_path / "mlp.model", trainer)

    def test_what_is_not_there_is_a_file_not_found(self, tmp_path):
        """With the path."""
        with pytest.raises(FileNotFoundError, match=r"mlp\.model"):
            serializers.load(tmp_path / "mlp.model", a_model())

    def test_two_modules_of_one_path_are_refused_in_a_file_too(self, tmp_path):
        """A part of the file could not be told from the other by its path."""
        model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(1, 1)}), "a/b": nn.Linear(1, 1)})
        with pytest.raises(ValueError, match=r"'a\.b\.weight' .* 'a/b\.weight' .* 'a/b/weight'"):
            serializers.save(tmp_path / "mlp.model", model)
        assert os.listdir(tmp_path) == []

    def test_another_model_is_refused_with_the_names(self, tmp_path):
        """PyTorch's own error lists what is missing, unexpected, or of another shape."""
        serializers.save(tmp_path / "mlp.model", nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="weight"):
            serializers.load(tmp_path / "mlp.model", nn.Linear(3, 2))


class TestRuns:
    @pytest.mark.parametrize("k", [0, 1, 4, 7])
    def test_a_run_continues_from_the_disk_bit_for_bit(self, tmp_path, k):
        """The program of the resume tests, stopped after k iterations."""
        whole = resume_program.build(str(tmp_path / "whole"), stop=(9, "iteration"))
        whole[0].run()
        first, data, fired = resume_program.build(str(tmp_path / "first"), stop=(k, "iteration"))
        first.run()
        serializers.save(tmp_path / "saved", first)
        second = resume_program.build(str(tmp_path / "second"), stop=(9, "iteration"), seed=77)
        serializers.load(tmp_path / "saved", second[0])
        second[0].run()
        expected, resumed = resume_program.outcome(*whole), resume_program.outcome(*second)
        resumed["consumed"] = data.consumed + resumed["consumed"]
        resumed["fired"] = fired + resumed["fired"]
        # Adam's state is NaN-free and the logs are floats, so that equality is that of every bit.
        assert {**resumed, "generators": None} == {**expected, "generators": None}

    def test_a_part_of_a_model_comes_out_of_a_run_by_its_path(self, tmp_path):
        """With or without a slash at the end; a whole model needs no path."""
        trainer, *_ = resume_program.build(str(tmp_path / "out"), stop=(1, "iteration"))
        trainer.run()
        serializers.save(tmp_path / "saved", trainer)
        net = trainer.updater.get_model("main")
        whole, part = resume_program.Net(), nn.Linear(4, 8)
        serializers.load(tmp_path / "saved", whole)
        serializers.load(tmp_path / "saved", part, "updater/model:main/body/0/")
        assert equal(whole.state_dict(), net.state_dict())
        assert equal(part.state_dict(), net.body[0].state_dict())
        with pytest.raises(ValueError, match="nothing under"):
            serializers.load(tmp_path / "saved", part, "updater/model:other")

    def test_a_directory_is_never_written_over(self, tmp_path):
        """The first stays as it was."""
        iterator = SerialIterator(list(range(5)), 2, seed=0)
        serializers.save(tmp_path / "saved", iterator)
        with pytest.raises(FileExistsError):
            serializers.save(tmp_path / "saved", iterator)

    def test_a_value_that_cannot_be_restored_is_refused_when_it_is_saved(self, tmp_path):
        """With the path of the value, and nothing is left behind."""

        class Bad(training.Extension):
            def __call__(self, trainer):
                pass

            def serialize(self, serializer):
                serializer("secret", object())

        trainer, *_ = resume_program.build(str(tmp_path / "out"))
        trainer.extend(Bad())
        with pytest.raises(TypeError, match="extensions/Bad/secret"):
            serializers.save(tmp_path / "saved", trainer)
        assert not (tmp_path / "saved").exists()

    def test_loading_unpickles_nothing(self, tmp_path, monkeypatch):
        """Neither pickle nor PyTorch's loader is reached; test_hostile.py proves it by an audit hook."""
        trainer, *_ = resume_program.build(str(tmp_path / "out"), stop=(2, "iteration"))
        trainer.run()
        serializers.save(tmp_path / "saved", trainer)
        resumed, *_ = resume_program.build(str(tmp_path / "again"), stop=(2, "iteration"))

        def refuse(*_, **__):
            raise AssertionError("unpickled")

        for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (np, "load")):
            monkeypatch.setattr(module, name, refuse)
        serializers.load(tmp_path / "saved", resumed)
        assert resumed.updater.iteration == 2

    def test_a_flipped_bit_in_a_snapshot_is_an_error(self, tmp_path):
        """Before anything is put into the object."""
        iterator = SerialIterator(list(range(5)), 2, seed=0)
        next(iterator)
        serializers.save(tmp_path / "saved", iterator)
        path = tmp_path / "saved" / "state.json"
        path.write_bytes(path.read_bytes().replace(b"2", b"3"))
        again = SerialIterator(list(range(5)), 2, seed=0)
        with pytest.raises(ValueError, match=r"state\.json"):
            serializers.load(tmp_path / "saved", again)
        assert again.current_position == 0


def test_a_file_of_torch_save_without_a_model_is_refused_and_named(tmp_path):
    """With the calls that read it; those with a state dict are read."""
    for name, zipped in (("new.pt", True), ("old.pt", False)):
        torch.save([1, 2], tmp_path / name, _use_new_zipfile_serialization=zipped)
        with pytest.raises(
            ValueError, match=rf"{name} is a file such as torch.save .* torch.load\(path, weights_only=True\)"
        ):
            serializers.load(tmp_path / name, nn.Linear(2, 2))


class Watched:
    """State of which loading fails; notes whether garbage is collected then."""

    def __init__(self):
        self.seen = None

    def serialize(self, serializer):
        if serializer("number", 3) == 3 and isinstance(serializer, serializers.Deserializer):
            self.seen = gc.isenabled()
            raise ValueError("fails to load")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_loading_leaves_the_collection_of_garbage_as_it_was(tmp_path, is_enabled):
    """Also where it fails. Meanwhile none is looked for among the many objects of a large state."""
    watched = Watched()
    serializers.save(tmp_path / "state", watched)
    collect = gc.enable if is_enabled else gc.disable
    collect()
    try:
        with pytest.raises(ValueError, match="fails to load"):
            serializers.load(tmp_path / "state", watched)
        assert (watched.seen, gc.isenabled()) == (False, is_enabled)
    finally:
        gc.enable()
