"""The step of an optimizer, without a profiler's record that no profiler reads."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

try:
    _RECORDING: Any = Optimizer.profile_hook_step(Optimizer.step).__code__
except AttributeError:  # a PyTorch that does it in another way: steps are called as they stand
    _RECORDING = object()


def step(optimizer: Optimizer) -> None:
    """Lets an optimizer step.

    PyTorch wraps the ``step`` of every class in a record for its profiler and calls of the hooks, which is a quarter of the
    time of a small step. Where no profiler runs and no hook is registered, what is wrapped is called by itself. A step that
    is wrapped or replaced in any other way, as schedulers of the learning rate do, is called as it stands.
    """
    function: Any = type(optimizer).step
    if getattr(function, "__code__", None) is not _RECORDING or "step" in vars(optimizer) or _is_watched(optimizer):
        optimizer.step()
    else:
        function.__wrapped__(optimizer)


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether someone wants to know of a step. These names of PyTorch's are not public: without them, it is taken as if."""
    try:
        return bool(
            torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
        )
    except AttributeError:
        return True
