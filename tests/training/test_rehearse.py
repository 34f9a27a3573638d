"""A rehearsal shows what would fail, and leaves no trace."""

import os
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from toys import updater_of

import resume_program
from chainring import iterators, training
from chainring.datasets import TupleDataset
from chainring.nn import Classifier
from chainring.training import extensions

LABELLED = TupleDataset(torch.linspace(-1, 1, 36).reshape(12, 3), torch.arange(12) % 4)


def whole_run(out, rehearses, accumulate=1):
    """The program of the resume tests from beginning to end."""
    trainer, data, fired = resume_program.build(str(out), accumulate=accumulate)
    if rehearses:
        trainer.rehearse()
        data.consumed.clear()
        fired.clear()
    trainer.run()
    return resume_program.outcome(trainer, data, fired)


@pytest.mark.filterwarnings("ignore:two updates")  # its data take down what is asked for
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_after_a_rehearsal_is_bit_for_bit_the_run_without_it(tmp_path, accumulate):
    """Parameters, Adam's state, log rows, consumed indices, fires and generators are equal."""
    expected = whole_run(tmp_path / "without", False, accumulate)
    assert whole_run(tmp_path / "with", True, accumulate) == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_warns_once_of_a_softmax_before_the_cross_entropy(tmp_path, accumulate):
    """And says where; the graph of the loss shows it, so that nothing is said of what only looks like probabilities."""
    found = []
    for last in (nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid(), nn.Identity()):
        model = Classifier(nn.Sequential(nn.Linear(3, 4), last))
        updater = updater_of(model=model, data=LABELLED, accumulate=accumulate)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.Trainer(updater, (1, "epoch"), str(tmp_path)).rehearse()
        found.append([str(warning.message) for warning in caught])
        assert updater.callbacks.backward_on_start == ()
    (first,), *others = found
    assert "takes the softmax of a softmax" in first
    assert first.endswith("leave the softmax out, see main/predictor/1")
    assert others == [[], [], []]


def test_a_softmax_that_is_a_function_is_looked_for_in_the_loss(tmp_path):
    """By the line of the function that has returned it."""

    def loss_of(model, x, t):
        return nn.functional.cross_entropy(model(x).softmax(1), t) + model(x).square().mean()

    updater = updater_of(model=nn.Linear(3, 4), data=LABELLED, loss_func=loss_of)
    with pytest.warns(UserWarning, match=rf"see .*loss_of, {__file__}:\d+"):
        training.Trainer(updater, (1, "epoch"), str(tmp_path)).rehearse()


@pytest.mark.filterwarnings("ignore:two updates")  # its data take down what is asked for
def test_it_takes_snapshots_in_the_scratch_directory_and_the_run_takes_its_own(tmp_path):
    """Also the best one, and with the watch over NaN: the snapshots of the run are those of a run without a rehearsal."""
    taken = []
    for rehearses in (False, True):
        out = tmp_path / str(rehearses)
        made = resume_program.with_snapshots(resume_program.build(str(out), stop=(6, "iteration")), autoload=True)
        made[0].extend(extensions.FailOnNonNumber("rollback"))
        if rehearses:
            made[0].rehearse()
            assert not out.exists()
        made[0].run()
        files = sorted(out.glob("*/*.safetensors"))
        taken.append({str(file.relative_to(out)): file.read_bytes() for file in files})
        assert os.readlink(out / "best") in os.listdir(out)
    assert taken[0].keys() == taken[1].keys()
    assert len(taken[0]) >= 7
    assert taken[0] == taken[1]


@pytest.mark.filterwarnings("ignore:two updates")  # its data take down what is asked for
def test_a_rehearsal_of_a_resumed_run_leaves_no_trace(tmp_path):
    """What was loaded, the random generators of the first update included, is still there afterwards."""
    outcomes = []
    for rehearses in (False, True):
        trainer, data, fired = resume_program.resumed(tmp_path)
        if rehearses:
            trainer.rehearse()
            data.consumed.clear()
            fired.clear()
        trainer.run()
        outcomes.append(resume_program.outcome(trainer, data, fired))
    assert outcomes[0] == outcomes[1]


