"""Helpers of the commands: finding snapshots, errors that name a remedy, and the form of the help."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chainring._files import is_url
from chainring.serializers._checkpoint import STATE
from chainring.serializers._safetensors import is_pickle
from chainring.serializers._store import (
    MANIFEST,
    CorruptError,
    DirectoryStore,
    SavedSnapshot,
    StoredFile,
    find_snapshot,
    has_name,
    open_file,
    open_store,
    split,
)

_RUN = "run.json"
_ASCII = frozenset(b"\t\n\r") | frozenset(range(32, 127))
_MAX_NAMES = 3
_MAX_WIDTH = 100


def find_saved(given: str) -> StoredFile | list[SavedSnapshot]:
    """Return a file, a snapshot, or all snapshots of a run, the newest first; at a path or an address.

    Raises:
        FileNotFoundError, ValueError, CorruptError: there is none of them; with the path to give instead.
        OSError: a store does not answer.
    """
    if is_url(given):
        return _find_in_store(given)
    path = Path(given)
    if not given:
        raise ValueError("the path is empty; give a snapshot, or the directory of a run, such as result")
    if path.is_file():
        return open_file(given)
    if (saved := find_snapshot(given)).exists():
        return [saved]
    if names := _snapshot_names(path):
        return [find_snapshot(path / name) for name in names]
    if not os.path.exists(given):
        raise FileNotFoundError(_absent(path))
    if not path.is_dir():
        raise FileNotFoundError(f"{given} is neither a regular file nor a directory")
    if (path / STATE).exists():
        raise CorruptError(f"{given} has a {STATE} and no {MANIFEST}: a snapshot that is damaged, or copied in part")
    raise FileNotFoundError(f"{given} is not a snapshot and holds none: {_contents(path)}")


def _find_in_store(url: str) -> StoredFile | list[SavedSnapshot]:
    from chainring.serializers._object_store import explain_absence  # which few commands need

    store = open_store(url)
    if has_name(url):
        saved = find_snapshot(url)
        if saved.exists():
            return [saved]
        if saved.name != split(url)[1]:  # a link to nothing
            raise explain_absence(url)
        with contextlib.suppress(FileNotFoundError):
            return open_file(url)
    if names := store.names():
        return [store.snapshot(name) for name in names]
    raise explain_absence(url)


def snapshots(given: str) -> list[SavedSnapshot]:
    """Return the snapshot itself, or all of a run, the newest first; see `find_saved`.

    Raises:
        FileNotFoundError: it is a file.
    """
    found = find_saved(given)
    if isinstance(found, StoredFile):
        raise FileNotFoundError(f"{given} is {describe_file(found)}")
    return found


def describe_file(file: StoredFile) -> str:
    """Return words for a file that is not a snapshot, with a remedy."""
    parent = file.path.rpartition("/")[0] or "."
    for place in (parent, parent.rpartition("/")[0]):
        if is_file(f"{place}/{MANIFEST}"):
            return f"one file of the snapshot {place}; give " + ("its address" if is_url(place) else "the directory")
    if is_model(file):
        return "the file of a model, not a snapshot: `chainring inspect` and `chainring verify` take it"
    return describe_foreign_file(file) or f"not a snapshot, which has a {MANIFEST}, nor the file of a model"


def describe_foreign_file(file: StoredFile) -> str | None:
    """Return words for a file that Chainring neither writes nor opens; ``None`` if it may be a model's, sound or not."""
    if is_pickle(file):
        return (
            "a file such as torch.save or NumPy write, which is not opened, because a pickle can run code. In Python, "
            "chainring.serializers.load(path, model) reads its tensors alone, and serializers.save writes them again"
        )
    start = bytes(file.read(0, min(8, file.size)).numpy())
    if len(start) == 8 and _ASCII.issuperset(start):  # as a length of a safetensors header it would be beyond any disk
        run = file.path.rpartition("/")[0]
        is_of_run = is_file(f"{run or '.'}/{_RUN}")
        return "text, not a model" + (f"; to look at the run it belongs to, give {run or '.'}" if is_of_run else "")
    return None


def is_model(file: StoredFile) -> bool:
    """Return whether a file begins as safetensors does: the length of a header, and the header."""
    start = bytes(file.read(0, min(9, file.size)).numpy())
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= file.size


def is_file(place: str) -> bool:
    """Return whether there is a regular file at a path or an address."""
    if is_url(place) and not has_name(place):
        return False
    try:
        open_file(place)
    except (OSError, ValueError):
        return False
    return True


def _absent(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, which is not there"
    names = _snapshot_names(path.parent)
    return f"there is no {path}" + (f"; {path.parent} has {listed(names)}" if names else "")


def _snapshot_names(directory: Path) -> list[str]:
    return DirectoryStore(directory).names() if directory.is_dir() else []


def _contents(path: Path) -> str:
    """Return words for the contents of a directory without snapshots, with a remedy."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if not entries:
        return "it is empty"
    if (path / _RUN).exists():
        return (
            "it belongs to a run that has taken no snapshot. In the script, "
            'trainer.extend(extensions.snapshot(), trigger=(1, "epoch")) takes them'
        )
    runs = [entry.name for entry in entries if (entry / _RUN).exists() or _snapshot_names(entry)]
    return f"neither has a {MANIFEST}" + (f". There are runs in it: give {listed(runs, path)}" if runs else "")


def listed(names: list[str], parent: Path | None = None) -> str:
    """Return the first names as text, or as paths to choose from if they are those in a directory."""
    shown = [str(parent / name) if parent else name for name in names[:_MAX_NAMES]]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", " if more else " or " if parent else ", ").join(shown) + more


def printable(text: object) -> str:
    """Return text of a file from anywhere, with the characters escaped that could control the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


def help_formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter that keeps text as written, and sets arguments as wide as the terminal, up to a readable width."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) - 2
    return argparse.RawDescriptionHelpFormatter(prog, width=width, max_help_position=26)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], purpose: str, text: str
) -> argparse.ArgumentParser:
    """Add the parser of a command, whose help shows the first paragraph of the text above the arguments."""
    description, _, epilog = text.strip().partition("\n\n")
    texts = {"help": purpose, "description": description, "epilog": epilog}
    parser: argparse.ArgumentParser = commands.add_parser(name, **texts, formatter_class=help_formatter, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead; errors stay text on stderr")
    parser.set_defaults(run=run)
    return parser


def print_json(facts: Any) -> None:
    """Print plain values as one JSON object without NaN, which not every reader takes."""
    print(json.dumps(facts, indent=1, allow_nan=False))


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends what was started before it ends this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: Any) -> None:
        sys.exit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
