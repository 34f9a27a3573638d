"""Tensors in one safetensors file, written as a stream whose checksum is computed on the way.

The format is safetensors': eight bytes of header length, the header as JSON, then the tensors in row-major order. What it
has no word for stands in the file's metadata under ``"chainring"``, as JSON from a tensor's name to an entry:

    {"strides": [9, 1, 3]}      elements between neighbours of a dimension, if not those of row-major order
    {"dtype": "complex128"}     the dtype of which the stored numbers are a view
    {"same_as": "encoder/w"}    stored under that name only
    {"offsets": [4, 0], "shape": [8, 2]}   a shard: where it begins in a tensor of that shape

Any other reader opens the file; it sees every value, but no strides, two float64 for a complex128, and a tied tensor once.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from chainring._files import Sink, SizedSink, parse_strict
from chainring._places.base import LocalFile, StoredFile
from chainring.serializers._values import find_aliases, find_dtypes, require_dtype

CHUNK = 8 * 2**20  # bytes per write

_KEY = "chainring"
_MAX_HEADER = 100_000_000  # bytes; safetensors refuses to read more
_FORMAT_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _FORMAT_DTYPES.items()}
_VIEW_NAMES = find_dtypes(["complex128", "float8_e8m0fnu", "float4_e2m1fn_x2"])
_VIEWS = {dtype: torch.float64 if dtype.is_complex else torch.uint8 for dtype in _VIEW_NAMES.values()}
"""Dtypes that not every reader of the format knows: stored as."""

_ENTRY = {"dtype": str, "same_as": str, "strides": list, "offsets": list, "shape": list}
"""What there may be in the metadata of a tensor."""
_NUMPY = {
    *(torch.float64, torch.float32, torch.float16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
"""Dtypes that NumPy has too, without those that may be conjugated."""

_CHECKSUM = re.compile(rb'"crc32":"([0-9a-f]{8})"')  # cannot stand in a name, where JSON escapes quotes

Load = Callable[[torch.Tensor], torch.Tensor]
ShardOffsets = tuple[Sequence[int], Sequence[int]]
"""The offset of a shard in each dimension, and the shape of the whole tensor."""


def write(
    file: Sink,
    tensors: Mapping[str, torch.Tensor],
    shard_offsets: Mapping[str, ShardOffsets] | None = None,
    load: Load | None = None,
) -> tuple[int, int, str]:
    """Write the content of a new file; return its size in bytes, its CRC-32, and those of its parts.

    The parts are the header and each tensor, in the order of the file; a checksum of theirs is eight hexadecimal digits.
    No more than 8 MB are copied at a time. ``load`` returns the values of a tensor when it is its turn, where this stands
    for others of its dtype and shape. Strides are kept as ``clone`` keeps them, so channels_last comes back as such,
    and a slice comes back dense; the same view of the same storage is written once.

    Raises:
        TypeError: a tensor whose dtype or layout the format lacks; the message names it.
        ValueError: a name that the format has taken.
    """
    header, stored = _prepare(tensors, {}, shard_offsets or {})
    if isinstance(file, SizedSink):
        file.expect(len(header) + sum(tensor.nbytes for tensor in stored.values()))
    return _stream(file, header, map(load, stored.values()) if load else stored.values())


class Stored(NamedTuple):
    """What the header of a file says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Sequence[int] | None  # where they are not those of row-major order
    span: tuple[int, int]  # its first byte in the file, and the one after its last
    part: int  # its number among the parts of the file, of which the header is the first
    offsets: ShardOffsets | None  # of a shard
    same_as: str | None  # the tensor that is stored in its place


