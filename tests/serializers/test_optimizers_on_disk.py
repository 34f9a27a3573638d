"""Every optimizer of torch goes on from the disk bit for bit, with each option that it has."""

import copy
import inspect

import pytest
import torch
from on_disk import Closing, Net, check_every_iteration, groups_of, trainer_of
from torch import nn

from chainring import training

BASE = {  # what makes each of them move: settings, without which the defaults stand
    "ASGD": {"t0": 2},  # averages from the third step on
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {},
    "LBFGS": {"lr": 0.1, "max_iter": 3, "history_size": 2},
    "Muon": {},
    "NAdam": {},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"weight_decay": 0.1},
    "Rprop": {},
    "SGD": {"lr": 0.1},
    "SparseAdam": {"lr": 0.01},
}
MORE = [  # settings that bring other state than a single option does
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "foreach": True, "maximize": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("SGD", {"weight_decay": torch.tensor(0.1)}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "foreach": True}),
    ("Adam", {"betas": (torch.tensor(0.8), torch.tensor(0.95)), "lr": torch.tensor(0.01)}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("Adam", {"amsgrad": True, "fused": True, "lr": torch.tensor(0.01)}),
    ("AdamW", {"amsgrad": True, "fused": True, "maximize": True}),
    ("Muon", {"nesterov": False}),
    ("Adafactor", {"lr": torch.tensor(0.01)}),
    ("LBFGS", {"history_size": 5, "max_iter": 5, "line_search_fn": "strong_wolfe"}),
]
TRIED = {  # one by one, on every optimizer that has the option
    "amsgrad": {"amsgrad": True},
    "centered": {"centered": True},
    "decoupled_weight_decay": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "lr": {"lr": torch.tensor(0.01)},
    "maximize": {"maximize": True},
    "momentum": {"momentum": 0.9},
    "nesterov": {"nesterov": True, "momentum": 0.9},
}
NUMBERS = {  # change how far a step goes, not what is remembered
    *("alpha", "beta2_decay", "betas", "d", "dampening", "eps", "etas", "initial_accumulator_value", "lambd", "lr_decay"),
    *("momentum_decay", "rho", "step_sizes", "t0", "weight_decay"),  # of several
    *("history_size", "line_search_fn", "max_eval", "max_iter", "tolerance_change", "tolerance_grad"),  # LBFGS
    *("adjust_lr_fn", "ns_coefficients", "ns_steps"),  # Muon
}
ELSEWHERE = {"capturable", "differentiable"}  # need an accelerator; a graph through the step, which no snapshot can hold

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


def options_of(name):
    """The options of an optimizer; a learning rate only where a tensor may stand for it."""
    given = dict(inspect.signature(getattr(torch.optim, name)).parameters)
    del given["params"]
    if "Tensor" not in str(given["lr"].annotation):
        del given["lr"]
    return list(given)


def cases():
    found = [(name, {}) for name in OPTIMIZERS]
    found += [(name, TRIED[option]) for name in OPTIMIZERS for option in options_of(name) if option in TRIED]
    return [pytest.param(*case, id="-".join([case[0], *case[1]])) for case in found + MORE]


class Sparse(nn.Module):
    """A table of which every step reaches some rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 2, sparse=True)

    def forward(self, x):
        return self.table((x[:, 0].abs() * 8).long() % 8).square().mean()


def builder(name, **settings):
    """Makes trainers with that optimizer, ready for what is peculiar to it."""

    def build(stop, out):
        # Without options over bfloat16, to which PyTorch would round what an optimizer keeps in float32.
        dtype = torch.float32 if settings else torch.bfloat16
        model = Sparse() if name == "SparseAdam" else Net(bias=name != "Muon", dtype=dtype)
        parameters = model.parameters() if name in ("SparseAdam", "LBFGS") else groups_of(model)
        # A tensor among the settings is the optimizer's own, which may write to it.
        optimizer = getattr(torch.optim, name)(parameters, **{**BASE.get(name, {}), **copy.deepcopy(settings)})
        return trainer_of(model, optimizer, stop, out, kind=Closing if name == "LBFGS" else training.StandardUpdater)

    return build


def test_the_table_covers_every_optimizer_of_torch_and_every_option():
    """What a later torch brings is named here until the tables above have it."""
    assert [f"{name} is not covered" for name in OPTIMIZERS if name not in BASE] == []
    known = TRIED.keys() | NUMBERS | ELSEWHERE
    new = [f"{name}({option}=) is not covered" for name in OPTIMIZERS for option in options_of(name) if option not in known]
    assert new == []


@pytest.mark.parametrize(("name", "settings"), cases())
def test_every_optimizer_goes_on_from_the_disk_bit_for_bit(tmp_path, name, settings):
    """After each iteration, with two groups, a tied parameter and one that never gets a gradient."""
    check_every_iteration(tmp_path, builder(name, **settings))