def test_a_rehearsal_keeps_the_state_of_extensions_that_come_after_loading(tmp_path):
    """Although it takes a snapshot, to which their state belongs."""

    def made(out, stop, state=None):
        trainer = training.Trainer(updater_of(), (stop, "iteration"), str(tmp_path / out))
        if state is not None:
            trainer.load_state_dict(state)
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
        trainer.extend(extensions.snapshot())
        return trainer

    first = made("first", 2)
    first.run()
    trainer = made("second", 3, first.state_dict())
    trainer.rehearse()
    trainer.run()
    assert [row["iteration"] for row in trainer.get_extension(extensions.LogReport).log] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:two updates")  # its data take down what is asked for
def test_every_extension_is_called_once_in_a_scratch_directory(tmp_path):
    """Also one whose trigger would fire in a week; nothing is written to `out`."""
    trainer, _, fired = resume_program.build(str(tmp_path / "out"))
    places = []
    trainer.extend(lambda t: places.append(t.out), trigger=(1000, "epoch"))
    trainer.rehearse()
    assert sorted(name for name, _ in fired) == ["fraction", "once", "schedule"]
    assert len(places) == 1
    assert places[0] != trainer.out == str(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_fails_in_a_rehearsal_is_raised_with_its_place_and_all_is_put_back(tmp_path):
    """The bug in the validation shows in seconds, and the trainer is as before."""
    trainer, *_ = resume_program.build(str(tmp_path))
    before = {name: value.clone() for name, value in trainer.updater.get_model("main").state_dict().items()}
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    @training.make_extension(trigger=(1, "epoch"))
    def broken(_):
        raise ValueError("a typo in the validation")

    trainer.extend(broken)
    with pytest.raises(ValueError, match="typo") as caught:
        trainer.rehearse()
    assert "broken" in caught.value.__notes__[0]
    assert trainer.updater.iteration == 0
    assert drawn == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    for name, value in trainer.updater.get_model("main").state_dict().items():
        assert torch.equal(value, before[name])


def test_a_rehearsal_after_the_run_has_begun_is_refused(tmp_path):
    """There is nothing left to try."""
    trainer, *_ = resume_program.build(str(tmp_path), stop=(1, "iteration"))
    trainer.run()
    with pytest.raises(RuntimeError, match="before run"):
        trainer.rehearse()


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch(tmp_path):
    """Its parameters could not be put back; the error names them and says what to do, which helps."""
    model = Classifier(nn.Sequential(nn.LazyLinear(3)))
    data = TupleDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    updater = training.StandardUpdater(iterators.SerialIterator(data, 4), torch.optim.Adam(model.parameters()), model)
    trainer = training.Trainer(updater, (2, "iteration"), out=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"\['predictor.0.weight', 'predictor.0.bias'\] of model 'main'; call the model once"
    ):
        trainer.rehearse()
    with torch.no_grad():
        model(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))
    trainer.rehearse()
    trainer.run()
    assert updater.iteration == 2


class Missing(training.Extension):
    """Watches a key that nothing reports."""

    watched_keys = ("main/los",)

    def __call__(self, trainer):
        pass


@pytest.mark.parametrize("watcher", ["an extension", "a trigger", "a stop trigger"])
def test_a_missing_key_does_not_hide_state_that_is_not_saved(tmp_path, watcher):
    """Both are told of at once."""

    class Counting(training.Extension):
        calls = 0

        def __call__(self, trainer):
            self.calls += 1

    stops = training.triggers.EarlyStoppingTrigger(monitor="main/los", mode="min")
    trainer, *_ = resume_program.build(str(tmp_path), stop=stops if watcher == "a stop trigger" else None)
    trainer.extend(Counting())
    if watcher == "an extension":
        trainer.extend(Missing())
    elif watcher == "a trigger":
        trainer.extend(lambda trainer: None, name="x", trigger=training.triggers.MinValueTrigger("main/los"))
    with pytest.warns(UserWarning, match="extensions.Counting.calls"), pytest.raises(ValueError, match="main/los") as caught:
        trainer.rehearse()
    assert "all state has been restored" in caught.value.__notes__[0]
