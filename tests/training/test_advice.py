"""A run ends by one line that says where its time went and what to do first, if there is something to say."""

import io
import re

import pytest
import torch
from torch import nn

from chainring import html_report, training
from chainring.iterators import Iterator, SerialIterator
from chainring.testing import ManualClock
from chainring.training import UpdateCallbacks, extensions
from chainring.training._advice import advise
from chainring.writers import Writer

EACH, EVERY_5 = (1, "iteration"), (5, "iteration")


class Spent:
    """Lets seconds pass on a clock, of which every iteration has some, and those that are planted."""

    def __init__(self, clock, **planted):
        self.clock, self.planted = clock, planted

    def __call__(self, where):
        once = self.planted.pop("first batch", 0.0) if where == "data set" else 0.0
        self.clock.advance(self.planted.get(where, 0.0) + once)


class Data:
    def __init__(self, spend):
        self.spend = spend

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.spend("data set")
        return torch.ones(3)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, x, spend):
        context.spend = spend
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        context.spend("backward")
        return gradient, None


class Model(nn.Module):
    def __init__(self, spend):
        super().__init__()
        self.layer, self.spend = nn.Linear(3, 1), spend

    def forward(self, x):
        self.spend("forward" if self.training else "evaluation")
        return Backward.apply(self.layer(x).square().mean(), self.spend)


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        self.spend("step")
        return super().step(closure)


class SlowWriter(Writer):
    def __init__(self, spend):
        self.spend = spend

    def write(self, record):
        self.spend("writer")


class SlowStream(io.StringIO):
    def __init__(self, spend):
        super().__init__()
        self.spend = spend

    def write(self, text):
        self.spend("stream")
        return super().write(text)


class Hook(training.Extension):
    def __init__(self, spend):
        self.spend = spend

    def observe(self, trainer):
        self.spend("observe")

    def __call__(self, trainer):
        self.spend("hook")


def run_of(out, measured_by=(extensions.Profiler,), **planted):
    """A run of 20 iterations on a clock, in which all has to do with the planted seconds."""
    with ManualClock() as clock:
        spend = Spent(clock, **{"forward": 0.5, "backward": 0.5, **planted})

        def convert(batch, device):
            spend("converter")
            return torch.stack(list(batch))

        def trigger(trainer):
            spend("trigger")
            return False

        def stop(trainer):
            spend("stop trigger")
            return trainer.updater.iteration >= 20

        model = Model(spend)
        optimizer = Slow(model.parameters(), 0.01)
        optimizer.spend = spend
        torch.optim.SGD(model.parameters())  # from now on the step that Slow calls within its own has hooks too
        callbacks = UpdateCallbacks(
            batch_on_finish=lambda _: spend("augmentation"),
            backward_on_finish=lambda _: spend("computed"),
            update_on_start=lambda _: spend("clipping"),
            update_on_finish=lambda _: spend("updated"),
        )
        updater = training.StandardUpdater(
            SerialIterator(Data(spend), 2), optimizer, model, converter=convert, callbacks=callbacks
        )
        trainer = training.Trainer(updater, stop, out=str(out))
        test = SerialIterator(Data(lambda _: spend("evaluation data")), 2, repeat=False, shuffle=False)
        trainer.extend(
            extensions.Evaluator(test, model, converter=lambda batch, device: torch.stack(list(batch))), trigger=EVERY_5
        )
        trainer.extend(extensions.LogReport(trigger=EVERY_5, writers=[SlowWriter(spend)]))
        trainer.extend(extensions.PrintReport(["iteration", "main/loss"], out=SlowStream(spend)))
        trainer.extend(extensions.snapshot(condition=lambda: spend("snapshot") or True), trigger=EVERY_5)
        trainer.extend(Hook(spend), "hook", EVERY_5)
        trainer.extend(lambda trainer: spend("each"), "each", EACH)
        trainer.extend(lambda trainer: None, "never", trigger)
        for measuring in measured_by:
            trainer.extend(measuring())
        trainer.run()


