"""MlflowWriter: logs to MLflow, as metrics of a run."""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chainring._messages import info, warn
from chainring.reporting.media import Image, Text, media_to_json
from chainring.writers.base import (
    Record,
    Run,
    ServiceWriter,
    checksum,
    import_optional,
    media_of,
    safe_name,
    scalars,
    text_of,
)

_METRICS, _PARAMS = 1000, 100  # the most in one request
_LONGEST = 250  # characters of a name
_TAG = "chainring.run"
_FIRST, _LAST = "epoch", "elapsed_time"  # of the numbers of a row, those that are sent first and last


class MlflowWriter(ServiceWriter):
    """Sends each row to MLflow: every number as a metric, with the iteration as the step.

    A resumed run continues under the same id, which is in ``out/mlflow_run.json``, and each row is logged once. MLflow
    cannot delete rows: if it has some of updates that are computed again, a new run with all rows so far, and the same
    name, tags and parameters, replaces the earlier one, which ``MlflowClient.restore_run`` restores.

    The config of the first start becomes the parameters. Images, texts and histograms are artifacts: PNG, text and JSON
    files in ``media/<iteration>``. A key that MLflow refuses, such as ``top@5``, is sent as ``top_5-`` and a checksum, with
    a warning. A run that the script has started with ``mlflow.start_run`` is not used.

    Example::

        writer = MlflowWriter("sqlite:///mlflow.db", experiment="digits")
        trainer.extend(extensions.LogReport(writers=[writer]))

    Args:
        tracking_uri: the tracking server or database, such as ``"sqlite:////home/me/mlflow.db"`` or ``"https://host"``;
            by default that of ``mlflow.get_tracking_uri``.
        experiment: the name of the experiment, which is created if it does not exist. By default the one given by
            ``MLFLOW_EXPERIMENT_NAME`` or ``MLFLOW_EXPERIMENT_ID``, or MLflow's default.

    Raises:
        ImportError: mlflow is not installed.
    """

    writes: Sequence[str] = ("mlflow_run.json",)

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._mlflow = import_optional("mlflow", "mlflow", "MlflowWriter")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._run_id: str | None = None
        self._names: dict[str, str] = {}  # by key, of those so far

    def begin(self, run: Run) -> None:
        self._client = self._mlflow.MlflowClient(self._tracking_uri)
        service = {"tracking_uri": self._client.tracking_uri, "experiment": self._experiment}
        saved = self._load(run)
        if not service.items() <= saved.items():
            saved = {}
        # A tag that is saved before any run is made tells of runs that a killed process had no time to save the id of.
        tag, run_id = saved.get("tag") or uuid.uuid4().hex, saved.get("run_id")
        description = {"run_id": run_id, "tag": tag, **service}
        self._save(run, description)
        known = {} if run_id is None else {run_id: self._client.get_run(run_id)}
        experiment_id = known[run_id].info.experiment_id if known else self._experiment_id()
        tagged = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{tag}'")
        earlier = {*known, *(started.info.run_id for started in tagged)}
        sent = None if run_id is None else self._sent(run_id, run.iteration)
        if sent is None:
            self._run_id = self._create(experiment_id, tag, known.get(run_id))
        else:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
        self._send_params(run.config)
        self._send_rows([record for record in run.records if sent is None or record.iteration not in sent])
        self._save(run, {**description, "run_id": self._run_id})
        for replaced in earlier - {self._run_id}:
            self._client.delete_run(replaced)

    def _sent(self, run_id: str, iteration: int) -> set[int] | None:
        """Return the steps of the rows that the run has, if it has no others and none in part; otherwise ``None``."""
        first, last = ([metric.step for metric in self._client.get_metric_history(run_id, key)] for key in (_FIRST, _LAST))
        names = [Path(file.path).name for file in self._client.list_artifacts(run_id, "media")]
        media = [int(name) for name in names if name.isdecimal()]
        is_whole = len(set(first)) == len(first) and sorted(first) == sorted(last)
        return set(last) if is_whole and max([*first, *media], default=0) <= iteration else None

    def _send_params(self, config: Mapping[str, Any]) -> None:
        known = self._client.get_run(self._run_id).data.params
        param = self._mlflow.entities.Param
        named = {self._name(str(key)): str(value) for key, value in config.items()}
        params = [param(name, value) for name, value in named.items() if name not in known]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS])

    def write(self, record: Record) -> None:
        if self._run_id is None:
            self._client = self._mlflow.MlflowClient(self._tracking_uri)
            self._run_id = self._create(self._experiment_id(), uuid.uuid4().hex)
        self._send_rows([record])

    def _send_rows(self, records: Sequence[Record]) -> None:
        """Send the media of rows, then their numbers, of which those that `_sent` looks for are the first and the last."""
        metric, metrics = self._mlflow.entities.Metric, []
        for record in records:
            for key, media in media_of(record).items():
                folder, name = f"media/{record.iteration:08d}", safe_name(key)
                if isinstance(media, Image):
                    with tempfile.TemporaryDirectory(prefix="chainring-mlflow-") as scratch:
                        path = Path(scratch, f"{name}.png")
                        path.write_bytes(media.png())
                        self._client.log_artifact(self._run_id, str(path), folder)
                elif isinstance(media, Text):
                    self._client.log_text(self._run_id, text_of(media), f"{folder}/{name}.txt")
                else:
                    self._client.log_dict(self._run_id, media_to_json(media), f"{folder}/{name}.json")
            ago = records[-1].elapsed_time - record.elapsed_time  # the times of earlier rows are as far apart as they were
            values, time_ms = scalars(record), int(1000 * (time.time() - ago))
            ordered = {_FIRST: values.pop(_FIRST), **values, _LAST: values[_LAST]}
            metrics += [metric(self._name(key), value, time_ms, record.iteration) for key, value in ordered.items()]
        for start in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS])

    def _name(self, key: str) -> str:
        """Return a key if it is a name that MLflow takes, which is a path too; otherwise a name of its own for it."""
        if key not in self._names:
            path = "/".join(part for part in re.sub(r"[^/\w.\- :]", "_", key).split("/") if part.strip("."))
            path = re.sub(r"^\.\.+", "", path)  # nor one that seems to lead out of a folder
            name = path if path and path == key and len(key) <= _LONGEST else f"{path[: _LONGEST - 9]}-{checksum(key)}"
            self._names[key] = name
            if name != key:
                rule = f"MLflow takes letters, digits, spaces and _ - . : / in names, at most {_LONGEST}"
                warn(f"{rule}: {key!r} is sent as {name!r}")
        return self._names[key]

    def close(self) -> None:
        run_id, self._run_id = self._run_id, None
        if run_id is not None:
            self._client.set_terminated(run_id)

    def _experiment_id(self) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")  # 0 is MLflow's default experiment
        experiment = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if experiment is None else experiment.experiment_id)

    def _create(self, experiment_id: str, tag: str, earlier: Any = None) -> str:
        """Create a run; one that replaces an ``earlier`` one has its name, tags and parameters."""
        if earlier is None:
            return str(self._client.create_run(experiment_id, tags={_TAG: tag}).info.run_id)
        tags = {**earlier.data.tags, _TAG: tag}
        run_id = str(self._client.create_run(experiment_id, tags=tags, run_name=earlier.info.run_name).info.run_id)
        info(
            f"MLflow cannot delete rows, and has rows of later iterations than this run resumes from: run "
            f"{earlier.info.run_id} there is replaced by {run_id}, and deleted; MlflowClient.restore_run restores it"
        )
        self._run_id = run_id
        self._send_params(earlier.data.params)
        return run_id
