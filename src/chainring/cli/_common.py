"""Helpers of the commands: the form of their help and of what they print."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from chainring._files import is_url, to_json


def help_formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter that keeps text as written, and sets arguments as wide as the terminal, up to a readable width."""
    width = min(shutil.get_terminal_size().columns, 100) - 2
    return argparse.RawDescriptionHelpFormatter(prog, width=width, max_help_position=26)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    purpose: str,
    text: str,
    *,
    prints_json: bool = True,
) -> argparse.ArgumentParser:
    """Add the parser of a command, whose help shows the first paragraph of the text above the arguments."""
    description, _, epilog = text.strip().partition("\n\n")
    texts = {"help": purpose, "description": description, "epilog": epilog}
    parser: argparse.ArgumentParser = commands.add_parser(name, **texts, formatter_class=help_formatter, allow_abbrev=False)
    if prints_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object instead; errors stay text on stderr")
    parser.set_defaults(run=run, parser=parser)
    return parser


def show(options: argparse.Namespace, facts: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print lines, or with ``--json`` the facts, without NaN, which not every reader takes."""
    for line in [json.dumps(to_json(facts), indent=1, allow_nan=False)] if options.json else lines:
        print(line)


def new_directory(given: str, run: Path) -> str:
    """Return the path of a directory to be made, outside of that of a run; one that is there and empty is removed."""
    path = Path(given)
    if is_url(given):
        raise ValueError(f"{given} is an address; give a new directory, and copy it there")
    if path.resolve().is_relative_to(run):
        raise ValueError(f"{given} lies in {run}, where nothing is changed; give another directory")
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        path.rmdir()
    if os.path.lexists(path):
        raise FileExistsError(f"{given} is there already; give a new directory")
    return os.path.realpath(path)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends what was started before it ends this process; not in a thread, where Python sets no handler."""
    is_set_elsewhere = signal.getsignal(signal.SIGTERM) is None  # not by Python, which could not restore it
    if threading.current_thread() is not threading.main_thread() or is_set_elsewhere:
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
