"""Checks for your own triggers, extensions, iterators and updaters, and for a whole program that must resume exactly."""

from chainring.testing.check_iterator import check_iterator
from chainring.testing.checks import check_extension, check_trigger, check_updater, fired
from chainring.testing.fakes import FakeUpdater, ManualClock
from chainring.testing.replay import NoReplay, ReplayDiffers, replay
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
