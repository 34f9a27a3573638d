"""What images, texts and histograms may be reported, and what of them is refused."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from chainring import Reporter, report_histogram, report_image, report_text
from chainring.reporting.media import media_from_json, media_to_json
from chainring.writers import Histogram, Text


def reported(function, value):
    """What a watcher is given."""
    reporter, found = Reporter(), {}
    reporter.media_watchers = (found.__setitem__,)
    with reporter.scope({}):
        function("key", value)
    assert list(found) == ["key"]
    return found["key"]


def pixels(value):
    return reported(report_image, value).pixels


COLOUR = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize(
    "image",
    [
        COLOUR,
        COLOUR.transpose(2, 0, 1),
        torch.from_numpy(COLOUR),
        torch.from_numpy(COLOUR).permute(2, 0, 1),
        COLOUR / 255,
        (COLOUR / 255).astype(np.float16),
        torch.from_numpy(COLOUR / 255).permute(2, 0, 1).float().requires_grad_(),
        torch.from_numpy(COLOUR / 255).bfloat16(),
        Pillow.fromarray(COLOUR),
    ],
    ids=[
        "array",
        "channels first",
        "tensor",
        "tensor channels first",
        "float64",
        "float16",
        "float32",
        "bfloat16",
        "Pillow",
    ],
)
def test_an_image_is_taken_in_every_order_and_dtype(image):
    """Unsigned bytes, floats from 0 to 1, channels first or last, as an array, a tensor or of Pillow."""
    np.testing.assert_array_equal(pixels(image), COLOUR)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (1, 4, 5), (5, 5, 4), (3, 4, 4)])
def test_grey_images_and_alpha_are_taken(shape):
    """Without a channel, with one, with four; three go before."""
    image = np.arange(math.prod(shape), dtype=np.uint8).reshape(shape)
    expected = {(4, 5): (4, 5, 1), (1, 4, 5): (4, 5, 1), (3, 4, 4): (4, 4, 3)}.get(shape, shape)
    assert pixels(image).shape == expected


def test_where_both_orders_fit_a_tensor_has_its_channels_first_and_an_array_last():
    """An image of 3 x 5 pixels of an array, of 5 x 3 of a tensor."""
    image = np.arange(45, dtype=np.uint8).reshape(3, 5, 3)
    np.testing.assert_array_equal(pixels(image), image)
    np.testing.assert_array_equal(pixels(torch.from_numpy(image)), image.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (torch.full((2, 2), 1.5), ValueError, "from 0 to 1, got 1.5 to 1.5; scale or clamp it"),
        (torch.full((2, 2), -0.1), ValueError, "from 0 to 1, got -0.1"),
        (torch.full((2, 2), math.nan), ValueError, "from 0 to 1, got nan"),
        (torch.zeros(8, 3, 5, 5), ValueError, "one by one, or make one of them with torchvision.utils.make_grid"),
        (torch.zeros(2, 5, 5), ValueError, r"got the shape \(2, 5, 5\)"),
        (torch.zeros(0, 5, 3), ValueError, "got the shape"),
        (torch.zeros(5), ValueError, "got the shape"),
        (torch.zeros(5, 5, dtype=torch.int64), TypeError, "unsigned bytes .* got int64"),
        (torch.zeros(5, 5, dtype=torch.bool), TypeError, r"got bool; a mask .* mask \* 1.0"),
        (Pillow.new("P", (2, 2)), TypeError, r"got 'P'; write image.convert\(\"RGB\"\)"),
        ("cat.png", TypeError, "unsigned bytes"),
        (None, TypeError, "unsigned bytes"),
    ],
)
def test_another_image_is_refused_with_a_remedy(image, error, message):
    """Values, shapes and things that would be shown as something else."""
    with Reporter().scope({}), pytest.raises(error, match=message):
        report_image("key", image)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_its_png_file_has_the_same_pixels(channels):
    """As Pillow reads it; and so has what comes back from a log."""
    image = reported(report_image, np.random.default_rng(0).integers(0, 256, (7, 5, channels)).astype(np.uint8))
    with Pillow.open(io.BytesIO(image.png())) as opened:
        np.testing.assert_array_equal(np.asarray(opened).reshape(7, 5, channels), image.pixels)
    np.testing.assert_array_equal(media_from_json(media_to_json(image)).pixels, image.pixels)


def test_a_later_change_of_the_array_does_not_change_what_was_reported():
    """It is copied at once."""
    image = np.zeros((2, 2, 3), np.uint8)
    found = pixels(image)
    image[:] = 9
    assert not found.any()


def test_a_text_is_a_string():
    """Anything else is refused."""
    assert reported(report_text, "NaN") == Text("NaN")
    assert media_from_json(media_to_json(Text("NaN\ud800"))) == Text("NaN\ud800")
    with Reporter().scope({}), pytest.raises(TypeError, match=r"a text is a string, got int; write str\(...\) of it"):
        report_text("key", 3)


@pytest.mark.parametrize("function", [report_image, report_text, report_histogram])
def test_a_key_is_a_string(function):
    """Anything else is refused."""
    with Reporter().scope({}), pytest.raises(TypeError, match="a key is a string"):
        function(3, "x")


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(1000),
        np.random.default_rng(0).normal(size=(10, 100)),
        list(range(70)),
        torch.arange(5),
        [True, False, True],
    ],
    ids=["tensor", "array", "list", "integers", "truth values"],
)
def test_a_histogram_counts_what_numpy_counts(values):
    """In 64 bins of equal width from the least to the greatest value."""
    histogram = reported(report_histogram, values)
    array = np.asarray(values, np.float64)
    counts, edges = np.histogram(array, 64)
    assert (sum(histogram.counts), len(histogram.counts)) == (array.size, 64)
    np.testing.assert_allclose(histogram.edges, edges)
    assert np.abs(np.cumsum(histogram.counts) - np.cumsum(counts)).max() <= 1  # a value on an edge
    assert histogram.sum == pytest.approx(array.sum())
    assert histogram.sum_of_squares == pytest.approx((array**2).sum())


def test_values_that_are_not_finite_are_counted_apart():
    """They do not move the bins."""
    histogram = reported(report_histogram, torch.tensor([math.nan, 1.0, 2.0, math.inf, math.inf, -math.inf]))
    assert (histogram.nan, histogram.positive_infinity, histogram.negative_infinity) == (1, 2, 1)
    assert (sum(histogram.counts), histogram.edges[0], histogram.edges[-1]) == (2, 1.0, 2.0)


@pytest.mark.parametrize("size", [1, 1000, (1 << 22) + 5])
def test_a_histogram_of_a_device_is_that_of_the_host(size, device):
    """Of values that are not finite too, though these are left out on the host and passed over on a device."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(3))
    values[1::7] = math.inf
    values[2::7] = math.nan
    host, other = reported(report_histogram, values), reported(report_histogram, values.to(device))
    assert (other.counts, other.edges, other.nan) == (host.counts, host.edges, host.nan)
    assert other.sum == pytest.approx(host.sum)


