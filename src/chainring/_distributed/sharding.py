"""Sharded tensors, as `fully_shard` makes them, and plain tensors alike."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chainring._distributed.communicator import Communicator


class Shard(NamedTuple):
    """A shard of a tensor."""

    tensor: Tensor
    offsets: Sequence[int]  # where it begins in each dimension
    shape: Sequence[int]  # of the whole tensor


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor of which each rank holds a shard, a ``DTensor``."""
    # Importing torch.distributed.tensor takes half a second. Who has made such a tensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model to which `fully_shard` was applied."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [child for child in model.modules() if isinstance(child, module.FSDPModule)]


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether ranks compute a model together, all on the same rows, and `fully_shard` has no part in it."""
    return not fsdp_modules(model) and any(map(is_sharded, model.parameters()))


def exchanged_by_fsdp(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients `fully_shard` exchanges between ranks in each backward."""
    places = [held._module_info for held in fsdp_parameters(model)]
    return [getattr(place.module, place.param_name) for place in places]


def find_misplaced(model: nn.Module, comm: Communicator) -> tuple[str, Any] | None:
    """Return a sharded parameter, with its name, whose gradient would not be averaged over the data; ``None`` without one.

    Each dimension of its mesh is one of ranks that share the data, over all of which `fully_shard` has placed it, or one of
    ranks that compute the model together.
    """
    exchanged = set(exchanged_by_fsdp(model)) if fsdp_modules(model) else set()
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            dimensions = [_along(parameter.device_mesh, dimension) for dimension in range(parameter.device_mesh.ndim)]
            data = [i for i, ranks in enumerate(dimensions) if len(ranks) > 1 and ranks <= set(comm.data_ranks)]
            others = [ranks for i, ranks in enumerate(dimensions) if i not in data]
            size = math.prod(len(dimensions[i]) for i in data)
            sharded = [not parameter.placements[i].is_replicate() for i in data]
            is_averaged = size == comm.size and parameter in exchanged and sharded in ([], [True], [False], [False, True])
            is_local = not data and parameter not in exchanged
            if not (is_averaged or is_local) or not all(ranks <= set(comm.model_ranks) for ranks in others):
                return name, parameter
    return None


def _along(mesh: Any, dimension: int) -> set[int]:
    """Return the numbers in the world of the ranks that differ from this one in one dimension of a mesh."""
    coordinate = list(mesh.get_coordinate())
    coordinate[dimension] = slice(None)
    return set(mesh.mesh[tuple(coordinate)].tolist())


def to_local(tensor: Any) -> Tensor:
    """Return the shard of a tensor that lies on this rank, in the same memory; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def placed_like(gradient: Any, parameter: Any) -> Any:
    """Return a gradient placed as its parameter is; as it is where the parameter is plain.

    The backward of a parameter that several ranks hold whole may leave to each of them a part of the sum.
    """
    if not is_sharded(parameter) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def to_full(tensor: Any) -> Tensor:
    """Return the whole tensor, gathered from all ranks; a plain tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def total_norm(tensors: Sequence[Any], norm_type: float) -> Tensor:
    """Return the norm of tensors as one vector; they are all plain, or all sharded over one mesh."""
    if norm_type != math.inf or not tensors or not is_sharded(tensors[0]):
        return to_full(torch.nn.utils.get_total_norm(tensors, norm_type))
    # PyTorch refuses the largest magnitude of a shard without elements, as a rank may have.
    module, mesh = sys.modules["torch.distributed.tensor"], tensors[0].device_mesh
    largest = [local.abs().max() for local in map(to_local, tensors) if local.numel()]
    norm = torch.stack(largest).max() if largest else torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)
    return to_full(module.DTensor.from_local(norm, mesh, [module.Partial("max")] * mesh.ndim))


