"""ProgressBar: shows the progress and the speed of training."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, Protocol

from tqdm import tqdm

from chainring._checks import is_integer, is_number, plain
from chainring._messages import try_to_show
from chainring._progress import to_fraction
from chainring.iterators.base import check_epoch_period
from chainring.training.extension import Extension
from chainring.training.trainer import Trainer

_SECONDS = 3.0  # refreshed at least so often, however slow the iterations are
_LINE_SECONDS = 1.0  # at least between two lines of a plain log
_ECHO = "^C^C"  # of the terminal, behind the bar, when Ctrl-C is pressed


class TextStream(Protocol):
    """A text file, or any object with ``write``."""

    def write(self, text: str, /) -> object: ...


def check_stream(out: TextStream | None) -> None:
    """Raise a `TypeError` if an ``out`` is neither ``None`` nor can be written to."""
    if out is not None and not callable(getattr(out, "write", None)):
        raise TypeError(f"out is a text stream, or None for the standard output; got {out!r}")


def terminal_width(out: Any) -> int | None:
    """Return the number of columns of the terminal of a stream; ``None`` if it has none or its width is unknown."""
    try:
        return os.get_terminal_size(out.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def is_notebook(out: Any) -> bool:
    """Return True if the stream is the output of a cell, under which HTML can be shown.

    Spyder and Qt consoles have the same kernel and show text; tqdm recognises them by the same variables.
    """
    streams = sys.modules.get("ipykernel.iostream")
    text_only = any(name == "QT_API" or name.startswith("SPYDER") for name in os.environ)
    return streams is not None and isinstance(out, streams.OutStream) and not text_only


class ProgressBar(Extension):
    """Shows the progress of training: a tqdm bar in a terminal or notebook, plain lines anywhere else.

    In a notebook the bar is an ipywidgets widget (``pip install 'chainring[notebook]'``), or text without ipywidgets. A
    terminal that cannot overwrite a line (``TERM=dumb``) gets plain lines. If the stream cannot be written to, such as a
    closed pipe, there is a warning, and it shows no more in this run.

    Example::

        trainer.extend(extensions.ProgressBar(update_interval=10))

    Args:
        training_length: ``(length, "iteration")`` or ``(length, "epoch")``; by default that of the stop trigger. If the
            length is not known, no total is shown.
        update_interval: the number of iterations between two refreshes; if iterations are slow, the bar is refreshed
            every few seconds nevertheless.
        bar_length: the number of characters of the bar, fewer if the terminal is narrow.
        out: the stream to print to; ``None`` is the current ``sys.stdout``.

    Raises:
        ValueError: when the run starts, the length is in epochs and the updater does not count epochs.
    """

    def __init__(
        self,
        training_length: tuple[float, Literal["iteration", "epoch"]] | None = None,
        update_interval: int = 100,
        bar_length: int = 50,
        out: TextStream | None = None,
    ) -> None:
        if (length := training_length) is not None:
            if not isinstance(length, (tuple, list)) or len(length) != 2 or not is_number(length[0]):
                raise TypeError(f'training_length is (length, "iteration") or (length, "epoch"), got {length!r}')
            if length[1] not in ("iteration", "epoch") or not 0 < float(length[0]) < math.inf:
                raise ValueError(f'training_length is a finite number above 0 and "iteration" or "epoch", got {length!r}')
        check_stream(out)
        for argument, value in (("update_interval", update_interval), ("bar_length", bar_length)):
            if not is_integer(value):
                raise TypeError(f"{argument} is an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{argument} is at least 1, got {value!r}")
        self._training_length = None if length is None else (plain(length[0]), length[1])
        self._update_interval, self._bar_length = plain(update_interval), plain(bar_length)
        self._out = out
        self._bar: Any = None
        self._total: float | None = None
        self._unit = "iteration"
        self._next_iteration = 0
        self._next_time = 0.0

    def initialize(self, trainer: Trainer) -> None:
        if not trainer.comm.is_main:
            return
        self._trainer = trainer
        length: Any = self._training_length
        if length is None:
            length = getattr(trainer.stop_trigger, "get_training_length", lambda: None)()
        elif length[1] == "epoch":
            check_epoch_period(trainer.updater, to_fraction(length[0]))
        self._total, self._unit = (None, "iteration") if length is None or length[1] == "second" else length
        out = sys.stdout if self._out is None else self._out
        make = _bar_class(out)
        bar = f"{{bar:{self._bar_length}}}" if make in (_Bar, _Lines) else "{bar}"
        with_total = "{percentage:3.0f}%|" + bar + "| {desc} [{elapsed}<{remaining}, {rate_fmt}]"
        settings: dict[str, Any] = {
            "desc": self._text(),
            "total": self._total,
            "initial": self._shown_progress(),
            "miniters": 0,  # refreshing is timed here and not by tqdm
            "unit": self._unit,
            "bar_format": "{desc} [{elapsed}, {rate_fmt}]" if self._total is None else with_total,
        }
        if make in (_Bar, _Lines):
            settings |= {"file": out, "leave": False}

        def begin() -> None:
            self._bar = make(**settings)

        try_to_show(type(self).__name__, begin)
        self._schedule(trainer.updater.iteration)

    def _shown_progress(self) -> float:
        """Return the progress as the bar shows it: a last batch that crosses the end of the data fills it, and no more."""
        updater = self._trainer.updater
        progress = updater.iteration if self._unit == "iteration" else updater.epoch_detail
        return progress if self._total is None else min(progress, self._total)

    def _text(self) -> str:
        updater = self._trainer.updater
        total = "" if self._total is None else f"/{self._total}"
        if self._unit == "epoch":
            return f"epoch {updater.epoch_detail:.2f}{total}, iteration {updater.iteration}"
        is_known = getattr(updater, "counts_epochs", True) and updater.epoch_detail > 0  # on a stream only at its end
        epoch = f", epoch {updater.epoch_detail:.2f}" if is_known else ""
        return f"iteration {updater.iteration}{total}{epoch}"

    def __call__(self, trainer: Trainer) -> None:
        iteration = trainer.updater.iteration
        if self._bar is not None and (iteration >= self._next_iteration or time.monotonic() >= self._next_time):
            self._show()
            self._schedule(iteration)

    def _schedule(self, iteration: int) -> None:
        self._next_iteration = iteration - iteration % self._update_interval + self._update_interval
        self._next_time = time.monotonic() + _SECONDS

    def _show(self, *, is_last: bool = False) -> None:
        bar = self._bar
        if not _try_to_draw(type(self).__name__, bar, self._text(), self._shown_progress(), is_last) or is_last:
            self._bar = None

    def on_error(self, trainer: Trainer, exception: BaseException) -> None:
        if self._bar is not None:
            self._bar.failed = True
        self.finalize()  # the message that follows begins on a line of its own

    def finalize(self) -> None:
        if self._bar is not None:
            self._show(is_last=True)


def _try_to_draw(name: str, bar: Any, text: str, progress: float, is_last: bool = False) -> bool:
    """Draw a bar, and close it if it ``is_last``; if that fails, warn and return False, and the bar is closed too."""

    def draw() -> None:
        bar.set_description_str(text, refresh=False)
        bar.update(progress - bar.n)
        if is_last:
            bar.close()
        if error := getattr(bar, "error", None):
            raise error

    if try_to_show(name, draw):
        return True
    with suppress(Exception):  # closed, it is no longer among the bars that are drawn below each line
        bar.close()
    return False


@contextmanager
def bar_of_batches(iterator: Any, name: str, out: Any) -> Generator[Iterable[Any]]:
    """Give the batches of an iterator; if ``out`` is a terminal or a notebook, it has a bar while they are worked on."""
    make, start, is_shown = _bar_class(out), getattr(iterator, "epoch_detail", None), True
    form = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]" if start is not None else "{desc} [{elapsed}]"
    settings: dict[str, Any] = {"total": None if start is None else 1.0, "desc": name, "bar_format": form, "leave": False}
    settings |= {"file": out} if make is _Bar else {}
    bars: list[Any] = []
    if make is _Lines or not try_to_show("progress_bar", lambda: bars.append(make(**settings))):
        yield iterator
        return
    (bar,) = bars

    def batches() -> Iterator[Any]:
        nonlocal is_shown
        for number, batch in enumerate(iterator, 1):
            yield batch
            progress = 0 if start is None else min(iterator.epoch_detail - start, 1.0)
            is_shown = is_shown and _try_to_draw("progress_bar", bar, f"{name}, batch {number}", progress)

    try:
        yield batches()
    finally:
        with suppress(Exception):
            bar.close()


class _GuardedBar:
    """A bar of tqdm that keeps an error: raised while it draws, it would leave the lock of all bars taken for ever."""

    monitor_interval = 0
    error: Exception | None = None

    def display(self, *args: Any, **settings: Any) -> Any:
        return self._try(super().display, *args, **settings)  # type: ignore[misc]

    def clear(self, *args: Any, **settings: Any) -> None:
        self._try(super().clear, *args, **settings)  # type: ignore[misc]

    def _try(self, draw: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        if self.error is None:
            try:
                return draw(*args, **settings)
            except Exception as error:
                self.error = error
        return None


class _Bar(_GuardedBar, tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which outlives the bar; refreshing is timed here."""

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return a function that draws over the line; an empty text erases what the terminal has echoed behind it, too."""
        draw, last = tqdm.status_printer(file), 0

        def draw_or_erase(text: str) -> None:
            nonlocal last
            if not text:  # twice, because tqdm fills up the next text to the length of the last one
                draw(" " * (last + len(_ECHO)))
            draw(text)
            last = len(text)

        return draw_or_erase

    def __str__(self) -> str:
        """Return the line with the bar in its full length, or shorter in a narrow terminal."""
        fields: dict[str, Any] = {**self.format_dict, "ncols": None}
        line = self.format_meter(**fields)
        width = terminal_width(self.fp) or shutil.get_terminal_size().columns
        columns = width - 1 - len(_ECHO)  # a full line may wrap
        if len(line) <= columns:
            return line
        fields.update(ncols=columns, bar_format=re.sub(r"{bar:\d+}", "{bar}", fields["bar_format"]))
        return self.format_meter(**fields)


def _bar_class(out: Any) -> Any:
    """Return the class of a bar on a stream: a widget in a notebook with ipywidgets, plain lines for a pipe or a file."""
    in_notebook = is_notebook(out)
    try:
        is_terminal = bool(getattr(out, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"
    except ValueError:  # a closed file
        is_terminal = False
    if not in_notebook and not is_terminal:  # where a line cannot be drawn over
        return _Lines
    if not in_notebook or importlib.util.find_spec("ipywidgets") is None:
        return _Bar
    from tqdm.notebook import tqdm_notebook

    class NotebookBar(_GuardedBar, tqdm_notebook):  # type: ignore[type-arg]
        """Green at the end, also where a stop trigger ends the run before its length; red where it failed."""

        failed = False

        def display(self, *args: Any, **settings: Any) -> None:
            if settings.get("bar_style") == "danger" and not self.failed:
                settings["bar_style"] = "success"
            super().display(*args, **settings)

    return NotebookBar


class _Lines:
    """The text of a bar as plain lines, for a pipe or a file: no colour, no carriage return."""

    def __init__(self, file: Any, desc: str, initial: float, miniters: int, leave: bool, **settings: Any) -> None:
        self._out, self._text, self.n = file, desc, initial
        self._settings = {**settings, "initial": initial, "ascii": True}
        self._began = self._printed = time.monotonic()
        self._shown: str | None = None

    def set_description_str(self, text: str, refresh: bool) -> None:
        self._text = text

    def update(self, done: float) -> None:
        self.n += done
        if time.monotonic() - self._printed >= _LINE_SECONDS:
            self._print()

    def close(self) -> None:
        if self._shown != self._text:
            self._print()

    def _print(self) -> None:
        self._printed, self._shown = time.monotonic(), self._text
        elapsed = self._printed - self._began
        line = tqdm.format_meter(self.n, elapsed=elapsed, prefix=self._text, **self._settings)
        print(line, file=self._out)
        getattr(self._out, "flush", lambda: None)()
