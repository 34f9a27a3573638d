"""What a batch is: how many examples it has, which rows and items are those of one, and the share of some of them.

A batch is a `Batch`, or a structure that an iterator or a loader of the user's returns, of which this module knows:

====================================  ===============================================================================
an array, a tensor                    its first dimension is the example; so is that of all else that has a ``shape``
a mapping, a named tuple, a record    its values are columns; a record is a dataclass or a class of attrs
the outermost tuple or list           its items are columns, as ``default_collate`` makes them
a tuple or list within                its items are columns, as of nested examples; or one item of each example
a number, a string, ``None``          belongs to the whole batch
an object of another class            has ``batch_size`` or ``num_graphs`` examples, or its length, or the rows of its arrays
====================================  ===============================================================================

Where two readings of a sequence are possible, what is known decides: the rows of arrays beside it, how many examples a
``collate_fn`` was given, and how it was in an earlier batch. Where they do not, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, overload

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from chainring._checks import is_number
from chainring._random import Indices
from chainring.converters import field_names, with_fields

Layout = dict[tuple[Any, ...], bool | None]
"""By path, whether a sequence in the batches of a source holds columns, or else one item of each example."""


class _Collated(Layout):
    def get(self, path: Any, default: Any = None) -> Any:
        return True


COLUMNS: Layout = _Collated()
"""The layout of batches that torch or Chainring has collated."""

_EXAMPLES = (
    "let the loader return the examples, DataLoader(..., collate_fn=chainring.iterators.Batch), and collate them in the "
    "converter= of the updater or Evaluator, which is called with those of each share"
)


class Batch(Sequence[Any]):
    """A sequence of examples. They may be stored as columns, which a converter uses directly without stacking.

    Attributes:
        columns: the batch as whole arrays (an array, or a tuple, mapping or dataclass of arrays whose first dimension is the
            example, and of lists with one item of each example), or ``None`` if the examples are stored one by one.
        weight: the number of examples that count; 0 for a batch that only keeps a rank synchronized with the others.

    Example::

        batch = Batch(columns=(np.zeros((3, 2)), np.arange(3)), length=3)
        x, t = batch[2]  # the last example
    """

    __slots__ = ("_examples", "_layout", "_length", "columns", "weight")

    def __init__(
        self,
        examples: Sequence[Any] | None = None,
        *,
        columns: Any = None,
        length: int | None = None,
        layout: Layout | None = None,
    ) -> None:
        self._examples, self.columns, self._layout = examples, columns, layout
        self._length: int = len(examples) if length is None else length  # type: ignore[arg-type]
        self.weight: Any = self._length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._examples is None else iter(self._examples)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice | Indices) -> Batch: ...
    def __getitem__(self, index: int | slice | Indices) -> Any:
        if isinstance(index, (slice, np.ndarray)):
            if self._examples is not None:
                batch = Batch(self._examples[index] if isinstance(index, slice) else _rows_at(self._examples, index))
            else:
                length = len(range(self._length)[index]) if isinstance(index, slice) else len(index)
                columns = select_rows(self.columns, index, self._length, self._layout)
                batch = Batch(columns=columns, length=length, layout=self._layout)
            batch.weight = min(self.weight, batch.weight)  # no example of a batch of weight 0 counts
            return batch
        if not -self._length <= index < self._length:
            raise IndexError(f"a batch of {self._length} examples has no example {index}")
        if self._examples is not None:
            return self._examples[index]
        return select_rows(self.columns, index, self._length, self._layout)

    def __repr__(self) -> str:
        return f"Batch of {self._length} examples"


class Uncounted:
    """Stands for the number of examples of a batch of which it is not known."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __repr__(self) -> str:
        return self._what

    def error(self) -> ValueError:
        return ValueError(
            "the examples of a batch are the rows of its arrays, its first dimension, or the items of its lists, "
            f'and this is {self!r}. Give its number: let the model return a "weight" beside "loss", or the '
            "iterator or loader a chainring.iterators.Batch(columns=..., length=...). With several ranks, virtual ranks or "
            f"replicas {_EXAMPLES}"
        )


class UncountedBatch(Batch):
    """A batch of columns whose number of examples is not known, and needed for a part of it only."""

    __slots__ = ()

    def __init__(self, columns: Any, examples: Uncounted) -> None:
        super().__init__(columns=columns, length=1)
        self.weight: Any = examples

    def __len__(self) -> int:
        raise self.weight.error()

    def __getitem__(self, index: Any) -> Any:
        raise self.weight.error()

    def __repr__(self) -> str:
        return repr(self.weight)


# --- the number of examples ---


