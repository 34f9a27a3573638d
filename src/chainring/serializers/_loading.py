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
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator, RankFailed, as_communicator
from chainring._distributed.sharding import Region, Shard, is_partition, is_sharded, local_shards, region_of, shard_like
from chainring._files import below_home, is_url
from chainring._messages import info, warn
from chainring._places.base import MANIFEST, StoredFile
from chainring.serializers import _safetensors, _values
from chainring.serializers._models import buffer_layouts, restore_layouts
from chainring.serializers._saving import BY_RANK, process_rank
from chainring.serializers._store import (
    STATE,
    CorruptError,
    Manifest,
    Place,
    SavedSnapshot,
    explain_absence,
    find_snapshot,
    open_file,
    split,
)
from chainring.serializers._values import StoredTensor, read_stored
from chainring.serializers.protocol import (
    DictionaryDeserializer,
    announce_change,
    is_module,
    load_entries,
    name_cleaner,
    own_states,
    serialize_method,
    state_entries,
    unwrap,
    without_collections,
)

if TYPE_CHECKING:
    from chainring.serializers.foreign import ForeignPlan

_MODEL = "updater/model:"
_SMALL = 1 << 13  # bytes of a tensor that every rank gets at once
_BLOCK = 1 << 20  # bytes that a rank reads, sends, or receives at once
_ROUND = 64  # tensors that are read at once
T = TypeVar("T")


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
    path = below_home(path) if str(path).startswith("~") else path
    snapshot = find_snapshot(path)
    comm = as_communicator(getattr(obj, "comm", Communicator()))
    if is_module(obj) and not snapshot.is_local and not hasattr(obj, "comm"):  # those that hold it read what is far away
        from chainring._distributed.gathering import holders_of  # which few programs need

        comm = holders_of(state_entries(obj).values())
    if snapshot.is_local or not snapshot.exists():
        plan, failure, content = None, None, None
        try:
            is_near = os.path.exists(os.path.join(path, MANIFEST))  # a snapshot, of which nothing is planned
            plan = None if is_near else _plan_foreign(path, obj, path_in_snapshot, strict)
            content = None if plan is None or comm.world.size == 1 else plan.fingerprint()
        except Exception as error:
            failure = error
        answers = comm.world.gather_object((failure and f"{type(failure).__name__}: {failure}", content))
        if failure is not None:
            raise failure
        for rank, (reason, fingerprint) in enumerate(answers):
            if reason is not None:
                raise RankFailed(f"{path} could not be loaded by rank {rank}: {reason}")
            if fingerprint != answers[0][1]:
                raise ValueError(f"{path} is not the same on rank {rank} as on rank 0: give all ranks the same checkpoint")
        if plan is not None:
            report = plan.apply()
            if comm.is_main if comm.world.size > 1 else process_rank() == 0:
                info(report)
            return
        if not snapshot.is_local or not Path(path).is_dir():
            _load_file(path, obj, path_in_snapshot, strict, Communicator() if snapshot.is_local else comm)
            return
    load_snapshot(snapshot, obj, comm, path_in_snapshot, strict)


def _plan_foreign(place: Place, obj: Any, path: str, strict: bool) -> ForeignPlan | None:
    """Return how a checkpoint of another library is loaded; ``None`` for what `save` wrote."""
    if is_url(place):
        try:
            file = open_file(place)
        except FileNotFoundError:
            raise explain_absence(place) from None
        if find_snapshot(place).name != split(place)[1]:  # a link, and to nothing
            raise explain_absence(place)
        if not _safetensors.is_pickle(file):
            return None
        with tempfile.TemporaryDirectory(prefix="chainring-") as folder:
            copy = Path(folder, file.path.rpartition("/")[2])
            file.copy_to(copy)
            try:
                return _plan_foreign(copy, obj, path, strict)
            except Exception as error:
                error.add_note(f"{copy} was a copy of {file.path}")
                raise
    source = Path(place)
    if not source.exists():
        raise explain_absence(source)
    if source.is_file() and not _safetensors.is_pickle(open_file(source)):
        return None
    from chainring.serializers.foreign import plan_loading  # which few programs need

    plan = plan_loading(source, obj, path, strict)
    if plan is None and source.is_file():
        raise ValueError(
            f"{source} is a file such as torch.save or NumPy write, which is not opened, because a pickle can run code; "
            "read it by torch.load(path, weights_only=True) and model.load_state_dict, an npz by serializers.load_npz"
        )
    return plan


