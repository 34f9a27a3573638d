"""fired: a trigger's timeline without a training."""

import pytest

from chainring.testing import fired
from chainring.training.triggers import MinValueTrigger, OnceTrigger


class Forgetful:
    """Fires every third time that it is asked, and saves nothing."""

    def __init__(self):
        self.count = 0

    def __call__(self, trainer):
        self.count += 1
        return self.count % 3 == 0


@pytest.mark.parametrize(
    ("trigger", "settings", "expected"),
    [
        ((2, "epoch"), {"epoch_length": 3}, [6, 12]),
        ((5, "iteration"), {}, [5, 10]),
        ((0.5, "epoch"), {"epoch_length": 5}, [3, 5, 8, 10]),
        ((1, "epoch"), {"epoch_length": 2.5}, [3, 5, 8, 10]),
        ((10, "second"), {"seconds": 4}, [3, 5, 8, 10]),
        (None, {}, []),
        (OnceTrigger, {}, [1]),
        (lambda: OnceTrigger(), {}, [1]),
        (lambda: (4, "iteration"), {}, [4, 8, 12]),
        (lambda trainer: trainer.updater.iteration > 10, {}, [11, 12]),
        (Forgetful(), {}, [3, 6, 9, 12]),
    ],
)
def test_it_says_at_which_iterations_a_trigger_fires(trigger, settings, expected):
    """Of any form: a pair, an object, a function, a class, a function that makes one."""
    assert fired(trigger, iterations=12, **settings) == expected


def test_values_are_a_column_for_each_key_or_a_function_of_the_iteration():
    """What a trigger is to see."""

    def make():
        return MinValueTrigger("loss", (1, "iteration"))

    column = [3.0, 2.0, 2.5, 1.0, 1.0]
    assert fired(make, iterations=5, values={"loss": column}) == [1, 2, 4]
    assert fired(make, iterations=5, values=lambda iteration: {"loss": column[iteration - 1]}) == [1, 2, 4]


def test_a_resumed_run_has_a_new_trigger_with_the_saved_state():
    """One with state goes on; one that saves nothing begins to count anew after each cut."""
    assert fired((5, "iteration"), iterations=12, resumed_after=[0, 3, 7, 12]) == [5, 10]
    assert fired(Forgetful, iterations=12, resumed_after=[4]) == [3, 7, 10]
    assert fired(OnceTrigger, iterations=4, resumed_after=range(4)) == [1]
    assert fired(lambda: OnceTrigger(call_on_resume=True), iterations=4, resumed_after=[2]) == [1, 3]


def test_what_cannot_be_tried_is_refused():
    """With the rule, the value and the remedy."""
    with pytest.raises(TypeError, match=r"new trigger.*one object.*lambda: \.\.\."):
        fired(Forgetful(), iterations=5, resumed_after=[2])
    with pytest.raises(ValueError, match=r"0 to 5 of them, got \[6\]"):
        fired(OnceTrigger, iterations=5, resumed_after=[2, 6])
    with pytest.raises(ValueError, match="at least 1 iteration, got iterations=0"):
        fired(OnceTrigger, iterations=0)
    with pytest.raises(TypeError, match="a trigger is None, a callable"):
        fired("epoch", iterations=5)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    """It writes in a directory of its own, which is removed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fired((1, "iteration"), iterations=3, resumed_after=[1])
    assert list(tmp_path.iterdir()) == []