def read_header(file: StoredFile) -> tuple[bytes, dict[str, Stored]]:
    """Return the header of a file, which may come from anywhere, and what it says of each tensor, in the order of the file.

    Raises:
        ValueError: the file is damaged, or not a safetensors file; or it holds a dtype that this version does not write.
    """
    text, header, texts = read_entries(file)
    try:
        metadata = parse_strict(texts.get(_KEY, "{}").encode())
        if not isinstance(metadata, dict) or not all(map(_is_entry, metadata.values())):
            raise ValueError("its metadata is not that of this version")
        order = {name: part for part, name in enumerate(header, 1)}
        stored = {}
        for name in header.keys() | metadata.keys():
            entry = metadata.get(name, {})
            source = entry.get("same_as", name)
            if (name not in header) != ("same_as" in entry) or source not in header:
                raise ValueError("its metadata and its tensors disagree")
            described, given = metadata.get(source, {}), header[source]
            if (dtype := _DTYPES.get(given["dtype"])) is None:
                raise ValueError(f"it holds {given['dtype']!r:.40}, which this version does not write")
            shape, strides = tuple(given["shape"]), described.get("strides")
            if "dtype" in described:  # it is stored as a view
                require_dtype(described["dtype"])
                view = _VIEW_NAMES.get(described["dtype"])
                if view is None or _VIEWS[view] is not dtype or (view.is_complex and shape[-1:] != (2,)):
                    raise ValueError(f"{dtype} of shape {list(shape)} cannot be a view of {described['dtype']!r:.40}")
                dtype, shape = view, shape[:-1] if view.is_complex else shape
            if strides is not None and not _is_dense(shape, strides):
                raise ValueError(f"strides {strides!r:.80} do not fit shape {list(shape)}")
            start, end = (len(text) + offset for offset in given["data_offsets"])
            offsets = (entry["offsets"], entry["shape"]) if "offsets" in entry else None
            stored[name] = Stored(dtype, shape, strides, (start, end), order[source], offsets, entry.get("same_as"))
    except ValueError as error:
        raise _refusal(file, error) from error
    return text, dict(sorted(stored.items(), key=lambda item: (item[1].part, item[1].same_as is not None, item[0])))


def _is_entry(entry: Any) -> bool:
    """Return whether metadata of a tensor has the form that this version writes."""
    if not isinstance(entry, dict) or ("offsets" in entry) != ("shape" in entry):
        return False
    sizes = [size for value in entry.values() if type(value) is list for size in value]
    return all(type(value) is _ENTRY.get(key) for key, value in entry.items()) and all(type(size) is int for size in sizes)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides are an order of the dimensions without holes or overlaps: others could ask for any memory."""
    if len(shape) != len(strides) or not all(0 <= stride < 2**62 for stride in strides):
        return False
    order = sorted(range(len(shape)), key=lambda i: (strides[i], shape[i]), reverse=True)
    dense = _row_major([shape[i] for i in order])
    return 0 in shape or all(shape[i] == 1 or strides[i] == stride for i, stride in zip(order, dense, strict=True))


def read(source: StoredFile | str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, in memory of their own on the CPU; what is one tensor in the file is one again.

    Raises:
        ValueError: the file is damaged, has another checksum than it says, or is not a safetensors file.
    """
    if isinstance(source, (str, os.PathLike)):
        source = LocalFile(Path(os.path.realpath(source)))  # a person may have made a link to it
    text, stored = read_header(source)
    expected, crc = _recorded_checksum(source, text)
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in stored.items():
        if entry.same_as is None:
            content: Any = source.read(entry.span[0], entry.span[1] - entry.span[0])
            crc = zlib.crc32(content.numpy(), crc)
            tensors[name] = to_tensor(content, entry.dtype, entry.shape, entry.strides)
    _compare(source, expected, crc)
    return {name: tensors[stored[name].same_as or name] for name in sorted(stored)}


def _refusal(file: StoredFile, error: Exception) -> ValueError:
    return ValueError(f"{file.path} is damaged or not a tensor file: {error}. Use another snapshot")


