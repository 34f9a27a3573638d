"""What a person sees of the example: in a real terminal (a pseudo-terminal, its escape codes interpreted) and in a pipe."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
from pathlib import Path
from typing import NamedTuple

import pytest

import forked

EXAMPLE = Path(__file__).parents[1] / "examples" / "mnist" / "train_mnist.py"
ENTRIES = ["epoch", "main/loss", "validation/main/loss", "main/accuracy", "validation/main/accuracy", "elapsed_time"]
EPOCHS = 4
BAR = re.compile(r" *\d+%\|.+\| epoch \d\.\d\d/4, iteration \d+ \[\d\d:\d\d<[\d:?]+, +[\d.?]+(epoch/s|s/epoch)\]")


class Screen:
    """A terminal of some width: printing, wrapping, carriage return, line feed, cursor up, erase in line.

    Attributes:
        lines: what stands there.
        drawn: the content of a line each time that the cursor left it or went back to its beginning.
    """

    def __init__(self, columns):
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0
        self.drawn = []

    def feed(self, text):
        for code, argument, sign in re.findall(r"(\x1b\[(\d*)[A-Za-z])|([\s\S])", text):
            self._control(code[-1], int(argument or 1)) if code else self._put(sign)
        return self

    def _control(self, letter, number):
        assert letter in "AK", f"an escape code that this terminal does not know: {letter}"
        if letter == "A":
            self.row -= number
        else:
            self.lines[self.row] = self.lines[self.row][: self.column]

    def _put(self, sign):
        assert sign.isprintable() or sign in "\r\n", repr(sign)
        if sign in "\r\n":
            self.drawn.append(self.lines[self.row].rstrip())
            self.column = 0 if sign == "\r" else self.column
            self.row += sign == "\n"
        else:
            if self.column == self.columns:
                self.row, self.column = self.row + 1, 0
            self._extend()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + sign + line[self.column + 1 :]
            self.column += 1
        self._extend()

    def _extend(self):
        while len(self.lines) <= self.row:
            self.lines.append("")

    def text(self):
        """The lines, without what is blank at their ends."""
        return [line.rstrip() for line in self.lines]


class Seen(NamedTuple):
    """A run of the example: the screen at its end, and the log that it wrote."""

    screen: Screen
    log: list
    received: str


def command(out):
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    arguments = [str(EXAMPLE), "--epoch", str(EPOCHS), "--batchsize", "5", "--out", str(out)]
    return arguments, environment | {"OMP_NUM_THREADS": "1"}


def show_in_terminal(columns, arguments, environment):
    """What a program sends to a pseudo-terminal of that width, which has its output and errors, and its exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {"TERM": "xterm-256color", **environment}
    with forked.Forked(arguments, env=environment, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        received = b""
        while chunk := _read(master):
            received += chunk
    os.close(master)
    return received.decode(), process.returncode


def run_in_terminal(columns, out, **settings):
    """The example with its output and errors on a pseudo-terminal of that width, in an environment with these settings."""
    arguments, environment = command(out)
    text, code = show_in_terminal(columns, arguments, {**environment, **settings})
    assert code == 0, text
    return Seen(Screen(columns).feed(text), json.loads((out / "log").read_text()), text)


def _read(master):
    try:
        return os.read(master, 65536)
    except OSError:  # how Linux says that nobody holds the other end any more
        return b""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return run_in_terminal(200, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return run_in_terminal(80, tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="module", params=["wide", "narrow"])
def either(request):
    return request.getfixturevalue(request.param)


def table_of(log):
    """The header and the rows as one line each, written here once more."""
    widths = [max(10, len(entry)) for entry in ENTRIES]
    cells = [ENTRIES, *[[f"{row[entry]:g}" for entry in ENTRIES] for row in log]]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def short_table_of(log):
    """The same as 80 columns have it: shorter titles, and numbers of at most four digits."""
    titles = ["epoch", "loss", "val/loss", "accuracy", "val/accuracy", "elapsed_time"]
    widths = [max(7, len(title)) for title in titles]
    cells = [titles, *[[str(row["epoch"]), *[f"{row[key]:.4g}" for key in ENTRIES[1:]]] for row in log]]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def test_a_wide_terminal_shows_the_table_and_nothing_else_at_the_end(wide):
    """A header, a row an epoch, columns aligned; the bar is gone and the cursor at the start of a clean line."""
    assert len(wide.log) == EPOCHS
    assert wide.screen.text() == [*table_of(wide.log), ""]
    assert wide.screen.column == 0


def test_80_columns_show_a_row_on_a_line(narrow):
    """Titles are shortened, and numbers rounded."""
    assert narrow.screen.text() == [*short_table_of(narrow.log), ""]


def test_the_bar_is_seen_and_fits_into_one_line(either):
    """It stands below the table and is drawn over itself: a line of it is never wrapped, never left behind."""
    bars = [line for line in either.screen.drawn if "%|" in line]
    assert len(bars) > EPOCHS
    assert all(BAR.fullmatch(line) for line in bars)
    assert max(map(len, bars)) < either.screen.columns


def test_the_bar_is_of_its_full_length_where_there_is_room(wide):
    """50 characters, and no more, however wide the terminal is."""
    bars = [line for line in wide.screen.drawn if "%|" in line]
    assert {len(line.split("|")[1]) for line in bars} == {50}


def test_table_and_bar_do_not_tear_each_other(either):
    """Whenever a line is left or begun again it is blank, all bar, or all table."""
    table = table_of(either.log) if either.screen.columns == 200 else short_table_of(either.log)
    torn = [line for line in either.screen.drawn if line and line not in table and not BAR.fullmatch(line)]
    assert torn == []


def test_nothing_is_coloured_whether_or_not_colour_is_refused(either):
    """With `NO_COLOR` (https://no-color.org) there is nothing to take away: no code that sets a colour is ever sent."""
    assert not re.search(r"\x1b\[[\d;]*m", either.received)


def test_a_dumb_terminal_gets_lines(tmp_path):
    """It cannot go back in a line: `TERM=dumb` is the shell of an editor, or the log of a build."""
    seen = run_in_terminal(200, tmp_path, TERM="dumb", NO_COLOR="1")
    assert not set(seen.received.replace("\r\n", "")) - {chr(code) for code in range(32, 127)}
    lines = seen.received.split("\r\n")
    progress = [line for line in lines if "%|" in line]
    assert progress
    assert all(BAR.fullmatch(line) for line in progress)
    assert [line for line in lines if line not in progress] == [*table_of(seen.log), ""]


def test_nothing_but_lines_goes_to_a_pipe(tmp_path):
    """The table as it is, the progress as plain lines: no carriage return, no escape code, nothing on stderr."""
    arguments, environment = command(tmp_path)
    done = forked.run(arguments, env=environment)
    done.check_returncode()
    assert done.stderr == ""
    assert not set(done.stdout.encode()) - set(range(32, 127)) - {ord("\n")}
    text = done.stdout.splitlines()
    progress = [line for line in text if "%|" in line]
    assert [line for line in text if line not in progress] == table_of(json.loads((tmp_path / "log").read_text()))
    assert all(BAR.fullmatch(line) for line in progress)
    assert text[-1].startswith("100%|" + "#" * 50 + "| epoch 4.00/4, iteration 1150 [")


INTERRUPTED = """
import os, signal, sys
import torch
from torch import nn
from chainring import iterators, training
from chainring.training import extensions

model = nn.Linear(2, 1)
iterator = iterators.SerialIterator(torch.ones(40, 2), 2)
optimizer = torch.optim.SGD(model.parameters())
updater = training.StandardUpdater(iterator, optimizer, model, loss_func=lambda net, x: net(x).sum())
trainer = training.Trainer(updater, (60, "iteration"), sys.argv[1])
trainer.extend(extensions.snapshot())
trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
if "rows" in sys.argv:
    trainer.extend(extensions.PrintReport(["iteration"]))
if "bar" in sys.argv:
    trainer.extend(extensions.ProgressBar(update_interval=1))


def disturb(trainer):
    if trainer.updater.iteration == 5:
        signum = getattr(signal, sys.argv[2])
        os.write(1, b"^C" * (signum == signal.SIGINT))  # what the terminal echoes
        os.kill(os.getpid(), signum)


trainer.extend(disturb)
trainer.run()
"""


TOLD = """
from chainring._messages import info
path = "/a/path/" + "long" * 20
info(f"a run that is told of in more words than one line of a terminal of eighty columns has room for, and {path}")
info("short")
"""


def test_a_message_is_broken_between_words(tmp_path):
    """Where a terminal is narrower; a path stays whole, and in a pipe nothing is broken."""
    environment = command(tmp_path)[1]
    text, _ = show_in_terminal(80, ["-c", TOLD], environment)
    first, second, path, last = text.splitlines()
    assert (first, second) == (
        "a run that is told of in more words than one line of a terminal of eighty", "columns has room for, and",
    )  # fmt: skip
    assert (path, last) == ("/a/path/" + "long" * 20, "short")
    assert forked.run(["-c", TOLD], env=environment).stdout.splitlines() == [f"{first} {second} {path}", "short"]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("bar", [["bar"], [], ["bar", "rows"]], ids=["bar", "no bar", "bar below a table"])
def test_a_signal_is_told_on_a_line_of_its_own(tmp_path, columns, signal, bar):
    """Neither beside the bar nor behind the ^C that the terminal echoes beside it, and that is gone with it."""
    environment = command(tmp_path)[1]
    text, code = show_in_terminal(columns, ["-c", INTERRUPTED, str(tmp_path), signal, *bar], environment)
    screen = Screen(columns).feed(text)
    told = [line for line in screen.text() if line]
    rows = ["iteration", "2", "4"] if "rows" in bar else []
    again = ", Ctrl-C again ends it at once" if signal == "SIGINT" else ""
    assert told == [
        *rows,
        f"{signal}: the run ends after this iteration{again}",
        f"{signal} ends the run after iteration 5: its state is saved",
    ]
    assert screen.column == 0
    assert code == {"SIGINT": 130, "SIGTERM": 143}[signal]
    assert any("%|" in line for line in screen.drawn) == bool(bar)
