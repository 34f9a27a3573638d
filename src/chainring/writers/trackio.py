"""TrackioWriter: logs to Trackio, as a run."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from chainring.reporting.media import Image, Media, Text
from chainring.writers.base import Record, Run, ServiceWriter, counters_of, import_optional, media_of, pixels_of, text_of

_REMOTE = ("space_id", "server_url")  # arguments of init, and variables of the environment with TRACKIO_ before


class TrackioWriter(ServiceWriter):
    """Sends each row to Trackio, with the iteration as the step. Its database is local, so no network is needed.

    A resumed run continues as the same run, whose id is in ``out/trackio_run.json``, and each row is logged once. Trackio
    cannot delete rows: where it has some of updates that are computed again, and with ``space_id`` or ``server_url`` at
    each start, the run begins again there with all rows so far. The config is the trainer's. A run that the script has
    started with ``trackio.init`` is ended.

    Example::

        trainer.extend(extensions.LogReport(writers=[TrackioWriter(project="digits")]))

    Args:
        **init: arguments of ``trackio.init``, such as ``project="digits"`` or ``name="baseline"``; they take precedence. The
            project is ``"uncategorized"`` by default.

    Raises:
        ImportError: trackio is not installed.
    """

    writes: Sequence[str] = ("trackio_run.json",)

    def __init__(self, **init: Any) -> None:
        self._trackio = import_optional("trackio", "trackio", "TrackioWriter")
        self._init = {"project": "uncategorized", **init}
        self._run: Any = None

    def begin(self, run: Run) -> None:
        saved = self._load(run)
        if saved.get("project") != self._init["project"]:
            saved = {}
        name = self._init.get("name") or saved.get("name")
        sent = self._keep(saved, name, run.iteration)
        config = {str(key): value for key, value in run.config.items()}
        settings = {"config": config, "name": name, "resume": "never" if sent is None else "must", **self._init}
        self._run = self._trackio.init(**settings)
        described = {"project": self._run.project, "name": self._run.name, "run_id": self._run.id}
        self._save(run, described)
        for record in run.records:
            if sent is None or record.iteration not in sent:
                self.write(record)

    def _keep(self, saved: Mapping[str, Any], name: Any, iteration: int) -> set[int] | None:
        """Return the steps that the run of the start before has, if it can continue; ``None`` without it.

        Otherwise that run is deleted: Trackio knows runs by their names, and has no way to take out single rows.
        """
        if any(self._init.get(key) or os.environ.get(f"TRACKIO_{key.upper()}") for key in _REMOTE):
            return None
        try:
            runs = [run for run in self._trackio.Api().runs(self._init["project"]) if run.name == name]
        except ValueError:  # there is no such project
            return None
        earlier = next((run for run in runs if run.id == saved.get("run_id")), None)
        if earlier is None:
            return None
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        steps = [row["step"] for row in storage.get_logs(self._init["project"], name, run_id=earlier.id)]
        if len(runs) == 1 and len(set(steps)) == len(steps) and max(steps, default=0) <= iteration:
            return set(steps)
        earlier.delete()
        return None

    def write(self, record: Record) -> None:
        if self._run is None:
            self._run = self._trackio.init(**self._init)
        media = {key: self._convert(item) for key, item in media_of(record).items()}
        self._run.log({**record.values, **counters_of(record), **media}, step=record.iteration)

    def _convert(self, media: Media) -> Any:
        """Return an image, a text or a histogram as Trackio's own; a text as it is, in a block of Markdown."""
        if isinstance(media, Image):
            return self._trackio.Image(pixels_of(media))
        if isinstance(media, Text):
            text = text_of(media)
            fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text)), 3)
            return self._trackio.Markdown(f"{fence}\n{text}\n{fence}")
        return self._trackio.Histogram(np_histogram=(list(media.counts), list(media.edges)))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
