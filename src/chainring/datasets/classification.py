"""Images to be classified: digits that scikit-learn ships; and MNIST, Fashion-MNIST and CIFAR, downloaded once."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from chainring._files import atomic_write
from chainring._random import preserve_host_rng
from chainring.datasets.combined import TupleDataset

_VARIABLE = "CHAINRING_DATASET_ROOT"
_TIMEOUT = 30.0  # seconds without a byte


@dataclass(frozen=True)
class RemoteFiles:
    """The files of a dataset on the network: their names, mirrors and checksums.

    Args:
        name: the subdirectory of the files in the cache directory.
        mirrors: base URLs, in the order in which they are tried.
        sha256: the SHA-256 of each file, in hexadecimal, by the file's name.

    Raises:
        ValueError: there is no mirror, a name is not a plain file name, or a SHA-256 is not 64 hexadecimal digits.

    Example::

        files = RemoteFiles("words", ("https://example.org/words",), {"en.txt": "9f86d0..."})  # all 64 digits
        path = files.download()["en.txt"]
    """

    name: str
    mirrors: tuple[str, ...]
    sha256: Mapping[str, str]

    def __post_init__(self) -> None:
        if isinstance(self.mirrors, str) or not self.mirrors:
            raise ValueError(f"mirrors is a tuple of at least one address, got {self.mirrors!r}")
        for name in (self.name, *self.sha256):
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(f"a name is of letters, digits, '_', '.' and '-', and starts with no dot, got {name!r}")
        for name, digest in self.sha256.items():
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"a SHA-256 is 64 hexadecimal digits in lower case, got {digest!r} for {name}")

    def download(self) -> dict[str, Path]:
        """Download the files that are missing or damaged.

        They are kept in ``$CHAINRING_DATASET_ROOT/<name>``, by default in ``~/.cache/chainring/<name>``. If several
        processes call this, one downloads and the others wait. Files that exist are only read.

        Returns:
            The path of each file, by its name.

        Raises:
            OSError: no mirror provided a file; the message lists every missing file, where to put it and its SHA-256. Or
                the directory is not writable.
        """
        root = Path(os.environ.get(_VARIABLE) or "~/.cache/chainring").expanduser()
        directory = root / self.name
        paths = {name: directory / name for name in self.sha256}
        if not self._missing(paths):
            return paths
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / ".lock").open("ab")  # it stays: a new file of this name would not be locked
        except OSError as error:
            raise OSError(
                f"datasets are kept in a directory that can be written, and {directory} cannot ({error}): set the "
                f"environment variable {_VARIABLE} to another"
            ) from error
        import filelock  # for those who download

        with lock:
            filelock.lock_descriptor(lock.fileno())
            for name in self._missing(paths):  # another process may have downloaded some meanwhile
                self._download_file(name, paths)
        return paths

    def _missing(self, paths: Mapping[str, Path]) -> list[str]:
        digests: dict[str, str] = {}
        for name, path in paths.items():
            if path.is_file():
                with path.open("rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return [name for name in paths if self.sha256[name] != digests.get(name)]

    def _download_file(self, name: str, paths: Mapping[str, Path]) -> None:
        failures = []
        for mirror in self.mirrors:
            url = f"{mirror.rstrip('/')}/{name}"
            try:
                return _download(url, paths[name], self.sha256[name])
            except _MirrorError as error:
                failures.append(f"  {url}: {error}")
        raise OSError(
            f"{name} could not be downloaded:\n"
            + "\n".join(failures)
            + "\nRun again when there is a network. Or put these files there yourself:\n"
            + "\n".join(f"  {paths[name]}  (SHA-256 {self.sha256[name]})" for name in self._missing(paths))
            + f"\nTo keep datasets in another directory, set the environment variable {_VARIABLE}."
        )


class _MirrorError(Exception):
    """A mirror did not give the file."""


class _ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which outlives the bar."""

    monitor_interval = 0


