"""Draws the pictures of docs/black-box.md from a run of the script of that page, and what the commands print about it.

    python docs/pictures/black_box.py [FOLDER]

They take the colours of the page that they stand in, light or dark.
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).parent
PAGE = HERE.parent / "black-box.md"
COLUMNS = 94  # of the terminal
WIDTH = 800


def script_of_page() -> str:
    """Return the first program of the page."""
    found = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def commands_of(markdown: str) -> list[str]:
    """Return the commands in the blocks of a text, without their comments."""
    fences = re.findall(r"^```(.*?)\n(.*?)^```$", markdown, re.DOTALL | re.MULTILINE)
    blocks = "\n".join(block for language, block in fences if language in ("", "console"))
    return re.findall(r"^(?:\$ )?(chainring .*?)(?: +#.*)?$", blocks, re.MULTILINE)


def call(command: str, folder: Path) -> tuple[int, str]:
    """Run a command of the page in a folder; return its exit status, and what it prints."""
    program, *arguments = shlex.split(command)
    start = [sys.executable, *(["-m", "chainring"] if program == "chainring" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


# --- the pictures ---


def draw_loss(rows: list[dict[str, float]]) -> str:
    """Return the curve of the loss over the iterations."""
    height, left, bottom = 250, 46, 34
    last, most = rows[-1]["iteration"], max(row["main/loss"] for row in rows)
    spike = max(rows, key=lambda row: row["main/loss"])

    def place(iteration: float, loss: float) -> tuple[float, float]:
        x = left + iteration / last * (WIDTH - left - 12)
        return round(x, 1), round(height - bottom - loss / (1.1 * most) * (height - bottom - 8), 1)

    lines = []
    for loss in range(0, int(1.1 * most) + 1, 2):
        (begin, y), (end, _) = place(0, loss), place(last, loss)
        lines += [f'<path class="grid" d="M{begin} {y}H{end}"/>', text(left - 8, y + 5, loss, "end")]
    for iteration in range(0, int(last) + 1, 50):
        lines.append(text(place(iteration, 0)[0], height - bottom + 20, iteration, "middle"))
    lines.append(text(WIDTH - 12, height - bottom + 20, "iteration", "end"))
    points = " ".join(f"{x},{y}" for x, y in (place(row["iteration"], row["main/loss"]) for row in rows))
    x, y = place(spike["iteration"], spike["main/loss"])
    lines += [
        f'<polyline class="line" points="{points}"/>',
        f'<circle class="mark" cx="{x}" cy="{y}" r="7"/>',
        text(x + 14, y + 5, f"main/loss, iterations up to {spike['iteration']}", "start"),
    ]
    title = "The curve of main/loss falls from 2.3 to 0.3, with one high peak and a lower one an epoch later."
    return picture("loss", title, height, lines)


def draw_terminal(printed: list[tuple[str, str]]) -> str:
    """Return a terminal with commands and what they print."""
    lines, y, step, advance = [], 28, 20, 8.1
    for command, output in printed:
        for number, line in enumerate([f"$ {command}", *output.rstrip().split("\n")]):
            for begin in range(0, max(len(line), 1), COLUMNS):
                shown = line[begin : begin + COLUMNS]
                kind = "" if number else ' class="command"'
                size = f'textLength="{len(shown) * advance:.1f}" lengthAdjust="spacingAndGlyphs"'
                lines.append(f'<text{kind} x="16" y="{y}" {size} xml:space="preserve">{html.escape(shown)}</text>')
                y += step
        y += step // 2
    title = f"A terminal in which {' and '.join(command.split()[1] for command, _ in printed)} name iteration and examples."
    frame = f'<rect x="1" y="1" width="{WIDTH - 2}" height="{y - 14}" rx="8"/>'
    return picture("terminal", title, y - 12, [frame, *lines])


def draw_examples(images: list[tuple[int, list[float]]]) -> str:
    """Return the images of a batch, each above its index, with a frame around the one of the largest value."""
    size, gap, columns = 56, 20, 10
    worst = max(images, key=lambda each: max(each[1]))[0]
    lines = []
    for place, (index, values) in enumerate(images):
        x, y = 12 + place % columns * (size + gap - 1), 14 + place // columns * (size + 36)
        lines.append(f'<image x="{x}" y="{y}" width="{size}" height="{size}" href="{png(values)}"/>')
        if index == worst:
            lines.append(f'<rect class="mark" x="{x - 5}" y="{y - 5}" width="{size + 10}" height="{size + 32}" rx="4"/>')
        lines.append(text(x + size / 2, y + size + 18, index, "middle"))
    height = 14 + -(-len(images) // columns) * (size + 36)
    return picture("examples", f"The {len(images)} images of the batch; {worst}, a negative, is framed.", height, lines)


def png(values: list[float]) -> str:
    """Return an image of 8 x 8 values from 0 to 1, which are cut off there, as an address with its content."""
    image = Image.new("L", (8, 8))
    image.putdata([round(255 * min(max(value, 0.0), 1.0)) for value in values])
    content = io.BytesIO()
    image.save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def text(x: float, y: float, words: object, anchor: str) -> str:
    """Return words at a place."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(str(words))}</text>'


def picture(name: str, title: str, height: int, lines: list[str]) -> str:
    """Return a picture with a title for those who do not see it."""
    identity = f"black-box-{name}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" class="picture {name}" role="img"'
    return "\n".join(
        [f'{head} aria-labelledby="{identity}">', f'<title id="{identity}">{title}</title>', *lines, "</svg>\n"]
    )


# --- the run ---


@contextlib.contextmanager
def trained() -> Iterator[Path]:
    """Inside, the script of the page is train.py in a folder, and has trained."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "train.py").write_text(script_of_page())
        code, output = call("python train.py", Path(name))
        assert code == 0, output
        yield Path(name)


def draw(folder: Path) -> dict[str, str]:
    """Return the pictures of the run in a folder, by the names of their files."""
    rows = [json.loads(row) for row in (folder / "result" / "log.jsonl").read_text().splitlines()]
    hunt = PAGE.read_text().partition("## From a spike to the examples")[2].partition("\n## ")[0]
    printed = [(command, call(command, folder)[1]) for command in commands_of(hunt)]
    indices = [int(index) for index in printed[-1][1].split("\n")[0].split()]
    names: dict[str, Any] = {}
    exec(script_of_page().partition("\nparser = ")[0], names)
    scans = names["Scans"]()
    images = [(index, scans[index][0].tolist()) for index in indices]
    return {
        "black-box-loss.svg": draw_loss(rows),
        "black-box-terminal.svg": draw_terminal(printed),
        "black-box-examples.svg": draw_examples(images),
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with trained() as run:
        for file, content in draw(run).items():
            (target / file).write_text(content)
