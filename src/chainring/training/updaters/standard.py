"""StandardUpdater: fetches a batch, computes the loss and its gradients over micro-batches and ranks, and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Iterator as PythonIterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal, TypeVar
from weakref import proxy

from torch import Tensor, nn
from torch.optim import Optimizer

from chainring._checks import plain
from chainring._distributed.communicator import Communicator, device_of_rank
from chainring._distributed.group import GroupCommunicator
from chainring._distributed.sharding import is_sharded, to_full
from chainring._hints import UPDATER_KEYWORDS, hinting
from chainring._messages import warn
from chainring._progress import raise_unless_end
from chainring.converters import Converter, Device, concat_examples
from chainring.datasets._batches import Batch, Uncounted, count_examples, require_count
from chainring.reporting.reporter import current_observation
from chainring.serializers._models import hyperparameters
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_optional, visit_setting
from chainring.training.updaters._arguments import (
    NO_FP16,
    NO_GRAPH,
    NO_NAN,
    NO_VIRTUAL_RANKS,
    Loss,
    as_iterators,
    check_balance,
    check_default_update,
    check_loss,
    check_models,
    check_optimizers,
    check_settings,
    move,
    needs_closure,
    prepare_iterators,
)
from chainring.training.updaters._audit import make_audit
from chainring.training.updaters._carried import check_carried
from chainring.training.updaters._means import WeightedMean, only_gradients_of
from chainring.training.updaters._ranks import (
    ExchangeWatch,
    ModelRanksWatch,
    WrappedModules,
    broadcast_parameters,
    check_dense,
    check_same,
    check_sharding,
    warn_of_untied,
)
from chainring.training.updaters._update import (
    NO_AUTOCAST,
    Precision,
    Scheme,
    Update,
    clear_gradients,
    compute_loss,
    is_on_host,
    run_backward,
)
from chainring.training.updaters.base import Updater
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, list_parameters, run

T = TypeVar("T")
_NO_EPOCHS = SimpleNamespace(epoch=0, epoch_detail=0.0)
"""Stands for the main iterator of an updater that has none."""
_CHECKED_UPDATES = 2  # of a run, after which ranks compare their parameters, as they do at each snapshot


class _Setting:
    """A setting of an updater, which is stored as any attribute, and looked at where it is set again."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, updater: StandardUpdater, value: Any) -> None:
        settings, value = vars(updater), plain(value)
        if "_scheme" not in settings:
            settings[self._name] = value
        elif value is not settings[self._name]:
            updater._change_setting(self._name, value)


