"""Images, texts and histograms: their reports, which a `LogReport` keeps with its next row, and their form in a log."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chainring._files import from_json, to_json
from chainring.reporting.reporter import find_reporter

_BINS = 64
_CHUNK = 1 << 22  # values that are counted at once, so that a copy of them in double precision stays small
_CHANNELS = ((3,), (1, 4))
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
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
    return {"kind": "histogram", **to_json(asdict(media))}  # the square of a finite double may be infinite


def media_from_json(content: dict[str, Any]) -> Media:
    """Return the media that `media_to_json` has made this JSON of."""
    kind, values = content["kind"], {key: value for key, value in content.items() if key != "kind"}
    if kind == "image":
        png = base64.b64decode(values["png"])  # as `Image.png` makes it
        width, height, _, color_type = struct.unpack_from(">IIBB", png, 16)
        channels = next(number for number, kind in _COLOR_TYPES.items() if kind == color_type)
        (size,) = struct.unpack_from(">I", png, 33)
        lines = np.frombuffer(zlib.decompress(png[41 : 41 + size]), np.uint8).reshape(height, 1 + width * channels)
        return Image(lines[:, 1:].reshape(height, width, channels))
    if kind == "text":
        return Text(values["text"])
    counts, edges, sums = tuple(values.pop("counts")), tuple(values.pop("edges")), from_json(values)
    return Histogram(counts, edges, **sums)


def report_image(key: str, image: Any) -> None:
    """Report an image, to be kept with the next row of the log; without a current reporter, do nothing.

    The last image of a key in an interval is kept, with several ranks that of rank 0. Inside an `Evaluator`, its name is
    added before the key, as for values.

    Example::

        report_image("sample", generator(noise)[0].clamp(0, 1))

    Args:
        key: the name of the image in the log, the report page and dashboards.
        image: a tensor or an array, H x W, H x W x C or C x H x W with 1, 3 or 4 channels, or an image of Pillow; of
            unsigned bytes, or of floats from 0 to 1. If the shape fits both orders, the one with 3 channels is used; if
            both have 3, a tensor is C x H x W and an array H x W x C.

    Raises:
        TypeError: the key is not a string, or the image has another type or dtype.
        ValueError: the image has another shape, or a float that is not from 0 to 1.
    """
    _report(key, image, _to_image)


def report_text(key: str, text: str) -> None:
    """Report a text, such as a translation or a sample of a language model; see `report_image`.

    Example::

        report_text("sample", tokenizer.decode(tokens))

    Raises:
        TypeError: the key or the text is not a string.
    """
    _report(key, text, _to_text)


def report_histogram(key: str, values: Any) -> None:
    """Report a histogram of values, counted at once in 64 bins of equal width; see `report_image`.

    Values are counted on their device, so a tensor on an accelerator is not copied to the host. NaN and infinities are
    counted separately.

    Example::

        report_histogram("weights", model.l1.weight)

    Args:
        key: the name of the histogram in the log, the report page and dashboards.
        values: a tensor, an array or nested lists of real numbers, of any shape.

    Raises:
        TypeError: the key is not a string, or the values are not real numbers.
    """
    _report(key, values, _to_histogram)


def _report(key: str, value: Any, convert: Any) -> None:
    if torch.compiler.is_compiling():  # nothing of it belongs into a graph; decorating it by `disable` imports the compiler
        torch._dynamo.graph_break("images, texts and histograms are not reported from a compiled graph")
    if find_reporter() is not None:
        if not isinstance(key, str):
            raise TypeError(f'a key is a string, such as "sample"; got {key!r}')
        report_media(key, convert(value))


def report_media(key: str, media: Media) -> None:
    """Give an image, a text or a histogram to the media watchers of the current reporter."""
    if (reporter := find_reporter()) is not None:
        for watch in reporter.media_watchers:
            watch(key, media)


def _to_text(text: Any) -> Text:
    if not isinstance(text, str):
        raise TypeError(f"a text is a string, got {type(text).__name__}; write str(...) of it")
    return Text(str(text))


def _to_image(image: Any) -> Image:
    """Return an image in unsigned bytes, H x W x C, copied; floats from 0 to 1 become the nearest of 255 parts."""
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and mode not in ("L", "RGB", "RGBA"):  # such as palettes, whose pixels are indices
        raise TypeError(f'an image of Pillow has the mode L, RGB or RGBA, got {mode!r}; write image.convert("RGB")')
    is_tensor = isinstance(image, Tensor)
    if is_tensor:  # in double precision, since NumPy lacks some dtypes
        image = image.detach().cpu()
        image = (image.double() if image.is_floating_point() else image).numpy()
    pixels = np.asarray(image)
    if pixels.dtype.kind == "f":
        if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError(
                f"an image of floats has values from 0 to 1, got {pixels.min():.6g} to {pixels.max():.6g}; scale or clamp "
                "it, or pass unsigned bytes (uint8) from 0 to 255"
            )
        pixels = np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)
    elif pixels.dtype != np.uint8:
        hint = "; a mask of True and False is shown by mask * 1.0" if pixels.dtype == bool else ""
        raise TypeError(f"an image is of unsigned bytes (uint8), or of floats from 0 to 1; got {pixels.dtype}{hint}")
    if pixels.ndim == 2:
        return Image(np.array(pixels[:, :, None]))
    axes = [0, -1] if is_tensor else [-1, 0]  # in which channels are looked for; 3 of them go before 1 and 4
    axes = [axis for channels in _CHANNELS for axis in axes if pixels.ndim == 3 and pixels.shape[axis] in channels]
    if pixels.size == 0 or not axes:
        raise ValueError(
            f"an image is H x W, H x W x C or C x H x W with 1, 3 or 4 channels, got the shape {tuple(pixels.shape)}; "
            "report the images of a batch one by one, or make one of them with torchvision.utils.make_grid"
        )
    return Image(np.array(pixels if axes[0] == -1 else pixels.transpose(1, 2, 0), order="C"))


def _to_histogram(values: Any) -> Histogram:
    """Count the finite values in bins of equal width, on their device."""
    with torch.no_grad():
        if not isinstance(values, Tensor):
            array = np.asarray(values)
            if array.dtype.kind not in "biuf":
                raise TypeError(f"a histogram is of real numbers, got {type(values).__name__} of {array.dtype}")
            values = torch.from_numpy(np.array(array, np.float64))
        if values.is_complex():
            raise TypeError(f"a histogram is of real numbers, got {values.dtype}; take its absolute values or its parts")
        flat = values.detach().reshape(-1)
        return _count(flat if flat.is_floating_point() else flat.double())


def _count(flat: Tensor) -> Histogram:
    """Return the histogram of a vector of floats, by one read of its device."""
    if not len(flat):
        return Histogram((), ())
    chunks, exact = torch.split(flat, _CHUNK), torch.float32 if flat.device.type == "mps" else torch.float64
    counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=flat.device)  # the last of what is not finite
    special = [test(flat).sum() for test in (torch.isnan, torch.isposinf, torch.isneginf)]
    least = torch.stack([torch.where(chunk.isfinite(), chunk, math.inf).min() for chunk in chunks]).min().to(exact)
    greatest = torch.stack([torch.where(chunk.isfinite(), chunk, -math.inf).max() for chunk in chunks]).max().to(exact)
    width = greatest / 2 - least / 2  # halves, because the width of all doubles overflows
    width = torch.where(width > 0, width, 1)
    numbers = [least, greatest]
    for chunk in chunks:
        is_finite = chunk.isfinite()
        wide = torch.where(is_finite, chunk, 0).to(exact)
        index = ((wide / 2 - least / 2) / width * _BINS).long().clamp_(0, _BINS - 1)
        index = torch.where(is_finite, index, _BINS)
        counts.index_add_(0, index, torch.ones_like(index))
        numbers += [wide.sum(), wide.square().sum()]
    bits = torch.stack(numbers).view(torch.int64 if exact is torch.float64 else torch.int32)  # MPS has no doubles
    from chainring._distributed.digests import read_together  # which few programs need

    integers, bits_on_host = read_together([torch.cat([torch.stack(special), counts]), bits])
    (nan, above, below, *bins), size = integers.tolist(), exact.itemsize
    low, high, *sums = bits_on_host.astype(f"i{size}").view(f"f{size}").tolist()
    if not any(bins[:_BINS]):
        return Histogram((), (), nan, above, below)
    span = high / 2 - low / 2
    bins = bins[: _BINS if span > 0 else 1]
    edges = (2 * (low / 2 + span * (i / len(bins))) for i in range(1, len(bins)))
    return Histogram(tuple(bins), (low, *edges, high), nan, above, below, sum(sums[::2]), sum(sums[1::2]))
