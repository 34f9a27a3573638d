"""The states of DDP's communication hooks, such as the error feedback of PowerSGD, of which each rank has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import is_sharded, to_local
from chainring._messages import warn
from chainring.serializers._objects import has_state, serialize_method
from chainring.serializers._restoring import copy_value
from chainring.serializers.protocol import (
    AbstractSerializer,
    DictionaryDeserializer,
    DictionarySerializer,
    Serializer,
    visit_optional,
)

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_ATTRIBUTES = {
    "PowerSGDState": ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report"),
    "PostLocalSGDState": ("iter",),
}
"""What changes in the states of PyTorch's own hooks, but for tensors and generators."""
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class HookStates:
    """The states of the communication hooks of some modules in DDP."""

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        self._modules = modules
        self._loaded: dict[str, dict[str, Any]] = {}  # until the buckets of DDP are laid out

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Return a context after which the states are as before, or as loaded since the last one."""
        hooks = [hook for hook in self._list() if hook.obstacle is None]
        before = {hook.name: _read(hook.state) for hook in hooks}
        yield
        for hook in hooks:
            _write(hook.state, self._loaded.get(hook.name, before[hook.name]), hook.device)
        self._loaded = {}

    def warn(self) -> None:
        """Warn of states that are not saved, or not enough."""
        for hook in self._list():
            if hook.doubt is not None:
                warn(hook.doubt)

    def serialize(self, serializer: AbstractSerializer, comm: Communicator) -> None:
        """Save the states of all ranks, each with the rank's number, or keep those of this rank until the run starts."""
        hooks = self._list()
        if isinstance(serializer, Serializer):
            for hook in hooks:
                if hook.obstacle is None:
                    _save(hook, serializer[hook.name], comm)
            if doubts := [hook.doubt for hook in hooks if hook.doubt is not None]:
                serializer("inexact", doubts[0])
            return
        self._loaded = {}
        for hook in hooks:
            if hook.obstacle is None and (values := _load(hook, serializer[hook.name], comm)) is not None:
                self._loaded[hook.name] = values

    def _list(self) -> list[_Hook]:
        """Return the hooks that have a state."""
        found: list[_Hook] = []
        for index, module in enumerate(self._modules):
            for hook, state in getattr(module, "_comm_hooks", ()):
                is_plain = state is None or isinstance(state, dist.ProcessGroup)
                if not is_plain and type(state).__module__ != f"{_HOOKS}.mixed_precision_hooks":
                    found.append(_Hook.of(f"{index}-{len(found)}", module, hook, state))
        return found


class _Hook(NamedTuple):
    """A communication hook with its state."""

    name: str
    title: str
    state: Any
    device: torch.device
    obstacle: str | None  # why its state is not saved
    doubt: str | None  # why a resumed run is not the uninterrupted one

    @classmethod
    def of(cls, name: str, module: DistributedDataParallel, hook: Any, state: Any) -> _Hook:
        title = f"the communication hook {getattr(hook, '__name__', type(hook).__name__)} of DDP"
        device = next(module.parameters()).device
        rest = "a resumed run trains on, and not as the uninterrupted one would"
        obstacle = doubt = None
        if not _is_known(state):
            obstacle = f"{title} keeps a {type(state).__name__}, which no snapshot holds: {rest}; give its class serialize()"
        elif module.static_graph:
            obstacle = (
                f"{title} keeps a state for each bucket, which DDP(static_graph=True) lays out otherwise at first: {rest}"
            )
        elif type(state).__name__ == "PostLocalSGDState":
            doubt = f"{title} lets ranks have parameters of their own, of which those of rank 0 are saved: {rest}"
        return cls(name, title, state, device, obstacle, obstacle or doubt)


def _is_of_torch(state: Any) -> bool:
    return type(state).__module__.startswith(f"{_HOOKS}.") and type(state).__name__ in _ATTRIBUTES


def _is_known(state: Any) -> bool:
    return _is_of_torch(state) or serialize_method(state) is not None or has_state(state)


def _read(state: Any) -> dict[str, Any]:
    """Return a copy of what changes in a state."""
    if not _is_of_torch(state):
        serializer = DictionarySerializer()
        serializer.visit("state", state)
        return serializer.target
    values = {name: getattr(state, name) for name in _ATTRIBUTES[type(state).__name__]}
    if hasattr(state, "rng"):
        values["rng"] = state.rng.get_state()
    for name in _BY_BUCKET:
        values |= {f"{name}/{bucket}": tensor for bucket, tensor in getattr(state, name, {}).items()}
    return {key: copy_value(value) for key, value in values.items()}


def _write(state: Any, values: Mapping[str, Any], device: torch.device) -> None:
    """Put a state back."""
    if not _is_of_torch(state):
        DictionaryDeserializer(values).visit("state", state)
        return
    for name in _ATTRIBUTES[type(state).__name__]:
        setattr(state, name, values[name])
    if hasattr(state, "rng"):
        state.rng.set_state(values["rng"])
    for name in filter(lambda name: hasattr(state, name), _BY_BUCKET):
        buckets = {key.partition("/")[2]: value for key, value in values.items() if key.startswith(f"{name}/")}
        setattr(state, name, {int(bucket): tensor.to(device) for bucket, tensor in buckets.items()})


def _save(hook: _Hook, serializer: AbstractSerializer, comm: Communicator) -> None:
    """Save a state; of several ranks the tensors of each bucket as one, of which every rank has a row."""
    world, values = comm.world, _read(hook.state)
    rows: dict[str, Tensor] = {}
    if serializer.comm.world.size > 1 and _is_of_torch(hook.state):
        rows = {key: values.pop(key) for key in list(values) if isinstance(values[key], Tensor)}
    ranks = serializer.comm.world.gather_object(values) if serializer.comm.world.size > 1 else {world.rank: values}
    serializer("class", type(hook.state).__name__)
    serializer("size", world.size)
    serializer("ranks", dict(enumerate(ranks)) if isinstance(ranks, list) else ranks)
    serializer("rows", {key: (tuple(row.shape), str(row.dtype).removeprefix("torch.")) for key, row in rows.items()})
    for key, row in rows.items():
        serializer["row"](key, _as_row(row, world.size))


def _load(hook: _Hook, serializer: AbstractSerializer, comm: Communicator) -> dict[str, Any] | None:
    """Return the state of this rank; ``None``, with a warning, if there is none."""
    world, name = comm.world, type(hook.state).__name__
    saved = visit_optional(serializer, "class", None), visit_optional(serializer, "size", 0)
    ranks = visit_optional(serializer, "ranks", {})
    if saved != (name, world.size) or world.rank not in ranks:
        was = "the saved run has none" if saved[0] is None else f"it was saved as {saved[0]} by {saved[1]} ranks"
        warn(
            f"{hook.title} begins with a new {name} on {world.size} ranks, because {was}: the resumed run is not exactly "
            "the uninterrupted one",
        )
        return None
    values: dict[str, Any] = ranks[world.rank]
    for key, (shape, dtype) in serializer("rows", {}).items():
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device=hook.device)
        rows = serializer["row"](key, _as_row(empty, world.size) if world.size == dist.get_world_size() > 1 else None)
        values[key] = to_local(rows)[0] if is_sharded(rows) else rows[world.rank]
    return values


def _as_row(tensor: Tensor, size: int) -> Any:
    """Return the tensor of all ranks of which this one is a row."""
    from torch.distributed.device_mesh import init_device_mesh  # importing it takes half a second
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(tensor.device.type, (size,))
    return DTensor.from_local(tensor[None], mesh, [Shard(0)], run_check=False)
