"""What a bucket promises, in memory and in a store that speaks S3."""

import os
import random
import threading
import uuid
from array import array
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from chainring import serializers, writers
from chainring._files import is_url
from chainring._places.bucket import MISSING, PART, Bucket, ChangedError
from chainring.iterators import SerialIterator
from chainring.serializers._store import open_store
from chainring.training import StandardUpdater, Trainer

CONTENT = random.Random(0).randbytes(2 * PART + 12345)
ODD = ["a b", "ü", "a%20b", "x#y", "p+q", "q?x", "[x]", "star*", "a&b<c>", "a\\b", ".hidden", "~t", "a=b;c:d@e,f'g\"h"]


@pytest.fixture(params=["memory", "s3"])
def bucket(request):
    """An empty bucket below an address with a prefix."""
    if request.param == "memory":
        return Bucket(f"memory://{uuid.uuid4().hex}/runs/first")
    return Bucket(f"{request.getfixturevalue('s3')}/runs/first")


def test_an_object_is_there_as_it_was_written(bucket):
    before = datetime.now(UTC) - timedelta(seconds=2)
    tag = bucket.put("a/b", b"content")
    found, entry = bucket.get("a/b"), bucket.head("a/b")
    assert found.content == b"content"
    assert found.tag == tag == entry.tag
    assert (entry.key, entry.size) == ("a/b", 7)
    assert before < found.modified == entry.modified < datetime.now(UTC) + timedelta(seconds=2)
    assert bucket.put("a/b", b"other") != tag
    assert bucket.get("a/b").content == b"other"


def test_what_is_not_there_is_said_to_be_missing_with_its_address(bucket):
    for call in (bucket.get, bucket.head, bucket.open):
        with pytest.raises(FileNotFoundError, match=f"there is no {bucket.url}/a/b$"):
            call("a/b")
    assert bucket.list() == []
    bucket.delete(["a/b", "c"])


def test_an_object_is_created_once(bucket):
    tag = bucket.put("a", b"first", MISSING)
    for content in (b"second", b"first"):
        with pytest.raises(ChangedError, match="a was written by somebody else"):
            bucket.put("a", content, MISSING)
    assert bucket.get("a").content == b"first"
    assert bucket.get("a").tag == tag


def test_an_object_is_replaced_only_in_the_expected_state(bucket):
    first = bucket.put("a", b"1")
    second = bucket.put("a", b"2", first)
    for content in (b"3", b"2"):
        with pytest.raises(ChangedError, match="written by somebody else"):
            bucket.put("a", content, first)
    bucket.put("a", b"4", second)
    assert bucket.get("a").content == b"4"
    bucket.delete(["a"])
    with pytest.raises(ChangedError):
        bucket.put("a", b"5", second)
    assert bucket.list() == []


