"""Every scheduler of torch goes on from the disk bit for bit: learning rates, momenta and what it counts."""

import pytest
import torch
from on_disk import Net, Scheduler, check_every_iteration, groups_of, trainer_of
from torch.optim import lr_scheduler, swa_utils


class Warmup:
    """A callable object, whose attributes torch saves with the scheduler."""

    def __init__(self, length, calls=0):
        self.length = length
        self.calls = calls

    def __call__(self, step):
        self.calls += 1
        return min(1.0, (step + 1) / self.length) / (1 + self.calls / 100)


def halved(step):
    return 0.5**step


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 3])]
    return lr_scheduler.SequentialLR(optimizer, [*parts, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2, 6])


def chained(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=4), lr_scheduler.LambdaLR(optimizer, [Warmup(5), halved])]
    return lr_scheduler.ChainedScheduler([*parts, lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer)


CASES = {  # by class, by what is peculiar; each changes the learning rate within eight steps
    "LambdaLR": {
        "a function": lambda o: lr_scheduler.LambdaLR(o, halved),
        "an object and a function": lambda o: lr_scheduler.LambdaLR(o, [Warmup(5), halved]),
    },
    "MultiplicativeLR": {
        "a function": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        "objects": lambda o: lr_scheduler.MultiplicativeLR(o, [Warmup(6), Warmup(3)]),
    },
    "StepLR": {"": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3)},
    "MultiStepLR": {"a milestone twice": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 7])},
    "ConstantLR": {"": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=3)},
    "LinearLR": {"": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5)},
    "ExponentialLR": {"": lambda o: lr_scheduler.ExponentialLR(o, 0.7)},
    "SequentialLR": {"of three": sequential},
    "ChainedScheduler": {"of three": chained},
    "CosineAnnealingLR": {"beyond its end": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, eta_min=0.001)},
    "CosineAnnealingWarmRestarts": {"": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, T_mult=2)},
    "PolynomialLR": {"": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=0.7)},
    "OneCycleLR": {
        "cos": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=10),
        "linear": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, anneal_strategy="linear", three_phase=True),
    },
    "CyclicLR": {
        "momentum": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, step_size_down=3, mode="triangular2"),
        "an object": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=Warmup(9), scale_mode="iterations"),
        "a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, [0.1, 0.2], 3, scale_fn=halved, cycle_momentum=False),
        "exp_range": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    },
    "ReduceLROnPlateau": {
        "min": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, cooldown=1),
        "max": lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", patience=1, threshold_mode="abs", min_lr=[1e-3, 1e-4]),
    },
    "SWALR": {
        "cos": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
        "linear": lambda o: swa_utils.SWALR(o, swa_lr=[0.01, 0.3], anneal_epochs=6, anneal_strategy="linear"),
    },
}
SCHEDULERS = sorted(
    {
        kind.__name__
        for module in (lr_scheduler, swa_utils)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    - {"LRScheduler", "_LRScheduler"}
)
EVERY_CASE = [pytest.param(name, make, id=f"{name}-{what}") for name in CASES for what, make in CASES[name].items()]


def sgd(groups):
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


def adam_with_tensors(groups):
    """Learning rates as tensors, to which schedulers write in place, and betas in the place of a momentum."""
    return torch.optim.Adam([{**group, "lr": torch.tensor(group["lr"])} for group in groups])


def builder(name, make, optimizer=sgd):
    def build(stop, out):
        model = Net()
        first, second = groups_of(model)
        made = optimizer([{**first, "lr": 0.1}, {**second, "lr": 0.03}])
        return trainer_of(model, made, stop, out, Scheduler(make(made), by_loss=name == "ReduceLROnPlateau"))

    return build


def rates(seen):
    return [values["/'optimizer'/'param_groups'/0/'lr'"] for values in seen.values()]


def test_the_table_covers_every_scheduler_of_torch():
    """What a later torch brings is named here until the table above has it."""
    assert [f"{name} is not covered" for name in SCHEDULERS if name not in CASES] == []
    for name, cases in CASES.items():
        kinds = {
            type(make(sgd([{"params": [torch.zeros(1)], "lr": 0.1} for _ in "ab"]))).__name__ for make in cases.values()
        }
        assert kinds == {name}


@pytest.mark.parametrize(("name", "make"), EVERY_CASE)
def test_every_scheduler_goes_on_from_the_disk_bit_for_bit(tmp_path, name, make):
    """After each iteration; each further step has the learning rates and momenta of the run that went on."""
    seen = check_every_iteration(tmp_path, builder(name, make))
    assert len(set(rates(seen))) > 1  # otherwise nothing was shown


@pytest.mark.parametrize(("name", "make"), EVERY_CASE)
def test_every_scheduler_goes_on_where_the_learning_rate_is_a_tensor(tmp_path, name, make):
    """A tensor stays one, and the scheduler goes on writing to the one that the optimizer reads."""
    seen = check_every_iteration(tmp_path, builder(name, make, adam_with_tensors))
    assert len(set(rates(seen))) > 1


@pytest.mark.parametrize("name", ["LinearLR", "OneCycleLR", "CyclicLR", "SequentialLR"])
def test_a_scheduler_made_after_the_updater_is_no_changed_setting(tmp_path, capsys, name):
    """What it writes at once to the groups, and before the first step, is not what the script constructed."""
    make = next(iter(CASES[name].values()))

    def build(stop, out):
        model = Net()
        optimizer = torch.optim.Adam(groups_of(model), lr=0.1)
        trainer = trainer_of(model, optimizer, stop, out)
        trainer.extend(Scheduler(make(optimizer)), name="scheduler")
        return trainer

    check_every_iteration(tmp_path, build)
    assert capsys.readouterr().out == ""


def test_one_tensor_that_is_the_learning_rate_of_two_groups_stays_one(tmp_path):
    """Torch gives every group the tensor of the call, so that what is written for one group holds for both."""

    def build(stop, out):
        model = Net()
        optimizer = torch.optim.SGD(groups_of(model), lr=torch.tensor(0.1), momentum=0.9)
        scheduler = lr_scheduler.LambdaLR(optimizer, [halved, lambda step: 0.9**step])
        return trainer_of(model, optimizer, stop, out, Scheduler(scheduler))

    check_every_iteration(tmp_path, build)
