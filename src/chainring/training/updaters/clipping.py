"""Clipping of gradients, for ``UpdateCallbacks(update_on_start=...)``, where they are final."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from chainring.reporter import report
from chainring.sharding import whole
from chainring.training.updaters.callbacks import UpdateContext

Clip = Callable[[UpdateContext], None]


def clip_grad_norm(max_norm: float, norm_type: float = 2.0) -> Clip:
    """Scales all gradients together so that their norm is at most ``max_norm``; reports the norm before as ``grad_norm``.

    The norm is that of all gradients of the updater's optimizers as one vector, as ``torch.nn.utils.clip_grad_norm_``
    has it. It stays on the device.

    Args:
        max_norm: above 0; infinity only reports.
        norm_type: of the norm, above 0; ``math.inf`` is the largest magnitude.

    Raises:
        ValueError: a number is not above 0.
    """
    _require_positive("max_norm", max_norm)
    _require_positive("norm_type", norm_type)

    def clip(context: UpdateContext) -> None:
        parameters = _parameters(context)
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type))
        if max_norm != math.inf:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        report({"grad_norm": norm})

    return clip


def clip_grad_value(max_value: float) -> Clip:
    """Clips each element of each gradient to the range from ``-max_value`` to ``max_value``.

    Args:
        max_value: above 0.

    Raises:
        ValueError: it is not above 0.
    """
    _require_positive("max_value", max_value)
    return lambda context: torch.nn.utils.clip_grad_value_(_parameters(context), max_value)


def _parameters(context: UpdateContext) -> list[Tensor]:
    """The parameters of the updater's optimizers that have a gradient, each once."""
    optimizers = context.updater.get_all_optimizers().values()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = {id(p): p for group in groups for p in group["params"] if p.grad is not None}
    return list(found.values())


def _require_positive(what: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{what} is a number above 0, got {value!r}")
