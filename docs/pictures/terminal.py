"""Record `terminal.svg`: a script is started in a real terminal, stopped with Ctrl-C, and started again.

    python docs/pictures/terminal.py

Each line of the screen is shown as long as it stood there; readers who prefer no motion see the last screen.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import tempfile
import termios
import time
from html import escape
from pathlib import Path

import pyte

HERE = Path(__file__).parent
ROWS, COLUMNS = 24, 80
SCRIPT = """
import torch
from torch import nn

import chainring
from chainring import datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import extensions

chainring.deterministic(0)
train, test = datasets.get_digits()
model = Classifier(nn.Sequential(nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 10)))
updater = training.StandardUpdater(iterators.SerialIterator(train, 50), torch.optim.Adam(model.parameters(), 1e-4), model)
trainer = training.Trainer(updater, (8, "epoch"), out="result")
trainer.extend(extensions.Evaluator(iterators.SerialIterator(test, 100, repeat=False, shuffle=False), model))
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]))
trainer.extend(extensions.ProgressBar(update_interval=5))
trainer.extend(extensions.snapshot(autoload=True, n_retains=2))
trainer.run()
"""
# What is typed, after how many seconds since the prompt or the line before, and what must be on the screen first.
KEYS = [("python train.py\n", 1.0, "$ "), ("\x03", 0.5, "\n4  "), ("python train.py\n", 1.5, "$ "), ("", 3.0, "\n8  ")]
WIDTH = 8.4  # of a character
GAP = 0.8  # seconds at most in which nothing changes
PAUSE = 4  # seconds for which the last screen stays
TITLE = (
    "A terminal. A script trains, with a table and a progress bar; Ctrl-C stops it after a few epochs; "
    "the same command continues from there."
)
STYLE = (
    "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6e6e6;white-space:pre;"
    "animation:%.2fs step-end infinite}.green{fill:#7ee787}.red{fill:#ff7b72}.brown{fill:#e3b341}.cyan{fill:#76e3ea}"
    "@media(prefers-reduced-motion:reduce){text{animation:none!important}}"
)
Line = tuple[tuple[str, str, bool], ...]  # text, colour, and whether it is bold


class Recording:
    """A shell in a terminal of its own, and every screen that it has shown."""

    def __init__(self, folder: str) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.frames: list[tuple[float, list[Line]]] = []
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update(PS1="$ ", TERM="xterm-256color", OMP_NUM_THREADS="1")
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.began = time.monotonic()

    def watch(self, seconds: float, until: str = "") -> None:
        """Read what is shown: as long as given, or until the screen has that text after what was typed last."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.02)[0]:
                self.stream.feed(os.read(self.terminal, 65536))
                self.frames.append((time.monotonic() - self.began, [self.line(row) for row in range(ROWS)]))
            if until and until in "\n" + "\n".join(self.screen.display[: self.screen.cursor.y + 1])[self.mark :]:
                return

    def line(self, row: int) -> Line:
        """Return the pieces of a line that look the same."""
        pieces: list[tuple[str, str, bool]] = []
        for cell in (self.screen.buffer[row][column] for column in range(COLUMNS)):
            if pieces and pieces[-1][1:] == (cell.fg, cell.bold):
                pieces[-1] = (pieces[-1][0] + cell.data, *pieces[-1][1:])
            else:
                pieces.append((cell.data, cell.fg, cell.bold))
        return tuple(pieces) if any(text.strip() for text, _, _ in pieces) else ()

    def type(self, keys: str) -> None:
        """Press the keys one after the other."""
        self.mark = len("\n".join(self.screen.display[: self.screen.cursor.y + 1]).rstrip())
        for key in keys:
            os.write(self.terminal, key.encode())
            self.watch(0.06)


def record() -> list[tuple[float, list[Line]]]:
    """Run the script as `KEYS` says and return the screens."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        recording = Recording(folder)
        recording.mark = 0
        for keys, pause, awaited in KEYS:
            recording.watch(60, until=awaited)
            recording.watch(pause)
            recording.type(keys)
        recording.watch(60, until="$ ")
        os.write(recording.terminal, b"exit\n")
        os.waitpid(recording.pid, 0)
    return recording.frames


def spans_of(frames: list[tuple[float, list[Line]]]) -> list[tuple[int, Line, float, float]]:
    """Return each line that was shown: its row, its text, and when it came and went."""
    spans = []
    last = frames[-1][0]
    for row in range(ROWS):
        shown, since = (), 0.0
        for at, lines in [*frames, (last, [("end",)] * ROWS)]:
            if lines[row] != shown:
                if shown:
                    spans.append((row, shown, since, at))
                shown, since = lines[row], at
    return [span for span in spans if span[3] - span[2] > 0.03 or span[3] == last]


def draw(frames: list[tuple[float, list[Line]]]) -> str:
    """Return the picture: every line once, visible while it stood on the screen."""
    frames = shorten(frames)
    length = frames[-1][0] + PAUSE
    rows = max(row for _, lines in frames for row in range(ROWS) if lines[row]) + 1
    width, height = COLUMNS * WIDTH + 24, rows * 19 + 52
    styles, texts = [STYLE % length], []
    for number, (row, line, since, until) in enumerate(spans_of(frames)):
        last = until == frames[-1][0]
        begin, end = 100 * since / length, 100 if last else 100 * until / length
        gone = "" if last else f"{end:.3f}%{{visibility:hidden}}"
        styles.append(f"@keyframes l{number}{{0%{{visibility:hidden}}{begin:.3f}%{{visibility:visible}}{gone}}}")
        columns = len("".join(piece for piece, _, _ in line).rstrip())
        texts.append(
            f'<text x="12" y="{row * 19 + 50}" textLength="{columns * WIDTH:g}" style="animation-name:l{number}" '
            f'visibility="{"visible" if last else "hidden"}">{"".join(map(span, line)).rstrip()}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img" aria-labelledby="title">',
            f'<title id="title">{TITLE}</title>',
            f"<style>{''.join(styles)}</style>",
            f'<rect width="{width:g}" height="{height}" rx="8" fill="#1b1f27"/>',
            *(f'<circle cx="{20 + 18 * n}" cy="18" r="5.5" fill="#4b5263"/>' for n in range(3)),
            *texts,
            "</svg>",
            "",
        ]
    )


def shorten(frames: list[tuple[float, list[Line]]]) -> list[tuple[float, list[Line]]]:
    """Return the screens from time zero on, with at most `GAP` seconds from one to the next: imports take long."""
    at, shortened = 0.0, []
    for (before, _), (now, lines) in zip([frames[0], *frames], frames, strict=False):
        at += min(now - before, GAP)
        shortened.append((at, lines))
    return shortened


def span(piece: tuple[str, str, bool]) -> str:
    """Return a piece of a line in its colour."""
    text, colour, bold = piece
    weight = ' font-weight="bold"' if bold else ""
    return escape(text) if colour == "default" and not bold else f'<tspan class="{colour}"{weight}>{escape(text)}</tspan>'


if __name__ == "__main__":
    (HERE / "terminal.svg").write_text(draw(record()))
