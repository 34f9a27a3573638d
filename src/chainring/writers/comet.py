"""CometWriter: logs to Comet, as an experiment."""

from __future__ import annotations

import glob
import inspect
import io
import json
import os
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainring.reporting.media import Image, Text, media_to_json
from chainring.writers.base import Record, Run, ServiceWriter, import_optional, media_of, safe_name, scalars, text_of

_ROWS_ONLY = dict.fromkeys(
    ("auto_metric_logging", "auto_param_logging", "auto_output_logging", "log_graph", "parse_args", "auto_log_co2"), False
)


class CometWriter(ServiceWriter):
    """Sends each row to Comet: every number as a metric, with the iteration as the step.

    Comet cannot delete a metric, so each start of the run is a separate experiment with all rows so far. Its key is in
    ``out/comet_run.json``. The config becomes the parameters. Images and texts are sent as such, histograms as JSON files.

    ``CometWriter(online=False)`` needs neither a key nor a network: the experiment is an archive in ``out/comet``, which
    ``comet upload`` sends later; archives of earlier starts are removed when the run ends. An experiment that the script
    has started is ended. Comet's automatic logging is off, unless the settings turn it on.

    Example::

        trainer.extend(extensions.LogReport(writers=[CometWriter(project_name="digits", online=False)]))

    Args:
        **settings: arguments of ``comet_ml.start``, such as ``project_name="digits"`` or ``api_key``, and of
            ``comet_ml.ExperimentConfig``, such as ``name="baseline"``; they take precedence.

    Raises:
        ImportError: comet_ml is not installed.
        TypeError: a setting is an argument of neither.
    """

    writes: Sequence[str] = ("comet_run.json",)

    def __init__(self, **settings: Any) -> None:
        self._comet = import_optional("comet_ml", "comet", "CometWriter")
        of_start = inspect.signature(self._comet.start).parameters
        self._start = {key: value for key, value in settings.items() if key in of_start}
        self._config = {key: value for key, value in settings.items() if key not in of_start}
        if unknown := self._config.keys() - inspect.signature(self._comet.ExperimentConfig).parameters:
            raise TypeError(
                "settings of CometWriter are arguments of comet_ml.start or comet_ml.ExperimentConfig, "
                f"and {sorted(unknown)} are of neither"
            )
        self._experiment: Any = None
        self._archives: Path | None = None  # where those of the run are
        self._earlier: list[str] = []  # the keys of experiments of earlier starts

    def begin(self, run: Run) -> None:
        self._archives = Path(self._config.get("offline_directory") or run.out / "comet")
        earlier = self._load(run).get("archives", [])
        key = str(self._start.get("experiment_key") or os.environ.get("COMET_EXPERIMENT_KEY") or uuid.uuid4().hex)
        self._earlier = [str(earlier_key) for earlier_key in earlier if earlier_key != key]
        # Before Comet has it, because an archive is begun at once, also by a process that is killed then.
        self._save(run, {"key": key, "archives": [*self._earlier, key]})
        self._open(key)
        self._experiment.log_parameters({str(name): value for name, value in run.config.items()})
        for record in run.records:
            self.write(record)

    def _open(self, key: str | None = None) -> None:
        settings = {"experiment_key": key, **self._start}
        if "experiment_config" not in settings:
            folder = {}
            if settings.get("online") is False and self._archives is not None:
                self._archives.mkdir(parents=True, exist_ok=True)
                folder = {"offline_directory": str(self._archives)}
            settings["experiment_config"] = self._comet.ExperimentConfig(**{**_ROWS_ONLY, **folder, **self._config})
        self._experiment = self._comet.start(**{"mode": "create", **settings})

    def write(self, record: Record) -> None:
        if self._experiment is None:
            self._open()
        self._experiment.log_metrics(scalars(record), step=record.iteration, epoch=record.epoch)
        for key, media in media_of(record).items():
            if isinstance(media, Image):
                self._experiment.log_image(io.BytesIO(media.png()), name=key, step=record.iteration)
            elif isinstance(media, Text):
                self._experiment.log_text(text_of(media), step=record.iteration, metadata={"key": key})
            else:
                name = f"media/{record.iteration:08d}/{safe_name(key)}.json"
                self._experiment.log_asset_data(json.dumps(media_to_json(media)), name=name, step=record.iteration)

    def close(self) -> None:
        experiment, self._experiment = self._experiment, None
        if experiment is None:
            return
        experiment.end()
        if any(map(zipfile.is_zipfile, self._archives_of(experiment.get_key()))):
            for path in [path for key in self._earlier for path in self._archives_of(key)]:
                path.unlink(missing_ok=True)

    def _archives_of(self, key: str) -> list[Path]:
        return [] if self._archives is None else [*self._archives.glob(f"{glob.escape(key)}*.zip")]
