"""Settings of an extension that would fail, or be left out silently, after the run has begun."""

import pytest
from counting import a_trainer

from chainring import training


@pytest.mark.parametrize("setting", ["finalizer", "initializer", "on_error"])
def test_a_function_of_an_extension_that_cannot_be_called_is_refused(setting):
    """Where it is given, and not left out silently when its time comes."""
    with pytest.raises(TypeError, match=f"{setting} is a function, got 3; write {setting}=f"):
        training.make_extension(**{setting: 3})


def test_a_priority_that_is_no_number_is_refused(tmp_path):
    """Where it is given, because it could not be ordered when the run starts."""
    with pytest.raises(TypeError, match=r"a priority is a number.*got 'high'"):
        a_trainer(tmp_path).extend(print, priority="high")
    with pytest.raises(TypeError, match=r"a priority is a number.*got 'high'"):
        training.make_extension(priority="high")
