"""The tensors of a snapshot in parts: each is read by one of the ranks that load it, which hands it to those that need it.

Every rank opens some of the files and knows the parts in them. What a rank asks for is read in a round, in which all ranks
take part, whatever each of them asks for: the ranks say which regions of which tensors they need, then which parts of these
they have, and then stream them in blocks, verified on the way. A rank that needs nothing more waits in `conclude`, and reads
on for the others until all have come there. So nothing depends on the order in which ranks ask.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from chainring._distributed.communicator import Communicator, RankFailed
from chainring._distributed.sharding import Region, Shard, is_partition, is_sharded, local_shards, region_of
from chainring.serializers import _safetensors
from chainring.serializers._restoring import StoredTensor
from chainring.serializers._store import CorruptError, Manifest, SavedSnapshot, StoredFile

T = TypeVar("T")
Needs = Mapping[str, list[tuple[int, Region]]]
"""By the name of a tensor the ranks that need it, with the regions that they need."""

_SMALL = 1 << 13  # bytes of a tensor that every rank gets at once
_BLOCK = 1 << 20  # bytes that a rank reads, sends, or receives at once
_ROUND = 64  # tensors for which a rank asks at once


class _Part(NamedTuple):
    """A part of a tensor that this rank reads."""

    path: str  # of the file
    start: int  # its first byte there
    file: StoredFile
    region: Region
    whole: tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of the tensor
    crc: int | None  # None where the file was verified as a whole


class _Whole(NamedTuple):
    """What is known of a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Sequence[int] | None
    content: bytes | None  # of a small one


class _Request(NamedTuple):
    """What a rank needs, and the failure for which it needs nothing any more."""

    regions: list[tuple[str, Region]] | None  # of tensors by name; None when it waits for the others
    failure: str | None


class _Offer(NamedTuple):
    """A part of a tensor that a rank has, and the ranks that need some of it."""

    region: Region
    ranks: set[int]


Offers = Sequence[Mapping[str, list[_Offer]]]
"""For each rank by the name of a tensor what it has of it."""


class _Block(NamedTuple):
    """A box of a part whose elements follow each other in the file."""

    name: str
    number: int  # of the part, among those that its rank has of the tensor
    region: Region  # of the tensor


