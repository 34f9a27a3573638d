"""The PrintReport: a table of the log's rows, each printed once."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import termios
import warnings

import pytest
from scripted import Counting, StateAt, run, trainer_of

from chainring.training.extensions import LogReport, PrintReport


def losses(*numbers):
    return [{"main/loss": number} for number in numbers]


def printed(tmp_path, observations, *, every=1, row=None, **settings):
    """The lines of the table."""
    out = io.StringIO()
    run(
        Counting(observations),
        len(observations),
        tmp_path,
        LogReport(trigger=(every, "iteration"), filename=None, postprocess=lambda own: own.update(row or {})),
        PrintReport(out=out, **settings),
    )
    return out.getvalue().splitlines()


def test_the_table_is_a_header_and_a_row_for_each_row_of_the_log(tmp_path):
    """The header comes once; a row comes when it is new, and no other iteration prints."""
    table = printed(tmp_path, losses(1, 2, 3, 4), every=2, entries=["iteration", "main/loss"])
    assert table == ["iteration   main/loss", "2           1.5", "4           3.5"]


def test_columns_are_as_wide_as_their_names_and_at_least_10(tmp_path):
    """Two spaces apart, six digits, aligned on the left."""
    row = {"main/loss": 1 / 3, "validation/main/loss": 1e-7, "n": 12345678}
    table = printed(tmp_path, [row], entries=["n", "validation/main/loss", "main/loss"])
    assert table == ["n           validation/main/loss  main/loss", "1.23457e+07  1e-07                 0.333333"]


def test_a_missing_key_is_a_blank(tmp_path):
    """The columns after it stay where they are. What no row has had is warned about at the end, with what they have."""
    observations = [{"a": 1.0, "b": 2.0}, {"b": 3.0}]
    with pytest.warns(UserWarning, match=r"no values for \['never'\]; the rows have \['a', 'b', 'epoch'") as caught:
        table = printed(tmp_path, observations, entries=["a", "b", "never"])
    assert len(caught) == 1
    assert table == ["a           b           never", "1           2", "            3"]


def test_a_run_that_fails_says_nothing_of_keys_that_have_not_come(tmp_path):
    """Its error is what there is to read; the rows so far are printed."""

    def fail(trainer):
        if trainer.updater.iteration == 2:
            raise ArithmeticError("as planned")

    out = io.StringIO()
    log = LogReport(trigger=(1, "iteration"), filename=None)
    with pytest.raises(ArithmeticError), warnings.catch_warnings(record=True, action="always") as caught:
        run(Counting(losses(1, 2, 3)), 3, tmp_path, fail, PrintReport(["iteration", "validation/main/loss"], out=out), log)
    assert [line.split() for line in out.getvalue().splitlines()] == [["iteration", "validation/main/loss"], ["1"]]
    assert [str(warning.message) for warning in caught] == []


def test_entries_none_takes_the_keys_of_the_first_row(tmp_path):
    """In their order."""
    header, _ = printed(tmp_path, [{"b": 1.0, "a": 2.0}])
    assert header.split() == ["b", "a", "epoch", "iteration", "elapsed_time"]


def test_no_rows_print_nothing(tmp_path):
    """Not even a header."""
    assert printed(tmp_path, losses(1), every=2) == []


def test_nan_and_text_are_shown_as_they_are(tmp_path):
    """What postprocess put into a row is a cell like another."""
    out = io.StringIO()
    log = LogReport(trigger=(1, "iteration"), filename=None, postprocess=lambda row: row.update(note="halved"))
    run(Counting(losses(float("nan"))), 1, tmp_path, log, PrintReport(["main/loss", "note"], out=out))
    assert out.getvalue().splitlines()[1] == "nan         halved"


def test_a_row_is_printed_in_the_iteration_in_which_it_is_written(tmp_path):
    """Not at the end of the run."""
    out, seen = io.StringIO(), []
    log = LogReport(trigger=(2, "iteration"), filename=None)
    look = lambda trainer: seen.append(out.getvalue().count("\n"))  # noqa: E731
    run(Counting(losses(1, 2, 3, 4)), 4, tmp_path, log, PrintReport(["main/loss"], out=out), look)
    assert seen == [0, 2, 2, 3]


def test_registered_before_the_log_it_prints_the_last_row_at_the_end(tmp_path):
    """A table of another order lacks no row."""
    out = io.StringIO()
    log = LogReport(trigger=(2, "iteration"), filename=None)
    run(Counting(losses(1, 2)), 2, tmp_path, PrintReport(["iteration"], out=out), log)
    assert out.getvalue().split() == ["iteration", "2"]


def test_a_resumed_run_prints_the_restored_rows_first(tmp_path):
    """Then its own, under one header; none of them twice."""
    kept = StateAt(3)
    parts = lambda out: (LogReport(trigger=(2, "iteration")), PrintReport(["iteration", "main/loss"], out=out))  # noqa: E731
    observations = losses(1, 2, 3, 4, 5, 6)
    full, again = io.StringIO(), io.StringIO()
    run(Counting(observations), 6, tmp_path, *parts(full), kept)
    started = []
    trainer = trainer_of(Counting(observations), 6, tmp_path, *parts(again), StateAt(3), state=kept.state)
    trainer.stop_trigger = lambda trainer: started.append(again.getvalue()) or trainer.updater.iteration == 6
    trainer.run()
    assert again.getvalue() == full.getvalue()
    assert started[0] == "".join(full.getvalue().splitlines(keepends=True)[:2])


def test_out_none_is_the_stdout_of_the_moment(tmp_path, capsys):
    """It is looked up when a row is printed, so redirect_stdout and capsys see it."""
    report = PrintReport(["main/loss"])
    trainer = trainer_of(Counting(losses(1)), 1, tmp_path, LogReport(trigger=(1, "iteration")), report)
    with contextlib.redirect_stdout(io.StringIO()) as redirected:
        trainer.run()
    assert redirected.getvalue() == "main/loss\n1\n"
    run(Counting(losses(2)), 1, tmp_path / "2", LogReport(trigger=(1, "iteration")), PrintReport(["main/loss"]))
    assert capsys.readouterr().out == "main/loss\n2\n"


def test_a_stream_without_flush_will_do(tmp_path):
    """Anything with write is a place to print."""

    class Stream:
        text = ""

        def write(self, text):
            self.text += text

    stream = Stream()
    run(Counting(losses(1)), 1, tmp_path, LogReport(trigger=(1, "iteration")), PrintReport(["main/loss"], out=stream))
    assert stream.text == "main/loss\n1\n"


def test_each_row_is_flushed(tmp_path):
    """It is seen at once through a pipe."""

    class Stream(io.StringIO):
        flushed = ""

        def flush(self):
            self.flushed = self.getvalue()

    stream, seen = Stream(), []
    report = PrintReport(["main/loss"], out=stream)
    look = lambda trainer: seen.append(stream.flushed == stream.getvalue() != "")  # noqa: E731
    run(Counting(losses(1, 2)), 2, tmp_path, LogReport(trigger=(1, "iteration")), report, look)
    assert seen == [True, True]


def test_log_report_names_the_log_to_show(tmp_path):
    """By the name that it has in the trainer."""
    out = io.StringIO()
    trainer = trainer_of(Counting(losses(1, 2)), 2, tmp_path)
    trainer.extend(LogReport(trigger=(1, "iteration")))
    trainer.extend(LogReport(trigger=(2, "iteration"), filename="slow"), name="slow")
    trainer.extend(PrintReport(["iteration"], log_report="slow", out=out))
    trainer.run()
    assert out.getvalue().split() == ["iteration", "2"]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(tmp_path):
    """Before the first update."""
    trainer = trainer_of(Counting(losses(1)), 1, tmp_path, LogReport(), PrintReport(log_report="Log"))
    with pytest.raises(KeyError, match=r"'Log'.*'LogReport'.*extend the trainer by one"):
        trainer.run()
    assert trainer.updater.iteration == 0


def test_an_extension_without_a_log_is_refused(tmp_path):
    """The error names it."""
    trainer = trainer_of(Counting(losses(1)), 1, tmp_path, PrintReport(log_report="PrintReport"))
    with pytest.raises(TypeError, match="'PrintReport' has no log"):
        trainer.run()


def test_entries_given_as_one_string_is_refused():
    """It would be taken for its letters."""
    with pytest.raises(TypeError, match=r"write \['epoch'\]"):
        PrintReport("epoch")


def test_without_entries_there_is_nothing_but_empty_lines_never_an_error(tmp_path):
    """An empty list of columns prints an empty header once."""
    assert printed(tmp_path, losses(1, 2), entries=[]) == ["", "", ""]


SEVEN = [
    "epoch", "iteration", "main/loss", "main/accuracy", "validation/main/loss", "validation/main/accuracy", "elapsed_time",
]  # fmt: skip


@contextlib.contextmanager
def terminal(columns):
    """A stream that is a terminal of that width, and keeps what is written."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    class Terminal(io.StringIO):
        isatty = staticmethod(lambda: True)
        fileno = staticmethod(lambda: slave)

    yield Terminal()
    os.close(master)
    os.close(slave)


