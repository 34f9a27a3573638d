"""What triggers share that judge the mean of a reported value."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from chainring.serializers.base import AbstractSerializer, Serializer, has_state, serialize_method
from chainring.summary import DictSummary
from chainring.training.triggers._get_trigger import get_trigger
from chainring.training.triggers.base import Trigger, start

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class MeanTrigger(Trigger):
    """Takes the mean of a reported value over an interval, weighted as the updates are. A subclass writes `judge`.

    Args:
        key: of the value in the observation. What is no single number is passed over.
        trigger: when a mean is taken.

    Raises:
        TypeError: the key is no string, or the trigger is of another form.
        ValueError: the trigger's unit or period is none.
    """

    def __init__(self, key: str, trigger: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f'the key is that of a reported value, such as "validation/main/loss"; got {key!r}')
        self.key = key
        self.trigger = get_trigger(trigger)
        self.forget()

    def judge(self, mean: float, trainer: Trainer) -> bool:
        """The answer at the end of an interval in which the value was reported."""
        raise NotImplementedError(f"{type(self).__name__} must define judge(mean, trainer)")

    def forget(self) -> None:
        self._summary = DictSummary()
        self._seen: set[str] = set()  # the keys since the trigger last fired, as long as they may have to be named
        self._has_warned = False

    def initialize(self, trainer: Trainer) -> None:
        super().initialize(trainer)
        start(self.trigger, trainer)

    def ask(self, trainer: Trainer) -> bool:
        observation = trainer.observation
        if self.key in observation:
            self._summary.add({self.key: observation[self.key]}, getattr(trainer.updater, "weight", 1))
        if not self._has_warned:
            self._seen.update(observation)
        if not self.trigger(trainer):
            return False
        means, self._summary = self._summary.over(trainer.comm).compute_mean(), DictSummary()
        if self.key not in means:
            self._warn(trainer.updater.iteration)
        self._seen.clear()
        return self.key in means and self.judge(means[self.key], trainer)

    def _warn(self, iteration: int) -> None:
        """Says once that there was nothing to compare, because a key that is never reported would otherwise go unnoticed."""
        if self._has_warned:
            return
        self._has_warned = True
        if self.key in self._seen:
            what, remedy = f"what was reported as {self.key!r} is no single number", "report one, for example .mean()"
        else:
            what = f"{self.key!r} was not reported; reported were {sorted(self._seen, key=str)}"
            remedy = (
                "check the key; give an interval in which it is reported, and to the extension that has this trigger "
                "a lower priority than to the one that reports it"
            )
        warnings.warn(
            f"{self} has nothing to compare at iteration {iteration}: since its interval began {what}. "
            f"This check counts for nothing, and this is said once; {remedy}",
            stacklevel=5,
        )

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        key, kind = serializer("key", self.key), serializer("trigger_type", type(self.trigger).__name__)
        self._seen = set(serializer("seen", sorted(self._seen, key=str)))
        self._has_warned = serializer("has_warned", self._has_warned)
        self._summary.serialize(serializer["summary"])
        # Settings are never state: what is known of another key says nothing, nor does the state of another trigger.
        if not isinstance(serializer, Serializer) and key != self.key:
            self.forget()
        has_own = serialize_method(self.trigger) is not None or has_state(self.trigger)
        if kind == type(self.trigger).__name__ and has_own:
            serializer.visit("trigger", self.trigger)
