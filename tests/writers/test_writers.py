"""Writers: what they are given, and that one that fails never stops training."""

import dataclasses

import pytest

from chainring import report, training
from chainring.training.extensions import LogReport
from chainring.writers import Record, Writer


class Kept(Writer):
    """Keeps what it is given."""

    def __init__(self):
        self.records = []
        self.closed = 0

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed += 1


class Failing(Kept):
    """Fails at one of its methods."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def write(self, record):
        super().write(record)
        if self.method == "write":
            raise OSError("disk full")

    def close(self):
        super().close()
        if self.method == "close":
            raise OSError("disk full")


class Doubling(training.Updater):
    """Reports 1, 2, 4, 8."""

    def update_core(self):
        report({"loss": 2.0**self.iteration, "name": "text"})


def run(tmp_path, *writers, extensions=(), **settings):
    log = LogReport(trigger=(2, "iteration"), writers=writers, **settings)
    training.Trainer(Doubling(), (4, "iteration"), tmp_path, [log, *extensions]).run()
    return log


def test_every_writer_gets_each_row_as_a_record(tmp_path):
    """Means in values; iteration, epoch and time as attributes beside them."""
    writers = Kept(), Kept()
    log = run(tmp_path, *writers)
    for writer in writers:
        assert [(r.epoch, r.iteration, dict(r.values)) for r in writer.records] == [
            (0, 2, {"loss": 1.5}),
            (0, 4, {"loss": 6.0}),
        ]
        assert [r.elapsed_time for r in writer.records] == [row["elapsed_time"] for row in log.log]


def test_writers_are_closed_once_when_the_run_ends(tmp_path):
    """Also when it fails."""
    whole, failed = Kept(), Kept()

    def fail(trainer):
        raise RuntimeError("stop here")

    run(tmp_path, whole)
    with pytest.raises(RuntimeError, match="stop here"):
        run(tmp_path, failed, extensions=[fail])
    assert (whole.closed, failed.closed) == (1, 1)


@pytest.mark.parametrize("filename", ["log", None])
def test_a_writer_that_raises_is_warned_about_once_and_does_not_stop_training(tmp_path, filename):
    """It gets no more rows; the log and the other writers get all of theirs."""
    bad, good = Failing("write"), Kept()
    with pytest.warns(UserWarning, match=r"Failing failed in write\(\) and gets no more rows: OSError: disk full") as caught:
        log = run(tmp_path, bad, good, filename=filename)
    assert len(caught) == 1
    assert (len(bad.records), len(good.records), len(log.log)) == (1, 2, 2)


def test_a_writer_that_failed_is_closed_like_the_others(tmp_path):
    """What it holds open is let go of all the same."""
    bad = Failing("write")
    with pytest.warns(UserWarning, match="disk full"):
        run(tmp_path, bad)
    assert bad.closed == 1


def test_a_writer_that_fails_to_close_is_warned_about_and_the_others_are_closed(tmp_path):
    """The run ends as it would have."""
    good = Kept()
    with pytest.warns(UserWarning, match=r"Failing failed in close\(\) and gets no more rows: OSError: disk full"):
        run(tmp_path, Failing("close"), good)
    assert good.closed == 1


def test_a_record_cannot_be_changed():
    """Its fields are what they were for the writer before."""
    record = Record(1, 2, 3.0, {"loss": 4.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.epoch = 5


def test_a_writer_without_write_says_so():
    """The error names the class and the method."""
    with pytest.raises(NotImplementedError, match=r"Writer must define write\(record\)"):
        Writer().write(Record(0, 0, 0.0, {}))


def test_close_is_optional():
    """A writer that holds nothing need not define it."""
    assert Writer().close() is None
