"""The script of the README, which takes the number of epochs and the directory of its results from the command line."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import chainring
from chainring import datasets, training
from chainring.training import extensions

chainring.deterministic(0)
train, test = datasets.get_digits()  # real data, no download
train_loader = DataLoader(train, 100, shuffle=True)
test_loader = DataLoader(test, 100)
model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
optimizer = torch.optim.Adam(model.parameters())


def loss_of(model, x, t):
    y = model(x)
    return {"loss": cross_entropy(y, t), "accuracy": (y.argmax(1) == t).float().mean()}


updater = training.StandardUpdater(train_loader, optimizer, model, loss_func=loss_of, device="auto")
evaluator = extensions.Evaluator(test_loader, model, device="auto")
trainer = training.Trainer(updater, (int(sys.argv[1]), "epoch"), out=sys.argv[2], extensions=extensions.defaults(evaluator))
trainer.run()
