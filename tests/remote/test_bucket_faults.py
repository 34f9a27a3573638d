"""A bucket over a network that fails: every request ends, with its result or with an error that says what to do."""

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import boto3
import pytest
from faulty_proxy import ENDING

from chainring._places.bucket import MISSING, PART, PATIENCE, Bucket, ChangedError, RemoteError

CONTENT = random.Random(0).randbytes(2 * PART + 12345)
SMALL = CONTENT[:50_000]
HASTY = PATIENCE._replace(retry=10)
RESTLESS = PATIENCE._replace(retry=30, answer=0.4)  # where nobody answers


@pytest.fixture
def bucket(proxy, s3):
    """A bucket behind the proxy, in which is a small object."""
    bucket = Bucket(f"{s3}/run", HASTY)
    bucket.put("small", SMALL)
    proxy.requests.clear()
    return bucket


@contextmanager
def refusal(*words):
    """Expects a `RemoteError` with those words."""
    with pytest.raises(RemoteError) as refused:
        yield refused
    for word in words:
        assert word in str(refused.value)


def uploads_of(server, bucket):
    """The keys of the uploads that nobody has finished."""
    client = boto3.client("s3", endpoint_url=server, region_name="us-east-1")
    found = client.list_multipart_uploads(Bucket=bucket.url.split("/")[2])
    return [upload["Key"] for upload in found.get("Uploads", [])]


def send(bucket, key="new", content=CONTENT):
    with bucket.upload(key) as file:
        file.write(content)


def read_all(bucket):
    if not bucket.list("large"):
        send(bucket, "large")
    file = bucket.open("large")
    return b"".join(bytes_of(file, start, min(1 << 20, file.size - start)) for start in range(0, file.size, 1 << 20))


def bytes_of(file, start, size):
    return file.read(start, size).numpy().tobytes()


DEEDS = {  # what is done, and the method and a part of the address of the request to break
    "get": (lambda bucket: bucket.get("small").content == SMALL, "GET", "small"),
    "read": (lambda bucket: bytes_of(bucket.open("small"), 5, 30_000) == SMALL[5:30_005], "GET", "small"),
    "head": (lambda bucket: bucket.head("small").size == len(SMALL), "HEAD", "small"),
    "open": (lambda bucket: read_all(bucket) == CONTENT, "GET", "large"),
    "list": (lambda bucket: [entry.key for entry in bucket.list()] == ["small"], "GET", "list-type"),
    "delete": (lambda bucket: [bucket.delete(["small"]), bucket.list("small")][1] == [], "POST", "delete"),
    "put": (lambda bucket: bucket.put("new", SMALL) == bucket.head("new").tag, "PUT", "new"),
    "create": (lambda bucket: bucket.put("new", SMALL, MISSING) == bucket.head("new").tag, "PUT", "new"),
    "update": (
        lambda bucket: bucket.put("small", b"2", bucket.head("small").tag) == bucket.head("small").tag,
        "PUT",
        "small",
    ),
    "begin": (lambda bucket: [send(bucket), bucket.get("new").content][1] == CONTENT, "POST", "uploads"),
    "part": (lambda bucket: [send(bucket), bucket.get("new").content][1] == CONTENT, "PUT", "partNumber=2"),
    "end": (lambda bucket: [send(bucket), bucket.get("new").content][1] == CONTENT, "POST", "uploadId"),
}


@pytest.mark.parametrize("fault", ENDING)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_request_that_fails_twice_is_made_again(proxy, bucket, deed, fault):
    """Whatever breaks, before or after it is carried out, the result is that of one that does not fail."""
    work, method, key = DEEDS[deed]
    proxy.fail(fault, times=2, method=method, key=key)
    assert work(bucket)
    assert [request.fault for request in proxy.requests].count(fault) == 1 + (deed != "end" or fault != "cut response")


@pytest.mark.parametrize("fault", ["stall", "stall after", "stall response"])
@pytest.mark.parametrize("deed", ["get", "open", "list", "delete", "create", "update"])
def test_a_request_that_nobody_answers_is_made_again(proxy, bucket, deed, fault):
    work, method, key = DEEDS[deed]
    proxy.fail(fault, method=method, key=key)
    assert work(Bucket(bucket.url, RESTLESS))


