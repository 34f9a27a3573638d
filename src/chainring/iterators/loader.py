"""LoaderIterator: batches of a torch DataLoader, or of anything else that returns batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from chainring._checks import is_integer, plain
from chainring._messages import warn
from chainring._random import digest
from chainring.iterators._order import Marks, contents, find_difference, marks_of, split_state, state_after
from chainring.iterators._passes import Passes, Position, compare, refusal, source_of
from chainring.iterators.base import Batch, Iterator, counters_of
from chainring.iterators.serial import require_flag
from chainring.serializers.protocol import AbstractSerializer, Serializer, announce_change, visit_optional, visit_setting


class _Fetched(NamedTuple):
    """A batch, the position after it, and True if it is known to be the last of its pass."""

    batch: Batch
    position: Position
    is_last: bool = False


class _Saved(NamedTuple):
    """What is saved of a loader. The first batch takes it up: then data are prepared, and ranks know of each other."""

    position: Position
    ranks: int  # that had shares of their own; 0 if there were no shares
    sizes: dict[str, int | None]
    workers: int
    marks: dict[str, Marks | None]  # of the last batch, of each rank that has its own
    next_marks: Marks | None = None  # of the batch after it, where that has been fetched
    is_at_end: bool = False  # of the pass, behind its last batch


def _with_state(passes: Passes, fetched: _Fetched) -> _Fetched:
    """Return what was fetched last with the state after it, if there is one, since only the newest can be had."""
    if not (passes.uses_state and passes.is_open):
        return fetched
    batch, position, is_last = fetched
    return _Fetched(batch, Position(*position[:3], passes.loader_state(), passes.source.get_generators()), is_last)


def _end_after(before: Position, end: Position) -> Position:
    """Return the end of a pass as it is reached from the position before its last batch, which a resumed run takes again."""
    is_known = before.passes == end.passes and before.loader_state is not None
    if not is_known or split_state(end.loader_state)[1] == 0:
        return end
    return Position(*end[:3], state_after(before.taken, before.loader_state), before.current_generators)


class LoaderIterator(Iterator):
    """Wraps a source of batches, and counts epochs: a ``DataLoader``, a list of batches, a generator, or a function.

    Batches are returned as they are; only a list (which ``default_collate`` returns) becomes a tuple. The number of examples
    in a batch is the first dimension of its arrays, or the length of lists and tuples within it that hold one item of each
    example; if these differ, let the model return a ``"weight"`` beside ``"loss"``, or the loader return a `Batch`. What the
    loader draws in this process from Python's, NumPy's or torch's global generator is a function of the seed (derived from
    ``torch.initial_seed()`` and saved), the pass and the batch. Worker processes start and end with each pass, also those of
    ``persistent_workers=True``, so that the seed and the pass determine their generators.

    A run resumes in the middle of an epoch through the loader's own state if there is one and it is complete: by
    ``state_dict``, by ``get_state`` of its iterators, as Grain's, or by ``save_state_rank``, as Megatron Energon's;
    otherwise the batches are fetched again and skipped, with a warning that gives their number. It is incomplete with a
    shuffle buffer of a Hugging Face stream, or with worker processes in which datasets or ``collate_fn`` may draw random
    numbers. A snapshot fetches the batch after a state; a run is refused whose loader is led to another one by its state,
    or fetches others again. The constructor warns of loaders that cannot be resumed bit for bit at all: with
    ``in_order=False``, or a stream shuffled without a seed.

    An epoch of a loader that has no length is one pass. Its end is found by reading one batch ahead, so that a trigger
    ``(1, "epoch")`` fires with the last batch. With ``epoch_length`` nothing is read ahead, and a loader without a length
    counts as endless: a pass is stopped after ``epoch_length`` batches, and the next epoch starts another pass, which
    must not return the same data again (``set_epoch`` is called, and its random numbers are seeded differently). A
    resumed run then fetches at most one epoch again. Leave ``epoch_length`` out if passes end by themselves.

    Args:
        loader: an iterable of batches, iterated again for every pass, or a function that returns one. An iterator (such
            as a generator) provides one pass, after which the data have run out.
        epoch_length: the number of batches in an epoch; by default ``len(loader)``, or one pass.
        per_rank: True if the loader already returns the share of each rank, like a stream that was split by
            ``split_dataset_by_node``, or a loader with a ``DistributedSampler``. Each rank then uses whole batches, and a
            mean is over the rows of all ranks; one whose pass ends early repeats its last batch with weight 0 until all
            have ended. Otherwise each rank takes its rows of the same batches, and a loader that is visibly split by rank,
            or returns different batches on the ranks, is refused.
        repeat: True to start another pass after one. Otherwise the loader's own generators are restored after each pass,
            so that an evaluation changes nothing and sees the same each time.

    Raises:
        TypeError: the loader does not return batches.
        ValueError: ``epoch_length`` is below 1, or the loader is empty and ``repeat`` is true.

    Example::

        loader = torch.utils.data.DataLoader(dataset, batch_size=100, shuffle=True)
        batch = next(LoaderIterator(loader))
    """

    serves_virtual_ranks = True

    def __init__(
        self,
        loader: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        epoch_length: int | None = None,
        per_rank: bool = False,
        repeat: bool = True,
    ) -> None:
        iterates = isinstance(loader, Iterable) or callable(loader) or hasattr(loader, "__getitem__")
        if isinstance(loader, (str, bytes, dict)) or not iterates:
            got = type(loader).__name__
            raise TypeError(f"a loader is an iterable of batches, or a function that returns one; got {got}")
        if epoch_length is not None and (not is_integer(epoch_length) or epoch_length < 1):
            raise ValueError(f"epoch_length counts batches and is at least 1, got {epoch_length!r}")
        self.loader: Any = loader  # first, so that what it does not save is named by this path
        source = source_of(loader)
        self.epoch_length = plain(epoch_length)
        self.per_rank = require_flag("per_rank", per_rank)
        self.repeat = require_flag("repeat", repeat)
        self.batch_size = getattr(loader, "batch_size", None) or 1
        self._batch_size_is_known = getattr(loader, "batch_size", None) is not None
        self._passes = Passes(source, self)
        if repeat and source.length == 0:
            raise ValueError(
                f"training takes batches again and again, and this {type(loader).__name__} has none: its data are empty, or "
                "fewer than a batch with drop_last=True"
            )
        if repeat and source.inexactness is not None:
            warn(f"a run over this {type(loader).__name__} cannot be resumed bit for bit: {source.inexactness}")
        self.may_have_no_end = source.length is None and not source.is_single_pass and not source.has_end
        self._epoch_position = 0
        self._returned = self._passes.position  # behind the batch last returned
        self._last: Batch | None = None  # the batch last returned, for a snapshot
        self._resumed: _Saved | None = None  # which is yet to be taken up
        self._pending: list[_Fetched] = []  # batches that were fetched and are not returned yet
        self._error: Exception | None = None  # that came when reading ahead; raised when it is its turn
        self._since_mark: list[_Fetched] | None = None  # batches returned since the last `mark`

    @property
    def _is_endless(self) -> bool:
        """True if a pass is left after epoch_length batches: it has no state by which it is taken up at any of them."""
        return self.epoch_length is not None and self.may_have_no_end and not self._passes.uses_state

    @property
    def _epoch_size(self) -> int | None:
        return self.epoch_length or self._passes.length or None

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self._epoch_position, self._epoch_size

    @property
    def place_in_passes(self) -> tuple[int, int]:
        """How many passes were gone through, and how many batches of the next were returned, whatever an epoch is."""
        passes, taken, *_ = self._returned
        return (passes - 1, taken) if taken else (passes, 0)

    def __next__(self) -> Batch:
        self._last = None  # so that one that is not needed any more takes no memory while another is fetched
        if not self._pending:
            self._fetch()
        passes, size, by_length = self._passes, self._epoch_size, self.epoch_length is None
        is_exact = size is not None and not (by_length and passes.is_length_wrong)
        epoch, position = self.epoch, self._epoch_position + 1
        if len(self._pending) == 1 and self._error is None:
            taken = self._pending[0].position.taken
            if not is_exact or (taken == passes.length and passes.uses_state):
                self._look_ahead()
                is_exact = is_exact and not passes.is_length_wrong
            elif taken + 1 == passes.length:
                self._pending[0] = _with_state(passes, self._pending[0])
        fetched = self._pending.pop(0)
        if self._since_mark is not None:
            self._since_mark.append(fetched)
        if by_length and position > 1 and fetched.position.passes != self._returned.passes:
            epoch, position, is_exact = epoch + 1, 1, False
        self._returned, self._last = fetched.position, fetched.batch
        if position == size if is_exact else fetched.is_last:
            epoch, position = epoch + 1, 0
        elif size is not None and position >= size:
            position = size - 1
        self._epoch_position = position
        self._count_batch(epoch, float(epoch) if size is None else epoch + position / size)
        return fetched.batch if self.per_rank else self.take_share(fetched.batch)

    def _check_length(self, *, is_at_end: bool = False) -> None:
        """Find the ends of passes by reading one batch ahead from now on, if this one ends before its length or goes on."""
        passes, taken, length = self._passes, self._passes.position.taken, self._passes.length or 0
        ends_early = is_at_end and 0 < taken < length and self.repeat and self.epoch_length is None
        if (ends_early or taken > length > 0) and not passes.is_length_wrong:
            passes.is_length_wrong = True
            count = taken if ends_early else "more"
            warn(
                f"the loader of iterator {self.name!r} ({type(self.loader).__name__}) has a len of {length}, "
                f"and a pass had {count} batches. An epoch is a pass: its end is found by reading one ahead from now on. "
                "Let __len__ return the number, or give LoaderIterator(loader, epoch_length=...)"
            )

    def _fetch(self) -> None:
        """Fetch the loader's next batch, from another pass if one has ended."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        passes = self._passes
        if self._resumed is not None:
            self._take_up()
            if self._pending:
                return
        if not self.repeat and self.epoch:  # epoch_length batches have come
            passes.end()
        is_new_pass = not passes.is_open
        while not passes.has_ended:
            if is_new_pass:
                passes.begin()
            try:
                self._pending.insert(0, self._take())
                return
            except StopIteration:
                is_empty = is_new_pass and passes.position.taken == 0
                self._check_length(is_at_end=True)
                passes.end()
                if is_empty and not passes.has_ended:
                    raise ValueError(
                        f"the loader of iterator {self.name!r} ({type(self.loader).__name__}) gave no batch in a whole "
                        "pass; a function must return a new iterable each time it is called"
                    ) from None
                is_new_pass = True
        raise StopIteration

    def _take(self) -> _Fetched:
        """Take the next batch, and end the pass with its last one if that is known by its number."""
        passes = self._passes
        batch = passes.take()
        position = passes.position
        if self._is_endless and position.taken >= (self._epoch_size or 0):
            passes.end()
        elif position.taken == passes.length and not (passes.uses_state or passes.is_length_wrong):
            # A run that is saved here need not fetch the pass again to find that it is over.
            try:
                self._pending.append(_Fetched(passes.take(), passes.position))
                self._check_length()
                return _Fetched(batch, position)
            except StopIteration:
                passes.end()
        return _Fetched(batch, passes.position)

    def _look_ahead(self) -> None:
        """Fetch one batch more of this pass, to learn whether the one that is returned next is its last."""
        passes = self._passes
        self._pending[0] = _with_state(passes, self._pending[0])
        batch, position, is_last = self._pending[0]
        if is_last or not passes.is_open:
            return
        try:
            self._pending.append(self._take())
            self._check_length()
        except StopIteration:
            self._check_length(is_at_end=True)
            passes.end()
            # A loader with a state continues from there, and is found at its end when the run is resumed.
            position = _end_after(self._returned, position) if passes.uses_state else passes.position
            self._pending[0] = _Fetched(batch, position, is_last=True)
        except Exception as error:
            if passes.has_shares:  # the other ranks have not waited for it
                raise
            self._error = error

    # --- ranks ---

    def check_share(self, size: int) -> None:
        if size > 1 and self.per_rank and self.virtual_ranks is not None:
            raise ValueError(
                f"virtual rank v of {self.virtual_ranks} has the rows batch[v::{self.virtual_ranks}] of the batch of all "
                f"ranks, and iterator {self.name!r} gives each of {size} its own share (per_rank=True), so that none knows "
                "them; let all ranks read the same batches: leave per_rank out, and what cuts the data"
            )
        if size > 1 and not self.per_rank and (what := self._passes.source.find_split()) is not None:
            raise ValueError(
                f"iterator {self.name!r} gives each of {size} ranks its share of every batch, and {what}; the batch "
                "size is that of all ranks together. Or say that each rank is given its own share: "
                "LoaderIterator(loader, per_rank=True)"
            )
        if size == 1 or not self.per_rank:
            super().check_share(size)

    def share(self, rank: int, size: int) -> None:
        super().share(rank, size)
        if self.per_rank and size > 1:
            own = getattr(self.loader, "batch_size", None) or 1, self._passes.source.length
            of_ranks = [own] * size if self.comm is None else self.comm.gather_object(own)
            batch_sizes, lengths = zip(*of_ranks, strict=True)
            self.batch_size = sum(batch_sizes)  # the same on all ranks, whose gradients are weighed by it
            # Passes are as long as the longest share.
            self._passes.length = None if self.comm is None or None in lengths else max(lengths)

    def batch_end(self) -> Any:
        """Return a digest of what lies on the host of the batches since the last `mark`, whole where ranks share them."""
        samples = [sample for fetched in self._since_mark or () for _, sample in contents(fetched.batch, sampled=True)]
        return (digest(*samples) if samples else None,)

    def batch_digest(self, start: Any, stop: Any) -> int | None:
        (value,) = stop
        return value  # type: ignore[no-any-return]

    # --- going back ---

    def reset(self) -> None:
        # Before the batch that was read ahead. Without repeat, each pass restores the generators, which others may share.
        self._restart(self._returned.passes, self._returned.current_generators if self.repeat else None)

    def rewind(self) -> None:
        self._restart(0, self._passes.initial_generators if self.repeat else None)

    def _restart(self, number: int, generators: dict[str, Any] | None) -> None:
        self._passes.restart(number, generators)
        self._returned = self._passes.position
        self._epoch_position = 0
        self._pending, self._since_mark, self._error, self._resumed, self._last = [], None, None, None, None
        self._restore_counters()

    def mark(self) -> Any:
        """Return this position, for `return_to` after a failed update."""
        self._since_mark = []
        return counters_of(self), self._epoch_position, self._returned

    def return_to(self, mark: Any) -> None:
        """Return to a position of `mark`: the batches since then will be returned again."""
        self._pending = (self._since_mark or []) + self._pending
        self._since_mark, self._last = [], None
        counts, self._epoch_position, self._returned = mark
        self._restore_counters(counts)

    def finalize(self) -> None:
        self._passes.close()

    # --- state ---

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving, passes = isinstance(serializer, Serializer), self._passes
        saved = self._describe(serializer) if saving else _Saved(passes.position, 0, self._sizes(), 0, {})
        sizes = {key: serializer(key, value) for key, value in saved.sizes.items()}
        if self._batch_size_is_known:
            visit_setting(serializer, "batch_size", self.batch_size, f"batch size of iterator {self.name!r}")
        passes.seed = serializer("seed", passes.get_seed() if saving else passes.seed)
        self._epoch_position = serializer("position", self._epoch_position)
        self._serialize_counters(serializer)
        has_ended = serializer("has_ended", passes.has_ended and not self._pending)
        passes.is_length_wrong = serializer("length_is_wrong", passes.is_length_wrong)
        names = ("passes", "taken", "generators", "loader", "generators_now")
        position = Position(*[serializer(name, value) for name, value in zip(names, saved.position, strict=True)])
        ranks = visit_optional(serializer, "ranks", saved.ranks)
        workers, marks = serializer("workers", saved.workers), serializer("last_batch", saved.marks)
        next_marks = visit_optional(serializer, "next_batch", saved.next_marks)
        is_at_end = serializer("is_at_end", saved.is_at_end)
        if saving:
            return
        self._check(_Saved(position, ranks, sizes, workers, marks))
        self._last, self._pending, self._since_mark, self._error = None, [], None, None
        passes.close()
        if self.per_rank:
            rank = str(serializer.comm.rank) if len(position.generators) > 1 else "0"  # one in memory is the rank's own
            loader = position.loader_state and position.loader_state.get(rank)
            position = Position(*position[:2], position.generators.get(rank, {}), loader, *position[4:])
            marks = {"0": marks.get(rank)}
        passes.position = self._returned = position
        passes.has_ended = has_ended
        self._resumed = _Saved(position, ranks, sizes, workers, marks, next_marks, is_at_end)
        if position.taken and workers != passes.source.n_workers:
            holds = "this epoch ends as it began, the next has the new number"
            announce_change(f"num_workers of iterator {self.name!r}", workers, passes.source.n_workers, holds)

    def _sizes(self) -> dict[str, int | None]:
        source = self._passes.source
        examples, batches = (None, None) if self.per_rank else (source.n_examples, source.length)
        return {"examples": examples, "batches": batches, "epoch_length": self.epoch_length}

    def _describe(self, serializer: AbstractSerializer) -> _Saved:
        """Return what is to be saved; of ranks with their own shares together."""
        comm, passes, source, saved = serializer.comm, self._passes, self._passes.source, self._resumed
        if saved is None:
            last, is_amid = self._last, passes.is_open and not self._pending and (self.repeat or not self.epoch)
            if passes.uses_state and is_amid and last is not None:
                self._pending = [_Fetched(last, self._returned)]
                try:
                    self._look_ahead()  # at the batch to which the state must lead a resumed run
                finally:
                    self._returned = self._pending.pop(0).position
            position = self._returned
            if not self._pending and position.loader_state is None:
                position = passes.describe()
            if position.current_generators is None:
                position = Position(*position[:4], source.get_generators())
            if self._pending and position.taken == 1 and split_state(state := passes.loader_state())[1] == 0:
                position = Position(*position[:3], state, position.current_generators)  # it was the same after one batch
            marks = {"0": None if last is None or not position.taken else marks_of(last)}
            ranks = max(comm.size, self.size) if self.per_rank else 0
            following = marks_of(self._pending[0].batch) if self._pending and position.taken and not self.per_rank else None
            is_at_end = not self._pending and 0 == passes.position.taken < position.taken
            saved = _Saved(position, ranks, self._sizes(), source.n_workers, marks, following, is_at_end)
        if self.per_rank:
            states = comm.gather_object((saved.position.generators, saved.marks["0"], saved.position.loader_state))
            generators, marks, loader = (
                {str(rank): item for rank, item in enumerate(items)} for items in zip(*states, strict=True)
            )
            begins_anew = all(state is None for state in loader.values())
            position = Position(*saved.position[:2], generators, None if begins_anew else loader, *saved.position[4:])
            saved = _Saved(position, *saved[1:4], marks)
        return saved

    def _check(self, saved: _Saved) -> None:
        """Refuse what means nothing with this loader; its lengths may depend on the epoch that it is told."""
        position, ranks, sizes, _, marks, *_ = saved
        if (ranks > 0) != self.per_rank and position.taken:
            raise ValueError(
                f"iterator {self.name!r} has per_rank={self.per_rank}, the saved run had {not self.per_rank}; "
                "another setting can begin at the end of an epoch only"
            )
        if self._sizes() != sizes and position.passes:
            self._passes.source.set_epoch(position.passes - 1)
        now = self._sizes()
        if sizes["epoch_length"] or now["epoch_length"]:
            sizes, now = ({**item, "epoch_length": item["epoch_length"] or item["batches"]} for item in (sizes, now))
        is_compared = marks.get("0") is not None
        may_vary = is_compared and (self._passes.is_length_wrong or now["batches"] is None)
        rules = (
            ("examples", "resume with the same dataset, or start a new run", True),
            ("batches", "another batch size can begin at the end of an epoch only", position.taken > 0 and not may_vary),
            ("epoch_length", "another length can begin at the end of an epoch only", self._epoch_position > 0),
        )
        for key, remedy, applies in rules:
            if applies and sizes[key] != now[key]:
                change = f"{key} = {now[key]}, the saved run had {sizes[key]}"
                raise ValueError(f"iterator {self.name!r} has {change}; {remedy}")

    def _take_up(self) -> None:
        """Go to the saved position, with data that the script has prepared since it was loaded."""
        assert self._resumed is not None
        position, ranks, _, workers, marks, next_marks, is_at_end = self._resumed
        if self.per_rank and max(ranks, 1) != self.size and position.taken:
            raise ValueError(
                f"iterator {self.name!r} was saved by {ranks} ranks, each in the middle of its own share, and there "
                f"are {self.size}: resume with as many, or from a snapshot of the end of an epoch"
            )
        passes = self._passes
        passes.resume(position, workers, marks.get("0"), is_at_end=is_at_end)
        if next_marks is not None:
            following = None
            with suppress(StopIteration):
                following = self._take()
            again = None if following is None else marks_of(following.batch)
            compare(passes, next_marks, again, f"batch {position.taken + 1} of this pass")
            if following is not None:
                self._pending.insert(0, following)
        self._resumed = None


