"""Trains a convolutional network on the handwritten digits with mixup, label smoothing and averaged parameters.

    python train_mixup.py --out result

The recipe is that of torchvision's reference script in small: images are mixed in pairs, the learning rate warms up and then
falls in half a cosine, and an exponential moving average of the parameters is evaluated beside the model. The same
command again continues a run that was stopped.
"""

import argparse
import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, pad

import chainring
from chainring import datasets, iterators, report, training
from chainring.nn import Classifier
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions, triggers


def network(units: int) -> nn.Sequential:
    """From images (batch, 1, 8, 8) to a score of each digit."""
    layers, channels = [], [1, units, 2 * units, 4 * units]
    for index, (before, after) in enumerate(pairwise(channels)):
        convolution = nn.Conv2d(before, after, 3, stride=min(index + 1, 2), padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


def shift(example: tuple[np.ndarray, int]) -> tuple[Tensor, int]:
    """Move an image by up to one pixel in each direction; drawn for each example from its own random numbers."""
    image, digit = example
    row, column = np.random.randint(0, 3, 2)
    return pad(torch.from_numpy(image), (1, 1, 1, 1))[:, row : row + 8, column : column + 8], digit


def mixup(alpha: float, smoothing: float):
    """Make the loss of a batch in which each image, and its label, is mixed with the one before it.

    Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", 2018.
    """

    def loss_func(model: Classifier, images: Tensor, digits: Tensor) -> Tensor:
        part = torch.distributions.Beta(alpha, alpha).sample().item()
        images, labels = (torch.lerp(x.roll(1, 0), x, part) for x in (images, one_hot(digits, 10).to(images)))
        loss = cross_entropy(model.predictor(images), labels, label_smoothing=smoothing)
        report({"loss": loss}, model)
        return loss

    return loss_func


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alpha", type=float, default=0.2, help="of the distribution of parts (default: %(default)s)")
    parser.add_argument("--batchsize", "-b", type=int, default=64, help="images in a batch (default: %(default)s)")
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--epoch", "-e", type=int, default=40, help="epochs to train (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and mixing (default: %(default)s)")
    parser.add_argument("--unit", "-u", type=int, default=16, help="channels of the first layer (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    train, test = datasets.get_digits(ndim=3)
    model = Classifier(network(args.unit))
    train_iter = iterators.SerialIterator(datasets.TransformDataset(train, shift), args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(test, len(test), repeat=False, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    updates = math.ceil(args.epoch * len(train) / args.batchsize)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=updates // 10)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates - updates // 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [updates // 10])
    clip = UpdateCallbacks(update_on_start=clip_grad_norm(5.0))
    updater = training.StandardUpdater(
        train_iter, optimizer, model, device=args.device, loss_func=mixup(args.alpha, 0.1), callbacks=clip
    )

    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    average = extensions.ExponentialMovingAverage(model, lambda n: min(0.99, (1 + n) / (10 + n)), start=(1, "epoch"))
    trainer.extend(average)
    trainer.extend(extensions.LRScheduler(scheduler), trigger=(1, "iteration"))
    for name, target in (("validation", model), ("average", average.model)):
        evaluator = extensions.Evaluator(test_iter, target, device=args.device, eval_func=target)  # nothing is mixed
        trainer.extend(evaluator, name=name)
    best = triggers.MaxValueTrigger("average/main/accuracy")
    trainer.extend(extensions.snapshot_object(average.model, "best"), trigger=best)
    trainer.extend(extensions.LogReport())
    entries = ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy", "average/main/accuracy"]
    trainer.extend(extensions.PrintReport(entries))
    trainer.extend(extensions.ProgressBar())
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
    trainer.run()


if __name__ == "__main__":
    main()