def test_a_part_of_an_upload_that_does_not_move_is_sent_again(proxy, s3):
    bucket = Bucket(s3, RESTLESS._replace(part=1))
    proxy.fail("stall", method="PUT", key="partNumber=1")
    send(bucket)
    assert bucket.get("new").content == CONTENT


def test_what_is_slow_and_moves_is_not_cut(proxy, s3):
    """A part of an upload and an answer may take longer than a silence may."""

    def is_cut(answer):
        proxy.requests.clear()
        bucket = Bucket(s3, HASTY._replace(answer=answer))
        proxy.bytes_per_second = (6 << 20) / answer  # of each connection
        start = time.monotonic()
        send(bucket)
        assert time.monotonic() - start > 1.2 * answer
        bucket.put("put", CONTENT[:PART])
        start = time.monotonic()
        assert bucket.get("new").content == CONTENT
        assert time.monotonic() - start > 2.5 * answer
        return any(request.status != 200 for request in proxy.requests)

    assert not is_cut(1) or not is_cut(10)  # a busy machine may be silent for a second


@pytest.mark.parametrize("seed", range(3))
def test_everything_holds_while_one_request_in_five_fails(proxy, bucket, seed):
    proxy.fail_at_random(0.2, seed)
    tag = bucket.put("counter", b"0", MISSING)
    for number in range(20):
        tag = bucket.put("counter", str(number).encode(), tag)
        with pytest.raises(ChangedError):
            bucket.put("counter", b"other", MISSING)
    for number in range(3):
        send(bucket, f"files/{number}")
    assert read_all(bucket) == CONTENT
    proxy.heal()
    assert bucket.get("counter").content == b"19"
    assert [bucket.get(entry.key).content == CONTENT for entry in bucket.list("files/")] == [True] * 3


@pytest.mark.parametrize("seed", range(2))
def test_of_writers_that_race_over_a_network_that_fails_no_two_have_written_after_the_same(proxy, s3, seed):
    """Each adds one to a number, on the condition that it is what it has read, until it has succeeded ten times.

    It may have succeeded more often than it knows: when the answer is lost and another has gone on from what it wrote.
    """
    first = Bucket(s3, HASTY)
    first.put("number", b"0", MISSING)
    proxy.fail_at_random(0.2, seed)
    failed, written = [], []

    def add(name):
        bucket, end = Bucket(s3, HASTY), 10
        try:
            while end:
                found = bucket.get("number")
                number = int(found.content.split()[0]) + 1
                with suppress(ChangedError):
                    bucket.put("number", f"{number} {name}".encode(), found.tag)
                    written.append(number)
                    end -= 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=add, args=[name]) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.heal()
    assert not failed
    assert len(set(written)) == len(written) == 40
    assert max(written) <= int(first.get("number").content.split()[0])


@pytest.mark.parametrize("fault", ["500 after", "cut after", "stall after"])
@pytest.mark.parametrize("is_update", [False, True])
def test_a_write_that_was_carried_out_without_an_answer_and_overwritten_is_known(proxy, bucket, s3, fault, is_update):
    """Between the write and its next try somebody else replaces the object: it is theirs now."""
    expected = bucket.head("small").tag if is_update else MISSING
    key = "small" if is_update else "new"
    proxy.fail(fault, method="PUT", key=key)
    own, other = Bucket(bucket.url, RESTLESS if fault == "stall after" else HASTY), Bucket(f"{s3}/run", HASTY)
    seen = proxy.begin

    def begin(method, path, headers):
        if [request.fault for request in proxy.requests] == [*[None] * is_update, fault]:
            proxy.begin = seen
            other.put(key, b"theirs")
        return seen(method, path, headers)

    proxy.begin = begin
    with pytest.raises(ChangedError, match=f"run/{key} was written by somebody else"):
        own.put(key, b"ours", expected)
    assert bucket.get(key).content == b"theirs"


def test_the_same_content_of_somebody_else_is_not_taken_for_ones_own(bucket):
    """Only a try of one's own that may have been carried out makes content that is there one's own."""
    bucket.put("new", b"same", MISSING)
    with pytest.raises(ChangedError):
        bucket.put("new", b"same", MISSING)


