"""Images, texts and histograms in a log: the row that each is kept with, and what is left of them after a resume."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from scripted import Counting

from chainring import html_report, report, report_histogram, report_image, report_scope, report_text, serializers, training
from chainring.iterators import SerialIterator
from chainring.training import extensions
from chainring.training.extensions import LogReport
from chainring.writers import Writer


class Showing(Counting):
    """Reports a text in the iterations that are named, and an image and a histogram in each."""

    def __init__(self, texts=range(1, 100)):
        super().__init__()
        self.texts = texts

    def update_core(self):
        k = self.iteration + 1
        report({"loss": float(k)})
        if k in self.texts:
            report_text("text", f"of {k}")
        report_image("image", np.full((2, 3), k, np.uint8))
        report_histogram("histogram", torch.arange(float(k)))


class Kept(Writer):
    """Keeps the media of each row."""

    def __init__(self):
        self.found = {}

    def begin(self, run):
        self.found = {record.iteration: dict(record.media) for record in run.records}

    def write(self, record):
        self.found[record.iteration] = dict(record.media)


def run(out, length, *more, updater=None, every=2, snapshot=3, filename="log", writers=()):
    """Rows every second iteration, snapshots every third; returns the trainer."""
    log = LogReport(trigger=(every, "iteration"), writers=writers, filename=filename)
    trainer = training.Trainer(updater or Showing(), (length, "iteration"), str(out), [log, *more])
    trainer.extend(extensions.snapshot(autoload=True, asynchronous=False), trigger=(snapshot, "iteration"))
    trainer.run()
    return trainer


def lines(out, name="log"):
    return [json.loads(line) for line in (out / f"{name}.media.jsonl").read_text().splitlines()]


def texts(out, name="log"):
    return [(line["row"], line["iteration"], line["media"]["text"]["text"]) for line in lines(out, name)]


def test_the_last_of_a_key_in_an_interval_is_kept_with_its_row(tmp_path):
    """And given to the writers with it."""
    kept = Kept()
    run(tmp_path, 6, writers=[kept])
    assert texts(tmp_path) == [(0, 2, "of 2"), (1, 4, "of 4"), (2, 6, "of 6")]
    assert [kept.found[k]["text"].text for k in (2, 4, 6)] == ["of 2", "of 4", "of 6"]
    assert [int(kept.found[k]["image"].pixels.max()) for k in (2, 4, 6)] == [2, 4, 6]
    assert [sum(kept.found[k]["histogram"].counts) for k in (2, 4, 6)] == [2, 4, 6]
    assert all(
        set(row) == {"loss", "epoch", "iteration", "elapsed_time"} for row in json.loads((tmp_path / "log").read_text())
    )


@pytest.mark.parametrize("first", ["log", "extension"])
def test_what_an_extension_reports_waits_for_the_next_row(tmp_path, first):
    """Also where the extension comes after the log."""

    @training.make_extension(trigger=(3, "iteration"))
    def show(trainer):
        report_text("shown", f"at {trainer.updater.iteration}")

    log = LogReport(trigger=(2, "iteration"))
    parts = [log, show] if first == "log" else [show, log]
    training.Trainer(Counting([{"loss": 1.0}] * 6), (6, "iteration"), str(tmp_path), parts).run()
    found = [(line["iteration"], line["media"]["shown"]["text"]) for line in lines(tmp_path)]
    assert found == ([(4, "at 3")] if first == "log" else [(4, "at 3"), (6, "at 6")])


def test_without_any_there_is_no_file(tmp_path):
    """A log of numbers is as before."""
    training.Trainer(Counting([{"loss": 1.0}] * 2), (2, "iteration"), str(tmp_path), [LogReport()]).run()
    assert sorted(os.listdir(tmp_path)) == [".lock", "log", "log.jsonl", "run.json"]


def test_after_a_kill_and_a_resume_the_file_is_that_of_the_uninterrupted_run(tmp_path):
    """In every iteration; rows after the snapshot are cut off, and what waited at the snapshot is in the next row."""
    run(tmp_path / "whole", 10, updater=Showing([1, 3, 7]), every=5)
    out = tmp_path / "out"

    class Killed(Showing):
        def update_core(self):
            super().update_core()
            if self.iteration == self.stop:
                raise KeyboardInterrupt

    for stop in range(1, 9):
        updater = Killed([1, 3, 7])
        updater.stop = stop
        with pytest.raises(KeyboardInterrupt):
            run(out, 10, updater=updater, every=5)
        with open(out / "log.media.jsonl", "a") as file:
            file.write('{"row": 7, "media": {"abandoned": {"kind": "text", "text": "x"}}}\n{"row": 8')
    run(out, 10, updater=Showing([1, 3, 7]), every=5)
    assert lines(out) == lines(tmp_path / "whole")
    assert texts(out) == [(0, 5, "of 3"), (1, 10, "of 7")]


def test_an_abandoned_row_shows_nothing_in_the_report(tmp_path):
    """Neither in the page that is written after the resume."""
    run(tmp_path, 8, snapshot=4)
    shutil.rmtree(tmp_path / "snapshot_iter_8")
    run(tmp_path, 5, snapshot=4, updater=Showing(texts=[]))
    page = html_report.write(tmp_path).file.read_text()
    assert "of 4" in page
    assert "of 6" not in page
    assert "of 8" not in page


def test_a_resumed_writer_is_given_the_media_of_earlier_rows(tmp_path):
    """Read from the file, for a service that has not received them."""
    run(tmp_path, 4, snapshot=4)
    kept = Kept()
    run(tmp_path, 6, snapshot=4, writers=[kept])
    assert {k: media["text"].text for k, media in kept.found.items()} == {2: "of 2", 4: "of 4", 6: "of 6"}
    np.testing.assert_array_equal(kept.found[2]["image"].pixels, np.full((2, 3, 1), 2, np.uint8))


def test_a_snapshot_without_the_file_beside_it_is_resumed_with_a_warning(tmp_path):
    """The log goes on without those of its earlier rows."""
    run(tmp_path, 4, snapshot=4)
    (tmp_path / "log.media.jsonl").write_text('{"row": 0, "media": {}}\n')
    with pytest.warns(UserWarning, match="without the images, texts and histograms of its earlier rows: .*together with"):
        run(tmp_path, 6, snapshot=4)
    assert texts(tmp_path) == [(2, 6, "of 6")]
    assert (tmp_path / "abandoned" / "1" / "log.media.jsonl").read_text() == '{"row": 0, "media": {}}\n'


def test_a_link_of_that_name_is_not_followed(tmp_path):
    """It is moved away, and what it leads to stays as it is."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.media.jsonl").symlink_to(secret)
    run(tmp_path / "out", 2)
    assert secret.read_text() == "secret"
    assert texts(tmp_path / "out") == [(0, 2, "of 2")]