WORKERS = "more workers (MultiprocessIterator, which takes your converter= too), or a faster transform"
STEP, AROUND = "in the step of the optimizer", "around the step of the optimizer"
CALLBACKS = "less in callbacks, in clipping, and in checks of gradients"
PLANTED = {  # seconds, what the line says of them, and its remedy
    "a data set": ({"data set": 2.0}, "76 % of the time waiting for data", WORKERS),
    "a data set, a little": ({"data set": 0.25}, "32 % of the time waiting for data", WORKERS),
    "a converter": ({"converter": 4.0}, "76 % of the time waiting for data", WORKERS),
    "evaluation, its model": ({"evaluation": 5.0}, "80 % of the time evaluating", "fewer examples"),
    "evaluation, its data": ({"evaluation data": 1.25}, "67 % of the time evaluating", "fewer examples"),
    "snapshots": ({"snapshot": 5.0}, "50 % of the time taking snapshots", "a less frequent trigger, or a faster disk"),
    "a writer of the log": ({"writer": 10.0}, "67 % of the time in the log", "faster writers"),
    "a terminal": ({"stream": 5.0}, " % of the time in extension 'PrintReport'", "a less frequent trigger"),
    "an extension of an interval": ({"hook": 15.0}, "75 % of the time in extension 'hook'", "a less frequent trigger"),
    "an extension of every iteration": ({"each": 1.0}, "50 % of the time in extension 'each'", "a less frequent trigger"),
    "an observe method": ({"observe": 3.0}, "75 % of the time in extension 'hook'", "less to do in it, or"),
    "a trigger": ({"trigger": 3.0}, "75 % of the time between updates", "fewer or faster triggers"),
    "a stop trigger": ({"stop trigger": 3.0}, " % of the time between updates", "fewer or faster triggers"),
    "an optimizer": ({"step": 1.0}, f"50 % of the time {STEP}", "fused=True"),
    "clipping": ({"clipping": 1.0}, f"50 % of the time {AROUND}", CALLBACKS),
    "a callback after the step": ({"updated": 1.0}, f"50 % of the time {AROUND}", CALLBACKS),
    "a callback after the backward": ({"computed": 1.0}, f"50 % of the time {AROUND}", CALLBACKS),
    "a change of each batch": ({"augmentation": 4.0}, "76 % of the time waiting for data", "a faster transform"),
}


def line_of(capsys):
    lines = [line for line in capsys.readouterr().out.splitlines() if "what helps first" in line]
    assert len(lines) <= 1
    return lines[0] if lines else None


@pytest.mark.parametrize("measuring", [extensions.Profiler, lambda: extensions.RankTimes(trigger=(20, "iteration"))])
@pytest.mark.parametrize(("planted", "where", "remedy"), PLANTED.values(), ids=PLANTED)
def test_a_planted_bottleneck_is_named_with_its_remedy(tmp_path, capsys, planted, where, remedy, measuring):
    """At the end of the run, and by the page of its report."""
    run_of(tmp_path, (measuring,), **planted)
    line = line_of(capsys)
    assert where in line
    assert remedy in line
    html_report.write(tmp_path)  # of RankTimes without what comes after its last report
    assert where.partition(" % ")[2].replace("'", "&#39;") in (tmp_path / "report.html").read_text()


SMALL = {"forward": 4.0, "backward": 5.0, "update": 3.0}  # of 20,000 updates
OF_PHASES = {
    "tiny updates": (SMALL, "100 % of the time in updates of 0.60 ms, which are mostly Python's", "compile=True"),
    "data of tiny updates": ({**SMALL, "data": 36.0}, "75 % of the time waiting for data", WORKERS),
    "ranks": ({"forward": 4.0, "backward": 3.0, "communication": 7.0}, "50 % of the time exchanging", "RankTimes"),
    "two evaluators": (
        {"forward": 60.0, "extension:validation": 20.0, "extension:validation_1": 20.0},
        "40 % of the time evaluating",
        "fewer examples",
    ),
    "two kinds of snapshots": (
        {"forward": 60.0, "extension:snapshot": 1.0, "extension:snapshot_1": 39.0},
        "40 % of the time taking snapshots",
        "a faster disk",
    ),
}


@pytest.mark.parametrize(("seconds", "where", "remedy"), OF_PHASES.values(), ids=OF_PHASES)
def test_what_takes_many_updates_or_ranks_is_named_by_its_seconds(seconds, where, remedy):
    line = advise(seconds, 20_000)
    assert where in line
    assert remedy in line


@pytest.mark.parametrize(
    ("planted", "where"),
    [
        ({"evaluation": 5.0}, "80 % of the time evaluating"),
        ({"snapshot": 5.0}, "50 % of the time taking snapshots"),
        ({"hook": 15.0}, "75 % of the time in extension 'hook'"),
        ({"writer": 10.0}, "67 % of the time in the log"),
    ],
)
def test_extensions_that_take_long_are_named_without_a_profiler(tmp_path, capsys, planted, where):
    """Those whose triggers do not fire in every iteration, which are timed in any run."""
    run_of(tmp_path, (), **planted)
    assert where in line_of(capsys)


