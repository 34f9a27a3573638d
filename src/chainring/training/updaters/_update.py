"""Update: one update under way, from the forward of its first micro-batch to the steps of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from chainring._checks import is_number
from chainring._distributed.communicator import Communicator
from chainring._distributed.progress import note_iteration
from chainring._distributed.sharding import is_sharded, to_full, to_local
from chainring._hints import PRECISIONS
from chainring._messages import info
from chainring._progress import raise_unless_end
from chainring.datasets._batches import require_count
from chainring.reporting._metrics import is_metric, list_metrics, uncounted
from chainring.reporting.reporter import current, current_observation, report, report_scope
from chainring.reporting.summary import is_scalar, select_scalars, weighted_mean, weighted_means
from chainring.training.updaters._arguments import NO_FP16, check_call
from chainring.training.updaters._means import fill, only_gradients_of, stash
from chainring.training.updaters._ranks import check_same
from chainring.training.updaters.callbacks import UpdateContext, list_parameters, run

if TYPE_CHECKING:
    from chainring.training.updaters._audit import Audit
    from chainring.training.updaters._compiled import Compiled
    from chainring.training.updaters._means import WeightedMean
    from chainring.training.updaters._ranks import ExchangeWatch, ModelRanksWatch, WrappedModules
    from chainring.training.updaters._virtual import Part, VirtualRanks
    from chainring.training.updaters.standard import StandardUpdater

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_AUTOCAST: AbstractContextManager[Any] = nullcontext()


@dataclass(slots=True, weakref_slot=True)
class Scheme:
    """The objects of an updater, and how it computes its updates, which follows from its settings."""

    updater: StandardUpdater
    iterators: dict[str, Any]
    epochs: Any  # the main iterator, by which epochs are counted
    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    has_own_core: bool  # update_core is overridden: it may take several batches, and step several times
    precision: Precision
    wrapped: WrappedModules
    balance: str = "even"  # how virtual ranks are dealt
    audit: Audit | None = None  # of virtual ranks
    averaging: WeightedMean | None = None
    always_averages: bool = False  # over ranks or virtual ranks
    mean: WeightedMean | None = None  # `averaging` where an update is more than one micro-batch of one process
    virtual: VirtualRanks | None = None
    compiled: Compiled | None = None
    exchange_watch: ExchangeWatch | None = None  # where an update_core could change parameters without an exchange
    model_watch: ModelRanksWatch | None = None  # where ranks compute a model together
    may_repeat: bool = False  # an example, with weight 0, where a batch has none for this rank
    steps_by_closure: bool = False  # the default update hands closures to the optimizers
    accumulates: bool = False
    spans_batches: bool = False  # an update may take several batches
    stashes: bool = False  # gradients are set aside until the last micro-batch: an update_core may add others
    has_said_empty: bool = False  # that an update had the weight 0
    had_empty: Tensor | None = None  # on an accelerator, whether an update had, in which optimizers have stepped
    ends_with_epoch: bool = False  # an update ends early at the end of an epoch, with fewer micro-batches
    reported_weights: dict[str, Any] = field(default_factory=dict)  # of values of earlier batches of the last update
    unchecked: int = 0  # updates after which ranks have still to compare their parameters
    update: Update = field(init=False)  # the running one; with virtual ranks, that of the part which is being computed
    idle: Update = field(init=False)  # in place of `update` between updates, so that the graph of a loss is freed

    def follow_settings(self) -> None:
        self.accumulates = self.updater.accumulate > 1
        self.spans_batches = self.has_own_core or self.accumulates
        self.stashes = self.has_own_core and self.accumulates
        self.ends_with_epoch = self.accumulates and not self.updater.accumulate_across_epochs
        self.mean = self.averaging if self.accumulates or self.always_averages else None
        if self.compiled is not None:
            self.compiled = type(self.compiled)(self)

    def is_empty(self, total: Any) -> bool:
        """Return True if the weight of an update is 0; on an accelerator, which is not waited for, only note it."""
        if is_on_host(total):
            return bool(total == 0)
        self.had_empty = total == 0 if self.had_empty is None else self.had_empty | (total == 0)
        return False

    def check_weights(self, is_empty: bool = False) -> None:
        """Refuse to go on after a step of which nothing counts; accelerators are read here, before a snapshot."""
        if is_empty:
            self.had_empty = torch.ones((), dtype=torch.bool)
        if self.had_empty is not None and bool(self.had_empty):
            raise RuntimeError(
                "optimizers have stepped in an update of weight 0, in which nothing counts: its weight was computed by what "
                "steps (compile=True), or on an accelerator, from which none is read. Resume from the last snapshot with "
                "compile=False and a number of the host as the weight, such as int(mask.sum())"
            )


@dataclass(slots=True)
class Update:
    """One update while it runs, or the part of one that a virtual rank computes; made anew each time."""

    scheme: Scheme
    context: UpdateContext  # of the current micro-batch
    epoch: Any = 0  # of the main iterator before the update
    examples: Any = 1  # of the current micro-batch
    is_last: bool = True  # optimizers step in this micro-batch
    weights: dict[int, Any] = field(default_factory=dict)  # by micro-batch, that of its first backward
    weight: Any = None  # of the last backward; None before the first of a micro-batch
    is_empty: bool = False  # that weight is 0, as far as this is known without waiting for a device
    has_loss_weight: bool = False  # a loss came with a weight
    totals: dict[str, Any] = field(default_factory=dict)  # for each optimizer that waits, the sum of the weights
    deferred: list[str] = field(default_factory=list)  # optimizers that step in the last micro-batch
    stashed: dict[Tensor, Tensor] = field(default_factory=dict)  # their gradients, where `Scheme.stashes`
    stepped: list[Optimizer] = field(default_factory=list)  # whose gradients the next backward clears
    closures: dict[str, ClosureStep] = field(default_factory=dict)
    sent: Any = None  # the sum whose sending has begun in the backward
    total_weight: Any = None  # of all micro-batches and ranks, in the last step
    part: Part | None = None  # of a virtual rank
    observed: list[dict[str, Any]] | None = None  # in the micro-batches that are over, if there are several
    uncounted: ExitStack | None = None  # undoes what metrics count while this rank repeats an example, to keep in step
    has_batch: bool = False  # of the main iterator in this micro-batch of an own ``update_core``
    pins: dict[str, tuple[Any, Any]] | None = None  # values reported of earlier batches, and their weights

    def run(self) -> Any:
        """Accumulate micro-batches, fewer if the data end after some, and return the weight of the update."""
        scheme, updater = self.scheme, cast("StandardUpdater", self.context.updater)
        outer = current_observation()
        self.observed = observed = list[dict[str, Any]]()
        pinned: dict[str, Any] = {}  # keys of values with a weight of their own
        for micro_step in range(updater.accumulate):
            before, self.context = self.context, UpdateContext(updater, updater.iteration, micro_step)
            self.is_last, self.weight, self.has_batch = micro_step == updater.accumulate - 1, None, False
            self._drop_foreign_gradients()
            if self.part is not None:
                self.part.whole.seed_generators(self.part)
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
            if self.pins:
                pins = self.take_pins(observation)
                observation |= {key: (observation[key], weight) for key, weight in pins.items()}
                pinned |= pins
            observed.append(observation)
            if scheme.ends_with_epoch and self.has_ended_epoch():
                self._end_early()
                break
        weights = [require_count(self.weights[micro_step]) for micro_step in range(len(observed))]
        if outer is not None:
            means = weighted_means(list(zip(observed, weights, strict=True)))
            outer.update(means)
            outer.update({key: means[key][0] for key in pinned})
            self.pins = {key: means[key] for key in pinned}
        return sum(weights)

    def note_batch(self, examples: Any) -> None:
        """Note that an ``update_core`` takes a batch: what it has reported before belongs to the batch before.

        Every value then has the weight of its own batch in a mean.
        """
        if self.has_batch and (observation := current_observation()) is not None:
            self.pins = {} if self.pins is None else self.pins
            weight = self.weights.pop(self.context.micro_step, self.examples)
            for key, value in observation.items():
                if is_scalar(value) and (key not in self.pins or self.pins[key][0] is not value):
                    self.pins[key] = value, require_count(weight)
        self.has_batch = True

    def take_pins(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the weights of those of the values in an observation that were reported of earlier batches."""
        pins, self.pins = self.pins or {}, None
        return {key: weight for key, (value, weight) in pins.items() if observation.get(key) is value}

    def let_metrics_count(self, counts: bool) -> None:
        """Let metrics of the models count from now on, or undo later what they count of an example that is repeated."""
        if self.uncounted is not None:
            self.uncounted.close()
            self.uncounted = None
        if not counts:
            self.uncounted = ExitStack()
            self.uncounted.enter_context(uncounted(self.scheme.models.values(), but=("_modules", "_parameters")))

    def check_metrics(self) -> None:
        """Refuse a metric outside of the models that has counted an example which is repeated."""
        known = set(map(id, list_metrics(self.scheme.models.values())))
        for key, value in (current_observation() or {}).items():
            if is_metric(value) and id(value) not in known:
                raise ValueError(
                    f"rank {self.scheme.updater.comm.rank} repeats an example, since the batch has fewer examples than "
                    f"there are ranks, and the metric {key!r} has counted it; make the metric an attribute of the model, "
                    "where it does not count, or leave such batches out: DataLoader(..., drop_last=True)"
                )

    def has_ended_epoch(self) -> bool:
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
            self.part.whole.meet(self.part, names)
        elif names:
            self.step(names, is_due=True)
        for name in list(self.closures):
            self.closures.pop(name).run()

    # --- steps ---

    def step(self, names: list[str], is_due: bool = False) -> None:
        """Let optimizers step, or first wait for other micro-batches or virtual ranks, unless the step ``is_due``."""
        # hot path: "in stages" of benchmarks/overhead.py: an empty context is three calls, a comprehension one
        scheme, scaler, callbacks = self.scheme, self.scheme.precision.scaler, self.scheme.updater.callbacks
        if not is_due:
            if scheme.mean is not None:
                self.add_totals(names)
            if not self.is_last:
                self._defer(names)
                return
            if self.part is not None:
                self.part.whole.meet(self.part, names)
                return
        optimizers = list(map(scheme.optimizers.__getitem__, names))
        if scheme.mean is not None or scaler is not None or callbacks.update_on_start or self.is_empty:
            optimizers = self.finish_gradients(names, optimizers)
            if not optimizers:
                return
        step, watch = step_optimizer if scaler is None else scaler.step, scheme.exchange_watch
        if watch is not None:
            watch.is_stepping = True
        for optimizer in optimizers:
            step(optimizer)
        if watch is not None:
            watch.is_stepping = False
        if callbacks.update_on_finish:
            run(callbacks.update_on_finish, self.context)
        self.stepped += optimizers

    def step_by_closure(self, name: str, closure: Callable[[], Any]) -> None:
        """Let an optimizer step that calls a closure, or wait for those of the other micro-batches."""
        self.closures.setdefault(name, ClosureStep(self, name)).add(closure)
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

    def finish_gradients(self, names: list[str], optimizers: list[Optimizer]) -> list[Optimizer]:
        """Make gradients final: means over micro-batches and ranks, unscaled, and as ``update_on_start`` leaves them.

        Return the optimizers that step: not those of whose gradients nothing counts.
        """
        scheme, callbacks = self.scheme, self.scheme.updater.callbacks
        given = optimizers
        if scheme.mean is not None:
            optimizers = scheme.mean.finish(self, names, optimizers)
        elif self.is_empty:
            optimizers = []
        if len(optimizers) < len(given) and not scheme.has_said_empty:
            scheme.has_said_empty = True
            info(
                f"update {scheme.updater.iteration + 1} has weight 0, so nothing in it counts: its optimizers do not step. "
                "For triggers it is an update like any other; this is said once"
            )
        if not optimizers:
            return []
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
        return optimizers

    def finish(self) -> None:
        """Conclude an update that averages gradients or scales its loss: the loss scale, checks between ranks, buffers."""
        scheme, comm = self.scheme, self.scheme.updater.comm
        if self.has_loss_weight and self.total_weight is not None and (observation := current_observation()) is not None:
            observation["main/weight"] = self.total_weight  # of all micro-batches and ranks, and not their mean
        if scheme.precision.scaler is not None:
            scheme.precision.scaler.update()
        if scheme.exchange_watch is not None:
            has_weighed = scheme.virtual is not None or self.weight is not None
            scheme.exchange_watch.check(comm, scheme.models, scheme.wrapped, has_weighed)
        if comm.size > 1 and scheme.mean is not None:
            scheme.mean.conclude(self)
        if scheme.unchecked:
            scheme.unchecked -= 1
            check_same(comm, scheme.models, scheme.wrapped)
        if comm.world.size > 1:
            note_iteration(scheme.updater.iteration + 1)


