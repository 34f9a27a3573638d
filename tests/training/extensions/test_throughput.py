"""Throughput: iterations, examples and tokens a second, and the peak of memory."""

import datetime
import json
import time

import pytest
import torch
from regressions import Regression, same_regression, updater_of
from resuming import parts, whole
from scripted import Counting

from chainring import serializers, training
from chainring.training import extensions

EVERY_2 = (2, "iteration")


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock, which goes when it is told to."""
    now = [1000.0]
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[0])
    return now


def rates_of(out, clock, updater, length=4, throughput=None, seconds=0.5, name=None):
    """What is reported in each iteration, of so many seconds, without the peak of memory."""
    seen = []

    def look(trainer):
        rates = {key: float(value) for key, value in trainer.observation.items() if "_per_second" in key}
        seen.append(rates)

    def go(trainer):
        clock[0] += seconds

    trainer = training.Trainer(updater, (length, "iteration"), out=str(out))
    trainer.extend(look, priority=0)
    trainer.extend(go, priority=900)
    trainer.extend(extensions.Throughput(trigger=EVERY_2) if throughput is None else throughput, name=name)
    trainer.run()
    return seen


def test_iterations_and_examples_a_second_are_reported_when_the_trigger_fires(tmp_path, clock):
    """Two iterations of four examples take a second here; the rest of the interval counts from the last report."""
    rates = {"throughput/iterations_per_second": 2.0, "throughput/examples_per_second": 8.0}
    assert rates_of(tmp_path, clock, updater_of()) == [{}, rates, {}, rates]


def test_the_interval_is_an_epoch_unless_another_is_given(tmp_path, clock):
    """Of three iterations here."""
    seen = rates_of(tmp_path, clock, updater_of(), 6, extensions.Throughput())
    assert [bool(rates) for rates in seen] == [False, False, True] * 2


def test_the_whole_loop_is_timed(tmp_path, clock):
    """Also what other extensions take after it, which falls into its next interval."""
    trainer = training.Trainer(updater_of(), (4, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.Throughput(trigger=EVERY_2))
    seen = []
    trainer.extend(lambda trainer: clock.__setitem__(0, clock[0] + 1), "go", priority=1)
    trainer.extend(
        lambda trainer: seen.append(trainer.observation["throughput/iterations_per_second"]), "look", EVERY_2, priority=2
    )
    trainer.run()
    assert seen == [2.0, 1.0]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulated_parts_count(tmp_path, clock, accumulate):
    """An update of three parts has three batches."""
    seen = rates_of(tmp_path, clock, updater_of(accumulate=accumulate), 2)
    assert seen[-1]["throughput/examples_per_second"] == 8.0 * accumulate


class Weighted(Regression):
    """Its loss counts tokens, of which an example has ten."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x, t):
        return {"loss": super().forward(x, t), "weight": self.of(10 * len(x))}


@pytest.mark.parametrize("of", [int, torch.tensor])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_tokens_are_counted_where_the_loss_is_weighted(tmp_path, clock, of, accumulate):
    """Beside the examples; nowhere else."""
    seen = rates_of(tmp_path, clock, updater_of(Weighted(of), accumulate=accumulate))
    assert [rates.get("throughput/tokens_per_second") for rates in seen] == [None, 80.0 * accumulate] * 2
    assert seen[1]["throughput/examples_per_second"] == 8.0 * accumulate


@pytest.mark.parametrize("of", [None, int, torch.tensor])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_virtual_ranks_change_no_rate(tmp_path, clock, of, accumulate):
    """Tokens are counted where the loss is weighted, and nowhere else."""

    def rates(virtual_ranks):
        model = [] if of is None else [Weighted(of)]
        updater = updater_of(*model, accumulate=accumulate, virtual_ranks=virtual_ranks)
        return rates_of(tmp_path / str(virtual_ranks), clock, updater)

    assert rates(1) == rates(2) == rates(None)


def test_an_updater_without_a_converter_has_iterations_only(tmp_path, clock):
    """What an example is, is its own affair."""
    assert rates_of(tmp_path, clock, Counting())[1] == {"throughput/iterations_per_second": 2.0}


def test_two_of_them_have_names_of_their_own(tmp_path, clock):
    """The keys begin with the name of the extension."""
    assert set(rates_of(tmp_path, clock, Counting(), name="speed")[1]) == {"speed/iterations_per_second"}


def test_the_peak_of_memory_never_sinks(tmp_path):
    """In MiB of the process, where the models are on the host: what is held is in it, and what was held stays."""
    peaks, held = [], []

    def hold(trainer):
        held[:] = [torch.ones(2**23)] if trainer.updater.iteration == 2 else []

    trainer = training.Trainer(updater_of(), (3, "iteration"), out=str(tmp_path))
    trainer.extend(hold, priority=900)
    trainer.extend(extensions.Throughput(trigger=(1, "iteration")))
    trainer.extend(lambda trainer: peaks.append(trainer.observation["throughput/peak_memory_mib"]), "look")
    trainer.run()
    assert 32 < peaks[0] <= peaks[1] <= peaks[2] < 100_000


