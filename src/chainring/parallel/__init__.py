"""Training on several devices and several ranks."""

from chainring._distributed.communicator import Communicator, RankFailed
from chainring._distributed.launchers import create_communicator
from chainring.parallel.data_parallel import DataParallel, gather, scatter

__all__ = ["Communicator", "DataParallel", "RankFailed", "create_communicator", "gather", "scatter"]
