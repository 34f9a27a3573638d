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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from chainring._remote.bucket import MISSING, PART, Bucket, ChangedError, RemoteError, Tag
from chainring._remote.lease import Fence, Lease, read_fence
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

if TYPE_CHECKING:
    from chainring._remote.mirror import Mirror

LEASE = "lease"  # the key of a manifest for the stamp of the lease under which it was written

_LARGEST_LINK = 1000  # bytes
_OLD = timedelta(days=1)  # of an upload that nobody will finish
_READERS = 8  # manifests read at once
_DRAFT = re.compile(r"(?P<draft>(?P<name>[^/]+)/[0-9a-f]{16})/.+")
_IN_ARCHIVE = re.compile(r"(?P<run>.+)/(?P<archive>(?:previous|abandoned)/\d+)")
_ARCHIVED = re.compile(r"(?:previous|abandoned)/\d+/[^/]+")
_RECORD = "run.json"


class ObjectSnapshot(SavedSnapshot):
    """A snapshot in an object store."""

    is_local = False

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket = bucket
        self.path = f"{bucket.url}/{name}"
        self.place, _, self.name = self.path.rpartition("/")
        self._key = name

    @classmethod
    def find(cls, bucket: Bucket, name: str) -> ObjectSnapshot:
        """Return the snapshot of a name, or to which the link of that name points."""
        snapshot = cls.at(bucket, name)
        target = None if snapshot.exists() else _link_target(bucket, name)
        return snapshot if target is None else cls.at(bucket, target)

    @classmethod
    def at(cls, bucket: Bucket, name: str) -> ObjectSnapshot:
        """Return the snapshot of a name; the files of one in an archive lie elsewhere in the run."""
        if match := _IN_ARCHIVE.fullmatch(bucket.url):
            return cls(Bucket(match["run"]), f"{match['archive']}/{name}")
        return cls(bucket, name)

    def exists(self) -> bool:
        try:
            self._bucket.head(f"{self._key}/{MANIFEST}")
        except FileNotFoundError:
            return False
        return True

    def read_manifest(self) -> Manifest:
        manifest = self.parse_manifest()
        if LEASE in manifest.about and not _admits(read_fence(self._bucket), manifest):
            raise CorruptError(f"{self.path} was written by a run that had lost its lease, and is not valid")
        return manifest

    def parse_manifest(self) -> Manifest:
        """Return the manifest as `read_manifest` does, also if its writer had lost the lease of the run."""
        try:
            text = self._bucket.get(f"{self._key}/{MANIFEST}").content
        except FileNotFoundError:
            raise CorruptError(f"{self.path} is not a snapshot: it has no {MANIFEST}") from None
        return parse_manifest(text, self.path)

    def sizes(self, manifest: Manifest) -> dict[str, int | None]:
        folder = self._folder(manifest)
        found = {entry.key.removeprefix(folder): entry.size for entry in self._bucket.list(folder)}
        return {name: size for name, size in found.items() if manifest.folder or name != MANIFEST}

    def path_of(self, file: str, manifest: Manifest) -> str:
        return f"{self._bucket.url}/{self._folder(manifest)}{file}"

    def open(self, file: str, manifest: Manifest) -> StoredFile:
        return ObjectFile(self._bucket, self._folder(manifest) + file)

    def folder_beside(self, manifest: Manifest) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="chainring-beside-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        beside = self._key.rpartition("/")[0]
        for name in (_RECORD, *manifest.beside):
            try:
                content = self._bucket.get(f"{beside}/{name}".lstrip("/")).content
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
        return f"{self._key}/{manifest.folder}/" if manifest.folder else f"{self._key}/"


