"""Downloads: cut, wrong, missing, at once, from mirrors that keep no rules; all on loopback."""

import hashlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from chainring.datasets.classification import RemoteFiles

CONTENT = bytes(range(256)) * 1000
OTHER = b"another file"


def digest(content):
    return hashlib.sha256(content).hexdigest()


class Mirror(ThreadingHTTPServer):
    """A server of files: what it was asked for, and what is wrong with it."""

    def __init__(self, **files):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.asked = []  # the file of each request
        self.cuts = []  # the bytes after which the next answers end
        self.chunked = False
        self.was_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.url = f"http://127.0.0.1:{self.server_port}/files"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        mirror, name = self.server, self.path.removeprefix("/files/")
        mirror.asked.append(name)
        mirror.was_asked.set()
        mirror.may_answer.wait(120)
        self.close_connection = True
        if name not in mirror.files:
            return self.send_error(404)
        body = mirror.files[name]
        self.send_response(200)
        if mirror.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = mirror.cuts.pop(0) if mirror.cuts else None
        body = body[:cut]
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body) if mirror.chunked else body)
        return self.wfile.write(b"0\r\n\r\n") if mirror.chunked and cut is None else None


@pytest.fixture
def serve(monkeypatch):
    """Starts mirrors, and stops them after the test."""
    monkeypatch.setenv("no_proxy", "*")
    running = []

    def start(**files):
        mirror = Mirror(**files)
        thread = threading.Thread(target=mirror.serve_forever, args=(0.01,))
        thread.start()
        running.append((mirror, thread))
        return mirror

    yield start
    for mirror, thread in running:
        mirror.may_answer.set()
        mirror.shutdown()
        thread.join()
        mirror.server_close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINRING_DATASET_ROOT", str(tmp_path / "root"))
    return tmp_path / "root" / "set"


