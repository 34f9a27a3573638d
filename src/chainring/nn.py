"""Classifier: a model that reports its loss and accuracy; model_summary: a table of the modules of a model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from chainring._distributed.sharding import is_sharded
from chainring._messages import Text
from chainring._random import preserve_rng
from chainring.converters import concat_examples, device_scope, to_device
from chainring.reporting.reporter import Reporter, current
from chainring.serializers.protocol import name_cleaner, unwrap

_MOST_SHAPES = 3
_WIDEST_SHAPE = 60  # characters
_TITLES = ("module", "class", "output", "parameters", "trainable", "memory")


def accuracy(y: Tensor, t: Tensor) -> Tensor:
    """Return the fraction of rows of ``y`` (batch, classes, ...) whose largest score is at the label ``t`` (batch, ...)."""
    return (y.argmax(1) == t).mean(dtype=torch.float32)


class Classifier(nn.Module):
    """A predictor with its loss: called with a batch, it returns the loss and reports ``loss`` and ``accuracy``.

    Args:
        predictor: the model that computes class scores from inputs; it becomes the attribute ``predictor``.
        lossfun: ``lossfun(scores, labels)``, by default cross entropy of logits.
        accfun: ``accfun(scores, labels)``, or ``None`` for no accuracy.
        label_key: the argument that contains the labels: a position, or the name of a keyword.

    Raises:
        TypeError: ``label_key`` is neither an integer nor a string.

    Example::

        model = Classifier(nn.Linear(784, 10))
        loss = model(images, labels)
    """

    def __init__(
        self,
        predictor: nn.Module,
        lossfun: Callable[..., Tensor] = nn.functional.cross_entropy,
        accfun: Callable[..., Any] | None = accuracy,
        label_key: int | str = -1,
    ) -> None:
        if not isinstance(label_key, (int, str)):
            raise TypeError(f"label_key is the position of an argument or a keyword's name, got {label_key!r}")
        super().__init__()
        self.predictor = predictor
        self.lossfun = lossfun
        self.accfun = accfun
        self.label_key = label_key

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch, a scalar.

        Raises:
            ValueError: the batch has no argument at ``label_key``.
        """
        key = self.label_key
        if isinstance(key, str):
            if key not in kwargs:
                raise ValueError(f"the labels are the keyword {key!r}, and the batch has the keywords {sorted(kwargs)}")
            labels = kwargs.pop(key)
        else:
            if not -len(args) <= key < len(args):
                raise ValueError(f"the labels are argument {key}, and the batch has {len(args)}; set label_key")
            position = key % len(args)
            args, labels = args[:position] + args[position + 1 :], args[position]
        # hot path: "the script's extensions" of benchmarks/overhead.py. self.predictor costs a microsecond more.
        scores = self._modules["predictor"](*args, **kwargs)  # type: ignore[misc]
        loss = self.lossfun(scores, labels)
        values = {"loss": loss}
        if self.accfun is accuracy:  # argmax has no gradient, and no_grad would take as long
            values["accuracy"] = accuracy(scores, labels)
        elif self.accfun is not None:
            with torch.no_grad():
                values["accuracy"] = self.accfun(scores, labels)
        if (reporter := current.reporter) is not None:  # as `report` does, with a call less
            reporter.report(values, self)
        return loss


