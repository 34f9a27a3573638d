"""Values of a row other than numbers: images, texts and histograms, and their form in a log."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SUMS = ("sum", "sum_of_squares")  # of a histogram: the square of a finite double may be infinite
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG, by the number of channels: grey, colour, colour with alpha


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image reported by `report_image`.

    Example::

        image = record.media["sample"]
        Path("sample.png").write_bytes(image.png())

    Attributes:
        pixels: an array of unsigned bytes, (height, width, channels): 1 channel is grey, 3 are colour, 4 colour and
            alpha.
    """

    kind: ClassVar = "image"
    pixels: npt.NDArray[np.uint8]

    def png(self) -> bytes:
        """Return the image as a PNG file (https://www.w3.org/TR/png-3/), which holds the same pixels."""
        height, width, channels = self.pixels.shape
        lines = np.zeros((height, 1 + width * channels), np.uint8)  # a line begins with its filter: 0 is none
        lines[:, 1:] = self.pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
        return _SIGNATURE + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
        )


@dataclass(frozen=True, slots=True)
class Text:
    """A text reported by `report_text`.

    Example::

        print(record.media["sentence"].text)
    """

    kind: ClassVar = "text"
    text: str


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram reported by `report_histogram`.

    Example::

        histogram = record.media["weights"]
        for count, left, right in zip(histogram.counts, histogram.edges, histogram.edges[1:]):
            print(left, right, count)

    Attributes:
        counts: the number of finite values in each bin; empty if there are none.
        edges: the edges of the bins, one more than counts, from the least to the greatest finite value.
        nan: the number of values that are NaN.
        positive_infinity: the number of values that are infinity.
        negative_infinity: the number of values that are minus infinity.
        sum: the sum of the finite values.
        sum_of_squares: the sum of their squares.
    """

    kind: ClassVar = "histogram"
    counts: tuple[int, ...]
    edges: tuple[float, ...]
    nan: int = 0
    positive_infinity: int = 0
    negative_infinity: int = 0
    sum: float = 0.0
    sum_of_squares: float = 0.0


Media = Image | Text | Histogram


def media_to_json(media: Media) -> dict[str, Any]:
    """Return an image, a text or a histogram in the types of JSON; an image as the Base64 of its PNG file."""
    if isinstance(media, Image):
        return {"kind": "image", "png": base64.b64encode(media.png()).decode()}
    if isinstance(media, Text):
        return {"kind": "text", "text": media.text}
    numbers = {name: getattr(media, name) for name in Histogram.__dataclass_fields__}
    return {"kind": "histogram", **numbers, **{name: _finite_or_word(numbers[name]) for name in _SUMS}}


def _finite_or_word(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def media_from_json(content: dict[str, Any]) -> Media:
    """Return what `media_to_json` was given."""
    kind, values = content["kind"], {key: value for key, value in content.items() if key != "kind"}
    if kind == "image":
        return Image(_read_png(base64.b64decode(values["png"])))
    if kind == "text":
        return Text(values["text"])
    sums = {name: float(values[name]) for name in _SUMS}
    return Histogram(**{**values, **sums, "counts": tuple(values["counts"]), "edges": tuple(values["edges"])})


def _read_png(png: bytes) -> npt.NDArray[np.uint8]:
    """Return the pixels of a PNG file that `Image.png` has made."""
    width, height, _, color_type = struct.unpack_from(">IIBB", png, 16)
    channels = next(number for number, kind in _COLOR_TYPES.items() if kind == color_type)
    (size,) = struct.unpack_from(">I", png, 33)
    lines = np.frombuffer(zlib.decompress(png[41 : 41 + size]), np.uint8).reshape(height, 1 + width * channels)
    return lines[:, 1:].reshape(height, width, channels)
