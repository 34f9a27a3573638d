"""The snapshots of a run: how one is written, read and verified, and the manifest that says what it consists of.

The manifest of a snapshot lists its files with their sizes and checksums, and carries a checksum of its own. It is written
last, so what has one was written to its end. How that is done in a directory and in an object store the places say.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chainring._files import Sink, is_regular, is_url, parse_strict, write_error
from chainring._messages import list_names
from chainring._places import base
from chainring._places.base import MANIFEST, STAMP, RemoteError, StoredFile, check_name, digest_of

Place = str | os.PathLike[str]
"""A path, or an address in an object store such as ``s3://bucket/run``."""

FORMAT = 1
STATE = "state.json"

_CHECKSUMS = re.compile(r"([0-9a-f]{8})+")
_NAME = re.compile(r"[^./\0][^/\0]*")  # what `check_name` lets pass
_PLAIN = re.compile(r"(?!\.\.?$)[^/\0]+")
_FOLDER = re.compile(r"((\.\./\.\./[^/.\0][^/\0]*/)?[0-9a-f]{16})?")
_TYPES = {"name": str, "iteration": int, "files": dict, "about": dict, "parts": dict, "folder": str, "beside": list}
"""Of what a manifest has beside its format."""
_ARCHIVE = re.compile(r"(?P<run>.+)/(?P<archive>(?:previous|abandoned)/\d+)")
_READERS = 8  # manifests in an object store that are read at once
_MAX_SUMMARIES = 1 << 14
_RECORD = "run.json"
THINNED = "thinned"  # the key of the digests that a manifest has in the place of files, see `Snapshots.thin`
_FILE = re.compile(r"(?:[0-9a-f]{16}/)?(?:state\.json|rank\d+-of-\d+\.safetensors)")  # of a snapshot
_MAX_NAMES = 3


class CorruptError(ValueError):
    """A snapshot is damaged: a file is missing, has another size, or other bytes than were written.

    Example::

        try:
            serializers.load("result/snapshot_iter_1000", trainer)
        except CorruptError:
            serializers.load("result/snapshot_iter_900", trainer)
    """


class NewerFormat(CorruptError):  # noqa: N818 - it is not damage
    """A newer version of Chainring wrote the snapshot, and this version cannot tell whether it is damaged."""


class Thinned(CorruptError):  # noqa: N818 - it is not damage
    """A snapshot was thinned: it has digests of what it held, and ``manifest`` is that with them."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        run, _, name = path.rpartition("/")
        super().__init__(
            f"{path} was thinned: it has digests of what it held. To make it again, and compare it with them: "
            f"chainring replay {run or '.'} --to {manifest.iteration} --save {name} SCRIPT"
        )
        self.manifest = manifest


class LateError(CorruptError):
    """A process has written the snapshot that had lost the place before, and it is not valid."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a snapshot: its name, its iteration, its files with their checksums, and facts about it."""

    name: str  # with which it was written; a copy may lie under another
    iteration: int
    files: Mapping[str, tuple[int, int]]  # size in bytes and CRC-32 by name
    about: Mapping[str, Any]  # anything else that was recorded, as plain JSON values
    # By name of a file of tensors the CRC-32 of its header and of each tensor in the order of the file, eight hexadecimal
    # digits each.
    parts: Mapping[str, str] = field(default_factory=dict)
    # Where the files lie, from the place of the manifest: beside it, or in an object store in a folder of their own.
    folder: str = ""
    beside: Sequence[str] = ()  # the files of the run to which the state refers, such as its log
    digest: str = field(default="", compare=False)  # of its text, where it was read


