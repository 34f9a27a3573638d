"""A proxy before a store of objects that breaks what it is told to break, and counts what passes.

    with FaultyProxy(server) as proxy:
        proxy.fail("503", times=2)                  # the next two requests
        proxy.fail("500 after", method="PUT")       # the next PUT is carried out, and is said to have failed
        proxy.fail("cut response", key="weights")   # the next request with that in its path or query
        proxy.fail_at_random(0.1, seed=1)           # one in ten, with any fault that ends by itself
        proxy.bytes_per_second = 100_000            # of each connection
        proxy.dropped_headers = {"if-none-match"}   # as a store does that knows no conditions
        ... proxy.url ... proxy.requests ...

A fault is one of `FAULTS`, or a status and a code of S3's, such as "403 AccessDenied", before it is carried out; the body
of such an answer repeats what the client has sent. "stall" ends when the client goes away, or with the proxy.
"""

import http.client
import random
import re
import select
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

PIECE = 16 << 10  # bytes
ENDING = (
    "500", "503",  # not carried out
    "500 after", "503 after",  # carried out
    "cut", "cut request", "cut after",  # no answer; the second is cut in the body of the request; the third was carried out
    "cut response",  # in its body
)  # fmt: skip
STALLING = ("stall", "stall after", "stall response")  # silence; the second and third were carried out
HTML = "200 html"  # an answer that is none of the store: the page of a login, or of a proxy on the way
EMPTY, SHORT = "200 empty", "200 short"  # listings: of nothing, and without what has "snapshot" in its key
FAULTS = ENDING + STALLING


@dataclass
class Request:
    """A request that came, as far as it came."""

    method: str
    path: str  # below the bucket, with the query, such as "/key?uploads"
    fault: str | None
    headers: dict  # by names in lower case
    status: int | None = None  # what the client was told
    received: int = 0  # bytes of the body that came from the client
    sent: int = 0  # bytes of the body that went to the client
    is_over: bool = False  # nothing more comes of it


@dataclass
class Order:
    """A fault for some of the requests that come."""

    fault: str
    times: int
    method: str | None
    key: str
    skip: int  # so many that it would meet go unharmed first


class FaultyProxy:
    """A proxy on a free port of loopback, in threads of this process.

    Args:
        server: the address of the store.
    """

    def __init__(self, server):
        self.server = urlsplit(server)
        self.requests = []
        self.bytes_per_second = None
        self.dropped_headers = set()
        self.over, self.stalls = threading.Event(), threading.Event()
        self._orders, self._rate, self._faults = [], 0.0, ENDING
        self._random, self._lock = random.Random(), threading.Lock()

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        return self

    def __exit__(self, *error):
        self.over.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._http.cut()

    def fail(self, fault, *, times=1, method=None, key="", skip=0):
        """Break the next requests of that method with that text in their path or query."""
        assert fault in FAULTS or fault[:3].isdigit(), fault
        with self._lock:
            self._orders.append(Order(fault, times, method, key, skip))

    def fail_at_random(self, rate, seed=0, faults=ENDING):
        """Break that part of the requests; 0 stops it."""
        with self._lock:
            self._rate, self._faults, self._random = rate, faults, random.Random(seed)

    def heal(self):
        """Forget all orders."""
        with self._lock:
            self._orders, self._rate, self.bytes_per_second, self.dropped_headers = [], 0.0, None, set()

    def count(self, method=None, key=""):
        """How many requests of that method had that text in their path or query."""
        return sum(method in (None, request.method) and key in request.path for request in list(self.requests))

    def begin(self, method, path, headers):
        """Note a request, and decide what becomes of it."""
        with self._lock:
            path = path[len(path.split("?")[0].split("/")[1]) + 1 :]
            request = Request(method, path, self._chosen(method, path), headers)
            self.requests.append(request)
        return request

    def _chosen(self, method, path):
        for order in self._orders:
            if order.times and order.method in (None, method) and order.key in path:
                if order.skip:
                    order.skip -= 1
                    continue
                order.times -= 1
                return order.fault
        return self._random.choice(self._faults) if self._random.random() < self._rate else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *args):
        super().__init__(*args)
        self.open = []

    def process_request(self, request, client_address):
        self.open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.close_request(request)  # without a polite word first

    def cut(self):
        """End the connections that clients keep."""
        for request in self.open:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """Clients go away, as they were made to."""


