"""Files that are whole whenever they are opened."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Puts a file with this content in the place of what is there, by one rename."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_bytes(content)
    os.replace(beside, path)
