"""Ranks that train together: modules that exchange gradients by themselves, the same start on all, and checks later."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from chainring._distributed.communicator import Communicator
from chainring._distributed.digests import sums_of
from chainring._distributed.sharding import (
    exchanged_by_fsdp,
    find_misplaced,
    fsdp_modules,
    is_local_to,
    is_sharded,
    to_full,
    to_local,
)
from chainring._messages import warn
from chainring._random import stable_hash
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
from chainring.training.updaters.callbacks import list_parameters

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_ATTRIBUTES = {
    "PowerSGDState": ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report"),
    "PostLocalSGDState": ("iter",),
}
"""The attributes that change in the states of PyTorch's own hooks, beside tensors and generators."""
_BY_BUCKET = ("error_dict", "p_memory_dict", "q_memory_dict")
_CHECK_INTERVAL = 1000  # updates
_CHUNK = 1 << 22  # elements that are summed at once
_TOLERANCE = 1e-2  # of a gradient, which kernels that add in any order round differently on each rank


class WrappedModules:
    """The modules of some models that are wrapped in DDP or `fully_shard`, and the states of communication hooks of DDP."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._replicated = list_ddp_modules(models)
        self._sharded = [module for model in models for module in fsdp_modules(model)]
        replicated = [parameter for module in self._replicated for parameter in module.parameters()]
        sharded = [parameter for model in models for parameter in exchanged_by_fsdp(model)]
        self.parameters = {id(parameter) for parameter in [*replicated, *sharded]}
        hooked = [module for module in self._replicated if getattr(module, "_comm_hooks", None)]
        self.differing = set(map(id, [*sharded, *(parameter for module in hooked for parameter in module.parameters())]))
        # In each backward DDP writes to the memory of their gradients, which are views of its buckets.
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
                        # With an input, since DDP with device_ids takes the first of those that it has moved.
                        loss: Tensor = module.forward(None)  # type: ignore[no-untyped-call]
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
        before = {hook: hook.read() for hook in hooks if hook.is_saved}
        yield
        for hook, state in before.items():
            hook.write(self._loaded.get(hook.name, state))
        self._loaded = {}

    def serialize(self, serializer: AbstractSerializer, comm: Communicator) -> None:
        """Save the states of hooks of all ranks, or keep those of this rank until the run starts."""
        hooks = self._list_hooks()
        saved = [hook for hook in hooks if hook.is_saved]
        if isinstance(serializer, Serializer):
            for hook in saved:
                hook.save(serializer[hook.name], comm)
            if doubts := [hook.doubt for hook in hooks if hook.doubt is not None]:
                serializer("inexact", doubts[0])
        else:
            loaded = {hook.name: hook.load(serializer[hook.name], comm) for hook in saved}
            self._loaded = {name: values for name, values in loaded.items() if values is not None}

    def _list_hooks(self) -> list[_Hook]:
        hooks: list[_Hook] = []
        for index, module in enumerate(self._replicated):
            for hook, state in getattr(module, "_comm_hooks", ()):
                is_plain = state is None or isinstance(state, dist.ProcessGroup)
                if not is_plain and type(state).__module__ != f"{_HOOKS}.mixed_precision_hooks":
                    hooks.append(_Hook(f"{index}-{len(hooks)}", module, hook, state))
        return hooks


class _Surrogate(nn.Module):
    """Stands for a model: its output depends on every parameter, the first ones last, as in a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.training = model.training
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward(self, _: None) -> Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._trained]).sum()


