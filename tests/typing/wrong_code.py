"""What users write by mistake: mypy finds each of these lines, or else it calls the comment on it unused (`make lint`)."""

from __future__ import annotations

import torch
from torch import nn

from chainring import Summary, datasets, iterators, serializers, training, writers
from chainring.training import Extension, StandardUpdater, Trainer, extensions

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters())
train, test = datasets.get_digits()
iterator = iterators.SerialIterator(train, batchsize=100)  # type: ignore[call-arg]
updater = StandardUpdater(iterators.SerialIterator(train, 10), optimizer, model, precision="fp8")  # type: ignore[arg-type]
training.StandardUpdater(optimiser=optimizer)  # type: ignore[call-arg]
trainer = Trainer(updater, (3, "iteration"), out="result")
trainer.updater.iteration = "three"  # type: ignore[assignment]
trainer.extent(extensions.LogReport())  # type: ignore[attr-defined]
trainer.extend(extensions.snapshot(n_retain=2))  # type: ignore[call-arg]
trainer.run(20)  # type: ignore[call-arg]
extensions.PrintReport(log_report=3)  # type: ignore[arg-type]
extensions.ProgressBar(update_interval="often")  # type: ignore[arg-type]
serializers.save("model")  # type: ignore[call-arg]
Summary().add(1.0, wieght=2)  # type: ignore[call-arg]


class Writes(writers.Writer):
    """Its argument is a record."""

    def write(self, record: dict[str, float]) -> None:  # type: ignore[override]
        """Writes."""


class Extends(Extension):
    """It is called with a trainer."""

    def __call__(self, trainer: int) -> None:  # type: ignore[override]
        """Extends."""