def _load_file(source: Place, obj: Any, path: str, strict: bool, comm: Communicator) -> None:
    """Load the file of a model, which the first of the ranks reads for all."""
    tensors: dict[str, Tensor] = {}
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            tensors = _safetensors.read(open_file(source))
        except (OSError, ValueError) as error:
            failure = error
    tensors, failure = comm.broadcast_object((tensors, failure))
    if failure is not None:
        raise failure
    if not is_module(obj):
        raise TypeError(
            f"{source} holds a model, and a {type(obj).__name__} is loaded from a snapshot directory; load a model by "
            "load(path, model)"
        )
    if path:
        prefix = f"{path.strip('/').replace('/', '.')}."
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    entries, clean = state_entries(obj), name_cleaner(obj)
    names = {clean(name): name for name in entries}  # its own may stand below prefixes of wrappers
    renamed = {names.get(name, name): value for name, value in tensors.items()}
    load_entries(obj, {name: shard_like(value, entries.get(name)) for name, value in renamed.items()}, strict)
    if parts := own_states(unwrap(obj)):
        paths = ", ".join(f"{type(part).__name__} at {path!r}" for path, part in parts)
        warn(
            f"{source} contains only parameters and buffers: the state that serialize of {paths} declares stays as it is. "
            "serializers.save(path, model) writes a directory with both",
        )


def load_snapshot(
    source: SavedSnapshot, obj: Any, comm: Communicator, path_in_snapshot: str = "", strict: bool = True
) -> None:
    """Load a snapshot into an object by all ranks of a communicator together, see `load`.

    Each part is read and verified by one of them. Where there are several, and where the snapshot lies in an object store,
    what is damaged may show only when some of the object has been filled.
    """
    with without_collections(), StoredTensors(source, comm.world) as stored:
        state = whole = _values.decode(stored.text, stored.tensors)
        ranks, is_model = as_communicator(getattr(obj, "comm", Communicator())), is_module(obj)
        if (size := whole.get(f"{BY_RANK}size")) is not None:
            kept = choose_rank(whole, ranks)
            if kept and not path_in_snapshot and not is_model and ranks.is_main:
                consequence = f"all continue with the state of rank 0 where ranks had their own: {', '.join(kept)}"
                announce_change("number of ranks", size, ranks.size, consequence)
        if path_in_snapshot or is_model:
            prefix = f"{path_in_snapshot.strip('/')}/" if path_in_snapshot else model_prefix(state, source)
            name, _, below = prefix.removeprefix(_MODEL).partition("/")
            changed = state.get(f"updater/changed_buffers:{name}", {}) if prefix.startswith(_MODEL) else {}
            recorded = {path.removeprefix(below): layouts for path, layouts in changed.items() if path.startswith(below)}
            if is_model and recorded:
                module = unwrap(obj)
                restore_layouts(module, buffer_layouts(module), recorded, lambda path: read_stored(whole.get(prefix + path)))
            state = {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}
            if prefix and not state:
                raise ValueError(f"{source} has nothing under {prefix!r}; `chainring inspect` lists what it has")
        if not is_model and serialize_method(obj) is None and "state_dict" not in state:
            raise ValueError(f"{source} does not hold a {type(obj).__name__}; `chainring inspect` lists what it has")
        saved = DictionaryDeserializer(state, strict)
        saved.place, saved.origin = source.place, stored
        saved.directory = None if is_model else source.files.folder_beside(source.key, stored.manifest.beside)
        saved.comm = ranks
        saved.visit("", unwrap(obj))


