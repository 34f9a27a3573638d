"""Why there is neither a snapshot nor a file at a path or an address, and what to give instead."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from chainring._files import is_url
from chainring._places.base import MANIFEST
from chainring.serializers._store import CorruptError, Place, has_name, open_store, split

_RECORD = "run.json"
_FILE = re.compile(r"(?:[0-9a-f]{16}/)?(?:state\.json|rank\d+-of-\d+\.safetensors)")  # of a snapshot
_MAX_NAMES = 3
_NO_SNAPSHOT = (
    "belongs to a run that has taken no snapshot. In the script, "
    'trainer.extend(extensions.snapshot(), trigger=(1, "epoch")) takes them'
)


def explain_absence(place: Place) -> Exception:
    """Return the error of a path or an address where neither a snapshot nor a file is, with what is there instead."""
    given = os.fspath(place)
    return _explain_in_store(given) if is_url(given) else _explain_on_disk(Path(given))


def _explain_on_disk(path: Path) -> Exception:
    if not os.path.exists(path):
        if path.is_symlink():
            return FileNotFoundError(f"{path} is a link to {os.readlink(path)}, which is not there")
        return _explain_nothing(str(path), str(path.parent), _snapshots_in(path.parent))
    if not path.is_dir():
        return FileNotFoundError(f"{path} is neither a regular file nor a directory")
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if (path / "state.json").exists():
        return CorruptError(f"{path} has a state.json and no {MANIFEST}: a snapshot that is damaged, or copied in part")
    runs = [str(entry) for entry in entries if (entry / _RECORD).exists() or _snapshots_in(entry)]
    if not entries:
        content = "it is empty"
    elif (path / _RECORD).exists():
        content = f"it {_NO_SNAPSHOT}"
    else:
        content = f"neither has a {MANIFEST}" + (f". There are runs in it: give {list_names(runs, ' or ')}" if runs else "")
    return FileNotFoundError(f"{path} is not a snapshot and holds none: {content}")


def _explain_in_store(url: str) -> Exception:
    run, (above, name) = open_store(url), split(url)
    if (target := open_store(above).link_target(name)) is not None:
        return FileNotFoundError(f"{url} is a link to {above}/{target}, which is not there")
    if names := run.names():
        return FileNotFoundError(f"{url} is a run, not a snapshot; give one of its own, such as {run}/{names[0]}")
    keys = sorted(run.files.sizes(""))
    if any(map(_FILE.fullmatch, keys)):
        return CorruptError(f"{url} has files of a snapshot and no {MANIFEST}: it is damaged, or was not finished")
    if _RECORD in keys:
        return FileNotFoundError(f"{url} {_NO_SNAPSHOT}")
    if keys:
        return FileNotFoundError(f"{url} is neither a snapshot nor a file; below it is {run}/{keys[0]}")
    return _explain_nothing(url, above, open_store(above).names() if has_name(above) else [])


def _explain_nothing(given: str, above: str, names: Sequence[str]) -> Exception:
    return FileNotFoundError(f"there is no {given}" + (f"; {above} has {list_names(names)}" if names else ""))


def _snapshots_in(directory: Path) -> list[str]:
    return open_store(directory).names() if directory.is_dir() else []


def list_names(names: Sequence[str], between: str = ", ") -> str:
    """Return the first names as text, and the number of the others."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", " if more else between).join(names[:_MAX_NAMES]) + more