@pytest.mark.parametrize("is_update", [False, True])
def test_of_many_who_write_at_once_one_succeeds(bucket, is_update):
    expected = bucket.put("a", b"before") if is_update else MISSING
    written = []
    gate = threading.Barrier(8)

    def write(number):
        gate.wait()
        try:
            bucket.put("a", str(number).encode(), expected)
            written.append(number)
        except ChangedError:
            pass

    threads = [threading.Thread(target=write, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert bucket.get("a").content == str(written[0]).encode()


def test_a_listing_has_what_begins_with_a_prefix_by_key(bucket):
    for key in ("b/2", "b/1", "ba", "a", "c/d/e"):
        bucket.put(key, key.encode())
    keys = {
        prefix: [entry.key for entry in bucket.list(prefix)] for prefix in ("", "b", "b/", "b/1", "c", "c/d/", "x", "x/")
    }
    assert keys == {
        "": ["a", "b/1", "b/2", "ba", "c/d/e"], "b": ["b/1", "b/2", "ba"], "b/": ["b/1", "b/2"], "b/1": ["b/1"],
        "c": ["c/d/e"], "c/d/": ["c/d/e"], "x": [], "x/": [],
    }  # fmt: skip
    assert [entry.size for entry in bucket.list("b")] == [3, 3, 2]
    assert bucket.list("a") == [bucket.head("a")]


def test_a_listing_ends_at_the_address(bucket):
    beside = Bucket(bucket.url.replace("/first", "/first2"))
    beside.put("a", b"")
    bucket.put("b", b"")
    assert [entry.key for entry in bucket.list()] == ["b"]
    assert [entry.key for entry in beside.list()] == ["a"]
    Bucket(f"{bucket.url}/c").put("d", b"1")
    assert [entry.key for entry in bucket.list()] == ["b", "c/d"]


def test_more_objects_are_listed_and_deleted_than_a_store_takes_in_one_request(bucket):
    for number in range(1010):
        bucket.put(f"{number:04}", b"")
    entries = bucket.list()
    assert [entry.key for entry in entries] == [f"{number:04}" for number in range(1010)]
    bucket.delete(entry.key for entry in entries)
    assert bucket.list() == []


def test_only_the_named_objects_are_deleted(bucket):
    for key in ("a", "a/b", "ab"):
        bucket.put(key, b"")
    bucket.delete(["a", "nothing"])
    assert [entry.key for entry in bucket.list()] == ["a/b", "ab"]


@pytest.mark.parametrize("name", ODD)
def test_names_with_odd_characters_stay_what_they_are(bucket, name):
    key = f"{name}/{name}"
    bucket.put(key, b"1", MISSING)
    with bucket.upload(f"{key}2") as file:
        file.write(b"2")
    assert [entry.key for entry in bucket.list()] == [key, f"{key}2"]
    assert bucket.get(key).content == b"1"
    bucket.delete([key, f"{key}2"])
    assert bucket.list() == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", ".", "a\nb", "a\0"])
def test_keys_that_a_store_would_change_are_refused(bucket, key):
    for call in (lambda: bucket.put(key, b""), lambda: bucket.get(key), lambda: bucket.delete([key])):
        with pytest.raises(ValueError, match="a key is names with slashes between them"):
            call()


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, len(CONTENT)])
def test_an_upload_is_there_with_all_its_bytes_when_the_block_ends(bucket, size):
    with bucket.upload("a") as file:
        for start in range(0, size, 3_000_000):
            assert file.write(CONTENT[start : min(start + 3_000_000, size)])
        assert file.tell() == size
        assert bucket.list() == []
    assert bucket.get("a").content == CONTENT[:size]


def test_an_upload_takes_any_buffer_and_does_not_see_it_change_afterwards(bucket):
    scratch = bytearray(CONTENT)
    with bucket.upload("a") as file:
        file.write(memoryview(scratch)[:-5])
        file.write(array("i", [1, 2]))
        scratch[:] = bytes(len(scratch))
    assert bucket.get("a").content == CONTENT[:-5] + array("i", [1, 2]).tobytes()


@pytest.mark.parametrize("size", [10, len(CONTENT)])
def test_an_upload_whose_block_fails_leaves_what_was_there(bucket, size):
    bucket.put("a", b"before")
    opened = []

    def write_and_fail():
        with bucket.upload("a") as file:
            opened.append(file)
            file.write(CONTENT[:size])
            raise FileNotFoundError("of the block")

    with pytest.raises(FileNotFoundError, match="of the block"):
        write_and_fail()
    assert bucket.get("a").content == b"before"
    with pytest.raises(ValueError, match="closed"):
        opened[0].write(b"more")


def bytes_of(file, start, size):
    return file.read(start, size).numpy().tobytes()


def test_ranges_are_read_in_any_order(bucket):
    bucket.put("a", CONTENT)
    numbers = random.Random(1)
    file = bucket.open("a")
    assert file.size == len(CONTENT)
    for _ in range(40):
        start = numbers.randrange(len(CONTENT))
        size = min(numbers.choice([0, 1, 1000, 1 << 20, 9 << 20]), len(CONTENT) - start)
        for begin in range(start, min(start + 3 * size, len(CONTENT)), size or 1):
            end = min(begin + size, len(CONTENT))
            assert bytes_of(file, begin, end - begin) == CONTENT[begin:end]
    assert bytes_of(file, 0, len(CONTENT)) == CONTENT
    assert bytes_of(file, len(CONTENT), 0) == b""


def test_a_range_beyond_the_end_is_refused(bucket):
    bucket.put("a", b"12345")
    with pytest.raises(ValueError, match="a has 5 bytes; got a request for 4 to 6"):
        bucket.open("a").read(4, 2)


