"""`load`, and the tensors of a snapshot in parts: each is read by one of the ranks, which hands it to those that need it.

The ranks load in program order: all read the same tensors at the same time, each into what it holds of them. In a read every
rank says which regions of them it needs, then which parts of them lie in its files, and who needs some of each; these are
streamed in blocks, and verified on the way. Ranks that read different tensors are an error on all of them. Nothing is ever
unpickled.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator, RankFailed, as_communicator
from chainring._distributed.sharding import (
    Region,
    Shard,
    is_partition,
    is_sharded,
    local_shards,
    region_of,
    shard_like,
)
from chainring._files import is_url
from chainring._messages import info, warn
from chainring._naming import name_cleaner, unwrap
from chainring._places.base import MANIFEST, StoredFile
from chainring.serializers import _safetensors, _values
from chainring.serializers._models import buffer_layouts, restore_layouts
from chainring.serializers._saving import process_rank
from chainring.serializers._store import (
    STATE,
    CorruptError,
    Manifest,
    Place,
    SavedSnapshot,
    explain_absence,
    fetched,
    find_snapshot,
    open_file,
    split,
)
from chainring.serializers._values import StoredTensor, read_stored, without_collections
from chainring.serializers.protocol import (
    DictionaryDeserializer,
    is_module,
    load_entries,
    own_states,
    serialize_method,
    state_entries,
)

if TYPE_CHECKING:
    from chainring.serializers.foreign import ForeignPlan


def load(path: str | os.PathLike[str], obj: Any, path_in_snapshot: str = "", strict: bool = True) -> None:
    """Load a checkpoint into an object, after every byte has been verified.

    Checkpoints of other libraries can be loaded too: into a model its parameters and buffers, into a trainer also the
    states of optimizers and schedulers and the counts, if the checkpoint has them. A summary of what was loaded, and what
    was not, is printed.

    Ranks that train together load a trainer together, and so they do a sharded model from an object store.

    Args:
        path: a file or directory of `save` or of a snapshot; or a checkpoint of Lightning; a directory of Hugging Face's
            ``Trainer``, of ``save_pretrained``, of Accelerate's ``save_state`` or of ``torch.distributed.checkpoint``; a
            snapshot of pytorch-pfn-extras; an npz of Chainer; or a file of ``torch.save`` with one or several state
            dicts. It can also be the address of a snapshot or a file in an object store.
        obj: the object to load into; its shapes must match.
        path_in_snapshot: the part to load, such as ``"updater/model:main/predictor"``; by default, a module gets the only
            model of the snapshot, or the main one.
        strict: True if a missing or unexpected entry is an error; otherwise missing entries stay as they are.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CorruptError: a file is damaged.
        ValueError, TypeError: a checkpoint of a model is loaded into a trainer, or the snapshot has no such part.
        KeyError, RuntimeError: entries are missing, unexpected, or have another shape.
        RankFailed: another rank of the trainer's ``comm`` could not load it.
    """
    snapshot = find_snapshot(path)
    comm = _find_communicator(obj, snapshot)
    if snapshot.is_local or not snapshot.exists():
        plan = _plan_together(comm.world, path, obj, path_in_snapshot, strict)
        if plan is not None:
            report = plan.apply()
            if comm.is_main if comm.world.size > 1 else process_rank() == 0:
                info(report)
            return
        if not snapshot.is_local or not Path(path).is_dir():
            tensors = _read_file(path, Communicator() if snapshot.is_local else comm)
            _load_file(path, tensors, obj, path_in_snapshot, strict)
            return
    load_snapshot(snapshot, obj, comm, path_in_snapshot, strict)


def _read_file(source: Place, comm: Communicator) -> dict[str, Tensor]:
    """Return the tensors of the file of a model, which the first of the ranks reads for all."""
    found: dict[str, Tensor] | None = None
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            found = _safetensors.read(open_file(source))
        except (OSError, ValueError) as error:
            failure = error
    found, failure = comm.broadcast_object((found, failure))
    if found is None:
        assert failure is not None
        raise failure
    return found


def _find_communicator(obj: Any, snapshot: SavedSnapshot) -> Communicator:
    """Return the ranks that load an object together; of a model alone those that hold it, if it is far to the snapshot."""
    if snapshot.is_local or not is_module(obj):
        return as_communicator(getattr(obj, "comm", Communicator()))
    from chainring._distributed.gathering import holders_of

    return as_communicator(getattr(obj, "comm", holders_of(state_entries(obj).values())))


def _load_file(source: Place, tensors: dict[str, Tensor], obj: Any, path_in_snapshot: str, strict: bool) -> None:
    """Load the file of a model."""
    if not is_module(obj):
        raise TypeError(
            f"{source} holds a model, and a {type(obj).__name__} is loaded from a snapshot directory; load a model by "
            "load(path, model)"
        )
    if path_in_snapshot:
        prefix = f"{path_in_snapshot.strip('/').replace('/', '.')}."
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    _load_entries(obj, tensors, strict)
    if parts := own_states(unwrap(obj)):
        paths = ", ".join(f"{type(part).__name__} at {path!r}" for path, part in parts)
        warn(
            f"{source} contains only parameters and buffers: the state that serialize of {paths} declares stays as it is. "
            "serializers.save(path, model) writes a directory with both",
        )


def _plan_together(comm: Communicator, source: Place, obj: Any, path: str, strict: bool) -> ForeignPlan | None:
    """Return how a checkpoint of another library is loaded by all ranks, ``None`` if it is none for any of them.

    Raises:
        RankFailed: another rank cannot load it.
        ValueError: rank 0 has read something else.
    """
    plan, failure, content = None, None, None
    try:
        plan = _plan_foreign(source, obj, path, strict)
        content = None if plan is None or comm.size == 1 else plan.fingerprint()
    except Exception as error:
        failure = error
    answers = comm.gather_object((failure and f"{type(failure).__name__}: {failure}", content))
    if failure is not None:
        raise failure
    for rank, (reason, found) in enumerate(answers):
        if reason is not None:
            raise RankFailed(f"{source} could not be loaded by rank {rank}: {reason}")
        if found != answers[0][1]:
            raise ValueError(f"{source} is not the same on rank {rank} as on rank 0: give all ranks the same checkpoint")
    return plan


def _plan_foreign(place: Place, obj: Any, path: str, strict: bool) -> ForeignPlan | None:
    """Return how a checkpoint of another library is loaded; ``None`` for what `save` wrote."""
    if is_url(place):
        return _plan_object(os.fspath(place), obj, path, strict)
    source = Path(place)
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}; give the path of a snapshot directory, or of a model's file")
    if (source / MANIFEST).exists() or (source.is_file() and not _safetensors.is_pickle(open_file(source))):
        return None
    from chainring.serializers.foreign import plan_loading  # which few programs need

    plan = plan_loading(source, obj, path, strict)
    if plan is None and source.is_file():
        raise ValueError(
            f"{source} is a file such as torch.save or NumPy write, which is not opened, because a pickle can run code; "
            "read it by torch.load(path, weights_only=True) and model.load_state_dict, an npz by serializers.load_npz"
        )
    return plan


def _plan_object(url: str, obj: Any, path: str, strict: bool) -> ForeignPlan | None:
    """Return how an object of another library is loaded, which is copied to the disk; see `_plan_foreign`."""
    try:
        file = open_file(url)
    except FileNotFoundError:
        raise explain_absence(url) from None
    if find_snapshot(url).name != split(url)[1]:  # a link, and to nothing
        raise explain_absence(url)
    if not _safetensors.is_pickle(file):
        return None
    with fetched(file) as copy:
        return _plan_foreign(copy, obj, path, strict)


def load_snapshot(
    source: SavedSnapshot, obj: Any, comm: Communicator, path_in_snapshot: str = "", strict: bool = True
) -> None:
    """Load a snapshot into an object by all ranks of a communicator together, see `load`.

    Each part is read and verified by one of them. Where there are several, and where the snapshot lies in an object store,
    what is damaged may show only when some of the object has been filled.
    """
    with without_collections(), StoredTensors(source, STATE, comm.world) as stored:
        state = _values.decode(stored.text, stored.tensors)
        _load_state(state, obj, path_in_snapshot, strict, source, stored)


def _load_entries(module: Any, tensors: Mapping[str, Any], strict: bool) -> None:
    """Load parameters and buffers by their dotted names into a module, whose own may stand below prefixes of wrappers."""
    entries, clean = state_entries(module), name_cleaner(module)
    names = {clean(name): name for name in entries}
    found = {names.get(name, name): value for name, value in tensors.items()}
    load_entries(module, {name: shard_like(value, entries.get(name)) for name, value in found.items()}, strict)


def read_state(source: SavedSnapshot | Place) -> dict[str, Any]:
    """Return the flat state in a snapshot, verified and with all of its tensors; raise as `opened_state` does."""
    with opened_state(source if isinstance(source, SavedSnapshot) else find_snapshot(source)) as state:
        return read_stored(state)  # type: ignore[no-any-return]


@contextmanager
def opened_state(source: SavedSnapshot) -> Iterator[dict[str, Any]]:
    """Open a snapshot for one process: its flat state, in which `read_stored` reads large tensors during the block.

    Of a snapshot on a disk every byte is verified first, elsewhere what is read.

    Raises:
        CorruptError: it is not what was written.
    """
    with StoredTensors(source, STATE, Communicator()) as stored:
        yield _values.decode(stored.text, stored.tensors)


def _load_state(
    state: dict[str, Any], obj: Any, path: str, strict: bool, source: SavedSnapshot, stored: StoredTensors
) -> None:
    if path or is_module(obj):
        prefix = f"{path.strip('/')}/" if path else model_prefix(state, source)
        if is_module(obj) and prefix.startswith(_MODEL):
            _restore_layouts(unwrap(obj), state, prefix)
        state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if prefix and not state:
            raise ValueError(f"{source} has nothing under {prefix!r}; `chainring inspect` lists what it has")
    if not is_module(obj) and serialize_method(obj) is None and "state_dict" not in state:
        raise ValueError(f"{source} does not hold a {type(obj).__name__}; `chainring inspect` lists what it has")
    saved = DictionaryDeserializer(state, strict)
    saved.place, saved.origin = source.place, stored
    saved.directory = None if is_module(obj) else source.folder_beside(stored.manifest)
    saved.comm = as_communicator(getattr(obj, "comm", saved.comm))
    saved.visit("", unwrap(obj))


def _restore_layouts(module: Any, state: Mapping[str, Any], prefix: str) -> None:
    """Give a model, or a part of one, the buffers whose form the saved run has changed."""
    name, _, below = prefix.removeprefix(_MODEL).partition("/")
    changed = state.get(f"updater/changed_buffers:{name}", {})
    recorded = {path.removeprefix(below): layouts for path, layouts in changed.items() if path.startswith(below)}
    if recorded:
        restore_layouts(module, buffer_layouts(module), recorded, lambda path: read_stored(state.get(prefix + path)))


def model_prefix(state: Mapping[str, Any], source: object) -> str:
    """Return the prefix of the only model in a snapshot, or of the main one; an empty one where there is no model.

    Raises:
        ValueError: there are several, and none is the main one.
    """
    names = sorted({key.removeprefix(_MODEL).partition("/")[0] for key in state if key.startswith(_MODEL)})
    if len(names) > 1 and "main" not in names:
        raise ValueError(f"{source} has the models {names}; name one by path_in_snapshot, such as {_MODEL + names[0]!r}")
    return f"{_MODEL}{'main' if 'main' in names else names[0]}/" if names else ""


_MODEL = "updater/model:"
T = TypeVar("T")
Request = Mapping[str, list[Region]]
"""By the names of the tensors that are read, the regions of them that a rank needs."""

_SMALL = 1 << 13  # bytes of a tensor that every rank gets at once
_BLOCK = 1 << 20  # bytes that a rank reads, sends, or receives at once
_ROUND = 64  # tensors that are read at once


class _Part(NamedTuple):
    """A part of a tensor that this rank reads."""

    file: StoredFile
    start: int  # its first byte there
    region: Region
    crc: int | None  # None where the file was verified as a whole


class _Described(NamedTuple):
    """What all ranks know of a part, and of the tensor to which it belongs."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    region: Region
    strides: Sequence[int] | None
    content: bytes | None  # of a small tensor
    same_as: str | None  # the tensor that is stored in its place


