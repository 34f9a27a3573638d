"""Snapshots are written while the training goes on: what they hold, and what becomes of failures."""

import errno
import io
import os
import threading

import numpy as np
import pytest
import torch
from snapshots import EVERY, Gate, Net, Witness, at, differing, fail_rename, holds, names, only, run, trainer_of

from chainring import serializers, training
from chainring.serializers._loading import read_state
from chainring.training.extensions import snapshot, snapshot_object

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_a_snapshot_holds_the_state_of_its_iteration_however_late_it_is_written(tmp_path, monkeypatch):
    """Its first byte is written two updates later; parameters, moments, buffers, generators are those of then."""
    gate, witness, lain = Gate(monkeypatch), Witness(), []

    def open_gate():
        lain.append(names(tmp_path))
        gate.opened.set()

    run(tmp_path, 4, (snapshot(), only(1)), witness, at(3, open_gate))
    assert lain == [[]]
    assert gate.passed.is_set()
    assert differing(witness.states[1], witness.states[3]) != []
    assert holds(tmp_path / "snapshot_iter_1", witness.states[1])


def test_a_models_file_holds_the_parameters_of_its_iteration_however_late_it_is_written(tmp_path, monkeypatch):
    """Likewise, for snapshot_object."""
    gate, witness, model, path = Gate(monkeypatch), Witness(), Net(), tmp_path / "model"
    run(tmp_path, 4, (snapshot_object(model, "model"), only(1)), witness, at(3, gate.opened.set), model=model)
    other = Net()
    serializers.load(path, other)
    then = {key[19:].replace("/", "."): value for key, value in witness.states[1].items() if "updater/model:main/" in key}
    assert differing(dict(other.state_dict()), then) == []
    assert differing(dict(model.state_dict()), then) != []


def test_the_next_snapshot_waits_for_the_one_before(tmp_path, monkeypatch):
    """One write is under way at a time: the copy of the state is not overwritten while it is read."""
    gate, witness = Gate(monkeypatch, seconds=0.3), Witness()
    run(tmp_path, 3, (snapshot(), only(1, 2)), witness, at(3, gate.opened.set))
    assert all(holds(tmp_path / f"snapshot_iter_{k}", witness.states[k]) for k in (1, 2))


TIED, WEIGHT = torch.randn(3), torch.nn.Parameter(torch.randn(2))


@pytest.mark.parametrize(
    "forms",
    [
        [torch.ones(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.ones(2)],
        [torch.ones(2, 3), torch.ones(3), torch.ones(4), torch.ones(3, 2).t()],
        [{"a": [TIED, (TIED, 1)]}, {"a": [TIED, (TIED.clone(), 1)]}, {"a": [TIED[:2], (TIED, 1)]}, {}],
        [WEIGHT, {"b": WEIGHT}, np.arange(3), [np.arange(4), torch.arange(4)]],
        [{"c": 1}, {"c": {2.5}}, {"c": None}, {"c": {(1, 2): torch.ones(1)}}],
    ],
    ids=["dtypes", "shapes", "ties", "parameters and arrays", "values"],
)
def test_state_whose_form_changes_between_snapshots_is_saved_as_it_is_then(tmp_path, forms):
    """Copied beside the encoding into what held the last copy, it is what a snapshot at once holds."""

    class Changing(training.Extension):
        def serialize(self, serializer):
            serializer("form", forms[(trainer.updater.iteration - 1) % len(forms)])

    witness = Witness()
    trainer = trainer_of(tmp_path, 8, (snapshot(), EVERY), witness)
    trainer.extend(Changing(), trigger=(100, "iteration"))
    trainer.run()
    assert all(holds(tmp_path / f"snapshot_iter_{k}", witness.states[k]) for k in range(1, 9))


def test_the_training_is_bit_for_bit_that_without_snapshots(tmp_path):
    """Copying the state changes nothing in it."""
    bare, saved = Witness(), Witness()
    run(tmp_path / "bare", 5, bare)
    run(tmp_path / "saved", 5, saved, (snapshot(), EVERY))
    ours, theirs = (
        {key: value for key, value in each.states[5].items() if "extension" not in key} for each in (bare, saved)
    )
    assert differing(ours, theirs) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_who_writes(tmp_path, monkeypatch, asynchronous):
    """A thread of its own, or the training itself where asynchronous is false."""
    writers, original = set(), io.open

    def opened(path, mode="r", *arguments, **options):
        if "x" in mode:
            writers.add(threading.current_thread() is threading.main_thread())
        return original(path, mode, *arguments, **options)

    monkeypatch.setattr(io, "open", opened)
    run(tmp_path, 2, (snapshot(asynchronous=asynchronous), EVERY))
    assert writers == {not asynchronous}


def test_a_snapshot_taken_by_hand_outside_of_a_run_is_written_when_the_call_returns(tmp_path):
    """Before it, when the run will sweep what is unfinished, and after it, when nobody would wait for a thread."""
    trainer, model = trainer_of(tmp_path, 2, (snapshot(), only())), Net()
    saving, by_hand = snapshot_object(model, "model"), trainer.get_extension("snapshot")
    for extension, name in ((by_hand, "snapshot_iter_0"), (saving, "model")):
        extension(trainer)
        assert name in names(tmp_path)
    trainer.run()
    by_hand(trainer)
    assert "snapshot_iter_2" in names(tmp_path)


@pytest.mark.parametrize("last", [3, 4])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_write_is_raised_at_the_next_snapshot_or_at_the_end(tmp_path, monkeypatch, asynchronous, last):
    """With path and free space; what was saved before stays, and the run continues from there."""
    fail_rename(monkeypatch, "snapshot_iter_3", FULL)
    trainer = trainer_of(tmp_path, last, (snapshot(), EVERY) if asynchronous else (snapshot(asynchronous=False), EVERY))
    with pytest.raises(
        OSError, match=r"No space left on device.*; [\d,]+ bytes are free there: .*snapshot_iter_3'"
    ) as caught:
        trainer.run()
    assert caught.value.errno == errno.ENOSPC
    assert trainer.updater.iteration == (last if asynchronous else 3)
    assert names(tmp_path) == ["snapshot_iter_1", "snapshot_iter_2"]
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []
    again = trainer_of(tmp_path, 2, (snapshot(autoload=True), EVERY))
    again.run()
    assert again.updater.iteration == 2
    assert again.is_resumed


@pytest.mark.parametrize("settings", [{}, {"asynchronous": False}])
def test_on_failure_may_let_the_training_go_on(tmp_path, monkeypatch, settings):
    """Later snapshots succeed, and each failure is told once."""
    fail_rename(monkeypatch, "snapshot_iter_2", FULL)
    fail_rename(monkeypatch, "snapshot_iter_5", FULL)
    taken, told = snapshot(**settings), []
    taken.on_failure = told.append
    run(tmp_path, 5, (taken, EVERY))
    assert [(error.errno, os.path.basename(error.filename)) for error in told] == [
        (errno.ENOSPC, "snapshot_iter_2"),
        (errno.ENOSPC, "snapshot_iter_5"),
    ]
    assert names(tmp_path) == [f"snapshot_iter_{k}" for k in (1, 3, 4)]
    assert all(read_state(tmp_path / name) for name in names(tmp_path))


def test_a_subclass_decides_about_failures_too(tmp_path, monkeypatch):
    """Overriding on_failure is the same as assigning it."""
    told = []

    class Lenient(snapshot):
        def on_failure(self, error):
            told.append(error)

    fail_rename(monkeypatch, "snapshot_iter_1", FULL)
    run(tmp_path, 2, (Lenient(), EVERY))
    assert len(told) == 1
    assert names(tmp_path) == ["snapshot_iter_2"]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError("no room")])
