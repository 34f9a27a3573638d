"""What comes before the first update: calls before training, what a resume finds changed, and the directory."""

import os
import re
import warnings

import pytest
import torch
from counting import CountingUpdater, Fires, a_trainer
from toys import updater_of

import resume_program
from chainring import iterators, report, training
from chainring.training import extensions


def resumed_from(saved, out, stop=(4, "iteration")):
    """A trainer without extensions that goes on with another's state."""
    trainer = a_trainer(out, stop=stop)
    trainer.load_state_dict(saved.state_dict())
    return trainer


def early(seen):
    """An extension that is also called before training, and says when."""

    @training.make_extension(default_name="early", invoke_before_training=True, trigger=(3, "iteration"))
    def early(trainer):
        seen.append((trainer.updater.iteration, trainer.is_before_training, trainer.extension_name))
        report({"early": trainer.updater.iteration})

    return early


def test_before_training_an_extension_is_called_once_inside_the_reporter(tmp_path):
    """At iteration 0, where `is_before_training` is true; what it reports is seen by the stop trigger at the head."""
    seen, heads = [], []
    trainer = a_trainer(tmp_path, stop=lambda trainer: heads.append(dict(trainer.observation)) or len(heads) > 4)
    trainer.extend(early(seen))
    trainer.extend(Fires(), "reader")
    trainer.run()
    assert seen == [(0, True, "early"), (3, False, "early")]
    assert heads == [{"early": 0}, {}, {}, {"early": 3}, {}]


def test_on_resume_it_is_called_again_and_its_report_thrown_away(tmp_path):
    """The stop trigger at the head sees the saved observation, as in the uninterrupted run."""
    saved, seen, heads = a_trainer(tmp_path, stop=(2, "iteration")), [], []
    saved.extend(lambda trainer: report({"loss": 0.5}), "loss")
    saved.extend(early([]))
    saved.run()
    resumed = resumed_from(saved, tmp_path, lambda trainer: not heads.append(dict(trainer.observation)))
    resumed.extend(lambda trainer: report({"loss": 0.25}), "loss")
    resumed.extend(early(seen))
    resumed.run()
    assert (seen, heads) == ([(2, False, "early")], [{"loss": 0.5}])


def test_an_extension_may_skip_the_call_on_resume(tmp_path):
    """`skip_on_resume` leaves it out in a run that goes on with an earlier one, and only there."""
    seen = []
    for is_resumed in (False, True):
        trainer, extension = a_trainer(tmp_path, stop=(0, "iteration")), early(seen)
        extension.skip_on_resume = True
        trainer.extend(extension)
        if is_resumed:
            trainer.load_state_dict(trainer.state_dict())
        trainer.run()
    assert seen == [(0, True, "early")]


def test_extend_says_whether_an_extension_is_called_before_training(tmp_path):
    """The argument wins over what the extension brings."""
    trainer, seen, fires = a_trainer(tmp_path, stop=(0, "iteration")), [], Fires()
    trainer.extend(early(seen), invoke_before_training=False)
    trainer.extend(fires, invoke_before_training=True)
    trainer.run()
    assert (seen, fires.iterations) == ([], [0])


def test_extensions_that_differ_on_resume_are_named_in_a_warning(tmp_path):
    """Those only there and those only here, once, when the run starts."""
    saved = a_trainer(tmp_path, stop=(2, "iteration"))
    for name in ("kept", "gone"):
        saved.extend(Fires(), name)
    saved.run()
    resumed, kept = resumed_from(saved, tmp_path), Fires()
    resumed.extend(kept, "kept")
    resumed.extend(Fires(), "new")
    with pytest.warns(UserWarning, match=r"only there \['gone'\], only here \['new'\]"):
        resumed.run()
    assert kept.iterations == [3, 4]


@pytest.mark.parametrize("below", ["", "below", "below/further"])
def test_an_out_that_is_or_lies_below_a_file_is_refused_at_construction(tmp_path, below):
    """The error names the file in the way and the remedy; upstream swallows it."""
    (tmp_path / "file").touch()
    with pytest.raises(
        NotADirectoryError, match=rf"out must be a directory, and {re.escape(str(tmp_path))}/file.*another out"
    ):
        a_trainer(tmp_path / "file" / below)


@pytest.mark.parametrize("out", [None, 5, b"result"])
def test_an_out_that_is_no_path_is_refused(out):
    """The error shows what an out is and what this is."""
    with pytest.raises(TypeError, match=f'out is the path of a directory, such as "result"; got .*{type(out).__name__}'):
        training.Trainer(CountingUpdater(), None, out)


def test_construction_makes_no_directory_and_a_run_makes_it_with_its_parents(tmp_path):
    """A script that fails early leaves nothing behind."""
    trainer = a_trainer(tmp_path / "a" / "b", stop=(1, "iteration"))
    before = (tmp_path / "a").exists()
    trainer.run()
    assert (before, (tmp_path / "a" / "b").is_dir()) == (False, True)