def norm_in_order(tensors: Sequence[Any], norm_type: float) -> Tensor:
    """Return the norm of tensors as one vector, whose bits do not depend on where they lie, nor on how they are sharded.

    Of sharded ones one at a time is gathered.
    """
    norms = [torch.linalg.vector_norm(_in_place_of_its_own(to_full(tensor)), norm_type) for tensor in tensors]
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


def _in_place_of_its_own(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements follow each other from the beginning of memory of its own: kernels begin apart."""
    is_own = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    return tensor if is_own else tensor.clone(memory_format=torch.contiguous_format)


def local_shard(tensor: Any) -> Shard | None:
    """Return this rank's shard of a sharded tensor; ``None`` if it has none, or another rank has the same one.

    Raises:
        NotImplementedError: the rank holds several shards, as in some layouts of tensor parallelism.
    """
    placements, coordinates = tensor.placements, tensor.device_mesh.get_coordinate()
    if coordinates is None or any(
        coordinate and placement.is_replicate() for coordinate, placement in zip(coordinates, placements, strict=True)
    ):
        return None
    chunks = tensor.__create_chunk_list__()
    if len(chunks) > 1:
        raise NotImplementedError(f"a tensor of {len(chunks)} shards a rank, placed as {placements}, cannot be saved")
    if not chunks or not tensor.to_local().numel():
        return None
    return Shard(tensor.to_local(), tuple(chunks[0].offsets), tuple(tensor.shape))


def shard_like(value: Any, like: Any) -> Any:
    """Return a tensor that every rank has whole, sharded as ``like`` is; as it is where ``like`` is not sharded."""
    if not is_sharded(like) or value is None or is_sharded(value):
        return value
    module = sys.modules["torch.distributed.tensor"]
    return module.distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def as_summand(whole: Tensor, like: Any) -> Any:
    """Return a tensor of this rank as a part of a sum over the ranks that hold ``like``, a sharded tensor of that shape."""
    module, mesh = sys.modules["torch.distributed.tensor"], like.device_mesh
    placements = [module.Partial()] * mesh.ndim
    return module.DTensor.from_local(whole, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def is_summand(tensor: Any) -> bool:
    """Return whether a tensor is a part of a sum, as `as_summand` makes it."""
    return is_sharded(tensor) and all(placement.is_partial() for placement in tensor.placements)


def reshard(modules: Sequence[Any]) -> None:
    """Let modules to which `fully_shard` was applied hold their shards again, and not what a forward has gathered."""
    for module in modules:
        module.reshard()


@torch.no_grad()
def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, sharded as it is. The whole model is not gathered.

    Raises:
        NotImplementedError: the parameters are sharded in another way than by `fully_shard` alone.
    """
    if not fsdp_modules(model):
        return copy.deepcopy(model)
    reshard(fsdp_modules(model))
    memo: dict[int, Any] = {}
    for parameter in (held for state in _fsdp_states(model) for _, _, held in _fsdp_parameters(state)):
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device_mesh.device_type)
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)  # gets its shape when its module is sharded
    bare: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        cls = _class_before_fsdp(module)
        bare[module] = memo[id(module)] = cls.__new__(cls)
    for module, copied in bare.items():
        vars(copied).update(copy.deepcopy(_without_fsdp(vars(module)), memo))
    shard_model_like(bare[model], model)
    for own, parameter in zip(bare[model].parameters(), model.parameters(), strict=True):
        to_local(own).copy_(to_local(parameter))
    return bare[model]


