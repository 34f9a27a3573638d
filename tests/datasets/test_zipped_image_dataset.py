"""ZippedImageDataset and LabeledZippedImageDataset: images of a ZIP archive as arrays, channels first."""

import io
import pickle
import zipfile

import numpy as np
import pytest
from PIL import Image

from chainring.datasets import ConcatenatedDataset, LabeledZippedImageDataset, ZippedImageDataset
from chainring.iterators import MultiprocessIterator, SerialIterator

PIXELS = {f"{folder}/{k}.png": np.full((2, 3, 3), 10 * k + n, np.uint8) for n, folder in enumerate("ab") for k in range(3)}


def packed(path, compression=zipfile.ZIP_DEFLATED):
    """An archive of six images in two folders, which are entries themselves."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/", "")
        for name, pixels in PIXELS.items():
            content = io.BytesIO()
            Image.fromarray(pixels).save(content, "png")
            archive.writestr(name, content.getvalue())
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_examples_are_the_images_in_the_order_of_the_archive(tmp_path, compression):
    """Folders are no examples."""
    dataset = ZippedImageDataset(packed(tmp_path / "images.zip", compression))
    assert len(dataset) == 6
    for image, pixels in zip(dataset, PIXELS.values(), strict=True):
        assert image.dtype == np.float32
        np.testing.assert_array_equal(image, pixels.transpose(2, 0, 1))
    assert ZippedImageDataset(tmp_path / "images.zip", np.uint8)[5].dtype == np.uint8


def test_lines_of_a_file_name_the_images_and_their_labels(tmp_path):
    """In its order, also twice."""
    (tmp_path / "labels.txt").write_text("b/2.png 7\n\na/0.png 3\nb/2.png 8\n")
    dataset = LabeledZippedImageDataset(packed(tmp_path / "images.zip"), tmp_path / "labels.txt")
    assert [(int(image.max()), int(label)) for image, label in dataset] == [(21, 7), (0, 3), (21, 8)]
    assert dataset[0][1].dtype == np.int64
    assert LabeledZippedImageDataset(tmp_path / "images.zip", tmp_path / "labels.txt", None, np.int8)[0][1].dtype == np.int8


def test_a_name_that_the_archive_has_not_is_refused(tmp_path):
    """At construction."""
    (tmp_path / "labels.txt").write_text("b/2.png 7\nc/0.png 3\n")
    with pytest.raises(ValueError, match=r"labels.txt names images that .*images.zip has not: \['c/0.png'\]"):
        LabeledZippedImageDataset(packed(tmp_path / "images.zip"), tmp_path / "labels.txt")


def test_several_archives_are_one_dataset(tmp_path):
    """By concatenating them."""
    parts = [ZippedImageDataset(packed(tmp_path / f"{k}.zip")) for k in range(2)]
    assert len(ConcatenatedDataset(*parts)) == 12


def test_it_can_be_pickled_and_read_by_worker_processes(tmp_path):
    """Which read what one process reads."""
    dataset = pickle.loads(pickle.dumps(ZippedImageDataset(packed(tmp_path / "images.zip"))))
    whole = [np.stack(list(batch)) for batch in SerialIterator(dataset, 2, repeat=False, seed=0)]
    with_workers = MultiprocessIterator(dataset, 2, repeat=False, seed=0, n_processes=2)
    for batch, expected in zip(with_workers, whole, strict=True):
        np.testing.assert_array_equal(np.stack(list(batch)), expected)
    with_workers.finalize()


def test_an_archive_that_has_changed_since_is_refused(tmp_path):
    """Where another image stands, or none."""
    dataset = ZippedImageDataset(packed(tmp_path / "images.zip", zipfile.ZIP_STORED))
    content = bytearray((tmp_path / "images.zip").read_bytes())
    content[content.index(b"IDAT")] ^= 1
    (tmp_path / "images.zip").write_bytes(content)
    with pytest.raises(ValueError, match=r"does not hold a/0\.png as its directory says"):
        dataset[0]
    (tmp_path / "images.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"does not hold b/2\.png as its directory says"):
        dataset[5]


def test_another_compression_is_refused(tmp_path):
    """At construction."""
    with pytest.raises(ValueError, match=r"a/.* in .* is encrypted or compressed otherwise than by Deflate"):
        ZippedImageDataset(packed(tmp_path / "images.zip", zipfile.ZIP_BZIP2))
