"""Sharded tensors, as `fully_shard` makes them, and plain tensors alike."""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from chainring._distributed.communicator import Communicator


class Shard(NamedTuple):
    """A shard of a tensor."""

    tensor: Tensor
    offsets: Sequence[int]  # where it begins in each dimension
    shape: Sequence[int]  # of the whole tensor


Region = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: where it begins in each dimension, and its shape."""


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor of which each rank holds a shard, a ``DTensor``."""
    # Importing torch.distributed.tensor takes half a second. Who has made such a tensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model to which `fully_shard` was applied."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [child for child in model.modules() if isinstance(child, module.FSDPModule)]


def is_local_to(parameter: Any, comm: Communicator) -> bool:
    """Return whether each of the ranks that compute a model together has computed the gradient of a parameter by itself.

    That of a parameter on a mesh of these ranks is a ``DTensor`` that knows what the others have.
    """
    return not is_sharded(parameter) or set(parameter.device_mesh.mesh.flatten().tolist()) <= set(comm.data_ranks)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether ranks compute a model together, all on the same rows, and `fully_shard` has no part in it."""
    return any(map(is_sharded, model.parameters())) and not fsdp_modules(model)


def exchanged_by_fsdp(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients `fully_shard` exchanges between ranks in each backward."""
    return list(map(_parameter_of, fsdp_parameters(model)))


def find_misplaced(model: nn.Module, comm: Communicator) -> tuple[str, Any] | None:
    """Return a sharded parameter, with its name, whose gradient would not be averaged over the data; ``None`` without one.

    Each dimension of its mesh is one of ranks that share the data, over all of which `fully_shard` has placed it, or one of
    ranks that compute the model together.
    """
    exchanged = set(exchanged_by_fsdp(model)) if fsdp_modules(model) else set()
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            continue
        mesh, here = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        along = [(*here[:i], slice(None), *here[i + 1 :]) for i in range(mesh.ndim)]
        dimensions = [set(mesh.mesh[line].tolist()) for line in along]  # of ranks that differ from this one in it alone
        data = [i for i, ranks in enumerate(dimensions) if len(ranks) > 1 and ranks <= set(comm.data_ranks)]
        others = [ranks for i, ranks in enumerate(dimensions) if i not in data]
        size = math.prod(len(dimensions[i]) for i in data)
        sharded = [not parameter.placements[i].is_replicate() for i in data]
        is_averaged = size == comm.size and parameter in exchanged and sharded in ([], [True], [False], [False, True])
        is_local = not data and parameter not in exchanged
        if not (is_averaged or is_local) or not all(ranks <= set(comm.model_ranks) for ranks in others):
            return name, parameter
    return None


def to_local(tensor: Any) -> Tensor:
    """Return the shard of a tensor that lies on this rank, in the same memory; a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def placed_like(gradient: Any, parameter: Any) -> Any:
    """Return a gradient with the placement of its parameter; unchanged if the parameter is plain.

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
    # PyTorch refuses the largest magnitude of a shard without elements, as a rank may have; and of two numbers of which
    # one is NaN the larger is, between ranks, either: so whether there is one is found beside it.
    module, mesh = sys.modules["torch.distributed.tensor"], tensors[0].device_mesh
    largest = [local.abs().max() for local in map(to_local, tensors) if local.numel()]
    norm = torch.stack(largest).max() if largest else torch.zeros((), dtype=tensors[0].dtype, device=tensors[0].device)
    pair = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf), norm.isnan().to(norm.dtype)])
    norm, has_nan = to_full(module.DTensor.from_local(pair, mesh, [module.Partial("max")] * mesh.ndim)).unbind()
    return torch.where(has_nan > 0, math.nan, norm)


def norm_in_order(tensors: Sequence[Any], norm_type: float) -> Tensor:
    """Return the norm of tensors as one vector, whose bits do not depend on where they lie, nor on how they are sharded.

    Sharded tensors are gathered one at a time.
    """
    norms: list[Tensor] = []
    for tensor in map(to_full, tensors):
        is_aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0  # as kernels begin apart where it is not
        whole = tensor if is_aligned else tensor.clone(memory_format=torch.contiguous_format)
        norms.append(torch.linalg.vector_norm(whole, norm_type))
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


