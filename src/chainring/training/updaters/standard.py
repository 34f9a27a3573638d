"""StandardUpdater: forward, backward, step; in stages, over accumulated parts and over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from collections.abc import Iterator as PythonIterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

from chainring._checks import is_integer
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import to_local
from chainring.converters import Device, as_device, concat_examples
from chainring.iterators.base import Batch, Iterator
from chainring.iterators.loader import as_iterator
from chainring.reporting.reporter import current_observation, report_scope
from chainring.reporting.summary import weighted_means
from chainring.serializers.base import AbstractSerializer, Serializer, visit_setting
from chainring.training.updaters._compiled import Compiled, not_compiled
from chainring.training.updaters._forward import (
    arguments,
    check_call,
    check_loss,
    check_loss_func,
    check_model_call,
    differentiate,
    loss_and_weight,
)
from chainring.training.updaters._optimizer_state import hyperparameters, parameter_names
from chainring.training.updaters._precision import Full, get_precision
from chainring.training.updaters._wrapped import Wrapped, buffers, equalize
from chainring.training.updaters.base import NO_EPOCHS, Registered, look_up
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, run


def named(given: Any, what: str) -> dict[str, Any]:
    """One object as ``{"main": it}``, a dict of several as it is."""
    if not isinstance(given, dict):
        return {"main": given}
    if not given:
        raise ValueError(f"at least one {what} is needed, got an empty dict")
    return dict(given)


def named_models(given: Any) -> dict[str, nn.Module]:
    """The models by name."""
    by_name = named(given, "model")
    for name, model in by_name.items():
        if not isinstance(model, nn.Module):
            is_class = isinstance(model, type)
            hint = "; call the class to make one" if is_class else "; converter= is a keyword" if callable(model) else ""
            raise TypeError(
                f"a StandardUpdater takes an iterator, an optimizer and third the model, an nn.Module{hint}. "
                f"Model {name!r} is {_described(model)}"
            )
    return by_name


def named_optimizers(given: Any, by_name: Mapping[str, nn.Module]) -> dict[str, Optimizer]:
    """The optimizers by name, each over parameters of the models."""
    found = named(given, "optimizer")
    names = parameter_names(by_name)
    for name, optimizer in found.items():
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer {name!r} must be a torch.optim.Optimizer, got {_described(optimizer)}")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in names for parameter in parameters)
        if foreign:
            raise ValueError(
                f"every parameter of an optimizer must belong to a registered model; of the {len(parameters)} of optimizer "
                f"{name!r}, {foreign} belong to none of {sorted(by_name)}. Make it from that model's parameters(), "
                "or register its model too: model={'main': ..., 'other': ...}"
            )
    return found


def check_settings(converter: Any, accumulate: Any, callbacks: Any) -> None:
    """Refuses settings of another kind or out of range."""
    if not callable(converter):
        raise TypeError(f"converter is called with a batch and a device, got {_described(converter)}")
    if not is_integer(accumulate):
        raise TypeError(f"accumulate counts the parts of an update, an integer, got {accumulate!r}")
    if accumulate < 1:
        raise ValueError(f"accumulate counts the parts of an update, at least 1, got {accumulate}")
    if callbacks is not None and not isinstance(callbacks, UpdateCallbacks):
        raise TypeError(f"callbacks is an UpdateCallbacks, such as UpdateCallbacks(update_on_start=f), got {callbacks!r}")


def require_main(iterators: Mapping[str, Any], by_name: Mapping[str, nn.Module]) -> None:
    """What the default update works with must be there."""
    for what, registered in (("iterator", iterators), ("model", by_name)):
        if "main" not in registered:
            raise ValueError(
                f'the default update works with the {what} "main", got only {sorted(registered)}; '
                "name one so, or write update_core in a subclass"
            )


def refuse_closures(by_name: Mapping[str, Optimizer]) -> None:
    """The default update calls ``step()``, which an optimizer that evaluates the loss itself does not take."""
    for name, optimizer in by_name.items():
        try:
            inspect.signature(type(optimizer).step).bind(optimizer)  # of the class: a scheduler wraps the object's
        except TypeError:
            raise TypeError(
                f"the default update calls optimizer.step() without a closure, and optimizer {name!r} "
                f"({type(optimizer).__name__}) needs one; write update_core in a subclass, "
                f"and there get_optimizer({name!r}).step(closure)"
            ) from None


def device_type(by_name: Mapping[str, nn.Module]) -> str:
    """The kind of device that the models are on."""
    for model in by_name.values():
        for parameter in model.parameters():
            return parameter.device.type
    return torch.device("cpu").type


def _described(given: Any) -> str:
    name = getattr(given, "__name__", None)
    return f"the class {name}" if isinstance(given, type) else (name or type(given).__name__)


def clear(optimizer: Optimizer) -> None:
    """Drops the gradients of an optimizer's parameters.

    ``Optimizer.zero_grad`` does the same in 5.6 us, of which most goes into a profiler record; where a class overrides
    it, it is called.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def set_aside(optimizer: Optimizer, held: dict[Tensor, Tensor]) -> None:
    """Moves the gradients of an optimizer's parameters into ``held``, added to what is there."""
    for parameter in _with_gradient([optimizer]):
        gradient = parameter.grad
        assert gradient is not None
        held[parameter] = held[parameter] + gradient if parameter in held else gradient
        parameter.grad = None


