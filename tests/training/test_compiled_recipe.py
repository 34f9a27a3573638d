"""A compiled model in a trainer, as docs/recipes.md shows it: names, keys and snapshots are those of the model."""

import pytest
import torch
from recipes import assert_resumes_everywhere, differences, run_section
from torch import nn

from chainring import iterators, report, serializers, training
from chainring.nn import Classifier
from chainring.training.extensions import Evaluator, LogReport, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, in its compiler

DATA = [(row, label % 10) for label, row in enumerate(torch.randn(24, 64, generator=torch.Generator().manual_seed(3)))]


class Part(nn.Module):
    """Reports from the inside of what is compiled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        y = self.layer(x)
        report({"size": y.abs().mean()}, self)
        return y


def trainer_of(out, length, *, compiled):
    torch.manual_seed(1)
    model = Classifier(Part())
    optimizer = torch.optim.Adam(model.parameters())
    given = torch.compile(model, backend="aot_eager") if compiled else model
    trainer = training.Trainer(
        training.StandardUpdater(iterators.SerialIterator(DATA, 8), optimizer, given), length, str(out)
    )
    test = iterators.SerialIterator(DATA, 8, repeat=False, shuffle=False)
    trainer.extend(Evaluator(test, given), trigger=(2, "iteration"))
    return trainer


def plain(out, length):
    return trainer_of(out, length, compiled=False)


def compiled(out, length):
    return trainer_of(out, length, compiled=True)


def test_a_compiled_run_reports_and_saves_under_the_names_of_the_plain_one(tmp_path):
    """And the same values: this backend runs the same kernels."""
    trainers = [make(tmp_path / make.__name__, (4, "iteration")) for make in (plain, compiled)]
    for trainer in trainers:
        trainer.extend(LogReport(trigger=(2, "iteration")))
        trainer.run()
    states = [trainer.state_dict() for trainer in trainers]
    assert list(states[1]) == list(states[0])
    assert not any("_orig_mod" in key for key in states[1])
    assert {"main/loss", "main/predictor/size", "validation/main/predictor/size"} <= trainers[1].observation.keys()
    assert differences(*trainers) == []


@pytest.mark.parametrize("resumed", [plain, compiled])
@pytest.mark.parametrize("make", [plain, compiled])
def test_runs_with_and_without_the_compiler_continue_each_other(tmp_path, make, resumed):
    """From every iteration."""
    assert_resumes_everywhere(make, tmp_path, 4, resumed=resumed)


def test_a_snapshot_of_a_compiled_run_fills_a_plain_model(tmp_path):
    """And one of a plain run a compiled model."""
    for make, wrap in ((compiled, nn.Sequential), (plain, lambda model: torch.compile(model, backend="aot_eager"))):
        trainer = make(tmp_path / make.__name__, (1, "iteration"))
        trainer.extend(snapshot("last"), trigger=(1, "iteration"))
        trainer.run()
        model = Classifier(Part())
        serializers.load(tmp_path / make.__name__ / "last", model if wrap is nn.Sequential else wrap(model))
        trained = trainer.updater.get_model("main").parameters()
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), trained, strict=True))


def test_the_recipe_runs(tmp_path, monkeypatch):
    """As it stands on the page."""
    monkeypatch.chdir(tmp_path)
    trainer = run_section("A compiled model")["trainer"]
    assert {"main/accuracy", "validation/main/accuracy"} <= trainer.observation.keys()
