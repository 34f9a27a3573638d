"""A run that `accelerator.py` kills and repeats: ``python _trained.py OUT DEVICE VIRTUAL_RANKS KILL``, also by torchrun.

It prints a digest of all that was trained. In the iteration KILL it ends by SIGKILL; 0 lets it be.
"""

import os
import signal
import sys

import torch
from torch import nn

import chainring
from chainring import datasets, iterators, parallel, training
from chainring.nn import Classifier
from chainring.training import extensions

ITERATIONS, BATCH = 12, 32


def main(out: str, device: str, virtual_ranks: int, kill: int) -> None:
    chainring.deterministic(0)
    communicator = parallel.create_communicator()
    body = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10))
    model = Classifier(body)
    optimizer = torch.optim.Adam(model.parameters())
    data = iterators.SerialIterator(datasets.get_digits()[0], BATCH, seed=1)
    settings = {"virtual_ranks": virtual_ranks} if virtual_ranks else {}
    updater = training.StandardUpdater(data, optimizer, model, device=device, **settings)
    trainer = training.Trainer(updater, (ITERATIONS, "iteration"), out=out)
    trainer.extend(extensions.LogReport(trigger=(4, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(3, "iteration"))
    if kill:

        def die(trainer: training.Trainer) -> None:
            if trainer.updater.iteration == kill:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.extend(die, trigger=(1, "iteration"), priority=-1000)
    trainer.run()
    if communicator.is_main:
        values = [value.cpu() for value in model.state_dict().values()]
        print(f"digest {sum(int(value.view(torch.uint8).long().sum()) for value in values)}", *map(exact, values))


def exact(value: torch.Tensor) -> str:
    import hashlib

    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:12]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
