"""The sections of the page below the log. An empty section says in one line how to fill it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from chainring.html_report import _tags
from chainring.html_report._run import COMPLETE, DAMAGED, Model, Run

_MAX_ROWS = 300
_MAX_INPUTS = 20
_RECORD = "<code>run.json</code>, which a <code>Trainer</code> writes when a run starts"


def settings(run: Run) -> str:
    """Return the section of the configuration, the versions and the device."""
    record = run.record
    content = []
    if run.record_error is not None:
        content.append(_tags.note(f"<code>run.json</code> cannot be read: {_tags.text(run.record_error)}"))
    elif not record:
        content.append(_tags.note(f"Nothing is recorded: it would be in {_RECORD}."))
    if config := _mapping(record.get("config")):
        content.append(_settings_table("Configuration", config))
    elif record:
        content.append(_tags.note("No configuration is recorded: pass <code>Trainer(..., config=vars(args))</code>."))
    names = {"argv": "command", "git_commit": "commit", "device": "device", "threads": "threads"}
    values = {name: record.get(key) for key, name in names.items()}
    values |= {f"{name} version": version for name, version in _mapping(record.get("versions")).items()}
    values |= {f"optimizer {name}": optimizer for name, optimizer in _mapping(record.get("optimizers")).items()}
    values |= {f"seeds of {name}": seeds for name, seeds in _mapping(record.get("seeds")).items()}
    if known := {name: value for name, value in values.items() if value is not None}:
        content.append(f"<details><summary>Made with</summary>{_settings_table('Made with', known)}</details>")
    return _tags.section("settings", "Settings", *content)


def _mapping(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _settings_table(caption: str, values: Mapping[str, Any]) -> str:
    rows = []
    for name, value in list(values.items())[:_MAX_ROWS]:
        is_command = isinstance(value, list) and value and all(isinstance(word, str) for word in value)
        rows.append([_tags.text(name), _tags.text(" ".join(value)) if is_command else _tags.value(value)])
    return _tags.table(caption, ["setting", "value"], rows) + _more(len(values), "run.json")


def _more(count: int, file: str) -> str:
    """Return the note that a table is cut off after its first rows, if it is."""
    return _tags.note(f"{count - _MAX_ROWS:,} more are in <code>{file}</code>.") if count > _MAX_ROWS else ""


def starts(run: Run) -> str:
    """Return the section of the starts of the run: when, where, and with which changes."""
    if not run.starts:
        return _tags.section("starts", "Starts", _tags.note(f"No start is recorded: they would be in {_RECORD}."))
    rows = []
    for index, start in list(enumerate(run.starts))[-_MAX_ROWS:]:
        changes = list(_mapping(start.get("changed")).items())[:_MAX_ROWS]
        changed = "<br>".join(_change(name, pair) for name, pair in changes) or ("" if index == 0 else "nothing")
        process = f"{start.get('host', '')}, process {start.get('pid', '')}"
        began = "started" if index == 0 else "resumed"
        time = _tags.text(start.get("time", ""))
        rows.append([began, _tags.value(start.get("iteration")), changed, time, _tags.text(process)])
    note = _tags.note("It was never resumed.") if len(rows) == 1 else ""
    head = ["", "after iteration", "changed", "when", "where"]
    return _tags.section("starts", "Starts", note, _tags.table("Starts of the run", head, rows, [1]))


def _change(name: str, pair: Any) -> str:
    old, new = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
    return f"<code>{_tags.text(name)}</code> <del>{_tags.value(old)}</del> → <ins>{_tags.value(new)}</ins>"


def plan(run: Run) -> str:
    """Return the section of the extensions in the order in which they run, and of the stop trigger."""
    recorded = _mapping(run.record.get("plan"))
    if not recorded:
        return _tags.section("plan", "Plan", _tags.note(f"No plan is recorded: it would be in {_RECORD}."))
    extensions = recorded.get("extensions")
    flags = {"before_training": "before training", "observes": "sees each iteration"}
    rows = [
        [
            _tags.text(extension.get("name", "")),
            _tags.text(extension.get("class", "")),
            _tags.value(extension.get("priority")),
            f"<code>{_tags.text(extension.get('trigger', ''))}</code>",
            ", ".join(words for key, words in flags.items() if extension.get(key)),
        ]
        for extension in (extensions[:_MAX_ROWS] if isinstance(extensions, list) else ())
        if isinstance(extension, dict)
    ]
    note = f"Training ends by <code>{_tags.text(recorded.get('stop_trigger', ''))}</code>. "
    if not rows:
        empty = "There is no extension: <code>trainer.extend(...)</code> adds one."
        return _tags.section("plan", "Plan", _tags.note(note + empty))
    note += "Each iteration is an update, and then every extension whose trigger fires, in this order."
    head = ["extension", "class", "priority", "trigger", "besides"]
    return _tags.section("plan", "Plan", _tags.note(note), _tags.table("Plan of the extensions", head, rows, [2]))


def time(run: Run) -> str:
    """Return the section of the time of each phase."""
    if run.profile is None:
        note = "Add <code>extensions.Profiler()</code>: it writes the time of each phase when the run ends."
        return _tags.section("time", "Time by phase", _tags.note(note))
    iterations, total = run.profile.iterations, sum(run.profile.seconds.values())
    rows = [
        [
            _tags.text(phase),
            f'<span class="bar"><i style="width:{seconds / total:.1%}"></i></span>{seconds / total:.1%}',
            f"{1000 * seconds / iterations:.3f}",
            f"{seconds:.3f}",
        ]
        for phase, seconds in sorted(run.profile.seconds.items(), key=lambda item: -item[1])[:_MAX_ROWS]
    ]
    note = f"{iterations:,} iterations in {_tags.duration(total)}: the last part of the run that came to its end."
    head = ["phase", "share", "ms an iteration", "seconds"]
    return _tags.section("time", "Time by phase", _tags.note(note), _tags.table("Time by phase", head, rows, [2, 3]))


def parameters(run: Run) -> str:
    """Return the section of the models and their parameters."""
    if not run.models:
        note = f"No model is recorded: it would be in {_RECORD} with an updater that has models."
        return _tags.section("parameters", "Parameters", _tags.note(note))
    rows = [
        [
            _tags.text(model.name),
            _tags.text(model.class_name),
            *(f"{count:,}" for count in (model.count(), model.count(trainable=True), len(model.shapes))),
        ]
        for model in run.models[:_MAX_ROWS]
    ]
    head = ["model", "class", "parameters", "trainable", "tensors"]
    details = "".join(map(_parameters_of, run.models[:20]))
    return _tags.section("parameters", "Parameters", _tags.table("Models", head, rows, [2, 3, 4]), details)


def _parameters_of(model: Model) -> str:
    rows = [
        [
            _tags.text(path),
            "not known at the start" if shape is None else "x".join(map(str, shape)) or "scalar",
            "" if shape is None else f"{Model('', '', {path: shape}, frozenset()).count():,}",
            "no" if path in model.frozen else "yes",
        ]
        for path, shape in list(model.shapes.items())[:_MAX_ROWS]
    ]
    table = _tags.table(f"Parameters of {model.name}", ["parameter", "shape", "numbers", "trainable"], rows, [2])
    more = _more(len(model.shapes), "run.json")
    return f"<details><summary>Parameters of {_tags.text(model.name)}</summary>{table}{more}</details>"


def graph(run: Run) -> str:
    """Return the section of the graph behind a reported value."""
    if run.graph is None:
        note = 'Add <code>extensions.dump_graph("main/loss")</code>: it writes the graph behind the first loss.'
        return _tags.section("graph", "Graph", _tags.note(note))
    name, inputs = run.graph.name, run.graph.inputs
    rows = [
        [_tags.text(label), ", ".join(map(_tags.text, [*sources[:_MAX_INPUTS], *(["…"] if sources[_MAX_INPUTS:] else [])]))]
        for label, sources in list(inputs.items())[-_MAX_ROWS:]
    ]
    note = f"The operations of the forward and their inputs, from <code>{_tags.text(name)}</code>."
    picture = ""
    if run.graph.picture is not None:
        # As an image it runs no script and fetches nothing.
        data = base64.b64encode(run.graph.picture).decode()
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="Graph, drawn by Graphviz">'
        picture = f'<div class="scroll" tabindex="0" role="region" aria-label="Graph">{image}</div>'
    table = _tags.table("Operations of the graph", ["operation", "inputs"], rows)
    return _tags.section("graph", "Graph", _tags.note(note), picture, table, _more(len(inputs), _tags.text(name)))


def snapshots(run: Run) -> str:
    """Return the section of the snapshots and their states."""
    if not run.snapshots:
        note = (
            'Add <code>extensions.snapshot(autoload=True), trigger=(1, "epoch")</code>: a run that is killed then goes on.'
        )
        return _tags.section("snapshots", "Snapshots", _tags.note(note))
    rows = [
        [
            _tags.text(snapshot.name) + "".join(f' <span class="link">{_tags.text(link)}</span>' for link in snapshot.links),
            "" if snapshot.iteration is None else f"{snapshot.iteration:,}",
            "" if snapshot.epoch is None else f"{snapshot.epoch:,}",
            _tags.size(snapshot.size),
            f'<span class="state {snapshot.state}">{snapshot.state}</span>',
            _tags.text(snapshot.note),
        ]
        for snapshot in run.snapshots[:_MAX_ROWS]
    ]
    head = ["snapshot", "iteration", "epoch", "size", "state", "note"]
    if not any(snapshot.note for snapshot in run.snapshots):
        head, rows = head[:-1], [row[:-1] for row in rows]
    table = _tags.table("Snapshots", head, rows, [1, 2, 3])
    return _tags.section("snapshots", "Snapshots", _tags.note(_snapshots_note(run)), table)


def _snapshots_note(run: Run) -> str:
    states = [snapshot.state for snapshot in run.snapshots]
    counts = ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))
    note = f"{counts}; {_tags.size(sum(snapshot.size for snapshot in run.snapshots))} in all."
    if COMPLETE in states:
        note += " Complete: names and sizes are as written; the bytes were not compared."
    if DAMAGED in states:
        first = _tags.text(run.snapshots[states.index(DAMAGED)].name)
        others = " and others" if states.count(DAMAGED) > 1 else ""
        note += f" Damaged is <code>{first}</code>{others}: a run that resumes by itself passes over it."
    if len(states) > _MAX_ROWS:
        note += f" The newest {_MAX_ROWS:,} are shown."
    return note
