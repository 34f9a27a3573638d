"""What the results of a run depend on besides its code, its settings and its data."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from chainring._version import __version__


@functools.cache
def versions() -> dict[str, str]:
    """The versions of what computes and of what writes."""
    return {
        "chainring": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def device_name() -> str:
    """The kind of accelerator at hand, with its name where it has one, or ``"cpu"``."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return "cpu"
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda: "")()
    return f"{kind.type} {name}".strip()


@functools.cache
def git_commit() -> str | None:
    """The commit of the repository in which the running script lies, or ``None``."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    place = script.parent if script.is_file() else Path.cwd()
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