def choose_rank(state: dict[str, Any], comm: Communicator) -> list[str]:
    """Put what this rank has saved in place of that of rank 0; return the paths that stay, as there were other ranks."""
    size = state[f"{BY_RANK}size"]
    saved = {key: value for key, value in state.items() if key.startswith(BY_RANK)}
    pairs = [(key, *key.removeprefix(BY_RANK).partition("/")[::2]) for key in saved]
    if size != comm.size:
        return sorted({path for _, _, path in pairs if path})
    # All ranks read all of it, because they have to read alike.
    read = read_stored(saved | {path: state[path] for _, _, path in pairs if path in state})
    state |= {path: read[path] for _, _, path in pairs if path in state}
    state |= {path: read[key] for key, rank, path in pairs if rank == str(comm.rank)}
    return []


def model_prefix(state: Mapping[str, Any], source: object) -> str:
    """Return the prefix of the only model in a snapshot, or of the main one; an empty one where there is no model."""
    names = sorted({key.removeprefix(_MODEL).partition("/")[0] for key in state if key.startswith(_MODEL)})
    if len(names) > 1 and "main" not in names:
        raise ValueError(f"{source} has the models {names}; name one by path_in_snapshot, such as {_MODEL + names[0]!r}")
    return f"{_MODEL}{'main' if 'main' in names else names[0]}/" if names else ""


def read_state(source: SavedSnapshot | Place) -> dict[str, Any]:
    """Return the flat state in a snapshot, verified and with all of its tensors; raise as `opened_state` does."""
    with opened_state(source if isinstance(source, SavedSnapshot) else find_snapshot(source)) as state:
        return read_stored(state)  # type: ignore[no-any-return]


@contextmanager
def opened_state(source: SavedSnapshot) -> Iterator[dict[str, Any]]:
    """Open a snapshot for one process: its flat state, in which `read_stored` reads large tensors during the block.

    Of a snapshot on a disk every byte is verified first, elsewhere what is read; a `CorruptError` if it is another.
    """
    with StoredTensors(source, Communicator()) as stored:
        yield _values.decode(stored.text, stored.tensors)


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


Request = Mapping[str, list[Region]]
"""By the names of the tensors that are read, the regions of them that a rank needs."""
Offer = Mapping[str, list[tuple[Region, set[int]]]]
"""By their names, the parts of the tensors that a rank has, and for each the ranks that need some of it."""


