"""The version, and with what a run computes: the versions of libraries, and the accelerator."""

from __future__ import annotations

import functools
import platform

import numpy
import torch

__version__ = "0.1.0"


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
