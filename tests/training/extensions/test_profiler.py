"""Profiler: the time of each phase, a table of it when the run ends, and a trace of some iterations."""

import json
import time

import pytest
import torch
from regressions import Regression, regression_data, updater_of
from resuming import parts
from scripted import Counting

from chainring import training
from chainring.converters import concat_examples
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, UpdateCallbacks, extensions


@pytest.fixture
def clock(monkeypatch):
    """The clock, which goes when `passes` is called and at no other time."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds, result=None):
        now[0] += seconds
        return result

    return passes


class Slow(Regression):
    """Takes 2 seconds for a forward, and 4 for a backward."""

    def __init__(self, passes, reports=True):
        super().__init__()
        self.passes, self.reports = passes, reports

    def forward(self, x, t):
        self.passes(2)
        loss = super().forward(x, t)
        loss.register_hook(lambda gradient: self.passes(4))
        return loss


class SlowSGD(torch.optim.SGD):
    """Takes 8 seconds for a step; the hooks of a step run twice, for its own and for that of its base."""

    def step(self, closure=None):
        self.passes(8)
        super().step()


torch.optim.SGD([torch.zeros(1)])  # the first of a kind gives its class the hooks


def slow_updater(passes, kind=StandardUpdater, **settings):
    """Takes 1 second for a batch, too."""
    model = Slow(passes)
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    optimizer.passes = passes
    iterator = SerialIterator(regression_data(), 4)
    return kind(iterator, optimizer, model, converter=lambda *args: passes(1, concat_examples(*args)), **settings)


def profiled(out, updater, *others, length=3, profiler=None):
    profiler = extensions.Profiler() if profiler is None else profiler
    training.Trainer(updater, (length, "iteration"), str(out), [profiler, *others]).run()
    return profiler


class OwnCore(StandardUpdater):
    """Says in its own words what the standard updater does."""

    def update_core(self):
        batch = self.next_batch()
        with self.autocast():
            loss = self.get_model("main")(*batch)
        self.backward(loss)
        self.step()


@pytest.mark.parametrize(
    ("settings", "parts_of_update"),
    [({}, 1), ({"kind": OwnCore}, 1), ({"accumulate": 3}, 3), ({"precision": "bf16"}, 1), ({"callbacks": "own"}, 1)],
)
def test_each_phase_has_its_own_time(tmp_path, clock, settings, parts_of_update):
    """Straight and in stages, with parts that are accumulated, and beside callbacks of one's own."""
    if "callbacks" in settings:
        settings = {"callbacks": UpdateCallbacks(forward_on_finish=lambda context: clock(32))}
    profiler = profiled(tmp_path, slow_updater(clock, **settings), lambda trainer: clock(16))
    own = 32 if "callbacks" in settings else 0
    assert profiler.iterations == 3
    assert profiler.seconds == {
        "first batch": 1 * parts_of_update,  # for which workers start
        "data": 2 * 1 * parts_of_update,
        "forward": 3 * (2 * parts_of_update + own),
        "backward": 3 * 4 * parts_of_update,
        "communication": 0,
        "step": 3 * 8,
        "update": 0,
        "loop": 0,
        "extension:<lambda>": 3 * 16,
    }


def test_an_updater_that_does_all_by_itself_counts_as_update(tmp_path, clock):
    """But for what is between its updates."""

    class Own(Counting):
        def update_core(self):
            clock(5)

    seconds = profiled(tmp_path, Own(), lambda trainer: clock(1)).seconds
    assert {phase: each for phase, each in seconds.items() if each} == {"update": 15, "extension:<lambda>": 3}


def test_each_extension_has_the_time_of_its_call_and_of_its_observation(tmp_path, clock):
    """What is between them, such as triggers, is the loop's; snapshots have theirs too."""

    class Observing(training.Extension):
        trigger = (3, "iteration")

        def observe(self, trainer):
            clock(1)

        def __call__(self, trainer):
            clock(10)

    class Saving(Observing):
        is_snapshot = True

    def slow_trigger(trainer):
        return clock(100, result=True)

    own = training.make_extension(trigger=slow_trigger, default_name="own")(lambda trainer: clock(1000))
    seconds = profiled(tmp_path, Counting(), Observing(), Saving(), own, length=4).seconds
    assert {phase: each for phase, each in seconds.items() if each} == {
        "loop": 400,
        "extension:Observing": 4 * 1 + 10,
        "extension:Saving": 4 * 1 + 10,
        "extension:own": 4000,
    }


