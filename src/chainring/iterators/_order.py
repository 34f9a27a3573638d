"""What decides on the batches of a loader: samplers, datasets and functions, their epochs and generators, its own state.

One that has another container, attribute or generator is one name more here, and one line in the forms of
``tests/contracts/test_orders_of_loaders.py``; so is one that has another pair of methods for its state: PyTorch's
``state_dict`` and ``load_state_dict`` are those of torchdata, Hugging Face, litData and MosaicML Streaming,
``save_state_rank`` and ``restore_state_rank`` those of Megatron Energon, ``get_state`` and ``set_state`` those of Grain.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, Dataset, Sampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from chainring._callables import is_taken_apart, references
from chainring._random import digest, is_generator
from chainring.datasets._batches import Batch
from chainring.datasets.base import DatasetMixin
from chainring.serializers.protocol import has_state

_ATTRIBUTES = ("sampler", "batch_sampler", "dataset", "datasets", "collate_fn", "base_dataloader")  # of a pass
_TRANSFORMS = ("transform", "target_transform", "transforms")
_SAMPLED_ARRAYS, _SAMPLED_NUMBERS = 64, 1024  # of a batch, and of each of its arrays, for a digest
_PAIRS = (("state_dict", "load_state_dict"), ("save_state_rank", "restore_state_rank"), ("get_state", "set_state"))
_CLASS, _FIELDS = "chainring.class", "chainring.fields"
_STATE, _TAKEN = "chainring.state", "chainring.taken"  # around a state of an earlier place in the pass


def members_of(source: Any, *, is_loader: bool = False) -> list[Any]:
    """Return a dataset or loader and all in it that may decide on the order or content of a pass, the innermost first."""
    members: list[Any] = []
    seen: set[int] = set()

    def add(value: Any) -> None:
        if id(value) not in seen:
            seen.add(id(value))
            for inner in _contents_of(value, is_loader and value is source):
                add(inner)
            members.append(value)

    add(source)
    return members


def _contents_of(value: Any, is_loader: bool) -> list[Any]:
    """Return what an object goes through or calls; the properties of a dataset may open files, and are left alone."""
    if is_taken_apart(value):  # but for the outer variables of a function
        return [item for kind, _, item in references(value) if kind in ("function", "object", "argument")]
    attributes = getattr(value, "__dict__", {})
    if is_loader:
        attributes = {name: getattr(value, name, None) for name in _ATTRIBUTES} | attributes
    inner: list[Any] = []
    for name, item in attributes.items():
        if name in _ATTRIBUTES or name in _TRANSFORMS or isinstance(item, (Dataset, Sampler, DatasetMixin)):
            several = list(item.values()) if isinstance(item, dict) else item
            inner += several if isinstance(several, (list, tuple)) and name[-1] == "s" else [item]
    return inner


def refuse_labels(members: Iterable[Any]) -> None:
    """Refuse a container of torch's over a column of pandas, whose indices are labels and not positions."""
    for member in members:
        inner = _contents_of(member, False) if type(member).__module__.startswith("torch.utils.data") else []
        for item in inner:
            if hasattr(type(item), "iloc"):
                raise TypeError(
                    f"a {type(member).__name__} asks its data by position, and the index of a {type(item).__name__} of "
                    "pandas has labels, which are other rows once it was sorted or filtered; give it .to_numpy()"
                )


class Epochs:
    """Tells all that has ``set_epoch`` of each epoch, and again what another iterator has told of its own since.

    A container comes after its contents, to which it may give another number.
    """

    _tellers: ClassVar[dict[int, Any]] = {}  # by the id of a member, what it was told last, by any iterator of this process

    def __init__(self, members: Iterable[Any]) -> None:
        self.members = [
            item for item in members if callable(getattr(item, "set_epoch", None)) and not isinstance(item, type)
        ]
        self._told: Any = None

    def tell(self, epoch: int) -> None:
        told = self._told
        if told is None or epoch != told[0] or any(self._tellers.get(id(member)) is not told for member in self.members):
            self.know(epoch)
            for member in self.members:
                member.set_epoch(epoch)

    def know(self, epoch: int) -> None:
        """Count an epoch as told, of which the members know by themselves."""
        self._told = [epoch]  # a new list, which is its own
        self._tellers.update({id(member): self._told for member in self.members})


