"""The interface of writers, which receive the rows of a log, the records that they receive, and what several share."""

from __future__ import annotations

import importlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from chainring import _random
from chainring._files import is_url, parse_strict, read_regular, replace_file
from chainring._messages import warn
from chainring.reporting.media import Image, Media, Text

_LARGEST_DESCRIPTION = 1 << 16  # bytes

COUNTERS = ("epoch", "iteration", "elapsed_time")
"""The keys of a row that are not means of reported values."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a log.

    Example::

        record = Record(epoch=1, iteration=500, elapsed_time=2.5, values={"main/loss": 0.3})
        record.values["main/loss"]

    Attributes:
        epoch: the number of completed epochs.
        iteration: the number of completed updates.
        elapsed_time: the seconds of training, including those before a resume.
        values: the means of the interval by key.
        media: the images, texts and histograms of the interval by key.
    """

    epoch: int
    iteration: int
    elapsed_time: float
    values: Mapping[str, float]
    media: Mapping[str, Media] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """The run whose rows a writer will receive.

    Example::

        CsvWriter().begin(Run(Path("result"), config={"lr": 0.1}))

    Attributes:
        out: the directory of the run. A relative file name is resolved there.
        config: the settings of the run.
        iteration: the number of completed updates. Existing rows of later iterations belong to updates that this run does
            not continue from.
        records: the rows so far, if the run continues an earlier one.
    """

    out: Path = Path()
    config: Mapping[str, Any] = field(default_factory=dict)
    iteration: int = 0
    records: Sequence[Record] = ()


class Writer:
    """Base class of writers, which receive the rows of a `LogReport` one by one. Define `write`; all else is optional.

    Example::

        class Printer(Writer):
            def write(self, record):
                print(record.iteration, dict(record.values))

        extensions.LogReport(writers=[Printer()])

    Attributes:
        writes: the names of the files that it writes into the run's directory, as in `Extension.writes`.
    """

    writes: Sequence[str] = ()

    def begin(self, run: Run) -> None:
        """Prepare for the first row; called again after `close` if the same run returns to a snapshot."""

    def write(self, record: Record) -> None:
        """Write one row.

        Raises:
            NotImplementedError: a subclass has not defined it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define write(record)")

    def close(self) -> None:
        """Close files and connections; called once, when the run ends."""


class ServiceWriter(Writer):
    """A writer to a service. Its one file has what a resumed run needs to continue under the same id there."""

    def _save(self, run: Run, description: Mapping[str, Any]) -> None:
        replace_file(run.out / self.writes[0], json.dumps(description) + "\n")

    def _load(self, run: Run) -> dict[str, Any]:
        """Return what was saved; empty if there is nothing that can be read."""
        path = run.out / self.writes[0]
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


def counters_of(record: Record) -> dict[str, float]:
    """Return epoch, iteration and elapsed time by key."""
    return {key: getattr(record, key) for key in COUNTERS}


def media_of(record: Record) -> dict[str, Media]:
    """Return the images, texts and histograms of a row by key, with their kind where a number has the key too."""
    taken = {*record.values, *COUNTERS}
    return {f"{key}/{media.kind}" if key in taken else key: media for key, media in record.media.items()}


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a row by key, epoch and time included, for services that take nothing but numbers."""
    row = {**record.values, **counters_of(record)}
    return {key: float(value) for key, value in row.items() if isinstance(value, Real) and key != "iteration"}


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
    if is_url(path):
        raise ValueError(f"{argument} is a name in the run's out, and {path} is an address; give it as the run's out")
    return str(os.fspath(path))


def escape_fields(name: str) -> str:
    """Return a name for `Writer.writes`, where braces are fields."""
    return name.replace("{", "{{").replace("}", "}}")


def safe_name(key: str) -> str:
    """Return a key as a part of a file name; different keys have different names."""
    name = re.sub(r"[^\w-]", "_", key, flags=re.ASCII)[:60]
    return name if name == key else f"{name}-{checksum(key)}"


def checksum(key: str) -> str:
    """Return a checksum of a key, for names that differ where keys do."""
    return f"{zlib.crc32(key.encode('utf-8', 'surrogatepass')):08x}"


def text_of(media: Text) -> str:
    """Return a text that can be encoded: a lone surrogate becomes an escape."""
    return media.text.encode("utf-8", "backslashreplace").decode()


def pixels_of(media: Image) -> Any:
    """Return the pixels as services take them, those of a grey image in two dimensions."""
    return media.pixels if media.pixels.shape[2] > 1 else media.pixels[:, :, 0]
