"""``chainring completion SHELL``: the completion of commands, options and paths in a shell."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from chainring.cli._common import add_command

_HELP = """
Print a script that completes the commands, options and paths of chainring in
a shell. It is made by shtab: pip install "chainring[completion]".

examples:
  chainring completion bash > ~/.local/share/bash-completion/completions/chainring
  chainring completion zsh > ~/.zfunc/_chainring    where fpath has ~/.zfunc
  chainring completion fish > ~/.config/fish/completions/chainring.fish

exit status:
  0  it is printed
  2  the shell is not known, or shtab is not installed"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    purpose = "the completion of these commands in a shell"
    parser = add_command(commands, "completion", run, purpose, _HELP, prints_json=False)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(options: argparse.Namespace) -> None:
    """Print the script for the shell.

    Raises:
        ImportError: shtab is not installed.
    """
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
