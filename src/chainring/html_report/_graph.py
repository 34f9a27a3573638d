"""The picture of a graph that `dump_graph` has written in DOT: boxes in layers, the inputs above what they flow into."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from html import escape

_NODE = re.compile(r'\s*(\w+) \[label="((?:[^"\\]|\\.)*)", (.*)\];')
_EDGE = re.compile(r"\s*(\w+) -> (\w+);")
_MOST = 400  # nodes: beyond that nobody follows an arrow
_CHARACTER, _LINE, _GAP, _LAYER = 7.3, 16, 18, 64  # pixels

Places = dict[str, tuple[float, float, float]]
"""Of each node the middle, the top and the width."""


def svg_of(dot: str) -> tuple[str, int] | None:
    """The picture as SVG whose colours come from the page, and the number of nodes; ``None`` if there is none to draw.

    It reads what `dump_graph` writes, one node or edge a line, and is no reader of DOT at large. A node stands one layer
    above the highest that it flows into, and in its layer where those are on average.
    """
    labels = {match[1]: (_lines(match[2]), match[3]) for line in dot.splitlines() if (match := _NODE.fullmatch(line))}
    edges = [(match[1], match[2]) for line in dot.splitlines() if (match := _EDGE.fullmatch(line))]
    edges = [(source, target) for source, target in dict.fromkeys(edges) if source in labels and target in labels]
    heights = _heights(list(labels), edges)
    if not labels or len(labels) > _MOST or heights is None:
        return None
    places = _places({name: lines for name, (lines, _) in labels.items()}, edges, heights)
    width = max(middle + size / 2 for middle, _, size in places.values())
    height = max(top for _, top, _ in places.values()) + 2 * _LINE + 12
    drawn = [_arrow(places[source], places[target], labels[source][0]) for source, target in edges]
    drawn += [_box(places[name], lines, style) for name, (lines, style) in labels.items()]
    whole = f'viewBox="-4 -4 {width + 8:.0f} {height + 8:.0f}" width="{width + 8:.0f}" height="{height + 8:.0f}"'
    arrow = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    defs = f'<defs>{arrow}<path d="M0 0 8 4 0 8z"/></marker></defs>'
    head = f'<svg class="graph" {whole} role="img" aria-label="Graph of {len(labels)} nodes">'
    return f"{head}{defs}{''.join(drawn)}</svg>", len(labels)


def _lines(label: str) -> list[str]:
    parts = re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], label).split("\n")
    return [part if len(part) <= 60 else f"{part[:59]}…" for part in parts[:2]]


def _heights(names: list[str], edges: list[tuple[str, str]]) -> dict[str, int] | None:
    """How many layers each node stands above the lowest; ``None`` where the arrows go in a circle."""
    sources, waiting = defaultdict(list), dict.fromkeys(names, 0)
    for source, target in edges:
        sources[target].append(source)
        waiting[source] += 1
    heights = dict.fromkeys(names, 0)
    ready = deque(name for name, count in waiting.items() if not count)
    done = 0
    while ready:
        target = ready.popleft()
        done += 1
        for source in sources[target]:
            heights[source] = max(heights[source], heights[target] + 1)
            waiting[source] -= 1
            if not waiting[source]:
                ready.append(source)
    return heights if done == len(names) else None


def _places(labels: dict[str, list[str]], edges: list[tuple[str, str]], heights: dict[str, int]) -> Places:
    targets, layers = defaultdict(list), defaultdict(list)
    for source, target in edges:
        targets[source].append(target)
    for name, height in heights.items():
        layers[height].append(name)
    places: Places = {}
    for height in range(max(heights.values()) + 1):
        wanted = {name: _mean([places[target][0] for target in targets[name]]) for name in layers[height]}
        edge = float("-inf")
        for name in sorted(wanted, key=lambda name: wanted[name]):
            width = max(len(line) for line in labels[name]) * _CHARACTER + 20
            middle = max(wanted[name], edge + _GAP + width / 2)
            edge = middle + width / 2
            places[name] = (middle, (max(heights.values()) - height) * _LAYER, width)
        shift = _mean([places[name][0] - wanted[name] for name in wanted])  # what pushing to the right has moved
        places |= {name: (places[name][0] - shift, *places[name][1:]) for name in wanted}
    left = min(middle - width / 2 for middle, _, width in places.values())
    return {name: (middle - left, top, width) for name, (middle, top, width) in places.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _arrow(source: tuple[float, float, float], target: tuple[float, float, float], lines: list[str]) -> str:
    x, y, end_x, end_y = source[0], source[1] + _height(lines), target[0], target[1] - 1
    bend = (y + end_y) / 2
    curve = f"M{x:.0f} {y:.0f}C{x:.0f} {bend:.0f} {end_x:.0f} {bend:.0f} {end_x:.0f} {end_y:.0f}"
    return f'<path class="edge" d="{curve}" marker-end="url(#tip)"/>'


def _box(place: tuple[float, float, float], lines: list[str], style: str) -> str:
    middle, top, width = place
    kind = "leaf" if "lightblue" in style else "root" if "lightgrey" in style else "operation"
    height = _height(lines)
    corner = 4 if kind != "operation" else height / 2
    corners = f'x="{middle - width / 2:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height}" rx="{corner:.0f}"'
    box = f'<rect class="{kind}" {corners}/>'
    texts = [
        f'<text x="{middle:.0f}" y="{top + 4 + _LINE * number + 10:.0f}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return box + "".join(texts)


def _height(lines: list[str]) -> int:
    return _LINE * len(lines) + 8
