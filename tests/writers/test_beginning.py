"""What a writer is told before the first row, and which writers are told."""

import random
import sys

import numpy as np
import pytest
from written import KilledError, Losing, train

from chainring import serializers
from chainring._distributed.communicator import Communicator
from chainring.training import Trainer
from chainring.training.extensions import LogReport
from chainring.writers import CsvWriter, MlflowWriter, Record, Run, TensorBoardWriter, TrackioWriter, WandbWriter, Writer


class Told(Writer):
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def begin(self, run):
        self.told.append(run)

    def write(self, record):
        self.told.append(record.iteration)

    def close(self):
        self.told.append("closed")


class Plain:
    """Has the two methods, and is no `Writer`."""

    def __init__(self):
        self.iterations = []

    def write(self, record):
        self.iterations.append(record.iteration)

    def close(self):
        self.iterations.append("closed")


class Second(Communicator):
    """The second of two ranks, which report the same."""

    rank, size = 1, 2

    def gather_object(self, obj):
        return [obj, obj]


def test_a_writer_is_told_the_directory_and_the_config(tmp_path):
    """Before the first row of a run that starts again."""
    writer = Told()
    train(tmp_path, writer, config={"lr": 0.5})
    assert writer.told == [Run(tmp_path, {"lr": 0.5}, 0, ()), 2, 4, 6, 8, "closed"]


def test_a_writer_of_a_resumed_run_is_told_the_rows_so_far(tmp_path):
    """And the iteration, behind which its files may hold more."""
    with pytest.raises(KilledError):
        train(tmp_path, kill=7)
    writer = Told()
    log = train(tmp_path, writer)
    run, *rest = writer.told
    assert (run.iteration, rest) == (4, [6, 8, "closed"])
    loss = {2: 1.5, 4: 3.5}
    times = [row["elapsed_time"] for row in log.log]
    values = [{"main/loss": loss[k], "odd": 0.5} for k in (2, 4)]
    assert list(run.records) == [Record(0, k, t, v) for k, t, v in zip((2, 4), times, values, strict=False)]


def test_two_methods_are_enough(tmp_path):
    """A writer need not be a `Writer`."""
    writer = Plain()
    train(tmp_path, writer)
    assert writer.iterations == [2, 4, 6, 8, "closed"]


def test_a_writer_that_cannot_begin_is_warned_about_and_gets_no_rows(tmp_path):
    """Training continues."""
    (tmp_path / "file").touch()
    good = Told()
    with pytest.warns(UserWarning, match=r"CsvWriter failed in begin\(\) and gets no more rows: .*file") as caught:
        train(tmp_path / "out", CsvWriter(str(tmp_path / "file" / "log.csv")), good)
    assert len(caught) == 1
    assert good.told[1:] == [2, 4, 6, 8, "closed"]


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda file: TensorBoardWriter(str(file / "events")),
        lambda file: WandbWriter(id="no/id"),
        lambda file: MlflowWriter(f"sqlite:///{file}/mlflow.db"),
    ],
    ids=["tensorboard", "wandb", "mlflow"],
)
def test_a_service_that_refuses_the_run_does_not_stop_it(tmp_path, offline, make):
    """A file where a directory should be, an id that W&B does not take: its own words, once, and every row in the log."""
    (tmp_path / "file").touch()
    writer = make(tmp_path / "file")
    with pytest.warns(
        UserWarning, match=f"{type(writer).__name__} failed in .* and gets no more rows: .*Training continues"
    ) as caught:
        log = train(tmp_path / "out", writer)
    assert sum("gets no more rows" in str(warning.message) for warning in caught) == 1
    assert [row["iteration"] for row in log.log] == [2, 4, 6, 8]


def test_only_the_first_rank_has_writers(tmp_path):
    """The others have the rows, and neither open nor close anything."""
    updater, writer = Losing(), Told()
    updater.comm = Second()
    log = LogReport(trigger=(2, "iteration"), writers=[writer])
    Trainer(updater, (4, "iteration"), str(tmp_path), [log]).run()
    assert (len(log.log), writer.told) == (2, [])


def test_a_package_that_draws_when_it_is_imported_leaves_the_generators_as_they_are(tmp_path, monkeypatch):
    """As what Trackio imports does; seeds may be set before a writer is made. Here a file of its name draws."""
    (tmp_path / "trackio.py").write_text("import random\nimport numpy as np\nrandom.random(), np.random.rand()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    before = random.getstate(), np.random.get_state(legacy=False)
    TrackioWriter(project="digits")
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    del sys.modules["trackio"]  # by monkeypatch it would be put back


def test_a_rehearsal_tells_writers_nothing(tmp_path):
    """What they show to others could not be put back."""
    writer = Told()
    log = LogReport(trigger=(2, "iteration"), writers=[writer])
    trainer = Trainer(Losing(), (4, "iteration"), str(tmp_path), [log])
    trainer.rehearse()
    assert writer.told == []
    trainer.run()
    assert writer.told[1:] == [2, 4, "closed"]


def test_a_log_and_its_writers_have_files_of_their_own():
    """Two under one name would overwrite each other."""
    with pytest.raises(ValueError, match=r"must write different files; more than one would write \['log.csv'\]"):
        LogReport(writers=[CsvWriter(), CsvWriter()])


def test_a_snapshot_resumed_in_another_directory_brings_the_rows(tmp_path):
    """The table there is that of the uninterrupted run."""
    train(tmp_path / "whole", CsvWriter(), length=8)
    snapshot = tmp_path / "whole" / "snapshot_iter_4"
    train(tmp_path / "other", CsvWriter(), load=lambda trainer: serializers.load(snapshot, trainer))
    texts = [(tmp_path / name / "log.csv").read_text().splitlines() for name in ("whole", "other")]
    assert [[line.split(",")[1] for line in text] for text in texts] == [["iteration", "2", "4", "6", "8"]] * 2
    assert texts[0][0] == texts[1][0]
    assert texts[0][1:3] == texts[1][1:3]


def test_rows_of_later_iterations_are_kept_where_the_run_goes_back(tmp_path):
    """A run that continues from an older snapshot copies the table to ``abandoned/1`` before it is cut back."""
    train(tmp_path, CsvWriter())
    train(tmp_path, CsvWriter(), length=6, load=lambda trainer: serializers.load(tmp_path / "snapshot_iter_4", trainer))
    tables = [(tmp_path / place / "log.csv").read_text().splitlines() for place in (".", "abandoned/1")]
    assert [len(table) for table in tables] == [4, 5]
