"""``backward(create_graph=True)``: optimizers that differentiate the gradients."""

import pytest
import torch
from toys import assert_close, parameters_of, regression_data, same_regression, updater_of

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, UpdateCallbacks


class Newton(torch.optim.Optimizer):
    """Divides each gradient by a diagonal of the Hessian, estimated as AdaHessian and Sophia do, with a fixed vector."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        products = torch.autograd.grad(gradients, parameters, [torch.ones_like(gradient) for gradient in gradients])
        with torch.no_grad():
            for parameter, product in zip(parameters, products, strict=True):
                parameter -= self.param_groups[0]["lr"] * parameter.grad / (product.abs() + 0.1)


def fourth_power(model, x, t):
    return (model.predictor(x) - t).pow(4).mean()


class Differentiating(StandardUpdater):
    def update_core(self):
        x, t = self.next_batch()
        with self.autocast():
            loss = fourth_power(self.get_model("main"), x, t)
        self.backward(loss, create_graph=True)
        self.step()


def trained(batch_size, **settings):
    model = same_regression()
    iterator = SerialIterator(regression_data(), batch_size, shuffle=False)
    updater = Differentiating(iterator, Newton(model.parameters()), model, **settings)
    for _ in range(2):
        updater.update()
    return parameters_of(updater)


SETTINGS = {
    "plain": {},
    "two micro-batches": {"accumulate": 2},
    "three micro-batches": {"accumulate": 3},
    "six micro-batches": {"accumulate": 6},
    "twelve micro-batches": {"accumulate": 12},
    "bf16": {"precision": "bf16"},
    "callbacks": {"callbacks": UpdateCallbacks(update_on_start=lambda context: None)},
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("name", SETTINGS)
def test_an_optimizer_may_differentiate_the_gradients(name):
    """As in a plain loop over batches of all micro-batches."""
    settings, model = SETTINGS[name], same_regression()
    optimizer = Newton(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled="precision" in settings):
            loss = fourth_power(model, *regression_data().tensors)
        loss.backward(create_graph=True)
        optimizer.step()
    ours = trained(12 // settings.get("accumulate", 1), **settings)
    assert_close(ours, [parameter.detach() for parameter in model.parameters()])


LOSING = [{"virtual_ranks": 2}, {"precision": "fp16"}, {"virtual_ranks": 1, "accumulate": 2}]


@pytest.mark.parametrize("settings", LOSING, ids=str)
def test_gradients_whose_graph_would_be_lost_are_refused(settings):
    """In the first update, with the settings that keep it."""
    made = updater_of(4, kind=Differentiating, **settings)
    made.start()
    with pytest.raises(ValueError, match=r'create_graph=True .* train in one process with "fp32" or "bf16"'):
        made.update()