def bring_back(optimizer: Optimizer, held: dict[Tensor, Tensor]) -> None:
    """Adds to the gradients of an optimizer's parameters what `set_aside` has moved away."""
    for parameter in _parameters([optimizer]):
        gradient = held.pop(parameter, None)
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def rescale(optimizer: Optimizer, reference: float, total: Any, divided: Set[int] = frozenset(), by: int = 1) -> None:
    """Makes gradients that were summed with weights w / reference a mean, by reference / (sum of the weights).

    Those of the parameters whose ids are in ``divided`` were also divided by the number ``by``.
    """
    if isinstance(total, Tensor) and not total.is_floating_point():
        total = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    factor = reference / total
    if not isinstance(factor, Tensor) and factor == 1 and not divided:
        return
    for parameter in _with_gradient([optimizer]):
        assert parameter.grad is not None
        to_local(parameter.grad).mul_(factor * by if id(parameter) in divided else factor)


def sum_over_ranks(
    comm: Any, optimizers: Sequence[Optimizer], totals: Sequence[Any], summed: Set[int] = frozenset()
) -> list[Any]:
    """Sums the gradients of the optimizers, in place, and the total weights over the ranks.

    The gradients of the parameters whose ids are in ``summed`` have been exchanged already.

    A rank that did not touch a parameter takes part with zeros; what no rank touched is left without a gradient, so that
    the optimizer passes it over as it does in a world of one.
    """
    if comm.size == 1:
        return list(totals)
    trained = [parameter for parameter in _parameters(optimizers) if parameter.requires_grad]
    parameters = [parameter for parameter in trained if id(parameter) not in summed]
    device = trained[0].device
    untouched = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
    touches = torch.ones(len(parameters), dtype=torch.float64)
    touches[untouched] = 0
    for number in untouched:
        parameters[number].grad = torch.zeros_like(parameters[number])
    weights = torch.stack([torch.as_tensor(total, dtype=torch.float64, device=device) for total in totals])
    sums = torch.cat([weights, touches.to(device)])
    comm.all_reduce([parameter.grad for parameter in parameters] + [sums], average=False)
    if untouched:  # only then is the device waited for
        counts = sums[len(totals) :].tolist()
        for number in untouched:
            if not counts[number]:
                parameters[number].grad = None
    return list(sums[: len(totals)].unbind())


