"""Clipping sees the final gradient, and says how large it was."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm, clip_grad_value

X = torch.linspace(-2, 2, 24).reshape(8, 3) ** 3
T = torch.linspace(5, 9, 8).reshape(8, 1)


def a_net():
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def gradients():
    """Of the whole batch, computed by NumPy from the formula of the squared error."""
    net = a_net()
    weight, bias = net.weight.detach().double().numpy(), net.bias.detach().double().numpy()
    rest = X.double().numpy() @ weight.T + bias - T.double().numpy()
    return 2 * rest.T @ X.double().numpy() / 8, 2 * rest.mean(0)


def step(clip, tmp_path, accumulate=1, **settings):
    """One step of plain descent at rate 1, so that the change is the gradient; and what was reported."""
    net = a_net()
    before = [p.detach().clone() for p in net.parameters()]
    updater = StandardUpdater(
        SerialIterator(list(zip(X, T, strict=True)), 8 // accumulate, shuffle=False),
        torch.optim.SGD(net.parameters(), 1.0),
        net,
        loss_func=lambda net, x, t: ((net(x) - t) ** 2).mean(),
        accumulate=accumulate,
        callbacks=UpdateCallbacks(update_on_start=clip),
        **settings,
    )
    trainer = Trainer(updater, (1, "iteration"), out=str(tmp_path))
    trainer.run()
    return [(old - new).detach().double().numpy() for old, new in zip(before, net.parameters(), strict=True)], trainer


@pytest.mark.parametrize("virtual_ranks", [None, 2])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_all_gradients_are_scaled_together_to_the_norm(tmp_path, accumulate, norm_type, virtual_ranks):
    """In the accumulated gradient, of all virtual ranks; the norm before is reported as grad_norm."""
    expected = gradients()
    norm = np.linalg.norm(np.concatenate([part.ravel() for part in expected]), norm_type)
    changes, trainer = step(clip_grad_norm(0.5, norm_type), tmp_path, accumulate, virtual_ranks=virtual_ranks)
    for change, gradient in zip(changes, expected, strict=True):
        np.testing.assert_allclose(change, gradient * 0.5 / norm, rtol=1e-4, atol=1e-6)
    assert float(trainer.observation["grad_norm"]) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("max_norm", [1e6, math.inf])
def test_a_gradient_within_the_norm_stays_as_it_is(tmp_path, max_norm):
    """And is reported."""
    changes, trainer = step(clip_grad_norm(max_norm), tmp_path)
    for change, gradient in zip(changes, gradients(), strict=True):
        np.testing.assert_allclose(change, gradient, rtol=1e-4, atol=1e-5)
    assert float(trainer.observation["grad_norm"]) > 1


def test_each_element_is_clipped_to_the_value(tmp_path):
    """From both sides."""
    changes, _ = step(clip_grad_value(0.75), tmp_path)
    for change, gradient in zip(changes, gradients(), strict=True):
        np.testing.assert_allclose(change, np.clip(gradient, -0.75, 0.75), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "arguments"), [(clip_grad_norm, (0,)), (clip_grad_norm, (1, -1)), (clip_grad_value, ("1",))]
)
def test_what_is_no_limit_is_refused(make, arguments):
    """At construction, with the value."""
    with pytest.raises(ValueError, match="above 0, got"):
        make(*arguments)
