"""Memory that runs out: a virtual rank is computed again to the same bits, or the error says what takes less memory."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from chainring._messages import info, warn
from chainring.datasets._batches import Batch
from chainring.reporting._metrics import list_metrics, remember
from chainring.training.updaters.callbacks import UpdateCallbacks, UpdateContext, taken_back

if TYPE_CHECKING:
    from chainring.training.updaters._virtual import Part

_TEXTS = re.compile(r"out of memory|(can't|cannot) allocate memory|not enough memory|ALLOC_FAILED", re.IGNORECASE)
_NEVER = sys.maxsize
_ALIGNED = 64  # elements; kernels ask for less
LESS = (
    'a smaller batch with accumulate=k, more virtual_ranks, precision="bf16", torch.utils.checkpoint in the model, and '
    "fused=True in the optimizer take less memory"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error by which PyTorch, NumPy or Python says that memory has run out, on any device."""
    is_one = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_one or (isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None)


class Memory:
    """Computes virtual ranks again where memory runs out: after caches were freed, then with saved tensors on the host.

    A virtual rank is a function of parameters, rows, seed, iteration and its number, so it is enough to put these back. The
    updates that need their saved tensors on the host are those of as many numbers as the smallest that has needed it.
    """

    def __init__(
        self, models: Iterable[Any], parameters: Iterable[Tensor], callbacks: UpdateCallbacks, is_main: bool
    ) -> None:
        self._metrics = list_metrics(models)
        self._parameters, self._callbacks = list(parameters), callbacks
        self._say = info if is_main else warn
        self._least = _NEVER  # numbers in the batches of an update that needs the host
        self._has_freed = False

    def compute(self, part: Part) -> None:
        """Compute a virtual rank, at most three times.

        Raises:
            RuntimeError, MemoryError: memory has run out again, or in what cannot be repeated with the same bits.
        """
        epochs, has_freed, error = (part.epoch, part.epoch_detail), False, None
        on_host = self._least < _NEVER and _numbers_in(part.list_batches(), _NEVER) >= self._least
        put_back_metrics = remember(self._metrics) if self._metrics else _do_nothing
        given: Any = nullcontext()  # where nothing has failed
        while True:
            undo: list[Callable[[], Any]] = []
            token = taken_back.set(undo)
            try:
                with given, saved_on_host(self._parameters) if on_host else nullcontext():
                    part.whole.compute_once(part)
                break
            except (RuntimeError, MemoryError) as failure:
                if not is_out_of_memory(failure) or not self._may_retry(failure, part, has_freed, on_host):
                    raise
                error = failure.with_traceback(None)  # whose frames keep what the forward has computed
                error.__context__ = error.__cause__ = None
            finally:
                taken_back.reset(token)
            on_host, has_freed = on_host or has_freed, True
            for function in reversed(undo):
                function()
            part.restart(epochs, put_back_metrics)
            before = self._settings_of(part)
            put_back_metrics = remember(self._metrics) if self._metrics else _do_nothing
            _free_caches(self._parameters)
            given = _GivenBatches(self._callbacks)
        if error is not None:
            if given.have_changed(part.list_batches()):
                error.add_note(f"{_name(part)} is not computed again, since it changes its batch in place")
                raise error
            if (name := _first_difference(before, self._settings_of(part))) is not None:
                error.add_note(f"{_name(part)} is not computed again, since it changes {name}, of which nobody has a copy")
                raise error
            self._tell(part, on_host)

    def _settings_of(self, part: Part) -> dict[Any, Any]:
        """Return what a virtual rank may change besides tensors: settings, modes, hooks, and attributes that are plain.

        They are compared around the last try, and not around the first, so that nothing is paid where memory suffices: what
        the last try has changed, the ones before it may have changed too.
        """
        scheme, settings = part.update.scheme, dict[Any, Any]()
        for name, optimizer in scheme.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                settings |= _plain(f"optimizer {name!r}, group {index}, ", group)
        counted = {id(module) for metric in self._metrics if isinstance(metric, nn.Module) for module in metric.modules()}
        for label, model in scheme.models.items():
            settings[f"requires_grad of model {label!r}"] = [parameter.requires_grad for parameter in model.parameters()]
            for path, module in model.named_modules(prefix=label):
                if id(module) not in counted:
                    settings |= _plain(f"{path}.", vars(module))
        return settings | _plain("updater.", vars(scheme.updater))

    def _may_retry(self, failure: BaseException, part: Part, has_freed: bool, on_host: bool) -> bool:
        """Return whether a virtual rank that has failed is computed again; a note of the error says why not."""
        if (obstacle := part.find_obstacle()) is not None:
            failure.add_note(f"{_name(part)} is not computed again, since its bits could differ: {obstacle}")
        elif has_freed and on_host:
            failure.add_note(
                f"after caches were freed, and with the saved tensors of {_name(part)} on the host, it ran out again"
            )
        else:
            return True
        return False

    def _tell(self, part: Part, on_host: bool) -> None:
        """Say how a virtual rank was computed again."""
        again = f"memory ran out, and {_name(part)} was computed again, to the same bits"
        if on_host and (numbers := _numbers_in(part.list_batches(), 0)) < self._least:
            self._least = numbers
            self._say(f"{again}, with its saved tensors on the host, as are updates of as many examples from now on; {LESS}")
        elif not on_host and not self._has_freed:
            self._has_freed = True
            self._say(f"{again}, after caches were freed; this is said once")


