"""StandardUpdater: forward, backward, step; in stages, over accumulated parts and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from chainring.converters import Device, as_device, concat_examples
from chainring.iterators.base import Batch, Iterator
from chainring.iterators.loader import as_iterator
from chainring.parallel.communicator import Communicator
from chainring.reporter import current_observation, report_scope
from chainring.serializers.base import AbstractSerializer, Serializer
from chainring.summary import weighted_means
from chainring.training._loss import arguments, check_call, check_loss, check_loss_func, loss_and_weight
from chainring.training.updaters import _arguments
from chainring.training.updaters._gradients import clear, rescale, sum_over_ranks
from chainring.training.updaters._precision import get_precision
from chainring.training.updaters.base import Updater
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, run


class StandardUpdater(Updater):
    """Fetches a batch, computes the loss, and lets the optimizer step.

    To change what an update computes, subclass it and write ``update_core`` from `next_batch`, `autocast`, `backward`
    and `step`: precision, accumulation and communication stay as they are. With ``accumulate=k`` one update runs
    ``update_core`` k times, and ``step`` acts in the last of them.

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

    Raises:
        TypeError: something of another kind stands where an iterator, an optimizer or a model belongs.
        ValueError: an optimizer has a parameter of no registered model, or a setting is out of range.
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
    ) -> None:
        self._models: dict[str, nn.Module] = _arguments.models(model)
        self._optimizers: dict[str, Optimizer] = _arguments.optimizers(optimizer, self._models)
        self._iterators: dict[str, Any] = {
            name: as_iterator(source) for name, source in _arguments.named(iterator, "iterator").items()
        }
        _arguments.check_settings(converter, accumulate, callbacks)
        if loss_func is not None:
            check_loss_func(loss_func)
        if type(self).update_core is StandardUpdater.update_core:
            _arguments.require_main(self._iterators, self._models)
        self.converter = converter
        self.device = as_device(device)
        self.loss_func = loss_func
        self.accumulate = accumulate
        self.callbacks = UpdateCallbacks() if callbacks is None else callbacks
        self.comm = Communicator() if comm is None else comm
        for name, source in self._iterators.items():
            if isinstance(source, Iterator):
                source.name = name
        for each in self._models.values():
            if self.device is not None:
                each.to(self.device)
        self._precision = get_precision(precision, _arguments.device_type(self._models))
        self._communicates = comm is not None
        self._weighs = accumulate > 1 or self._communicates
        self._spans = accumulate > 1 or type(self).update_core is not StandardUpdater.update_core
        self._checked = False
        self._stepping = list(self._optimizers.values())
        self._marking = [source for source in self._iterators.values() if hasattr(source, "mark")]
        has_own_core = type(self).update_core is not StandardUpdater.update_core
        self._is_straight = not (self._weighs or has_own_core or self.callbacks or precision != "fp32")
        self._begin_update()

    def get_iterator(self, name: str) -> Any:
        if name in self._iterators:  # asked by every epoch trigger every iteration
            return self._iterators[name]
        return _arguments.look_up(self._iterators, name, "iterator")

    def get_all_iterators(self) -> dict[str, Any]:
        return dict(self._iterators)

    def get_model(self, name: str) -> nn.Module:
        return _arguments.look_up(self._models, name, "model")  # type: ignore[no-any-return]

    def get_all_models(self) -> dict[str, nn.Module]:
        return dict(self._models)

    def get_optimizer(self, name: str) -> Optimizer:
        return _arguments.look_up(self._optimizers, name, "optimizer")  # type: ignore[no-any-return]

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        return dict(self._optimizers)

    def update(self) -> None:
        """One update. When it fails, the iterators go back to where it began, so that they agree with ``iteration``."""
        marks = [(source, source.mark()) for source in self._marking]
        try:
            for optimizer in self._stepping:
                clear(optimizer)
            if self._is_straight:
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
        loss, weight = self._loss(inputs)
        check_loss(loss)
        loss.backward()
        for optimizer in self._stepping:
            optimizer.step()
        self.weight = weight if weight is not None else batch.weight if type(batch) is Batch else len(batch)

    def _update_in_stages(self) -> None:
        self._begin_update()
        if self.accumulate == 1:
            self.update_core()
            self._count_part()
        else:
            self._accumulate()
        self._precision.update()
        if self._spans:
            self.previous_epoch_detail, self.is_new_epoch = self._before, self._is_new

    def _begin_update(self) -> None:
        self._context = UpdateContext(self, self.iteration, 0)
        self._is_last = self.accumulate == 1
        self._part_weight: Any = 1
        self._given_weight: Any = None
        self._totals: dict[str, Any] = {}
        self._stepped: list[Optimizer] = []
        self._deferred: list[str] = []
        self.weight = 0
        main = self._iterators.get("main")
        self._is_new = False
        self._before = getattr(main, "epoch_detail", None)
        self._reference = self.accumulate * getattr(main, "batch_size", 1)

    def _accumulate(self) -> None:
        """The parts of an update; when the data end after some, the update is made of those."""
        outer = current_observation()
        parts: list[tuple[dict[str, Any], Any]] = []
        for part in range(self.accumulate):
            self._context = UpdateContext(self, self.iteration, part)
            self._is_last = part == self.accumulate - 1
            observation: dict[str, Any] = {}
            try:
                self._observe_part(observation, outer is not None)
            except StopIteration:
                if not parts:
                    raise
                self._is_last = True
                self._finish(self._deferred)
                break
            parts.append((observation, self._given_weight))
        if outer is not None:
            outer.update(weighted_means(parts))

    def _observe_part(self, observation: dict[str, Any], reports: bool) -> None:
        self._given_weight = None
        with report_scope(observation) if reports else nullcontext():
            self.update_core()
        self._count_part()

    def _count_part(self) -> None:
        if self._given_weight is None:  # an update_core that does without `backward`
            self._given_weight = self._part_weight
            self.weight = self.weight + self._part_weight

    def update_core(self) -> None:
        """One part of an update: the next batch, its loss, backward, and a step of every optimizer."""
        batch = self.next_batch()
        with self.autocast():
            loss, weight = self._loss(batch)
            self._context.loss = loss
        self.backward(loss, weight)
        self._step(list(self._optimizers))

    def _loss(self, batch: Any) -> tuple[Any, Any]:
        model, function = self._models["main"], self.loss_func
        if function is None and type(batch) is tuple:
            return loss_and_weight(model(*batch), "main")
        args, kwargs = arguments(batch)
        if function is None:
            return loss_and_weight(model(*args, **kwargs), "main")
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
        if name == "main":
            weight = getattr(batch, "weight", None)
            self._part_weight = len(batch) if weight is None else weight
            self._is_new = self._is_new or source.is_new_epoch
        self._context.batch = converted = self.converter(batch, self.device)
        return converted

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
        weight = self._part_weight if weight is None else weight
        if self._given_weight is None:
            self._given_weight = weight
            self.weight = self.weight + weight
        self._last_weight = weight
        for optimizer in self._stepped:  # gradients of a step before this one, in an update of several
            clear(optimizer)
        self._stepped = []
        context = self._context
        context.loss = loss
        run(self.callbacks.backward_on_start, context)
        if self._weighs:
            share = weight / self._reference
            loss = loss if type(share) is float and share == 1.0 else loss * share
        self._precision.scale(loss).backward()  # type: ignore[no-untyped-call]
        run(self.callbacks.backward_on_finish, context)

    def step(self, name: str = "main") -> None:
        """Lets an optimizer step, in the last part of an update: communicate, unscale, callbacks, ``optimizer.step()``.

        Its gradients stay to be looked at until the next backward or update, which begins with none.
        """
        self._step([name])

    def _step(self, names: list[str]) -> None:
        for name in names:
            self._totals[name] = self._totals.get(name, 0) + self._last_weight
        if self._is_last:
            self._finish(names)
        else:
            self._deferred += [name for name in names if name not in self._deferred]

    def _finish(self, names: list[str]) -> None:
        """The stages after the last backward."""
        callbacks, context = self.callbacks, self._context
        optimizers = [_arguments.look_up(self._optimizers, name, "optimizer") for name in names]
        if self._weighs:
            totals = [self._totals[name] for name in names]
            if self._communicates:
                run(callbacks.comm_on_start, context)
                totals = sum_over_ranks(self.comm, optimizers, totals)
                run(callbacks.comm_on_finish, context)
            for optimizer, total in zip(optimizers, totals, strict=True):
                rescale(optimizer, self._reference, total)
        for optimizer in optimizers:
            self._precision.unscale(optimizer)
        run(callbacks.update_on_start, context)
        for optimizer in optimizers:
            self._precision.step(optimizer)
        run(callbacks.update_on_finish, context)
        self._stepped += optimizers

    def serialize(self, serializer: AbstractSerializer) -> None:
        super().serialize(serializer)
        span = serializer("span", [self.previous_epoch_detail, self.is_new_epoch])
        if self._spans and not isinstance(serializer, Serializer):
            self.previous_epoch_detail, self.is_new_epoch = span
        self._precision.serialize(serializer["precision"])
