"""What users write by mistake: mypy and pyright find each of these lines, or call the comment on it unused (`make lint`)."""

from __future__ import annotations

import torch
from torch import nn

from chainring import Summary, converters, datasets, iterators, parallel, serializers, training, writers
from chainring.nn import Classifier
from chainring.training import (
    Extension,
    ParallelUpdater,
    StandardUpdater,
    Trainer,
    UpdateCallbacks,
    clip_grad_norm,
    extensions,
    get_trigger,
    make_extension,
    triggers,
)

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters())
train, test = datasets.get_digits()
rows = iterators.SerialIterator(train, 100)
updater = StandardUpdater(rows, optimizer, model)
trainer = Trainer(updater, (3, "iteration"), out="result")

# Names that there are not, and values of another kind.
iterators.SerialIterator(train, batchsize=100)  # type: ignore[call-arg]
StandardUpdater(rows, optimizer, model, precision="fp8")  # type: ignore[arg-type]
training.StandardUpdater(optimiser=optimizer)  # type: ignore[call-arg]
trainer.updater.iteration = "three"  # type: ignore[assignment]
trainer.extent(extensions.LogReport())  # type: ignore[attr-defined]
trainer.extend(extensions.snapshot(n_retain=2))  # type: ignore[call-arg]
trainer.run(20)  # type: ignore[call-arg]
extensions.PrintReport(log_report=3)  # type: ignore[arg-type]
extensions.ProgressBar(update_interval="often")  # type: ignore[arg-type]
serializers.save("model")  # type: ignore[call-arg]
Summary().add(1.0, wieght=2)  # type: ignore[call-arg]

# A trainer takes an updater, and a stop trigger that is a pair with a unit, a trigger or None.
Trainer(updater, (20, "epochs"))  # type: ignore[arg-type]
Trainer(updater, 20)  # type: ignore[arg-type]
Trainer(updater, "epoch")  # type: ignore[arg-type]
Trainer(updater, ("epoch", 20))  # type: ignore[arg-type]
Trainer(rows, (20, "epoch"))  # type: ignore[arg-type]
Trainer(model, (20, "epoch"))  # type: ignore[arg-type]
Trainer((20, "epoch"), updater)  # type: ignore[arg-type]
Trainer(updater, (20, "epoch"), extensions.LogReport())  # type: ignore[arg-type]

# An updater takes an iterator, an optimizer and a model, in this order, by name or alone.
StandardUpdater(rows, model, optimizer)  # type: ignore[arg-type]
StandardUpdater(rows, model, model)  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, optimizer)  # type: ignore[arg-type]
StandardUpdater(optimizer, rows, model)  # type: ignore[arg-type]
StandardUpdater(model, optimizer, rows)  # type: ignore[arg-type]
StandardUpdater({"main": rows}, {"main": model}, {"main": optimizer})  # type: ignore[dict-item]
StandardUpdater(rows, optimizer, model, converters.concat_examples)  # type: ignore[call-arg]
StandardUpdater(rows, optimizer, model, callbacks=print)  # type: ignore[arg-type]
ParallelUpdater(rows, optimizer, model, devices=["cpu", "cpu"])  # type: ignore[arg-type]

# Its settings.
StandardUpdater(rows, optimizer, model, device=1.5)  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, model, device=["cpu"])  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, model, precision="bf16-mixed")  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, model, accumulate="2")  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, model, loss_func="mse")  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, model, loss_func=lambda model, x: "x")  # type: ignore[arg-type, return-value]
StandardUpdater(rows, optimizer, model, converter="pad")  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, model, comm=3)  # type: ignore[arg-type]
StandardUpdater(rows, optimizer, model, virtual_ranks="8")  # type: ignore[arg-type]

# Extensions are objects that are called with the trainer; their triggers are as the stop trigger.
trainer.extend(extensions.LogReport)  # type: ignore[arg-type]
trainer.extend(extensions.snapshot)  # type: ignore[arg-type]
trainer.extend(extensions.LogReport(), trigger=(1, "epochs"))  # type: ignore[arg-type]
trainer.extend(extensions.LogReport(), trigger="epoch")  # type: ignore[arg-type]
trainer.extend(extensions.LogReport(), trigger=1)  # type: ignore[arg-type]
trainer.extend(extensions.LogReport(), (1, "epoch"))  # type: ignore[arg-type]
trainer.extend(extensions.LogReport(), trigger=triggers.IntervalTrigger)  # type: ignore[arg-type]
trainer.extend(extensions.LogReport(), priority="high")  # type: ignore[arg-type]
trainer.extend(lambda: None)  # type: ignore[misc, arg-type]
trainer.extend(3)  # type: ignore[arg-type]

# An extension is found by its name or its class, and has what that class has.
print(trainer.get_extension(extensions.LogReport).logs)  # type: ignore[attr-defined]
print(trainer.get_extension(extensions.LogReport()).log)  # type: ignore[call-overload]
trainer.get_extension(3)  # type: ignore[call-overload]