def shown(tmp_path, columns, rows, entries=None):
    """The lines of the table of these rows in a terminal of that width."""
    with terminal(columns) as out:
        log = LogReport(trigger=(1, "iteration"), filename=None, postprocess=lambda row: row.update(rows.pop(0)))
        run(Counting([{"x": 1.0}] * len(rows)), len(rows), tmp_path, log, PrintReport(entries or list(rows[0]), out=out))
        return out.getvalue().splitlines()


def test_seven_columns_fit_into_80(tmp_path):
    """Shorter titles, numbers in the width of their columns, whole numbers in full."""
    numbers = [123456, 7654321, 1 / 3, 0.98765, 1.23456e-5, -4.5678e-10, 12.345]
    later = [123457, 7654322, float("nan"), float("inf"), -1e100, 0.0, 5025.0]
    rows = [dict(zip(SEVEN, values, strict=True)) for values in (numbers, later)]
    assert shown(tmp_path, 80, rows) == [
        "epoch    iteration  loss     accuracy  val/loss  val/accuracy  elapsed_time",
        "123456   7654321    0.3333   0.9877    1.23e-05  -4.568e-10    12.35",
        "123457   7654322    nan      inf       -1e+100   0             5025",
    ]


def test_where_there_is_room_a_terminal_shows_what_a_file_has(tmp_path):
    """Full names, six digits."""
    rows = [dict(zip(SEVEN, [1, 15, 1 / 3, 0.5, 2 / 3, 0.25, 12.345], strict=True))]
    assert shown(tmp_path, 120, list(rows)) == printed(tmp_path / "file", [{"x": 1.0}], entries=SEVEN, row=rows[0])


