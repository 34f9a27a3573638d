"""The script that the rerun tests start, stop and start again, as its users do."""

import argparse
import os
import signal

import torch
from torch import nn

import chainring
from chainring import iterators, serializers, training
from chainring.training import extensions


class Decay(training.Extension):
    """Reports the learning rate of the update, and multiplies it."""

    priority = training.PRIORITY_WRITER

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def __call__(self, trainer):
        chainring.report({"lr": self.optimizer.param_groups[0]["lr"]})
        self.scheduler.step()

    def serialize(self, serializer):
        serializer.visit("scheduler", self.scheduler)


def kill_once(trainer):
    """As the machine would, at the fifth iteration; not again when the marker is gone."""
    marker = f"{trainer.out}.kill"
    if trainer.updater.iteration == 5 and os.path.exists(marker):
        os.remove(marker)
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--units", type=int, default=3)
    parser.add_argument("--stop", type=int, default=8)
    parser.add_argument("--resume")
    parser.add_argument("--autoload", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    chainring.deterministic(0)
    model = nn.Sequential(nn.Linear(4, args.units), nn.Dropout(0.2), nn.Linear(args.units, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))

    def loss(model, x):
        value = model(x).square().mean()
        chainring.report({"loss": value}, model)
        return value

    updater = training.StandardUpdater(iterators.SerialIterator(data, 6), optimizer, model, loss_func=loss)
    settings = {"lr": args.lr, "units": args.units}
    trainer = training.Trainer(updater, (args.stop, "iteration"), out=args.out, config=settings)
    trainer.extend(Decay(optimizer))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(kill_once)
    trainer.extend(extensions.snapshot(autoload=args.autoload), trigger=(1, "iteration"))
    if args.resume:
        serializers.load(args.resume, trainer)
    trainer.run()
    serializers.save(f"{args.out}/trained.model", model)


if __name__ == "__main__":
    main()
