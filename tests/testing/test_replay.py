"""replay gives a trainer as it was at any iteration of a run, and changes nothing in the run's directory."""

import functools
import gc
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import chainring
import forked
import rank_pair
import replay_program as program
from chainring import _random, iterators, training
from chainring.testing import ManualClock, NoReplay, ReplayDiffers, replay
from chainring.training import extensions
from chainring.training.updaters.callbacks import UpdateCallbacks, clip_grad_norm
from chainring.writers import Writer

KILLS = (11, 26, 40)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was killed three times, of which the newest snapshots are left, and what it had after each iteration."""
    root = tmp_path_factory.mktemp("finished")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kill in (*map(str, KILLS), None):
        command = [program.__file__, str(root / "result"), str(root / "kept"), *filter(None, [kill])]
        assert forked.run(command, env=environment).returncode == (-signal.SIGKILL if kill else 0)
    return root / "result", program.read_kept(root / "kept")


def content(directory):
    """Every file of a directory, with its bytes and when it was written."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


class Net(nn.Linear):
    """Draws, and reports its loss."""

    def __init__(self):
        super().__init__(2, 1)

    def forward(self, x):
        loss = super().forward(nn.functional.dropout(x)).square().mean()
        chainring.report({"loss": loss}, self)
        return loss


def make_small(out, length=12, lr=0.1, parts=(), comm=None, **settings):
    """A trainer of a few iterations of two examples, with a snapshot after each fourth."""
    chainring.deterministic(1)
    model = Net()
    data = iterators.SerialIterator([torch.full((2,), float(i)) for i in range(5)], 2, seed=3)
    updater = training.StandardUpdater(data, torch.optim.Adam(model.parameters(), lr=lr), model, comm=comm, **settings)
    trainer = training.Trainer(updater, (length, "iteration"), out=out)
    trainer.extend(extensions.snapshot(), trigger=(4, "iteration"))
    for part in parts:
        trainer.extend(part)
    return trainer


def values_of(trainer):
    """The parameters and the moments of the optimizer, in one row."""
    optimizer = trainer.updater.get_optimizer("main")
    moments = [value for state in optimizer.state.values() for value in state.values()]
    parameters = [parameter.detach() for parameter in trainer.updater.get_model("main").parameters()]
    return torch.cat([tensor.reshape(-1) for tensor in (*parameters, *moments)]).tolist()


@pytest.fixture
def run(tmp_path):
    """A run of twelve iterations, and the values after each."""
    values = {}
    make_small(tmp_path / "result", parts=[Noting(values)]).run()
    return tmp_path / "result", values


class Noting(training.Extension):
    """Notes the values after each iteration."""

    def __init__(self, values):
        self.values = values

    def __call__(self, trainer):
        self.values[trainer.updater.iteration] = values_of(trainer)


make_noting = functools.partial(make_small, parts=[Noting({})])


@pytest.mark.filterwarnings("ignore:.*running_mean is NaN in snapshot")  # of the forward of an update that is left out
def test_any_iteration_is_to_the_last_bit_what_the_run_had(finished):
    """Dropout, workers, augmentation, schedules, averages, values that are not numbers and were rolled back, three kills."""
    out, kept = finished
    skipped = sorted(int(path.name.rpartition("_")[2]) for path in out.glob("non_number_iter_*"))
    assert len(skipped) > 2
    snapshots = {int(path.name.rpartition("_")[2]) for path in out.glob("snapshot_iter_*")}
    assert snapshots == {7, 49, 56, 60}  # 7 is before the first skipped update, which leaves NaN in running means
    before = content(out)
    for iteration in (0, 60, skipped[1], *random.Random(5).sample(range(1, 60), 4)):
        trainer = replay(program.make_trainer, out, iteration)
        found = program.state_of(trainer)
        assert [path for path in found | kept[iteration] if found.get(path) != kept[iteration].get(path)] == []
        assert trainer.updater.iteration == iteration
    assert content(out) == before


def make_recorded(out, changed=None, **settings):
    """With what each iteration was; after one of them a weight is another one."""

    @training.make_extension(priority=2000)
    def change(trainer):
        if trainer.updater.iteration == changed:
            trainer.updater.get_model("main").weight.data[0, 0] += 1e-6

    return make_small(out, parts=[change, extensions.Recorder((3, "iteration"))], **settings)


def test_a_replay_that_goes_another_way_than_was_recorded_is_an_error(tmp_path):
    """The first iteration and what differs in it are named; what is recorded is the same where nothing has changed."""
    out = tmp_path / "result"
    make_recorded(out).run()
    for iteration in (0, 3, 4, 11):
        assert replay(make_recorded, out, iteration).updater.iteration == iteration
    with pytest.raises(ReplayDiffers, match=r"differs from the run: the loss main/loss of iteration 11 is not the one"):
        replay(functools.partial(make_recorded, changed=10), out, 11)
    with pytest.raises(ReplayDiffers, match=r"the tensor updater/model:main/weight of iteration 3 is not the one"):
        replay(functools.partial(make_recorded, changed=3), out, 3)


