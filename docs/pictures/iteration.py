"""Draw the bars of the README from the table of docs/speed.md on an iteration, which benchmarks/overhead.py has printed.

    python docs/pictures/iteration.py [FOLDER]

One picture for light pages and one for dark ones, as the README chooses them; each has a ground, as an index of packages
shows the light one on any page.
"""

from __future__ import annotations

import re
import sys
import textwrap
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
SCHEMES = {
    "light": {"paper": "#ffffff", "ink": "#333333", "ours": "#2a6fbb", "others": "#9aa1ab"},
    "dark": {"paper": "#131416", "ink": "#cfd0d0", "ours": "#5aa2f0", "others": "#6b7280"},
}
NAMES = {"raw loop": "a loop by hand", "no extension": "Chainring", "lightning Trainer": "Lightning Trainer"}
NAMES |= {"lightning Fabric": "Lightning Fabric", "accelerate": "Accelerate", "pytorch-ignite": "Ignite"}
VERSION = re.compile(r" \d+(\.\d+)+$")
WIDTH, LEFT, RIGHT, TOP, STEP = 460, 180, 420, 34, 26  # where system-ui is wide, the longest name takes 166


def read(page: str) -> tuple[list[tuple[str, int]], str]:
    """Return the microseconds of an iteration of each loop without a log, least first, and the machine."""
    section = page.split("## An iteration\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (\d+) \| (?:raw loop)? \|", section, re.MULTILINE)
    bars = [(_name(row), int(time)) for row, time in rows if row in NAMES or VERSION.search(row)]
    (machine,) = re.findall(r"on a (virtual machine with .*?)\. What", " ".join(page.split()))
    return sorted(bars, key=lambda bar: bar[1]), machine


def _name(row: str) -> str:
    name, _, version = row.rpartition(" ") if VERSION.search(row) else (row, "", "")
    return f"{NAMES.get(name, name)} {version}".strip()


def draw(bars: list[tuple[str, int]], machine: str, colours: dict[str, str]) -> str:
    """Return the picture, whose bars begin at 0."""
    scale = (RIGHT - LEFT) / max(time for _, time in bars)
    bottom = TOP + STEP * len(bars)
    processor, system = machine.split(", Linux")
    figures = ", ".join(f"{name} {time}" for name, time in bars)
    about = f"""Two small layers in batches of 8. Medians of one run of benchmarks/overhead.py on a {processor},
        Linux{system}; no accelerator."""
    notes = textwrap.wrap(" ".join(about.split()), 70)
    height = bottom + 16 + 17 * len(notes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        f'  <title id="title">Microseconds an iteration: {escape(figures)}</title>',
        f'  <rect width="100%" height="100%" fill="{colours["paper"]}"/>',
        f'  <g fill="{colours["ink"]}" font-family="system-ui,sans-serif" font-size="13">',
        '  <text x="8" y="18" font-weight="600">Microseconds an iteration: less is better</text>',
    ]
    for number, (name, time) in enumerate(bars):
        y, ours = TOP + STEP * number, name == "Chainring"
        width, colour = time * scale, colours["ours" if ours else "others"]
        weight = ' font-weight="600"' if ours else ""
        lines += [
            f'  <text x="{LEFT - 8}" y="{y + 14}" text-anchor="end"{weight}>{escape(name)}</text>',
            f'  <rect x="{LEFT}" y="{y}" width="{width:.1f}" height="19" fill="{colour}"/>',
            f'  <text x="{LEFT + width + 6:.1f}" y="{y + 14}"{weight}>{time}</text>',
        ]
    for number, note in enumerate(notes):
        lines.append(f'  <text x="8" y="{bottom + 18 + 17 * number}" font-size="12">{note}</text>')
    lines += ["  </g>", "</svg>", ""]
    return "\n".join(lines)


def main(folder: Path) -> None:
    """Write the pictures."""
    bars, machine = read((HERE.parent / "speed.md").read_text())
    for scheme, colours in SCHEMES.items():
        (folder / f"iteration-{scheme}.svg").write_text(draw(bars, machine, colours))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
