"""Images and histograms of tensors on an accelerator are those of the same tensors on the host."""

import numpy as np
import torch

from chainring import Reporter, report_histogram, report_image


def reported(function, value):
    reporter, found = Reporter(), {}
    reporter.media_watchers = (found.__setitem__,)
    with reporter.scope({}):
        function("key", value)
    return found["key"]


def test_a_histogram_is_counted_there_as_on_the_host():
    """Also with deterministic kernels; only the rounding of the sums may differ."""
    values = torch.cat([torch.randn(100_000), torch.tensor([torch.nan, torch.inf])])
    here = reported(report_histogram, values)
    torch.use_deterministic_algorithms(True)
    try:
        there = reported(report_histogram, values.cuda())
    finally:
        torch.use_deterministic_algorithms(False)
    assert (there.counts, there.edges, there.nan, there.positive_infinity) == (here.counts, here.edges, 1, 1)
    assert abs(there.sum - here.sum) <= 1e-9 * here.sum_of_squares


def test_an_image_has_the_same_pixels():
    """Of floats in half precision."""
    image = torch.rand(3, 8, 9).bfloat16()
    np.testing.assert_array_equal(reported(report_image, image.cuda()).pixels, reported(report_image, image).pixels)
