"""The objects under an address in an object store, through obstore, with the conditions on which commits rest.

An object is there whole or not at all. `Bucket.put` may ask that it is not there yet, or that it still is what was read: of
several who do so one succeeds. A request is tried again for a minute when the store or the network fails, and whether a
conditional one has succeeded although its answer was lost is found out by reading.
"""

from __future__ import annotations

import functools
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple, cast

SCHEMES = ("s3", "gs", "az", "memory")
PART = 8 << 20  # bytes of a part of an upload

_PARTS_AT_ONCE = 4
_SECONDS = 60  # for which a failing request is tried again
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


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


class RemoteError(OSError):
    """The store does not answer, or refuses."""


class ChangedError(RemoteError):
    """An object is not in the state in which it was to be written: somebody else has written it."""


def is_url(place: object) -> bool:
    """Return whether a place is an address in an object store, such as ``"s3://bucket/run"``, and not a path.

    Raises:
        ValueError: it is the path that pathlib makes of an address.
    """
    text = os.fspath(place) if isinstance(place, os.PathLike) else place
    if not isinstance(text, str):
        return False
    scheme, colon, rest = text.partition(":/")
    if not colon or scheme not in SCHEMES:
        return False
    if isinstance(place, PurePath):
        raise ValueError(f"an address is given as text, because a Path joins its slashes: {scheme}://{rest.lstrip('/')!s}")
    return rest.startswith("/")


class Bucket:
    """The objects whose keys begin with an address, such as ``s3://bucket/run``.

    Raises:
        ImportError: obstore is not installed.
        ValueError: the address is not one of ``s3://``, ``gs://``, ``az://`` and ``memory://``, names no bucket, or has
            credentials in it.

    Attributes:
        url: the address, without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        scheme, name, prefix = _parse(url)
        self._store = _open_store(scheme, name)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = f"{scheme}://{name}/{prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"

    def below(self, path: str) -> Bucket:
        """Return the bucket of the objects whose keys begin with a path."""
        return Bucket(f"{self.url}/{path}")

    def get(self, key: str) -> Found:
        """Return an object.

        Raises:
            FileNotFoundError: it is not there.
            RemoteError: it cannot be read.
        """
        with self._translated("read", key):
            result = _obstore().get(self._store, self._prefix + key)
            return Found(bytes(result.bytes()), _tag(result.meta), result.meta["last_modified"])

    def head(self, key: str) -> Entry:
        """Return what a listing says of an object; raise as `get` does."""
        with self._translated("read", key):
            return self._entry(_obstore().head(self._store, self._prefix + key))

    def read(self, key: str, start: int, size: int) -> memoryview:
        """Return bytes of an object; raise as `get` does, also if it has fewer."""
        if not size:
            return memoryview(b"")
        with self._translated("read", key):
            content = memoryview(_obstore().get_range(self._store, self._prefix + key, start=start, length=size))
        if len(content) != size:
            raise RemoteError(f"{self.url}/{key} ends {size - len(content)} bytes too early")
        return content

    def put(self, key: str, content: bytes, expected: Tag | None = None) -> Tag:
        """Write an object, if it is in the ``expected`` state; return its new one.

        Raises:
            ChangedError: it is in another state.
            RemoteError: it cannot be written.
        """
        mode: Any = "overwrite"
        if expected is not None:
            mode = "create" if expected == MISSING else {name: value for name, value in expected._asdict().items() if value}
        try:
            with self._translated("written", key):
                return _tag(_obstore().put(self._store, self._prefix + key, content, mode=mode, use_multipart=False))
        except ChangedError:
            # An earlier try may have succeeded, and only its answer was lost.
            try:
                found = self.get(key)
            except FileNotFoundError:
                found = None
            if found is not None and found.content == content:
                return found.tag
            raise

    @contextmanager
    def upload(self, key: str) -> Iterator[BinaryIO]:
        """Open a new object, which is there when the block ends; it is sent in parts while it is written.

        When anything fails it is not there. No more than `PART` bytes for each of a few connections are held.

        Raises:
            RemoteError: it cannot be written.
        """
        with self._translated("written", key):
            file = _obstore().open_writer(self._store, self._prefix + key, buffer_size=PART, max_concurrency=_PARTS_AT_ONCE)
            yield cast(BinaryIO, file)
            file.close()

    def list(self, prefix: str = "") -> list[Entry]:
        """Return the objects whose keys begin with ``prefix``, by key.

        Raises:
            RemoteError: the store does not answer.
        """
        folder = prefix.rpartition("/")[0]
        with self._translated("listed", prefix):
            chunks = _obstore().list(self._store, self._prefix + folder or None)
            entries = [self._entry(meta) for chunk in chunks for meta in chunk]
        return sorted(entry for entry in entries if entry.key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error.

        Raises:
            RemoteError: the store does not answer.
        """
        paths = [self._prefix + key for key in keys]
        with self._translated("deleted", ""):
            for start in range(0, len(paths), 1000):
                _obstore().delete(self._store, paths[start : start + 1000])

    def _entry(self, meta: Any) -> Entry:
        return Entry(meta["path"].removeprefix(self._prefix), meta["size"], _tag(meta), meta["last_modified"])

    @contextmanager
    def _translated(self, deed: str, key: str) -> Iterator[None]:
        """Turn the errors of obstore into those of Chainring, with the address, and without what a request carried."""
        exceptions = _obstore().exceptions
        place = f"{self.url}/{key}".rstrip("/")
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {place}") from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise ChangedError(f"{place} was written by somebody else") from None
        except exceptions.BaseError as error:
            raise RemoteError(f"{place} cannot be {deed}: {_reason(error)}") from None


def _parse(url: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket and the prefix of an address."""
    parts = urllib.parse.urlsplit(url)
    rule = 'an address in an object store is written "s3://bucket/run", also with gs, az or memory'
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{rule}; got {parts.scheme!r}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{rule}, without credentials or settings, which the environment has; got one with them")
    if not parts.netloc and parts.scheme != "memory":
        raise ValueError(f"{rule}; got no bucket in {url!r}")
    names = [name for name in parts.path.split("/") if name]
    if any(name in (".", "..") for name in names):
        raise ValueError(f"{rule}; got {url!r}, with a dot for a name")
    return parts.scheme, parts.netloc, "/".join(names)


@functools.cache
def _open_store(scheme: str, name: str) -> Any:
    """Return the obstore store of a bucket, one in a process: that of memory exists nowhere else."""
    from datetime import timedelta as seconds

    stores = _obstore().store
    if scheme == "memory":
        return stores.MemoryStore()
    retries = {
        "max_retries": 30,
        "retry_timeout": seconds(seconds=_SECONDS),
        "backoff": {"max_backoff": timedelta(seconds=8)},
    }
    is_plain = any(os.environ.get(variable, "").startswith("http://") for variable in _ENDPOINTS)
    options: dict[str, Any] = {"allow_http": True} if is_plain else {}
    return stores.from_url(f"{scheme}://{name}", client_options=options, retry_config=retries)


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ImportError("object stores need obstore: pip install 'chainring[remote]'") from error
    return obstore


def _tag(meta: Any) -> Tag:
    return Tag(meta.get("e_tag"), meta.get("version"))


def _reason(error: BaseException) -> str:
    """Return the first line of what obstore says; the others repeat the request."""
    return re.sub(r"https?://\S+", "the store", str(error).partition("\n")[0])
