"""Ranks of which some may be lost: refusals of what could not go on, and means of which each rank knows all."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chainring._distributed.sharding import is_sharded
from chainring._distributed.virtual_ranks import Deal
from chainring.datasets._batches import require_count
from chainring.reporting._metrics import list_metrics
from chainring.reporting.reporter import current_observation
from chainring.reporting.summary import weighted_means
from chainring.training.updaters._means import WeightedMean
from chainring.training.updaters._ranks import list_ddp_modules
from chainring.training.updaters._update import Update
from chainring.training.updaters._virtual_state import Agreement, Findings, Means, list_keys
from chainring.training.updaters.callbacks import keeping


def check_survival(models: Mapping[str, nn.Module], virtual_ranks: int | None, audit: Any) -> None:
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
    elif list_metrics(models.values()):
        reason = "what a metric object in a model has counted is not put back so far: report a value of each batch"
    elif audit:
        reason = "what an audit has found is not put back so far: leave audit out"
    if reason is not None:
        raise ValueError(f"with create_communicator(survive=True) ranks go on when others are lost, and {reason}")


class SurvivingMean(WeightedMean):
    """A mean over ranks of which some may be lost: all know what each has reported, which is not lost with it.

    It is exchanged with the buffers before the step, which no rank begins before all can complete it; or at the end of an
    update of which all that it changes is put back.
    """

    _agreed: tuple[Update, Means] | None = None

    def start(self) -> None:
        comm, parameters = self._scheme.updater.comm, next(iter(self._scheme.models.values())).parameters()
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self.sends = self.sends and comm.size > 1
        self._agreement = Agreement(comm, device)

    def finish(self, update: Update, names: list[str], optimizers: list[Optimizer]) -> list[Optimizer]:
        counting = super().finish(update, names, optimizers)
        if keeping.get() is None and self._scheme.updater.comm.size > 1:
            observation = current_observation() or {}
            if update.observed is None:
                self._agree(update, observation, update.weights.get(0, update.examples))
            else:  # of the micro-batches, the last of which is over if the step comes after it
                observed = [*update.observed, observation][: len(update.weights)]
                weights = [require_count(update.weights[micro_step]) for micro_step in range(len(observed))]
                self._agree(update, weighted_means(list(zip(observed, weights, strict=True))), sum(weights))
        return counting

    def conclude(self, update: Update) -> None:
        scheme, updater = self._scheme, self._scheme.updater
        observation = current_observation()
        if self._agreed is None or self._agreed[0] is not update:
            weights = scheme.reported_weights
            values = {key: (value, weights[key]) if key in weights else value for key, value in (observation or {}).items()}
            self._agree(update, values, updater.weight)
        assert self._agreed is not None
        (_, means), self._agreed = self._agreed, None
        updater.weight, scheme.reported_weights = means.weight, means.weights
        if observation is not None:
            observation.update(means.values)

    def _agree(self, update: Update, observation: Mapping[str, Any], weight: Any) -> None:
        comm = self._scheme.updater.comm
        super().conclude(update)
        part: Any = SimpleNamespace(observation=observation, weight=require_count(weight), rows=1, steps=[])
        _, means = self._agreement.start(Findings(list_keys([part])), [part], Deal.even(comm.size, comm.size))()
        self._agreed = update, means