class StoredTensors:
    """The tensors of a snapshot by their names, and what else is in it.

    All ranks of ``comm`` make one at the same time, and use it as a context for what each of them loads.

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
        self._tied: dict[str, set[str | None]] = {}  # by name of a tensor, those stored in its place in the files here
        self._wholes: dict[str, _Whole] = {}
        self._sound: set[Any] = set()
        for begun in self._on_all(self._open):
            self._take(begun)
        self.tensors: dict[str, Tensor | StoredTensor] = {
            name: StoredTensor(name, whole.dtype, whole.shape, whole.strides, self)
            if whole.content is None
            else _to_tensor(whole.content, whole)
            for name, whole in sorted(self._wholes.items())
        }
        self._tie()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.conclude()
        elif not self._has_ended:
            self._round(None, f"{type(error).__name__}: {error}")

    def read(self, targets: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Read each of these tensors into one of its shape and dtype, of which only the shards of this rank are filled.

        Raises:
            CorruptError: on all ranks, that a part is not what was written; then some may have been filled.
            RankFailed: another rank has failed.
        """
        for start in range(0, len(targets), _ROUND):
            wanted: dict[str, list[Shard]] = {}
            for stored, target in targets[start : start + _ROUND]:
                wanted.setdefault(stored.name, []).extend(_shards_of(target.detach()))
            self._round(wanted)

    def conclude(self) -> None:
        """Read for the other ranks as long as one of them needs it."""
        while not self._round(None):
            pass

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
        except CorruptError as error:
            failure = error
        except (ValueError, OSError) as error:
            failure = CorruptError(f"{self._source} cannot be read: {error}")
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

    def _open(self) -> list[tuple[str, _Whole]]:
        """Open the files that this rank reads, or reads some of; return the tensors of which it reads the beginning."""
        names = sorted(name for name in self.manifest.files if name.endswith(".safetensors"))
        begun: list[tuple[str, _Whole]] = []
        for name, readers in zip(names, _assign_readers(len(names), self._comm.size), strict=True):
            if self._comm.rank not in readers:
                continue
            file = self._source.open(name, self.manifest)
            crc, stored = _safetensors.read_header(file)
            crcs = self._checksums(file, name, crc, stored, self._comm.rank == readers[0])
            mine = _share(stored, readers.index(self._comm.rank), len(readers))
            for key, entry in stored.items():
                tensor = _name_of(key)
                self._tied.setdefault(tensor, set()).add(entry.same_as and _name_of(entry.same_as))
                if entry.part in mine:
                    begun += self._add(file, tensor, entry, None if crcs is None else crcs[entry.part])
        return begun

    def _checksums(
        self, file: StoredFile, name: str, crc: int, stored: Mapping[str, _safetensors.Stored], is_first: bool
    ) -> list[int] | None:
        """Return the checksums of the parts of a file, ``None`` where it is verified as a whole, as by earlier versions."""
        if self._is_verified:
            return None
        text, count = self.manifest.parts.get(name), len({entry.part for entry in stored.values()})
        if text is None:
            if is_first and file.checksum() != self.manifest.files[name][1]:
                raise CorruptError(f"{file.path} has other bytes than were written")
            return None
        crcs = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
        if len(crcs) != 1 + count or crcs[0] != crc:
            raise CorruptError(f"{file.path} has other bytes than were written")
        return crcs

    def _add(self, file: StoredFile, tensor: str, entry: _safetensors.Stored, crc: int | None) -> list[tuple[str, _Whole]]:
        offsets, shape = entry.offsets or ((0,) * len(entry.shape), entry.shape)
        part = _Part(file.path, entry.place[0], file, (tuple(offsets), entry.shape), (entry.dtype, tuple(shape)), crc)
        self._parts.setdefault(tensor, []).append(part)
        if any(offsets):
            return []
        size, content = entry.place[1] - entry.place[0], None
        if entry.shape == tuple(shape) and size <= (_SMALL if self._source.is_local else 0):  # there a request for each
            content = bytes(file.read(part.start, size).numpy())
            if crc is not None and zlib.crc32(content) != crc:
                raise CorruptError(f"{file.path} has other bytes than were written")
        return [(tensor, _Whole(entry.dtype, tuple(shape), None if entry.offsets else entry.strides, content))]

    def _take(self, begun: Sequence[tuple[str, _Whole]]) -> None:
        """Take over what a rank knows of tensors; all ranks do alike, with the same result."""
        total = sum(size for size, _ in self.manifest.files.values())
        for name, whole in begun:
            if name in self._wholes:
                raise CorruptError(f"{self._source} has {name!r} in two files, or twice")
            if math.prod(whole.shape) * whole.dtype.itemsize > total:  # first: a shape alone could ask for any memory
                _refuse_parts(name, whole.shape)
            self._wholes[name] = whole

    def _tie(self) -> None:
        """Give tensors that are one in all files alike one value."""
        own = {(name, other) for name, others in self._tied.items() for other in others if other is not None}
        found = {pair for pairs in self._gather(own) for pair in pairs}
        if found:
            wrong = {pair for pair in found if self._tied.get(pair[0], {pair[1]}) != {pair[1]}}
            refused = {pair for pairs in self._gather(wrong) for pair in pairs}
            self.tensors |= {name: self.tensors[other] for name, other in found - refused if other in self.tensors}

    def _round(self, wanted: Mapping[str, list[Shard]] | None, failure: str | None = None) -> bool:
        """Read what the ranks need in this round; return whether none needs anything."""
        regions = None if wanted is None else [(name, region_of(shard)) for name in wanted for shard in wanted[name]]
        requests: list[_Request] = self._gather(_Request(regions, failure))
        if failures := [f"rank {rank}: {request.failure}" for rank, request in enumerate(requests) if request.failure]:
            self._has_ended = True
            if failure is None:
                raise RankFailed(f"the snapshot {self._source} could not be loaded by {failures[0]}")
            return True
        needs: dict[str, list[tuple[int, Region]]] = {}
        for rank, request in enumerate(requests):
            for name, region in request.regions or ():
                needs.setdefault(name, []).append((rank, region))
        if needs:
            offers: Offers = self._on_all(lambda: self._offer(needs))
            self._check(needs, offers)
            stream = _Stream(self._comm, self._parts, self._wholes, needs, offers, wanted or {})
            try:
                stream.run()
            except BaseException:
                self._has_ended = True
                raise
            self._on_all(stream.check)
        return all(request.regions is None for request in requests)

    def _offer(self, needs: Needs) -> dict[str, list[_Offer]]:
        offers = {}
        for name in sorted(needs.keys() & self._parts.keys(), key=lambda name: self._parts[name][0][:2]):
            parts, needed = self._parts[name], needs[name]
            if any(part.whole != self._wholes[name][:2] for part in parts):
                _refuse_parts(name, self._wholes[name].shape)
            offers[name] = [
                _Offer(part.region, {rank for rank, region in needed if _overlap(part.region, region)}) for part in parts
            ]
        return offers

    def _check(self, needs: Iterable[str], offers: Offers) -> None:
        """Refuse parts that are not the whole of a tensor, on all ranks alike."""
        for name in needs:
            layout = self._wholes[name].shape, tuple(offer.region for of_rank in offers for offer in of_rank.get(name, ()))
            if layout not in self._sound and not is_partition(*layout):
                _refuse_parts(name, layout[0])
            self._sound.add(layout)