def local_shards(tensor: Any) -> list[Shard]:
    """Return the regions of a sharded tensor that this rank holds, in the same memory: one, but where rows alternate.

    A region without elements is not returned, unless the whole tensor has none.

    Raises:
        ValueError: the ranks hold summands of it, or what this rank holds is not what its placements say.
    """
    shape, coordinate = tuple(tensor.shape), tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    splits: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for placement, size, own in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if hasattr(placement, "dim") and not placement.is_partial():
            splits[placement.dim].append((size, own, int(getattr(placement, "split_factor", 1))))
        elif not placement.is_replicate():
            raise ValueError(
                f"a tensor placed as {tensor.placements} is not there before its summands are added; "
                "save tensor.full_tensor(), or redistribute it"
            )
    runs = [_runs(size, tuple(of_dimension)) for size, of_dimension in zip(shape, splits, strict=True)]
    local, held = to_local(tensor), tuple(sum(length for _, length in of_dimension) for of_dimension in runs)
    if tuple(local.shape) != held and local.numel() + math.prod(held):
        raise ValueError(
            f"of a tensor of shape {list(shape)} placed as {tensor.placements} this rank holds {list(local.shape)}, and "
            f"{list(held)} would be its own; place it by fully_shard and parallelize_module"
        )
    if not local.numel():
        return [] if math.prod(shape) else [Shard(local.new_empty(shape), (0,) * len(shape), shape)]
    shards = [Shard(local, (), shape)]
    for dimension, of_dimension in enumerate(runs):
        lengths = [length for _, length in of_dimension]
        shards = [
            Shard(part, (*shard.offsets, start), shape)
            for shard in shards
            for part, (start, _) in zip(torch.split(shard.tensor, lengths, dimension), of_dimension, strict=True)
        ]
    return shards


@lru_cache(4096)
def _runs(size: int, splits: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int]]:
    """Return the runs of indices, as their beginning and length, that are left of ``size`` by successive splits.

    A split is the number of its parts, which of them is meant, and in how many blocks each by itself is split.
    """
    order: list[tuple[int, int, int]] = []
    for split in reversed(splits):  # fully_shard splits what the dimensions to its right have left, and says so by blocks
        counts = [math.prod(parts for parts, _, _ in order[:end]) for end in range(len(order) + 1)]
        is_ordered = split[2] in counts
        order.insert(counts.index(split[2]) if is_ordered else 0, (*split[:2], 1) if is_ordered else split)
    index = torch.arange(size)
    for parts, own, blocks in order:
        taken = [block.chunk(parts)[own] for block in index.chunk(blocks) if own < len(block.chunk(parts))]
        index = torch.cat(taken) if taken else index[:0]
    if not len(index):
        return [(0, 0)]
    starts = [0, *(torch.nonzero(torch.diff(index) != 1).flatten() + 1).tolist()]
    return [(int(index[start]), end - start) for start, end in zip(starts, [*starts[1:], len(index)], strict=True)]


def region_of(shard: Shard) -> Region:
    """Return the region of a tensor that a shard is."""
    return tuple(shard.offsets), tuple(shard.tensor.shape)


