"""What a dataset is: examples by index, and where it holds whole arrays, columns of which a batch takes rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import call
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
import torch.utils.data
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten, tree_map

from chainring._random import Indices


class Indexed(Protocol):
    """The interface of a dataset: a length, and an example for each integer below it, as in a list, an array or a tensor."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Dataset: TypeAlias = Indexed | torch.utils.data.Dataset[Any]
"""What a dataset is to type checkers. The class of PyTorch does not declare the length that its subclasses have."""


def size_of(dataset: Dataset) -> int:
    """Return the number of examples."""
    return len(dataset)  # type: ignore[arg-type]


class DatasetMixin:
    """Base class of datasets: a subclass defines ``__len__`` and ``get_example(i)``, and gets all kinds of indexing.

    ``dataset[3]`` and ``dataset[-1]`` return one example; a slice, or a list or array of integers or booleans, returns a
    list of examples.

    Example::

        class Squares(DatasetMixin):
            def __len__(self):
                return 10

            def get_example(self, i):
                return i**2

        Squares()[-1], Squares()[:3]  # (81, [0, 1, 4])
    """

    def __len__(self) -> int:
        """Return the number of examples."""
        raise NotImplementedError(f"{type(self).__name__} must define __len__")

    def get_example(self, i: int) -> Any:
        """Return example ``i``, which is from 0 to ``len(self) - 1``."""
        raise NotImplementedError(f"{type(self).__name__} must define get_example(i)")

    def __getitem__(self, index: int | slice | list[int] | list[bool] | NDArray[Any]) -> Any:
        if isinstance(index, slice):
            return [self.get_example(i) for i in range(*index.indices(len(self)))]
        if isinstance(index, (int, np.integer)):
            return self.get_example(self._normalize(int(index)))
        indices = np.asarray(index)
        if indices.ndim == 0 and indices.dtype.kind in "iu":
            return self.get_example(self._normalize(int(indices)))
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iub"):
            raise TypeError(f"an index is an integer, a slice, or a list or array of integers or booleans, got {index!r}")
        if indices.dtype.kind == "b":
            if len(indices) != len(self):
                raise IndexError(f"a mask has one boolean for each of the {len(self)} examples, got {len(indices)}")
            indices = np.flatnonzero(indices)
        return [self.get_example(self._normalize(int(i))) for i in indices]

    def _normalize(self, i: int) -> int:
        size = len(self)
        if not -size <= i < size:
            raise IndexError(f"the dataset has {size} examples, so no example {i}")
        return i % size


