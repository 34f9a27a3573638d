"""examples/transformers: a model from a config learns, and adapters are all that its fine-tuning changes and saves."""

import pytest
from running import log, run
from safetensors.torch import load_file

SMALL = ("--pretrain", 2, "--epoch", 2, "--sentences", 1500)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a small run of both stages."""
    out = tmp_path_factory.mktemp("transformers")
    run("transformers/train_adapters.py", *SMALL, "--out", out)
    return out


def tensors(out):
    newest = max(out.glob("snapshot_iter_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
    return load_file(newest / "rank00000-of-00001.safetensors")


def test_pretraining_learns_the_language(whole):
    """After two epochs the next word is much less of a surprise than among all of the vocabulary, which is log 56 = 4.0."""
    assert log(whole / "base")[-1]["validation/main/loss"] < 3


def test_a_snapshot_of_the_fine_tuning_has_the_adapters_only(whole):
    """No frozen parameter is in it: it has the head, and two matrices for each of twelve layers."""
    model = [name for name in tensors(whole) if name.startswith("updater/model:main/")]
    assert len(model) == 1 + 2 * 12
    assert all(name.endswith(("/up", "/down", "/score/weight")) for name in model)


def test_fine_tuning_goes_on_where_it_was_stopped(whole, tmp_path):
    """Stopped between the stages' ends and continued, it ends with the same rows and the same adapters."""
    run("transformers/train_adapters.py", *SMALL[:2], "--epoch", 1, *SMALL[4:], "--out", tmp_path)
    run("transformers/train_adapters.py", *SMALL, "--out", tmp_path)
    assert log(tmp_path) == log(whole)
    assert all(value.equal(tensors(whole)[name]) for name, value in tensors(tmp_path).items() if "/model:main/" in name)
