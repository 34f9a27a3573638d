"""Passes over a source of batches, with seeded draws: how they begin, end, and are taken up again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from collections.abc import Iterator as PythonIterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from chainring._distributed.communicator import Communicator
from chainring._messages import warn
from chainring._random import preserve_host_rng, seed_host, stable_hash
from chainring.iterators._sources import Source, is_from_data
from chainring.iterators.base import Batch, Iterator, make_batch, not_the_end
from chainring.serializers.protocol import has_state


class Position(NamedTuple):
    """A position between two batches."""

    passes: int  # over the loader that were begun
    taken: int  # batches of the last pass that were fetched; 0 if it is over
    generators: dict[str, Any]  # the states of the loader's own generators at the beginning of that pass
    loader_state: Any = None  # the loader's own, and that of its generators: kept if a batch beyond it was fetched
    current_generators: dict[str, Any] | None = None


class Passes:
    """The passes over a source, one after the other.

    Random numbers that the source draws in this process come from a stream that follows from the seed, the pass and the
    batch, and from the rank where each has its own share. Without ``owner.repeat`` the source's own generators are restored
    after each pass.

    Args:
        source: the source.
        owner: the iterator that returns the batches; its name, seed and ranks hold.
        per_rank: True if the source gives each rank its own share.

    Attributes:
        position: the position behind the batch fetched last.
        length: the number of batches in a pass; ``None`` if it is unknown.
        seed: the seed, once it is known.
        shares: of ranks that each have their own share.
        has_ended: True if there is no other pass.
        uses_state: True if a pass is taken up again by the source's own state, and nothing is fetched again.
    """

    def __init__(self, source: Source, owner: Iterator, *, per_rank: bool = False) -> None:
        self._source, self._owner, self._per_rank = source, owner, per_rank
        self._state_lacks = "the last batch of a rank whose share has ended" if per_rank else None
        if self._state_lacks is None and has_state(source.loader):
            self._state_lacks = source.find_state_gap()
        self.uses_state = has_state(source.loader) and self._state_lacks is None
        self.length = source.length
        self.seed: int | None = None
        self.shares: RankShares | None = None
        self.has_ended = False
        self._pass: PythonIterator[Any] | None = None
        self._is_spent = False  # a source of a single pass was begun
        self._releases: list[Callable[[], Any]] = []  # to be called when the pass ends
        self._initial_generators = source.get_generators()
        self._resumed_generators: dict[str, Any] = {}  # for the end of `_open`, which may draw from them
        self.position = Position(0, 0, self._initial_generators)

    @property
    def is_open(self) -> bool:
        return self._pass is not None

    def begin(self) -> None:
        if not self._owner.repeat:
            self._releases.append(partial(self._source.set_generators, self._source.get_generators()))
            self._source.set_generators(self._initial_generators)
        self._source.set_epoch(self.position.passes)
        self._open(self.position.passes)

    def _open(self, number: int) -> None:
        generators = self._source.get_generators()
        with self._seeded(number, -1):
            self._pass = self._source.begin(self._releases)
        self._source.set_generators(self._resumed_generators)
        self._resumed_generators = {}
        self._is_spent = self._source.is_single_pass
        if self.shares is not None:
            self.shares.last_batch = None
        self.position = Position(number + 1, 0, generators)

    def end(self) -> None:
        self.close()
        self.has_ended = not self._owner.repeat or self._source.is_single_pass
        self.position = Position(self.position.passes, 0, self._source.get_generators())

    def close(self) -> None:
        """Release what the pass holds, such as worker processes."""
        while self._releases:
            self._releases.pop()()
        # A DataLoader's workers end with its iterator, to which the traceback of an error may still refer.
        getattr(self._pass, "_shutdown_workers", lambda: None)()
        self._pass = None

    def take(self) -> Batch:
        """Return the next batch of the pass.

        Raises:
            StopIteration: the pass has ended.
            ValueError: ranks that share the batches are given different ones.
        """
        batch = self._fetch() if self.shares is None else self.shares.take(self._fetch)
        passes, taken, generators = self.position[:3]
        comm = self._owner.comm
        if taken == 0 and comm is not None and (not self._per_rank or comm.world.size > comm.size):
            self._check_same_on_all_ranks(batch, comm)
        self.position = Position(passes, taken + 1, generators)
        return batch

    def _fetch(self) -> Batch:
        assert self._pass is not None
        seeded = self._seeded(self.position.passes - 1, self.position.taken) if self._source.may_draw else nullcontext()
        with seeded:
            try:
                item = next(self._pass)
            except StopIteration as error:
                if is_from_data(error, self._pass):
                    raise not_the_end(f"the dataset or a function of the loader of iterator {self._owner.name!r}") from error
                raise
        return make_batch(item)

    @contextmanager
    def _seeded(self, *keys: int) -> Generator[None]:
        rank = [] if self.shares is None else [self._owner.rank]
        with preserve_host_rng():
            seed_host(self.get_seed(), *keys, *rank)
            yield

    def get_seed(self) -> int:
        """Return the seed, which is derived when it is first used."""
        if self.seed is None:
            self.seed = stable_hash("loader", self._owner.base_seed(), self._owner.name)
        return self.seed

    def _check_same_on_all_ranks(self, batch: Batch, comm: Communicator) -> None:
        """Refuse a source that gives other batches to ranks that share them, or that see the same rows.

        Each would take its rows of a part of the data, or compute a part of the model for other examples.
        """
        sums = comm.world.gather_object((comm.rank, _checksum(batch)))
        kind = type(self._source.loader).__name__
        if not self._per_rank and len({checksum for _, checksum in sums}) > 1:
            raise ValueError(
                f"the {len(sums)} ranks share every batch of iterator {self._owner.name!r} by its rows, and its loader "
                f"({kind}) gives them different ones. If it gives each rank its own share, "
                "write LoaderIterator(loader, per_rank=True); otherwise seed what it draws alike on all ranks"
            )
        if len(set(sums)) > comm.size:
            raise ValueError(
                f"ranks that compute one model together see the same rows, and the loader of iterator {self._owner.name!r} "
                f"({kind}) gives them different ones: cut its data by the rank of the communicator, "
                "which is that of the data, and seed what it draws alike on all ranks"
            )

    # --- going elsewhere ---

    def restart(self, passes: int, generators: dict[str, Any] | None) -> None:
        """Let pass number ``passes`` be the next, with the source's own generators in these states, if they are given.

        Raises:
            ValueError: the source gives one pass, which was begun.
        """
        if self._is_spent:
            raise ValueError(
                f"the loader of iterator {self._owner.name!r} ({type(self._source.loader).__name__}) gives one pass, which "
                "was begun, and cannot start again: pass a function that returns a new iterable"
            )
        self.close()
        self._source.set_generators(generators or {})
        self.position = Position(passes, 0, self._source.get_generators())
        self.has_ended = False

    def rewind(self) -> None:
        """Let the next pass be as the first was, after a `restart`."""
        self._source.set_generators(self._initial_generators)

    def describe(self) -> Position:
        """Return the position with all that is to be saved of it."""
        passes, taken, generators = self.position[:3]
        if self._pass is None and taken == 0:
            generators = self._source.get_generators()
        state = self.loader_state()
        return Position(passes, taken, generators, state, self._source.get_generators())  # after the state, which may draw

    def loader_state(self) -> Any:
        """Return the source's own state, if it is used."""
        has_begun = self._pass is not None or self.position.taken > 0
        starts_workers = not has_begun and getattr(self._source.loader, "num_workers", 0) > 0
        if not self.uses_state or starts_workers:
            return None
        with self._seeded(self.position.passes, -1):  # some begin a pass for it
            return self._source.loader.state_dict()

    def get_generators(self) -> dict[str, Any]:
        return self._source.get_generators()

    def resume(self, saved: Position) -> None:
        """Go to a saved position: by the source's own state, or by fetching the batches of the pass again."""
        passes, taken, generators, state, current_generators = saved
        self.close()
        if state is None or not self.uses_state:
            if self._owner.repeat or not taken:
                self._source.set_generators(generators)
            self.position = Position(passes - (taken > 0), 0, generators)
            if taken:
                self._skip(taken)
            return
        # A loader restores its position with other draws than in the saved run (torchdata's draws no seed for its
        # workers), and the next pass would be another one.
        self._resumed_generators = current_generators or {} if self._owner.repeat else {}
        if taken:
            self._source.set_epoch(passes - 1)
        with preserve_host_rng():
            self._source.loader.load_state_dict(state)
        if taken:
            self._open(passes - 1)
        self.position = Position(passes, taken, generators)

    def _skip(self, count: int) -> None:
        kind, name = type(self._source.loader).__name__, self._owner.name
        if type(self._source.loader) not in (list, tuple):
            lacks = self._state_lacks
            why = f"{kind} has no state_dict" if lacks is None else f"the state of {kind} lacks {lacks}"
            warn(
                f"iterator {name!r} fetches {count} batches again and skips them, to resume in the middle of an "
                f"epoch: {why}. SerialIterator and loaders with a state do not need this",
            )
        self.begin()
        for skipped in range(count):
            try:
                if self.shares is None:
                    self._fetch()
                else:
                    self.shares.skip(self._fetch)
            except StopIteration:
                raise ValueError(
                    f"the saved run had taken {count} batches of this pass, and the loader of iterator {name!r} "
                    f"gives only {skipped}: resume with the same data and batch size"
                ) from None
            self.position = Position(self.position.passes, skipped + 1, self.position.generators)


