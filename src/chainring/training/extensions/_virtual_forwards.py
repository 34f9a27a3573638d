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
from chainring.training.updaters._ranks import WrappedModules

Forward = Callable[..., tuple[dict[str, Any], Any]]
"""``forward(batch, shows=True)`` returns what is reported of a batch, and its weight."""


def add_virtual_forwards(
    summary: DictMeans,
    batches: Iterable[Any],
    forward: Forward,
    models: list[nn.Module],
    count: int,
    comm: Communicator,
    seed: int,
) -> None:
    """Evaluate batches on this rank's block of virtual ranks, and add what is reported, metrics with the counts of all.

    A share without examples is skipped. Modules that are wrapped exchange parameters or buffers in a forward: of these all
    ranks run equally many, some of which do not count; so they do in the first batch, to learn which metrics there are.

    Raises:
        ValueError: a metric is not reported on all ranks, or what it has counted cannot be added up.
    """
    block, buffers = block_of(comm.rank, comm.size, count), _Buffers(models)
    exchanges = comm.size > 1 and bool(WrappedModules(models).parameters)
    least = -(-count // comm.size) if exchanges else 0  # forwards of each batch
    metrics: dict[str, Any] = {}
    for index, batch in enumerate(batches):
        done = 0
        for position, virtual in enumerate(block):
            share = batch if len(block) == 1 else take_examples(batch, slice(position, None, len(block)))
            examples = count_examples(share)
            if isinstance(examples, int) and examples == 0:
                break  # nor have those after it
            _random.seed_all("evaluation", seed, index, virtual)
            observation, weight = forward(share, shows=virtual == 0)
            buffers.restore()
            metrics |= {key: value for key, value in observation.items() if is_metric(value)}
            summary.add({key: value for key, value in observation.items() if not is_metric(value)}, weight)
            done += 1
        for _ in range(max(least, int(index == 0)) - done):
            with undone(metrics.values()):
                observation, _ = forward(take_examples(batch, slice(0, 1)), shows=False)
            buffers.restore()
            for key, value in observation.items():
                if is_metric(value) and key not in metrics:
                    value.reset()
                    metrics[key] = value
    for key, metric in all_over_ranks(metrics, comm).items():
        summary.add({key: metric})


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
