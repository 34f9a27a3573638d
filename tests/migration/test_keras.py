"""docs/migration/keras.md is true: Keras, with its torch backend, and Chainring train the same model."""

import importlib.metadata
import importlib.util
import json
import re

import numpy as np
import pytest
import torch
from pages import DOCS, run_script, script_of

PAGE = "migration/keras.md"
needs_keras = pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="make migration installs Keras")
BUILD = "model.build((None, 64))\nnp.savez('../first.npz', *model.get_weights())\nmodel.compile("
SAVE_THEIRS = """
import json
np.savez("last.npz", *model.get_weights())
json.dump({key: values[-1] for key, values in history.history.items()}, open("last.json", "w"))
"""
COPY = """
import numpy as np
copy_dense(list(np.load("../first.npz").values()), (model[0], model[2]))
classifier = Classifier("""
SAVE_OURS = "\ntorch.save(model.state_dict(), 'model.pt')\n"
IN_ORDER = ("shuffle=True", "shuffle=False")
SGD = {
    "before": ("keras.optimizers.Adam(1e-3)", "keras.optimizers.SGD(0.1)"),
    "after": ("torch.optim.Adam(model.parameters(), 1e-3, eps=1e-7)", "torch.optim.SGD(model.parameters(), 0.1)"),
}


def replaced(script, *pairs):
    for old, new in pairs:
        assert old in script
        script = script.replace(old, new, 1)
    return script


@pytest.fixture(scope="module", params=["adam", "sgd"])
def run(request, tmp_path_factory):
    """The optimizer, and the folders of both scripts of the page, begun with the same weights and with the rows in order."""
    root = tmp_path_factory.mktemp(request.param)
    with_sgd = {name: [pair] if request.param == "sgd" else [] for name, pair in SGD.items()}
    before = replaced(script_of(PAGE, "Before"), IN_ORDER, ("model.compile(", BUILD), *with_sgd["before"])
    run_script(root / "before", before + SAVE_THEIRS, KERAS_BACKEND="torch")
    weights = "import torch\n" + script_of(PAGE, "Weights of Keras")
    after = replaced(script_of(PAGE, "After"), IN_ORDER, ("classifier = Classifier(", COPY), *with_sgd["after"])
    run_script(root / "after", weights + after + SAVE_OURS)
    return request.param, root


@needs_keras
def test_both_scripts_have_the_numbers_of_the_page(run):
    """The rows of its table; the page names the version."""
    optimizer, root = run
    text = (DOCS / PAGE).read_text()
    assert f"Keras {importlib.metadata.version('keras')}" in text
    theirs = json.loads((root / "before" / "last.json").read_text())
    ours = json.loads((root / "after" / "result" / "log").read_text())[-1]
    suffix = ", with SGD\\(0.1\\)" if optimizer == "sgd" else ""
    for name, found in (
        ("before", [theirs[key] for key in ("loss", "val_loss", "val_accuracy")]),
        ("after", [ours[key] for key in ("main/loss", "validation/main/loss", "validation/main/accuracy")]),
    ):
        numbers = re.search(rf"^\| {name}{suffix} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE).groups()
        assert [f"{value:.4f}" for value in found] == list(numbers)


@needs_keras
def test_the_parameters_agree_up_to_rounding_with_sgd(run):
    """And with Adam, whose epsilon has another place in Keras, up to a hundredth."""
    optimizer, root = run
    theirs = list(np.load(root / "before" / "last.npz").values())
    ours = torch.load(root / "after" / "model.pt")
    tolerance = 1e-6 if optimizer == "sgd" else 1e-2
    for array, name in zip(theirs, ("0.weight", "0.bias", "2.weight", "2.bias"), strict=True):
        np.testing.assert_allclose(ours[name].numpy().T, array, atol=tolerance)


@needs_keras
def test_a_kernel_of_keras_becomes_the_weight_of_a_conv2d(tmp_path):
    """As the page converts it; both layers give the same."""
    script = (
        "import torch\n"
        + script_of(PAGE, "Weights of Keras")
        + """
import keras
layer = keras.layers.Conv2D(4, 3)
x = torch.rand(2, 8, 8, 3)
theirs = layer(x)
kernel, bias = layer.get_weights()
ours = torch.nn.Conv2d(3, 4, 3)
ours.weight.data.copy_(to_conv2d(kernel))
ours.bias.data.copy_(torch.from_numpy(bias))
torch.testing.assert_close(ours(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1), theirs.cpu())
"""
    )
    run_script(tmp_path / "run", script, KERAS_BACKEND="torch")