class _Offer(NamedTuple):
    """A part of a tensor that a rank has, and the ranks that need some of it."""

    region: Region
    ranks: set[int]


class _Block(NamedTuple):
    """A box of a part whose elements follow each other in the file."""

    name: str
    number: int  # of the part, among those that its rank has of the tensor
    region: Region  # of the tensor


class StoredTensors:
    """The tensors of a snapshot by their names, and what else is in it.

    All ranks of ``comm`` make one at the same time, and use it as a context for what they load.

    Raises:
        CorruptError: the snapshot is not what was written, or cannot be read, as far as that shows before its tensors are
            read. A communicator of one reads and verifies all of it first.

    Attributes:
        manifest: that of the snapshot.
        text: the content of the file of everything but tensors.
        tensors: the tensors, those that are not small as `StoredTensor`.
    """

    def __init__(self, source: SavedSnapshot, state: str, comm: Communicator) -> None:
        self._source, self._comm, self._has_ended = source, comm, False
        # One rank verifies all of a snapshot on its disk before anything is filled; of one that is far away each byte is
        # read once, and verified on the way.
        self._is_verified = source.is_local and comm.size == 1
        looked = self._on_all(lambda: self._look(state) if comm.rank == 0 else None)[0]
        assert looked is not None
        self.manifest, self.text = looked
        self._parts: dict[str, list[_Part]] = {}
        self.tensors = self._assemble(list(itertools.chain.from_iterable(self._on_all(self._open))))

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.conclude()
        elif not self._has_ended:
            self._agree(None, f"{type(error).__name__}: {error}")

    def read(self, targets: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Read each of these tensors into one of its shape and dtype, of which only the shards of this rank are filled.

        Raises:
            CorruptError: on all ranks, that a part is not what was written; then some may have been filled.
            RankFailed: another rank has failed.
            ValueError: another rank reads other tensors.
        """
        wanted: dict[str, list[Shard]] = {}
        for stored, target in targets:
            wanted.setdefault(stored.name, []).extend(_shards_of(target.detach()))
        names = list(wanted)
        for start in range(0, len(names), _ROUND):
            requests = self._agree({name: list(map(region_of, wanted[name])) for name in names[start : start + _ROUND]})
            offers = self._gather(self._offer(requests))
            dtypes = {name: self.tensors[name].dtype for name in requests[0]}
            stream = _Stream(self._comm, self._parts, dtypes, requests, offers, wanted)
            try:
                stream.run()
            except BaseException:
                self._has_ended = True
                raise
            self._on_all(stream.check)

    def conclude(self) -> None:
        """Wait until all ranks have read what they read so far; raise as `read` does where one has failed."""
        self._agree(None)

    def _agree(self, request: Request | None, failure: str | None = None) -> list[Request]:
        """Return what all ranks read now, which must be the same tensors; none where they conclude."""
        answers = self._gather((request or {}, failure))
        if failures := [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(answers) if reason]:
            self._has_ended = True
            if failure is None:
                raise RankFailed(f"the snapshot {self._source} could not be loaded by {failures[0]}")
        requests: list[Request] = [request for request, _ in answers]
        for rank, other in enumerate(requests if failure is None else ()):
            if list(other) != list(requests[0]):
                self._has_ended = True
                pairs = itertools.zip_longest(requests[0], other, fillvalue="nothing")
                ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"ranks load the same state in the same order, and of {self._source} rank 0 reads {ours}, rank {rank} "
                    f"{theirs}: let all ranks ask for it in serialize, and extend the trainer alike"
                )
        return requests

    def _gather(self, value: T) -> list[T]:
        try:
            return self._comm.gather_object(value)
        except BaseException:
            self._has_ended = True
            raise

    def _on_all(self, call: Callable[[], T]) -> list[T]:
        """Return the results of a call on all ranks, or raise on all the error of one."""
        result, failure = None, None
        try:
            result = call()
        except (ValueError, OSError) as error:
            is_told = isinstance(error, CorruptError)
            failure = error if is_told else CorruptError(f"{self._source} cannot be read: {error}")
        answers: list[Any] = self._gather((result, failure))
        for _, failure in answers:
            if failure is not None:
                raise failure
        return [result for result, _ in answers]

    def _look(self, state: str) -> tuple[Manifest, bytes]:
        manifest = self._source.verify(content=self._is_verified)
        if state not in manifest.files:
            raise CorruptError(f"{self._source} has no {state}")
        text = self._source.open(state, manifest).read_all()
        if zlib.crc32(text) != manifest.files[state][1]:
            raise CorruptError(f"{self._source}/{state} has other bytes than were written")
        return manifest, text

    def _open(self) -> list[_Described]:
        """Open the files that this rank reads, or reads some of; return what it reads of each tensor.

        A file is read by the rank that wrote it, where there are as many as then. Small tensors are read at once.
        """
        rank, size = self._comm.rank, self._comm.size
        names = sorted(name for name in self.manifest.files if name.endswith(".safetensors"))
        described = []
        for number, path in enumerate(names):
            readers = [reader for reader in range(size) if reader * len(names) // size == number]
            readers = readers if len(names) < size else [number * size // len(names)]
            if rank not in readers:
                continue
            file = self._source.open(path, self.manifest)
            header, stored = _safetensors.read_header(file)
            text, count = self.manifest.parts.get(path, ""), 1 + len({entry.part for entry in stored.values()})
            crcs = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
            if not self._is_verified and (len(crcs) != count or crcs[0] != zlib.crc32(header)):
                raise CorruptError(f"{file.path} has other bytes than were written")
            mine = _share(stored, readers.index(rank), len(readers))
            for key, entry in stored.items():
                if entry.part not in mine:
                    continue
                name, start, length = key.partition("\0")[0], entry.span[0], entry.span[1] - entry.span[0]
                offsets, shape = entry.offsets or ((0,) * len(entry.shape), entry.shape)
                part = _Part(file, start, (tuple(offsets), entry.shape), None if self._is_verified else crcs[entry.part])
                self._parts.setdefault(name, []).append(part)
                content = None
                if entry.shape == tuple(shape) and self._source.is_local and length <= _SMALL:  # elsewhere by requests
                    content = bytes(file.read(start, length).numpy())
                    if part.crc is not None and zlib.crc32(content) != part.crc:
                        raise CorruptError(f"{file.path} has other bytes than were written")
                strides = None if entry.offsets else entry.strides
                same_as = entry.same_as and entry.same_as.partition("\0")[0]
                described.append(_Described(name, entry.dtype, tuple(shape), part.region, strides, content, same_as))
        return described

    def _assemble(self, described: Iterable[_Described]) -> dict[str, Tensor | StoredTensor]:
        """Return the tensors that the parts of all ranks make up; those that are one in all files are one value."""
        parts: dict[str, list[_Described]] = {}
        for part in described:
            parts.setdefault(part.name, []).append(part)
        tensors: dict[str, Tensor | StoredTensor] = {}
        sound: set[Any] = set()
        for name, (first, *others) in sorted(parts.items()):
            layout = first.shape, tuple(part.region for part in parts[name])
            if any((part.dtype, part.shape) != (first.dtype, first.shape) for part in others) or (
                layout not in sound and not is_partition(*layout)  # first: a shape alone could ask for any memory
            ):
                raise CorruptError(
                    f"the shards of {name!r} do not make one tensor of shape {list(first.shape)}; use another snapshot"
                )
            sound.add(layout)
            if first.content is None:
                tensors[name] = StoredTensor(name, first.dtype, first.shape, first.strides, self)
            else:
                content = torch.tensor(np.frombuffer(first.content, np.uint8))
                tensors[name] = _safetensors.to_tensor(content, first.dtype, first.shape, first.strides)
        sources = {name: {part.same_as for part in parts[name]} for name in parts}
        tied = {name: source for name, (source, *others) in sources.items() if source in tensors and not others}
        return tensors | {name: tensors[source] for name, source in tied.items() if source is not None}

    def _offer(self, requests: Sequence[Request]) -> dict[str, list[_Offer]]:
        """Return the parts of the requested tensors that this rank has, in the order in which they lie in its files."""

        def needs(part: _Part, regions: list[Region]) -> bool:
            return any(_overlap(part.region, region) for region in regions)

        def start_of(name: str) -> tuple[str, int]:
            return self._parts[name][0].file.path, self._parts[name][0].start

        names = sorted(requests[0].keys() & self._parts.keys(), key=start_of)
        return {
            name: [
                _Offer(part.region, {rank for rank, request in enumerate(requests) if needs(part, request[name])})
                for part in self._parts[name]
            ]
            for name in names
        }


class _Stream:
    """A read in which parts of tensors are read in blocks, and handed to the ranks that need them."""

    def __init__(
        self,
        comm: Communicator,
        parts: Mapping[str, list[_Part]],
        dtypes: Mapping[str, torch.dtype],
        requests: Sequence[Request],
        offers: Sequence[Mapping[str, list[_Offer]]],
        wanted: Mapping[str, list[Shard]],
    ) -> None:
        self._comm, self._parts, self._dtypes, self._wanted = comm, parts, dtypes, wanted
        self._requests, self._offers = requests, offers
        self._crcs: dict[tuple[str, int], int] = {}
        self._ends = self._row_ends()  # by file and first byte of a part, where those end that are read one after the other
        self._failure: CorruptError | None = None

    def check(self) -> None:
        """Raise what was found wrong in the parts that this rank has read."""
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        """Fill what is wanted here, and what the other ranks want of the parts here."""
        limit = max(_BLOCK // self._comm.size, 1 << 18)
        plans = [list(self._steps(rank, limit, is_shared=True)) for rank in range(self._comm.size)]
        for step in itertools.zip_longest(*plans, fillvalue=()):
            self._exchange(step)
        for blocks in self._steps(self._comm.rank, _BLOCK, is_shared=False):
            for block in blocks:
                self._fill(block, self._read(block))

    def _row_ends(self) -> dict[tuple[str, int], int]:
        own, extents = self._comm.rank, []
        for name, offers in self._offers[own].items():
            for part, offer in zip(self._parts[name], offers, strict=True):
                if offer.ranks:  # what others need comes first
                    end = part.start + math.prod(part.region[1]) * self._dtypes[name].itemsize
                    extents.append((offer.ranks != {own}, part.file.path, part.start, end))
        rows: dict[tuple[bool, str, int], int] = {}
        for is_shared, path, start, end in sorted(extents, reverse=True):
            rows[is_shared, path, start] = rows.get((is_shared, path, end), end)
        return {(path, start): end for (_, path, start), end in rows.items()}

    def _steps(self, rank: int, limit: int, *, is_shared: bool) -> Iterator[list[_Block]]:
        """Yield blocks of the parts of a rank that others need, or those that it alone needs, a few at a time."""
        step: list[_Block] = []
        size = 0
        for name, offers in self._offers[rank].items():
            itemsize = self._dtypes[name].itemsize
            for number, (region, ranks) in enumerate(offers):
                if not ranks or (ranks != {rank}) != is_shared:
                    continue
                for box in _boxes(region[1], limit // itemsize):
                    offsets = tuple(start + offset for start, offset in zip(region[0], box[0], strict=True))
                    if step and size + math.prod(box[1]) * itemsize > limit:
                        yield step
                        step, size = [], 0
                    step.append(_Block(name, number, (offsets, box[1])))
                    size += math.prod(box[1]) * itemsize
        if step:
            yield step

    def _exchange(self, blocks: Sequence[Sequence[_Block]]) -> None:
        """Send the blocks of this rank to those that need them, and take those of the others, rank by rank."""
        own = self._comm.rank
        sent: list[list[Tensor]] = [[] for _ in blocks]
        for block in blocks[own]:
            content = self._read(block)
            self._fill(block, content)
            for rank, request in enumerate(self._requests):
                overlaps = [_overlap(block.region, region) for region in request[block.name] if rank != own]
                sent[rank] += [_bytes(content[_within(block.region, overlap)]) for overlap in overlaps if overlap]
        coming = [
            [target for block in of_rank if rank != own for _, target in self._targets(block)]
            for rank, of_rank in enumerate(blocks)
        ]
        sizes = [sum(target.numel() * target.itemsize for target in targets) for targets in coming]
        wait = self._comm.start_all_to_all([_joined(pieces).to(self._comm.device) for pieces in sent], sizes)
        sent.clear()
        for content, targets in zip(wait(), coming, strict=True):
            pieces = torch.split(content.cpu(), [target.numel() * target.itemsize for target in targets])
            for piece, target in zip(pieces, targets, strict=True):
                target[...] = piece.clone().view(target.dtype).reshape(target.shape)  # aligned by the copy

    def _targets(self, block: _Block) -> Iterator[tuple[Region, Tensor]]:
        """Yield the regions of a block that are wanted here, in the order of the request, each with the tensor to fill."""
        for shard in self._wanted.get(block.name, ()):
            if overlap := _overlap(block.region, region_of(shard)):
                yield overlap, shard.tensor[_within(region_of(shard), overlap)]

    def _fill(self, block: _Block, content: Tensor) -> None:
        for overlap, target in self._targets(block):
            target[...] = content[_within(block.region, overlap)]

    def _read(self, block: _Block) -> Tensor:
        """Return the content of a block of a part, of which the blocks before it were read before."""
        part, dtype = self._parts[block.name][block.number], self._dtypes[block.name]
        first = _row_major_index(block.region, part.region) * dtype.itemsize
        size, whole = (math.prod(region[1]) * dtype.itemsize for region in (block.region, part.region))
        content = torch.empty(size, dtype=torch.uint8)
        try:
            content = part.file.read(part.start + first, size, self._ends[part.file.path, part.start])
        except OSError as error:
            self._failure = self._failure or CorruptError(f"{part.file.path} cannot be read: {error}")
        key = block.name, block.number
        self._crcs[key] = crc = zlib.crc32(memoryview(content.numpy()), self._crcs.get(key, 0))  # type: ignore[arg-type]
        if first + size == whole and part.crc not in (crc, None):
            self._failure = self._failure or CorruptError(
                f"{part.file.path} has other bytes of {key[0]!r} than were written"
            )
        return content.view(dtype).reshape(block.region[1])


def _share(stored: Mapping[str, _safetensors.Stored], position: int, count: int) -> set[int]:
    """Return the parts of a file that one of ``count`` ranks reads; each reads as many bytes as the others."""
    read, mine = [0] * count, set()
    for part, (start, end) in sorted({entry.part: entry.span for entry in stored.values()}.items()):
        reader = min(range(count), key=read.__getitem__)
        read[reader] += end - start
        if reader == position:
            mine.add(part)
    return mine


def _shards_of(tensor: Tensor) -> list[Shard]:
    if is_sharded(tensor):
        return local_shards(tensor)
    return [Shard(tensor, (0,) * tensor.ndim, tuple(tensor.shape))]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)


def _overlap(first: Region, second: Region) -> Region | None:
    """Return the region that two have in common, if it has elements."""
    starts = tuple(map(max, first[0], second[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True)]
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _within(outer: Region, inner: Region) -> tuple[slice, ...]:
    """Return the index of a region in the tensor of a region around it."""
    starts = [start - origin for start, origin in zip(inner[0], outer[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner[1], strict=True))


def _row_major_index(inner: Region, outer: Region) -> int:
    """Return the number of the first element of a region among those of the region around it."""
    index = 0
    for start, origin, size in zip(inner[0], *outer, strict=True):
        index = index * size + start - origin
    return index


def _boxes(sizes: Sequence[int], limit: int) -> Iterator[Region]:
    """Yield boxes in row-major order that make up one of ``sizes``, each of at most ``limit`` elements that lie together."""
    inner = math.prod(sizes[1:])
    if math.prod(sizes) <= limit:
        yield (0,) * len(sizes), tuple(sizes)
    elif inner > limit:
        for row in range(sizes[0]):
            yield from (((row, *offsets), (1, *box)) for offsets, box in _boxes(sizes[1:], limit))
    else:
        rows = limit // inner
        for start in range(0, sizes[0], rows):
            yield (start, *(0 for _ in sizes[1:])), (min(rows, sizes[0] - start), *sizes[1:])