def test_the_bytes_of_two_objects_are_not_mixed(bucket):
    """An object is replaced by another of the same size, after some of it was read."""
    bucket.put("a", CONTENT)
    file = bucket.open("a")
    assert bytes_of(file, 0, 10) == CONTENT[:10]
    bucket.put("a", bytes(len(CONTENT)))
    with pytest.raises(ChangedError, match="a was replaced while it was read"):
        file.read(len(CONTENT) - 10, 10)
    file = bucket.open("a")
    bucket.delete(["a"])
    with pytest.raises(FileNotFoundError):
        file.read(0, 10)


def test_a_store_that_knows_conditions_keeps_nothing_of_the_trial(bucket):
    bucket.check_conditions()
    assert bucket.list() == []


def test_a_bucket_shows_its_address(bucket):
    assert repr(bucket) == f"Bucket('{bucket.url}')"
    assert Bucket(f"{bucket.url}//").url == bucket.url


def test_addresses_are_told_from_paths():
    assert [is_url(place) for place in ("s3://b/run", "gs://b", "az://b/x", "memory:///run")] == [True] * 4
    paths = ("run", "/s3/run", "./s3:run", "s3", "s3/run", "s3//run", "lr:0.1/run", "C:/run", "c:\\run", "at 10:00/run")
    assert not any(map(is_url, (*paths, "/http://a/b", Path("run"), Path("run:1"), b"s3://b", 3, None)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("S3://bucket/run", ": s3://bucket/run"),
        ("s3:/bucket/run", ": s3://bucket/run"),
        ("s3:bucket/run", ": s3://bucket/run"),
        ("s3:\\\\bucket/run", ": s3://bucket/run"),
        (" s3://bucket/run", ": s3://bucket/run"),
        ("'s3://bucket/run", ": s3://bucket/run"),
        ("s3 ://bucket/run", ": s3://bucket/run"),
        ("gcs://bucket/run", ": gs://bucket/run"),
        ("GS:/bucket/run", ": gs://bucket/run"),
        ("s3a://bucket/run", ": s3://bucket/run"),
        ("azure://bucket/run", ": az://bucket/run"),
        ("Memory:///run", ": memory://run"),
        ("https://bucket.s3.amazonaws.com/run", "got one with 'https'"),
        ("file:///run", "got one with 'file'"),
        ("hdfs://host/run", "got one with 'hdfs'"),
        ("abfss://a/run", "got one with 'abfss'"),
        ("https:/host/run", "got one with 'https'"),
        (Path("s3://bucket/run"), "because a Path joins its slashes: s3://bucket/run"),
        (Path("S3://bucket/run"), "because a Path joins its slashes: s3://bucket/run"),
        (Path("https://host/run"), "because a Path joins its slashes; got one with 'https'"),
    ],
)
def test_a_mistyped_address_is_refused_and_is_no_directory(text, said, tmp_path, monkeypatch):
    """Whoever takes a path or an address: it is neither read nor made as a directory of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="an address") as refused:
        is_url(text)
    assert str(refused.value).partition(". ")[0].endswith(said)
    model = torch.nn.Linear(1, 1)
    updater = StandardUpdater(SerialIterator([1], 1), torch.optim.SGD(model.parameters(), 0.1), model)
    for use in (
        lambda: Trainer(updater, out=text),
        lambda: serializers.save(text, model),
        lambda: serializers.load(text, model),
        lambda: open_store(text),
        lambda: writers.CsvWriter(text),
        lambda: writers.TensorBoardWriter(text),
    ):
        with pytest.raises(ValueError, match="an address"):
            use()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///run", "got no bucket"),
        ("ftp://bucket/run", "got 'ftp'"),
        ("s3://bucket/a/../b", "got 's3://bucket/a/../b'"),
        ("s3://bu cket/a", "got the bucket 'bu cket'"),
        ("s3://bucket/run?region=eu", "without credentials or settings"),
    ],
)
def test_what_is_no_address_is_refused_with_the_way_to_write_one(url, message):
    with pytest.raises(ValueError, match=message) as refused:
        Bucket(url)
    assert 'is written "s3://bucket/run"' in str(refused.value)


def test_memory_is_one_store_in_a_process():
    Bucket("memory:///runs/a").put("b", b"1")
    assert Bucket("memory:///runs").get("a/b").content == b"1"
    Bucket("memory:///runs").delete(["a/b"])
