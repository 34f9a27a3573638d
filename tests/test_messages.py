"""Messages: warnings point to a line of the user's, a finished run says so, and an error is printed once."""

import ast
import io
import sys
import warnings
from pathlib import Path

import pytest
from torch import nn
from toys import updater_of

import chainring
import forked
from chainring import serializers, training, writers
from chainring.training import extensions, triggers

SOURCE = Path(chainring.__file__).parent


def line_of(mark):
    """The number of the line of this file that ends with this comment."""
    (number,) = [n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"  # {mark}")]
    return number


def trainer_of(out, stop=(2, "iteration")):
    return training.Trainer(updater_of(), stop, str(out))


def test_every_warning_is_given_by_the_one_function_that_finds_the_line_of_the_user():
    """No module of ours calls `warnings.warn`, whose place would be counted in frames."""
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warnings.warn_explicit")
    ]
    assert [call.partition(":")[0] for call in calls] == ["_messages.py"]


class FailingWriter(writers.Writer):
    def write(self, record):
        raise OSError("no connection")


def extend_by_an_unknown_column(trainer):
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.PrintReport(["nothing"]))  # by an unknown column


def extend_by_a_failing_writer(trainer):
    trainer.extend(extensions.LogReport(trigger=(1, "iteration"), writers=[FailingWriter()]))  # by a failing writer


def stop_by_an_unknown_key(trainer):
    often, length = (1, "iteration"), (2, "iteration")
    trainer.stop_trigger = triggers.EarlyStoppingTrigger(often, "no/loss", max_trigger=length)  # by an unknown key


def plot_an_unknown_key(trainer):
    trainer.extend(extensions.PlotReport("nothing", trigger=(2, "iteration")))  # an unknown key


def load_in_an_extension(trainer):
    model = WithState()
    serializers.save(trainer.out + "/plain", nn.Linear(2, 2))

    @training.make_extension(trigger=(2, "iteration"))
    def load(trainer):
        serializers.load(trainer.out + "/plain", model)  # in an extension

    trainer.extend(load)


class WithState(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def serialize(self, serializer):
        serializer("count", 1)


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        (extend_by_an_unknown_column, "by an unknown column"),
        (extend_by_a_failing_writer, "by a failing writer"),
        (stop_by_an_unknown_key, "by an unknown key"),
        (plot_an_unknown_key, "an unknown key"),
        (load_in_an_extension, "in an extension"),
    ],
)
def test_a_warning_points_to_the_line_of_the_script_that_it_is_about(tmp_path, change, mark):
    """Where the extension is registered, the trigger is made, or the library is called from the user's own extension."""
    trainer = trainer_of(tmp_path)
    change(trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line_of(mark))


def test_a_warning_about_the_whole_run_points_to_its_run(tmp_path):
    """Such as that its data end early."""
    trainer = training.Trainer(updater_of(repeat=False), (9, "epoch"), str(tmp_path))
    with pytest.warns(UserWarning, match="ended after 3 iterations") as caught:
        trainer.run()  # of the whole
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line_of("of the whole"))]


def test_a_warning_of_a_line_is_shown_once_as_any_other(tmp_path):
    """By the filter that Python has by default."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(2):
            training.Trainer(updater_of(repeat=False), (9, "epoch"), str(tmp_path / str(number))).run()
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (
            (1, "epoch"),
            'already finished at epoch 1, iteration 3: the stop trigger is (1, "epoch"); '
            'raise the stop trigger to train further, for example to (2, "epoch"), or give another out= for a new run',
        ),
        (
            (2, "iteration"),
            'already finished at epoch 1, iteration 3: the stop trigger is (2, "iteration"); '
            'raise the stop trigger to train further, for example to (4, "iteration"), or give another out= for a new run',
        ),
        (
            (1e-9, "second"),
            'already finished at epoch 1, iteration 3, 0 seconds: the stop trigger is (1e-09, "second"); '
            'raise the stop trigger to train further, for example to (2, "second"), or give another out= for a new run',
        ),
        (
            (1, "iteration"),
            'already finished at epoch 1, iteration 3: the stop trigger is (1, "iteration"); '
            'raise the stop trigger to train further, for example to (6, "iteration"), or give another out= for a new run',
        ),
        (
            (0, "epoch"),
            'already finished at epoch 1, iteration 3: the stop trigger is (0, "epoch"); '
            'raise the stop trigger to train further, for example to (2, "epoch"), or give another out= for a new run',
        ),
        (
            lambda trainer: True,
            "already finished at epoch 1, iteration 3: <lambda> stops the training here; "
            "give another stop trigger to train further",
        ),
        ((4, "iteration"), None),
    ],
)
def test_a_resumed_run_that_is_at_its_end_says_so(tmp_path, capsys, stop, told):
    """With where it is, what ends it and what to change; one that makes updates says nothing of the kind."""
    first = trainer_of(tmp_path, (3, "iteration"))
    first.extend(extensions.snapshot(autoload=True))
    first.run()
    assert "already finished" not in capsys.readouterr().out
    second = trainer_of(tmp_path, stop)
    second.extend(extensions.snapshot(autoload=True))
    second.run()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("already")]
    assert lines == ([] if told is None else [told])


def test_what_an_output_cannot_show_is_escaped_and_the_run_continues(tmp_path, monkeypatch):
    """In a table, and in a message with a path; the rows in the file are as they were reported."""
    (tmp_path / "Läufe").mkdir()
    trainer_of(tmp_path / "Läufe").run()  # so that the next one prints where its files are now
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    trainer = trainer_of(tmp_path / "Läufe")
    trainer.extend(extensions.observe_value("größe", lambda trainer: 2.0), trigger=(1, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.PrintReport(["iteration", "größe"]))
    trainer.run()
    output.seek(0)
    shown = output.read()
    assert "iteration   gr\\xf6\\xdfe" in shown
    assert "L\\xe4ufe holds an earlier run" in shown
    assert [row["größe"] for row in trainer.get_extension("LogReport").log] == [2.0, 2.0]


def test_a_fresh_run_of_no_length_says_nothing(tmp_path, capsys):
    """Which was asked for."""
    trainer_of(tmp_path, (0, "epoch")).run()
    assert capsys.readouterr().out == ""


FAILING = """
import sys
import torch
from torch import nn
from chainring import iterators, training
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters())
iterator = iterators.SerialIterator(torch.ones(4, 2), 2)
updater = training.StandardUpdater(iterator, optimizer, model, loss_func=lambda net, x: net(x).sum())
trainer = training.Trainer(updater, (9, "iteration"), sys.argv[1])


@training.make_extension(trigger=(2, "iteration"))
def fail(trainer):
    raise LookupError("the words of the error")


trainer.extend(fail)
trainer.run()
"""


def test_an_error_is_printed_once(tmp_path):
    """With its traceback, at the end of which stands the line of the script, and where the run was."""
    done = forked.run(["-c", FAILING, str(tmp_path)])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.count("the words of the error") == 1
    assert done.stderr.endswith("LookupError: the words of the error\nraised in extension 'fail' after iteration 2\n")


def test_a_program_with_a_log_has_the_error_there_before_anything_is_finalized(tmp_path):
    """As the program has configured it."""
    logged = "import logging; logging.basicConfig(stream=sys.stdout)\ntrainer.run()"
    done = forked.run(["-c", FAILING.replace("trainer.run()", logged), str(tmp_path)])
    assert done.stdout == (
        "ERROR:chainring:training stops in extension 'fail' after iteration 2: LookupError: the words of the error\n"
    )
