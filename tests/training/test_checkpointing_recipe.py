"""Gradient checkpointing, as docs/recipes.md shows it: the same training, whose reports count once."""

import pytest
import torch
from recipes import assert_resumes_everywhere, definitions
from torch import nn
from torch.utils.checkpoint import checkpoint

from chainring import iterators, report, training
from chainring.nn import Classifier
from chainring.training.extensions import LogReport

DATA = [(row, label % 10) for label, row in enumerate(torch.randn(24, 64, generator=torch.Generator().manual_seed(3)))]


def trainer_of(model, out, length=(3, "iteration"), **settings):
    updater = training.StandardUpdater(
        iterators.SerialIterator(DATA, 8), torch.optim.Adam(model.parameters()), model, **settings
    )
    return training.Trainer(updater, length, str(out))


def deep():
    torch.manual_seed(2)
    return Classifier(definitions("Gradient checkpointing")["Deep"]())


class Plain(nn.Module):
    """The same layers without checkpointing."""

    def __init__(self, deep):
        super().__init__()
        self.blocks, self.head = deep.blocks, deep.head

    def forward(self, x):
        return self.head(nn.Sequential(*self.blocks)(x))


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_a_checkpointed_model_trains_bit_for_bit_as_the_plain_one(tmp_path, settings):
    """With dropout, whose masks are drawn again from the same state."""
    models = [deep(), deep()]
    models[1].predictor = Plain(models[1].predictor)
    for number, model in enumerate(models):
        torch.manual_seed(9)
        trainer_of(model, tmp_path / str(number), **settings).run()
    pairs = list(zip(*(model.state_dict().values() for model in models), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_checkpointed_run_resumes_at_every_iteration(tmp_path):
    """Bit for bit, with dropout."""
    assert_resumes_everywhere(lambda out, length: trainer_of(deep(), out, length), tmp_path, 5)


class Shared(nn.Module):
    """One block, which reports in its midst, called twice; also what a hook sees of the gradient."""

    def __init__(self, checkpointed):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.checkpointed, self.calls = checkpointed, 0

    def block(self, x):
        self.calls += 1
        hidden = self.first(x).relu()
        report({"size": hidden.detach().mean()}, self)
        return self.second(hidden).relu()

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        x.register_hook(lambda gradient: report({"gradient": gradient.norm()}, self))
        return self.head(x)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_a_report_of_a_part_that_is_computed_again_is_that_of_the_forward(tmp_path, settings):
    """The last report of a key in the forward holds, though the backward comes to the first call last."""
    rows, calls = [], []
    for checkpointed in (False, True):
        torch.manual_seed(4)
        model = Classifier(Shared(checkpointed))
        trainer = trainer_of(model, tmp_path / str(checkpointed), **settings)
        trainer.extend(LogReport(trigger=(1, "iteration")))
        trainer.run()
        log = trainer.get_extension("LogReport").log
        rows.append([[row["main/predictor/size"], row["main/predictor/gradient"], row["main/loss"]] for row in log])
        calls.append(model.predictor.calls)
    assert rows[1] == rows[0]
    assert calls[1] == 2 * calls[0]


def test_running_statistics_in_a_checkpointed_part_move_twice(tmp_path):
    """Which the page warns of."""
    counts = []
    for checkpointed in (False, True):
        torch.manual_seed(4)
        norm = nn.BatchNorm1d(64)
        run = (lambda x, norm=norm: checkpoint(norm, x, use_reentrant=False)) if checkpointed else norm
        head = nn.Linear(64, 10)

        class Model(nn.Module):
            def __init__(self, norm=norm, run=run, head=head):
                super().__init__()
                self.norm, self.head, self.run = norm, head, run

            def forward(self, x, t):
                return nn.functional.cross_entropy(self.head(self.run(x)), t)

        trainer_of(Model(), tmp_path / str(checkpointed)).run()
        counts.append(int(norm.num_batches_tracked))
    assert counts == [3, 6]
