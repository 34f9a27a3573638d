"""The environment of a run: versions, accelerator, and the commit of the script."""

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
    """Return the versions of Chainring and of what it computes with."""
    return {
        "chainring": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


@functools.cache
def device_name(device: torch.device | None = None) -> str:
    """Return the type of a device, with its name if it has one; by default of the accelerator at hand, or ``"cpu"``."""
    if device is not None and device.type == "cpu":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu"
    name = getattr(torch.get_device_module(accelerator), "get_device_name", lambda: "")()
    return f"{accelerator.type} {name}".strip()


@functools.cache
def git_commit() -> str | None:
    """Return the commit of the repository in which the running script lies, or ``None``."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    directory = script.parent if script.is_file() else Path.cwd()
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
