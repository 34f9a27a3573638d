"""Files, read on demand: images in folders and in ZIP archives, with and without labels, and the lines of texts."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from chainring._random import Indices
from chainring.datasets.base import DatasetMixin

Path = str | os.PathLike[str]
_STORED, _DEFLATED = 0, 8  # methods of compression in a ZIP archive


class ImageDataset(DatasetMixin):
    """Example i is image i, as an array of (channels, height, width).

    Pixels have the values of the file, mostly from 0 to 255, and are not scaled. A grey image has 1 channel, or 2 with
    alpha; a colour image has 3, or 4 with alpha. The orientation in the EXIF data is not applied, and palettes are not
    looked up: an image with a palette returns the indices of its colours, as needed for segmentation masks.

    Args:
        paths: paths below ``root``; or the name of a text file (UTF-8) that has one on each line, also below ``root``.
            The text file itself may be anywhere. Empty lines are skipped.
        root: the directory that the paths start from.
        dtype: of the arrays, float32 by default; any numeric dtype of NumPy.

    Raises:
        ImportError: Pillow is not installed.
        TypeError: a path is not a path, or the dtype is not numeric.
        ValueError: the dtype cannot hold the pixels of an image; raised when the image is read.
        OSError: a file cannot be read or is not an image; raised when it is read.

    Example::

        dataset = ImageDataset(["cat.png", "dog.png"], root="images")
        dataset[0].shape  # (3, height, width)
    """

    def __init__(self, paths: Path | Sequence[Path], root: Path = ".", dtype: npt.DTypeLike | None = None) -> None:
        _check_pillow()
        self.root = root
        self.dtype = _numeric_dtype("dtype", np.float32 if dtype is None else dtype)
        if isinstance(paths, (str, os.PathLike)):
            with open(paths, encoding="utf-8") as file:
                paths = [line.strip() for line in file if line.strip()]
        self.paths = [_as_str(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def get_example(self, i: int) -> npt.NDArray[Any]:
        path = os.path.join(self.root, self.paths[i])
        return _read_image(path, path, self.dtype)


class ZippedImageDataset(DatasetMixin):
    """Example i is image i of a ZIP archive, in the order of its directory; images are as in `ImageDataset`.

    The archive's directory is read once, and each image is read from the disk on demand. No file stays open: the dataset
    can be pickled, and shared by forked processes and threads. Use `ConcatenatedDataset` to combine several archives.

    Args:
        zipfilename: the path of the archive. Its folders do not count as examples.
        dtype: of the arrays, float32 by default; any numeric dtype of NumPy.

    Raises:
        ImportError: Pillow is not installed.
        TypeError: the dtype is not numeric.
        ValueError: an image is encrypted, or compressed by another method than Deflate; when it is read, the file has
            changed, or the dtype cannot hold its pixels.
        OSError: the archive cannot be read.

    Example::

        image = ZippedImageDataset("images.zip")[0]
    """

    def __init__(self, zipfilename: Path, dtype: npt.DTypeLike | None = None) -> None:
        from zipfile import ZipFile

        _check_pillow()
        self.zipfilename = _as_str(zipfilename)
        self.dtype = _numeric_dtype("dtype", np.float32 if dtype is None else dtype)
        self._members: dict[str, tuple[int, int, int, int]] = {}  # where the header is, compressed size, method and CRC-32
        with ZipFile(self.zipfilename) as archive:
            for info in archive.infolist():
                if info.flag_bits & 1 or info.compress_type not in (_STORED, _DEFLATED):
                    raise ValueError(
                        f"{info.filename} in {self.zipfilename} is encrypted or compressed otherwise than by Deflate; pack "
                        "it again"
                    )
                self._members[info.filename] = info.header_offset, info.compress_size, info.compress_type, info.CRC
        self.paths = [name for name in self._members if not name.endswith("/")]

    def __len__(self) -> int:
        return len(self.paths)

    def get_example(self, i: int) -> npt.NDArray[Any]:
        path, name = self.zipfilename, self.paths[i]
        offset, size, method, crc = self._members[name]
        # Opened again each time, which takes some microseconds: an open file's position would be shared by forks. The
        # format is that of https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.7.
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                signature, *lengths = struct.unpack("<4s22xHH", file.read(30))
                file.seek(sum(lengths), os.SEEK_CUR)
                content = file.read(size)
            content = content if method == _STORED else zlib.decompress(content, -zlib.MAX_WBITS)
        except (struct.error, zlib.error):
            signature, content = b"", b""
        if signature != b"PK\3\4" or zlib.crc32(content) != crc:
            raise ValueError(f"{path} does not hold {name} as its directory says: it is damaged, or has changed since")
        return _read_image(io.BytesIO(content), f"{path}/{name}", self.dtype)


class LabeledImageDataset(DatasetMixin):
    """Example i is the pair of image i and its label; images are as in `ImageDataset`.

    Args:
        pairs: pairs of a path below ``root`` and an integer label; or the name of a text file (UTF-8) whose lines have a
            path, white space and a label.
        root: the directory that the paths start from.
        dtype: of the images, float32 by default.
        label_dtype: of the labels, int64 by default, as ``torch.nn.functional.cross_entropy`` needs them.

    Raises:
        TypeError: an item is not such a pair.
        ValueError: a line of the text file has no integer label, or ``label_dtype`` cannot hold the labels.

    Example::

        dataset = LabeledImageDataset([("cat.png", 0), ("dog.png", 1)], root="images")
        image, label = dataset[1]
    """

    def __init__(
        self,
        pairs: Path | Sequence[tuple[Path, int]],
        root: Path = ".",
        dtype: npt.DTypeLike | None = None,
        label_dtype: npt.DTypeLike | None = None,
    ) -> None:
        pairs = _read_pairs(pairs) if isinstance(pairs, (str, os.PathLike)) else list(pairs)
        for i, pair in enumerate(pairs):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], (int, np.integer)):
                raise TypeError(f"each item of pairs is a path and an integer label, got {pair!r} as item {i}")
        self.images = ImageDataset([path for path, _ in pairs], root, dtype)
        self.labels = _labels_of(pairs, label_dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def get_example(self, i: int) -> tuple[npt.NDArray[Any], Any]:
        return self.images.get_example(i), self.labels[i]


class LabeledZippedImageDataset(DatasetMixin):
    """Example i is an image of a ZIP archive and its label, which are given by line i of a text file.

    Args:
        zipfilename: the path of the archive, read as by `ZippedImageDataset`.
        labelfilename: the name of a text file (UTF-8) outside of the archive, whose lines have a name in the archive, white
            space and an integer label.
        dtype, label_dtype: as for `LabeledImageDataset`.

    Raises:
        ValueError: a line has no integer label or names an image that is not in the archive, or ``label_dtype`` cannot
            hold the labels; also as for `ZippedImageDataset`.

    Example::

        dataset = LabeledZippedImageDataset("images.zip", "labels.txt")
        image, label = dataset[0]
    """

    def __init__(
        self,
        zipfilename: Path,
        labelfilename: Path,
        dtype: npt.DTypeLike | None = None,
        label_dtype: npt.DTypeLike | None = None,
    ) -> None:
        pairs = _read_pairs(labelfilename)
        self.images = ZippedImageDataset(zipfilename, dtype)
        paths = [_as_str(path) for path, _ in pairs]
        if missing := set(paths).difference(self.images.paths):
            raise ValueError(f"{labelfilename} names images that {zipfilename} has not: {sorted(missing)[:5]}")
        self.images.paths = paths
        self.labels = _labels_of(pairs, label_dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def get_example(self, i: int) -> tuple[npt.NDArray[Any], Any]:
        return self.images.get_example(i), self.labels[i]


def _check_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError('images are read by Pillow: pip install "chainring[examples]"') from error


def _labels_of(pairs: Sequence[tuple[Path, int]], label_dtype: npt.DTypeLike | None) -> npt.NDArray[Any]:
    dtype = _numeric_dtype("label_dtype", np.int64 if label_dtype is None else label_dtype)
    given = np.array([label for _, label in pairs], np.int64)
    labels: npt.NDArray[Any] = given.astype(dtype)
    if not np.array_equal(labels, given):
        raise ValueError(f"label_dtype {dtype} cannot hold labels from {given.min()} to {given.max()}; take a larger one")
    return labels


def _read_image(source: str | IO[bytes], path: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    from PIL import Image

    try:
        with Image.open(source) as image:
            pixels = np.asarray(image)
    except Exception as error:  # of many types, and Pillow does not name a truncated file
        error.add_note(f"while the image {path} was read")
        raise
    converted = pixels.astype(dtype)
    if not np.can_cast(pixels.dtype, dtype, "safe") and not np.array_equal(converted, pixels):
        raise ValueError(
            f"{path} has pixels of {pixels.dtype} from {pixels.min()} to {pixels.max()}, which {dtype} cannot hold; "
            "pass another dtype="
        )
    return converted[np.newaxis] if converted.ndim == 2 else np.ascontiguousarray(converted.transpose(2, 0, 1))


def _numeric_dtype(name: str, value: npt.DTypeLike) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(value)
    except TypeError as error:
        raise TypeError(f'{name} is a dtype of NumPy\'s, such as "float32" or np.uint8, got {value!r}') from error
    if dtype.kind not in "biuf":
        raise TypeError(f"{name} is a dtype of numbers, got {dtype}")
    return dtype


def _as_str(path: Path) -> str:
    name = os.fspath(path)  # raises for what is not a path
    if not isinstance(name, str):
        raise TypeError(f"a path is a str or a Path, got {path!r}")
    return name


def _read_pairs(path: Path) -> list[tuple[Path, int]]:
    pairs: list[tuple[Path, int]] = []
    with open(path, encoding="utf-8") as file:
        for line_number, line in enumerate(file, 1):
            fields = line.rsplit(maxsplit=1)  # a path may have spaces
            try:
                if fields:
                    name, label = fields
                    pairs.append((name.strip(), int(label)))
            except ValueError:
                raise ValueError(
                    f'a line has a path and an integer label, such as "cat.png 3", got {line.rstrip()!r} '
                    f"in line {line_number} of {os.fspath(path)}"
                ) from None
    return pairs


class TextDataset(DatasetMixin):
    r"""Example i is line i of a text file, without its line end; with several files, the tuple of their lines i.

    The constructor finds where lines start (8 bytes per line are kept), and each example is read from the disk on demand,
    so a file may be larger than the memory. No file stays open: the dataset can be pickled, and shared by forked
    processes and threads. The files must not change while the dataset is in use.

    Lines end with ``"\n"`` or ``"\r\n"``. Empty lines are examples too; ``filter_func=str.strip`` leaves them out.

    Args:
        paths: a file, or several with as many lines each, such as sentences and their translations.
        encoding: of all files; a line must end with the byte 0x0A (not so in UTF-16).
        filter_func: called at construction with one line of each file; the lines for which it returns a false value are
            left out.

    Raises:
        ValueError: there is no path, files have different numbers of lines, or the encoding is unknown or unsuitable.
        OSError: a file cannot be read.
        UnicodeDecodeError: a line is not in the encoding; raised when it is read.

    Example::

        dataset = TextDataset(["train.en", "train.de"], filter_func=lambda en, de: en and de)
        en, de = dataset[0]
    """

    def __init__(
        self,
        paths: Path | Sequence[Path],
        encoding: str = "utf-8",
        filter_func: Callable[..., Any] | None = None,
    ) -> None:
        if filter_func is not None and not callable(filter_func):
            raise TypeError(f"filter_func is a function of one line of each file, got {type(filter_func).__name__}")
        try:
            newlines = "\n\n".encode(encoding)
        except LookupError as error:
            raise ValueError(f"encoding is the name of one of Python's codecs, got {encoding!r}") from error
        if not newlines.endswith(b"\n\n"):  # a byte order mark may come before them
            rule = f"an encoding ends lines with the byte 0x0A, and {encoding!r} does not"
            raise ValueError(f"{rule}; convert the file to UTF-8")
        self._is_single = isinstance(paths, (str, os.PathLike))
        self.paths = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        if not self.paths:
            raise ValueError("a TextDataset needs at least one file, got none")
        self.encoding = encoding
        self._offsets = [_find_lines(path) for path in self.paths]
        counts = {path: len(offsets) - 1 for path, offsets in zip(self.paths, self._offsets, strict=True)}
        if len(set(counts.values())) > 1:
            raise ValueError(f"several files must have the same number of lines, got {counts}")
        self._selected: Indices | None = None  # the indices of the lines that the filter has kept
        if filter_func is not None:
            with ExitStack() as stack:
                files = [stack.enter_context(open(path, "rb")) for path in self.paths]
                rows = enumerate(zip(*files, strict=True))
                self._selected = np.flatnonzero([bool(filter_func(*self._decode(index, lines))) for index, lines in rows])

    def __len__(self) -> int:
        return len(self._offsets[0]) - 1 if self._selected is None else len(self._selected)

    def get_example(self, i: int) -> str | tuple[str, ...]:
        index = i if self._selected is None else int(self._selected[i])
        lines = []
        for path, offsets in zip(self.paths, self._offsets, strict=True):
            start, stop, size = offsets[[index, index + 1, -1]].tolist()
            # Opened again for each line, which takes some microseconds: an open file's position would be shared by forks.
            with open(path, "rb", buffering=0) as file:
                current_size = os.fstat(file.fileno()).st_size
                file.seek(start)
                lines.append(file.read(stop - start))
            if current_size != size:
                raise ValueError(
                    f"{path} has {current_size} bytes and had {size} when its lines were counted: a file must not "
                    "change under a TextDataset; make the dataset again"
                )
        texts = self._decode(index, lines)
        return texts[0] if self._is_single else tuple(texts)

    def _decode(self, index: int, lines: Sequence[bytes]) -> list[str]:
        texts = []
        for path, line in zip(self.paths, lines, strict=True):
            try:
                texts.append(line.removesuffix(b"\n").removesuffix(b"\r").decode(self.encoding))
            except UnicodeDecodeError as error:
                error.add_note(f"in line {index + 1} of {path}")
                raise
        return texts


def _find_lines(path: str) -> Indices:
    """Return the offsets at which the lines of a file start; the last one is the file's size."""
    starts, size = [np.zeros(1, np.int64)], 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 0x0A) + (size + 1))
            size += len(chunk)
    offsets = np.concatenate(starts)
    return offsets if offsets[-1] == size else np.append(offsets, size)  # the last line may have no end