def test_each_log_keeps_those_of_its_own_intervals(tmp_path):
    """In a file beside its own."""
    run(tmp_path, 6, LogReport(trigger=(3, "iteration"), filename="other"))
    assert texts(tmp_path) == [(0, 2, "of 2"), (1, 4, "of 4"), (2, 6, "of 6")]
    assert texts(tmp_path, "other") == [(0, 3, "of 3"), (1, 6, "of 6")]


def test_a_rehearsal_leaves_nothing_behind(tmp_path):
    """Neither a file nor an image that waits."""
    log = LogReport(trigger=(5, "iteration"))
    trainer = training.Trainer(Showing([1, 2]), (5, "iteration"), str(tmp_path / "out"), [log])
    trainer.rehearse()
    assert not (tmp_path / "out").exists()
    trainer.updater.texts = []
    trainer.run()
    assert [set(line["media"]) for line in lines(tmp_path / "out")] == [{"image", "histogram"}]


class Model(torch.nn.Module):
    """Shows its last batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        report_text("batch", str(x.tolist()))
        loss = (self.weight * x).mean()
        report({"loss": loss}, self)
        return loss


def test_those_of_an_evaluation_have_its_name(tmp_path):
    """Beside those of the training; a call of `evaluate` by itself reports none."""
    model = Model()
    data = np.arange(4, dtype=np.float32)
    updater = training.StandardUpdater(
        SerialIterator(data, 2, shuffle=False), torch.optim.SGD(model.parameters(), lr=0.1), model
    )
    evaluator = extensions.Evaluator(SerialIterator(data + 10, 2, repeat=False, shuffle=False), model)
    trainer = training.Trainer(updater, (1, "epoch"), str(tmp_path), [evaluator, LogReport()])
    trainer.extend(lambda trainer: evaluator.evaluate() and None, name="by hand", priority=400)
    trainer.run()
    ((_, found),) = [(line["row"], line["media"]) for line in lines(tmp_path)]
    assert {key: item["text"] for key, item in found.items()} == {"batch": "[2.0, 3.0]", "validation/batch": "[12.0, 13.0]"}


def test_what_is_reported_before_a_resumed_training_is_discarded(tmp_path):
    """As values are; before a new one it is kept with the row that is written next."""

    @training.make_extension(trigger=(100, "iteration"), invoke_before_training=True)
    def show(trainer):
        report_text("before", f"at {trainer.updater.iteration}")
        with report_scope({}):
            report({"loss": 1.0})

    run(tmp_path, 3, show)
    run(tmp_path, 6, show)
    assert [line["media"].get("before", {}).get("text") for line in lines(tmp_path)] == ["at 0", None, None]


def test_a_saved_trainer_elsewhere_keeps_what_waits(tmp_path):
    """In a snapshot of any kind."""
    trainer = run(tmp_path / "first", 3, every=5)
    serializers.save(tmp_path / "saved", trainer)
    log = LogReport(trigger=(5, "iteration"))
    again = training.Trainer(Showing(texts=[]), (5, "iteration"), str(tmp_path / "second"), [log])
    again.extend(extensions.snapshot(), trigger=(3, "iteration"))
    serializers.load(tmp_path / "saved", again)
    again.run()
    assert texts(tmp_path / "second") == [(0, 5, "of 3")]


def test_a_compiled_update_that_reports_them_runs_uncompiled_with_a_warning(tmp_path):
    """What it reports is what it computes."""
    model = Model()
    iterator = SerialIterator(np.arange(4, dtype=np.float32), 2, shuffle=False)
    updater = training.StandardUpdater(iterator, torch.optim.SGD(model.parameters(), lr=0.1), model, compile=True)
    with pytest.warns(UserWarning, match="updates run as they are, not compiled"):
        training.Trainer(updater, (2, "iteration"), str(tmp_path), [LogReport()]).run()
    ((_, found),) = [(line["row"], line["media"]) for line in lines(tmp_path)]
    assert found == {"batch": {"kind": "text", "text": "[2.0, 3.0]"}}
