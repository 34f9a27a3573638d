"""What the script of a resumed run sets otherwise than the script of the run that it continues."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chainring import iterators, serializers, training
from chainring.datasets import TupleDataset
from chainring.training import extensions, triggers


@pytest.mark.parametrize(("count", "words"), [(None, "the last bits are not"), (4, "virtual ranks compute the same bits")])
def test_another_number_of_ranks_changes_the_last_bits_except_with_virtual_ranks(tmp_path, capsys, count, words):
    """What is printed says which of both it is."""

    def make_trainer():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = iterators.SerialIterator(torch.ones(8, 2), 4)
        updater = training.StandardUpdater(data, optimizer, model, loss_func=lambda m, x: m(x).sum(), virtual_ranks=count)
        return training.Trainer(updater, (1, "iteration"), out=str(tmp_path))

    state = make_trainer().state_dict()
    of_rank_1 = {key.replace("generators/0", "generators/1"): value for key, value in state.items()}
    make_trainer().load_state_dict(of_rank_1 | state)
    assert words in capsys.readouterr().out


class TestSettingsOfAResumedRun:
    """Torch saves the learning rate with the state, so a new one in the script must be told from a decayed one."""

    def run(self, lr, state=None, momentum=0.9):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        updater = training.StandardUpdater([torch.ones(1, 2)], optimizer, model, loss_func=lambda m, x: m(x).sum())
        if state is not None:
            updater.load_state_dict(state)
        return updater, optimizer.param_groups[0]

    def decayed(self):
        updater, group = self.run(0.1)
        updater.update()
        group["lr"] = 0.01  # as a scheduler or a shift does
        return updater.state_dict()

    def test_a_decayed_value_is_put_back_where_the_script_is_the_same(self, capsys):
        """The same script continues with the value that the saved run had reached."""
        assert self.run(0.1, self.decayed())[1]["lr"] == 0.01
        assert capsys.readouterr().out == ""

    def test_a_value_that_the_script_now_constructs_otherwise_holds_and_is_printed(self, capsys):
        """A new learning rate is a changed setting; the momentum, which is as before, comes from the saved run."""
        state = self.decayed()
        _, group = self.run(0.5, state)
        assert (group["lr"], group["momentum"]) == (0.5, 0.9)
        printed = capsys.readouterr().out
        assert "lr" in printed
        assert "0.5" in printed
        assert "0.1" in printed

    def test_a_value_is_as_constructed_before_a_scheduler_wrote_to_it(self):
        """A warm-up that starts at a tenth of the rate is no change of the rate."""
        states = []
        for lr in (0.1, 0.1):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1)
            updater = training.StandardUpdater([torch.ones(1, 2)], optimizer, model, loss_func=lambda m, x: m(x).sum())
            if states:
                updater.load_state_dict(states[0])
                assert optimizer.param_groups[0]["lr"] == 0.07
            optimizer.param_groups[0]["lr"] = 0.07
            states.append(updater.state_dict())


X = np.arange(24, dtype=np.float32).reshape(12, 2)
BATCHES = TensorDataset(torch.from_numpy(X))


class OwnTrigger:
    """One that shows its state."""

    def __init__(self):
        self.calls = 0

    def __repr__(self):
        return f"OwnTrigger, called {self.calls} times"

    def __call__(self, trainer):
        self.calls += 1
        return False


def updater_of(*, source=None, replicas=0, kind=iterators.SerialIterator, batch=2, **settings):
    model = nn.Linear(2, 1)
    source = kind(TupleDataset(X), batch, seed=0) if source is None else source
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not replicas:
        return training.StandardUpdater(source, optimizer, model, loss_func=loss, **settings)
    devices = dict.fromkeys(["main", *map(str, range(1, replicas))], "cpu")
    return training.ParallelUpdater(source, optimizer, model, devices=devices, loss_func=loss)


def trainer_of(out, *, stop=(2, "iteration"), often=(1, "epoch"), **settings):
    trainer = training.Trainer(updater_of(**settings), stop, str(out))
    trainer.extend(lambda trainer: None, name="own", trigger=often)
    trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
    return trainer


def loss(model, x):
    return model(x).sum()


def resumed(tmp_path, before, now):
    """A trainer that has loaded a run of other settings, and gone on."""
    trainer_of(tmp_path / "before", **before).run()
    trainer = trainer_of(tmp_path / "now", **{"stop": (4, "iteration"), **now})
    serializers.load(tmp_path / "before/snapshot_iter_2", trainer)
    trainer.run()
    return trainer


CHANGES = {
    "the stop trigger": ({}, {}, None),
    "the batch size": ({}, {"batch": 3}, "batch size of iterator 'main' 2 -> 3"),
    "the batch size of workers": (
        {"kind": iterators.MultiprocessIterator},
        {"batch": 3},
        "batch size of iterator 'main' 2 -> 3",
    ),
    "the batch size of a loader": (
        {"source": DataLoader(BATCHES, 6)},
        {"source": DataLoader(BATCHES, 4)},
        "batch size of iterator 'main' 6 -> 4",
    ),
    "the parts of an update": ({}, {"accumulate": 2}, "accumulate 1 -> 2"),
    "the precision": ({"precision": "bf16"}, {}, "precision 'bf16' -> 'fp32'"),
    "the virtual ranks": ({"virtual_ranks": 2}, {"virtual_ranks": 1}, "virtual_ranks 2 -> 1"),
    "no virtual ranks any more": ({"virtual_ranks": 2}, {}, "virtual_ranks 2 -> None"),
    "virtual ranks from now on": ({}, {"virtual_ranks": 2}, "virtual_ranks None -> 2"),
    "the replicas": ({"replicas": 2}, {"replicas": 3}, "number of replicas 2 -> 3"),
    "when an extension runs": (
        {},
        {"often": (2, "epoch")},
        """trigger of extension 'own' "IntervalTrigger(1, 'epoch')" -> "IntervalTrigger(2, 'epoch')\"""",
    ),
}
STOP = """stop trigger "ReachedTrigger(2, 'iteration')" -> "ReachedTrigger(4, 'iteration')\""""


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_script_sets_otherwise_holds_and_is_printed_and_recorded(tmp_path, capsys, change):
    """Each of the settings that a resumed run may have otherwise; run.json has the old value and the new."""
    before, now, said = CHANGES[change]
    trainer = resumed(tmp_path, before, now)
    expected = [STOP] if said is None else [STOP, said]
    printed = capsys.readouterr().out.splitlines()
    _, header, *rows = printed[printed.index("resumed with different settings from the saved run:") :]
    rows = [" ".join(row.split()) for row in rows if row.startswith("  ")]
    assert header.split() == ["setting", "saved", "->", "now"]
    assert sorted(rows) == sorted(expected)
    assert trainer.updater.iteration == 4
    changed = json.loads((tmp_path / "now/run.json").read_text())["starts"][-1]["changed"]
    assert rows == [f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items()]


