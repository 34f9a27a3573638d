"""The objects under an address in an object store, through obstore, with the conditions on which commits rest.

An object is there whole or not at all. `Bucket.put` may ask that it is not there yet, or that it still is what was read: of
several who do so one succeeds. A request is tried again for a minute when the store or the network fails, and whether a
conditional one has succeeded although its answer was lost is found out by reading.
"""

from __future__ import annotations

import re
import secrets
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, NamedTuple

from chainring._files import SCHEMES
from chainring._places.base import RemoteError
from chainring._places.connection import PATIENCE, ChangedError, Connection, Patience, obstore
from chainring._places.streams import PART, RangeReader, Upload

__all__ = [
    "MISSING",
    "PART",
    "PATIENCE",
    "Bucket",
    "ChangedError",
    "Entry",
    "Found",
    "Patience",
    "RemoteError",
    "Tag",
]


_SMALL = 64 << 10  # bytes, which any network that works sends in `Patience.answer`
_CONDITIONS = (
    "writes on a condition (If-None-Match and If-Match), without which two runs could destroy one another's snapshots"
)


class Tag(NamedTuple):
    """The state of an object, which changes whenever it is written."""

    e_tag: str | None
    version: str | None


MISSING = Tag(None, None)
"""The state of an object that is not there."""


class Found(NamedTuple):
    """The content of an object, and its state."""

    content: bytes
    tag: Tag
    modified: datetime  # by the clock of the store


class Entry(NamedTuple):
    """An object in a listing."""

    key: str  # below the address of the bucket
    size: int  # bytes
    tag: Tag
    modified: datetime  # by the clock of the store