def read_entries(file: StoredFile) -> tuple[bytes, dict[str, dict[str, Any]], dict[str, str]]:
    """Return the header of a file, its entries by the names of tensors in the order of the file, and its metadata.

    An entry has ``dtype``, ``shape`` and ``data_offsets``. Every byte behind the header belongs to one tensor, which has
    those of its shape.
    """
    try:
        size = int.from_bytes(file.read_bytes(0, min(8, file.size)), "little")
        if size > min(_MAX_HEADER, file.size - 8):
            raise ValueError(f"its header is longer than the file, or than {_MAX_HEADER} bytes")
        text = file.read_bytes(0, 8 + size)
        header = parse_strict(text[8:])
        texts = header.pop("__metadata__", {}) if isinstance(header, dict) else None
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("its header is not an object with texts as metadata")
        header = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
        start = 0
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            are_sizes = all(type(number) is int and number >= 0 for number in (first, last, *entry["shape"]))
            if not are_sizes or not isinstance(entry["dtype"], str):
                raise ValueError(f"{name!r:.80} has a dtype, a shape or a place of another form")
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is not None and last - first != math.prod(entry["shape"]) * dtype.itemsize:
                raise ValueError(f"{name!r:.80} does not have the bytes of its shape")
            if first != start or last < first:
                raise ValueError("its tensors overlap, or leave a hole")
            start = last
        if start != file.size - len(text):
            raise ValueError(f"its tensors have {start} bytes, and there are {file.size - len(text)}")
    except (ValueError, KeyError, TypeError) as error:
        raise _refusal(file, error) from error
    return text, header, texts


def to_tensor(
    content: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None
) -> torch.Tensor:
    """Return a tensor with the dtype and the strides that were written, of its bytes."""
    tensor = content.view(dtype).reshape(shape)
    return tensor if strides is None else torch.empty_strided(shape, strides, dtype=dtype).copy_(tensor)