def generators_of(members: Iterable[Any]) -> list[Any]:
    """Return the generators that the members have as attributes, whose states differ from pass to pass."""
    values = [value for member in members for value in getattr(member, "__dict__", {}).values()]
    return list({id(value): value for value in values if is_generator(value)}.values())


def sampler_gap(loader: Any) -> str | None:
    """Return what the state of a torchdata loader lacks of its order, if it lacks something.

    Without the state of a sampler it skips as many indices of a new order as were drawn of the old one.
    """
    if not is_defined_in(loader, "torchdata."):
        return None
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    inner = outer.sampler if isinstance(outer, BatchSampler) else outer
    is_kept = has_state(outer) or isinstance(inner, (SequentialSampler, _InfiniteConstantSampler))
    is_asked = outer is inner or is_defined_in(outer, "torchdata.")
    if is_kept or (is_asked and (is_defined_in(inner, "torchdata.") or has_state(inner))):
        return None
    return f"the position of its {type(inner).__name__}"


def is_streamed(dataset: Any) -> bool:
    """Return whether it is a dataset of MosaicML Streaming or litData, without code of the user's in it."""
    is_theirs = type(dataset).__name__ == "StreamingDataset" and is_defined_in(dataset, ("streaming.", "litdata."))
    return is_theirs and not any(getattr(dataset, name, None) for name in _TRANSFORMS)


def is_defined_in(value: Any, package: str | tuple[str, ...]) -> bool:
    """Return whether a function, or the class of an object, was defined in a package, or in one of several."""
    return str(getattr(value, "__module__", "") or "").startswith(package)


# --- the content of a batch, by which it is known again ---

Marks = list[list[int]]
"""Of each array of a batch: how often it was changed in place, a digest, and 1 if it has floats."""


