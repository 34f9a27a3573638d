"""Every optimizer of five libraries goes on from the disk bit for bit, or is refused before the first snapshot.

They run in an environment of their own, since each of these libraries changes what others find: `make libraries`.
"""

import inspect
import logging
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions

pytest.importorskip("bitsandbytes", reason="make libraries installs them", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):
    logging.disable(logging.WARNING)
    import bitsandbytes
    import pytorch_optimizer
    import schedulefree
    import timm.optim
    import torchao.optim

    logging.disable(logging.NOTSET)

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

REFUSED = {  # their state holds objects, or does not come back from their own load_state_dict
    "pytorch_optimizer.conda": "projector: .*GaLoreProjector cannot be saved",
    "pytorch_optimizer.scalableshampoo": "pre_conditioner: .*PreConditioner cannot be saved",
}


def optimizers_of(module):
    kinds = [(name, kind) for name, kind in vars(module).items() if isinstance(kind, type)]
    return [(name, kind) for name, kind in sorted(kinds) if issubclass(kind, torch.optim.Optimizer)]


def quantizing(kind):
    """Also for a model that is as small as that of a test."""
    given = inspect.signature(kind.__init__).parameters
    settings = {"min_8bit_size": 16} if "min_8bit_size" in given else {}
    if "momentum" in given:
        settings["momentum"] = 0.9
    return lambda model: kind(model.parameters(), lr=1e-3, **settings)


def by_name(name):
    kind = pytorch_optimizer.load_optimizer(name)

    def make(model):
        given = inspect.signature(kind.__init__).parameters
        settings = {"lr": 1e-3} if "lr" in given else {}
        settings |= {key: 8 for key in ("num_iterations", "num_data") if key in given}
        return kind(model.parameters(), **settings)

    return make


WRAPPERS = ("Lookahead", "ScheduleFreeWrapper", "OrthoGrad", "TRAC")
CASES = {f"bitsandbytes.{name}": quantizing(kind) for name, kind in optimizers_of(bitsandbytes.optim)}
CASES |= {f"torchao.{name}": quantizing(kind) for name, kind in optimizers_of(torchao.optim)}
CASES |= {f"schedulefree.{name}": quantizing(kind) for name, kind in optimizers_of(schedulefree)}
CASES |= {f"pytorch_optimizer.{name}": by_name(name) for name in pytorch_optimizer.get_supported_optimizers()}
CASES |= {
    f"pytorch_optimizer.{name}": lambda model, name=name: getattr(pytorch_optimizer, name)(
        torch.optim.Adam(model.parameters())
    )
    for name in WRAPPERS
    if hasattr(pytorch_optimizer, name)
}
CASES |= {
    f"timm.{name}": lambda model, name=name: timm.optim.create_optimizer_v2(model, name, lr=1e-3)
    for name in [*timm.optim.list_optimizers(), "lookahead_adamw"]
}
DRAWS = {"weight_decay": 0.1, "stochastic_weight_decay": True}  # from a generator of its own
CASES["timm.kron"] = lambda model: timm.optim.create_optimizer_v2(model, "kron", lr=1e-3, **DRAWS)


class Net(nn.Module):
    """As wide as it must be for states to be quantized."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


def trainer_of(name, out, epochs, saves=True):
    torch.manual_seed(5)
    np.random.seed(5)
    model = Net(8 if "kron" in name else 80)  # without opt_einsum, Kron's products have as many numbers as a weight, squared
    data = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(StandardUpdater(SerialIterator(data, 4), CASES[name](model), model), (epochs, "epoch"), out=str(out))
    if saves:
        trainer.extend(extensions.snapshot(autoload=True), trigger=(epochs, "epoch"))
    return trainer


def values(trainer):
    return [parameter.detach().clone() for parameter in trainer.updater.get_model("main").parameters()]


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_goes_on_bit_for_bit_or_is_refused_at_the_first_update(tmp_path, name):
    """After an epoch, into fresh objects, from the disk."""
    try:
        whole = trainer_of(name, tmp_path / "whole", 2, saves=False)
        whole.run()
    except Exception as error:
        pytest.skip(f"it does not train this model by step() alone: {type(error).__name__}: {error}")
    first = trainer_of(name, tmp_path / "run", 1)
    if name in REFUSED:
        with pytest.raises((TypeError, ValueError), match=REFUSED[name]):
            first.run()
        assert first.updater.iteration == 1
        return
    first.run()
    second = trainer_of(name, tmp_path / "run", 2)
    second.run()
    assert second.is_resumed
    assert all(map(torch.equal, values(whole), values(second)))


SCHEDULE_FREE = [name for name in CASES if "ScheduleFree" in name and "Closure" not in name] + ["pytorch_optimizer.splus"]


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_an_evaluation_changes_no_bit_of_the_training_and_sees_other_weights(tmp_path, name):
    """Those that the optimizer's own eval() gives."""
    plain, evaluated = (trainer_of(name, tmp_path / out, 2, saves=False) for out in "ab")
    model, optimizer = evaluated.updater.get_model("main"), evaluated.updater.get_optimizer("main")
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    evaluated.extend(extensions.Evaluator(SerialIterator(data, 8, repeat=False, shuffle=False), model, eval_func=model))
    plain.run()
    evaluated.run()
    assert all(map(torch.equal, values(plain), values(evaluated)))
    reported, trained = evaluated.get_extension("validation").evaluate()["main/loss"], float(model(data))
    optimizer.eval()
    assert reported == pytest.approx(float(model(data)))
    assert reported != pytest.approx(trained, rel=1e-7)
