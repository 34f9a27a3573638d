"""Several snapshot extensions with one name and different triggers."""

import shutil
import warnings

import pytest
from snapshots import EVERY, Witness, fail_rename, holds, names, only, run, trainer_of

from chainring.serializers._store import Snapshots, find_snapshot
from chainring.training.extensions import snapshot


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    "filename", ["snapshot_iter_{.updater.iteration}", lambda trainer: f"at_{trainer.updater.iteration}"]
)
def test_where_their_triggers_coincide_one_snapshot_is_written(tmp_path, monkeypatch, asynchronous, filename):
    """It holds the state, and no second is begun."""
    commits, commit = [], Snapshots.commit
    monkeypatch.setattr(
        Snapshots,
        "commit",
        lambda store, name, *rest, **more: (commits.append(name), commit(store, name, *rest, **more)),
    )
    witness = Witness()
    settings = {"asynchronous": asynchronous}
    run(
        tmp_path,
        6,
        (snapshot(filename, **settings), (2, "iteration")),
        (snapshot(filename, **settings), (3, "iteration")),
        witness,
    )
    iterations = [find_snapshot(tmp_path / name).read_manifest().iteration for name in commits]
    assert iterations == [2, 3, 4, 6]
    assert all(holds(tmp_path / name, witness.states[each]) for name, each in zip(commits, iterations, strict=True))


@pytest.mark.parametrize("order", [1, -1])
def test_each_keeps_what_it_has_taken_also_after_a_resume(tmp_path, order):
    """The rare ones are all kept, of the frequent ones the two newest, whoever comes first."""

    def both():
        return [(snapshot(n_retains=2, autoload=True), EVERY), (snapshot(), (4, "iteration"))][::order]

    run(tmp_path, 6, *both())
    assert names(tmp_path) == ["snapshot_iter_4", "snapshot_iter_5", "snapshot_iter_6"]
    run(tmp_path, 11, *both())
    assert names(tmp_path) == ["snapshot_iter_10", "snapshot_iter_11", "snapshot_iter_4", "snapshot_iter_8"]


def test_each_asks_its_own_condition_once(tmp_path):
    """One whose condition is false takes nothing, and what the other has taken is not its own."""
    asked = []
    picky = snapshot(n_retains=1, condition=lambda: asked.append(1) or len(asked) % 2 == 0)
    run(tmp_path, 4, (picky, (2, "iteration")), (snapshot(n_retains=1), EVERY))
    assert len(asked) == 2
    assert names(tmp_path) == ["snapshot_iter_4"]
    run(tmp_path / "b", 4, (snapshot(n_retains=1), EVERY), (snapshot(condition=lambda: False), (2, "iteration")))
    assert names(tmp_path / "b") == ["snapshot_iter_4"]


def test_a_fixed_name_leads_to_the_newest_of_either(tmp_path):
    """Their snapshots are kept as each asks for."""
    run(tmp_path, 5, (snapshot("best"), only(2, 4)), (snapshot("best"), only(4, 5)))
    assert (tmp_path / "best").resolve().name == "best_iter_5"
    assert names(tmp_path) == ["best", "best_iter_4", "best_iter_5"]


def test_the_snapshots_of_a_run_with_one_belong_to_both_of_its_continuation(tmp_path):
    """As long as one keeps them they stay."""
    run(tmp_path, 2, (snapshot(), EVERY))
    with pytest.warns(UserWarning, match="only here"):
        run(tmp_path, 4, (snapshot(n_retains=1, autoload=True), EVERY), (snapshot(n_retains=3), (2, "iteration")))
    assert names(tmp_path) == ["snapshot_iter_1", "snapshot_iter_2", "snapshot_iter_4"]


def test_one_extension_under_two_triggers_takes_one_snapshot(tmp_path):
    """The same object, registered twice."""
    taken = snapshot()
    run(tmp_path, 4, (taken, (2, "iteration")), (taken, (4, "iteration")))
    assert names(tmp_path) == ["snapshot_iter_2", "snapshot_iter_4"]


def test_a_failed_write_is_the_failure_of_both(tmp_path, monkeypatch):
    """It is raised, once."""
    fail_rename(monkeypatch, "snapshot_iter_2", OSError(28, "No space left on device"), once=False)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, 4, (snapshot(), (2, "iteration")), (snapshot(), (2, "iteration")))
    assert names(tmp_path) == []


def test_snapshots_of_one_name_that_would_save_different_parts_are_refused(tmp_path):
    """With and without frozen parameters."""
    trainer = trainer_of(tmp_path, 2, snapshot(), snapshot(frozen=False))
    with pytest.raises(ValueError, match="give frozen= to all of 'snapshot_iter_"):
        trainer.run()


def test_what_a_person_removes_or_puts_there_during_the_run_is_not_counted_and_not_removed(tmp_path):
    """Manifests are read when the run begins; later only the names of its own snapshots are looked for."""

    def tamper(trainer):
        if trainer.updater.iteration == 3:
            shutil.copytree(tmp_path / "snapshot_iter_1", tmp_path / "copy")
            shutil.rmtree(tmp_path / "snapshot_iter_1")

    with warnings.catch_warnings(action="error"):
        run(tmp_path, 6, (snapshot(n_retains=3, asynchronous=False), EVERY), tamper)
    assert names(tmp_path) == ["copy", "snapshot_iter_4", "snapshot_iter_5", "snapshot_iter_6"]


def test_no_manifest_is_read_while_the_run_goes_on(tmp_path, monkeypatch):
    """They are read when it begins: a commit costs the same however many snapshots are kept, and who keeps them."""
    run(tmp_path, 6, (snapshot(), EVERY), (snapshot(n_retains=3), (2, "iteration")))
    read, opened, iterations = [], open, []

    def recorded(path, mode="r", *rest, **more):
        if str(path).endswith("manifest.json") and "r" in mode:
            read.append(str(path))
        return opened(path, mode, *rest, **more)

    monkeypatch.setattr("builtins.open", recorded)
    both = [(snapshot(autoload=True), EVERY), (snapshot(n_retains=3), (2, "iteration"))]
    with pytest.warns(UserWarning, match="only here"):
        run(tmp_path, 12, *both, lambda trainer: iterations.append(len(read)))
    assert len(iterations) == 6
    assert len(set(iterations)) == 1
    assert len(names(tmp_path)) == 12
