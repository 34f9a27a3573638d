"""Programs as a beginner writes them, each with one mistake: the error names the cause and the remedy, briefly and once."""

import json
import re
from typing import NamedTuple

import pytest

import forked

PROGRAM = """\
import torch
from torch import nn
from torch.nn import functional as F

from chainring import datasets, iterators, report, serializers, training, writers
from chainring.nn import Classifier
from chainring.training import extensions, triggers

train, test = datasets.get_digits()
net = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
model = Classifier(net)
optimizer = torch.optim.Adam(model.parameters())
train_iter = iterators.SerialIterator(train, 100)
test_iter = iterators.SerialIterator(test, 100, repeat=False, shuffle=False)
updater = training.StandardUpdater(train_iter, optimizer, model)
trainer = training.Trainer(updater, (1, "epoch"), out="result")
trainer.extend(extensions.Evaluator(test_iter, model))
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss"]))
trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
trainer.run()
"""
MODEL = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x, t):
        y = self.linear(x)
        {}


model = Net()
"""
UPDATER = "train_iter, optimizer, model)"
STOP = '(1, "epoch")'
RUN = "trainer.run()"


class Wrong(NamedTuple):
    """What stands in the place of a part of the program, and words of the error: of its cause and of its remedy."""

    right: str
    wrong: str
    cause: str
    remedy: str


def model(line):
    return "model = Classifier(net)\n", MODEL.format(line)


def extending(lines):
    return RUN, f"{lines}\n{RUN}"


WRONG = {
    # the stop trigger
    "epochs for epoch": Wrong(STOP, '(20, "epochs")', "got 'epochs'", 'write for example (20, "epoch")'),
    "a bare number of epochs": Wrong(STOP, "20", "got 20", 'write (20, "epoch")'),
    "a bare unit": Wrong(STOP, '"epoch"', "got 'epoch'", 'write (1, "epoch")'),
    "the pair the other way round": Wrong(STOP, '("epoch", 20)', "got ('epoch', 20)", 'write (20, "epoch")'),
    "an iterator for the stop trigger": Wrong(
        STOP, "test_iter", "got SerialIterator", "extend the trainer by extensions.Evaluator(test_iterator, model)"
    ),
    "an iterator before the stop trigger": Wrong(
        STOP, f"test_iter, {STOP}", "takes updater, stop_trigger, out, extensions in this order", "has the place of 'out'"
    ),
    "a loader for the stop trigger": Wrong(
        STOP, "torch.utils.data.DataLoader(test)", "got DataLoader", "extensions.Evaluator(test_iterator, model)"
    ),
    "a dataset for the stop trigger": Wrong(STOP, "test", "got TupleDataset", "extensions.Evaluator(test_iterator, model)"),
    "an extension for the stop trigger": Wrong(
        STOP, "extensions.LogReport()", "got LogReport", "trainer.extend(extension) adds an extension"
    ),
    "max_epochs": Wrong(STOP, "max_epochs=20", "no argument 'max_epochs'", 'Trainer(updater, (20, "epoch"))'),
    "callbacks": Wrong('out="result"', "callbacks=[]", "no argument 'callbacks'", "trainer.extend(extension)"),
    # the updater
    "model and optimizer swapped": Wrong(
        UPDATER, "train_iter, model, optimizer)", "Model 'main' is Adam", "third the model"
    ),
    "a dataset for an iterator": Wrong(
        UPDATER, "train, optimizer, model)", "got the dataset", "SerialIterator(dataset, batch_size)"
    ),
    "a class for an iterator": Wrong(
        UPDATER,
        "iterators.SerialIterator, optimizer, model)",
        "got the class SerialIterator",
        "SerialIterator(dataset, batch_size)",
    ),
    "an iterator for the updater": Wrong(
        "Trainer(updater", "Trainer(train_iter", "got SerialIterator", "such as StandardUpdater"
    ),
    "the optimizer of another model": Wrong(
        "Adam(model.parameters())",
        "Adam(nn.Linear(64, 10).parameters())",
        "belong to none of ['main']",
        "Make it from that model",
    ),
    "a GPU that is not there": Wrong(
        UPDATER, 'train_iter, optimizer, model, device="cuda:9")', "'cuda:9' is not there", 'device="auto"'
    ),
    "a GPU by a number that is not there": Wrong(
        UPDATER, "train_iter, optimizer, model, device=9)", "device 9", "-1 is the CPU"
    ),
    "the first GPU of a machine without one": Wrong(
        UPDATER, "train_iter, optimizer, model, device=99)", "99", '"auto" is what'
    ),
    "the precision of Lightning": Wrong(
        UPDATER, 'train_iter, optimizer, model, precision="bf16-mixed")', "got 'bf16-mixed'", 'use "bf16"'
    ),
    "accumulate_grad_batches": Wrong(
        UPDATER,
        "train_iter, optimizer, model, accumulate_grad_batches=4)",
        "no argument 'accumulate_grad_batches'",
        "accumulate=4",
    ),
    "a loss function without the model": Wrong(
        UPDATER,
        "train_iter, optimizer, net, loss_func=F.cross_entropy)",
        "cross_entropy takes no model",
        "loss_func=lambda model, x, t:",
    ),
    "a scheduler for an optimizer": Wrong(
        "optimizer = torch.optim.Adam(model.parameters())",
        "optimizer = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(model.parameters()), 10)",
        "got StepLR",
        "extend(extensions.LRScheduler(scheduler))",
    ),
    "a model that is frozen": Wrong(
        "train_iter = ", "model.requires_grad_(False)\ntrain_iter = ", "depends on no parameter", "requires_grad=False"
    ),
    "a batch of no example": Wrong("SerialIterator(train, 100)", "SerialIterator(train, 0)", "got 0", "at least 1"),
    "no batch size": Wrong(
        "SerialIterator(train, 100)",
        "SerialIterator(train)",
        "the batch size",
        "SerialIterator(dataset, 100)",
    ),
    "no batch size for workers": Wrong(
        "SerialIterator(train, 100)", "MultiprocessIterator(train)", "the batch size", "MultiprocessIterator(dataset, 100)"
    ),
    "no data": Wrong(
        "SerialIterator(train, 100)", "SerialIterator([], 100)", "this list has length 0", "check what fills it"
    ),
    "examples of several sizes": Wrong(
        "iterators.SerialIterator(train, 100)",
        "torch.utils.data.DataLoader([(x[: 60 + t % 2], t) for x, t in train], 100)",
        "stack expects each tensor to be equal size",
        "the collate_fn of the loader fills them up",
    ),
    "examples of several sizes in an iterator": Wrong(
        "SerialIterator(train, 100)",
        "SerialIterator([(x[: 60 + t % 2], t) for x, t in train], 100)",
        "is of shape (61,)",
        "pass padding= to fill up",
    ),
    "labels that are strings": Wrong(
        "iterators.SerialIterator(train, 100)",
        "torch.utils.data.DataLoader([(x, str(t)) for x, t in train], 100)",
        "must be Tensor, not tuple",
        "let the dataset return numbers",
    ),
    "pictures as they are read": Wrong(
        "iterators.SerialIterator(train, 100)",
        'torch.utils.data.DataLoader([(__import__("PIL.Image").Image.new("L", (8, 8)), t) for x, t in train], 100)',
        "found <class 'PIL.Image.Image'>",
        "give the loader a collate_fn",
    ),
    "a generator for a dataset": Wrong(
        "SerialIterator(train, 100)",
        "SerialIterator((example for example in train), 100)",
        "got generator",
        "hand a DataLoader or another iterable to the updater",
    ),
    "a generator for the dataset of a loader": Wrong(
        "iterators.SerialIterator(train, 100)",
        "torch.utils.data.DataLoader((example for example in train), 100)",
        "object of type 'generator' has no len",
        "write list(generator), or an IterableDataset",
    ),
    "a dictionary for a pair": Wrong(
        "iterators.SerialIterator(train, 100)",
        'torch.utils.data.DataLoader([{"image": x, "label": t} for x, t in train], 100)',
        "the batch has 0",
        "set label_key",
    ),
    "a loader that drops all": Wrong(
        "iterators.SerialIterator(train, 100)",
        "torch.utils.data.DataLoader(train[:50], 100, drop_last=True)",
        "this DataLoader has none",
        "fewer than a batch with drop_last=True",
    ),
    "a callback for callbacks": Wrong(
        UPDATER,
        "train_iter, optimizer, model, callbacks=training.clip_grad_norm(1.0))",
        "got <function clip_grad_norm",
        "UpdateCallbacks(update_on_start=f)",
    ),
    "a layer that the optimizer does not know": Wrong(
        "train_iter = ",
        "net[2] = nn.Linear(20, 10)\ntrain_iter = ",
        "of the 4 of optimizer 'main', 2 belong to none",
        "Make it from that model's parameters()",
    ),
    "a model on another device than its batches": Wrong(
        "optimizer = ", 'model.to("meta")\noptimizer = ', "on the expected device", "StandardUpdater(device=) moves model"
    ),
    "a run without gradients": Wrong(
        RUN,
        f"with torch.no_grad():\n    {RUN}",
        "depends on no parameter that needs a gradient",
        "look for detach(), no_grad()",
    ),
    # the model
    "a model without a loss": Wrong(
        UPDATER, "train_iter, optimizer, net)", "too many positional arguments", "Classifier(model)"
    ),
    "logits for a loss": Wrong(*model("return y"), "of shape (100, 10) from Net.forward, {train}:16", "cross_entropy(y, t)"),
    "a loss for each example": Wrong(*model('return F.cross_entropy(y, t, reduction="none")'), "of shape (100,)", ".mean()"),
    "no loss returned": Wrong(
        *model('report({"loss": F.cross_entropy(y, t)}, self)'),
        "got NoneType from Net.forward, {train}:16",
        "Return the tensor",
    ),
    "a mapping without a loss": Wrong(
        *model('return {"ce": F.cross_entropy(y, t)}'), "got dict with ['ce'] from Net.forward", '{"loss": loss'
    ),
    "a loss that is a number": Wrong(*model("return F.cross_entropy(y, t).item()"), "got float", "without .item()"),
    "a loss without a gradient": Wrong(
        *model("return F.cross_entropy(y, t).detach()"), "depends on no parameter", "look for detach()"
    ),
    "backward in the model": Wrong(
        *model("loss = F.cross_entropy(y, t)\n        loss.backward()\n        return loss"),
        "backward through the graph a second time",
        "look for it in Net.forward, {train}:16",
    ),
    "a report of a tensor": Wrong(
        *model("loss = F.cross_entropy(y, t)\n        report(loss, self)\n        return loss"),
        "got Tensor",
        'such as {"loss": loss}',
    ),
    "numbers of 64 bits": Wrong(
        "datasets.get_digits()",
        "([(x.astype('float64'), t) for x, t in part] for part in datasets.get_digits())",
        "Double and Float",
        "x.astype(numpy.float32)",
    ),
    "a mean of truths": Wrong(
        *model('report({"accuracy": (y.argmax(1) == t).mean()}, self)'), "Got: Bool", ".float().mean()"
    ),
    "labels in a column": Wrong(
        "datasets.get_digits()",
        "([(x, torch.tensor([t])) for x, t in part] for part in datasets.get_digits())",
        "multi-target not supported",
        "label.squeeze(1)",
    ),
    "labels that are floats": Wrong(
        "datasets.get_digits()",
        "([(x, float(t)) for x, t in part] for part in datasets.get_digits())",
        "Float",
        "label.long()",
    ),
    "more classes than outputs": Wrong(
        "nn.Linear(20, 10)", "nn.Linear(20, 5)", "is out of bounds", "outputs of the last layer"
    ),
    "another number of features": Wrong(
        "nn.Linear(64, 20)", "nn.Linear(784, 20)", "100x64 and 784x20", "model_summary(model)"
    ),
    "a loss and what it was made of": Wrong(
        *model("return F.cross_entropy(y, t), y"), "got tuple from Net.forward, {train}:16", "Return the tensor"
    ),
    "a report of keywords": Wrong(
        *model("report(loss=y.sum(), observer=self)\n        return F.cross_entropy(y, t)"),
        "unexpected keyword argument 'loss'",
        'report({"loss": loss}, self)',
    ),
    # extensions
    "a name for an evaluation": Wrong(
        "Evaluator(test_iter, model)",
        'Evaluator(test_iter, model, name="test")',
        "no argument 'name'",
        "trainer.extend(extension, name=",
    ),
    "a trigger for a snapshot": Wrong(
        "snapshot(), trigger",
        "snapshot(trigger=(1, 'epoch')), trigger",
        "no argument 'trigger'",
        "trainer.extend(extension, name=",
    ),
    "a schedule of each iteration": Wrong(
        *extending(
            "steps = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"
            'trainer.extend(extensions.LRScheduler(steps, trigger=(1, "iteration")))'
        ),
        "no argument 'trigger'",
        "trainer.extend(extension, name=",
    ),
    "the key of early stopping first": Wrong(
        STOP,
        'triggers.EarlyStoppingTrigger("validation/main/loss")',
        "got the string 'validation/main/loss' first",
        "monitor='validation/main/loss'",
    ),
    "a misspelled patience": Wrong(
        STOP, "triggers.EarlyStoppingTrigger(patients=3)", "no argument 'patients'", "did you mean 'patience'?"
    ),
    "an evaluation without end": Wrong(
        "100, repeat=False, shuffle=False", "100", "repeats forever", "make it with repeat=False"
    ),
    "an evaluation of a dataset": Wrong(
        "Evaluator(test_iter", "Evaluator(test", "got the dataset", "SerialIterator(dataset, batch_size)"
    ),
    "an evaluation of a model on an iterator": Wrong(
        "Evaluator(test_iter, model)", "Evaluator(model, test_iter)", "got Classifier first", "the iterator first"
    ),
    "an evaluation of no model": Wrong(
        "Evaluator(test_iter, model)",
        "Evaluator(test_iter)",
        "and the model",
        "Evaluator(test_iterator, model)",
    ),
    "a table without a log": Wrong(
        "trainer.extend(extensions.LogReport())\n", "", "no extension 'LogReport'", "extensions.LogReport()"
    ),
    "an extension without an argument": Wrong(
        *extending("def hello():\n    pass\n\n\ntrainer.extend(hello)"),
        "'hello' cannot be",
        "called with one argument, the trainer",
    ),
    "an extension for a list of them": Wrong(
        STOP, f"{STOP}, extensions=extensions.LogReport()", "got <chainring", "extensions.defaults(evaluator)"
    ),
    "an extension that is called": Wrong(*extending("trainer.extend(print(1))"), "got NoneType", "write extend(f)"),
    "the class of an extension": Wrong("LogReport()", "LogReport", "got the class LogReport", "write LogReport(...)"),
    "a scheduler for an extension": Wrong(
        *extending("trainer.extend(torch.optim.lr_scheduler.StepLR(optimizer, 10))"),
        "got StepLR",
        "extensions.LRScheduler(scheduler)",
    ),
    "a writer for an extension": Wrong(
        *extending("trainer.extend(writers.CsvWriter())"), "got CsvWriter", "LogReport(writers=[writer])"
    ),
    "a trigger for an extension": Wrong(
        *extending("trainer.extend(triggers.EarlyStoppingTrigger())"),
        "EarlyStoppingTrigger is a trigger",
        "Trainer(updater, trigger)",
    ),
    "a trigger that is a string": Wrong('trigger=(1, "epoch")', 'trigger="epoch"', "got 'epoch'", 'write (1, "epoch")'),
    "True for a period": Wrong(
        'snapshot(), trigger=(1, "epoch")',
        'snapshot(), trigger=(True, "epoch")',
        "got True of type bool",
        "such as 1 or 0.5",
    ),
    "a number of iterations for a search of the rate": Wrong(
        *extending("extensions.find_learning_rate(trainer, iterations=0)"),
        "find_learning_rate() has no argument 'iterations'",
        "count= is the number of updates",
    ),
    "a search of the rate with an updater": Wrong(
        *extending("extensions.find_learning_rate(updater)"), "got StandardUpdater", "find_learning_rate(Trainer(updater))"
    ),
    "a plateau of nothing": Wrong(
        *extending(
            "best = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\ntrainer.extend(extensions.LRScheduler(best))"
        ),
        "steps by a value",
        'monitor="validation/main/loss"',
    ),
    "a misspelled setting": Wrong(
        "snapshot()", "snapshot(n_retain=3)", "no argument 'n_retain'", "did you mean 'n_retains'?"
    ),
    "a number of the best without a key": Wrong(
        "snapshot()", "snapshot(keep_best=3)", "got 3", 'such as ("validation/main/loss", 3)'
    ),
    "a schedule of another name": Wrong(
        *extending('trainer.extend(extensions.LinearShift("learning_rate", (0.1, 0.01), (0, 100)))'),
        "no 'learning_rate'",
        "'lr'",
    ),
    "a snapshot with an unknown field": Wrong(
        "snapshot()", 'snapshot("model_{.updater.epochs}")', "no attribute 'epochs'", "snapshot_iter_{.updater.iteration}"
    ),
    "a snapshot with a bare field": Wrong(
        "snapshot()", 'snapshot("model_{epoch}")', "'model_{epoch}'", "{.updater.iteration}"
    ),
    "EarlyStopping": Wrong(
        *extending("trainer.extend(extensions.EarlyStopping())"), "'EarlyStopping'", "triggers.EarlyStoppingTrigger"
    ),
    "ModelCheckpoint": Wrong(
        "from chainring.training import extensions, triggers",
        "from chainring.training.extensions import ModelCheckpoint",
        "'ModelCheckpoint'",
        "extensions.snapshot()",
    ),
    "a decorator with settings": Wrong(
        *extending('@trainer.extend(trigger=(1, "epoch"))\ndef hello(trainer):\n    pass'),
        "extend() takes the extension first",
        '@training.make_extension(trigger=(1, "epoch"))',
    ),
    "a misspelled extension": Wrong(
        "extensions.LogReport", "extensions.LogRepport", "'LogRepport'", "Did you mean: 'LogReport'?"
    ),
    "NaN": Wrong(
        *extending("trainer.extend(extensions.FailOnNonNumber())\nnet[0].weight.data.fill_(torch.nan)"),
        "NaN",
        "lower the learning rate",
    ),
    "a report of a stranger": Wrong(
        *extending("trainer.extend(lambda trainer: report({'x': 1.0}, nn.Linear(2, 2)))"),
        "Linear is not registered",
        "add_observer(name, it)",
    ),
    # the run
    "fit": Wrong(RUN, "trainer.fit()", "no attribute 'fit'", "a Trainer runs with run()"),
    "two runs": Wrong(RUN, f"{RUN}\n{RUN}", "a trainer can run only once", "make a new one"),
    "an extension that comes too late": Wrong(
        RUN, f"{RUN}\ntrainer.extend(extensions.ProgressBar())", "run(), which has started", "call extend before it"
    ),
    "out is a file": Wrong(
        "import torch\n", 'import torch\nopen("result", "w").close()\n', "result is not a directory", "choose another out"
    ),
    "out that cannot be made": Wrong('out="result"', 'out="/proc/result"', "writable directory", "choose another out"),
    "a snapshot that is not there": Wrong(
        RUN,
        f'serializers.load("result/snapshot_iter_9", trainer)\n{RUN}',
        "there is no result/snapshot_iter_9",
        "give the path of",
    ),
    "settings that are not a mapping": Wrong(
        'out="result"', 'config=type("Settings", (), {})()', "got Settings", "such as vars(args)"
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_answered_in_at_most_four_lines(tmp_path, monkeypatch, name):
    """After the traceback, in which a line of the program stands; with the cause and the remedy, and nothing twice."""
    wrong = WRONG[name]
    assert PROGRAM.count(wrong.right) >= 1
    (tmp_path / "train.py").write_text(PROGRAM.replace(wrong.right, wrong.wrong, 1))
    monkeypatch.chdir(tmp_path)
    done = forked.run([tmp_path / "train.py"])
    assert done.returncode == 1
    before, _, traceback = done.stderr.partition("Traceback (most recent call last):\n")
    assert before == ""
    assert f'File "{tmp_path}/train.py", line ' in traceback
    *_, error = re.split(r"\n(?! )", traceback.rstrip(), maxsplit=1)
    assert len(error.splitlines()) <= 4
    assert wrong.cause.replace("{train}", str(tmp_path / "train.py")) in error
    assert wrong.remedy.replace("{train}", str(tmp_path / "train.py")) in error
    words = error.splitlines()[0].partition(": ")[2]
    assert [words in line for line in done.stderr.splitlines() if not line.startswith(" ")].count(True) == 1


WARNED = {
    "an evaluation without data": Wrong(
        "SerialIterator(test,", "SerialIterator([],", "the validation has no data", "check that they are not empty"
    ),
    "an evaluation of a copy": Wrong(
        "Evaluator(test_iter, model)",
        "Evaluator(test_iter, __import__('copy').deepcopy(model))",
        "after iterations 15 to 29, gave the same to the last bit",
        "give the Evaluator the model of the updater",
    ),
    "a column that is never reported": Wrong(
        '"validation/main/loss"]', '"val/loss"]', "no values for ['val/loss']", "the rows have ['main/loss'"
    ),
    "a stop trigger that watches a misspelled key": Wrong(
        STOP,
        'triggers.EarlyStoppingTrigger(monitor="mian/loss", max_trigger=(2, "epoch"))',
        "'mian/loss' was not reported",
        "check the key",
    ),
    "the best by a misspelled key": Wrong(
        "snapshot()",
        'snapshot("best", keep_best=("validation/main/los", 3), mode="min")',
        "'validation/main/los' was not reported",
        "did you mean 'validation/main/loss'?",
    ),
    "a model in evaluation mode": Wrong(
        "nn.ReLU(), nn.Linear(20, 10))\n",
        "nn.Dropout(0.5), nn.Linear(20, 10)).eval()\n",
        "trained in evaluation mode",
        "call model.train() before",
    ),
    "a loader that is begun already": Wrong(
        "iterators.SerialIterator(train, 100)",
        "iter(torch.utils.data.DataLoader(train, 100))",
        "ended after 15",
        "A DataLoader itself, instead of iter(loader)",
    ),
    "a batch of more examples than there are": Wrong(
        "SerialIterator(train, 100)", "SerialIterator(train[:160], 1000)", "a batch of 1000", "a smaller batch size"
    ),
    "data that end": Wrong(
        "SerialIterator(train, 100)", "SerialIterator(train, 100, repeat=False)", "ended after 15", "repeat=True"
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_doubtful_program_is_warned_once_with_its_own_line(tmp_path, monkeypatch, name):
    """The line of the program that the warning is about, or that of its run."""
    wrong = WARNED[name]
    (tmp_path / "train.py").write_text(PROGRAM.replace(wrong.right, wrong.wrong, 1).replace(STOP, '(2, "epoch")', 1))
    monkeypatch.chdir(tmp_path)
    done = forked.run([tmp_path / "train.py"])
    assert done.returncode == 0
    place, _, text = done.stderr.partition(": UserWarning: ")
    assert re.fullmatch(re.escape(f"{tmp_path}/train.py:") + r"\d+", place)
    assert wrong.cause in text
    assert wrong.remedy in text
    assert done.stderr.count("UserWarning") == 1
    assert len(done.stderr.splitlines()) <= 4


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10)", "size mismatch for predictor.0.weight"),
        ("nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 10)", '"predictor.4.weight"'),
        (f"nn.Linear(64, 20), {'nn.Linear(20, 20), ' * 60} nn.Linear(20, 10)", '"predictor.4.weight"'),
    ],
)
def test_a_run_that_would_continue_with_another_model_ends_in_four_lines(tmp_path, monkeypatch, layers, words):
    """With the first difference, however many there are, and with what to do if the script has changed."""
    monkeypatch.chdir(tmp_path)
    program = PROGRAM.replace("snapshot()", "snapshot(autoload=True)")
    (tmp_path / "train.py").write_text(program)
    assert forked.run([tmp_path / "train.py"]).returncode == 0
    text = program.replace("nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)", layers).replace(STOP, '(2, "epoch")', 1)
    (tmp_path / "train.py").write_text(text)
    done = forked.run([tmp_path / "train.py"])
    assert done.returncode == 1
    *_, error = re.split(r"\n(?! )", done.stderr.rstrip(), maxsplit=1)
    assert f'File "{tmp_path}/train.py", line ' in done.stderr
    assert len(error.splitlines()) <= 4
    assert max(map(len, error.splitlines())) < 500
    assert words in error.splitlines()[0]
    assert re.search(r"And \d+ more differences$", error.splitlines()[0])
    assert "give another out to begin again" in error


LOADERS = {
    "DataLoader": 'torch.utils.data.DataLoader(train, 100, num_workers=1, multiprocessing_context="{}")',
    "MultiprocessIterator": 'iterators.MultiprocessIterator(list(train), 100, n_processes=1, start_method="{}")',
}
BATCH = "next(train_iter)"


@pytest.mark.parametrize(
    ("loader", "method", "run"),
    [
        ("DataLoader", "forkserver", RUN),
        ("MultiprocessIterator", "spawn", "trainer.rehearse()"),
        ("MultiprocessIterator", "forkserver", BATCH),
    ],
)
def test_workers_of_a_script_without_a_guard_say_what_it_lacks(tmp_path, monkeypatch, loader, method, run):
    """They import it to begin, and would each train: the first words are the remedy, nothing hangs, and no process is left.

    What the program prints ends when the last of its processes has.
    """
    text = PROGRAM.replace("iterators.SerialIterator(train, 100)", LOADERS[loader].format(method), 1)
    (tmp_path / "train.py").write_text(text.replace(RUN, run))
    monkeypatch.chdir(tmp_path)
    done = forked.run([tmp_path / "train.py"])
    assert done.returncode == 1
    first, *_ = re.findall(r"^\w*Error: (.*)", done.stderr, re.MULTILINE)
    assert 'call it under `if __name__ == "__main__":`' in first
    assert "is being written by another run" not in done.stderr
    if loader == "DataLoader":
        assert "hint: why a worker ended is printed above" in done.stderr
    else:
        assert "ended with exit code 1 before it began; what it has printed above says why" in done.stderr
    if run == RUN:
        assert json.loads((tmp_path / "result" / "run.json").read_text())["starts"][0]["iteration"] == 0


def test_a_lambda_that_workers_are_sent_ends_in_what_to_write(tmp_path, monkeypatch):
    """Below the words of pickle and, in newer versions, of PyTorch."""
    lambdas = LOADERS["DataLoader"].format("spawn").replace("100,", "100, collate_fn=lambda rows: rows,", 1)
    (tmp_path / "train.py").write_text(PROGRAM.replace("iterators.SerialIterator(train, 100)", lambdas, 1))
    monkeypatch.chdir(tmp_path)
    done = forked.run([tmp_path / "train.py"])
    assert done.returncode == 1
    *_, error = re.split(r"\n(?! )", done.stderr.rstrip(), maxsplit=1)
    assert "Can't pickle" in error
    assert error.endswith("define these at the top of a module, not as a lambda")
