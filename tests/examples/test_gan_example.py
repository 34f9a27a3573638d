"""examples/gan: it learns, writes pictures, and continues to the same pictures."""

import numpy as np
import pytest
from PIL import Image
from running import log, run

SMALL = ("--epoch", 20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run of 20 epochs."""
    out = tmp_path_factory.mktemp("gan")
    run("gan/train_gan.py", *SMALL, "--out", out)
    return out


def test_samples_come_close_to_the_digits(whole):
    """The distance from digits that are not trained on falls from 11.2 of an untrained generator to below 4."""
    assert [row["epoch"] for row in log(whole)] == [10, 20]
    assert log(whole)[-1]["distance"] < 4 < log(whole)[0]["distance"] < 11


def test_a_picture_shows_64_samples_that_differ(whole):
    """Eight rows of eight images in black, white and grey; no two are alike."""
    pixels = np.asarray(Image.open(whole / "samples_epoch_20.png"))
    assert pixels.shape == (320, 320)
    images = {
        pixels[row : row + 40, column : column + 40].tobytes() for row in range(0, 320, 40) for column in range(0, 320, 40)
    }
    assert len(images) == 64
    assert pixels.min() < 64 < 192 < pixels.max()


def test_a_run_in_two_parts_ends_with_the_same_picture(whole, tmp_path):
    """Stopped after 11 epochs and continued by the same command, it ends with the same log and the same pictures."""
    run("gan/train_gan.py", "--epoch", 11, "--out", tmp_path)
    run("gan/train_gan.py", *SMALL, "--out", tmp_path)
    assert log(tmp_path) == log(whole)
    for name in ("samples_epoch_10.png", "samples_epoch_20.png"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