def test_a_condition_that_another_request_is_in_the_way_of_is_asked_again(proxy, bucket):
    proxy.fail("409 ConditionalRequestConflict", times=2, method="PUT")
    bucket.put("new", b"1", MISSING)
    proxy.fail("409 ConditionalRequestConflict", method="PUT")
    bucket.put("new", b"2", bucket.head("new").tag)
    assert bucket.get("new").content == b"2"


@pytest.mark.parametrize(
    ("fault", "said"),
    [("503", "the store answers 503 Service Unavailable"), ("cut", "the connection to the store broke or stood still"),
     ("stall", "")],
)  # fmt: skip
@pytest.mark.parametrize("deed", ["get", "list", "create", "begin", "part", "end"])
def test_a_store_that_goes_on_failing_is_given_up(proxy, s3, deed, fault, said):
    """Not before the patience is at its end, and not long after."""
    patient = Bucket(f"{s3}/run")
    patient.put("small", SMALL)
    work, method, key = DEEDS[deed]
    proxy.fail(fault, times=1000, method=method, key=key)
    silence = {"answer": 0.3, "part": 0.5} if fault == "stall" else {}
    start = time.monotonic()
    with refusal(f"{s3}/run", " cannot be ", said):
        work(Bucket(f"{s3}/run", PATIENCE._replace(retry=0.8, **silence)))
    assert 0.5 < time.monotonic() - start < 60
    proxy.heal()
    assert [entry.key for entry in patient.list()] == ["small"]


def test_an_error_says_after_how_long_it_came(proxy, s3):
    bucket = Bucket(s3, PATIENCE._replace(retry=1.2))
    bucket.put("a", b"1")
    proxy.fail("503 SlowDown", times=1000)
    with refusal("cannot be read after ", " s: the store answers 503 Service Unavailable (SlowDown)"):
        bucket.get("a")
    assert proxy.count("GET") > 3


def test_a_failed_or_abandoned_upload_leaves_nothing(proxy, object_server, s3):
    bucket = Bucket(s3, PATIENCE._replace(retry=0.5))
    with suppress(ZeroDivisionError), bucket.upload("abandoned") as file:
        file.write(CONTENT)
        raise ZeroDivisionError
    forgotten = bucket.upload("forgotten")
    forgotten.__enter__().write(CONTENT)
    del forgotten
    proxy.fail("503", times=1000, method="PUT", key="partNumber=2")
    with refusal("failed cannot be written"):
        send(bucket, "failed")
    proxy.heal()
    assert bucket.list() == []
    assert uploads_of(object_server, bucket) == []


KILLED = """
import sys
from chainring._places.bucket import PART, Bucket
with Bucket(sys.argv[1]).upload("a") as file:
    for _ in range(100):
        file.write(bytes(PART))
        print("written", flush=True)
"""


def test_a_process_that_is_killed_in_an_upload_leaves_no_object_and_parts_that_a_rule_can_remove(proxy, object_server, s3):
    bucket = Bucket(s3)
    proxy.bytes_per_second = 100 << 20
    with subprocess.Popen([sys.executable, "-c", KILLED, s3], stdout=subprocess.PIPE) as process:
        for _ in range(5):
            process.stdout.readline()
        process.kill()
    assert bucket.list() == []
    assert uploads_of(object_server, bucket) == ["a"]


def test_a_block_that_goes_on_after_a_failed_write_makes_no_object(proxy, s3):
    bucket = Bucket(s3, PATIENCE._replace(retry=0.5))

    def go_on():
        with bucket.upload("a") as file:
            file.write(CONTENT)
            proxy.fail("503", times=1000, method="PUT")
            for _ in range(8):
                with suppress(RemoteError):
                    file.write(CONTENT)
            proxy.heal()

    with refusal("a cannot be written"):
        go_on()
    assert bucket.list() == []


def test_an_upload_that_is_aborted_by_others_is_an_error(proxy, object_server, s3):
    bucket = Bucket(s3, HASTY._replace(retry=0.5))

    def write():
        with bucket.upload("a") as file:
            file.write(CONTENT)
            client = boto3.client("s3", endpoint_url=object_server, region_name="us-east-1")
            name = s3.removeprefix("s3://")
            for upload in client.list_multipart_uploads(Bucket=name)["Uploads"]:
                client.abort_multipart_upload(Bucket=name, Key="a", UploadId=upload["UploadId"])

    with refusal("a cannot be written: something has aborted its upload"):
        write()
    assert bucket.list() == []