def test_a_log_report_takes_it_down(tmp_path):
    """In the row of the same iteration."""
    log = extensions.LogReport(trigger=EVERY_2)
    trainer = training.Trainer(updater_of(), (4, "iteration"), str(tmp_path), [log, extensions.Throughput(EVERY_2)])
    trainer.run()
    assert all(row["throughput/examples_per_second"] > 0 for row in log.log)


def test_training_is_the_same_with_it_and_the_converter_is_put_back(tmp_path):
    """Beside another extension that looks at the batches, in either order."""
    plain, timed = updater_of(), updater_of()
    converter = timed.converter
    for updater, own in ((plain, []), (timed, [extensions.FailOnNonNumber(), extensions.Throughput()])):
        training.Trainer(updater, (4, "iteration"), str(tmp_path), own).run()
    assert timed.converter is converter
    for own, other in zip(*(updater.get_model("main").parameters() for updater in (plain, timed)), strict=True):
        assert torch.equal(own, other)


def test_the_seconds_before_a_resume_do_not_count(tmp_path, clock):
    """A resumed interval is timed from where this process began."""

    def make():
        seen, updater = [], updater_of(same_regression())
        go = training.make_extension(default_name="go", priority=900)(lambda _: clock.__setitem__(0, clock[0] + 1))
        look = training.make_extension(default_name="look", trigger=(4, "iteration"))(
            lambda trainer: seen.append(trainer.observation["throughput/iterations_per_second"])
        )
        look.seen = seen
        return updater, [go, extensions.Throughput((4, "iteration")), look]

    _, _, (_, _, look) = whole(tmp_path, make, 4)
    (_, _, _), (_, _, (_, _, resumed)) = parts(tmp_path / "cut", make, 4, 3, way="file")
    assert look.seen == resumed.seen == [1.0]


def timed(out, clock, length=4, own=(), loads=None):
    """A trainer that takes snapshots at every second iteration, and the goodput by iteration."""
    updater = updater_of(callbacks=training.UpdateCallbacks(forward_on_start=lambda _: pass_time(clock, 1)))
    trainer, seen = training.Trainer(updater, (length, "iteration"), out=str(out)), {}
    trainer.extend(extensions.Throughput((1, "iteration")))
    trainer.extend(extensions.snapshot(), trigger=EVERY_2)
    for extension in own:
        trainer.extend(extension)
    trainer.extend(lambda t: seen.__setitem__(t.updater.iteration, t.observation["throughput/goodput"]), "look")
    if loads is not None:
        serializers.load(loads, trainer)
    return trainer, seen


def pass_time(clock, seconds):
    clock[0] += seconds


def test_goodput_is_the_part_of_the_time_that_went_into_updates(tmp_path, clock):
    """A second each here; an extension that takes three is no update."""
    trainer, seen = timed(tmp_path, clock)
    trainer.extend(lambda trainer: pass_time(clock, 3), "evaluation", priority=900)
    trainer.run()
    assert seen == dict.fromkeys(range(1, 5), 0.25)


def test_updates_that_a_kill_has_undone_and_the_time_until_the_next_start_are_lost(tmp_path, clock, monkeypatch):
    """Two of three updates are kept; the run is continued 4,000 seconds after its first start."""
    trainer, _ = timed(tmp_path, clock, length=3)
    trainer.run()
    first = json.loads((tmp_path / "run.json").read_text())["starts"][0]["time"]
    now = datetime.datetime.fromisoformat(first).timestamp() + 4001
    monkeypatch.setattr(time, "time", lambda: now)
    trainer, seen = timed(tmp_path, clock, loads=tmp_path / "snapshot_iter_2")
    trainer.run()
    assert seen == {3: 3 / 4001, 4: 4 / 4002}


def test_updates_that_a_rollback_has_undone_are_lost(tmp_path, clock):
    """The run goes back from the third iteration to the second, once."""
    went_back = []

    def go_back(trainer):
        if trainer.updater.iteration == 3 and not went_back:
            went_back.append(True)
            raise training.RollBack("the third is to be done again")

    trainer, seen = timed(tmp_path, clock, own=[go_back])
    trainer.run()
    assert went_back
    assert seen == {1: 1.0, 2: 1.0, 3: 3 / 4, 4: 4 / 5}


def test_goodput_is_no_difference_between_a_run_and_the_resumed_one(tmp_path, clock):
    """Its state follows the clock, as the elapsed time, by which name tools leave it out."""
    trainer, _ = timed(tmp_path, clock)
    assert [key for key in trainer.state_dict() if key.startswith("extensions/throughput")] == [
        "extensions/throughput/elapsed_time/updates"
    ]