def _prepare(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], shard_offsets: Mapping[str, ShardOffsets]
) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the header of a file, and the tensors to store in the order of the file."""
    for name, tensor in tensors.items():
        _check(name, tensor)
    entries: dict[str, dict[str, Any]] = {}
    stored: dict[str, torch.Tensor] = {}
    aliases = find_aliases(tensors)
    for name, tensor in tensors.items():
        entry: dict[str, Any] = {}
        if aliases[name] != name and tensor.numel():
            entry["same_as"] = aliases[name]
        else:
            if tensor.stride() != (row_major := _row_major(tensor.shape)):
                strides = torch.empty_like(tensor, device="meta").stride()  # as clone() chooses them
                entry |= {"strides": strides} if strides != row_major else {}
            if tensor.dtype in _VIEWS:
                entry["dtype"] = str(tensor.dtype).removeprefix("torch.")
            stored[name] = tensor.detach() if tensor.requires_grad else tensor
        if name in shard_offsets:
            entry["offsets"], entry["shape"] = map(list, shard_offsets[name])
        if entry:
            entries[name] = entry
    header: dict[str, Any] = {}
    if texts := {**metadata, _KEY: json.dumps(entries)} if entries else dict(metadata):
        header["__metadata__"] = texts
    # Every tensor begins at a multiple of its item's size, as readers that map the file need it.
    stored = dict(sorted(stored.items(), key=lambda item: -item[1].dtype.itemsize))
    start = 0
    for name, tensor in stored.items():
        end = start + tensor.numel() * tensor.itemsize
        dtype = _FORMAT_DTYPES[_VIEWS.get(tensor.dtype, tensor.dtype)]
        shape = [*tensor.shape, 2] if tensor.dtype is torch.complex128 else [*tensor.shape]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(
            f"a header of {len(text)} bytes is more than the {_MAX_HEADER} that safetensors reads: write two files"
        )
    return len(text).to_bytes(8, "little") + text, stored


def _check(name: str, tensor: torch.Tensor) -> None:
    if name == "__metadata__" or not isinstance(name, str):
        raise ValueError(f"{name!r} cannot name a tensor in a safetensors file; give it another")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{name}: a tensor file holds plain tensors, not {type(tensor).__name__}; write what it wraps")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(
            f"{name}: a tensor file holds dense values, not {tensor.layout} on {tensor.device}; write to_dense()"
        )
    if tensor.dtype not in _FORMAT_DTYPES and tensor.dtype not in _VIEWS:
        raise TypeError(f"{name}: safetensors has no {tensor.dtype}; convert it to a dtype that holds its values")


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor of that shape."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * (size or 1))
    return tuple(strides[::-1]) if shape else ()


def _stream(file: Sink, header: bytes, tensors: Iterable[torch.Tensor]) -> tuple[int, int, str]:
    file.write(header)
    size, crc = len(header), zlib.crc32(header)
    parts = [crc]
    for tensor in tensors:
        content, of_tensor = None, 0
        for content in _contents(tensor):
            file.write(content)
            crc, of_tensor = zlib.crc32(content, crc), zlib.crc32(content, of_tensor)
            size += content.nbytes
        parts.append(of_tensor)
        del tensor, content  # before the next is loaded
    return size, crc, "".join(f"{part:08x}" for part in parts)


def _contents(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield buffers of at most `CHUNK` bytes, which are ``tensor`` in row-major order."""
    # hot path: "chainring, asynchronous" in benchmarks/snapshot.py
    if tensor.dtype in _NUMPY and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg():
        # Through NumPy: each operation of torch would hand Python's lock to the training and wait to have it back.
        content = tensor.numpy().reshape(-1).view(np.uint8)
        yield from (content[start : start + CHUNK] for start in range(0, len(content), CHUNK))
        return
    for chunk in _chunks(tensor):
        yield chunk.resolve_conj().resolve_neg().cpu().view(torch.uint8).numpy()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield one-dimensional tensors of at most `CHUNK` bytes, which are ``tensor`` in row-major order."""
    size = tensor.numel() * tensor.itemsize
    if size <= CHUNK:
        yield tensor.contiguous().reshape(-1)
    else:
        rows = len(tensor) * CHUNK // size
        for block in torch.split(tensor, rows) if rows > 1 else tensor:
            yield from _chunks(block)


def write_with_checksum(file: BinaryIO, tensors: Mapping[str, torch.Tensor], load: Load | None = None) -> None:
    """Write tensors with a checksum in the metadata, for a file that has no manifest.

    The checksum is the CRC-32 of the file with eight zeros in its place.
    """
    header, stored = _prepare(tensors, {"writer": _KEY, "crc32": "00000000"}, {})
    _, crc, _ = _stream(file, header, map(load, stored.values()) if load else stored.values())
    found = _CHECKSUM.search(header)
    assert found is not None
    file.seek(found.start(1))
    file.write(b"%08x" % crc)


def verify_file(file: StoredFile) -> tuple[int, bool]:
    """Compare a file with its checksum, if it has one, which `write_with_checksum` wrote; raise as `read` does.

    Return the number of its tensors, and whether it has a checksum.
    """
    text, stored = read_header(file)
    expected, crc = _recorded_checksum(file, text)
    _compare(file, expected, file.checksum(len(text), crc))
    return len(stored), expected is not None


def _recorded_checksum(file: StoredFile, header: bytes) -> tuple[bytes | None, int]:
    """Return the checksum in a header, if it has one, and the CRC-32 of the header without it."""
    found = _CHECKSUM.search(header)
    if found is None:
        if b'"writer":"chainring"' in header:
            _compare(file, b"", 0)
        return None, zlib.crc32(header)
    return found.group(1), zlib.crc32(header[: found.start(1)] + b"00000000" + header[found.end(1) :])


def _compare(file: StoredFile, expected: bytes | None, crc: int) -> None:
    if expected not in (None, b"%08x" % crc):
        raise ValueError(f"{file.path} is damaged: its checksum is another. Use another copy")


def is_pickle(file: StoredFile) -> bool:
    """Return whether a file begins as those of ``torch.save`` and NumPy do, an archive or a pickle, not as safetensors."""
    start = file.read_bytes(0, min(9, file.size))
    return start.startswith((b"PK\x03\x04", b"\x80")) and start[8:] != b"{"