class _Hook:
    """A communication hook of DDP with its state; ``doubt`` is why a resumed run is not the uninterrupted one."""

    def __init__(self, name: str, module: DistributedDataParallel, hook: Any, state: Any) -> None:
        self.name, self._state, self._class = name, state, type(state).__name__
        self._title = f"the communication hook {getattr(hook, '__name__', type(hook).__name__)} of DDP"
        self._device = next(module.parameters()).device
        self._is_of_torch = type(state).__module__.startswith(f"{_HOOKS}.") and self._class in _ATTRIBUTES
        has_ways = self._is_of_torch or serialize_method(state) is not None or has_state(state)
        self.is_saved = has_ways and not module.static_graph
        doubt, remedy = None, ""
        if not has_ways:
            doubt, remedy = f"keeps a {self._class}, which no snapshot holds", "; give its class serialize()"
        elif module.static_graph:
            doubt = f"keeps a {self._class} for each bucket, which DDP(static_graph=True) lays out otherwise at first"
        elif self._class == "PostLocalSGDState":
            doubt = "lets ranks have parameters of their own, of which those of rank 0 are saved"
        rest = f"a resumed run trains on, and not as the uninterrupted one would{remedy}"
        self.doubt = doubt and f"{self._title} {doubt}: {rest}"

    def read(self) -> dict[str, Any]:
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
        """Save the state; tensors of a bucket on several ranks become one sharded tensor with a row for each rank."""
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
            values[key] = to_local(serializer["row"](key, _as_row(empty, world.size)))[0]
        return values


def _as_row(tensor: Tensor, size: int) -> Any:
    """Return a sharded tensor in which the tensor of each rank is a row."""
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
    for module in list_ddp_modules(list(models.values())):
        ranks = dist.get_process_group_ranks(module.process_group)
        if ranks != list(comm.data_ranks):
            raise ValueError(
                f"DistributedDataParallel averages gradients over the ranks {ranks}, and the ranks that share the data are "
                f'{list(comm.data_ranks)}: give it process_group=mesh["dp"].get_group() of the mesh in '
                'comm=create_communicator(mesh=mesh["dp"]), or leave the model plain, whose gradients the updater averages'
            )
    modules = [module for model in models.values() for module in model.modules() if comm.world.size > comm.size]
    for norm in (module for module in modules if isinstance(module, nn.SyncBatchNorm)):
        group = norm.process_group
        if group is None or dist.get_process_group_ranks(group) != list(comm.data_ranks):
            raise ValueError(
                f"SyncBatchNorm counts the rows of all {comm.world.size} ranks, of which {comm.size} share the data, so "
                "that its running variance would be that of more rows than there are: give it "
                'process_group=mesh["dp"].get_group()'
            )


_NO_SPARSE = (
    "ranks and virtual ranks add up dense gradients, and {}; give its layer sparse=False, and an optimizer that takes dense "
    "gradients, such as Adam in place of SparseAdam"
)