class StandardUpdater(Updater):
    """Fetches a batch, computes the loss and its gradients, and runs a step of the optimizer.

    This is an update::

        for micro_step in range(accumulate):                     # with virtual ranks, each of them runs all of these
            batch = converter(next(iterator), device)            # batch_on_finish
            with autocast():                                     # forward_on_start, forward_on_finish
                loss, weight = model(*batch)                     # or loss_func(model, *batch); weight: number of examples
            (loss * weight).backward()                           # backward_on_start, backward_on_finish
        gradients = sum over ranks / sum of all weights          # comm_on_start, comm_on_finish
        unscale(gradients)                                       # update_on_start: they are final
        optimizer.step()                                         # update_on_finish

    To change what an update computes, subclass it and write ``update_core`` from `next_batch`, `autocast`, `backward` and
    `step`: precision, gradient accumulation and communication stay as they are. With ``accumulate=k``, one update runs
    ``update_core`` k times, and ``step`` takes effect in the last of them, on the gradients that were there at each call.

    An optimizer whose ``step`` needs a closure, such as ``torch.optim.LBFGS``, is given one that computes the loss of the
    same micro-batches each time it is called. The reported values are those of the first call: the loss before the step.

    The micro-batches of an update, and those of other ranks, are averaged by weight: the number of examples, or what the
    loss returns as ``"weight"`` beside ``"loss"``. So k micro-batches of b examples are equivalent to one batch of k * b
    examples. A micro-batch of weight 0 adds nothing, even if its loss is NaN; in an update of nothing else no optimizer
    steps, and the update counts. A weight on an accelerator is not read; see the page on several processes.

    Args:
        iterator: the iterator that returns batches; a ``DataLoader`` or another iterable of batches is wrapped. Like
            ``optimizer`` and ``model``, it is a single object, which is called ``"main"``, or a mapping of several by name.
            ``None`` if an update needs no data: the model, or ``loss_func(model)``, is then called without inputs, epochs
            stay at 0, and each update has weight 1 in a mean.
        optimizer: the optimizer of the models' parameters.
        model: the model; it is moved to ``device``. Called with a batch, it returns the loss, unless there is a
            ``loss_func``.
        converter: ``converter(batch, device)`` turns a batch of examples into tensors.
        device: ``None`` leaves data and models where they are; a negative integer or ``"cpu"`` is the CPU; any other
            integer, or a string such as ``"cuda:1"``, is that accelerator (GPU); ``"auto"`` is the accelerator if there
            is one (with several ranks, that of the rank), otherwise the CPU.
        loss_func: ``loss_func(model, *inputs)`` returns the loss, or a mapping that has ``"loss"``, all of whose scalars
            are reported under the model's name.
        precision: of the forward pass: ``"fp32"`` uses the dtypes of the model; ``"bf16"`` and ``"fp16"`` are mixed
            precision by autocast, ``"fp16"`` with a loss scaler.
        accumulate: the number of micro-batches in an update (gradient accumulation). As an attribute it may be set between
            two updates, by an extension say, and holds from the next one on; so may ``accumulate_across_epochs``.
        callbacks: functions called around the stages of an update.
        comm: the communicator of the ranks that train together.
        compile: True to compile the loss, its gradients and the steps into one function with ``torch.compile``, captured
            as a graph on an NVIDIA GPU; results are equal to float tolerance. Compilation takes seconds before the first
            update, and before the first batch of each other shape. With gradient accumulation, ranks, fp16, or callbacks
            other than ``batch_on_finish``, only the loss and its gradients are compiled, and not captured. Virtual ranks,
            closures, overridden stages, DDP and sharded parameters, a model that cannot be compiled, and any update with
            torch before 2.13 run uncompiled, and a warning says why.
        virtual_ranks: the number of parts in which each update is computed, for any number of ranks; they are summed in a
            fixed order, so that parameters, optimizer state, log rows and snapshots are equal to the last bit on 1 to
            ``virtual_ranks`` ranks. Virtual rank v computes the rows ``batch[v::virtual_ranks]`` with its own random
            numbers and batch statistics, and runs ``update_core`` once; all are joined in `step`. If memory runs out
            in one, it is computed again to the same bits, at last with saved tensors on the host.
        balance: how the virtual ranks are dealt to the ranks: ``"even"``, or by ``"speed"``, as measured in one of eight
            updates, where devices are not equal. No bit depends on it. Every rank computes at least one, so that more
            virtual ranks balance better.
        audit: the number of virtual ranks of each update, in turn, that are computed a second time, by another rank where
            there is one, and whose gradients are compared bit for bit before an optimizer steps; ``0`` for none. See the
            page "Devices that compute wrong".
        audit_policy: ``"correct"`` computes an update again in which they differ, uses what two ranks agree on, and warns;
            ``"stop"`` ends the run with a `CorruptionError`, which also ends it where it cannot be decided what is right.
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

    accumulate: int = _Setting()  # type: ignore[assignment]
    accumulate_across_epochs: bool = _Setting()  # type: ignore[assignment]
    virtual_ranks: int | None = _Setting()  # type: ignore[assignment]
    compile: bool = _Setting()  # type: ignore[assignment]

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
        balance: Literal["even", "speed"] = "even",
        audit: int = 0,
        audit_policy: Literal["correct", "stop"] = "correct",
    ) -> None:
        models = _Registered("model", check_models(model))
        optimizers = _Registered("optimizer", check_optimizers(optimizer, models))
        iterators = _Registered("iterator", as_iterators(iterator))
        self.constructed = {name: hyperparameters(optimizer) for name, optimizer in optimizers.items()}
        check_settings(converter, loss_func, accumulate, accumulate_across_epochs, callbacks)
        if not self._overrides("update_core"):
            check_default_update(iterators, models, optimizers)
        self.converter, self.loss_func, self.virtual_ranks, self.compile = converter, loss_func, virtual_ranks, compile
        self.accumulate, self.accumulate_across_epochs = accumulate, accumulate_across_epochs
        self.callbacks = UpdateCallbacks() if callbacks is None else callbacks
        self.comm = Communicator() if comm is None else comm
        self.device = device_of_rank(device, self.comm)
        check_sharding(self.comm, models)
        if self.comm.size > 1 or virtual_ranks is not None:
            check_dense(models, optimizers)
        move(models.values(), self.device, optimizers.values())
        if virtual_ranks is not None:
            from chainring.training.updaters._virtual_state import check_virtual_ranks

            check_virtual_ranks(virtual_ranks, self.comm, models, optimizers)
            check_carried(loss_func, models)
        check_balance(balance, virtual_ranks, models, iterators)
        prepare_iterators(iterators, self.converter, virtual_ranks, self.comm.size, self.callbacks)
        # What refers back does so weakly, so that the memory of a device is free as soon as an updater is deleted.
        wrapped = WrappedModules(list(models.values()))
        self._scheme = Scheme(
            updater=proxy(self),
            iterators=iterators,
            epochs=iterators.get("main", _NO_EPOCHS),
            models=models,
            optimizers=optimizers,
            has_own_core=self._overrides("update_core"),
            precision=Precision(precision, models.values(), self.comm),
            wrapped=wrapped,
            balance=balance,
            audit=make_audit(audit, audit_policy, virtual_ranks, self.comm.size, models, iterators, wrapped),
        )
        self._complete_scheme(communicates=comm is not None)
        self.weight = 0
        self._scheme.update = self._scheme.idle = Update(proxy(self._scheme), UpdateContext(proxy(self), 0, 0))

    def _change_setting(self, name: str, value: Any) -> None:
        """Let a setting hold from the next update on."""
        scheme, settings = self._scheme, vars(self)
        if name not in ("accumulate", "accumulate_across_epochs"):
            raise AttributeError(f"{name} is decided when an updater is made: {type(self).__name__}(..., {name}={value!r})")
        if scheme.update is not scheme.idle:
            raise RuntimeError(f"{name} changes between two updates, as in an extension, and an update is going on")
        changed = {**settings, name: value}
        accumulate, across_epochs = changed["accumulate"], changed["accumulate_across_epochs"]
        check_settings(self.converter, self.loss_func, accumulate, across_epochs, self.callbacks)
        settings[name] = value
        scheme.follow_settings()
        if not scheme.spans_batches:  # these are the iterator's again
            for name in ("previous_epoch_detail", "is_new_epoch"):
                settings.pop(name, None)

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(StandardUpdater, name) for name in names)

    def _complete_scheme(self, communicates: bool) -> None:
        """Add what the settings need beside one micro-batch in one process: virtual ranks, means, watches, compilation."""
        scheme, comm, mean = self._scheme, self.comm, WeightedMean
        if comm.survives:
            from chainring.training.updaters._survival import SurvivingMean, check_survival  # which few programs need

            mean = SurvivingMean
            check_survival(scheme.models)
        has_closures = any(map(needs_closure, scheme.optimizers.values()))
        if has_closures and scheme.precision.scaler and not scheme.has_own_core:
            raise ValueError(NO_FP16)
        scheme.steps_by_closure = has_closures
        has_own_stage = self._overrides("update_core", "next_batch", "autocast", "backward", "step")
        exchanged = scheme.wrapped.parameters
        is_plain = not any(map(is_sharded, list_parameters(scheme.optimizers.values())))
        if self.virtual_ranks is not None:
            from chainring.training.updaters._virtual import VirtualRanks

            scheme.virtual = VirtualRanks(scheme, self.virtual_ranks, may_continue=self._overrides("update_core", "step"))
            scheme.averaging = WeightedMean(scheme, comm if communicates else None, frozenset(), sends=True)
        else:
            sends = comm.size > 1 and isinstance(comm, GroupCommunicator) and is_plain
            sends = sends and not (has_own_stage or has_closures or exchanged)
            scheme.averaging = mean(scheme, comm if communicates else None, exchanged, sends)
        scheme.always_averages = communicates or self.virtual_ranks is not None
        scheme.may_repeat = comm.size > 1 and self.virtual_ranks is None
        scheme.follow_settings()
        if comm.world.size > 1 or self.virtual_ranks is not None:
            if self._overrides("update_core", "step"):
                scheme.exchange_watch = ExchangeWatch(scheme.optimizers)
            if comm.world.size > comm.size:
                scheme.model_watch = ModelRanksWatch(comm, scheme.models)
        if self.compile:
            from chainring.training.updaters._compiled import compile_unless

            obstacle = None
            if has_own_stage or scheme.virtual is not None or has_closures:
                obstacle = "virtual ranks, closures and your own stages are left as they are"
            elif exchanged or not is_plain:
                obstacle = "DDP, fully_shard and sharded parameters exchange between ranks inside of the model"
            scheme.compiled = compile_unless(obstacle, scheme)

    def start(self) -> None:
        """Broadcast the models of rank 0 to all ranks, and let DDP build its buckets."""
        super().start()
        scheme = self._scheme
        if self.comm.survives and scheme.averaging is not None:
            scheme.averaging.start()
        if self.comm.world.size > 1:
            broadcast_parameters(self.comm, list(scheme.models.values()), scheme.wrapped)
            # Where ranks may be lost, nothing is exchanged after a step; snapshots compare the models too.
            scheme.unchecked = 0 if self.comm.survives else _CHECKED_UPDATES
        for model in scheme.models.values() if scheme.model_watch is not None and self.iteration == 0 else ():
            warn_of_untied(model)
        with scheme.wrapped.preserved_hooks() if scheme.wrapped.parameters else nullcontext():
            if scheme.virtual is not None:
                scheme.virtual.start()
                scheme.wrapped.set_gradient_sync(False)
            elif scheme.wrapped.parameters:  # of one rank too, since the states of hooks belong to buckets
                scheme.wrapped.build_ddp_buckets()

    def update(self) -> None:
        """Run one update. If it fails, the iterators return to where it began, so that they agree with ``iteration``.

        Raises:
            StopIteration: raised by an iterator of the updater: the data have run out.
            RuntimeError: anything else has raised ``StopIteration``; or, on several ranks, the update has changed
                parameters without exchanging gradients between them.
        """
        scheme, main = self._scheme, self._scheme.iterators.get("main")
        marks = []
        for source in scheme.iterators.values():  # hot path: "in stages" of benchmarks/overhead.py, here and in the stages
            if hasattr(source, "mark"):
                marks.append((source, source.mark()))  # noqa: PERF401
        epoch, epoch_detail = 0, None
        if scheme.spans_batches:
            epoch, epoch_detail = getattr(main, "epoch", 0), getattr(main, "epoch_detail", None)
        update = scheme.update = Update(scheme, UpdateContext(self, self.iteration, 0), epoch)
        self.weight = 0
        try:
            if scheme.compiled is None or not scheme.compiled.computes_whole_updates:
                for optimizer in scheme.optimizers.values():
                    clear_gradients(optimizer)
            if scheme.exchange_watch is not None:
                scheme.exchange_watch.begin()
            if scheme.virtual is not None:
                self.weight = scheme.virtual.run(update)
            elif scheme.accumulates:
                self.weight = update.run()
            else:
                self.update_core()
                self.weight = update.weights[0] if update.weights else require_count(update.examples)
            if update.pins or scheme.reported_weights:
                scheme.reported_weights = update.take_pins(current_observation() or {})
            if scheme.mean is not None or scheme.precision.scaler is not None:
                scheme.update.finish()
        except BaseException as error:
            for source, mark in marks:
                source.return_to(mark)
            if isinstance(error, StopIteration):
                raise_unless_end(self, error)
            raise
        finally:
            if update.uncounted is not None:
                update.let_metrics_count(True)
            scheme.update = scheme.idle
        if scheme.spans_batches:  # an epoch then counts from the first of them to the last
            self.previous_epoch_detail, self.is_new_epoch = epoch_detail, getattr(main, "epoch", 0) != update.epoch
        self.iteration += 1

    def finalize(self) -> None:
        """Release the iterators; warn of an update of weight 0 on an accelerator since the last snapshot."""
        super().finalize()
        had_empty = self._scheme.had_empty
        if had_empty is not None and not had_empty.is_cpu:
            try:
                self._scheme.check_weights()
            except RuntimeError as error:
                warn(str(error))

    # --- the stages of a micro-batch, for `update_core` ---

    def update_core(self) -> None:
        """Process one micro-batch: fetch it, compute its loss and gradients, and step every optimizer."""
        scheme = self._scheme
        batch = self.next_batch() if scheme.iterators else ()
        if scheme.compiled is not None and scheme.compiled.run_update(scheme.update, batch):
            return
        if scheme.steps_by_closure:
            for name in scheme.optimizers:
                self.step(name, partial(self._compute_gradients, batch))
            return
        self._compute_gradients(batch)
        names = list(scheme.optimizers)
        if len(names) == 1:
            self.step(names[0])
        else:
            scheme.update.step(names)

    def _compute_gradients(self, batch: Any) -> Any:
        """Add the gradients of a micro-batch, and return its loss."""
        scheme, update, compiled = self._scheme, self._scheme.update, self._scheme.compiled
        if compiled is not None and compiled.computes_gradients:
            run(self.callbacks.forward_on_start, update.context)
            if (loss := compiled.add_gradients(update, batch)) is not None:
                return loss
            forward = scheme.precision.autocast()
        else:
            forward = self.autocast()
        if forward is NO_AUTOCAST:  # an empty context is two calls
            loss, weight = compute_loss(scheme.models["main"], self.loss_func, batch)
        else:
            with forward:
                loss, weight = compute_loss(scheme.models["main"], self.loss_func, batch)
                update.context.loss = loss
        update.has_loss_weight = update.has_loss_weight or weight is not None
        self.backward(loss, weight)
        return loss

    def next_batch(self, name: str = "main") -> Any:
        """Return the next batch of an iterator, converted to tensors on the device.

        Raises:
            StopIteration: the data have run out.
            KeyError: there is no iterator of that name.
        """
        scheme, update, iterator = self._scheme, self._scheme.update, self._scheme.iterators[name]
        context = update.context
        if update.part is None:
            epoch = getattr(iterator, "epoch", 0)
            batch = next(iterator)
            examples = batch.weight if type(batch) is Batch else count_examples(batch)
        else:
            batch, examples, epoch = update.part.whole.take_rows(update.part, name, iterator)
        context.batch = self.converter(batch, self.device)
        context.examples = None if isinstance(examples, Uncounted) else examples
        if name == "main":
            if scheme.has_own_core:
                update.note_batch(examples)
            update.examples, context.epoch = examples, epoch
            if scheme.may_repeat and (examples == 0 or update.uncounted is not None):
                update.let_metrics_count(examples != 0)
            if scheme.ends_with_epoch and update.has_ended_epoch():  # known before the backward in which ranks exchange
                update.is_last = True
                if update.part is None:
                    scheme.wrapped.set_gradient_sync(True)
        if self.callbacks.batch_on_finish:
            run(self.callbacks.batch_on_finish, context)
        return context.batch

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context manager of a forward pass, which sets its precision and runs the callbacks of that stage."""
        callbacks = self.callbacks
        if callbacks.forward_on_start or callbacks.forward_on_finish:
            return self._forward_stage()
        precision = self._scheme.precision
        return precision.autocast() if precision.dtype is not None else NO_AUTOCAST

    @contextmanager
    def _forward_stage(self) -> PythonIterator[None]:
        context = self._scheme.update.context
        run(self.callbacks.forward_on_start, context)
        with self._scheme.precision.autocast():
            yield
        run(self.callbacks.forward_on_finish, context)

    def backward(self, loss: Tensor, weight: Any = None, *, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Compute the gradients of a loss, and add them to those of the parameters.

        Args:
            loss: a scalar, the mean over what ``weight`` counts.
            weight: the weight of this micro-batch relative to the others and to those of other ranks, by default its
                number of examples; a number, or a 0-dimensional tensor, which is not read from the device.
            retain_graph: True to keep the graph, for another backward through a part of it.
            create_graph: True to let the gradients have a graph, for an optimizer that differentiates them, such as
                AdaHessian. Not with several ranks, virtual ranks or ``"fp16"``.

        Raises:
            TypeError, ValueError: the loss is not a scalar tensor that depends on a parameter.
        """
        scheme, update, callbacks = self._scheme, self._scheme.update, self.callbacks
        if type(loss) is not Tensor or loss.ndim or not loss.requires_grad:
            is_returned = type(self).update_core is StandardUpdater.update_core  # else the caller's line is in the traceback
            check_loss(loss, (self.loss_func or scheme.models["main"]) if is_returned else None)  # says what is wrong
            loss = to_full(loss)
        if create_graph and (self.comm.size > 1 or scheme.virtual is not None or scheme.precision.scaler is not None):
            raise ValueError(NO_GRAPH)
        retain_graph = retain_graph or create_graph
        if type(update.examples) is not int:
            weight = require_count(update.examples) if weight is None else weight
        elif update.examples == 0:  # a repeated example never counts
            weight = 0
            if update.uncounted is not None:
                update.check_metrics()
        elif weight is None:
            weight = update.examples
        update.weight = weight
        if type(weight) is int:
            is_empty = weight == 0
        else:  # on an accelerator, what is looked at is the sum over micro-batches and ranks
            is_empty = (scheme.mean is None or is_on_host(weight)) and scheme.is_empty(weight)
        update.is_empty = is_empty
        update.weights.setdefault(update.context.micro_step, weight)
        for optimizer in update.stepped:
            clear_gradients(optimizer)
        update.stepped = []
        update.context.loss = loss
        if callbacks.backward_on_start:
            run(callbacks.backward_on_start, update.context)
        if scheme.mean is not None:  # gradients become means in the step
            loss = scheme.mean.weigh(loss, weight)
        if scheme.precision.scaler is not None:
            loss = scheme.precision.scaler.scale(loss)
        if is_empty and scheme.wrapped.parameters and (update.examples or loss.is_cpu) and not loss.isfinite():
            raise ValueError(NO_NAN)
        sending = scheme.mean.sending(update) if scheme.mean is not None and scheme.mean.sends else None
        if is_empty and (scheme.virtual is not None or not scheme.wrapped.parameters):
            # Gradients of weight 0 are dropped, since those of a loss of NaN are NaN; but not what DDP and fully_shard
            # exchange in this backward, with what was added before.
            with only_gradients_of([], scheme.optimizers.values()), sending or nullcontext():
                run_backward(loss, retain_graph, create_graph)
        elif sending is not None:
            with sending:
                run_backward(loss, retain_graph, create_graph)
        else:
            run_backward(loss, retain_graph, create_graph)
        if callbacks.backward_on_finish:
            run(callbacks.backward_on_finish, update.context)

    def step(self, name: str = "main", closure: Callable[[], Tensor] | None = None) -> None:
        """Step an optimizer in the last micro-batch: exchange gradients, unscale, run callbacks, ``optimizer.step()``.

        Its gradients can be read until the next backward or update, which clears them.

        A closure is the same as in PyTorch: it computes the loss, calls ``self.backward(loss)``, or ``loss.backward()``,
        and returns the loss. Before each call the optimizer's gradients are cleared; after it they are exchanged between
        ranks, and the callbacks of communication and ``update_on_start`` run. With gradient accumulation, each call runs
        the closures of all micro-batches; the optimizer gets the mean loss over micro-batches and ranks. Gradients of a
        `backward` before ``step`` are made final first, for methods that start from them. Values are reported in the first
        call only.

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
        update = self._scheme.update
        if closure is None:
            update.step([name])
        elif self._scheme.virtual is None:
            update.step_by_closure(name, closure)
        else:
            raise ValueError(NO_VIRTUAL_RANKS)

    # --- iterators, models and optimizers by name; progress ---

    # hot path: "an idle extension more" of benchmarks/overhead.py. Every epoch trigger asks, so without a Python frame.
    epoch = property(attrgetter("_scheme.epochs.epoch"))
    epoch_detail = property(attrgetter("_scheme.epochs.epoch_detail"))

    reported_weights = property(attrgetter("_scheme.reported_weights"))
    balance = property(attrgetter("_scheme.balance"))
    faults = property(
        attrgetter("_scheme.audit.faults"), doc="What audits found, each with iteration, rank, host, device, tensor."
    )

    @property
    def audit(self) -> int:
        """The number of virtual ranks of each update that are computed twice."""
        return 0 if self._scheme.audit is None else self._scheme.audit.count

    @property
    def virtual_seed(self) -> int | None:
        """The number from which the random numbers of virtual ranks are derived: rank 0's seed when the run was started."""
        return None if self._scheme.virtual is None else self._scheme.virtual.seed

    @property
    def precision(self) -> str:
        """The precision of the forward pass, ``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self._scheme.precision.name

    @property
    def counts_epochs(self) -> bool:
        counted = (type(self).epoch, type(self).epoch_detail) != (StandardUpdater.epoch, StandardUpdater.epoch_detail)
        return counted or self._scheme.epochs is not _NO_EPOCHS

    def get_iterator(self, name: str) -> Any:
        return self._scheme.iterators[name]

    def get_all_iterators(self) -> dict[str, Any]:
        return dict(self._scheme.iterators)

    def get_model(self, name: str) -> nn.Module:
        return self._scheme.models[name]

    def get_all_models(self) -> dict[str, nn.Module]:
        return dict(self._scheme.models)

    def get_optimizer(self, name: str) -> Optimizer:
        return self._scheme.optimizers[name]

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        return dict(self._scheme.optimizers)

    # --- state ---

    def serialize(self, serializer: AbstractSerializer) -> None:
        scheme, loads = self._scheme, not isinstance(serializer, Serializer)
        if not loads and scheme.had_empty is not None:
            scheme.check_weights()
        if not loads and serializer.comm.size > 1:  # all ranks save together
            if scheme.audit is None:
                check_same(self.comm, scheme.models, scheme.wrapped)
            else:
                scheme.audit.compare_states()
        super().serialize(serializer)
        span = serializer("span", None if loads else [self.previous_epoch_detail, self.is_new_epoch])
        if loads and scheme.spans_batches:
            self.previous_epoch_detail, self.is_new_epoch = span
        scaler = scheme.precision.scaler
        scaler_state = serializer["precision"]("scaler", None if scaler is None else scaler.state_dict())
        if scaler is not None and scaler_state is not None and loads:
            scaler.update()  # forgets the steps of an update that was interrupted
            scaler.load_state_dict(scaler_state)
        for name, value in {  # that a resumed run may change, which is then announced
            "virtual_ranks": self.virtual_ranks,
            "accumulate": self.accumulate,
            "accumulate_across_epochs": self.accumulate_across_epochs,
            "precision": scheme.precision.name,
        }.items():
            visit_setting(serializer["settings"], name, value, name)
        if scheme.virtual is not None:
            scheme.virtual.seed = visit_optional(serializer, "virtual_seed", scheme.virtual.seed)
        if scheme.wrapped.parameters:
            scheme.wrapped.serialize(serializer["communication_hooks"], self.comm)
        if scheme.compiled is not None:
            scheme.compiled.serialize(serializer)


class _Registered(dict[str, T]):
    """Objects by name; the error about an unknown name lists the known ones."""

    def __init__(self, role: str, objects: Mapping[str, T]) -> None:
        super().__init__(objects)
        self._role = role

    def __missing__(self, name: str) -> T:
        raise KeyError(f"no {self._role} {name!r}; registered: {sorted(self)}")
