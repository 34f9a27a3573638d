"""Modules wrapped in DDP or `fully_shard`, which exchange gradients in their backward; and how ranks begin alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chainring._distributed.communicator import Communicator
from chainring._distributed.sharding import exchanged_by_fsdp, find_misplaced, fsdp_modules, is_sharded, to_local
from chainring._messages import warn
from chainring.training.updaters._hook_states import HookStates


class WrappedModules:
    """The modules of some models that are wrapped in DDP or `fully_shard`; ``parameters`` are the ids of theirs.

    ``in_buckets`` are the ids of those whose gradients lie in memory that DDP writes to in each backward, ``hook_states``
    those of communication hooks of DDP.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._replicated = _list_ddp_modules(models)
        self.hook_states = HookStates(self._replicated) if self._replicated else None
        self._sharded = [module for model in models for module in fsdp_modules(model)]
        replicated = [parameter for module in self._replicated for parameter in module.parameters()]
        sharded = [parameter for model in models for parameter in exchanged_by_fsdp(model)]
        self.parameters = {id(parameter) for parameter in [*replicated, *sharded]}
        viewed = [module for module in self._replicated if module.gradient_as_bucket_view]
        self.in_buckets = {id(parameter) for module in viewed for parameter in module.parameters()}

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


class _Surrogate(nn.Module):
    """Stands for a model: its output depends on every parameter, the first ones last, as in a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.training = model.training
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward(self) -> Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._trained]).sum()


def check_sharding(comm: Communicator, models: Mapping[str, nn.Module]) -> None:
    """Refuse tensors that are sharded in another way than over the ranks that share the batch.

    Raises:
        ValueError: of tensor parallelism, for example, whose ranks must all see the same rows.
    """
    for label, model in models.items() if comm.world.size > 1 else ():
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
    for module in _list_ddp_modules(list(models.values())) if comm.world.size > 1 else ():
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
    gathered = comm.world.gather_object({name: _sum_of_squares(parameter) for name, parameter in divided.items()})
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


def _sum_of_squares(parameter: Any) -> float:
    """Return that of the shard of this rank, over the number of ranks that hold the same one."""
    placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    copies: int = math.prod(size for size, placement in placed if placement.is_replicate())
    parts = torch.split(to_local(parameter).detach().flatten(), 1 << 22)
    squares: list[float] = [part.double().square().sum().item() for part in parts]
    return sum(squares) / copies


def list_buffers(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return the buffers of models, except those of DDP, which broadcasts them itself."""
    replicated = {buffer for module in _list_ddp_modules(models) for buffer in module.buffers()}
    return [buffer for model in models for buffer in model.buffers() if buffer not in replicated and not is_sharded(buffer)]


def _list_ddp_modules(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [module for model in models for module in model.modules() if isinstance(module, DistributedDataParallel)]
