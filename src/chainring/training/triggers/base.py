"""A trigger is a question about a trainer: does it happen now?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from chainring.serializers.base import AbstractSerializer, Serializer, Stateful

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class Trigger(Stateful):
    """Asked again in the same iteration it repeats its answer, so one object can serve two extensions.

    A subclass writes `ask`, which is called at most once an iteration. Any callable of a trainer is a trigger too; this
    class only adds the memory.

    Attributes:
        predictable: whether the answers follow from iterations and epochs alone, so that a plan can be drawn up.
    """

    predictable = False
    _asked: int | None = None
    _answer = False
    _restored = False

    def __call__(self, trainer: Trainer) -> bool:
        """Whether it happens in this iteration."""
        iteration = trainer.updater.iteration
        if iteration != self._asked:
            if self._asked is not None and iteration < self._asked:
                self.forget()  # another run: it began before this one's last question
            self._answer = self.ask(trainer)
            self._asked = iteration
        return self._answer

    def ask(self, trainer: Trainer) -> bool:
        """The answer for this iteration, computed."""
        raise NotImplementedError(f"{type(self).__name__} must define ask(trainer)")

    def forget(self) -> None:
        """Starts anew, for a run that begins again."""

    def initialize(self, trainer: Trainer) -> None:
        """Called once when a run starts, after state was put back; refuses what cannot work.

        A trigger without saved state starts from here: what lies behind a resumed run does not count, nor does what an
        earlier trainer asked this object.
        """
        if not self._restored:
            self._asked = None
            self.forget()
        self._restored = False

    def serialize(self, serializer: AbstractSerializer) -> None:
        self._asked = serializer("asked", self._asked)
        self._answer = serializer("answer", self._answer)
        self._restored = self._restored or not isinstance(serializer, Serializer)


def start(trigger: Any, trainer: Trainer) -> None:
    """Initializes a trigger once a run, however many extensions and other triggers hold it."""
    started = vars(trainer).setdefault("_started_triggers", [])
    if hasattr(trigger, "initialize") and all(other is not trigger for other in started):
        started.append(trigger)
        trigger.initialize(trainer)


def shown(trigger: Any) -> str:
    """A trigger as text, the same in every process: with its settings, or the name of a function."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(getattr(trigger, "__name__", trigger)))


def setting_of(trigger: Any) -> str:
    """The same as far as it is a setting: of a class that is not ours its name, since what else it shows may be state."""
    is_ours = type(trigger).__module__.startswith("chainring.")
    return shown(trigger) if is_ours or hasattr(trigger, "__name__") else type(trigger).__name__


def never(trainer: Any) -> bool:
    """The trigger that ``None`` stands for."""
    return False
