"""What snapshots are called, which are kept, and that nothing else is touched."""

import os
import shutil
import warnings

import pytest
import torch
from snapshots import EVERY, Witness, fail_rename, holds, names, only, run, trainer_of

from chainring import serializers, training
from chainring._files import is_temporary
from chainring.serializers._loading import read_state
from chainring.training.extensions import snapshot

AUTO = "snapshot_iter_{.updater.iteration}"


def make_foreign(out):
    """What the user and others keep beside, by names that look like those of snapshots; what each holds."""
    out.mkdir()
    for name in ("snapshot_iter_old.txt", "snapshot_iter_1.txt", "snapshot_iter_", "xsnapshot_iter_1", "notes"):
        (out / name).write_text(f"mine: {name}")
    for name in ("snapshot_iter_old", "other", "12a"):
        (out / name).mkdir()
        (out / name / "data").write_text(f"mine: {name}")
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("filename", [AUTO, "{.updater.iteration}", "{0.updater.iteration}_{0.updater.epoch}"])
def test_foreign_files_of_like_names_are_neither_removed_nor_loaded(tmp_path, filename):
    """Retention and autoload keep to the names and manifests of their own series, whatever these begin with."""
    out = tmp_path / "result"
    foreign = make_foreign(out)
    run(out, 3, (snapshot(filename, n_retains=1, autoload=True), EVERY))
    trainer = run(out, 5, (snapshot(filename, n_retains=1, autoload=True), EVERY), seed=4)
    assert len(names(out)) == 8 + 1
    assert serializers.load(out / filename.format(trainer), trainer_of(tmp_path / "x", 5)) is None
    assert {path: (out / path).read_bytes() for path in foreign} == foreign


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_the_user_calls_like_a_snapshot_is_neither_removed_nor_loaded(tmp_path, is_directory):
    """snapshot_iter_999 without a manifest was not written here. A rerun moves it out of the way, as a later one."""
    own = tmp_path / "snapshot_iter_999"

    def put(trainer):
        if trainer.updater.iteration == 1:
            own.mkdir() if is_directory else own.write_text("mine")

    run(tmp_path, 4, (snapshot(n_retains=1, autoload=True), EVERY), put)
    assert names(tmp_path) == ["snapshot_iter_4", "snapshot_iter_999"]
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = run(tmp_path, 5, (snapshot(n_retains=1, autoload=True), EVERY), put)
    assert ["is skipped: " in str(each.message) for each in caught] == [True] * is_directory
    assert trainer.is_resumed
    moved = tmp_path / "abandoned/1" / own.name
    assert moved.is_dir() if is_directory else moved.read_text() == "mine"


@pytest.mark.parametrize("filename", [AUTO, "best", lambda trainer: f"at{trainer.updater.iteration}"])
def test_a_copy_under_another_name_is_the_users(tmp_path, filename):
    """It is neither removed nor continued from, whichever iteration it has, and loads where it is asked for by its path."""
    out = tmp_path / "result"
    run(out, 3, (snapshot(filename, n_retains=1, autoload=True), EVERY))
    (own,) = (path for path in out.glob("*3") if not path.is_symlink())
    for name in ("mine", "a", "snapshot_iter_3_copy"):  # before and behind the others in the order of names
        shutil.copytree(own, out / name)
    own.rename(out / "renamed")
    again = run(out, 5, (snapshot(filename, n_retains=1, autoload=True), EVERY), seed=4)
    assert not again.is_resumed
    kept = {"mine", "a", "snapshot_iter_3_copy", "renamed"}
    assert kept <= set(names(out))
    third = run(out, 6, (snapshot(filename, n_retains=1, autoload=True), EVERY), seed=4)
    assert (third.is_resumed, kept <= set(names(out))) == (True, True)
    for name in kept:
        serializers.load(out / name, trainer_of(tmp_path / "x", 5))


@pytest.mark.parametrize("is_copy", [True, False])
def test_what_a_person_puts_in_the_place_of_a_snapshot_during_a_run_is_not_removed(tmp_path, is_copy):
    """A directory, or the copy of an earlier snapshot, where one was that is not to be kept any more."""
    taken = snapshot(n_retains=2)

    def put(trainer):
        if trainer.updater.iteration == 3:
            taken.wait()
            (tmp_path / "snapshot_iter_2").rename(tmp_path / "mine")
            if is_copy:
                shutil.copytree(tmp_path / "snapshot_iter_1", tmp_path / "snapshot_iter_2")
            else:
                (tmp_path / "snapshot_iter_2").mkdir()
            (tmp_path / "snapshot_iter_2" / "notes").write_text("mine")

    run(tmp_path, 6, (taken, EVERY), put)
    assert names(tmp_path) == ["mine", "snapshot_iter_2", "snapshot_iter_5", "snapshot_iter_6"]
    assert (tmp_path / "snapshot_iter_2" / "notes").read_text() == "mine"


