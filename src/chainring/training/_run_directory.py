"""The directory of a run: who writes there, and what happens to the files of an earlier run."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from string import Formatter

from chainring._files import DirectoryLock, flush_directory, make_numbered_directory, temporary_path
from chainring._messages import info
from chainring.serializers._store import Store

_MAX_SHOWN = 6
_ARCHIVES = ("previous", "abandoned")
_COUNTS = {"iteration": r"(?P<iteration>\d+)", "epoch": r"\d+", "epoch_detail": r"[\d.e+-]+"}


class RunDirectory:
    """The directory in which one run writes, and no other run meanwhile.

    Unfinished files of killed runs are removed. What a run has saved is never deleted here, only moved.

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
        """Let other runs write there."""
        self._lock.release()

    def archive_earlier_run(self, templates: Iterable[str]) -> None:
        """Move the files of an earlier run with these names to ``previous/<n>``, for a run that starts anew."""
        names = list(self._find(templates))
        if names:
            archive = self._move(names, "previous")
            info(f"{self.path} holds an earlier run: {_list_names(names)} moved to {archive}")

    def archive_later_snapshots(self, templates: Iterable[str], iteration: int) -> None:
        """Move snapshots of later iterations to ``abandoned/<n>``, for a run that continues from this one.

        The files beside them, such as the log, are copied there, because the run will cut them back.
        """
        found = self._find(templates)
        later = [name for name, saved_at in found.items() if saved_at is not None and saved_at > iteration]
        if not later:
            return
        # Links go first, so that none is left dangling when the process is killed in between.
        later = [name for name in found if "/" not in name and self._store.link_target(name) in later] + later
        files = [name for name in found if (self.path / name).is_file() and name not in later]
        archive = self._move(later, "abandoned", copies=files)
        info(f"resumed at iteration {iteration}: the later {_list_names(later)} moved to {archive}")

    def _find(self, templates: Iterable[str]) -> dict[str, float | None]:
        """Return what runs have written: iterations by name, infinite for damaged snapshots, ``None`` for other files."""
        patterns = {template: compile_template(template) for template in templates}
        manifests = dict(self._store.listing())
        found: dict[str, float | None] = {}
        names = sorted(name for name in os.listdir(self.path) if not name.startswith(".") and name not in _ARCHIVES)
        for name in names:
            matches = [match for pattern in patterns.values() if (match := pattern.fullmatch(name))]
            manifest = manifests.get(name)
            if manifest is not None and (matches or "series" in manifest.about):
                found[name] = manifest.iteration
            elif matches:
                found[name] = _iteration_of(matches, math.inf if name in manifests else None)
        found |= {name: None for name in names if name not in found and self._store.link_target(name) in found}
        for template, pattern in patterns.items():
            folder = template.partition("{")[0].rpartition("/")[0]
            if folder and not os.path.isabs(template) and ".." not in Path(template).parts:
                for path in sorted((self.path / folder).rglob("*")):
                    name = path.relative_to(self.path).as_posix()
                    if path.is_file() and (match := pattern.fullmatch(name)):
                        found[name] = _iteration_of([match], None)
        return found

    def _move(self, names: list[str], archives: str, copies: Iterable[str] = ()) -> Path:
        archive = make_numbered_directory(self.path / archives)
        for name in (*copies, *names):
            (archive / name).parent.mkdir(parents=True, exist_ok=True)
        for name in copies:
            shutil.copy2(self.path / name, archive / name)
        for name in names:
            os.rename(self.path / name, archive / name)
        flush_directory(archive)
        flush_directory(self.path)
        return archive


def compile_template(template: str) -> re.Pattern[str]:
    """Return the pattern of the names that a template such as ``snapshot_iter_{.updater.iteration}`` stands for.

    Fields that count, iterations and epochs, stand for digits, so that ``snapshot_iter_old`` of another program does not
    match; the first iteration is the group of that name. Any other field stands for any text, unless the template consists
    of it alone, which would then match every name.
    """
    fields = list(Formatter().parse(template))
    any_text = ".+" if any(literal for literal, *_ in fields) else r"(?!)"
    regexes: list[str] = []
    for literal, field, _, _ in fields:
        regexes.append(re.escape(literal))
        if field is not None:
            regex = _COUNTS.get(field.rpartition(".")[2], any_text)
            regexes.append(r"\d+" if regex in regexes and "<" in regex else regex)
    return re.compile("".join(regexes))


def _iteration_of(matches: list[re.Match[str]], default: float | None) -> float | None:
    return next((int(match["iteration"]) for match in matches if "iteration" in match.re.groupindex), default)


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return shown if len(names) <= _MAX_SHOWN else f"{shown} and {len(names) - _MAX_SHOWN} more"


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
    """Create the directory and check that a file can be written there.

    Raises:
        OSError: the directory cannot be created, or not written to.
    """
    try:
        os.makedirs(out, exist_ok=True)
        probe = temporary_path(Path(out))
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        rule = f"out must be a directory one may write to ({error.strerror}); choose another out"
        raise OSError(error.errno, rule, os.fspath(out)) from error