def is_partition(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Return whether regions cover a shape, each element once, and lie within it. Regions without elements do not matter."""
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in regions):
        return False
    regions = [region for region in regions if math.prod(region[1])]
    if sum(math.prod(sizes) for _, sizes in regions) != math.prod(shape):
        return False
    if len(regions) <= 1:
        return all(tuple(sizes) == tuple(shape) and not any(offsets) for offsets, sizes in regions)
    starts = np.array([offsets for offsets, _ in regions])
    ends = starts + np.array([sizes for _, sizes in regions])
    if (starts < 0).any() or (ends > np.array(shape)).any():
        return False
    pairs = zip(starts, ends, strict=True)
    return all(((starts < end) & (start < ends)).all(1).sum() == 1 for start, end in pairs)  # overlaps itself alone


_last_plans: WeakKeyDictionary[Communicator, tuple[bytes, list[list[int]]]] = WeakKeyDictionary()
"""By the communicator a digest of the layouts for which writers were assigned last, and which regions this rank writes."""


def assign_writers(tensors: Mapping[str, Any], comm: Communicator, busy: int = 0) -> dict[str, list[Shard]]:
    """Return the shards of tensors that this rank writes, so that all ranks together write every element once.

    A shard that several ranks hold is written by the one with the least to write; ``busy`` is how many other elements
    this rank writes.

    Raises:
        ValueError: the shards on the ranks are not the whole of a tensor, once, or the ranks have other tensors.
    """
    shards: list[list[Shard]] = []
    problem = None
    for name, tensor in tensors.items():
        try:
            shards.append(local_shards(tensor))
        except ValueError as error:
            shards.append([])
            problem = problem or f"{name!r}: {error}"
    about = [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    regions = [tuple(map(region_of, of_tensor)) for of_tensor in shards]
    seen: dict[Any, int] = {}
    first = []  # of each tensor, the first one in the same memory
    for index, of_tensor in enumerate(shards):
        view = [(*shard.offsets, shard.tensor.data_ptr(), shard.tensor.stride()) for shard in of_tensor]
        first.append(seen.setdefault((repr(view), of_tensor[0].tensor.dtype), index) if view else index)
    known, mine = _last_plans.get(comm, (b"", []))
    answers = comm.gather_object((problem, _digest(about), _digest((regions, first)), known))
    problems, names, layouts, plans = zip(*answers, strict=True)
    if refusal := next(filter(None, problems), None):
        raise ValueError(refusal)
    if len(set(names)) > 1:
        ranks = comm.gather_object(about)
        rank, other = next((rank, other) for rank, other in enumerate(ranks) if other != ranks[0])
        one, another = next(pair for pair in zip_longest(ranks[0], other) if pair[0] != pair[1])
        raise ValueError(
            f"ranks 0 and {rank} have different sharded tensors, or another order of them: where one has {one}, the other "
            f"has {another}; give all ranks the same model and optimizer"
        )
    digest = _digest((names, layouts))
    if any(plan != digest for plan in plans):  # on all ranks alike: a plan costs the descriptions of all layouts
        mine = _assign(about, comm.gather_object((regions, first, busy)), comm.rank)
        _last_plans[comm] = digest, mine
    return {name: [of_tensor[i] for i in chosen] for name, of_tensor, chosen in zip(tensors, shards, mine, strict=True)}


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _assign(about: Sequence[tuple[str, str, tuple[int, ...]]], ranks: Sequence[Any], rank_here: int) -> list[list[int]]:
    """Return for each tensor the indices of the regions that rank ``rank_here`` writes."""
    regions, firsts, others = zip(*ranks, strict=True)
    busy, sound = list(others), set[Any]()  # elements that each rank writes so far, and layouts that were checked
    writers: list[dict[Region, int]] = []
    mine: list[list[int]] = []
    for index, (name, _, shape) in enumerate(about):
        holders: dict[Region, list[int]] = {}
        for rank, of_rank in enumerate(regions):
            for region in of_rank[index]:
                holders.setdefault(region, []).append(rank)
        layout = (shape, tuple(holders))
        if layout not in sound and not is_partition(shape, layout[1]):
            who = "this process" if len(ranks) == 1 else f"the {len(ranks)} ranks"
            count, written = math.prod(shape), sum(math.prod(sizes) for _, sizes in holders)
            extent = f"{written} of them" if written < count else "some of them twice"
            raise ValueError(
                f"{name!r} has {count} numbers, and {who} would write {extent}, so that it could not be loaded again: "
                "give the updater comm=create_communicator(), so that all ranks write their shards, or save the model "
                "alone, which is written whole, by serializers.save(path, model)"
            )
        sound.add(layout)
        writers.append({})
        for region, having in holders.items():
            tied = firsts[having[0]][index]
            writer = writers[tied].get(region)  # what is tied lies in one file, where it is stored once
            if writer not in having:
                writer = min(having, key=busy.__getitem__)
                busy[writer] += math.prod(region[1])
            writers[index][region] = writer
        mine.append([i for i, region in enumerate(regions[rank_here][index]) if writers[index][region] == rank_here])
    return mine


def shard_like(value: Any, like: Any) -> Any:
    """Return a tensor that every rank has whole, sharded like ``like``; unchanged if ``like`` is not sharded."""
    if not is_sharded(like) or value is None or is_sharded(value):
        return value
    module = sys.modules["torch.distributed.tensor"]
    return module.distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def empty_shard_like(like: Any, dtype: torch.dtype) -> Any:
    """Return a tensor sharded as ``like`` is, on the same device, of which each rank has made its shard."""
    module = sys.modules["torch.distributed.tensor"]
    local = torch.empty_like(to_local(like.detach()), dtype=dtype)
    whole = {"shape": like.shape, "stride": like.stride()}
    return module.DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **whole)


def as_summand(whole: Tensor, like: Any) -> Any:
    """Return a tensor of this rank as a part of a sum over the ranks that hold ``like``, a sharded tensor of that shape."""
    module, mesh = sys.modules["torch.distributed.tensor"], like.device_mesh
    placements = [module.Partial()] * mesh.ndim
    return module.DTensor.from_local(whole, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def is_summand(tensor: Any) -> bool:
    """Return whether a tensor is a ``Partial`` ``DTensor``, as `as_summand` makes it."""
    return is_sharded(tensor) and all(placement.is_partial() for placement in tensor.placements)


def reshard(modules: Sequence[Any]) -> None:
    """Let modules to which `fully_shard` was applied hold their shards again, and not what a forward has gathered."""
    for module in modules:
        module.reshard()


def shared_by_copies(modules: Iterable[Any]) -> dict[int, Any]:
    """Return the meshes and process groups that modules hold, for the memo of a deep copy: it has the same ones."""
    mesh_module, group_class = sys.modules.get("torch.distributed.device_mesh"), getattr(dist, "ProcessGroup", ())
    classes = (group_class, () if mesh_module is None else mesh_module.DeviceMesh)
    return {id(value): value for module in modules for value in vars(module).values() if isinstance(value, classes)}


@torch.no_grad()
def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model, sharded as it is. The whole model is not gathered.

    Raises:
        NotImplementedError: `fully_shard` has placed the parameters in a way that is not known.
        TypeError: an attribute of a module cannot be copied.
    """
    memo = shared_by_copies(model.modules())
    if not fsdp_modules(model):
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            rule = f"an average begins with a copy of the model, and {_uncopied(model)} cannot be copied"
            raise TypeError(
                f"{rule}: {type(error).__name__}: {error}; define __deepcopy__ on its class, or make it outside the model; "
                "torch.nn.utils.parametrizations.weight_norm and spectral_norm can be copied, those of torch.nn.utils cannot"
            ) from error
    reshard(fsdp_modules(model))
    for parameter in (parameter for state in _fsdp_states(model) for parameter, _ in _fsdp_parameters(state)):
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device_mesh.device_type)
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)  # gets its shape when its module is sharded
    bare: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        is_sharded_module = isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule)
        cls: Any = type(module).__mro__[getattr(module, "_orig_cls_mro_index", 2) if is_sharded_module else 0]
        bare[module] = memo[id(module)] = cls.__new__(cls)
    for module, copied in bare.items():
        vars(copied).update(copy.deepcopy(_without_fsdp(vars(module)), memo))
    shard_model_like(bare[model], model)
    for own, parameter in zip(bare[model].parameters(), model.parameters(), strict=True):
        to_local(own).copy_(to_local(parameter))
    return bare[model]


