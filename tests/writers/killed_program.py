"""A run that writes everywhere, and is killed: ``python killed_program.py OUT DATABASE ITERATION``."""

import os
import signal
import sys

from written import Losing, train

from chainring.writers import CsvWriter, MlflowWriter, TensorBoardWriter, WandbWriter


class Killed(Losing):
    """Ends the process without a word, in the middle of an update."""

    def update_core(self):
        super().update_core()
        if self.iteration == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)


def writers(database):
    """One of each kind."""
    return CsvWriter(), TensorBoardWriter(), WandbWriter(mode="offline"), MlflowWriter(database, "killed")


if __name__ == "__main__":
    train(sys.argv[1], *writers(sys.argv[2]), updater=Killed(), config={"lr": 0.5})
