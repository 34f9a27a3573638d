"""Trains a small network on handwritten digits, on any number of processes: ``train_mnist.py`` with five other lines.

    python train_digits.py
    torchrun --nproc-per-node 2 train_digits.py
    torchrun --nproc-per-node 2 train_digits.py --parallel ddp
    torchrun --nproc-per-node 2 train_digits.py --parallel fsdp

All four end with the same losses, up to rounding: ``--batchsize`` is that of the whole batch, of which each process takes
its share. A run continues on another number of processes, and with another ``--parallel``: ``--resume result/...``.
"""

import argparse

import torch
from distribute import distribute
from torch import nn

import chainring
from chainring import datasets, iterators, serializers, training
from chainring.nn import Classifier
from chainring.training import extensions


class MLP(nn.Sequential):
    """Two hidden layers, from pixels to the scores of the classes."""

    def __init__(self, pixels: int, units: int, classes: int) -> None:
        super().__init__(nn.Linear(pixels, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=100, help="examples in a batch (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=20, help="epochs to train (default: %(default)s)")
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none", help="who exchanges gradients")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--resume", "-r", default="", help="a snapshot to continue, such as result/snapshot_iter_150")
    parser.add_argument("--unit", "-u", type=int, default=50, help="units of a hidden layer (default: %(default)s)")
    parser.add_argument(
        "--dataset", choices=["digits", "mnist"], default="digits", help="what to learn (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    train, test = datasets.get_mnist() if args.dataset == "mnist" else datasets.get_digits()
    model, comm = distribute(Classifier(MLP(train[0][0].size, args.unit, 10)), args.parallel)
    optimizer = torch.optim.Adam(model.parameters())
    train_iter = iterators.SerialIterator(train, args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    updater = training.StandardUpdater(train_iter, optimizer, model, device=comm.device, comm=comm)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.Evaluator(test_iter, model, device=comm.device))
    trainer.extend(extensions.dump_graph("main/loss"))
    trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport())
    columns = ["epoch", "main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy", "elapsed_time"]
    trainer.extend(extensions.PrintReport(columns))
    trainer.extend(extensions.ProgressBar())
    if args.resume:
        serializers.load(args.resume, trainer)
    trainer.run()
    serializers.save(f"{args.out}/mlp.model", model)


if __name__ == "__main__":
    main()
