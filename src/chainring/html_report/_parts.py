"""The parts of the page that are tables and pictures. Each says in one line how to get it where there is nothing."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from html import escape
from typing import Any

from chainring.html_report import _tags
from chainring.html_report._run import COMPLETE, DAMAGED, Model, Run

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


_MOST_ROWS = 300
_RECORD = "<code>run.json</code>, which a <code>Trainer</code> writes when a run starts"


def settings(run: Run) -> str:
    """The configuration, and with what the run was made."""
    record = run.record
    config = record.get("config") or {}
    parts = []
    if run.trouble is not None:
        parts.append(_tags.note(f"<code>run.json</code> cannot be read: {_tags.text(run.trouble)}"))
    elif not record:
        parts.append(_tags.note(f"Nothing is recorded: it would be in {_RECORD}."))
    if config:
        parts.append(_pairs("Configuration", config))
    elif record:
        parts.append(_tags.note("No configuration is recorded: pass <code>Trainer(..., config=vars(args))</code>."))
    made = {"command": record.get("argv"), "commit": record.get("git_commit"), "device": record.get("device")}
    made |= {"threads": record.get("threads")} | {
        f"{key} version": each for key, each in (record.get("versions") or {}).items()
    }
    made |= {f"optimizer {name}": each for name, each in _mapping(record.get("optimizers")).items()}
    made |= {f"seeds of {name}": each for name, each in _mapping(record.get("seeds")).items()}
    known = {name: each for name, each in made.items() if each is not None}
    if known:
        parts.append(f"<details><summary>Made with</summary>{_pairs('Made with', known)}</details>")
    return _tags.section("settings", "Settings", *parts)


def _mapping(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _pairs(caption: str, pairs: dict[str, Any]) -> str:
    rows = [[_tags.text(name), _spelled(content)] for name, content in list(pairs.items())[:_MOST_ROWS]]
    left_out = len(pairs) - len(rows)
    more = _tags.note(f"{left_out:,} more are in <code>run.json</code>.") if left_out else ""
    return _tags.table(caption, ["setting", "value"], rows) + more


def _spelled(content: Any) -> str:
    """A list of texts, as a command line is one, word by word."""
    if isinstance(content, list) and content and all(isinstance(word, str) for word in content):
        return _tags.text(" ".join(content))
    return _tags.value(content)


def starts(run: Run) -> str:
    """When the run was started and resumed, and what had changed by then."""
    found = run.starts
    if not found:
        return _tags.section("starts", "Starts", _tags.note(f"No start is recorded: they would be in {_RECORD}."))
    rows = []
    for number, start in list(enumerate(found))[-_MOST_ROWS:]:
        changed = _mapping(start.get("changed"))
        lines = [_change(name, pair) for name, pair in list(changed.items())[:_MOST_ROWS]]
        what = "<br>".join(lines) or ("" if number == 0 else "nothing")
        place = f"{start.get('host', '')}, process {start.get('pid', '')}"
        began = "started" if number == 0 else "resumed"
        rows.append([began, _tags.value(start.get("iteration")), what, _tags.text(start.get("time", "")), _tags.text(place)])
    said = _tags.note("It was never resumed.") if len(found) == 1 else ""
    head = ["", "after iteration", "changed", "when", "where"]
    return _tags.section("starts", "Starts", said, _tags.table("Starts of the run", head, rows, [1]))


def _change(name: str, pair: Any) -> str:
    old, new = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
    return f"<code>{_tags.text(name)}</code> <del>{_tags.value(old)}</del> → <ins>{_tags.value(new)}</ins>"


def plan(run: Run) -> str:
    """The extensions in the order in which they run, and what stops the run."""
    recorded = _mapping(run.record.get("plan"))
    extensions = recorded.get("extensions")
    extensions = [each for each in extensions if isinstance(each, dict)] if isinstance(extensions, list) else []
    if not recorded:
        return _tags.section("plan", "Plan", _tags.note(f"No plan is recorded: it would be in {_RECORD}."))
    rows = [
        [
            _tags.text(each.get("name", "")),
            _tags.text(each.get("class", "")),
            _tags.value(each.get("priority")),
            f"<code>{_tags.text(each.get('trigger', ''))}</code>",
            ", ".join(
                word
                for key, word in (("before_training", "before training"), ("observes", "sees each iteration"))
                if each.get(key)
            ),
        ]
        for each in extensions[:_MOST_ROWS]
    ]
    stop = f"Training ends by <code>{_tags.text(recorded.get('stop_trigger', ''))}</code>."
    how = "Each iteration is an update, and then every extension whose trigger fires, in this order."
    empty = "There is no extension: <code>trainer.extend(...)</code> adds one."
    head = ["extension", "class", "priority", "trigger", "besides"]
    shown = _tags.table("Plan of the extensions", head, rows, [2]) if rows else ""
    return _tags.section("plan", "Plan", _tags.note(f"{stop} {how if rows else empty}"), shown)


def time(run: Run) -> str:
    """Where the time goes, by phase."""
    if run.profile is None:
        how = "Add <code>extensions.Profiler()</code>: it writes the time of each phase when the run ends."
        return _tags.section("time", "Time by phase", _tags.note(how))
    iterations, phases = run.profile
    rows = [
        [
            _tags.text(phase.name),
            f'<span class="bar"><i style="width:{100 * min(max(phase.share, 0), 1):.1f}%"></i></span>{phase.share:.1%}',
            f"{phase.milliseconds:.3f}",
            f"{phase.seconds:.3f}",
        ]
        for phase in sorted(phases, key=lambda phase: -phase.seconds)[:_MOST_ROWS]
    ]
    total = sum(phase.seconds for phase in phases)
    said = f"{iterations:,} iterations in {_tags.duration(total)}: the last part of the run that came to its end."
    head = ["phase", "share", "ms an iteration", "seconds"]
    return _tags.section("time", "Time by phase", _tags.note(said), _tags.table("Time by phase", head, rows, [2, 3]))


def parameters(run: Run) -> str:
    """How many parameters the models have, and which."""
    if not run.models:
        how = f"No model is recorded: it would be in {_RECORD} with an updater that has models."
        return _tags.section("parameters", "Parameters", _tags.note(how))
    rows = [
        [
            _tags.text(model.name),
            _tags.text(model.kind),
            f"{model.count():,}",
            f"{model.count(trainable=True):,}",
            f"{len(model.shapes):,}",
        ]
        for model in run.models[:_MOST_ROWS]
    ]
    head = ["model", "class", "parameters", "trainable", "tensors"]
    details = "".join(map(_tensors, run.models[:20]))
    return _tags.section("parameters", "Parameters", _tags.table("Models", head, rows, [2, 3, 4]), details)


def _tensors(model: Model) -> str:
    name = _tags.text(model.name)
    listed = list(model.shapes.items())
    rows = [
        [
            _tags.text(path),
            "not known at the start" if shape is None else "x".join(map(str, shape)) or "scalar",
            "" if shape is None else f"{Model('', '', {path: shape}, frozenset()).count():,}",
            "no" if path in model.frozen else "yes",
        ]
        for path, shape in listed[:_MOST_ROWS]
    ]
    left_out = len(listed) - len(rows)
    more = _tags.note(f"{left_out:,} more are in <code>run.json</code>.") if left_out else ""
    head = ["parameter", "shape", "numbers", "trainable"]
    shown = _tags.table(f"Parameters of {model.name}", head, rows, [2])
    return f"<details><summary>Parameters of {name}</summary>{shown}{more}</details>"


def graph(run: Run) -> str:
    """The graph of the loss."""
    title = "Graph"
    if run.graph is None:
        how = 'Add <code>extensions.dump_graph("main/loss")</code>: it writes the graph behind the first loss.'
        return _tags.section("graph", title, _tags.note(how))
    name, dot = run.graph
    drawn = svg_of(dot)
    if drawn is None:
        what = "is too large to be drawn here, or is not what <code>dump_graph</code> writes"
        how = f"<code>{_tags.text(name)}</code> {what}; Graphviz draws it."
        return _tags.section("graph", title, _tags.note(how))
    svg, count = drawn
    said = f"{count} nodes of <code>{_tags.text(name)}</code>: boxes are parameters and the result, the others operations."
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="Graph">{svg}</div>'
    return _tags.section("graph", title, _tags.note(said), region)


def snapshots(run: Run) -> str:
    """The snapshots, and whether each is what was written."""
    title = "Snapshots"
    if not run.snapshots:
        how = 'Add <code>extensions.snapshot(autoload=True), trigger=(1, "epoch")</code>: a run that is killed then goes on.'
        return _tags.section("snapshots", title, _tags.note(how))
    rows = [
        [
            _tags.text(each.name) + "".join(f' <span class="link">{_tags.text(link)}</span>' for link in each.links),
            "" if each.iteration is None else f"{each.iteration:,}",
            "" if each.epoch is None else f"{each.epoch:,}",
            _tags.size(each.size),
            f'<span class="state {each.state}">{each.state}</span>',
            _tags.text(each.note),
        ]
        for each in run.snapshots[:_MOST_ROWS]
    ]
    states = [each.state for each in run.snapshots]
    said = [f"{states.count(state):,} {state}" for state in dict.fromkeys(states)]
    total = _tags.size(sum(each.size for each in run.snapshots))
    notes = f"{', '.join(said)}; {total} in all."
    if COMPLETE in states:
        notes += " Complete: names and sizes are as written; the bytes were not compared."
    if DAMAGED in states:
        first = next(each.name for each in run.snapshots if each.state == DAMAGED)
        notes += (
            f" Damaged is <code>{_tags.text(first)}</code>{' and others' if states.count(DAMAGED) > 1 else ''}: a run that"
        )
        notes += " resumes by itself passes over it."
    if len(rows) < len(states):
        notes += f" The newest {len(rows):,} are shown."
    head = ["snapshot", "iteration", "epoch", "size", "state", "note"]
    if not any(each.note for each in run.snapshots):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return _tags.section("snapshots", title, _tags.note(notes), _tags.table("Snapshots", head, rows, [1, 2, 3]))