def _plain(path: str, attributes: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the values of numbers, texts and flags, the versions of tensors, and the lengths of others, by name."""
    values: dict[Any, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, (bool, int, float, str, type(None))):
            values[path + name] = value
        elif isinstance(value, Tensor):
            values[path + name, id(value)] = value._version
        elif isinstance(value, Sized) and not isinstance(value, nn.Module):
            values[path + name] = len(value)
    return values


def _first_difference(before: dict[Any, Any], after: dict[Any, Any]) -> str | None:
    """Return the name of what differs; a tensor that was replaced by another is a result."""
    changed = (key for key in before.keys() & after.keys() if before[key] != after[key])
    return next((key if isinstance(key, str) else key[0] for key in changed), None)


def _name(part: Part) -> str:
    return f"virtual rank {part.number} of update {part.update.context.iteration + 1}"


def _free_caches(parameters: list[Tensor]) -> None:
    """Free what nothing refers to any more, and what PyTorch keeps of an accelerator to give it out again."""
    gc.collect()
    if parameters and (device := parameters[0].device).type != "cpu":
        torch.get_device_module(device).empty_cache()


def _do_nothing() -> None:
    pass


class _GivenBatches:
    """The converted batches of a virtual rank that is computed again."""

    def __init__(self, callbacks: UpdateCallbacks) -> None:
        self._callbacks = callbacks
        self._tensors: list[tuple[Tensor, bool]] = []  # and whether it had a gradient

    def __enter__(self) -> None:
        self._callbacks.add("batch_on_finish", self._note, first=True)

    def __exit__(self, *error: object) -> None:
        self._callbacks.remove("batch_on_finish", self._note)

    def _note(self, context: UpdateContext) -> None:
        tensors = [leaf for leaf in tree_leaves(context.batch) if isinstance(leaf, Tensor)]
        self._tensors += [(tensor, tensor.is_leaf and tensor.grad is not None) for tensor in tensors]

    def have_changed(self, batches: list[Any]) -> bool:
        """Return True if one has changed that shares its memory with a batch of the iterator, which then has changed too."""
        spans = [span for batch in batches for span in map(_span_of, _leaves(batch)) if span is not None]
        for tensor, has_gradient in self._tensors:
            start, _ = (tensor._version > 0 and _span_of(tensor)) or (-1, 0)
            if has_gradient or any(first <= start < end for first, end in spans):
                return True
        return False


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


def _span_of(leaf: Any) -> tuple[int, int] | None:
    """Return the addresses of the memory of a tensor or an array."""
    if isinstance(leaf, np.ndarray):
        leaf = leaf if leaf.base is None or not isinstance(leaf.base, np.ndarray) else leaf.base
        return leaf.ctypes.data, leaf.ctypes.data + leaf.nbytes
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return None
    storage = leaf.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


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
    """Return a number of bytes as text."""
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
