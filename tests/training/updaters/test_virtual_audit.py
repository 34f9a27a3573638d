"""Audits of virtual ranks in one process: what does not repeat, and settings that are refused."""

import json
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from audits import COUNT, Net, OwnCore, iterator_of, train
from chainring import html_report, report
from chainring._runs.comparison import first_recorded_difference
from chainring.cli import main
from chainring.converters import concat_examples
from chainring.iterators import SerialIterator
from chainring.training import CorruptionError, StandardUpdater, Trainer, UpdateCallbacks, extensions
from chainring.training._ledger import Ledger

ITERATION = 4


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The bits of a run without audits."""
    return train(None, tmp_path_factory.mktemp("right"))[0]


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"cls": OwnCore}, {"rows": 80, "kind": "once"}, {"kind": "processes"}],
    ids=["plain", "accumulate", "own update_core", "short batches", "processes"],
)
def test_an_audit_of_one_process_changes_no_bit_and_gives_no_alarm(tmp_path, settings):
    """Parameters, moments, running statistics, the log and the files of a recorder."""
    expected = train(None, tmp_path / "0", **settings)
    assert train(None, tmp_path / "2", audit=2, **settings) == expected
    recorded = [(tmp_path / name / "recorder.bin").read_bytes() for name in ("0", "2")]
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize("place", ["gradient", "activation", "batch"])
def test_a_transient_fault_of_one_process_is_corrected_with_a_warning(tmp_path, right, place):
    """It names the iteration, the virtual rank, the device and the first parameter, and says what it can be."""
    bits, said, error = train(None, tmp_path, (place, 0, ITERATION, ITERATION), audit=1)
    assert (bits, error) == (right, None)
    (text,) = said
    assert text.startswith("in iteration 5 rank 0 (")
    assert "virtual rank 4 wrong, first in the gradient of 'main." in text
    assert "a transient fault" in text


def test_what_was_found_is_in_the_recorder_and_is_no_difference(tmp_path, capsys):
    """Its row names all that the warning does, and diff and the page show it; rows, tensors and a replay are the same."""
    for name, faults in (("right", ()), ("wrong", [("gradient", 0, ITERATION, ITERATION)])):
        train(None, tmp_path / name, *faults, audit=1)
    right, wrong = (Ledger.read(tmp_path / name / "recorder.bin") for name in ("right", "wrong"))
    (mark,) = set(wrong.names) - set(right.names)
    assert re.fullmatch("audit: iteration 5, virtual rank 4, rank 0, host .+, device cpu, tensor main.last.weight", mark)
    assert [iteration for iteration in range(1, 8) if mark in wrong.row(iteration).losses] == [5]
    assert first_recorded_difference(wrong, right, 0, 7, with_generators=True) == (7, None)
    assert main(["diff", str(tmp_path / "wrong"), str(tmp_path / "right")]) == 0
    assert mark in capsys.readouterr().out
    html_report.write(tmp_path / "wrong")
    page = (tmp_path / "wrong" / "report.html").read_text()
    assert page.count("An audit has found computations that differ: iteration 5, virtual rank 4") == 1


def test_inspect_shows_what_audits_have_found(tmp_path, capsys):
    """For the run, and for one of its snapshots; in JSON too."""
    train(None, tmp_path, ("gradient", 0, ITERATION, ITERATION), audit=1, snapshots=6)
    for path in (tmp_path, tmp_path / "snapshot_iter_6"):
        assert main(["inspect", str(path)]) == 0
        text = "found by an audit of the run: iteration 5, virtual rank 4, rank 0, host "
        assert text in capsys.readouterr().out
    assert main(["inspect", "--json", str(tmp_path)]) == 0
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault.endswith("device cpu, tensor main.last.weight")


@pytest.mark.parametrize("number", range(COUNT))
def test_a_parameter_that_changes_in_memory_ends_the_run(tmp_path, number):
    """Whichever virtual rank is computed then, and where both computations of the audited one agree as well."""
    _, said, error = train(None, tmp_path, ("parameter", 0, ITERATION, number), audit=1)
    assert said == []
    assert "in iteration 5 the memory of parameter 'main.first.weight' has changed" in error


class Unsteady(nn.Module):
    """A model whose gradient differs each time, as that of a kernel that is not deterministic."""

    def __init__(self, differs):
        super().__init__()
        self.net, self.calls, self.differs = nn.Linear(6, 3), 0, differs

    def forward(self, x, t):
        self.calls += 1
        return nn.functional.cross_entropy(self.net(x), t) * (1 + self.differs(self.calls) * 2**-10)


def test_a_kernel_that_is_not_deterministic_is_told_from_a_fault(tmp_path):
    """Where no two of three computations agree, the run ends, and where two do by chance again and again it is said."""
    model = Unsteady(lambda calls: calls)
    updater = StandardUpdater(
        iterator_of("serial", 64), torch.optim.SGD(model.parameters(), 0.1), model, virtual_ranks=8, audit=1
    )
    with pytest.raises(RuntimeError, match=r"torch\.use_deterministic_algorithms"):
        Trainer(updater, (5, "iteration"), out=str(tmp_path)).run()
    # Of each update the first computation, which is the second of the audited one: it has 9 calls, and then 9 again.
    by_chance = Unsteady(lambda calls: calls % 18 == 1)
    settings = {"virtual_ranks": 8, "audit": 1}
    updater = StandardUpdater(iterator_of("serial", 64), torch.optim.SGD(by_chance.parameters(), 0.1), by_chance, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(updater, (6, "iteration"), out=str(tmp_path / "2")).run()
    said = ["torch.use_deterministic_algorithms" in str(item.message) for item in caught]
    assert said == sorted(said)
    assert (said[0], said[-1]) == (False, True)


def test_a_generator_of_the_script_is_named_among_the_causes(tmp_path):
    """Of a model that draws from one that is no attribute, which nobody looks at or seeds for each virtual rank."""
    model = Unsteady(lambda calls: np.random.default_rng().random())
    updater = StandardUpdater(
        iterator_of("serial", 64), torch.optim.SGD(model.parameters(), 0.1), model, virtual_ranks=8, audit=1
    )
    with pytest.raises(CorruptionError, match=r"draws from numpy\.random\.default_rng"):
        Trainer(updater, (5, "iteration"), out=str(tmp_path)).run()


class Counting(nn.Module):
    """A model that reports a metric, an attribute of it that counts the rows."""

    def __init__(self, metric):
        super().__init__()
        self.net, self.metric = Net(), metric

    def forward(self, x, t):
        self.metric.update(x)
        report({"rows": self.metric}, self)
        return self.net(x, t)


class Rows:
    """A metric that counts rows."""

    def __init__(self):
        self.count = 0

    def update(self, x):
        self.count += len(x)

    def compute(self):
        return self.count

    def reset(self):
        self.count = 0


def test_what_is_computed_again_counts_once(tmp_path):
    """A metric of the model, and the examples of Throughput; also in an update that begins again."""
    logs = []
    for audit, faulty in ((0, False), (2, False), (2, True)):
        torch.manual_seed(0)
        model = Counting(Rows())
        done = []

        def spoil(gradient, faulty=faulty, done=done):
            if faulty and len(done) == 3:
                gradient = gradient.clone()
                gradient[0, 0] += 1
            done.append(None)
            return gradient

        model.net.last.weight.register_hook(spoil)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        updater = StandardUpdater(iterator_of("serial", 64), optimizer, model, virtual_ranks=COUNT, audit=audit)
        trainer = Trainer(updater, (4, "iteration"), out=str(tmp_path / f"{audit}{faulty}"))
        trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
        if faulty:
            with pytest.warns(UserWarning, match="a transient fault"):
                trainer.run()
        else:
            trainer.run()
        logs.append([row["main/rows"] for row in trainer.get_extension("LogReport").log])
    assert logs == [[64, 64]] * 3


def test_callbacks_of_a_stage_run_in_what_is_computed_again(tmp_path):
    """They belong to the computation."""
    seen = []
    callbacks = UpdateCallbacks(backward_on_finish=lambda context: seen.append(context.iteration))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    updater = StandardUpdater(iterator_of("serial", 64), optimizer, model, virtual_ranks=COUNT, audit=2, callbacks=callbacks)
    Trainer(updater, (2, "iteration"), out=str(tmp_path)).run()
    assert seen == [0] * (COUNT + 2) + [1] * (COUNT + 2)


class Stateful(nn.Linear):
    """A layer with a state of its own."""

    def serialize(self, serializer):
        pass


@pytest.mark.parametrize(
    ("settings", "model", "words"),
    [
        ({"audit": 1}, None, "give virtual_ranks too"),
        ({"audit": 9, "virtual_ranks": 8}, None, "audit is from 0 to virtual_ranks=8"),
        ({"audit": -1, "virtual_ranks": 8}, None, "audit is from 0 to virtual_ranks=8"),
        ({"audit": 0.5, "virtual_ranks": 8}, None, "audit is the number of virtual ranks"),
        ({"audit": True, "virtual_ranks": 8}, None, "audit is the number of virtual ranks"),
        ({"audit": 1, "virtual_ranks": 8, "audit_policy": "warn"}, None, 'audit_policy is "correct" or "stop"'),
        ({"audit": 1, "virtual_ranks": 8}, Stateful(3, 1), "keeps a state of its own"),
    ],
)
@pytest.mark.filterwarnings("ignore:model 'main' has itself")
def test_audits_that_cannot_be_are_refused(settings, model, words):
    """When the updater is made."""
    model = nn.Linear(3, 1) if model is None else model
    iterator = SerialIterator(list(torch.ones(8, 3)), 8)
    with pytest.raises((TypeError, ValueError), match=words):
        StandardUpdater(iterator, torch.optim.SGD(model.parameters(), 0.1), model, converter=concat_examples, **settings)
