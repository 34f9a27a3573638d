"""The ledger of a run: the file that `extensions.Recorder` writes, and `Ledger`, which reads it.

A file begins with 16 bytes: ``MAGIC``, the version as an unsigned 32-bit integer, and the CRC-32 of these 12 bytes. Blocks
follow it without gaps; all numbers are little-endian. A block is a head of 28 bytes and a payload:

====================  =====================================================================================================
bytes of the head     meaning
====================  =====================================================================================================
4                     length of the payload
4                     number of the block, from 0
8                     iteration of its first row
4                     number of its rows, at most 32; row i is of iteration first + i
4                     CRC-32 of the payload
4                     CRC-32 of the 24 bytes before
====================  =====================================================================================================

The payload is, in this order:

- the names of the losses in this block: a 16-bit length, and a JSON array of strings in UTF-8;
- the rows, each: the 64-bit digest of the batch's indices (0: not known), the 64-bit digest of the generators (0 in all but
  the last row, and there if it was not taken), for each name the 64 bits of the loss (those of a shorter type are the
  lowest), and for each name one byte, the type: an index into `LOSS_TYPES`, of which 0 says that this loss was not reported;
- the digests of tensors, for each iteration of the block in which they were taken: the iteration (64 bits), the number of
  tensors (32 bits), the length of a JSON array of their names (32 bits; 0 where they are those of the digests before), the
  array, and 64 bits for each tensor. Those of iteration 0 are of the tensors before the first update.

A block has the rows of the iterations 32k + 1 to 32k + 32, so that equal runs have equal files, whatever snapshots and kills
there were. The last one may be short: as a run continues, it is written again at the same place with more rows.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chainring._files import open_regular, parse_strict

MAGIC = b"\x89ledger\n"
VERSION = 1
HEAD = MAGIC + struct.pack("<I", VERSION) + struct.pack("<I", zlib.crc32(MAGIC + struct.pack("<I", VERSION)))
"""The first bytes of every ledger."""
ROWS = 32
"""The most rows of a block; a block ends with the iteration that is a multiple of it."""
MARK = "audit: "
"""Begins the name of a loss that is none, but says what an audit has found; runs that are the same may differ in it."""
LOSS_TYPES = ("", "float64", "float32", "float16", "bfloat16", "int64")

_BLOCK = struct.Struct("<IIQII")
_CRC = struct.Struct("<I")
_NAMES = struct.Struct("<H")
_DIGESTS = struct.Struct("<QII")
_BLOCK_SIZE = _BLOCK.size + _CRC.size
_LARGEST_FILE = 1 << 31  # bytes, of more than forty million iterations
_REMEDY = "take the file from a copy, or let the run continue from a snapshot before, which writes it again from there"

Bits = tuple[int, int]
"""A loss: its bits, and its type as an index into `LOSS_TYPES`."""


class LedgerError(ValueError):
    """A ledger is damaged; the text names the file and the block."""


class Row(NamedTuple):
    """The record of an iteration, the first of which is 1; ``None`` stands for what was not taken."""

    iteration: int
    batch: int | None  # the digest of the indices of its examples
    generators: int | None  # the digest of the random generators after it
    losses: Mapping[str, Bits]  # by name, such as "main/loss"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The content of a ledger, in arrays of one element, or row, for each recorded iteration."""

    path: Path
    iterations: NDArray[np.int64]  # ascending; consecutive, unless the recorder was missing in a part of the run
    batches: NDArray[np.uint64]  # the digests of the batches' indices, 0 where they are not known
    generators: NDArray[np.uint64]  # the digests after the last iteration of each block, 0 after the others
    names: tuple[str, ...]  # of the losses, the columns of the next two
    bits: NDArray[np.uint64]
    types: NDArray[np.uint8]  # indices into `LOSS_TYPES`. Two losses are the same if bits and type are
    digests: Mapping[int, Mapping[str, int]]  # by iteration, of every tensor by its path in a snapshot
    note: str | None = None  # why the last block was left out, if it was: it is incomplete, as in a killed run

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read a ledger, also while another process is writing it: the last block is left out where it is incomplete."""
        path = Path(os.path.realpath(path))
        with open(open_regular(path), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > _LARGEST_FILE:
                raise LedgerError(f"{path} has {size:,} bytes, and at most {_LARGEST_FILE:,} are read; {_REMEDY}")
            return cls.parse(file.read(), path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Ledger:
        """Return the ledger in these bytes; ``path`` is for errors. See `read`."""
        blocks: list[tuple[int, list[str], NDArray[Any]]] = []
        digests: dict[int, dict[str, int]] = {}
        tensors: list[str] = []
        note, last = None, 0
        for number, block in enumerate(_blocks(path, content)):
            if isinstance(block, str):
                note = block
                break
            first, count, payload = block
            try:
                if first <= last:
                    raise ValueError(f"it begins with iteration {first}, after one that ends with {last}")
                previous, last = last, first + count - 1
                start = _NAMES.size + _NAMES.unpack_from(payload)[0]
                names = _parse_names(payload[_NAMES.size : start])
                rows = np.frombuffer(payload[start:], _row_type(len(names)), count)
                if rows["types"].size and rows["types"].max() >= len(LOSS_TYPES):
                    raise ValueError("a loss has an unknown type")
                blocks.append((first, names, rows))
                rest = payload[start + rows.nbytes :]
                while rest:
                    iteration, size, length = _DIGESTS.unpack_from(rest)
                    start = _DIGESTS.size + length
                    tensors = _parse_names(rest[_DIGESTS.size : start]) if length else tensors
                    if size != len(tensors) or not previous <= iteration <= last or iteration in digests:
                        raise ValueError(f"the digests of iteration {iteration} are not those of its tensors")
                    values = np.frombuffer(rest[start:], "<u8", size)
                    digests[iteration] = dict(zip(tensors, values.tolist(), strict=True))
                    rest = rest[start + values.nbytes :]
            except (ValueError, struct.error) as error:
                raise LedgerError(f"{path}: block {number} is damaged: {error}; {_REMEDY}") from error

        # Each block has columns of its own; the arrays have those of all.
        names = list(dict.fromkeys(name for _, columns, _ in blocks for name in columns))
        table = np.zeros(sum(len(rows) for _, _, rows in blocks), _row_type(len(names)))
        iterations, start = np.zeros(len(table), np.int64), 0
        for first, columns, rows in blocks:
            stop, indices = start + len(rows), [names.index(name) for name in columns]
            iterations[start:stop] = np.arange(first, first + len(rows))
            table["batch"][start:stop], table["generators"][start:stop] = rows["batch"], rows["generators"]
            table["bits"][start:stop, indices], table["types"][start:stop, indices] = rows["bits"], rows["types"]
            start = stop
        arrays = table["batch"], table["generators"], tuple(names), table["bits"], table["types"]
        return cls(path, iterations, *arrays, digests, note)

    @property
    def faults(self) -> list[str]:
        """What audits have found, in words."""
        return [name.removeprefix(MARK) for name in self.names if name.startswith(MARK)]

    def row(self, iteration: int) -> Row | None:
        """Return what is known of an iteration, ``None`` if it was not recorded."""
        index = int(np.searchsorted(self.iterations, iteration))
        if index == len(self.iterations) or self.iterations[index] != iteration:
            return None
        bits, types = self.bits[index].tolist(), self.types[index].tolist()
        losses = {name: (value, kind) for name, value, kind in zip(self.names, bits, types, strict=True) if kind}
        return Row(iteration, int(self.batches[index]) or None, int(self.generators[index]) or None, losses)

    def block(self, number: int, first: int, last: int) -> Block:
        block = Block(number, first)
        for row in filter(None, map(self.row, range(first, last + 1))):
            block.add_row(row.batch or 0, row.losses)
            block.generators = row.generators or 0
        for iteration, tensors in self.digests.items():
            if (first if number else 0) <= iteration <= last:
                block.digests[iteration] = list(tensors), np.array(list(tensors.values()), np.uint64)
        return block


def cut_back(content: bytes, path: Path, iteration: int) -> bytes:
    """Return a ledger without what is of later iterations; ``path`` is for errors, see `Ledger.read`."""
    ledger, end = Ledger.parse(content, path), len(HEAD)
    for number, block in enumerate(_blocks(path, content)):
        if isinstance(block, str) or block[0] > iteration:
            break
        first, count, payload = block
        if first + count - 1 > iteration:
            return content[:end] + ledger.block(number, first, iteration).encode([])
        end += _BLOCK_SIZE + len(payload)
    return content[:end]


def loss_value(bits: int, kind: int) -> float:
    if LOSS_TYPES[kind] == "bfloat16":
        bits, kind = bits << 16, LOSS_TYPES.index("float32")
    if not kind:
        return math.nan
    dtype = np.dtype(LOSS_TYPES[kind])
    return float(np.frombuffer(bits.to_bytes(8, "little"), dtype, 1)[0])


@dataclass(slots=True)
class Block:
    """The rows of up to 32 iterations that follow one another, and the digests taken in them."""

    number: int  # in its file, from 0
    first: int  # the iteration of the first row
    rows: list[tuple[int, Mapping[str, Bits]]] = field(default_factory=list)  # the digest of the batch, the losses by name
    digests: dict[int, tuple[Sequence[str], NDArray[np.uint64]]] = field(default_factory=dict)  # of tensors, by iteration
    generators: int = 0  # the digest after the last iteration; 0 if it was not taken

    def add_row(self, batch: int, losses: Mapping[str, Bits]) -> None:
        """Add the next iteration, after which the generators are other ones."""
        self.rows.append((batch, losses))
        self.generators = 0

    def encode(self, known: Sequence[str]) -> bytes:
        """Return the bytes of the block in a file whose last digests before it are of tensors with the names ``known``."""
        names = list(dict.fromkeys(name for _, losses in self.rows for name in losses))
        text, pack = _json(names), struct.Struct(f"<QQ{len(names)}Q{len(names)}B").pack  # as `_row_type` has it
        parts = [_NAMES.pack(len(text)), text]
        for index, (batch, losses) in enumerate(self.rows, 1):
            generators = self.generators if index == len(self.rows) else 0
            row = [losses.get(name, (0, 0)) for name in names]
            parts.append(pack(batch, generators, *[bits for bits, _ in row], *[kind for _, kind in row]))
        for iteration, (tensors, values) in self.digests.items():
            text = b"" if list(tensors) == list(known) else _json(tensors)
            known = tensors
            parts += [_DIGESTS.pack(iteration, len(values), len(text)), text, values.astype("<u8").tobytes()]
        payload = b"".join(parts)
        head = _BLOCK.pack(len(payload), self.number, self.first, len(self.rows), zlib.crc32(payload))
        return head + _CRC.pack(zlib.crc32(head)) + payload


def _json(names: Sequence[str]) -> bytes:
    return json.dumps(list(names), separators=(",", ":")).encode()


def _row_type(losses: int) -> np.dtype[Any]:
    return np.dtype([("batch", "<u8"), ("generators", "<u8"), ("bits", "<u8", (losses,)), ("types", "u1", (losses,))])


def _blocks(path: Path, content: bytes) -> Iterator[tuple[int, int, memoryview] | str]:
    """Yield the first iteration, the number of rows and the payload of each block; for a last one left out the reason."""
    if content[: len(MAGIC)] != MAGIC[: len(content)] or not content:
        raise LedgerError(f"{path} is not a ledger, which extensions.Recorder writes")
    if len(content) < len(HEAD):
        raise LedgerError(f"{path} has {len(content)} bytes, and a ledger {len(HEAD)} at least: it was cut off")
    version, crc = struct.unpack_from("<II", content, len(MAGIC))
    if crc != zlib.crc32(content[: len(MAGIC) + 4]):
        raise LedgerError(f"{path}: the first {len(HEAD)} bytes are damaged; {_REMEDY}")
    if version > VERSION:
        raise LedgerError(f"{path} is of version {version}, and this Chainring reads up to {VERSION}: install a newer one")
    position, number = len(HEAD), 0
    while position < len(content):
        head = content[position : position + _BLOCK_SIZE]
        where = f"{path}: block {number}, at byte {position},"
        if len(head) < _BLOCK_SIZE or not (any(head) or any(content[position:])):
            yield f"{where} is incomplete"
            return
        length, stated, first, rows, crc = _BLOCK.unpack_from(head)
        if _CRC.unpack_from(head, _BLOCK.size)[0] != zlib.crc32(head[: _BLOCK.size]):
            raise LedgerError(f"{where} has a damaged head, so that what follows it cannot be found; {_REMEDY}")
        where += f" with the iterations {first} to {first + rows - 1},"
        payload = memoryview(content)[position + _BLOCK_SIZE : position + _BLOCK_SIZE + length]
        position += _BLOCK_SIZE + length
        if len(payload) < length:
            yield f"{where} is incomplete"
            return
        if zlib.crc32(payload) != crc:
            if position == len(content):
                yield f"{where} is incomplete or damaged: its checksum is another one"
                return
            raise LedgerError(f"{where} is damaged: its checksum is another one; {_REMEDY}")
        if stated != number or not 1 <= rows <= ROWS or first < 1 or first + rows > 2**62:
            raise LedgerError(f"{where} says that it is block {stated}: blocks are missing or were moved; {_REMEDY}")
        yield first, rows, payload
        number += 1


def _parse_names(text: memoryview) -> list[str]:
    names = parse_strict(bytes(text))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise ValueError("its names are not different strings")
    return names
