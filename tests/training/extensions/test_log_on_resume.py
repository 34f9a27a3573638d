"""The rows of a log through the disk: beside a snapshot they stay in their file, and a resumed run continues with them."""

import json
import math
import os
import shutil
import time
import tracemalloc

import pytest
from scripted import Counting, trainer_of

from chainring import serializers, training
from chainring.serializers._saving import capture
from chainring.serializers.protocol import DictionaryDeserializer
from chainring.training import extensions
from chainring.training.extensions import LogReport

VALUES = (0.1, math.nan, 1e9, -math.inf, 0.3, math.inf, 5.0, 1e-9)


def observations():
    return [{"loss": value, "index": index} for index, value in enumerate(VALUES)]


def made(out, length, *logs, every=1, **settings):
    """A trainer with logs, and a snapshot every so many iterations."""
    trainer = trainer_of(Counting(observations(), epoch_length=3), length, out, *logs)
    trainer.extend(extensions.snapshot(**settings), trigger=(every, "iteration"))
    return trainer


def run(out, length, *logs, load=None, **settings):
    trainer = made(out, length, *logs, **settings)
    if load is not None:
        serializers.load(load, trainer)
    trainer.run()
    return trainer


def timeless(rows):
    return [{key: repr(value) for key, value in row.items() if key != "elapsed_time"} for row in rows]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def both(out, name="log"):
    """The rows of both files, which are the same, without their times."""
    rows = lines(out / f"{name}.jsonl")
    assert json.loads((out / name).read_text()) == rows
    return timeless(rows)


def iterations(rows):
    return [row["iteration"] for row in rows]


@pytest.mark.parametrize("way", ["load", "autoload", "killed later"])
def test_files_and_rows_after_stop_and_resume_equal_those_of_the_uninterrupted_run(tmp_path, way):
    """After every iteration, in the middle of an interval too, with NaN, infinities and rows after the snapshot."""
    whole = LogReport(trigger=(3, "iteration")), LogReport(trigger=(0.5, "epoch"), filename="other")
    run(tmp_path / "whole", 8, *whole)
    out = tmp_path / "out"
    for stop in range(1, 9):
        logs = LogReport(trigger=(3, "iteration")), LogReport(trigger=(0.5, "epoch"), filename="other")
        load = out / f"snapshot_iter_{stop - 1}" if stop > 1 and way != "autoload" else None
        run(out, min(stop + (way == "killed later"), 8), *logs, load=load, autoload=way == "autoload")
        if way == "killed later" and stop < 8:
            for name in ("log.jsonl", "other.jsonl"):
                with open(out / name, "a") as file:
                    file.write('{"loss": 1.0, "iteration": 99}\n{"loss": 0.')
            (out / "log").write_text("[")
    assert [timeless(log.log) for log in logs] == [timeless(log.log) for log in whole]
    assert [both(out, name) for name in ("log", "other")] == [both(tmp_path / "whole", name) for name in ("log", "other")]


def test_a_snapshot_from_before_a_log_was_added_is_resumed_with_a_warning(tmp_path):
    """The log begins at that iteration."""
    run(tmp_path, 3)
    log = LogReport(trigger=(1, "iteration"))
    with pytest.warns(UserWarning, match=r"only here \['LogReport'\]"):
        run(tmp_path, 5, log, load=tmp_path / "snapshot_iter_3")
    assert iterations(log.log) == [4, 5]
    assert both(tmp_path) == timeless(lines(tmp_path / "log.jsonl"))


def test_the_rows_of_a_log_under_another_name_in_the_trainer_are_set_aside_and_not_cut_off(tmp_path, capsys):
    """Its state is not this extension's, so what its file holds is not this extension's to remove."""
    run(tmp_path, 3, LogReport(trigger=(1, "iteration")))
    before = (tmp_path / "log.jsonl").read_bytes()
    trainer = made(tmp_path, 4)
    trainer.extend(LogReport(trigger=(1, "iteration")), name="renamed")
    serializers.load(tmp_path / "snapshot_iter_3", trainer)
    trainer.rehearse()
    with pytest.warns(UserWarning, match=r"only there \['LogReport'\], only here \['renamed'\]"):
        trainer.run()
    assert (tmp_path / "abandoned" / "1" / "log.jsonl").read_bytes() == before
    assert iterations(lines(tmp_path / "log.jsonl")) == [4]
    assert f"rows that this run does not continue: moved to {tmp_path}/abandoned/1/log.jsonl" in capsys.readouterr().out


