"""The batches of a loader, pass after pass: what is between an iterator's epochs and the loader itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator as PythonIterator
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from chainring.generators import host_preserved, seed_host
from chainring.iterators import _loaders
from chainring.iterators._loader_workers import Closing, guarded
from chainring.iterators.base import Iterator
from chainring.order import stable_hash
from chainring.serializers.base import has_state


class Place(NamedTuple):
    """Between two batches: ``passes`` were begun, ``taken`` batches of the last came (0: it is over)."""

    passes: int
    taken: int
    generators: dict[str, Any]  # the states of the loader's own generators as that pass began


class PassIterator(Iterator):
    """Fetches from a loader, begins its passes anew and finds a place in them again; a subclass counts the epochs."""

    def __init__(self, loader: Any, epoch_length: int | None, repeat: bool) -> None:
        _loaders.check(loader, epoch_length)
        self.loader = loader
        self.epoch_length = epoch_length
        self.repeat = repeat
        self._count = _loaders.length_of(loader)  # batches in a pass, where the loader tells
        if repeat and self._count == 0:
            raise ValueError(f"repeat=True needs at least one batch, and {type(loader).__name__} has none")
        self._seed: int | None = None
        self._draws_between = _loaders.draws_between(loader)
        self._generators = _loaders.generators_of(loader)
        self._first_state = self._outer_state = self._generator_state()
        self._pass: PythonIterator[Any] | None = None
        self._closing: Closing | None = None
        self._fetched = Place(0, 0, self._first_state)
        self._again: list[tuple[Any, Place]] = []  # what was fetched and is not returned yet
        self._has_ended = False  # there is no other pass
        self._is_spent = False  # a loader of one pass was begun
        self._after_open: dict[str, Any] = {}  # the generators of a resumed run, once the loader has found its place

    def _fetch(self) -> tuple[Any, Place]:
        """The loader's next batch, from another pass where one has ended, and the place after it."""
        if not self.repeat and self.epoch:  # epoch_length batches have come
            self._end_pass()
        begins = self._pass is None
        while not self._has_ended:
            if self._pass is None:
                self._begin()
            try:
                return self._take()
            except StopIteration:
                is_empty = begins and self._fetched.taken == 0
                self._end_pass()
                if self.repeat and not _loaders.is_one_pass(self.loader):
                    if is_empty:
                        raise ValueError(self._says_empty()) from None
                    begins = True
        raise StopIteration

    def _says_empty(self) -> str:
        return (
            f"the loader of iterator {self.name!r} ({type(self.loader).__name__}) gave no batch in a whole pass; "
            "a function must return a fresh iterable each time that it is called"
        )

    def _take(self) -> tuple[Any, Place]:
        item, place = self._next_of_pass()
        self._fetched = place
        if place.taken == self._count and not has_state(self.loader):
            place = self._look_for_end()
        return item, place

    def _next_of_pass(self) -> tuple[Any, Place]:
        assert self._pass is not None
        passes, taken, state = self._fetched
        with self._stream(passes - 1, taken):
            item = next(self._pass)
        return item, Place(passes, taken + 1, state)

    def _look_for_end(self) -> Place:
        """Ends the pass with its last batch, so that a run saved there need not fetch it again to find that out."""
        place = self._fetched
        try:
            item, self._fetched = self._next_of_pass()
        except StopIteration:
            self._end_pass()
            return self._fetched
        self._again.append((item, self._fetched))  # the loader's length was too small
        return place

    def _begin(self) -> None:
        """Begins a pass: a new epoch for what shuffles by epoch, a stream of its own for what draws."""
        number = self._fetched.passes
        if not self.repeat:
            self._outer_state = self._generator_state()
            self._put_generators(self._first_state)
        _loaders.tell_epoch(self.loader, number)
        self._open(number)

    def _open(self, number: int) -> None:
        state = self._generator_state()
        with _seeded(self._known_seed(), number, -1), guarded(self.loader) as closing:
            self._closing = closing
            self._pass = iter(self.loader() if _loaders.is_function(self.loader) else self.loader)
        self._put_generators(self._after_open)
        self._after_open = {}
        self._is_spent = _loaders.is_one_pass(self.loader)
        self._fetched = Place(number + 1, 0, state)

    def _end_pass(self) -> None:
        self._drop_pass()
        self._has_ended = not self.repeat or _loaders.is_one_pass(self.loader)
        self._fetched = Place(self._fetched.passes, 0, self._generator_state())

    def _drop_pass(self) -> None:
        if self._pass is not None and not self.repeat:
            self._put_generators(self._outer_state)
        if self._closing is not None and not self.loader.persistent_workers:
            self._closing.set()
        self._pass = None  # a DataLoader's workers end with its iterator

    def _stream(self, number: int, batch: int) -> AbstractContextManager[None]:
        """Generators seeded for one batch of one pass, put back afterwards; workers have their own."""
        return _seeded(self._known_seed(), number, batch) if self._draws_between else nullcontext()

    def _known_seed(self) -> int:
        if self._seed is None:
            self._seed = stable_hash("loader", self.derived_from(), self.name)
        return self._seed

    def _generator_state(self) -> dict[str, Any]:
        return {str(number): generator.get_state() for number, generator in enumerate(self._generators)}

    def _put_generators(self, state: Mapping[str, Any]) -> None:
        for number, generator in enumerate(self._generators):
            if str(number) in state:
                generator.set_state(state[str(number)])

    def _loader_state(self) -> Any:
        """The loader's own state, where it has one and it is that of the batch last returned."""
        if self._again or not has_state(self.loader):
            return None
        with _seeded(self._known_seed(), self._fetched.passes, -1):  # some begin a pass to tell
            return self.loader.state_dict()

    def _resume_own(self, place: Place, own: Any, generators: dict[str, Any]) -> None:
        passes, taken, state = place
        # A loader finds its place again with other draws than it took the first time (torchdata's does without the seed of
        # its workers), and the next pass would be another one.
        self._after_open = generators if self.repeat else {}
        if taken:
            _loaders.tell_epoch(self.loader, passes - 1)
        with host_preserved():
            self.loader.load_state_dict(own)
        if taken:
            self._open(passes - 1)
        self._fetched = Place(passes, taken, state)

    def _skip(self, taken: int) -> None:
        if type(self.loader) not in (list, tuple):
            warnings.warn(
                f"iterator {self.name!r} fetches {taken} batches again and skips them, to continue in the middle of an "
                f"epoch: {type(self.loader).__name__} has no state_dict. SerialIterator and loaders with a state need not",
                stacklevel=2,
            )
        self._begin()
        for number in range(taken):
            try:
                self._take()
            except StopIteration:
                raise ValueError(
                    f"the saved run had taken {taken} batches of this pass, and the loader of iterator {self.name!r} "
                    f"gives only {number}: resume with the same data and batch size"
                ) from None

    def finalize(self) -> None:
        self._drop_pass()


@contextmanager
def _seeded(*parts: int) -> PythonIterator[None]:
    with host_preserved():
        seed_host(*parts)
        yield
