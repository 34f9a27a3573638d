"""A run of Hugging Face's Trainer is continued as it would have continued itself; models of save_pretrained are loaded."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from foreign_runs import assert_close, assert_same

from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.training import extensions

CONFIG = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# The bias of keys has no gradient but rounding, which differs between processors, and which Adam would divide by itself.
EPSILON = 1e-4

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and accelerate


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    """Take seconds to import, which no other file of tests needs."""
    pytest.importorskip("datasets.distributed")  # not made for NumPy before 2


def gpt2(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**CONFIG, **NO_DROPOUT))


def rows():
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 20, (8,), generator=generator) for _ in range(20)]
    return [{"input_ids": row, "labels": row} for row in ids]


def fit(place, resume=None):
    from transformers import Trainer, TrainingArguments

    class Unshuffled(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    settings = {"learning_rate": 1e-2, "adam_epsilon": EPSILON, "weight_decay": 0.1, "max_grad_norm": 0.0}
    settings["per_device_train_batch_size"] = 4
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = TrainingArguments(str(place), num_train_epochs=3, save_steps=3, **settings, **quiet)
    trainer = Unshuffled(gpt2(), arguments, train_dataset=rows())
    trainer.model_accepts_loss_kwargs = False  # or it divides by the number of labels, one a row of which is not predicted
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The checkpoints of a run of 15 steps, five an epoch, every three."""
    pytest.importorskip("accelerate")
    place = tmp_path_factory.mktemp("hugging_face")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(place)
    return place


def make(out):
    """The same training here; the groups are made in the order in which the library makes them."""
    from transformers import get_scheduler

    model = gpt2(1)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2, eps=EPSILON)
    updater = training.StandardUpdater(
        SerialIterator(rows(), 4, shuffle=False), optimizer, model, loss_func=lambda model, **batch: model(**batch).loss
    )
    trainer = training.Trainer(updater, (3, "epoch"), out=out)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=15)
    trainer.extend(extensions.LRScheduler(scheduler), trigger=(1, "iteration"))
    return trainer, model, optimizer


@pytest.mark.parametrize(("step", "epoch"), [(3, 0.6), (12, 2.4), (15, 3)])
def test_the_continued_run_follows_the_trainers_own(place, tmp_path, capsys, step, epoch):
    """Tied embeddings, two groups, a scheduler of every iteration; parameters and moments to the bit."""
    path = place / f"checkpoint-{step}"
    trainer, model, optimizer = make(tmp_path / "out")
    serializers.load(path, trainer)
    saved = gpt2().from_pretrained(path)
    assert_same(dict(model.state_dict()), dict(saved.state_dict()))
    assert_same(optimizer.state_dict()["state"], torch.load(path / "optimizer.pt", weights_only=True)["state"])
    assert trainer.updater.iteration == step
    assert trainer.updater.epoch_detail == pytest.approx(epoch)
    said = capsys.readouterr().out
    assert "a checkpoint of Hugging Face's Trainer" in said
    assert "rng_state.pth" in said
    if step < 15:
        trainer.run()
        assert trainer.updater.iteration == 15
        assert_close(model, fit(tmp_path / "theirs", str(path)))


def test_one_group_in_place_of_two_is_refused(place, tmp_path):
    """The numbers of an optimizer mean something in its groups alone."""
    model = gpt2(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    updater = training.StandardUpdater(SerialIterator(rows(), 4), optimizer, model)
    with pytest.raises(ValueError, match="make the same groups in the same order"):
        serializers.load(place / "checkpoint-3", training.Trainer(updater, out=tmp_path))


@pytest.mark.parametrize("size", ["1GB", "2KB"])
def test_a_model_of_save_pretrained_is_loaded(tmp_path, size):
    """In one file or in several with an index; tied embeddings stand there once, and are tied here."""
    model, other = gpt2(), gpt2(1)
    model.save_pretrained(tmp_path / "model", max_shard_size=size)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == (size == "2KB")
    serializers.load(tmp_path / "model", other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.lm_head.weight is other.transformer.wte.weight


def test_a_part_of_a_model_is_found_by_its_names(tmp_path):
    """The body of a model with a head, by itself."""
    model, other = gpt2(), gpt2(1).transformer
    model.save_pretrained(tmp_path / "model")
    serializers.load(tmp_path / "model", other)
    assert_same(dict(other.state_dict()), dict(model.transformer.state_dict()))


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, file):
    """Nothing beyond the directory is opened."""
    gpt2().save_pretrained(tmp_path / "model", max_shard_size="2KB")
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["transformer.wte.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is not in it"):
        serializers.load(tmp_path / "model", gpt2())


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", 'a "NaN', "NaN\\", "é NaN Infinity"])
def test_an_index_keeps_names_that_look_like_numbers(tmp_path, name):
    """Only a number that is not finite, which strict JSON lacks, is read as nothing."""
    model = gpt2()
    model.save_pretrained(tmp_path / "model")
    file = f"{name.replace(chr(92), '')}.safetensors"
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / file)
    names = [key for key in model.state_dict() if key != "lm_head.weight"]  # which is tied
    index = {"metadata": {"x": float("nan"), name: float("-inf")}, "weight_map": dict.fromkeys(names, file)}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    other = gpt2(1)
    serializers.load(tmp_path / "model", other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_links_lead_into_the_directory_or_into_the_cache(tmp_path):
    """The cache of the library links to blobs; a link elsewhere is refused."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "f00", tmp_path / "models--a--b" / "blobs"
    model, other = gpt2(), gpt2(1)
    model.save_pretrained(tmp_path / "saved")
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    (tmp_path / "saved" / "model.safetensors").rename(blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "0123"))
    serializers.load(snapshot, other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    (blobs / "0123").rename(tmp_path / "elsewhere")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link to"):
        serializers.load(snapshot, other)