def is_on_host(weight: Any) -> bool:
    """Return True for a weight that can be read without waiting for a device."""
    return not isinstance(weight, Tensor) or weight.is_cpu


class _Empty(Exception):  # noqa: N818 - it ends a step whose closures count nothing, and is not an error
    pass


class ClosureStep:
    """A step of an optimizer that computes the mean loss of all micro-batches of an update as often as it likes."""

    def __init__(self, update: Update, name: str) -> None:
        self._update, self._name = update, name
        self._optimizer = update.scheme.optimizers[name]
        self._evaluations: list[tuple[Any, ...]] = []  # of each micro-batch, the arguments of `_call`
        self._has_gradients = False  # of a backward before the closure was given
        self._is_first = True

    def add(self, closure: Any) -> None:
        update = self._update
        if not callable(closure):
            raise TypeError(f"a closure is a function without arguments that returns the loss, got {type(closure).__name__}")
        if update.scheme.precision.scaler is not None:
            raise ValueError(NO_FP16)
        self._evaluations.append((closure, update.context, update.examples, current_observation()))
        if update.weight is not None:
            self._has_gradients = True
            if update.scheme.mean is not None:
                update.add_totals([self._name])

    def run(self) -> None:
        """Let the optimizer step, which calls all closures any number of times."""
        update, watch = self._update, self._update.scheme.exchange_watch
        if self._has_gradients:
            update.finish_gradients([self._name], [self._optimizer])
        if watch is not None:
            watch.is_stepping = True
        try:
            self._optimizer.step(self._evaluate)
        except _Empty:
            return
        finally:
            if watch is not None:
                watch.is_stepping = False
        run(update.scheme.updater.callbacks.update_on_finish, update.context)
        update.stepped.append(self._optimizer)

    def _evaluate(self) -> Any:
        """Compute the gradients of the optimizer by its closures, and return the mean loss."""
        update, optimizers = self._update, self._update.scheme.optimizers
        is_first, self._is_first = self._is_first, False
        for optimizer in update.stepped:
            clear_gradients(optimizer)
        update.stepped = []
        before = update.context, update.examples, update.weight
        with torch.enable_grad(), only_gradients_of([self._optimizer], optimizers.values()):
            losses = [self._call(is_first, *evaluation) for evaluation in self._evaluations]
            with nullcontext() if is_first or current_observation() is None else report_scope({}):
                if not update.finish_gradients([self._name], [self._optimizer]):
                    raise _Empty
        update.context, update.examples, update.weight = before
        return self._mean(losses)

    def _call(
        self, is_first: bool, closure: Any, context: UpdateContext, examples: Any, observation: dict[str, Any] | None
    ) -> tuple[Any, Any]:
        """Return the loss of a micro-batch and its weight; its gradients are added to those of the micro-batches before."""
        update, scheme = self._update, self._update.scheme
        update.context, update.examples, update.weight = context, examples, None
        clear_gradients(self._optimizer)
        if is_first:
            update.weights.pop(context.micro_step, None)
        with nullcontext() if observation is None else report_scope(observation if is_first else {}):
            loss = closure()
        if not is_number(loss) and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise TypeError(
                f"a closure calls self.backward(loss) and returns the loss, one number; got {type(loss).__name__}"
            )
        if update.weight is None:  # the closure has called loss.backward()
            if scheme.wrapped.parameters and scheme.updater.comm.size > 1:
                raise RuntimeError(
                    "DDP and fully_shard exchange gradients in the backward, before which self.backward(loss) weighs the "
                    "loss; write self.backward(loss) in the closure, not loss.backward()"
                )
            weight = update.weight = require_count(update.examples)
            update.weights.setdefault(context.micro_step, weight)
            if scheme.mean is not None:
                for parameter in list_parameters([self._optimizer]):
                    if parameter.grad is not None:
                        to_local(parameter.grad).mul_(weight / scheme.mean.reference)
        if scheme.mean is not None:
            update.add_totals([self._name])
            stash(self._optimizer, update.stashed, scheme.wrapped.in_buckets)
        return to_full(loss), update.weight

    def _mean(self, losses: list[tuple[Any, Any]]) -> Any:
        """Return the mean of losses by weight, over all ranks: the same number on each rank, for joint decisions."""
        comm, (loss, _) = self._update.scheme.updater.comm, losses[0]
        if len(losses) == 1 and comm.size == 1:
            return loss
        device = list_parameters([self._optimizer])[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        values = fill([loss for loss, _ in losses], dtype=dtype, device=device).unbind()
        mean, weight = weighted_mean(list(zip(values, [weight for _, weight in losses], strict=True)))
        if comm.size > 1:
            sums = fill([mean * weight, weight], dtype=dtype, device=device)
            comm.all_reduce([sums], average=False)
            mean = sums[0] / sums[1]
        return mean.to(loss.dtype) if isinstance(loss, Tensor) else mean


class Precision:
    """``"fp32"``: the dtypes of the models; ``"bf16"``: autocast; ``"fp16"``: autocast with a loss scaler."""

    def __init__(self, name: str, models: Iterable[nn.Module] = (), comm: Communicator | None = None) -> None:
        if name not in _DTYPES:
            hint = PRECISIONS.get(str(name).removeprefix("torch."))
            raise ValueError(f'precision is "fp32", "bf16" or "fp16", got {name!r}' + (f"; {hint}" if hint else ""))
        self.name, self.dtype = name, _DTYPES[name]
        parameters = (parameter for model in models for parameter in model.parameters())
        self._device_type = next((parameter.device.type for parameter in parameters), "cpu")
        self.scaler = LossScaler(self._device_type, comm or Communicator()) if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        return NO_AUTOCAST if self.dtype is None else torch.autocast(self._device_type, dtype=self.dtype)


class LossScaler(torch.amp.GradScaler):
    """Scales the loss up and the gradients down again; an optimizer may step several times in one update.

    Ranks that hold shards of gradients skip a step, and lower the scale, if one of them finds an overflow in its shard.
    """

    def __init__(self, device_type: str, comm: Communicator) -> None:
        super().__init__(device_type)
        self._comm = comm
        self._stepped: set[Optimizer] = set()

    def unscale_(self, optimizer: Optimizer) -> None:
        if optimizer in self._stepped:  # its second step of this update: GradScaler counts by its own updates
            self.update()
        super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        """Unscale gradients in place; shard by shard, since PyTorch cannot unscale those of several meshes together."""
        parameters = list_parameters([optimizer])
        if not any(map(is_sharded, parameters)):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        shards = [to_local(parameter).detach() for parameter in parameters]
        for shard, parameter in zip(shards, parameters, strict=True):
            shard.grad = None if parameter.grad is None else to_local(parameter.grad)
        local: Any = SimpleNamespace(param_groups=[{"params": shards}])
        infs = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)  # by device, 1.0 where it found one
        largest = torch.stack([found.to(found_inf.device) for found in [found_inf, *infs.values()]]).max()
        self._comm.world.all_reduce([largest], average=False)
        return {found_inf.device: largest}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self._stepped.add(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._stepped:
            super().update(new_scale)
        self._stepped.clear()


# --- the loss, its gradients and a step ---


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a converted batch as arguments: a tuple by position, a mapping by keyword, anything else as one argument."""
    if isinstance(batch, tuple):
        return batch, {}
    return ((), batch) if isinstance(batch, Mapping) else ((batch,), {})


def compute_loss(model: nn.Module, loss_func: Callable[..., Any] | None, batch: Any) -> tuple[Any, Any]:
    """Return the loss of a converted batch, and its weight if it comes with one."""
    # hot path: "no extension" of benchmarks/overhead.py. Nearly every batch is a tuple, and many models report their loss.
    args, kwargs = (batch, {}) if type(batch) is tuple else arguments(batch)
    try:
        output = model(*args, **kwargs) if loss_func is None else loss_func(model, *args, **kwargs)
    except TypeError:
        check_call(model, loss_func, args, kwargs)  # says what is wrong, if it is the call
        raise
    reporter = current.reporter
    if type(output) is Tensor and (reporter is None or "main/loss" in reporter.reported.values):
        return output, None
    return loss_and_weight(output)


def loss_and_weight(output: Any) -> tuple[Any, Any]:
    """Report the loss in the output of a model or loss function; return it with the ``"weight"`` beside it, or ``None``.

    If the output is a mapping that has ``"loss"``, all of its scalars are reported. A plain loss is reported unless the
    model has reported one itself.
    """
    if isinstance(output, Tensor):
        output = output if type(output) is Tensor else to_full(output)
        reporter = current.reporter
        if reporter is not None and "main/loss" not in reporter.reported.values and output.ndim == 0:
            if reporter.watchers:
                reporter.report({"main/loss": output})
            else:  # hot path: "no extension" of benchmarks/overhead.py. A third of the time of a report.
                reporter.reported.values["main/loss"] = output.detach().clone()
        return output, None
    if isinstance(output, Mapping) and "loss" in output:
        report({f"main/{key}": value for key, value in select_scalars(output).items()})
        weight = output.get("weight")
        if weight is not None and not is_scalar(weight):
            raise ValueError(
                'the "weight" beside "loss" is one number, what the mean in the loss counts; '
                f"got {type(weight).__name__} of shape {tuple(getattr(weight, 'shape', ()))}; sum it, as by mask.sum()"
            )
        return to_full(output["loss"]), to_full(weight).detach() if isinstance(weight, Tensor) else weight
    return output, None


def run_backward(loss: Tensor, retain_graph: bool = False, create_graph: bool = False) -> None:
    """Compute the gradients of a loss.

    Gradient checkpointing runs parts of the forward pass again during the backward. Values that they report again are
    ignored; otherwise a module that is called twice would end with the value of its first call.
    """
    reporter = current.reporter
    if reporter is None:
        loss.backward(retain_graph=retain_graph, create_graph=create_graph)  # type: ignore[no-untyped-call]
        return
    # hot path: "no extension" of benchmarks/overhead.py. As in a scope of the reporter, which is three calls.
    reported = reporter.reported
    values, stacks = reported.values, reported.stacks
    reported.values, reported.stacks = {}, None
    try:
        loss.backward(retain_graph=retain_graph, create_graph=create_graph)  # type: ignore[no-untyped-call]
    finally:
        during, reported.values, reported.stacks = reported.values, values, stacks
    if during:  # new keys are kept, such as the size of a gradient that a tensor's hook reports
        values.update({**during, **values})


def clear_gradients(optimizer: Optimizer) -> None:
    # hot path: "no extension" of benchmarks/overhead.py. zero_grad() takes 5.6 us, mostly for a record of the profiler.
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


try:
    _PROFILED_STEP: Any = Optimizer.profile_hook_step(Optimizer.step).__code__
except AttributeError:  # a PyTorch that does it in another way: steps are called as they stand
    _PROFILED_STEP = object()


def step_optimizer(optimizer: Optimizer) -> None:
    """Run the step of an optimizer.

    PyTorch wraps the ``step`` of every class in a record for its profiler and calls of the hooks, which is a quarter of the
    time of a small step. Where no profiler runs and no hook is registered, the wrapped function is called by itself. A step
    that is wrapped or replaced in any other way, as schedulers of the learning rate do, is called as it stands.
    """
    # hot path: "no extension" of benchmarks/overhead.py
    function: Any = type(optimizer).step
    try:
        is_watched = (
            torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
        )
    except AttributeError:  # a PyTorch that does not have these private names
        is_watched = True
    if is_watched or "step" in vars(optimizer) or getattr(function, "__code__", None) is not _PROFILED_STEP:
        optimizer.step()
    else:
        function.__wrapped__(optimizer)