# Settings of extensions.
extensions.LogReport(trigger=(1, "epochs"))  # type: ignore[arg-type]
extensions.LogReport(trigger=10)  # type: ignore[arg-type]
extensions.LogReport(keys=3)  # type: ignore[arg-type]
extensions.LogReport(writers=writers.CsvWriter())  # type: ignore[arg-type]
extensions.LogReport(writers=[print])  # type: ignore[list-item]
extensions.PlotReport("main/loss", trigger=(1, "epochs"))  # type: ignore[arg-type]
extensions.ProgressBar((20, "epochs"))  # type: ignore[arg-type]
extensions.ProgressBar(20)  # type: ignore[arg-type]
extensions.Evaluator(model, rows)  # type: ignore[arg-type]
extensions.Evaluator(rows, optimizer)  # type: ignore[arg-type]
extensions.Evaluator(rows, model, device=1.5)  # type: ignore[arg-type]
extensions.Evaluator(rows, model, "cuda")  # type: ignore[arg-type]
extensions.Evaluator(rows, model, precision="bf16-mixed")  # type: ignore[arg-type]
extensions.FailOnNonNumber("raise")  # type: ignore[arg-type]
extensions.LRScheduler(0.1)  # type: ignore[arg-type]
extensions.ExponentialMovingAverage(optimizer)  # type: ignore[arg-type]
extensions.ExponentialShift("lr", "0.1")  # type: ignore[arg-type]
extensions.ExponentialShift("lr", 0.1, optimizer=model)  # type: ignore[arg-type]
extensions.Recorder(parameters=(1, "epochs"))  # type: ignore[arg-type]
extensions.Throughput(trigger=(1, "epochs"))  # type: ignore[arg-type]
extensions.ParameterStatistics(optimizer)  # type: ignore[arg-type]
extensions.observe_value("lr", 0.1)  # type: ignore[arg-type]
extensions.snapshot_object(model, 3)  # type: ignore[arg-type]

# Units and settings of triggers.
triggers.IntervalTrigger(1, "epochs")  # type: ignore[arg-type]
triggers.IntervalTrigger("1", "epoch")  # type: ignore[arg-type]
triggers.ManualScheduleTrigger([1, 2], "epochs")  # type: ignore[arg-type]
triggers.MinValueTrigger("main/loss", trigger=(1, "epochs"))  # type: ignore[arg-type]
triggers.MinValueTrigger("main/loss", (1, "seconds"))  # type: ignore[arg-type]
triggers.EarlyStoppingTrigger(mode="maximum")  # type: ignore[arg-type]
triggers.EarlyStoppingTrigger(max_trigger=100)  # type: ignore[arg-type]
triggers.TimeTrigger("1 h")  # type: ignore[arg-type]
get_trigger((1, "epochs"))  # type: ignore[arg-type]
get_trigger(1)  # type: ignore[arg-type]
make_extension(trigger=(1, "epochs"))  # type: ignore[arg-type]

# Data and devices.
iterators.SerialIterator(100, train)  # type: ignore[arg-type]
iterators.SerialIterator(3, 100)  # type: ignore[arg-type]
iterators.SerialIterator(train, "100")  # type: ignore[arg-type]
iterators.MultiprocessIterator(train, 100, n_processes="4")  # type: ignore[arg-type]
iterators.LoaderIterator(3)  # type: ignore[arg-type]
converters.concat_examples(3)  # type: ignore[arg-type]
converters.concat_examples([1, 2], 1.5)  # type: ignore[arg-type]
converters.to_device(torch.ones(1), "cpu")  # type: ignore[arg-type]
parallel.DataParallel(model, 0)  # type: ignore[arg-type]
parallel.DataParallel([0, 1], model)  # type: ignore[arg-type]
parallel.create_communicator(1.5)  # type: ignore[arg-type]

# Files, models, callbacks and datasets.
serializers.load(trainer, "result")  # type: ignore[arg-type]
serializers.save(model, "mlp.model")  # type: ignore[arg-type]
Classifier("resnet")  # type: ignore[arg-type]
Classifier(model, "cross_entropy")  # type: ignore[arg-type]
clip_grad_norm("1")  # type: ignore[arg-type]
UpdateCallbacks(update_on_start=3)  # type: ignore[arg-type]
datasets.split_dataset(train, "half")  # type: ignore[arg-type]
datasets.TransformDataset(lambda x: x, train)  # type: ignore[arg-type]
datasets.DictDataset(x=3)  # type: ignore[arg-type]


class Writes(writers.Writer):
    """Its argument is a record."""

    def write(self, record: dict[str, float]) -> None:  # type: ignore[override]
        """Writes."""


class Extends(Extension):
    """It is called with a trainer."""

    trigger = 1, "epochs"  # type: ignore[assignment]

    def __call__(self, trainer: int) -> None:  # type: ignore[override]
        """Extends."""
