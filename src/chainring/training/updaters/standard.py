"""StandardUpdater: fetches a batch, computes the loss and its gradients over micro-batches and ranks, and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Iterator as PythonIterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator, device_of_rank
from chainring._distributed.group import GroupCommunicator
from chainring._distributed.progress import note_iteration
from chainring._distributed.sharding import is_sharded, to_full
from chainring._hints import UPDATER_KEYWORDS, hinting
from chainring._progress import raise_unless_end
from chainring.converters import Converter, Device, concat_examples
from chainring.datasets._columns import Uncounted, count_examples, require_count
from chainring.iterators.base import Batch, Iterator
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import weighted_means
from chainring.serializers._optimizers import hyperparameters
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_optional, visit_setting
from chainring.training.updaters._arguments import (
    as_iterators,
    check_default_update,
    check_models,
    check_optimizers,
    check_settings,
)
from chainring.training.updaters._closures import (
    NO_FP16,
    Evaluation,
    check_not_sharded,
    check_returned,
    mean_loss,
    needs_closure,
    only_gradients_of,
)
from chainring.training.updaters._compiled import IS_AVAILABLE, CompiledGradients, CompiledUpdate, warn_not_compiled
from chainring.training.updaters._exchange import ExchangeWatch, ModelRanksWatch
from chainring.training.updaters._forward import (
    Loss,
    arguments,
    check_call,
    check_loss,
    loss_and_weight,
    run_backward,
)
from chainring.training.updaters._gradients import (
    RankSum,
    clear_gradients,
    list_parameters,
    rescale,
    scale,
    stash,
    step_optimizer,
    sum_over_ranks,
    unstash,
)
from chainring.training.updaters._precision import Precision, device_type_of
from chainring.training.updaters._virtual import NO_CLOSURES, Part, VirtualRanks, check_virtual_ranks
from chainring.training.updaters._wrapped import (
    WrappedModules,
    broadcast_parameters,
    check_sharding,
    list_buffers,
    warn_of_untied,
)
from chainring.training.updaters.base import Updater
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, run

T = TypeVar("T")
_NO_EPOCHS = SimpleNamespace(epoch=0, epoch_detail=0.0)
"""Stands for the main iterator of an updater that has none."""


class UpdateState:
    """The progress of an update; with virtual ranks, each of them has its own.

    Attributes:
        context: that of the current micro-batch.
        examples: the number of its examples.
        is_last_micro_batch: True if optimizers step in it.
        weights: the weights of the micro-batches by number, those of the first backward of each.
        backward_weight: the weight of the last backward; ``None`` before the first of a micro-batch.
        has_loss_weight: True if a loss came with a weight.
        total_weights: the sum over micro-batches for each optimizer.
        deferred: optimizers that step at the end of the update.
        stashed: their gradients, where an overridden update_core may add foreign ones.
        stepped: optimizers that have stepped, whose gradients the next backward clears.
        closures: those that optimizers step by, of each micro-batch.
        precedes_closure: optimizers that had gradients before they were given a closure.
    """

    __slots__ = (
        "backward_weight", "closures", "context", "deferred", "examples", "has_loss_weight", "is_last_micro_batch",
        "precedes_closure", "stashed", "stepped", "total_weights", "weights",
    )  # fmt: skip

    def __init__(self, context: UpdateContext) -> None:
        self.context = context
        self.examples: Any = 1
        self.is_last_micro_batch = True
        self.weights: dict[int, Any] = {}
        self.backward_weight: Any = None
        self.has_loss_weight = False
        self.total_weights: dict[str, Any] = {}
        self.deferred: list[str] = []
        self.stashed: dict[Tensor, Tensor] = {}
        self.stepped: list[Optimizer] = []
        self.closures: dict[str, list[Evaluation]] = {}
        self.precedes_closure: set[str] = set()


class StandardUpdater(Updater):
    """Fetches a batch, computes the loss and its gradients, and runs a step of the optimizer.

    To change what an update computes, subclass it and write ``update_core`` from `next_batch`, `autocast`, `backward` and
    `step`: precision, gradient accumulation and communication stay as they are. With ``accumulate=k`` (gradient
    accumulation), one update runs ``update_core`` k times, and ``step`` takes effect in the last of them, on the
    gradients that were there at each call of it.

    An optimizer whose ``step`` needs a closure, such as ``torch.optim.LBFGS``, is given one that computes the loss of the
    same batch, or of the same k micro-batches, each time it is called. The reported values are those of the first call in
    an update: the loss before the step.

    The micro-batches of an update, and those of other ranks, are averaged by weight: the number of examples, or what the
    loss returns as ``"weight"`` beside ``"loss"``. So k micro-batches of b examples are equivalent to one batch of k * b
    examples.

    Args:
        iterator: the iterator that returns batches; a ``DataLoader`` or another iterable of batches is wrapped. Like
            ``optimizer`` and ``model``, it is either a single object, which is called ``"main"``, or a mapping of several
            by name. ``None`` if an update needs no data, for example to minimize a function: the model, or
            ``loss_func(model)``, is then called without inputs, epochs stay at 0, and each update has weight 1 in a mean.
        optimizer: the optimizer of the models' parameters.
        model: the model; it is moved to ``device``. Called with a batch, it returns the loss, unless there is a
            ``loss_func``.
        converter: ``converter(batch, device)`` turns a batch of examples into tensors.
        device: ``None`` leaves data and models where they are; a negative integer or ``"cpu"`` is the CPU; any other
            integer, or a string such as ``"cuda:1"``, is that accelerator (GPU); ``"auto"`` is the accelerator if there
            is one (with several ranks, that of the rank), otherwise the CPU.
        loss_func: ``loss_func(model, *inputs)`` returns the loss, or a mapping that has ``"loss"``, all of whose scalars
            are reported under the model's name.
        precision: the precision of the forward pass: ``"fp32"`` uses the dtypes of the model; ``"bf16"`` and ``"fp16"``
            are mixed precision by autocast, ``"fp16"`` with a loss scaler.
        accumulate: the number of micro-batches in an update (gradient accumulation).
        callbacks: functions called around the stages of an update.
        comm: the communicator of the ranks that train together.
        compile: True to compile the loss, its gradients and the steps into one function with ``torch.compile``, captured
            as a graph on an NVIDIA GPU; results are equal to float tolerance. An optimizer with ``fused=True`` steps with
            its own kernel, outside of that function. With gradient accumulation, ranks, fp16, or callbacks other than
            ``batch_on_finish``, only the loss and its gradients are compiled, and not captured; ranks then exchange
            gradients after the backward. Compilation takes seconds before the first update, and before the first batch of
            each other shape. Virtual ranks, closures, overridden stages, DDP, ``fully_shard`` and other sharded
            parameters, a model that cannot be compiled, and any update with torch before 2.13 run uncompiled, and a
            warning says why. An update that `dump_graph` or a `Profiler` observes, or that has callbacks between
            forward and backward, runs uncompiled without a warning.
        virtual_ranks: the number of parts in which each update is computed, for any number of ranks; they are summed in a
            fixed order, so that parameters, optimizer state, log rows and snapshots are equal to the last bit on 1 to
            ``virtual_ranks`` ranks. Virtual rank v computes the rows ``batch[v::virtual_ranks]`` with its own random
            numbers and batch statistics, and runs ``update_core`` once; all are joined in `step`.
        accumulate_across_epochs: False to end an update early when an epoch ends, with the micro-batches fetched so far,
            so that an epoch of n batches has ceil(n / accumulate) updates. Otherwise the next epoch completes the update:
            e epochs have floor(e * n / accumulate) updates, and an epoch may end in the middle of one.

    Attributes:
        callbacks: the `UpdateCallbacks`, to which an extension may add its own.

    Raises:
        TypeError: an iterator, an optimizer or a model has the wrong type.
        ValueError: an optimizer has a parameter that belongs to no registered model, or is a ``ZeroRedundancyOptimizer``,
            or a setting is out of range, or a batch has fewer examples than there are ranks.

    Example::

        model = chainring.nn.Classifier(network)
        optimizer = torch.optim.Adam(model.parameters())
        updater = StandardUpdater(SerialIterator(dataset, 32), optimizer, model, accumulate=4)
    """

    @hinting(UPDATER_KEYWORDS)
    def __init__(
        self,
        iterator: Iterable[Any] | Mapping[str, Iterable[Any]] | None,
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module],
        *,
        converter: Converter = concat_examples,
        device: Device = None,
        loss_func: Callable[..., Loss] | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        accumulate: int = 1,
        callbacks: UpdateCallbacks | None = None,
        comm: Communicator | None = None,
        compile: bool = False,  # noqa: A002
        accumulate_across_epochs: bool = True,
        virtual_ranks: int | None = None,
    ) -> None:
        self._models = _Registered("model", check_models(model))
        self._optimizers = _Registered("optimizer", check_optimizers(optimizer, self._models))
        self._iterators = _Registered("iterator", as_iterators(iterator))
        self.constructed = {name: hyperparameters(optimizer) for name, optimizer in self._optimizers.items()}
        check_settings(converter, loss_func, accumulate, accumulate_across_epochs, callbacks)
        if not self._overrides("update_core"):
            check_default_update(self._iterators, self._models, self._optimizers)
        self.converter = converter
        self.loss_func, self.virtual_ranks, self.compile = loss_func, virtual_ranks, compile
        self.accumulate, self.accumulate_across_epochs = accumulate, accumulate_across_epochs
        self.callbacks = UpdateCallbacks() if callbacks is None else callbacks
        self.comm = Communicator() if comm is None else comm
        self.device = device_of_rank(device, self.comm)
        check_sharding(self.comm, self._models)
        self._communicates = comm is not None
        self._virtual = None if virtual_ranks is None else self._make_virtual_ranks(virtual_ranks)
        self._prepare_iterators()
        for module in self._models.values() if self.device is not None else ():
            module.to(self.device)
        self._precision = Precision(precision, device_type_of(self._models.values()), self.comm)
        self._wrapped = WrappedModules(list(self._models.values()))
        self._choose_path(compile)
        self._begin_update()

    def _prepare_iterators(self) -> None:
        self._epoch_source = self._iterators.get("main", _NO_EPOCHS)
        self._rewindable = [source for source in self._iterators.values() if hasattr(source, "mark")]
        for name, source in self._iterators.items():
            if isinstance(source, Iterator):
                source.name = name
                source.use_converter(self.converter)
                if self.virtual_ranks is not None:
                    source.use_virtual_ranks(self.virtual_ranks)
                source.check_share(self.comm.size)

    def _make_virtual_ranks(self, count: int) -> VirtualRanks:
        check_virtual_ranks(count, self.comm, self._models, self._optimizers)
        goes_on = self._overrides("update_core", "step")
        return VirtualRanks(count, self.comm, self._models.values(), self._iterators, goes_on)

    def _choose_path(self, compiles: bool) -> None:
        """Decide which steps an update needs; that follows from the settings."""
        self._has_ranks = self.comm.world.size > 1
        overrides_core = self._overrides("update_core")
        overrides_stage = self._overrides("update_core", "next_batch", "autocast", "backward", "step")
        # True if there is more than one micro-batch or rank, or virtual rank, to average.
        self._averages = self.accumulate > 1 or self._communicates or self._virtual is not None
        # True if an update may take several batches, so that it counts epochs from its own beginning to its end.
        self._spans_batches = self.accumulate > 1 or overrides_core
        # True if an update that the end of an epoch cuts short is made of the micro-batches that there are.
        self._ends_with_epoch = self.accumulate > 1 and not self.accumulate_across_epochs
        # True if gradients wait apart for the last micro-batch, because an overridden update_core may add foreign ones.
        self._stashes = self.accumulate > 1 and overrides_core
        watches = (self._has_ranks or self._virtual is not None) and self._overrides("update_core", "step")
        self._exchange_watch = ExchangeWatch(self._optimizers) if watches else None
        is_shared = self.comm.world.size > self.comm.size
        self._model_watch = ModelRanksWatch(self.comm, self._models) if is_shared else None
        check_not_sharded(self._optimizers)
        self._steps_by_closure = any(map(needs_closure, self._optimizers.values()))
        if self._steps_by_closure and self._precision.scaler and not overrides_core:
            raise ValueError(NO_FP16)
        # True if nothing but the last backward of an update adds to gradients, which are then sent while it runs.
        adds_more = overrides_stage or self._steps_by_closure or bool(self._wrapped.parameters)
        is_plain = not any(map(is_sharded, list_parameters(self._optimizers.values())))
        sends_beside = self.comm.size > 1 and isinstance(self.comm, GroupCommunicator)
        self._overlaps = sends_beside and self._virtual is None and is_plain and not adds_more
        self._begun: RankSum | None = None
        self._uses_fast_path = not (self._averages or overrides_stage or self._precision.scaler or self._steps_by_closure)
        self._update_straight = self._update_fast if self._iterators else self._update_without_data
        # True if a step has nothing to do but that of the optimizer, beside callbacks.
        self._steps_at_once = not (self._averages or self._precision.scaler or self._has_ranks)
        self._finish_step = self._step_optimizers if self._virtual is None else self._meet
        # hot path: "no extension" of benchmarks/overhead.py. A context manager that does nothing is three calls.
        is_fp32 = self._precision.name == "fp32"
        self._forward = self._compute_loss if is_fp32 else self._compute_loss_in_autocast
        self._is_plain_forward = is_fp32 and not self._overrides("autocast")
        self._compute: Callable[[Any], Any] = self._compute_eagerly
        self._compiled_gradients: CompiledGradients | None = None
        if compiles:
            self._compile(self._find_not_compiled(overrides_stage, is_plain))

    def _compile(self, obstacle: str | None) -> None:
        """Compile updates, or at least their gradients, unless there is an obstacle, which a warning then names."""
        if obstacle:
            warn_not_compiled(obstacle)
        else:
            model = self._models["main"]
            forward = model if self.loss_func is None else partial(self.loss_func, model)
            optimizers = list(self._optimizers.values())
            self._compiled_gradients = CompiledGradients(forward, self._precision, optimizers, self._averages)
            if self._uses_fast_path:
                self._compute = CompiledUpdate(self._compute, forward, self._precision, optimizers)

    def _find_not_compiled(self, overrides_stage: bool, is_plain: bool) -> str | None:
        """Return why updates are not compiled, or ``None``."""
        if overrides_stage or self._virtual is not None or self._steps_by_closure:
            return "virtual ranks, closures and your own stages are left as they are"
        if self._wrapped.parameters or not is_plain:
            return "DDP, fully_shard and sharded parameters exchange between ranks inside of the model"
        if not IS_AVAILABLE:
            return f"an update is compiled by torch 2.13 or newer, and this is {torch.__version__}"
        return None

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(StandardUpdater, name) for name in names)

    def start(self) -> None:
        """Broadcast the models of rank 0 to all ranks, and let DDP build its buckets."""
        super().start()
        if self.comm.world.size > 1:
            broadcast_parameters(self.comm, list(self._models.values()), self._wrapped)
        for model in self._models.values() if self._model_watch is not None and self.iteration == 0 else ():
            warn_of_untied(self.comm, model)
        hooks = self._wrapped.hook_states
        if hooks is not None:
            hooks.warn()
        with nullcontext() if hooks is None else hooks.preserved():
            if self._virtual is not None:
                self._virtual.start()
                self._wrapped.set_gradient_sync(False)
            elif self.comm.size > 1:
                self._wrapped.build_ddp_buckets()

    # --- an update ---

    def update(self) -> None:
        """Run one update. If it fails, the iterators return to where it began, so that they agree with ``iteration``.

        Raises:
            StopIteration: raised by an iterator of the updater: the data have run out.
            RuntimeError: anything else has raised ``StopIteration``; or, on several ranks, the update has changed
                parameters without exchanging gradients between them.
        """
        marks = [(source, source.mark()) for source in self._rewindable]
        try:
            if self._uses_fast_path and not (self.callbacks.are_within and self._compiled_gradients is not None):
                self._update_straight()
            else:
                self._update_in_stages()
        except BaseException as error:
            for source, mark in marks:
                source.return_to(mark)
            if isinstance(error, StopIteration):
                raise_unless_end(self, error)
            raise
        self.iteration += 1

    def _update_fast(self) -> None:
        """Run an update of one micro-batch, whose gradients are neither averaged nor scaled."""
        # hot path: "no extension" of benchmarks/overhead.py. The stages are a fifth of the time of a small update.
        has_callbacks = self.callbacks.are_any
        if has_callbacks:
            self._begin_with_callbacks()
        batch = next(self._iterators["main"])
        inputs = self.converter(batch, self.device)
        if has_callbacks:
            weight = self._compute_with_callbacks(self._finish_batch(inputs, count_examples(batch)))
        else:
            weight = self._compute(inputs)
        if weight is None:
            weight = batch.weight if type(batch) is Batch else require_count(count_examples(batch))
        self.weight = weight

    def _update_without_data(self) -> None:
        if self.callbacks.are_any:
            self._begin_with_callbacks()
            weight = self._compute_with_callbacks(())
        else:
            weight = self._compute(())
        self.weight = 1 if weight is None else weight

    def _compute_eagerly(self, inputs: Any) -> Any:
        for optimizer in self._optimizers.values():
            clear_gradients(optimizer)
        loss, weight = self._forward(self._models["main"], inputs)
        check_loss(loss)
        run_backward(loss)
        for optimizer in self._optimizers.values():
            step_optimizer(optimizer)
        return weight

    def _begin_with_callbacks(self) -> None:
        """Begin an update whose callbacks may add to the gradients, from the first on."""
        if self._compiled_gradients is None:  # a compiled update writes its gradients into tensors that stay
            for optimizer in self._optimizers.values():
                clear_gradients(optimizer)
        self._state = UpdateState(UpdateContext(self, self.iteration, 0))
        self.weight = 0

    def _compute_with_callbacks(self, inputs: Any) -> Any:
        """Compute an update that has begun with callbacks; those of communication are for several ranks."""
        # hot path: "a callback" of benchmarks/overhead.py
        if self._compiled_gradients is not None:  # then there are only those of the batch
            return self._compute(inputs)
        callbacks, context = self.callbacks, self._state.context
        run(callbacks.forward_on_start, context)
        loss, weight = self._forward(self._models["main"], inputs)
        context.loss = loss
        run(callbacks.forward_on_finish, context)
        check_loss(loss)
        run(callbacks.backward_on_start, context)
        run_backward(loss)
        run(callbacks.backward_on_finish, context)
        run(callbacks.update_on_start, context)
        for optimizer in self._optimizers.values():
            step_optimizer(optimizer)
        run(callbacks.update_on_finish, context)
        return weight

    def _update_in_stages(self) -> None:
        for optimizer in self._optimizers.values():
            clear_gradients(optimizer)
        if self._exchange_watch is not None:
            self._exchange_watch.begin()
        self._begin_update()
        if self._virtual is None:
            self._compute_micro_batches()
        else:
            self._compute_virtual_ranks(self._virtual)
        if not self._steps_at_once:
            self._finish_update()
        if self._spans_batches:
            self.previous_epoch_detail = self._epoch_detail_before
            self.is_new_epoch = getattr(self._iterators.get("main"), "epoch", 0) != self._epoch_before

    def _finish_update(self) -> None:
        """Do what is left of an update that averages gradients or scales its loss, or of several ranks."""
        if self._averages and self._state.has_loss_weight and (observation := current_observation()) is not None:
            observation["main/weight"] = self._total_weight  # of all micro-batches and ranks, and not their mean
        if self._precision.scaler is not None:
            self._precision.scaler.update()
        if self._exchange_watch is not None:
            has_weighed = self._virtual is not None or self._state.backward_weight is not None
            self._exchange_watch.check(self.comm, self._models, self._wrapped, has_weighed)
        if self.comm.size > 1 and self._virtual is None and (buffers := list_buffers(list(self._models.values()))):
            self.comm.broadcast(buffers)
        if self._has_ranks:
            note_iteration(self.iteration + 1)

    def _begin_update(self) -> None:
        self._state = UpdateState(UpdateContext(self, self.iteration, 0))
        self.weight = 0
        main = self._iterators.get("main")
        if self._averages:
            # The sizes of the micro-batches are not known before the last has come. So each loss is multiplied by its weight
            # over that of a full update, and the sums of the gradients are corrected once, at the end.
            self._reference_weight = self.accumulate * getattr(main, "batch_size", 1)
        if self._spans_batches:
            self._epoch_before = getattr(main, "epoch", 0)
            self._epoch_detail_before = getattr(main, "epoch_detail", None)

    def _compute_micro_batches(self) -> None:
        if self.accumulate == 1:
            if self._virtual is not None:
                self._virtual.seed_generators(0)
            self.update_core()
            self.weight = require_count(self._state.weights.get(0, self._state.examples))
        else:
            self._accumulate()

    # --- virtual ranks ---

    def _compute_virtual_ranks(self, virtual: VirtualRanks) -> None:
        """Compute what an update consists of for each virtual rank of this rank."""
        virtual.begin(self.iteration, self._step_optimizers, self._activate)
        if not self._overrides("update_core"):
            self._fetch_micro_batches(virtual)
        weight = virtual.run(self._compute_part)
        # Every rank has what all have reported, and in a mean over ranks one of them counts.
        self.weight = weight if self.comm.rank == 0 else 0

    def _fetch_micro_batches(self, virtual: VirtualRanks) -> None:
        main = self._iterators.get("main")
        for _ in range(self.accumulate if main is not None else 0):
            has_ended = not virtual.fetch("main", main)
            if has_ended or (self._ends_with_epoch and getattr(main, "epoch", 0) != self._epoch_before):
                break

    def _activate(self, part: Part) -> None:
        if part.state is None:
            part.state = UpdateState(UpdateContext(self, self.iteration, 0))
        self._state = part.state

    def _compute_part(self, part: Part) -> None:
        self._compute_micro_batches()
        part.weight = self.weight

    def _meet(self, names: list[str]) -> None:
        """Let optimizers step as soon as all virtual ranks have come to that step."""
        assert self._virtual is not None
        optimizers = [self.get_optimizer(name) for name in names]
        for optimizer in optimizers if self._state.stashed else ():
            unstash(optimizer, self._state.stashed)
        self._virtual.meet(names, optimizers, [self._state.total_weights.pop(name) for name in names])
        self._state.stepped += optimizers

    def _accumulate(self) -> None:
        """Run the micro-batches of an update; if the data end after some, the update is made of those."""
        state, outer = self._state, current_observation()
        observed: list[dict[str, Any]] = []
        for micro_step in range(self.accumulate):
            before, state.context = state.context, UpdateContext(self, self.iteration, micro_step)
            state.is_last_micro_batch = micro_step == self.accumulate - 1
            observation: dict[str, Any] = {}
            self._discard_stale_gradients()
            # Stashed gradients are exchanged each time, since the last backward does not see them.
            if self._virtual is None:
                self._wrapped.set_gradient_sync(state.is_last_micro_batch or self._stashes)
            if self._virtual is not None:
                self._virtual.seed_generators(micro_step)
            state.backward_weight = None
            try:
                with nullcontext() if outer is None else report_scope(observation):
                    self.update_core()
            except StopIteration as error:
                if not observed:
                    raise
                raise_unless_end(self, error)
                state.context = before
                self._finish_early()
                break
            state.weights.setdefault(micro_step, state.examples)  # of an update_core that does without `backward`
            observed.append(observation)
            if self._ends_with_epoch and self._epoch_has_ended():
                self._finish_early()
                break
        weights = [require_count(state.weights[micro_step]) for micro_step in range(len(observed))]
        self.weight = sum(weights)
        if outer is not None:
            outer.update(weighted_means(list(zip(observed, weights, strict=True))))

    def _finish_early(self) -> None:
        """Let the optimizers step that wait for a last micro-batch, which does not come."""
        state = self._state
        state.is_last_micro_batch = True
        names = [name for name in state.deferred if name in state.total_weights and name not in state.closures]
        if not (names or state.closures):
            return
        self._discard_stale_gradients()
        if self._virtual is None:
            self._exchange_late()
        if names:
            self._finish_step(names)
        for name in list(state.closures):
            self._finish_step_by_closure(name)

    def _epoch_has_ended(self) -> bool:
        main = self._iterators.get("main")
        # The first virtual rank of a block fetches all batches of an update, before the others have had theirs.
        epoch = getattr(main, "epoch", 0) if self._virtual is None else self._virtual.part.epoch
        return bool(epoch != self._epoch_before)

    def _discard_stale_gradients(self) -> None:
        """Clear gradients that were added after an optimizer's step: a generator's loss also reaches its critic."""
        if self._stashes:
            for name in self._state.deferred:
                clear_gradients(self._optimizers[name])

    def _exchange_late(self) -> None:
        """Let wrapped models exchange the gradients that they have accumulated, as the last micro-batch would have done."""
        self._wrapped.set_gradient_sync(True)
        if self.comm.size > 1 and self._wrapped.parameters and not self._stashes and not self._state.closures:
            unreported = nullcontext() if current_observation() is None else report_scope({})
            with unreported, self._precision.autocast():
                loss, _ = self._compute_loss(self._models["main"], self._state.context.batch)
            run_backward(loss * 0)

    # --- the stages of a micro-batch, for `update_core` ---

    def update_core(self) -> None:
        """Process one micro-batch: fetch it, compute its loss and gradients, and step every optimizer."""
        batch = self.next_batch() if self._iterators else ()
        if self._steps_by_closure:
            self._step_all_by_closure(partial(self._compute_gradients, batch))
            return
        self._compute_gradients(batch)
        if len(self._optimizers) == 1:
            (name,) = self._optimizers
            self.step(name)
        else:
            self._step(list(self._optimizers))

    def _compute_gradients(self, batch: Any) -> Any:
        callbacks, compiled = self.callbacks, self._compiled_gradients
        is_whole = not (callbacks.forward_on_finish or callbacks.backward_on_start)  # without a stage inside
        if compiles := compiled is not None and compiled.is_of_use and is_whole:
            run(callbacks.forward_on_start, self._state.context)
            if (loss := self._add_compiled_gradients(compiled, batch)) is not None:
                run(callbacks.backward_on_finish, self._state.context)
                return loss
        if self._is_plain_forward and not callbacks.forward_on_start and is_whole:
            loss, weight = self._compute_loss(self._models["main"], batch)
        else:
            with self._precision.autocast() if compiles else self.autocast():
                loss, weight = self._compute_loss(self._models["main"], batch)
                self._state.context.loss = loss
        self._state.has_loss_weight = self._state.has_loss_weight or weight is not None
        self.backward(loss, weight)
        return loss

    def _add_compiled_gradients(self, compiled: CompiledGradients, batch: Any) -> Any:
        """Return the loss, or ``None`` if its gradients cannot be compiled."""
        state = self._state
        examples = 1 if isinstance(state.examples, Uncounted) else state.examples
        found = compiled.add(batch, 1 / self._reference_weight if self._averages else 1.0, examples)
        if found is None:
            return None
        state.context.loss, weight = found
        state.has_loss_weight = state.has_loss_weight or weight is not None
        self._note_weight(weight)
        return state.context.loss

    def _step_all_by_closure(self, closure: Callable[[], Any]) -> None:
        for name in self._optimizers:
            self.step(name, closure)

    def next_batch(self, name: str = "main") -> Any:
        """Return the next batch of an iterator, converted to tensors on the device.

        Raises:
            StopIteration: the data have run out.
            KeyError: there is no iterator of that name.
        """
        iterator = self._iterators[name]
        if self._virtual is None:
            batch = next(iterator)
            examples = batch.weight if type(batch) is Batch else count_examples(batch)
        else:
            batch, examples = self._virtual.take(name, iterator)
        if name == "main":
            self._state.examples = examples
            if self._ends_with_epoch and self._epoch_has_ended():  # known before the backward in which ranks exchange
                self._state.is_last_micro_batch = True
                if self._virtual is None:
                    self._wrapped.set_gradient_sync(True)
        return self._finish_batch(self.converter(batch, self.device), examples)

    def _finish_batch(self, converted: Any, examples: Any) -> Any:
        """Call the callbacks of a converted batch; return the batch, which they may have replaced."""
        context = self._state.context
        context.batch, context.examples = converted, None if isinstance(examples, Uncounted) else examples
        if self.callbacks.batch_on_finish:
            run(self.callbacks.batch_on_finish, context)
        return context.batch

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context manager of a forward pass, which sets its precision and runs the callbacks of that stage."""
        callbacks = self.callbacks
        if callbacks.forward_on_start or callbacks.forward_on_finish:
            return self._forward_stage()
        return self._precision.autocast()

    @contextmanager
    def _forward_stage(self) -> PythonIterator[None]:
        run(self.callbacks.forward_on_start, self._state.context)
        with self._precision.autocast():
            yield
        run(self.callbacks.forward_on_finish, self._state.context)

    def _compute_loss(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the loss of a converted batch, and its weight if it comes with one."""
        function = self.loss_func
        # hot path: "no extension" of benchmarks/overhead.py. Nearly every batch is a tuple.
        args, kwargs = (batch, {}) if type(batch) is tuple else arguments(batch)
        try:
            output = model(*args, **kwargs) if function is None else function(model, *args, **kwargs)
        except TypeError:
            check_call(model, function, batch)  # says what is wrong, if it is the call
            raise
        return loss_and_weight(output, "main")

    def _compute_loss_in_autocast(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        with self._precision.autocast():
            return self._compute_loss(model, batch)

    def backward(self, loss: Tensor, weight: Any = None, *, retain_graph: bool = False) -> None:
        """Compute the gradients of a loss, and add them to those of the parameters.

        Args:
            loss: a scalar, the mean over what ``weight`` counts.
            weight: the weight of this micro-batch relative to the others and to those of other ranks, by default its
                number of examples; a number, or a 0-dimensional tensor, which is not read from the device.
            retain_graph: True to keep the graph, for another backward through a part of it.

        Raises:
            TypeError, ValueError: the loss is not a scalar tensor that depends on a parameter.
        """
        check_loss(loss)
        loss = loss if type(loss) is Tensor else to_full(loss)
        state = self._state
        weight = self._note_weight(weight)
        if state.stepped:
            self._clear_stepped()
        context, callbacks, scaler = state.context, self.callbacks, self._precision.scaler
        context.loss = loss
        if callbacks.backward_on_start:
            run(callbacks.backward_on_start, context)
        if self._averages:
            if isinstance(weight, Tensor):  # a count, in the precision of the loss
                weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
            share = weight / self._reference_weight
            loss = loss if type(share) is float and share == 1.0 else loss * share
        loss = loss if scaler is None else scaler.scale(loss)
        # hot path: "in stages" of benchmarks/overhead.py, here and where optimizers step: an empty context is three calls
        if self._overlaps or self._virtual is not None:
            with self._sending():
                run_backward(loss, retain_graph)
        else:
            run_backward(loss, retain_graph)
        if callbacks.backward_on_finish:
            run(callbacks.backward_on_finish, context)

    def _note_weight(self, weight: Any) -> Any:
        """Return the weight of this micro-batch: that of its loss, by default its number of examples."""
        state = self._state
        if weight is None or (type(state.examples) is int and state.examples == 0):  # a repeated example never counts
            weight = require_count(state.examples)
        state.weights.setdefault(state.context.micro_step, weight)
        state.backward_weight = weight
        return weight

    def _sending(self) -> AbstractContextManager[None]:
        """Return the context of a backward of ranks or virtual ranks, in which they send gradients that are final."""
        if self._virtual is not None:
            return self._virtual.backward(self._list_stepping())
        stepping = [] if self.callbacks.comm_on_start else self._list_stepping()
        if not stepping:
            return nullcontext()
        self._begun = RankSum(self.comm, stepping, frozenset())
        return self._begun.backward()

    def _list_stepping(self) -> list[Optimizer]:
        """Return the optimizers that step after this backward, if its gradients are final in a default update."""
        is_final = self._state.is_last_micro_batch and not self.callbacks.backward_on_finish
        return list(self._optimizers.values()) if is_final else []

    def _clear_stepped(self) -> None:
        """Clear the gradients of a step before, in an update of several."""
        for optimizer in self._state.stepped:
            clear_gradients(optimizer)
        self._state.stepped = []

    def step(self, name: str = "main", closure: Callable[[], Tensor] | None = None) -> None:
        """Step an optimizer in the last micro-batch: exchange gradients, unscale, run callbacks, ``optimizer.step()``.

        Its gradients can be read until the next backward or update, which clears them.

        A closure is the same as in PyTorch: it computes the loss, calls ``self.backward(loss)``, or ``loss.backward()``,
        and returns the loss. The updater does the rest: before each call the optimizer's gradients are cleared; after it
        they are exchanged between ranks, and the callbacks of communication and ``update_on_start`` run. With gradient
        accumulation, each call runs the closures of all micro-batches. The optimizer gets the mean loss over
        micro-batches and ranks, the same on every rank. Gradients of a `backward` before ``step`` are made final before
        the optimizer steps, for methods that start from them. Values are reported in the first call only.

        Args:
            name: the name of the optimizer.
            closure: for an optimizer that computes the loss itself, such as ``torch.optim.LBFGS``.

        Raises:
            KeyError: there is no optimizer of that name.
            TypeError: the closure cannot be called, or does not return one number.
            ValueError: there is a closure and the precision is ``"fp16"``.
            RuntimeError: with accumulation or ranks, the loss did not go through `backward`.

        Example::

            class Minimizer(StandardUpdater):
                def update_core(self):
                    x, t = self.next_batch()

                    def closure():
                        loss = mse_loss(self.get_model("main")(x), t)
                        self.backward(loss)
                        return loss

                    self.step(closure=closure)
        """
        if closure is None and self._steps_at_once and not self.callbacks.are_any:
            # hot path: "in stages" of benchmarks/overhead.py, where each function that is called takes half a microsecond
            step_optimizer(optimizer := self.get_optimizer(name))
            self._state.stepped.append(optimizer)
        elif closure is None:
            self._step([name])
        elif self._virtual is not None:
            raise ValueError(NO_CLOSURES)
        else:
            self._step_by_closure(name, closure)

    def _step(self, names: list[str]) -> None:
        if self._averages:
            self._add_total_weights(names)
        if self._state.is_last_micro_batch:
            self._finish_step(names)
            return
        self._state.deferred += [name for name in names if name not in self._state.deferred]
        if self._stashes:
            for name in names:
                stash(self.get_optimizer(name), self._state.stashed, self._wrapped.in_buckets)

    def _add_total_weights(self, names: list[str]) -> None:
        if self._state.backward_weight is None:
            raise RuntimeError(
                "step() needs a self.backward(loss) before it, which weights this micro-batch relative to those of all "
                "ranks; write self.backward(loss) in update_core, not loss.backward()"
            )
        for name in names:
            self._state.total_weights[name] = self._state.total_weights.get(name, 0) + self._state.backward_weight

    def _step_optimizers(self, names: list[str]) -> None:
        """Run the stages after the last backward: communication, unscaling, the steps of the optimizers."""
        scaler, optimizers = self._precision.scaler, list(map(self.get_optimizer, names))
        self._finish_gradients(names, optimizers)
        step = step_optimizer if scaler is None else scaler.step
        if self._exchange_watch is None:
            for optimizer in optimizers:
                step(optimizer)
        else:
            with self._exchange_watch.stepping():
                for optimizer in optimizers:
                    step(optimizer)
        if self.callbacks.update_on_finish:
            run(self.callbacks.update_on_finish, self._state.context)
        self._state.stepped += optimizers

    def _stepping(self) -> AbstractContextManager[None]:
        """Return the context of steps whose gradients have been exchanged."""
        return nullcontext() if self._exchange_watch is None else self._exchange_watch.stepping()

    def _finish_gradients(self, names: list[str], optimizers: list[Optimizer]) -> None:
        scaler = self._precision.scaler
        if self._averages:
            self._average_gradients(names, optimizers)
        if self._model_watch is not None:
            self._model_watch.check(self.iteration, self._state.context.loss, optimizers)
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if self.callbacks.update_on_start:
            # The gradients of the others are not final: another backward may have reached them, on each rank by itself.
            if len(optimizers) == len(self._optimizers):
                run(self.callbacks.update_on_start, self._state.context)
            else:
                with only_gradients_of(optimizers, self._optimizers.values()):
                    run(self.callbacks.update_on_start, self._state.context)

    def _step_by_closure(self, name: str, closure: Callable[[], Any]) -> None:
        optimizer = self.get_optimizer(name)
        state = self._state
        if not callable(closure):
            raise TypeError(f"a closure is a function without arguments that returns the loss, got {type(closure).__name__}")
        if self._precision.scaler is not None:
            raise ValueError(NO_FP16)
        evaluation = Evaluation(closure, state.context, state.examples, current_observation())
        state.closures.setdefault(name, []).append(evaluation)
        if state.backward_weight is not None:
            state.precedes_closure.add(name)
            if self._averages:
                self._add_total_weights([name])
        if state.is_last_micro_batch:
            self._finish_step_by_closure(name)
            return
        state.deferred += [] if name in state.deferred else [name]
        if self._stashes:
            stash(optimizer, state.stashed, self._wrapped.in_buckets)

    def _finish_step_by_closure(self, name: str) -> None:
        """Let an optimizer step that calls the closures of all micro-batches as often as it likes."""
        optimizer, evaluations = self.get_optimizer(name), self._state.closures.pop(name)
        if name in self._state.precedes_closure:
            self._state.precedes_closure.remove(name)
            self._finish_gradients([name], [optimizer])
        is_first = True

        def closure() -> Any:
            nonlocal is_first
            was_first, is_first = is_first, False
            return self._evaluate(name, optimizer, evaluations, was_first)

        with self._stepping():
            optimizer.step(closure)
        if self.callbacks.update_on_finish:
            run(self.callbacks.update_on_finish, self._state.context)
        self._state.stepped.append(optimizer)

    def _evaluate(self, name: str, optimizer: Optimizer, evaluations: list[Evaluation], is_first: bool) -> Any:
        """Compute the gradients of an optimizer by its closures, and return the mean loss."""
        state = self._state
        self._clear_stepped()
        before = state.context, state.examples, state.backward_weight
        with torch.enable_grad(), only_gradients_of([optimizer], self._optimizers.values()):
            losses = [self._call_closure(name, optimizer, evaluation, is_first) for evaluation in evaluations]
            unreported = nullcontext() if is_first or current_observation() is None else report_scope({})
            with unreported:
                self._finish_gradients([name], [optimizer])
        state.context, state.examples, state.backward_weight = before
        return mean_loss(self.comm, losses, list_parameters([optimizer])[0].device)

    def _call_closure(self, name: str, optimizer: Optimizer, evaluation: Evaluation, is_first: bool) -> tuple[Any, Any]:
        """Return the loss of a micro-batch and its weight; its gradients are added to those of the micro-batches before."""
        state = self._state
        state.context, state.examples, state.backward_weight = (
            evaluation.context,
            evaluation.examples,
            None,
        )
        clear_gradients(optimizer)
        if is_first:
            state.weights.pop(evaluation.context.micro_step, None)
        observation = evaluation.observation
        with nullcontext() if observation is None else report_scope(observation if is_first else {}):
            loss = check_returned(evaluation.closure())
        if state.backward_weight is None:
            self._weigh_gradients(optimizer)
        if self._averages:
            self._add_total_weights([name])
            stash(optimizer, state.stashed, self._wrapped.in_buckets)
        return loss, state.backward_weight

    def _weigh_gradients(self, optimizer: Optimizer) -> None:
        """Weigh the gradients of a closure that has called ``loss.backward()``, as `backward` weighs a loss."""
        if self._wrapped.parameters and self.comm.size > 1:
            raise RuntimeError(
                "DDP and fully_shard exchange gradients in the backward, before which self.backward(loss) weighs the loss; "
                "write self.backward(loss) in the closure, not loss.backward()"
            )
        state = self._state
        state.backward_weight = weight = require_count(state.examples)
        state.weights.setdefault(state.context.micro_step, weight)
        if self._averages:
            scale(optimizer, weight / self._reference_weight)

    def _average_gradients(self, names: list[str], optimizers: list[Optimizer]) -> None:
        """Turn the weighted sums of gradients into means, over the micro-batches and over the ranks."""
        exchanged = self._wrapped.parameters
        if self._communicates:
            if self._exchange_watch is not None:
                self._exchange_watch.has_exchanged = True
            run(self.callbacks.comm_on_start, self._state.context)
        if self._virtual is not None:
            totals, exchanged = self._virtual.sum_gradients(optimizers), set()
        else:
            for optimizer in optimizers if self._state.stashed else ():
                unstash(optimizer, self._state.stashed)
            totals = [self._state.total_weights.pop(name) for name in names]
            if self._communicates:
                begun, self._begun = self._begun, None
                totals = sum_over_ranks(self.comm, optimizers, totals, exchanged, begun)
        if self._communicates:
            run(self.callbacks.comm_on_finish, self._state.context)
        self._total_weight = totals[0]
        for optimizer, total in zip(optimizers, totals, strict=True):
            rescale(optimizer, self._reference_weight, total, exchanged, self.comm.size)

    # --- iterators, models and optimizers by name; progress ---

    # hot path: "an idle extension more" of benchmarks/overhead.py. Every epoch trigger asks, so without a Python frame.
    epoch = property(attrgetter("_epoch_source.epoch"))
    epoch_detail = property(attrgetter("_epoch_source.epoch_detail"))

    @property
    def virtual_seed(self) -> int | None:
        """The number from which the random numbers of virtual ranks are derived: rank 0's seed when the run was started."""
        return None if self._virtual is None else self._virtual.seed

    @property
    def precision(self) -> str:
        """The precision of the forward pass, ``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self._precision.name

    @property
    def counts_epochs(self) -> bool:
        counted = (type(self).epoch, type(self).epoch_detail) != (StandardUpdater.epoch, StandardUpdater.epoch_detail)
        return counted or self._epoch_source is not _NO_EPOCHS

    def get_iterator(self, name: str) -> Any:
        return self._iterators[name]

    def get_all_iterators(self) -> dict[str, Any]:
        return dict(self._iterators)

    def get_model(self, name: str) -> nn.Module:
        return self._models[name]

    def get_all_models(self) -> dict[str, nn.Module]:
        return dict(self._models)

    def get_optimizer(self, name: str) -> Optimizer:
        return self._optimizers[name]

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        return dict(self._optimizers)

    # --- state ---

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        span = serializer("span", [self.previous_epoch_detail, self.is_new_epoch])
        if self._spans_batches and not isinstance(serializer, Serializer):
            self.previous_epoch_detail, self.is_new_epoch = span
        scaler = self._precision.scaler
        scaler_state = serializer["precision"]("scaler", None if scaler is None else scaler.state_dict())
        if scaler is not None and scaler_state is not None and not isinstance(serializer, Serializer):
            scaler.load_state_dict(scaler_state)
        for name, value in self._settings().items():
            visit_setting(serializer["settings"], name, value, name)
        if self._virtual is not None:
            self._virtual.seed = visit_optional(serializer, "virtual_seed", self._virtual.seed)
        if self._wrapped.hook_states is not None:
            self._wrapped.hook_states.serialize(serializer["communication_hooks"], self.comm)
        if isinstance(self._compute, CompiledUpdate):
            self._compute.serialize(serializer["compiled"])
        if self._compiled_gradients is not None:
            self._compiled_gradients.serialize(serializer["compiled_gradients"])

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run may change, which is then announced."""
        return {
            "virtual_ranks": self.virtual_ranks,
            "accumulate": self.accumulate,
            "accumulate_across_epochs": self.accumulate_across_epochs,
            "precision": self._precision.name,
        }


class _Registered(dict[str, T]):
    """Objects by name; the error about an unknown name lists the known ones."""

    def __init__(self, role: str, objects: Mapping[str, T]) -> None:
        super().__init__(objects)
        self._role = role

    def __missing__(self, name: str) -> T:
        raise KeyError(f"no {self._role} {name!r}; registered: {sorted(self)}")
