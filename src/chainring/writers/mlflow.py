"""MlflowWriter: the rows of a log as metrics of a run of MLflow."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chainring._media import Histogram, Image, Text, media_to_json
from chainring.writers._common import import_optional, load_service_run, safe_name, save_service_run
from chainring.writers.base import Record, Run, Writer, media_of, scalars

_FILE = "mlflow_run.json"
_METRICS, _PARAMS = 1000, 100  # the most in one request


class MlflowWriter(Writer):
    """Sends each row to MLflow: every number of it as a metric, at the step of its iteration.

    The run's id is kept in ``out/mlflow_run.json``, so a resumed run goes on under the same id. Each row arrives at least
    once: a resumed run sends the earlier rows that MLflow lacks, and a row that is computed again is sent again, at the
    same step. The config becomes the parameters; MLflow does not let them change, so those of the first start stay. Its
    databases hold infinity as the largest double. Images, texts and histograms are artifacts, PNG, text and JSON files in
    ``media/<iteration>``. A run that the script has begun with ``mlflow.start_run`` is another one
    and is left alone.

    Example::

        writer = MlflowWriter("sqlite:///mlflow.db", experiment="digits")
        trainer.extend(extensions.LogReport(writers=[writer]))

    Args:
        tracking_uri: of the runs, such as ``"sqlite:////home/me/mlflow.db"`` or ``"https://host"``; by default that of
            ``mlflow.get_tracking_uri``.
        experiment: its name; it is created if it does not exist. By default the one that ``MLFLOW_EXPERIMENT_NAME`` or
            ``MLFLOW_EXPERIMENT_ID`` names, or else MLflow's default.

    Raises:
        ImportError: mlflow is not installed.
    """

    writes: Sequence[str] = (_FILE,)

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._mlflow = import_optional("mlflow", "mlflow", "MlflowWriter")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._run_id: str | None = None

    def begin(self, run: Run) -> None:
        self._client = self._mlflow.MlflowClient(self._tracking_uri)
        service = {"tracking_uri": self._client.tracking_uri, "experiment": self._experiment}
        saved = load_service_run(run.out / _FILE)
        if saved.get("run_id") is not None and service.items() <= saved.items():
            self._run_id = saved["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._create()
            save_service_run(run.out / _FILE, {"run_id": self._run_id, **service})
        known = self._client.get_run(self._run_id).data.params
        param = self._mlflow.entities.Param
        params = [param(str(key), str(value)) for key, value in run.config.items() if str(key) not in known]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS])
        sent = {metric.step for metric in self._client.get_metric_history(self._run_id, "elapsed_time")}
        for record in run.records:
            if record.iteration not in sent:
                self.write(record)

    def write(self, record: Record) -> None:
        if self._run_id is None:
            self._client = self._mlflow.MlflowClient(self._tracking_uri)
            self._create()
        metric, now = self._mlflow.entities.Metric, int(1000 * time.time())
        metrics = [metric(key, value, now, record.iteration) for key, value in scalars(record).items()]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS])
        for key, media in media_of(record).items():
            self._send(f"media/{record.iteration:08d}/{safe_name(key)}", media)

    def _send(self, path: str, media: Image | Text | Histogram) -> None:
        if isinstance(media, Image):
            folder, _, name = path.rpartition("/")
            with tempfile.TemporaryDirectory(prefix="chainring-mlflow-") as scratch:
                (Path(scratch) / f"{name}.png").write_bytes(media.png())
                self._client.log_artifact(self._run_id, str(Path(scratch) / f"{name}.png"), folder)
        elif isinstance(media, Text):
            self._client.log_text(self._run_id, media.text.encode("utf-8", "backslashreplace").decode(), f"{path}.txt")
        else:
            self._client.log_dict(self._run_id, media_to_json(media), f"{path}.json")

    def close(self) -> None:
        run_id, self._run_id = self._run_id, None
        if run_id is not None:
            self._client.set_terminated(run_id)

    def _create(self) -> None:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")  # 0 is MLflow's default experiment
        else:
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id = self._client.create_run(experiment_id).info.run_id