def _parameters(optimizers: Sequence[Optimizer]) -> PythonIterator[Tensor]:
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def _with_gradient(optimizers: Sequence[Optimizer]) -> PythonIterator[Tensor]:
    return (parameter for parameter in _parameters(optimizers) if parameter.grad is not None)


try:
    _RECORDING: Any = Optimizer.profile_hook_step(Optimizer.step).__code__
except AttributeError:  # a PyTorch that does it in another way: steps are called as they stand
    _RECORDING = object()


def step(optimizer: Optimizer) -> None:
    """Lets an optimizer step.

    PyTorch wraps the ``step`` of every class in a record for its profiler and calls of the hooks, which is a quarter of the
    time of a small step. Where no profiler runs and no hook is registered, what is wrapped is called by itself. A step that
    is wrapped or replaced in any other way, as schedulers of the learning rate do, is called as it stands.
    """
    function: Any = type(optimizer).step
    if getattr(function, "__code__", None) is not _RECORDING or "step" in vars(optimizer) or _is_watched(optimizer):
        optimizer.step()
    else:
        function.__wrapped__(optimizer)


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether someone wants to know of a step. These names of PyTorch's are not public: without them, it is taken as if."""
    try:
        return bool(
            torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
        )
    except AttributeError:
        return True


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
                set_aside(look_up(self._optimizers, name, "optimizer"), self._held)

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
        optimizers = [look_up(self._optimizers, name, "optimizer") for name in names]
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