def test_a_snapshot_with_the_manifest_of_another_is_damaged(tmp_path):
    """Of an earlier one, whole or alone, and of one of another series: it is named, and an older one continued."""
    for number, whose in enumerate(("snapshot_iter_1", "snapshot_iter_2", "best_iter_3")):
        for is_whole in (True, False):
            out = tmp_path / f"{number}{is_whole}"
            run(out, 3, (snapshot(AUTO, autoload=True), EVERY), (snapshot("best"), EVERY))
            damaged = out / "snapshot_iter_3"
            if is_whole:
                shutil.rmtree(damaged)
                shutil.copytree(out / whose, damaged)
            else:
                shutil.copy(out / whose / "manifest.json", damaged)
            with pytest.warns(UserWarning, match=r"snapshot 'snapshot_iter_3' is skipped"):
                trainer = run(out, 5, (snapshot(AUTO, autoload=True), EVERY), (snapshot("best"), EVERY), seed=4)
            assert (trainer.is_resumed, trainer.updater.iteration) == (True, 5)
            assert names(out / "abandoned/1") == ["best", "best_iter_3", "snapshot_iter_3"]


def test_snapshots_of_other_series_are_neither_removed_nor_loaded(tmp_path):
    """Each extension knows its own by the manifest; one that got such a name is said, and moved out of the way."""
    short, wide = "{.updater.iteration}", "s{.updater.iteration}"

    def both(out, stop, seed=0, **settings):
        return run(
            out, stop, (snapshot(short, n_retains=2, **settings), EVERY), (snapshot(wide), (2, "iteration")), seed=seed
        )

    both(tmp_path, 4)
    assert names(tmp_path) == ["3", "4", "s2", "s4"]
    os.rename(tmp_path / "s4", tmp_path / "9")  # its manifest still says whose it is
    trainer = trainer_of(
        tmp_path, 5, (snapshot(short, autoload=True, n_retains=1), only()), (snapshot(wide), only()), seed=3
    )
    started = []
    trainer.extend(lambda trainer: started.append(trainer.updater.iteration))
    with (
        pytest.warns(UserWarning, match="different extensions"),
        pytest.warns(UserWarning, match="'9' is skipped: its manifest is that of 's4'"),
    ):
        trainer.run()
    assert started == [5]
    assert (names(tmp_path), names(tmp_path / "abandoned/1")) == (["5", "abandoned", "s2"], ["9"])


def test_the_newest_is_that_of_the_highest_iteration_and_not_of_the_latest_time(tmp_path):
    """A copied or touched snapshot is no newer for it, for autoload as for retention."""
    run(tmp_path, 12, (snapshot(), EVERY))
    for k in range(1, 13):
        os.utime(tmp_path / f"snapshot_iter_{k}", (k, 10**9 - 1000 * k))
    run(tmp_path, 13, (snapshot(autoload=True, n_retains=3), EVERY), seed=3)
    assert names(tmp_path) == [f"snapshot_iter_{k}" for k in (11, 12, 13)]


def record(monkeypatch, look):
    """Calls ``look`` after each rename, link and removal of a name; returns what these were."""
    events = []

    def wrapped(name):
        call = getattr(os, name)

        def recorded(*paths, **options):
            call(*paths, **options)
            events.append(
                (name, *(os.path.basename(os.fspath(path)) for path in paths if isinstance(path, (str, os.PathLike))))
            )
            look()

        monkeypatch.setattr(os, name, recorded)

    for name in ("rename", "replace", "symlink", "unlink"):
        wrapped(name)
    return events


@pytest.mark.parametrize("n_retains", [1, 2])
def test_older_ones_are_removed_only_after_the_next_is_committed(tmp_path, monkeypatch, n_retains):
    """At every moment as many are whole as are to be kept."""
    counts = []

    def look():
        counts.append(len([name for name in names(tmp_path) if read_state(tmp_path / name)]))

    record(monkeypatch, look)
    run(tmp_path, 4, (snapshot(n_retains=n_retains, asynchronous=False), EVERY))
    assert names(tmp_path) == [f"snapshot_iter_{k}" for k in range(5 - n_retains, 5)]
    since = counts.index(n_retains)
    assert set(counts[since:]) == {n_retains, n_retains + 1}


