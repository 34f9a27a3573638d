"""docs/migration/pfn-extras.md is true: pytorch-pfn-extras 0.9.0 and Chainring have the same results for its lines."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "migration" / "pfn-extras.md"
pytest.importorskip("pytorch_pfn_extras", reason="pytorch-pfn-extras is not installed: make migration installs it")

DIFFERENCES = {  # the program: what it returns under pytorch-pfn-extras, and under Chainring
    "differs_check_grad": ("made", "TypeError"),
    "differs_evaluate_alone": (["IndexError", "KeyError"], [["main/loss"], ["main/loss"]]),
    "differs_evaluation": (2.75, 2.0),
    "differs_lazy_value": ("reported", "TypeError"),
    "differs_log_format": ([["log.jsonl"], "{"], [["log.jsonl", "log.jsonl.jsonl"], "["]),
    "differs_may_fire": (True, False),
    "differs_micro_average": ([6], [2, 4, 6]),
    "differs_missing_value": (["KeyError", "KeyError"], ["ran", "ran"]),
    "differs_mode": ("made", "ValueError"),
    "differs_name": (["val"], ["none"]),
    "differs_observe_lr": ("made", "TypeError"),
    "differs_once": (True, False),
    "differs_plateau": ("ValueError", "ran"),
    "differs_plot_report": ("bool", "AttributeError"),
    "differs_print_report": (
        ["main/loss", "epoch", "elapsed_time"],
        ["main/loss", "epoch", "iteration", "elapsed_time"],
    ),
    "differs_scheduler": (["made", "made"], ["TypeError", "TypeError"]),
    "differs_snapshot_file": (False, True),
    "differs_writer": ("made", "TypeError"),
}


def programs():
    """The functions of the file from `intervals` on, by name, with their docstrings."""
    tree = ast.parse((HERE / "pfn_extras_programs.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "main"]
    first = next(index for index, node in enumerate(functions) if node.name == "intervals")
    return {node.name: ast.get_docstring(node) for node in functions[first:]}


def run(folder, *command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each program returned, by library."""
    found = {}
    for library in ("pfn_extras", "chainring"):
        folder = tmp_path_factory.mktemp(library)
        run(folder, HERE / "pfn_extras_programs.py", library, "results.json")
        found[library] = json.loads((folder / "results.json").read_text())
    return found


def near(value):
    """The same, with numbers up to the rounding of float32."""
    if isinstance(value, dict):
        return {key: near(item) for key, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, rel=2e-5, abs=1e-7) if isinstance(value, float) else value


def test_the_library_is_the_one_of_the_page():
    """The page names the version that it was compared with."""
    assert f"pytorch-pfn-extras {importlib.metadata.version('pytorch-pfn-extras')}" in PAGE.read_text()


@pytest.mark.parametrize("program", [name for name in programs() if not name.startswith("differs_")])
def test_a_line_of_the_page_does_the_same_in_both(program, results):
    """Its docstring is the line; what it returns is the same under both libraries."""
    theirs, ours = (results[library][program] for library in ("pfn_extras", "chainring"))
    for library, result in (("pytorch-pfn-extras", theirs), ("chainring", ours)):
        assert not (isinstance(result, dict) and "failed" in result), f"{library}: {result['failed']}"
    assert ours == near(theirs)


@pytest.mark.parametrize("program", [name for name in programs() if name.startswith("differs_")])
def test_a_difference_is_as_the_page_says(program, results):
    """Each library returns what stands here; the first code of its docstring stands in the table of differences."""
    assert tuple(results[library][program] for library in ("pfn_extras", "chainring")) == DIFFERENCES[program]
    table = PAGE.read_text().split("## What differs\n")[1].split("\n## ")[0]
    assert programs()[program].split("`")[1] in table


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The folders in which the scripts before and after have run, with ``shuffle=False``, and saved the model."""
    folders = {}
    for part in re.split(r"```(?:python|\{code-block\} python)\n", PAGE.read_text())[1:]:
        name = "after" if "before" in folders else "before"
        folders[name] = tmp_path_factory.mktemp(name)
        script = part.split("```")[0].replace("shuffle=True", "shuffle=False")
        (folders[name] / "script.py").write_text(f"{script}\ntorch.save(model.state_dict(), 'model.pt')\n")
        run(folders[name], "script.py")
    return folders


def test_the_script_before_and_the_one_after_train_the_same_model(scripts):
    """With ``shuffle=False`` the parameters after ten epochs are equal to the last bit, as the page says."""
    theirs, ours = (torch.load(folder / "model.pt") for folder in scripts.values())
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert theirs.keys() == ours.keys()


def test_the_numbers_of_the_page_are_those_of_the_scripts(scripts):
    """The rows "with `shuffle=False`" of its table, up to rounding."""
    for name, prefix in (("before", "val"), ("after", "validation/main")):
        row = json.loads((scripts[name] / "result" / "log").read_text())[-1]
        (numbers,) = re.findall(rf"\| {name}, with `shuffle=False` \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text())
        assert [row[f"{prefix}/loss"], row[f"{prefix}/accuracy"]] == pytest.approx([float(x) for x in numbers], abs=2e-3)