def _uncopied(model: nn.Module) -> str:
    """Return the name of the attribute of a module that cannot be copied."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                if name != "_modules":
                    copy.deepcopy(value, shared_by_copies(model.modules()))
            except Exception:
                return f"{path}.{name}".lstrip(".")
    return type(model).__name__


def shard_model_like(model: nn.Module, like: nn.Module) -> None:
    """Apply `fully_shard` to the modules of a model as it was applied to those of ``like``, which it is a copy of.

    Raises:
        NotImplementedError: `fully_shard` has placed the parameters of ``like`` in a way that is not known.
        ValueError: `parallelize_module` was applied to ``like``, and not to the model.
    """
    counterpart = dict(zip(like.modules(), model.modules(), strict=True))
    reshard(fsdp_modules(like))
    states = _fsdp_states(like)
    meshes = [group.mesh_info.mesh for state in states for group in _fsdp_groups(state)]
    for state in states:
        placements: dict[nn.Parameter, Any] = {}
        for parameter, fsdp_param in _fsdp_parameters(state):
            copied = _counterpart_of(fsdp_param, parameter, counterpart)
            n_others = len(_spec_before_fsdp(fsdp_param).placements) if fsdp_param.is_dtensor else 0  # not of the data
            dimension = parameter.placements[parameter.device_mesh.ndim - 1 - n_others].dim
            placements[copied] = sys.modules["torch.distributed.tensor"].Shard(dimension)
        modules = [counterpart[module] for module in state._modules]
        others = {parameter for module in modules for parameter in module.parameters()} - placements.keys()
        ignored = {parameter for parameter in others if not is_sharded(parameter)}  # which torch 2.6 cannot do
        sys.modules["torch.distributed.fsdp"].fully_shard(
            modules[0] if len(modules) == 1 else modules,
            **{"mesh": meshes[0]} | _fsdp_settings(state) | ({"ignored_params": ignored} if ignored else {}),
            shard_placement_fn=placements.get,
        )


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return the ``FSDPParam`` in which `fully_shard` keeps each parameter that it has sharded."""
    return [fsdp_param for state in _fsdp_states(model) for group in _fsdp_groups(state) for fsdp_param in group.fsdp_params]