class SavedSnapshot:
    """A snapshot, or what may be one.

    Attributes:
        files: the place where the run lies that has taken it.
        key: its name there, behind the folder of an archive.
        path: where it lies, a path or an address.
        place: where the run lies that has taken it, the same for all of its snapshots: an absolute path, or an address.
        name: its name, without that folder.
        is_local: whether it lies in a directory.
    """

    def __init__(self, files: base.Place, name: str) -> None:
        if not files.is_local and (match := _ARCHIVE.fullmatch(files.url)):  # its files are still in the run
            files, name = open_store(match["run"]).files, f"{match['archive']}/{name}"
        self.files, self.key = files, name
        self.path, self.is_local = files.path_of(name), files.is_local
        self.place = files.url if files.is_local else self.path.rpartition("/")[0]
        self.name = name.rpartition("/")[2]

    def __str__(self) -> str:
        return self.path

    def exists(self) -> bool:
        """Return whether it has a manifest, sound or not."""
        return self.files.exists(posixpath.join(self.key, MANIFEST))

    def read_manifest(self) -> Manifest:
        """Return the manifest, compared with its own checksum; a `Thinned` if the files are not there. See `verify`."""
        try:
            text = self.files.read(posixpath.join(self.key, MANIFEST))
        except FileNotFoundError:
            raise CorruptError(f"{self.path} is not a snapshot: it has no {MANIFEST}") from None
        except ValueError as error:
            raise CorruptError(str(error)) from None
        manifest = parse_manifest(text, self.path)
        if not self.files.admits(self.key, manifest.about.get(STAMP), manifest.digest):
            raise LateError(f"{self.path} was written by a run that had lost its lease, and is not valid")
        if THINNED in manifest.about:
            raise Thinned(self.path, manifest)
        return manifest

    def folder(self, manifest: Manifest) -> str:
        """Return the folder of the files, from the place of the run."""
        was_moved = manifest.folder.startswith("../")  # and they were not
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.key) if was_moved else self.key, manifest.folder))

    def path_of(self, file: str, manifest: Manifest) -> str:
        """Return where a file lies, a path or an address."""
        return self.files.path_of(posixpath.join(self.folder(manifest), file))

    def open(self, file: str, manifest: Manifest) -> StoredFile:
        """Open a file."""
        return self.files.open(posixpath.join(self.folder(manifest), file))

    def verify(self, *, content: bool = True) -> Manifest:
        """Return the manifest after every byte of the files, or without ``content`` their sizes, were verified.

        Raises:
            CorruptError: a file is missing, too many, of another size or content, or not a regular file; a `NewerFormat`
                if a newer version wrote it.
            OSError: one of them cannot be read.
        """
        manifest = self.read_manifest()
        sizes = self.files.sizes(self.folder(manifest), manifest.files)
        present = {name: size for name, size in sizes.items() if manifest.folder or name != MANIFEST}
        missing, extra = sorted(manifest.files.keys() - present.keys()), sorted(present.keys() - manifest.files.keys())
        if missing or extra:
            raise CorruptError(f"{self.path} is not what was written: missing {missing}, too many {extra}")
        for name, (size, _) in manifest.files.items():
            if present[name] is None:  # opening a pipe would wait for ever
                raise CorruptError(f"{self.path_of(name, manifest)} is not a regular file")
            if present[name] != size:
                raise CorruptError(f"{self.path_of(name, manifest)} has {present[name]} bytes, {size} were written")
        for name, (_, crc) in manifest.files.items() if content else ():
            if self.open(name, manifest).checksum() != crc:
                raise CorruptError(f"{self.path_of(name, manifest)} has other bytes than were written")
        return manifest


Written = tuple[int, int] | tuple[int, int, str]
"""The size of a file in bytes and its CRC-32; of a file of tensors those of its parts too, see `Manifest`."""
WriteFile = Callable[[Sink], Written]
"""Writes the content of a new file."""

# By place, name and state, for lists: without the checksums of parts; None for a damaged one.
_summaries: dict[tuple[str, str, Hashable], Manifest | None] = {}