class _Stream:
    """A round in which parts of tensors are read in blocks, and handed to the ranks that need them."""

    def __init__(
        self,
        comm: Communicator,
        parts: Mapping[str, list[_Part]],
        wholes: Mapping[str, _Whole],
        needs: Needs,
        offers: Offers,
        wanted: Mapping[str, list[Shard]],
    ) -> None:
        self._comm, self._parts, self._wholes, self._needs, self._wanted = comm, parts, wholes, needs, wanted
        self._offers = offers
        self._crcs: dict[tuple[str, int], int] = {}
        self._ends = self._row_ends()  # by file and first byte of a part, where those end that are read one after the other
        self._failure: CorruptError | None = None

    def check(self) -> None:
        """Raise what was found wrong in the parts that this rank has read."""
        if self._failure is not None:
            raise self._failure

    def _row_ends(self) -> dict[tuple[str, int], int]:
        own, places = self._comm.rank, []
        for name, offers in self._offers[own].items():
            itemsize = self._wholes[name].dtype.itemsize
            for part, offer in zip(self._parts[name], offers, strict=True):
                if offer.ranks:  # what others need comes first
                    end = part.start + math.prod(part.region[1]) * itemsize
                    places.append((offer.ranks != {own}, part.path, part.start, end))
        rows: dict[tuple[bool, str, int], int] = {}
        for is_shared, path, start, end in sorted(places, reverse=True):
            rows[is_shared, path, start] = rows.get((is_shared, path, end), end)
        return {(path, start): end for (_, path, start), end in rows.items()}

    def run(self) -> None:
        """Fill what is wanted here, and what the other ranks want of the parts here."""
        limit = max(_BLOCK // self._comm.size, 1 << 18)
        plans = [list(self._steps(rank, limit, is_shared=True)) for rank in range(self._comm.size)]
        for number in range(max(map(len, plans))):
            self._exchange([plan[number] if number < len(plan) else [] for plan in plans])
        for blocks in self._steps(self._comm.rank, _BLOCK, is_shared=False):
            for block in blocks:
                self._place(block, self._read(block))

    def _steps(self, rank: int, limit: int, *, is_shared: bool) -> Iterator[list[_Block]]:
        """Yield blocks of the parts of a rank that others need, or those that it alone needs, a few at a time."""
        step: list[_Block] = []
        size = 0
        for name, of_tensor in self._offers[rank].items():
            itemsize = self._wholes[name].dtype.itemsize
            for number, (region, ranks) in enumerate(of_tensor):
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
        own, device = self._comm.rank, self._comm.device
        sent: list[list[Tensor]] = [[] for _ in blocks]
        for block in blocks[own]:
            content = self._read(block)
            self._place(block, content)
            for rank, region in self._needs[block.name]:
                if rank != own and (overlap := _overlap(block.region, region)):
                    sent[rank].append(_bytes(content[_within(block.region, overlap)]))
        coming = [[block for block in of_rank if rank != own] for rank, of_rank in enumerate(blocks)]
        sizes = [sum(self._sizes_wanted(block) for block in of_rank) for of_rank in coming]
        wait = self._comm.start_all_to_all([_joined(pieces).to(device) for pieces in sent], sizes)
        sent.clear()
        for content, of_rank in zip(wait(), coming, strict=True):
            self._take(content.cpu(), of_rank)

    def _sizes_wanted(self, block: _Block) -> int:
        regions = [_overlap(block.region, region_of(shard)) for shard in self._wanted.get(block.name, ())]
        return sum(math.prod(region[1]) for region in regions if region) * self._wholes[block.name].dtype.itemsize

    def _take(self, content: Tensor, blocks: Sequence[_Block]) -> None:
        """Put what a rank has sent where it belongs: of each block what was wanted, in the order in which it was."""
        for block in blocks:
            for shard in self._wanted.get(block.name, ()):
                if overlap := _overlap(block.region, region_of(shard)):
                    size = math.prod(overlap[1]) * shard.tensor.itemsize
                    piece = content[:size].clone().view(shard.tensor.dtype).reshape(overlap[1])  # aligned by the copy
                    shard.tensor[_within(region_of(shard), overlap)] = piece
                    content = content[size:]

    def _place(self, block: _Block, content: Tensor) -> None:
        for shard in self._wanted.get(block.name, ()):
            if overlap := _overlap(block.region, region_of(shard)):
                shard.tensor[_within(region_of(shard), overlap)] = content[_within(block.region, overlap)]

    def _read(self, block: _Block) -> Tensor:
        """Return the content of a block of a part, of which the blocks before it were read before."""
        part, dtype = self._parts[block.name][block.number], self._wholes[block.name].dtype
        first = _row_major_index(block.region, part.region) * dtype.itemsize
        size, whole = (math.prod(region[1]) * dtype.itemsize for region in (block.region, part.region))
        content = torch.empty(size, dtype=torch.uint8)
        try:
            content = part.file.read(part.start + first, size, self._ends[part.path, part.start])
        except OSError as error:
            self._failure = self._failure or CorruptError(f"{part.file.path} cannot be read: {error}")
        key = block.name, block.number
        self._crcs[key] = crc = zlib.crc32(_view(content), self._crcs.get(key, 0))
        if first + size == whole and part.crc not in (crc, None):
            self._failure = self._failure or CorruptError(
                f"{part.file.path} has other bytes of {key[0]!r} than were written"
            )
        return content.view(dtype).reshape(block.region[1])


def _name_of(key: str) -> str:
    """Return the name of the tensor of which something is stored under a key."""
    return key.partition("\0")[0]


def _refuse_parts(name: str, shape: Sequence[int]) -> NoReturn:
    raise CorruptError(f"the shards of {name!r} do not make one tensor of shape {list(shape)}; use another snapshot")


def _assign_readers(files: int, ranks: int) -> list[list[int]]:
    """Return the ranks that read each file: those that wrote it, where there are as many as then."""
    if files >= ranks:
        return [[file * ranks // files] for file in range(files)]
    return [[rank for rank in range(ranks) if rank * files // ranks == file] for file in range(files)]


def _share(stored: Mapping[str, _safetensors.Stored], position: int, count: int) -> set[int]:
    """Return the parts of a file that one of ``count`` ranks reads; each reads as many bytes as the others."""
    read, mine = [0] * count, set()
    for part, (start, end) in sorted({entry.part: entry.place for entry in stored.values()}.items()):
        reader = min(range(count), key=read.__getitem__)
        read[reader] += end - start
        if reader == position:
            mine.add(part)
    return mine


def _shards_of(tensor: Tensor) -> list[Shard]:
    if is_sharded(tensor):
        return local_shards(tensor)
    return [Shard(tensor, (0,) * tensor.ndim, tuple(tensor.shape))]


def _to_tensor(content: bytes, whole: _Whole) -> Tensor:
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    tensor = values.view(whole.dtype).reshape(whole.shape)
    if whole.strides is None:
        return tensor
    return torch.empty_strided(whole.shape, whole.strides, dtype=whole.dtype).copy_(tensor)


def _view(content: Tensor) -> memoryview:
    array: Any = content.numpy()
    return memoryview(array)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)


def _overlap(one: Region, other: Region) -> Region | None:
    """Return the region that two have in common, if it has elements."""
    starts = tuple(map(max, one[0], other[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
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
