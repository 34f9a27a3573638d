"""The proxy by which the other tests break a store does what it says."""

import http.client
import random
import threading
import time
from contextlib import closing, suppress
from urllib.parse import urlsplit

import pytest
from faulty_proxy import ENDING, FAULTS, STALLING

CONTENT = random.Random(0).randbytes(200_000)
AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
DONE = ("500 after", "503 after", "cut after", "cut response", "stall after", "stall response")


class RefusedError(Exception):
    """The store has answered something else than 200."""


def ask(proxy, s3, method, key, content=None, headers=None, stalls=False):
    headers = {"Content-Type": "application/octet-stream", "Authorization": AUTHORIZATION} | (headers or {})
    with closing(http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=120)) as connection:
        connection.request(method, f"/{s3.removeprefix('s3://')}/{key}", content, headers)
        if stalls:
            assert proxy.stalls.wait(120)
            connection.sock.settimeout(0.2)  # seconds, after which nothing comes any more
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise RefusedError(answer.status)
            return answer.read()


def test_what_is_not_broken_passes_and_is_counted(proxy, s3):
    ask(proxy, s3, "PUT", "a", CONTENT)
    assert ask(proxy, s3, "GET", "a") == CONTENT
    assert [(request.method, request.status, request.received, request.sent) for request in proxy.requests] == [
        ("PUT", 200, len(CONTENT), 0),
        ("GET", 200, 0, len(CONTENT)),
    ]
    assert proxy.count("GET") == proxy.count(key="/a") - 1 == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_a_request_before_or_after_it_is_carried_out(proxy, s3, fault):
    proxy.fail(fault, method="PUT" if "response" not in fault else "GET")
    if "response" in fault:
        ask(proxy, s3, "PUT", "a", CONTENT)
    request = ("GET", "a") if "response" in fault else ("PUT", "a", CONTENT)
    with pytest.raises((OSError, http.client.HTTPException, RefusedError)) as refused:
        ask(proxy, s3, *request, stalls=fault in STALLING)
    if fault[:3].isdigit():
        assert refused.value.args == (int(fault[:3]),)
    if fault in DONE:
        assert ask(proxy, s3, "GET", "a") == CONTENT
    else:
        with pytest.raises(RefusedError, match="404"):
            ask(proxy, s3, "GET", "a")


def test_an_order_is_for_so_many_requests_of_a_method_and_a_key(proxy, s3):
    proxy.fail("503", times=1, method="PUT", key="b", skip=1)
    for key in ("a", "b"):
        ask(proxy, s3, "PUT", key, b"1")
    with pytest.raises(RefusedError, match="503"):
        ask(proxy, s3, "PUT", "b", b"2")
    ask(proxy, s3, "PUT", "b", b"3")
    assert ask(proxy, s3, "GET", "b") == b"3"


def test_faults_at_random_are_those_of_the_seed(proxy, s3):
    seen = []
    for _ in range(2):
        proxy.requests.clear()
        proxy.fail_at_random(0.5, seed=3, faults=("500", "503"))
        for number in range(20):
            with suppress(RefusedError):
                ask(proxy, s3, "PUT", str(number), b"1")
        seen.append([request.fault for request in proxy.requests])
    assert seen[0] == seen[1]
    assert {"500", "503", None} == set(seen[0]) <= {*ENDING, None}


def test_a_slow_link_has_so_many_bytes_a_second(proxy, s3):
    proxy.bytes_per_second = 400_000
    start = time.monotonic()
    ask(proxy, s3, "PUT", "a", CONTENT)
    assert time.monotonic() - start > 0.4


def test_dropped_headers_do_not_reach_the_store(proxy, s3):
    def create():
        ask(proxy, s3, "PUT", "a", b"1", headers={"If-None-Match": "*"})

    create()
    with pytest.raises(RefusedError, match="412"):
        create()
    proxy.dropped_headers = {"if-none-match"}
    create()


def test_of_many_who_create_an_object_at_once_one_succeeds(proxy, s3):
    outcomes = []

    def create(number):
        with suppress(RefusedError):
            ask(proxy, s3, "PUT", "a", str(number).encode(), headers={"If-None-Match": "*"})
            outcomes.append(number)

    threads = [threading.Thread(target=create, args=[number]) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    assert ask(proxy, s3, "GET", "a") == str(outcomes[0]).encode()
