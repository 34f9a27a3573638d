"""CIFAR-10 and CIFAR-100, from small archives on loopback."""

import hashlib
import io
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from chainring.datasets import CIFAR10, CIFAR100, TupleDataset, get_cifar10, get_cifar100

FILES = {
    get_cifar10: (
        [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)],
        ["cifar-10-batches-bin/test_batch.bin"],
    ),
    get_cifar100: (["cifar-100-binary/train.bin"], ["cifar-100-binary/test.bin"]),
}
SOURCES = {get_cifar10: CIFAR10, get_cifar100: CIFAR100}
PIXELS = np.random.RandomState(0).randint(0, 256, (12, 3, 32, 32), np.uint8)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def content_of(get, name, damage):
    """Two records of each file; the number of the file's first image is its label, and before it a coarser one."""
    names = [name for part in FILES[get] for name in part]
    start = 2 * names.index(name)
    coarse = b"" if get is get_cifar10 else b"\x63"
    records = [coarse + bytes([k]) + PIXELS[k].tobytes() for k in (start, start + 1)]
    return b"".join(records)[: -1 if damage == "cut" else None]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Puts an archive on a server on loopback, and gives the source that names it."""
    monkeypatch.setenv("CHAINRING_DATASET_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("no_proxy", "*")
    served = tmp_path / "served"
    served.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=served))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def source(get, damage=None):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name in (name for part in FILES[get] for name in part):
                content = content_of(get, name, damage)
                member = tarfile.TarInfo(name)
                member.size = len(content)
                if damage == "links":
                    member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
                archive.addfile(member, io.BytesIO(content))
        content = packed.getvalue()[: len(packed.getvalue()) // 2 if damage == "archive" else None]
        (name,) = SOURCES[get].sha256
        (served / name).write_bytes(content)
        digests = {name: hashlib.sha256(content).hexdigest()}
        return replace(SOURCES[get], mirrors=(f"http://127.0.0.1:{server.server_port}/",), sha256=digests)

    yield source
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("get", FILES)
@pytest.mark.parametrize(("ndim", "shape"), [(3, (3, 32, 32)), (1, (3072,))])
def test_examples_are_images_in_the_form_asked_for_and_their_labels(serve, get, ndim, shape):
    """Train and test, in the order of the files; of two labels the finer one."""
    train, test = get(ndim=ndim, source=serve(get))
    assert isinstance(train, TupleDataset)
    assert (len(train), len(test)) == (2 * len(FILES[get][0]), 2)
    for k, (image, label) in enumerate([*train, *test]):
        assert (image.shape, image.dtype, label.dtype, label) == (shape, np.float32, np.int64, k)
        np.testing.assert_array_equal(image, (PIXELS[k].reshape(shape) / 255).astype(np.float32))


@pytest.mark.parametrize("get", FILES)
def test_images_alone_have_the_scale_and_the_dtype_asked_for(serve, get):
    """Both parts are one array each."""
    _, test = get(withlabel=False, scale=255.0, dtype="float64", source=serve(get))
    assert test.dtype == np.float64
    np.testing.assert_array_equal(test, PIXELS[2 * len(FILES[get][0]) :][:2])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"ndim": 2}, ValueError, "ndim is 1 or 3"),
        ({"dtype": np.uint8}, TypeError, "dtype is a floating-point dtype.*uint8"),
    ],
)
def test_a_form_that_there_is_not_is_refused_before_the_download(settings, error, message):
    """No server is asked."""
    with pytest.raises(error, match=message):
        get_cifar10(**settings, source=replace(CIFAR10, mirrors=("http://127.0.0.1:9/",)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [("archive", "whole gzipped tar archive"), ("cut", r"must hold .*it has 6145 bytes"), ("links", "it has 0 bytes there")],
)
def test_an_archive_of_another_form_is_refused(serve, damage, message):
    """Cut, with other records, or with links, which are not followed."""
    with pytest.raises(ValueError, match=message):
        get_cifar10(source=serve(get_cifar10, damage))


def test_the_file_is_downloaded_once(serve, tmp_path):
    """And is read from the disk afterwards."""
    source = serve(get_cifar100)
    get_cifar100(source=source)
    (tmp_path / "served" / "cifar-100-binary.tar.gz").unlink()
    assert len(get_cifar100(source=source)[1]) == 2
    assert (tmp_path / "root" / "cifar-100" / "cifar-100-binary.tar.gz").exists()