def make_batch(item: Any, examples: int | None = None, layout: Layout | None = None, batch_size: Any = None) -> Batch:
    """Return an item of a loader as a batch.

    Args:
        item: a `Batch`, or a structure.
        examples: how many its ``collate_fn`` was given, if that is known.
        layout: that of the loader's batches, to which is added what can be told from this one.
        batch_size: that of the loader, which its last batch need not have.
    """
    if isinstance(item, Batch):
        return item
    columns = tuple(item) if type(item) is list else item  # which default_collate makes
    layout = {} if layout is None else layout
    if (rows := count_rows(columns, examples, layout, batch_size)) is None:
        rows, layout = len(columns) if isinstance(columns, tuple) else 1, {(): False}  # of numbers or strings, say
    if isinstance(rows, Uncounted):
        return UncountedBatch(columns, rows)
    return Batch(columns=columns, length=rows, layout=layout)


def count_examples(batch: Any) -> Any:
    """Return the number of examples of a batch that count: a `Batch` has it, any other structure is counted.

    A list, or any other sequence, holds examples. The result is `Uncounted` where the number is not known.
    """
    if type(batch) is Batch:  # hot path: "in stages" of benchmarks/overhead.py
        return batch.weight
    if not (isinstance(batch, tuple) or _fields_of(batch) is not None):
        if (weight := getattr(batch, "weight", None)) is not None:
            return weight
        if isinstance(batch, Sequence) or (hasattr(batch, "__len__") and not _rows_within(batch)):
            return len(batch)
    rows = count_rows(batch)
    return (len(batch) if isinstance(batch, tuple) else 1) if rows is None else rows


def require_count(examples: Any) -> Any:
    """Return the number of examples that `count_examples` has found, or raise where it is not known."""
    if isinstance(examples, Uncounted):
        raise examples.error()
    return examples


def count_rows(
    columns: Any, examples: int | None = None, layout: Layout | None = None, batch_size: Any = None
) -> int | Uncounted | None:
    """Return the number of examples of a structure; ``None`` if nothing in it has one. `make_batch` has the arguments."""
    if layout is COLUMNS:
        batch_size, values = None, columns.values() if type(columns) is dict else columns
        if type(columns) in (tuple, dict) and set(map(type, values)) == {torch.Tensor}:  # as they nearly always are
            sizes = {value.shape[:1] for value in values}
            if len(sizes) == 1 and (size := sizes.pop()):
                return int(size[0])
    reading = _Reading({} if layout is None else layout)
    is_alike = type(columns) in (tuple, list) and _are_alike(columns)
    if is_alike and len(columns) == examples:  # as collate_fn=list makes it of examples that are single arrays or mappings
        if not reading.add_sequence(columns, ()):
            reading.layout[()] = False
    else:
        reading.add(columns, ())
    numbers = reading.numbers()
    if numbers is None:
        is_known = isinstance(columns, (tuple, list)) or _fields_of(columns) is not None or _is_single(columns)
        return None if is_known else Uncounted(f"a {type(columns).__name__}, which has no array and no length")
    if len(numbers) > 1:
        known = [{examples}, {batch_size}, set(reading.lengths)]
        numbers = next((numbers & hint for hint in known if len(numbers & hint) == 1), numbers)
    is_doubted = is_alike and examples is None and len(columns) == batch_size not in numbers
    is_doubted = is_doubted and reading.layout.get(()) is None
    if len(numbers) != 1 or is_doubted:
        return Uncounted(f"a batch with {reading.describe()}{f' from a loader with {batch_size=}' if is_doubted else ''}")
    (count,) = numbers
    reading.learn(count)
    if is_alike and (count == batch_size if examples is None else len(columns) != examples):
        reading.layout[()] = True
    return count


