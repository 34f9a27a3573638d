"""Reports of images, texts and histograms, which a `LogReport` keeps with its next row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from chainring._media import Histogram, Image, Media, Text
from chainring.reporting.reporter import current

_BINS = 64
_CHUNK = 1 << 22  # values that are counted at once, so that a copy of them in double precision stays small
_CHANNELS = ((3,), (1, 4))


def report_image(key: str, image: Any) -> None:
    """Report an image, to be kept with the next row of the log; without a current reporter, do nothing.

    The last image of a key in an interval is kept. Inside an `Evaluator`, its name is added before the key, as for
    values. With several ranks, the image of rank 0 is kept.

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
    _report(key, image, to_image)


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
    _report(key, values, to_histogram)


def _report(key: str, value: Any, convert: Any) -> None:
    if torch.compiler.is_compiling():  # nothing of it belongs into a graph; decorating it by `disable` imports the compiler
        torch._dynamo.graph_break("images, texts and histograms are not reported from a compiled graph")
    if current.reporter is not None:
        if not isinstance(key, str):
            raise TypeError(f'a key is a string, such as "sample"; got {key!r}')
        report_media(key, convert(value))


def report_media(key: str, media: Media) -> None:
    """Give an image, a text or a histogram to the media watchers of the current reporter."""
    if current.reporter is not None:
        for watch in current.reporter.media_watchers:
            watch(key, media)


def _to_text(text: Any) -> Text:
    if not isinstance(text, str):
        raise TypeError(f"a text is a string, got {type(text).__name__}; write str(...) of it")
    return Text(str(text))


def to_image(image: Any) -> Image:
    """Return an image in unsigned bytes, H x W x C, copied from a tensor, an array or an image of Pillow."""
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and mode not in ("L", "RGB", "RGBA"):  # such as palettes, whose pixels are indices
        raise TypeError(f'an image of Pillow has the mode L, RGB or RGBA, got {mode!r}; write image.convert("RGB")')
    is_tensor = isinstance(image, Tensor)
    pixels = _pixels(image.detach().cpu() if is_tensor else np.asarray(image))
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


def _pixels(image: Any) -> Any:
    """Return the pixels as an array of unsigned bytes; floats from 0 to 1 become the nearest of 255 parts."""
    if isinstance(image, Tensor):
        image = (image.double() if image.is_floating_point() else image).numpy()
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind != "f":
        hint = "; a mask of True and False is shown by mask * 1.0" if image.dtype == bool else ""
        raise TypeError(f"an image is of unsigned bytes (uint8), or of floats from 0 to 1; got {image.dtype}{hint}")
    if image.size and not (image.min() >= 0 and image.max() <= 1):
        raise ValueError(
            f"an image of floats has values from 0 to 1, got {image.min():.6g} to {image.max():.6g}; scale or clamp it, or "
            "pass unsigned bytes (uint8) from 0 to 255"
        )
    return np.rint(image.astype(np.float64) * 255).astype(np.uint8)


def to_histogram(values: Any) -> Histogram:
    """Count the finite values in bins of equal width, on their device."""
    with torch.no_grad():
        flat = _tensor(values).reshape(-1)
        if not flat.is_floating_point():
            flat = flat.double()
        nan, above, below = (int(test(flat).sum()) for test in (torch.isnan, torch.isposinf, torch.isneginf))
        finite = flat[torch.isfinite(flat)] if nan + above + below else flat
        if not len(finite):
            return Histogram((), (), nan, above, below)
        least, greatest = (value.item() for value in torch.aminmax(finite))
        bins = _BINS if greatest / 2 > least / 2 else 1  # halves, because the width of all doubles overflows
        span = greatest / 2 - least / 2
        counts, total, squares = torch.zeros(bins, dtype=torch.int64, device=finite.device), 0.0, 0.0
        for start in range(0, len(finite), _CHUNK):
            chunk = finite[start : start + _CHUNK]
            wide = chunk.double() if chunk.device.type != "mps" else chunk.float()  # which has no doubles
            index = ((wide / 2 - least / 2) / (span or 1.0) * bins).long().clamp_(0, bins - 1)
            counts += torch.bincount(index, minlength=bins)
            total, squares = total + wide.sum().item(), squares + wide.square().sum().item()
    edges = (2 * (least / 2 + span * (i / bins)) for i in range(1, bins))
    return Histogram(tuple(counts.tolist()), (least, *edges, greatest), nan, above, below, total, squares)


def _tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        if values.is_complex():
            raise TypeError(f"a histogram is of real numbers, got {values.dtype}; take its absolute values or its parts")
        return values.detach()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"a histogram is of real numbers, got {type(values).__name__} of {array.dtype}")
    return torch.from_numpy(np.array(array, np.float64))
