"""What docs/recipes.md defines, and runs of it that are cut at every iteration."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from chainring import serializers
from chainring.training.extensions import LogReport, snapshot

DOCS = Path(__file__).parents[2] / "docs"


def blocks(heading=""):
    """The Python of a section; of the lines before the first one without a heading."""
    sections = re.split(r"^## ", (DOCS / "recipes.md").read_text(), flags=re.MULTILINE)
    (section,) = [part for part in sections[1:] if part.startswith(heading)] if heading else sections[:1]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def definitions(heading):
    """The names that a section defines: its imports, classes and functions, after those at the head of the page."""
    defined = {}
    statements = r"^(?:import|from|class|def)\b.*\n(?:(?:[ \t].*)?\n)*"
    for block in blocks():
        exec(block, defined)
    for block in blocks(heading):
        for statement in re.findall(statements, block, re.MULTILINE):
            exec(statement, defined)
    return defined


def run_section(heading):
    """Runs a section as it stands, in the current directory; what it has defined."""
    namespace = {}
    for block in blocks() + blocks(heading):
        exec(block, namespace)
    return namespace


def run_page(name):
    """Runs another page from its beginning to its end; what it has defined."""
    namespace = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL):
        exec(block, namespace)
    return namespace


def rows_of(trainer):
    """The rows of the log without times."""
    log = trainer.get_extension("LogReport").log
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in log]


def exact(value):
    """A value in a form in which ``==`` compares every bit."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


def differences(one, other):
    """The keys under which two trainers differ, times left out."""
    first, second = (
        {key: exact(value) for key, value in trainer.state_dict().items() if "elapsed_time" not in key and "/log" not in key}
        for trainer in (one, other)
    )
    assert rows_of(one) == rows_of(other)
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


def assert_resumes_everywhere(make, out, length, *, resumed=None, log=(3, "iteration")):
    """A run of ``make(out)`` that is continued from its snapshot of any iteration is the uninterrupted run.

    ``resumed`` makes the trainer that continues, if it is another.
    """

    def made(name, kind):
        trainer = kind(str(out / name), (length, "iteration"))
        trainer.extend(LogReport(trigger=log))
        trainer.extend(snapshot(), trigger=(1, "iteration"))
        return trainer

    whole = made("whole", make)
    whole.run()
    for iteration in range(1, length):
        rest = made(f"from_{iteration}", resumed or make)
        serializers.load(out / "whole" / f"snapshot_iter_{iteration}", rest)
        rest.run()
        assert rest.updater.iteration == length
        assert differences(whole, rest) == [], f"resumed from iteration {iteration}"
