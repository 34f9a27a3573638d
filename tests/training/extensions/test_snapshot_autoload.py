"""A rerun of the same script continues from the newest sound snapshot, and says which were not."""

import os
import shutil
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from snapshots import EVERY, Net, Witness, differing, flip, holds, names, only, run, trainer_of, weights_of

from chainring import deterministic, serializers, training
from chainring.serializers._store import CorruptError
from chainring.training.extensions import snapshot


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The states of a run of eight iterations that nothing interrupts."""
    deterministic(0)  # as before each test, which is later
    witness = Witness()
    run(tmp_path_factory.mktemp("whole"), 8, (snapshot(autoload=True), EVERY), witness)
    return witness.states


def go(out, stop, seed=0, **settings):
    """A run with autoload to that iteration; its states."""
    witness = Witness()
    run(out, stop, (snapshot(autoload=True, **settings), EVERY), witness, seed=seed)
    return witness.states


def unlink_tensors(place):
    next(place.glob("*.safetensors")).unlink()


def cut_state(place):
    with (place / "state.json").open("r+b") as file:
        file.truncate(10)


DAMAGES = {
    "bit": lambda place: flip(next(place.glob("*.safetensors"))),
    "bit of the manifest": lambda place: flip(place / "manifest.json"),
    "no manifest": lambda place: (place / "manifest.json").unlink(),
    "no tensors": unlink_tensors,
    "cut": cut_state,
    "too much": lambda place: (place / "more").write_text("x"),
}


def test_a_rerun_continues_bit_for_bit_from_the_newest(tmp_path, whole):
    """Where there is none, it starts."""
    assert list(go(tmp_path, 3)) == [1, 2, 3]
    states = go(tmp_path, 8, seed=5)
    assert list(states) == [4, 5, 6, 7, 8]
    assert all(differing(states[k], whole[k]) == [] for k in states)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ones_are_warned_about_and_an_older_one_is_continued(tmp_path, whole, damage):
    """Bit for bit from there; what was damaged is moved away and kept."""
    go(tmp_path, 4)
    for k in (3, 4):
        DAMAGES[damage](tmp_path / f"snapshot_iter_{k}")
    with pytest.warns(UserWarning, match="is skipped") as caught:
        states = go(tmp_path, 8, seed=5)
    told = [str(each.message) for each in caught]
    assert len(told) == 2
    assert all(any(f"snapshot 'snapshot_iter_{k}' is skipped" in text for text in told) for k in (3, 4))
    assert list(states) == [3, 4, 5, 6, 7, 8]
    assert differing(states[8], whole[8]) == []
    assert names(tmp_path / "abandoned/1") == ["snapshot_iter_3", "snapshot_iter_4"]
    assert holds(tmp_path / "snapshot_iter_4", whole[4])


manifests_read = Counter()


def note_manifest(event, arguments):
    """An audit hook, which stays as long as the process does."""
    if event == "open" and str(arguments[0]).endswith("manifest.json") and arguments[2] & os.O_ACCMODE == os.O_RDONLY:
        manifests_read[Path(arguments[0]).parent.name] += 1


def test_the_manifest_of_a_snapshot_that_is_kept_is_read_once(tmp_path):
    """However many there are, and however many are taken after them; that which is loaded is verified besides."""
    go(tmp_path, 6)
    sys.addaudithook(note_manifest)
    manifests_read.clear()
    go(tmp_path, 9, seed=5)
    kept = [f"snapshot_iter_{k}" for k in range(1, 6)]
    assert {name: manifests_read[name] for name in kept} == dict.fromkeys(kept, 1)


def test_where_none_is_sound_the_run_is_refused(tmp_path):
    """To start again would bury what may still be saved by hand: nothing is moved, nothing trained."""
    go(tmp_path, 2)
    for k in (1, 2):
        flip(tmp_path / f"snapshot_iter_{k}/state.json")
    trainer = trainer_of(tmp_path, 4, (snapshot(autoload=True), EVERY))
    with (
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(CorruptError, match=r"none of the snapshots \['snapshot_iter_2', 'snapshot_iter_1'\].*start again"),
    ):
        trainer.run()
    assert trainer.updater.iteration == 0
    assert names(tmp_path) == ["snapshot_iter_1", "snapshot_iter_2"]


def test_what_is_loaded_by_name_wins(tmp_path, whole):
    """Though newer ones are there, of which one is damaged: nobody asked for them."""
    go(tmp_path, 4)
    flip(tmp_path / "snapshot_iter_4/state.json")
    witness = Witness()
    trainer = trainer_of(tmp_path, 8, (snapshot(autoload=True), EVERY), witness, seed=5)
    serializers.load(tmp_path / "snapshot_iter_1", trainer)
    trainer.run()
    assert list(witness.states) == [2, 3, 4, 5, 6, 7, 8]
    assert differing(witness.states[8], whole[8]) == []
    assert names(tmp_path / "abandoned/1") == ["snapshot_iter_2", "snapshot_iter_3", "snapshot_iter_4"]


@pytest.mark.parametrize("newer", ["a", "b"])
def test_of_two_that_autoload_the_newest_of_both_is_continued(tmp_path, newer):
    """Whichever was registered first."""

    def both(stop, seed=0):
        witness = Witness()
        when = {"a": only(1, 2), "b": only(1, 2)} | {newer: only(1, 3)}
        pairs = [(snapshot(f"{name}_{{.updater.iteration}}", autoload=True), when[name]) for name in "ab"]
        trainer = trainer_of(tmp_path, stop, *pairs, witness, at_four, seed=seed)
        return trainer, witness

    def at_four(trainer):
        if trainer.updater.iteration == 4 and stopping:
            raise KeyboardInterrupt

    stopping = [True]
    with pytest.raises(KeyboardInterrupt):
        both(9)[0].run()
    older = "ab".replace(newer, "")
    assert names(tmp_path) == sorted([f"{newer}_1", f"{newer}_3", f"{older}_1", f"{older}_2"])
    stopping.clear()
    trainer, witness = both(5, seed=6)
    trainer.run()
    assert list(witness.states) == [4, 5]
    assert {"a_5", "b_5"} <= set(names(tmp_path))


def test_a_finished_run_does_nothing_and_writes_no_snapshot(tmp_path):
    """Not an update, not a byte in what it has saved."""
    go(tmp_path, 4)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("snapshot*/*")}
    assert go(tmp_path, 4, seed=5) == {}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("snapshot*/*")} == before
    assert names(tmp_path) == [f"snapshot_iter_{k}" for k in (1, 2, 3, 4)]


@pytest.mark.parametrize("filename", ["snapshot_iter_{.updater.iteration}", "last", lambda trainer: "last"])
def test_the_end_of_the_run_is_saved_though_no_trigger_fires(tmp_path, filename):
    """So that a rerun with a later stop continues from there, and the same rerun does nothing."""
    for stop, expected in ((4, [1, 2, 3, 4]), (4, []), (5, [5])):
        witness = Witness()
        run(tmp_path, stop, (snapshot(filename, autoload=True), (1, "epoch")), witness, seed=stop)
        assert list(witness.states) == expected
    assert names(tmp_path)[-1].endswith("iter_5")


def test_without_autoload_the_end_is_not_saved(tmp_path):
    """Only what the trigger says."""
    run(tmp_path, 4, snapshot())
    assert names(tmp_path) == ["snapshot_iter_3"]


def test_a_link_is_continued_from_too(tmp_path, whole):
    """A snapshot of a fixed name, whose link may even be gone."""
    run(tmp_path, 3, (snapshot("last", autoload=True), EVERY), Witness())
    os.unlink(tmp_path / "last")
    witness = Witness()
    run(tmp_path, 8, (snapshot("last", autoload=True), EVERY), witness, seed=5)
    assert list(witness.states) == [4, 5, 6, 7, 8]
    assert all(differing(witness.states[k], whole[k]) == [] for k in witness.states)


def test_a_target_is_put_back_before_the_run(tmp_path):
    """A pretrained part, say, which the run then starts from: the trainer itself starts again."""
    model = Net()
    run(tmp_path, 2, (snapshot(target=model), EVERY), model=model)
    trained, fresh, seen = weights_of(model), Net(), []

    class Looks(training.Extension):
        def initialize(self, trainer):
            seen.append((trainer.updater.iteration, weights_of(fresh)))

        def __call__(self, trainer):
            pass

    run(tmp_path, 1, (snapshot(target=fresh, autoload=True), EVERY), Looks(), model=fresh)
    assert seen[0][0] == 0
    assert differing(seen[0][1], trained) == []
    assert names(tmp_path / "previous/1") == ["snapshot_iter_1", "snapshot_iter_2"]


class Notes(training.Extension):
    """Notes of what iteration it finds the run when it is initialized."""

    def __init__(self, priority=100):
        self.priority, self.found = priority, None

    def initialize(self, trainer):
        model = trainer.updater.get_model("main")
        self.found = (trainer.updater.iteration, trainer.is_before_training, weights_of(model))

    def __call__(self, trainer):
        pass


@pytest.mark.parametrize("how", ["autoload", "load, extend", "extend, load"])
def test_an_extension_is_initialized_with_the_restored_state(tmp_path, whole, how):
    """Whatever its priority, and whatever the order of load and extend."""
    notes = [Notes(), Notes(-500), Notes(1000)]
    run(tmp_path, 3, (snapshot(autoload=True), EVERY), Notes(), Notes(), Notes())
    trainer = trainer_of(tmp_path, 4, seed=5)
    if how == "load, extend":
        serializers.load(tmp_path / "snapshot_iter_2", trainer)
    for extension in notes:
        trainer.extend(extension)
    trainer.extend(snapshot(autoload=how == "autoload"), trigger=EVERY)
    if how == "extend, load":
        serializers.load(tmp_path / "snapshot_iter_2", trainer)
    trainer.run()
    iteration = 3 if how == "autoload" else 2
    saved = {key[19:].replace("/", "."): value for key, value in whole[iteration].items() if "updater/model:main/" in key}
    for each in notes:
        assert each.found[:2] == (iteration, False)
        assert differing(each.found[2], saved) == []


def test_no_warning_is_given_where_all_is_sound(tmp_path):
    """Nor is what the user keeps beside looked into."""
    (tmp_path / "snapshot_iter_mine").mkdir()
    (tmp_path / "data").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(tmp_path, 2)
        assert list(go(tmp_path, 3, seed=5)) == [3]


class Simple(training.Extension):
    """A snapshot extension of one's own, which keeps two."""

    is_snapshot = autoload = True
    writes = ("state_{.updater.iteration}",)

    def __call__(self, trainer):
        path = Path(trainer.out, f"state_{trainer.updater.iteration}")
        if not path.exists():  # it is called once more when the run ends
            serializers.save(path, trainer)
        for path in self.saved(trainer)[2:]:
            shutil.rmtree(path)

    def newest(self, trainer):
        path = next(iter(self.saved(trainer)), None)
        return path and (self.iteration(path), lambda: serializers.load(path, trainer))

    def saved(self, trainer):
        return sorted(Path(trainer.out).glob("state_*"), key=self.iteration, reverse=True)

    def iteration(self, path):
        return int(path.name.removeprefix("state_"))


def test_a_snapshot_extension_of_ones_own_resumes_as_ours_does(tmp_path):
    """In some fifteen lines, of what is public."""
    whole, parts = Witness(), Witness()
    run(tmp_path / "whole", 6, whole)
    for stop in (3, 6):
        run(tmp_path / "parts", stop, (Simple(), EVERY), parts, seed=stop - 3)
    assert names(tmp_path / "parts") == ["state_5", "state_6"]
    assert not [key for key in differing(parts.states[6], whole.states[6]) if key.startswith("updater")]