class _Reading:
    """The numbers of examples that the arrays and sequences of a structure allow."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rows: dict[int, None] = {}  # of arrays that are in no sequence
        self.lengths: dict[int, None] = {}  # of sequences without arrays
        self.objects: dict[int, None] = {}  # what objects of other classes say
        self._sequences: dict[tuple[Any, ...], tuple[Any, _Reading]] = {}  # with arrays, and what they allow as columns

    def add(self, value: Any, path: tuple[Any, ...]) -> None:
        if (rows := _rows_of(value)) is not None:
            self.rows[rows] = None
        elif isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            if path:
                self.add_sequence(value, path)
            else:
                self._add_all(dict(enumerate(value)), path)
        elif (fields := _fields_of(value)) is not None:
            self._add_all(fields, path)
        elif not _is_single(value):
            size, lengths = _size_of(value), [len(value)] if hasattr(value, "__len__") else []
            self.objects |= dict.fromkeys(_rows_within(value) + lengths if size is None else [size])

    def _add_all(self, values: Mapping[Any, Any], path: tuple[Any, ...]) -> None:
        for key, value in values.items():
            self.add(value, (*path, key))

    def add_sequence(self, value: Any, path: tuple[Any, ...]) -> bool:
        """Return whether there are arrays in it."""
        within = _Reading(self.layout)
        within._add_all(dict(enumerate(value)), path)
        if within.rows or within._sequences or within.objects:
            self._sequences[path] = value, within
            return True
        self.lengths.update(within.lengths or {len(value): None})  # of strings, say; or of columns of strings
        return False

    def numbers(self) -> set[int] | None:
        """Return the numbers of examples that all allow; ``None`` if any number is allowed."""
        if self.rows:
            allowed = set(self.rows) if len(self.rows) == 1 else set()
            for path, (value, _) in self._sequences.items():  # a list may hold anything, such as features of several sizes
                allowed &= self._allowed(path) if isinstance(value, tuple) else allowed
            return allowed
        if self._sequences:
            return reduce(set.intersection, map(self._allowed, self._sequences))
        numbers = self.objects or self.lengths
        return set(numbers) if len(numbers) == 1 else set() if numbers else None

    def _allowed(self, path: tuple[Any, ...]) -> set[int]:
        (value, within), holds_columns = self._sequences[path], self.layout.get(path)
        of_columns = set() if holds_columns is False else within.numbers() or set()
        return of_columns if holds_columns else of_columns | {len(value)}

    def learn(self, count: int) -> None:
        """Note of which sequences it is certain what they hold, where there are so many examples."""
        for path, (value, within) in self._sequences.items():
            if (holds_columns := count in (within.numbers() or ())) != (len(value) == count):
                self.layout[path] = holds_columns
            else:
                self.layout.setdefault(path, None)
            if holds_columns:
                within.learn(count)

    def describe(self) -> str:
        rows = self.rows or self.objects
        found = [f"arrays of {' and '.join(map(str, rows))} rows"] if rows else []
        found += [f"a sequence of {len(value)} with {within.describe()}" for value, within in self._sequences.values()]
        return ", ".join(dict.fromkeys([*found, *(f"a sequence of {length}" for length in self.lengths)])) or "no array"


def _rows_of(value: Any) -> int | None:
    """Return the first dimension of an array, or of anything else with a shape; ``None`` if it has none."""
    if isinstance(value, torch.Tensor):
        return value.size(0) if value.ndim else None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    shape = () if isinstance(value, type) else getattr(value, "shape", ())
    return int(shape[0]) if isinstance(shape, tuple) and shape else None


def _size_of(value: Any) -> int | None:
    """Return how many examples an object says that it has."""
    size = getattr(value, "batch_size", getattr(value, "num_graphs", None))
    return size if type(size) is int else None


def _fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the values of a mapping, a named tuple, a dataclass or a class of attrs by name; ``None`` of anything else."""
    if isinstance(value, tuple):
        return value._asdict() if hasattr(value, "_asdict") else None
    if isinstance(value, (list, str, type)):
        return None
    if callable(getattr(value, "items", None)):  # of a class with this method alone, too; a graph says its number itself
        return dict(value.items()) if isinstance(value, Mapping) or _size_of(value) is None else None
    names = field_names(value)
    return {name: getattr(value, name) for name in names} if names else None


