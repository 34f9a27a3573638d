"""The ProgressBar: what it says, when, and that only plain lines go where no terminal is."""

import contextlib
import io
import itertools
import re
import threading
import time

import pytest
from scripted import Counting, run, trainer_of

from chainring.training import Trainer, Updater
from chainring.training.extensions import ProgressBar


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, without a width of its own."""

    def isatty(self):
        return True


class Clock:
    """Stands where it is put; each update moves it by ``step``."""

    def __init__(self, monkeypatch):
        self.now, self.step = 1000.0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr("tqdm.std.time", lambda: self.now)

    def updater(self, ends_after=None, **settings):
        clock = self

        class Timed(Counting):
            def update_core(self):
                if self.iteration == ends_after:
                    raise StopIteration
                clock.now += clock.step

        return Timed(**settings)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    return Clock(monkeypatch)


def shown(text):
    """The iterations that were shown, each once, in order."""
    return list(dict.fromkeys(int(number) for number in re.findall(r"iteration (\d+)", text)))


def test_a_line_says_how_far_training_is_how_long_it_took_and_takes_and_how_fast_it_goes(clock, tmp_path):
    """In the unit of the stop trigger, iterations here."""
    out = io.StringIO()
    clock.step = 2.0
    run(clock.updater(epoch_length=4), 8, tmp_path, ProgressBar(update_interval=4, bar_length=10, out=out))
    assert " 50%|#####     | iteration 4/8, epoch 1.00 [00:08<00:08,  2.00s/iteration]" in out.getvalue().splitlines()


def test_in_epochs_it_counts_epochs_and_names_the_iteration(clock, tmp_path):
    """Where the training length is in epochs."""
    out = io.StringIO()
    clock.step = 0.5
    bar = ProgressBar((4, "epoch"), update_interval=4, bar_length=4, out=out)
    run(clock.updater(epoch_length=2), 8, tmp_path, bar)
    assert out.getvalue().splitlines()[0] == " 50%|##  | epoch 2.00/4, iteration 4 [00:02<00:02,  1.00epoch/s]"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_it_is_refreshed_every_update_interval_iterations(clock, tmp_path, stream):
    """The bar is drawn at multiples of update_interval, and at the end."""
    out = stream()
    clock.step = 1.0
    run(clock.updater(), 7, tmp_path, ProgressBar(update_interval=2, out=out))
    assert [number for number in shown(out.getvalue()) if number] == [2, 4, 6, 7]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_slow_iterations_are_shown_every_few_seconds_all_the_same(clock, tmp_path, stream):
    """Also when they have become slow, after many fast ones."""
    out, seen = stream(), []
    updater = clock.updater()
    clock.step = 0.001

    def look(trainer):
        clock.step = 1.0 if trainer.updater.iteration >= 2000 else 0.001
        seen.append(shown(out.getvalue())[-1:])

    run(updater, 2015, tmp_path, ProgressBar(update_interval=1000, out=out), look)
    numbers = [number for number in shown(out.getvalue()) if number >= 2000]
    assert len(numbers) >= 5
    assert all(later - earlier <= 5 for earlier, later in itertools.pairwise(numbers))
    assert seen[2010][0] > 2005


def test_a_resumed_run_begins_where_it_stands(clock, tmp_path):
    """And its speed is its own, not that of iterations which it did not run."""
    state = run(Counting(), 6, tmp_path).state_dict()
    out = io.StringIO()
    clock.step = 1.0
    trainer = trainer_of(clock.updater(), 8, tmp_path, state=state)
    trainer.extend(ProgressBar(update_interval=1, bar_length=8, out=out))
    with pytest.warns(UserWarning, match="ProgressBar"):
        trainer.run()
    assert "| iteration 7/8, epoch 7.00 [00:01<00:01,  1.00iteration/s]" in out.getvalue()


@pytest.mark.parametrize("stop", [None, lambda trainer: trainer.updater.iteration >= 3, (5, "second")])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_without_a_known_length_there_is_no_total(clock, tmp_path, stop, stream):
    """No bar and no percentage, but the iterations done and their speed; Chainer raises an AttributeError."""
    out = stream()
    clock.step = 2.0
    Trainer(clock.updater(ends_after=3), stop, tmp_path, [ProgressBar(update_interval=1, out=out)]).run()
    assert "iteration 2, epoch 2.00 [00:04,  2.00s/iteration]" in out.getvalue()
    assert shown(out.getvalue())[-1] == 3
    assert "%" not in out.getvalue()


def test_training_length_takes_the_place_of_the_stop_trigger_s(clock, tmp_path):
    """The given length is the total."""
    out = io.StringIO()
    clock.step = 1.0
    run(clock.updater(epoch_length=2), 4, tmp_path, ProgressBar((8, "epoch"), update_interval=1, out=out))
    assert " 25%|" in out.getvalue().splitlines()[-1]
    assert "epoch 2.00/8, iteration 4" in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("length", [(4, "iteration"), (4.9, "iteration"), (2, "epoch"), (1.6, "epoch")])
def test_past_its_length_the_bar_is_full_and_the_text_says_where_it_is(clock, tmp_path, length, stream):
    """A last batch that crosses the end of the data fills the bar, without a warning or a negative time."""
    out = stream()
    clock.step = 1.0
    run(clock.updater(epoch_length=3), 7, tmp_path, ProgressBar(length, update_interval=1, bar_length=5, out=out))
    last = re.split(r"[\r\n]+", out.getvalue().strip().removesuffix("\r").strip())[-1]
    assert last.startswith("100%|#####| ")
    assert {"iteration": "iteration 7/", "epoch": "epoch 2.33/"}[length[1]] in last
    assert "<00:00, " in last


@pytest.mark.parametrize("length", [1, 7, 50])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_bar_length_is_the_number_of_characters_of_the_bar(clock, tmp_path, length, stream):
    """It holds where the terminal is wide enough."""
    out = stream()
    clock.step = 1.0
    run(clock.updater(), 2, tmp_path, ProgressBar(update_interval=1, bar_length=length, out=out))
    assert f"100%|{'#' * length}| iteration 2/2" in out.getvalue()


@pytest.mark.parametrize("columns", [20, 80, 100])
def test_a_line_is_shorter_than_the_terminal_is_wide(clock, tmp_path, monkeypatch, columns):
    """So it never wraps: the bar is shortened first, and then the text cut off."""
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    clock.step = 1.0
    run(clock.updater(), 12, tmp_path, ProgressBar(update_interval=1, out=out))
    assert max(map(len, out.getvalue().split("\r"))) <= columns - 1


@pytest.mark.parametrize("fails", [False, True])
def test_in_a_terminal_the_bar_is_gone_when_the_run_ends(clock, tmp_path, fails):
    """Nothing of it stays on the line, where the prompt comes next."""

    def fail(trainer):
        if fails:
            raise OSError("full")

    out = Terminal()
    with pytest.raises(OSError, match="full") if fails else contextlib.nullcontext():
        run(clock.updater(), 3, tmp_path, ProgressBar(out=out), fail)
    *_, last, after = out.getvalue().split("\r")
    assert last.strip() == after == ""
    assert "\n" not in out.getvalue()


def test_nothing_but_lines_goes_to_a_stream_that_is_no_terminal(clock, tmp_path):
    """No carriage return, no escape code, no character beyond ASCII; each line is whole."""
    out = io.StringIO()
    clock.step = 0.7
    run(clock.updater(), 20, tmp_path, ProgressBar(update_interval=1, out=out))
    text = out.getvalue()
    assert text.isascii()
    assert not set(text) & set("\r\x1b\x08")
    assert text.endswith("\n")
    assert all("iteration" in line for line in text.splitlines())


def test_a_plain_log_gets_at_most_a_line_a_second(clock, tmp_path):
    """However often the bar would be refreshed."""
    out = io.StringIO()
    clock.step = 0.01
    run(clock.updater(), 1000, tmp_path, ProgressBar(update_interval=1, out=out))
    assert 9 <= len(out.getvalue().splitlines()) <= 11


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_thread_watches_over_the_bar_or_is_left_behind(tmp_path, stream):
    """That of tqdm would outlive it; one that another library has begun is not ours."""
    before = set(threading.enumerate())
    threads = []
    run(Counting(), 3, tmp_path, ProgressBar(out=stream()), lambda _: threads.extend(threading.enumerate()))
    threads += threading.enumerate()
    started = set(threads) - before
    assert [thread for thread in started if type(thread).__module__.startswith("tqdm")] == []


def test_out_none_is_the_stdout_of_the_moment(tmp_path):
    """sys.stdout is looked up when the run starts, not when the module is imported."""
    trainer = trainer_of(Counting(), 3, tmp_path, ProgressBar())
    with contextlib.redirect_stdout(io.StringIO()) as redirected:
        trainer.run()
    assert "iteration 3/3" in redirected.getvalue()


def test_an_updater_without_epochs_is_shown_without_them(clock, tmp_path):
    """Its epoch would be 0 for ever."""

    class Plain(Updater):
        def update_core(self):
            clock.now += 2.0

    out = io.StringIO()
    run(Plain(), 2, tmp_path, ProgressBar(out=out))
    assert "| iteration 2/2 [" in out.getvalue()
    with pytest.raises(ValueError, match="needs an updater that counts epochs"):
        run(Plain(), 2, tmp_path, ProgressBar((2, "epoch"), out=out))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"training_length": 100}, TypeError),
        ({"training_length": ("epoch", 3)}, TypeError),
        ({"training_length": (3, "epochs")}, ValueError),
        ({"training_length": (0, "epoch")}, ValueError),
        ({"update_interval": 0}, ValueError),
        ({"update_interval": (1, "epoch")}, TypeError),
        ({"bar_length": 0}, ValueError),
    ],
)
def test_an_argument_that_means_nothing_is_refused_at_construction(settings, error):
    """The error shows the value."""
    (value,) = settings.values()
    with pytest.raises(error, match=re.escape(repr(value))):
        ProgressBar(**settings)
