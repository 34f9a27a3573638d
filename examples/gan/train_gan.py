"""Trains a GAN on the handwritten digits of 8 x 8 pixels: two models, two optimizers, an updater of one's own.

    python train_gan.py --out result

Pictures of samples are written to ``result/samples_epoch_10.png`` and so on. The same command again continues a run that
was stopped, to the same pictures.
"""

import argparse
import os

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm

import chainring
from chainring import datasets, iterators, report, training
from chainring.training import PRIORITY_WRITER, extensions


class Generator(nn.Sequential):
    """From noise (batch, noise) to images (batch, 1, 8, 8) between 0 and 1."""

    def __init__(self, noise: int, units: int) -> None:
        super().__init__(
            nn.Linear(noise, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(),
            nn.Linear(units, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)),
        )  # fmt: skip


class Critic(nn.Sequential):
    """From images to one score each: the larger, the more it looks like a digit."""

    def __init__(self, units: int) -> None:
        super().__init__(
            nn.Flatten(), spectral_norm(nn.Linear(64, units)), nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(units, units)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(units, 1)),
        )  # fmt: skip


class GANUpdater(training.StandardUpdater):
    """One step of the critic, which learns to tell digits from generated ones, then one of the generator."""

    def __init__(self, *args, noise: int, **settings) -> None:
        super().__init__(*args, **settings)
        self.noise = noise

    def update_core(self) -> None:
        generator, critic = self.get_model("generator"), self.get_model("critic")
        real = self.next_batch()
        with self.autocast():
            fake = generator(torch.randn(len(real), self.noise, device=real.device))
            loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        self.backward(loss)
        self.step("critic")
        report({"loss": loss}, critic)

        critic.requires_grad_(False)  # what makes the generator better is nothing for the critic to learn from
        with self.autocast():
            loss = softplus(-critic(fake)).mean()
        self.backward(loss)
        self.step("generator")
        report({"loss": loss}, generator)
        critic.requires_grad_(True)


class Samples(training.Extension):
    """Writes a picture of what a generator makes of this noise, eight images in a row."""

    trigger = (10, "epoch")
    writes = ("samples_epoch_{.updater.epoch}.png",)  # moved away, as the log is, when another run starts in this directory

    def __init__(self, generator: nn.Module, noise: Tensor) -> None:
        self.generator, self.noise = generator, noise

    def __call__(self, trainer: training.Trainer) -> None:
        with torch.no_grad():
            images = self.generator(self.noise).cpu().numpy()[:, 0]
        rows = [np.hstack(np.pad(images[start : start + 8], ((0, 0), (1, 1), (1, 1)))) for start in range(0, len(images), 8)]
        pixels = (255 * (1 - np.vstack(rows))).astype(np.uint8)
        picture = Image.fromarray(pixels).resize((4 * pixels.shape[1], 4 * pixels.shape[0]), Image.Resampling.NEAREST)
        picture.save(os.path.join(trainer.out, self.writes[0].format(trainer)))


def frechet_distance(x: Tensor, y: Tensor) -> float:
    """Between the normal distributions with the means and covariances of the pixels of x and of y.

    Dowson and Landau, "The Frechet Distance between Multivariate Normal Distributions", 1982.
    """
    x, y = x.flatten(1).double(), y.flatten(1).double()
    covariances = x.T.cov(), y.T.cov()
    root = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    return float((x.mean(0) - y.mean(0)).square().sum() + covariances[0].trace() + covariances[1].trace() - 2 * root)


def measure(generator: nn.Module, noise: Tensor, digits: Tensor):
    """Make an extension that reports how far what a generator makes is from digits that are not trained on."""

    @training.make_extension(trigger=(1, "epoch"), default_name="measure", priority=PRIORITY_WRITER)
    def distance(trainer: training.Trainer) -> None:
        with torch.no_grad():
            report({"distance": frechet_distance(generator(noise), digits)})

    return distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=64, help="images in a batch (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=200, help="epochs to train (default: %(default)s)")
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--noise", type=int, default=32, help="numbers an image is made of (default: %(default)s)")
    parser.add_argument("--unit", "-u", type=int, default=256, help="units of a layer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and noise (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    train, test = datasets.get_digits(withlabel=False, ndim=3)
    models = {"generator": Generator(args.noise, args.unit), "critic": Critic(args.unit)}
    rates = {"generator": 3e-4, "critic": 1e-3}
    optimizers = {name: torch.optim.Adam(models[name].parameters(), lr, betas=(0.0, 0.99)) for name, lr in rates.items()}
    train_iter = iterators.SerialIterator(train, args.batchsize, seed=args.seed)
    updater = GANUpdater(train_iter, optimizers, models, noise=args.noise, device=args.device)

    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    average = extensions.ExponentialMovingAverage(models["generator"], decay=0.99)  # steadier than the last generator
    trainer.extend(average)
    noise, digits = torch.randn(len(test), args.noise).to(updater.device), torch.from_numpy(test).to(updater.device)
    trainer.extend(measure(average.model, noise, digits))
    trainer.extend(Samples(average.model, noise[:64]))
    trainer.extend(extensions.LogReport(trigger=(10, "epoch")))
    trainer.extend(extensions.PrintReport(["epoch", "generator/loss", "critic/loss", "distance", "elapsed_time"]))
    trainer.extend(extensions.ProgressBar())
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
    trainer.run()


if __name__ == "__main__":
    main()
