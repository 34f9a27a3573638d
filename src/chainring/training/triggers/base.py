"""Trigger, the base class of triggers that remember their answer; and functions for any trigger."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chainring.serializers.protocol import AbstractSerializer, Serializer, Stateful, visit_if_stateful, visit_setting

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class Trigger(Stateful):
    """Base class of triggers that repeat their answer within an iteration, so that several extensions can share one.

    Any callable of one argument, the trainer, can be a trigger; this class adds a memory of the last answer. A subclass
    defines `ask`.

    Example::

        class EveryPowerOfTwo(Trigger):
            def ask(self, trainer):
                return trainer.updater.iteration.bit_count() == 1

    Attributes:
        predictable: True if the answers follow from iterations and epochs alone, so that `Trainer.explain` can plan them.
    """

    predictable = False
    _asked: int | None = None
    _answer = False
    _restored = False

    def __call__(self, trainer: Trainer) -> bool:
        """Return True if the trigger fires in this iteration."""
        iteration = trainer.updater.iteration
        if iteration != self._asked:
            if self._asked is not None and iteration < self._asked:
                self.forget()  # this is another run, which has not come as far as the one that asked last
            self._answer = self.ask(trainer)
            self._asked = iteration
        return self._answer

    def ask(self, trainer: Trainer) -> bool:
        """Compute the answer for this iteration; called at most once per iteration.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define ask(trainer)")

    def forget(self) -> None:
        """Reset the state, for a run that starts from the beginning."""

    @property
    def watched_keys(self) -> Sequence[str]:
        """The keys of reported values that it needs; a rehearsal raises an error if one of them is not reported."""
        return ()

    def identity(self, trainer: Trainer) -> Sequence[str]:
        """Return texts that distinguish it from others of its class, such as a key; a resumed run recognizes it by them.

        See `Extension.identity`.
        """
        return ()

    def initialize(self, trainer: Trainer) -> None:
        """Prepare for a run, after saved state was restored; refuse a trainer with which the trigger cannot work.

        A trigger without saved state starts from the current iteration: it ignores the progress before the resume, and
        earlier calls by another trainer.
        """
        if not self._restored:
            self._asked = None
            self.forget()
        self._restored = False

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load the last answer and its iteration; a subclass adds its own state."""
        self._asked = serializer("asked", self._asked)
        self._answer = serializer("answer", self._answer)
        self._restored = self._restored or not isinstance(serializer, Serializer)


def never(trainer: Trainer) -> bool:
    """Return False: the trigger that ``None`` stands for."""
    return False


def serialize_inner_trigger(serializer: AbstractSerializer, key: str, trigger: Any) -> None:
    """Save or load the trigger that another one calls; it keeps its own state if a trigger of another class was saved."""
    name = type(trigger).__name__
    saved_name = serializer(f"{key}_type", name)
    if saved_name == name:
        visit_if_stateful(serializer, key, trigger)


def serialize_extension_trigger(
    serializer: AbstractSerializer, name: str, trigger: Any, *, saved_name: str | None = None, is_same_class: bool = True
) -> None:
    """Save or load the trigger of the extension ``name``, its state only of the same class, and compare its setting."""
    key = name if saved_name is None else saved_name
    if is_same_class:
        visit_if_stateful(serializer["extension_triggers"], key, trigger)
    settings = serializer["extension_trigger_settings"]
    visit_setting(settings, key, describe_setting(trigger), f"trigger of extension {name!r}")


def keys_of(part: Any, attribute: str = "watched_keys") -> list[str]:
    """Return the keys that an extension, a trigger or an updater names; none where that is something else of the user's."""
    keys = getattr(part, attribute, ())
    if isinstance(keys, str):
        return [keys]
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, (tuple, list, set, frozenset)) else []


def describe(trigger: Any) -> str:
    """Return a trigger as text that is the same in every process: with its settings, or the name of a function."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(getattr(trigger, "__name__", trigger)))


def describe_setting(trigger: Any) -> str:
    """Return the text by which a resumed run recognizes the trigger; for a class of a user its name.

    The other text of a user's class may contain state, which is not a setting.
    """
    is_ours = type(trigger).__module__.startswith("chainring.")
    return describe(trigger) if is_ours or hasattr(trigger, "__name__") else type(trigger).__name__
