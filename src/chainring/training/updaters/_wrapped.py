"""Modules wrapped in DDP or `fully_shard`, which exchange gradients in their backward; and how ranks begin alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import exchanged_by_fsdp, find_misplaced, fsdp_modules, is_sharded, to_local
from chainring._messages import warn
from chainring.serializers._values import copy_value
from chainring.serializers.protocol import (
    AbstractSerializer,
    DictionaryDeserializer,
    DictionarySerializer,
    Serializer,
    has_state,
    serialize_method,
    visit_optional,
)

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_ATTRIBUTES = {
    "PowerSGDState": ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report"),
    "PostLocalSGDState": ("iter",),
}
"""What changes in the states of PyTorch's own hooks, but for tensors and generators."""
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")


class WrappedModules:
    """The modules of some models that are wrapped in DDP or `fully_shard`, and the states of communication hooks of DDP.

    Attributes:
        parameters: the ids of their parameters.
        in_buckets: the ids of those whose gradients lie in memory that DDP writes to in each backward.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._replicated = _list_ddp_modules(models)
        self._sharded = [module for model in models for module in fsdp_modules(model)]
        replicated = [parameter for module in self._replicated for parameter in module.parameters()]
        sharded = [parameter for model in models for parameter in exchanged_by_fsdp(model)]
        self.parameters = {id(parameter) for parameter in [*replicated, *sharded]}
        viewed = [module for module in self._replicated if module.gradient_as_bucket_view]
        self.in_buckets = {id(parameter) for module in viewed for parameter in module.parameters()}
        self._loaded: dict[str, dict[str, Any]] = {}  # states of hooks, until the buckets of DDP are laid out

    def set_gradient_sync(self, enabled: bool) -> None:
        """Let the next backward exchange gradients between ranks, or only add to those of this rank."""
        for module in self._replicated:
            module.require_backward_grad_sync = enabled  # what DDP's own no_sync() sets
        for sharded in self._sharded:
            sharded.set_requires_gradient_sync(enabled)

    def build_ddp_buckets(self) -> None:
        """Let DDP assign its buckets before the first update, by two backwards that touch no data.

        DDP orders its buckets by the first backward that it sees. After a resume that is another one than in the
        uninterrupted run, so that sums of three ranks or more would round otherwise, and the two runs would differ in their
        last bits. DDP with a static graph must see the graph of the model first, and is left alone.
        """
        for module in self._replicated:
            if not module.static_graph:
                wrapped, module.module = module.module, _Surrogate(module.module)
                broadcasts, module.broadcast_buffers = module.broadcast_buffers, False
                try:
                    for _ in range(2):
                        loss: Tensor = module.forward()  # type: ignore[no-untyped-call]
                        loss.backward()  # type: ignore[no-untyped-call]
                finally:
                    module.module, module.broadcast_buffers = wrapped, broadcasts
                for parameter in module.parameters():
                    parameter.grad = None

    @contextmanager
    def preserved_hooks(self) -> Iterator[None]:
        """Warn of hooks whose states are not saved; return a context after which states are as before, or as loaded."""
        hooks = self._list_hooks()
        for hook in hooks:
            if hook.doubt is not None:
                warn(hook.doubt)
        before = {hook: hook.read() for hook in hooks if hook.obstacle is None}
        yield
        for hook, state in before.items():
            hook.write(self._loaded.get(hook.name, state))
        self._loaded = {}

    def serialize(self, serializer: AbstractSerializer, comm: Communicator) -> None:
        """Save the states of hooks of all ranks, or keep those of this rank until the run starts."""
        hooks = self._list_hooks()
        saved = [hook for hook in hooks if hook.obstacle is None]
        if isinstance(serializer, Serializer):
            for hook in saved:
                hook.save(serializer[hook.name], comm)
            if doubts := [hook.doubt for hook in hooks if hook.doubt is not None]:
                serializer("inexact", doubts[0])
        else:
            loaded = {hook.name: hook.load(serializer[hook.name], comm) for hook in saved}
            self._loaded = {name: values for name, values in loaded.items() if values is not None}

    def _list_hooks(self) -> list[_Hook]:
        """Return the communication hooks that have a state."""
        found: list[_Hook] = []
        for index, module in enumerate(self._replicated):
            for hook, state in getattr(module, "_comm_hooks", ()):
                is_plain = state is None or isinstance(state, dist.ProcessGroup)
                if not is_plain and type(state).__module__ != f"{_HOOKS}.mixed_precision_hooks":
                    found.append(_Hook(f"{index}-{len(found)}", module, hook, state))
        return found


class _Surrogate(nn.Module):
    """Stands for a model: its output depends on every parameter, the first ones last, as in a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.training = model.training
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._trained]).sum()


