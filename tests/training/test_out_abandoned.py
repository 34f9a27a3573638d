"""What becomes of the later snapshots of a run that is continued from an earlier one."""

import json
import shutil
from pathlib import Path

import pytest
from counting import CountingUpdater, a_trainer
from torch import nn

from chainring import report, serializers, training
from chainring.training import extensions


class Reporting(CountingUpdater):
    """Reports a loss that falls."""

    def update_core(self):
        report({"loss": 1 / (self.iteration + 1)})


class Draws(training.Extension):
    """Writes a file an iteration into a folder."""

    writes = ("images/{.updater.iteration}",)

    def __call__(self, trainer):
        path = Path(trainer.out) / "images" / str(trainer.updater.iteration)
        path.parent.mkdir(exist_ok=True)
        path.touch()


def trainer_of(out, stop, *own, **settings):
    trainer = a_trainer(out, Reporting(), (stop, "iteration"))
    trainer.extend(extensions.snapshot(**settings), trigger=(1, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    for extension in own:
        trainer.extend(extension, trigger=(1, "iteration"))
    return trainer


def run(out, stop, *own, load=None, state=None, **settings):
    trainer = trainer_of(out, stop, *own, **settings)
    if load is not None:
        serializers.load(load, trainer)
    if state is not None:
        trainer.load_state_dict(state)
    trainer.run()
    return trainer


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def snapshots(directory):
    return [name for name in names(directory) if name.startswith("snapshot")]


def taken(*iterations):
    return [f"snapshot_iter_{iteration}" for iteration in iterations]


def logged(directory):
    """The iterations of the rows in both files of a log."""
    rows = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    if (directory / "log").exists():
        assert json.loads((directory / "log").read_text()) == rows
    return [row["iteration"] for row in rows]


def test_the_later_snapshots_are_moved_and_the_log_is_copied_and_cut_back(tmp_path, said):
    """To abandoned/1, and from the next fork on to abandoned/2; it is said, and nothing is lost."""
    run(tmp_path, 4)
    before = (tmp_path / "log.jsonl").read_bytes()
    said()
    seen = []
    look = training.make_extension(initializer=lambda trainer: seen.append(logged(tmp_path)), priority=-1)(lambda _: None)
    trainer = trainer_of(tmp_path, 3)
    serializers.load(tmp_path / "snapshot_iter_2", trainer)
    trainer.extend(look)
    with pytest.warns(UserWarning, match="different extensions"):
        trainer.run()
    place = tmp_path / "abandoned" / "1"
    assert said() == [f"resumed at iteration 2: the later snapshot_iter_3, snapshot_iter_4 moved to {place}"]
    assert seen == [[1, 2]]
    assert names(tmp_path / "abandoned" / "1") == ["log", "log.jsonl", "run.json", *taken(3, 4)]
    assert (tmp_path / "abandoned" / "1" / "log.jsonl").read_bytes() == before
    assert snapshots(tmp_path) == taken(1, 2, 3)
    assert logged(tmp_path) == [1, 2, 3]
    run(tmp_path, 2, load=tmp_path / "snapshot_iter_1", autoload=True)
    assert names(tmp_path / "abandoned" / "2") == ["log", "log.jsonl", "run.json", *taken(2, 3)]
    assert logged(tmp_path / "abandoned" / "2") == [1, 2, 3]
    assert logged(tmp_path) == [1, 2]


def stamped(*iterations):
    return "".join(json.dumps({"iteration": iteration}) + "\n" for iteration in iterations)


FORKS = {
    "an earlier snapshot": (2, lambda out: None),
    "the newest snapshot, with rows after it": (4, lambda out: shutil.rmtree(out / "snapshot_iter_5")),
    "the first snapshot": (1, lambda out: None),
    "a log whose array was removed": (2, lambda out: (out / "log").unlink()),
    "a log whose last line was cut": (2, lambda out: (out / "log.jsonl").write_text(stamped(1, 2, 3)[:-9])),
    "a log on which a person has worked": (2, lambda out: (out / "log").write_text("[]")),
}


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_rows_of_what_is_abandoned_do_not_stay_where_no_extension_continues_them(tmp_path, said, fork, is_elsewhere):
    """A later start without the LogReport: its run has cut the rows back, and so `chainring diff` finds none of another."""
    run(tmp_path / "out", 5)
    at, change = FORKS[fork]
    shutil.copytree(tmp_path / "out" / f"snapshot_iter_{at}", tmp_path / "elsewhere" / "snapshot")
    change(tmp_path / "out")
    said()
    trainer = a_trainer(tmp_path / "out", Reporting(), (7, "iteration"))
    trainer.extend(extensions.snapshot(), trigger=(1, "iteration"))
    source = tmp_path / "elsewhere" / "snapshot" if is_elsewhere else tmp_path / "out" / f"snapshot_iter_{at}"
    serializers.load(source, trainer, strict=False)
    with pytest.warns(UserWarning, match="extensions"):
        trainer.run()
    if is_elsewhere:
        assert not {"log", "log.jsonl"} & set(names(tmp_path / "out"))
        assert any((folder / "log.jsonl").exists() for folder in (tmp_path / "out" / "abandoned").iterdir())
        return
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line)["iteration"] for line in lines if line.endswith("}")]
    if "cut" in fork:
        return  # a file that is damaged is left to a person
    assert rows == list(range(1, at + 1))
    if fork != "a log whose array was removed":
        assert [row["iteration"] for row in json.loads((tmp_path / "out" / "log").read_text())] in (rows, [])