def shard_model_like(model: nn.Module, like: nn.Module) -> None:
    """Apply `fully_shard` to the modules of a model as it was applied to those of ``like``, which it is a copy of.

    Raises:
        NotImplementedError: the parameters of ``like`` are sharded in another way than by `fully_shard` alone.
    """
    counterpart = dict(zip(like.modules(), model.modules(), strict=True))
    reshard(fsdp_modules(like))
    states = _fsdp_states(like)
    meshes = [group.mesh_info.mesh for state in states for group in _fsdp_groups(state)]
    for state in states:
        placements: dict[nn.Parameter, Any] = {}
        for module, name, parameter in _fsdp_parameters(state):
            own = getattr(counterpart[module], name)
            if own.shape != parameter.shape:
                own.data = own.new_empty(parameter.shape)
            placements[own] = parameter.placements[-1]
        modules = [counterpart[module] for module in state._modules]
        others = {parameter for module in modules for parameter in module.parameters()} - placements.keys()
        sys.modules["torch.distributed.fsdp"].fully_shard(
            modules[0] if len(modules) == 1 else modules,
            **{"mesh": meshes[0]} | _fsdp_settings(state),
            shard_placement_fn=placements.get,
            ignored_params={parameter for parameter in others if not is_sharded(parameter)} or None,
        )


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return what `fully_shard` keeps of each parameter that it has sharded."""
    return [held for state in _fsdp_states(model) for group in _fsdp_groups(state) for held in group.fsdp_params]


def describe_fsdp(model: nn.Module) -> dict[str, str]:
    """Return how `fully_shard` was applied to each module of a model, by the module's name: in all but its mesh."""
    names = {id(module): name for name, module in model.named_modules()}
    settings = {id(module): _fsdp_settings(module._get_fsdp_state()) for module in fsdp_modules(model)}
    return {names[key]: repr({k: v for k, v in each.items() if k != "mesh"}) for key, each in settings.items()}


def _class_before_fsdp(module: Any) -> Any:
    is_sharded_module = isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule)
    return type(module).__mro__[getattr(module, "_orig_cls_mro_index", 2) if is_sharded_module else 0]


def _fsdp_settings(state: Any) -> dict[str, Any]:
    """Return the arguments with which `fully_shard` was called."""
    settings = {"mp_policy": state._mp_policy}
    for group in _fsdp_groups(state):
        after, info = group.post_forward_mesh_info, group.mesh_info
        is_reshaped = after is not None and after is not info
        settings |= {"mesh": info.mesh, "offload_policy": group.offload_policy}
        settings["reshard_after_forward"] = after.shard_mesh_size if is_reshaped else after is not None
    if getattr(state, "_auto_reshard_after_forward", False):
        settings["reshard_after_forward"] = None
    return settings


def _fsdp_states(model: nn.Module) -> list[Any]:
    """Return what `fully_shard` keeps of each of its calls, of inner modules first."""
    return list(dict.fromkeys(module._get_fsdp_state() for module in reversed(fsdp_modules(model))))


def _fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a call of `fully_shard`: one, or none where the module has no parameters left."""
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # of older versions
    return [group for group in groups if group is not None]


def _fsdp_parameters(state: Any) -> list[tuple[nn.Module, str, Any]]:
    """Return the parameters of a call of `fully_shard`, each with a module that has it and its name there."""
    groups = _fsdp_groups(state)
    found = [(group, parameter) for group in groups for parameter in group.fsdp_params]
    if len(groups) > 1 or any(held.is_dtensor or not hasattr(group.mesh_info, "shard_mesh_size") for group, held in found):
        raise NotImplementedError(
            "a model whose parameters are sharded in another way than by fully_shard alone, over one mesh, cannot be copied "
            "by itself; copy it before it is sharded, and apply the same calls to the copy and to the model"
        )
    places = [held._module_info for _, held in found]
    return [(place.module, place.param_name, getattr(place.module, place.param_name)) for place in places]


def _without_fsdp(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without the state and the hooks of `fully_shard`."""
    kept = dict(attributes)
    for name, value in attributes.items():
        if name.startswith("__composable_api_state_key"):
            kept[name] = {key: item for key, item in value.items() if getattr(key, "__name__", key) != "fully_shard"}
        elif name.endswith("_hooks") and isinstance(value, Mapping):
            kept[name] = type(value)((key, hook) for key, hook in value.items() if not _is_of_fsdp(hook))  # type: ignore[call-arg]
    return kept


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp")