def test_the_only_good_one_stays_when_the_next_cannot_be_written(tmp_path, monkeypatch):
    """What is there is removed after a commit, and there was none."""
    fail_rename(monkeypatch, "snapshot_iter_2", OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        run(tmp_path, 2, (snapshot(n_retains=1), EVERY))
    assert names(tmp_path) == ["snapshot_iter_1"]
    assert read_state(tmp_path / "snapshot_iter_1")["updater/iteration"] == 1


def test_a_fixed_name_is_a_relative_link_that_is_valid_at_every_moment(tmp_path, monkeypatch):
    """It is replaced by one rename after the commit of the next, and the one before is removed thereafter."""
    out, seen = tmp_path / "result", []

    def look():
        if os.path.lexists(out / "best"):
            seen.append(read_state(out / "best")["updater/iteration"])

    events = record(monkeypatch, look)
    run(out, 3, (snapshot("best"), EVERY))
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3}
    assert ("unlink", "best") not in events
    renames = [event[1:] for event in events if event[0] == "rename"]
    order = [f"{source} removed" if is_temporary(target) else target for source, target in renames]
    first, second, third = (["best_iter_1", "best"], ["best_iter_2", "best"], ["best_iter_3", "best"])
    assert order == [*first, *second, "best_iter_1 removed", *third, "best_iter_2 removed"]
    assert os.readlink(out / "best") == "best_iter_3"
    shutil.move(out, tmp_path / "moved")
    assert read_state(tmp_path / "moved/best")["updater/iteration"] == 3


def test_a_fixed_name_keeps_the_last_few_where_n_retains_says_so(tmp_path):
    """The best k: the link leads to the newest of them."""
    run(tmp_path, 5, (snapshot("best", n_retains=2), only(1, 3, 5)))
    assert names(tmp_path) == ["best", "best_iter_3", "best_iter_5"]
    assert os.readlink(tmp_path / "best") == "best_iter_5"


def test_a_link_that_a_kill_has_left_behind_is_mended(tmp_path):
    """Between the commit and the rename of the link, the run was killed; the rerun leads the name to the best."""

    def best(stop):
        return run(tmp_path, stop, (snapshot("best", n_retains=2), only(1, 3)), (snapshot(AUTO, autoload=True), EVERY))

    best(3)
    os.unlink(tmp_path / "best")
    os.symlink("best_iter_1", tmp_path / "best")
    best(4)
    assert os.readlink(tmp_path / "best") == "best_iter_3"


def test_a_link_leads_to_an_older_one_when_the_run_goes_back(tmp_path):
    """To the newest that is not abandoned."""

    def trainer():
        return trainer_of(tmp_path, 3, (snapshot("best", n_retains=2), only(1, 3)), (snapshot(AUTO), EVERY))

    trainer().run()
    back, seen = trainer(), []
    serializers.load(tmp_path / "snapshot_iter_1", back)
    back.extend(lambda trainer: seen.append(os.readlink(tmp_path / "best")))
    with pytest.warns(UserWarning, match="different extensions"):
        back.run()
    assert seen == ["best_iter_1"] * 2
    assert names(tmp_path / "abandoned/1") == ["best", "best_iter_3", "snapshot_iter_2", "snapshot_iter_3"]
    assert os.readlink(tmp_path / "best") == "best_iter_3"


def test_a_name_by_epoch_is_a_link_to_the_last_snapshot_of_the_epoch(tmp_path):
    """Within an epoch the next replaces the one before; those of other epochs stay."""
    run(tmp_path, 5, (snapshot("epoch_{.updater.epoch}"), EVERY))
    assert names(tmp_path) == ["epoch_0", "epoch_0_iter_2", "epoch_1", "epoch_1_iter_5"]
    assert {name: os.readlink(tmp_path / name) for name in ("epoch_0", "epoch_1")} == {
        "epoch_0": "epoch_0_iter_2",
        "epoch_1": "epoch_1_iter_5",
    }


