"""An accelerator that is not there: see README.md.

In a process that `stand_in.start.before_torch` has prepared, as `sitecustomize.py` does in the processes of ``make device``,
``import torch`` finds two devices more.
"""

import re
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

NAME = ""
"""That of the device: ``cuda``, or ``standin``."""

native: Any = None
"""The part in C++, once torch is imported."""

WAITS = (
    "to_device",
    "to_host",
    "to_host_unpinned",
    "number",
    "size",
    "synchronize_device",
    "synchronize_stream",
    "synchronize_event",
)
"""What the host waits for: copies that block, numbers and sizes that it reads, and what waits by name."""


class Where(NamedTuple):
    kind: str
    about: str
    line: str
    """The innermost line of Chainring, or else of the caller."""


class Counts(dict[str, int]):
    """How often what happened, without what did not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.where: Counter[Where] = Counter()

    @property
    def waits(self) -> dict[str, int]:
        return {kind: number for kind, number in self.items() if kind in WAITS}


class counting:  # noqa: N801 - used as a statement
    """What happens on the devices within: ``with counting() as counts``, and ``counts["to_host"]`` is known afterwards.

    Each copy, each wait and each collective has the line that it comes from, in ``counts.where``.
    """

    def __enter__(self) -> Counts:
        self._counts, self._before = Counts(), native.tallies()
        native.set_observer(self._observe)
        return self._counts

    def __exit__(self, *_: object) -> None:
        native.set_observer(None)
        for kind, (number, size) in native.tallies().items():
            before, size_before = self._before.get(kind, (0, 0))
            if number > before:
                self._counts[kind], self._counts.bytes[kind] = number - before, size - size_before

    def _observe(self, kind: str, about: str, _: int) -> None:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe())]
        callers = [frame for frame in frames if not re.search(r"/torch/|/stand_in/", frame[0])]
        ours = [frame for frame in callers if "/chainring/" in frame[0]]
        file, line = [*ours, *callers, ("?", 0)][0]
        self._counts.where[Where(kind, about, f"{Path(file).name}:{line}")] += 1
