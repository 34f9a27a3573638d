"""A run with shifts that is cut anywhere goes on with the values of the uninterrupted one: no second decay, no jump."""

import pytest
import torch
from schedules import PER_EPOCH, WAYS, Line, chained, resumed, run, sgd, trainer_of, updater_of

from chainring import training
from chainring.training.extensions import (
    ExponentialShift,
    InverseShift,
    LinearShift,
    MultistepShift,
    PolynomialShift,
    StepShift,
    WarmupShift,
    snapshot,
)

STOP = 7
MAKES = {
    "exponential": lambda: [(ExponentialShift("lr", 0.7), None)],
    "exponential, of epochs": lambda: [(ExponentialShift("lr", 0.7), (1, "epoch"))],
    "exponential, with a target": lambda: [(ExponentialShift("lr", 0.7, 0.3, 0.1), None)],
    "linear": lambda: [(LinearShift("momentum", (0.9, 0.1), (1, 5)), None)],
    "inverse": lambda: [(InverseShift("lr", 0.3, 0.75), (2, "iteration"))],
    "polynomial": lambda: [(PolynomialShift("lr", 0.9, 5), None)],
    "step": lambda: [(StepShift("lr", 0.5, 3), None)],
    "multistep": lambda: [(MultistepShift("lr", 0.1, [2, 4, 5], 0.3), None)],
    "multistep, of epochs": lambda: [(MultistepShift("lr", 0.1, [1, 2], None), (1, "epoch"))],
    "warm-up": lambda: [(WarmupShift("lr", 0.01, 3, 0.1), None)],
    "two attributes": lambda: [(ExponentialShift("lr", 0.7), None), (LinearShift("weight_decay", (0, 1), (0, 4)), None)],
    "warm-up, then steps": lambda: [
        (StepShift("lr", 0.1, 2, 0.2), (1, "epoch")),
        (WarmupShift("lr", 0.01, 2, 0.2), None),
    ],
    "two of one attribute": lambda: [(StepShift("lr", 0.5, 1), None), (ExponentialShift("lr", 0.9), (2, "iteration"))],
}


def builder(make, **settings):
    def build(out, stop):
        trainer = trainer_of(out, stop, **settings)

        def extend():
            for shift, trigger in make():
                trainer.extend(shift, trigger=trigger)

        return trainer, extend

    return build


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_cut_after_any_iteration_every_update_has_the_same_settings(tmp_path, said, make, way):
    """Before the first, at the bounds of epochs and between them; with state in memory and on the disk."""
    build = builder(make, split=True)
    expected = resumed(tmp_path, STOP, None, build, way)
    assert len({str(settings) for settings in expected[0]}) > 1
    assert chained(tmp_path, STOP, build, way) == expected
    assert said() == []


def test_a_rate_that_is_a_tensor_is_resumed_bit_for_bit(tmp_path):
    """Torch rounds it to the tensor's format; the formula begins with what was read at first."""

    def build(out, stop):
        trainer = trainer_of(out, stop, optimizer=lambda model: sgd(model, lr=torch.tensor(0.3), split=True))
        return trainer, lambda: trainer.extend(ExponentialShift("lr", 0.7))

    expected = resumed(tmp_path, 5, None, build, "file")
    assert chained(tmp_path, 5, build, "file") == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_rate_that_the_script_constructs_otherwise_is_what_the_shift_begins_with(tmp_path, capsys, way):
    """It is a changed setting and printed; how often the shift was called is not, and comes from the saved run."""

    def make():
        return [(ExponentialShift("lr", 0.5), None)]

    used, now, _ = resumed(tmp_path, 4, 2, builder(make, lr=0.8), way, change=builder(make, lr=1.6))
    assert [groups[0][0] for groups in [*used, now]] == [0.8, 0.4, 0.4, 0.2, 0.1]
    assert "0.8 -> 1.6" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("way", WAYS)
def test_another_rate_of_the_shift_holds_from_the_resume_on(tmp_path, way):
    """Settings are never state: the value is that of the new formula after as many calls."""
    before, after = (builder(lambda rate=rate: [(ExponentialShift("lr", rate, 1), None)]) for rate in (0.5, 0.1))
    used, now, _ = resumed(tmp_path, 4, 2, before, way, change=after)
    assert [groups[0][0] for groups in [*used, now]] == pytest.approx([1, 0.5, 0.01, 0.001, 0.0001])


