"""The training of ``train_mnist.py`` in plain PyTorch, to the same numbers: what Chainring takes off your hands.

It imports nothing of Chainring but the function that says which example comes when, so that both see the same batches.
What is missing here is what a loop of one's own tends to be missing: a progress bar that continues beside the table,
state that is saved and put back to the bit, a batch that may be shorter, other triggers than "once an epoch".
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from chainring.iterators import epoch_order

COLUMNS = ["epoch", "main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy", "elapsed_time"]


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    digits = load_digits()
    images = (digits.images * (1 / 16)).astype(np.float32).reshape(-1, 64)
    tests = np.arange(len(images)) % 5 == 0
    return images[~tests], digits.target[~tests], images[tests], digits.target[tests]


def mean(values: list[float], weights: list[int]) -> float:
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / math.fsum(weights)


def evaluate(model: nn.Module, x: np.ndarray, t: np.ndarray, batch_size: int, device: torch.device) -> dict[str, float]:
    losses, accuracies, sizes = [], [], []
    model.eval()
    with torch.no_grad():
        for start in range(0, len(x), batch_size):
            inputs = torch.from_numpy(x[start : start + batch_size]).to(device)
            labels = torch.from_numpy(t[start : start + batch_size]).to(device)
            scores = model(inputs)
            losses.append(float(nn.functional.cross_entropy(scores, labels)))
            accuracies.append(float((scores.argmax(1) == labels).float().mean()))
            sizes.append(len(labels))
    model.train()
    return {"validation/main/loss": mean(losses, sizes), "validation/main/accuracy": mean(accuracies, sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batchsize", "-b", type=int, default=100)
    parser.add_argument("--epoch", "-e", type=int, default=20)
    parser.add_argument("--device", "-g", default="cpu")
    parser.add_argument("--out", "-o", default="result_plain")
    parser.add_argument("--unit", "-u", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device, units = torch.device(args.device), args.unit
    model = nn.Sequential(nn.Linear(64, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 10))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    train_x, train_t, test_x, test_t = load()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    rows: list[dict[str, float]] = []
    losses: list[torch.Tensor] = []
    accuracies: list[torch.Tensor] = []
    began = time.monotonic()
    epoch = iteration = 0
    waiting = epoch_order(args.seed, 0, len(train_x))
    print("  ".join(f"{column:<10}" for column in COLUMNS))
    while epoch < args.epoch:
        batch, waiting = waiting[: args.batchsize], waiting[args.batchsize :]
        is_new_epoch = len(waiting) == 0
        if is_new_epoch:  # a batch across the end of an epoch takes its rest from the next
            epoch += 1
            waiting = epoch_order(args.seed, epoch, len(train_x))
            missing = args.batchsize - len(batch)
            batch, waiting = np.concatenate([batch, waiting[:missing]]), waiting[missing:]
        inputs, labels = torch.from_numpy(train_x[batch]).to(device), torch.from_numpy(train_t[batch]).to(device)

        optimizer.zero_grad()
        scores = model(inputs)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        iteration += 1

        losses.append(loss.detach())  # floats only once an epoch: reading one makes an accelerator wait
        accuracies.append((scores.detach().argmax(1) == labels).float().mean())
        if is_new_epoch:
            row = {
                "main/loss": mean([float(value) for value in losses], [args.batchsize] * len(losses)),
                "main/accuracy": mean([float(value) for value in accuracies], [args.batchsize] * len(accuracies)),
                **evaluate(model, test_x, test_t, args.batchsize, device),
                "epoch": epoch,
                "iteration": iteration,
                "elapsed_time": time.monotonic() - began,
            }
            losses, accuracies = [], []
            rows.append(row)
            print("  ".join(f"{row[column]:<{max(10, len(column))}g}" for column in COLUMNS), flush=True)
            (out / "log").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