class Bucket:
    """The objects whose keys begin with an address, such as ``s3://bucket/run``.

    Args:
        url: the address.
        patience: for how long requests are tried again, and when one has failed.

    Raises:
        ImportError: obstore is not installed.
        ValueError: the address is not one of ``s3://``, ``gs://``, ``az://`` and ``memory://``, names no bucket, or has
            credentials in it.

    Attributes:
        url: the address, without a slash at its end.
    """

    def __init__(self, url: str, patience: Patience = PATIENCE) -> None:
        scheme, self._name, prefix = _parse(url)
        obstore()
        self._connection = Connection(scheme, self._name, patience)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"{scheme}://{self._name}" + (f"/{prefix}" if prefix else "")

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def get(self, key: str) -> Found:
        """Return an object.

        Raises:
            FileNotFoundError: it is not there.
            RemoteError: it cannot be read.
        """
        path = self._path(key)

        def request() -> Found:
            result = obstore().get(self._connection.asking, path)
            return Found(bytes(result.bytes()), _tag(result.meta), result.meta["last_modified"])

        return self._connection.call("read", f"{self.url}/{key}", request)

    def head(self, key: str) -> Entry:
        """Return what a listing says of an object; raise as `get` does."""
        path, place = self._path(key), f"{self.url}/{key}"
        try:
            return self._entry(self._connection.call("read", place, lambda: obstore().head(self._connection.asking, path)))
        except FileNotFoundError:
            pass  # this answer has no body that would say whether it is the bucket that is not there
        return self._entry(self._connection.call("read", place, lambda: obstore().get(self._connection.asking, path).meta))

    def read(self, key: str, start: int, size: int) -> memoryview:
        """Return bytes of an object; raise as `get` does, also if it has fewer."""
        if not size:
            return memoryview(b"")
        return self._range(key, start, start + size, None)

    def open(self, key: str, size: int | None = None) -> RangeReader:
        """Return a reader of an object, which reads ahead.

        Args:
            key: its key.
            size: its bytes, where it is known what they must be.

        Raises:
            FileNotFoundError: it is not there.
            ChangedError: it has not that size.
            RemoteError: it cannot be read.
        """
        entry = self.head(key)
        place = f"{self.url}/{key}"
        if size not in (None, entry.size):
            raise ChangedError(f"{place} has {entry.size} bytes in place of {size}: it is damaged, or was replaced")
        return RangeReader(lambda start, stop: self._range(key, start, stop, entry.tag.e_tag), place, entry.size)

    def _range(self, key: str, start: int, stop: int, e_tag: str | None) -> memoryview:
        path, place = self._path(key), f"{self.url}/{key}"
        options: dict[str, Any] = {"range": (start, stop)} | ({"if_match": e_tag} if e_tag else {})

        def request() -> memoryview:
            return memoryview(obstore().get(self._connection.asking, path, options=options).bytes())

        try:
            content = self._connection.call("read", place, request)
        except ChangedError:
            content = None
        if content is None:
            raise ChangedError(f"{place} was replaced while it was read; read it again from its beginning")
        if len(content) != stop - start:
            raise RemoteError(f"{place} ends {stop - start - len(content)} bytes too early")
        return content

    def put(self, key: str, content: bytes, expected: Tag | None = None) -> Tag:
        """Write an object, if it is in the ``expected`` state; return its new one.

        Raises:
            ChangedError: it is in another state; `ChangedError.is_certain` is False if it may have had this content before.
            RemoteError: it cannot be written.
        """
        mode: Any = "overwrite"
        if expected is not None:
            mode = "create" if expected == MISSING else {name: value for name, value in expected._asdict().items() if value}
        path, place = self._path(key), f"{self.url}/{key}"

        def request() -> Tag:
            store = self._connection.asking if len(content) <= _SMALL else self._connection.putting
            return _tag(obstore().put(store, path, content, mode=mode, use_multipart=False))

        try:
            return self._connection.call("written", place, request)
        except ChangedError as error:
            changed = error
        except FileNotFoundError:  # what S3 says of an update of what is not there
            changed = ChangedError(f"{place} was removed by somebody else")
        if not changed.is_certain:  # an earlier try may have succeeded, and only its answer was lost
            with suppress(FileNotFoundError):
                found = self.get(key)
                if found.content == content:
                    return found.tag
        raise changed

    @contextmanager
    def upload(self, key: str, size: int = 0) -> Iterator[Upload]:
        """Open a new object, which is there when the block ends; it is sent in parts while it is written.

        When anything fails it is not there. No more than a part for each of a few connections is held.

        Args:
            key: its key.
            size: how many bytes it will have, or more than that, if they may be more than 10,000 times `PART`.

        Raises:
            RemoteError: it cannot be written.
        """
        path = self._path(key)
        upload = Upload(self._connection, path, f"{self.url}/{key}", size, lambda content: self.put(key, content))
        try:
            yield upload
        except BaseException:
            upload.abort()
            raise
        upload.finish()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error.

        Raises:
            RemoteError: the store does not answer.
        """
        paths = [self._path(key) for key in keys]
        for start in range(0, len(paths), 1000):
            self._delete(paths[start : start + 1000])

    def _delete(self, paths: list[str]) -> None:
        try:
            self._connection.call("cleared", self.url, lambda: obstore().delete(self._connection.asking, paths))
        except FileNotFoundError:
            if len(paths) > 1:
                for path in paths:
                    self._delete([path])

    def check_conditions(self) -> datetime:
        """Find out whether the store knows conditions, with an object that is removed again; return what time it is there.

        Raises:
            ValueError: it does not.
            RemoteError: it does not answer.
        """
        key = f".probe-{secrets.token_hex(8)}"
        rule = f"a run needs a store that knows {_CONDITIONS}; {self.url} is in one that"
        remedy = "choose another store, or a later version of this one"
        try:
            first = self._probe(key, MISSING)
            if first is None or self._probe(key, MISSING) is not None:
                raise ValueError(f"{rule} lets an object be created twice; {remedy}")
            second = self._probe(key, first)
            if second is None or self._probe(key, first) is not None:
                raise ValueError(f"{rule} lets an object be replaced that has changed meanwhile; {remedy}")
            return self.head(key).modified
        finally:
            self.delete([key])

    def _probe(self, key: str, expected: Tag) -> Tag | None:
        """Return the state of an object that was written, or None if it was not in the expected one."""
        try:
            return self.put(key, secrets.token_bytes(16), expected)
        except ChangedError:
            return None

    def list(self, prefix: str = "") -> list[Entry]:
        """Return the objects whose keys begin with ``prefix``, by key.

        Raises:
            RemoteError: the store does not answer.
        """
        folder = self._prefix + prefix.rpartition("/")[0]

        def request() -> list[Entry]:
            chunks = obstore().list(self._connection.asking, folder or None)
            return [self._entry(meta) for chunk in chunks for meta in chunk]

        entries = self._connection.call("listed", f"{self.url}/{prefix}".rstrip("/"), request)
        return sorted(entry for entry in entries if entry.key.startswith(prefix))

    def _path(self, key: str) -> str:
        if not all(key.split("/")) or {".", ".."} & set(key.split("/")) or not key.isprintable():
            raise ValueError(f"a key is names with slashes between them, as of a file; got {key!r}")
        return self._prefix + key

    def _entry(self, meta: Any) -> Entry:
        return Entry(meta["path"].removeprefix(self._prefix), meta["size"], _tag(meta), meta["last_modified"])


def _parse(url: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket and the prefix of an address."""
    parts = urllib.parse.urlsplit(url)
    rule = 'an address in an object store is written "s3://bucket/run", also with gs, az or memory'
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{rule}; got {parts.scheme!r}")
    if "@" in url or ":" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{rule}, without credentials or settings, which the environment has; got one with them")
    if not parts.netloc and parts.scheme != "memory":
        raise ValueError(f"{rule}; got no bucket in {url!r}")
    if parts.netloc and not re.fullmatch(r"[\w.-]+", parts.netloc):
        raise ValueError(f"{rule}; got the bucket {parts.netloc!r}")
    names = [name for name in parts.path.split("/") if name]
    if {".", ".."} & set(names) or not parts.path.isprintable():
        raise ValueError(f"{rule}; got {url!r}")
    return parts.scheme, parts.netloc, "/".join(names)


def _tag(meta: Any) -> Tag:
    return Tag(meta.get("e_tag"), meta.get("version"))
