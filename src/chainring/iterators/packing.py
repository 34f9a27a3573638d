"""PackingIterator: documents of any length, packed into rows of one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from chainring._checks import is_integer, plain
from chainring._random import Indices, stable_hash
from chainring.datasets._batches import COLUMNS, Batch
from chainring.datasets.base import Dataset
from chainring.iterators.base import Iterator, counters_of
from chainring.iterators.mixture import MixtureIterator, fetch_numbers
from chainring.iterators.serial import IndexedIterator, SerialIterator, require_flag, require_indices, require_integer
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_setting

_LOOK_AHEAD = 1_024  # documents of which those are taken that fit into a row
_CHUNK = 256  # documents that are fetched at once
_NONE = -1  # the document of a place that is not used
_NO_TOKENS = np.empty(0, np.int64)
_LARGEST_TOKEN = 2**63 - 1


class _Documents(NamedTuple):
    """Documents on their way into rows, in the order in which they were fetched."""

    lengths: Indices  # with their separators
    numbers: Indices  # by which they are known in ``document_ids``
    positions: Indices  # in the stream of documents, counted from the first
    epochs: Indices  # of their passes
    tokens: NDArray[np.object_]  # an array of each, without its separator

    def at(self, rows: Any) -> _Documents:
        return _Documents(*[column[rows] for column in self])

    def before(self, others: _Documents) -> _Documents:
        columns: Any = map(np.concatenate, zip(self, others, strict=True))
        return _Documents(*columns)


_NO_DOCUMENTS = _Documents(_NO_TOKENS, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS, np.empty(0, object))


class _Fetch(NamedTuple):
    """Documents that were fetched together."""

    start: int  # the position of the first
    end: int  # the position after the last
    before: IndexedIterator  # as it was then


class _Pieces(NamedTuple):
    """Documents, or parts of them, in rows; and what is left of a row, which is a piece of no document."""

    numbers: Indices
    counts: Indices  # of places
    starts: Indices  # the places of their documents' first tokens, counted from the first place of the first row


class _Rows(NamedTuple):
    """Rows of whole documents that were found together."""

    places: Indices  # of the documents of the pieces, in those that waited
    pieces: _Pieces
    tokens: list[NDArray[np.integer]]  # of each piece
    ends: list[int]  # of rows, counted in pieces, and before them the beginning of the first
    unused: list[int]  # how many places of each row are left


_NO_ROWS = _Rows(_NO_TOKENS, _Pieces(_NO_TOKENS, _NO_TOKENS, _NO_TOKENS), [], [0], [])


class _Position(NamedTuple):
    """Where the next row begins."""

    documents: _Documents = _NO_DOCUMENTS  # fetched and not packed, or not whole, and those of all the rows
    offset: int = 0  # of the first of them, how many tokens are packed
    packed: int = 0  # documents that are packed to their end
    fetches: tuple[_Fetch, ...] = ()  # those of all documents that wait
    fetched: int = 0  # documents
    rows: _Rows = _NO_ROWS
    row: int = 0  # the next of them

    @property
    def waiting(self) -> Indices:
        """The positions in the stream of the documents that are not packed."""
        return self.documents.positions[self.order]

    @property
    def order(self) -> Indices:
        """The places of these documents, in the order of the stream."""
        return _all_but(self.rows.places[: self.rows.ends[self.row]], len(self.documents.positions))


class _Saved(NamedTuple):
    """A position without its documents."""

    first: int  # position in the stream at which the source stands
    waiting: list[int]
    offset: int
    packed: int
    fetched: int
    numbers: list[int]  # of the documents that wait


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
        self.separator, self.split = plain(separator), require_flag("split", split)
        self.source: IndexedIterator = (
            dataset if isinstance(dataset, IndexedIterator) else SerialIterator(dataset, _CHUNK, repeat, shuffle, seed=seed)
        )
        self.repeat = self.source.repeat
        self.at = _Position()
        self._saved: _Saved | None = None  # a state that was loaded, until the documents that wait are fetched
        try:
            self.counts = np.arange(self.batch_size * self.length)
        except (MemoryError, ValueError) as error:
            raise ValueError(
                f"a batch is kept in memory, and {self.batch_size} rows of {self.length} tokens do not fit; "
                "take a smaller length or batch size"
            ) from error

    @property
    def seed(self) -> int:
        """The seed of the order of documents."""
        self.source.name, self.source.initial_seed = self.name, self.initial_seed
        return self.source.seed

    @property
    def progress(self) -> tuple[int, int, int]:
        size = self.pass_size
        return (*divmod(self.at.packed, size), size)

    @property
    def pass_size(self) -> int:
        """The number of documents in a pass."""
        return max(self.source.progress[2] or 0, 1)

    def __next__(self) -> Batch:
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
        return self.take_share(Batch(columns=packing.write(rows), length=rows, layout=COLUMNS))

    def reset(self) -> None:
        self._take_up_saved()  # with the passes of documents that wait, after which comes the next unused order
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
        self._saved = None
        self.source.return_to(of_source)
        self._restore_counters(counters)

    def batch_end(self) -> Any:
        self._take_up_saved()
        return self.at.packed, self.at.offset, *self.at.waiting[:1].tolist()

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
        waiting = at.waiting.tolist()
        needed = _needed(at.fetches, waiting)
        first, source = at.fetched, self.source
        if needed and not isinstance(source, MixtureIterator):
            first, source = needed[0].start, needed[0].before
        is_saving = isinstance(serializer, Serializer)
        serializer.visit("source", source if is_saving else self.source)
        saved = _Saved(
            serializer("first", first),
            serializer("waiting", waiting),
            serializer("offset", at.offset),
            serializer("packed", at.packed),
            serializer("fetched", at.fetched),
            serializer("numbers", at.documents.numbers[at.order].tolist()),
        )
        self._serialize_counters(serializer)
        if not is_saving:
            self._saved = saved

    def _take_up_saved(self) -> None:
        """Fetch again the documents that wait in a state that was loaded."""
        if (saved := self._saved) is None:
            return
        _ = self.seed
        mark, self.at = self.source.mark(), _Position(fetched=saved.first)
        packing = _Packing(self)
        try:
            if saved.numbers and isinstance(self.source, MixtureIterator):  # which may have other weights now
                numbers, positions = (np.array(values, np.int64) for values in (saved.numbers, saved.waiting))
                packing.put_behind(fetch_numbers(self.source, numbers), numbers, positions, np.zeros_like(positions))
            while packing.fetched < saved.fetched and packing.fetch():
                pass
            positions = packing.documents.positions
            waits = np.isin(positions, saved.waiting) | (positions >= saved.fetched)  # the source may have other batches now
            documents = packing.documents.at(waits)
            if saved.numbers != documents.numbers[: len(saved.numbers)].tolist():
                raise ValueError(
                    f"the documents that wait in iterator {self.name!r} are others than in the saved run: some would come "
                    "twice, others never. Resume with the same seed, or start a new run"
                )
            if saved.offset and saved.offset > documents.lengths[0]:
                raise ValueError(
                    f"document {documents.numbers[0]} has {documents.lengths[0]} tokens, and the saved run had "
                    f"packed {saved.offset} of it; resume with the same documents"
                )
        except BaseException:
            self.source.return_to(mark)
            raise
        self.at = _Position(documents, saved.offset, saved.packed, packing.fetches, packing.fetched)
        self._saved = None


class _Packing:
    """Fills rows from where an iterator stands."""

    def __init__(self, iterator: PackingIterator) -> None:
        self._iterator, at = iterator, iterator.at
        self.documents, self._offset, self._packed = at.documents, at.offset, at.packed
        self.fetches, self.fetched, self._rows, self._row = at.fetches, at.fetched, at.rows, at.row
        self._separator = None if iterator.separator is None else np.array([iterator.separator])
        self._tokens: list[NDArray[np.integer]] = []  # of all rows, one after the other
        self._pieces: list[_Pieces] = []
        self._unused: list[slice] = []  # places of all rows
        self._n_empty = 0  # documents without tokens that were fetched last

    def fill(self) -> int:
        """Find the pieces of documents that are the rows of a batch; return how many rows there are."""
        return self._fill_in_turn() if self._iterator.split else self._fill_by_length()

    def write(self, rows: int) -> dict[str, NDArray[np.int64]]:
        """Return the ids, documents and positions of the rows that were filled."""
        pieces: Any = self._pieces[0] if len(self._pieces) == 1 else map(np.concatenate, zip(*self._pieces, strict=True))
        numbers, counts, starts = pieces
        ids, documents = np.concatenate(self._tokens, dtype=np.int64), numbers.repeat(counts)
        positions = starts.repeat(counts)
        np.subtract(self._iterator.counts[: len(ids)], positions, positions)
        for places in self._unused:
            positions[places] = 0
        return {
            "input_ids": ids.reshape(rows, -1),
            "document_ids": documents.reshape(rows, -1),
            "positions": positions.reshape(rows, -1),
        }

    def _fill_in_turn(self) -> int:
        used, length, epoch = 0, self._iterator.length, None
        places = self._iterator.batch_size * length
        while used < places and (len(self.documents.lengths) or self.fetch()):
            documents = self.documents
            if documents.epochs[0] != epoch and (left := -used % length):
                self._leave(used, left)
                used += left
                continue
            epoch, offset = documents.epochs[0], self._offset
            ends = documents.lengths.cumsum() + (used - offset)
            count = min(int(ends.searchsorted(places)) + 1, len(ends))
            if documents.epochs[count - 1] != epoch:
                count = int(np.count_nonzero(documents.epochs == epoch))
            lengths, tokens, end = documents.lengths[:count], documents.tokens[:count].tolist(), int(ends[count - 1])
            pieces = _Pieces(documents.numbers[:count], lengths.copy(), ends[:count] - lengths)
            ended, self._offset, used = count, 0, min(end, places)
            if end > places:  # the last goes on in the next batch
                ended, self._offset = count - 1, int(lengths[-1]) - (end - places)
                tokens[-1] = tokens[-1][: self._offset]
                pieces.counts[-1] = self._offset
            tokens[0] = tokens[0][offset:]
            pieces.counts[0] -= offset
            self._put(tokens, pieces, is_cut=end > places)
            self._packed += ended
            self.documents = documents.at(slice(ended, None))
        self._leave(used, -used % length)
        return -(-used // length)

    def _leave(self, used: int, places: int) -> None:
        """Leave the rest of a row unused."""
        if places:
            self._put([np.zeros(places, np.int64)], _Pieces(*np.array([[_NONE], [places], [used]])))
            self._unused.append(slice(used, used + places))

    def _put(self, tokens: list[NDArray[np.integer]], pieces: _Pieces, is_cut: bool = False) -> None:
        """Put pieces behind those that there are, with separators behind those that end a document."""
        if self._separator is not None:
            parts = [self._separator] * (2 * len(tokens))
            parts[::2] = tokens
            for place in np.flatnonzero(pieces.numbers == _NONE).tolist():
                parts[2 * place + 1] = _NO_TOKENS
            tokens = parts[:-1] if is_cut else parts
        self._tokens += tokens
        self._pieces.append(pieces)

    def _fill_by_length(self) -> int:
        filled, of_batch, length = 0, self._iterator.batch_size, self._iterator.length
        while filled < of_batch and self._look_ahead():
            rows, row = self._rows, self._row
            self._row = min(row + of_batch - filled, len(rows.unused))
            found = slice(rows.ends[row], rows.ends[self._row])
            numbers, counts, starts = [column[found] for column in rows.pieces]
            self._put(rows.tokens[found], _Pieces(numbers, counts, starts + (filled - row) * length))
            ends = enumerate(rows.unused[row : self._row], filled + 1)
            unused = [slice(end * length - left, end * length) for end, left in ends if left]
            self._unused += unused
            self._packed += len(numbers) - len(unused)
            filled += self._row - row
        return filled

    def _look_ahead(self) -> bool:
        """Find the next rows if none is left, in the documents of the pass or else of the next; return False at the end."""
        while self._row == len(self._rows.unused):
            waiting = _all_but(self._rows.places, len(self.documents.lengths))
            self.documents, self._rows, self._row = self.documents.at(waiting), _NO_ROWS, 0
            has_more = True
            while True:
                epochs = self.documents.epochs
                of_pass = int(np.count_nonzero(epochs == epochs[:1]))
                if of_pass < len(epochs) or len(epochs) >= _LOOK_AHEAD or not (has_more := self.fetch()):
                    break
            if not of_pass:
                return False
            least = _LOOK_AHEAD if of_pass == len(epochs) and has_more else 1
            places, ends, unused = _find_rows(self.documents.lengths[:of_pass], least, self._iterator.length)
            if unused:
                self._keep_rows(places, ends, unused)
            else:  # these documents are all empty
                self._packed += of_pass
                self.documents = self.documents.at(slice(of_pass, None))
        return True

    def _keep_rows(self, places: Indices, ends: list[int], unused: list[int]) -> None:
        """Keep rows of the documents at these places, and of none where places of a row are left."""
        documents = self.documents
        numbers, counts, tokens = documents.numbers[places], documents.lengths[places], documents.tokens[places]
        gaps, left = np.flatnonzero(places == _NONE), [count for count in unused if count]
        zeros = np.zeros(max(unused), np.int64)
        numbers[gaps], counts[gaps] = _NONE, left
        tokens[gaps] = np.fromiter((zeros[:count] for count in left), object, len(left))
        pieces = _Pieces(numbers, counts, counts.cumsum() - counts)
        self._rows = _Rows(places, pieces, tokens.tolist(), [0, *ends], unused)

    def fetch(self) -> bool:
        """Fetch documents; return False if there are no more."""
        iterator, source = self._iterator, self._iterator.source
        _ = iterator.seed
        before, began, (epoch, position, _) = copy.copy(source), source.batch_end(), source.progress
        try:
            examples = list(next(source))
        except StopIteration:
            return False
        numbers: Any = source.indices_since(began)
        counted = np.arange(len(examples))
        of_pass = epoch * iterator.pass_size + position + counted  # in passes, which a mixture has only of each source
        epochs = np.zeros_like(counted) if isinstance(source, MixtureIterator) else of_pass // iterator.pass_size
        waiting = self.documents.positions
        self.put_behind(examples, numbers, self.fetched + counted, epochs)
        self.fetches = *_needed(self.fetches, waiting), _Fetch(self.fetched, self.fetched + len(examples), before)
        self.fetched += len(examples)
        self._refuse_empty_passes()
        return True

    def put_behind(self, examples: Sequence[Any], numbers: Indices, positions: Indices, epochs: Indices) -> None:
        """Put documents behind those that wait."""
        iterator = self._iterator
        # hot path: "documents, packed" of benchmarks/data.py. Nearly all are arrays of integers that int64 holds.
        tokens = [
            example
            if type(example) is np.ndarray and example.ndim == 1 and example.dtype.char in "bhilqBHI"
            else _tokens_of(example, number)
            for example, number in zip(examples, numbers.tolist(), strict=True)
        ]
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens)) + (iterator.separator is not None)
        if not iterator.split and lengths.max(initial=0) > iterator.length:
            at = int((lengths > iterator.length).argmax())
            its = "" if iterator.separator is None else " with its separator"
            raise ValueError(
                f"a document is not longer than a row with split=False, and document {numbers[at]} has {lengths[at]} "
                f"tokens{its}, a row {iterator.length}; give split=True or a larger length, or cut it before"
            )
        filled = np.flatnonzero(lengths)
        self._n_empty = len(lengths) - 1 - int(filled[-1]) if len(filled) else self._n_empty + len(lengths)
        documents = np.fromiter(tokens, object, len(tokens))
        self.documents = self.documents.before(_Documents(lengths, numbers, positions, epochs, documents))

    def _refuse_empty_passes(self) -> None:
        """Refuse a pass of empty documents alone, where one with tokens would be looked for without end."""
        source = self._iterator.source
        if not self._n_empty or not source.repeat:
            return
        weights = source.weights.values() if isinstance(source, MixtureIterator) else ()
        least = min(filter(None, weights), default=1.0)  # the source of this weight is the last to end its pass
        if self._n_empty * least > 2 * self._iterator.pass_size + 1:  # of any two passes that begin anywhere, one is whole
            raise ValueError(
                f"a row takes tokens, and the last {self._n_empty} documents, which is all of a pass, have none; see why "
                "they are empty, or give a separator"
            )

    def position(self) -> _Position:
        """Return where the next row begins."""
        return _Position(self.documents, self._offset, self._packed, self.fetches, self.fetched, self._rows, self._row)


def _find_rows(lengths: Indices, least: int, length: int) -> tuple[Indices, list[int], list[int]]:
    """Find rows as long as so many documents wait at their beginning; a row takes the first that fits, again and again.

    Return the places of their documents, and that of none behind those of a row that is not full; where in these each row
    ends; and how many of its places are left.
    """
    count, first, shortest, packed = len(lengths), 0, int(lengths.min()), length + 1
    waiting = np.append(lengths, 0).astype(np.min_scalar_type(packed))  # the last fits always
    sizes, fits, limit = waiting.data, bytearray(count + 1), np.zeros((), waiting.dtype)
    fitting = np.frombuffer(fits, bool)
    n_waiting, chosen, ends, unused = count, list[int](), list[int](), list[int]()
    # hot path: "whole documents, packed" of benchmarks/data.py. What is called for each document is looked up once.
    find, less_equal, choose = fits.find, np.less_equal, chosen.append
    while n_waiting >= least:
        begin, left = len(chosen), length
        while sizes[first] == packed:
            first += 1
        at = first  # which fits into an empty row
        while at < count:
            left -= sizes[at]
            sizes[at] = packed  # which fits nowhere
            choose(at)
            at += 1  # none before fits, and often the next does
            if sizes[at] > left:
                if left < shortest:
                    break
                limit[()] = left
                less_equal(waiting, limit, fitting)
                at = find(1)
        if left == length:  # those that are left are all empty
            del chosen[begin:]
            break
        if left >= shortest:  # nothing that waits fits into what is left
            shortest = left + 1
        n_waiting -= len(chosen) - begin
        if left:
            choose(_NONE)
        ends.append(len(chosen))
        unused.append(left)
    return np.array(chosen, np.int64), ends, unused


def _all_but(places: Indices, count: int) -> Indices:
    """Return so many places but for these, among which those of none do not count."""
    waits = np.ones(count + 1, bool)  # the last place is that of none
    waits[places] = False
    return np.flatnonzero(waits[:-1])


def _needed(fetches: Iterable[_Fetch], waiting: Sequence[int] | Indices) -> list[_Fetch]:
    """Return the fetches from that of the first waiting document on."""
    return [fetch for fetch in fetches if len(waiting) and waiting[0] < fetch.end]


def _tokens_of(example: Any, number: int) -> NDArray[np.integer]:
    """Return the tokens of a document as an array."""
    tokens = example
    with suppress(ValueError, TypeError, NotImplementedError):  # of what is no array of numbers, which is refused below
        if isinstance(example, torch.Tensor):
            tokens = example.numpy(force=True)
        elif isinstance(example, list):  # and no tuple, which is an example of several columns
            tokens = np.array(example) if example else np.empty(0, np.int64)
    is_masked = isinstance(tokens, np.ma.MaskedArray)  # whose mask would be lost
    if is_masked or not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        has_shape = isinstance(tokens, (np.ndarray, np.generic, torch.Tensor)) and not is_masked
        shown = f"an array of {tokens.dtype} and shape {tuple(tokens.shape)}" if has_shape else f"a {type(tokens).__name__}"
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
