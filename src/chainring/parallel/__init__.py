"""Several devices and several ranks."""

from chainring.parallel.communicator import Communicator

__all__ = ["Communicator"]