def _download(url: str, path: Path, sha256: str) -> None:
    """Download a file; one that is cut or has another SHA-256 never takes the place of ``path``."""
    try:
        response = urlopen(url, timeout=_TIMEOUT)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise _MirrorError(str(error)) from error
    digest, total = hashlib.sha256(), response.length
    bar = _ProgressBar(total=total, desc=path.name, unit="B", unit_scale=True, disable=None)
    with response, bar, atomic_write(path) as file:
        while True:
            try:
                chunk = response.read(1 << 16)
            except (OSError, HTTPException) as error:  # only of reading: a full disk is not an error of the mirror
                raise _MirrorError(f"the connection was cut ({error})") from error
            if not chunk:
                break
            file.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
        if total is not None and file.tell() < total:
            raise _MirrorError(f"the connection was cut after {file.tell()} of {total} bytes")
        if digest.hexdigest() != sha256:
            raise _MirrorError(f"this file has the SHA-256 {digest.hexdigest()}")


_FILES = (
    ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
)

MNIST = RemoteFiles(
    name="mnist",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    sha256={
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)
"""The files of `get_mnist`."""

FASHION_MNIST = RemoteFiles(
    name="fashion-mnist",
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    ),
    sha256={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
)
"""The files of `get_fashion_mnist`."""

CIFAR10 = RemoteFiles(
    name="cifar-10",
    mirrors=("https://www.cs.toronto.edu/~kriz",),
    sha256={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
)
"""The file of `get_cifar10`."""

CIFAR100 = RemoteFiles(
    name="cifar-100",
    mirrors=("https://www.cs.toronto.edu/~kriz",),
    sha256={"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
)
"""The file of `get_cifar100`."""

_CIFAR_SIZE = 3 * 32 * 32  # bytes of an image


def get_digits(withlabel: bool = True, ndim: int = 1, scale: float = 1.0) -> tuple[Any, Any]:
    """Return 1,797 handwritten digits of 8 x 8 pixels, 1,437 training and 360 test examples.

    The split is fixed: every fifth image is a test image, since the file is sorted by who wrote them. Source:
    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.

    Args:
        withlabel: examples are pairs of an image and its label (int64), otherwise images alone.
        ndim: the dimensions of an image (float32): 1 is (64,), 2 is (8, 8), 3 is (1, 8, 8).
        scale: the value of a black pixel; pixels are from 0 to it.

    Returns:
        The training and the test dataset, each a `TupleDataset` or an array.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: ``ndim`` is not 1, 2 or 3.

    Example::

        train, test = get_digits()
        image, label = train[0]
    """
    shape = _shape_of(ndim, 1, 8, 8)
    try:
        with preserve_host_rng():  # the first import of scikit-learn draws from Python's generator
            from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('the digits come with scikit-learn: pip install "chainring[examples]"') from error
    digits: Any = load_digits()
    images = (digits.images * (scale / 16)).astype(np.float32).reshape(-1, *shape)
    is_test = np.arange(len(images)) % 5 == 0
    if not withlabel:
        return images[~is_test], images[is_test]
    labels = digits.target.astype(np.int64)
    return TupleDataset(images[~is_test], labels[~is_test]), TupleDataset(images[is_test], labels[is_test])


def get_mnist(withlabel: bool = True, ndim: int = 1, scale: float = 1.0, *, source: RemoteFiles = MNIST) -> tuple[Any, Any]:
    """Return 70,000 handwritten digits of 28 x 28 pixels: 60,000 training and 10,000 test examples.

    The files (11 MB) are downloaded once, into ``$CHAINRING_DATASET_ROOT/mnist``, by default into
    ``~/.cache/chainring/mnist``, and checked each time.

    LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.

    Args:
        withlabel: examples are pairs of an image and its label (int64), otherwise images alone.
        ndim: the dimensions of an image (float32): 1 is (784,), 2 is (28, 28), 3 is (1, 28, 28).
        scale: the value of the brightest pixel, which is ink; pixels are from 0 to it.
        source: another source of four files of the same names, such as ``dataclasses.replace(MNIST, mirrors=(...,))``.

    Returns:
        The training and the test dataset, each a `TupleDataset` or an array.

    Raises:
        OSError: a file is missing and cannot be downloaded; the message says which file to put where.
        ValueError: ``ndim`` is not 1, 2 or 3; or a file of a ``source`` of your own is not such an IDX file.

    Example::

        train, test = get_mnist()
        image, label = train[0]
    """
    _shape_of(ndim, 1, 28, 28)
    missing = [name for names in _FILES for name in names if name not in source.sha256]
    if missing:
        raise ValueError(f"a source names the four files of MNIST, and {source.name!r} lacks {', '.join(missing)}")
    paths = source.download()
    datasets: list[Any] = []
    for names in _FILES:
        image_path, label_path = (paths[name] for name in names)
        pixels, labels = read_idx(image_path, 3), read_idx(label_path, 1)
        if len(pixels) != len(labels):
            raise ValueError(f"{image_path} must have one image for each of the {len(labels)} labels, has {len(pixels)}")
        images = _scale(pixels, scale, np.dtype(np.float32)).reshape(len(pixels), *_shape_of(ndim, 1, *pixels.shape[1:]))
        datasets.append(TupleDataset(images, labels.astype(np.int64)) if withlabel else images)
    train, test = datasets
    return train, test


def get_fashion_mnist(
    withlabel: bool = True, ndim: int = 1, scale: float = 1.0, *, source: RemoteFiles = FASHION_MNIST
) -> tuple[Any, Any]:
    """Return 70,000 images of clothes in ten classes; arguments, results and errors are those of `get_mnist`.

    The files (31 MB) are kept in ``$CHAINRING_DATASET_ROOT/fashion-mnist``.

    Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.
    """
    return get_mnist(withlabel, ndim, scale, source=source)


def _shape_of(ndim: int, channels: int, height: int, width: int) -> tuple[int, ...]:
    shapes = {1: (channels * height * width,), 3: (channels, height, width)}
    if channels == 1:
        shapes |= {2: (height, width)}
    if ndim not in shapes:
        raise ValueError(f"ndim is {'1, 2 or 3' if channels == 1 else '1 or 3'}, got {ndim!r}")
    return shapes[ndim]


def _scale(pixels: npt.NDArray[np.uint8], scale: float, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    scaled: npt.NDArray[Any] = (np.arange(256) / 255 * scale).astype(dtype)[pixels]  # no array of float64 on the way
    return scaled


def read_idx(path: Path, ndim: int) -> npt.NDArray[np.uint8]:
    """Return the array of unsigned bytes in a gzipped IDX file, which must have ``ndim`` axes.

    The format, from yann.lecun.com/exdb/mnist: two zero bytes, the type of an element (8: unsigned byte), the number of
    axes, the length of each axis as a big-endian 32-bit integer, the elements with the last axis changing fastest.

    Raises:
        ValueError: the file is not an IDX file, is cut, or continues after its last element.
    """
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzip file: {error}") from error
    magic = bytes([0, 0, 0x08, ndim])
    if content[:4] != magic or len(content) < 4 + 4 * ndim:
        raise ValueError(
            f"{path} must be an IDX file of unsigned bytes with {ndim} axes: {magic.hex(' ')} and {ndim} lengths of "
            f"four bytes; it starts with {content[:4].hex(' ') or 'nothing'} and has {len(content)} bytes"
        )
    shape = tuple(np.frombuffer(content, ">u4", ndim, 4).tolist())
    elements = np.frombuffer(content, np.uint8)[4 + 4 * ndim :]
    if len(elements) != math.prod(shape):
        raise ValueError(f"{path} must hold {math.prod(shape)} bytes for its shape {shape}, but holds {len(elements)}")
    return elements.reshape(shape)


def get_cifar10(
    withlabel: bool = True,
    ndim: int = 3,
    scale: float = 1.0,
    dtype: npt.DTypeLike | None = None,
    *,
    source: RemoteFiles = CIFAR10,
) -> tuple[Any, Any]:
    """Return 60,000 colour images of 32 x 32 pixels in ten classes: 50,000 training and 10,000 test examples.

    The file (170 MB) is downloaded once, into ``$CHAINRING_DATASET_ROOT/cifar-10``, by default into
    ``~/.cache/chainring/cifar-10``, and checked each time. It is the binary version; nothing is unpickled.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    Args:
        withlabel: as for `get_mnist`.
        ndim: the dimensions of an image: 3 is (3, 32, 32), 1 is (3072,).
        scale: as for `get_mnist`.
        dtype: the floating-point dtype of the images; float32 by default.
        source: another source of the same file, such as ``dataclasses.replace(CIFAR10, mirrors=(...,))``.

    Returns:
        The training and the test dataset, each a `TupleDataset` or an array.

    Raises:
        OSError: the file is missing and cannot be downloaded; the message says which file to put where.
        TypeError: the dtype is not a floating-point dtype.
        ValueError: ``ndim`` is not 1 or 3; or the file of a ``source`` of your own is not such an archive.

    Example::

        train, test = get_cifar10()
        image, label = train[0]
    """
    folder = "cifar-10-batches-bin"
    train = [f"{folder}/data_batch_{number}.bin" for number in range(1, 6)]
    return _get_cifar(source, (train, [f"{folder}/test_batch.bin"]), 1, (withlabel, ndim, scale, dtype))


def get_cifar100(
    withlabel: bool = True,
    ndim: int = 3,
    scale: float = 1.0,
    dtype: npt.DTypeLike | None = None,
    *,
    source: RemoteFiles = CIFAR100,
) -> tuple[Any, Any]:
    """Return 60,000 colour images in a hundred classes; arguments, results and errors are those of `get_cifar10`.

    The labels are those of the hundred fine classes, not of the twenty superclasses. The file (169 MB) is kept in
    ``$CHAINRING_DATASET_ROOT/cifar-100``.
    """
    folder = "cifar-100-binary"
    return _get_cifar(source, ([f"{folder}/train.bin"], [f"{folder}/test.bin"]), 2, (withlabel, ndim, scale, dtype))


def _get_cifar(
    source: RemoteFiles, parts: tuple[list[str], list[str]], label_bytes: int, form: tuple[bool, int, float, Any]
) -> tuple[Any, Any]:
    import tarfile

    withlabel, ndim, scale, dtype = form
    shape = _shape_of(ndim, 3, 32, 32)
    dtype = np.dtype(np.float32 if dtype is None else dtype)
    if dtype.kind != "f":
        raise TypeError(f"dtype is a floating-point dtype, because pixels are from 0 to scale; got {dtype}")
    if len(source.sha256) != 1:
        raise ValueError(f"a source names the one archive of CIFAR, and {source.name!r} has {list(source.sha256)}")
    (path,) = source.download().values()
    contents = {}
    try:
        with tarfile.open(path, "r:gz") as archive:  # nothing is unpacked to the disk
            for member in archive:
                is_wanted = member.isfile() and any(member.name in names for names in parts)
                if is_wanted and (file := archive.extractfile(member)) is not None:
                    contents[member.name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzipped tar archive: {error}") from error
    datasets = []
    for names in parts:
        for name in names:
            size = len(contents.get(name, b""))
            if size == 0 or size % (label_bytes + _CIFAR_SIZE):
                raise ValueError(
                    f"{path} must hold {name}, records of {label_bytes} bytes for labels and {_CIFAR_SIZE} for pixels; it "
                    f"has {size} bytes there"
                )
        rows = np.concatenate([np.frombuffer(contents[name], np.uint8) for name in names])
        rows = rows.reshape(-1, label_bytes + _CIFAR_SIZE)
        images = _scale(rows[:, label_bytes:], scale, dtype).reshape(-1, *shape)
        datasets.append(TupleDataset(images, rows[:, label_bytes - 1].astype(np.int64)) if withlabel else images)
    train, test = datasets
    return train, test
