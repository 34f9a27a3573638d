"""ImageDataset and LabeledImageDataset: image files, read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chainring.datasets.base import DatasetMixin

Path = str | os.PathLike[str]


class ImageDataset(DatasetMixin):
    """Example i is image i, as an array of (channels, height, width).

    Pixels are as the file has them, mostly from 0 to 255, and not scaled. A grey image has 1 channel, with alpha 2; a
    colour image 3, with alpha 4. An orientation in the EXIF data is not applied, and a palette not looked up: such an
    image gives the indices of its colours, as masks of classes need.

    Args:
        paths: paths below ``root``; or the name of a text file (UTF-8) that has one on each line, also below ``root``.
            The text file itself need not lie there. Empty lines are skipped.
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
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise ImportError('images are read by Pillow: pip install "chainring[examples]"') from error
        self.root = root
        self.dtype = _numeric_dtype("dtype", np.float32 if dtype is None else dtype)
        if isinstance(paths, (str, os.PathLike)):
            with open(paths, encoding="utf-8") as file:
                paths = [line.strip() for line in file if line.strip()]
        self.paths = [_as_str(path) for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def get_example(self, i: int) -> npt.NDArray[Any]:
        return _read_image(os.path.join(self.root, self.paths[i]), self.dtype)


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
        label_dtype = _numeric_dtype("label_dtype", np.int64 if label_dtype is None else label_dtype)
        labels = np.array([label for _, label in pairs], np.int64)
        self.labels = labels.astype(label_dtype)
        if not np.array_equal(self.labels, labels):
            given = f"labels from {labels.min()} to {labels.max()}"
            raise ValueError(f"label_dtype {label_dtype} cannot hold {given}; take a larger one")

    def __len__(self) -> int:
        return len(self.labels)

    def get_example(self, i: int) -> tuple[npt.NDArray[Any], Any]:
        return self.images.get_example(i), self.labels[i]


def _read_image(path: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    from PIL import Image

    try:
        with Image.open(path) as image:
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
