"""A store of snapshots in an object store, where nothing can be renamed, and any request may be the last.

A snapshot is its manifest at ``<name>/manifest.json``, which is put when all of its files are there, and only if there is
none yet. The files lie in a folder whose name nobody can guess, ``<name>/<16 hexadecimal digits>/``, so whoever writes a
snapshot of the same name, such as a process that was thought dead, never touches those of another. A link is a small object
that names its target. To move a snapshot is to write its manifest elsewhere: its files stay where they are.
"""

from __future__ import annotations

import atexit
import json
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from chainring._remote.bucket import MISSING, PART, Bucket, ChangedError, Tag
from chainring.serializers._store import (
    MANIFEST,
    CorruptError,
    Manifest,
    SavedSnapshot,
    Store,
    StoredFile,
    WriteFile,
    Written,
    check_name,
    format_manifest,
    parse_manifest,
    split,
)

_LARGEST_LINK = 1000  # bytes
_READERS = 8  # manifests read at once
_DRAFT = re.compile(r"(?P<draft>(?P<name>[^/]+)/[0-9a-f]{16})/.+")
_ARCHIVED = re.compile(r"(?:previous|abandoned)/\d+/[^/]+")
_FILE = re.compile(r"(?:[0-9a-f]{16}/)?(?:state\.json|rank\d+-of-\d+\.safetensors)")
_RECORD = "run.json"


class Guard(Protocol):
    """What allows a run to write, see `chainring._remote.lease.Lease`."""

    def renew(self) -> None:
        """Raise an `OSError` unless this run may write, and go on writing for a while."""

    def check(self) -> None:
        """Raise an `OSError` if this run may not write any more."""


class ObjectSnapshot(SavedSnapshot):
    """A snapshot in an object store."""

    is_local = False

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket = bucket
        self.name, self.place, self.path = name, bucket.url, f"{bucket.url}/{name}"

    @classmethod
    def find(cls, bucket: Bucket, name: str) -> ObjectSnapshot:
        """Return the snapshot of a name, or to which the link of that name points."""
        snapshot = cls(bucket, name)
        target = None if snapshot.exists() else _link_target(bucket, name)
        return snapshot if target is None else cls(bucket, target)

    def exists(self) -> bool:
        try:
            self._bucket.head(f"{self.name}/{MANIFEST}")
        except FileNotFoundError:
            return False
        return True

    def read_manifest(self) -> Manifest:
        try:
            text = self._bucket.get(f"{self.name}/{MANIFEST}").content
        except FileNotFoundError:
            raise CorruptError(f"{self.path} is not a snapshot: it has no {MANIFEST}") from None
        return parse_manifest(text, self.path)

    def sizes(self, manifest: Manifest) -> dict[str, int | None]:
        folder = self._folder(manifest)
        found = {entry.key.removeprefix(folder): entry.size for entry in self._bucket.list(folder)}
        return {name: size for name, size in found.items() if manifest.folder or name != MANIFEST}

    def path_of(self, file: str, manifest: Manifest) -> str:
        return f"{self.place}/{self._folder(manifest)}{file}"

    def open(self, file: str, manifest: Manifest) -> StoredFile:
        return ObjectFile(self._bucket, self._folder(manifest) + file)

    def folder_beside(self, manifest: Manifest) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="chainring-beside-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name in ("run.json", *manifest.beside):
            try:
                content = self._bucket.get(name).content
            except FileNotFoundError:
                continue  # whoever needs it says so
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder

    def _folder(self, manifest: Manifest) -> str:
        """Return the beginning of the keys of the files."""
        if manifest.folder.startswith("../../"):
            return f"{manifest.folder.removeprefix('../../')}/"
        return f"{self.name}/{manifest.folder}/" if manifest.folder else f"{self.name}/"