def test_a_change_of_the_working_directory_does_not_move_the_run(tmp_path, monkeypatch):
    """A relative out is resolved when the trainer is made; a later os.chdir, by a data set say, changes nothing."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = training.Trainer(CountingUpdater(), (3, "iteration"), "result")
    trainer.extend(extensions.LogReport(), trigger=(1, "iteration"))
    trainer.extend(extensions.snapshot(), trigger=(3, "iteration"))
    trainer.extend(lambda trainer: trainer.updater.iteration == 1 and os.chdir(tmp_path / "elsewhere"), name="moves")
    trainer.run()
    assert trainer.out == str(tmp_path / "result")
    assert len((tmp_path / "result" / "log.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "result" / "snapshot_iter_3").is_dir()
    assert os.listdir(tmp_path / "elsewhere") == []


class Holding(training.Extension):
    """Has this state."""

    trigger = (1, "iteration")

    def __init__(self, key="state", value=1):
        self.key, self.value = key, value

    def __call__(self, trainer):
        return False

    def serialize(self, serializer):
        serializer(self.key, self.value)


def holding_module(trainer, *state):
    """Lets the model save more than its parameters."""
    module = trainer.updater.get_model("main").predictor
    module.serialize = Holding(*state).serialize


UNSAVABLE = {
    "an object of an extension": lambda t: t.extend(Holding(value=object())),
    "a generator of an extension": lambda t: t.extend(Holding(value={"seen": [iter([1])]})),
    "a tensor of an extension under half a surrogate": lambda t: t.extend(Holding("a\udc80", torch.ones(1))),
    "a tensor in a dict under half a surrogate": lambda t: t.extend(Holding(value={"\ud800": torch.ones(1)})),
    "a sparse tensor": lambda t: t.extend(Holding(value=torch.eye(2).to_sparse())),
    "an object of a trigger": lambda t: t.extend(lambda trainer: None, "called", trigger=Holding(value=object())),
    "an object of a module": lambda t: holding_module(t, "state", object()),
    "a parameter under half a surrogate": lambda t: t.updater.get_model("main").register_buffer("b\udc80", torch.ones(1)),
    "a reported value under half a surrogate": lambda t: t.extend(
        lambda trainer: report({"loss \udc80": torch.ones(())}), "reporter", priority=200
    ),
}


@pytest.mark.parametrize("add", UNSAVABLE.values(), ids=UNSAVABLE)
def test_state_that_cannot_be_saved_ends_a_run_after_its_first_update(tmp_path, add):
    """And not at its first snapshot, after an epoch of work; a run without snapshots saves nothing, and goes on."""
    for takes_snapshots in (True, False):
        trainer = training.Trainer(updater_of(), (2, "epoch"), out=str(tmp_path / str(takes_snapshots)))
        if takes_snapshots:
            trainer.extend(extensions.snapshot(), trigger=(2, "epoch"))
        add(trainer)
        if takes_snapshots:
            with pytest.raises(TypeError, match=r"cannot be saved"):
                trainer.run()
            assert trainer.updater.iteration == 1
        else:
            trainer.run()
            assert trainer.updater.iteration == 6


def test_the_trial_of_the_state_writes_no_file_and_prints_nothing(tmp_path, capsys):
    """After the first update there is what a run without snapshots has written."""
    files = []
    for takes_snapshots in (True, False):
        out = tmp_path / str(takes_snapshots)
        trainer = training.Trainer(updater_of(), (1, "iteration"), out=str(out))
        trainer.extend(extensions.LogReport(trigger=(5, "iteration")))
        trainer.extend(extensions.Recorder())
        if takes_snapshots:
            trainer.extend(extensions.snapshot(), trigger=(2, "epoch"))
        trainer.run()
        files.append({path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != "run.json"})
    assert files[0] == files[1]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["never called", "never called"]  # at the end


class WithDropout(torch.nn.Sequential):
    """A model whose dropout a caller may have turned off."""

    def __init__(self, *more):
        super().__init__(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1), *more)

    def forward(self, x):
        return super().forward(x).square().mean()


def started(out, trained, *others):
    """Warnings of a run that trains the first of these models."""
    models = {"main": trained} | {f"other{number}": other for number, other in enumerate(others)}
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    data = iterators.SerialIterator(torch.ones(4, 3), 2)
    trainer = training.Trainer(training.StandardUpdater(data, optimizer, models), (2, "iteration"), str(out))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    return [str(each.message) for each in caught if "evaluation mode" in str(each.message)]


def test_model_that_is_trained_in_evaluation_mode_is_named(tmp_path):
    """As from_pretrained() returns it; a teacher that is not trained may be, and so may a part of a model."""
    (text,) = started(tmp_path / "a", WithDropout().eval())
    assert text.startswith("model 'main' is trained in evaluation mode, without its dropout; call model.train() before")
    assert started(tmp_path / "b", WithDropout(), WithDropout().eval()) == []
    assert started(tmp_path / "c", WithDropout(torch.nn.Dropout(0.1).eval())) == []
    assert started(tmp_path / "d", WithDropout(torch.nn.BatchNorm1d(1).eval())) == []


def test_run_says_from_what_it_continues(tmp_path, capsys):
    """Its snapshot, iteration and epoch, once."""
    for stop in (2, 3):
        trainer = resume_program.build(str(tmp_path), stop=(stop, "iteration"))[0]
        trainer.extend(extensions.snapshot(autoload=True), name="saved", trigger=(2, "iteration"))
        trainer.run()
    shown = capsys.readouterr().out
    assert shown.count("resumed from ") == 1
    assert "snapshot_iter_2, after iteration 2, epoch " in shown


def test_snapshot_that_does_not_fit_a_changed_script_is_named_with_what_to_do(tmp_path):
    """Beside the error of PyTorch."""
    for width in (2, 3):
        model = torch.nn.Linear(width, 1)
        data = iterators.SerialIterator(torch.ones(4, width), 2)
        updater = training.StandardUpdater(
            data, torch.optim.SGD(model.parameters(), 0.1), model, loss_func=lambda model, x: model(x).mean()
        )
        trainer = training.Trainer(updater, (width, "iteration"), str(tmp_path))
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        if width == 2:
            trainer.run()
            continue
        with pytest.raises(RuntimeError, match="size mismatch") as caught:
            trainer.run()
        assert "snapshot_iter_2 was loaded" in caught.value.__notes__[0]
        assert "strict=False" in caught.value.__notes__[0]
