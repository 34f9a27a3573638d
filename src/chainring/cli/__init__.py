"""The command ``chainring``: looks at what a run has written, and tries whether a run continues."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from chainring._version import __version__
from chainring.cli import export, inspect, report, verify, verify_resume
from chainring.cli._common import EXIT_STATUS, paragraph, printable, width_of_help
from chainring.serializers._store import CorruptError, NewerFormat

__all__ = ["main"]

_COMMANDS = (report, inspect, verify, verify_resume, export)

_DESCRIPTION = """
Looks at what a run has written, without the code that wrote it, and tries whether
a run continues. Nothing that was saved is executed, and nothing of it is written over."""

_EPILOG = f"""\
examples:
  chainring report result                  the page of the run, for a browser
  chainring inspect result                 what has the run in result/ saved?
  chainring verify result                  is it sound, now that it was copied?
  chainring export result mlp.safetensors  the trained model, for any program
  chainring verify-resume train.py -e 3    does it continue bit for bit?

{EXIT_STATUS}

`chainring COMMAND --help` says more of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for damage or a difference, 2 for what cannot be done."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _leave_output()
        return 0
    except OSError as error:  # a full disk
        _leave_output()
        return _fail(2, error)


def _run(arguments: Sequence[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    try:
        status: int | None = options.run(options)
    except BrokenPipeError:
        raise
    except NewerFormat as error:
        return _fail(2, error)
    except CorruptError as error:
        return _fail(1, error)
    except (OSError, ValueError) as error:
        return _fail(2, error)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "chainring", description=paragraph(_DESCRIPTION), epilog=_EPILOG, formatter_class=width_of_help, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"chainring {__version__}", help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _fail(status: int, error: object) -> int:
    """Says why and returns the status."""
    if isinstance(error, OSError) and error.strerror:
        error = f"{error.filename or 'the output'}: {error.strerror}"
    for line in str(error).splitlines():
        print(f"chainring: {printable(line)}", file=sys.stderr)
    return status


def _leave_output() -> None:
    """Lets Python, which flushes at its end, write to nowhere what could not be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
