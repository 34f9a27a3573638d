"""CIFAR-10 and CIFAR-100, downloaded once; their binary version, which holds bytes and no pickles."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chainring.datasets._download import RemoteFiles
from chainring.datasets.tuple_dataset import TupleDataset

_SHAPE = (3, 32, 32)
_SIZE = 3 * 32 * 32
_MIRRORS = ("https://www.cs.toronto.edu/~kriz",)

CIFAR10 = RemoteFiles(
    name="cifar-10",
    mirrors=_MIRRORS,
    sha256={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
)
"""The file of `get_cifar10`."""

CIFAR100 = RemoteFiles(
    name="cifar-100",
    mirrors=_MIRRORS,
    sha256={"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
)
"""The file of `get_cifar100`."""


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
        withlabel: examples are pairs of an image and its label (int64), otherwise images alone.
        ndim: the dimensions of an image: 3 is (3, 32, 32), 1 is (3072,).
        scale: the value of the brightest pixel; pixels are from 0 to it.
        dtype: the floating-point dtype of the images; float32 by default.
        source: another source of the same file, such as ``dataclasses.replace(CIFAR10, mirrors=(...,))`` for a mirror of
            your own.

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
    withlabel, ndim, scale, dtype = form
    if ndim not in (1, 3):
        raise ValueError(f"ndim is 1 or 3, got {ndim!r}")
    dtype = np.dtype(np.float32 if dtype is None else dtype)
    if dtype.kind != "f":
        raise TypeError(f"dtype is a floating-point dtype, because pixels are from 0 to scale; got {dtype}")
    if len(source.sha256) != 1:
        raise ValueError(f"a source names the one archive of CIFAR, and {source.name!r} has {list(source.sha256)}")
    (path,) = source.download().values()
    shape = _SHAPE if ndim == 3 else (_SIZE,)
    table = (np.arange(256) / 255 * scale).astype(dtype)  # looked up, so that there is no array of float64 on the way
    datasets = []
    for names in parts:
        rows = np.concatenate([np.frombuffer(content, np.uint8) for content in _read_members(path, names, label_bytes)])
        rows = rows.reshape(-1, label_bytes + _SIZE)
        images = table[rows[:, label_bytes:]].reshape(-1, *shape)
        datasets.append(TupleDataset(images, rows[:, label_bytes - 1].astype(np.int64)) if withlabel else images)
    train, test = datasets
    return train, test


def _read_members(path: Path, names: list[str], label_bytes: int) -> list[bytes]:
    """Return the content of files in an archive, each of whole records; nothing is unpacked to the disk."""
    import tarfile

    contents = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if member.isfile() and member.name in names and (file := archive.extractfile(member)) is not None:
                    contents[member.name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzipped tar archive: {error}") from error
    for name in names:
        size = len(contents.get(name, b""))
        if size == 0 or size % (label_bytes + _SIZE):
            raise ValueError(
                f"{path} must hold {name}, records of {label_bytes} bytes for labels and {_SIZE} for pixels; it has "
                f"{size} bytes there"
            )
    return [contents[name] for name in names]