def test_an_object_that_is_too_large_for_parts_of_the_usual_size_has_larger_ones(proxy, s3):
    """Stores take 10,000 of them."""
    with Bucket(s3).upload("new") as file:
        file.expect(100 << 30)
        file.write(CONTENT)
        file.write(CONTENT)
    sizes = sorted(request.received for request in proxy.requests if "partNumber" in request.path)
    assert sizes[-1] == sizes[-2] > PART
    assert sizes[-1] * 10_000 >= 100 << 30
    assert Bucket(s3).get("new").content == CONTENT * 2


def test_more_parts_than_a_store_takes_are_refused_before_they_are_sent(s3, tmp_path):
    with open(tmp_path / "holes", "wb") as holes:
        holes.truncate(10_000 * PART + 1)

    def write():
        with (
            open(tmp_path / "holes", "rb") as holes,
            mmap.mmap(holes.fileno(), 0, access=mmap.ACCESS_READ) as content,
            Bucket(s3).upload("new") as file,
        ):
            file.write(content)

    with pytest.raises(ValueError, match=f"new is to have more than 10000 parts of {PART} bytes; call expect"):
        write()
    assert Bucket(s3).list() == []


def test_reading_in_small_pieces_takes_few_requests_and_no_bytes_twice(proxy, bucket):
    send(bucket, "large")
    proxy.requests.clear()
    file = bucket.open("large")
    pieces = [bytes_of(file, start, min(1 << 20, file.size - start)) for start in range(0, file.size, 1 << 20)]
    assert b"".join(pieces) == CONTENT
    assert proxy.count("GET") <= 6
    assert sum(request.sent for request in proxy.requests if request.method == "GET") == len(CONTENT)


def test_reading_here_and_there_takes_what_is_asked_for(proxy, bucket):
    send(bucket, "large")
    proxy.requests.clear()
    file = bucket.open("large")
    for start in range(PART, 0, -1 << 20):
        assert bytes_of(file, start, 1000) == CONTENT[start : start + 1000]
    assert sum(request.sent for request in proxy.requests) == 8000


def test_a_reader_goes_on_after_a_failure(proxy, s3):
    bucket = Bucket(s3, PATIENCE._replace(retry=0.5))
    bucket.put("a", SMALL)
    file = bucket.open("a")
    file.read(0, 10)
    proxy.fail("503", times=1000)
    with refusal("a cannot be read"):
        file.read(10, 1000)
    proxy.heal()
    assert bytes_of(file, 10, 1000) == SMALL[10:1010]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("403 AccessDenied", ("the store answers 403 Forbidden (AccessDenied)", "permission to read, write, list")),
        ("403 InvalidAccessKeyId", ("403", "InvalidAccessKeyId", "check the credentials")),
        ("403 SignatureDoesNotMatch", ("SignatureDoesNotMatch", "check the credentials")),
        ("401 Whatever", ("the store answers 401 Unauthorized (Whatever)", "check the credentials")),
        ("400 ExpiredToken", ("the credentials have expired: renew them",)),
        ("404 NoSuchBucket", ("there is no bucket of that name: create it, or correct the address",)),
        ("301 PermanentRedirect", ("the bucket is in another region: set AWS_REGION",)),
        ("400 AuthorizationHeaderMalformed", ("the bucket is in another region: set AWS_REGION",)),
        ("403 RequestTimeTooSkewed", ("set this machine's clock",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("deed", ["get", "read", "list", "delete", "create", "update", "begin", "part", "end"])
def test_what_does_not_heal_is_said_at_once_with_a_remedy(proxy, bucket, deed, fault, words):
    work, method, key = DEEDS[deed]
    proxy.fail(fault, times=1000, method=method, key=key)
    with refusal(f"{bucket.url}", *words):
        work(bucket)
    assert [request.fault for request in proxy.requests].count(fault) == 1


def test_a_bucket_that_is_not_there_is_not_taken_for_an_object_that_is_not(s3):
    bucket = Bucket("s3://no-such-bucket/run")
    works = [lambda: bucket.get("a"), lambda: bucket.head("a"), lambda: bucket.open("a"), bucket.list,
             bucket.check_conditions, lambda: bucket.put("a", b""), lambda: bucket.put("a", b"", MISSING),
             lambda: send(bucket), lambda: bucket.delete(["a"])]  # fmt: skip
    for work in works:
        with refusal("s3://no-such-bucket/run", "there is no bucket of that name: create it, or correct the address"):
            work()


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:9", ("nothing answers at the address of the store",)),
        ("http://store.invalid", ("the name of the store is not known",)),
    ],
)
def test_a_store_that_has_never_answered_is_given_up_soon(s3, monkeypatch, endpoint, words):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    bucket = Bucket(s3, PATIENCE._replace(start=0.3))
    start = time.monotonic()
    with refusal(*words, "check the network and", "AWS_ENDPOINT_URL"):
        bucket.get("a")
    assert time.monotonic() - start < PATIENCE.retry / 2


