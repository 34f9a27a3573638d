"""Step 1: a Trainer runs the same loop over the same loader."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from chainring import report, training
from chainring.training import PRIORITY_WRITER, extensions


def load() -> list[TensorDataset]:
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    return random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))


def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    loss, right, size = 0.0, 0, 0
    model.eval()
    with torch.no_grad():
        for x, t in loader:
            y = model(x)
            loss += cross_entropy(y, t).item() * len(x)
            right += (y.argmax(1) == t).sum().item()
            size += len(x)
    model.train()
    return loss / size, right / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epoch", "-e", type=int, default=20, help="epochs to train (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = load()
    train_loader = DataLoader(train, 100, shuffle=True, generator=torch.Generator().manual_seed(0))
    test_loader = DataLoader(test, 100)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    optimizer = torch.optim.Adam(model.parameters())

    def evaluation(trainer: training.Trainer) -> None:
        test_loss, accuracy = evaluate(model, test_loader)
        report({"test/loss": test_loss, "test/accuracy": accuracy})

    updater = training.StandardUpdater(
        train_loader, optimizer, model, loss_func=lambda model, x, t: cross_entropy(model(x), t)
    )
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(evaluation, trigger=(1, "epoch"), priority=PRIORITY_WRITER)
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "main/loss", "test/loss", "test/accuracy"]))
    trainer.run()

    torch.save(model.state_dict(), f"{args.out}/model.pt")


if __name__ == "__main__":
    main()