def model_summary(model: nn.Module, batch: Any = None) -> str:
    """Return a table of the modules of a model: class, shape of the output, parameters, trainable ones and memory.

    Each number is that of the module itself without its submodules, so the columns add up to the last line. A module that
    is used in several places has one line, and a parameter shared by several modules counts in the first of them. Memory
    is that of parameters and buffers. With a batch, the model is called once, as an update calls it, to find the shapes
    of its outputs; a ``-`` marks a module that was not called, such as the inner layer of ``nn.MultiheadAttention``. If a
    module was called several times, all of its different shapes are listed.

    The call uses a copy of the model and of the batch, in the current mode of the model, so that the model, its buffers
    and modes, the batch and the random generators do not change by a single bit. During the call there are two models in
    memory.

    Args:
        model: the model. Wrappers of ``torch.compile`` and DDP are left out, and nothing is compiled.
        batch: a tuple is passed as positional arguments, a mapping as keyword arguments, anything else as one argument. A
            list with tensors, as a ``DataLoader`` returns it, counts as a tuple; a list of examples, as an iterator
            returns it, is converted to a batch. The batch is moved to the device of the model.

    Raises:
        TypeError: ``model`` is not a module; or ``batch`` is given and the model cannot be copied.
        ValueError: a module is lazy and has no shapes yet; or ``batch`` is given and the model needs all ranks.

    Example::

        print(model_summary(nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)), torch.zeros(8, 784)))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model_summary describes a torch.nn.Module, got {model!r:.80}; of several models call it for each")
    model = unwrap(model)
    for path, module in model.named_modules():
        if any(map(is_lazy, [*module.parameters(recurse=False), *module.buffers(recurse=False)])):
            raise ValueError(
                f"model_summary does not change the model, and {path or 'the model'!r} is a {type(module).__name__}, "
                "whose parameters are created by its first call; call the model once with a batch first"
            )
    outputs = {} if batch is None else _run_copy(model, batch)
    rows = list(_rows(model, outputs))
    totals = [sum(numbers) for numbers in zip(*(row[3:] for row in rows), strict=True)]
    lines = [_TITLES, *((*row[:3], *_texts(row[3:])) for row in rows), ("total", "", "", *_texts(totals))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join([*map(str.ljust, line[:3], widths), *map(str.rjust, line[3:], widths[3:])]) for line in lines]
    rule = "-" * len(table[0])
    return Text("\n".join([table[0].rstrip(), rule, *table[1:-1], rule, table[-1]]))


def _rows(model: nn.Module, outputs: Mapping[str, list[str]]) -> Iterator[tuple[Any, ...]]:
    """Yield the name, the class and the output of each module, its numbers of parameters, and the bytes of its memory."""
    clean = name_cleaner(model)
    counted: set[int] = set()
    for path, module in model.named_modules():
        if unwrap(module) is not module:  # has nothing of its own, and the name of what it wraps
            continue
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        new = [tensor for tensor in tensors if id(tensor) not in counted]
        counted.update(map(id, new))
        parameters = [tensor for tensor in new if isinstance(tensor, nn.Parameter)]
        trainable = [tensor for tensor in parameters if tensor.requires_grad]
        numbers = [sum(tensor.numel() for tensor in group) for group in (parameters, trainable)]
        memory = sum(tensor.numel() * tensor.element_size() for tensor in new)
        shapes = outputs.get(path, ["-"])
        shown = "; ".join(shapes[:_MOST_SHAPES]) + ("; ..." if len(shapes) > _MOST_SHAPES else "")
        yield (clean(path) or "(model)", type(module).__name__, shown, *numbers, memory)


def _texts(numbers: Sequence[int]) -> tuple[str, str, str]:
    parameters, trainable, memory = numbers
    units = [unit for unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")) if memory >= unit[0]]
    size = f"{memory / units[0][0]:.1f} {units[0][1]}" if units else f"{memory} B"
    return f"{parameters:,}", f"{trainable:,}", size


def _run_copy(model: nn.Module, batch: Any) -> dict[str, list[str]]:
    """Call a copy of the model; return the shapes of the outputs of each module by path, each different one once.

    Models whose call needs all ranks are refused: where only one of them asks for the table, it would wait forever.
    """
    if any(map(is_sharded, model.parameters())):
        raise ValueError(
            "model_summary runs a copy of the model, and this model is sharded over ranks; call it before "
            "fully_shard or parallelize_module, or leave out the batch"
        )
    synchronized = any(isinstance(module, nn.SyncBatchNorm) and module.training for module in model.modules())
    if synchronized and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "model_summary runs a copy of the model on this rank, and its SyncBatchNorm waits for all ranks; "
            "call it before convert_sync_batchnorm or after model.eval(), or leave out the batch"
        )
    if type(batch) is list and any(isinstance(item, Tensor) for item in batch):
        batch = tuple(batch)
    elif isinstance(batch, list) or hasattr(batch, "columns"):
        batch = concat_examples(batch)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    twin, batch = _copy(model, batch)
    batch = to_device(next(iter(devices)) if len(devices) == 1 else None, batch)
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch) if isinstance(batch, Mapping) else ((batch,), {})
    outputs: dict[str, list[str]] = {}
    running: list[str] = []
    for path, module in twin.named_modules():
        _record_shapes(path, module, running, outputs)
    reporter = Reporter()
    reporter.add_observers("main", twin.named_modules())
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(device_scope(device))
        stack.enter_context(preserve_rng())
        if "torch._dynamo" in sys.modules:  # who has compiled a part has imported it; compiling takes minutes
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(reporter.scope({}))
        try:
            twin(*args, **kwargs)
        except Exception as error:
            mode, where = "training" if twin.training else "evaluation", running[-1] if running else ""
            error.add_note(f"while model_summary called the model with the batch, in {mode} mode, in {where!r}")
            raise
    return outputs


def _copy(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    memo: dict[int, Any] = {}
    for module in model.modules():  # weight_norm and spectral_norm leave results there, which have no deepcopy
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy((model, batch), memo)
    except Exception as error:
        raise TypeError(
            "model_summary runs a copy of the model and of the batch, so that it changes neither, and they cannot be copied "
            f"({type(error).__name__}: {error}); leave out the batch for a table without shapes"
        ) from error


def _record_shapes(path: str, module: nn.Module, running: list[str], outputs: dict[str, list[str]]) -> None:
    """Let a module note the shapes of its outputs, and that it is running."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        shapes, text = outputs.setdefault(path, []), _describe(output)
        shape = text if len(text) <= _WIDEST_SHAPE else text[: _WIDEST_SHAPE - 3] + "..."
        if shape not in shapes:
            shapes.append(shape)

    module.register_forward_pre_hook(lambda *_: running.append(path))
    module.register_forward_hook(note)


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return "[" + ", ".join(map(str, output.shape)) + "]"
    if isinstance(output, (tuple, list)):
        return "(" + ", ".join(map(_describe, output)) + ")"
    if isinstance(output, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(value)}" for key, value in output.items()) + "}"
    return "None" if output is None else type(output).__name__