def make_clipped(out, largest=10.0, digests=3, **settings):
    """The gradients are clipped after the loss, so another bound shows in the next one."""
    clip = UpdateCallbacks(update_on_start=clip_grad_norm(largest))
    trainer = make_small(out, callbacks=clip, **settings)
    trainer.extend(extensions.Recorder(None if digests is None else (digests, "iteration")))
    return trainer


@pytest.mark.parametrize(
    ("digests", "to", "is_checked"),
    [(3, 1, False), (3, 5, False), (3, 3, True), (1, 1, True), (None, 1, False), (None, 5, False)],
)
def test_what_the_last_replayed_update_has_changed_is_compared_or_said_not_to_be(tmp_path, said, digests, to, is_checked):
    """A loss is recorded before its update; a digest after it."""
    make = functools.partial(make_clipped, digests=digests)
    make(tmp_path / "result").run()
    replay(make, tmp_path / "result", to)
    assert [f"the loss of iteration {to} is the recorded one" in line for line in said()] == ([] if is_checked else [True])
    if to == 1:  # the first that another bound changes
        if is_checked:
            with pytest.raises(ReplayDiffers, match="of iteration 1 is not the one"):
                replay(functools.partial(make, largest=0.01), tmp_path / "result", to)
        else:
            with pytest.raises(ReplayDiffers, match="the loss main/loss of iteration 2 is not the one"):
                replay(functools.partial(make, largest=0.01), tmp_path / "result", to + 1)


def make_seeded_by_torch_alone(out, draws=(), **settings):
    """As most scripts are; an extension may draw."""
    trainer = make_recorded(out, **settings)
    trainer.extend(lambda trainer: [draw() for draw in draws], name="draw", trigger=(1, "iteration"))
    random.seed()
    np.random.seed()
    return trainer


@pytest.mark.parametrize("iteration", [1, 3, 4, 5, 11, 12])
def test_generators_that_nobody_draws_from_need_not_be_seeded(tmp_path, iteration):
    """Of the beginning, or of a snapshot: the replay is that of the run."""
    make_seeded_by_torch_alone(tmp_path / "result").run()
    assert replay(make_seeded_by_torch_alone, tmp_path / "result", iteration).updater.iteration == iteration


def test_a_generator_that_was_drawn_from_counts(tmp_path):
    """Where nobody has seeded it, a replay of the beginning is another one."""
    make = functools.partial(make_seeded_by_torch_alone, draws=[np.random.rand])
    make(tmp_path / "result", length=3).run()
    with pytest.raises(ReplayDiffers, match="the state of the random generators of iteration 3"):
        replay(functools.partial(make, length=3), tmp_path / "result", 3)


def test_a_run_that_goes_on_is_only_read(tmp_path):
    """It holds the lock of its directory, and goes on as if nothing had been."""
    out, seen = tmp_path / "result", []

    @training.make_extension(trigger=(7, "iteration"), priority=-200)
    def look(trainer):
        trainer.get_extension("snapshot").wait()
        before = content(out)
        with _random.preserve_rng():
            seen.append(values_of(replay(make_look_nowhere, out, 6)))
        assert content(out) == before

    watched = make_small(out, parts=[look])
    watched.run()
    make_look_nowhere(tmp_path / "whole", parts=[Noting(values := {})]).run()
    assert seen == [values[6]]
    assert values_of(watched) == values[12]


def make_look_nowhere(out, parts=()):
    """The same trainer with an extension of the same name that does nothing."""

    @training.make_extension(trigger=(7, "iteration"), priority=-200)
    def look(trainer):
        pass

    return make_small(out, parts=[look, *parts])


def test_it_begins_with_the_nearest_snapshot_and_leaves_gradients_and_generators(run):
    """So the next update is that of the run, and the gradients are those of the iteration."""
    out, values = run
    updates = []
    trainer = replay(functools.partial(make_noting, loss_func=lambda model, x: updates.append(1) or model(x)), out, 10)
    assert values_of(trainer) == values[10]
    assert len(updates) == 2
    gradient = trainer.updater.get_model("main").weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    assert float(trainer.observation["main/loss"]) > 0
    trainer.updater.update()
    assert values_of(trainer) == values[11]


def test_what_it_saves_goes_on_to_the_end_of_the_run(run):
    """Its state, loaded into a new trainer; it is that of a snapshot, triggers included."""
    out, values = run
    state = replay(make_noting, out, 5).state_dict()
    trainer = make_small(out.parent / "again", parts=[Noting({})])
    trainer.load_state_dict(state)
    trainer.run()
    assert values_of(trainer) == values[12]