def test_a_snapshot_beside_the_log_does_not_grow_with_its_rows(tmp_path):
    """It has the name, length and checksum of the file, whose rows are long."""
    log = LogReport(trigger=(1, "iteration"), postprocess=lambda row: row.update(text="x" * 10_000))
    run(tmp_path, 8, log)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / f"snapshot_iter_{iteration}").iterdir()) for iteration in (1, 8)
    ]
    assert abs(sizes[1] - sizes[0]) < 100
    assert (tmp_path / "log.jsonl").stat().st_size > 80_000


def test_the_bytes_that_are_written_grow_with_the_rows_and_not_with_their_square(tmp_path, monkeypatch):
    """Counted: each row once in the file of lines, which is never replaced, and the array no more when it is large."""
    inodes, replaced, replace = set(), [], os.replace

    def recorded(source, target):
        replaced.append((os.path.basename(target), os.path.getsize(source)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    log = LogReport(trigger=(1, "iteration"), postprocess=lambda row: row.update(text="x" * 300_000))
    look = training.make_extension(priority=-1)(lambda trainer: inodes.add((tmp_path / "log.jsonl").stat().st_ino))
    trainer_of(Counting(observations()), 40, tmp_path, log, look).run()
    assert len(inodes) == 1
    assert 40 * 300_000 < (tmp_path / "log.jsonl").stat().st_size < 41 * 300_000
    assert [size // 300_000 for name, size in replaced if name == "log"] == [0, 1, 2, 3, 40]  # the last is at the end
    assert [size for name, size in replaced if name == "log.jsonl"] == [0]  # when it was made


@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "left behind"])
def test_rows_that_are_lost_are_warned_about_and_the_file_is_set_aside(tmp_path, damage, capsys):
    """The run continues with the rows from now on; what is left of the others can be looked at."""
    out, path = tmp_path / "out", tmp_path / "out" / "log.jsonl"
    run(out, 4, LogReport(trigger=(1, "iteration")))
    snapshot, text = out / "snapshot_iter_4", path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(text[:-3])
    elif damage == "changed":
        path.write_bytes(text.replace(b"0.1", b"0.2", 1))
    else:
        out = tmp_path / "new"
        out.mkdir()
        snapshot = snapshot.rename(out / "snapshot_iter_4")
    left = (out / "log.jsonl").read_bytes() if (out / "log.jsonl").exists() else None
    log = LogReport(trigger=(1, "iteration"))
    trainer = made(out, 6, log)
    with pytest.warns(UserWarning, match="continues without its earlier rows"):
        serializers.load(snapshot, trainer)
    trainer.rehearse()
    trainer.run()
    assert iterations(log.log) == [5, 6]
    assert both(out) == timeless(lines(out / "log.jsonl"))
    if left is None:
        assert not (out / "abandoned").exists()
    else:
        assert (out / "abandoned" / "1" / "log.jsonl").read_bytes() == left
        assert "rows that this run does not continue: moved to" in capsys.readouterr().out


def test_a_log_without_a_file_keeps_its_rows_in_the_snapshot(tmp_path):
    """And continues with them."""
    run(tmp_path, 3, LogReport(trigger=(1, "iteration"), filename=None))
    log = LogReport(trigger=(1, "iteration"), filename=None)
    run(tmp_path, 5, log, load=tmp_path / "snapshot_iter_3")
    assert iterations(log.log) == [1, 2, 3, 4, 5]
    assert [math.isnan(row["loss"]) for row in log.log] == [False, True, False, False, False]
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(("before", "after"), [("log", "rows"), ("log", None), (None, "log"), ("logs/log", "log")])
def test_another_filename_on_resume_goes_on_with_the_rows(tmp_path, before, after):
    """The file of the old name stays as it was."""
    first = LogReport(trigger=(1, "iteration"), filename=before)
    run(tmp_path, 3, first)
    text = (tmp_path / f"{before}.jsonl").read_bytes() if before else None
    log = LogReport(trigger=(1, "iteration"), filename=after)
    run(tmp_path, 5, log, load=tmp_path / "snapshot_iter_3")
    assert timeless(log.log[:3]) == timeless(first.log)
    assert iterations(log.log) == [1, 2, 3, 4, 5]
    if after:
        assert iterations(lines(tmp_path / f"{after}.jsonl")) == [1, 2, 3, 4, 5]
    if before:
        assert (tmp_path / f"{before}.jsonl").read_bytes() == text


def test_a_file_of_that_name_that_is_none_of_the_log_is_set_aside(tmp_path):
    """Also where the continued run has no rows yet."""
    run(tmp_path, 2, LogReport(trigger=(3, "iteration")))
    (tmp_path / "mine.jsonl").write_text("mine")
    run(tmp_path, 3, LogReport(trigger=(3, "iteration"), filename="mine"), load=tmp_path / "snapshot_iter_2")
    assert (tmp_path / "abandoned" / "1" / "mine.jsonl").read_text() == "mine"
    assert iterations(lines(tmp_path / "mine.jsonl")) == [3]


def test_a_directory_that_was_moved_as_a_whole_is_resumed_with_its_rows(tmp_path):
    """The name of the file is relative to the snapshot."""
    run(tmp_path / "old", 3, LogReport(trigger=(1, "iteration")))
    shutil.move(tmp_path / "old", tmp_path / "new")
    log = LogReport(trigger=(1, "iteration"))
    run(tmp_path / "new", 4, log, load=tmp_path / "new" / "snapshot_iter_3")
    assert iterations(log.log) == [1, 2, 3, 4]
    assert not (tmp_path / "old").exists()


def test_a_snapshot_saved_elsewhere_by_hand_holds_the_rows_itself(tmp_path):
    """It can be taken away alone."""
    log = LogReport(trigger=(1, "iteration"))
    save = training.make_extension(trigger=(3, "iteration"), priority=-200)(
        lambda trainer: serializers.save(tmp_path / "elsewhere" / "taken", trainer)
    )
    trainer = made(tmp_path / "out", 3, log)
    trainer.extend(save, name="save")
    trainer.run()
    shutil.rmtree(tmp_path / "out")
    again = LogReport(trigger=(1, "iteration"))
    trainer = made(tmp_path / "out", 3, again)
    trainer.extend(save, name="save")
    serializers.load(tmp_path / "elsewhere" / "taken", trainer)
    assert timeless(again.log) == timeless(log.log)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_log_is_on_the_disk_before_the_snapshot_that_refers_to_it_has_its_name(tmp_path, monkeypatch, asynchronous):
    """The order of fsync and rename, by what the descriptors point to."""
    seen, fsync, rename = [], os.fsync, os.rename

    def recorded_fsync(descriptor):
        seen.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recorded_rename(source, target):
        seen.append(("rename", os.path.basename(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    run(tmp_path, 2, LogReport(trigger=(1, "iteration")), asynchronous=asynchronous)
    log = ("fsync", (tmp_path / "log.jsonl").stat().st_ino)
    first, second = (seen.index(("rename", f"snapshot_iter_{iteration}")) for iteration in (1, 2))
    assert log in seen[:first]
    assert log in seen[first:second]


LONG = 40_000  # bytes of a row, so that some thirty rows are more than stay in memory


def long_log(**settings):
    return LogReport(trigger=(1, "iteration"), postprocess=lambda row: row.update(text="x" * LONG), **settings)


@pytest.mark.parametrize("filename", ["log", None])
def test_the_rows_of_a_long_log_are_read_from_its_file_on_a_resume_too(tmp_path, filename):
    """Without a file they stay in memory and in the snapshot."""
    first, whole = long_log(filename=filename), long_log(filename=filename)
    run(tmp_path / "whole", 70, whole, every=100)
    run(tmp_path / "out", 40, first, every=35)
    log = long_log(filename=filename)
    trainer = made(tmp_path / "out", 70, log, every=35)
    serializers.load(tmp_path / "out" / "snapshot_iter_35", trainer)
    assert iterations(log.log) == list(range(1, 36))
    trainer.run()
    assert timeless(log.log) == timeless(whole.log)
    assert iterations(log.rows_from(60)) == iterations(log.log[60:]) == list(range(61, 71))
    assert iterations(log.rows_from(3)) == list(range(4, 71))
    if filename:
        assert both(tmp_path / "out") == both(tmp_path / "whole")


def test_a_long_log_takes_no_memory_and_a_snapshot_no_time_for_its_rows(tmp_path):
    """Of 400 rows, which are 16 MB, a few are in memory; a snapshot reads none of them."""
    sizes, opened = [], []
    log = long_log()
    trainer = trainer_of(Counting([{"loss": 1.0}] * 400), 400, tmp_path, log)
    measure = training.make_extension(trigger=(100, "iteration"), priority=-1)(
        lambda trainer: (
            sizes.append(tracemalloc.get_traced_memory()[0]),
            opened.append(capture(trainer, tmp_path).referred),
        )
    )
    trainer.extend(measure)
    tracemalloc.start()
    try:
        trainer.run()
    finally:
        tracemalloc.stop()
    assert max(sizes) - min(sizes) < 2_000_000
    assert opened == [[tmp_path / "log.jsonl"]] * 4
    assert len(log.log) == 400


@pytest.mark.parametrize("damage", ["gone", "cut", "a pipe", "a directory", "a device"])
def test_a_long_log_that_was_damaged_is_named_with_the_number_of_rows_that_are_lost(tmp_path, damage):
    """And nothing is waited for; what is there is set aside."""
    run(tmp_path, 40, long_log(), every=40)
    path = tmp_path / "log.jsonl"
    if damage == "cut":
        os.truncate(path, 1_500_000)
    else:
        path.unlink()
    put = {"a pipe": os.mkfifo, "a directory": os.mkdir, "a device": lambda path: os.symlink("/dev/zero", path)}
    put.get(damage, lambda path: None)(path)
    log = long_log()
    trainer = made(tmp_path, 42, log, every=40)
    with pytest.warns(UserWarning, match=r"continues without its earlier rows, 40 of them: .*log\.jsonl does not begin"):
        serializers.load(tmp_path / "snapshot_iter_40", trainer)
    trainer.run()
    assert iterations(log.log) == iterations(lines(path)) == [41, 42]
    assert os.path.lexists(tmp_path / "abandoned" / "1" / "log.jsonl") == (damage != "gone")


def test_the_file_of_the_rows_is_cut_back_and_not_replaced(tmp_path):
    """An older snapshot refers to it."""
    run(tmp_path, 3, LogReport(trigger=(1, "iteration")))
    inode = (tmp_path / "log.jsonl").stat().st_ino
    run(tmp_path, 3, LogReport(trigger=(1, "iteration")), load=tmp_path / "snapshot_iter_2")
    assert [row["iteration"] for row in lines(tmp_path / "log.jsonl")] == [1, 2, 3]
    assert (tmp_path / "log.jsonl").stat().st_ino == inode


def test_a_torn_last_row_is_cut_off(tmp_path):
    """As a loss of power leaves it, or a kill while a row is written."""
    run(tmp_path, 30, long_log(), every=30)
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(b'{"loss": 0.1, "te')
    log = long_log()
    run(tmp_path, 31, log, every=30, load=tmp_path / "snapshot_iter_30")
    assert iterations(log.log) == iterations(lines(tmp_path / "log.jsonl")) == list(range(1, 32))


def test_rows_in_the_state_go_on_in_the_file_that_has_them(tmp_path):
    """As a state in memory has them."""
    first = long_log()
    trainer = made(tmp_path, 30, first, every=100)
    trainer.run()
    state = read_state_of(trainer, tmp_path)
    assert state["extensions/LogReport/log"] is None
    state["extensions/LogReport/log"], state["extensions/LogReport/file"] = first.log, None
    log = long_log()
    again = made(tmp_path, 31, log, every=100)
    source = DictionaryDeserializer(state)
    source.directory = tmp_path
    again.serialize(source)
    assert timeless(log.log) == timeless(first.log)
    again.run()
    assert iterations(log.log) == list(range(1, 32))


def read_state_of(trainer, directory):
    """The state as a snapshot in this directory has it."""
    return dict(capture(trainer, directory).target)


def test_the_state_in_memory_has_the_rows_themselves(tmp_path):
    """It can be put into a fresh trainer whose out has no file."""
    first = long_log()
    trainer = made(tmp_path / "first", 40, first, every=100)
    trainer.run()
    log = long_log()
    again = made(tmp_path / "second", 41, log, every=100)
    again.load_state_dict(trainer.state_dict())
    again.run()
    assert timeless(log.log[:40]) == timeless(first.log)
    assert both(tmp_path / "second") == timeless(lines(tmp_path / "second" / "log.jsonl"))
    assert iterations(lines(tmp_path / "second" / "log.jsonl")) == list(range(1, 42))


def test_a_log_that_a_person_removes_during_the_run_leaves_a_valid_array(tmp_path):
    """With the rows until then; the loss is told at a resume."""
    log = LogReport(trigger=(1, "iteration"))
    remove = training.make_extension(priority=-1)(
        lambda trainer: trainer.updater.iteration == 3 and (tmp_path / "log.jsonl").unlink()
    )
    trainer_of(Counting(observations()), 5, tmp_path, log, remove).run()
    assert iterations(json.loads((tmp_path / "log").read_text())) == [1, 2, 3]
    assert iterations(lines(tmp_path / "log.jsonl")) == [4, 5]
