"""Messages of a run to its user: printed lines, and warnings that are given once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chainring.serializers.base import AbstractSerializer

_is_muted = False


def mute() -> None:
    """Let this process print nothing from now on; of several ranks, only the first prints."""
    global _is_muted
    _is_muted = True


def info(text: str) -> None:
    """Print a line for the user, unless this process is muted."""
    if not _is_muted:
        print(text, flush=True)


class OneTimeWarning:
    """A warning that is given once in a run, however often the run is resumed.

    Attributes:
        was_given: True if it has been given.
    """

    def __init__(self) -> None:
        self.was_given = False

    def give(self, text: str, stacklevel: int) -> None:
        """Warn, unless this was done before."""
        if not self.was_given:
            self.was_given = True
            warnings.warn(text, stacklevel=stacklevel + 1)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load whether the warning has been given."""
        self.was_given = serializer("has_warned", self.was_given)
