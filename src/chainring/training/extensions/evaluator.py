"""Evaluator: the model on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chainring import _random
from chainring._distributed.communicator import Communicator
from chainring._naming import named_submodules
from chainring.converters import Device, as_device, concat_examples
from chainring.iterators.base import Iterator, share_among_ranks
from chainring.iterators.loader import LoaderIterator, as_iterator
from chainring.reporting._metrics import own_metrics
from chainring.reporting.reporter import Reporter, report
from chainring.reporting.summary import DictSummary
from chainring.serializers.base import AbstractSerializer
from chainring.training.extension import PRIORITY_WRITER, Extension
from chainring.training.updaters._forward import arguments, loss_and_weight

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


class Evaluator(Extension):
    """Runs the model over an iterator once and reports the means of what it reports, as ``validation/main/loss``.

    No gradients are computed, every submodule's training flag is put back, and random generators are left as they were.
    Means are weighted by the number of examples, so they do not depend on the batch size. Metrics that are attributes of
    the model count this evaluation alone, and afterwards are what they were.

    Args:
        iterator: gives batches of one pass; a ``DataLoader`` or another iterable of batches is wrapped. One, or a mapping
            of several by name, of which ``"main"`` is evaluated.
        target: the model, or a mapping of several by name; a single one is called ``"main"``.
        converter: ``converter(batch, device)`` makes tensors of a batch of examples.
        device: where the batches go; ``None`` leaves them where they are.
        eval_hook: called with the evaluator before each evaluation.
        eval_func: called with a batch in place of the main target. What it returns means the same: a loss, or a mapping
            that has ``"loss"``.

    Raises:
        ValueError: the iterator repeats, so an evaluation would never end; or there is nothing to call.
        TypeError: something of another kind stands where an iterator, a model or a function belongs.
    """

    trigger = (1, "epoch")
    priority = PRIORITY_WRITER
    skip_on_resume = True
    default_name = "validation"

    def __init__(
        self,
        iterator: Any,
        target: Any,
        converter: Callable[..., Any] = concat_examples,
        device: Device = None,
        eval_hook: Callable[..., None] | None = None,
        eval_func: Callable[..., Any] | None = None,
    ) -> None:
        iterators = dict(iterator) if isinstance(iterator, dict) else {"main": iterator}
        self._iterators = {name: _one_pass(name, source) for name, source in iterators.items()}
        self._targets: dict[str, nn.Module] = dict(target) if isinstance(target, dict) else {"main": target}
        for name, model in self._targets.items():
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"an Evaluator takes the model second, an nn.Module; target {name!r} is {type(model).__name__}"
                )
        functions = {"converter": converter, "eval_hook": eval_hook, "eval_func": eval_func}
        for name, function in functions.items():
            if not callable(function) and (function is not None or name == "converter"):
                raise TypeError(f"{name} of an Evaluator is a function, got {function!r}")
        if "main" not in self._iterators or (eval_func is None and "main" not in self._targets):
            raise ValueError('an Evaluator needs an iterator "main", and a target "main" or an eval_func')
        for name, source in self._iterators.items():
            if isinstance(source, Iterator):
                source.name = f"validation/{name}"  # from which, beside the initial seed, a seed of None is derived
        self.converter = converter
        self.device = as_device(device)
        self.eval_hook = eval_hook
        self.eval_func = eval_func
        self._comm: Communicator = Communicator()

    def get_iterator(self, name: str) -> Any:
        """The iterator of that name."""
        return self._iterators[name]

    def get_all_iterators(self) -> dict[str, Any]:
        """Every iterator by its name."""
        return dict(self._iterators)

    def get_target(self, name: str) -> nn.Module:
        """The model of that name."""
        return self._targets[name]

    def get_all_targets(self) -> dict[str, nn.Module]:
        """Every model by its name."""
        return dict(self._targets)

    def initialize(self, trainer: Trainer) -> None:
        self._comm = trainer.comm
        for source in self._iterators.values():
            share_among_ranks(source, trainer.comm)

    def __call__(self, trainer: Trainer | None = None) -> dict[str, float]:
        """Evaluates, and reports the means under the name that the extension has in the trainer; returns them so."""
        result = self.evaluate()
        if trainer is not None and trainer.extension_name is not None:
            result = {f"{trainer.extension_name}/{key}": value for key, value in result.items()}
        report(result)
        return result

    def evaluate(self) -> dict[str, float]:
        """The mean of each reported key over one pass, ``main/loss`` for example; nothing is reported."""
        if self.eval_hook is not None:
            self.eval_hook(self)
        iterator = self._iterators["main"]
        getattr(iterator, "rewind", iterator.reset)()
        reporter = Reporter()
        for name, model in self._targets.items():
            for path, part in named_submodules(name, model):
                reporter.add_observer(path, part)
        summary = DictSummary()
        if self._comm.size > 1:  # of a model in training, each rank has statistics of its own share
            self._comm.broadcast([buffer for model in self._targets.values() for buffer in model.buffers()])
        with torch.no_grad(), _random.preserve_rng(), own_metrics(self._targets.values()), _evaluating(self._targets):
            for batch in iterator:
                observation: dict[str, Any] = {}
                with reporter.scope(observation):
                    weight = self._evaluate_batch(batch)
                summary.add(observation, weight)
            return summary.over(self._comm).compute_mean()

    def _evaluate_batch(self, batch: Any) -> Any:
        args, kwargs = arguments(self.converter(batch, self.device))
        answer = (self.eval_func or self._targets["main"])(*args, **kwargs)
        _, weight = loss_and_weight(answer, "main")
        number = getattr(batch, "weight", None)
        own = len(batch) if number is None else number
        return own if weight is None or own == 0 else weight

    def finalize(self) -> None:
        for iterator in self._iterators.values():
            if hasattr(iterator, "finalize"):
                iterator.finalize()

    def serialize(self, serializer: AbstractSerializer) -> None:
        for name, iterator in self._iterators.items():
            serializer.visit(f"iterator:{name}", iterator)


def _one_pass(name: str, source: Any) -> Any:
    if isinstance(source, LoaderIterator):
        return LoaderIterator(source.loader, epoch_length=source.epoch_length, repeat=False)
    iterator = as_iterator(source, repeat=False)
    if getattr(iterator, "repeat", False):
        raise ValueError(
            f"an evaluation is one pass, and iterator {name!r} ({type(iterator).__name__}) repeats for ever; "
            "make it with repeat=False, shuffle=False"
        )
    return iterator


@contextmanager
def _evaluating(targets: Mapping[str, nn.Module]) -> Generator[None]:
    """Every submodule in evaluation mode, and afterwards each in the mode that it had."""
    modes = [(part, part.training) for model in targets.values() for part in model.modules()]
    try:
        for model in targets.values():
            model.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training
