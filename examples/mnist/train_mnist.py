"""Trains a small network on handwritten digits: the script that Chainring is measured by.

The data are the 1,797 digits inside scikit-learn, or MNIST, which is downloaded once. ``train_plain.py`` beside it is the
same training without Chainring.
"""

import argparse

import torch
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
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
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
    model = Classifier(MLP(train[0][0].size, args.unit, 10))
    optimizer = torch.optim.Adam(model.parameters())
    train_iter = iterators.SerialIterator(train, args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    updater = training.StandardUpdater(train_iter, optimizer, model, device=args.device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.Evaluator(test_iter, model, device=args.device))
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