def test_a_failure_that_is_not_the_disks_always_stops_the_training(tmp_path, monkeypatch, error):
    """on_failure is about writing; a bug is not passed over."""
    fail_rename(monkeypatch, "snapshot_iter_2", error)
    taken, told = snapshot(), []
    taken.on_failure = told.append
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path, 9, (taken, EVERY))
    assert told == []
    assert names(tmp_path) == ["snapshot_iter_1"]


class Opens(training.Extension):
    """Opens a gate when the run ends, however it ends; is finalized before the snapshot is."""

    def __init__(self, gate):
        self.gate = gate

    def __call__(self, trainer):
        pass

    def finalize(self):
        self.gate.opened.set()


def raises(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt("stop"), SystemExit("stop"), None])
def test_a_write_under_way_is_finished_when_the_run_ends(tmp_path, monkeypatch, error):
    """By the stop trigger, an error, or Ctrl-C."""
    gate, witness = Gate(monkeypatch), Witness()
    extensions = (snapshot(), only(1)), witness, Opens(gate)
    if error is None:
        run(tmp_path, 2, *extensions)
    else:
        with pytest.raises(type(error), match="stop"):
            run(tmp_path, 9, *extensions, at(2, raises(error)))
    assert gate.passed.is_set()
    assert holds(tmp_path / "snapshot_iter_1", witness.states[1])


def test_a_failed_write_is_a_note_of_the_error_that_ended_the_run(tmp_path, monkeypatch):
    """The first error is the one that is raised."""
    fail_rename(monkeypatch, "snapshot_iter_1", FULL)
    gate = Gate(monkeypatch)
    with pytest.raises(RuntimeError, match="stop") as caught:
        run(tmp_path, 9, (snapshot(), only(1)), Opens(gate), at(2, raises(RuntimeError("stop"))))
    assert any(
        "finalize of 'snapshot' raised OSError" in note and "snapshot_iter_1" in note for note in caught.value.__notes__
    )


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(
    "value",
    [object(), torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.nn.UninitializedParameter()],
    ids=["object", "sparse", "meta", "lazy"],
)
def test_what_cannot_be_saved_is_refused_at_once_with_its_path(tmp_path, value, first):
    """While the training waits, and not later by the thread; in the first snapshot or a later one."""

    class Odd(training.Extension):
        def serialize(self, serializer):
            serializer("value", value if trainer.updater.iteration == first else torch.ones(2))

    trainer = trainer_of(tmp_path, 9, (snapshot(), EVERY))
    trainer.extend(Odd(), trigger=(100, "iteration"))
    with pytest.raises(TypeError, match="extensions/Odd/value"):
        trainer.run()
    assert trainer.updater.iteration == first
    assert names(tmp_path) == [f"snapshot_iter_{k}" for k in range(1, first)]


def test_a_models_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    """The policy is that of snapshots."""
    replace, count = os.replace, []

    def replaced(source, target):
        if os.path.basename(target) == "model":
            count.append(target)
            if len(count) == 2:
                raise FULL
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    model, witness = Net(), Witness()
    trainer = trainer_of(tmp_path, 2, (snapshot_object(model, "model"), EVERY), witness, model=model)
    with pytest.raises(OSError, match="bytes are free there"):
        trainer.run()
    other = Net()
    serializers.load(tmp_path / "model", other)
    assert (other.head.weight == witness.states[1]["updater/model:main/head/weight"]).all()
    assert names(tmp_path) == ["model"]
