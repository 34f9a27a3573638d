"""Every scheduler of torch goes on exactly, wherever the run is cut and in whatever order things are made."""

import warnings

import pytest
import torch
from schedules import PER_EPOCH, WAYS, Line, chained, resumed, sgd, trainer_of
from scripted import Counting
from torch.optim import lr_scheduler

from chainring import training
from chainring.training import extensions
from chainring.training.extensions import LRScheduler
from torch_schedulers import CASES, EVERY_CASE

pytestmark = [
    pytest.mark.filterwarnings("ignore:The epoch parameter in"),  # of SequentialLR, until torch 2.9
    pytest.mark.filterwarnings("ignore:ReduceLROnPlateau has the mode 'max', and of 'main/loss'"),
]

STOP = 8


def adam(model, lr=0.1, **_):
    return torch.optim.Adam([{"params": [each], "lr": torch.tensor(lr)} for each in model.parameters()])


def builder(make, *, made="after", by_loss=False, optimizer=sgd, lr=0.1, every=1):
    """A run with a scheduler, which is made before the updater, after it, or when it is registered."""

    def build(out, stop):
        def optimizer_of(model):
            kept.append(optimizer(model, lr=lr, split=True))
            if made == "before":
                kept.append(make(kept[0]))
            return kept[0]

        kept = []
        trainer = trainer_of(out, stop, optimizer=optimizer_of)
        if made == "after":
            kept.append(make(kept[0]))

        def extend():
            scheduler = make(kept[0]) if made == "last" else kept[1]
            trainer.extend(LRScheduler(scheduler, monitor="main/loss" if by_loss else None), trigger=(every, "iteration"))

        return trainer, extend

    return build


def check(tmp_path, said, build, ways):
    expected = resumed(tmp_path / "whole", STOP, None, build, "file")
    assert len({str(groups[0][0]) for groups in expected[0]}) > 1
    for way in ways:
        assert chained(tmp_path / way, STOP, build, way) == expected, way
    assert said() == []


@pytest.mark.parametrize("made", ["before", "after", "last"])
@pytest.mark.parametrize(("name", "make"), EVERY_CASE)
def test_every_scheduler_goes_on_exactly(tmp_path, said, name, make, made):
    """Also one that is made after the state was loaded, which writes to the groups at once, and nothing is printed."""
    build = builder(make, made=made, by_loss=name == "ReduceLROnPlateau")
    check(tmp_path, said, build, ["load, extend"] if made != "before" else ["extend, load"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["SequentialLR", "CyclicLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_it_goes_on_exactly_after_every_iteration_and_from_the_disk(tmp_path, said, name, way):
    """With steps in every second iteration, so that there is something between two of them."""
    make = next(iter(CASES[name].values()))
    build = builder(make, made="last", by_loss=name == "ReduceLROnPlateau", every=2)
    check(tmp_path, said, build, [way])


@pytest.mark.parametrize("name", ["LambdaLR", "SequentialLR", "CyclicLR", "ReduceLROnPlateau"])
def test_learning_rates_that_are_tensors_go_on_exactly(tmp_path, said, name):
    """Also with betas in the place of a momentum."""
    make = next(iter(CASES[name].values()))
    build = builder(make, made="last", by_loss=name == "ReduceLROnPlateau", optimizer=adam)
    check(tmp_path, said, build, ["load, extend", "file"])


OBSERVATIONS = [{"loss" if number < 6 else "los": value} for number, value in enumerate([4, 1, 5, 3, 2, 6, 1, 1])]


def test_the_mean_and_the_warning_of_an_interval_that_is_cut_are_those_of_the_whole(tmp_path):
    """What came before the cut counts, what was said is not said again; of an optimizer that the updater does not save."""

    def part(stop, state=None):
        optimizer = sgd(Line(), lr=1.0)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        trainer = training.Trainer(Counting(OBSERVATIONS), (stop, "iteration"), str(tmp_path))
        trainer.extend(LRScheduler(plateau, monitor="loss"), trigger=(2, "iteration"))
        if state is not None:
            trainer.load_state_dict(state)
        trainer.run()
        return trainer.state_dict(), [optimizer.param_groups[0]["lr"], plateau.best, plateau.last_epoch]

    for k in range(9):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = part(k)
            _, after = part(8, state)
        assert len(caught) == 1
        assert after == [0.25, 2.5, 3], k


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", ["before", "after", "last"])
@pytest.mark.parametrize("name", ["LambdaLR", "StepLR", "ExponentialLR", "PolynomialLR", "SequentialLR", "ChainedScheduler"])
def test_a_new_learning_rate_of_the_optimizer_holds_in_the_schedule(tmp_path, capsys, name, made, way):
    """The schedule goes on as far along as it was, on the new rate."""
    make = next(iter(CASES[name].values()))
    before, after = (builder(make, made=made, lr=lr) for lr in (0.1, 0.5))
    expected = resumed(tmp_path / "whole", STOP, None, after, way)[0]
    used = resumed(tmp_path, STOP, 4, before, way, change=after)[0]
    assert [groups[0][0] for groups in used[4:]] == pytest.approx([groups[0][0] for groups in expected[4:]])
    assert "lr of optimizer 'main', group 0 0.1 -> 0.5" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("made", ["before", "after", "last"])
def test_a_scheduler_that_sets_its_own_rates_does_not_heed_that_of_the_optimizer(tmp_path, made):
    """As in a run from the beginning."""
    make = CASES["OneCycleLR"]["cos"]
    before, after = (builder(make, made=made, lr=lr) for lr in (0.1, 0.5))
    expected = resumed(tmp_path / "whole", STOP, None, after, "file")[0]
    way = "load, extend" if made == "last" else "file"
    used = resumed(tmp_path, STOP, 4, before, way, change=after)[0]
    assert [groups[0][0] for groups in used] == pytest.approx([groups[0][0] for groups in expected])


@pytest.mark.parametrize("way", WAYS)
def test_a_new_setting_of_the_scheduler_holds_and_is_printed(tmp_path, capsys, way):
    """Torch would take it from the saved state, without a word."""
    before, after = (
        builder(lambda o, g=gamma: lr_scheduler.ExponentialLR(o, g), made="last", lr=1.0) for gamma in (0.5, 0.1)
    )
    used = resumed(tmp_path, 5, 2, before, way, change=after)[0]
    assert [groups[0][0] for groups in used] == pytest.approx([1, 0.5, 0.25, 0.025, 0.0025])
    assert "gamma of the scheduler 0.5 -> 0.1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("way", WAYS)
def test_a_new_setting_inside_a_sequence_and_one_that_lies_in_the_groups_hold(tmp_path, capsys, way):
    """A part's own, and the highest rate of a cycle."""

    def sequence(gamma):
        return lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 1.0), lr_scheduler.ExponentialLR(o, gamma)], milestones=[1]
        )

    before, after = (builder(sequence(gamma), made="last", lr=1.0) for gamma in (0.5, 0.1))
    used = resumed(tmp_path / "sequence", 5, 3, before, way, change=after)[0]
    assert [groups[0][0] for groups in used] == pytest.approx([1, 1, 0.5, 0.25, 0.025])
    before, after = (
        builder(lambda o, top=top: lr_scheduler.OneCycleLR(o, top, total_steps=8), made="last") for top in (1, 2)
    )
    expected = resumed(tmp_path / "whole", 6, None, after, way)[0]
    used = resumed(tmp_path / "cycle", 6, 4, before, way, change=after)[0]
    assert used[5] == expected[5]
    assert "max_lr of the scheduler, group 1 " in capsys.readouterr().out