class ObjectFile(StoredFile):
    """An object that is read in parts."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._reader = bucket.open(key)
        weakref.finalize(self, self._reader.close)
        self.path, self.size = f"{bucket.url}/{key}", self._reader.size

    def read_into(self, start: int, view: memoryview) -> None:
        view[:] = self._reader.read(start, len(view))


class ObjectStore(Store):
    """The snapshots of a run in an object store.

    Args:
        bucket: the objects of the run.
        guard: what allows this process to write; without one it may.
        persist: called with a file that is to be put into the store.
    """

    def __init__(
        self, bucket: Bucket, guard: Guard | None = None, persist: Callable[[Path], None] = lambda path: None
    ) -> None:
        self.bucket, self.place = bucket, bucket.url
        self._guard, self._persist = guard, persist
        self._manifests: dict[str, tuple[Tag, Manifest | None]] = {}  # by name, as they were when they were listed

    def snapshot(self, name: str) -> ObjectSnapshot:
        return ObjectSnapshot(self.bucket, name)

    def begin(self, name: str) -> str:
        if self.snapshot(check_name(name)).exists() or self._find_link(name)[0] != MISSING:
            raise FileExistsError(
                f"{self.place}/{name} is there already; a snapshot is never written over: choose another name"
            )
        return f"{name}/{secrets.token_hex(8)}"

    def write(self, draft: str, file: str, write: WriteFile) -> Written:
        with self.bucket.upload(f"{draft}/{check_name(file)}") as upload:
            return write(upload)

    def publish(self, draft: str, name: str, manifest: Manifest) -> None:
        content = format_manifest(replace(manifest, folder=draft.rpartition("/")[2]))
        key = f"{name}/{MANIFEST}"
        if self._guard is not None:
            self._guard.renew()
        try:
            tag = self.bucket.put(key, content, MISSING)
        except ChangedError:
            raise FileExistsError(f"{self.place}/{name} was written by somebody else meanwhile") from None
        if self._guard is not None:
            try:
                self._guard.check()
            except BaseException:
                self.bucket.delete([key])
                raise
        self._manifests[name] = tag, replace(parse_manifest(content, name), parts={})

    def discard(self, draft: str) -> None:
        with suppress(OSError):  # the next run removes it
            self.bucket.delete(entry.key for entry in self.bucket.list(f"{draft}/"))

    def persist(self, path: Path) -> None:
        self._persist(path)

    def link(self, name: str, target: str) -> None:
        tag, earlier = self._find_link(check_name(name))
        if tag != MISSING and earlier is None:
            raise FileExistsError(f"{self.place}/{name} is in the way of a link to {target!r}; choose another name")
        content = {"chainring": "link", "target": check_name(target), "nonce": secrets.token_hex(8)}
        self.bucket.put(name, json.dumps(content).encode(), tag)

    def link_target(self, name: str) -> str | None:
        return _link_target(self.bucket, name)

    def _find_link(self, name: str) -> tuple[Tag, str | None]:
        try:
            tag = self.bucket.head(name).tag
        except FileNotFoundError:
            return MISSING, None
        return tag, _link_target(self.bucket, name)

    def unlink(self, name: str) -> None:
        self.bucket.delete([name])

    def links(self) -> dict[str, str]:
        """Return the links by name, with their targets."""
        small = [entry.key for entry in self.bucket.list() if "/" not in entry.key and entry.size < _LARGEST_LINK]
        return {name: target for name in small if (target := _link_target(self.bucket, name)) is not None}

    def exists(self, name: str) -> bool:
        return any(entry.key == name or entry.key.startswith(f"{name}/") for entry in self.bucket.list(name))

    def candidates(self) -> list[str]:
        self._refresh()
        return list(self._manifests)

    def known_manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a snapshot as it was last listed or written."""
        if not self._manifests:
            self._refresh()
        return self._manifests.get(name, (MISSING, None))[1]

    def _refresh(self) -> None:
        """Read the manifests that are new, or that have changed."""
        found: dict[str, Tag] = {}
        for entry in self.bucket.list():
            name, slash, rest = entry.key.partition("/")
            if rest == MANIFEST and not name.startswith("."):
                found[name] = entry.tag
            elif slash and _DRAFT.fullmatch(entry.key):
                found.setdefault(name, MISSING)
        new = [name for name, tag in found.items() if self._manifests.get(name, (None,))[0] != tag or tag == MISSING]
        with ThreadPoolExecutor(_READERS) as pool:
            read = dict(zip(new, pool.map(self._read_manifest, new), strict=True))
        known = self._manifests
        self._manifests = {name: (tag, read[name] if name in read else known[name][1]) for name, tag in found.items()}

    def _read_manifest(self, name: str) -> Manifest | None:
        try:
            return replace(self.snapshot(name).read_manifest(), parts={})
        except CorruptError:
            return None

    def remove(self, name: str) -> None:
        """Remove a snapshot: its manifest first, so that it is never there in part."""
        self.bucket.delete([f"{check_name(name)}/{MANIFEST}"])
        self._manifests.pop(name, None)
        self.bucket.delete(entry.key for entry in self.bucket.list(f"{name}/") if entry.key not in self._in_use(name))

    def _in_use(self, name: str) -> set[str]:
        """Return the keys below a name that belong to a snapshot that was moved elsewhere."""
        drafts = {draft for draft in self._archived_drafts() if draft.startswith(f"{name}/")}
        return {entry.key for draft in drafts for entry in self.bucket.list(f"{draft}/")}

    def _archived_drafts(self) -> set[str]:
        """Return the folders of the files of snapshots that were moved elsewhere."""
        keys = [entry.key for archive in ("previous/", "abandoned/") for entry in self.bucket.list(archive)]
        moved = [key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")]
        with ThreadPoolExecutor(_READERS) as pool:
            manifests = pool.map(self._read_manifest, filter(_ARCHIVED.fullmatch, moved))
        return {manifest.folder.removeprefix("../../") for manifest in manifests if manifest is not None}

    def move(self, name: str, archive: str) -> None:
        key = f"{name}/{MANIFEST}"
        try:
            content = self.bucket.get(key).content
        except FileNotFoundError:
            self._move_object(name, archive)
            return
        try:
            manifest = parse_manifest(content, name)
        except CorruptError:
            pass  # as it is, for whoever wants to look at it
        else:
            content = format_manifest(replace(manifest, folder=f"../../{name}/{manifest.folder}".rstrip("/")))
        self.bucket.put(f"{archive}/{key}", content, MISSING)
        self.bucket.delete([key])
        self._manifests.pop(name, None)

    def _move_object(self, name: str, archive: str) -> None:
        try:
            content = self.bucket.get(name).content
        except FileNotFoundError:
            return  # files without a manifest, which the next run removes
        self.bucket.put(f"{archive}/{name}", content, MISSING)
        self.bucket.delete([name])

    def sweep(self) -> list[str]:
        keys = [entry.key for entry in self.bucket.list()]
        drafts = {match["draft"]: match["name"] for key in keys if (match := _DRAFT.fullmatch(key))}
        in_use = {f"{name}/{manifest.folder}" for name, manifest in self.listing() if manifest is not None}
        # Of a snapshot whose manifest cannot be read nobody knows which are its files.
        unknown = {name for name, manifest in self.listing() if manifest is None and f"{name}/{MANIFEST}" in keys}
        if drafts.keys() - in_use:
            in_use |= self._archived_drafts()
        unfinished = [draft for draft, name in drafts.items() if draft not in in_use and name not in unknown]
        self.bucket.delete(key for key in keys if any(key.startswith(f"{draft}/") for draft in unfinished))
        self._manifests = {}
        return unfinished


def _link_target(bucket: Bucket, name: str) -> str | None:
    """Return the snapshot to which a link points, or ``None`` if there is no such link."""
    try:
        if bucket.head(name).size >= _LARGEST_LINK:
            return None
        content: Any = json.loads(bucket.get(name).content)
        return check_name(content["target"]) if content["chainring"] == "link" else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def replacing_object(url: str) -> Iterator[BinaryIO]:
    """Open a new file that becomes the object at an address when the block ends; whoever writes it may go back in it.

    Raises:
        FileExistsError: a snapshot has that name.
    """
    place, name = split(url)
    if ObjectSnapshot(Bucket(place), name).exists():
        raise FileExistsError(f"{url} is a snapshot, and is not replaced by a file; choose another name")
    with tempfile.TemporaryFile(prefix="chainring-") as content:
        yield content
        content.seek(0)
        with Bucket(place).upload(name) as upload:
            while chunk := content.read(PART):
                upload.write(chunk)


@contextmanager
def fetched(file: StoredFile) -> Iterator[Path]:
    """Copy an object into a file that is there during the block."""
    with tempfile.TemporaryDirectory(prefix="chainring-") as folder:
        path = Path(folder, file.path.rpartition("/")[2])
        with open(path, "wb") as copy:
            for start in range(0, file.size, PART):
                part = bytearray(min(PART, file.size - start))
                file.read_into(start, memoryview(part))
                copy.write(part)
        yield path


def explain_absence(url: str) -> Exception:
    """Return the error of an address where neither a snapshot nor an object is, with what is there instead."""
    above, name = split(url)
    if (target := _link_target(Bucket(above), name)) is not None:
        return FileNotFoundError(f"{url} is a link to {above}/{target}, which is not there")
    bucket = Bucket(url)
    if names := ObjectStore(bucket).names():
        return FileNotFoundError(f"{url} is a run, not a snapshot; give one of its own, such as {bucket.url}/{names[0]}")
    keys = [entry.key for entry in bucket.list()]
    if any(_FILE.fullmatch(key) for key in keys):
        return CorruptError(f"{url} has files of a snapshot and no {MANIFEST}: it is damaged, or was not finished")
    if _RECORD in keys:
        return FileNotFoundError(
            f"{url} belongs to a run that has taken no snapshot. In the script, "
            'trainer.extend(extensions.snapshot(), trigger=(1, "epoch")) takes them'
        )
    if keys:
        return FileNotFoundError(f"{url} is neither a snapshot nor a file; below it is {bucket.url}/{keys[0]}")
    return FileNotFoundError(f"there is no {url}")
