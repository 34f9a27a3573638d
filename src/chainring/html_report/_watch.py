"""A page that follows runs: a server on this machine alone, which reads the runs and sends what has changed.

There is one document, the page, and one stream, its changes. No request names a file, and nothing is written.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from chainring._files import is_url
from chainring.html_report._content import (
    Content,
    DrawnRun,
    Parting,
    content_of,
    content_of_several,
    drawn_run,
    json_of,
    names_of,
    page_of,
)
from chainring.html_report._log import LogFile
from chainring.html_report._run import read_run
from chainring.serializers._store import Place

HOST = "127.0.0.1"
_PAUSE = 1.0  # seconds between two looks at the runs
_SHARE = 4  # of the time that a look has taken, the pause after it is at least so many times as long
_COMPARING_SHARE = 20  # the same of the time to find where runs part
_STALE = 60.0  # seconds after which what was read of a log that no longer grows is let go
_BEAT = 5.0  # seconds after which a listener that has gone is noticed
_TO_ASK, _TO_READ = 2.0, 10.0  # seconds for a request, and to take what is sent: the server ends no later

_HEADERS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"), ("Referrer-Policy", "no-referrer"))  # fmt: skip

Compare = Callable[[], Sequence[Parting]]


@contextmanager
def watch(
    places: Sequence[Place], port: int, compare: Compare = list
) -> Iterator[tuple[str, Callable[[], None], Callable[[], None]]]:
    """Serve the page of one run or of several for the time of the block.

    The values are the address of the page, a function that reads changes again and again and never returns, and one that
    does so once. ``compare`` tells where runs diverge from the first.
    """
    runs, feed = _Runs(places, compare), _Feed()

    def look() -> None:
        if (news := runs.look()) is not None:
            feed.publish(*news)

    def follow() -> None:
        while True:
            began = time.monotonic()
            look()
            time.sleep(max(_PAUSE, _SHARE * (time.monotonic() - began)))

    look()
    with _Server(port, feed) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield f"http://{HOST}:{server.server_port}/", follow, look
        finally:
            feed.end()
            server.shutdown()
            thread.join()


class _Runs:
    """The runs as they were when they were last read."""

    def __init__(self, places: Sequence[Place], compare: Compare) -> None:
        for place in places:
            if is_url(place):
                raise ValueError(
                    f"--watch follows runs on the disks of this machine, and {place} is an address; "
                    "write the page again from time to time, without --watch"
                )
        self._directories, self._names, self._compare = [Path(place) for place in places], names_of(places), compare
        self._files: list[dict[str, LogFile]] = [{} for _ in places]  # the logs, as far as they have been read
        self._stats: dict[int, dict[str, tuple[int, int]]] = {}  # by the index of a run, when it was read
        self._drawn: dict[int, DrawnRun] = {}
        self._trouble = ""
        self._partings: Sequence[Parting] = ()
        self._are_compared, self._next_comparison = False, 0.0

    def look(self) -> tuple[Content, str] | None:
        """Read the runs that have changed; return what the page shows and what went wrong, ``None`` if nothing is new."""
        have_changed, troubles, count = False, [], len(self._directories)
        for index, directory in enumerate(self._directories):
            try:
                have_changed |= self._read(index)
            except (OSError, ValueError) as error:  # the run stays as it was
                if index not in self._drawn:
                    raise
                troubles.append(f"{directory}: {error}")
        self._are_compared &= not have_changed
        is_due = not self._are_compared and count > 1 and time.monotonic() >= self._next_comparison
        if is_due:
            began = time.monotonic()
            self._partings, self._are_compared = self._compare(), True
            now = time.monotonic()
            self._next_comparison = now + _COMPARING_SHARE * (now - began)
        trouble = "; ".join(troubles)
        if not have_changed and not is_due and trouble == self._trouble:
            return None
        self._trouble = trouble
        drawn = [self._drawn[index] for index in range(count)]
        return (content_of_several(self._names, drawn, self._partings) if count > 1 else content_of(drawn[0])), trouble

    def _read(self, index: int) -> bool:
        """Read a run if the size or the time of one of its files is another; return whether it was."""
        directory, files, stats = self._directories[index], self._files[index], {}
        with suppress(OSError):
            for name in sorted({*os.listdir(directory), *files}):
                with suppress(OSError):
                    status = os.stat(directory / name)
                    stats[name] = status.st_size, status.st_mtime_ns
        if stats == self._stats.get(index):
            return False
        count = len(self._directories)
        self._drawn[index] = drawn_run(read_run(directory, verify=False, number_of_runs=count, files=files), count)
        self._stats[index] = stats
        if time.time() - max((stats[name][1] for name in files if name in stats), default=0) / 1e9 > _STALE:
            files.clear()
        return True


class _Feed:
    """The page as of now, and when what of it has changed, for those who look at it."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)  # of this server: a page of an earlier one is loaded again
        self._version = 0
        self._changed_at: dict[tuple[str, Any], int] = {}  # by what has changed the version in which it did
        self._content = Content("", {}, {}, {"runs": []}, 0)
        self._trouble = ""
        self._condition = threading.Condition()
        self.is_ended = False

    def publish(self, content: Content, trouble: str) -> None:
        """Take over what the page shows now, and what went wrong; wake those who listen."""
        with self._condition:
            before = self._content
            pairs = itertools.zip_longest(content.data["runs"], before.data["runs"])
            news: set[tuple[str, Any]] = {("run", index) for index, (run, old) in enumerate(pairs) if run != old}
            news |= {("part", name) for name in content.parts if content.parts[name] != before.parts.get(name)}
            if news or trouble != self._trouble:
                self._version += 1
                self._changed_at |= dict.fromkeys(news, self._version)
                self._content, self._trouble = content, trouble
            self._condition.notify_all()

    def page(self) -> bytes:
        """Return the page as of now."""
        with self._condition:
            content, mark = self._content, f"{self._token}-{self._version}"
        return page_of(content, mark).encode()

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
                event = b":\n\n"  # a comment, which tells whether anyone is there
                if self._version > seen:
                    news = [what for what, version in self._changed_at.items() if version > seen]
                    change = {
                        "runs": {index: self._content.data["runs"][index] for kind, index in news if kind == "run"},
                        "parts": {name: self._content.parts[name] for kind, name in news if kind == "part"},
                        "partings": self._content.data["partings"],
                        "trouble": self._trouble,
                    }
                    event = f"event: change\nid: {token}-{self._version}\ndata: {json_of(change)}\n\n".encode()
                seen = self._version
            yield event
            if self.is_ended:
                yield b"event: end\ndata:\n\n"
                return

    def end(self) -> None:
        """Send those who listen away."""
        with self._condition:
            self.is_ended = True
            self._condition.notify_all()


