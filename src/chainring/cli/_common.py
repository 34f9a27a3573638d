"""How the commands present themselves: a help that teaches, no wider than one reads."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainring.serializers._checkpoint import STATE
from chainring.serializers._safetensors import is_of_pickle
from chainring.serializers._store import MANIFEST, CorruptError, Store

_RUN = "run.json"
_TEXT = frozenset(b"\t\n\r") | frozenset(range(32, 127))
_SHOWN = 3


def refusal(given: str) -> Exception:
    """Why a path is no snapshot and holds none, and what to give instead: an error to be raised."""
    path = Path(given)
    if not given:
        return ValueError("the path is empty; give a snapshot, or the directory of a run, such as result")
    if not os.path.exists(given):
        return FileNotFoundError(_absent(path))
    if not path.is_dir():
        return FileNotFoundError(f"{given} is {kind_of_file(path)}")
    if (path / STATE).exists():
        return CorruptError(f"{given} has a {STATE} and no {MANIFEST}: a snapshot that is damaged, or copied in part")
    return FileNotFoundError(f"{given} is no snapshot and holds none: {_contents(path)}")


def kind_of_file(path: Path) -> str:
    """What a file is that is no snapshot, and what to do with it."""
    parent = path.parent
    if (parent / MANIFEST).exists():
        return f"one file of the snapshot {parent}; give the directory"
    if is_model(path):
        return "the file of a model, and no snapshot: `chainring inspect` and `chainring verify` take it"
    if (foreign := what_is_foreign(path)) is not None:
        return foreign
    return "no directory; a snapshot is a directory with a " + MANIFEST


def what_is_foreign(path: Path) -> str | None:
    """What a file is that Chainring neither writes as a model nor opens; ``None`` if it may be a model's, sound or not."""
    if not path.is_file():
        return "no plain file and no directory"
    if is_of_pickle(path):
        return (
            "a file such as torch.save or NumPy write, which is not opened, because a pickle can run code. In Python: "
            "load it with torch.load(path, weights_only=True), and save the model with chainring.serializers.save"
        )
    with path.open("rb") as file:
        start = file.read(8)
    if len(start) == 8 and _TEXT.issuperset(start):  # as a length of a safetensors header it would be beyond any disk
        run = path.parent if (path.parent / _RUN).exists() else None
        return "text, and no model" + (f"; to look at the run it belongs to, give {run}" if run else "")
    return None


def is_model(path: Path) -> bool:
    """Whether a file begins as safetensors does: the length of a header, and the header."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size


def _absent(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, which is not there"
    parent = path.parent
    names = Store(parent).names() if parent.is_dir() else []
    return f"there is no {path}" + (f"; {parent} has {_listed(names)}" if names else "")


def _contents(path: Path) -> str:
    """What a directory has that is no snapshot."""
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if not entries:
        return "it is empty"
    if (path / _RUN).exists():
        return (
            "it is of a run that has taken no snapshot. In the script, "
            'trainer.extend(extensions.snapshot(), trigger=(1, "epoch")) takes them'
        )
    runs = [entry.name for entry in entries if entry.is_dir() and ((entry / _RUN).exists() or Store(entry).names())]
    return f"neither has a {MANIFEST}" + (f". There are runs in it: give {_listed(runs, path)}" if runs else "")


def _listed(names: list[str], parent: Path | None = None) -> str:
    shown = [str(parent / name) if parent else name for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", " if more else " or " if parent else ", ").join(shown) + more


def find(directory: str) -> Path:
    """The snapshot itself, or the newest of those in the directory of a run, see `snapshots`."""
    return snapshots(directory)[0]


def snapshots(directory: str) -> list[Path]:
    """The snapshot itself, or all in the directory of a run, the newest first.

    Raises:
        FileNotFoundError: there is neither; the error says what there is, and what to give.
        CorruptError: it is a snapshot that has lost its manifest.
    """
    path = Path(directory)
    if directory and (path / MANIFEST).exists():
        return [path]
    names = Store(path).names() if directory and path.is_dir() else []
    if not names:
        raise refusal(directory)
    return [path / name for name in names]


def printable(text: object) -> str:
    """Text out of a file that may come from anywhere, without what would steer the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


_WIDEST = 100

EXIT_STATUS = """\
exit status:
  0    done, and what was looked at is fine
  1    what was written is damaged, or a resumed run differs
  2    wrong arguments, or nothing there that could be looked at or tried
  130  interrupted by Ctrl-C"""


def width_of_help(prog: str) -> argparse.HelpFormatter:
    """Text as it was written, and arguments as wide as the terminal, up to what is pleasant to read."""
    return argparse.RawDescriptionHelpFormatter(prog, width=_columns(), max_help_position=26)


def paragraph(text: str) -> str:
    """Lines of text as one paragraph of that width."""
    return textwrap.fill(" ".join(text.split()), _columns())


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST) - 2


def add_command(
    commands: Any, name: str, *, purpose: str, description: str, examples: Sequence[str], status: Sequence[str]
) -> argparse.ArgumentParser:
    """A parser for one command, whose help ends with examples and with what its exit statuses mean.

    Args:
        commands: what ``add_subparsers`` returned.
        name: of the command.
        purpose: what it is for, as the list of commands has it.
        description: what it does.
        examples: command lines, of at most 76 characters.
        status: what 0, 1 and 2 mean here, in this order.
    """
    epilog = ["examples:", *(f"  {line}" for line in examples), "", "exit status:"]
    epilog += [f"  {number}  {meaning}" for number, meaning in enumerate(status)]
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=paragraph(description),
        epilog="\n".join(epilog),
        formatter_class=width_of_help,
        allow_abbrev=False,
    )
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option ``--json``: what is printed for people goes to programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead; errors stay text on stderr")


def print_json(facts: Any) -> None:
    """Prints plain values as one JSON object that any reader takes."""
    print(json.dumps(facts, indent=1, allow_nan=False))