def test_resuming_from_the_newest_moves_nothing(tmp_path, said):
    """There is nothing later, and nothing is said."""
    run(tmp_path, 2)
    run(tmp_path, 4, load=tmp_path / "snapshot_iter_2")
    assert names(tmp_path) == [".lock", "log", "log.jsonl", "run.json", *taken(1, 2, 3, 4)]
    assert said() == []


def test_what_is_abandoned_or_of_a_previous_run_is_never_continued_from_by_itself(tmp_path):
    """The newest snapshot counts that lies in out itself."""
    run(tmp_path, 5)
    run(tmp_path, 2, load=tmp_path / "snapshot_iter_1")
    assert run(tmp_path, 2, autoload=True).is_resumed
    assert run(tmp_path, 3, autoload=True).updater.iteration == 3
    for name in snapshots(tmp_path):
        shutil.rmtree(tmp_path / name)
    assert not run(tmp_path, 1, autoload=True).is_resumed


def test_damaged_later_snapshots_and_those_of_other_extensions_are_moved_too(tmp_path):
    """Also links with what they point to, models, errors, and a snapshot that no longer says of what iteration it is."""
    own = [
        extensions.snapshot("best"),
        extensions.snapshot("kept_{.updater.epoch}", n_retains=5),
        extensions.snapshot_object(nn.Linear(1, 1), "model_{.updater.iteration}"),
        extensions.snapshot_object(CountingUpdater(), "updater"),
    ]
    first = trainer_of(tmp_path, 4, *own, snapshot_on_error=True)
    first.extend(lambda trainer: 1 / (4 - trainer.updater.iteration), name="fails", priority=-99)
    with pytest.raises(ZeroDivisionError):
        first.run()
    (tmp_path / "snapshot_iter_3" / "manifest.json").write_text("damaged")
    (tmp_path / "best_iter_3" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="different extensions"):
        run(tmp_path, 2, load=tmp_path / "snapshot_iter_2")
    moved = names(tmp_path / "abandoned" / "1")
    copied = ["log", "log.jsonl", "model_1", "model_2", "run.json"]
    assert moved == sorted(
        ["best", "best_iter_3", "kept_0", "kept_0_iter_3", "model_3", "snapshot_iter_3", "snapshot_iter_4_error", "updater",
         "updater_iter_3", *copied]
    )  # fmt: skip
    assert (tmp_path / "abandoned" / "1" / "kept_0" / "manifest.json").is_file()
    assert names(tmp_path) == sorted([".lock", "abandoned", *copied, *taken(1, 2)])


def test_later_files_in_folders_are_moved_and_a_log_there_is_copied_also_through_a_link(tmp_path):
    """Into folders of the same name; a link to a file is no link to a snapshot."""

    def own():
        model = extensions.snapshot_object(nn.Linear(1, 1), "m_{.updater.iteration}")
        return [extensions.LogReport(trigger=(1, "iteration"), filename="logs/log"), model, Draws()]

    run(tmp_path, 3, *own())
    (tmp_path / "logs" / "log.jsonl").rename(tmp_path / "elsewhere")
    (tmp_path / "logs" / "log.jsonl").symlink_to(tmp_path / "elsewhere")
    run(tmp_path, 2, *own(), load=tmp_path / "snapshot_iter_1")
    abandoned = tmp_path / "abandoned" / "1"
    assert names(abandoned / "images") == ["1", "2", "3"]  # the first is a copy
    assert names(tmp_path / "images") == ["1", "2"]
    assert logged(abandoned / "logs") == [1, 2, 3]
    assert logged(tmp_path / "logs") == [1, 2]


