"""Shared by the writers: optional packages, file names, and the ids under which services know a run."""

from __future__ import annotations

import importlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chainring import _random
from chainring._files import parse_strict, read_regular, replace_file
from chainring._messages import warn
from chainring.reporting.media import Image, Text

_LARGEST_DESCRIPTION = 1 << 16  # bytes


def import_optional(module: str, extra: str, writer: str) -> Any:
    """Import a package that is an optional dependency, or raise an `ImportError` that names the extra.

    Random numbers that it draws meanwhile do not change the run, whose seeds may be set already.
    """
    try:
        with _random.preserve_host_rng():
            return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{writer} writes with {module}, which cannot be imported ({error}): pip install 'chainring[{extra}]'"
        ) from error


def check_path(argument: str, path: str | os.PathLike[str]) -> str:
    """Return a path in the run's ``out``, or an absolute path, as a string."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(f"{argument} is a name in the run's out, or an absolute path; got {path!r}")
    return str(os.fspath(path))


def escape_fields(name: str) -> str:
    """Return a name for `Writer.writes`, where braces are fields."""
    return name.replace("{", "{{").replace("}", "}}")


def safe_name(key: str) -> str:
    """Return a key as a part of a file name; different keys have different names."""
    name = re.sub(r"[^\w-]", "_", key, flags=re.ASCII)[:60]
    return name if name == key else f"{name}-{zlib.crc32(key.encode('utf-8', 'surrogatepass')):08x}"


def text_of(media: Text) -> str:
    """Return a text that can be encoded: a lone surrogate becomes an escape."""
    return media.text.encode("utf-8", "backslashreplace").decode()


def pixels_of(media: Image) -> Any:
    """Return the pixels as services take them, those of a grey image in two dimensions."""
    return media.pixels if media.pixels.shape[2] > 1 else media.pixels[:, :, 0]


def save_service_run(path: Path, description: Mapping[str, Any]) -> None:
    """Save the id under which a service knows the run, so that a resumed run continues under the same id."""
    replace_file(path, json.dumps(description) + "\n")


def load_service_run(path: Path) -> dict[str, Any]:
    """Return what `save_service_run` saved; empty if there is nothing that can be read."""
    try:
        description = parse_strict(read_regular(path, _LARGEST_DESCRIPTION))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        description = error
    if not isinstance(description, dict):
        warn(f"{path} does not hold the id of a run, and will be replaced: {description}")
        return {}
    return description
