"""Snapshots of pytorch-pfn-extras and of Chainer are continued as those libraries themselves go on."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chainring import serializers, training
from chainring.iterators import SerialIterator
from chainring.training import extensions

CHAINER = os.environ.get("CHAINER_PYTHON")
needs_chainer = pytest.mark.skipif(not CHAINER, reason="CHAINER_PYTHON is not set: run make migration")
EXAMPLES, BATCH = 40, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, eps=2e-5), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class WithLoss(nn.Module):
    """As Chainer's Classifier, with the mean squared error."""

    def __init__(self):
        super().__init__()
        self.predictor = Net()

    def forward(self, x, t):
        return nn.functional.mse_loss(self.predictor(x), t)


def data():
    random = np.random.RandomState(0)
    return [torch.tensor(random.randn(EXAMPLES, size).astype("f")) for size in (4, 2)]


def train_with_pfn_extras(place, epochs, load=None):
    """A run that takes a snapshot after each epoch; returns model and optimizer."""
    import pytorch_pfn_extras as ppe
    from pytorch_pfn_extras.training import extensions

    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    # The scheduler steps before the snapshot of an epoch is taken.
    parts = [extensions.LRScheduler(scheduler, trigger=(1, "epoch")), extensions.snapshot()]
    manager = ppe.training.ExtensionsManager(
        model, optimizer, epochs, iters_per_epoch=EXAMPLES // BATCH, out_dir=str(place), extensions=parts
    )
    if load is not None:
        manager.load_state_dict(torch.load(load, weights_only=True))
    while not manager.stop_trigger:
        for x, t in DataLoader(TensorDataset(*data()), BATCH):
            with manager.run_iteration(step_optimizers=["main"]):
                optimizer.zero_grad()
                model(x, t).backward()
    return model, optimizer


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_pfn_extras_is_continued(tmp_path, capsys):
    """Parameters and moments to the bit, the scheduler, and the epoch by the iteration."""
    saved, saved_optimizer = train_with_pfn_extras(tmp_path / "theirs", 2)
    path = tmp_path / "theirs" / "snapshot_iter_20"
    model = WithLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    updater = training.StandardUpdater(DataLoader(TensorDataset(*data()), BATCH), optimizer, model)
    trainer = training.Trainer(updater, (4, "epoch"), out=tmp_path / "ours")
    trainer.extend(extensions.LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    serializers.load(path, trainer)
    assert_equal(model.state_dict(), saved.state_dict())
    for one, other in zip(optimizer.state.values(), saved_optimizer.state.values(), strict=True):
        assert_equal(one, other)
    assert (updater.iteration, updater.epoch) == (20, 2)
    assert "a snapshot of pytorch-pfn-extras" in capsys.readouterr().out
    trainer.run()
    theirs, their_optimizer = train_with_pfn_extras(tmp_path / "resumed", 4, path)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert optimizer.param_groups[0]["lr"] == their_optimizer.param_groups[0]["lr"]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


PROGRAM = """
import sys, numpy as np, chainer, chainer.links as L, chainer.functions as F
from chainer import training
from chainer.training import extensions

class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.norm, self.last = L.Linear(4, 8, nobias=True), L.BatchNormalization(8), L.Linear(8, 2)
    def forward(self, x):
        return self.last(self.norm(self.first(x)))

chainer.config.cudnn_deterministic = True
random = np.random.RandomState(0)
arrays = [random.randn({examples}, size).astype("f") for size in (4, 2)]
rule, place, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
np.random.seed(0)
model = L.Classifier(Net(), lossfun=F.mean_squared_error)
model.compute_accuracy = False
optimizer = {{"Adam": lambda: chainer.optimizers.Adam(1e-2), "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(1e-2),
    "RMSprop": lambda: chainer.optimizers.RMSprop(1e-3), "AdaDelta": chainer.optimizers.AdaDelta,
    "AdaGrad": lambda: chainer.optimizers.AdaGrad(1e-2), "SGD": lambda: chainer.optimizers.SGD(1e-2)}}[rule]()
optimizer.setup(model)
iterator = chainer.iterators.SerialIterator(chainer.datasets.TupleDataset(*arrays), {batch}, shuffle=False)
trainer = training.Trainer(training.updaters.StandardUpdater(iterator, optimizer), (stop, "iteration"), out=place)
trainer.extend(extensions.LogReport())
trainer.extend(extensions.snapshot(filename="snapshot_{{.updater.iteration}}"), trigger=(15, "iteration"))
trainer.run()
chainer.serializers.save_npz(place + "/model.npz", model)
"""
OPTIMIZERS = {
    "Adam": (lambda p: torch.optim.Adam(p, 1e-2), {"m": "exp_avg", "v": "exp_avg_sq"}),
    "MomentumSGD": (lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9), {}),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, 1e-3), {"ms": "square_avg"}),
    "AdaDelta": (lambda p: torch.optim.Adadelta(p, 1.0, rho=0.95), {"msg": "square_avg", "msdx": "acc_delta"}),
    "AdaGrad": (lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-8), {"h": "sum"}),
    "SGD": (lambda p: torch.optim.SGD(p, 1e-2), {}),
}
NAMES = {"weight": ("W", "gamma"), "bias": ("b", "beta"), "running_mean": ("avg_mean",), "running_var": ("avg_var",)}


