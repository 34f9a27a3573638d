"""A page that follows runs: a server on this machine alone, which reads the runs and sends what has changed.

There is one document, the page, and one stream, its changes. No request names a file, and nothing is written.
"""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from chainring._files import is_url
from chainring.html_report._log import modified
from chainring.html_report._media import MAX_SIZE
from chainring.html_report._page import json_of, page_of
from chainring.html_report._parts import Content, DrawnRun, content_of, content_of_several, drawn_run
from chainring.html_report._run import Readers, read_run
from chainring.html_report._several import Parting, names_of
from chainring.serializers._store import Place

HOST = "127.0.0.1"
_PAUSE = 1.0  # seconds between two looks at the runs
_SHARE = 4  # of the time that a look has taken, the pause after it is at least so many times as long
_COMPARING_SHARE = 20  # the same of the time to find where runs part
_STALE = 60.0  # seconds after which what was read of a log that no longer grows is let go
_BEAT = 5.0  # seconds after which a listener that has gone is noticed
_MAX_LISTENERS = 32
_LAST_SECONDS = 2.0  # in which those who listen are told that the server ends

Compare = Callable[[], Sequence[Parting]]


@contextmanager
def watch(
    places: Sequence[Place], port: int, compare: Compare = list
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Serve the page of one run or of several for the time of the block.

    The values are the address of the page, a function that reads changes again and again and never returns, and one that
    does so once. ``compare`` tells where runs diverge from the first.

    Raises:
        ValueError: a run is at an address, or given twice.
        FileNotFoundError: there is no run.
        OSError: the port is in use.
    """
    watched = _Watched(places, compare)
    watched.look()
    with _Server(port, watched) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}/", watched.follow, watched.look
        finally:
            watched.end()
            server.shutdown()
            thread.join()
            server.cut()


class _Watched:
    """The runs as they were when they were last looked at, and when each part of the page has changed."""

    def __init__(self, places: Sequence[Place], compare: Compare) -> None:
        for place in places:
            if is_url(place):
                raise ValueError(
                    f"--watch follows runs on the disks of this machine, and {place} is an address; "
                    "write the page again from time to time, without --watch"
                )
        self._directories = [Path(place) for place in places]
        self._names = names_of(places)
        self._compare = compare
        self._partings: Sequence[Parting] = ()
        self._is_compared, self._next_comparison = False, 0.0
        self._readers = [Readers() for _ in places]
        if len(places) > 1:
            self._readers = [Readers(max_rows=1, max_media=MAX_SIZE // len(places)) for _ in places]
        self._signs: list[Any] = [()] * len(places)
        self._drawn: list[DrawnRun] = []
        self._token = secrets.token_hex(8)  # of this server: a page of an earlier one is loaded again
        self._version = 0
        self._changed_at: dict[tuple[str, Any], int] = {}  # by what has changed the version in which it did
        self._trouble = ""
        self._content: Content
        self._condition = threading.Condition()
        self._listeners = 0
        self.is_ended = False

    # --- the runs ---

    def follow(self) -> None:
        """Look at the runs time and again."""
        while True:
            began = time.monotonic()
            self.look()
            time.sleep(max(_PAUSE, _SHARE * (time.monotonic() - began)))

    def look(self) -> None:
        """Read the runs that have changed, and wake those who listen."""
        changed, trouble = self._read_changed()
        self._is_compared &= not changed
        is_due = not self._is_compared and len(self._drawn) > 1 and time.monotonic() >= self._next_comparison
        if is_due:
            began = time.monotonic()
            self._partings, self._is_compared = self._compare(), True
            now = time.monotonic()
            self._next_comparison = now + _COMPARING_SHARE * (now - began)
        if not changed and not is_due and trouble == self._trouble:
            return
        several = len(self._drawn) > 1
        content = content_of_several(self._names, self._drawn, self._partings) if several else content_of(self._drawn[0])
        with self._condition:
            self._remember(content, trouble)
            self._condition.notify_all()

    def _remember(self, content: Content, trouble: str) -> None:
        before = self._content if self._version else Content("", {}, {}, {"runs": [None] * len(self._drawn)}, 0)
        pairs = zip(content.data["runs"], before.data["runs"], strict=True)
        news: set[tuple[str, Any]] = {("run", index) for index, (run, old) in enumerate(pairs) if run != old}
        news |= {("part", name) for name in content.parts if content.parts[name] != before.parts.get(name)}
        if news or trouble != self._trouble:
            self._version += 1
            self._changed_at |= dict.fromkeys(news, self._version)
            self._content, self._trouble = content, trouble

    def _read_changed(self) -> tuple[list[int], str]:
        """Return which runs have changed, and what went wrong with others, which stay as they were."""
        changed, troubles = [], []
        for index, directory in enumerate(self._directories):
            sign = self._sign(index)
            if sign == self._signs[index]:
                continue
            readers = self._readers[index]
            try:
                run = read_run(directory, verify=False, with_snapshots=len(self._directories) == 1, readers=readers)
            except (OSError, ValueError) as error:
                if self._version == 0:
                    raise
                troubles.append(f"{directory}: {error}")
                continue
            drawn = drawn_run(run, len(self._directories))
            self._signs[index] = sign
            changed.append(index)
            self._drawn[index : index + 1] = [drawn]
            if self._is_stale(index):
                readers.files.clear()
        return changed, "; ".join(troubles)

    def _sign(self, index: int) -> Any:
        """Return what tells that the files of a run have changed."""
        directory = self._directories[index]
        try:
            names = [entry.name for entry in directory.iterdir()]
        except OSError:
            return None
        return [(name, modified(directory / name)) for name in sorted({*names, *self._readers[index].files})]

    def _is_stale(self, index: int) -> bool:
        times = [modified(self._directories[index] / name)[1] for name in self._readers[index].files]
        return time.time() - max(times, default=0) / 1e9 > _STALE

    # --- those who look at the page ---

    def page(self) -> bytes:
        """Return the page as of now."""
        with self._condition:
            content, mark = self._content, self._mark()
        return page_of(content, mark).encode()

    def _mark(self) -> str:
        return f"{self._token}-{self._version}"

    def changes(self, mark: str) -> Iterator[bytes]:
        """Yield what changes after a page or an event with this mark, as server-sent events, until the server ends."""
        token, _, version = mark.partition("-")
        if token != self._token or not version.isdecimal() or len(version) > 18:
            yield b"event: reload\ndata:\n\n"
            return
        seen = int(version)
        while True:
            with self._condition:
                if not self.is_ended and self._version == seen:
                    self._condition.wait(_BEAT)
                # A comment tells whether anyone is there.
                event = self._event(seen) if self._version > seen else b":\n\n"
                seen = self._version
            yield event
            if self.is_ended:
                yield b"event: end\ndata:\n\n"
                return

    def _event(self, seen: int) -> bytes:
        news = [what for what, version in self._changed_at.items() if version > seen]
        change = {
            "runs": {index: self._content.data["runs"][index] for kind, index in news if kind == "run"},
            "parts": {name: self._content.parts[name] for kind, name in news if kind == "part"},
            "partings": self._content.data["partings"],
            "trouble": self._trouble,
        }
        return f"event: change\nid: {self._mark()}\ndata: {json_of(change)}\n\n".encode()

    def end(self) -> None:
        """Send those who listen away."""
        with self._condition:
            self.is_ended = True
            self._condition.notify_all()

    @contextmanager
    def listening(self) -> Iterator[bool]:
        """Count a listener; the value is whether there is room for it."""
        with self._condition:
            self._listeners += 1
            has_room = self._listeners <= _MAX_LISTENERS
        try:
            yield has_room
        finally:
            with self._condition:
                self._listeners -= 1


class _Server(ThreadingHTTPServer):
    """Answers this machine only; its threads end with it."""

    daemon_threads = False

    def __init__(self, port: int, watched: _Watched) -> None:
        self.watched = watched
        self._connections: set[socket.socket] = set()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(
                f"port {port} of {HOST} is in use; give another --port, or --port 0 for one that is free"
            ) from error
        self.hosts = {f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"}

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        """End the connections: those that wait for a request at once, others when they have been sent the last event."""
        self._shut(socket.SHUT_RD)
        until = time.monotonic() + _LAST_SECONDS
        while self._connections and time.monotonic() < until:
            time.sleep(0.02)
        self._shut(socket.SHUT_RDWR)

    def _shut(self, direction: int) -> None:
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(direction)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a reader who has gone; nothing depends on it."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "chainring", ""
    timeout = 30.0

    def do_GET(self) -> None:
        # The name of another site may be made to lead to this machine; its pages ask for that name.
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self.send_error(403, "this page is that of 127.0.0.1 and localhost only")
            return
        path, _, query = self.path.partition("?")
        if path == "/" and not query:
            page = self.server.watched.page()
            self._begin("text/html; charset=utf-8", len(page))
            self.wfile.write(page)
        elif path == "/events":
            self._send_events(self.headers.get("Last-Event-ID") or query)
        else:
            self.send_error(404)

    def _send_events(self, mark: str) -> None:
        with self.server.watched.listening() as has_room:
            if not has_room:
                self.send_error(503, f"the page is open {_MAX_LISTENERS} times")
                return
            self._begin("text/event-stream")
            for event in self.server.watched.changes(mark):
                self.wfile.write(event)
                self.wfile.flush()

    def _begin(self, kind: str, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in {
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
        """Print nothing: the terminal shows the address."""
