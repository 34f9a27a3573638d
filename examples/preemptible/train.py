"""Trains on the digits, with dropout and augmentation, on a machine that may be taken away at any moment.

    python train.py --out result

The same command again continues from the last snapshot. SIGTERM lets the iteration end and saves it, and exits with 143. As
one of several ranks, with --survive, it also goes on where others are lost.
"""

import argparse

import numpy as np
import torch
from torch import nn

import chainring
from chainring import datasets, iterators, serializers, training
from chainring.nn import Classifier
from chainring.parallel import create_communicator
from chainring.training import extensions


def moved(example: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """Return the image moved by a pixel or not, to any side."""
    image, label = example
    return np.roll(image, np.random.randint(-1, 2, size=2), (1, 2)), label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=50, help="examples in a batch (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=40, help="epochs to train (default: %(default)s)")
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and noise (default: %(default)s)")
    parser.add_argument("--survive", action="store_true", help="go on without ranks that are lost, in four virtual ranks")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    train, test = datasets.get_digits(ndim=3)
    train_iter = iterators.SerialIterator(datasets.TransformDataset(train, moved), args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)
    layers = [nn.Flatten(), nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Dropout(0.3), nn.Linear(100, 10)]
    model = Classifier(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    ranks = {"comm": create_communicator("cpu", survive=True), "virtual_ranks": 4} if args.survive else {}
    updater = training.StandardUpdater(train_iter, optimizer, model, device=args.device, **ranks)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.LRScheduler(schedule))
    trainer.extend(extensions.Evaluator(test_iter, model, device=args.device))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]))
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2), trigger=(25, "iteration"))  # at most 25 are lost
    trainer.run()
    if updater.comm.is_main:
        serializers.save(f"{args.out}/digits.model", model)


if __name__ == "__main__":
    main()