class _Hook:
    """A communication hook of DDP with its state.

    ``obstacle`` is why its state is not saved, ``doubt`` why a resumed run is not the uninterrupted one.
    """

    def __init__(self, name: str, module: DistributedDataParallel, hook: Any, state: Any) -> None:
        self.name, self._state, self._class = name, state, type(state).__name__
        self._title = f"the communication hook {getattr(hook, '__name__', type(hook).__name__)} of DDP"
        self._device = next(module.parameters()).device
        self._is_of_torch = type(state).__module__.startswith(f"{_HOOKS}.") and self._class in _ATTRIBUTES
        rest = "a resumed run trains on, and not as the uninterrupted one would"
        self.obstacle: str | None = None
        if not self._is_of_torch and serialize_method(state) is None and not has_state(state):
            self.obstacle = (
                f"{self._title} keeps a {self._class}, which no snapshot holds: {rest}; give its class serialize()"
            )
        elif module.static_graph:
            self.obstacle = (
                f"{self._title} keeps a state for each bucket, which DDP(static_graph=True) lays out otherwise at first: "
                f"{rest}"
            )
        self.doubt = self.obstacle
        if self.doubt is None and self._class == "PostLocalSGDState":
            self.doubt = f"{self._title} lets ranks have parameters of their own, of which those of rank 0 are saved: {rest}"

    def read(self) -> dict[str, Any]:
        """Return a copy of what changes in the state."""
        if not self._is_of_torch:
            serializer = DictionarySerializer()
            serializer.visit("state", self._state)
            return serializer.target
        values = {name: getattr(self._state, name) for name in _ATTRIBUTES[self._class]}
        if hasattr(self._state, "rng"):
            values["rng"] = self._state.rng.get_state()
        for name in _BY_BUCKET:
            values |= {f"{name}/{bucket}": tensor for bucket, tensor in getattr(self._state, name, {}).items()}
        return {key: copy_value(value) for key, value in values.items()}

    def write(self, values: Mapping[str, Any]) -> None:
        """Put the state back."""
        if not self._is_of_torch:
            DictionaryDeserializer(values).visit("state", self._state)
            return
        for name in _ATTRIBUTES[self._class]:
            setattr(self._state, name, values[name])
        if hasattr(self._state, "rng"):
            self._state.rng.set_state(values["rng"])
        for name in _BY_BUCKET:
            if hasattr(self._state, name):
                buckets = {key.partition("/")[2]: value for key, value in values.items() if key.startswith(f"{name}/")}
                setattr(self._state, name, {int(bucket): tensor.to(self._device) for bucket, tensor in buckets.items()})

    def save(self, serializer: AbstractSerializer, comm: Communicator) -> None:
        """Save the state; of several ranks the tensors of each bucket as one, of which every rank has a row."""
        world, values, ranks = comm.world, self.read(), serializer.comm.world
        rows: dict[str, Tensor] = {}
        if ranks.size > 1 and self._is_of_torch:
            rows = {key: values.pop(key) for key in list(values) if isinstance(values[key], Tensor)}
        serializer("class", self._class)
        serializer("size", world.size)
        serializer("ranks", dict(enumerate(ranks.gather_object(values))) if ranks.size > 1 else {world.rank: values})
        serializer("rows", {key: (tuple(row.shape), str(row.dtype).removeprefix("torch.")) for key, row in rows.items()})
        for key, row in rows.items():
            serializer["row"](key, _as_row(row, world.size))

    def load(self, serializer: AbstractSerializer, comm: Communicator) -> dict[str, Any] | None:
        """Return the state of this rank; ``None``, with a warning, if there is none."""
        world = comm.world
        saved = visit_optional(serializer, "class", None), visit_optional(serializer, "size", 0)
        ranks = visit_optional(serializer, "ranks", {})
        if saved != (self._class, world.size) or world.rank not in ranks:
            was = "the saved run has none" if saved[0] is None else f"it was saved as {saved[0]} by {saved[1]} ranks"
            warn(
                f"{self._title} begins with a new {self._class} on {world.size} ranks, because {was}: the resumed run is "
                "not exactly the uninterrupted one",
            )
            return None
        values: dict[str, Any] = ranks[world.rank]
        for key, (shape, dtype) in serializer("rows", {}).items():
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            rows = serializer["row"](key, _as_row(empty, world.size) if world.size == dist.get_world_size() > 1 else None)
            values[key] = to_local(rows)[0] if is_sharded(rows) else rows[world.rank]
        return values


