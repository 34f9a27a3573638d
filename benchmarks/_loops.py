"""The work that every row does, written by hand in PyTorch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from _turns import lap
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

BATCH = 8
EPOCH = 500
"""Iterations in an epoch."""
COMMITS = 40
"""Snapshots in an epoch of loops that take one in every iteration."""

_generator = np.random.default_rng(0)
X = _generator.standard_normal((EPOCH * BATCH, 16), dtype=np.float32)
T = _generator.integers(0, 4, EPOCH * BATCH)
X_TEST, T_TEST = X[:160].copy(), T[:160].copy()


class Predictor(nn.Sequential):
    """Two small layers, or more of them: next to nothing to compute, so that what surrounds it shows."""

    def __init__(self, layers: int = 2) -> None:
        torch.manual_seed(0)
        hidden = [part for _ in range(layers - 1) for part in (nn.Linear(16, 16), nn.ReLU())]
        super().__init__(*hidden, nn.Linear(16, 4))


class Loss(nn.Module):
    """The predictor with its loss, which it returns."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.predictor = Predictor(layers)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return cross_entropy(self.predictor(x), t)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def raw(epochs: int, layers: int = 2) -> None:
    """Do the bare work."""
    model = Loss(layers)
    optimizer = sgd(model)
    for _ in range(epochs):
        order = np.random.permutation(len(X))
        for start in range(0, len(X), BATCH):
            lap()
            index = order[start : start + BATCH]
            loss = model(torch.from_numpy(X[index]), torch.from_numpy(T[index]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def raw_bf16(epochs: int) -> None:
    """Do the bare work with the forward in bfloat16."""
    model = Loss()
    optimizer = sgd(model)
    for _ in range(epochs):
        order = np.random.permutation(len(X))
        for start in range(0, len(X), BATCH):
            lap()
            index = order[start : start + BATCH]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.from_numpy(X[index]), torch.from_numpy(T[index]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def raw_with_log(epochs: int, out: Path, saves: bool = False) -> None:
    """Do what the script does: means of loss and accuracy, an evaluation, a line in a file and one on the screen, a bar."""
    predictor = Predictor()
    optimizer = sgd(predictor)
    with open(os.devnull, "w") as screen:
        for epoch in range(1, epochs + 1):
            loss_sum, right = torch.zeros(()), torch.zeros(())
            order = np.random.permutation(len(X))
            for start in tqdm(range(0, len(X), BATCH), file=screen, leave=False):
                lap()
                index = order[start : start + BATCH]
                t = torch.from_numpy(T[index])
                scores = predictor(torch.from_numpy(X[index]))
                loss = cross_entropy(scores, t)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    loss_sum += loss
                    right += (scores.argmax(1) == t).float().mean()
            row = {"loss": float(loss_sum) / EPOCH, "accuracy": float(right) / EPOCH, **_evaluated(predictor)}
            row |= {"epoch": epoch, "iteration": epoch * EPOCH}
            with open(out / "raw.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print("  ".join(f"{value:<10g}" for value in row.values()), file=screen, flush=True)
            if saves:
                state = {"model": predictor.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, out / "checkpoint.pt")


def _evaluated(predictor: nn.Module) -> dict[str, float]:
    predictor.eval()
    loss_sum, right = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for start in range(0, len(X_TEST), BATCH):
            t = torch.from_numpy(T_TEST[start : start + BATCH])
            scores = predictor(torch.from_numpy(X_TEST[start : start + BATCH]))
            loss_sum += cross_entropy(scores, t)
            right += (scores.argmax(1) == t).float().mean()
    predictor.train()
    batches = len(X_TEST) // BATCH
    return {"validation/loss": float(loss_sum) / batches, "validation/accuracy": float(right) / batches}
