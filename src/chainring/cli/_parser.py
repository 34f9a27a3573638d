"""How the commands present themselves: a help that teaches, no wider than one reads."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

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
