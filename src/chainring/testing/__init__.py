"""Checks for your own triggers, extensions, iterators and updaters, and for a whole program that must resume exactly."""

from chainring.testing._replaying import NoReplay
from chainring.testing.check_extension import check_extension
from chainring.testing.check_iterator import check_iterator
from chainring.testing.check_trigger import check_trigger, fired
from chainring.testing.check_updater import check_updater
from chainring.testing.fakes import FakeUpdater, ManualClock
from chainring.testing.replay import ReplayDiffers, replay
from chainring.testing.verify_resume import Inconclusive, NotTried, ResumeDiffers, verify_resume

__all__ = [
    "FakeUpdater",
    "Inconclusive",
    "ManualClock",
    "NoReplay",
    "NotTried",
    "ReplayDiffers",
    "ResumeDiffers",
    "check_extension",
    "check_iterator",
    "check_trigger",
    "check_updater",
    "fired",
    "replay",
    "verify_resume",
]