class _Server(ThreadingHTTPServer):
    """Answers this machine only; its threads end with it."""

    daemon_threads = False

    def __init__(self, port: int, feed: _Feed) -> None:
        self.feed = feed
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(
                f"port {port} of {HOST} is in use; give another --port, or --port 0 for one that is free"
            ) from error
        self.hosts = {f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a reader who has gone; nothing depends on it."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "chainring", ""
    timeout = _TO_ASK

    def do_GET(self) -> None:
        self.connection.settimeout(_TO_READ)
        # The name of another site may be made to lead to this machine; its pages ask for that name.
        if self.headers.get("Host", "").lower() not in self.server.hosts:
            self.send_error(403, "this page is that of 127.0.0.1 and localhost only")
            return
        path, _, query = self.path.partition("?")
        if path == "/" and not query:
            page = self.server.feed.page()
            self._begin("text/html; charset=utf-8", ("Content-Length", str(len(page))))
            self.wfile.write(page)
        elif path == "/events":
            self._begin("text/event-stream")
            for event in self.server.feed.changes(self.headers.get("Last-Event-ID") or query):
                self.wfile.write(event)
                self.wfile.flush()
        else:
            self.send_error(404)

    def _begin(self, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(200)
        for name, value in (("Content-Type", kind), *headers, *_HEADERS):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
        """Print nothing: the terminal shows the address."""
