"""Updaters some of whose examples count nothing, in one process and on ranks, for test_weights.py."""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from toys import observed_update, parameters_of, regression_data, same_regression

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater

FORMS = {
    "int": int,
    "bool": lambda count: int(count) or False,
    "float": float,
    "tensor": lambda count: count,
    "float tensor": lambda count: count.float(),
    "numpy": lambda count: np.int64(count.item()),
}


def masked_data(counting):
    """Twelve examples, of which these count."""
    mask = torch.tensor([number in counting for number in range(12)])
    return TensorDataset(*regression_data().tensors, mask)


def loss_of(form, least):
    """A loss over the examples that count, NaN if none does, with their number as its weight."""

    def loss(model, x, t, mask):
        errors = (model(x) - t).square().squeeze(1) * mask
        return {"loss": errors.sum() / mask.sum().clamp(min=least), "weight": FORMS[form](mask.sum())}

    return loss


class OwnUpdate(StandardUpdater):
    """Gives the weight to `backward` itself."""

    def update_core(self):
        batch = self.next_batch()
        outputs = self.loss_func(self.get_model("main"), *batch)
        self.backward(outputs["loss"], outputs["weight"])
        self.step()


def masked_updater(counting, form="tensor", batch_size=4, kind=StandardUpdater, **settings):
    optimizer, wraps = settings.pop("optimizer", torch.optim.AdamW), settings.pop("wraps", False)
    least = settings.pop("least", 0)
    model = same_regression().predictor
    model = DistributedDataParallel(model) if wraps else model
    iterator = SerialIterator(masked_data(counting), batch_size, shuffle=False)
    optimizer = optimizer(model.parameters(), lr=0.1)
    return kind(iterator, optimizer, model, loss_func=loss_of(form, least), **settings)


def train(updater, updates=3):
    """After each update the parameters, and the numbers in the optimizer's state."""
    updater.start()
    seen = []
    for _ in range(updates):
        observed_update(updater)
        state = updater.get_optimizer("main").state.values()
        numbers = [torch.as_tensor(value).clone() for values in state for value in values.values()]
        seen.append([*parameters_of(updater), *numbers])
    return seen


def as_lists(seen):
    return [[number.tolist() for number in numbers] for numbers in seen]


def train_on_rank(comm, cases):
    found = []
    for counting, settings in cases:
        updater = masked_updater(counting, comm=comm, **settings)
        updater.get_iterator("main").share(comm.rank, comm.size)
        found.append((as_lists(train(updater)), updater.iteration))
    return found


def train_with_nan(comm, counting):
    """The error of a loss of NaN in DDP."""
    updater = masked_updater(counting, "int", comm=comm, wraps=True)
    updater.get_iterator("main").share(comm.rank, comm.size)
    return train(updater)
