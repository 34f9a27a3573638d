"""WandbWriter: logs to Weights & Biases, as a run."""

from __future__ import annotations

import glob
import html
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chainring._files import set_aside
from chainring._messages import warn
from chainring.reporting.media import Image, Media, Text
from chainring.writers.base import Record, Run, ServiceWriter, counters_of, import_optional, media_of, pixels_of


class WandbWriter(ServiceWriter):
    """Sends each row to Weights & Biases (W&B), with ``iteration`` as the x-axis of its curves.

    A resumed run continues under the same id, which is in ``out/wandb_run.json``, and sends the rows that W&B lacks. Rows
    that are computed again after a kill are there once offline, ``WandbWriter(mode="offline")`` and ``wandb sync``; online
    they are sent again, with a warning, because W&B cannot delete rows. ``iteration`` is correct in every row. The run's
    config is the trainer's. A run that the script has started with ``wandb.init`` is used as it is, and is left open.

    Example::

        trainer.extend(extensions.LogReport(writers=[WandbWriter(project="digits")]))

    Args:
        **init: arguments of ``wandb.init``, such as ``project="digits"``; they take precedence.

    Raises:
        ImportError: wandb is not installed.
    """

    writes: Sequence[str] = ("wandb_run.json",)

    def __init__(self, **init: Any) -> None:
        self._wandb = import_optional("wandb", "wandb", "WandbWriter")
        self._init = init
        self._run: Any = None
        self._owns = False

    def begin(self, run: Run) -> None:
        self._owns = self._wandb.run is None
        run_id = self._load(run).get("id")
        settings = {"dir": str(run.out), "config": dict(run.config), **self._init}
        if run_id is not None and _is_kept(Path(settings["dir"]), str(run_id)):
            settings = {"id": run_id, "resume": "allow", **settings}
        given = self._init.get("settings")  # a new id is that which W&B would take from its settings or the environment
        given = given.get("run_id") if isinstance(given, Mapping) else getattr(given, "run_id", None)
        settings.setdefault("id", given or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(6))
        if self._owns:  # before W&B has it, so that a kill leaves no run behind that is nobody's
            self._save(run, {"id": settings["id"]})
        self._open(settings)
        if run.iteration and self._run.step > run.iteration + 1:
            warn(
                f"W&B cannot delete rows, and has those of run {self._run.id} up to step {self._run.step - 1}; the run goes "
                f"back to iteration {run.iteration}, so later ones will be there twice. WandbWriter(mode='offline'), and "
                "wandb sync at the end, send each row once",
            )
        for record in run.records:
            if record.iteration >= self._run.step:  # a kill loses what W&B has not sent yet
                self.write(record)

    def write(self, record: Record) -> None:
        if self._run is None:
            self._open(self._init)
        step = record.iteration if record.iteration >= self._run.step else None
        media = {key: self._convert(item) for key, item in media_of(record).items()}
        self._run.log({**record.values, **counters_of(record), **media}, step=step, commit=True)

    def _convert(self, media: Media) -> Any:
        """Return an image, a text or a histogram as W&B's own; the numbers of an empty histogram are none."""
        if isinstance(media, Image):
            return self._wandb.Image(pixels_of(media))
        if isinstance(media, Text):
            return self._wandb.Html(f"<pre>{html.escape(media.text)}</pre>")
        return self._wandb.Histogram(np_histogram=(list(media.counts), list(media.edges))) if media.counts else None

    def _open(self, settings: Mapping[str, Any]) -> None:
        self._owns = self._wandb.run is None
        self._run = self._wandb.init(**settings) if self._owns else self._wandb.run
        self._run.define_metric("*", step_metric="iteration")

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._owns:
            run.finish()


def _is_kept(directory: Path, run_id: str) -> bool:
    """Set the offline folders of a run aside, whose rows a new one will have; return False if one was sent already."""
    folders = [*directory.glob(f"wandb/offline-run-*-{glob.escape(run_id)}")]
    if any(any(folder.glob("*.synced")) for folder in folders):
        return False
    for folder in folders:
        set_aside(folder)
    return True
