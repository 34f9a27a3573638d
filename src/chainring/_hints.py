"""Names that users of other libraries try, and what to write here. Looked up only where a name is missing."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_STOP = 'the stop trigger is the second argument: Trainer(updater, (20, "epoch"))'
_MODEL = "a model is any torch.nn.Module that returns its loss; chainring.nn.Classifier makes one of a network"
_EXTENSION = "subclass chainring.training.Extension, or extend the trainer by a function of one argument"
EVALUATOR = "extend the trainer by extensions.Evaluator(test_iterator, model)"
_UPDATER = "the updater has it: trainer.updater.get_{0}('main')"
_WRITERS = "extensions.LogReport(writers=[{0}()]) sends the rows of the log there, by chainring.writers.{0}"
_ACCUMULATE = "StandardUpdater(..., accumulate=4) makes an update of 4 batches"
_CLIP = "StandardUpdater(..., callbacks=UpdateCallbacks(update_on_start=clip_grad_norm(1.0))) clips gradients"
_DEVICE = (
    'StandardUpdater(..., device="cuda") places the model; torchrun starts several processes, see create_communicator()'
)
_PRECISION = 'StandardUpdater(..., precision="bf16") computes in mixed precision'
_SCHEDULER = "extend the trainer by extensions.LRScheduler(scheduler) or a shift, such as extensions.LinearShift"
_BF16 = 'use "bf16"'
_FP16 = 'use "bf16", or "fp16", which scales the loss'
_FP32 = 'use "fp32"'


def _by_name(hints: Mapping[str, str]) -> dict[str, str]:
    """Return for each name its hint, from a table of hints with the names that each answers."""
    return {name: hint for hint, names in hints.items() for name in names.split()}


TRAINER = _by_name(
    {
        "a Trainer runs with run()": "fit train start",
        EVALUATOR: "validate test evaluate",
        "extensions.predict(model, iterator) returns what the model computes": "predict",
        "extensions.find_learning_rate(trainer) looks for one": "lr_find tune tuner",
        "a trainer saves itself by trainer.extend(extensions.snapshot(autoload=True))": "save save_checkpoint",
        "chainring.serializers.save(path, model) saves the model": "save_model",
        "chainring.serializers.load(path, trainer) loads a snapshot": "load load_checkpoint resume",
        "trainer.extend(extension) adds an extension": "add_callback callbacks",
        "chainring.report({'loss': loss}, self) reports a value, and extensions.LogReport() logs it": "log log_dict",
        "trainer.extend(extensions.LogReport()) logs the values that were reported": "logger",
        "the updater counts: trainer.updater.iteration": "global_step iteration",
        "the updater counts: trainer.updater.epoch": "epoch current_epoch",
        _UPDATER.format("model"): "model",
        _UPDATER.format("optimizer"): "optimizer optimizers",
        _UPDATER.format("iterator"): "train_dataloader",
        "StandardUpdater(..., compile=True) compiles the update": "compile",
    }
)

TRAINER_KEYWORDS = _by_name(
    {
        _STOP: "max_epochs epochs num_epochs num_train_epochs",
        'the stop trigger is the second argument: Trainer(updater, (1000, "iteration"))': "max_steps",
        'the stop trigger is the second argument: Trainer(updater, (3600, "second"))': "max_time",
        "extensions=[...] takes extensions, as trainer.extend(extension) does": "callbacks",
        "trainer.extend(extensions.LogReport()) logs the values that were reported": "logger",
        'out="result" is the directory of the run': "default_root_dir output_dir",
        _CLIP: "gradient_clip_val max_grad_norm",
        _ACCUMULATE: "accumulate_grad_batches gradient_accumulation_steps",
        _PRECISION: "precision fp16 bf16",
        _DEVICE: "accelerator device devices strategy",
        "pass it to the updater: Trainer(StandardUpdater(iterator, optimizer, model), ...)": "model optimizer",
        "pass an iterator of it: StandardUpdater(SerialIterator(dataset, 100), optimizer, model)": "train_dataset",
        EVALUATOR: "eval_dataset",
        'extend(extensions.Evaluator(...), trigger=(500, "iteration")) says when to evaluate': "val_check_interval",
        'extend(extensions.Evaluator(...), trigger=(2, "epoch")) says when to evaluate': "check_val_every_n_epoch",
        "trainer.extend(extensions.ProgressBar()) shows one": "enable_progress_bar",
        "extensions.snapshot(autoload=True) resumes the run that is in out": "resume_from_checkpoint",
    }
)

UPDATER_KEYWORDS = _by_name(
    {
        _ACCUMULATE: "accumulate_grad_batches gradient_accumulation_steps accum_grad",
        _CLIP: "gradient_clip_val max_grad_norm clip_grad_norm",
        _PRECISION: "mixed_precision amp fp16 bf16",
        "loss_func=f gives the loss, as f(model, *inputs)": "loss loss_fn criterion",
        "an iterator has the batch size: SerialIterator(dataset, batch_size)": "batch_size",
        "the optimizer has the learning rate": "lr",
        _SCHEDULER: "scheduler lr_scheduler",
        "converter=f makes the inputs of a batch of examples": "collate_fn",
    }
)

LEARNING_RATES = _by_name(
    {
        "count= is the number of updates": "iterations num_iter num_training num_it steps",
        "smallest= is the rate of the first update": "min_lr start_lr",
        "largest= is the rate of the last one": "max_lr end_lr",
    }
)

EXTEND = {
    "": (
        "takes the extension first; to decorate a function, write @trainer.extend above "
        '@training.make_extension(trigger=(1, "epoch"))'
    ),
}

OF_EXTEND = _by_name({'trainer.extend(extension, name="other", trigger=(1, "epoch")) takes it': "name priority trigger"})
SNAPSHOT = {"save_top_k": 'keep_best=("validation/main/loss", 3)', "save_total_limit": "n_retains=3", **OF_EXTEND}
BATCH_SIZE = {"": "takes the dataset and the batch size, as {}(dataset, 100)"}
EVALUATION = {"": "takes an iterator and the model, as {}(test_iterator, model)", **OF_EXTEND}

PRECISIONS: dict[Any, str] = _by_name(
    {
        _BF16: "bf16-mixed bfloat16",
        f"{_BF16}, or cast the model by model.to(torch.bfloat16)": "bf16-true",
        _FP16: "mixed 16 16-mixed fp16-mixed float16 half",
        f"{_FP16}, or cast the model by model.half()": "16-true",
        _FP32: "32 32-true float32 no",
        "cast the model by model.double(), and leave precision out": "64 64-true",
    }
)

CALLED = "write extend(f), not extend(f(trainer))"
EXTENSIONS = {  # by a method of what is not an extension
    "get_last_lr": "a scheduler is wrapped, extensions.LRScheduler(scheduler)",
    "write": "a writer is given to a log, extensions.LogReport(writers=[writer])",
    "on_train_start": _EXTENSION,
    "on_train_begin": _EXTENSION,
}

NAMES = _by_name(  # that a module of Chainring lacks
    {
        _MODEL: "LightningModule Module Model",
        _EXTENSION: "Callback TrainerCallback LambdaCallback",
        "it is chainring.training.Trainer": "Trainer",
        "it is chainring.training.StandardUpdater": "StandardUpdater",
        "it is chainring.training.Extension": "Extension",
        "it is torch.nn.Sequential": "Sequential",
        "it is torch.nn.Module": "Chain Link",
        "layers are those of torch.nn; chainring.nn.Classifier is here": "links",
        "functions are those of torch.nn.functional": "functions",
        "optimizers are those of torch.optim": "optimizers",
        "they are called extensions: chainring.training.extensions": "callbacks",
        "they are called writers: chainring.writers": "loggers",
        "it is chainring.deterministic(seed)": "seed_everything set_seed",
        "it is chainring.parallel.create_communicator(), given to StandardUpdater(comm=)": "Accelerator",
        "settings are arguments of StandardUpdater and Trainer": "TrainingArguments",
        'it is a stop trigger: Trainer(updater, chainring.training.triggers.EarlyStoppingTrigger(monitor="main/loss"))': (
            "EarlyStopping EarlyStoppingTrigger"
        ),
        'it is extensions.snapshot(), for the best with trigger=triggers.MinValueTrigger("main/loss")': "ModelCheckpoint",
        "it is extensions.snapshot()": "Checkpoint Snapshot",
        "it is extensions.snapshot(autoload=True)": "BackupAndRestore",
        _WRITERS.format("TensorBoardWriter"): "TensorBoard TensorBoardLogger",
        _WRITERS.format("WandbWriter"): "WandbLogger WandbCallback",
        _WRITERS.format("MlflowWriter"): "MLFlowLogger",
        _WRITERS.format("CometWriter"): "CometLogger",
        _WRITERS.format("CsvWriter"): "CSVLogger",
        "it is extensions.find_learning_rate(trainer)": "LearningRateFinder FastaiLRFinder",
        "it is extensions.observe_lr()": "LearningRateMonitor",
        "it is extensions.LRScheduler(scheduler), over any of torch.optim.lr_scheduler": "LearningRateScheduler",
        "it is extensions.LRScheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(...), monitor=key)": "ReduceLROnPlateau",
        "it is extensions.ProgressBar()": "TQDMProgressBar RichProgressBar",
        "it is extensions.FailOnNonNumber()": "TerminateOnNaN",
        "it is extensions.SystemMetrics()": "DeviceStatsMonitor",
        "it is extensions.Throughput()": "ThroughputMonitor",
        "it is extensions.ExponentialMovingAverage(model)": "EMA WeightAveraging",
        _ACCUMULATE: "GradientAccumulationScheduler",
        "it is chainring.nn.model_summary(model, batch)": "ModelSummary",
        "it is chainring.iterators.SerialIterator": "SerialIterator",
        "it is chainring.iterators.MultiprocessIterator": "MultithreadIterator",
        "a torch.utils.data.DataLoader can be used directly: StandardUpdater(loader, ...)": "DataLoader",
    }
)

ERRORS = {  # of PyTorch, by what is found in their text
    r"expected (target dtype|scalar type)( to be)? (Long|Byte)": "labels are class numbers, of dtype int64: label.long()",
    r"[Tt]arget -?\d+ is out of bounds": "labels count from 0 to the number of outputs of the last layer less 1",
    r"must have the same dtype, but got Double|expected .* Float but found Double|but got (dtype )?Double": (
        "numbers of NumPy and Python are of 64 bits, and layers of 32: x.astype(numpy.float32), or x.float() of a tensor"
    ),
    r"mean\(\): could not infer output dtype": "a mean is of floats: (y.argmax(1) == t).float().mean()",
    r"0D or 1D target tensor expected, multi-target not supported": (
        "labels of classes have the shape (batch,): label.squeeze(1), or label.argmax(1) where they are one-hot"
    ),
    r"mat1 and mat2 shapes cannot be multiplied": (
        "a layer takes other features than it is given; chainring.nn.model_summary(model) lists the layers"
    ),
    r"Expected all tensors to be on the same device|is not on the expected device": (
        "StandardUpdater(device=) moves model and batches, Evaluator(device=) its batches; make new tensors on x.device; "
        "after a model.to() of yours, make an optimizer that has its state at once, such as Adagrad"
    ),
    r"stack expects each tensor to be equal size": (
        "examples of several sizes make a batch where the collate_fn of the loader fills them up, as by "
        "torch.nn.utils.rnn.pad_sequence"
    ),
    r"default_collate: batch must contain": (
        "let the dataset return tensors, arrays or numbers for images and other objects, or give the loader a collate_fn"
    ),
    r"must be Tensor, not (list|tuple)": (
        "a loader leaves strings as they are, in a list: let the dataset return numbers; of several values that a layer "
        "returns, take the one that is needed"
    ),
    r"object of type 'generator' has no len": (
        "a generator is no dataset, and ends after one pass: write list(generator), or an IterableDataset around it"
    ),
    r"report\(\) got an unexpected keyword argument": 'values are reported in a mapping: report({"loss": loss}, self)',
    r"Can't (get|pickle) ": (
        "workers are sent the dataset and the functions that it calls: define these at the top of a module, not as a lambda"
    ),
    r"DataLoader worker .* exited unexpectedly": (
        "why a worker ended is printed above; one that was killed without a word had no memory left: take fewer workers"
    ),
    r"backward through the graph a second time": (
        "the updater calls backward(), and what returns the loss does not: look for it in {loss}; a value that one batch "
        "leaves to the next needs detach()"
    ),
    r"modified by an inplace operation": "torch.autograd.set_detect_anomaly(True) shows the operation of the forward",
}


def find_hint(error: BaseException) -> str | None:
    """Return what may help where PyTorch has raised an error in a model; ``None`` if nothing is known.

    It may have ``{loss}`` in the place of the function that computes the loss.
    """
    answered = (RuntimeError, IndexError, AttributeError, TypeError, pickle.PicklingError)
    text = str(error) if isinstance(error, answered) else ""
    return next((f"hint: {hint}" for pattern, hint in ERRORS.items() if re.search(pattern, text)), None)


SUBMODULES = {
    "chainring": [
        "cli", "converters", "datasets", "iterators", "nn", "parallel", "serializers", "testing", "training", "writers",
    ],
    "chainring.training": ["extensions", "triggers"],
}  # fmt: skip


def find_missing(module: str, name: str) -> ModuleType:
    """Return a public module that was not imported yet, or raise the error of a name that a module lacks, with a hint.

    Raises:
        AttributeError: always, but for ``from module import name``, of whose error Python would drop the words.
        ImportError: there.
    """
    if name in SUBMODULES.get(module, ()):
        return importlib.import_module(f"{module}.{name}")
    text = f"module {module!r} has no attribute {name!r}"
    hint = NAMES.get(name)
    caller = sys._getframe(2).f_globals.get("__name__")
    if hint is not None and caller == "importlib._bootstrap":
        raise ImportError(f"cannot import name {name!r} from {module!r}: {hint}", name=name)
    raise AttributeError(text if hint is None else f"{text}: {hint}", name=name, obj=importlib.import_module(module))


def hinting(hints: Mapping[str, str]) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator: a keyword that a constructor or function lacks is refused with the nearest, or what to write.

    So is an argument that is given twice, by its place and by its name, and, if there is a hint for an empty name, a call
    without an argument that is required.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
            code = function.__code__
            known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            ordered = known[: code.co_argcount]
            required = ordered[: len(ordered) - len(function.__defaults__ or ())]
            named = f"{function.__qualname__.removesuffix('.__init__')}()"
            for name in keywords if not code.co_flags & inspect.CO_VARKEYWORDS else ():
                near = difflib.get_close_matches(name, known, 1)
                if name not in known and (name in hints or near):
                    hint = hints[name] if name in hints else f"did you mean {near[0]!r}?"
                    raise TypeError(f"{named} has no argument {name!r}: {hint}")
            for name, value in zip(ordered, arguments, strict=False):
                if name in keywords:
                    rule = f"{named} takes {', '.join(ordered).removeprefix('self, ')} in this order"
                    raise TypeError(f"{rule}; {value!r:.60} has the place of {name!r}, which is given by its name too")
            if "" in hints and not keywords.keys() >= {*required[len(arguments) :]}:
                is_constructor = function.__name__ == "__init__"
                called = type(arguments[0]).__name__ if is_constructor else function.__qualname__
                raise TypeError(f"{called}() {hints[''].format(called)}")
            return function(*arguments, **keywords)

        return call

    return decorate
