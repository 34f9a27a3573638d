"""Many values that are reported together: kept as one tensor, which nobody notices."""

import json

import pytest
import torch
from torch import nn

from chainring import get_current_reporter, report
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions

KEYS = [f"k{number}" for number in range(20)]


class Reporting(nn.Module):
    """Reports many values in each iteration, of which kind and dtype may change, together or one by one."""

    def __init__(self, kind, together):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.kind, self.together, self.calls = kind, together, 0

    def report(self, values):
        for part in [values] if self.together else [{key: value} for key, value in values.items()]:
            report(part, self)

    def forward(self, x):
        self.calls += 1
        loss = self.layer(x).square().mean()
        values = {key: loss.detach() * number for number, key in enumerate(KEYS)}
        if self.kind == "beside others":
            report({"before": loss}, self)
        if self.kind == "other dtypes in turn" and self.calls % 2:
            values = {key: value.double() for key, value in values.items()}
        if self.kind == "complex":
            values = {key: value + 1j for key, value in values.items()}
        if self.kind == "other keys in turn" and self.calls % 3:
            values = {key: value for key, value in values.items() if key != "k7"}
        self.report(values)
        if self.kind == "one again":
            report({"k3": loss * 100}, self)
        if self.kind == "some again":
            self.report({key: value + 1 for key, value in values.items() if key not in ("k0", "k19")})
        if self.kind == "looked at between":
            observation = get_current_reporter().observation
            self.report({f"twice {key}": observation[f"main/{key}"] * 2 for key in KEYS})
        return loss


def looks_at_one(trainer):
    trainer.observation["seen"] = trainer.observation["main/k4"] * 2


def logged(out, kind, together, reader=None, keys=None):
    torch.manual_seed(0)
    model = Reporting(kind, together)
    data = [torch.randn(3) for _ in range(50)]
    updater = StandardUpdater(SerialIterator(data, 4), torch.optim.SGD(model.parameters(), lr=0.01), model)
    trainer = Trainer(updater, (3, "epoch"), out=str(out))
    if reader is not None:
        trainer.extend(reader, name="reader", trigger=(1, "iteration"), priority=400)
    trainer.extend(extensions.LogReport(keys=keys, trigger=(7, "iteration")))
    trainer.run()
    rows = json.loads((out / "log").read_text())
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows], trainer


KINDS = [
    "plain",
    "beside others",
    "other dtypes in turn",
    "complex",
    "other keys in turn",
    "one again",
    "some again",
    "looked at between",
]


@pytest.mark.filterwarnings("ignore:.* is not averaged.*complex")
@pytest.mark.parametrize("reader", [None, looks_at_one], ids=["nobody looks", "an extension looks"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_log_is_that_of_values_reported_one_by_one(kind, reader, tmp_path):
    """To the bit, with the keys in the same order, whether or not somebody looks at the observation before."""
    together, _ = logged(tmp_path / "together", kind, True, reader if kind != "complex" else None)
    alone, _ = logged(tmp_path / "alone", kind, False, reader if kind != "complex" else None)
    assert together == alone
    assert [list(row) for row in together] == [list(row) for row in alone]
    assert len(together) == 5


def test_a_log_of_one_of_the_keys_has_its_mean(tmp_path):
    """Of a key in the midst of those that were reported together."""
    together, _ = logged(tmp_path / "together", "plain", True, keys=["main/k7"])
    alone, _ = logged(tmp_path / "alone", "plain", False, keys=["main/k7"])
    assert together == alone
    assert all("main/k7" in row and "main/k8" not in row for row in together)


@pytest.mark.filterwarnings("ignore:.* is not averaged.*complex")
@pytest.mark.parametrize("kind", KINDS)
def test_the_observation_is_a_plain_dictionary_of_numbers(kind, tmp_path):
    """Of the same keys, in the same order, and of the same dtypes as if each had been reported alone."""
    _, together = logged(tmp_path / "together", kind, True)
    _, alone = logged(tmp_path / "alone", kind, False)
    assert type(together.observation) is dict
    assert list(together.observation) == list(alone.observation)
    for key, value in alone.observation.items():
        assert type(together.observation[key]) is type(value)
        assert together.observation[key].dtype == value.dtype
        assert torch.equal(together.observation[key], value)


def test_an_observation_that_was_handed_out_gets_only_numbers_later(tmp_path):
    """An extension that holds it sees what others report afterwards."""
    held = []

    def hold(trainer):
        held.append(trainer.observation)

    def report_more(trainer):
        report({f"more {number}": torch.tensor(float(number)) for number in range(20)})

    torch.manual_seed(0)
    model = Reporting("plain", True)
    iterator = SerialIterator([torch.ones(3)] * 8, 4)
    updater = StandardUpdater(iterator, torch.optim.SGD(model.parameters(), lr=0.1), model)
    trainer = Trainer(updater, (1, "epoch"), out=str(tmp_path))
    trainer.extend(hold, name="hold", trigger=(1, "iteration"), priority=300)
    trainer.extend(report_more, name="more", trigger=(1, "iteration"), priority=200)
    trainer.run()
    for observation in held:
        assert all(type(value) is torch.Tensor for value in observation.values())
        assert [float(observation[f"more {number}"]) for number in range(20)] == list(range(20))


@pytest.mark.parametrize("make", [extensions.LogReport, extensions.Recorder, extensions.FailOnNonNumber])
def test_an_extension_that_runs_in_each_iteration_leaves_the_values_together(make, tmp_path):
    """It reads those that it wants, and a hundred others cost nothing more."""
    together = []

    def look(trainer):
        together.append(bool(trainer.reported.stacks))

    torch.manual_seed(0)
    model = Reporting("plain", True)
    iterator = SerialIterator([torch.ones(3)] * 8, 4)
    updater = StandardUpdater(iterator, torch.optim.SGD(model.parameters(), lr=0.1), model)
    trainer = Trainer(updater, (3, "iteration"), out=str(tmp_path))
    trainer.extend(make())
    trainer.extend(look, name="look", trigger=(1, "iteration"), priority=-100)
    trainer.run()
    assert together == [True] * 3
