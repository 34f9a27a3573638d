"""The command ``chainring``: looks at what a run has written, and tries whether a run continues."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from chainring._version import __version__
from chainring.cli import export, inspect, verify, verify_resume
from chainring.cli._snapshot import printable
from chainring.serializers.manifest import CorruptError

__all__ = ["main"]

_DESCRIPTION = "Looks at what a run has written, without the code that wrote it, and tries whether a run continues."

_EPILOG = """exit status:
  0  done
  1  what was written is damaged, or a resumed run differs
  2  the arguments are wrong, there is nothing of that kind, or it cannot be tried"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for damage or a difference, 2 for what cannot be done."""
    parser = argparse.ArgumentParser(
        "chainring", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"chainring {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (inspect, verify, verify_resume, export):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        status: int | None = options.run(options)
    except CorruptError as error:
        print(f"chainring: {printable(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stdout = None
        return 0
    except (OSError, ValueError) as error:
        print(f"chainring: {printable(error)}", file=sys.stderr)
        return 2
    return status or 0