def test_a_store_that_has_answered_is_waited_for(object_server, s3):
    """Its server is away for longer than one that never was there would be given."""
    from faulty_proxy import FaultyProxy

    with FaultyProxy(object_server) as first:
        os.environ["AWS_ENDPOINT_URL"] = first.url
        bucket = Bucket(s3, PATIENCE._replace(start=0.1, retry=1.5))
        bucket.put("a", b"1")
    start = time.monotonic()
    with refusal("nothing answers at the address of the store"):
        bucket.get("a")
    assert time.monotonic() - start > 0.7


@pytest.mark.parametrize(
    ("dropped", "said"),
    [("if-none-match", "lets an object be created twice"), ("if-match", "lets an object be replaced that has changed")],
)
def test_a_store_without_conditions_is_refused_with_the_rule_and_a_remedy(proxy, s3, dropped, said):
    bucket = Bucket(f"{s3}/run", HASTY)
    bucket.check_conditions()
    proxy.dropped_headers = {dropped}
    with pytest.raises(ValueError, match=said) as refused:
        bucket.check_conditions()
    for word in ("a run needs a store that knows writes on a condition", f"{s3}/run", "choose another store"):
        assert word in str(refused.value)
    assert bucket.list() == []


def test_conditions_are_checked_over_a_network_that_fails(proxy, s3):
    bucket = Bucket(s3, HASTY)
    proxy.fail_at_random(0.3, 5)
    for _ in range(5):
        bucket.check_conditions()
    proxy.dropped_headers = {"if-none-match"}
    for _ in range(5):
        with pytest.raises(ValueError, match="created twice"):
            bucket.check_conditions()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, which the refusal is about
def test_a_forked_process_is_refused_and_does_not_hang(bucket):
    bucket.get("small")
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            Bucket(bucket.url).get("small")
        except RemoteError as error:
            os.write(there, str(error).encode())
        finally:
            os._exit(0)
    os.close(there)
    alarm = signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.alarm(120)
    with open(here, "rb") as pipe:
        said = pipe.read().decode()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, alarm)
    os.waitpid(pid, 0)
    assert f"process {pid} was forked from one that has used an object store" in said
    assert 'start processes by "spawn" or "forkserver"' in said
    assert bucket.get("small").content == SMALL


def test_waiting_leaves_the_numbers_of_the_program_alone(proxy, bucket):
    state = random.getstate()
    proxy.fail("503", times=2)
    bucket.get("small")
    assert random.getstate() == state


MEMORY = """
import sys
from chainring._places.bucket import PART, Bucket
def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
bucket = Bucket(sys.argv[1])
bucket.put("warm", b"1")
data = bytes(PART)
bucket.get("warm")
open("/proc/self/clear_refs", "w").write("5")
before = held()
if sys.argv[2] == "write":
    with bucket.upload("a") as file:
        for _ in range(8):
            file.write(data)
else:
    file = bucket.open("a")
    for start in range(0, file.size, 1 << 20):
        file.read(start, 1 << 20)
print((peak() - before) / PART)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_upload_holds_a_part_for_each_connection_and_a_reader_its_windows(proxy, s3):
    """Of 64 MB over links that are slower than what writes and reads."""
    proxy.bytes_per_second = 100 << 20
    for deed, limit in (("write", 4.5), ("read", 4)):
        done = subprocess.run([sys.executable, "-c", MEMORY, s3, deed], capture_output=True, text=True, check=True)
        assert float(done.stdout) < limit