class StandardUpdater(InParts):
    """Fetches a batch, computes the loss, and lets the optimizer step.

    To change what an update computes, subclass it and write ``update_core`` from `next_batch`, `autocast`, `backward`
    and `step`: precision, accumulation and communication stay as they are. With ``accumulate=k`` one update runs
    ``update_core`` k times, and ``step`` acts in the last of them, on the gradients that stood at each call of it.

    Parts of an update (accumulated ones, and those of other ranks) are averaged by weight: the number of examples, or
    what the loss returns as ``"weight"`` beside ``"loss"``. So k parts of b examples are one batch of k * b.

    Args:
        iterator: gives batches; a ``DataLoader`` or another iterable of batches is wrapped. One, or a mapping of several
            by name, as for ``optimizer`` and ``model``; a single one is called ``"main"``.
        optimizer: over the parameters of the models.
        model: is moved to ``device``. Called with a batch it returns the loss, unless there is a ``loss_func``.
        converter: ``converter(batch, device)`` makes tensors of a batch of examples.
        device: ``None`` leaves data and models where they are; a negative integer or ``"cpu"`` is the host.
        loss_func: ``loss_func(model, *inputs)`` returns the loss, or a mapping that has ``"loss"``, whose scalars are
            reported under the model's name.
        precision: of the forward: ``"fp32"`` as the model is, ``"bf16"`` autocast, ``"fp16"`` autocast with a loss scaler.
        accumulate: parts of an update.
        callbacks: called around the stages.
        comm: the communicator of the ranks that train together.
        compile: computes the loss, its gradients and the steps in one function of ``torch.compile``, on an NVIDIA
            accelerator as a captured graph; results are the same to float tolerance. Seconds go by before the first update,
            and before the first of each other shape of a batch. What cannot be compiled runs as it is, and a warning says
            why; so does an update that `dump_graph` or a `Profiler` watches, which need its graph and its phases.

    Raises:
        TypeError: something of another kind stands where an iterator, an optimizer or a model belongs.
        ValueError: an optimizer has a parameter of no registered model, or a setting is out of range, or a
            batch has fewer examples than there are ranks.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        model: Any,
        *,
        converter: Callable[..., Any] = concat_examples,
        device: Device = None,
        loss_func: Callable[..., Any] | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        accumulate: int = 1,
        callbacks: UpdateCallbacks | None = None,
        comm: Any = None,
        compile: bool = False,  # noqa: A002
    ) -> None:
        self._models = named_models(model)
        self._optimizers = named_optimizers(optimizer, self._models)
        iterators = named(iterator, "iterator")
        self._iterators = {name: as_iterator(source) for name, source in iterators.items()}
        self.constructed = {name: hyperparameters(each) for name, each in self._optimizers.items()}
        self._clock = self._iterators.get("main", NO_EPOCHS)
        check_settings(converter, accumulate, callbacks)
        if loss_func is not None:
            check_loss_func(loss_func)
        if not _overrides(self, "update_core"):
            require_main(self._iterators, self._models)
            refuse_closures(self._optimizers)
        self.converter = converter
        self.device = as_device(device)
        self.loss_func = loss_func
        self.accumulate = accumulate
        self.callbacks = UpdateCallbacks() if callbacks is None else callbacks
        self.comm = Communicator() if comm is None else comm
        self._name_and_move()
        self._precision = get_precision(precision, device_type(self._models))
        self._communicates = comm is not None
        self._wrapped = Wrapped(list(self._models.values()))
        self._checked = False
        self._choose_path(precision, compile)
        self._begin_update()

    def _name_and_move(self) -> None:
        for name, source in self._iterators.items():
            if isinstance(source, Iterator):
                source.name = name
                source.check_share(self.comm.size)
        for each in self._models.values():
            if self.device is not None:
                each.to(self.device)

    def _choose_path(self, precision: str, compiles: bool) -> None:
        """What an update has to go through, which follows from the settings."""
        has_own_core = _overrides(self, "update_core")
        has_own_stage = _overrides(self, "update_core", "next_batch", "autocast", "backward", "step")
        self._weighs = self.accumulate > 1 or self._communicates
        self._spans = self.accumulate > 1 or has_own_core
        self._sets_aside = self.accumulate > 1 and has_own_core
        self._stepping = list(self._optimizers.values())
        self._marking = [source for source in self._iterators.values() if hasattr(source, "mark")]
        self._is_straight = not (self._weighs or has_own_stage or precision == "fp16")
        # Without autocast there is nothing to enter, and a context manager that does nothing is three calls.
        self._in_precision = self._loss if precision == "fp32" else self._loss_in_autocast
        self._compute: Callable[[Any], Any] = self._compute_eagerly
        if compiles and self._is_straight and not self.callbacks.needs_stages:
            answer = self._models["main"] if self.loss_func is None else partial(self.loss_func, self._models["main"])
            self._compute = Compiled(self._compute, answer, self._precision, self._stepping)
        elif compiles:
            not_compiled("accumulation, ranks, callbacks, fp16 and stages of one's own need an update in stages")

    def start(self) -> None:
        """Gives all ranks the models of rank 0, and lets DDP lay out its buckets."""
        if self.comm.size > 1:
            equalize(self.comm, list(self._models.values()), self._wrapped)
            self._wrapped.lay_out()

    def update(self) -> None:
        """One update. When it fails, the iterators go back to where it began, so that they agree with ``iteration``."""
        marks = [(source, source.mark()) for source in self._marking]
        try:
            if self._is_straight and not self.callbacks.needs_stages:
                self._update_straight()
            else:
                self._update_in_stages()
        except BaseException:
            for source, mark in marks:
                source.return_to(mark)
            raise
        self.iteration += 1

    def _update_straight(self) -> None:
        """What the stages come to where there is nothing between them: a fifth of their time."""
        batch = next(self._iterators["main"])
        inputs = self.converter(batch, self.device)
        if self.callbacks.batch_on_finish:
            self._context = UpdateContext(self, self.iteration, 0)
            inputs = self._finish_batch(inputs, count_examples(batch))
        weight = self._compute(inputs)
        self.weight = weight if weight is not None else batch.weight if type(batch) is Batch else len(batch)

    def _finish_batch(self, converted: Any, examples: Any) -> Any:
        """Call the callbacks of a converted batch; return the batch, which they may have replaced."""
        context = self._context
        context.batch, context.examples = converted, examples
        run(self.callbacks.batch_on_finish, context)
        return context.batch

    def _compute_eagerly(self, inputs: Any) -> Any:
        for optimizer in self._stepping:
            clear(optimizer)
        loss, weight = self._in_precision(inputs)
        check_loss(loss)
        differentiate(loss)
        for optimizer in self._stepping:
            step(optimizer)
        return weight

    def _loss_in_autocast(self, inputs: Any) -> tuple[Any, Any]:
        with self._precision.autocast():
            return self._loss(inputs)

    def _update_in_stages(self) -> None:
        for optimizer in self._stepping:
            clear(optimizer)
        self._begin_update()
        if self.accumulate == 1:
            self.update_core()
            self._count_part()
        else:
            self._accumulate()
        if self._precision.scaler is not None:
            self._precision.scaler.update()
        if self.comm.size > 1 and (changing := buffers(list(self._models.values()))):
            self.comm.broadcast(changing)
        if self._spans:
            main = self._iterators.get("main")
            self.previous_epoch_detail = self._before
            self.is_new_epoch = getattr(main, "epoch", 0) != self._epoch_before

    def update_core(self) -> None:
        """One part of an update: the next batch, its loss, backward, and a step of every optimizer."""
        batch = self.next_batch()
        with self.autocast():
            loss, weight = self._loss(batch)
            self._context.loss = loss
        self.backward(loss, weight)
        if len(self._optimizers) == 1:
            self.step(*self._optimizers)
        else:
            self._step(list(self._optimizers))

    def _loss(self, batch: Any) -> tuple[Any, Any]:
        model, function = self._models["main"], self.loss_func
        if function is None:
            try:
                if type(batch) is tuple:
                    return loss_and_weight(model(*batch), "main")
                args, kwargs = arguments(batch)
                return loss_and_weight(model(*args, **kwargs), "main")
            except TypeError:
                check_model_call(model, batch)  # says what is wrong, if it is the call
                raise
        args, kwargs = arguments(batch)
        if not self._checked:
            check_call(function, model, batch)
            self._checked = True
        return loss_and_weight(function(model, *args, **kwargs), "main")

    def next_batch(self, name: str = "main") -> Any:
        """The next batch of an iterator, converted, on the device.

        Raises:
            StopIteration: the data have ended.
        """
        source = self._iterators[name]
        batch = next(source)
        examples = count_examples(batch)
        if name == "main":
            self._part_weight = examples
        return self._finish_batch(self.converter(batch, self.device), examples)

    def autocast(self) -> AbstractContextManager[None]:
        """Around the forward: its precision, and the callbacks of that stage."""
        callbacks = self.callbacks
        if callbacks.forward_on_start or callbacks.forward_on_finish:
            return self._forward_stage()
        return self._precision.autocast()

    @contextmanager
    def _forward_stage(self) -> Any:
        run(self.callbacks.forward_on_start, self._context)
        with self._precision.autocast():
            yield
        run(self.callbacks.forward_on_finish, self._context)

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        span = serializer("span", [self.previous_epoch_detail, self.is_new_epoch])
        if self._spans and not isinstance(serializer, Serializer):
            self.previous_epoch_detail, self.is_new_epoch = span
        self._precision.serialize(serializer["precision"])
        for name, value in self._settings().items():
            visit_setting(serializer["settings"], name, value, name)
        if isinstance(self._compute, Compiled):
            self._compute.serialize(serializer["compiled"])

    def _settings(self) -> dict[str, Any]:
        """What a resumed run may have otherwise, and then says so."""
        return {"accumulate": self.accumulate, "precision": self._precision.name}


def count_examples(batch: Any) -> Any:
    """The number of examples of a batch that count."""
    weight = getattr(batch, "weight", None)
    return len(batch) if weight is None else weight


def _overrides(updater: StandardUpdater, *names: str) -> bool:
    return any(getattr(type(updater), name) is not getattr(StandardUpdater, name) for name in names)