def test_another_scheduler_starts_from_where_the_rate_is(tmp_path, capsys):
    """Nothing of the old one's state is taken over, and that is said."""
    before = builder(lambda o: lr_scheduler.ExponentialLR(o, 0.5), lr=1.0)
    after = builder(lambda o: lr_scheduler.StepLR(o, 2, 0.1), lr=1.0)
    used = resumed(tmp_path, 6, 2, before, "file", change=after)[0]
    assert [groups[0][0] for groups in used] == pytest.approx([1, 0.5, 0.25, 0.25, 0.025, 0.025])
    assert "the scheduler 'ExponentialLR' -> 'StepLR' (the new one starts from here)" in " ".join(
        capsys.readouterr().out.split()
    )


def test_what_the_script_writes_by_hand_after_the_load_holds(tmp_path):
    """It is not taken back when the run starts."""
    build = builder(lambda o: lr_scheduler.ExponentialLR(o, 0.5), lr=1.0)
    first, extend = build(tmp_path / "first", 2)
    extend()
    first.run()
    second, extend = build(tmp_path / "second", 4)
    extend()
    second.load_state_dict(first.state_dict())
    group = second.updater.get_optimizer("main").param_groups[0]
    group["lr"] = 8.0
    second.run()
    assert group["lr"] == 2.0


def test_a_rehearsal_leaves_no_trace(tmp_path):
    """Also none in a scheduler that had been resumed."""
    rates = []
    for rehearses in (False, True):
        build = builder(CASES["SequentialLR"]["of three"], made="last")
        first, extend = build(tmp_path / "first", 3)
        extend()
        if rehearses:
            first.rehearse()
        first.run()
        second, extend = build(tmp_path / "second", 7)
        second.load_state_dict(first.state_dict())
        extend()
        if rehearses:
            second.rehearse()
        second.run()
        rates.append([group["lr"] for group in second.updater.get_optimizer("main").param_groups])
    assert rates[0] == rates[1]


def test_the_state_before_the_run_is_the_state_that_was_loaded(tmp_path):
    """A trainer that is loaded and saved again without a run hands on what it was given."""
    build = builder(CASES["CyclicLR"]["momentum"], made="last")
    trainers = [build(tmp_path / str(number), stop) for number, stop in enumerate((3, 0, 6, 6))]
    for number, (trainer, extend) in enumerate(trainers[:3]):
        if number:
            trainer.load_state_dict(trainers[number - 1][0].state_dict())
        extend()
        if number != 1:
            trainer.run()
    whole, extend = trainers[3]
    extend()
    whole.run()
    ends = [trainer.updater.get_optimizer("main").param_groups[0] for trainer in (trainers[2][0], whole)]
    assert [end["momentum"] for end in ends] == [ends[0]["momentum"]] * 2


def test_a_snapshot_of_an_epoch_and_the_step_after_it_do_not_repeat_it(tmp_path):
    """A run that loads its snapshot by itself steps once an epoch, as the whole does."""

    def part(stop):
        trainer = trainer_of(tmp_path, stop, extensions.snapshot(autoload=True))
        optimizer = trainer.updater.get_optimizer("main")
        trainer.extend(LRScheduler(lr_scheduler.ExponentialLR(optimizer, 0.5)))
        trainer.run()
        return optimizer.param_groups[0]["lr"]

    assert [part(epochs * PER_EPOCH) for epochs in (1, 2, 2, 4)] == [0.05, 0.025, 0.025, 0.00625]
