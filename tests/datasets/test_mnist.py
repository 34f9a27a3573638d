"""MNIST and Fashion-MNIST, from small IDX files on loopback."""

import gzip
import hashlib
import inspect
import re
import struct
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from chainring.datasets import TupleDataset
from chainring.datasets.classification import FASHION_MNIST, MNIST, get_fashion_mnist, get_mnist, read_idx

PIXELS = {name: np.random.RandomState(n).randint(0, 256, (n, 28, 28), np.uint8) for name, n in (("train", 7), ("t10k", 3))}
LABELS = {name: np.arange(len(pixels), dtype=np.uint8) for name, pixels in PIXELS.items()}


def idx(array, kind=0x08):
    """An IDX file of the array's bytes."""
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Puts files on a server on loopback, and gives the source that names them."""
    monkeypatch.setenv("CHAINRING_DATASET_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("no_proxy", "*")
    served = tmp_path / "served"
    served.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=served))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def source(pixels=PIXELS, labels=LABELS):
        contents = {f"{name}-images-idx3-ubyte.gz": gzip.compress(idx(array)) for name, array in pixels.items()}
        contents |= {f"{name}-labels-idx1-ubyte.gz": gzip.compress(idx(array)) for name, array in labels.items()}
        for name, content in contents.items():
            (served / name).write_bytes(content)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        return replace(MNIST, mirrors=(f"http://127.0.0.1:{server.server_port}/",), sha256=digests)

    yield source
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("get", [get_mnist, get_fashion_mnist])
@pytest.mark.parametrize(("ndim", "shape"), [(1, (784,)), (2, (28, 28)), (3, (1, 28, 28))])
def test_examples_are_images_in_the_form_asked_for_and_their_labels(serve, get, ndim, shape):
    """Train and test are pairs of a float32 image from 0 to 1 and an int64 label, in the order of the file."""
    for name, data in zip(("train", "t10k"), get(ndim=ndim, source=serve()), strict=True):
        assert isinstance(data, TupleDataset)
        assert len(data) == len(PIXELS[name])
        for i, (image, label) in enumerate(data):
            assert (image.shape, image.dtype, label.dtype) == (shape, np.float32, np.int64)
            np.testing.assert_array_equal(image, (PIXELS[name][i].reshape(shape) / 255).astype(np.float32))
            assert label == LABELS[name][i]


def test_without_labels_examples_are_the_images(serve):
    """Both parts are one array, which may be written to."""
    train, test = get_mnist(withlabel=False, source=serve())
    assert (train.shape, test.shape, train.dtype) == ((7, 784), (3, 784), np.float32)
    assert train.flags.writeable
    assert train.flags.c_contiguous


@pytest.mark.parametrize("scale", [1.0, 255.0, 0.1])
def test_pixels_are_from_0_to_scale_exactly(serve, scale):
    """0 is 0.0, 255 is the scale, and with a scale of 255 each pixel is its byte."""
    pixels = {name: np.arange(256, dtype=np.uint8).reshape(1, 16, 16) for name in PIXELS}
    source = serve(pixels, {name: array[:1] for name, array in LABELS.items()})
    train, _ = get_mnist(withlabel=False, scale=scale, source=source)
    assert (train.min(), train.max()) == (0, np.float32(scale))
    if scale == 255:
        np.testing.assert_array_equal(train[0], np.arange(256))


def test_the_second_call_needs_no_server(serve):
    """The files are in the cache, whichever mirror they came from."""
    source = serve()
    get_mnist(source=source)
    train, test = get_mnist(source=replace(source, mirrors=("http://127.0.0.1:1",)))
    assert (len(train), len(test)) == (7, 3)


@pytest.mark.parametrize(("get", "files"), [(get_mnist, MNIST), (get_fashion_mnist, FASHION_MNIST)])
def test_without_a_network_the_error_names_the_published_files(tmp_path, monkeypatch, get, files):
    """All four are listed with place and SHA-256; they are what the function takes when it is told nothing."""
    monkeypatch.setenv("CHAINRING_DATASET_ROOT", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    assert inspect.signature(get).parameters["source"].default is files
    with pytest.raises(OSError, match="could not be downloaded") as caught:
        get(source=replace(files, mirrors=("http://127.0.0.1:1",)))
    assert len(files.sha256) == 4
    for name, digest in files.sha256.items():
        assert f"{tmp_path / files.name / name}  (SHA-256 {digest})" in str(caught.value)


def test_the_two_datasets_do_not_share_a_file():
    """Files of the same names are kept apart, and each has its own checksum."""
    assert MNIST.name != FASHION_MNIST.name
    assert MNIST.sha256.keys() == FASHION_MNIST.sha256.keys()
    assert len({*MNIST.sha256.values(), *FASHION_MNIST.sha256.values()}) == 8


def test_another_ndim_is_an_error_before_anything_is_downloaded(serve, tmp_path):
    """The rule and the value are named."""
    with pytest.raises(ValueError, match="ndim is 1, 2 or 3, got 4"):
        get_mnist(ndim=4, source=serve())
    assert not (tmp_path / "root").exists()


def test_a_source_names_all_four_files(serve):
    """Files that a source lacks are named before anything is downloaded."""
    with pytest.raises(ValueError, match=r"lacks train-labels-idx1-ubyte\.gz, t10k-labels-idx1-ubyte\.gz"):
        get_mnist(source=serve(labels={}))


def test_images_and_labels_must_be_as_many(serve):
    """Files of two different parts do not go together."""
    with pytest.raises(ValueError, match=r"t10k-images.* must have one image for each of the 7 labels, has 3"):
        get_mnist(source=serve(labels={"train": LABELS["train"], "t10k": LABELS["train"]}))


@pytest.mark.parametrize("shape", [(5,), (0,), (2, 3, 4), (0, 28, 28)])
def test_an_idx_file_comes_back_as_the_array(tmp_path, shape):
    """Any number of axes and elements, also none."""
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(idx(array)))
    read = read_idx(path, len(shape))
    assert (read.shape, read.dtype) == (shape, np.uint8)
    np.testing.assert_array_equal(read, array)


IMAGES = PIXELS["t10k"]
WHOLE = idx(IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(idx(LABELS["t10k"])), "00 00 08 03 .* starts with 00 00 08 01"),
        (gzip.compress(idx(IMAGES, kind=0x0D)), "00 00 08 03 .* starts with 00 00 0d 03"),
        (gzip.compress(b"\x01" + WHOLE[1:]), "starts with 01 00 08 03"),
        (gzip.compress(WHOLE[:15]), "has 15 bytes"),
        (gzip.compress(b""), "starts with nothing and has 0 bytes"),
        (gzip.compress(WHOLE[:-1]), r"must hold 2352 bytes for its shape \(3, 28, 28\), but holds 2351"),
        (gzip.compress(WHOLE + b"\x00"), "but holds 2353"),
        (gzip.compress(WHOLE[:4] + b"\xff" * 12 + WHOLE[16:]), "must hold 79228162458924105385300197375 bytes"),
        (WHOLE, "whole gzip file"),
        (gzip.compress(WHOLE)[:-20], "whole gzip file"),
        (gzip.compress(WHOLE)[:12] + b"\xff" * 40, "whole gzip file"),
    ],
    ids=["labels", "floats", "magic", "header cut", "empty", "short", "long", "huge", "plain", "gzip cut", "gzip bad"],
)
def test_a_file_that_is_no_such_idx_file_is_an_error_that_names_it(tmp_path, content, message):
    """Magic, type, axes, lengths and the gzip file around them are checked, without memory for what they claim."""
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path, 3)
    assert re.match(re.escape(str(path)), str(caught.value))