def test_another_attribute_begins_anew(tmp_path):
    """How far the learning rate had come says nothing about the momentum."""
    before, after = (builder(lambda attr=attr: [(ExponentialShift(attr, 0.5), None)]) for attr in ("lr", "momentum"))
    used, _, _ = resumed(tmp_path, 4, 2, before, "file", change=after)
    assert [groups[0][:2] for groups in used] == [[0.1, 0.9], [0.05, 0.9], [0.025, 0.9], [0.025, 0.45]]


def test_a_shift_that_the_saved_run_had_not_begins_at_the_resume(tmp_path):
    """It begins with the value that the saved run had."""
    build = builder(lambda: [(ExponentialShift("lr", 0.5), None)], lr=0.8)
    with pytest.warns(UserWarning, match="only here"):
        used, now, _ = resumed(tmp_path, 4, 2, builder(list, lr=0.8), "file", change=build)
    assert [groups[0][0] for groups in [*used, now]] == [0.8, 0.8, 0.8, 0.4, 0.2]


def test_its_own_state_is_enough_where_the_optimizer_has_none(tmp_path):
    """An optimizer that the updater does not save gets its value back when the run starts."""

    class Bare(training.Updater):
        def __init__(self):
            self.optimizer = sgd(Line())

        def get_optimizer(self, name):
            return self.optimizer

        def update_core(self):
            pass

        def serialize(self, serializer):
            self.iteration = serializer("iteration", self.iteration)

    for make in (lambda: WarmupShift("lr", 0.1, 2, 1.0), lambda: MultistepShift("lr", 0.1, [1], 1.0)):
        trainers = [training.Trainer(Bare(), (stop, "iteration"), str(tmp_path), [make()]) for stop in (4, 4)]
        trainers[0].run()
        trainers[1].load_state_dict(trainers[0].state_dict())
        trainers[1].run()
        rates = [trainer.updater.optimizer.param_groups[0]["lr"] for trainer in trainers]
        assert rates[0] == rates[1] != 0.1 * 0.1


def test_the_snapshot_that_a_run_loads_by_itself_comes_before_the_shift_begins(tmp_path):
    """After an autoload the rate is that of the saved run, from the first update on."""

    def part(stop):
        trainer = trainer_of(tmp_path, stop, ExponentialShift("lr", 0.5), snapshot(autoload=True), lr=1.0)
        used = []
        optimizer = trainer.updater.get_optimizer("main")
        optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
        trainer.run()
        return used

    assert part(PER_EPOCH) + part(PER_EPOCH + 2) == [1, 0.5, 0.25, 0.125, 0.0625]


def test_a_rehearsal_leaves_no_trace(tmp_path):
    """Neither in the count nor in what was read as the initial value."""
    outcomes = []
    for rehearses in (False, True):
        trainer = trainer_of(tmp_path, 3, ExponentialShift("lr", 0.5), WarmupShift("momentum", 0, 2, None))
        if rehearses:
            trainer.rehearse()
        trainer.run()
        group = trainer.updater.get_optimizer("main").param_groups[0]
        outcomes.append((group["lr"], group["momentum"]))
    assert outcomes[0] == outcomes[1] == (0.0125, 0.9)


def test_an_object_of_an_earlier_run_begins_anew_in_another(tmp_path):
    """Its count and its initial value were of that run."""
    shift = ExponentialShift("lr", 0.5)
    assert run(tmp_path, 2, shift, lr=0.8) == [0.8, 0.4, 0.2]
    assert run(tmp_path, 2, shift, lr=0.4) == [0.4, 0.2, 0.1]


def test_a_run_that_goes_back_to_a_snapshot_takes_the_shift_with_it(tmp_path):
    """The updates after it are made with the rates of those iterations."""
    model = Line()
    trainer = training.Trainer(updater_of(model, sgd(model, lr=1.0)), (5, "iteration"), str(tmp_path))
    optimizer, used = trainer.updater.get_optimizer("main"), []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    trainer.extend(ExponentialShift("lr", 0.5))
    trainer.extend(snapshot(asynchronous=False), trigger=(2, "iteration"))

    def once(_):
        if len(used) == 4:
            raise training.RollBack("for a trial")

    trainer.extend(once)
    trainer.run()
    assert used == [1, 0.5, 0.25, 0.125, 0.25, 0.125, 0.0625]
