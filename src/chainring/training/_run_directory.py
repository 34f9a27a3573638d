"""The directory of a run: who writes there, and what becomes of what lies there already."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from string import Formatter

from chainring._files import DirectoryLock, flush_directory, make_numbered_directory, temporary_path
from chainring._messages import info
from chainring.serializers._store import Manifest, Store

_SHOWN = 6
_PLACES = ("previous", "abandoned")
_COUNTS = {"iteration": r"(?P<iteration>\d+)", "epoch": r"\d+", "epoch_detail": r"[\d.e+-]+"}


class RunDirectory:
    """Where one run writes, and no other run meanwhile.

    What killed runs have left unfinished is removed. What a run has saved is never deleted here, only moved.

    Args:
        out: the directory; it exists.

    Raises:
        BlockingIOError: another run writes there; the error names its process and host.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.path = Path(out)
        self._lock = DirectoryLock(out)
        self._store = Store(out)
        try:
            self._store.sweep()
        except BaseException:
            self._lock.release()
            raise

    def release(self) -> None:
        """Lets another run in."""
        self._lock.release()

    def begin(self, templates: Iterable[str]) -> None:
        """Moves what an earlier run has written under these names to ``previous/<n>``, for a run that starts anew."""
        own = list(self._own(templates))
        if own:
            moved = self._move(own, "previous")
            info(f"{self.path} holds an earlier run: {_listed(own)} moved to {moved}")

    def go_back(self, templates: Iterable[str], iteration: int) -> None:
        """Moves snapshots of later iterations to ``abandoned/<n>``, for a run that continues from this one.

        The files beside them, such as the log, are copied there, because the run will cut them back.
        """
        own = self._own(templates)
        later = [name for name, since in own.items() if since is not None and since > iteration]
        if not later:
            return
        # Links go first, so that none leads nowhere when the process is killed on the way.
        later = [name for name in own if "/" not in name and self._store.link_target(name) in later] + later
        files = [name for name in own if (self.path / name).is_file() and name not in later]
        moved = self._move(later, "abandoned", copies=files)
        info(f"resumed at iteration {iteration}: the later {_listed(later)} moved to {moved}")

    def _own(self, templates: Iterable[str]) -> dict[str, float | None]:
        """The run's own entries and the iteration of each, infinite for a damaged snapshot, ``None`` for other files."""
        templates = list(templates)
        patterns = [pattern_of(template) for template in templates]
        manifests = dict(self._store.listing())
        found: dict[str, float | None] = {}
        names = sorted(name for name in os.listdir(self.path) if not name.startswith(".") and name not in _PLACES)
        for name in names:
            matches = [match for pattern in patterns if (match := pattern.fullmatch(name))]
            manifest = manifests.get(name)
            if not matches and not (manifest is not None and "series" in manifest.about):
                continue
            numbers = [match["iteration"] for match in matches if "iteration" in match.re.groupindex]
            if name in manifests:
                found[name] = _iteration(manifest, numbers)
            else:
                found[name] = int(numbers[0]) if numbers else None
        found |= {name: None for name in names if name not in found and self._store.link_target(name) in found}
        return found | self._nested(templates)

    def _nested(self, templates: Iterable[str]) -> dict[str, float | None]:
        """The same of the files that lie in folders within."""
        found: dict[str, float | None] = {}
        for template in templates:
            folder = template.partition("{")[0].rpartition("/")[0]
            if not folder or os.path.isabs(template) or ".." in Path(template).parts:
                continue
            pattern = pattern_of(template)
            for path in sorted((self.path / folder).rglob("*")):
                name = path.relative_to(self.path).as_posix()
                if path.is_file() and (match := pattern.fullmatch(name)):
                    found[name] = int(match["iteration"]) if "iteration" in match.re.groupindex else None
        return found

    def _move(self, names: list[str], where: str, copies: Iterable[str] = ()) -> Path:
        place = make_numbered_directory(self.path / where)
        for name in (*copies, *names):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
        for name in copies:
            shutil.copy2(self.path / name, place / name)
        for name in names:
            os.rename(self.path / name, place / name)
        flush_directory(place)
        flush_directory(self.path)
        return place


def pattern_of(template: str) -> re.Pattern[str]:
    """The names that a template such as ``snapshot_iter_{.updater.iteration}`` stands for.

    Fields that count, iterations and epochs, stand for digits, so that what others call ``snapshot_iter_old`` is not taken
    for the run's own; the first iteration is the group of that name. A field of any other kind stands for any text, unless
    it is all of the name, which would then be every name.
    """
    fields = list(Formatter().parse(template))
    other = ".+" if any(literal for literal, *_ in fields) else r"(?!)"
    parts: list[str] = []
    for literal, field, _, _ in fields:
        parts.append(re.escape(literal))
        if field is not None:
            part = _COUNTS.get(field.rpartition(".")[2], other)
            parts.append(r"\d+" if part in parts and "<" in part else part)
    return re.compile("".join(parts))


def _iteration(manifest: Manifest | None, numbers: list[str]) -> float:
    if manifest is not None:
        return manifest.iteration
    return int(numbers[0]) if numbers else float("inf")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def check_out(out: str | os.PathLike[str]) -> None:
    """Check that ``out`` is, or can become, a directory to write to, without creating anything.

    Raises:
        TypeError: it is not a path.
        OSError: something else is in the way, or the permission is missing.
    """
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f'out is the path of a directory, such as "result"; got {out!r} of type {type(out).__name__}')
    path = Path(out).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise NotADirectoryError(f"out must be a directory, and {existing} is not a directory; choose another out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"out must be a directory one may write to, and {existing} is not; choose another out")


def create_out(out: str | os.PathLike[str]) -> None:
    """Create the directory, and try whether a file can be written there.

    Raises:
        OSError: it cannot.
    """
    try:
        os.makedirs(out, exist_ok=True)
        probe = temporary_path(Path(out))
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        rule = f"out must be a directory one may write to ({error.strerror}); choose another out"
        raise OSError(error.errno, rule, os.fspath(out)) from error
