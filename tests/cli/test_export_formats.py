"""What `chainring export` writes in each format is opened by the library whose format it is."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from chainring import iterators, serializers, training
from chainring.cli import main
from chainring.training import extensions


def snapshot_of(model, place):
    updater = training.StandardUpdater(iterators.SerialIterator([0, 1], 2), torch.optim.SGD(model.parameters(), 0.1), model)
    serializers.save(place, training.Trainer(updater, out=place.parent))
    return str(place)


class Tied(nn.Module):
    """A tensor under two names, one of channels_last, a buffer of integers, an empty one and a number."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(2)
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("brief", torch.ones(2, dtype=torch.bfloat16))


@pytest.fixture
def saved(tmp_path):
    model = Tied()
    return snapshot_of(model, tmp_path / "snapshot"), model.state_dict()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_torch_reads_the_file_that_is_written_for_it(saved, tmp_path):
    """With its reader of weights alone; tied tensors are still one."""
    directory, expected = saved
    assert main(["export", directory, str(tmp_path / "model.pt"), "--format", "torch"]) == 0
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_equal(found, dict(expected))
    assert found["first.weight"].data_ptr() == found["last.weight"].data_ptr()
    model = Tied()
    serializers.load(tmp_path / "model.pt", model)
    assert_equal(dict(model.state_dict()), dict(expected))


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)|TypedStorage is")  # of the reader
def test_distributed_checkpoint_reads_the_directory_into_a_plain_state_dict(saved, tmp_path):
    """Under the names of the plain model."""
    import torch.distributed.checkpoint as dcp

    directory, expected = saved
    assert main(["export", directory, str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    assert_equal(found, dict(expected))


def test_transformers_reads_the_directory_with_the_config_beside_it(tmp_path):
    """Of a model with tied embeddings; there is no config.json in it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    directory = snapshot_of(model, tmp_path / "snapshot")
    assert main(["export", directory, str(tmp_path / "hf"), "--format", "hf"]) == 0
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    config.save_pretrained(tmp_path / "hf")
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert_equal(dict(found.state_dict()), dict(model.state_dict()))


def test_large_models_are_divided_into_files(saved, tmp_path, monkeypatch):
    """No file is larger than the limit, unless one tensor is; the index says where each tensor is."""
    from safetensors.torch import load_file

    from chainring.cli import export

    monkeypatch.setattr(export, "MAX_FILE", 100)
    directory, expected = saved
    assert main(["export", directory, str(tmp_path / "hf"), "--format", "hf"]) == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / "hf" / name) for name in set(index["weight_map"].values())}
    assert len(files) > 2
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert_equal(found, {name: value for name, value in expected.items() if name != "last.weight"})
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


@pytest.mark.parametrize("form", ["safetensors", "torch", "hf", "dcp"])
def test_what_exists_is_not_written_over_and_json_says_what_was_written(saved, tmp_path, capsys, form):
    """In every format; nothing is left beside it."""
    directory, expected = saved
    (tmp_path / "there").mkdir()
    assert main(["export", directory, str(tmp_path / "there"), "--format", form]) == 2
    capsys.readouterr()
    assert main(["export", "--json", directory, str(tmp_path / "new" / "place"), "--format", form]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["tensors"]) == (form, sorted(expected))
    assert facts["bytes"] > sum(value.nbytes for value in expected.values()) - expected["last.weight"].nbytes
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["place"]


def test_the_suffix_of_the_file_tells_its_format(saved, tmp_path, capsys):
    """Torch's for .pt and .pth; one that contradicts --format is refused, and any other says nothing."""
    directory, expected = saved
    for suffix in ("pt", "PTH"):
        assert main(["export", directory, str(tmp_path / f"model.{suffix}")]) == 0
        assert_equal(torch.load(tmp_path / f"model.{suffix}", weights_only=True), dict(expected))
    for name in ("model.safetensors", "weights"):
        assert main(["export", directory, str(tmp_path / name)]) == 0
        assert load_file(tmp_path / name).keys()
    for name, form in (("a.pt", "safetensors"), ("a.safetensors", "torch"), ("a.pt", "hf")):
        assert main(["export", directory, str(tmp_path / name), "--format", form]) == 2
        assert f"and --format is {form}; change one of them" in capsys.readouterr().err
        assert not (tmp_path / name).exists()


def test_an_average_is_exported_by_the_name_of_its_extension(tmp_path, capsys):
    """Its parameters, under the names of the model; a name that is wrong is answered by those there are."""
    model = nn.Linear(2, 2)
    updater = training.StandardUpdater(iterators.SerialIterator([0, 1], 2), torch.optim.SGD(model.parameters(), 0.1), model)
    trainer = training.Trainer(updater, out=tmp_path)
    average = extensions.ExponentialMovingAverage(model)
    trainer.extend(average)
    with torch.no_grad():
        average.model.weight.fill_(2.0)
    serializers.save(tmp_path / "snapshot", trainer)
    arguments = ["export", str(tmp_path / "snapshot"), str(tmp_path / "average.pt"), "--model"]
    assert main([*arguments, "average"]) == 2
    assert "it has main, ExponentialMovingAverage" in capsys.readouterr().err
    assert main([*arguments, "ExponentialMovingAverage"]) == 0
    assert_equal(torch.load(tmp_path / "average.pt", weights_only=True), average.model.state_dict())
