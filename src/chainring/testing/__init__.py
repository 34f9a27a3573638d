"""What proves one's own parts, a check for each interface, and one's own program: that it continues after a kill."""

from chainring.testing.check_extension import check_extension
from chainring.testing.check_iterator import check_iterator
from chainring.testing.check_trigger import check_trigger
from chainring.testing.check_updater import check_updater
from chainring.testing.fakes import FakeUpdater, ManualClock
from chainring.testing.fired import fired
from chainring.testing.verify_resume import NotTried, ResumeDiffers, verify_resume

__all__ = [
    "FakeUpdater",
    "ManualClock",
    "NotTried",
    "ResumeDiffers",
    "check_extension",
    "check_iterator",
    "check_trigger",
    "check_updater",
    "fired",
    "verify_resume",
]