@pytest.mark.parametrize(
    ("keys", "titles"),
    [
        (["main/loss", "loss", "elapsed_time", "epoch"], ["main/loss", "loss", "elapsed_time", "epoch"]),
        (["main/loss", "validation/main/loss", "val/loss"], ["loss", "validation/main/loss", "val/loss"]),
        (["validation_1/main/accuracy", "validation/main/accuracy"], ["val_1/accuracy", "val/accuracy"]),
        (["main/main", "main"], ["main/main", "main"]),
        (["main/encoder/layer/weight", "main/encoder/layer/bias"], ["encoder/layer/weight", "encoder/layer/bias"]),
        (["main/generator/loss", "main/discriminator/loss"], ["generator/loss", "discriminator/loss"]),
    ],
)
def test_no_two_columns_have_one_title(tmp_path, keys, titles):
    """A title that would be the same as another stays longer, and the row takes several lines at last."""
    lines = shown(tmp_path, 20, [dict.fromkeys(keys, 1.0)])
    assert " ".join(lines[: len(lines) // 2]).split() == titles


def test_a_table_without_columns_is_no_error_in_a_narrow_terminal(tmp_path):
    """Nor is one column that is wider than the terminal."""
    with terminal(5) as out:
        run(Counting(losses(1)), 1, tmp_path, LogReport(trigger=(1, "iteration")), PrintReport([], out=out))
        assert out.getvalue() == "\n\n"
    assert shown(tmp_path / "one", 5, [{"validation/main/perplexity_of_all": 1.0}]) == ["val/perplexity_of_all", "1"]
