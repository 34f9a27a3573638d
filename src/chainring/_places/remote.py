"""The place of a run in an object store, where nothing can be renamed, and any request may be the last.

A snapshot is its manifest at ``<name>/manifest.json``, which is put when all of its files are there, and which the index of
the run lists then. The files lie in a folder whose name nobody can guess, ``<name>/<16 hexadecimal digits>/``, so whoever
writes a snapshot of the same name, such as a process that was thought dead, never touches those of another. A link stands in
the index too; a small object of its name tells it to whoever copies the run. To move a snapshot is to write its manifest
elsewhere: its files stay where they are.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from chainring._files import Sink
from chainring._places.base import MANIFEST, Place, RemoteError, StoredFile, check_name, digest_of
from chainring._places.bucket import MISSING, Bucket, Entry, Tag
from chainring._places.connection import ChangedError
from chainring._places.index import Index, Record, list_run, read_record, stamp_of
from chainring._places.mirror import DRAFT, LARGEST_LINK, Mirror, read_link, working_directory

_RECORD = "run.json"
_ARCHIVED = re.compile(r"(?:previous|abandoned)/\d+/[^/]+")


def find_out(url: str) -> tuple[str, str]:
    """Return the directory on this machine for the files of a run, and the address as it is written."""
    url = Bucket(os.fspath(url)).url
    return str(working_directory(url)), url


class RemotePlace(Place):
    """The objects under an address; ``index`` is that of the run that writes here, without one anybody may."""

    is_local = False

    def __init__(self, address: str | Bucket) -> None:
        self.bucket = address if isinstance(address, Bucket) else Bucket(address)
        self.url = self.bucket.url
        self.index: Index | None = None
        self._mirror: Mirror | None = None
        # As they were when they were listed; None before. While this process holds the index, nobody else changes them.
        self._states: dict[str, Tag | None] | None = None
        self._record: Record | None = None

    def claim(self, folder: str | os.PathLike[str], lost: Collection[tuple[int, str]] = ()) -> None:
        """Take the place for this process, and copy the files beside the snapshots into a directory.

        See `Bucket.check_conditions`, `Index` and `Mirror` for what may be in the way, and for processes that were ``lost``.
        """
        self.bucket.check_conditions()
        self.index = Index(self.bucket, lost=lost)
        try:
            self._mirror = Mirror(self.bucket, folder, self.index)
            self._mirror.fetch()
        except BaseException:
            self.index.release()
            raise

    def release(self) -> None:
        """Put the last files into the store, and let other runs write there; an error says where they are."""
        assert self.index is not None
        assert self._mirror is not None
        try:
            self._mirror.close()
        finally:
            self.index.release()

    def _list(self) -> list[Entry]:
        return list_run(self.bucket, None if self.index is None else self.index.record)

    def states(self) -> dict[str, Hashable | None]:
        states: dict[str, Tag | None] = {}
        for entry in self._list():
            name, _, rest = entry.key.partition("/")
            if rest == MANIFEST and not name.startswith("."):
                states[name] = entry.tag  # files without it are unfinished, or those of a snapshot that was moved
        self._states, self._record = states, None
        return dict(states)

    def state(self, name: str) -> Hashable | None:
        states = self.states() if self.index is None or self._states is None else self._states
        return states.get(name)

    def exists(self, name: str) -> bool:
        return any(entry.key == name or entry.key.startswith(f"{name}/") for entry in self.bucket.list(name))

    def sizes(self, folder: str, expected: Iterable[str] = ()) -> dict[str, int | None]:
        prefix = f"{folder}/" if folder else ""
        entries = self.bucket.list(prefix, [f"{prefix}{name}" for name in expected])
        return {entry.key.removeprefix(prefix): entry.size for entry in entries}

    def read(self, name: str) -> bytes:
        return self.bucket.get(name).content

    def open(self, name: str) -> StoredFile:
        return self.bucket.open(name)

    def folder_beside(self, name: str, files: Iterable[str]) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="chainring-beside-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        above = name.rpartition("/")[0]
        for file in (_RECORD, *files):
            with suppress(FileNotFoundError):  # whoever needs it says so
                content = self.read(f"{above}/{file}".lstrip("/"))
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(content)
        return folder

    def create(self, name: str) -> AbstractContextManager[Sink]:
        return self.bucket.upload(name)

    def draft(self, name: str) -> str:
        is_taken = self.bucket.has(name)
        with suppress(FileNotFoundError):
            manifest = self.read(f"{name}/{MANIFEST}")
            is_taken = is_taken or self.admits(name, stamp_of(manifest), digest_of(manifest))
        if is_taken:
            raise FileExistsError(
                f"{self.url}/{name} is there already; a snapshot is never written over: choose another name"
            )
        return f"{name}/{secrets.token_hex(8)}"

    def stamp(self, name: str) -> str | None:
        return None if self.index is None else self.index.record.stamp(name)

    def admits(self, name: str, stamp: object, digest: str) -> bool:
        if stamp is None:
            return True
        if self.index is not None:
            return self.index.record.admits(name, stamp, digest)
        if self._record is not None and self._record.admits(name, stamp, digest):
            return True
        self._record = read_record(self.bucket)  # after the manifest
        return self._record is None or self._record.admits(name, stamp, digest)

    def publish(self, draft: str, name: str, manifest: bytes) -> None:
        key = f"{name}/{MANIFEST}"
        if self.index is not None:
            self.index.check()
        try:  # from now on the draft is not discarded: the manifest may be there, although no answer comes
            tag = self.bucket.put(key, manifest, MISSING)
        except ChangedError:
            other = self.bucket.get(key)
            if self.index is not None:
                self.index.change()  # after that look: it is not that of somebody who holds the index now
            if self.admits(name, stamp_of(other.content), digest_of(other.content)):
                self.discard(draft)
                raise FileExistsError(f"{self.url}/{name} was written by somebody else meanwhile") from None
            tag = self.bucket.put(key, manifest, other.tag)
        if self.index is not None:
            self.index.change(snapshots={name: digest_of(manifest)})
        if self._states is not None:
            self._states[name] = tag
        if self._mirror is not None:
            with suppress(RemoteError):  # they are tried again, and what the snapshot refers to is there
                self._mirror.put()

    def discard(self, draft: str) -> None:
        with suppress(OSError):  # the next run removes it
            self.bucket.delete(entry.key for entry in self.bucket.list(f"{draft}/"))

    def remove(self, name: str, files: Iterable[str]) -> None:
        self._remove_manifest(name)
        self.bucket.delete(files)

    def move(self, name: str, archive: str, manifest: bytes | None) -> None:
        if self.index is not None:
            self.index.check()
        if manifest is not None:
            self.bucket.put(f"{archive}/{name}/{MANIFEST}", manifest, MISSING)
            self._remove_manifest(name)
        elif (target := self.link_target(name)) is not None:
            self.bucket.put(f"{archive}/{name}", _link_to(target), MISSING)
            self.link(name, None)
        # Else files without a manifest have the name, which the next run removes; others are those of the mirror.

    def _remove_manifest(self, name: str) -> None:
        if self.index is not None:
            self.index.change(snapshots={name: None})
        self.bucket.delete([f"{name}/{MANIFEST}"])
        if self._states is not None:
            self._states.pop(name, None)

    def link(self, name: str, target: str | None) -> None:
        if target is None:
            if self.index is not None:
                self.index.change(links={name: None})
            self.bucket.delete([name])
            return
        if self.link_target(name) is None and self.bucket.has(name):
            raise FileExistsError(f"{self.url}/{name} is in the way of a link to {target!r}; choose another name")
        run = None
        if self.index is not None:
            self.index.change(links={name: target})
            run = self.index.record.run
        self.bucket.put(name, _link_to(target, run))

    def links(self) -> dict[str, str]:
        record = read_record(self.bucket) if self.index is None else self.index.record
        small = [entry.key for entry in self._list() if "/" not in entry.key and entry.size <= LARGEST_LINK]
        listed = {} if record is None else record.links
        copied = {name: target for name in small if (target := _copied_link(self.bucket, name, record)) is not None}
        return dict(sorted({**copied, **listed}.items()))

    def link_target(self, name: str) -> str | None:
        record = read_record(self.bucket) if self.index is None else self.index.record
        if record is not None and name in record.links:
            return record.links[name]
        return _copied_link(self.bucket, name, record)

    def persist(self, path: Path) -> None:
        if self._mirror is not None:
            self._mirror.persist(path)

    def sweep(self, folders_of: Callable[[Iterable[str]], Mapping[str, str | None]]) -> list[str]:
        keys = [entry.key for entry in self._list()]
        named = {key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")}
        drafts = {match["draft"]: match["name"] for key in keys if (match := DRAFT.fullmatch(key))}
        there = {name for name in named if "/" not in name}
        valid = dict(folders_of(there))
        in_use = set(valid.values())
        # Of a snapshot whose manifest cannot be read nobody knows which are its files.
        unknown = {name for name, folder in valid.items() if folder is None}
        if drafts.keys() - in_use:
            archived = folders_of(filter(_ARCHIVED.fullmatch, named))
            in_use.update(archived.values())
            unknown |= {name.rpartition("/")[2] for name, folder in archived.items() if folder is None}
        unfinished = {draft for draft, name in drafts.items() if draft not in in_use and name not in unknown}
        files = [key for key in keys if (match := DRAFT.fullmatch(key)) and match["draft"] in unfinished]
        self.bucket.delete([*(f"{name}/{MANIFEST}" for name in there - valid.keys()), *files])
        return sorted(unfinished)


def _copied_link(bucket: Bucket, name: str, record: Record | None) -> str | None:
    """Return to what a link leads that another run or a person has put there."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        entry = bucket.head(name)
        if entry.size <= LARGEST_LINK and (link := read_link(entry, bucket.get(name).content, record)):
            return check_name(link["target"])
    return None


def _link_to(target: str, run: str | None = None) -> bytes:
    return json.dumps({"chainring": "link", "target": target} | ({} if run is None else {"run": run})).encode()
