"""OnceTrigger: fires the first time only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.training.triggers.base import Trigger

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class OnceTrigger(Trigger):
    """Fires the first time that it is asked after an update, and never again.

    Example::

        trainer.extend(print_memory, trigger=OnceTrigger(call_on_resume=True))

    Args:
        call_on_resume: if True, it fires once more in each run that continues an earlier one.

    Attributes:
        finished: True if it has fired.
    """

    predictable = True

    def __init__(self, call_on_resume: bool = False) -> None:
        self.call_on_resume = call_on_resume
        self.finished = False

    def forget(self) -> None:
        self.finished = False

    def ask(self, trainer: Trainer) -> bool:
        if trainer.updater.iteration == 0:
            return False
        fires, self.finished = not self.finished, True
        return fires

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        self.finished = serializer("finished", self.finished)
        if not isinstance(serializer, Serializer) and self.call_on_resume:
            self.finished = False

    def __repr__(self) -> str:
        return f"OnceTrigger({self.call_on_resume})"