@pytest.mark.parametrize(
    "planted",
    [
        {},
        {"forward": 10.0},
        {"backward": 10.0},
        {"data set": 0.1},
        {"forward": 0.1, "backward": 0.1, "data set": 0.1},
        {"first batch": 60.0},
    ],
    ids=["nothing", "a forward", "a backward", "data that take little", "a run of some seconds", "workers that start once"],
)
@pytest.mark.parametrize("measured_by", [(), (extensions.Profiler,), (extensions.RankTimes,)])
def test_nothing_is_said_where_there_is_nothing_to_do(tmp_path, capsys, planted, measured_by):
    """Where the time goes into the model, and of runs below ten seconds."""
    run_of(tmp_path, measured_by, **planted)
    assert line_of(capsys) is None


def test_an_update_of_ones_own_is_not_taken_for_a_step_of_the_optimizer():
    """An updater whose forward and backward are not known, as of an evolution of weights, or of a closure in a step."""
    assert advise({"update": 80.0, "data": 20.0}, 100) is None
    assert "30 % of the time waiting for data" in advise({"update": 70.0, "data": 30.0}, 100)


def trainer_of(out, spend=lambda where: None, stop=(5, "iteration"), data=None):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = data or SerialIterator(Data(spend), 2)
    updater = training.StandardUpdater(data, optimizer, model, loss_func=lambda model, x: model(x).mean())
    return training.Trainer(updater, stop, out=str(out))


def test_extensions_that_were_never_called_are_named_at_the_end(tmp_path, capsys):
    """A log that has no row, such as that of a stream without epochs, and what reports for it."""
    trainer = trainer_of(tmp_path, stop=(3, "iteration"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.observe_lr())
    trainer.extend(lambda trainer: None, "called", (3, "iteration"))
    trainer.extend(extensions.snapshot(autoload=True))  # taken at the end of any run
    trainer.run()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("never called, because the run has ended after iteration 3: observe_lr, LogReport; ")
    assert 'trigger=(1, "iteration"), to extend or defaults' in line
    again = trainer_of(tmp_path, stop=(3, "iteration"))
    again.extend(extensions.LogReport())
    again.extend(extensions.observe_lr())
    again.extend(lambda trainer: None, "called", (3, "iteration"))
    again.extend(extensions.snapshot(autoload=True))
    again.run()
    assert "never called" not in capsys.readouterr().out  # by a start that continues another


@pytest.mark.parametrize(("stop", "names"), [((3, "iteration"), ["LogReport, snapshot"]), ((1, "epoch"), [])])
def test_what_waits_for_the_end_of_a_stream_is_named_at_the_start_alone(tmp_path, capsys, stop, names):
    """It may never come, and a run that is killed would leave neither log nor snapshot; one that stops with it knows it."""
    trainer = trainer_of(tmp_path, stop=stop, data=lambda: iter([torch.ones(2, 3)] * 9))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
    trainer.run()
    lines = capsys.readouterr().out.splitlines()
    assert [re.search("until they end, nothing calls (.*?); give", line)[1] for line in lines] == names


def test_an_iterator_may_call_what_it_likes_progress(tmp_path):
    """The run starts, whose epochs it counts by other attributes."""

    class Mine(Iterator):
        batch_size, epoch, is_new_epoch, epoch_detail, previous_epoch_detail, progress = 2, 0, False, 0.0, None, 0.5

        def __next__(self):
            return [torch.ones(3)] * 2

    trainer = trainer_of(tmp_path, stop=(3, "iteration"), data=Mine())
    trainer.extend(extensions.LogReport(trigger=EACH))
    trainer.run()
    assert trainer.updater.iteration == 3


@pytest.mark.parametrize(("seconds", "says"), [(3.0, True), (0.1, False)])
def test_a_long_run_that_leaves_nothing_says_so(tmp_path, capsys, seconds, says):
    """Neither log nor snapshot: the model is in memory still, and the line saves it. A short one is a trial."""
    with ManualClock() as clock:
        trainer = trainer_of(tmp_path)
        trainer.extend(lambda trainer: clock.advance(seconds), "work", (1, "iteration"))
        trainer.run()
        printed = capsys.readouterr().out
        assert ("has written neither a log nor a snapshot" in printed) == says
        trainer = trainer_of(tmp_path)
        trainer.extend(lambda trainer: clock.advance(seconds), "work", (1, "iteration"))
        trainer.extend(extensions.LogReport(trigger=EVERY_5))
        trainer.run()
    assert "neither a log" not in capsys.readouterr().out
