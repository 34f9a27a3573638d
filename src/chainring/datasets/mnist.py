"""MNIST and Fashion-MNIST, downloaded once, and their IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chainring.datasets._download import RemoteFiles
from chainring.datasets.tuple_dataset import TupleDataset

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


def get_mnist(withlabel: bool = True, ndim: int = 1, scale: float = 1.0, *, source: RemoteFiles = MNIST) -> tuple[Any, Any]:
    """Return 70,000 handwritten digits of 28 x 28 pixels: 60,000 training and 10,000 test examples.

    The files (11 MB) are downloaded once, into ``$CHAINRING_DATASET_ROOT/mnist``, by default into
    ``~/.cache/chainring/mnist``, and checked each time.

    LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition", 1998.

    Args:
        withlabel: examples are pairs of an image and its label (int64), otherwise images alone.
        ndim: the dimensions of an image (float32): 1 is (784,), 2 is (28, 28), 3 is (1, 28, 28).
        scale: the value of the brightest pixel, which is ink; pixels are from 0 to it.
        source: another source of four files of the same names, such as ``dataclasses.replace(MNIST, mirrors=(...,))`` for
            a mirror of your own.

    Returns:
        The training and the test dataset, each a `TupleDataset` or an array.

    Raises:
        OSError: a file is missing and cannot be downloaded; the message says which file to put where.
        ValueError: ``ndim`` is not 1, 2 or 3; or a file of a ``source`` of your own is not such an IDX file.

    Example::

        train, test = get_mnist()
        image, label = train[0]
    """
    if ndim not in (1, 2, 3):
        raise ValueError(f"ndim is 1, 2 or 3, got {ndim!r}")
    missing = [name for names in _FILES for name in names if name not in source.sha256]
    if missing:
        raise ValueError(f"a source names the four files of MNIST, and {source.name!r} lacks {', '.join(missing)}")
    paths = source.download()
    train, test = (_make_dataset(paths[images], paths[labels], withlabel, ndim, scale) for images, labels in _FILES)
    return train, test


def get_fashion_mnist(
    withlabel: bool = True, ndim: int = 1, scale: float = 1.0, *, source: RemoteFiles = FASHION_MNIST
) -> tuple[Any, Any]:
    """Return 70,000 images of clothes in ten classes; arguments, results and errors are those of `get_mnist`.

    The files (31 MB) are kept in ``$CHAINRING_DATASET_ROOT/fashion-mnist``.

    Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.
    """
    return get_mnist(withlabel, ndim, scale, source=source)


def _make_dataset(image_path: Path, label_path: Path, withlabel: bool, ndim: int, scale: float) -> Any:
    pixels, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if len(pixels) != len(labels):
        raise ValueError(f"{image_path} must have one image for each of the {len(labels)} labels, has {len(pixels)}")
    count, rows, columns = pixels.shape
    shape = {1: (rows * columns,), 2: (rows, columns), 3: (1, rows, columns)}[ndim]
    # Looked up in a table, so that there is no array of float64 on the way.
    images = (np.arange(256) / 255 * scale).astype(np.float32)[pixels].reshape(count, *shape)
    return TupleDataset(images, labels.astype(np.int64)) if withlabel else images


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