class _Rows:
    """A column of pandas by position: its own index has labels, which are other rows once it was sorted or filtered."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> Any:
        return self.column.iloc[index]


def by_position(dataset: Any) -> Any:
    """Return a dataset whose indices are positions: a column of pandas is wrapped, and a table, which has none, refused."""
    if not hasattr(type(dataset), "iloc"):
        return dataset
    if getattr(dataset, "ndim", 1) > 1:
        raise TypeError(
            f"examples are asked by position, and dataset[i] of a {type(dataset).__name__} is a column; write "
            'dataset.to_numpy(), or TupleDataset(dataset["x"], dataset["y"]) of its columns'
        )
    return _Rows(dataset)


def require_datasets(name: str, *datasets: Any) -> tuple[Any, ...]:
    """Return the datasets, indexed by position; refuse objects without a length or examples now, and none at all."""
    if not datasets:
        raise ValueError(f"{name} needs at least one dataset, got none")
    for dataset in datasets:
        if isinstance(dataset, type) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            got = f"the class {dataset.__name__}" if isinstance(dataset, type) else type(dataset).__name__
            raise TypeError(
                f"{name} combines datasets, which have __len__ and __getitem__(i); got {got}. "
                "Make a list of an iterable, or pass an iterable of batches to the updater directly"
            )
    return tuple(map(by_position, datasets))


def indexes_like(dataset: DatasetMixin, cls: type[DatasetMixin]) -> bool:
    """Return whether ``dataset`` indexes as ``cls`` does: a subclass has not overridden how an example is made."""
    return type(dataset).get_example is cls.get_example and type(dataset).__getitem__ is DatasetMixin.__getitem__


Gather = Callable[[Any], Any]  # from the indices of examples, or the places of a `JointGather`, to columns


def make_gather(dataset: Any) -> Gather | None:
    """Return a function from indices to the columns of those examples, or ``None`` if examples are asked one by one.

    Arrays of numbers, tensors and ``TensorDataset`` are gathered directly, but not their subclasses, which may give other
    examples. A dataset offers its own gather by a method ``column_gather()`` of its class.
    """
    cls = type(dataset)
    if is_array(dataset):
        return partial(dataset.take, axis=0)
    if cls is torch.Tensor:
        where: Any = {"device": dataset.device, "non_blocking": dataset.is_cuda}  # whose driver has the bytes at once
        return (lambda rows: dataset.index_select(0, torch.from_numpy(rows).to(**where))) if dataset.ndim else None
    if cls is torch.utils.data.TensorDataset:
        return make_tuple_gather(dataset.tensors)
    # Looked up in the class: a wrapper that passes unknown attributes on to what it wraps must not be bypassed.
    make = getattr(cls, "column_gather", None)
    return make(dataset) if callable(make) else None


def make_tuple_gather(datasets: Iterable[Any]) -> Gather | None:
    """Return a function from indices to a tuple of the columns of each dataset; ``None`` if one of them has none."""
    datasets = list(datasets)
    if all(map(is_array, datasets)):  # hot path: "arrays in memory" of benchmarks/data.py: no Python call for each array
        takes = [dataset.take for dataset in datasets]
        return lambda indices: tuple(map(call, takes, repeat(indices), repeat(0)))
    gathers = [gather for dataset in datasets if (gather := make_gather(dataset)) is not None]
    return (lambda indices: tuple([gather(indices) for gather in gathers])) if len(gathers) == len(datasets) else None


class JointGather(NamedTuple):
    """Gathers rows of several datasets together. Their places are found first, for many batches at once."""

    find: Callable[[Indices, Indices], list[Indices]]
    """From which dataset each example is in, and its index there, to its places in some arrays."""
    take: Callable[[Sequence[Indices]], Any]
    """From the places of examples to their columns."""
    arrays: Any = None  # which are kept, as long as there are views of their memory


def _gather_in_turn(gathers: Sequence[Gather]) -> JointGather:
    """Return what gathers from one dataset after the other."""

    def take(places: Sequence[Indices]) -> Any:
        owners, indices = places
        rows, order = [np.flatnonzero(owners == owner) for owner in range(len(gathers))], np.empty_like(owners)
        order[np.concatenate(rows)] = np.arange(len(owners))
        parts = [gather(indices[own]) for gather, own in zip(gathers, rows, strict=True) if len(own)]
        return _join(parts or [gathers[0](indices)], order)

    return JointGather(lambda owners, indices: [owners, indices], take)


def _gather_at_once(columns: Sequence[Sequence[NDArray[Any]]], is_tuple: bool) -> JointGather:
    """Return what gathers from several arrays as from one, of a row at each address where a row of theirs may begin.

    It begins with the first of them in memory and ends with the last; what is between them is never read.
    """
    takes, steps = [], []
    for arrays in columns:
        kind = np.dtype((arrays[0].dtype, arrays[0].shape[1:]))
        addresses = np.array([array.__array_interface__["data"][0] for array in arrays])
        starts = addresses - addresses.min()
        unit = math.gcd(kind.itemsize, *starts.tolist())
        starts, step = starts // unit, kind.itemsize // unit
        length = int(max(starts + (np.array(list(map(len, arrays))) - 1) * step)) + 1
        takes.append(_make_take(arrays[int(starts.argmin())], length, unit, kind))
        steps.append((starts, step))

    def take(places: Sequence[Indices]) -> Any:
        # hot path: "the same, beside one array" of benchmarks/data.py
        return tuple(map(call, takes, places))

    def find(owners: Indices, indices: Indices) -> list[Indices]:
        places = [starts.take(owners) for starts, _ in steps]
        for column, (_, step) in zip(places, steps, strict=True):
            column += indices if step == 1 else indices * step
        return places

    return JointGather(find, take if is_tuple else lambda places: takes[0](places[0]), columns)


def _make_take(first: NDArray[Any], length: int, unit: int, kind: np.dtype[Any]) -> Callable[[Indices], NDArray[Any]]:
    """Return what takes rows of a kind, of which one may begin at each multiple of a number of bytes after an array."""
    if unit == kind.itemsize and first.flags.aligned:  # otherwise NumPy would copy all that is between them
        view = as_strided(first, (length, *first.shape[1:]), (unit, *first.strides[1:]), writeable=False)
        return view.__getitem__ if first.ndim == 1 else lambda places: view.take(places, 0)
    # They overlap, and NumPy copies a row at once only where it is one element, which is read as what it is afterwards.
    rows = as_strided(first.reshape(-1).view(f"V{kind.itemsize}"), (length,), (unit,), writeable=False)
    return lambda places: rows[places].view(kind)


def make_joint_gather(datasets: Sequence[Any], arrays: Sequence[Sequence[NDArray[Any]]]) -> JointGather | None:
    """Return the gather of datasets whose columns can be joined, which are arrays of the same shapes and dtypes.

    Other examples are collated one by one, which promotes dtypes and names the shapes that differ. ``arrays`` are those
    of which each dataset consists, if it consists of nothing else.
    """
    gathers = list(map(make_gather, datasets))
    kinds = [None if gather is None else _kind_of(gather(np.empty(0, np.int64))) for gather in gathers]
    if None in kinds or any(kind != kinds[0] for kind in kinds):
        return None
    if all(of_dataset and all(array.size and array.flags.c_contiguous for array in of_dataset) for of_dataset in arrays):
        with suppress(ValueError):  # where rows are large and arrays far apart, the view is larger than NumPy allows
            return _gather_at_once([*zip(*arrays, strict=True)], not is_array(datasets[0]))
    return _gather_in_turn(gathers)  # type: ignore[arg-type]


def _kind_of(columns: Any) -> Any:
    leaves, structure = tree_flatten(columns)
    if not leaves or not all(isinstance(leaf, (np.ndarray, torch.Tensor)) for leaf in leaves):
        return None
    return structure, [(type(leaf), leaf.dtype, leaf.shape[1:], getattr(leaf, "device", None)) for leaf in leaves]


def _join(parts: Sequence[Any], order: Indices) -> Any:
    """Return the rows of the columns of equal gathers, counted from the first of the first part, in an order."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts).take(order, axis=0)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)).index_select(0, torch.from_numpy(order).to(first.device))
    if type(first) is tuple:
        return tuple([_join(columns, order) for columns in zip(*parts, strict=True)])
    return tree_map(lambda *columns: _join(columns, order), *parts)


def is_array(dataset: Any) -> bool:
    """Return whether it is an array of numbers, of which rows are taken."""
    return type(dataset) in (np.ndarray, np.memmap) and dataset.ndim > 0 and dataset.dtype.kind in "biufc"
