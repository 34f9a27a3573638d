"""docs/migration/hugging-face.md is true: the Trainer of transformers and Chainring train the same model."""

import importlib.metadata
import json
import re

import pytest
import torch
from pages import DOCS, run_script, script_of

PAGE = "migration/hugging-face.md"
DATA = "The data and the model of both"
IN_ORDER = ("use_cpu=True", 'train_sampling_strategy="sequential", use_cpu=True')
SAVE_THEIRS = """
torch.save(hf.model.state_dict(), "model.pt")
import json
json.dump(hf.state.log_history, open("log.json", "w"))
"""
SAVE_OURS = """
torch.save({model}.state_dict(), "model.pt")
"""


def replaced(script, *pairs):
    for old, new in pairs:
        assert old in script
        script = script.replace(old, new)
    return script


@pytest.fixture(scope="module")
def before_and_after(tmp_path_factory):
    """The folders in which the two scripts of the page have run, with the rows in order."""
    root = tmp_path_factory.mktemp("scripts")
    before = replaced(script_of(PAGE, DATA, "Before"), IN_ORDER) + SAVE_THEIRS
    after = replaced(script_of(PAGE, DATA, "After"), ("shuffle=True", "shuffle=False")) + SAVE_OURS.format(model="model")
    return run_script(root / "before", before), run_script(root / "after", after)


def test_the_version_is_the_one_of_the_page():
    assert f"transformers {importlib.metadata.version('transformers')}" in (DOCS / PAGE).read_text()


def test_the_script_before_and_the_one_after_train_the_same_model(before_and_after):
    """Warm-up, decay, clipping and the choice of the best epoch included: the parameters are equal to the last bit."""
    theirs, ours = (torch.load(folder / "model.pt") for folder in before_and_after)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_the_numbers_of_the_page_are_those_of_the_scripts(before_and_after):
    """The evaluations of all epochs agree up to rounding, and the last ones stand in the page."""
    before, after = before_and_after
    theirs = json.loads((before / "log.json").read_text())
    rows = json.loads((after / "result" / "log").read_text())
    for name, key in (("eval_loss", "validation/main/loss"), ("eval_accuracy", "validation/main/accuracy")):
        found = [row[name] for row in theirs if name in row]
        assert len(found) == 4
        assert [row[key] for row in rows] == pytest.approx(found, rel=1e-5)
    for library in ("before", "after"):
        numbers = re.search(rf"\| {library}, in order \| ([\d.]+) \| ([\d.]+) \|", (DOCS / PAGE).read_text()).groups()
        assert [f"{rows[-1]['validation/main/loss']:.4f}", f"{rows[-1]['validation/main/accuracy']:g}"] == list(numbers)


def arguments_of(folder, **settings):
    """Lines that make the arguments of a run in order, as in the script before."""
    given = "".join(f"    {name}={value!r},\n" for name, value in settings.items())
    return f"""
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    {folder!r}, learning_rate=1e-3, lr_scheduler_type="constant", logging_strategy="epoch", save_strategy="no",
    train_sampling_strategy="sequential", use_cpu=True, report_to=[], disable_tqdm=True,
{given})
"""


def test_accumulated_gradients_of_a_language_model_are_those_of_the_page(tmp_path):
    """Losses of padded batches, weighted by their tokens, agree with the other library up to rounding."""
    ours = replaced(script_of(PAGE, DATA, "After", "Gradient accumulation"), ("shuffle=True", "shuffle=False"))
    data = ours[: ours.index("def language_loss")].replace(script_of(PAGE, "After"), "")
    settings = arguments_of("hf", num_train_epochs=2, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    theirs = (
        data + settings + "hf = Trainer(make_language_model(), arguments, collate_texts, texts)\nhf.train()\n" + SAVE_THEIRS
    )
    run_script(tmp_path / "before", theirs)
    run_script(tmp_path / "after", ours + SAVE_OURS.format(model="language_model"))
    their_rows = [row["loss"] for row in json.loads((tmp_path / "before" / "log.json").read_text()) if "loss" in row]
    rows = json.loads((tmp_path / "after" / "language" / "log").read_text())
    assert [row["iteration"] for row in rows] == [32, 64]
    assert [row["main/loss"] for row in rows] == pytest.approx(their_rows, rel=1e-3)  # which average updates without weights
    models = [torch.load(tmp_path / name / "model.pt") for name in ("before", "after")]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-5)


def test_a_classifier_of_transformers_adds_up_its_micro_batches(tmp_path):
    """The gradient of the first update with accumulation is twice that of one batch of the same rows, as the page says."""
    norms = []
    for size, count in ((16, 1), (8, 2)):
        settings = arguments_of(
            "hf", max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=count, logging_steps=1
        ).replace('logging_strategy="epoch"', 'logging_strategy="steps"')
        script = script_of(PAGE, DATA) + settings + "hf = Trainer(make_model(), arguments, collate, train)\nhf.train()\n"
        folder = run_script(tmp_path / str(count), script + SAVE_THEIRS)
        norms.append(json.loads((folder / "log.json").read_text())[0]["grad_norm"])
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-3)
