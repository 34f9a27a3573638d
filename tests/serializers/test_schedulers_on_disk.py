"""Every scheduler of torch goes on from the disk bit for bit: learning rates, momenta and what it counts."""

import pytest
import torch
from on_disk import Net, Scheduler, check_every_iteration, groups_of, trainer_of
from torch.optim import lr_scheduler

from torch_schedulers import CASES, EVERY_CASE, SCHEDULERS, halved

pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of SequentialLR, until torch 2.9


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
def test_a_scheduler_made_after_the_updater_is_no_changed_setting(tmp_path, said, name):
    """What it writes at once to the groups, and before the first step, is not what the script constructed."""
    make = next(iter(CASES[name].values()))

    def build(stop, out):
        model = Net()
        optimizer = torch.optim.Adam(groups_of(model), lr=0.1)
        trainer = trainer_of(model, optimizer, stop, out)
        trainer.extend(Scheduler(make(optimizer)), name="scheduler")
        return trainer

    check_every_iteration(tmp_path, build)
    assert said() == []


def test_one_tensor_that_is_the_learning_rate_of_two_groups_stays_one(tmp_path):
    """Torch gives every group the tensor of the call, so that what is written for one group holds for both."""

    def build(stop, out):
        model = Net()
        optimizer = torch.optim.SGD(groups_of(model), lr=torch.tensor(0.1), momentum=0.9)
        scheduler = lr_scheduler.LambdaLR(optimizer, [halved, lambda step: 0.9**step])
        return trainer_of(model, optimizer, stop, out, Scheduler(scheduler))

    check_every_iteration(tmp_path, build)
