"""Step 2: the model reports, an Evaluator takes the place of the function, and the run is logged, drawn and saved."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from chainring import training
from chainring.nn import Classifier
from chainring.training import extensions


def load() -> list[TensorDataset]:
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epoch", "-e", type=int, default=20, help="epochs to train (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = load()
    train_loader = DataLoader(train, 100, shuffle=True, generator=torch.Generator().manual_seed(0))
    test_loader = DataLoader(test, 100)
    model = Classifier(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)))
    optimizer = torch.optim.Adam(model.parameters())

    updater = training.StandardUpdater(train_loader, optimizer, model)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out, config=vars(args))
    trainer.extend(extensions.Evaluator(test_loader, model), name="test")
    trainer.extend(extensions.LogReport())
    columns = ["epoch", "main/loss", "test/main/loss", "main/accuracy", "test/main/accuracy", "elapsed_time"]
    trainer.extend(extensions.PrintReport(columns))
    trainer.extend(extensions.PlotReport(["main/loss", "test/main/loss"], "epoch", (5, "epoch"), filename="loss.png"))
    trainer.extend(extensions.ProgressBar())
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
    trainer.run()

    torch.save(model.predictor.state_dict(), f"{args.out}/model.pt")


if __name__ == "__main__":
    main()
