"""Every scheduler of torch, by what is peculiar about it: the table that tests of schedulers go through."""

import pytest
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
