"""A run that `accelerator.py` kills and repeats: ``python _trained.py OUT DEVICE VIRTUAL_RANKS KILL``, also by torchrun.

It prints a digest of all parameters. In the iteration KILL it ends by SIGKILL; 0 lets it be. A DEVICE that is ``auto`` is
that of the rank; without VIRTUAL_RANKS, 0, an update is computed in one piece.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

from torch import nn
from torch.optim import Adam

import chainring
from chainring import datasets, iterators, parallel, training
from chainring.nn import Classifier
from chainring.training import extensions

ITERATIONS, BATCH = 12, 32


def main(out: str, device: str, virtual_ranks: int, kill: int) -> None:
    chainring.deterministic(0)
    communicator = parallel.create_communicator()
    model = Classifier(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10)))
    optimizer = Adam(model.parameters())
    data = iterators.SerialIterator(datasets.get_digits()[0], BATCH, seed=1)
    updater = training.StandardUpdater(
        data, optimizer, model, device=device, virtual_ranks=virtual_ranks or None, comm=communicator
    )
    trainer = training.Trainer(updater, (ITERATIONS, "iteration"), out=out)
    trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(3, "iteration"))

    def die(trainer: training.Trainer) -> None:
        if trainer.updater.iteration == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.extend(die, trigger=(1, "iteration"), priority=-1000)
    trainer.run()
    if communicator.is_main:
        content = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
        print("parameters:", hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
