"""The command ``chainring``: shows, verifies and exports the files of a run, verifies that it can be resumed, replays it."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from chainring._messages import printable
from chainring._version import __version__
from chainring.cli import average, bisect, control, diff, export, inspect, replay, report, reproduce, thin, verify_resume
from chainring.cli._common import add_command, help_formatter
from chainring.serializers._store import CorruptError, NewerFormat, Thinned

_DESCRIPTION = """
Show, verify and export the files of a run, without the code that wrote them;
verify that a run can be resumed; go to any of its iterations, and find the one
in which it went wrong; change a run that trains; make one again from its
record. Saved files are never changed, except by `thin`, and but for the code
in that record never executed."""

_EPILOG = """\
examples:
  chainring report result                  write a page for a browser
  chainring control result lr=1e-4         change it while it trains
  chainring inspect result                 show the newest snapshot
  chainring verify result                  verify it, after a copy say
  chainring export result mlp.safetensors  the model, for any program
  chainring average result other mlp.safetensors             the mean of two
  chainring verify-resume train.py -e 3    kill, resume and compare
  chainring diff result other              where two runs part
  chainring replay result --to 48123 train.py                any iteration
  chainring batch result 48123 train.py                      its examples
  chainring bisect result --bad "main/loss > 10" train.py    the bad batch
  chainring reproduce result               once more, from its record
  chainring thin result --every "10 epoch"    free the disk of snapshots

exit status:
  0    success, without damage or a difference
  1    a file is damaged, a run or a replay differs, or none is bad
  2    wrong arguments, or nothing to show, verify, compare or replay
  3    two uninterrupted runs differ already, or one hung
  130  interrupted by Ctrl-C

See `chainring COMMAND --help` for each command."""

_COMPLETION = """
Print a script that completes the commands, options and paths of chainring in
a shell. It is made by shtab: pip install "chainring[completion]".

examples:
  chainring completion bash > ~/.local/share/bash-completion/completions/chainring
  chainring completion zsh > ~/.zfunc/_chainring    where fpath has ~/.zfunc
  chainring completion fish > ~/.config/fish/completions/chainring.fish

exit status:
  0  it is printed
  2  the shell is not known, or shtab is not installed"""


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
    except OSError as error:  # a full disk, or a reader such as head that has closed the pipe
        null = os.open(os.devnull, os.O_WRONLY)  # where Python, which flushes at exit, may write the rest
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return 0 if isinstance(error, BrokenPipeError) else _fail(2, error)


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "chainring", description=_DESCRIPTION.strip(), epilog=_EPILOG, formatter_class=help_formatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"chainring {__version__}", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (report, control, inspect, verify_resume, diff, replay, bisect, reproduce, thin, export, average):
        module.add_to(commands)
    purpose = "the completion of these commands in a shell"
    completion = add_command(commands, "completion", _complete, purpose, _COMPLETION, prints_json=False)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    completion.set_defaults(root=parser)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    given = arguments[0]
    if not given.startswith("-") and given not in commands.choices:
        return _fail(2, f"there is no command {given!r}{_nearest(given, commands.choices)} `chainring --help` lists all")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        prog, known = options.parser.prog, [name for action in options.parser._actions for name in action.option_strings]
        shown = " ".join(f"{argument!r}{_nearest(argument.partition('=')[0], known)}" for argument in unknown)
        return _fail(2, f"`{prog}` does not take {shown} `{prog} --help` lists what it takes")
    try:
        status: int | None = options.run(options)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ImportError) as error:
        is_damage = isinstance(error, CorruptError) and not isinstance(error, NewerFormat | Thinned)
        return _fail(1 if is_damage else 2, error)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except Exception:  # Python would end with 1, which says that something is damaged or differs
        traceback.print_exc()
        return 2
    return status or 0


def _nearest(given: str, names: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(given, list(names), n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else ";"


def _fail(status: int, error: object) -> int:
    if isinstance(error, OSError) and error.strerror:
        error = f"{error.filename or 'the output'}: {error.strerror}"
    for line in str(error).splitlines():
        print(f"chainring: {printable(line)}", file=sys.stderr)
    return status


def _complete(options: argparse.Namespace) -> None:
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise ImportError('chainring completion needs shtab: pip install "chainring[completion]"') from None
    _complete_paths(options.root, shtab.FILE)
    print(shtab.complete(options.root, options.shell))


def _complete_paths(parser: argparse.ArgumentParser, completion: Any) -> None:
    """Let every argument without choices that is text be completed as a path."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in set(action.choices.values()):
                _complete_paths(command, completion)
        elif action.choices is None and action.type is None and action.nargs != 0:
            action.complete = completion  # type: ignore[attr-defined]
