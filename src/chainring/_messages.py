"""Messages of a run to its user: printed lines, and warnings that point to a line of the user's."""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

_NOT_THE_USERS = sys.stdlib_module_names | {"chainring", "torch", "tqdm"}

_is_muted = False


def mute(is_muted: bool = True) -> None:
    """Let this process print nothing from now on, or again; of several ranks, only the first prints."""
    global _is_muted
    _is_muted = is_muted


def info(text: str, *, follows_signal: bool = False) -> None:
    """Print a line for the user, above a progress bar if there is one, unless this process is muted or nobody can read it.

    Where it is longer than the terminal is wide, it is broken between words.
    With ``follows_signal`` it begins a line of its own on a terminal, which has echoed Ctrl-C as ``^C``.
    """
    if _is_muted:
        return
    with suppress(AttributeError, OSError, ValueError):  # no terminal
        wrap = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
        width = os.get_terminal_size(sys.stdout.fileno()).columns
        text = "\n".join(wrap(line, width) if 0 < width < len(line) else line for line in text.split("\n"))
    begins_line = follows_signal and not _bars() and getattr(sys.stdout, "isatty", lambda: False)()
    with suppress(OSError, ValueError), _above_bars(sys.stdout):  # a closed pipe, a full disk, a closed file
        print("\n" * begins_line + showable(text, sys.stdout), flush=True)


def showable(text: str, out: Any) -> str:
    """Return the text, with escapes for what the encoding of a stream does not have: a run does not end by a message."""
    encoding = getattr(out, "encoding", None)
    if text.isascii() or not isinstance(encoding, str):
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


def list_names(names: Collection[str], most: int, between: str = ", ") -> str:
    """Return the first names as text, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", " if more else between).join(map(printable, list(names)[:most])) + more


def printable(text: object) -> str:
    """Return text of a file from anywhere, with the characters escaped that could control the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


def _bars() -> Any:
    """Return the progress bars that are drawn now, those of the user included."""
    return getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())


def _above_bars(out: Any) -> AbstractContextManager[None]:
    """Return a context in which lines can be written to a standard stream; the bars are drawn again below them."""
    return sys.modules["tqdm"].tqdm.external_write_mode(file=out) if _bars() else nullcontext()


def try_to_show(name: str, show: Callable[[], Any]) -> bool:
    """Call what writes to a stream; if it fails, warn and return False, because a run does not end by what it shows."""
    try:
        show()
    except Exception as error:
        failure = f"{name} cannot write and shows no more: {type(error).__name__}: {error}"
        warn(f"{failure}. Training continues, and so does the log")
        return False
    return True


class Text(str):
    """Text of several lines, which a notebook shows as ``print`` does."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        printer.text(self)


class Place(NamedTuple):
    """A line of a program."""

    filename: str
    line: int
    module: str


def user_place() -> Place | None:
    """Return the line of the user's that has led here, the innermost; ``None`` in a thread of ours."""
    return _find_places()[0]


def warn(text: str, place: Place | None = None) -> None:
    """Warn at a place, by default that of the call in the user's code, or where the extension at work was extended."""
    caller, extension = _find_places()
    place = place or extension or caller or Place("sys", 1, "sys")
    registry = getattr(sys.modules.get(place.module), "__dict__", {}).setdefault("__warningregistry__", {})
    with suppress(OSError, ValueError), _above_bars(sys.stderr):  # as in `info`; an error that a filter raises is neither
        warnings.warn_explicit(text, UserWarning, place.filename, place.line, place.module, registry)


def _find_places() -> tuple[Place | None, Place | None]:
    """Return the innermost line of the user's, and if that has started a run, where the extension at work was extended."""
    frame, extension = sys._getframe(1), None
    while (module := frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_USERS:
        if module == "chainring.training.trainer":
            extension = getattr(frame.f_locals.get("self"), "place_of_extension", extension)
        if frame.f_back is None:
            return None, None
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, module), extension


class OneTimeWarning:
    """A warning that is given once in a run, however often the run is resumed; it points to where this is constructed."""

    def __init__(self) -> None:
        self.was_given = False
        self._place = user_place()

    def give(self, text: str) -> None:
        if not self.was_given:
            self.was_given = True
            warn(text, self._place)

    def serialize(self, serializer: Callable[[str, Any], Any]) -> None:
        """Save or load whether the warning has been given."""
        self.was_given = serializer("has_warned", self.was_given)