def test_the_table_is_written_when_the_run_ends(tmp_path, clock):
    """Also when it fails; the time up to then. The same is written as JSON."""

    def fail(trainer):
        clock(1)
        if trainer.updater.iteration == 2:
            raise ValueError("as planned")

    with pytest.raises(ValueError, match="as planned"):
        profiled(tmp_path, slow_updater(clock), fail)
    lines = (tmp_path / "profile.txt").read_text().splitlines()
    assert [line.split() for line in lines] == [
        ["2", "iterations"],
        ["phase", "share", "ms/iteration", "seconds"],
        ["first", "batch", "3.1%", "500.000", "1.000"],
        ["data", "3.1%", "500.000", "1.000"],
        ["forward", "12.5%", "2000.000", "4.000"],
        ["backward", "25.0%", "4000.000", "8.000"],
        ["step", "50.0%", "8000.000", "16.000"],
        ["extension:fail", "6.2%", "1000.000", "2.000"],
        ["all", "100.0%", "16000.000", "32.000"],
    ]
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data == {
        "iterations": 2,
        "seconds": {
            "first batch": 1, "data": 1, "forward": 4, "backward": 8, "communication": 0, "step": 16, "update": 0, "loop": 0,
            "extension:fail": 2,
        },
    }  # fmt: skip


def test_the_trace_has_the_operations_of_its_iterations(tmp_path):
    """Two steps of the optimizer, in the format of Chrome's viewer; without a trace there is no file."""
    profiled(tmp_path, updater_of(), length=5, profiler=extensions.Profiler(trace=(2, 3)))
    events = json.loads((tmp_path / "profile_trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert any("addmm" in name for name in names)
    profiled(tmp_path / "other", updater_of())
    assert not (tmp_path / "other" / "profile_trace.json").exists()


def test_a_trace_that_the_run_ends_in_is_written(tmp_path):
    """What there is of it."""
    profiled(tmp_path, updater_of(), length=2, profiler=extensions.Profiler(trace=(2, 9)))
    assert json.loads((tmp_path / "profile_trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"callbacks": UpdateCallbacks()}])
def test_training_is_the_same_with_it_and_nothing_stays_behind(tmp_path, settings):
    """Bit for bit, beside another extension that looks at the batches; the updater is what it was."""
    plain, timed = updater_of(**settings), updater_of(**settings)
    before = {name: value for name, value in vars(timed).items() if name in ("update", "converter", "callbacks")}
    training.Trainer(plain, (4, "iteration"), str(tmp_path)).run()
    profiled(tmp_path, timed, extensions.FailOnNonNumber(), extensions.Throughput(), length=4)
    assert {name: value for name, value in vars(timed).items() if name in ("update", "converter", "callbacks")} == before
    for own, other in zip(*(updater.get_model("main").parameters() for updater in (plain, timed)), strict=True):
        assert torch.equal(own, other)


@pytest.mark.filterwarnings("ignore:two updates")  # its clock
def test_a_rehearsal_does_not_count(tmp_path, clock):
    """Its table goes where its other files go."""
    profiler = extensions.Profiler()
    trainer = training.Trainer(slow_updater(clock), (1, "iteration"), str(tmp_path), [profiler])
    trainer.rehearse()
    trainer.run()
    assert (profiler.iterations, profiler.seconds["step"]) == (1, 8)


def test_a_resumed_run_measures_what_this_process_does(tmp_path, clock):
    """It has no state."""
    _, (trainer, _, (second,)) = parts(tmp_path, lambda: (slow_updater(clock), [extensions.Profiler()]), 5, 3, way="file")
    assert (second.iterations, second.seconds["data"] + second.seconds["first batch"]) == (2, 2)
    assert not any(key.startswith("extensions/Profiler") for key in trainer.state_dict())


@pytest.mark.parametrize(
    ("trace", "error"),
    [(5, TypeError), ((1, 2, 3), TypeError), ((1.0, 2), TypeError), ((0, 2), ValueError), ((3, 2), ValueError)],
)
def test_what_cannot_be_traced_is_refused_at_construction(trace, error):
    """The error gives the rule and the value."""
    with pytest.raises(error, match=r"the first and the last iteration to record, counted from 1.*got"):
        extensions.Profiler(trace=trace)