class StoredTensors:
    """The tensors of a snapshot by their names, and what else is in it.

    All ranks of ``comm`` use one at the same time as a context for what they load.

    Raises:
        CorruptError: the snapshot is not what was written, or cannot be read, as far as that shows before its tensors are
            read. A communicator of one reads and verifies all of it first.

    Attributes:
        manifest: that of the snapshot.
        text: the content of the file of everything but tensors.
        tensors: the tensors, those that are not small as `StoredTensor`.
    """

    def __init__(self, source: SavedSnapshot, comm: Communicator) -> None:
        self._source, self._comm = source, comm

    def __enter__(self) -> StoredTensors:
        """Agree with the other ranks who reads what."""
        self._size, self._has_ended = self._comm.size, False
        # One rank verifies all of a snapshot on its disk before anything is filled; of one that is far away each byte is
        # read once, and verified on the way.
        self._is_verified = self._source.is_local and self._comm.size == 1
        about: Any = self._on_all(lambda: self._read_manifest_and_state() if self._comm.rank == 0 else None)[0]
        self.manifest: Manifest = about[0]
        self.text: bytes = about[1]
        self._headers: dict[str, Any] = about[2]  # of files that several ranks read
        self._parts: dict[str, list[_Part]] = {}
        self.tensors = self._assemble(itertools.chain.from_iterable(self._on_all(self._open_files)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait until all ranks have read what they read so far; raise as `read` does where one has failed."""
        if error is None:
            self._agree(None)
        elif not self._has_ended:
            self._agree(None, f"{type(error).__name__}: {error}")

    def read(self, targets: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Read each of these tensors into one of its shape and dtype, of which only the shards of this rank are filled.

        Raises:
            CorruptError: on all ranks, that a part is not what was written; then some may have been filled.
            RankFailed: another rank has failed.
            ValueError: another rank reads other tensors.
        """
        if self._comm.size < self._size:  # ranks were lost since
            self.__enter__()
        wanted: dict[str, list[Shard]] = {}
        for stored, target in targets:
            tensor = target.detach()
            whole = Shard(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
            wanted.setdefault(stored.name, []).extend(local_shards(tensor) if is_sharded(tensor) else [whole])
        names = list(wanted)
        for start in range(0, len(names), _ROUND):
            requests = self._agree({name: list(map(region_of, wanted[name])) for name in names[start : start + _ROUND]})
            offers = self._on_all(partial(self._offer, requests))
            dtypes = {name: self.tensors[name].dtype for name in requests[0]}
            stream = _Stream(self._comm, self._parts, dtypes, requests, offers, wanted)
            try:
                stream.run()
            except BaseException:
                self._has_ended = True
                raise
            self._on_all(stream.check)

    def _offer(self, requests: Sequence[Request]) -> Offer:
        """Return what this rank has of the tensors that are read now, in the order of its files."""
        parts = {name: self._parts[name] for name in requests[0].keys() & self._parts.keys()}
        in_order = sorted(parts, key=lambda name: (parts[name][0].file.path, parts[name][0].start))
        return {name: [(p.region, _ranks_that_need(requests, name, p.region)) for p in parts[name]] for name in in_order}

    def _agree(self, request: Request | None, failure: str | None = None) -> list[Request]:
        """Return what all ranks read now, which must be the same tensors; none where they conclude."""
        answers = self._on_all(lambda: (request or {}, failure))
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

    def _on_all(self, call: Callable[[], T]) -> list[T]:
        """Return the results of a call on all ranks, or raise on all the error of one."""
        result, failure = None, None
        try:
            result = call()
        except CorruptError as error:
            failure = error
        except (ValueError, OSError) as error:
            failure = CorruptError(f"{self._source} cannot be read: {error}")
        try:
            answers = self._comm.gather_object((result, failure))
        except BaseException:
            self._has_ended = True
            raise
        for _, failure in answers:
            if failure is not None:
                raise failure
        return [result for result, _ in answers]

    def _read_manifest_and_state(self) -> tuple[Manifest, bytes, Mapping[str, Any]]:
        manifest = self._source.verify(content=self._is_verified)
        if STATE not in manifest.files:
            raise CorruptError(f"{self._source} has no {STATE}")
        text = self._source.open(STATE, manifest).read_bytes()
        if zlib.crc32(text) != manifest.files[STATE][1]:
            raise CorruptError(f"{self._source}/{STATE} has other bytes than were written")
        names = [name for name in manifest.files if name.endswith(".safetensors")]
        shared = names if len(names) < self._comm.size else ()  # by ranks, each of which would read the header
        return manifest, text, {name: _safetensors.read_header(self._source.open(name, manifest)) for name in shared}

    def _open_files(self) -> list[_Described]:
        """Open the files that this rank reads, or reads some of; return what it reads of each tensor.

        A file is read by the rank that wrote it, where there are as many as then. Small tensors are read at once.
        """
        rank, size = self._comm.rank, self._comm.size
        names = sorted(name for name in self.manifest.files if name.endswith(".safetensors"))
        described = []
        for index, path in enumerate(names):
            readers = [reader for reader in range(size) if reader * len(names) // size == index]
            readers = readers if len(names) < size else [index * size // len(names)]
            if rank not in readers:
                continue
            file = self._source.open(path, self.manifest)
            header, stored = self._headers.get(path) or _safetensors.read_header(file)
            text, count = self.manifest.parts.get(path, ""), 1 + len({entry.part for entry in stored.values()})
            crcs = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
            if not self._is_verified and (len(crcs) != count or crcs[0] != zlib.crc32(header)):
                raise CorruptError(f"{file.path} has other bytes than were written")
            for key, entry in stored.items():
                name, start, length = key.partition("\0")[0], entry.span[0], entry.span[1] - entry.span[0]
                # Each reader has an equal share of the bytes, and reads the parts that begin in it.
                share = (start - len(header)) * len(readers) // (file.size - len(header) or 1)
                if readers[min(share, len(readers) - 1)] != rank:
                    continue
                offsets, shape = entry.offsets or ((0,) * len(entry.shape), entry.shape)
                part = _Part(file, start, (tuple(offsets), entry.shape), None if self._is_verified else crcs[entry.part])
                self._parts.setdefault(name, []).append(part)
                content = None
                if entry.shape == tuple(shape) and self._source.is_local and length <= _SMALL:  # elsewhere by requests
                    content = file.read_bytes(start, length)
                    if part.crc is not None and zlib.crc32(content) != part.crc:
                        raise CorruptError(f"{file.path} has other bytes than were written")
                strides = None if entry.offsets else entry.strides
                same_as = entry.same_as and entry.same_as.partition("\0")[0]
                described.append(_Described(name, entry.dtype, tuple(shape), part.region, strides, content, same_as))
        return described

    def _assemble(self, described: Iterable[_Described]) -> dict[str, Tensor | StoredTensor]:
        """Return the tensors that the parts of all ranks make up; tied ones are one value."""
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


class _Block(NamedTuple):
    """A box of a part whose elements follow each other in the file."""

    name: str
    number: int  # of the part, among those that its rank has of the tensor
    region: Region  # of the tensor
    is_shared: bool  # whether other ranks need some of the part


@dataclass
class _Stream:
    """A read in which parts of tensors are read in blocks, and handed to the ranks that need them."""

    comm: Communicator
    parts: Mapping[str, list[_Part]]
    dtypes: Mapping[str, torch.dtype]
    requests: Sequence[Request]
    offers: Sequence[Offer]
    wanted: Mapping[str, list[Shard]]
    crcs: dict[tuple[str, int], int] = field(default_factory=dict)  # of what was read so far of each part
    failure: CorruptError | None = None

    def check(self) -> None:
        """Raise what was found wrong in the parts that this rank has read."""
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        """Fill the tensors of this rank, and send what other ranks need of the parts that it reads."""
        extents = []
        for name, offers in self.offers[self.comm.rank].items():
            for part, (region, ranks) in zip(self.parts[name], offers, strict=True):
                if ranks:
                    end = part.start + math.prod(region[1]) * self.dtypes[name].itemsize
                    extents.append((part.file.path, part.start, end))
        ends: dict[tuple[str, int], int] = {}  # by file and first byte of a part, the end of the run of adjacent parts
        for path, start, end in sorted(extents, reverse=True):
            ends[path, start] = ends.get((path, end), end)
        plans = [list(self._steps(rank)) for rank in range(self.comm.size)]
        for step in itertools.zip_longest(*plans, fillvalue=()):
            self._exchange(step, ends)

    def _steps(self, rank: int) -> Iterator[list[_Block]]:
        """Yield the blocks that are needed of the parts of a rank, a few at a time."""
        limit = max(_BLOCK // self.comm.size, 1 << 18)
        step: list[_Block] = []
        size = 0
        for name, offers in self.offers[rank].items():
            itemsize = self.dtypes[name].itemsize
            for number, (region, ranks) in enumerate(offers):
                for box in _boxes(region, limit // itemsize) if ranks else ():
                    if step and size + math.prod(box[1]) * itemsize > limit:
                        yield step
                        step, size = [], 0
                    step.append(_Block(name, number, box, ranks != {rank}))
                    size += math.prod(box[1]) * itemsize
        if step:
            yield step

    def _exchange(self, blocks: Sequence[Sequence[_Block]], ends: Mapping[tuple[str, int], int]) -> None:
        """Read the blocks of this rank, send them to those that need them, and take those of the others, rank by rank."""
        rank_here = self.comm.rank
        sent: list[list[Tensor]] = [[] for _ in blocks]
        for block in blocks[rank_here]:
            content = self._read(block, ends)
            for overlap, target in self._targets(block):
                target[...] = content[_within(block.region, overlap)]
            for rank, request in enumerate(self.requests):
                overlaps = [_overlap(block.region, region) for region in request[block.name] if rank != rank_here]
                needed = [content[_within(block.region, overlap)] for overlap in overlaps if overlap]
                sent[rank] += [piece.reshape(-1).view(torch.uint8) for piece in needed]
        if not any(block.is_shared for of_rank in blocks for block in of_rank):
            return
        coming = [
            [target for block in of_rank if rank != rank_here for _, target in self._targets(block)]
            for rank, of_rank in enumerate(blocks)
        ]
        sizes = [sum(target.numel() * target.itemsize for target in targets) for targets in coming]
        joined = [torch.cat([torch.empty(0, dtype=torch.uint8), *pieces]).to(self.comm.device) for pieces in sent]
        sent.clear()
        wait = self.comm.start_all_to_all(joined, sizes)
        for content, targets in zip(wait(), coming, strict=True):
            pieces = torch.split(content.cpu(), [target.numel() * target.itemsize for target in targets])
            for piece, target in zip(pieces, targets, strict=True):
                target[...] = piece.clone().view(target.dtype).reshape(target.shape)  # aligned by the copy

    def _targets(self, block: _Block) -> Iterator[tuple[Region, Tensor]]:
        """Yield the regions of a block that are wanted here, in the order of the request, each with the tensor to fill."""
        for shard in self.wanted.get(block.name, ()):
            if overlap := _overlap(block.region, region_of(shard)):
                yield overlap, shard.tensor[_within(region_of(shard), overlap)]

    def _read(self, block: _Block, ends: Mapping[tuple[str, int], int]) -> Tensor:
        """Return the content of a block; the blocks of a part are read in order, so that its checksum can be continued."""
        part, dtype = self.parts[block.name][block.number], self.dtypes[block.name]
        first = 0  # the number of its first element among those of the part, in row-major order
        for start, origin, length in zip(block.region[0], *part.region, strict=True):
            first = first * length + start - origin
        size, whole = (math.prod(region[1]) * dtype.itemsize for region in (block.region, part.region))
        content = torch.empty(size, dtype=torch.uint8)
        try:
            content = part.file.read(part.start + first * dtype.itemsize, size, ends[part.file.path, part.start])
        except OSError as error:
            self.failure = self.failure or CorruptError(f"{part.file.path} cannot be read: {error}")
        key = block.name, block.number
        array: Any = content.numpy()
        self.crcs[key] = crc = zlib.crc32(array, self.crcs.get(key, 0))
        if first * dtype.itemsize + size == whole and part.crc not in (crc, None):
            problem = f"{part.file.path} has other bytes of {block.name!r} than were written"
            self.failure = self.failure or CorruptError(problem)
        return content.view(dtype).reshape(block.region[1])


def _ranks_that_need(requests: Sequence[Request], name: str, part: Region) -> set[int]:
    """Return the ranks that need some of a part of a tensor."""
    return {rank for rank, request in enumerate(requests) if any(_overlap(part, region) for region in request[name])}


def _overlap(first: Region, second: Region) -> Region | None:
    """Return the intersection of two regions, or ``None`` if it is empty."""
    starts = tuple(map(max, first[0], second[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True)]
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _within(outer: Region, inner: Region) -> tuple[slice, ...]:
    """Return the index of a region in the tensor of a region around it."""
    starts = [start - origin for start, origin in zip(inner[0], outer[0], strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner[1], strict=True))


def _boxes(region: Region, limit: int) -> Iterator[Region]:
    """Yield boxes in row-major order that make up a region, each of at most ``limit`` elements that lie together."""
    offsets, sizes = region
    if math.prod(sizes) <= limit:
        yield region
        return
    cut = next(dimension for dimension in range(len(sizes)) if math.prod(sizes[dimension + 1 :]) <= limit)
    rows = limit // math.prod(sizes[cut + 1 :])
    ranges = [range(start, start + size) for start, size in zip(offsets[:cut], sizes[:cut], strict=True)]
    for before in itertools.product(*ranges):
        for row in range(0, sizes[cut], rows):
            size = min(rows, sizes[cut] - row)
            yield (*before, offsets[cut] + row, *offsets[cut + 1 :]), (*(1 for _ in before), size, *sizes[cut + 1 :])
