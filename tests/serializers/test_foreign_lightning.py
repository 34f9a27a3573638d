"""A run of Lightning is continued as Lightning itself would have continued it."""

import logging
import warnings

import pytest
import torch
from foreign_runs import Net, assert_close, assert_same, loader, make, mean_squared_error, moments, trainer_of

from chainring import serializers

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: loaders without workers, a folder that exists


def fit(place, epochs, ckpt_path=None):
    import lightning as L

    class Lit(L.LightningModule):
        """The model of `foreign_runs` as the attribute of a module of Lightning."""

        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            return mean_squared_error(self.net, *batch)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Lit()
    every = L.pytorch.callbacks.ModelCheckpoint(place, filename="{step}", save_top_k=-1, every_n_train_steps=5)
    ends = L.pytorch.callbacks.ModelCheckpoint(place, filename="end-{epoch}", save_top_k=-1, every_n_epochs=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=place, callbacks=[every, ends], **quiet)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The checkpoints of a run of two epochs: at its steps 5, 10, 15 and 20, and at the ends of its epochs."""
    place = tmp_path_factory.mktemp("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lightning")  # takes seconds, which no other file of tests needs
        fit(place, 2)
    return place


@pytest.mark.parametrize(
    ("name", "iteration", "epoch"),
    [("step=15", 15, 1.5), ("step=5", 5, 0.5), ("end-epoch=1", 20, 2), ("end-epoch=0", 10, 1)],
)
def test_the_continued_run_follows_lightnings_own_resumed_run(place, tmp_path, capsys, name, iteration, epoch):
    """From the end of an epoch and from its middle; parameters and moments come in to the bit.

    In the middle of an epoch Lightning begins a plain loader at its first batch again; the run here goes on with the next,
    and follows the run that was never stopped.
    """
    path = place / f"{name}.ckpt"
    content = torch.load(path, weights_only=True)
    model, optimizer, scheduler = make(1)
    trainer = trainer_of(model, optimizer, scheduler, tmp_path / "out", (3, "epoch"))
    serializers.load(path, trainer)
    assert_same({f"net.{key}": value for key, value in model.state_dict().items()}, dict(content["state_dict"]))
    assert_same(moments(optimizer), content["optimizer_states"][0]["state"])
    assert (trainer.updater.iteration, trainer.updater.epoch_detail) == (iteration, epoch)
    said = capsys.readouterr().out
    assert "a Lightning checkpoint" in said
    assert "which stand below 'net' there" in said
    assert "not loaded: callbacks" in said
    trainer.run()
    theirs = fit(tmp_path / "theirs", 3, path if epoch == int(epoch) else None)
    assert trainer.updater.iteration == 30
    assert_close(model, theirs.net)
    assert optimizer.param_groups[0]["lr"] == theirs.optimizers().param_groups[0]["lr"]


def test_weights_alone_are_loaded_into_a_model(place):
    """With the rest named as not taken."""
    model = Net()
    serializers.load(place / "step=5.ckpt", model)
    saved = torch.load(place / "step=5.ckpt", weights_only=True)["state_dict"]
    assert_same({f"net.{name}": value for name, value in model.state_dict().items()}, dict(saved))


def test_several_optimizers_are_taken_in_their_order_or_refused(place, tmp_path):
    """A checkpoint of two, for an updater of one."""
    content = torch.load(place / "step=5.ckpt", weights_only=True)
    content["optimizer_states"] *= 2
    torch.save(content, tmp_path / "two")
    trainer = trainer_of(*make(1), tmp_path / "out")
    with pytest.raises(ValueError, match="has the state of the optimizers 0, 1, and the updater has main"):
        serializers.load(tmp_path / "two", trainer)
    serializers.load(tmp_path / "two", trainer, strict=False)
    assert trainer.updater.iteration == 5