def check_dense(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse layers with sparse gradients, and optimizers that need them."""
    for label, model in models.items():
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise ValueError(_NO_SPARSE.format(f"{name or 'itself'!r} of model {label!r} has sparse ones"))
    for label, optimizer in optimizers.items():
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(_NO_SPARSE.format(f"optimizer {label!r} is SparseAdam, which needs sparse ones"))


def check_strided(gradient: Tensor | None) -> None:
    """Refuse a sparse gradient, of which no layer and no optimizer tells before."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise TypeError(_NO_SPARSE.format(f"that of shape {tuple(gradient.shape)} is {gradient.layout}"))


def broadcast_parameters(comm: Communicator, models: Sequence[nn.Module], wrapped: WrappedModules) -> None:
    """Give all ranks the parameters and buffers of rank 0, except those that DDP or `fully_shard` care for."""
    parameters = [p for model in models for p in model.parameters() if id(p) not in wrapped.parameters]
    comm.world.broadcast([*(p for p in parameters if not is_sharded(p)), *list_buffers(models)])
    comm.broadcast([to_local(parameter) for parameter in parameters if is_sharded(parameter)])


def warn_of_untied(model: nn.Module) -> None:
    """Warn of matrices that ranks have divided and that have the same elements, as `parallelize_module` leaves tied ones."""
    divided = {name: to_local(p).detach() for name, p in model.named_parameters() if is_sharded(p) and p.ndim > 1}
    alike: dict[Any, str] = {}
    for (name, shard), total in zip(divided.items(), sums_of(list(divided.values())), strict=True):
        other = alike.setdefault((shard.shape, total), name)
        if other != name and total:  # 0 of zeros
            warn(
                f"parameters {other!r} and {name!r} are equal but not shared: if they were tied, parallelize_module has "
                "untied them, and each is now trained separately. Tie them again after it, before the optimizer is made, "
                "by assigning the weight of one module to the other",
            )


def list_buffers(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return the buffers of models, except those of DDP, which broadcasts them itself."""
    replicated = {buffer for module in list_ddp_modules(models) for buffer in module.buffers()}
    return [buffer for model in models for buffer in model.buffers() if buffer not in replicated and not is_sharded(buffer)]


def list_ddp_modules(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    return [module for model in models for module in model.modules() if isinstance(module, DistributedDataParallel)]


class ExchangeWatch:
    """Detects changes of parameters by an ``update_core`` outside of `StandardUpdater.step`, which exchanges gradients."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self.begin()
        for name, optimizer in optimizers.items():
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # its __init__ has called that of Optimizer
                optimizer.register_step_post_hook(partial(self._note_step, name))

    def begin(self) -> None:
        self.has_exchanged = False  # gradients, in this update
        self.is_stepping = False  # on gradients that were exchanged
        self._stepped_outside: list[tuple[str, bool]] = []  # the name, and whether it was given a closure

    def _note_step(self, name: str, _: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_stepping:
            has_closure = kwargs.get("closure", *args[1:2]) is not None
            self._stepped_outside.append((name, has_closure))

    def check(self, comm: Communicator, models: Mapping[str, nn.Module], wrapped: WrappedModules, has_weighed: bool) -> None:
        """Refuse an update after which ranks may differ; ``has_weighed`` is true if a loss has gone through ``backward``."""
        for name, has_closure in self._stepped_outside:
            parameters = list_parameters([self._optimizers[name]])
            # A closure gives each rank its own loss, by which its optimizer decides for itself.
            if has_weighed or has_closure or not all(id(parameter) in wrapped.parameters for parameter in parameters):
                raise RuntimeError(
                    f"update_core has let optimizer {name!r} step by itself, so the {comm.world.size} ranks have not "
                    f"exchanged its gradients, or compared them: write self.backward(loss) and self.step({name!r}) in "
                    f"update_core, or self.step({name!r}, closure) with an optimizer that needs a closure, and not "
                    "optimizer.step()"
                )
        if self.has_exchanged or self._stepped_outside:
            return
        if find_differing(comm, models, wrapped) is not None:
            raise RuntimeError(
                f"after an update without self.step() the {comm.size} ranks have different parameters: update_core has "
                "changed them without averaging gradients. Write self.backward(loss) and self.step() in update_core"
            )


def find_differing(comm: Communicator, models: Mapping[str, nn.Module], wrapped: WrappedModules) -> str | None:
    """Return the path of the first parameter that ranks which share the data have different values of.

    Shards differ by nature, and parameters that a communication hook of DDP leaves to each rank may do.
    """
    named = {
        f"{label}.{path}": to_local(parameter).detach()
        for label, model in models.items()
        for path, parameter in model.named_parameters()
        if id(parameter) not in wrapped.differing and not is_lazy(parameter)
    }
    if comm.size == 1 or not named:
        return None
    sums = sums_of(list(named.values()))
    group = comm.data_ranks[0]  # on a mesh there are several, each of which has its own part of the model
    digests = set(comm.world.gather_object((group, stable_hash(*sums))))
    if len(digests) == len({group for group, _ in digests}):
        return None
    of_ranks = comm.world.gather_object([(group, *item) for item in enumerate(sums)])
    different: set[tuple[int, int, int]] = set().union(*of_ranks)  # of a group, a parameter is there once for each value
    counts = Counter((index, group) for group, index, _ in different)
    return list(named)[min(index for (index, _), count in counts.items() if count > 1)]


def check_same(comm: Communicator, models: Mapping[str, nn.Module], wrapped: WrappedModules) -> None:
    """Refuse ranks that have different parameters, by the same error on each."""
    if (name := find_differing(comm, models, wrapped)) is not None:
        raise RuntimeError(
            f"the {comm.size} ranks share the data and train one model, and have different values of parameter {name!r}: "
            "something has changed it on each rank in its own way, such as an extension that draws random numbers, a "
            "learning rate set from the loss of a rank, or a forward that writes to its parameters. Let rank 0 decide, "
            "comm.broadcast_object(value), or average what is computed of the rows, comm.all_reduce(tensors)"
        )


class ModelRanksWatch:
    """Compares the results of ranks that compute a model together, in the first update and in every thousandth.

    They must agree in the losses and in the parameters that each of them holds whole, of which only one rank writes its own.
    """

    def __init__(self, comm: Communicator, models: Mapping[str, nn.Module]) -> None:
        self._comm, self._models = comm, models
        self._first: int | None = None

    def check(self, iteration: int, loss: Any, optimizers: Iterable[Optimizer]) -> None:
        """Refuse ranks whose losses or gradients differ, by the same error on every rank, before an optimizer steps."""
        self._first = iteration if self._first is None else self._first
        if iteration != self._first and iteration % _CHECK_INTERVAL:
            return
        stepping = set(map(id, list_parameters(optimizers)))
        names = {id(p): name for model in self._models.values() for name, p in model.named_parameters()}
        sums = {
            names[id(p)]: _sums_of(to_local(p.grad))
            for model in self._models.values()
            for p in model.parameters()
            if id(p) in stepping and p.grad is not None and p.grad.layout is torch.strided and is_local_to(p, self._comm)
        }
        gathered = self._comm.world.gather_object((self._comm.rank, float(to_full(loss).detach()), sums))
        first_of: dict[int, Any] = {}  # by data rank, what the first of its ranks has computed
        for rank, (data_rank, loss, sums) in enumerate(gathered):
            first, expected_loss, expected = first_of.setdefault(data_rank, (rank, loss, sums))
            differing = []  # what, and both numbers
            total = math.hypot(*(norm for norm, _ in expected.values()))
            for name in dict.fromkeys([*expected, *sums]):
                (norm, expected_sum), (_, actual_sum) = expected.get(name, (0.0, 0.0)), sums.get(name, (0.0, 0.0))
                if abs(expected_sum - actual_sum) > _TOLERANCE * (norm + _TOLERANCE * total):
                    differing.append((f"a sum over the gradient of {name!r}", expected_sum, actual_sum))
            if abs(expected_loss - loss) > 1e-5 * abs(expected_loss):
                differing.append(("the loss", expected_loss, loss))
            if differing:
                what, first_value, value = differing[0]
                raise RuntimeError(
                    f"ranks {first} and {rank} compute a model together, on the same rows, and {what} is "
                    f"{first_value:.6g} on the one and {value:.6g} on the other, as if each had data of its own: give both "
                    "the same rows and seeds, and place the parameters of what they share on the mesh, by "
                    "parallelize_module(model, "
                    'mesh["tp"], plan); or, if each computes on a part of a sequence, add up gradients over these ranks by '
                    "UpdateCallbacks(comm_on_start=...), and the losses in the model"
                )


def _sums_of(gradient: torch.Tensor) -> tuple[float, float]:
    """Return the norm of a gradient, and the sum of its elements with irregular signs."""
    positions = torch.arange(min(gradient.numel(), _CHUNK), device=gradient.device)
    signs = 1.0 - 2.0 * ((positions * positions * 7 + positions * 3) % 11 % 2).double()
    sums = torch.zeros(2, dtype=torch.float64, device=gradient.device)
    for chunk in torch.split(gradient.detach().flatten(), _CHUNK):
        values = chunk.double()
        sums += torch.stack([values @ values, values @ signs[: values.numel()]])
    squares, total = sums.tolist()
    return math.sqrt(squares), total