class Snapshots:
    """The snapshots of a run, wherever they lie.

    Attributes:
        files: the place where they lie.
        place: its absolute path or address, the same for all who reach it.
    """

    def __init__(self, files: base.Place) -> None:
        self.files, self.place = files, files.url

    def __str__(self) -> str:
        return str(self.files)

    def snapshot(self, name: str) -> SavedSnapshot:
        """Return the snapshot of a name, which need not be there."""
        return SavedSnapshot(self.files, name)

    def commit(
        self,
        name: str,
        files: Mapping[str, WriteFile] | Callable[[str], Mapping[str, Written]],
        iteration: int,
        about: Mapping[str, Any] | None = None,
        beside: Sequence[Path] = (),
    ) -> None:
        """Write a snapshot and publish it under ``name``; afterwards it is there for good.

        When anything fails, nothing is published and what was written is removed; but when the very last step fails, that
        flushes the name, the whole snapshot is there. ``files`` may also be a call that writes them for a draft. The files
        ``beside`` it are made to last first.
        """
        for path in beside:
            self.files.persist(path)
        draft = self.files.draft(check_name(name))
        try:
            try:
                written = files(draft) if callable(files) else {f: self.write(draft, f, write) for f, write in files.items()}
            except BaseException:
                self.files.discard(draft)
                raise
            stamp = self.files.stamp(name)
            manifest = Manifest(
                name,
                iteration,
                {check_name(file): result[:2] for file, result in written.items()},
                {**(about or {}), **({} if stamp is None else {STAMP: stamp})},
                {file: result[2] for file, result in written.items() if len(result) > 2},
                draft.partition("/")[2],
                [path.name for path in beside],
            )
            self.files.publish(draft, name, format_manifest(manifest))
        except OSError as error:
            if self.files.is_local:
                raise write_error(error, Path(self.files.path_of(name))) from error
            raise

    def write(self, draft: str, file: str, write: WriteFile) -> Written:
        """Write a file of a draft; afterwards it is there for good."""
        with self.files.create(f"{draft}/{check_name(file)}") as sink:
            return write(sink)

    def link(self, name: str, target: str) -> None:
        """Make ``name`` a link to the snapshot ``target``, in the place of an earlier link at once."""
        self.files.link(check_name(name), check_name(target))

    def link_target(self, name: str) -> str | None:
        """Return the snapshot to which the link ``name`` points, or ``None`` if there is no such link."""
        return self.files.link_target(check_name(name))

    def names(self) -> list[str]:
        """Return the names of the snapshots, the highest iteration first, then the thinned, at last the damaged ones."""
        listed = [item for item in self.listing() if item[1] is not None or self.files.exists(f"{item[0]}/{MANIFEST}")]
        return [name for name, _ in sorted(listed, key=lambda item: 2 if item[1] is None else THINNED in item[1].about)]

    def listing(self, *, copies: bool = True) -> list[tuple[str, Manifest | None]]:
        """Return all that may be snapshots with their manifests, those first whose manifest cannot be read.

        Then comes the highest iteration, and so on down. Only manifests are read. Without ``copies`` one that was written
        under another name counts as one that cannot be read: a person has copied it, or it has replaced another.
        """
        states = self.files.states()
        if self.files.is_local:
            summaries = [self._summary(name, state) for name, state in states.items()]
        else:
            with ThreadPoolExecutor(_READERS) as pool:
                summaries = list(pool.map(self._summary, states.keys(), states.values()))
        listed = [
            (name, manifest if manifest is None or copies or manifest.name == name else None)
            for name, manifest in zip(states, summaries, strict=True)
            if manifest is None or self.files.admits(name, manifest.about.get(STAMP), manifest.digest)
        ]
        return sorted(listed, key=lambda item: (item[1] is not None, -item[1].iteration if item[1] else 0, item[0]))

    def _summary(self, name: str, state: Hashable | None) -> Manifest | None:
        """Return the manifest of a snapshot for a list; it is read once as long as it is not written again."""
        if state is None:
            return None
        key = self.place, name, state
        if key not in _summaries:
            if len(_summaries) > _MAX_SUMMARIES:
                _summaries.clear()
            try:
                manifest = parse_manifest(self.files.read(f"{name}/{MANIFEST}"), name)
                about = {**manifest.about, THINNED: None} if THINNED in manifest.about else manifest.about
                _summaries[key] = replace(manifest, parts={}, about=about)
            except ValueError:
                _summaries[key] = None
            except OSError as error:
                if not self.files.is_local and not isinstance(error, FileNotFoundError):
                    raise
                return None
        return _summaries[key]

    def holds(self, name: str, iteration: int) -> bool:
        """Return whether there is a snapshot of that name, of that iteration."""
        manifest = self._summary(name, self.files.state(name))
        if manifest is None or manifest.iteration != iteration:
            return False
        return self.files.admits(name, manifest.about.get(STAMP), manifest.digest)

    def remove(self, name: str) -> None:
        """Remove a snapshot, which is never there in part; what a person has put in its place stays."""
        manifest = self._summary(check_name(name), self.files.state(name))
        if manifest is not None and manifest.name == name:
            folder = self.snapshot(name).folder(manifest)
            # Others below that name may belong to a snapshot that was moved.
            self.files.remove(name, [f"{folder}/{file}" for file in manifest.files])

    def thin(self, name: str, digests: Mapping[str, str] | None) -> None:
        """Put digests in the place of the files of a snapshot in a directory.

        One rename puts them into its manifest, which then lists no files. Only after that, when this lasts, the files go;
        where a kill has left some, a call without digests removes them.
        """
        assert isinstance(self.files, base.Directory)
        text = None
        if digests is not None:
            manifest = self.snapshot(name).read_manifest()
            text = format_manifest(replace(manifest, files={}, parts={}, about={**manifest.about, THINNED: dict(digests)}))
        self.files.empty(name, text, [file for file in self.files.sizes(name) if _FILE.fullmatch(file)])

    def move(self, name: str, archive: str) -> None:
        """Move a snapshot or a link into a folder of the run, such as ``"previous/1"``."""
        text = None
        if not self.files.is_local and self.files.exists(f"{name}/{MANIFEST}"):
            text = self.files.read(f"{name}/{MANIFEST}")
            with suppress(CorruptError):  # one that is damaged is moved as it is, for whoever wants to look at it
                manifest = parse_manifest(text, name)
                folder = f"../../{name}/{manifest.folder}".rstrip("/")
                about = {key: value for key, value in manifest.about.items() if key != STAMP}  # in an archive all are valid
                text = format_manifest(replace(manifest, folder=folder, about=about))
        self.files.move(name, archive, text)

    def folders_of(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return the folders of the files of those snapshots that are valid, ``None`` for damaged ones."""
        folders: dict[str, str | None] = {}

        def find_folder(name: str) -> None:
            saved = self.snapshot(name)
            try:
                manifest = saved.read_manifest()
                folders[name] = saved.folder(manifest) if manifest.name == saved.name else None
            except LateError:
                pass  # it is not valid
            except CorruptError:
                folders[name] = None

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(find_folder, names))
        return folders


def find_newest(
    store: Snapshots, names: Iterable[str], warn: Callable[[str], None], known_damaged: Container[str] = ()
) -> str | None:
    """Return the first of ``names`` that is complete, ``None`` if there is none; warn about each before it.

    Its content is verified only when it is loaded.

    Raises:
        CorruptError: all of them are damaged; a new start would hide files that may still be recovered by hand.
    """
    damaged = []
    for name in names:
        if name in known_damaged:
            damaged.append(name)
            continue
        try:
            manifest = store.snapshot(name).verify(content=False)
            if manifest.name != name:
                raise CorruptError(f"its manifest is that of {manifest.name!r}")
        except RemoteError:  # of what is not seen nobody knows that it is damaged
            raise
        except (CorruptError, OSError) as error:
            warn(f"snapshot {name!r} is skipped: {error}")
            damaged.append(name)
        else:
            return name
    if damaged:
        raise CorruptError(f"none of the snapshots {damaged} in {store} is undamaged; move them away to start again")
    return None


def open_store(place: Place) -> Snapshots:
    """Return the snapshots of a run, at a path or an address; nothing needs to be there."""
    if is_url(place):
        from chainring._places.remote import RemotePlace  # the door to object stores, which few programs need

        return Snapshots(RemotePlace(os.fspath(place)))
    return Snapshots(base.Directory(place))


def split(address: Place) -> tuple[base.Place, str]:
    """Return the place above a path or an address, and the name there."""
    if not is_url(address):
        return base.Directory(Path(address).parent), Path(address).name
    url = os.fspath(address)
    if not has_name(url):
        raise ValueError(f"{url} is a whole bucket; give what lies in it, such as {url.rstrip('/')}/run/snapshot_iter_100")
    above, _, name = open_store(url).place.rpartition("/")
    return open_store(above).files, name


def has_name(url: str) -> bool:
    """Return whether an address is that of something in a bucket, and not of the bucket."""
    return "/" in open_store(url).place.partition("://")[2]


def open_file(place: Place) -> StoredFile:
    """Open a regular file at a path or an address."""
    if is_url(place):
        files, name = split(place)
        return files.open(name)
    resolved = Path(os.path.realpath(place))  # a person may have made a link to it
    if os.path.lexists(resolved) and not is_regular(resolved):
        raise ValueError(f"{place} is not a regular file; give the path of a model's file")
    file = open_store(resolved.parent).files.open(resolved.name)
    file.path = os.fspath(place)
    return file


def find_snapshot(place: Place) -> SavedSnapshot:
    """Return what may be a snapshot at a path or an address; a link in an object store is followed."""
    files, name = split(place)
    saved = SavedSnapshot(files, name)
    if files.is_local or saved.exists() or (target := files.link_target(name)) is None:
        return saved
    return SavedSnapshot(files, target)


def format_manifest(manifest: Manifest) -> bytes:
    """Return the text of a manifest, with its checksum."""
    content: dict[str, Any] = {"format": FORMAT, "name": manifest.name, "iteration": int(manifest.iteration)}
    content |= {"files": dict(manifest.files), "about": dict(manifest.about), "parts": dict(manifest.parts)}
    content |= {"folder": manifest.folder} if manifest.folder else {}
    content |= {"beside": list(manifest.beside)} if manifest.beside else {}
    body = json.dumps(content, indent=1).encode()
    return b"%s\n%08x" % (body, zlib.crc32(body))


def parse_manifest(text: bytes, place: str) -> Manifest:
    """Return the manifest of the snapshot at ``place``; a `CorruptError` if it is not what was written.

    Its values have their types: the checksum finds damage, and does not prove who wrote it.
    """
    body, newline, crc = text.rpartition(b"\n")
    if not newline or crc != b"%08x" % zlib.crc32(body):  # as text: a number would forgive the case of a letter
        raise CorruptError(f"{place}/{MANIFEST} is not what was written")
    try:
        content = parse_strict(body)
        version = content["format"]
        if type(version) is not int or version < FORMAT:
            raise ValueError(f"it has format {version!r:.40}, and this version reads {FORMAT}")
        if version > FORMAT:
            raise NewerFormat(
                f"{place} is of a newer Chainring, which writes format {version!r:.40}; this one reads {FORMAT}: update it"
            )
        values = {"parts": {}, "folder": "", "beside": [], **content}
        for key, cls in _TYPES.items():
            if type(values[key]) is not cls:
                raise ValueError(f"{key!r} is {values[key]!r:.40}, and no {cls.__name__}")
        values["files"] = {file: (size, crc) for file, (size, crc) in values["files"].items()}
        numbers = [number for size_and_crc in values["files"].values() for number in size_and_crc]
        texts = [(_FOLDER, values["folder"]), *((_PLAIN, name) for name in values["beside"])]
        texts += [(_NAME, file) for file in values["files"]]
        texts += [(_CHECKSUMS, crcs) for crcs in values["parts"].values()]
        if not all(type(number) is int for number in numbers) or not all(
            type(text) is str and pattern.fullmatch(text) for pattern, text in texts
        ):
            raise ValueError("a size, a checksum or a name has another form")
    except NewerFormat:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{place}/{MANIFEST} is not a manifest that this version reads: {error}") from error
    return Manifest(**{key: values[key] for key in _TYPES}, digest=digest_of(text))


def explain_absence(place: Place) -> Exception:
    """Return the error of a path or an address where neither a snapshot nor a file is, with what is there instead."""
    run, (above, name) = open_store(place), split(place)
    is_local, keys = run.files.is_local, sorted(key for key in run.files.sizes("") if not key.startswith("."))
    if not keys and not (is_local and os.path.exists(place)):
        if (target := above.link_target(name)) is not None:
            return FileNotFoundError(f"{place} is a link to {target}, which is not there")
        names = Snapshots(above).names() if (os.path.isdir(above.url) if is_local else has_name(above.url)) else []
        remedy = (
            f"{above} has {list_names(names, _MAX_NAMES)}" if names else "give the path of a snapshot or of a model's file"
        )
        return FileNotFoundError(f"there is no {place}; {remedy}")
    if is_local and not os.path.isdir(place):
        return FileNotFoundError(f"{place} is neither a regular file nor a directory")
    if names := run.names():
        return FileNotFoundError(f"{place} is a run, not a snapshot; give one of its own, such as {run}/{names[0]}")
    if any(map(_FILE.fullmatch, keys)):
        return CorruptError(f"{place} has files of a snapshot and no {MANIFEST}: it is damaged, or was copied in part")
    if _RECORD in keys:
        return FileNotFoundError(
            f"{place} belongs to a run that has taken no snapshot. In the script, "
            'trainer.extend(extensions.snapshot(), trigger=(1, "epoch")) takes them'
        )
    folders = [Path(place, key) for key in keys if is_local and Path(place, key).is_dir()]
    runs = [str(folder) for folder in folders if (folder / _RECORD).exists() or open_store(folder).names()]
    content = f": it has {keys[0]}, and no {MANIFEST}" if keys else ": it is empty"
    if runs:
        content = f". There are runs in it: give {list_names(runs, _MAX_NAMES, ' or ')}"
    return FileNotFoundError(f"{place} is not a snapshot and holds none{content}")