class RankShares:
    """The batches of ranks that each have a share of their own, and end a pass together.

    Attributes:
        last_batch: the last batch of this rank in the pass.
    """

    def __init__(self, owner: Iterator) -> None:
        self._owner = owner
        self.last_batch: Batch | None = None

    def take(self, fetch: Callable[[], Batch]) -> Batch:
        """Return this rank's next batch; if it has none and others have, its last one again with weight 0.

        Raises:
            StopIteration: no rank has another batch.
        """
        name, rank, size, comm = self._owner.name, self._owner.rank, self._owner.size, self._owner.comm
        if comm is None:
            raise ValueError(
                f"with per_rank=True the {size} ranks of iterator {name!r} agree on the end of a pass, for which "
                "they need a communicator: StandardUpdater(..., comm=create_communicator())"
            )
        try:
            batch = self.last_batch = fetch()
            has_ended = False
        except StopIteration:
            has_ended = True
        if not comm.start_max(int(not has_ended))():
            raise StopIteration
        if not has_ended:
            return batch
        if self.last_batch is None:
            raise ValueError(
                f"the loader of iterator {name!r} gave rank {rank} of {size} no batch in a whole pass, and "
                "others have some: give every rank a share, for example by more shards or a smaller batch size"
            )
        batch = self.last_batch[:]
        batch.weight = 0
        return batch

    def skip(self, fetch: Callable[[], Batch]) -> None:
        """Fetch a batch that was taken before. Other ranks are not asked: it is known that one of them had it."""
        try:
            self.last_batch = fetch()
        except StopIteration:
            if self.last_batch is None:
                raise


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
