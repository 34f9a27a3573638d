"""WandbWriter: the rows of a log as a run of Weights & Biases."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from chainring._media import Image, Media, Text
from chainring.writers._common import import_optional, load_service_run, save_service_run
from chainring.writers.base import Record, Run, Writer, counters_of, media_of

_FILE = "wandb_run.json"


class WandbWriter(Writer):
    """Sends each row to Weights & Biases, whose curves are drawn over ``iteration``.

    The run's id is kept in ``out/wandb_run.json``, so a resumed run goes on under the same id; the run's config is the
    trainer's. Each row arrives at least once: a resumed run sends the earlier rows that W&B lacks, and a row that is
    computed again is sent again. W&B's own step is the iteration, and because it only grows, a row sent again gets the next
    step; ``iteration`` is right in every row. A run that the script has begun with ``wandb.init`` is used as it is, and is
    left open.

    W&B writes its own files into ``out/wandb``. ``WandbWriter(mode="offline")`` or ``WANDB_MODE=offline`` needs no network
    and does not prompt; each start has a folder there, with all rows so far, which ``wandb sync`` sends later. Online,
    without a login, W&B prompts or fails as ``wandb.init`` does.

    Example::

        trainer.extend(extensions.LogReport(writers=[WandbWriter(project="digits")]))

    Args:
        **init: arguments of ``wandb.init``, such as ``project="digits"``; they take precedence.

    Raises:
        ImportError: wandb is not installed.
    """

    writes: Sequence[str] = (_FILE,)

    def __init__(self, **init: Any) -> None:
        self._wandb = import_optional("wandb", "wandb", "WandbWriter")
        self._init = init
        self._run: Any = None
        self._owns = False

    def begin(self, run: Run) -> None:
        run_id = load_service_run(run.out / _FILE).get("id")
        resume = {} if run_id is None else {"id": run_id, "resume": "allow"}
        self._open({"dir": str(run.out), "config": dict(run.config), **resume, **self._init})
        if self._owns:
            save_service_run(run.out / _FILE, {"id": self._run.id})
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
            return self._wandb.Image(media.pixels if media.pixels.shape[2] > 1 else media.pixels[:, :, 0])
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
