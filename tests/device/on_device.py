"""A plugin of pytest, for tests that run on the stand-in: a race fails the test in which it is found."""

from collections.abc import Iterator

import pytest
import stand_in


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    stand_in.native.take_races()
    yield
    races = stand_in.native.take_races()
    stand_in.native.reset()
    assert not races, "\n".join(races)
