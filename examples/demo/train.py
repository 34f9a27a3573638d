"""The script of the README, which takes the number of epochs and the directory of its results from the command line."""

import sys

import torch
from torch import nn

import chainring
from chainring import datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import extensions

chainring.deterministic(0)
mlp = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
model = Classifier(mlp)  # reports "loss" and "accuracy"
optimizer = torch.optim.Adam(model.parameters())
train, test = datasets.get_digits()  # real data, no download
train_iter = iterators.SerialIterator(train, 100)
test_iter = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)

updater = training.StandardUpdater(train_iter, optimizer, model, device="auto")
trainer = training.Trainer(updater, (int(sys.argv[1]), "epoch"), out=sys.argv[2])
trainer.extend(extensions.Evaluator(test_iter, model, device="auto"))
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]))
trainer.extend(extensions.ProgressBar())
trainer.extend(extensions.snapshot(autoload=True, n_retains=2), trigger=(1, "epoch"))
trainer.run()