def contents(batch: Batch, *, sampled: bool = False, reads_devices: bool = False) -> Iterator[tuple[Any, bytes]]:
    """Yield the tensors, arrays and plain values of a batch, with their bytes; or samples of what is on the host."""
    leaves = tree_leaves([*batch] if batch.columns is None else batch.columns)
    leaves = [item for leaf in leaves for item in (tree_leaves(vars(leaf)) if _has_fields(leaf) else [leaf])]
    for leaf in leaves[:_SAMPLED_ARRAYS] if sampled else leaves:
        if isinstance(leaf, (int, float, str, bytes)):
            yield leaf, repr(leaf).encode()
            continue
        is_tensor = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta"
        if not is_tensor and not (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"):
            continue
        if is_tensor and sampled and not reads_devices and leaf.device.type != "cpu":
            continue
        flat = leaf.detach().reshape(-1) if is_tensor else leaf.reshape(-1)
        sample = flat[:: -(-len(flat) // _SAMPLED_NUMBERS) or 1] if sampled else flat
        content = (sample.cpu().clone().view(torch.uint8).numpy() if is_tensor else sample).tobytes()
        yield leaf, f"{leaf.dtype}{tuple(leaf.shape)}".encode() + content


def _has_fields(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not isinstance(leaf, (torch.Tensor, np.ndarray, type))


def marks_of(batch: Batch) -> Marks:
    """Return by what a batch is known again in another run: samples of its arrays, read from the device too."""
    marks = []
    for leaf, content in contents(batch, sampled=True, reads_devices=True):
        has_floats = isinstance(leaf, float) or "float" in str(getattr(leaf, "dtype", ""))
        version = 0 if not isinstance(leaf, torch.Tensor) or leaf.is_inference() else leaf._version
        marks.append([version, digest(content), int(has_floats)])
    return marks


def find_difference(saved: Marks, marks: Marks) -> str | None:
    """Return what differs between a batch and its saved marks: ``"examples"``, or ``"numbers"`` of the same examples.

    A tensor that the update has changed in place says nothing. Where other arrays than floats agree, so do the examples.
    """
    if len(saved) != len(marks):
        return "examples"
    pairs = [(old, new) for old, new in zip(saved, marks, strict=True) if old[0] == new[0]]
    differ = [old[2] for old, new in pairs if old[1:] != new[1:]]
    if not differ:
        return None
    return "numbers" if all(differ) and not all(old[2] for old, _ in pairs) else "examples"


class StateMethods(NamedTuple):
    """How an object tells where it stands, and goes there."""

    owner: Any
    save: Callable[[], Any]
    load: Callable[[Any], Any]
    holds_generators: bool  # of its workers

    def get(self) -> Any:
        """Return the state in values that a snapshot can hold."""
        try:
            return _to_values(self.save())
        except Exception as error:
            error.add_note(
                f"raised by {type(self.owner).__name__}.{self.save.__name__}, which tells the position to save. Let it "
                "return, or hide it, so that batches are fetched again and skipped: LoaderIterator(lambda: loader)"
            )
            raise

    def set(self, state: Any) -> None:
        """Go to a state that `get` returned."""
        dataset: Any = getattr(self.owner, "dataset", None)
        if is_defined_in(self.owner, "streaming.") and hasattr(dataset, "next_epoch") and isinstance(state, dict):
            # By itself it takes up the epoch that it is in, or a later one, and ignores an earlier one.
            dataset.next_epoch = max(state["epoch"], 0)
        if is_defined_in(self.owner, "litdata."):
            vars(self.owner)["restore"] = False  # which it leaves True where a pass that was restored is broken off
        try:
            self.load(_from_values(state, type(self.owner).__module__.split(".")[0]))
        except Exception as error:
            error.add_note(
                f"raised by {type(self.owner).__name__}.{self.load.__name__}, which was given the state that was saved of "
                "it. A run that is resumed gives it to a loader just made, with the data and settings of the saved run; "
                "one that refuses to be put back once it was used, as Megatron Energon's, cannot be rehearsed"
            )
            raise


def state_methods(owner: Any) -> StateMethods | None:
    """Return an object's pair of methods: one that takes nothing, and one that takes what the first returns."""
    for names in _PAIRS:
        save, load = (getattr(owner, name, None) for name in names)
        if _takes(save) and _takes(load, None):
            return StateMethods(owner, save, load, names[0] != "state_dict")  # type: ignore[arg-type]
    return None


def _takes(method: Any, *arguments: Any) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:  # also where it cannot be called
        return False
    except ValueError:  # of code in C, which has none
        return callable(method)
    return True


def counts_elsewhere(dataset: Any) -> bool:
    """Return whether it is a dataset of MosaicML Streaming, whose position is counted by its own loader alone."""
    method = getattr(dataset, "state_dict", None)
    return inspect.ismethod(method) and {"num_samples", "from_beginning"} <= {*inspect.signature(method).parameters}


def state_after(taken: int, state: Any) -> dict[str, Any]:
    """Mark a state as that after so many batches of a pass, of which the others are to be fetched again."""
    return {_STATE: state, _TAKEN: taken}


def split_state(state: Any) -> tuple[Any, int | None]:
    """Return a state without its mark, and the number of batches after which it was had, if it has one."""
    is_marked = isinstance(state, dict) and [*state] == [_STATE, _TAKEN]
    return (state[_STATE], state[_TAKEN]) if is_marked else (state, None)


def _to_values(state: Any) -> Any:
    """Return a state in which a dataclass, or a subclass of dict, is its name and its fields."""
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    elif isinstance(state, dict):
        fields = {**state}
    else:
        is_plain = type(state) in (list, tuple)
        return type(state)(_to_values(item) for item in state) if is_plain else state
    fields = {key: _to_values(value) for key, value in fields.items()}
    cls = type(state)
    return fields if cls is dict else {_CLASS: f"{cls.__module__}:{cls.__qualname__}", _FIELDS: fields}


def _from_values(state: Any, package: str) -> Any:
    """Return a state with the objects that it had; a class is one that the package of the loader has brought."""
    if type(state) in (list, tuple):
        return type(state)(_from_values(item, package) for item in state)
    if not isinstance(state, dict):
        return state
    if _CLASS not in state:
        return {key: _from_values(value, package) for key, value in state.items()}
    module, _, name = state[_CLASS].partition(":")
    cls: Any = vars(sys.modules[module]).get(name) if module in sys.modules else None
    is_data = isinstance(cls, type) and (dataclasses.is_dataclass(cls) or issubclass(cls, dict))
    if not is_data or module.split(".")[0] not in (package, "collections"):
        raise ValueError(
            f"the saved state of a loader has an object of {state[_CLASS]}, which {package} has not brought as a dataclass "
            "or a subclass of dict; resume with the version of it with which the state was saved"
        )
    value, fields = cls.__new__(cls), _from_values(state[_FIELDS], package)
    if issubclass(cls, dict):
        value.update(fields)
    else:
        for key, item in fields.items():
            object.__setattr__(value, key, item)
    return value