@pytest.fixture
def nowhere(monkeypatch):
    """An address where nobody listens."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as taken:  # bound and not listening: no other process can get the port meanwhile
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def source(*mirrors, **contents):
    urls = tuple(getattr(mirror, "url", mirror) for mirror in mirrors)
    return RemoteFiles("set", urls, {name: digest(content) for name, content in (contents or {"a": CONTENT}).items()})


def assert_complete(folder, content=CONTENT):
    assert (folder / "a").read_bytes() == content
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_files_are_downloaded_once_and_again_when_damaged(serve, folder):
    """The second call asks nobody, and both say where the files are; every call checks what is there."""
    mirror = serve(a=CONTENT, b=OTHER)
    files = source(mirror, a=CONTENT, b=OTHER)
    assert files.download() == files.download() == {"a": folder / "a", "b": folder / "b"}
    assert mirror.asked == ["a", "b"]
    assert_complete(folder)
    (folder / "a").write_bytes(CONTENT[:-1] + b"?")
    files.download()
    assert_complete(folder)


@pytest.mark.parametrize(("chunked", "says"), [(False, "cut after 1000 of 256000 bytes"), (True, "the connection was cut")])
def test_a_cut_download_leaves_nothing_and_begins_again(serve, folder, chunked, says):
    """A part of a file is never taken for the file, whether or not the server says how long that is."""
    mirror = serve(a=CONTENT)
    mirror.cuts, mirror.chunked = [1000], chunked
    with pytest.raises(OSError, match=says):
        source(mirror).download()
    assert [path.name for path in folder.iterdir()] == [".lock"]
    source(mirror).download()
    assert_complete(folder)


def test_mirrors_are_tried_in_turn(serve, nowhere, folder):
    """One is down, one lacks the file, one has another, one breaks off: the next is asked."""
    lacking, wrong, breaking, good = serve(), serve(a=OTHER), serve(a=CONTENT), serve(a=CONTENT)
    breaking.cuts = [1000]
    source(nowhere, lacking, wrong, breaking, good).download()
    assert [len(mirror.asked) for mirror in (lacking, wrong, breaking, good)] == [1, 1, 1, 1]
    assert_complete(folder)


def test_a_wrong_file_is_never_put_in_place(serve, folder):
    """A file of another SHA-256 is thrown away, and the error says which it has and which it should have."""
    mirror = serve(a=OTHER)
    with pytest.raises(OSError, match=digest(OTHER)) as caught:
        source(mirror).download()
    assert digest(CONTENT) in str(caught.value)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_without_a_network_the_error_says_what_to_put_where(nowhere, folder):
    """Each missing file is named with its place and SHA-256, and once they are there all is well."""
    contents = {"a": CONTENT, "b": OTHER, "c": b"c"}
    files = source(nowhere, f"{nowhere}/other", **contents)
    folder.mkdir(parents=True)
    (folder / "c").write_bytes(b"c")
    with pytest.raises(OSError, match="a could not be downloaded") as caught:
        files.download()
    message = str(caught.value)
    assert all(part in message for part in (f"{nowhere}/a", f"{nowhere}/other/a", "refused", "CHAINRING_DATASET_ROOT"))
    assert f"{folder / 'a'}  (SHA-256 {digest(CONTENT)})" in message
    assert f"{folder / 'b'}  (SHA-256 {digest(OTHER)})" in message
    assert str(folder / "c") not in message
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    assert list(files.download()) == ["a", "b", "c"]


class Looked(dict):
    """Checksums that say when somebody has compared a file with one."""

    def __init__(self, checksums):
        super().__init__(checksums)
        self.now = threading.Event()

    def __getitem__(self, name):
        self.now.set()
        return super().__getitem__(name)


def test_two_at_once_download_once(serve, folder):
    """One that sees that a file is missing while another downloads it waits for that one, and asks for nothing."""
    mirror = serve(a=CONTENT)
    mirror.may_answer.clear()
    looked = Looked({"a": digest(CONTENT)})
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(source(mirror).download)
        assert mirror.was_asked.wait(120)
        second = pool.submit(RemoteFiles("set", (mirror.url,), looked).download)
        assert looked.now.wait(120)
        mirror.may_answer.set()
        assert first.result(30) == second.result(30)
    assert mirror.asked == ["a"]
    assert_complete(folder)


def test_an_error_of_the_own_disk_is_no_fault_of_the_mirror(serve, folder):
    """A file that cannot be written is an error of the system at once."""
    mirrors = serve(a=CONTENT), serve(a=CONTENT)
    (folder / "a").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="could not be written"):
        source(*mirrors).download()
    assert [len(mirror.asked) for mirror in mirrors] == [1, 0]


def test_a_directory_that_cannot_be_made_is_named_with_the_variable(nowhere, folder):
    """The error says where datasets were to be kept, and how to choose another place."""
    folder.parent.write_bytes(b"a file in the way")
    with pytest.raises(OSError, match=f"{folder}.*CHAINRING_DATASET_ROOT"):
        source(nowhere).download()


@pytest.mark.parametrize(("given", "expected"), [(None, ".cache/chainring"), ("", ".cache/chainring"), ("~/data", "data")])
def test_datasets_are_kept_in_the_home_unless_told_otherwise(serve, tmp_path, monkeypatch, given, expected):
    """Unset and empty are ~/.cache/chainring, and a ~ in the variable is the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CHAINRING_DATASET_ROOT", raising=False)
    if given is not None:
        monkeypatch.setenv("CHAINRING_DATASET_ROOT", given)
    assert source(serve(a=CONTENT)).download() == {"a": tmp_path / expected / "set" / "a"}


@pytest.mark.parametrize(
    ("name", "mirrors", "sha256", "message"),
    [
        ("set", "http://127.0.0.1", {}, "mirrors"),
        ("../set", ("http://127.0.0.1",), {}, "'../set'"),
        ("set", ("http://127.0.0.1",), {"../a": "0" * 64}, "'../a'"),
        ("set", ("http://127.0.0.1",), {"a": "F" * 64}, "64 hexadecimal digits in lower case"),
    ],
)
def test_remote_files_are_checked_when_they_are_named(name, mirrors, sha256, message):
    """A slip in an address, a name or a checksum is an error before anything is asked for."""
    with pytest.raises(ValueError, match=message):
        RemoteFiles(name, mirrors, sha256)
