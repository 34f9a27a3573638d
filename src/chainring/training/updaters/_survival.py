"""Ranks of which some may be lost: refusals of what could not go on, and means of which each rank knows all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chainring._distributed.group import GroupCommunicator
from chainring._distributed.sharding import is_sharded
from chainring._distributed.virtual_ranks import Node, fold
from chainring.datasets._batches import require_count
from chainring.reporting.reporter import current_observation
from chainring.reporting.summary import weighted_means
from chainring.training.updaters._means import WeightedMean
from chainring.training.updaters._ranks import list_buffers, list_ddp_modules
from chainring.training.updaters._update import Update
from chainring.training.updaters._virtual_state import pair_with_weight
from chainring.training.updaters.callbacks import keeping


def check_survival(models: Mapping[str, nn.Module]) -> None:
    """Refuse what could not go on, or not with the same numbers, when ranks are lost."""
    modules = [module for model in models.values() for module in model.modules()]
    reason = None
    if any(is_sharded(parameter) for model in models.values() for parameter in model.parameters()):
        reason = "the shards of a rank that is lost are lost with it: leave the model plain"
    elif list_ddp_modules(list(models.values())):
        reason = "DistributedDataParallel keeps to the ranks with which it was made: leave the model plain, whose gradients "
        reason += "the updater exchanges"
    elif any(isinstance(module, nn.SyncBatchNorm) for module in modules):
        reason = "SyncBatchNorm keeps to the ranks with which the run has begun: take nn.BatchNorm"
    if reason is not None:
        raise ValueError(f"with create_communicator(survive=True) ranks go on when others are lost, and {reason}")


class _Agreed(NamedTuple):
    """What all ranks know of an update: the sum of their weights, and of each value the mean and the sum of its weights."""

    update: Update
    weight: Tensor
    means: dict[str, Tensor]
    weights: dict[str, Tensor]


class SurvivingMean(WeightedMean):
    """A mean over ranks of which some may be lost: all know what each has reported, which is not lost with it.

    It is exchanged before the step, after the gradients and in one message with their weights, so that no rank begins the
    step before all can complete it, or beside them where no rank may lack what another has; or at the end of an update of
    which all that it changes is put back.
    """

    _agreed: _Agreed | None = None

    def start(self) -> None:
        self.sends = self.sends and self._scheme.updater.comm.size > 1
        self._told: tuple[str, ...] = ()  # the keys of this rank in the last update,
        self._keys: tuple[str, ...] = ()  # and those of all ranks

    def finish(self, update: Update, names: list[str], optimizers: list[Optimizer]) -> list[Optimizer]:
        counting = super().finish(update, names, optimizers)
        if keeping.get() is None and self._scheme.updater.comm.size > 1 and not self._agrees_with_sums(update):
            self._agree_at_step(update)
        return counting

    def _agrees_with_sums(self, update: Update) -> bool:
        # A callback after the exchange may report what all have to know too.
        return keeping.get() is None and not update.scheme.updater.callbacks.comm_on_finish

    def _start_sum(self, comm: GroupCommunicator, update: Update, numbers: Tensor) -> Callable[[], Tensor]:
        if not self._agrees_with_sums(update):
            return super()._start_sum(comm, update, numbers)
        if comm.may_lack:
            return partial(self._agree_at_step, update, numbers)
        sums = self._agree_at_step(update, numbers)
        return lambda: sums

    def _agree_at_step(self, update: Update, numbers: Tensor | None = None) -> Tensor:
        observation = current_observation() or {}
        if update.observed is None:
            return self._agree(update, observation, update.weights.get(0, update.examples), numbers)
        # Of the micro-batches, the last of which is over if the step comes after it.
        observed = [*update.observed, observation][: len(update.weights)]
        weights = [require_count(update.weights[micro_step]) for micro_step in range(len(observed))]
        return self._agree(update, weighted_means(list(zip(observed, weights, strict=True))), sum(weights), numbers)

    def conclude(self, update: Update) -> None:
        scheme, updater = self._scheme, self._scheme.updater
        observation = current_observation()
        if self._agreed is None or self._agreed.update is not update:
            weights = scheme.reported_weights
            values = {key: (value, weights[key]) if key in weights else value for key, value in (observation or {}).items()}
            self._agree(update, values, updater.weight)
        assert self._agreed is not None
        (_, updater.weight, means, scheme.reported_weights), self._agreed = self._agreed, None
        if observation is not None:
            observation.update(means)

    def _agree(self, update: Update, observation: Mapping[str, Any], weight: Any, numbers: Tensor | None = None) -> Tensor:
        """Let all ranks know what each has reported, and have the buffers of rank 0; return the sums of some numbers."""
        comm, weight = self._scheme.updater.comm, require_count(weight)
        if buffers := list_buffers(list(self._scheme.models.values())):
            comm.send(buffers)
        pairs = {key: pair for key, value in observation.items() if (pair := pair_with_weight(value, weight)) is not None}
        is_new, self._told = self._told != tuple(pairs), tuple(pairs)
        sums = self._sum_over_ranks(pairs, weight, is_new, numbers)
        if sums[0]:
            of_ranks = comm.gather_object(self._told)
            self._keys = tuple(dict.fromkeys(key for keys in of_ranks for key in keys))
            sums = self._sum_over_ranks(pairs, weight, False, numbers)
        count = len(self._keys)
        values, weights = sums[2 : 2 + 2 * count].view(2, count)
        means = dict(zip(self._keys, (values / weights).unbind(), strict=True))
        self._agreed = _Agreed(update, sums[1], means, dict(zip(self._keys, weights.unbind(), strict=True)))
        return sums[2 + 2 * count :]

    def _sum_over_ranks(
        self, pairs: Mapping[str, tuple[Any, Any]], weight: Any, is_new: bool, numbers: Tensor | None
    ) -> Tensor:
        """Return sums over the ranks: whether one has other keys, the weight, values times weights, weights, numbers."""
        # On the host alone, where few calls are faster than calls of tensors: it is a part of each update.
        known = [tuple(map(float, pairs.get(key, (0, 0)))) for key in self._keys]
        products = [value * weight if weight else 0.0 for value, weight in known]  # also of a value that is not finite
        own = torch.tensor([is_new, float(weight), *products, *(weight for _, weight in known)], dtype=torch.float64)
        own, comm = own if numbers is None else torch.cat([own, numbers]), self._scheme.updater.comm
        total: Tensor
        if comm.may_lack:
            rows: Tensor = comm.start_all_gather(own)()
            (total,) = fold({Node(0, rank): row for rank, row in enumerate(rows)}, comm.size, Tensor.add_).values()
        else:  # a sum of two is the same in either order
            total = comm.start_sum(own)()
        return total
