"""A loop of Accelerate is continued from its save_state as the loop itself would have continued."""

import warnings

import pytest
import torch
from foreign_runs import assert_close, assert_same, loader, make, mean_squared_error, moments, trainer_of
from torch import nn

from chainring import serializers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerate


def loop(epochs, load=None, save=None, **settings):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, scheduler = make()
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    if load is not None:
        accelerator.load_state(load)
    for _ in range(epochs):
        for x, t in batches:
            accelerator.backward(mean_squared_error(model, x, t))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    if save is not None:
        accelerator.save_state(save, **settings)
    return model, optimizer


@pytest.mark.parametrize("is_safe", [True, False])
def test_the_continued_run_follows_the_loop_of_accelerate(tmp_path, capsys, is_safe):
    """Weights as safetensors or as a file of torch; parameters and moments to the bit, the epoch from the iteration."""
    saved, saved_optimizer = loop(2, save=tmp_path / "state", safe_serialization=is_safe)
    model, optimizer, scheduler = make(1)
    trainer = trainer_of(model, optimizer, scheduler, tmp_path / "out")
    serializers.load(tmp_path / "state", trainer)
    assert_same(dict(model.state_dict()), dict(saved.state_dict()))
    assert_same(moments(optimizer), saved_optimizer.state_dict()["state"])
    assert (trainer.updater.iteration, trainer.updater.epoch, scheduler.last_epoch) == (20, 2, 2)
    said = capsys.readouterr().out
    assert "a state of Accelerate" in said
    assert "the iteration is 20, as the optimizer counts its updates" in said
    assert "2 follows from the iteration and the 10 batches of an epoch here" in said
    assert "not loaded: random_states_0.pkl" in said
    trainer.run()
    assert_close(model, loop(2, tmp_path / "state")[0])


def test_of_several_models_one_is_loaded_by_its_name(tmp_path):
    """As Accelerate numbers them; without a name it is an error that lists them."""
    accelerator = accelerate.Accelerator(cpu=True)
    models = accelerator.prepare(nn.Linear(2, 3), nn.Linear(2, 3))
    accelerator.save_state(tmp_path / "state")
    model = nn.Linear(2, 3)
    for name, expected in zip(("model", "model_1"), models, strict=True):
        serializers.load(tmp_path / "state", model, name)
        assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    with pytest.raises(ValueError, match=r"has the models \['model', 'model_1'\]; name one by path_in_snapshot"):
        serializers.load(tmp_path / "state", model)


def test_a_state_without_weights_is_refused(tmp_path):
    """Such as that of FSDP, which are in a directory beside it."""
    torch.save({}, tmp_path / "random_states_0.pkl")
    with pytest.raises(ValueError, match="a state of Accelerate without the weights of a model"):
        serializers.load(tmp_path, nn.Linear(2, 3))


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "scaler.pt"])
def test_a_file_that_holds_nothing_is_refused(tmp_path, name):
    """It is not taken for one that is not there."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 3))
    accelerator.save_state(tmp_path / "state")
    torch.save({}, tmp_path / "state" / "random_states_0.pkl")  # by which the directory is known
    torch.save(None, tmp_path / "state" / name)
    with pytest.raises(ValueError, match="holds nothing: it is damaged"):
        serializers.load(tmp_path / "state", nn.Linear(2, 3))
