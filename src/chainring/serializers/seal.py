"""A tensor file with its own checksum in its metadata, for a model that is saved as one file, without a manifest."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from chainring.serializers.tensor_file import CHUNK, MARKS, MAX_HEADER, write

_SEAL = re.compile(rb'"crc32":"([0-9a-f]{8})"')  # cannot stand in a name, where JSON escapes quotes
_WRITER = re.compile(rb'"writer":"chainring"')


def write_sealed(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a new file as `write` does, with its own checksum in its metadata, for a file that has no manifest.

    The checksum is the CRC-32 of the file with eight zeros in its place.
    """
    _, crc = write(path, tensors, {"writer": MARKS, "crc32": "00000000"})
    with Path(path).open("r+b") as file:
        found = _SEAL.search(file.read(_length_of_header(file)))
        assert found is not None
        file.seek(found.start(1))
        file.write(b"%08x" % crc)
        file.flush()
        os.fsync(file.fileno())


def check_seal(path: str | os.PathLike[str]) -> bool:
    """Compares a file that `write_sealed` wrote with its checksum. One of another writer has none: then it is false.

    Raises:
        ValueError: the file is not what was written, or no file: to open a pipe would be to wait for ever.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no plain file; give the path of a model's file")
    with Path(path).open("rb") as file:
        header = bytearray(file.read(_length_of_header(file)))
        seal = _SEAL.search(header)
        if seal is None and not _WRITER.search(header):
            return False
        crc, written = 0, b""
        if seal is not None:
            written = bytes(seal.group(1))
            header[slice(*seal.span(1))] = b"00000000"
            crc = zlib.crc32(header)
            while chunk := file.read(CHUNK):
                crc = zlib.crc32(chunk, crc)
        if written != b"%08x" % crc:
            raise ValueError(f"{path} is damaged: its checksum is another. Use another copy")
    return True


def is_of_pickle(path: Path) -> bool:
    """Whether a file begins as those of ``torch.save`` and NumPy do, an archive or a pickle, and not as safetensors."""
    with path.open("rb") as file:
        start = file.read(9)
    return start.startswith((b"PK\x03\x04", b"\x80")) and start[8:] != b"{"


def _length_of_header(file: BinaryIO) -> int:
    """The bytes up to the first tensor, as far as the file says and holds them; the position is put back."""
    claimed = int.from_bytes(file.read(8), "little")
    file.seek(0)
    return 8 + min(claimed, MAX_HEADER)
