"""EarlyStoppingTrigger: when a reported value has not become better for a while."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from chainring._messages import info
from chainring.serializers.base import AbstractSerializer, has_state, serialize_method
from chainring.training.triggers._get_trigger import get_stop_trigger
from chainring.training.triggers.best_value import MeanTrigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer

MODES = ("auto", "max", "min")


class EarlyStoppingTrigger(MeanTrigger):
    """A stop trigger: true once ``patience`` checks in a row brought no improvement, or when ``max_trigger`` says so.

    Each time that it is asked it takes the value into account, weighted as the updates are. When ``check_trigger`` fires, it
    compares the mean since that last fired with the best so far. The first mean is an improvement, one that is equal is
    none, and NaN never is. A check of an interval in which the value was not reported neither counts nor begins the count
    anew, and is warned about once.

    Used as the trigger of an extension, it fires from the check that ends its patience on, until an improvement.

    Args:
        check_trigger: when a mean is taken and compared.
        monitor: the key of the value in the observation, such as ``"validation/main/loss"``.
        patience: how many checks in a row without improvement end training.
        mode: ``"max"`` where greater is better, ``"min"`` where less is; ``"auto"`` is ``"max"`` where the key contains
            ``"accuracy"``, else ``"min"``.
        verbose: whether it prints that it stops, and why.
        max_trigger: ends training in any case; as of a trainer's stop trigger, a pair means *reached*. ``None`` never does.

    Attributes:
        mode: ``"max"`` or ``"min"``.

    Raises:
        TypeError: the key is no string, the patience no integer, or a trigger is of another form.
        ValueError: the patience is below 1, the mode unknown, or the unit or period of a trigger is none.
    """

    def __init__(
        self,
        check_trigger: Any = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int = 3,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: Any = (100, "epoch"),
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int):
            raise TypeError(f"patience is how many checks, an integer; got {patience!r}")
        if patience < 1:
            raise ValueError(f"patience is how many checks without improvement end training, at least 1; got {patience!r}")
        if mode not in MODES:
            raise ValueError(f'mode is "auto", "max" or "min", got {mode!r}')
        self.patience = patience
        self.verbose = verbose
        self.max_trigger = get_stop_trigger(max_trigger)
        super().__init__(monitor, check_trigger)
        self.mode = mode if mode != "auto" else "max" if "accuracy" in monitor else "min"

    def forget(self) -> None:
        super().forget()
        self._best: float | None = None
        self._count = 0

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        trainer.initialize_trigger(self.max_trigger)

    def __call__(self, trainer: Trainer) -> bool:
        # Both are settings, and the answer is not kept: a run that is resumed with more patience goes on.
        is_reached = self.max_trigger(trainer)
        super().__call__(trainer)
        return is_reached or self._count >= self.patience

    def judge(self, mean: float, trainer: Trainer) -> bool:
        """Whether patience has ended with this check."""
        if self._is_better(mean):
            self._best, self._count = mean, 0
            return False
        self._count += 1
        if self.verbose and self._count == self.patience:
            updater = trainer.updater
            info(
                f"training stops early, at epoch {updater.epoch}, iteration {updater.iteration}: {self.key} has been "
                f"no better than {self._best} in {self.patience} checks, and was {mean} in the last"
            )
        return self._count >= self.patience

    def _is_better(self, mean: float) -> bool:
        if math.isnan(mean):
            return False
        if self._best is None:
            return True
        return mean > self._best if self.mode == "max" else mean < self._best

    def get_training_length(self) -> tuple[float, str] | None:
        """The length and its unit at which training ends in any case; ``None`` where ``max_trigger`` does not say."""
        length: tuple[float, str] | None = getattr(self.max_trigger, "get_training_length", lambda: None)()
        return length

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._best = serializer("best", self._best)
        self._count = serializer("count", self._count)
        mode, kind = serializer("mode", self.mode), serializer("max_trigger_type", type(self.max_trigger).__name__)
        super().serialize(serializer)
        if mode != self.mode:
            self._best, self._count = None, 0
        has_own = serialize_method(self.max_trigger) is not None or has_state(self.max_trigger)
        if kind == type(self.max_trigger).__name__ and has_own:
            serializer.visit("max_trigger", self.max_trigger)

    def __str__(self) -> str:
        return f"EarlyStoppingTrigger({self.trigger}, {self.key!r}, {self.patience}, {self.mode!r})"

    __repr__ = __str__
