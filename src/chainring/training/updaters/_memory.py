"""Memory that runs out: a virtual rank is computed again to the same bits, or the error says what takes less memory."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import MemberDescriptorType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chainring._callables import defined_by, is_taken_apart, references
from chainring._distributed.digests import sums_of
from chainring._distributed.sharding import to_local
from chainring._messages import info, warn
from chainring.datasets._batches import Batch
from chainring.reporting._metrics import list_metrics, parts_of, remember
from chainring.training.updaters._carried import OWN_ATTRIBUTES
from chainring.training.updaters.callbacks import taken_back

if TYPE_CHECKING:
    from chainring.training.updaters._virtual import Part
    from chainring.training.updaters._virtual_state import ChangeWatch

_TEXTS = re.compile(r"out of memory|(can't|cannot) allocate memory|not enough memory|ALLOC_FAILED", re.IGNORECASE)
_NEVER = sys.maxsize
_MAX_DEPTH = 6
_OF_A_MODULE = ("_parameters", "_buffers", "_modules")  # looked at by themselves
_ALIGNED = 64  # elements; kernels ask for less
LESS = (
    'a smaller batch with accumulate=k, more virtual_ranks, precision="bf16", torch.utils.checkpoint in the model, and '
    "fused=True in the optimizer take less memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error by which PyTorch, NumPy or Python says that memory has run out, or that comes of one."""
    return any(
        isinstance(cause, (torch.OutOfMemoryError, MemoryError))
        or (isinstance(cause, RuntimeError) and _TEXTS.search(str(cause)) is not None)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and those of which it comes, as a traceback shows them."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return causes


class Memory:
    """Computes virtual ranks again where memory runs out: after caches were freed, then with saved tensors on the host.

    A virtual rank is a function of parameters, rows, seed, iteration and its number, so it is enough to put these back. The
    updates that need their saved tensors on the host are those of as many numbers as the smallest that has needed it.
    """

    def __init__(self, models: Iterable[Any], parameters: Iterable[Tensor], watch: ChangeWatch, is_main: bool) -> None:
        self._metrics, self._parameters, self._watch = list_metrics(models), list(parameters), watch
        self._say = info if is_main else warn
        self._least = _NEVER  # numbers in the batches of an update that needs the host
        self._has_freed = False

    def compute(self, part: Part) -> None:
        """Compute a virtual rank, at most three times."""
        epochs, error, outer = (part.epoch, part.epoch_detail), None, taken_back.get()
        put_back_metrics = remember(self._metrics)
        needs_host = self._least < _NEVER and _numbers_in(part.list_batches(), _NEVER) >= self._least
        tries = [True, True] if needs_host else [False, False, True]  # with saved tensors on the host, or not
        while True:
            undo: list[Callable[[], Any]] = []
            on_host, token = tries.pop(0), taken_back.set(undo)
            try:
                with saved_on_host(self._parameters) if on_host else nullcontext():
                    part.whole.compute_once(part)
                break
            except BaseException as failure:
                is_again = failure is not error and is_out_of_memory(failure)
                if not is_again or not _may_retry(failure, part, bool(tries)):
                    if outer is not None:
                        outer += undo
                    raise
                error = failure
                for cause in _causes(failure):
                    cause.__traceback__ = None  # whose frames keep what the forward has computed
            finally:
                taken_back.reset(token)
            for function in reversed(undo):
                function()
            part.restart(epochs, put_back_metrics)
            put_back_metrics = remember(self._metrics)
            _free_caches(self._parameters)
            before = self._state_of(part)
            self._watch.compare_values(partial(_refuse, part, error))
        if not part.counts:
            for function in reversed(undo):
                function()
        elif outer is not None:
            outer += undo
        if error is not None:
            self._watch.check()
            after = self._state_of(part)
            for name, value in before.items():
                if name in after and value is not after[name] and value != after[name]:
                    _refuse(part, error, name)
            self._tell(part, on_host)

    def _state_of(self, part: Part) -> dict[str, Any]:
        """Return what a virtual rank may change besides parameters: settings, attributes, variables, and its batches.

        It is compared around the last try, and not around the first, so that nothing is paid where memory suffices: what
        the last try has changed, the ones before it may have changed too.
        """
        scheme, updater = part.update.scheme, part.update.scheme.updater
        modules = [item for label, model in scheme.models.items() for item in model.named_modules(prefix=label)]
        counted = {id(obj): obj for metric in self._metrics for obj in parts_of(metric)}  # put back
        apart = [getattr(updater.update_core, "__self__", None), *scheme.iterators.values(), *(obj for _, obj in modules)]
        seen: dict[int, Any] = counted | {id(obj): obj for obj in apart}
        values: list[tuple[str, Mapping[str, Any]]] = []
        for index, leaf in enumerate(leaf for batch in part.list_batches() for leaf in _leaves(batch)):
            is_array, has_gradient = isinstance(leaf, (Tensor, np.ndarray)), isinstance(leaf, Tensor) and leaf.is_leaf
            fields = leaf if is_array else getattr(leaf, "__dict__", leaf)
            values.append(("", {f"its batch in place, value {index}": fields}))
            values.append(("", {f"the gradient of value {index} of it": leaf.grad if has_gradient else None}))
        attributes = {name: item for name, item in _attributes(updater).items() if name not in OWN_ATTRIBUTES}
        values += [("updater", attributes), ("callbacks", vars(updater.callbacks))]
        for name, optimizer in scheme.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                values.append((f"optimizer {name!r}, group {index}, ", {**group, "params": None}))
        for label, model in scheme.models.items():
            values.append(("", {f"requires_grad of model {label!r}": [p.requires_grad for p in model.parameters()]}))
        values += [(path, _attributes(module)) for path, module in modules if id(module) not in counted]
        return {key: state for path, inside in values for key, state in _plain(path, inside, seen).items()}

    def _tell(self, part: Part, on_host: bool) -> None:
        again = f"memory ran out, and {_name(part)} was computed again, to the same bits"
        if on_host and (numbers := _numbers_in(part.list_batches(), 0)) < self._least:
            self._least = numbers
            self._say(f"{again}, with its saved tensors on the host, as are updates of as many examples from now on; {LESS}")
        elif not on_host and not self._has_freed:
            self._has_freed = True
            self._say(f"{again}, after caches were freed; this is said once")


def _may_retry(failure: BaseException, part: Part, has_tries: bool) -> bool:
    """Return whether a virtual rank that has failed is computed again; a note of the error says why not."""
    if (obstacle := part.find_obstacle()) is not None:
        failure.add_note(f"{_name(part)} is not computed again, since its bits could differ: {obstacle}")
    elif not has_tries:
        failure.add_note(
            f"after caches were freed, and with the saved tensors of {_name(part)} on the host, it ran out again"
        )
    return obstacle is None and has_tries


def _plain(path: str, values: Mapping[str, Any], seen: dict[int, Any], depth: int = 0) -> dict[str, Any]:
    """Return what shows a change of values, by name: of their numbers, texts and flags, at any depth, and of arrays.

    Of containers also the length. What a function refers to is looked into, and the attributes of objects and classes that
    PyTorch and Python do not define. Where an iterator is, nobody knows. What was ``seen`` is not looked into again.
    """
    plain: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{path}.{name}".strip(".")
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None), np.generic)):
            plain[key] = value
            continue
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen[id(value)] = value
        inside: dict[str, Any] = {}
        if isinstance(value, Tensor):
            has_digest = value.layout is torch.strided and not value.is_quantized
            plain[key] = sums_of([to_local(value.detach())]) if has_digest else (id(value), value._version)
        elif isinstance(value, np.ndarray):
            plain[key] = value.tobytes()
        elif isinstance(value, Iterator):
            plain[key] = object()  # which is equal to no other
        elif is_taken_apart(value):
            inside = {label: item for _, label, item in references(value)}
        elif isinstance(value, (type, SimpleNamespace)) or defined_by(type(value)) != "library":
            inside = _attributes(value)
        if isinstance(value, (set, frozenset)):
            plain[key] = frozenset(value)
        elif isinstance(value, (dict, list, tuple, deque)):
            plain[key] = len(value)
            if name not in _OF_A_MODULE:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                inside |= {str(index): item for index, item in items}
        plain |= _plain(key, inside, seen, depth + 1)
    return plain


