"""Classifier: a model that computes its loss and accuracy and reports both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from chainring.reporting.reporter import report


def accuracy(y: Tensor, t: Tensor) -> Tensor:
    """Return the share of rows of ``y`` (batch, classes, ...) whose largest entry is at the label in ``t`` (batch, ...)."""
    return (y.argmax(1) == t).mean(dtype=torch.float32)


class Classifier(nn.Module):
    """A predictor with its loss: called with a batch, it returns the loss and reports ``loss`` and ``accuracy``.

    Args:
        predictor: the model from inputs to class scores; it is the attribute ``predictor``.
        lossfun: ``lossfun(scores, labels)``, by default cross entropy of logits.
        accfun: ``accfun(scores, labels)``, or ``None`` for no accuracy.
        label_key: the argument that holds the labels: a position, or the name of a keyword.

    Raises:
        TypeError: ``label_key`` is neither an integer nor a string.

    Example::

        model = Classifier(nn.Linear(784, 10))
        loss = model(images, labels)
    """

    def __init__(
        self,
        predictor: nn.Module,
        lossfun: Callable[..., Tensor] = nn.functional.cross_entropy,
        accfun: Callable[..., Any] | None = accuracy,
        label_key: int | str = -1,
    ) -> None:
        if not isinstance(label_key, (int, str)):
            raise TypeError(f"label_key is the position of an argument or a keyword's name, got {label_key!r}")
        super().__init__()
        self.predictor = predictor
        self.lossfun = lossfun
        self.accfun = accfun
        self.label_key = label_key

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch, a scalar.

        Raises:
            ValueError: the batch has no argument at ``label_key``.
        """
        args, kwargs, labels = self._split(args, kwargs)
        # hot path: "the script's extensions" of benchmarks/overhead.py. self.predictor costs a microsecond more.
        scores = self._modules["predictor"](*args, **kwargs)  # type: ignore[misc]
        loss = self.lossfun(scores, labels)
        values = {"loss": loss}
        if self.accfun is accuracy:  # argmax has no gradient, and no_grad would take as long
            values["accuracy"] = accuracy(scores, labels)
        elif self.accfun is not None:
            with torch.no_grad():
                values["accuracy"] = self.accfun(scores, labels)
        report(values, self)
        return loss

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        key = self.label_key
        if isinstance(key, str):
            if key not in kwargs:
                raise ValueError(f"the labels are the keyword {key!r}, and the batch has the keywords {sorted(kwargs)}")
            return args, {name: value for name, value in kwargs.items() if name != key}, kwargs[key]
        if not -len(args) <= key < len(args):
            raise ValueError(f"the labels are argument {key}, and the batch has {len(args)}; set label_key")
        position = key % len(args)
        return args[:position] + args[position + 1 :], kwargs, args[position]