def _as_row(tensor: Tensor, size: int) -> Any:
    """Return the tensor of all ranks of which this one is a row."""
    from torch.distributed.device_mesh import init_device_mesh  # importing it takes half a second
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(tensor.device.type, (size,))
    return DTensor.from_local(tensor[None], mesh, [Shard(0)], run_check=False)


def check_sharding(comm: Communicator, models: Mapping[str, nn.Module]) -> None:
    """Refuse tensors and modules that exchange over other ranks than those that share the batch."""
    if comm.world.size == 1:
        return
    for label, model in models.items():
        if found := find_misplaced(model, comm):
            name, parameter = found
            raise ValueError(
                f"with comm each of the {comm.size} ranks takes its share of a batch, and parameter {name!r} of model "
                f"{label!r} is placed as {parameter.placements} on {parameter.device_mesh}, so that ranks which belong "
                "together would see different rows, or that its gradient would not be averaged over the data: shard it by "
                "fully_shard(model, mesh=init_device_mesh(comm.device.type, (comm.size,))); or make one mesh of all ranks, "
                'such as init_device_mesh(comm.device.type, (2, 4), mesh_dim_names=("dp", "tp")), and give the updater '
                'comm=create_communicator(mesh=mesh["dp"]), fully_shard mesh["dp"], and parallelize_module mesh["tp"]'
            )
    for module in _list_ddp_modules(list(models.values())):
        ranks = dist.get_process_group_ranks(module.process_group)
        if ranks != list(comm.data_ranks):
            raise ValueError(
                f"DistributedDataParallel averages gradients over the ranks {ranks}, and the ranks that share the data are "
                f'{list(comm.data_ranks)}: give it process_group=mesh["dp"].get_group() of the mesh in '
                'comm=create_communicator(mesh=mesh["dp"]), or leave the model plain, whose gradients the updater averages'
            )
    modules = [module for model in models.values() for module in model.modules()] if comm.world.size > comm.size else []
    for norm in (module for module in modules if isinstance(module, nn.SyncBatchNorm)):
        group = norm.process_group
        if group is None or dist.get_process_group_ranks(group) != list(comm.data_ranks):
            raise ValueError(
                f"SyncBatchNorm counts the rows of all {comm.world.size} ranks, of which {comm.size} share the data, so "
                "that its running variance would be that of more rows than there are: give it "
                'process_group=mesh["dp"].get_group()'
            )


def broadcast_parameters(comm: Communicator, models: Sequence[nn.Module], wrapped: WrappedModules) -> None:
    """Give all ranks the parameters and buffers of rank 0, except those that DDP or `fully_shard` care for."""
    parameters = [p for model in models for p in model.parameters() if id(p) not in wrapped.parameters]
    comm.world.broadcast([*(p for p in parameters if not is_sharded(p)), *list_buffers(models)])
    comm.broadcast([to_local(parameter) for parameter in parameters if is_sharded(parameter)])


def warn_of_untied(comm: Communicator, model: nn.Module) -> None:
    """Warn of matrices that ranks have divided and that have the same elements, as `parallelize_module` leaves tied ones."""
    divided: dict[str, Any] = {name: p for name, p in model.named_parameters() if is_sharded(p) and p.ndim > 1}
    squares: dict[str, float] = {}  # of the shard of this rank, over the number of ranks that hold the same one
    for name, parameter in divided.items():
        placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
        copies = math.prod(size for size, placement in placed if placement.is_replicate())
        parts = torch.split(to_local(parameter).detach().flatten(), 1 << 22)
        squares[name] = sum(part.double().square().sum().item() for part in parts) / copies
    gathered = comm.world.gather_object(squares)
    alike: dict[Any, str] = {}
    for name, parameter in divided.items():
        total = sum(rank[name] for rank in gathered)
        other = alike.setdefault((tuple(parameter.shape), f"{total:.9e}"), name)
        if other != name and total:
            warn(
                f"parameters {other!r} and {name!r} are equal but not shared: if they were tied, parallelize_module has "
                "untied them, and each is now trained separately. Tie them again after it, before the optimizer is made, "
                "by assigning the weight of one module to the other",
            )


def list_buffers(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return the buffers of models, except those of DDP, which broadcasts them itself."""
    replicated = {buffer for module in _list_ddp_modules(models) for buffer in module.buffers()}
    return [buffer for model in models for buffer in model.buffers() if buffer not in replicated and not is_sharded(buffer)]


def _list_ddp_modules(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [module for model in models for module in model.modules() if isinstance(module, DistributedDataParallel)]