def of_chainer(arrays, name, below):
    """The array that has the name of a parameter in Chainer."""
    *parents, last = name.split(".")
    paths = ["/".join([below, *parents, one]).strip("/") for one in NAMES.get(last, ("N",))]
    return next(arrays[path] for path in paths if path in arrays)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    """By the name of an optimizer the folder of a run of 30 iterations, with a snapshot in the middle of an epoch."""
    root = tmp_path_factory.mktemp("chainer")
    program = root / "program.py"
    program.write_text(PROGRAM.format(examples=EXAMPLES, batch=BATCH))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.pop("PYTHONPATH", None)
    for rule in OPTIMIZERS:
        subprocess.run([CHAINER, program, rule, root / rule, "30"], env=environment, check=True, timeout=600)
    return root


@needs_chainer
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_run_of_chainer_is_continued(snapshots, tmp_path, capsys, rule):
    """From the middle of its second epoch; parameters and moments to the bit, but for the momentum, which is converted."""
    make, keys = OPTIMIZERS[rule]
    model = WithLoss()
    optimizer = make(model.parameters())
    updater = training.StandardUpdater(
        SerialIterator(list(zip(*data(), strict=True)), BATCH, shuffle=False), optimizer, model
    )
    trainer = training.Trainer(updater, (30, "iteration"), out=tmp_path)
    serializers.load(snapshots / rule / "snapshot_15", trainer)
    arrays = dict(np.load(snapshots / rule / "snapshot_15", allow_pickle=True))
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), of_chainer(arrays, name, "updater/model:main")), name
    for name, parameter in model.named_parameters():
        for theirs, ours in keys.items():
            below = [
                f"{p.removeprefix('updater/model:main/')}/{theirs}" for p in arrays if p.startswith("updater/model:main/")
            ]
            found = {p: arrays[f"updater/optimizer:main/{p}"] for p in below if f"updater/optimizer:main/{p}" in arrays}
            expected = of_chainer({p.removesuffix(f"/{theirs}"): a for p, a in found.items()}, name, "")
            assert np.array_equal(optimizer.state[parameter][ours].numpy(), expected), (name, ours)
    assert (updater.iteration, updater.epoch_detail) == (15, 1.5)
    said = capsys.readouterr().out
    assert "a snapshot of Chainer" in said
    assert "not loaded: " in said
    assert "extensions/LogReport" in said
    trainer.run()
    last = dict(np.load(snapshots / rule / "model.npz"))
    for name, value in model.state_dict().items():
        if not name.endswith("num_batches_tracked"):  # which Chainer counts for a decay of None alone
            np.testing.assert_allclose(value.numpy(), of_chainer(last, name, ""), rtol=2e-4, atol=2e-5)


@needs_chainer
def test_a_model_of_chainer_is_loaded_whole_or_in_part(snapshots):
    """By the path of the part; an optimizer of another kind is refused."""
    path = snapshots / "Adam" / "model.npz"
    whole, part = WithLoss(), Net()
    serializers.load(path, whole)
    serializers.load(path, part, "predictor")
    assert_equal(part.state_dict(), whole.predictor.state_dict())
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    updater = training.StandardUpdater(SerialIterator([0, 1], 2), optimizer, model)
    with pytest.raises(ValueError, match="is of another kind than SGD, which has no 'betas'"):
        serializers.load(snapshots / "Adam" / "snapshot_15", training.Trainer(updater, out=Path("unused")))
