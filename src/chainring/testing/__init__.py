"""What proves a program that trains: that it continues bit for bit after it was killed."""

from chainring.testing.verify_resume import NotTried, ResumeDiffers, verify_resume

__all__ = ["NotTried", "ResumeDiffers", "verify_resume"]
