"""Classifier: a predictor with its loss and accuracy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chainring import Reporter
from chainring.nn import Classifier

X = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [5.0, 1.0, 0.0]])
T = torch.tensor([0, 1, 1, 0])


def observed(model, *args, **kwargs):
    reporter, observation = Reporter(), {}
    reporter.add_observer("main", model)
    with reporter.scope(observation):
        loss = model(*args, **kwargs)
    return loss, observation


def test_it_returns_the_cross_entropy_and_reports_loss_and_accuracy():
    """Of logits and integer labels; three of four are right."""
    loss, observation = observed(Classifier(nn.Identity()), X, T)
    expected = (torch.logsumexp(X, 1) - X[range(4), T]).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(observation, {"main/loss": expected, "main/accuracy": torch.tensor(0.75)})


def test_it_works_outside_a_trainer():
    """With no reporter it only returns the loss."""
    assert Classifier(nn.Identity())(X, T).ndim == 0


def test_accuracy_counts_every_position_behind_the_classes():
    """Scores (batch, classes, positions) with labels (batch, positions)."""
    scores = torch.stack([X, X.flip(0)], 2)
    labels = torch.stack([T, torch.zeros_like(T)], 1)
    _, observation = observed(Classifier(nn.Identity()), scores, labels)
    right = (scores.numpy().argmax(1) == labels.numpy()).mean()
    assert observation["main/accuracy"].item() == pytest.approx(right)


def test_loss_and_accuracy_can_be_replaced():
    """accfun=None reports none."""
    model = Classifier(nn.Identity(), lossfun=F.mse_loss, accfun=lambda y, t: y.max())
    _, observation = observed(model, X, X + 1)
    assert {key: float(value) for key, value in observation.items()} == {"main/loss": 1.0, "main/accuracy": 5.0}
    _, observation = observed(Classifier(nn.Identity(), F.mse_loss, None), X, X)
    assert list(observation) == ["main/loss"]


def test_a_loss_module_will_do_as_lossfun():
    """nn.CrossEntropyLoss() belongs here, where no model goes first."""
    loss = Classifier(nn.Identity(), lossfun=nn.CrossEntropyLoss(label_smoothing=0.1))(X, T)
    torch.testing.assert_close(loss, F.cross_entropy(X, T, label_smoothing=0.1))


class Sum(nn.Module):
    def forward(self, a, b=0.0):
        return a + b


@pytest.mark.parametrize(
    ("label_key", "args", "kwargs"),
    [
        (-1, (X, X, T), {}),
        (2, (X, X, T), {}),
        (0, (T, X, X), {}),
        (1, (X, T), {"b": X}),
        ("t", (X, X), {"t": T}),
        ("t", (), {"t": T, "a": X, "b": X}),
    ],
)
def test_label_key_says_which_argument_holds_the_labels(label_key, args, kwargs):
    """A position or a keyword; all others go to the predictor as they were passed."""
    loss = Classifier(Sum(), label_key=label_key)(*args, **kwargs)
    torch.testing.assert_close(loss, F.cross_entropy(2 * X, T))


@pytest.mark.parametrize(
    ("label_key", "args", "kwargs", "words"),
    [
        (2, (X, T), {}, ["argument 2", "the batch has 2", "label_key"]),
        (-1, (), {"x": X, "t": T}, ["argument -1", "the batch has 0", "label_key"]),
        ("t", (X,), {"label": T}, ["the keyword 't'", "['label']"]),
    ],
)
def test_a_batch_without_labels_is_refused(label_key, args, kwargs, words):
    """Rule, value and remedy."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words are compared below
        Classifier(nn.Identity(), label_key=label_key)(*args, **kwargs)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_label_key_of_another_kind_is_refused_at_construction():
    """It is a position or a name."""
    with pytest.raises(TypeError, match="position of an argument or a keyword's name, got None"):
        Classifier(nn.Identity(), label_key=None)


def test_accuracy_keeps_no_graph_and_the_loss_does():
    """Only what is returned is differentiated."""
    model = Classifier(nn.Linear(3, 3), accfun=lambda y, t: y.sum())
    loss, observation = observed(model, X, T)
    loss.backward()
    assert model.predictor.weight.grad is not None
    assert not observation["main/accuracy"].requires_grad


class Structured(nn.Module):
    """A predictor that answers with a mapping, as many published models do."""

    def forward(self, x):
        return {"logits": x, "hidden": None}


def test_a_predictor_may_answer_with_a_structure():
    """Which lossfun and accfun know."""
    lossfun, accfun = (lambda y, t: F.cross_entropy(y["logits"], t)), (lambda y, t: (y["logits"].argmax(1) == t).sum())
    loss, observation = observed(Classifier(Structured(), lossfun, accfun), X, T)
    torch.testing.assert_close(loss, F.cross_entropy(X, T))
    assert observation["main/accuracy"] == 3


def test_an_accuracy_of_ones_own_computes_without_gradients():
    """It may go through NumPy, or through a module with parameters."""
    seen = []

    def accfun(y, t):
        seen.append(torch.is_grad_enabled())
        return float((y.numpy().argmax(1) == t.numpy()).mean())

    observed(Classifier(nn.Linear(3, 3), accfun=accfun), X, T)
    assert seen == [False]


def test_its_parameters_are_the_predictors():
    """Under the name predictor, so that a saved model can be found by its path."""
    assert list(Classifier(nn.Linear(3, 3)).state_dict()) == ["predictor.weight", "predictor.bias"]
