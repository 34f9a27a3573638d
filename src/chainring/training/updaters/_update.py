"""Update: one update under way, from its first micro-batch to the steps of its optimizers; made anew each time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from chainring._distributed.progress import note_iteration
from chainring._distributed.sharding import to_full
from chainring._progress import raise_unless_end
from chainring.datasets._columns import Uncounted, require_count
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import weighted_means
from chainring.training.updaters._closures import ClosureStep, only_gradients_of
from chainring.training.updaters._forward import check_loss, compute_loss, run_backward
from chainring.training.updaters._gradients import clear_gradients, stash, step_optimizer
from chainring.training.updaters._wrapped import list_buffers
from chainring.training.updaters.callbacks import UpdateContext, run

if TYPE_CHECKING:
    from chainring.training.updaters._compiled import Compiled
    from chainring.training.updaters._means import WeightedMean
    from chainring.training.updaters._precision import Precision
    from chainring.training.updaters._virtual import Part, VirtualRanks
    from chainring.training.updaters._watches import ExchangeWatch, ModelRanksWatch
    from chainring.training.updaters._wrapped import WrappedModules
    from chainring.training.updaters.standard import StandardUpdater


@dataclass(slots=True)
class Scheme:
    """The objects of an updater, and how it computes its updates, which follows from its settings.

    Attributes:
        updater: the updater.
        iterators, models, optimizers: by name.
        epochs: the main iterator, by which epochs are counted.
        has_own_core: True if ``update_core`` is overridden: it may take several batches, and step several times.
        precision: of the forward.
        wrapped: the modules that exchange gradients by themselves.
        mean: makes the means over micro-batches, ranks or virtual ranks; ``None`` where an update is one micro-batch of
            one process, whose gradients are final as the backward leaves them.
        virtual: the virtual ranks, or ``None``.
        compiled: the compiled functions, or ``None``.
        exchange_watch: detects an ``update_core`` that changes parameters without an exchange; ``None`` where none can.
        model_watch: compares ranks that compute a model together; ``None`` where there are none.
        steps_by_closure: True if the default update hands closures to the optimizers.
        spans_batches: True if an update may take several batches.
        stashes: True if gradients wait apart for the last micro-batch: an own ``update_core`` may add those of another loss.
        ends_with_epoch: True if an update that the end of an epoch cuts short is made of the micro-batches that there are.
        update: the one that is under way; of virtual ranks that of the part which is being computed.
        idle: stands for it between two updates, so that the graph of a loss is let go of with its update.
    """

    updater: StandardUpdater
    iterators: dict[str, Any]
    epochs: Any
    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    has_own_core: bool
    precision: Precision
    wrapped: WrappedModules
    mean: WeightedMean | None = None
    virtual: VirtualRanks | None = None
    compiled: Compiled | None = None
    exchange_watch: ExchangeWatch | None = None
    model_watch: ModelRanksWatch | None = None
    steps_by_closure: bool = False
    spans_batches: bool = field(init=False)
    stashes: bool = field(init=False)
    ends_with_epoch: bool = field(init=False)
    update: Update = field(init=False)
    idle: Update = field(init=False)

    def __post_init__(self) -> None:
        accumulates = self.updater.accumulate > 1
        self.spans_batches = self.has_own_core or accumulates
        self.stashes = self.has_own_core and accumulates
        self.ends_with_epoch = accumulates and not self.updater.accumulate_across_epochs


@dataclass(slots=True)
class Update:
    """One update while it runs, or the part of one that a virtual rank computes.

    Attributes:
        scheme: how it is computed.
        context: of the current micro-batch.
        epoch: of the main iterator before the update.
        examples: the number of examples of the micro-batch.
        is_last: True if optimizers step in this micro-batch.
        weights: the weights of the micro-batches by number, those of the first backward of each.
        weight: of the last backward; ``None`` before the first of a micro-batch.
        has_loss_weight: True if a loss came with a weight.
        totals: for each optimizer that has called for a step, the sum of the weights of its micro-batches.
        deferred: the names of optimizers that step in the last micro-batch.
        stashed: their gradients, where these wait apart.
        stepped: optimizers whose gradients are those of a step, which the next backward clears.
        closures: the steps of optimizers that were given closures, by name.
        sent: the sum whose sending has begun in the backward.
        total_weight: of all micro-batches and ranks, in the last step.
        part: that of the virtual rank, or ``None``.
    """

    scheme: Scheme
    context: UpdateContext
    epoch: Any = 0
    examples: Any = 1
    is_last: bool = True
    weights: dict[int, Any] = field(default_factory=dict)
    weight: Any = None
    has_loss_weight: bool = False
    totals: dict[str, Any] = field(default_factory=dict)
    deferred: list[str] = field(default_factory=list)
    stashed: dict[Tensor, Tensor] = field(default_factory=dict)
    stepped: list[Optimizer] = field(default_factory=list)
    closures: dict[str, ClosureStep] = field(default_factory=dict)
    sent: Any = None
    total_weight: Any = None
    part: Part | None = None

    def run(self) -> Any:
        """Run the micro-batches, and return the weight of the update; if the data end after some, it is made of those."""
        scheme, updater = self.scheme, self.scheme.updater
        if updater.accumulate == 1:
            if self.part is not None:
                self.part.seed_generators(0)
            updater.update_core()
            return require_count(self.weights.get(0, self.examples))
        outer = current_observation()
        observed: list[dict[str, Any]] = []
        for micro_step in range(updater.accumulate):
            before, self.context = self.context, UpdateContext(updater, updater.iteration, micro_step)
            self.is_last, self.weight = micro_step == updater.accumulate - 1, None
            self._drop_foreign_gradients()
            if self.part is not None:
                self.part.seed_generators(micro_step)
            else:  # stashed gradients are exchanged each time, since the last backward does not see them
                scheme.wrapped.set_gradient_sync(self.is_last or scheme.stashes)
            observation: dict[str, Any] = {}
            try:
                with nullcontext() if outer is None else report_scope(observation):
                    updater.update_core()
            except StopIteration as error:
                if not observed:
                    raise
                raise_unless_end(updater, error)
                self.context = before
                self._end_early()
                break
            self.weights.setdefault(micro_step, self.examples)  # of an update_core that does without `backward`
            observed.append(observation)
            if scheme.ends_with_epoch and self._epoch_has_ended():
                self._end_early()
                break
        weights = [require_count(self.weights[micro_step]) for micro_step in range(len(observed))]
        if outer is not None:
            outer.update(weighted_means(list(zip(observed, weights, strict=True))))
        return sum(weights)

    def _epoch_has_ended(self) -> bool:
        # The first virtual rank of a block fetches all batches of an update, before the others have had theirs.
        epoch = getattr(self.scheme.iterators.get("main"), "epoch", 0) if self.part is None else self.part.epoch
        return bool(epoch != self.epoch)

    def _drop_foreign_gradients(self) -> None:
        """Clear gradients that were added after an optimizer's step: a generator's loss also reaches its critic."""
        for name in self.deferred if self.scheme.stashes else ():
            clear_gradients(self.scheme.optimizers[name])

    def _end_early(self) -> None:
        """Let the optimizers step that wait for a last micro-batch, which does not come."""
        scheme, self.is_last = self.scheme, True
        names = [name for name in self.deferred if name in self.totals and name not in self.closures]
        if not (names or self.closures):
            return
        self._drop_foreign_gradients()
        if self.part is None:
            scheme.wrapped.set_gradient_sync(True)
            if scheme.updater.comm.size > 1 and scheme.wrapped.parameters and not (scheme.stashes or self.closures):
                # Wrapped modules exchange what they have accumulated in a backward, as that of the last would have done.
                with nullcontext() if current_observation() is None else report_scope({}), scheme.precision.autocast():
                    loss, _ = compute_loss(scheme.models["main"], scheme.updater.loss_func, self.context.batch)
                run_backward(loss * 0)
        if names and self.part is not None:
            self.part.meet(names)
        elif names:
            self.step_optimizers(names)
        for name in list(self.closures):
            self.closures.pop(name).run()

    def note_batch(self, name: str, converted: Any, examples: Any) -> Any:
        """Note a converted batch with the number of its examples, and return what the callbacks make of it."""
        context, callbacks = self.context, self.scheme.updater.callbacks
        if name == "main":
            self.examples = examples
            if self.scheme.ends_with_epoch and self._epoch_has_ended():  # known before the backward in which ranks exchange
                self.is_last = True
                if self.part is None:
                    self.scheme.wrapped.set_gradient_sync(True)
        context.batch, context.examples = converted, None if isinstance(examples, Uncounted) else examples
        if callbacks.batch_on_finish:
            run(callbacks.batch_on_finish, context)
        return context.batch

    # --- the backward ---

    def backward(self, loss: Tensor, weight: Any, retain_graph: bool) -> None:
        """Add the gradients of a loss to those of the parameters, so that they become means in the step."""
        # hot path: "in stages" of benchmarks/overhead.py, here and in the step: an empty context is three calls
        if type(loss) is not Tensor or loss.ndim or not loss.requires_grad:
            check_loss(loss)  # says what is wrong
            loss = to_full(loss)
        weight = self.note_weight(weight)
        for optimizer in self.stepped:
            clear_gradients(optimizer)
        self.stepped = []
        scheme, context, callbacks = self.scheme, self.context, self.scheme.updater.callbacks
        context.loss = loss
        if callbacks.backward_on_start:
            run(callbacks.backward_on_start, context)
        if scheme.mean is not None:
            loss = scheme.mean.weigh(loss, weight)
        if scheme.precision.scaler is not None:
            loss = scheme.precision.scaler.scale(loss)
        if scheme.mean is not None and scheme.mean.sends:
            with scheme.mean.sending(self):
                run_backward(loss, retain_graph)
        else:
            run_backward(loss, retain_graph)
        if callbacks.backward_on_finish:
            run(callbacks.backward_on_finish, context)

    def note_weight(self, weight: Any) -> Any:
        """Note the weight of this micro-batch, by default its number of examples, and return it."""
        if weight is None or (type(self.examples) is int and self.examples == 0):  # a repeated example never counts
            weight = require_count(self.examples)
        self.weights.setdefault(self.context.micro_step, weight)
        self.weight = weight
        return weight

    # --- steps ---

    def step(self, names: list[str]) -> None:
        """Let optimizers step, or wait for the last micro-batch."""
        if self.scheme.mean is not None:
            self.add_totals(names)
        if not self.is_last:
            self._defer(names)
        elif self.part is not None:
            self.part.meet(names)
        else:
            self.step_optimizers(names)

    def step_by_closure(self, name: str, closure: Callable[[], Any]) -> None:
        """Let an optimizer step that calls a closure, or wait for those of the other micro-batches."""
        step = self.closures.setdefault(name, ClosureStep(self, name))
        step.add(closure)
        if self.is_last:
            self.closures.pop(name).run()
        else:
            self._defer([name])

    def add_totals(self, names: list[str]) -> None:
        """Add the weight of the last backward to those by which the gradients of optimizers become means."""
        if self.weight is None:
            raise RuntimeError(
                "step() needs a self.backward(loss) before it, which weights this micro-batch relative to those of all "
                "ranks; write self.backward(loss) in update_core, not loss.backward()"
            )
        for name in names:
            self.totals[name] = self.totals.get(name, 0) + self.weight

    def _defer(self, names: list[str]) -> None:
        self.deferred += [name for name in names if name not in self.deferred]
        for name in names if self.scheme.stashes else ():
            stash(self.scheme.optimizers[name], self.stashed, self.scheme.wrapped.in_buckets)

    def step_optimizers(self, names: list[str]) -> None:
        """Run the stages after the last backward: communication, unscaling, the steps of the optimizers."""
        scheme, scaler = self.scheme, self.scheme.precision.scaler
        optimizers = [scheme.optimizers[name] for name in names]
        if scheme.mean is not None or scaler is not None or scheme.updater.callbacks.update_on_start:
            self.finish_gradients(names, optimizers)
        step = step_optimizer if scaler is None else scaler.step
        if scheme.exchange_watch is None:
            for optimizer in optimizers:
                step(optimizer)
        else:
            with scheme.exchange_watch.stepping():
                for optimizer in optimizers:
                    step(optimizer)
        if scheme.updater.callbacks.update_on_finish:
            run(scheme.updater.callbacks.update_on_finish, self.context)
        self.stepped += optimizers

    def finish_gradients(self, names: list[str], optimizers: list[Optimizer]) -> None:
        """Make gradients final: means over micro-batches and ranks, unscaled, and as ``update_on_start`` leaves them."""
        scheme, callbacks = self.scheme, self.scheme.updater.callbacks
        if scheme.mean is not None:
            scheme.mean.finish(self, names, optimizers)
        if scheme.model_watch is not None:
            scheme.model_watch.check(scheme.updater.iteration, self.context.loss, optimizers)
        if scheme.precision.scaler is not None:
            for optimizer in optimizers:
                scheme.precision.scaler.unscale_(optimizer)
        if callbacks.update_on_start:
            # The gradients of the others are not final: another backward may have reached them, on each rank by itself.
            is_alone = len(optimizers) == len(scheme.optimizers)
            with nullcontext() if is_alone else only_gradients_of(optimizers, scheme.optimizers.values()):
                run(callbacks.update_on_start, self.context)

    def finish(self) -> None:
        """Do what is left after the steps of an update that averages gradients or scales its loss."""
        scheme, comm = self.scheme, self.scheme.updater.comm
        if self.has_loss_weight and self.total_weight is not None and (observation := current_observation()) is not None:
            observation["main/weight"] = self.total_weight  # of all micro-batches and ranks, and not their mean
        if scheme.precision.scaler is not None:
            scheme.precision.scaler.update()
        if scheme.exchange_watch is not None:
            has_weighed = scheme.virtual is not None or self.weight is not None
            scheme.exchange_watch.check(comm, scheme.models, scheme.wrapped, has_weighed)
        if comm.size > 1 and scheme.virtual is None and (buffers := list_buffers(list(scheme.models.values()))):
            comm.broadcast(buffers)
        if comm.world.size > 1:
            note_iteration(scheme.updater.iteration + 1)