class ObjectFile(StoredFile):
    """An object that is read in parts, and ahead."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._reader = bucket.open(key)
        weakref.finalize(self, self._reader.close)
        self.path, self.size = f"{bucket.url}/{key}", self._reader.size

    def read_into(self, start: int, view: memoryview, until: int | None = None) -> None:
        view[:] = self._reader.read(start, len(view), until)


class ObjectStore(Store):
    """The snapshots of a run in an object store.

    Args:
        bucket: the objects of the run.

    Attributes:
        lease: of the run that writes here; without one, anybody may.
        files: the files beside the snapshots, as far as this process writes them.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.place = bucket, bucket.url
        self.lease: Lease | None = None
        self.files: Mirror | None = None
        # By name, as they were when they were listed; None before. Of a run that has the lease, nobody else changes them.
        self._manifests: dict[str, tuple[Tag, Manifest | None]] | None = None

    def snapshot(self, name: str) -> ObjectSnapshot:
        return ObjectSnapshot.at(self.bucket, name)

    def begin(self, name: str) -> str:
        if self.exists_as_snapshot(check_name(name)) or self._find_link(name)[0] != MISSING:
            raise FileExistsError(
                f"{self.place}/{name} is there already; a snapshot is never written over: choose another name"
            )
        return f"{name}/{secrets.token_hex(8)}"

    def write(self, draft: str, file: str, write: WriteFile) -> Written:
        with self.bucket.upload(f"{draft}/{check_name(file)}") as upload:
            return write(upload)

    def publish(self, draft: str, name: str, manifest: Manifest) -> None:
        stamp = {} if self.lease is None else {LEASE: self.lease.stamp}
        manifest = replace(manifest, folder=draft.rpartition("/")[2], about={**manifest.about, **stamp})
        self._check_lease()
        tag = self._put_manifest(draft, name, format_manifest(manifest))
        if self.lease is not None:
            self.lease.renew()  # which proves that it was there in time; see the lease
        if self._manifests is not None:
            self._manifests[name] = tag, replace(manifest, parts={})
        if self.files is not None:
            with suppress(RemoteError):  # they are tried again, and what the snapshot refers to is there
                self.files.put()

    def _put_manifest(self, draft: str, name: str, content: bytes) -> Tag:
        """Put a manifest in the place of none, or of one that is not valid.

        From now on the draft is not discarded: the manifest may be there, although no answer has come. The next run sweeps.
        """
        key = f"{name}/{MANIFEST}"
        try:
            return self.bucket.put(key, content, MISSING)
        except ChangedError:
            if self.exists_as_snapshot(name):
                self.discard(draft)
                raise FileExistsError(f"{self.place}/{name} was written by somebody else meanwhile") from None
            return self.bucket.put(key, content, self.bucket.head(key).tag)  # of a writer that had lost the lease

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def discard(self, draft: str) -> None:
        with suppress(OSError):  # the next run removes it
            self.bucket.delete(entry.key for entry in self.bucket.list(f"{draft}/"))

    def persist(self, path: Path) -> None:
        if self.files is not None:
            self.files.persist(path)

    def link(self, name: str, target: str) -> None:
        tag, earlier = self._find_link(check_name(name))
        self._check_lease()  # after that look: whoever takes the lease from here on changes the tag, see `renew_links`
        if tag != MISSING and earlier is None:
            raise FileExistsError(f"{self.place}/{name} is in the way of a link to {target!r}; choose another name")
        self._put_link(name, target, tag)

    def _put_link(self, name: str, target: str, expected: Tag) -> None:
        content = {"chainring": "link", "target": check_name(target), "nonce": secrets.token_hex(8)}
        try:
            self.bucket.put(name, json.dumps(content).encode(), expected)
        except ChangedError:
            if self.lease is not None:
                self.lease.renew()  # which says who has taken it
            raise

    def renew_links(self) -> None:
        """Put every link as it is, so that its tag changes, on whose condition an earlier writer may be about to put it.

        A name that was free can still be linked by that writer.
        """
        for name in self.links():
            is_renewed = False
            while not is_renewed:
                tag, target = self._find_link(name)
                with suppress(ChangedError):  # by that writer, just before
                    if target is not None:
                        self._put_link(name, target, tag)
                    is_renewed = True

    def link_target(self, name: str) -> str | None:
        return _link_target(self.bucket, name)

    def _find_link(self, name: str) -> tuple[Tag, str | None]:
        try:
            tag = self.bucket.head(name).tag
        except FileNotFoundError:
            return MISSING, None
        return tag, _link_target(self.bucket, name)

    def unlink(self, name: str) -> None:
        self._check_lease()
        self.bucket.delete([name])

    def links(self) -> dict[str, str]:
        small = [entry.key for entry in self.bucket.list() if "/" not in entry.key and entry.size <= _LARGEST_LINK]
        return {name: target for name in small if (target := _link_target(self.bucket, name)) is not None}

    def exists(self, name: str) -> bool:
        return any(entry.key == name or entry.key.startswith(f"{name}/") for entry in self.bucket.list(name))

    def candidates(self) -> list[str]:
        return list(self._refresh())

    def manifests(self, without: str | None = None) -> dict[str, Manifest | None]:
        return {name: manifest for name, (_, manifest) in self._refresh().items() if name != without}

    def known_manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a snapshot; where this run has the lease, as it was last listed or written."""
        known = self._refresh() if self._manifests is None or self.lease is None else self._manifests
        return known.get(name, (MISSING, None))[1]

    def _refresh(self) -> dict[str, tuple[Tag, Manifest | None]]:
        """Read the manifests that are new, or that have changed, but those of a writer that had lost the lease."""
        found: dict[str, Tag] = {}
        for entry in self.bucket.list():
            name, slash, rest = entry.key.partition("/")
            if rest == MANIFEST and not name.startswith("."):
                found[name] = entry.tag
            elif slash and _DRAFT.fullmatch(entry.key):
                found.setdefault(name, MISSING)
        known = self._manifests or {}
        new = [name for name, tag in found.items() if tag != MISSING and known.get(name, (None,))[0] != tag]
        manifests = {name: each[1] for name, each in known.items()} | self._read_manifests(new)
        fence = self._fence()
        self._manifests = {
            name: (tag, None if tag == MISSING else manifests[name])
            for name, tag in found.items()
            if tag == MISSING or _admits(fence, manifests[name])
        }
        return self._manifests

    def _fence(self) -> Fence:
        return read_fence(self.bucket) if self.lease is None else self.lease.fence

    def _read_manifests(self, names: Sequence[str]) -> dict[str, Manifest | None]:
        """Return the manifests of snapshots, ``None`` for those that are damaged."""

        def read(name: str) -> Manifest | None:
            try:
                return replace(self.snapshot(name).parse_manifest(), parts={})
            except CorruptError:
                return None

        with ThreadPoolExecutor(_READERS) as pool:
            return dict(zip(names, pool.map(read, names), strict=True))

    def stamps(self) -> list[tuple[str | None, str]]:
        """Return of every snapshot, also in archives, the stamp of the lease under which it was written, and its folder."""
        keys = [entry.key for entry in self.bucket.list()]
        names = [key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")]
        manifests = self._read_manifests([name for name in names if "/" not in name or _ARCHIVED.fullmatch(name)])
        return [(_stamp(each), each.folder.rpartition("/")[2]) for each in manifests.values() if each is not None]

    def exists_as_snapshot(self, name: str) -> bool:
        """Return whether a valid snapshot, or a damaged one, has that name."""
        snapshot = self.snapshot(name)
        if not snapshot.exists():
            return False
        try:
            return _admits(self._fence(), snapshot.parse_manifest())
        except CorruptError:
            return True

    def remove(self, name: str) -> None:
        """Remove a snapshot: its manifest first, so that it is never there in part."""
        self._check_lease()
        manifest = self.known_manifest(check_name(name))
        self._make_invalid(manifest)
        self.bucket.delete([f"{name}/{MANIFEST}"])
        self._forget(name)
        if manifest is not None:  # others below that name may belong to a snapshot that was moved
            self.bucket.delete(f"{name}/{manifest.folder}/{file}".replace("//", "/") for file in manifest.files)

    def _make_invalid(self, manifest: Manifest | None) -> None:
        """See that a manifest does not count if an earlier writer, which has received no answer, puts it there again."""
        if self.lease is not None and manifest is not None:
            self.lease.forget(manifest.folder.rpartition("/")[2])

    def _archived(self) -> tuple[set[str], set[str]]:
        """Return the folders of the files of snapshots that were moved elsewhere, and the names of the damaged ones."""
        keys = [entry.key for archive in ("previous/", "abandoned/") for entry in self.bucket.list(archive)]
        moved = [key.removesuffix(f"/{MANIFEST}") for key in keys if key.endswith(f"/{MANIFEST}")]
        manifests = self._read_manifests(list(filter(_ARCHIVED.fullmatch, moved)))
        known = {manifest.folder.removeprefix("../../") for manifest in manifests.values() if manifest is not None}
        return known, {name.rpartition("/")[2] for name, manifest in manifests.items() if manifest is None}

    def _forget(self, name: str) -> None:
        if self._manifests is not None:
            self._manifests.pop(name, None)

    def move(self, name: str, archive: str) -> None:
        self._check_lease()
        key = f"{name}/{MANIFEST}"
        try:
            content = self.bucket.get(key).content
        except FileNotFoundError:
            self._move_object(name, archive)
            return
        manifest = None
        with suppress(CorruptError):  # which is moved as it is, for whoever wants to look at it
            manifest = parse_manifest(content, name)
        if manifest is not None:
            folder = f"../../{name}/{manifest.folder}".rstrip("/")
            about = {key: value for key, value in manifest.about.items() if key != LEASE}  # in an archive all are valid
            content = format_manifest(replace(manifest, folder=folder, about=about))
        self.bucket.put(f"{archive}/{key}", content, MISSING)
        self._make_invalid(manifest)
        self.bucket.delete([key])
        self._forget(name)

    def _move_object(self, name: str, archive: str) -> None:
        try:
            content = self.bucket.get(name).content
        except FileNotFoundError:
            return  # files without a manifest, which the next run removes
        self.bucket.put(f"{archive}/{name}", content, MISSING)
        self.bucket.delete([name])

    def leave_probe(self) -> str:
        name = f".probe-{secrets.token_hex(8)}"
        self.bucket.put(name, b"")
        return name

    def sees_probe(self, name: str) -> bool:
        try:
            self.bucket.head(name)
        except OSError:
            return False
        return True

    def remove_probe(self, name: str) -> None:
        self.bucket.delete([name])

    def sweep(self) -> list[str]:
        keys = [entry.key for entry in self.bucket.list()]
        drafts = {match["draft"]: match["name"] for key in keys if (match := _DRAFT.fullmatch(key))}
        listed = dict(self.listing())
        in_use = {f"{name}/{manifest.folder}" for name, manifest in listed.items() if manifest is not None}
        # Of a snapshot whose manifest cannot be read nobody knows which are its files.
        unknown = {name for name, manifest in listed.items() if manifest is None and f"{name}/{MANIFEST}" in keys}
        if drafts.keys() - in_use:
            archived, damaged = self._archived()
            in_use, unknown = in_use | archived, unknown | damaged
        unfinished = {draft for draft, name in drafts.items() if draft not in in_use and name not in unknown}
        invalid = {key for key in keys if key.endswith(f"/{MANIFEST}") and key.count("/") == 1} - {
            f"{name}/{MANIFEST}" for name in listed
        }
        parts = [key for key in keys if (match := _DRAFT.fullmatch(key)) and match["draft"] in unfinished]
        self.bucket.delete([*invalid, *parts])
        with suppress(RemoteError):  # not everybody may
            self.bucket.abort_uploads(_OLD)
        return sorted(unfinished)


def _stamp(manifest: Manifest) -> str | None:
    stamp = manifest.about.get(LEASE)
    return stamp if isinstance(stamp, str) else None


def _admits(fence: Fence, manifest: Manifest | None) -> bool:
    """Return whether a snapshot, or a damaged one, is not that of a writer that had lost the lease."""
    try:
        return manifest is None or fence.admits(_stamp(manifest), manifest.folder.rpartition("/")[2])
    except ValueError:
        return True


def _link_target(bucket: Bucket, name: str) -> str | None:
    """Return the snapshot to which a link points, or ``None`` if there is no such link."""
    try:
        if bucket.head(name).size > _LARGEST_LINK:
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
        file.copy_to(path)
        try:
            yield path
        except Exception as error:
            error.add_note(f"{path} was a copy of {file.path}")
            raise
