"""Virtual ranks: their buffers and sharded gradients, what real ranks agree upon, and models that they cannot compute."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy

from chainring._callables import is_taken_apart, references
from chainring._checks import is_integer
from chainring._distributed.communicator import Communicator
from chainring._distributed.digests import sums_of
from chainring._distributed.sharding import (
    as_summand,
    fsdp_modules,
    fsdp_parameters,
    is_sharded,
    is_summand,
    reshard,
    to_local,
)
from chainring._distributed.virtual_ranks import Deal, TreeSum
from chainring._messages import warn
from chainring._random import WITHOUT_CUDNN, draws_in_cudnn, is_generator
from chainring.reporting.summary import is_scalar
from chainring.serializers._models import hyperparameters
from chainring.serializers.protocol import own_states, unwrap
from chainring.training.updaters._arguments import NO_VIRTUAL_RANKS, needs_closure
from chainring.training.updaters._carried import OWN_ATTRIBUTES
from chainring.training.updaters._means import fill

if TYPE_CHECKING:
    from chainring.training.updaters._update import Scheme
    from chainring.training.updaters._virtual import Part

_WATCHED_UPDATES = 2  # of a run
_GLOBAL_GENERATORS = (np.random.mtrand._rand, random._inst, torch.default_generator)
_MAX_DEPTH, _MAX_ITEMS, _MAX_OBJECTS = 12, 100, 20_000
_ELEMENT_BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RMSprop, optim.Adagrad, optim.RAdam, optim.Adamax,
    optim.Adadelta, optim.ASGD,
)  # fmt: skip


class RunningStatistics:
    """The buffers of some models. All virtual ranks begin an update with the same ones.

    Those that a virtual rank changes are set aside for it, so that the next one starts from the same values. In the end,
    a floating-point buffer is the mean of the results weighted by rows, and an integer buffer is that of virtual rank 0.
    They are set by way of ``.data``, which does not count as a change: a graph that has saved one would refuse it, though in
    the backward of a virtual rank its buffers are again what they were when it was left.
    """

    def __init__(self, models: Mapping[str, nn.Module], count: int) -> None:
        self._owners = {
            module: f"{label}.{path}" for label, model in models.items() for path, module in model.named_modules()
        }
        self._count = count

    @torch.no_grad()
    def begin(self, deal: Deal, rank: int) -> None:
        named = [(module._buffers, name) for module in self._owners for name in module._buffers]
        slot_of = {id(buffers[name]): (buffers, name) for buffers, name in named if buffers[name] is not None}
        self._slots: list[tuple[Any, str]] = list(slot_of.values())
        self._buffers: list[Tensor] = [buffers[name] for buffers, name in self._slots]
        self._layouts = {(id(buffers), name): _layout_of(buffers[name]) for buffers, name in named}
        self._initial = [buffer.clone() for buffer in self._buffers]
        self._sum = TreeSum(deal, rank)
        self._sums: list[Tensor | None] | None = None
        self.changed: set[int] = set()  # the numbers of the buffers that a virtual rank of this rank has changed

    @torch.no_grad()
    def put(self, values: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Restore the buffers that `take` has returned for a virtual rank; all others are as at the beginning."""
        for slot, (result, value) in values.items():
            buffers, name = self._slots[slot]
            buffers[name] = result
            self._buffers[slot].data.copy_(value)

    @torch.no_grad()
    def take(self, values: dict[int, tuple[Tensor, Tensor]]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the buffers that a virtual rank has changed, now or before (``values``), and undo its changes.

        Of each, what is in its place, and the value of the one that was there at the beginning: graphs may have saved both.
        """
        for path, before, now in self.find_reshaped():
            if before is not None or self._count > 1:  # what the only virtual rank makes is not averaged
                raise RuntimeError(
                    "of a buffer the virtual ranks of an update have the mean, from the value with which all of them "
                    f"begin, and a forward has made {path!r} of shape {now and now[0]}, which was {before and before[0]}: "
                    "register it with its shape in __init__, or call the model with a batch before the updater is made"
                )
        taken = dict(values)
        for slot, (buffers, name) in enumerate(self._slots):
            buffer, result, initial = self._buffers[slot], buffers[name], self._initial[slot]
            # Buffers on an accelerator are taken in any case: to compare them would wait for it. Versions would not tell,
            # because BatchNorm's kernel on the host changes its statistics without counting that.
            if slot in taken or result is not buffer or result.device.type != "cpu" or not torch.equal(result, initial):
                taken[slot] = result, buffer.clone()
                buffers[name] = buffer
                buffer.data.copy_(initial)
        return taken

    def find_reshaped(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the buffers that a virtual rank has made or reshaped: the path, and shape and dtype before and now."""
        for module, path in self._owners.items():
            for name, buffer in module._buffers.items():
                before, now = self._layouts.get((id(module._buffers), name)), _layout_of(buffer)
                if before != now:
                    yield f"{path}.{name}".replace("..", "."), before, now

    @torch.no_grad()
    def undo(self) -> None:
        for (buffers, name), buffer, initial in zip(self._slots, self._buffers, self._initial, strict=True):
            buffers[name] = buffer
            buffer.data.copy_(initial)  # uncounted, since the graph of another virtual rank may have saved it

    @torch.no_grad()
    def add(self, number: int, rows: int, values: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Add the results of virtual rank ``number``, which has had so many rows."""
        leaf: list[Tensor | None] = [None] * len(self._slots)
        for slot, (result, kept) in values.items() if rows else ():
            initial, value = self._initial[slot], kept if result is self._buffers[slot] else result
            self.changed.add(slot)
            if _is_averaged(value):
                leaf[slot] = torch.where(value == initial, 0, _exact(value) - _exact(initial)) * rows  # also of infinities
            elif number == 0:
                leaf[slot] = value.to(torch.int64) - initial.to(torch.int64)
        self._sum.add(leaf)

    @torch.no_grad()
    def exchange(self, comm: Communicator, changed: Sequence[int]) -> None:
        """Sum over all ranks what has become of the buffers that any of them has changed."""
        like = [_exact(self._buffers[slot]) for slot in changed]
        self._sums = self._sum.select(changed, like).finish(comm, like) if changed else []

    @torch.no_grad()
    def finish(self, comm: Communicator, changed: Sequence[int], rows: Tensor) -> None:
        """Set the buffers that any rank has changed; ``rows`` is the number of rows over all virtual ranks."""
        if self._sums is None:
            self.exchange(comm, changed)
        for slot, total in zip(changed, self._sums or (), strict=True):
            buffer, initial = self._buffers[slot], self._initial[slot]
            assert total is not None
            change = total / rows if _is_averaged(buffer) else total
            buffer.copy_(torch.where(change == 0, _exact(initial), _exact(initial) + change))


def _layout_of(buffer: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype)


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _exact(buffer: Tensor) -> Tensor:
    """Return a buffer in a dtype in which sums are computed."""
    if not _is_averaged(buffer):
        return buffer.to(torch.int64)
    return buffer.to(torch.promote_types(buffer.dtype, torch.float32 if buffer.device.type == "mps" else torch.float64))


class ShardedGradients:
    """The gradients that each rank has computed of the sharded parameters of some models.

    While virtual ranks compute, `fully_shard` does not reduce gradients, because virtual ranks sum them in their own order.
    So a backward leaves, on each rank, the gradient of the whole parameter with the gathered parameter. It is moved to the
    sharded parameter as a ``Partial`` ``DTensor``, a sum that is not computed yet, and can then be cleared, set aside and
    added to like the gradient of a plain parameter.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        models = list(models)
        for model in models:
            reshard(fsdp_modules(model))  # an evaluation leaves parameters gathered
        self._fsdp_params = [fsdp_param for model in models for fsdp_param in fsdp_parameters(model)]

    def __bool__(self) -> bool:
        return bool(self._fsdp_params)

    def drop(self) -> None:
        """Forget gradients that a backward which failed may have left."""
        for fsdp_param in self._fsdp_params:
            _take(fsdp_param)

    @contextmanager
    def backward(self) -> Generator[None]:
        """Return the context of a backward, which adds to the gradients that are there."""
        for fsdp_param in self._fsdp_params:
            gradient = fsdp_param.sharded_param.grad
            gathered = getattr(fsdp_param, "unsharded_param", None)  # not before the first forward
            if gathered is not None and is_summand(gradient) and gathered.dtype == gradient.dtype:
                gathered.grad, fsdp_param.sharded_param.grad = to_local(gradient), None
        yield
        self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Move what a backward has left to the gradients of the sharded parameters."""
        for fsdp_param in self._fsdp_params:
            parameter, gradient = fsdp_param.sharded_param, _take(fsdp_param)
            if gradient is None:
                continue
            earlier = parameter.grad
            if earlier is None:
                parameter.grad = as_summand(gradient.to(parameter.dtype), parameter)
            elif is_summand(earlier):
                to_local(earlier).add_(gradient)
            else:
                raise RuntimeError(
                    "loss.backward() has met the gradients of a step, which are sharded and were summed over the ranks; "
                    "write self.backward(loss) in update_core, which clears them before"
                )


def _take(fsdp_param: Any) -> Tensor | None:
    """Return the gradient that a backward has left with a gathered parameter, which then has none."""
    gathered, gradient = getattr(fsdp_param, "unsharded_param", None), fsdp_param.unsharded_accumulated_grad
    if gradient is None and gathered is not None:
        gradient = gathered.grad
    if "unsharded_accumulated_grad" in vars(fsdp_param):  # until torch 2.14, and there with a MixedPrecisionPolicy
        fsdp_param.unsharded_accumulated_grad = None
    if gathered is not None:
        gathered.grad = None
    return gradient  # type: ignore[no-any-return]


def whole_like(parameter: Any) -> Tensor:
    """Return a tensor of the shape, dtype and device of a whole parameter, which takes no memory where that is sharded."""
    if not is_sharded(parameter):
        return parameter  # type: ignore[no-any-return]
    return torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


class Findings(NamedTuple):
    """What a rank has found out in an update, or all ranks together."""

    keys: tuple[str, ...] = ()  # of the numbers that were reported, in the order of the virtual ranks
    changed: tuple[int, ...] = ()  # the numbers of the buffers that have changed
    absent: tuple[int, ...] = ()  # the positions of parameters that no virtual rank has a gradient of
    is_stale: bool = False  # gradients were sent that have changed since
    shown: bytes = b""  # the images, texts and histograms of virtual rank 0, where any rank may have to go on with the log


class ChangeWatch:
    """Refuses what a virtual rank changes by itself, so that only the next ones of the same rank see it.

    Parameters change in a step alone. In the first updates of a run their values are compared around each virtual rank,
    later their versions, and the values of those that a virtual rank has changed before and put back. The settings of
    optimizers, and random generators that are not the global ones, are compared in the first updates.
    """

    def __init__(self, scheme: Scheme, count: int) -> None:
        named = [item for label, model in scheme.models.items() for item in model.named_parameters(f"model {label!r}:")]
        self._names, self._parameters = [name.replace(":.", ", ") for name, _ in named], [value for _, value in named]
        self._scheme, self._is_alone = scheme, count == 1
        self._unchecked = 0 if self._is_alone else _WATCHED_UPDATES
        self._settings: dict[str, Any] | None = None  # as the first virtual rank since the last step has left them
        self._put_back: set[int] = set()  # the parameters that virtual ranks have changed and put back
        roots: dict[str, Any] = {f"model {label!r}": model for label, model in scheme.models.items()}
        roots |= {f"updater.{name}": value for name, value in vars(scheme.updater).items() if name not in OWN_ATTRIBUTES}
        for label, iterator in () if self._is_alone else scheme.iterators.items():
            roots[f"the data set of iterator {label!r}"] = getattr(iterator, "dataset", None)
        seen: dict[int, Any] = {}
        self._generators = [item for path, root in roots.items() for item in _generators_in(path, root, seen, 0)]

    def begin(self) -> None:
        self._refuse: Callable[[str], NoReturn] | None = None
        self._looks = self._unchecked > 0
        self._unchecked -= self._looks
        self._states = [_state_of(generator) for _, generator in self._generators]
        self.note()

    def note(self) -> None:
        """Note what virtual ranks have to leave as it is, until the next step."""
        self._versions = [parameter._version for parameter in self._parameters]
        if not self._is_alone:
            self._compared = list(range(len(self._parameters))) if self._looks else sorted(self._put_back)
            self._sums, self._settings = self._sum(), None

    def find_change(self) -> str | None:
        """Return the name of what the virtual rank that is computed now has changed, and cannot be put back."""
        pairs = zip(self._names, self._parameters, self._versions, strict=True)
        drawn = zip(self._generators, self._states, strict=True)
        return next(
            chain(
                (name for name, parameter, version in pairs if parameter._version != version),
                (path for (path, generator), state in drawn if _state_of(generator) != state),
            ),
            None,
        )

    def compare_values(self, refuse: Callable[[str], NoReturn]) -> None:
        """Let a virtual rank that begins again be refused, by its name, if a parameter has another value when it is left."""
        self._compared, self._refuse = list(range(len(self._parameters))), refuse
        self._sums = self._sum()

    def _sum(self) -> list[int]:
        return sums_of([to_local(self._parameters[index]).detach() for index in self._compared])

    def check(self) -> None:
        """Refuse what the virtual rank that is left now has changed."""
        refuse, self._refuse = self._refuse, None
        if self._is_alone and refuse is None:
            return
        versions = [parameter._version for parameter in self._parameters]
        if versions != self._versions or self._compared:
            sums = self._sum()
            changed = [index for index, *pair in zip(self._compared, self._sums, sums, strict=True) if pair[0] != pair[1]]
            counted = {index for index, (a, b) in enumerate(zip(versions, self._versions, strict=True)) if a != b}
            changed += counted - set(self._compared)
            if changed and refuse is not None:
                refuse(self._names[min(changed)])
            if changed:
                raise RuntimeError(
                    "parameters change in self.step() alone, once for all virtual ranks, and one of these has changed "
                    f"{self._names[min(changed)]}. What happens once an update belongs into an extension, "
                    'trainer.extend(function, trigger=(1, "iteration")), or UpdateCallbacks(update_on_finish=function); '
                    "what a forward keeps is a buffer, of which virtual ranks have the mean; what is changed for a while is "
                    "put back from a copy, parameter.copy_(saved), from the first update on"
                )
            self._put_back |= counted
            self._versions = versions
        if self._looks:
            self._check_settings()
            for (path, generator), state in zip(self._generators, self._states, strict=True):
                if _state_of(generator) != state:
                    raise RuntimeError(
                        f"each virtual rank and each example has the global generators seeded for it, and {path}, of type "
                        f"{type(generator).__name__}, was drawn from, whose numbers depend on which rank computes what: "
                        "draw from the global ones, torch.rand(3), numpy.random.rand(3), random.random(), or make one "
                        "for each example, numpy.random.default_rng(index)"
                    )

    def _check_settings(self) -> None:
        found: dict[str, Any] = {}
        for name, optimizer in self._scheme.optimizers.items():
            groups = zip(hyperparameters(optimizer), optimizer.param_groups, strict=True)
            found[name] = [{**group, "lr": float(now.get("lr", 0))} for group, now in groups]
        for name, value in vars(self._scheme.updater).items():
            if hasattr(value, "last_epoch"):
                found[f"{name}.last_epoch"] = value.last_epoch
        if self._settings is None:
            self._settings = found
        elif found != self._settings:
            name = next(name for name in found if found[name] != self._settings[name])
            raise RuntimeError(
                f"update_core runs once for each virtual rank, and has left {name!r} as {self._settings[name]} in one and "
                f"as {found[name]} in the next: a scheduler belongs into trainer.extend(extensions.LRScheduler(scheduler)), "
                "and settings that depend on values of the rows into an extension, which reads trainer.observation"
            )


def _generators_in(path: str, value: Any, seen: dict[int, Any], depth: int) -> Iterable[tuple[str, Any]]:
    """Yield the random generators that an object refers to, except the global ones, which virtual ranks have seeded."""
    if is_generator(value):
        if not any(value is generator for generator in _GLOBAL_GENERATORS):
            yield path, value
        return
    is_far = depth > _MAX_DEPTH or len(seen) > _MAX_OBJECTS
    if is_far or id(value) in seen or isinstance(value, (type, ModuleType, Tensor, str, bytes)):
        return
    seen[id(value)] = value
    items: Iterable[tuple[Any, Any]] = getattr(value, "__dict__", {}).items()
    if isinstance(value, (dict, list, tuple)):
        items = islice(value.items() if isinstance(value, dict) else enumerate(value), _MAX_ITEMS)
    elif is_taken_apart(value):
        items = ((name, item) for _, name, item in references(value))
    for name, item in list(items):
        inner = path if name in ("_modules", "self", "") else f"{path}.{name}"
        yield from _generators_in(inner, item, seen, depth + 1)


def _state_of(generator: Any) -> Any:
    return generator.get_state().numpy().tobytes() if isinstance(generator, torch.Generator) else pickle.dumps(generator)


class Means(NamedTuple):
    """Weighted means over all virtual ranks, the sums of their weights and rows, and those of the weights of their steps."""

    values: dict[str, Any]
    weight: Tensor
    rows: Tensor
    step_weights: list[Tensor]
    is_new: Tensor  # not 0 if the findings of a rank have changed
    weights: dict[str, Any]  # of the values
    digests: Tensor  # of which each rank has given some


class Agreement:
    """What all ranks have found out in an update, and the weighted means over all virtual ranks of what these report.

    Ranks exchange their findings only if those of one have changed since the last update. A flag for that is sent with the
    means of the keys of the last update; on an accelerator, which would have to be waited for to read it, in a message of
    its own. A virtual rank without rows does not count, nor does one that has not reported a key for the mean of that key.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._last = self._agreed = Findings()  # of this rank, and of all

    def start(
        self, findings: Findings, parts: Sequence[Part], deal: Deal, at_step: bool = False, digests: Sequence[Any] = ()
    ) -> Callable[[], tuple[Findings, Means]]:
        """Start to exchange findings and means with the other ranks; the returned function waits for them."""
        if self._comm.size == 1:
            return lambda: (findings, self._start_means(parts, deal, at_step, findings.keys, digests)())
        is_new, self._last = findings != self._last, findings
        wait_for_any = None if self._device.type == "cpu" else self._comm.start_max(int(is_new))
        wait = self._start_means(parts, deal, at_step, self._agreed.keys, digests, is_new)

        def finish() -> tuple[Findings, Means]:
            means = wait()
            if bool(means.is_new) if wait_for_any is None else wait_for_any():
                ranks = self._comm.gather_object(findings)
                self._agreed = Findings(
                    tuple(dict.fromkeys(key for rank in ranks for key in rank.keys)),
                    tuple(sorted({slot for rank in ranks for slot in rank.changed})),
                    tuple(sorted(set.intersection(*(set(rank.absent) for rank in ranks)))),
                    any(rank.is_stale for rank in ranks),
                    b"".join(rank.shown for rank in ranks),
                )
                means = self._start_means(parts, deal, at_step, self._agreed.keys, digests)()
            return self._agreed, means

        return finish

    def _start_means(
        self,
        parts: Sequence[Part],
        deal: Deal,
        at_step: bool,
        keys: Sequence[str],
        digests: Sequence[Any],
        is_new: bool = False,
    ) -> Callable[[], Means]:
        total = TreeSum(deal, self._comm.rank)
        step_count = len(parts[0].steps[-1][1]) if at_step else 0
        for part in parts:
            pairs = [pair_with_weight(part.observation.get(key), part.weight) or (0, 0) for key in keys]
            sums = [part.weight, part.rows, *(part.steps[-1][1] if at_step else ())]
            numbers = [*sums, *(value for value, _ in pairs), *(weight for _, weight in pairs)]
            numbers = [is_new, *(numbers if part.rows else [0] * len(numbers))]
            numbers += digests if part is parts[0] else [0] * len(digests)
            vector = fill(numbers, dtype=self._dtype, device=self._device)
            start = 1 + len(sums)
            values, weights, _ = torch.split(vector[start:], [len(keys), len(keys), len(digests)])
            values.copy_(torch.where(weights == 0, 0, values * weights))  # also of a value that is not finite
            total.add([vector])
        wait = total.start_gather(self._comm)

        def finish() -> Means:
            sizes = [1, 1, 1, step_count, len(keys), len(keys), len(digests)]
            new, weight, rows, step_weights, values, weights, sums = torch.split(wait(), sizes)
            means = dict(zip(keys, (values / weights).unbind(), strict=True))
            totals = dict(zip(keys, weights.unbind(), strict=True))
            return Means(means, weight.reshape(()), rows.reshape(()), list(step_weights.unbind()), new, totals, sums)

        return finish


def list_keys(parts: Sequence[Part]) -> tuple[str, ...]:
    """Return the keys of numbers that virtual ranks with rows have reported, in their order."""
    rows = [(key, value) for part in parts if part.rows for key, value in part.observation.items()]
    return tuple(dict.fromkeys(key for key, value in rows if pair_with_weight(value, 0) is not None))


def pair_with_weight(value: Any, weight: Any) -> tuple[Any, Any] | None:
    """Return a reported number and its weight, by default ``weight``; ``None`` for anything but a number."""
    if type(value) is tuple and len(value) == 2 and is_scalar(value[0]) and is_scalar(value[1]):
        return value
    return (value, weight) if value is not None and is_scalar(value) else None


def check_virtual_ranks(
    count: Any, comm: Communicator, models: Mapping[str, nn.Module], optimizers: Mapping[str, optim.Optimizer]
) -> None:
    """Refuse a number of virtual ranks, and models and optimizers with which they cannot give the same bits."""
    if not is_integer(count):
        raise TypeError(f"virtual_ranks is the number of parts of an update, an integer, got {count!r}")
    if count < max(1, comm.size):
        raise ValueError(
            f"virtual_ranks is the number of parts of an update, of which each rank computes at least one, got {count} with "
            f"{comm.size} ranks; take at least {comm.size}, such as the largest number of devices that the run may ever have"
        )
    if comm.world.size > comm.size:
        raise ValueError(
            f"virtual_ranks are computed by ranks that have the whole model, or are sharded by fully_shard alone, and on "
            f"this mesh {comm.world.size // comm.size} ranks compute one model together, whose number its bits depend on: "
            "leave virtual_ranks out, or give all ranks of the mesh to the data"
        )
    for name, model in models.items():
        for path, module in model.named_modules():
            _check_module(f"model {name!r} has {path or 'itself'} of type {type(module).__name__}", module)
        if own := [path or "itself" for path, _ in own_states(unwrap(model))]:
            warn(
                f"model {name!r} has {', '.join(own)}, which keeps a state of its own, since it has serialize(); the "
                "virtual ranks of one process share it. What changes in it from batch to batch, as the hidden state of a "
                "recurrent network does, makes the bits depend on the number of ranks: leave virtual_ranks out then",
            )
    for name, optimizer in optimizers.items():
        if needs_closure(optimizer):
            raise ValueError(f"optimizer {name!r} is {type(optimizer).__name__}; {NO_VIRTUAL_RANKS}")
        pairs = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for group, parameter in pairs:
            if is_sharded(parameter) and (reason := _find_reason(optimizer, group, parameter)):
                raise ValueError(
                    "with virtual_ranks each rank makes of its shards what one rank makes of whole parameters, to the last "
                    f"bit, and optimizer {name!r} of sharded parameters {reason}, or leave the model plain or wrap it in "
                    "DistributedDataParallel"
                )


def _check_module(what: str, module: nn.Module) -> None:
    if (max_norm := getattr(module, "max_norm", None)) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ValueError(
            f"with virtual_ranks parameters stay as they are until the step, and {what}, whose forward scales the rows that "
            f"a virtual rank looks up to max_norm={max_norm}: leave max_norm out, and scale once an update, UpdateCallbacks("
            f"update_on_finish=lambda context: layer.weight.data.renorm_({module.norm_type}, 0, {max_norm}))"
        )
    if draws_in_cudnn(module):
        text = f"{what}(dropout={module.dropout:g}), for which cuDNN draws from a state that all virtual ranks would share"
        raise ValueError(f"{text}: {WITHOUT_CUDNN}")
    if isinstance(module, nn.SyncBatchNorm):
        raise ValueError(
            f"with virtual_ranks each virtual rank has its own statistics of the batch, and {what}, which exchanges them "
            "between ranks by itself; take nn.BatchNorm, whose running statistics are averaged"
        )
    if getattr(module, "_comm_hooks", None):
        raise ValueError(
            f"with virtual_ranks gradients are exchanged in one fixed order, and {what} with a communication hook of its "
            "own, which would not be called; leave it out"
        )
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(map(is_lazy, own)):
        raise ValueError(f"{what}, whose shape is not known yet; call the model with one batch before the updater is made")


def _find_reason(optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: Any) -> str | None:
    """Return why the bits of a step depend on the shards, and what to write instead; ``None`` if they do not."""
    cls, device = type(optimizer), parameter.device.type
    if cls not in _ELEMENT_BY_ELEMENT:
        names = ", ".join(known.__name__ for known in _ELEMENT_BY_ELEMENT)
        return f"is {cls.__qualname__}, which may use more than one element at a time: take one of torch.optim's {names}"
    if group.get("fused"):
        return "has fused=True, whose kernels round by the place of an element: take foreach=True, or neither"
    if device == "cpu" and parameter.element_size() < 4:
        return (
            f"steps in {parameter.dtype} on the host, whose kernels round by the place of an element: keep parameters in "
            'float32 and compute with precision="bf16"'
        )
    if device != parameter.device_mesh.device_type:
        return (
            f"steps on {device!r}, to which fully_shard has moved them, and ranks exchange on "
            f"{parameter.device_mesh.device_type!r}: leave offload_policy out"
        )
    return None
