"""Learns features of the handwritten digits without labels: BYOL, in an update of one's own.

    python train_byol.py --out result

Two views of each image are made at random. An online network learns to predict, from one view, what a target network makes
of the other; the target is a moving average of the online network. The same command again continues a run that was stopped.

Grill et al., "Bootstrap your own latent: A new approach to self-supervised Learning", 2020.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cosine_similarity, grid_sample, normalize

import chainring
from chainring import datasets, iterators, report, training
from chainring.training import PRIORITY_WRITER, extensions


def perceptron(inputs: int, units: int, outputs: int) -> nn.Sequential:
    """Two layers, as in the projector and the predictor of the paper."""
    return nn.Sequential(nn.Linear(inputs, units), nn.BatchNorm1d(units), nn.ReLU(), nn.Linear(units, outputs))


class Encoder(nn.Module):
    """From images (batch, 1, 8, 8) to ``features`` (batch, units); called, to their projections (batch, 32)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, units // 4, 3, padding=1), nn.BatchNorm2d(units // 4), nn.ReLU(),
            nn.Conv2d(units // 4, units // 2, 3, 2, padding=1), nn.BatchNorm2d(units // 2), nn.ReLU(),
            nn.Conv2d(units // 2, units, 3, 2, padding=1), nn.BatchNorm2d(units), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.project = perceptron(units, 4 * units, 32)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(self.features(images))


def view(images: Tensor) -> Tensor:
    """Turn, stretch and move each image at random, and change its contrast."""
    angle, *stretch = (torch.rand(5, len(images), device=images.device) - 0.5).unbind()
    rows = [1 + stretch[0], angle, stretch[2] / 2, -angle, 1 + stretch[1], stretch[3] / 2]
    grid = affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(images.shape), align_corners=False)
    contrast = 0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, device=images.device)
    return contrast * grid_sample(images, grid, align_corners=False)


class BYOLUpdater(training.StandardUpdater):
    """One step of the online network and its predictor, after which the target follows."""

    def __init__(self, *args, target: extensions.ExponentialMovingAverage, **settings) -> None:
        super().__init__(*args, **settings)
        self.target = target

    def update_core(self) -> None:
        online, predict = self.get_model("online"), self.get_model("predictor")
        images = self.next_batch()
        first, second = view(images), view(images)
        with self.autocast():
            with torch.no_grad():
                goals = self.target.model(second), self.target.model(first)
            similar = [
                cosine_similarity(predict(online(x)), goal).mean() for x, goal in zip((first, second), goals, strict=True)
            ]
            loss = 2 - 2 * torch.stack(similar).mean()
        self.backward(loss)
        self.step()
        self.target.update()
        report({"loss": loss}, online)


def neighbours(encoder: Encoder, train, test, labelled: int):
    """Make an extension that reports how often the nearest of a few labelled images has the label of a test image."""
    images, labels = (torch.as_tensor(part[:labelled]) for part in train.datasets)
    others, goals = map(torch.as_tensor, test.datasets)

    @training.make_extension(trigger=(1, "epoch"), priority=PRIORITY_WRITER, invoke_before_training=True)
    def accuracy(trainer: training.Trainer) -> None:
        encoder.eval()
        with torch.no_grad():
            near, far = (normalize(encoder.features(x.to(trainer.updater.device))) for x in (images, others))
        encoder.train()
        found = labels[(far @ near.T).argmax(1).cpu()]
        report({"accuracy": (found == goals).float().mean()})

    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=128, help="images in a batch (default: %(default)s)")
    parser.add_argument("--decay", type=float, default=0.99, help="of the target, at first (default: %(default)s)")
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--epoch", "-e", type=int, default=60, help="epochs to train (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and views (default: %(default)s)")
    parser.add_argument("--unit", "-u", type=int, default=64, help="features of an image (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    train, test = datasets.get_digits(ndim=3)
    online, predictor = Encoder(args.unit), perceptron(32, 4 * args.unit, 32)
    updates = math.ceil(args.epoch * len(train) / args.batchsize)
    rise = lambda n: 1 - (1 - args.decay) * (1 + math.cos(math.pi * min(n / updates, 1))) / 2  # noqa: E731
    target = extensions.ExponentialMovingAverage(online, rise)
    images = datasets.TransformDataset(train, lambda example: example[0])
    updater = BYOLUpdater(
        iterators.SerialIterator(images, args.batchsize, seed=args.seed),
        torch.optim.Adam([*online.parameters(), *predictor.parameters()], 1e-3, weight_decay=1e-5),
        {"online": online, "predictor": predictor}, target=target, device=args.device,
    )  # fmt: skip

    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(target)
    trainer.extend(neighbours(online, train, test, 50))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "online/loss", "accuracy", "elapsed_time"]))
    trainer.extend(extensions.ProgressBar())
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
    trainer.run()


if __name__ == "__main__":
    main()
