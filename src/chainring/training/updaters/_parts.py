"""An update that is made of parts: accumulated ones, and those of other ranks, averaged by weight."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring.merging import weighted_means
from chainring.reporter import current_observation, report_scope
from chainring.training._loss import check_loss, differentiate
from chainring.training.updaters import _arguments
from chainring.training.updaters._gradients import bring_back, clear, rescale, set_aside, sum_over_ranks
from chainring.training.updaters._precision import Full
from chainring.training.updaters._ranks import Wrapped
from chainring.training.updaters._registered import Registered
from chainring.training.updaters._step import step
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, run


class InParts(Registered):
    """From the first backward of an update to its last step.

    The sizes of the parts are not known before the last is there. So each loss is weighted by its weight over a
    reference, what a full update counts, and the summed gradients are corrected once at the end.
    """

    accumulate: int
    callbacks: UpdateCallbacks
    _precision: Full
    _communicates: bool
    _weighs: bool
    """Whether there is more than one part to average."""
    _spans: bool
    """Whether an update may take more than one batch, so that it counts epochs from its own beginning to its end."""
    _sets_aside: bool
    """Whether gradients wait apart for the last part, because an ``update_core`` of one's own may add strange ones."""
    _wrapped: Wrapped
    _is_last = True
    """Whether no part follows the one under way."""

    def _begin_update(self) -> None:
        self._context = UpdateContext(self, self.iteration, 0)
        self._part_weight: Any = 1
        self._given_weight: Any = None
        self._last_weight: Any = None
        self._stepped: list[Optimizer] = []
        self.weight = 0
        if self._weighs:
            self._begin_average()
        if self._spans:
            main = self._iterators.get("main")
            self._epoch_before = getattr(main, "epoch", 0)
            self._before = getattr(main, "epoch_detail", None)

    def _begin_average(self) -> None:
        self._totals: dict[str, Any] = {}
        self._deferred: list[str] = []
        self._held: dict[Tensor, Tensor] = {}
        self._reference = self.accumulate * getattr(self._iterators.get("main"), "batch_size", 1)

    def _accumulate(self) -> None:
        """The parts of an update; when the data end after some, the update is made of those."""
        outer = current_observation()
        parts: list[tuple[dict[str, Any], Any]] = []
        for part in range(self.accumulate):
            before, self._context = self._context, UpdateContext(self, self.iteration, part)
            self._is_last = part == self.accumulate - 1
            observation: dict[str, Any] = {}
            self._drop_strays()
            # Gradients that are set aside are exchanged each time, since the last backward does not see them.
            self._wrapped.synchronize(self._is_last or self._sets_aside)
            try:
                self._observe_part(observation, outer is not None)
            except StopIteration:
                if not parts:
                    raise
                self._is_last, self._context = True, before
                self._drop_strays()
                self._exchange_late()
                self._finish(self._deferred)
                break
            parts.append((observation, self._given_weight))
        if outer is not None:
            outer.update(weighted_means(parts))

    def _exchange_late(self) -> None:
        """Lets wrapped models exchange what they have added up, since the part that was to do it does not come."""
        if self.comm.size > 1 and self._wrapped.parameters and not self._sets_aside:
            self._wrapped.synchronize(True)
            unreported = nullcontext() if current_observation() is None else report_scope({})
            with unreported, self._precision.autocast():
                loss, _ = self._loss(self._context.batch)
            differentiate(loss * 0)

    def _loss(self, batch: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def _observe_part(self, observation: dict[str, Any], reports: bool) -> None:
        self._given_weight = self._last_weight = None
        with report_scope(observation) if reports else nullcontext():
            self.update_core()
        self._count_part()

    def _count_part(self) -> None:
        if self._given_weight is None:  # an update_core that does without `backward`
            self._given_weight = self._part_weight
        self.weight = self.weight + self._given_weight

    def _drop_strays(self) -> None:
        """Drops what came into the gradients of an optimizer after its step: a generator's loss also reaches its critic."""
        if self._sets_aside:
            for name in self._deferred:
                clear(self._optimizers[name])

    def backward(self, loss: Tensor, weight: Any = None) -> None:
        """Adds the gradients of a loss.

        Args:
            loss: a scalar, the mean over what ``weight`` counts.
            weight: what this part counts beside the other parts and ranks, by default its number of examples; a number,
                or a tensor without dimensions, which is not read.

        Raises:
            TypeError, ValueError: the loss is not a scalar tensor that depends on a parameter.
        """
        check_loss(loss)
        number = self._part_weight
        if weight is None or (type(number) is int and number == 0):  # a repeated example never counts
            weight = number
        if self._given_weight is None:
            self._given_weight = weight
        self._last_weight = weight
        if self._stepped:  # gradients of a step before this one, in an update of several
            for optimizer in self._stepped:
                clear(optimizer)
            self._stepped = []
        context, callbacks = self._context, self.callbacks
        context.loss = loss
        if callbacks.backward_on_start:
            run(callbacks.backward_on_start, context)
        if self._weighs:
            if isinstance(weight, Tensor):  # a count, in the digits of the loss
                weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
            share = weight / self._reference
            loss = loss if type(share) is float and share == 1.0 else loss * share
        scaler = self._precision.scaler
        differentiate(loss if scaler is None else scaler.scale(loss))
        if callbacks.backward_on_finish:
            run(callbacks.backward_on_finish, context)

    def step(self, name: str = "main") -> None:
        """Lets an optimizer step, in the last part of an update: communicate, unscale, callbacks, ``optimizer.step()``.

        Its gradients stay to be looked at until the next backward or update, which begins with none.
        """
        self._step([name])

    def _step(self, names: list[str]) -> None:
        if self._weighs:
            self._count_weights(names)
        if self._is_last:
            self._finish(names)
            return
        self._deferred += [name for name in names if name not in self._deferred]
        if self._sets_aside:
            for name in names:
                set_aside(_arguments.look_up(self._optimizers, name, "optimizer"), self._held)

    def _count_weights(self, names: list[str]) -> None:
        if self._last_weight is None:
            raise RuntimeError(
                "step() follows self.backward(loss), which weighs this part of the update beside the other parts and "
                "ranks; write self.backward(loss) in update_core, not loss.backward()"
            )
        for name in names:
            self._totals[name] = self._totals.get(name, 0) + self._last_weight

    def _finish(self, names: list[str]) -> None:
        """The stages after the last backward."""
        callbacks, context, scaler = self.callbacks, self._context, self._precision.scaler
        optimizers = [_arguments.look_up(self._optimizers, name, "optimizer") for name in names]
        if self._weighs:
            self._average(names, optimizers)
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale(optimizer)
        if callbacks.update_on_start:
            run(callbacks.update_on_start, context)
        for optimizer in optimizers:
            if scaler is None:
                step(optimizer)
            else:
                scaler.step(optimizer)
        if callbacks.update_on_finish:
            run(callbacks.update_on_finish, context)
        self._stepped += optimizers

    def _average(self, names: list[str], optimizers: list[Optimizer]) -> None:
        """Makes the weighted sums of gradients means, over the parts and over the ranks."""
        for optimizer in optimizers if self._held else ():
            bring_back(optimizer, self._held)
        totals = [self._totals.pop(name) for name in names]
        if self._communicates:
            run(self.callbacks.comm_on_start, self._context)
            totals = sum_over_ranks(self.comm, optimizers, totals, self._wrapped.parameters)
            run(self.callbacks.comm_on_finish, self._context)
        for optimizer, total in zip(optimizers, totals, strict=True):
            rescale(optimizer, self._reference, total, self._wrapped.parameters, self.comm.size)