class _CutError(Exception):
    """The connection is to end here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy = None
    request_seen = None
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (_CutError, OSError):
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)  # a reset, and not an end that looks as if it were all
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        finally:
            if self.request_seen is not None:
                self.request_seen.is_over = True

    def _pass(self):
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_seen = request = self.proxy.begin(self.command, self.path, headers)
        fault = request.fault or ""
        if fault == "stall":
            self._stall()
        size = int(self.headers.get("content-length") or 0)
        content = self._read(size // 2 if fault == "cut request" else size)
        if fault in ("cut", "cut request"):
            raise _CutError
        if fault == HTML:
            page = b"<html><head><title>Sign in</title></head><body><p>Sign in to the network</p></body></html>"
            return self._answer(200, {"content-type": "text/html"}, page)
        if fault == EMPTY:
            return self._answer(200, {"content-type": "application/xml"}, b"<ListBucketResult></ListBucketResult>")
        if fault[:3].isdigit() and not fault.endswith("after") and fault != SHORT:
            error = (
                f"<Error><Code>{fault[4:]}</Code><Message>You sent {escape(self.path + str(self.headers))}</Message></Error>"
            )
            return self._answer(int(fault[:3]), {}, error.encode() if self.command != "HEAD" else b"")
        status, answered, body = self._forward(content)
        if fault == "stall after":
            self._stall()
        if fault == "cut after" or (fault == "cut response" and not body):
            raise _CutError
        if fault in ("500 after", "503 after"):
            return self._answer(int(fault[:3]), {}, b"")
        if fault == SHORT:
            body = re.sub(rb"<Contents>\s*<Key>[^<]*snapshot.*?</Contents>", b"", body, flags=re.DOTALL)
        return self._answer(status, answered, body, fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

    def _read(self, size):
        pieces = []
        while size:
            piece = self.rfile.read(min(size, PIECE))
            if not piece:
                raise _CutError
            self._wait_for(piece)
            self.request_seen.received += len(piece)
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _forward(self, content):
        headers = {name: value for name, value in self.headers.items() if name.lower() not in self.proxy.dropped_headers}
        connection = http.client.HTTPConnection(self.proxy.server.hostname, self.proxy.server.port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(content)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _answer(self, status, headers, body, fault=""):
        self.request_seen.status = status
        self.send_response_only(status)
        kept = {name: value for name, value in headers.items() if name.lower() not in ("connection", "transfer-encoding")}
        if self.command != "HEAD" and status != 204:
            kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
            kept["content-length"] = str(len(body))
        for name, value in kept.items():
            self.send_header(name, value)
        self.end_headers()
        part = body[: len(body) // 2] if fault in ("cut response", "stall response") else body
        for start in range(0, len(part), PIECE):
            piece = part[start : start + PIECE]
            self._wait_for(piece)
            self.request_seen.sent += len(piece)
            self.wfile.write(piece)
        if fault == "cut response":
            raise _CutError
        if fault == "stall response":
            self._stall()

    def _wait_for(self, piece):
        if self.proxy.bytes_per_second and self.proxy.over.wait(len(piece) / self.proxy.bytes_per_second):
            raise _CutError

    def _stall(self):
        """Say nothing until the client has gone."""
        self.proxy.stalls.set()
        while not self.proxy.over.is_set():
            if select.select([self.connection], [], [], 0.1)[0] and not self.connection.recv(PIECE):
                break
        raise _CutError