def _is_single(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, which belongs to a whole batch."""
    return value is None or isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0 or is_number(value)


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether values could be those of several examples at one place."""

    def kind(value: Any) -> Any:
        fields = _fields_of(value)
        return type(value), getattr(value, "dtype", None), getattr(value, "ndim", None), fields and tuple(fields)

    return len({kind(value) for value in values}) == 1


# --- a share of the examples ---


def take_examples(batch: Any, index: slice) -> Any:
    """Return a part of the examples of a batch, in the structure that the batch has."""
    if isinstance(batch, Batch) or not (isinstance(batch, tuple) or _fields_of(batch) is not None):
        return batch[index]
    layout: Layout = {}
    if (rows := require_count(count_rows(batch, layout=layout))) is None:
        layout[()] = False
    return select_rows(batch, index, rows, layout)


def select_rows(
    columns: Any, index: int | slice | Indices, length: int | None = None, layout: Layout | None = None, path: Any = ()
) -> Any:
    """Return what ``index`` selects of a structure of ``length`` examples.

    A value without rows, such as a number that a whole batch shares, comes with every selection. Of a structure whose
    layout is ``None``, a list of ``length`` holds one item of each example.

    Raises:
        ValueError: something in it has another number of rows, or cannot be cut, or there are two ways to cut it.
    """
    if (rows := _rows_of(columns)) is not None:
        if length is not None and rows != length:
            raise _uncuttable(f"has {rows} rows", length, path)
        return _index(columns, index, length, path)
    if (fields := _fields_of(columns)) is not None:
        selected = {key: select_rows(value, index, length, layout, (*path, key)) for key, value in fields.items()}
        if isinstance(columns, tuple):
            return type(columns)(*selected.values())
        if callable(getattr(columns, "items", None)):
            return selected
        return with_fields(columns, selected)
    if isinstance(columns, (tuple, list)):
        if _holds_columns(columns, length, layout, path):
            items = [select_rows(value, index, length, layout, (*path, key)) for key, value in enumerate(columns)]
        elif isinstance(index, int):
            return columns[index]
        else:
            items = list(columns[index]) if isinstance(index, slice) else [columns[row] for row in index.tolist()]
        return tuple(items) if isinstance(columns, tuple) else items
    if _is_single(columns) or not (hasattr(columns, "__len__") or hasattr(columns, "to") or _rows_within(columns)):
        return columns
    return _index(columns, index, length, path)


def _holds_columns(values: Any, length: int | None, layout: Layout | None, path: Any) -> bool:
    """Return whether a sequence holds columns, or else one item of each example."""
    reading, known = _Reading(layout or {}), None if layout is None else layout.get(path, None if path else True)
    if not path:
        if known is None and layout is not None:
            raise _uncuttable(f"has {length} items of {length} rows, either of which could be the examples", length, path)
        return known is not False
    reading._add_all(dict(enumerate(values)), path)
    numbers = reading.numbers()
    if numbers is None and isinstance(values, tuple):  # of numbers that a whole batch shares, if not one of each example
        return known is True or len(values) != length
    could_be_columns, could_be_items = length is None or length in (numbers or ()), len(values) == length
    if could_be_columns and could_be_items and known is None and not (layout is None and isinstance(values, list)):
        raise _uncuttable(f"has {length} items of {length} rows, either of which could be the examples", length, path)
    if not could_be_columns and not could_be_items:
        raise _uncuttable(f"has {len(values)} items", length, path)
    return could_be_columns and (known is True or not could_be_items)


def _rows_within(value: Any) -> list[int]:
    """Return the rows of the arrays that are attributes of an object."""
    return [rows for item in getattr(value, "__dict__", {}).values() if (rows := _rows_of(item)) is not None]


def _index(column: Any, index: int | slice | Indices, length: int | None, path: Any) -> Any:
    """Return rows of an array, or of an object of which every n-th row is an object of its class."""
    column = getattr(column, "iloc", column)  # rows of pandas by position
    if isinstance(index, np.ndarray):
        return _rows_at(column, index)
    can_index = hasattr(column, "__getitem__") and not isinstance(column, PackedSequence)
    rows: Any = column[index] if can_index else None
    is_known = rows is not None and (isinstance(index, int) or hasattr(rows, "shape") or type(rows) is type(column))
    if not is_known or (isinstance(index, slice) and length is not None and len(rows) != len(range(length)[index])):
        raise _uncuttable(f"is a {type(column).__name__}, which cannot be cut into rows", length, path)
    if not isinstance(index, slice) or index.step in (None, 1):
        return rows
    # Every n-th row of an array in memory without gaps, as the whole array had it: ``view`` works on it.
    if isinstance(rows, torch.Tensor):
        return rows if rows.is_contiguous() else rows.clone()
    return np.ascontiguousarray(rows) if type(rows) is np.ndarray and rows.ndim else rows


def _rows_at(column: Any, indices: Indices) -> Any:
    """Return some rows of a column, which is an array, or a sequence of strings, say, that then becomes a list."""
    if hasattr(column, "ndim"):
        return column[indices]
    if isinstance(column, Sequence):
        return [column[index] for index in indices.tolist()]
    raise ValueError(
        f"of a {type(column).__name__} only every n-th row can be taken; return a tuple or mapping of arrays, or a Batch of "
        "examples"
    )


def _uncuttable(what: str, length: int | None, path: Any) -> ValueError:
    where = f"{''.join(f'[{key!r}]' for key in path)} of the batch" if path else "the batch"
    return ValueError(
        f"several ranks, virtual ranks or replicas share the {length} examples of a batch by its rows, and {where} {what}; "
        f"return a tuple, mapping or dataclass of arrays with {length} rows, or {_EXAMPLES}"
    )