def test_names_by_epoch_are_retained_with_their_links(tmp_path):
    """No link is left that leads nowhere."""
    run(tmp_path, 10, (snapshot("epoch_{.updater.epoch}", n_retains=2), (1, "epoch")))
    assert names(tmp_path) == ["epoch_2", "epoch_2_iter_6", "epoch_3", "epoch_3_iter_9"]


def test_a_function_may_name_snapshots_also_twice_the_same(tmp_path):
    """The second of a name takes the place of the first."""
    run(tmp_path, 5, (snapshot(lambda trainer: "early" if trainer.updater.iteration < 4 else "late"), EVERY))
    assert names(tmp_path) == ["early", "early_iter_3", "late", "late_iter_5"]
    assert read_state(tmp_path / "early")["updater/iteration"] == 3


def test_a_function_that_gives_no_name_is_refused(tmp_path):
    """A slash would lead out of the directory."""
    with pytest.raises(ValueError, match="has no slash"):
        run(tmp_path / "result", 1, (snapshot(lambda trainer: "../elsewhere"), EVERY))
    assert names(tmp_path) == ["result"]


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_is_in_the_way_of_a_link_is_an_error_before_training(tmp_path, is_directory):
    """A file or a directory that another makes is never written over."""
    place = tmp_path / "result/best"

    class Makes(training.Extension):
        def initialize(self, trainer):
            place.mkdir() if is_directory else place.write_text("mine")

        def __call__(self, trainer):
            pass

    trainer = trainer_of(place.parent, 2, (snapshot("best"), EVERY), Makes())
    with pytest.raises(FileExistsError, match=r"result/best is in the way.*move it, or give another filename"):
        trainer.run()
    assert trainer.updater.iteration == 0
    assert place.is_dir() if is_directory else place.read_text() == "mine"


@pytest.mark.parametrize("is_directory", [True, False])
def test_what_lies_under_a_fixed_name_already_is_kept(tmp_path, is_directory):
    """Moved aside when a run starts anew, and said."""
    place = tmp_path / "best"
    place.mkdir() if is_directory else place.write_text("mine")
    run(tmp_path, 1, (snapshot("best"), EVERY))
    kept = tmp_path / "previous/1/best"
    assert kept.is_dir() if is_directory else kept.read_text() == "mine"
    assert place.is_symlink()


class Breaks(training.StandardUpdater):
    """Fails in its fourth update, halfway, with parameters that are no numbers."""

    def update_core(self):
        if self.iteration == 3:
            for parameter in self.get_model("main").parameters():
                parameter.data.fill_(torch.nan)
            next(self.get_iterator("main"))
            raise ArithmeticError("poisoned")
        super().update_core()


def test_the_snapshot_of_a_failure_leaves_the_good_one_of_its_iteration_alone(tmp_path):
    """It has a name of its own and is never loaded by itself, however often the run fails there."""
    whole, first, healed = Witness(), Witness(), Witness()
    run(tmp_path / "whole", 6, (snapshot(autoload=True), EVERY), whole)
    out = tmp_path / "result"
    for seed in range(3):
        with pytest.raises(ArithmeticError):
            run(out, 6, (snapshot(autoload=True, snapshot_on_error=True), EVERY), first, kind=Breaks, seed=seed)
    good = [f"snapshot_iter_{k}" for k in (1, 2, 3)]
    assert names(out) == [*good, "snapshot_iter_3_error", "snapshot_iter_3_error_1", "snapshot_iter_3_error_2"]
    assert holds(out / "snapshot_iter_3", whole.states[3])
    assert read_state(out / "snapshot_iter_3_error")["updater/model:main/body/weight"].isnan().all()
    run(out, 6, (snapshot(autoload=True), EVERY), healed, seed=8)
    assert holds(out / "snapshot_iter_6", whole.states[6])
    assert list(healed.states) == [4, 5, 6]


def test_a_run_with_nothing_but_the_snapshot_of_a_failure_starts_anew(tmp_path):
    """Also under a fixed name, whose link does not lead there."""
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            run(tmp_path, 6, (snapshot("last", autoload=True, snapshot_on_error=True), only()), kind=Breaks)
        assert names(tmp_path)[0] == "last_iter_3_error"
    assert names(tmp_path / "previous/1") == ["last_iter_3_error"]


def test_nothing_is_saved_on_failure_unless_asked_for(tmp_path):
    """The default."""
    with pytest.raises(ArithmeticError):
        run(tmp_path, 6, (snapshot(), only(2)), kind=Breaks)
    assert names(tmp_path) == ["snapshot_iter_2"]