def test_the_trigger_of_an_extension_that_comes_after_loading_is_recorded_too(tmp_path):
    """State waits for its extension, and so does what is said about it."""
    trainer_of(tmp_path / "before").run()
    trainer = training.Trainer(updater_of(), (2, "iteration"), str(tmp_path / "now"))
    serializers.load(tmp_path / "before/snapshot_iter_2", trainer)
    trainer.extend(lambda trainer: None, name="own", trigger=(2, "epoch"))
    trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
    trainer.run()
    (start,) = json.loads((tmp_path / "now/run.json").read_text())["starts"][1:]
    assert start["changed"] == {"trigger of extension 'own'": ["IntervalTrigger(1, 'epoch')", "IntervalTrigger(2, 'epoch')"]}


@pytest.mark.parametrize("often", [(1, "epoch"), OwnTrigger(), triggers.TimeTrigger(100), lambda trainer: False, None])
def test_where_nothing_is_set_otherwise_nothing_is_printed(tmp_path, capsys, often):
    """Whatever the triggers are, and whatever they have seen since."""
    resumed(tmp_path, {"often": often}, {"stop": (2, "iteration"), "often": often})
    assert "resumed with" not in capsys.readouterr().out


class TestALearningRateThatIsATensor:
    """A tensor of one number is a setting as a number is, and stays the tensor that the script has made."""

    def group(self, lr, state=None, beta=0.9):
        """The settings after two updates, each of which a schedule halves the rate, and the state there."""
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr, betas=(torch.tensor(beta), torch.tensor(0.5)))
        source = iterators.SerialIterator(TupleDataset(X), 2, seed=0)
        updater = training.StandardUpdater(source, optimizer, model, loss_func=loss)
        group = optimizer.param_groups[0]
        if state is not None:
            updater.load_state_dict(state)
            group = optimizer.param_groups[0]
            assert group["lr"] is lr or not isinstance(lr, torch.Tensor)
        for _ in range(2):
            updater.update()
            group["lr"] *= 0.5
        return group, updater.state_dict()

    def test_what_a_schedule_has_made_of_it_comes_back_into_the_tensor_of_the_script(self, capsys):
        """Which a captured or compiled step reads."""
        _, state = self.group(torch.tensor(0.5))
        assert self.group(torch.tensor(0.5), state)[0]["lr"] == 0.5 / 16
        assert capsys.readouterr().out == ""

    def test_another_one_in_the_script_holds_and_is_printed(self, capsys):
        """It fills the tensor; so does one of a pair of tensors."""
        _, state = self.group(torch.tensor(0.5))
        group, _ = self.group(torch.tensor(0.25), state, beta=0.75)
        assert (group["lr"], group["betas"]) == (0.25 / 4, (0.75, 0.5))
        printed = capsys.readouterr().out
        first, header, *rows = [" ".join(line.split()) for line in printed.splitlines()]
        assert (first, header) == ("resumed with different settings from the saved run:", "setting saved -> now")
        assert rows[0] == "lr of optimizer 'main', group 0 0.5 -> 0.25"
        assert rows[1].startswith("betas of optimizer 'main', group 0 (0.8999")
        assert rows[1].endswith(" -> (0.75, 0.5)")
        assert len({line.index(" -> ") for line in printed.splitlines()[1:]}) == 1

    def test_a_number_in_place_of_a_tensor_is_a_number(self, capsys):
        """In the form in which the script has it now."""
        _, state = self.group(torch.tensor(0.5))
        group, _ = self.group(0.125, state)
        assert type(group["lr"]) is float
        assert group["lr"] == 0.125 / 4
        assert "lr of optimizer 'main', group 0 0.5 -> 0.125" in " ".join(capsys.readouterr().out.split())

    def test_a_tensor_that_a_scheduler_has_written_to_is_as_it_was_constructed(self, capsys):
        """The scheduler is made before the updater, and its first value differs from that of the script."""
        model = nn.Linear(2, 1)

        def made(lr):
            optimizer = torch.optim.SGD(model.parameters(), torch.tensor(lr))
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
            source = iterators.SerialIterator(TupleDataset(X), 2, seed=0)
            return training.StandardUpdater(source, optimizer, model, loss_func=loss)

        first, second = made(0.5), made(0.25)
        assert [updater.constructed["main"][0]["lr"] for updater in (first, second)] == [0.5, 0.25]
        second.load_state_dict(first.state_dict())
        group = second.get_optimizer("main").param_groups[0]
        assert (group["lr"], group["initial_lr"]) == (0.25, 0.25)
        assert "0.5 -> 0.25" in " ".join(capsys.readouterr().out.split())
