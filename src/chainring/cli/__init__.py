"""The command ``chainring``: shows, verifies and exports the files of a run, verifies that it can be resumed, replays it."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence

from chainring._version import __version__
from chainring.cli import batch, bisect, completion, diff, export, inspect, replay, report, verify, verify_resume
from chainring.cli._common import help_formatter, printable
from chainring.serializers._store import CorruptError, NewerFormat

__all__ = ["main"]

_COMMANDS = (report, inspect, verify, verify_resume, diff, replay, batch, bisect, export, completion)

_DESCRIPTION = """
Show, verify and export the files of a run, without the code that wrote them;
verify that a run can be resumed; go to any of its iterations, and find the one
in which it went wrong. Saved files are never executed or overwritten."""

_EPILOG = """\
examples:
  chainring report result                  write a page for a browser
  chainring inspect result                 show the newest snapshot
  chainring verify result                  verify it, after a copy say
  chainring export result mlp.safetensors  the model, for any program
  chainring verify-resume train.py -e 3    kill, resume and compare
  chainring diff result other              where two runs part
  chainring replay result --to 48123 train.py                any iteration
  chainring batch result 48123 train.py                      its examples
  chainring bisect result --bad "main/loss > 10" train.py    the bad batch

exit status:
  0    success, without damage or a difference
  1    a file is damaged, a run or a replay differs, or none is bad
  2    wrong arguments, or nothing to show, verify, compare or replay
  3    two uninterrupted runs differ already, or one hung
  130  interrupted by Ctrl-C

See `chainring COMMAND --help` for each command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for damage or a difference, 2 for a wrong or impossible request."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # of which the encoding may lack a letter of a path
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # a reader such as head has closed the pipe
        _discard_output()
        return 0
    except OSError as error:  # a full disk
        _discard_output()
        return _fail(2, error)


def _run(arguments: Sequence[str]) -> int:
    parser = make_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if not arguments[0].startswith("-") and (problem := _find_unknown_command(arguments[0])):
        return _fail(2, problem)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        return _fail(2, _describe_unknown(options.parser, unknown))
    try:
        status: int | None = options.run(options)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError) as error:
        is_damage = isinstance(error, CorruptError) and not isinstance(error, NewerFormat)
        return _fail(1 if is_damage else 2, error)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return status or 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        "chainring", description=_DESCRIPTION.strip(), epilog=_EPILOG, formatter_class=help_formatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"chainring {__version__}", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    parser.set_defaults(root=parser)  # which `completion` describes
    return parser


def _find_unknown_command(given: str) -> str | None:
    """Return words for a command that is not there, with the nearest that is."""
    names = [command.__name__.rpartition(".")[2].replace("_", "-") for command in _COMMANDS]
    if given in names:
        return None
    return f"there is no command {given!r}{_nearest(given, names)} `chainring --help` lists all"


def _describe_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return words for arguments that a command does not take, with the nearest that it does."""
    known = [name for action in parser._actions for name in action.option_strings]
    shown = " ".join(f"{argument!r}{_nearest(argument.partition('=')[0], known)}" for argument in unknown)
    return f"`{parser.prog}` does not take {shown} `{parser.prog} --help` lists what it takes"


def _nearest(given: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(given, names, n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else ";"


def _fail(status: int, error: object) -> int:
    """Print the error and return the status."""
    if isinstance(error, OSError) and error.strerror:
        error = f"{error.filename or 'the output'}: {error.strerror}"
    for line in str(error).splitlines():
        print(f"chainring: {printable(line)}", file=sys.stderr)
    return status


def _discard_output() -> None:
    """Let Python, which flushes at exit, write the rest of the output to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