@pytest.mark.parametrize(
    ("values", "counts", "edges"),
    [([], (), ()), ([math.nan], (), ()), ([3.0, 3.0], (2,), (3.0, 3.0)), ([-1.7e308, 1.7e308], None, (-1.7e308, 1.7e308))],
)
def test_histograms_of_no_value_of_one_value_and_of_the_largest_numbers(values, counts, edges):
    """None of them fails, and each comes back from a log."""
    histogram = reported(report_histogram, torch.tensor(values, dtype=torch.float64, requires_grad=True))
    assert histogram.counts == counts or (counts is None and sum(histogram.counts) == 2)
    assert (histogram.edges[:1], histogram.edges[-1:]) == (edges[:1], edges[-1:])
    assert isinstance(histogram, Histogram)
    assert media_from_json(media_to_json(histogram)) == histogram


@pytest.mark.parametrize("values", ["abc", None, [None], torch.zeros(2, dtype=torch.complex64), {"a": 1}])
def test_a_histogram_of_what_is_no_real_number_is_refused(values):
    """At once."""
    with Reporter().scope({}), pytest.raises(TypeError, match="a histogram is of real numbers"):
        report_histogram("key", values)


def test_without_a_reporter_nothing_happens():
    """As for `report`, so that a model also runs outside a trainer."""
    report_image("key", torch.full((2, 2), 7.0))
    report_text("key", "x")
    report_histogram("key", [1.0])
