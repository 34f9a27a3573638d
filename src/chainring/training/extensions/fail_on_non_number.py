"""FailOnNonNumber: stops, skips or rolls back an update whose loss or gradients are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from chainring import _random
from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import to_full, to_local
from chainring._messages import info
from chainring.serializers._loading import read_state
from chainring.serializers._saving import Checkpoint, StateCollector
from chainring.serializers._values import copy_value
from chainring.serializers.protocol import DictionaryDeserializer, DictionarySerializer, own_states, parameter_names, unwrap
from chainring.training._entry import RollBack
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, undo_if_computed_again
from chainring.training.updaters.standard import StandardUpdater


class FailOnNonNumber(Extension):
    """Checks the loss and the gradients of every update for NaN and infinities, before the optimizer steps.

    With ``"stop"`` and ``"rollback"`` the check is read one iteration later, so that the loop does not wait for it. A
    snapshot waits for the check of its own iteration, so it never contains such an update. If the check fails, the run
    returns to its newest snapshot and repeats the iterations up to that update, where ``"stop"`` ends it, and
    ``"rollback"`` skips the step and continues. Without a snapshot both end the run one iteration after the update.
    ``"skip"`` waits for the check in every iteration, and skips each step whose loss or gradients are not finite.

    What is needed to repeat the step of a `StandardUpdater` that is skipped or ends the run is saved as
    ``non_number_iter_<n>``: see `replay`.

    Example::

        trainer.extend(extensions.FailOnNonNumber("rollback"))

    Args:
        policy: ``"stop"``, ``"skip"`` or ``"rollback"``.
    """

    trigger = (1, "iteration")
    priority = 1000
    writes = ("non_number_iter_{.iteration}",)

    def __init__(self, policy: Literal["stop", "skip", "rollback"] = "stop") -> None:
        if policy not in ("stop", "skip", "rollback"):
            raise ValueError(f"policy is one of 'stop', 'skip', 'rollback', got {policy!r}")
        self.policy = policy
        self._bad_iterations: set[int] = set()  # not state: they must be remembered when the run goes back
        self._pending: list[tuple[int, Tensor, torch.Event | None]] = []
        self._before: dict[str, Any] | None = None  # generators, buffers and own states of modules before the forward
        self._batches: list[Any] = []
        self._undo = ExitStack()  # what takes the checks out of the trainer again

    def initialize(self, trainer: Trainer) -> None:
        self._pending = []
        for optimizer in trainer.updater.get_all_optimizers().values():
            self._undo.callback(optimizer.register_step_pre_hook(partial(self._before_step, trainer)).remove)
        callbacks = getattr(trainer.updater, "callbacks", None)
        if isinstance(callbacks, UpdateCallbacks):
            record = partial(self._record_batch, trainer)
            callbacks.add("batch_on_finish", record)
            self._undo.callback(callbacks.remove, "batch_on_finish", record)

    def finalize(self) -> None:
        self._undo.close()
        self._before, self._batches = None, []

    def _is_checked_at_once(self, trainer: Trainer) -> bool:
        return self.policy == "skip" or trainer.updater.iteration + 1 in self._bad_iterations

    def _record_batch(self, trainer: Trainer, context: UpdateContext) -> None:
        """Keep what the forward depends on: the batch, the generators, the buffers and a module's own state."""
        if not self._is_checked_at_once(trainer):
            return
        if self._before is None:
            self._before = {"generators": _random.get_rng_state(trainer.updater)}
            for name, model in trainer.updater.get_all_models().items():
                self._before |= {_key(name, path): copy_value(buffer) for path, buffer in unwrap(model).named_buffers()}
                beside = DictionarySerializer()
                for path, part in own_states(unwrap(model)):
                    part.serialize(beside[path])
                self._before[f"own state of {name}"] = beside.target
        self._batches.append(context.batch)
        undo_if_computed_again(self._batches.pop)

    def _before_step(self, trainer: Trainer, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Check a step before it, or, if it is done by a closure, in the first call of that."""
        closure = _closure_of(args, kwargs)
        if closure is None:
            self._check_step(trainer, optimizer)
            return None
        is_checked = False

        def check() -> Any:
            nonlocal is_checked
            loss = closure()
            if not is_checked:
                is_checked = True
                self._check_step(trainer, optimizer)
            return loss

        return (args[0], check), {}

    def _check_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Check the loss and all gradients, before a step; skip the step if they are bad, or end the run."""
        iteration, world, reported = trainer.updater.iteration + 1, trainer.comm.world, trainer.reported
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        losses = [reported[key] for key in reported.values if key.rpartition("/")[2] == "loss"]
        losses = [value for value in losses if isinstance(value, Tensor) and value.is_floating_point()]
        # A loss is the rank's own, and all must decide alike.
        is_bad = _on_any_rank(world, _has_non_number([*(parameter.grad for parameter in trained), *losses]))
        if not self._is_checked_at_once(trainer):
            event = None
            if is_bad.device.type != "cpu":  # so that reading it waits for nothing later
                on_device, is_bad = is_bad, torch.empty((), dtype=torch.bool, pin_memory=True)
                is_bad.copy_(on_device, non_blocking=True)
                event = torch.Event(on_device.device)
                event.record(torch.accelerator.current_stream(on_device.device))  # by default that of the current device
            self._pending.append((iteration, is_bad, event))
            return
        if not bool(is_bad):
            return
        names = parameter_names(trainer.updater.get_all_models())
        bad_here = [names.get(id(p), "?") for p in trained if not bool(torch.isfinite(to_local(p.grad)).all())]
        of_ranks = world.gather_object((bad_here, bool(_has_non_number(losses))))
        bad = list(dict.fromkeys(chain.from_iterable(names for names, _ in of_ranks)))  # of a shard its rank alone knows
        rank = next((rank for rank, (_, has_bad_loss) in enumerate(of_ranks) if has_bad_loss), 0)
        origin = f"in the gradients of {', '.join(bad[:4])}{' ...' if len(bad) > 4 else ''}" if bad else "in the loss"
        origin += f", from the loss of rank {rank}" if rank else ""
        text = f"the update of iteration {iteration} has NaN or infinity {origin}"
        if self._before is not None:
            path = self._save(trainer, iteration, rank)
            text += f"; FailOnNonNumber.replay({str(path)!r}, updater) repeats it"
        if self.policy == "stop":
            raise NonNumberError(text)
        info(f"{text}; its step is skipped")
        for parameter in trained:
            parameter.grad = None

    def _save(self, trainer: Trainer, iteration: int, rank: int) -> str:
        """Save what is needed to repeat the update of a rank; all gather a model of which each holds shards, one writes."""
        world, state = trainer.comm.world, StateCollector()
        seen: Any = self._before, self._batches
        if rank:
            sent = tree_map_only(Tensor, lambda tensor: to_full(tensor).cpu(), seen) if rank == world.rank else None
            seen = world.gather_object(sent)[rank]
        before, batches = seen
        state("generators", before["generators"])
        state("batches", batches)
        for name, model in trainer.updater.get_all_models().items():
            for path, value in unwrap(model).state_dict().items():
                whole = to_full(before.get(_key(name, path), value))
                state(f"model:{_key(name, path)}", whole if trainer.comm.is_main else None)
            for path, value in before[f"own state of {name}"].items():
                if f"model:{_key(name, path)}" not in state.target:  # as a parameter or buffer is
                    state(f"model:{_key(name, path)}", value)
        store, filename = trainer.store, f"non_number_iter_{iteration}"
        if trainer.comm.is_main and not store.holds(filename, iteration):
            Checkpoint(state).commit(store, filename, iteration)
        return store.snapshot(filename).path

    def __call__(self, trainer: Trainer) -> None:
        self._before, self._batches = None, []
        iteration = trainer.updater.iteration
        if self.policy == "stop" and iteration in self._bad_iterations:
            raise NonNumberError(
                f"the update of iteration {iteration} had NaN or infinity, but not when it was repeated: it depends on "
                "something that is not part of the saved state; `chainring verify-resume` finds what"
            )
        self._read_flags(before=iteration)

    def before_snapshot(self, trainer: Trainer) -> None:
        self._read_flags(before=trainer.updater.iteration + 1)
        parameters = [p for model in trainer.updater.get_all_models().values() for p in model.parameters()]
        is_bad = _on_any_rank(trainer.comm.world, _has_non_number(parameters))
        if bool(is_bad):  # not by a step, or by a step that overflowed the dtype
            raise NonNumberError(f"a parameter is NaN or infinite after iteration {trainer.updater.iteration}")

    def _read_flags(self, before: int) -> None:
        """Read the checks of the iterations before this one, and go back if one of them failed."""
        while self._pending and self._pending[0][0] < before:
            iteration, is_bad, event = self._pending.pop(0)
            if event is not None:
                event.synchronize()
            if bool(is_bad):
                self._bad_iterations.add(iteration)
                self._pending = []
                text = f"the update of iteration {iteration} had NaN or infinity in its loss or gradients"
                remedy = 'lower the learning rate, clip the gradients, or skip such updates with FailOnNonNumber("skip")'
                raise RollBack(text, otherwise=NonNumberError(f"{text}; {remedy}"))

    @staticmethod
    def replay(path: str | PathLike[str], updater: StandardUpdater) -> None:
        """Repeat a saved update up to its step, with the same batch, parameters, buffers and random numbers.

        Afterwards the gradients can be inspected; run it under ``torch.autograd.detect_anomaly()`` to find the operation.

        Args:
            path: the directory ``non_number_iter_<n>`` in the run's directory.
            updater: a new `StandardUpdater` over the same models. A batch is taken from its iterators and ignored.

        Raises:
            CorruptError: the files are damaged.
            RuntimeError: the models differ from the saved ones.
        """
        state = read_state(path)
        for name, model in updater.get_all_models().items():
            prefix = f"model:{name}/"
            saved = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            DictionaryDeserializer(saved).visit("", unwrap(model))
        batches = list(state["batches"])

        def replace_batch(context: UpdateContext) -> None:
            if len(batches) == len(state["batches"]):
                _random.set_rng_state(state["generators"], updater)
            context.batch = _placed_like(batches.pop(0), context.batch)

        def end_replay(_: Optimizer, args: Any, kwargs: Any) -> None:
            if (closure := _closure_of(args, kwargs)) is not None:
                closure()
            raise _ReplayEnd

        handles = [optimizer.register_step_pre_hook(end_replay) for optimizer in updater.get_all_optimizers().values()]
        updater.callbacks.add("batch_on_finish", replace_batch)
        try:
            with suppress(_ReplayEnd):
                updater.update()
        finally:
            updater.callbacks.remove("batch_on_finish", replace_batch)
            for handle in handles:
                handle.remove()


class NonNumberError(RuntimeError):
    """A loss, a gradient or a parameter is NaN or infinite.

    Example::

        try:
            trainer.run()  # with trainer.extend(extensions.FailOnNonNumber())
        except NonNumberError as error:
            print(error)  # names the value, the iteration, and the bundle that replays the batch
    """


class _ReplayEnd(Exception):  # noqa: N818 - it ends the replay before the step, and is not an error
    pass


def _on_any_rank(world: Communicator, flag: Tensor) -> Tensor:
    if world.size == 1:
        return flag
    count = flag.to(world.device, torch.float32)
    world.all_reduce([count], average=False)
    return count > 0


def _has_non_number(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether any number in any tensor is NaN or infinite, as one boolean on their device."""
    dense = [tensor.coalesce().values() if tensor.is_sparse else to_local(tensor) for tensor in tensors]
    dense = [tensor.detach() for tensor in dense if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())]
    if not dense:
        return torch.zeros((), dtype=torch.bool)
    # The largest magnitude, which is NaN where there is one; unlike a sum of squares it cannot overflow.
    return ~torch.isfinite(torch.nn.utils.get_total_norm(dense, math.inf))


def _placed_like(batch: Any, like: Any) -> Any:
    """Return a batch with its tensors where those of another are; if that has others, on the device of its first one."""
    devices = [leaf.device for leaf in tree_leaves(like) if isinstance(leaf, Tensor)]
    leaves, structure = tree_flatten(batch)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(devices) != len(tensors):
        devices = devices[:1] * len(tensors)
    for i, device in zip(tensors, devices, strict=False):
        leaves[i] = leaves[i].to(device)
    return tree_unflatten(leaves, structure)


def _closure_of(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _key(model_name: str, path: str) -> str:
    return f"{model_name}/{path.replace('.', '/')}"