def test_autoload_that_passes_over_a_damaged_snapshot_moves_it_aside(tmp_path):
    """So that the snapshot of that iteration can be taken again."""
    run(tmp_path, 3)
    (tmp_path / "snapshot_iter_3" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="snapshot_iter_3' is skipped"):
        run(tmp_path, 4, autoload=True)
    assert snapshots(tmp_path) == taken(1, 2, 3, 4)
    assert snapshots(tmp_path / "abandoned" / "1") == taken(3)
    assert (tmp_path / "abandoned" / "1" / "snapshot_iter_3" / "state.json").read_text() == "{}"
    assert logged(tmp_path) == [1, 2, 3, 4]


def test_an_abandoned_snapshot_can_be_continued_with_its_rows(tmp_path):
    """Its log lies beside it; what the run in out has meanwhile done is in turn abandoned."""
    first = run(tmp_path, 4)
    run(tmp_path, 3, load=tmp_path / "snapshot_iter_1")
    again = run(tmp_path, 5, load=tmp_path / "abandoned" / "1" / "snapshot_iter_4")
    assert again.get_extension("LogReport").log[:4] == first.get_extension("LogReport").log
    assert logged(tmp_path) == [1, 2, 3, 4, 5]
    assert [start["iteration"] for start in json.loads((tmp_path / "run.json").read_text())["starts"]] == [0, 4]
    assert logged(tmp_path / "abandoned" / "2") == [1, 2, 3]


def test_a_previous_run_can_be_continued_with_its_rows(tmp_path):
    """From previous/1, in another directory; there nothing changes."""
    first = run(tmp_path / "out", 3)
    run(tmp_path / "out", 1)
    previous = tmp_path / "out" / "previous" / "1"
    before = {path: path.read_bytes() for path in previous.rglob("*") if path.is_file()}
    again = run(tmp_path / "new", 4, load=previous / "snapshot_iter_2")
    assert again.get_extension("LogReport").log[:2] == first.get_extension("LogReport").log[:2]
    assert logged(tmp_path / "new") == [1, 2, 3, 4]
    assert {path: path.read_bytes() for path in previous.rglob("*") if path.is_file()} == before
    assert snapshots(tmp_path / "new") == taken(3, 4)


@pytest.mark.parametrize("way", ["elsewhere", "memory"])
def test_a_state_from_elsewhere_moves_what_belongs_to_another_run_in_out(tmp_path, way):
    """From memory what is later, as if the run were its own; its other rows are set aside."""
    run(tmp_path / "out", 4)
    before = (tmp_path / "out" / "log.jsonl").read_bytes()
    source = run(tmp_path / "source", 2)
    if way == "memory":
        again = run(tmp_path / "out", 3, state=source.state_dict())
    else:
        again = run(tmp_path / "out", 3, load=tmp_path / "source" / "snapshot_iter_2")
    assert again.get_extension("LogReport").log[:2] == source.get_extension("LogReport").log
    assert logged(tmp_path / "out") == [1, 2, 3]
    assert snapshots(tmp_path / "out" / "abandoned" / "1") == (taken(3, 4) if way == "memory" else taken(1, 2, 3, 4))
    assert (tmp_path / "out" / "abandoned" / "1" / "log.jsonl").read_bytes() == before
    assert (tmp_path / "out" / "abandoned" / "2" / "log.jsonl").read_bytes() == before
    assert snapshots(tmp_path / "source") == taken(1, 2)
    assert logged(tmp_path / "source") == [1, 2]


def test_a_run_that_continues_another_and_is_killed_before_its_first_snapshot_is_not_taken_for_the_one_that_was_there(
    tmp_path, said
):
    """A restart with autoload then finds no snapshot, and not that of another run at an earlier iteration."""
    run(tmp_path / "a", 3)
    run(tmp_path / "b", 2)

    def killed(trainer):
        raise KeyboardInterrupt

    killed.initialize = killed
    with pytest.warns(UserWarning, match="different extensions"), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", 5, killed, load=tmp_path / "a" / "snapshot_iter_3")
    assert snapshots(tmp_path / "b") == []
    assert snapshots(tmp_path / "b" / "abandoned" / "1") == taken(1, 2)
    assert not run(tmp_path / "b", 1, autoload=True).is_resumed
    assert any("resumed from" in line and "moved to" in line for line in said())
