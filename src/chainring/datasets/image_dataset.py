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

    Pixels are as the file has them, from 0 to 255 mostly and not scaled: a grey image has 1 channel, with alpha 2, a
    coloured one 3, with alpha 4. An orientation in the EXIF data is not applied, and a palette not looked up: such an
    image gives the numbers of its colours, as masks of classes need.

    Args:
        paths: paths below ``root``; or the name of a text file (UTF-8) that has one on each line, relative to ``root``
            too, which it need not lie in itself. Empty lines count as none.
        root: the directory that the paths start from.
        dtype: of the arrays, float32 by default; whatever NumPy understands by a dtype of numbers.

    Raises:
        ImportError: Pillow is not installed.
        TypeError: a path is none, or the dtype is none of numbers.
        ValueError: a dtype cannot hold the pixels of an image; raised when the image is read.
        OSError: a file cannot be read or is no image; raised when it is read.
    """

    def __init__(self, paths: Path | Sequence[Path], root: Path = ".", dtype: Any = None) -> None:
        _require_pillow()
        self.root = root
        self.dtype = _number_dtype("dtype", np.float32 if dtype is None else dtype)
        names = _lines_of(paths) if isinstance(paths, (str, os.PathLike)) else paths
        self.paths = [_as_path(name) for name in names]

    def __len__(self) -> int:
        return len(self.paths)

    def get_example(self, i: int) -> npt.NDArray[Any]:
        return _read_image(os.path.join(self.root, self.paths[i]), self.dtype)


class LabeledImageDataset(DatasetMixin):
    """Example i is the pair of image i and its label; images are as in `ImageDataset`.

    Args:
        pairs: pairs of a path below ``root`` and an integer label; or the name of a text file (UTF-8) whose lines have a
            path and behind it, after white space, a label.
        root: the directory that the paths start from.
        dtype: of the images, float32 by default.
        label_dtype: of the labels, int64 by default, as ``torch.nn.functional.cross_entropy`` needs them.

    Raises:
        TypeError: a pair is none.
        ValueError: a line of the text file has no integer label, or ``label_dtype`` cannot hold the labels.
    """

    def __init__(
        self, pairs: Path | Sequence[tuple[Path, int]], root: Path = ".", dtype: Any = None, label_dtype: Any = None
    ) -> None:
        listed = _pairs_of(pairs) if isinstance(pairs, (str, os.PathLike)) else list(pairs)
        for number, pair in enumerate(listed):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], (int, np.integer)):
                raise TypeError(f"each item of pairs is a path and an integer label, got {pair!r} as number {number}")
        self.images = ImageDataset([path for path, _ in listed], root, dtype)
        kind = _number_dtype("label_dtype", np.int64 if label_dtype is None else label_dtype)
        labels = np.array([label for _, label in listed], np.int64)
        self.labels = labels.astype(kind)
        if not np.array_equal(self.labels, labels):
            raise ValueError(
                f"label_dtype {kind} cannot hold labels from {labels.min()} to {labels.max()}; take a larger one"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def get_example(self, i: int) -> tuple[npt.NDArray[Any], Any]:
        return self.images.get_example(i), self.labels[i]


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError('images are read by Pillow: pip install "chainring[examples]"') from error


def _read_image(path: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image)
    except Exception as error:  # of many kinds, and Pillow does not say which file is truncated
        error.add_note(f"while the image {path} was read")
        raise
    converted = pixels.astype(dtype)
    if not np.can_cast(pixels.dtype, dtype, "safe") and not np.array_equal(converted, pixels):
        raise ValueError(
            f"{path} has pixels of {pixels.dtype} from {pixels.min()} to {pixels.max()}, which {dtype} cannot hold; "
            "pass another dtype="
        )
    return converted[np.newaxis] if converted.ndim == 2 else np.ascontiguousarray(converted.transpose(2, 0, 1))


def _number_dtype(what: str, dtype: Any) -> np.dtype[Any]:
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f'{what} is a dtype of NumPy\'s, such as "float32" or np.uint8, got {dtype!r}') from error
    if kind.kind not in "biuf":
        raise TypeError(f"{what} is a dtype of numbers, got {kind}")
    return kind


def _as_path(name: Any) -> str:
    path = os.fspath(name)  # raises for what is no path
    if not isinstance(path, str):
        raise TypeError(f"a path is a str or a Path, got {name!r}")
    return path


def _lines_of(path: Path) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()]


def _pairs_of(path: Path) -> list[tuple[Path, int]]:
    pairs: list[tuple[Path, int]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            parts = line.rsplit(maxsplit=1)  # a path may have spaces
            try:
                if parts:
                    name, label = parts
                    pairs.append((name.strip(), int(label)))
            except ValueError:
                raise ValueError(
                    f'a line has a path and an integer label, such as "cat.png 3", got {line.rstrip()!r} '
                    f"in line {number} of {os.fspath(path)}"
                ) from None
    return pairs
