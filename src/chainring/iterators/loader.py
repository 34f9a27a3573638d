"""LoaderIterator: batches of a torch DataLoader, or of anything else that returns batches."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Iterator as PythonIterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from chainring._checks import is_integer
from chainring._distributed.communicator import Communicator
from chainring._messages import warn
from chainring._random import digest, preserve_host_rng, seed_host, stable_hash
from chainring.datasets._columns import batch_of_columns, count_rows
from chainring.iterators._worker_main import exit_with_parent
from chainring.iterators.base import Batch, Iterator, not_the_end
from chainring.serializers._objects import has_state
from chainring.serializers.protocol import AbstractSerializer, Serializer, visit_optional, visit_setting

_SAMPLED_ARRAYS, _SAMPLED_NUMBERS = 64, 1024  # of a batch, and of each of its arrays, for a digest


class LoaderIterator(Iterator):
    """Wraps a source of batches, and counts epochs: a ``DataLoader``, a list of batches, a generator, or a function.

    Batches are returned as they are, without being concatenated again; only a list (which ``default_collate`` returns)
    becomes a tuple. The number of examples in a batch is the first dimension of its arrays; if these differ, let the
    model return a ``"weight"`` beside ``"loss"``, or the loader return a `Batch`. The random numbers that the loader
    draws in this process from Python's, NumPy's or torch's global generator come from a separate stream, a function of
    the seed (derived from ``torch.initial_seed()`` and saved), the pass and the batch.

    A run resumes in the middle of an epoch through the loader's own ``state_dict`` if there is one and it is complete;
    otherwise the batches are fetched again and skipped, with a warning that gives their number. It is incomplete with a
    shuffle buffer of a Hugging Face stream, or with worker processes in which datasets or ``collate_fn`` may draw random
    numbers. The constructor warns of loaders that cannot be resumed bit for bit at all: with ``in_order=False``, or a
    stream shuffled without a seed.

    Worker processes start and end with each pass, also those of ``persistent_workers=True``, so that their generators are
    determined by the seed and the pass. None is left when a run has ended.

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
            mean is over the rows of all ranks. A rank whose pass ends early repeats its last batch with weight 0 until
            all have ended, so that every example is seen. Otherwise the loader must return the same batches on all ranks,
            and each rank takes its rows of them; a loader that is visibly split by rank, or returns different batches on
            the ranks, is then refused.
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
        _check(loader, epoch_length)
        self.loader: Any = loader
        self.epoch_length = epoch_length
        self.per_rank = per_rank
        self.repeat = repeat
        self.batch_size = getattr(loader, "batch_size", None) or 1
        self._batch_size_is_known = getattr(loader, "batch_size", None) is not None
        self._describe_loader(loader)
        self._epoch_position = 0
        self._seed: int | None = None
        self._initial_generators = self._outer_generators = self._get_generators()
        self._resumed_generators: dict[str, Any] = {}  # for the end of `_open`, which may draw from them
        self._pass: PythonIterator[Any] | None = None
        self._last_batch: Batch | None = None  # of this pass and rank
        self._resumed: _RankPosition | None = None  # the position to which a rank's own share is yet to be brought
        self._releases: list[Callable[[], Any]] = []  # of the workers of this pass
        self._position = self._returned = LoaderPosition(0, 0, self._initial_generators)  # of the batch fetched, returned
        self._pending: list[_Fetched] = []  # batches that were fetched and are not returned yet
        self._error: Exception | None = None  # that came when reading ahead; raised when it is its turn
        self._since_mark: list[_Fetched] | None = None  # batches returned since the last `mark`
        self._has_ended = False  # there is no other pass
        self._is_spent = False  # a loader of a single pass was begun
        if repeat:
            _warn_of_inexact_order(loader)

    def _describe_loader(self, loader: Any) -> None:
        self._pass_length = _length(loader)
        if self.repeat and self._pass_length == 0:
            raise ValueError(f"repeat=True needs at least one batch, and {type(loader).__name__} has none")
        self._epoch_size = (self._pass_length or None) if self.epoch_length is None else self.epoch_length
        self._state_lacks = "the last batch of a rank whose share has ended" if self.per_rank else _find_state_gap(loader)
        self._uses_state = has_state(loader) and self._state_lacks is None
        self._is_single_pass = hasattr(loader, "__next__")  # it is an iterator itself, such as a generator
        # The pass of a loader with a state is not left: it is resumed without fetching anything again.
        may_have_no_end = self._pass_length is None and not self._is_single_pass and not self._uses_state
        self._is_endless = self.epoch_length is not None and may_have_no_end and not _is_finite_stream(loader)
        self._may_draw = _may_draw(loader)
        self._generators = _own_generators(loader)

    @property
    def refetches(self) -> bool:
        """True if a run resumed in the middle of a pass fetches the batches of that pass again."""
        return not self._uses_state

    @property
    def progress(self) -> tuple[int, int, int | None]:
        return self.epoch, self._epoch_position, self._epoch_size

    def __next__(self) -> Batch:
        if not self._pending:
            self._fetch()
        if self._epoch_size is None and len(self._pending) == 1 and self._error is None:
            self._look_ahead()
        fetched = self._pending.pop(0)
        if self._since_mark is not None:
            self._since_mark.append(fetched)
        self._advance(fetched)
        return fetched.batch if self.per_rank else self.take_share(fetched.batch)

    def _advance(self, fetched: _Fetched) -> None:
        """Count a batch that is returned."""
        position = fetched.position
        begins_pass = self._returned.taken > 0 and position.passes > self._returned.passes
        self._returned = position
        self.previous_epoch_detail = self.epoch_detail
        self.is_new_epoch = False
        if self._epoch_size is None and begins_pass and self._epoch_position:  # the end was not known before
            self.epoch, self._epoch_position, self.is_new_epoch = self.epoch + 1, 0, True
        self._epoch_position += 1
        if fetched.is_last if self._epoch_size is None else self._epoch_position == self._epoch_size:
            self.epoch, self._epoch_position, self.is_new_epoch = self.epoch + 1, 0, True
        self.epoch_detail = float(self.epoch)
        if self._epoch_size is not None:
            self.epoch_detail = self.epoch + self._epoch_position / self._epoch_size

    # --- passes over the loader ---

    def _fetch(self) -> None:
        """Fetch the loader's next batch, from another pass if one has ended."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._resumed is not None:
            self._resume_share(self._resumed)
        if not self.repeat and self.epoch:  # epoch_length batches have come
            self._end_pass()
        is_new_pass = self._pass is None
        while not self._has_ended:
            if self._pass is None:
                self._begin_pass()
            try:
                self._pending.insert(0, self._take())
                return
            except StopIteration:
                is_empty = is_new_pass and self._position.taken == 0
                self._end_pass()
                if is_empty and not self._has_ended:
                    raise ValueError(
                        f"the loader of iterator {self.name!r} ({type(self.loader).__name__}) gave no batch in a whole "
                        "pass; a function must return a new iterable each time it is called"
                    ) from None
                is_new_pass = True
        raise StopIteration

    def _look_ahead(self) -> None:
        """Fetch one batch more of this pass, to learn whether the one that is returned next is its last."""
        batch, position, is_last = self._pending[0]
        if is_last or self._pass is None:
            return
        if self._uses_state:  # of which only the newest can be had
            position = LoaderPosition(*position[:3], self._get_loader_state(), self._get_generators())
            self._pending[0] = _Fetched(batch, position)
        try:
            self._pending.append(self._take())
        except StopIteration:
            self._end_pass()
            # A loader with a state continues from there, and is found at its end when the run is resumed.
            self._pending[0] = _Fetched(batch, position if self._uses_state else self._position, is_last=True)
        except Exception as error:
            if self._is_own_share:  # the other ranks have not waited for it
                raise
            self._error = error

    def _take(self) -> _Fetched:
        batch = self._next_batch()
        position = self._position
        if self._is_endless and position.taken >= (self._epoch_size or 0):
            self._end_pass()
        elif position.taken == self._pass_length and not self._uses_state:
            # The pass is ended with its last batch, so that a run saved here need not fetch it again to find that out.
            try:
                self._pending.append(_Fetched(self._next_batch(), self._position))  # the loader's length was too small
                return _Fetched(batch, position)
            except StopIteration:
                self._end_pass()
        return _Fetched(batch, self._position)

    def _next_batch(self) -> Batch:
        passes, taken, generators = self._position[:3]
        batch = self._next_of_share() if self._is_own_share else self._next_of_loader()
        comm = self.comm
        if taken == 0 and comm is not None and (not self.per_rank or comm.world.size > comm.size):
            self._check_same_on_all_ranks(batch, comm)
        self._position = LoaderPosition(passes, taken + 1, generators)
        return batch

    def _next_of_loader(self) -> Batch:
        assert self._pass is not None
        with self._seeded(self._position.passes - 1, self._position.taken) if self._may_draw else nullcontext():
            try:
                item = next(self._pass)
            except StopIteration as error:
                if _is_from_data(error, self._pass):
                    raise not_the_end(f"the dataset or a function of the loader of iterator {self.name!r}") from error
                raise
        return make_batch(item)

    def _check_same_on_all_ranks(self, batch: Batch, comm: Communicator) -> None:
        """Refuse a loader that gives other batches to ranks that share them, or that see the same rows.

        Each would take its rows of a part of the data, or compute a part of the model for other examples.
        """
        sums = comm.world.gather_object((comm.rank, _checksum(batch)))
        if not self.per_rank and len({checksum for _, checksum in sums}) > 1:
            raise ValueError(
                f"the {len(sums)} ranks share every batch of iterator {self.name!r} by its rows, and its loader "
                f"({type(self.loader).__name__}) gives them different ones. If it gives each rank its own share, "
                "write LoaderIterator(loader, per_rank=True); otherwise seed what it draws alike on all ranks"
            )
        if len(set(sums)) > comm.size:
            raise ValueError(
                f"ranks that compute one model together see the same rows, and the loader of iterator {self.name!r} "
                f"({type(self.loader).__name__}) gives them different ones: cut its data by the rank of the communicator, "
                "which is that of the data, and seed what it draws alike on all ranks"
            )

    # --- a loader that gives each rank its own share ---

    @property
    def _is_own_share(self) -> bool:
        return self.per_rank and self.size > 1

    def _next_of_share(self) -> Batch:
        """Return this rank's next batch; if it has none and others have, its last one again with weight 0."""
        if self.comm is None:
            raise ValueError(
                f"with per_rank=True the {self.size} ranks of iterator {self.name!r} agree on the end of a pass, for which "
                "they need a communicator: StandardUpdater(..., comm=create_communicator())"
            )
        try:
            batch = self._last_batch = self._next_of_loader()
            has_ended = False
        except StopIteration:
            has_ended = True
        if not self.comm.start_max(int(not has_ended))():
            raise StopIteration
        if not has_ended:
            return batch
        if self._last_batch is None:
            raise ValueError(
                f"the loader of iterator {self.name!r} gave rank {self.rank} of {self.size} no batch in a whole pass, and "
                "others have some: give every rank a share, for example by more shards or a smaller batch size"
            )
        batch = self._last_batch[:]
        batch.weight = 0
        return batch

    def _resume_share(self, saved: _RankPosition) -> None:
        """Fetch this rank's batches again up to the position in which the run was saved."""
        self._resumed = None
        passes, taken, generators = saved.position[:3]
        if saved.ranks != self.size and taken:
            raise ValueError(
                f"iterator {self.name!r} was saved by {saved.ranks} ranks, each in the middle of its own share, and there "
                f"are {self.size}: resume with as many, or from a snapshot of the end of an epoch"
            )
        if self.repeat or not taken:
            self._set_generators(generators)
        self._position = LoaderPosition(passes - (taken > 0), 0, generators)
        if taken:
            self._skip(taken)

    def _begin_pass(self) -> None:
        epoch = self._position.passes
        if not self.repeat:
            self._outer_generators = self._get_generators()
            self._set_generators(self._initial_generators)
        _set_epoch(self.loader, epoch)
        self._open(epoch)

    def _open(self, epoch: int) -> None:
        generators = self._get_generators()
        with self._seeded(epoch, -1):
            is_function = callable(self.loader) and not isinstance(self.loader, Iterable)
            source = self.loader() if is_function else self.loader
            with _guard_workers(source, self._releases):
                self._pass = iter(source)
        self._set_generators(self._resumed_generators)
        self._resumed_generators = {}
        self._is_spent = self._is_single_pass
        self._last_batch = None
        self._position = LoaderPosition(epoch + 1, 0, generators)

    def _end_pass(self) -> None:
        self.finalize()
        self._has_ended = not self.repeat or self._is_single_pass
        self._position = LoaderPosition(self._position.passes, 0, self._get_generators())

    def finalize(self) -> None:
        if self._pass is not None and not self.repeat:
            self._set_generators(self._outer_generators)
        if self._releases:
            for release in self._releases:
                release()
            self._releases.clear()
            # A DataLoader's workers end with its iterator, to which the traceback of an error may still refer.
            getattr(self._pass, "_shutdown_workers", lambda: None)()
        self._pass = None

    def _get_seed(self) -> int:
        if self._seed is None:
            self._seed = stable_hash("loader", self.base_seed(), self.name)
        return self._seed

    def _seeded(self, *position: int) -> AbstractContextManager[None]:
        """Give the loader a random stream that follows from the seed and the position, and the rank if it is its own."""
        return _seeded(self._get_seed(), *position, *([self.rank] if self._is_own_share else []))

    def _get_generators(self) -> dict[str, Any]:
        return {str(i): generator.get_state() for i, generator in enumerate(self._generators)}

    def _set_generators(self, states: Mapping[str, Any]) -> None:
        for i, generator in enumerate(self._generators):
            if str(i) in states:
                generator.set_state(states[str(i)])

    # --- going back ---

    def reset(self) -> None:
        self._restart(self._returned.passes)

    def rewind(self) -> None:
        self._restart(0)
        if self.repeat:
            self._set_generators(self._initial_generators)

    def _restart(self, passes: int) -> None:
        if self._is_spent:
            raise ValueError(
                f"the loader of iterator {self.name!r} ({type(self.loader).__name__}) gives one pass, which was begun, "
                "and cannot start again: pass a function that returns a new iterable"
            )
        self.finalize()
        if self._returned.current_generators is not None:  # before the batch that was read ahead
            self._set_generators(self._returned.current_generators)
        self._position = self._returned = LoaderPosition(passes, 0, self._get_generators())
        self._epoch_position = 0
        self._pending, self._error, self._resumed = [], None, None
        self._since_mark = None
        self._has_ended = False
        self.epoch = 0
        self.epoch_detail = 0.0
        self.previous_epoch_detail = None
        self.is_new_epoch = False

    def mark(self) -> Any:
        """Return this position, for `return_to` after a failed update."""
        self._since_mark = []
        counts = self.epoch, self._epoch_position, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch
        return counts, self._returned

    def return_to(self, mark: Any) -> None:
        """Return to a position of `mark`: the batches since then will be returned again."""
        self._pending = (self._since_mark or []) + self._pending
        self._since_mark = []
        counts, self._returned = mark
        self.epoch, self._epoch_position, self.epoch_detail, self.previous_epoch_detail, self.is_new_epoch = counts

    def check_share(self, size: int) -> None:
        if size > 1 and self.per_rank and self.virtual_ranks is not None:
            raise ValueError(
                f"virtual rank v of {self.virtual_ranks} has the rows batch[v::{self.virtual_ranks}] of the batch of all "
                f"ranks, and iterator {self.name!r} gives each of {size} its own share (per_rank=True), so that none knows "
                "them; let all ranks read the same batches: leave per_rank out, and what cuts the data"
            )
        if size > 1 and not self.per_rank and (what := _find_cut(self.loader)) is not None:
            raise ValueError(
                f"iterator {self.name!r} gives each of {size} ranks its share of every batch, and {what}; the batch "
                "size is that of all ranks together. Or say that each rank is given its own share: "
                "LoaderIterator(loader, per_rank=True)"
            )
        if size == 1 or not self.per_rank:
            super().check_share(size)

    def share(self, rank: int, size: int) -> None:
        super().share(rank, size)
        if self._is_own_share:
            self.batch_size = size * (getattr(self.loader, "batch_size", None) or 1)
            lengths = [None] if self.comm is None else self.comm.gather_object(_length(self.loader))
            # Passes are as long as the longest share.
            self._pass_length = None if None in lengths else max(lengths)
            self._epoch_size = self.epoch_length or self._pass_length

    def batch_place(self) -> Any:
        """Return a digest of the content of the batches since the last `mark`, of the whole ones where ranks share them.

        Of each array 1,024 evenly spaced numbers count. It is ``None`` if none of them lies on the host, or there was no
        `mark`.
        """
        parts = [part for fetched in self._since_mark or () for part in _samples(fetched.batch)]
        return (digest(*parts) if parts else None,)

    def batch_digest(self, start: Any, stop: Any) -> int | None:
        (found,) = stop
        return found  # type: ignore[no-any-return]

    # --- state ---

    def serialize(self, serializer: AbstractSerializer) -> None:
        saving = isinstance(serializer, Serializer)
        sizes = {key: serializer(key, value) for key, value in self._sizes().items()}
        if self._batch_size_is_known:
            visit_setting(serializer, "batch_size", self.batch_size, f"batch size of iterator {self.name!r}")
        self._seed = serializer("seed", self._get_seed() if saving else self._seed)
        self.epoch = serializer("epoch", self.epoch)
        self._epoch_position = serializer("position", self._epoch_position)
        self.epoch_detail = serializer("epoch_detail", self.epoch_detail)
        self.previous_epoch_detail = serializer("previous_epoch_detail", self.previous_epoch_detail)
        self.is_new_epoch = serializer("is_new_epoch", self.is_new_epoch)
        has_ended = serializer("has_ended", self._has_ended and not self._pending)
        generators = self._get_generators
        position = self._describe_position() if saving else LoaderPosition(0, 0, generators(), None, generators())
        ranks = serializer.comm.size
        if saving and self.per_rank:
            states = serializer.comm.gather_object(position.generators)
            position = LoaderPosition(*position[:2], dict(zip(map(str, range(ranks)), states, strict=True)), *position[3:])
        names = ("passes", "taken", "generators", "loader", "generators_now")
        position = LoaderPosition(*[serializer(name, value) for name, value in zip(names, position, strict=True)])
        saved_ranks = visit_optional(serializer, "ranks", max(ranks, self.size) if saving and self.per_rank else 0)
        if not saving:
            self._check_sizes(sizes, position.taken)
            if (saved_ranks > 0) != self.per_rank and position.taken:
                raise ValueError(
                    f"iterator {self.name!r} has per_rank={self.per_rank}, the saved run had {not self.per_rank}; "
                    "another setting can begin at the end of an epoch only"
                )
            if self.per_rank:
                position = self._of_this_rank(position, serializer.comm)
                self._resumed = _RankPosition(position, saved_ranks or 1)
            self._resume(position)
            self._has_ended = has_ended

    def _of_this_rank(self, position: LoaderPosition, comm: Communicator) -> LoaderPosition:
        """Return a saved position with the generators of this rank; one state in memory is the rank's own."""
        states = position.generators
        rank = str(comm.rank) if len(states) > 1 else "0"
        return LoaderPosition(*position[:2], states.get(rank, {}), *position[3:])

    def _describe_position(self) -> LoaderPosition:
        """Return the position after the batch last returned, with all that is to be saved of it."""
        if self._resumed is not None:
            position = self._resumed.position
        elif self._pending or self._returned.loader_state is not None:
            position = self._returned
        else:
            passes, taken, generators = self._position[:3]
            if self._pass is None and taken == 0:
                generators = self._get_generators()
            position = LoaderPosition(passes, taken, generators, self._get_loader_state())
        if position.current_generators is None:  # after the loader's state, which may draw
            position = LoaderPosition(*position[:4], self._get_generators())
        return position

    def _get_loader_state(self) -> Any:
        has_begun = self._pass is not None or self._position.taken > 0
        if not self._uses_state or (not has_begun and getattr(self.loader, "num_workers", 0) > 0):  # it would start them
            return None
        with self._seeded(self._position.passes, -1):  # some begin a pass for it
            return self.loader.state_dict()

    def _sizes(self) -> dict[str, int | None]:
        if self.per_rank:
            return {"examples": None, "batches": None, "epoch_length": self.epoch_length}
        return {"examples": _dataset_size(self.loader), "batches": _length(self.loader), "epoch_length": self._epoch_size}

    def _check_sizes(self, saved: dict[str, int | None], taken: int) -> None:
        rules = (
            ("examples", "resume with the same dataset, or start a new run", True),
            ("batches", "another batch size can begin at the end of an epoch only", taken > 0),
            ("epoch_length", "another length can begin at the end of an epoch only", self._epoch_position > 0),
        )
        current = self._sizes()
        for key, remedy, applies in rules:
            if applies and saved[key] != current[key]:
                sizes = f"{key} = {current[key]}, the saved run had {saved[key]}"
                raise ValueError(f"iterator {self.name!r} has {sizes}; {remedy}")

    def _resume(self, saved: LoaderPosition) -> None:
        passes, taken, generators, loader_state, current_generators = saved
        self.finalize()
        self._pending, self._since_mark, self._error = [], None, None
        if self._resumed is not None:  # brought there by the first batch, when the rank is known
            self._position = self._returned = saved
            return
        if loader_state is not None and self._uses_state:
            # A loader restores its position with other draws than in the saved run (torchdata's draws no seed for its
            # workers), and the next pass would be another one.
            self._resumed_generators = current_generators or {} if self.repeat else {}
            if taken:
                _set_epoch(self.loader, passes - 1)
            with preserve_host_rng():
                self.loader.load_state_dict(loader_state)
            if taken:
                self._open(passes - 1)
            self._position = LoaderPosition(passes, taken, generators)
        else:
            if self.repeat or not taken:
                self._set_generators(generators)
            self._position = LoaderPosition(passes - (taken > 0), 0, generators)
            if taken:
                self._skip(taken)
        self._returned = self._position

    def _skip(self, taken: int) -> None:
        if type(self.loader) not in (list, tuple):
            kind = type(self.loader).__name__
            why = (
                f"{kind} has no state_dict"
                if self._state_lacks is None
                else f"the state of {kind} lacks {self._state_lacks}"
            )
            warn(
                f"iterator {self.name!r} fetches {taken} batches again and skips them, to resume in the middle of an "
                f"epoch: {why}. SerialIterator and loaders with a state do not need this",
            )
        self._begin_pass()
        for skipped in range(taken):
            try:
                self._skip_batch()
            except StopIteration:
                raise ValueError(
                    f"the saved run had taken {taken} batches of this pass, and the loader of iterator {self.name!r} "
                    f"gives only {skipped}: resume with the same data and batch size"
                ) from None

    def _skip_batch(self) -> None:
        """Fetch a batch that was taken before. Other ranks are not asked: it is known that one of them had it."""
        try:
            batch = self._next_of_loader()
        except StopIteration:
            if not self._is_own_share or self._last_batch is None:
                raise
        else:
            self._last_batch = batch if self._is_own_share else None
        self._position = LoaderPosition(self._position.passes, self._position.taken + 1, self._position.generators)


