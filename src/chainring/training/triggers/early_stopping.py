"""EarlyStoppingTrigger: stops training when a reported value has not improved for a while."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from chainring._checks import is_integer
from chainring._messages import info
from chainring.serializers.base import AbstractSerializer
from chainring.training.triggers._get_trigger import TriggerLike, get_stop_trigger
from chainring.training.triggers.base import serialize_inner_trigger
from chainring.training.triggers.best_value import MonitorTrigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class EarlyStoppingTrigger(MonitorTrigger):
    """A stop trigger: true once ``patience`` checks in a row brought no improvement, or when ``max_trigger`` fires.

    Each time that it is asked it adds the value to a mean, weighted as the updates are. When ``check_trigger`` fires, it
    compares the mean since that last fired with the best so far. The first mean is an improvement; an equal one and
    NaN are not. A check of an interval in which the value was not reported does not count and does not reset the
    count; the first one gives a warning.

    As the trigger of an extension, it fires from the check that ends its patience until the next improvement.

    Example::

        stop = EarlyStoppingTrigger(monitor="validation/main/loss", patience=5, max_trigger=(100, "epoch"))
        trainer = Trainer(updater, stop)

    Args:
        check_trigger: when a mean is taken and compared.
        monitor: the key of the value in the observation, such as ``"validation/main/loss"``.
        patience: the number of checks in a row without improvement that end training.
        mode: ``"max"`` where greater is better, ``"min"`` where less is; ``"auto"`` is ``"max"`` where the key contains
            ``"accuracy"``, else ``"min"``.
        verbose: if True, a line is printed when training stops early.
        max_trigger: ends training in any case; as for a trainer's stop trigger, a pair means *reached*. ``None`` never does.

    Attributes:
        mode: ``"max"`` or ``"min"``.

    Raises:
        TypeError: the key is not a string, the patience is not an integer, or a trigger is not a trigger.
        ValueError: the patience is below 1, the mode is unknown, or the period or unit of a trigger is invalid.
    """

    def __init__(
        self,
        check_trigger: TriggerLike = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int = 3,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: TriggerLike = (100, "epoch"),
    ) -> None:
        if not is_integer(patience):
            raise TypeError(f"patience is the number of checks, an integer; got {patience!r}")
        if patience < 1:
            raise ValueError(f"patience is the number of checks without improvement, at least 1; got {patience!r}")
        if mode not in ("auto", "max", "min"):
            raise ValueError(f'mode is "auto", "max" or "min", got {mode!r}')
        self.patience = patience
        self.verbose = verbose
        self.max_trigger = get_stop_trigger(max_trigger)
        self.mode = mode if mode != "auto" else "max" if "accuracy" in str(monitor) else "min"
        super().__init__(monitor, operator.lt if self.mode == "max" else operator.gt, check_trigger)

    def forget(self) -> None:
        super().forget()
        self._count = 0  # checks in a row without improvement

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        trainer.initialize_trigger(self.max_trigger)

    def __call__(self, trainer: Trainer) -> bool:
        # Both are settings, and the answer is not kept: a run that is resumed with more patience goes on.
        is_reached = self.max_trigger(trainer)
        super().__call__(trainer)
        return is_reached or self._count >= self.patience

    def check(self, mean: float, trainer: Trainer) -> bool:
        """Return True if patience has ended with this check."""
        if self._update_best(mean):
            self._count = 0
            return False
        self._count += 1
        if self.verbose and self._count == self.patience:
            updater = trainer.updater
            info(
                f"training stops early, at epoch {updater.epoch}, iteration {updater.iteration}: {self.key} has been "
                f"no better than {self._best} in {self.patience} checks, and was {mean} in the last"
            )
        return self._count >= self.patience

    def get_training_length(self) -> tuple[float, str] | None:
        """Return the length and its unit at which training ends in any case; ``None`` if ``max_trigger`` has none."""
        length: tuple[float, str] | None = getattr(self.max_trigger, "get_training_length", lambda: None)()
        return length

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._count = serializer("count", self._count)
        saved_mode = serializer("mode", self.mode)
        super().serialize(serializer)
        if saved_mode != self.mode:
            self._best, self._count = None, 0
        serialize_inner_trigger(serializer, "max_trigger", self.max_trigger)

    def __repr__(self) -> str:
        return f"EarlyStoppingTrigger({self.trigger}, {self.key!r}, {self.patience}, {self.mode!r})"
