"""Where a writer finds what it writes with, and where it writes."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring._files import replace


def optional(module: str, extra: str, writer: str) -> Any:
    """Imports a package that not everybody has installed.

    Raises:
        ImportError: it cannot be imported; the error names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{writer} writes with {module}, which cannot be imported ({error}): pip install 'chainring[{extra}]'"
        ) from error


def checked_name(what: str, name: Any) -> str:
    """A name in the run's ``out``, or an absolute path.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise TypeError(f"{what} is a name in the run's out, or an absolute path; got {name!r}")
    return str(os.fspath(name))


def template(name: str) -> str:
    """A name as `Extension.writes` has it, where braces are fields."""
    return name.replace("{", "{{").replace("}", "}}")


def remember(path: Path, facts: Mapping[str, Any]) -> None:
    """Keeps in the run's ``out`` under which id a service knows the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, (json.dumps(facts) + "\n").encode())


def remembered(path: Path) -> dict[str, Any]:
    """What `remember` kept; empty where there is nothing that can be read."""
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        facts = error
    if not isinstance(facts, dict):
        warnings.warn(f"{path} is passed over and written anew, because it is not what was written: {facts}", stacklevel=2)
        return {}
    return facts
