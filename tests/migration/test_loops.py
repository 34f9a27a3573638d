"""The pages on hand-written loops are true: the loop and the trainer of a page train the same model, bit for bit."""

import importlib.metadata
import json

import pytest
import torch
from accelerate import Accelerator
from pages import DOCS, run_script, script_of
from torch import nn
from torch.utils.data import DataLoader

from chainring import serializers

DATA = "The data and the model of both"
STARTS = "torch.randint(len(tokens) - BLOCK, (BATCH,)"
STREAMS = "\nSTREAMS = {name: torch.Generator().manual_seed(0) for name in ('train', 'val')}\n"
SAVE = "\ntorch.save(model.state_dict(), 'model.pt')\n"
SAVE_AVERAGE = "\ntorch.save(getattr(average, 'module', getattr(average, 'model', None)).state_dict(), 'average.pt')\n"


def run_both(root, page, add="", **replaced):
    """The folders in which the script before and the one after have run, with these lines added at the end."""
    folders = []
    for heading in ("Before", "After"):
        script = script_of(f"migration/{page}.md", DATA, heading) + SAVE + add
        for old, new in replaced.values():
            assert old in script
            script = script.replace(old, new)
        folders.append(run_script(root / heading, script))
    return folders


def assert_equal(folders, name):
    theirs, ours = (torch.load(folder / name) for folder in folders)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())


def rows(folder):
    return json.loads((folder / "result" / "log").read_text())


def test_a_loop_with_accelerate_and_its_trainer_train_the_same_model(tmp_path):
    """With accumulation, clipping, bfloat16 and a schedule; the page names the version."""
    assert f"accelerate {importlib.metadata.version('accelerate')}" in (DOCS / "migration/accelerate.md").read_text()
    assert_equal(run_both(tmp_path, "accelerate", order=("shuffle=True", "shuffle=False")), "model.pt")


@pytest.mark.filterwarnings("ignore:::accelerate\\.")
def test_accelerate_divides_a_short_accumulation_by_its_whole_length():
    """The gradient of one batch that is left over is half of its own with two steps of accumulation, as the page says."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, loader = accelerator.prepare(nn.Linear(1, 1, bias=False), DataLoader(torch.ones(3, 1), 1))
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
        if accelerator.sync_gradients:
            gradient = model.weight.grad.clone()
            model.weight.grad = None
    assert gradient.item() == 0.5


def test_a_loop_like_nanogpt_and_its_trainer_train_the_same_model(tmp_path):
    """With accumulation, clipping, bfloat16 and a learning rate by iteration, if both are given the same pieces of text."""
    streams = ("def get_batch", f"{STREAMS}\n\ndef get_batch")
    folders = run_both(tmp_path, "nanogpt", starts=(STARTS, f"{STARTS}, generator=STREAMS[split]"), streams=streams)
    assert_equal(folders, "model.pt")
    assert [row["iteration"] for row in rows(folders[1])] == [20, 40, 60]


def test_a_script_like_torchvisions_and_its_trainer_train_the_same_model(tmp_path):
    """With a schedule by epochs, momentum and BatchNorm; the averages are equal up to rounding."""
    theirs, ours = run_both(tmp_path, "torchvision", add=SAVE_AVERAGE, order=("shuffle=True", "shuffle=False"))
    assert_equal((theirs, ours), "model.pt")
    averages = [torch.load(folder / "average.pt") for folder in (theirs, ours)]
    assert averages[0].keys() == averages[1].keys()
    for name, value in averages[0].items():
        torch.testing.assert_close(averages[1][name], value, rtol=1e-5, atol=1e-6)


def test_the_namespace_in_a_checkpoint_of_torchvision_is_refused(tmp_path):
    """With its name, as the page says; nothing is unpickled."""
    script = script_of("migration/torchvision.md", DATA, "Before")
    folder = run_script(tmp_path / "run", script.replace("epochs=4", "epochs=2"))
    with pytest.raises(ValueError, match=r"it holds argparse\.Namespace, which only unpickling could make"):
        serializers.load(folder / "checkpoint.pth", nn.Linear(1, 1))