class LoaderPosition(NamedTuple):
    """A position between two batches."""

    passes: int  # over the loader that were begun
    taken: int  # batches of the last pass that were fetched; 0 if it is over
    generators: dict[str, Any]  # the states of the loader's own generators at the beginning of that pass
    loader_state: Any = None  # the loader's own, and that of its generators: kept if a batch beyond it was fetched
    current_generators: dict[str, Any] | None = None


class _Fetched(NamedTuple):
    """A batch, the position after it, and True if it is known to be the last of its pass."""

    batch: Batch
    position: LoaderPosition
    is_last: bool = False


class _RankPosition(NamedTuple):
    """The position in which a run of so many ranks was saved, each with its own share."""

    position: LoaderPosition
    ranks: int


def as_iterator(source: Any, repeat: bool = True) -> Any:
    """Return an iterator as it is, and any other source of batches wrapped in a `LoaderIterator`.

    Raises:
        TypeError: the source is a dataset, which returns examples and not batches, or is not iterable.
    """
    if isinstance(source, type) and hasattr(source, "__next__"):
        rule = f"an iterator of batches is needed, got the class {source.__name__}"
        raise TypeError(f"{rule}; make an object of it, such as SerialIterator(dataset, batch_size)")
    if isinstance(source, Iterator) or (hasattr(source, "__next__") and hasattr(source, "epoch_detail")):
        return source
    if _is_dataset(source):
        raise TypeError(
            f"an iterator of batches is needed, got the dataset {type(source).__name__}, which returns single examples; "
            "wrap it: SerialIterator(dataset, batch_size), or LoaderIterator(dataset) if its items are batches"
        )
    if isinstance(source, (torch.nn.Module, torch.optim.Optimizer, Mapping)):
        raise TypeError(f"an iterator of batches is needed, got {type(source).__name__}")
    return LoaderIterator(source, repeat=repeat)


