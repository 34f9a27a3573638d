"""ImageDataset and LabeledImageDataset: image files as arrays, channels first."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from chainring.converters import concat_examples
from chainring.datasets import ImageDataset, LabeledImageDataset
from chainring.iterators import MultiprocessIterator, SerialIterator

PIXELS = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)  # height, width, channels


@pytest.fixture
def folder(tmp_path):
    """A directory with an image of each mode, two rows of three pixels."""
    for mode, channels in {"L": 0, "LA": slice(2), "RGB": slice(3), "RGBA": slice(4)}.items():
        Image.fromarray(np.ascontiguousarray(PIXELS[:, :, channels])).save(tmp_path / f"{mode}.png")
    return tmp_path


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4)])
def test_an_image_is_channels_height_width(folder, mode, channels):
    """Grey has 1 channel, alpha is one more; pixels are float32 and not scaled."""
    image = ImageDataset([f"{mode}.png"], folder)[0]
    assert (image.shape, image.dtype) == ((channels, 2, 3), np.float32)
    for channel in range(channels):
        assert image[channel].tolist() == PIXELS[:, :, channel].tolist()


@pytest.mark.parametrize("dtype", ["uint8", np.float16, np.dtype("int64")])
def test_dtype_is_the_arrays(folder, dtype):
    """In any form that NumPy knows."""
    image = ImageDataset(["RGB.png"], folder, dtype)[0]
    assert image.dtype == dtype
    assert image.tolist() == PIXELS[:, :, :3].transpose(2, 0, 1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, "float31", "datetime64[s]", "U1", complex])
def test_a_dtype_of_no_numbers_is_refused(dtype):
    """At construction."""
    with pytest.raises(TypeError, match="dtype is a dtype of"):
        ImageDataset([], dtype=dtype)


def test_pixels_that_the_dtype_cannot_hold_are_refused(tmp_path):
    """A 16-bit image does not wrap around in uint8."""
    Image.fromarray(np.array([[0, 1000]], np.uint16)).save(tmp_path / "deep.png")
    assert ImageDataset(["deep.png"], tmp_path)[0].tolist() == [[[0, 1000]]]
    with pytest.raises(ValueError, match=r"deep.png has pixels of uint16 from 0 to 1000, which uint8 cannot hold"):
        ImageDataset(["deep.png"], tmp_path, "uint8")[0]


def test_the_orientation_is_left_to_the_user(tmp_path):
    """EXIF data that ask for a turn by 90 degrees change nothing."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS[:, :, :3].copy()).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as image:
        assert image.getexif()[0x0112] == 6
    assert ImageDataset(["turned.png"], tmp_path)[0].shape == (3, 2, 3)


def test_an_image_with_a_palette_gives_the_numbers_of_its_colours(tmp_path):
    """Masks of classes are stored so."""
    image = Image.fromarray(np.array([[0, 2, 1]], np.uint8))
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    image.save(tmp_path / "mask.png")
    assert ImageDataset(["mask.png"], tmp_path, "int64")[0].tolist() == [[[0, 2, 1]]]


def test_paths_may_stand_in_a_file(folder):
    """One on each line, below root; empty lines count as none; a Path is a path too."""
    listing = folder / "lists" / "train.txt"
    listing.parent.mkdir()
    listing.write_text("L.png\n\nRGB.png\n")
    for source in (listing, str(listing), ["L.png", Path("RGB.png")]):
        assert [image.shape[0] for image in ImageDataset(source, str(folder))] == [1, 3]


def test_what_is_no_path_is_refused():
    """At construction."""
    with pytest.raises(TypeError, match="int"):
        ImageDataset([3])
    with pytest.raises(TypeError, match="a path is a str or a Path"):
        ImageDataset([b"x.png"])


@pytest.mark.parametrize("damage", [lambda data: b"no image", lambda data: data[: len(data) // 2]])
def test_a_file_that_is_no_image_is_named(folder, damage):
    """Also a truncated one, of which Pillow does not say which it is."""
    path = folder / "RGB.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(OSError, match=r"image|truncated") as error:
        ImageDataset(["RGB.png"], folder)[0]
    assert error.value.__notes__ == [f"while the image {path} was read"]


def test_without_pillow_the_extra_is_named(monkeypatch):
    """At construction, of both."""
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for kind in (ImageDataset, LabeledImageDataset):
        with pytest.raises(ImportError, match=r'pip install "chainring\[examples\]"'):
            kind([])


class TestLabels:
    def test_an_example_is_an_image_and_its_label(self, folder):
        """int64, as cross_entropy needs it."""
        dataset = LabeledImageDataset([("L.png", 3), ("RGB.png", np.int32(-1))], folder)
        assert [(image.shape[0], label, label.dtype) for image, label in dataset] == [(1, 3, np.int64), (3, -1, np.int64)]

    def test_pairs_may_stand_in_a_file(self, folder):
        """A path, which may have spaces, white space and a label."""
        (folder / "L.png").rename(folder / "my cat.png")
        (folder / "pairs").write_text("my cat.png  5\n\nRGB.png\t6\n", encoding="utf-8")
        for source in (folder / "pairs", str(folder / "pairs")):
            dataset = LabeledImageDataset(source, folder, label_dtype="int32")
            assert [(image.shape[0], label) for image, label in dataset] == [(1, 5), (3, 6)]
            assert dataset[0][1].dtype == np.int32

    @pytest.mark.parametrize("line", ["cat.png", "cat.png dog", "cat.png 1.5"])
    def test_a_line_without_a_label_is_named(self, tmp_path, line):
        """By number and file."""
        (tmp_path / "pairs").write_text(f"a.png 1\n{line}\n")
        with pytest.raises(ValueError, match=rf"got '{line}' in line 2 of .*pairs"):
            LabeledImageDataset(tmp_path / "pairs")

    @pytest.mark.parametrize("pair", ["cat.png", ("cat.png", "1"), ("cat.png", 1, 2), ("cat.png", 0.5)])
    def test_what_is_no_pair_is_refused(self, pair):
        """With its index."""
        with pytest.raises(TypeError, match=r"a path and an integer label, got .* as item 1"):
            LabeledImageDataset([("a.png", 0), pair])

    def test_labels_that_the_dtype_cannot_hold_are_refused(self):
        """Not wrapped around."""
        with pytest.raises(ValueError, match="label_dtype uint8 cannot hold labels from 0 to 256"):
            LabeledImageDataset([("a", 0), ("b", 256)], label_dtype="uint8")

    def test_batches_are_the_same_in_workers(self, folder):
        """Images of one form become tensors; the dataset can be pickled."""
        dataset = pickle.loads(pickle.dumps(LabeledImageDataset([("RGB.png", k) for k in range(6)], folder)))
        serial = SerialIterator(dataset, 4, seed=1)
        with MultiprocessIterator(dataset, 4, n_processes=2, seed=1) as iterator:
            for _ in range(4):
                for ours, theirs in zip(concat_examples(next(iterator)), concat_examples(next(serial)), strict=True):
                    assert torch.equal(ours, theirs)
