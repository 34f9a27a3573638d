"""PackingIterator: documents of any length, packed into rows of one."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from chainring._checks import is_integer, plain
from chainring._random import stable_hash
from chainring.datasets._batches import COLUMNS, Batch
from chainring.datasets.base import Dataset
from chainring.iterators.base import Iterator, counters_of
from chainring.iterators.mixture import MixtureIterator
from chainring.iterators.serial import IndexedIterator, SerialIterator, require_indices, require_integer
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_setting

_LOOK_AHEAD = 1_024  # documents of which those are taken that fit into a row
_CHUNK = 256  # documents that are fetched at once
_NONE = -1  # the document of a place that is not used
_LARGEST_TOKEN = 2**63 - 1
_PACKED, _OF_ANOTHER_PASS = 1, 2  # by how much more than a row a whole document is taken for that is not to be packed


class _Document(NamedTuple):
    """A document on its way into rows."""

    tokens: NDArray[np.integer]
    length: int  # with its separator
    number: int  # by which it is known in ``document_ids``
    position: int  # in the stream of documents, counted from the first
    epoch: int  # of its pass


class _Position(NamedTuple):
    """Where the next row begins."""

    documents: tuple[_Document, ...] = ()  # fetched and not packed, or not whole; of whole ones some are packed
    lengths: NDArray[np.int64] | None = None  # of whole ones, see `_Packing`
    offset: int = 0  # of the first of them, how many tokens are packed
    packed: int = 0  # documents that are packed to their end
    # From that of the first waiting document on: where fetches together began, and the iterator as it was before each.
    fetches: tuple[tuple[int, IndexedIterator], ...] = ()
    fetched: int = 0  # documents

    def waiting(self, row: int) -> list[int]:
        """Return the positions in the stream of the documents that are not packed, into rows of this length."""
        if self.lengths is None:
            return [document.position for document in self.documents]
        return [self.documents[at].position for at in np.flatnonzero(self.lengths != row + _PACKED).tolist()]


class _Saved(NamedTuple):
    """A position without its documents."""

    first: int  # position in the stream at which the source stands
    waiting: list[int]
    offset: int
    packed: int
    fetched: int


class PackingIterator(Iterator):
    """Packs documents into rows of one length, as language models are trained on them.

    A batch is a mapping of three arrays of int64, ``batch_size`` x ``length``: ``input_ids``; ``document_ids``, the index of
    the document of each token, by which attention is kept inside of documents; and ``positions`` in it. What is not used of
    a row has the document -1, the token 0 and the position 0: at the end of a pass, and with ``split=False`` of every row.

    Documents come in the order of a `SerialIterator`, each once a pass. With ``split=True`` they follow one another, and one
    that does not end in a row goes on in the next, so that no token is lost, and none comes twice. With ``split=False`` they
    stay whole: each row takes, of the next 1,024 documents of the pass, the first that fits, again and again.

    The state is where it stands in the documents, and no tokens; a run that is resumed fetches again what it has looked
    ahead. Each rank fetches all documents and takes its rows.

    Example::

        for batch in PackingIterator(documents, length=1024, batch_size=8, separator=tokenizer.eos_token_id):
            batch.columns["input_ids"]

    Args:
        dataset: documents, one-dimensional arrays, tensors or lists of integers; or a `MixtureIterator`, `SerialIterator` or
            `MultiprocessIterator` of documents, whose batches, order and passes then count.
        length: tokens in a row.
        batch_size: rows in a batch, over all ranks.
        separator: a token that is put after each document, and belongs to it; ``None`` puts none.
        split: False to keep documents whole.
        repeat, shuffle, seed: as for `SerialIterator`; those of an iterator are its own.

    Raises:
        TypeError: ``dataset`` is no dataset and none of these iterators, or an example is no document.
        ValueError: a number is out of range; with ``split=False``, a document is longer than a row; a whole pass is empty.
    """

    serves_virtual_ranks = True

    def __init__(
        self,
        dataset: Dataset | Iterator,
        length: int,
        batch_size: int,
        *,
        separator: int | None = None,
        split: bool = True,
        repeat: bool = True,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        if isinstance(dataset, Iterator) and not isinstance(dataset, IndexedIterator):
            raise TypeError(
                "documents come from a dataset, or from a MixtureIterator, SerialIterator or MultiprocessIterator of them; "
                f"got {type(dataset).__name__}"
            )
        if not isinstance(dataset, Iterator):
            require_indices(dataset, "make a list of documents that can only be iterated")
        if separator is not None and not is_integer(separator):
            raise TypeError(f"a separator is a token, an integer, or None; got {separator!r}")
        if abs(separator or 0) > _LARGEST_TOKEN:
            raise ValueError(f"a separator is a token, an index below 2**63; got {separator}")
        self.length, self.batch_size = require_integer("length", length, 1), require_integer("a batch size", batch_size, 1)
        self.separator, self.split = plain(separator), bool(split)
        self.source: IndexedIterator = (
            dataset if isinstance(dataset, IndexedIterator) else SerialIterator(dataset, _CHUNK, repeat, shuffle, seed=seed)
        )
        self.repeat = self.source.repeat
        self.at = _Position()
        self._saved: _Saved | None = None  # a state that was loaded, until the documents that wait are fetched
        self.counts = np.arange(self.batch_size * self.length)

    @property
    def seed(self) -> int:
        """The seed of the order of documents."""
        self.source.name, self.source.initial_seed = self.name, self.initial_seed
        return self.source.seed

    @property
    def progress(self) -> tuple[int, int, int]:
        return (*divmod(self.at.packed, self.pass_size), self.pass_size)

    @property
    def pass_size(self) -> int:
        """The number of documents in a pass."""
        return max(self.source.progress[2] or 0, 1)

    def __next__(self) -> Batch:
        _ = self.seed
        self._take_up_saved()
        mark = self.source.mark()
        try:
            packing = _Packing(self)
            rows = packing.fill()
        except BaseException:
            self.source.return_to(mark)
            raise
        if not rows:
            raise StopIteration
        self.at = packing.position()
        epoch, done, size = self.progress
        self._count_batch(epoch, epoch + done / size)
        columns = dict(zip(("input_ids", "document_ids", "positions"), packing.write(rows), strict=True))
        return self.take_share(Batch(columns=columns, length=rows, layout=COLUMNS))

    def reset(self) -> None:
        self.source.reset()
        self._begin_again()

    def rewind(self) -> None:
        self.source.rewind()
        self._begin_again()

    def _begin_again(self) -> None:
        self.at, self._saved = _Position(), None
        self._restore_counters()

    def mark(self) -> Any:
        """Return this position, for `return_to` after a failed update."""
        self._take_up_saved()
        return counters_of(self), self.at, self.source.mark()

    def return_to(self, mark: Any) -> None:
        """Go back to a position that `mark` returned: the rows since then will be returned again."""
        counters, self.at, of_source = mark
        self.source.return_to(of_source)
        self._restore_counters(counters)

    def batch_end(self) -> Any:
        self._take_up_saved()
        return self.at.packed, self.at.offset, *self.at.waiting(self.length)[:1]

    def batch_digest(self, start: Any, stop: Any) -> int | None:
        return stable_hash(self.seed, self.length, self.split, *start, "to", *stop)

    def finalize(self) -> None:
        self.source.finalize()

    def serialize(self, serializer: AbstractSerializer) -> None:
        if isinstance(serializer, Serializer):
            self._take_up_saved()
        at, name = self.at, f"of iterator {self.name!r}"
        visit_setting(serializer, "batch_size", self.batch_size, f"batch size {name}")
        visit_setting(serializer, "length", self.length, f"length of the rows {name}")
        visit_setting(serializer, "separator", self.separator, f"separator {name}")
        if serializer("split", self.split) != self.split:
            raise ValueError(
                f"the saved run had split={not self.split} {name}; a position in one means nothing in the other"
            )
        first, source = at.fetches[0] if at.fetches else (at.fetched, self.source)
        serializer.visit("source", source if isinstance(serializer, Serializer) else self.source)
        saved = _Saved(
            serializer("first", first),
            serializer("waiting", at.waiting(self.length)),
            serializer("offset", at.offset),
            serializer("packed", at.packed),
            serializer("fetched", at.fetched),
        )
        self._serialize_counters(serializer)
        if not isinstance(serializer, Serializer):
            self._saved = saved

    def _take_up_saved(self) -> None:
        """Fetch again the documents that wait in a state that was loaded."""
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        self.at = _Position(fetched=saved.first)
        packing, waits = _Packing(self), set(saved.waiting)
        while packing.fetched < saved.fetched and packing.fetch():
            pass
        documents = tuple(document for document in packing.waiting if document.position in waits)
        self.at = _Position(documents, None, saved.offset, saved.packed, tuple(packing.fetches), packing.fetched)


class _Packing:
    """Fills rows from where an iterator stands."""

    def __init__(self, iterator: PackingIterator) -> None:
        self._iterator, at = iterator, iterator.at
        self.waiting, self._offset, self._packed = list(at.documents), at.offset, at.packed
        self.fetches, self.fetched = list(at.fetches), at.fetched
        self._tokens: list[NDArray[np.integer]] = []  # of all rows, one after the other
        self._pieces: list[int] = []  # three for each: of which document, how many tokens, and how many are before them
        self._separator = np.array([iterator.separator or 0])
        self._head = 0  # with split documents, how many of those that wait are packed
        # With whole ones, their lengths, and more than fits where one is packed already, or of another pass.
        self._epoch = self.waiting[0].epoch if self.waiting else None
        if at.lengths is None:
            self._lengths = self._lengths_of([] if iterator.split else self.waiting)
        else:
            self._lengths = at.lengths.copy()
        self._gaps = int((self._lengths == iterator.length + _PACKED).sum())  # where documents were, that are packed
        self._empty = 0  # documents without tokens that were fetched last

    def fill(self) -> int:
        """Find the pieces of documents that are the rows of a batch; return how many rows there are."""
        if self._iterator.split:
            return self._fill_in_turn()
        rows = 0
        while rows < self._iterator.batch_size and (used := self._fill_by_length()):
            rows += 1
            self._fill_up(used)
        return rows

    def write(self, rows: int) -> Iterable[NDArray[np.int64]]:
        """Return the ids, documents and positions of the rows that were filled."""
        documents, counts, firsts = np.array(self._pieces, np.int64).reshape(-1, 3).T
        ids = np.concatenate(self._tokens, dtype=np.int64, casting="unsafe")
        numbers = documents.repeat(counts)
        positions = self._iterator.counts[: len(ids)] - (counts.cumsum() - counts - firsts).repeat(counts)
        if _NONE in documents:
            positions[numbers == _NONE] = 0
        return (array.reshape(rows, -1) for array in (ids, numbers, positions))

    def _fill_in_turn(self) -> int:
        used, length, epoch = 0, self._iterator.length, None
        places = self._iterator.batch_size * length
        while used < places and (self._head < len(self.waiting) or self.fetch()):
            document = self.waiting[self._head]
            if document.epoch != epoch and (left := -used % length):
                used += left
                self._fill_up(length - left)
                continue
            epoch, first = document.epoch, self._offset
            count = min(document.length - first, places - used)
            self._add(document, first, count)
            used += count
            self._offset += count
            if self._offset == document.length:
                self._offset = 0
                self._head += 1
                self._packed += 1
        self._fill_up(used % length or length)
        return -(-used // length)

    def _fill_up(self, used: int) -> None:
        """Leave the rest of a row unused."""
        if left := self._iterator.length - used:
            self._tokens.append(np.zeros(left, np.int64))
            self._pieces += (_NONE, left, 0)

    def _fill_by_length(self) -> int:
        used, length, packed = 0, self._iterator.length, self._packed
        self._look_ahead()
        while True:
            fits = self._lengths <= length - used
            at = int(fits.argmax()) if len(fits) else 0
            if not len(fits) or not fits[at]:
                if used or self._packed == packed:
                    return used
                packed = self._packed  # of empty documents, behind which there may be others
                self._look_ahead()
                continue
            document = self.waiting[at]
            self._add(document, 0, document.length)
            used += document.length
            self._lengths[at] = length + _PACKED
            self._packed += 1
            self._gaps += 1

    def _add(self, document: _Document, first: int, count: int) -> None:
        """Put some tokens of a document behind those that there are."""
        tokens = document.tokens if count == document.length else document.tokens[first : first + count]
        self._tokens.append(tokens)
        if len(tokens) < count:
            self._tokens.append(self._separator)
        self._pieces += (document.number, count, first)

    def _look_ahead(self) -> None:
        """Fetch documents of the pass until enough wait; if none is left of it, go on to the next."""
        if self._gaps == len(self.waiting) or not (self._lengths <= self._iterator.length).any():
            self._close_gaps()
            if self.waiting or self.fetch():
                self._epoch = self.waiting[0].epoch
                self._lengths = self._lengths_of(self.waiting)
        elif self._gaps > _LOOK_AHEAD // 4:
            self._close_gaps()
        while self.waiting and self.waiting[-1].epoch == self._epoch and len(self.waiting) - self._gaps < _LOOK_AHEAD:
            known = len(self.waiting)
            if not self.fetch():
                break
            self._lengths = np.concatenate([self._lengths, self._lengths_of(self.waiting[known:])])

    def _lengths_of(self, documents: Sequence[_Document]) -> NDArray[np.int64]:
        other = self._iterator.length + _OF_ANOTHER_PASS
        lengths = [document.length if document.epoch == self._epoch else other for document in documents]
        return np.array(lengths, np.int64)

    def _close_gaps(self) -> None:
        left = np.flatnonzero(self._lengths != self._iterator.length + _PACKED)
        self.waiting, self._lengths, self._gaps = [self.waiting[at] for at in left.tolist()], self._lengths[left], 0

    def fetch(self) -> bool:
        """Fetch documents; return False if there are no more."""
        iterator, source = self._iterator, self._iterator.source
        before, began, (epoch, position, _) = copy.copy(source), source.batch_end(), source.progress
        size = iterator.pass_size
        try:
            examples = list(next(source))
        except StopIteration:
            return False
        numbers: Any = source.indices_since(began)
        first = epoch * size + position  # in passes, which a mixture has only of each source
        self.fetches.append((self.fetched, before))
        of_separator, longest = iterator.separator is not None, math.inf if iterator.split else iterator.length
        of_pass, is_mixture = 0, isinstance(source, MixtureIterator)
        for index, (example, number) in enumerate(zip(examples, numbers.tolist(), strict=True)):
            tokens = _tokens_of(example, number)
            length = len(tokens) + of_separator
            if length > longest:
                its = "" if iterator.separator is None else " with its separator"
                raise ValueError(
                    f"a document is not longer than a row with split=False, and document {number} has {length} tokens{its}, "
                    f"a row {iterator.length}; give split=True or a larger length, or cut it before"
                )
            self._empty = 0 if length else self._empty + 1
            if not is_mixture:
                of_pass = (first + index) // size
            self.waiting.append(_Document(tokens, length, number, self.fetched + index, of_pass))
        self.fetched += len(examples)
        self._refuse_empty_passes()
        return True

    def _refuse_empty_passes(self) -> None:
        """Refuse a pass of empty documents alone, where one with tokens would be looked for without end."""
        source = self._iterator.source
        if not self._empty or not source.repeat:
            return
        weights = source.weights.values() if isinstance(source, MixtureIterator) else ()
        least = min(filter(None, weights), default=1.0)  # the source of this weight is the last to end its pass
        if self._empty * least > 2 * self._iterator.pass_size + 1:  # of any two passes that begin anywhere, one is whole
            raise ValueError(
                f"a row takes tokens, and the last {self._empty} documents, which is all of a pass, have none; see why they "
                "are empty, or give a separator"
            )

    def position(self) -> _Position:
        """Return where the next row begins."""
        waiting, at, lengths = tuple(self.waiting[self._head :]), 0, None
        if not self._iterator.split:
            lengths, at = self._lengths, int((self._lengths != self._iterator.length + _PACKED).argmax()) if waiting else 0
        has_any = self._gaps < len(waiting)
        first = waiting[at].position if has_any else self.fetched
        starts = [start for start, _ in self.fetches if start <= first]
        fetches = [fetch for fetch in self.fetches if has_any and fetch[0] >= starts[-1]]
        return _Position(waiting, lengths, self._offset, self._packed, tuple(fetches), self.fetched)


def _tokens_of(example: Any, number: int) -> NDArray[np.integer]:
    """Return the tokens of a document as an array."""
    if type(example) is np.ndarray and example.ndim == 1 and example.dtype.char in "bhilqBHI":
        return example  # of integers that int64 holds
    tokens = example.numpy(force=True) if isinstance(example, torch.Tensor) else example
    if isinstance(tokens, (list, tuple)):
        with suppress(ValueError):  # lists of different lengths, which are refused below
            tokens = np.array(tokens) if len(tokens) else np.empty(0, np.int64)
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        shown = f"an array of {tokens.dtype} and shape {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens)
        raise TypeError(
            f"a document is one dimension of integers, and example {number} is {shown}; take them out of it by "
            'TransformDataset(dataset, lambda example: example["input_ids"]), for example'
        )
    if tokens.dtype == np.uint64 and len(large := tokens[tokens > _LARGEST_TOKEN]):
        raise ValueError(
            f"a token is an index below 2**63, and document {number} has {large[0]}; a negative number that was read as "
            "uint64 is one: take tokens.astype(np.int64)"
        )
    return tokens
