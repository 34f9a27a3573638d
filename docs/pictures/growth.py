"""Draw the curves of docs/speed.md, and write their table, from what benchmarks/growth.py has measured.

    python benchmarks/growth.py --rounds 3 --json docs/pictures/growth.json
    python docs/pictures/growth.py [FOLDER]

`make growth` does both. The page includes the pictures as HTML, so that they take its colours, light or dark.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 360, 44, 348, 40, 206
LEGEND = 262
"""Where the names of the lines begin, under the axis and its name."""
LOGARITHMIC_FROM = 5.0
"""How many times the least figure the largest is, where an axis from 0 would show little of the others."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """A picture: what is measured in which unit, over what, and what the line at 1 stands for."""

    title: str
    of: str
    over: str
    unit: str
    one: str | None = None

    @property
    def name(self) -> str:
        """Of its file, without the suffix."""
        return f"growth-{self.over.replace(' ', '-')}"


PANELS = (
    Panel("An iteration by keys, x the raw loop", "an iteration", "keys in the log", "x the raw loop", "the raw loop"),
    Panel("An iteration by extensions, x the raw loop", "an iteration", "extensions", "x the raw loop", "the raw loop"),
    Panel("An iteration by layers, x the raw loop", "an iteration", "layers", "x the raw loop", "the raw loop with as many"),
    Panel("Stop for a snapshot of 100 MB, x memcpy", "stop for a snapshot of 100 MB", "tensors", "x memcpy", "memcpy"),
    Panel("A snapshot until it is on the disk, ms", "a snapshot until it is on the disk", "kept before", "ms"),
    Panel("An iteration with a row of the log, ms", "an iteration", "rows of the log", "ms"),
    Panel("An update by ranks, x DDP", "an update", "ranks", "x DDP", "DDP, and on one rank a plain update"),
    Panel("Examples a second, x the DataLoader", "examples a second", "workers", "x the DataLoader", "the DataLoader"),
)


@dataclass(frozen=True)
class Axis:
    """Places of numbers between two ends of the picture."""

    place: Callable[[float], float]
    ticks: Sequence[float]


def across(numbers: Sequence[int]) -> Axis:
    """Return a logarithmic axis with the numbers themselves as ticks; 0 is as far from 1 as 1 from 2."""
    logs = {number: math.log(number or 0.5) for number in numbers}
    first, last = min(logs.values()), max(logs.values())
    return Axis(lambda number: LEFT + 14 + (logs[int(number)] - first) / (last - first) * (RIGHT - LEFT - 28), numbers)


def upwards(values: Sequence[float]) -> Axis:
    """Return an axis from 0, or a logarithmic one where the figures lie far apart."""
    least, most = min(values), max(values)
    if most < LOGARITHMIC_FROM * least:
        step = next(each for each in _round_numbers(1e-6) if most / each <= 5)
        top = step * math.ceil(most / step)
        ticks = [step * number for number in range(round(top / step) + 1)]
        return Axis(lambda value: BOTTOM - value / top * (BOTTOM - TOP), ticks)
    ends = [next(each for each in reversed(list(_round_numbers(1e-6))) if each <= least)]
    ends.append(next(each for each in _round_numbers(1e-6) if each >= most))
    low, high = map(math.log, ends)
    ticks = [each for each in _round_numbers(1e-6) if ends[0] <= each <= ends[1]]
    if len(ticks) > 7:
        ticks = [each for each in ticks if math.log10(each).is_integer()]
    return Axis(lambda value: BOTTOM - (math.log(value) - low) / (high - low) * (BOTTOM - TOP), ticks)


def _round_numbers(first: float) -> Sequence[float]:
    return [float(f"{digit}e{exponent}") for exponent in range(round(math.log10(first)), 7) for digit in (1, 2, 5)]


def draw(panel: Panel, results: Sequence[Result]) -> str:
    """Return the picture, with its figures as its description."""
    wanted = (panel.of, panel.over, panel.unit)
    chosen = [each for each in results if (each["of"], each["what"], each["unit"]) == wanted]
    lines = {who: [each for each in chosen if each["who"] == who] for who in dict.fromkeys(each["who"] for each in chosen)}
    x = across(sorted({int(each["number"]) for each in chosen}))
    ends = [each["figure"][end] for each in chosen for end in ("least", "most")]
    y = upwards([*ends, 1.0] if panel.one else ends)
    names = {who: f"line{number}" for number, who in enumerate(lines)} | ({panel.one: "one"} if panel.one else {})
    legend = [f'<g transform="translate(0 {LEGEND + 18 * n})">{_named(*each)}</g>' for n, each in enumerate(names.items())]
    identity = panel.name
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {LEGEND + 18 * len(names)}" class="curve" '
            f'role="img" aria-labelledby="{identity} {identity}-figures">',
            f'  <title id="{identity}">{escape(panel.title)}</title>',
            f'  <desc id="{identity}-figures">{escape(". ".join(map(told, lines, lines.values())))}.</desc>',
            f'  <text class="heading" x="8" y="20">{escape(panel.title)}</text>',
            *(f"  {each}" for each in _axes(panel, x, y)),
            *(f"  {_line(names[who], own, x, y)}" for who, own in lines.items()),
            *(f"  {each}" for each in legend),
            "</svg>",
            "",
        ]
    )


def _axes(panel: Panel, x: Axis, y: Axis) -> list[str]:
    parts = [f'<path class="grid" d="M{LEFT} {y.place(tick):.1f}H{RIGHT}"/>' for tick in y.ticks]
    parts += [f'<text x="{LEFT - 6}" y="{y.place(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>' for tick in y.ticks]
    parts += [f'<text x="{x.place(tick):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{tick:,}</text>' for tick in x.ticks]
    parts.append(f'<text x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 34}" text-anchor="middle">{escape(panel.over)}</text>')
    if panel.one:
        parts.append(f'<g class="one"><path d="M{LEFT} {y.place(1.0):.1f}H{RIGHT}"/></g>')
    return parts


def _line(style: str, results: Sequence[Result], x: Axis, y: Axis) -> str:
    """Return the medians as a line, and from the least to the most of the rounds a bar at each."""
    figures = [(x.place(each["number"]), each["figure"]) for each in results]
    bars = "".join(f"M{at:.1f} {y.place(f['least']):.1f}V{y.place(f['most']):.1f}" for at, f in figures)
    line = "L".join(f"{at:.1f} {y.place(f['median']):.1f}" for at, f in figures)
    dots = "".join(f'<circle cx="{at:.1f}" cy="{y.place(f["median"]):.1f}" r="3"/>' for at, f in figures)
    return f'<g class="{style}"><path class="bar" d="{bars}"/><path d="M{line}"/>{dots}</g>'


def _named(name: str, style: str) -> str:
    dot = "" if style == "one" else f'<circle cx="{LEFT + 14}" cy="-4" r="3"/>'
    sample = f'<g class="{style}"><path d="M{LEFT} -4H{LEFT + 28}"/>{dot}</g>'
    return f'{sample}<text x="{LEFT + 36}" y="0">{escape(name)}</text>'


def told(who: str, results: Sequence[Result]) -> str:
    """Return the medians of a line in words."""
    figures = ", ".join(f"{each['figure']['median']:.3g} with {each['number']:,}" for each in results)
    return f"{who}: {figures}"


def table(report: dict[str, Any]) -> str:
    """Return the figures in Markdown, and what they were measured on."""
    rows = ["| | | with | | median (least to most) |", "|---|---|---|---|---|"]
    for each in report["rows"]:
        value = each["figure"]
        figure = f"{value['median']:.2f} ({value['least']:.2f} to {value['most']:.2f}) {each['unit']}"
        rows.append(f"| {each['of']} | {each['who']} | {each['what']} | {each['number']:,} | {figure} |")
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    return "\n".join([f"Measured with {machine}.", "", *rows, ""])


def main(folder: Path) -> None:
    """Write the pictures and the table."""
    report = json.loads((HERE / "growth.json").read_text())
    for panel in PANELS:
        (folder / f"{panel.name}.svg").write_text(draw(panel, report["rows"]))
    (folder / "growth-table.md").write_text(table(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