def describe_fsdp(model: nn.Module) -> dict[str, str]:
    """Return how `fully_shard` was applied to each module of a model, by the module's name: in all but its mesh."""
    names = {id(module): name for name, module in model.named_modules()}
    settings = {id(module): _fsdp_settings(module._get_fsdp_state()) for module in fsdp_modules(model)}
    return {names[key]: repr({k: v for k, v in applied.items() if k != "mesh"}) for key, applied in settings.items()}


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
    """Return the ``FSDPState`` of each call of `fully_shard`, those of inner modules first."""
    return list(dict.fromkeys(module._get_fsdp_state() for module in reversed(fsdp_modules(model))))


def _fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a call of `fully_shard`: one, or none where the module has no parameters left."""
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # of older versions
    return [group for group in groups if group is not None]


def _fsdp_parameters(state: Any) -> list[tuple[Any, Any]]:
    """Return the parameters of a call of `fully_shard`, each with its ``FSDPParam``."""
    groups = _fsdp_groups(state)
    infos = [group.mesh_info for group in groups]
    are_known = all(hasattr(info, "shard_mesh_size") and not getattr(info, "is_spmd_mesh", False) for info in infos)
    if len(groups) > 1 or not are_known:
        raise NotImplementedError(
            "a model that fully_shard has sharded over several meshes, or by dp_mesh_dims, cannot be copied by itself; copy "
            "it before it is sharded, and apply the same calls to the copy and to the model"
        )
    return [(_parameter_of(fsdp_param), fsdp_param) for group in groups for fsdp_param in group.fsdp_params]


def _parameter_of(fsdp_param: Any) -> Any:
    return getattr(fsdp_param._module_info.module, fsdp_param._module_info.param_name)


def _spec_before_fsdp(fsdp_param: Any) -> Any:
    """Return how a parameter was placed by `parallelize_module`, before `fully_shard`."""
    spec = getattr(fsdp_param, "_unsharded_dtensor_spec", None)
    return fsdp_param._tp_spec if spec is None else spec  # of older versions


def _counterpart_of(fsdp_param: Any, parameter: Any, counterpart: Mapping[nn.Module, nn.Module]) -> Any:
    """Return the parameter of a copy that stands for one of `fully_shard`, in the shape that it had before."""
    info = fsdp_param._module_info
    copied = getattr(counterpart[info.module], info.param_name)
    if not fsdp_param.is_dtensor:
        if copied.shape != parameter.shape:
            copied.data = copied.new_empty(parameter.shape)
        return copied
    if is_sharded(copied):
        return copied
    if copied.numel():
        raise ValueError(
            "the model was made parallel by parallelize_module after its average was made, whose modules do not compute so; "
            "make the average after parallelize_module"
        )
    spec = _spec_before_fsdp(fsdp_param)
    placed, like = (spec.mesh, spec.placements), {"shape": spec.shape, "stride": spec.stride}
    local, module = copied.new_empty(fsdp_param._orig_size), sys.modules["torch.distributed.tensor"]
    made = module.DTensor.from_local(local, *placed, run_check=False, **like)
    made = nn.Parameter(made, parameter.requires_grad)
    modules = [info.module, *info.shared_modules]
    for module, name in zip(modules, [info.param_name, *info.shared_param_names], strict=True):
        setattr(counterpart[module], name, made)
    return made


def _without_fsdp(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without the state and the hooks of `fully_shard`."""

    def is_of_fsdp(hook: Any) -> bool:
        return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp")

    kept = dict(attributes)
    for name, value in attributes.items():
        if name.startswith("__composable_api_state_key"):
            kept[name] = {key: item for key, item in value.items() if getattr(key, "__name__", key) != "fully_shard"}
        elif name.endswith("_hooks") and isinstance(value, Mapping):
            kept[name] = type(value)((key, hook) for key, hook in value.items() if not is_of_fsdp(hook))  # type: ignore[call-arg]
    return kept