def _check(loader: Any, epoch_length: int | None) -> None:
    iterates = isinstance(loader, Iterable) or callable(loader) or hasattr(loader, "__getitem__")
    if isinstance(loader, (str, bytes, dict)) or not iterates:
        raise TypeError(f"a loader is an iterable of batches, or a function that returns one; got {type(loader).__name__}")
    if epoch_length is not None and (not is_integer(epoch_length) or epoch_length < 1):
        raise ValueError(f"epoch_length counts batches and is at least 1, got {epoch_length!r}")


def _is_dataset(source: Any) -> bool:
    """Return whether a source gives single examples: it can be indexed, and not iterated in another way."""
    if isinstance(source, (IterableDataset, DataLoader)):
        return False
    is_known = isinstance(source, (Dataset, np.ndarray, torch.Tensor))
    if is_known or hasattr(source, "get_example") or hasattr(source, "__getitems__"):  # which torch's DataLoader calls
        return True
    return hasattr(source, "__getitem__") and not hasattr(source, "__iter__") and not hasattr(source, "__next__")


def _is_from_data(error: StopIteration, source: Any) -> bool:
    """Return whether an error that has come out of ``next(source)`` was raised by a function that makes data.

    That is the dataset or the ``collate_fn`` of a ``DataLoader``, here or in a worker, or a function that ``map`` calls.
    """
    traceback = error.__traceback__
    assert traceback is not None
    if not isinstance(type(source).__next__, FunctionType):  # as of map, through which the end of another iterator may come
        return traceback.tb_next is not None and traceback.tb_next.tb_frame.f_code.co_name != "__next__"
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        owner, name = type(frame.f_locals.get("self")).__name__, frame.f_code.co_name
        if (owner, name) == ("ExceptionWrapper", "reraise"):
            return True
        if owner in ("_MapDatasetFetcher", "_IterableDatasetFetcher") and traceback is not None:
            return traceback.tb_frame.f_code.co_name != "__next__"  # in which an iterable dataset may end
    return False


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _dataset_size(loader: Any) -> int | None:
    """Return the number of examples in a pass, if a ``DataLoader`` indexes its dataset."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    return None if dataset is None or isinstance(dataset, IterableDataset) else _length(dataset)


def make_batch(item: Any) -> Batch:
    """Return an item of a loader as a batch; a list, which ``default_collate`` makes, counts as a tuple of columns."""
    if isinstance(item, Batch):
        return item
    columns = tuple(item) if type(item) is list else item
    if (rows := count_rows(columns)) is None:
        column = next(iter(columns.values()), ()) if isinstance(columns, Mapping) else columns  # of strings, say
        rows = len(column) if hasattr(column, "__len__") else 1
    return batch_of_columns(columns, rows)


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
    return [sampler for sampler in samplers if sampler is not None]


def _find_cut(loader: Any) -> str | None:
    """Return what has visibly given each rank its own share of the data, and the remedy."""
    for sampler in _samplers(loader):
        ranks = max(getattr(sampler, "num_replicas", 1) or 1, getattr(sampler, "num_processes", 1) or 1)
        if ranks > 1 or isinstance(sampler, DistributedSampler):
            return f"the {type(sampler).__name__} has already split the data: leave the sampler out"
    cut: Any = getattr(getattr(loader, "dataset", loader), "_distributed", None)
    if getattr(cut, "world_size", 1) > 1:
        return f"split_dataset_by_node has already split the data into {cut.world_size} shares: leave it out"
    return None


def _samples(batch: Batch) -> PythonIterator[bytes]:
    """Yield a sample of the content of a batch as far as it lies on the host."""
    for leaf in itertools.islice(tree_leaves([*batch] if batch.columns is None else batch.columns), _SAMPLED_ARRAYS):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
            flat = leaf.detach().reshape(-1)
            sample = flat[:: -(-len(flat) // _SAMPLED_NUMBERS) or 1].clone().view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            sample = leaf.reshape(-1)[:: -(-leaf.size // _SAMPLED_NUMBERS) or 1].tobytes()
        elif isinstance(leaf, (int, float, str, bytes)):
            yield repr(leaf).encode()
            continue
        else:
            continue
        yield f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        yield sample


def _checksum(batch: Batch) -> int:
    """Return a number that differs if the content of a batch does, as far as it is tensors, arrays and plain values."""
    checksum = 0
    for leaf in tree_leaves([*batch] if batch.columns is None else batch.columns):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            content: Any = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            content = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        else:
            content = repr(leaf).encode() if isinstance(leaf, (int, float, str, bytes)) else b""
        checksum = zlib.crc32(content, checksum)
    return checksum


def _set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader, its samplers and its dataset, if they have it."""
    for target in (loader, *[getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]):
        if callable(set_epoch := getattr(target, "set_epoch", None)):
            set_epoch(epoch)


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a DataLoader and its samplers, which have another state at the start of each pass."""
    generators = [getattr(owner, "generator", None) for owner in (loader, *_samplers(loader))]
    return list({id(item): item for item in generators if isinstance(item, torch.Generator)}.values())


def _may_draw(loader: Any) -> bool:
    """Return whether a loader may draw in this process amid a pass; seeding and restoring takes 70 us a batch."""
    if getattr(loader, "num_workers", 0) == 0:
        return type(loader) not in (list, tuple)
    return not all(type(sampler).__module__.startswith("torch.utils.data") for sampler in _samplers(loader))


@contextmanager
def _seeded(*keys: int) -> Generator[None]:
    with preserve_host_rng():
        seed_host(*keys)
        yield


# --- what the state of a loader of others lacks ---


def _find_state_gap(loader: Any) -> str | None:
    """Return what the own state of a loader lacks to continue a pass bit for bit, if it has one."""
    if not has_state(loader):
        return None
    if getattr(loader, "num_workers", 0) > 0 and not _is_free_of_draws(loader):
        return "the random generators of its workers"
    for part in _parts_of_stream(loader):
        if hasattr(part, "buffer_size"):
            return "the examples in its shuffle buffer"
        function = getattr(part, "function", None)
        if getattr(part, "batched", False) and not str(getattr(function, "__module__", "")).startswith("datasets."):
            return "the position in a batched map, which may draw for many examples at once"
    return None


def _is_free_of_draws(loader: Any) -> bool:
    """Return whether it is known that nothing draws in the workers of a loader."""
    if not str(getattr(loader.collate_fn, "__module__", "")).startswith("torch.utils.data"):
        return False
    dataset = loader.dataset
    is_table = type(dataset).__module__ == "datasets.arrow_dataset" and dataset.format["type"] != "custom"
    return is_table or type(dataset) in (TensorDataset, list, tuple)


def _is_finite_stream(loader: Any) -> bool:
    """Return whether a loader is over a Hugging Face stream that is not repeated for ever."""
    parts = _parts_of_stream(loader)
    return bool(parts) and not any(getattr(part, "num_times", 0) is None for part in parts)


def _parts_of_stream(loader: Any) -> list[Any]:
    """Return the steps of a Hugging Face ``IterableDataset``, the last first; none if the loader is not over one."""
    waiting, parts = [getattr(getattr(loader, "dataset", loader), "_ex_iterable", None)], []
    while waiting:
        if (part := waiting.pop()) is not None:
            parts.append(part)
            waiting += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return parts


def _warn_of_inexact_order(loader: Any) -> None:
    reason = None
    if getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "in_order", True):
        reason = "with in_order=False batches come in the order in which the workers finish; leave it True"
    for part in _parts_of_stream(loader):
        generator: Any = getattr(part, "generator", None)
        seeds: Any = generator.bit_generator.seed_seq if isinstance(generator, np.random.Generator) else None
        entropy = getattr(seeds, "entropy", None)
        if isinstance(entropy, int) and entropy.bit_length() > 64:  # that of the system
            reason = "its stream is shuffled without a seed, in another order each time; write shuffle(seed=...)"
    if reason is not None:
        kind = type(loader).__name__
        warn(f"a run over this {kind} cannot be resumed bit for bit: {reason}")


# --- the worker processes of a DataLoader ---


@contextmanager
def _guard_workers(loader: Any, releases: list[Callable[[], Any]]) -> Generator[None]:
    """Make the workers that a DataLoader starts in this block leave signals to the trainer, and end with the pass.

    To ``releases`` is added what is to be called before they are ended.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        yield
        return
    init_fn, is_persistent = loader.worker_init_fn, loader.persistent_workers
    guard = _WorkerGuard(loader.multiprocessing_context or multiprocessing.get_context(), init_fn)
    # Called by multiprocessing before it waits for its processes: at exit, and in a Process, where atexit is not.
    releases.append(multiprocessing.util.Finalize(None, guard.released.set, exitpriority=20))
    loader.worker_init_fn = guard
    vars(loader)["persistent_workers"] = False  # torch refuses to set the attribute
    try:
        yield
    finally:
        loader.worker_init_fn = init_fn
        vars(loader)["persistent_workers"] = is_persistent


class _WorkerGuard:
    """A ``worker_init_fn`` for workers that ignore SIGINT, and SIGTERM until they are released.

    Released, they obey SIGTERM, by which torch ends workers that are stuck.
    """

    def __init__(self, context: Any, init_fn: Callable[[int], Any] | None) -> None:
        self.released = context.Event()
        self._init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=exit_with_parent, daemon=True).start()
        if self._init_fn is not None:
            self._init_fn(worker_id)

    def _terminate(self, *_: Any) -> None:
        if self.released.is_set() or os.getppid() == 1:
            os._exit(0)
