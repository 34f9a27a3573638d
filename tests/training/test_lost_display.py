"""A run does not end by what it shows: streams that can be written to no longer."""

import contextlib
import errno
import io
import os
import pty
import sys

import pytest
import torch
from counting import CountingUpdater
from torch import nn

from chainring import report
from chainring.training import Trainer, extensions

EVERY = (1, "iteration")
STREAMS = {}


def stream(function):
    STREAMS[function.__name__] = function
    return function


class Descriptor:
    """A stream without a buffer."""

    def __init__(self, descriptor, close):
        self.descriptor = descriptor
        close(os.close, descriptor)

    def write(self, text):
        os.write(self.descriptor, text.encode())


@stream
def a_pipe_that_nobody_reads(close):
    reader, writer = os.pipe()
    os.close(reader)
    return Descriptor(writer, close)


@stream
def a_full_disk(close):
    return Descriptor(os.open("/dev/full", os.O_WRONLY), close)


@stream
def a_closed_file(close):
    out = io.StringIO()
    out.close()
    return out


@stream
def a_terminal_that_was_closed(close):
    terminal, program = pty.openpty()
    os.close(terminal)
    return Descriptor(program, close)


class Failing(io.StringIO):
    """Takes so many writes, and then fails."""

    def __init__(self, error, taken=0, is_terminal=False):
        super().__init__()
        self.error, self.taken, self.is_terminal = error, taken, is_terminal

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.taken -= 1
        if self.taken < 0:
            raise self.error
        return super().write(text)


@stream
def a_terminal_that_breaks_off_later(close):
    return Failing(BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, is_terminal=True)


@stream
def a_stream_of_ones_own_with_an_error_of_its_own(close):
    return Failing(RuntimeError("connection closed"), 1)


DISPLAYS = {
    "PrintReport": lambda out: extensions.PrintReport(["iteration", "loss"], out=out),
    "ProgressBar": lambda out: extensions.ProgressBar(update_interval=1, out=out),
}


class Reports(nn.Module):
    def forward(self, x):
        report({"loss": x.mean()}, self)


class Updater(CountingUpdater):
    def update_core(self):
        report({"loss": float(self.iteration)})


def trained(out, display):
    trainer = Trainer(Updater(), (20, "iteration"), str(out))
    trainer.extend(extensions.LogReport(trigger=EVERY))
    trainer.extend(display, trigger=EVERY)
    trainer.run()
    return trainer


@pytest.mark.parametrize("display", DISPLAYS)
@pytest.mark.parametrize("kind", STREAMS)
def test_a_display_whose_stream_fails_is_left_out_and_the_run_goes_on(tmp_path, display, kind):
    """One warning says which and why; all rows are in the log."""
    with (
        contextlib.ExitStack() as stack,
        pytest.warns(UserWarning, match=f"{display} cannot write and shows no more: .*Training continues") as caught,
    ):
        trainer = trained(tmp_path, DISPLAYS[display](STREAMS[kind](stack.callback)))
    assert len(caught) == 1
    assert len(trainer.get_extension("LogReport").log) == 20


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("display", [*DISPLAYS, "progress_bar"])
def test_a_standard_output_that_fails_ends_neither_displays_nor_lines_of_the_run(
    tmp_path, monkeypatch, display, is_terminal
):
    """Those of `Trainer.run` itself included, such as that of a run that is finished already."""
    monkeypatch.setattr(sys, "stdout", Failing(OSError(errno.ENOSPC, "No space left on device"), 1, is_terminal))
    if display == "progress_bar":
        shown = extensions.Evaluator([torch.ones(1), torch.ones(1)], Reports(), progress_bar=True)
    else:
        shown = DISPLAYS[display](None)
    with (
        pytest.warns(UserWarning, match="shows no more") if is_terminal or display in DISPLAYS else contextlib.nullcontext()
    ):
        trainer = trained(tmp_path, shown)
    assert len(trainer.get_extension("LogReport").log) == 20
    trained(tmp_path, extensions.snapshot())
    trained(tmp_path, extensions.snapshot(autoload=True))  # says that it is finished, where nobody reads it


class Broken(Failing):
    """Fails where it is flushed, as before anything is drawn."""

    def flush(self):
        raise self.error


def test_a_terminal_that_is_gone_before_an_evaluation_ends_none(tmp_path, monkeypatch):
    """Its bar is left out from the beginning."""
    monkeypatch.setattr(sys, "stdout", Broken(OSError(errno.EIO, "Input/output error"), is_terminal=True))
    with pytest.warns(UserWarning, match="progress_bar cannot write and shows no more"):
        trainer = trained(tmp_path, extensions.Evaluator([torch.ones(1), torch.ones(1)], Reports(), progress_bar=True))
    assert len(trainer.get_extension("LogReport").log) == 20


@pytest.mark.parametrize("display", DISPLAYS)
def test_a_process_without_a_standard_output_shows_nothing(tmp_path, monkeypatch, recwarn, display):
    """As Python makes it where descriptor 1 is closed: ``sys.stdout`` is ``None``."""
    monkeypatch.setattr(sys, "stdout", None)
    assert len(trained(tmp_path, DISPLAYS[display](None)).get_extension("LogReport").log) == 20
    assert not recwarn.list
