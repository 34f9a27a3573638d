"""check_trigger finds each defect that a trigger can have, and passes one that has none."""

import pytest

from chainring.testing import check_trigger
from chainring.training.triggers import OnceTrigger, Trigger


class EveryThird(Trigger):
    """As it should be."""

    count = 0

    def ask(self, trainer):
        self.count += 1
        return self.count % 3 == 0

    def serialize(self, serializer):
        super().serialize(serializer)
        self.count = serializer("count", self.count)


class SavesNothing(EveryThird):
    def serialize(self, serializer):
        pass


class SavesNoAnswer(EveryThird):
    def serialize(self, serializer):
        self.count = serializer("count", self.count)


class LoadsNothing(EveryThird):
    def serialize(self, serializer):
        Trigger.serialize(self, serializer)
        serializer("count", self.count)


class CountsQuestions(EveryThird):
    """Asked twice in an iteration, it counts twice."""

    def __call__(self, trainer):
        return self.ask(trainer)


class ReadsTheClock(EveryThird):
    """Keeps a point of the clock, which stands elsewhere in another process."""

    until = 4.0

    def ask(self, trainer):
        import time

        if time.monotonic() < self.until:
            return False
        self.until = time.monotonic() + 4
        return True

    def serialize(self, serializer):
        Trigger.serialize(self, serializer)
        self.until = serializer("until", self.until)


class KeepsInTheClass(EveryThird):
    counts = [0]  # noqa: RUF012 - the defect

    def ask(self, trainer):
        self.counts[0] += 1
        return self.counts[0] % 5 == 0


class SavesAFunction(EveryThird):
    def serialize(self, serializer):
        super().serialize(serializer)
        serializer("rule", lambda: None)


class ReadsAnotherKey(EveryThird):
    def serialize(self, serializer):
        Trigger.serialize(self, serializer)
        from chainring.serializers import Serializer

        self.count = serializer("count" if isinstance(serializer, Serializer) else "counts", self.count)


def test_a_sound_trigger_passes():
    """Of one's own, a pair, and a function that makes one."""
    check_trigger(EveryThird)
    check_trigger((2, "iteration"))
    check_trigger(lambda: OnceTrigger())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (SavesNothing, r"saved after iteration 1 .*fires at \[4, 7, 10\] instead of \[3, 6, 9, 12\].*serialize"),
        (LoadsNothing, r"saved after iteration 1 .*self\.x = serializer\('x', self\.x\)"),
        (CountsQuestions, r"two extensions that share .*alone it would be at \[3, 6, 9, 12\].*ask\(trainer\)"),
        (ReadsTheClock, r"saved after iteration .*fires when the uninterrupted one does"),
        (KeepsInTheClass, r"created again starts again: it fired at \[5, 10\], then at \[3, 8\]"),
        (SavesAFunction, r"state can be saved: .*numbers, strings"),
        (ReadsAnotherKey, r"state that was saved can be loaded into a new object: .*counts"),
        (lambda: lambda trainer: False, r"only if the trigger fires: never in 12 iterations. Give iterations="),
    ],
)
def test_a_broken_one_does_not(broken, said):
    """The rule, what was found, and what to do."""
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        check_trigger(broken)


def test_a_trigger_that_cannot_be_made_anew_is_refused():
    """An object shows nothing about a resume."""
    with pytest.raises(TypeError, match="one object; give lambda"):
        check_trigger(EveryThird())
