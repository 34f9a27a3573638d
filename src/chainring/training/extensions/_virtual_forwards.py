"""The forwards of an evaluation on virtual ranks: the same ones whichever ranks compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from chainring import _random
from chainring._distributed.communicator import Communicator
from chainring._distributed.virtual_ranks import block_of
from chainring.datasets._columns import count_examples, take_examples
from chainring.reporting._metrics import all_over_ranks, is_metric, undone
from chainring.reporting.summary import DictMeans
from chainring.training.updaters._wrapped import WrappedModules

Forward = Callable[..., tuple[dict[str, Any], Any]]
"""``forward(batch, shows=True)`` returns what is reported of a batch, and its weight."""


class VirtualForwards:
    """Evaluates each batch part by part: those of the virtual ranks of this rank.

    A part without examples is skipped. Modules that are wrapped exchange parameters or buffers in a forward: of these all
    ranks run equally many, some of which do not count; so they do in the first batch, to learn which metrics there are.
    """

    def __init__(self, count: int, comm: Communicator, seed: int, models: list[nn.Module]) -> None:
        self._comm = comm
        self._seed = seed
        self._block = block_of(comm.rank, comm.size, count)
        largest = -(-count // comm.size)
        exchanges = comm.size > 1 and bool(WrappedModules(models).parameters)
        self._least = largest if exchanges else 0  # forwards of each batch
        self._buffers = _Buffers(models)
        self._metrics: dict[str, Any] = {}

    def run(self, batches: Iterable[Any], forward: Forward, summary: DictMeans) -> None:
        """Evaluate all batches, and add what is reported of them, metrics with what they have counted on all ranks.

        Raises:
            ValueError: a metric is not reported on all ranks, or what it has counted cannot be added up.
        """
        for index, batch in enumerate(batches):
            self._run_batch(index, batch, forward, summary)
        for key, metric in all_over_ranks(self._metrics, self._comm).items():
            summary.add({key: metric})

    def _run_batch(self, index: int, batch: Any, forward: Forward, summary: DictMeans) -> None:
        done, size = 0, len(self._block)
        for position, virtual in enumerate(self._block):
            part = batch if size == 1 else take_examples(batch, slice(position, None, size))
            examples = count_examples(part)
            if isinstance(examples, int) and examples == 0:
                break  # nor have those after it
            _random.seed_all("evaluation", self._seed, index, virtual)
            observation, weight = forward(part, shows=virtual == 0)
            self._buffers.restore()
            metrics = {key: value for key, value in observation.items() if is_metric(value)}
            self._metrics |= metrics
            summary.add({key: value for key, value in observation.items() if key not in metrics}, weight)
            done += 1
        for _ in range(max(self._least, int(index == 0)) - done):
            with undone(self._metrics.values()):
                observation, _ = forward(take_examples(batch, slice(0, 1)), shows=False)
            self._buffers.restore()
            for key, value in observation.items():
                if is_metric(value) and key not in self._metrics:
                    value.reset()
                    self._metrics[key] = value


class _Buffers:
    """The buffers of some models, but for those of metrics, which every forward finds as they were at the beginning."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = [module for model in models for module in model.modules()]
        of_metrics = {id(child) for module in modules if is_metric(module) for child in module.modules()}
        self._slots: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = [
            (module._buffers, name, buffer, buffer.clone())
            for module in modules
            if id(module) not in of_metrics
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._versions = [buffer._version for _, _, buffer, _ in self._slots]

    def restore(self) -> None:
        """Undo what a forward has changed."""
        for index, (buffers, name, buffer, initial) in enumerate(self._slots):
            buffers[name] = buffer
            if buffer._version != self._versions[index]:
                buffer.copy_(initial)
                self._versions[index] = buffer._version