def test_snapshots_of_errors_and_damaged_ones_are_not_used(tmp_path):
    """The state after an error, of an update that may be incomplete, and one whose bytes have changed."""
    out = tmp_path / "result"

    @training.make_extension(trigger=(10, "iteration"))
    def fail(trainer):
        raise RuntimeError("planned")

    trainer = make_small(out, parts=[fail, Noting(values := {})])
    trainer.get_extension("snapshot").snapshot_on_error = True
    with pytest.raises(RuntimeError, match="planned"):
        trainer.run()
    assert (out / "snapshot_iter_10_error").is_dir()
    tensors = out / "snapshot_iter_8" / "rank00000-of-00001.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x77")
    updates = []
    make = functools.partial(make_noting, loss_func=lambda model, x: updates.append(1) or model(x))
    for iteration, count in ((10, 6), (9, 6 + 5)):
        with (
            pytest.warns(UserWarning, match="snapshot 'snapshot_iter_8' is skipped: "),
            pytest.warns(UserWarning, match="only there \\['fail'\\]"),
        ):
            replayed = replay(make, out, iteration)
        assert len(updates) == count
    assert values_of(replayed) == values[9]


def test_a_run_that_the_clock_has_ended_is_replayed_however_long_an_iteration_takes(tmp_path):
    """Its stop trigger is asked, and the answer does not count before the iteration."""
    out = tmp_path / "result"
    with ManualClock() as clock:

        def make(out, seconds=4.0, values=None):
            @training.make_extension(priority=-200)
            def advance(trainer):
                clock.advance(seconds)

            trainer = make_small(out, parts=[advance, Noting({} if values is None else values)])
            trainer.stop_trigger = training.triggers.get_stop_trigger((6, "second"))
            return trainer

        values = {}
        make(out, 1.0, values).run()
        assert max(values) == 6
        assert values_of(replay(make, out, 6)) == values[6]


def test_rows_go_to_no_service_and_the_directory_is_removed_with_the_trainer(tmp_path):
    """The rows themselves are there."""

    class Service(Writer):
        def write(self, record):
            sent.append(record.iteration)

    def note(trainer):
        chainring.report_text("note", f"iteration {trainer.updater.iteration}")

    def make(out):
        return make_small(out, parts=[note, extensions.LogReport(trigger=(2, "iteration"), writers=[Service()])])

    sent = []
    make(tmp_path / "result").run()
    assert sent == [2, 4, 6, 8, 10, 12]
    trainer = replay(make, tmp_path / "result", 7)
    assert len(sent) == 6
    assert [row["iteration"] for row in trainer.get_extension("LogReport").log] == [2, 4, 6]
    place = Path(trainer.out)
    assert place.is_dir()
    assert not place.is_relative_to(tmp_path)
    del trainer
    gc.collect()
    assert not place.parent.exists()


def test_the_threads_are_those_of_the_run(run):
    """Sums over another number of threads round otherwise; afterwards the number is what it was."""
    out, _ = run
    torch.set_num_threads(2)
    threads = []
    make = functools.partial(make_noting, loss_func=lambda model, x: threads.append(torch.get_num_threads()) or model(x))
    replay(make, out, 9)
    assert threads == [1]
    assert torch.get_num_threads() == 2


def make_on_ranks(out, **settings):
    return make_small(out, parts=[extensions.Recorder((2, "iteration"))], **settings)


def of_two_ranks(comm, out, virtual_ranks):
    make_on_ranks(out, length=6, comm=comm, virtual_ranks=virtual_ranks).run()


@pytest.mark.parametrize("virtual_ranks", [None, 2])
def test_a_run_of_two_ranks_is_replayed_where_one_process_computes_the_same_bits(tmp_path, virtual_ranks):
    """With virtual ranks, and as recorded; otherwise it is refused, with what to do."""
    out = tmp_path / "result"
    rank_pair.on_two_ranks(of_two_ranks, out, virtual_ranks)
    make = functools.partial(make_on_ranks, virtual_ranks=virtual_ranks)
    if virtual_ranks is None:
        for iteration in (5, 3):  # from the snapshot, and from the beginning
            with pytest.raises(NoReplay, match=r"was trained on 2 ranks.*virtual_ranks="):
                replay(make, out, iteration)
    else:
        whole = make_small(tmp_path / "whole", virtual_ranks=2, parts=[Noting(values := {})])
        whole.run()
        for iteration in (6, 3):
            assert values_of(replay(make, out, iteration)) == values[iteration]


@pytest.mark.parametrize(
    ("iteration", "error", "text"),
    [
        (99, NoReplay, "ends after iteration 12, before 99; give the arguments"),
        (-1, ValueError, "0, the state before the first, or more; got -1"),
        (1.5, TypeError, "an iteration is an integer, got 1.5"),
        (True, TypeError, "an iteration is an integer, got True"),
    ],
)
def test_other_iterations_are_refused(run, iteration, error, text):
    """Those that the run does not come to, and what is no number of one."""
    with pytest.raises(error, match=text):
        replay(make_noting, run[0], iteration)


def test_what_is_no_run_is_refused(run, tmp_path):
    """A snapshot, an empty directory, nothing at all, and a function that makes no trainer."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoReplay, match="is a snapshot; give its run, such as"):
        replay(make_noting, run[0] / "snapshot_iter_4", 4)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        replay(make_noting, tmp_path / "empty", 4)
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/run holds no run"):
        replay(make_noting, "memory://bucket/run", 4)
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        replay(make_noting, tmp_path / "nowhere", 4)
    with pytest.raises(TypeError, match="returned a NoneType"):
        replay(lambda: None, run[0], 4)
