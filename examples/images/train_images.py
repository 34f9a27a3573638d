"""Trains a small convolutional network on a folder of images, with augmentation in worker processes.

    python train_images.py --out result
    python train_images.py --out result_plain --no-augment

The folder has a folder for each class: ``images/train/3/0013.png``. Where it is not there it is made of handwritten digits.
The same command again continues a run that was stopped, with any number of workers.
"""

import argparse
import math
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import affine_grid, grid_sample

import chainring
from chainring import datasets, iterators, training
from chainring.datasets import LabeledImageDataset, TransformDataset
from chainring.nn import Classifier
from chainring.training import extensions


def make_folder(root: Path) -> None:
    """Write the digits as PNG files of 8 x 8 pixels, of the training digits the first 30 of each class."""
    train, test = datasets.get_digits(ndim=2, scale=255)
    for part, examples, most in (("train", train, 30), ("test", test, len(test))):
        written = [0] * 10
        for image, label in examples:
            if written[label] < most:
                path = root / part / str(label) / f"{written[label]:04}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.astype(np.uint8)).save(path)
                written[label] += 1


def read_folder(root: Path) -> LabeledImageDataset:
    """Read the images of a folder; the label is the number of the class among the sorted names of its folders."""
    classes = sorted(path for path in root.iterdir() if path.is_dir())
    pairs = [(path.relative_to(root), label) for label, name in enumerate(classes) for path in sorted(name.iterdir())]
    return LabeledImageDataset(pairs, root)


def scaled(example: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """From pixels of 0 to 255 to numbers of 0 to 1."""
    image, label = example
    return image / np.float32(255), label


def augmented(example: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """Return the image a little turned, enlarged and moved, at random.

    What ``random`` draws here follows from the seed, the epoch and the number of the example: it is the same in any worker,
    and in a run that is continued.
    """
    image, label = scaled(example)
    angle, size = math.radians(random.gauss(0, 10)), math.exp(random.gauss(0, 0.1))
    across, down = random.gauss(0, 0.1), random.gauss(0, 0.1)
    cosine, sine = size * math.cos(angle), size * math.sin(angle)
    turn = torch.tensor([[[cosine, -sine, across], [sine, cosine, down]]])
    grid = affine_grid(turn, [1, *image.shape], align_corners=False)
    return grid_sample(torch.from_numpy(image)[None], grid, align_corners=False)[0].numpy(), label


class CNN(nn.Sequential):
    """Two convolutions and two dense layers, for grey images of 8 x 8 pixels."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", default="images", help="the folder; made of digits if absent (default: %(default)s)")
    parser.add_argument("--no-augment", action="store_true", help="train on the images as they are")
    parser.add_argument("--workers", type=int, default=2, help="processes that read; 0 is this one (default: %(default)s)")
    parser.add_argument("--batchsize", "-b", type=int, default=50, help="images in a batch (default: %(default)s)")
    parser.add_argument("--epoch", "-e", type=int, default=100, help="epochs to train (default: %(default)s)")
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    root = Path(args.images)
    if not root.exists():
        make_folder(root)
    train = TransformDataset(read_folder(root / "train"), scaled if args.no_augment else augmented)
    test = TransformDataset(read_folder(root / "test"), scaled)
    if args.workers:
        train_iter = iterators.MultiprocessIterator(train, args.batchsize, n_processes=args.workers, seed=args.seed)
    else:
        train_iter = iterators.SerialIterator(train, args.batchsize, seed=args.seed)
    test_iter = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)

    model = Classifier(CNN(10))
    optimizer = torch.optim.Adam(model.parameters())
    updater = training.StandardUpdater(train_iter, optimizer, model, device=args.device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.Evaluator(test_iter, model, device=args.device), trigger=(10, "epoch"))
    trainer.extend(extensions.LogReport(trigger=(10, "epoch")))
    columns = ["epoch", "main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy", "elapsed_time"]
    trainer.extend(extensions.PrintReport(columns))
    trainer.extend(extensions.ProgressBar())
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
    trainer.run()


if __name__ == "__main__":
    main()