def check_state(iterator: LoaderIterator) -> None:
    """Refuse a loader whose own state does not lead to the next three batches, or a stream without one that reads on.

    A rehearsal asks for it; what is taken is gone.
    """
    if not iterator._passes.uses_state:
        iterator._passes.check_beginning()
        return
    saved, batches = iterator.state_dict(), [marks_of(batch) for batch in islice(iterator, 3)]
    iterator.load_state_dict(saved)
    again = [marks_of(batch) for batch in islice(iterator, 3)]
    for number, (marks, others) in enumerate(zip_longest(batches, again), 1):
        if marks is None or others is None or find_difference(marks, others) is not None:
            raise refusal(iterator._passes, f"batch {number} after its own state")


def as_iterator(source: Any, repeat: bool = True) -> Any:
    """Return an iterator as it is, and any other source of batches wrapped in a `LoaderIterator`."""
    if isinstance(source, type) and hasattr(source, "__next__"):
        rule = f"an iterator of batches is needed, got the class {source.__name__}"
        raise TypeError(f"{rule}; make an object of it, such as SerialIterator(dataset, batch_size)")
    if isinstance(source, Iterator) or (hasattr(source, "__next__") and hasattr(source, "epoch_detail")):
        return source
    if hasattr(source, "__next__") and hasattr(source, "is_new_epoch"):
        rule = f"{type(source).__name__} counts epochs, and has no epoch_detail by which triggers would know them"
        raise TypeError(f"{rule}; derive it from chainring.iterators.Iterator")
    gives_examples = not isinstance(source, (IterableDataset, DataLoader)) and (
        isinstance(source, (Dataset, np.ndarray, torch.Tensor))
        or hasattr(source, "get_example")
        or hasattr(source, "__getitems__")  # which torch's DataLoader calls
        or (hasattr(source, "__getitem__") and not hasattr(source, "__iter__") and not hasattr(source, "__next__"))
    )
    if gives_examples:
        raise TypeError(
            f"an iterator of batches is needed, got the dataset {type(source).__name__}, which returns single examples; "
            "wrap it: SerialIterator(dataset, batch_size), or LoaderIterator(dataset) if its items are batches"
        )
    if isinstance(source, (torch.nn.Module, torch.optim.Optimizer, Mapping)):
        raise TypeError(f"an iterator of batches is needed, got {type(source).__name__}")
    return LoaderIterator(source, repeat=repeat)
