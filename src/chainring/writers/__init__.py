"""Where log rows go besides the log."""

from chainring.writers.base import Record, Writer

__all__ = ["Record", "Writer"]
