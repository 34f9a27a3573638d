"""Several devices and several ranks."""

from chainring.communicator import Communicator, RankFailed
from chainring.parallel.data_parallel import DataParallel
from chainring.parallel.process_group import create_communicator
from chainring.parallel.scatter import gather, scatter

__all__ = ["Communicator", "DataParallel", "RankFailed", "create_communicator", "gather", "scatter"]
