"""Kills of a run whose rows go to services: in the end each service's own store has each row exactly once."""

import hashlib
import json
import os
import random
import re
import sys
import time
import zipfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "writers"))  # where W&B's files are read

import torch
from attempts import LEFT, Settings, check_directory
from bench import Row

import chainring
from chainring import training, writers
from chainring.reporting.media import media_from_json
from chainring.training import extensions
from tries import WrongEndError

FILE = "sent"  # the log whose rows are sent
MOST = 6  # kills of one run
QUIET = {
    "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off",
    "HF_HUB_OFFLINE": "1", "COMET_LOGGING_CONSOLE": "ERROR", "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}  # fmt: skip


class Showing(training.Extension):
    """Reports an image, a text and a histogram in every third iteration; takes a moment, so that kills come between rows."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, trainer):
        k = trainer.updater.iteration
        if k % 3 == 0:
            chainring.report_image("picture", torch.full((3, 2, 4), k / 51))
            chainring.report_text("main/loss", f"<b> of {k}")
            chainring.report_histogram("weights", torch.arange(float(k)))
        time.sleep(random.Random(k).uniform(0, 2 * self.seconds))


class Telling(writers.Writer):
    """Tells when a writer is called, and when it has returned."""

    def __init__(self, writer, tell):
        self.writer, self.tell, self.writes = writer, tell, writer.writes

    def _call(self, name, method, *arguments):
        self.tell((f"calls {name}",))
        method(*arguments)
        self.tell((f"called {name}",))

    def begin(self, run):
        self._call("begin", self.writer.begin, run)

    def write(self, record):
        self._call(f"write {record.iteration}", self.writer.write, record)

    def close(self):
        self._call("close", self.writer.close)


def send(service, place, seconds, flushes, trainer, tell):
    """Adds a log whose rows go to a service, in the process of an attempt."""
    writer = service.make(place, flushes)
    trainer.extend(Showing(seconds), trigger=(1, "iteration"))
    log = extensions.LogReport(trigger=(2, "iteration"), filename=FILE, writers=[Telling(writer, tell)])
    trainer.extend(log, name="Sent")
    tell(("loaded",))


@dataclass(frozen=True)
class Place:
    """The directory of a try, and the rows that its log has in the end."""

    path: Path

    @property
    def out(self):
        return self.path / "out"

    @cached_property
    def rows(self):
        """The rows by iteration; in services infinities are words, the largest double or themselves, and none is here."""
        rows = [json.loads(line) for line in (self.out / f"{FILE}.jsonl").read_text().splitlines()]
        return {row["iteration"]: {key: value for key, value in row.items() if key != "iteration"} for row in rows}

    @cached_property
    def media(self):
        """The images, texts and histograms by iteration and key."""
        lines = [json.loads(line) for line in (self.out / f"{FILE}.media.jsonl").read_text().splitlines()]
        found = {line["iteration"]: {k: media_from_json(each) for k, each in line["media"].items()} for line in lines}
        if len(self.rows) != 15 or not all(each.keys() == {"picture", "main/loss", "weights"} for each in found.values()):
            raise WrongEndError(f"the log has {len(self.rows)} rows, and media of {found}")
        return found

    def own(self, file, key):
        """What a file with the id of a run says, of this run and of those that were begun before its first snapshot."""
        files = [self.out / file, *self.out.glob(f"previous/*/{file}")]
        own, *earlier = (json.loads(path.read_text()).get(key) for path in files)
        return own, set(earlier)

    def compare(self, found, what="rows"):
        """Rows as pairs of iteration and numbers, in any order, are those of the log, each once."""
        steps = Counter(step for step, _ in found)
        twice, lost = sorted(steps - Counter(set(steps))), sorted(self.rows.keys() - steps.keys())
        if twice or lost or steps.keys() != self.rows.keys():
            raise WrongEndError(f"{what}: {twice} are there twice, {lost} are not there, of {sorted(steps.elements())}")
        if differing := [(step, values, self.rows[step]) for step, values in found if values != self.rows[step]]:
            raise WrongEndError(f"{what} differ from the log: {differing[0]}")

    def compare_media(self, found):
        """Media as pairs of iteration and key, in any order, are those of the log, each once."""
        expected = sorted((step, key) for step, media in self.media.items() for key in media)
        if sorted(found) != expected:
            raise WrongEndError(f"media: {sorted(found)}, and the log has {expected}")


class Mlflow:
    """The real MLflow with a database of SQLite, as its client reads it."""

    def make(self, place, flushes):
        import warnings

        warnings.filterwarnings("ignore", module="sqlalchemy")
        return writers.MlflowWriter(f"sqlite:///{place}/mlflow.db", "killed")

    def prepare(self, bench, place):
        """Makes the tables beforehand: SQLite does not make them all at once."""
        os.environ.update(QUIET)
        self._client(place).create_experiment("killed", str(place / "artifacts"))
        return {}

    def _client(self, place):
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{place}/mlflow.db")

    def check(self, place):
        client = self._client(place.path)
        runs = client.search_runs([client.get_experiment_by_name("killed").experiment_id])
        (tag, earlier), (own, _) = place.own("mlflow_run.json", "tag"), place.own("mlflow_run.json", "run_id")
        runs = [run for run in runs if run.data.tags["chainring.run"] not in earlier]
        if [(run.info.run_id, run.data.tags["chainring.run"], run.info.status) for run in runs] != [(own, tag, "FINISHED")]:
            raise WrongEndError(f"the runs are {[(run.info.run_id, run.info.status) for run in runs]}, and its own is {own}")
        keys = runs[0].data.metrics.keys()
        points = [(metric.step, key, metric.value) for key in keys for metric in client.get_metric_history(own, key)]
        if len({point[:2] for point in points}) != len(points):
            raise WrongEndError(f"points are there twice: {sorted(points)}")
        steps = sorted({step for step, _, _ in points})
        place.compare([(step, {key: value for at, key, value in points if at == step}) for step in steps])
        found, folder = [], Path(client.download_artifacts(own, "media", str(place.path)))
        names = {"picture": "picture.png", "main/loss": "main_loss*.txt", "weights": "weights.json"}
        for path in folder.glob("*/*"):
            (key,) = (key for key, pattern in names.items() if path.match(pattern))
            found.append((int(path.parent.name), key))
            media = place.media[found[-1][0]][key]
            content = {"picture": lambda m: m.png(), "main/loss": lambda m: m.text.encode()}.get(key)
            if content and content(media) != path.read_bytes():
                raise WrongEndError(f"{path} has another content than the log")
        place.compare_media(found)


class Wandb:
    """The real W&B offline: what its files have that ``wandb sync`` would send, which takes each folder of ``out/wandb``."""

    def make(self, place, flushes):
        import wandb

        settings = wandb.Settings(x_transaction_log_flush_interval=0.1) if flushes else wandb.Settings()
        return writers.WandbWriter(project="killed", settings=settings)

    def prepare(self, bench, place):
        return {}

    def check(self, place):
        from offline import read

        logs = {path.resolve() for path in (place.out / "wandb").glob("*/*.wandb")}
        own, earlier = place.own("wandb_run.json", "id")
        contents = {path: read(path.parent) for path in logs}
        contents = {path: content for path, content in contents.items() if content[0] not in {None, *earlier}}
        if [content[0] for content in contents.values()] != [own]:
            raise WrongEndError(f"there are the runs {[content[0] for content in contents.values()]}, and its own is {own}")
        rows, media = [], []
        for path, (_, _, found) in contents.items():
            for row in found:
                step, keys = row["iteration"], [key for key in row if re.match("(picture|main/loss/text|weights)/", key)]
                numbers = {key: value for key, value in row.items() if key not in keys and not key.startswith("_")}
                rows.append((step, {key: value for key, value in numbers.items() if key != "iteration"}))
                media += [(step, key.removesuffix("/_type").removesuffix("/text")) for key in keys if key.endswith("/_type")]
                if row["_step"] != step:
                    raise WrongEndError(f"iteration {step} has the step {row['_step']}")
                for key in (key for key in keys if key.endswith("/path")):
                    content = (path.parent / "files" / row[key]).read_bytes()
                    if hashlib.sha256(content).hexdigest() != row[f"{key.removesuffix('path')}sha256"]:
                        raise WrongEndError(f"{row[key]} has another content than it had")
        place.compare(rows)
        place.compare_media(media)


class Trackio:
    """The real Trackio, as its reader reads its database."""

    def make(self, place, flushes):
        return writers.TrackioWriter(project=place.name, auto_log_cpu=False, auto_log_gpu=False)

    def prepare(self, bench, place):
        os.environ["TRACKIO_DIR"] = str(bench.root / "trackio")  # it is read once, when it is imported
        return {"TRACKIO_DIR": os.environ["TRACKIO_DIR"]}

    def check(self, place):
        from trackio.sqlite_storage import SQLiteStorage as Storage

        project, (own, earlier) = place.path.name, place.own("trackio_run.json", "run_id")
        runs = [run for run in Storage.get_run_records(project) if run["id"] not in earlier]
        if [run["id"] for run in runs] != [own]:
            raise WrongEndError(f"the runs are {runs}, and its own is {own}")
        rows, media = [], []
        for row in Storage.get_logs(project, runs[0]["name"], run_id=own):
            rows.append((row["step"], {k: v for k, v in row.items() if isinstance(v, (int, float)) and k != "step"}))
            if rows[-1][1].pop("iteration") != row["step"]:
                raise WrongEndError(f"the step of {row} is not its iteration")
            media += [(row["step"], key.removesuffix("/text")) for key, value in row.items() if isinstance(value, dict)]
        place.compare(rows)
        place.compare_media(media)


class Comet:
    """The real Comet offline: the archives that ``comet upload`` would send."""

    def make(self, place, flushes):
        return writers.CometWriter(online=False, log_code=False, log_git_metadata=False, log_env_details=False)

    def prepare(self, bench, place):
        return {}

    def check(self, place):
        own, earlier = place.own("comet_run.json", "key")
        # A start that was killed before its record was there belongs to the run of the next.
        for path in place.out.glob("previous/*/comet_run.json"):
            earlier.update(json.loads(path.read_text())["archives"])
        files = [path for path in (place.out / "comet").glob("*.zip") if path.stem not in earlier]
        if [path.stem for path in files] != [own]:
            raise WrongEndError(f"there are the archives {files}, and its own is {own}; of runs before there are {earlier}")
        with zipfile.ZipFile(files[0]) as archive:
            sent = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
        points = [message["payload"]["metric"] for message in sent if message["type"] == "metric_msg"]
        found = [(point["step"], point["metricName"], point["metricValue"]) for point in points]
        found = [point for point in found if point[1] != "process duration"]  # is Comet's own
        if len({point[:2] for point in found}) != len(found):
            raise WrongEndError(f"points are there twice: {sorted(found)}")
        steps = sorted({step for step, _, _ in found})
        place.compare([(step, {key: value for at, key, value in found if at == step}) for step in steps])
        kinds = {"visualization": "picture", "text-sample": "main/loss", "asset": "weights"}
        uploads = [message["payload"] for message in sent if message["type"] == "file_upload"]
        media = [(each["additional_params"]["step"], kinds[each["upload_type"]]) for each in uploads]
        place.compare_media([each for each in media if each[0] is not None])


SERVICES = (Mlflow(), Wandb(), Trackio(), Comet())


def kills(bench, number, draw, place):
    """Kills a run again and again, at random or while its writer is at work, until it completes; then runs it once more."""
    service, there = SERVICES[number % len(SERVICES)], Place(place)
    name = type(service).__name__
    (place / "tmp").mkdir()  # where killed processes leave what they have begun
    environment = QUIET | service.prepare(bench, place) | {"TMPDIR": str(place / "tmp")}
    counts, most, start = Counter(), draw.randint(1, MOST), "autoload"
    while True:
        seconds, flushes = draw.choice([0.0, 0.02, 0.05]), draw.random() < 0.5
        added = partial(send, service, place, seconds, flushes)
        settings = Settings(start=start, environment=environment, added=added, may_warn=True)
        with bench.attempt(place, settings) as attempt:
            if counts["kills"] == most or not _kill(attempt, draw, seconds):
                bench.compare(attempt.completed())
                break
        _check_gone(attempt)
        counts["kills"] += 1
        counts[f"of {name}"] += 1
        calls = {word.removeprefix("calls ") for word in attempt.messages if word.startswith("calls ")}
        counts["inside a write"] += any(f"called {call}" not in attempt.messages for call in calls)
        there_are = check_directory(there.out)
        start = draw.choice([min(there_are, key=there_are.get), "autoload", "autoload"]) if there_are else "autoload"
        counts["from an older snapshot"] += start != "autoload"
    _check_gone(attempt)
    _check_warnings(attempt)
    service.check(there)
    with bench.attempt(place, Settings(environment=environment, added=added, may_warn=True)) as attempt:
        bench.compare(attempt.completed())
    _check_gone(attempt)
    _check_warnings(attempt)
    service.check(Place(place))
    return counts + Counter({"runs completed": 1})


def _kill(attempt, draw, seconds):
    """Kills it at a random moment, in half of the cases in a call of the writer; false if it was over."""
    attempt.wait_for("loaded")
    if draw.random() < 0.5:
        call = draw.choice(["begin", "close", *(f"write {k}" for k in range(2, 31, 2))])
        attempt.wait_for(f"calls {call}")
        attempt.wait_for("ended", draw.expovariate(1 / 0.02))
    elif attempt.wait_for("running", draw.uniform(0, 3)):
        attempt.wait_for("ended", draw.uniform(0, 1 + 30 * seconds))
    if attempt.code is not None:
        return False
    attempt.kill()
    attempt.wait_for()
    return attempt.code < 0


def _check_gone(attempt):
    """W&B's process, which leads a session of its own, ends with the one that it is for."""
    until = time.monotonic() + LEFT
    while _processes_for(attempt.pid):
        if time.monotonic() > until:
            raise WrongEndError(f"{LEFT:g} s after the end of the run, W&B's process is still there")
        time.sleep(0.01)


def _processes_for(pid):
    found = []
    for entry in os.scandir("/proc"):
        try:
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"--pid" in words and words[words.index(b"--pid") + 1] == b"%d" % pid:
            found.append(entry.name)
    return found


def _check_warnings(attempt):
    """No writer has failed in any attempt."""
    if match := re.search(r".*Writer failed.*", attempt.output):
        raise WrongEndError(match[0])


ROWS = [
    Row(
        "services", "SIGKILL of runs that send rows to MLflow with SQLite, W&B offline, Trackio and Comet offline",
        "each row, image, text and histogram exactly once in the service's own store", "kills", 400, kills,
    ),
]  # fmt: skip
