"""StandardUpdater: forward, backward, step; in stages, over accumulated parts and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

from chainring.communicator import Communicator
from chainring.converters import Device, as_device, concat_examples
from chainring.iterators.base import Batch, Iterator
from chainring.iterators.loader import as_iterator
from chainring.serializers.base import AbstractSerializer, Serializer, visit_setting
from chainring.training._loss import (
    arguments,
    check_call,
    check_loss,
    check_loss_func,
    check_model_call,
    differentiate,
    loss_and_weight,
)
from chainring.training.updaters import _arguments
from chainring.training.updaters._compiled import Compiled, not_compiled
from chainring.training.updaters._gradients import clear
from chainring.training.updaters._optimizer_state import hyperparameters
from chainring.training.updaters._parts import InParts
from chainring.training.updaters._precision import get_precision
from chainring.training.updaters._ranks import Wrapped, buffers, equalize
from chainring.training.updaters._registered import NO_EPOCHS
from chainring.training.updaters._step import step
from chainring.training.updaters.callbacks import UpdateCallbacks, run


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
        self._models = _arguments.models(model)
        self._optimizers = _arguments.optimizers(optimizer, self._models)
        iterators = _arguments.named(iterator, "iterator")
        self._iterators = {name: as_iterator(source) for name, source in iterators.items()}
        self.constructed = {name: hyperparameters(each) for name, each in self._optimizers.items()}
        self._clock = self._iterators.get("main", NO_EPOCHS)
        _arguments.check_settings(converter, accumulate, callbacks)
        if loss_func is not None:
            check_loss_func(loss_func)
        if not _overrides(self, "update_core"):
            _arguments.require_main(self._iterators, self._models)
            _arguments.refuse_closures(self._optimizers)
        self.converter = converter
        self.device = as_device(device)
        self.loss_func = loss_func
        self.accumulate = accumulate
        self.callbacks = UpdateCallbacks() if callbacks is None else callbacks
        self.comm = Communicator() if comm is None else comm
        self._name_and_move()
        self._precision = get_precision(precision, _arguments.device_type(self._models))
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
        self._is_straight = not (self._weighs or has_own_stage or self.callbacks or precision == "fp16")
        # Without autocast there is nothing to enter, and a context manager that does nothing is three calls.
        self._in_precision = self._loss if precision == "fp32" else self._loss_in_autocast
        self._compute: Callable[[Any], Any] = self._compute_eagerly
        if compiles and self._is_straight:
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
        weight = self._compute(self.converter(batch, self.device))
        self.weight = weight if weight is not None else batch.weight if type(batch) is Batch else len(batch)

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
        if name == "main":
            weight = getattr(batch, "weight", None)
            self._part_weight = len(batch) if weight is None else weight
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


def _overrides(updater: StandardUpdater, *names: str) -> bool:
    return any(getattr(type(updater), name) is not getattr(StandardUpdater, name) for name in names)
