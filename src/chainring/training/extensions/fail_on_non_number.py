"""FailOnNonNumber: what happens when a loss or a gradient is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from chainring import _random
from chainring._distributed.sharding import to_local
from chainring._messages import info
from chainring._naming import unwrap
from chainring.serializers._checkpoint import Checkpoint, read_state
from chainring.serializers._store import Store
from chainring.serializers.base import DictionaryDeserializer, StateCollector, copy_value, load_module
from chainring.training.extension import Extension, RollBack
from chainring.training.updaters._optimizer_state import parameter_names
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext

if TYPE_CHECKING:
    from chainring.training.trainer import Trainer


def is_bad(tensors: Sequence[Tensor]) -> Tensor:
    """Whether any number in any tensor is NaN or infinite, as one boolean on their device."""
    dense = [tensor.coalesce().values() if tensor.is_sparse else to_local(tensor) for tensor in tensors]
    dense = [tensor.detach() for tensor in dense if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())]
    if not dense:
        return torch.zeros((), dtype=torch.bool)
    # The largest magnitude, which is NaN where there is one; unlike a sum of squares it cannot overflow.
    return ~torch.isfinite(torch.nn.utils.get_total_norm(dense, math.inf))


class Flag:
    """A boolean on its way from the device to the host: to read it waits for nothing that was asked of the device later."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.Event | None = None
        if value.device.type == "cpu":
            self._value = value
            return
        self._value = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._value.copy_(value, non_blocking=True)
        self._event = torch.Event(value.device)
        self._event.record()

    def read(self) -> bool:
        """The boolean."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value)


POLICIES = ("stop", "skip", "rollback")


class FailOnNonNumber(Extension):
    """Watches the loss and the gradients of every update, before the optimizer steps.

    With ``"stop"`` and ``"rollback"`` the answer is computed on the device and read one iteration later, so that the loop
    does not wait for it; a snapshot waits for that of its own iteration, and is never taken of a state that is poisoned.
    The run then goes back to its newest snapshot and comes to the same update again, where it can be saved as it was.
    There ``"stop"`` ends the run, and ``"rollback"`` leaves that step out and goes on. Without a snapshot to go back to,
    both end the run one iteration after the update.

    ``"skip"`` waits for the answer in every iteration, and leaves out each step whose gradients are no numbers.

    Where a step is left out or the run is ended at it, what is needed to repeat it is saved as ``non_number_iter_<n>``: see
    `replay`. That takes a `StandardUpdater`.

    Args:
        policy: ``"stop"``, ``"skip"`` or ``"rollback"``.

    Raises:
        ValueError: the policy is another.
    """

    trigger = (1, "iteration")
    priority = 1000

    def __init__(self, policy: Literal["stop", "skip", "rollback"] = "stop") -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy is one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
        self.policy = policy
        self._known: set[int] = set()  # iterations whose updates are no numbers; not state: who goes back must remember
        self._pending: list[tuple[int, Flag]] = []
        self._before: dict[str, Any] | None = None
        self._batches: list[Any] = []
        self._undo: list[Any] = []
        self._trainer: Trainer | None = None

    @property
    def writes(self) -> tuple[str, ...]:
        return ("non_number_iter_{.iteration}",)

    def initialize(self, trainer: Trainer) -> None:
        updater = trainer.updater
        self._trainer, self._pending = trainer, []
        for optimizer in updater.get_all_optimizers().values():
            handle = optimizer.register_step_pre_hook(self._look)
            self._undo.append(handle.remove)
        callbacks = getattr(updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            callbacks.add("batch_on_finish", self._take_down)
            self._undo.append(partial(callbacks.remove, "batch_on_finish", self._take_down))

    def finalize(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._before, self._batches = None, []

    @property
    def _is_armed(self) -> bool:
        """Whether this update is looked at before its step."""
        assert self._trainer is not None
        return self.policy == "skip" or self._trainer.updater.iteration + 1 in self._known

    def _take_down(self, context: UpdateContext) -> None:
        """Keeps what the forward begins with: the batch, the generators, and the buffers that it changes."""
        if not self._is_armed:
            return
        assert self._trainer is not None
        if self._before is None:
            self._batches = []
            self._before = {"generators": _random.get_rng_state()}
            for name, model in self._trainer.updater.get_all_models().items():
                buffers = dict(unwrap(model).named_buffers())
                self._before |= {f"{name}/{path.replace('.', '/')}": copy_value(buffer) for path, buffer in buffers.items()}
        self._batches.append(context.batch)

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        """Before a step: is there a number in every gradient, and in the loss?"""
        trainer = self._trainer
        assert trainer is not None
        iteration = trainer.updater.iteration + 1
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        bad = is_bad([*gradients, *_losses(trainer.observation)])
        if trainer.comm.size > 1:  # a loss is the rank's own, and all must decide alike
            count = bad.to(torch.float32)
            trainer.comm.all_reduce([count], average=False)
            bad = count > 0
        if not self._is_armed:
            self._pending.append((iteration, Flag(bad)))
        elif bool(bad):
            self._leave_out(trainer, optimizer, iteration)

    def _leave_out(self, trainer: Trainer, optimizer: Optimizer, iteration: int) -> None:
        names = parameter_names(trainer.updater.get_all_models())
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found = [names.get(id(p), "?") for p in parameters if not bool(torch.isfinite(p.grad).all())]
        where = f"in the gradients of {', '.join(found[:4])}{' ...' if len(found) > 4 else ''}" if found else "in the loss"
        bundle = self._save(trainer, iteration) if trainer.comm.rank == 0 else None
        text = f"the update of iteration {iteration} has NaN or infinity {where}"
        text += f"; FailOnNonNumber.replay({str(bundle)!r}, updater) repeats it" if bundle is not None else ""
        if self.policy == "stop":
            raise NonNumberError(text)
        info(f"{text}; its step is left out")
        for parameter in parameters:
            parameter.grad = None

    def _save(self, trainer: Trainer, iteration: int) -> Path | None:
        if self._before is None:
            return None
        state = StateCollector()
        before = dict(self._before)
        state("generators", before.pop("generators"))
        state("batches", self._batches)
        for name, model in trainer.updater.get_all_models().items():
            for path, value in unwrap(model).state_dict().items():
                key = f"{name}/{path.replace('.', '/')}"
                state(f"model:{key}", before.get(key, value))
        store, name = Store(trainer.out), f"non_number_iter_{iteration}"
        if not store.holds(name, iteration):
            Checkpoint(state).commit(store, name, iteration)
        return store.root / name

    def __call__(self, trainer: Trainer) -> None:
        self._before, self._batches = None, []
        iteration = trainer.updater.iteration
        if self.policy == "stop" and iteration in self._known:
            raise NonNumberError(
                f"the update of iteration {iteration} had NaN or infinity, and has not when it is repeated: it depends on "
                "something that is not in the state of the run; `chainring verify-resume` finds what"
            )
        self._read(trainer, before=iteration)

    def before_snapshot(self, trainer: Trainer) -> None:
        self._read(trainer, before=trainer.updater.iteration + 1)
        parameters = [p for model in trainer.updater.get_all_models().values() for p in model.parameters()]
        if bool(is_bad(parameters)):  # by other than a step, or by a step too large for the format
            raise NonNumberError(f"a parameter is NaN or infinite after iteration {trainer.updater.iteration}")

    def _read(self, trainer: Trainer, before: int) -> None:
        """Acts upon the flags of the iterations before this one."""
        while self._pending and self._pending[0][0] < before:
            iteration, flag = self._pending.pop(0)
            if flag.read():
                self._known.add(iteration)
                self._pending = []
                raise _GoBack(f"the update of iteration {iteration} had NaN or infinity in its loss or gradients")

    @staticmethod
    def replay(path: Any, updater: Any) -> None:
        """Repeats an update that was saved, up to its step: the same batch, parameters, buffers and random numbers.

        Afterwards the gradients can be looked at; run it within ``torch.autograd.detect_anomaly()`` to find the operation.

        Args:
            path: what was saved, ``non_number_iter_<n>`` in the run's directory.
            updater: a `StandardUpdater` over the same models, made anew. Its iterators are asked for a batch that is
                thrown away.

        Raises:
            CorruptError: it is not what was written.
            RuntimeError: the models are others.
        """
        state = read_state(Path(path))
        for name, model in updater.get_all_models().items():
            prefix = f"model:{name}/"
            saved = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            load_module(DictionaryDeserializer(saved), unwrap(model))
        batches = iter(state["batches"])

        replaced = 0

        def replace(context: UpdateContext) -> None:
            nonlocal replaced
            if not replaced:
                _random.set_rng_state(state["generators"])
            replaced += 1
            context.batch = next(batches)

        handles = [optimizer.register_step_pre_hook(_stop) for optimizer in updater.get_all_optimizers().values()]
        updater.callbacks.add("batch_on_finish", replace)
        try:
            updater.update()
        except _Replayed:
            pass
        finally:
            updater.callbacks.remove("batch_on_finish", replace)
            for handle in handles:
                handle.remove()


class NonNumberError(RuntimeError):
    """A loss, a gradient or a parameter is NaN or infinite."""


class _GoBack(RollBack, NonNumberError):  # noqa: N818 - see RollBack
    """Where there is no snapshot to go back to, it is the error that ends the run."""


class _Replayed(Exception):  # noqa: N818 - it ends the replay before the step
    pass


def _stop(*_: Any) -> None:
    raise _Replayed


def _losses(observation: Mapping[str, Any]) -> list[Tensor]:
    """The losses that were reported in this iteration."""
    values = [value for key, value in observation.items() if key.rpartition("/")[2] == "loss"]
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