def _attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object and its classes, or of a class, where the script or a package defines them."""
    attributes: dict[str, Any] = {}
    for cls in (obj if isinstance(obj, type) else obj.__class__).__mro__:
        for name, item in vars(cls).items() if defined_by(cls) != "library" else ():
            if isinstance(item, MemberDescriptorType):  # of __slots__
                attributes[name] = getattr(obj, name, None)
            elif not name.startswith("__"):
                attributes[f"{cls.__name__}.{name}"] = item
    return attributes if isinstance(obj, type) else attributes | getattr(obj, "__dict__", {})


def _refuse(part: Part, error: BaseException, name: str) -> NoReturn:
    """Raise the error from before a virtual rank was computed again, since it has changed something."""
    error.add_note(f"{_name(part)} is not computed again, since it may have changed {name}, of which nobody has a copy")
    raise error


def _name(part: Part) -> str:
    return f"virtual rank {part.number} of update {part.update.context.iteration + 1}"


def _free_caches(parameters: list[Tensor]) -> None:
    """Free what nothing refers to any more, and what PyTorch keeps of an accelerator to give it out again."""
    gc.collect()
    if parameters and (device := parameters[0].device).type != "cpu":
        torch.get_device_module(device).empty_cache()


def _leaves(batch: Any) -> list[Any]:
    """Return the arrays and numbers of a batch as it comes from an iterator."""
    if isinstance(batch, Batch):
        batch = list(batch) if batch.columns is None else batch.columns
    return tree_leaves(batch)


def _numbers_in(batches: list[Any], unknown: int) -> int:
    """Return how many numbers there are in some batches, and ``unknown`` if none was fetched."""
    leaves = [leaf for batch in batches for leaf in _leaves(batch)]
    sizes = (leaf.numel() if isinstance(leaf, Tensor) else getattr(leaf, "size", 1) for leaf in leaves)
    return sum(size if isinstance(size, int) else 1 for size in sizes) if leaves else unknown


def saved_on_host(kept: Iterable[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which what autograd saves for a backward lies on the host, except for these tensors and views.

    As `torch.autograd.graph.save_on_cpu`; but each tensor comes back with the strides and the alignment that it had, on
    which the last bits of a kernel may depend, and parameters, which are on the device in any case, stay there.
    """
    addresses = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.layout is torch.strided}

    @torch.no_grad()
    def pack(tensor: Tensor) -> Any:
        is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if tensor.device.type == "cpu" or not is_plain or tensor.untyped_storage().data_ptr() in addresses:
            return tensor.detach()  # which does not keep the graph alive
        size, stride = tensor.size(), tensor.stride()
        lengths = [1 if step == 0 else length for length, step in zip(size, stride, strict=True)]  # of what is repeated, one
        values = tensor.as_strided(lengths, stride).cpu()
        return tensor.device, values, size, stride, tensor.storage_offset() % _ALIGNED

    @torch.no_grad()
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, values, size, stride, offset = packed
        span = sum((length - 1) * step for length, step in zip(values.shape, stride, strict=True)) + 1
        memory = torch.empty(offset + span if values.numel() else 0, dtype=values.dtype, device=device)
        memory.as_strided(values.shape, stride, offset).copy_(values)
        return memory.as_strided(size, stride, offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def capacity(device: torch.device) -> tuple[int, int] | None:
    """Return how many bytes of a device are free, and how many it has; ``None`` if it does not tell."""
    try:
        if device.type == "cpu":
            free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        elif hasattr(torch.accelerator, "get_memory_info"):  # since torch 2.10
            free, total = torch.accelerator.get_memory_info(device)
        else:
            free, total = torch.get_device_module(device).mem_get_info(device)
    except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError):
        return None
    return int(free), int(total)


def sized(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def explain_out_of_memory(updater: Any, extension: str | None) -> str:
    """Return what is known of the memory, and what takes less of it, where an error has said that it has run out."""
    parameters = (parameter for model in updater.get_all_models().values() for parameter in model.parameters())
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    numbers = []
    if (sizes := capacity(device)) is not None:
        name = "this machine" if device.type == "cpu" else device
        numbers.append(f"{name} has {sized(sizes[1])}, of which {sized(sizes[0])} are free now")
    if (peak := getattr(torch.get_device_module(device), "max_memory_allocated", None)) is not None:
        numbers.append(f"the tensors of this process took {sized(peak(device))} at the peak")
    text = f"hint: {'; '.join([*numbers, ''])}{LESS}"
    if extension is not None:
        return f"{text}; in extension {extension!r} so does a smaller batch of its own iterator"
    if getattr(updater, "virtual_ranks", None) is None:
        text += "; with virtual_ranks=1 a forward or backward is computed again, to the same bits, with less on the device"
    return text
