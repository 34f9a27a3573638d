"""Files of ``torch.save``, read by torch's reader of weights alone, which runs nothing."""

from __future__ import annotations

import contextlib
import io
import os
import pickletools
import stat
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The beginning of a file of ``torch.save`` before 1.6: a number in a pickle."""
_DEEPEST_TUPLE = 16
_OF_LEGACY = 4  # pickles at the beginning of a file before 1.6
_DEEPEST, _MOST = 100, 10_000_000  # levels of containers in one another, and values in all of them
_PATHS = [
    f"{module}.{name}"
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
]


def is_regular_file(path: Path) -> bool:
    """Return whether there is a regular file, perhaps behind a link: to open a pipe would be to wait for ever."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def is_torch_file(path: Path) -> bool:
    """Return whether a file is one of ``torch.save``, by what is in it."""
    if not is_regular_file(path):
        return False
    with path.open("rb") as file:
        start = file.read(len(_LEGACY))
    return start == _LEGACY or (start.startswith(_ZIP) and any(name.endswith("/data.pkl") for name in _members(path)))


def _members(path: Path) -> list[str]:
    """Return the names in a zip; none of a file that is not one, or no longer one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, RuntimeError):
        return []


def read_torch_file(path: Path) -> Any:
    """Return what ``torch.save`` has written: tensors on the CPU, plain values, and paths as text.

    Raises:
        ValueError: it is damaged, or holds anything else.
    """
    _check_size(path)
    return read_torch_stream(path, str(path))


def read_torch_stream(source: Path | BinaryIO, where: str) -> Any:
    """Return what ``torch.save`` has written; see `read_torch_file`."""
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            _check_pickle(source)
            content = torch.load(source, map_location="cpu", weights_only=True)
        _check_storages(_check_tree(content), source)
    except Exception as error:  # of a damaged file torch's reader raises whatever its parts raise
        raise ValueError(f"{where} cannot be read: {_describe(error)}") from error
    return content


class _Dtype:
    """What stands for a dtype of NumPy."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self.code = f"{state[1]}{self.code}"


class NumPyArray:
    """What stands for an array of NumPy, which nothing is taken from."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _to_number(dtype: Any, content: Any) -> Any:
    """Return a number of NumPy as one of Python."""
    if not isinstance(dtype, _Dtype) or dtype.code not in _NUMBERS or not isinstance(content, bytes):
        raise ValueError("it has a value of NumPy that is no number")
    return np.frombuffer(content, dtype.code, 1).item()


_NUMBERS = {
    order + code
    for order in ("", "<", ">")
    for code in ("b1", *(f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)))
}


def _check_pickle(source: Path | BinaryIO) -> None:
    """Refuse tuples of tuples of tuples before torch reads them: as a key, they would take for ever to hash."""
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        if file.read(len(_ZIP)) == _ZIP:
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    if name.endswith(".pkl"):
                        _check_tuples(io.BytesIO(archive.read(name)))
        else:
            file.seek(0)
            for _ in range(_OF_LEGACY):
                _check_tuples(file)
        file.seek(0)


def _check_tuples(file: BinaryIO) -> None:
    """Follow a pickle without making anything, but for each value the number of tuples in one another."""
    depths: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for code, argument, _ in pickletools.genops(file):
        name = code.name
        if name == "MARK":
            marks.append(len(depths))
        elif name.startswith("TUPLE"):
            start = marks.pop() if name == "TUPLE" else len(depths) - int(name[-1])
            depths[start:] = [1 + max(depths[start:], default=0)]
            if depths[-1] > _DEEPEST_TUPLE:
                raise ValueError("it has tuples in tuples without end")
        elif name.endswith("PUT"):
            memo[argument] = depths[-1]
        elif name.endswith("GET"):
            depths.append(memo[argument])
        elif name in ("REDUCE", "NEWOBJ"):  # as of a torch.Size, which is a tuple too
            depths[-2:] = depths[-1:]
        elif name in ("BUILD", "APPEND"):
            depths.pop()
        elif name == "SETITEM":
            del depths[-2:]
        elif name in ("APPENDS", "SETITEMS"):
            del depths[marks.pop() :]
        elif name == "BINPERSID":
            depths[-1] = 0
        elif name not in ("PROTO", "STOP"):
            depths.append(0)


def _check_tree(content: Any) -> list[torch.Tensor]:
    """Refuse containers in containers without end, which nobody could walk through or copy; return the tensors in them."""
    level, seen, tensors = [content], 0, list[torch.Tensor]()
    for _ in range(_DEEPEST):
        tensors += [value for value in level if isinstance(value, torch.Tensor)]
        level = [item for value in level if isinstance(value, (dict, list, tuple, set)) for item in _items(value)]
        seen += len(level)
        if not level:
            return tensors
        if seen > _MOST:
            break
    raise ValueError("it has lists in lists without end")


def _check_storages(tensors: Iterable[torch.Tensor], source: Path | BinaryIO) -> None:
    """Refuse tensors that are longer than what the archive has of them: torch 2.6 would read whatever lies behind it."""
    dense = [each for each in tensors if each.layout is torch.strided and not each.is_meta]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in dense}
    with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        file.seek(0)
        if file.read(len(_ZIP)) != _ZIP:
            return
        with zipfile.ZipFile(file) as archive:
            sizes = Counter(member.file_size for member in archive.infolist())
    if +Counter(filter(None, storages.values())) - sizes:
        raise ValueError("it ends within a tensor")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _to_text(*parts: Any) -> str:
    """Return a path as text; the system's own class would be another one on another system."""
    return os.path.join(*parts) if parts and all(isinstance(part, str) for part in parts) else ""


def _check_size(path: Path) -> None:
    """Refuse an archive that would become larger than the file, which ``torch.save`` never writes."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:
        raise ValueError(f"{path} is damaged, or cut off: {error}. Use another copy") from error
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError(f"{path} is compressed, as torch.save writes no file: unpack and pack it without compression")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError(f"{path} is damaged: its entries are larger than the file. Use another copy")


def _describe(error: Exception) -> str:
    """Return the reason of torch's reader in a line, with a remedy."""
    text = str(error)
    if "GLOBAL " in text:
        name = text.partition("GLOBAL ")[2].split()[0]
        return (
            f"it holds {name}, which only unpickling could make, and that can run any code. Save plain values in its "
            f"place; if you trust the file, torch.serialization.add_safe_globals([{name.rpartition('.')[2]}]) admits it"
        )
    return (
        f"it is damaged, or not of plain tensors and values ({type(error).__name__}: {text.splitlines()[0] if text else ''})"
    )


_STAND_INS: list[Any] = [
    *((_to_text, name) for name in _PATHS),
    *((_to_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((NumPyArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    (NumPyArray, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
]
"""What torch's reader makes in place of paths and of values of NumPy: text, numbers of Python, and nothing of arrays."""
