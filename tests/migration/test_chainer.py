"""docs/migration/chainer.md is true: its lines, run under Chainer 7.8.1 and under Chainring, have the same results."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from chainring import datasets

HERE = Path(__file__).parent
CHAINER = os.environ.get("CHAINER_PYTHON")
pytestmark = pytest.mark.skipif(
    not CHAINER, reason="CHAINER_PYTHON is not set: make migration builds an environment with Chainer 7.8.1 and sets it"
)


def programs(*, different):
    """The names ``<module>.<function>`` of those that differ by design, or of the others."""
    for path in sorted((HERE / "programs").glob("*.py")):
        if (path.stem == "differences") == different:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    yield f"{path.stem}.{node.name}"


def run(python, library, folder):
    """What each program returned."""
    folder.mkdir()
    command = [python, HERE / "either.py", library, HERE / "programs", "results.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "EXCHANGE": str(folder.parent)}
    if library == "chainer":
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each program returned, by library."""
    root = tmp_path_factory.mktemp("programs")
    pythons = {"chainer": CHAINER, "chainring": sys.executable}
    return {library: run(python, library, root / library) for library, python in pythons.items()}


def near(value):
    """The same, with numbers up to the rounding of float32."""
    if isinstance(value, dict):
        return {key: near(item) for key, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, rel=2e-5, abs=1e-7) if isinstance(value, float) else value


@pytest.mark.parametrize("program", list(programs(different=False)))
def test_a_line_of_the_page_does_the_same_in_both(program, results):
    """Its docstring is the line; what it returns is the same under both libraries."""
    theirs, ours = (results[library][program] for library in ("chainer", "chainring"))
    for library, result in (("chainer", theirs), ("chainring", ours)):
        assert not (isinstance(result, dict) and "failed" in result), f"{library}: {result['failed']}"
    assert ours == near(theirs)


DIFFERENCES = {  # the program: what it returns under Chainer, and under Chainring
    "array_of_another_shape": ([None, [2.0, 2.0, 2.0]], [None, [0.0, 0.0, 0.0]]),
    "batches_of_workers": ("ndarray", "Tensor"),
    "batch_is_a_list": ([True, [1, 2, 3], "appended", [1, 2, 3]], [False, "AttributeError", "AttributeError", [1, 2]]),
    "batches_without_length": ("ran", "ValueError"),
    "default_percentiles": (
        ["max", "mean", "min", "percentile", "std", "zeros"],
        ["max", "mean", "min", "std", "zeros"],
    ),
    "device_of_a_converter": ([False], ["device"]),
    "end_of_a_line": (["one\n", 3, "one\n"], ["one", 2, "TypeError"]),
    "evaluate_alone": (["an error", ["target/loss"]], [["main/loss"], ["main/loss"]]),
    "evaluation_weights": (2.75, 2.0),  # 0, 1, 2 and 3 in a batch, and 4 in another
    "files_of_a_snapshot": (False, True),
    "label_dtype": ("int32", "int64"),
    "leading_slash": (["main/part/a", "mainpart/b"], ["main/part/a", "main/part/b"]),
    "name_of_an_extension": (["val", "val"], [None, "val"]),
    "names_in_a_file": (["number", "part/array"], ["chainring.json", "part/array"]),
    "negative_index": ([-1, "IndexError"], [5, 2]),
    "negative_rate": ("made", "ValueError"),
    "nothing_concatenated": (0, "ValueError"),
    "observed_rate_of_adam": (0.000316, 0.001),
    "once_at_iteration_0": (True, False),
    "one_file_in_a_list": ("str", "tuple"),
    "parallel_gradients": (2.0, 1.0),
    "parameter_of_another_kind": (["loaded", "loaded"], ["RuntimeError", "RuntimeError"]),
    "patients": ("made", "TypeError"),
    "plot_report_name": (["made", True], ["TypeError", False]),
    "rate_after_autoload": ([0.1, 0.1, 0.05, 0.1, 0.025, 0.025], [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]),
    "rest_of_a_split": ([3, 3, 3], [4, 4, 3]),
    "several_examples": ([[2, 0], [12, 10]], [[2, 12], [0, 10]]),
    "shared_memory": (["made", "made"], ["TypeError", "TypeError"]),
    "silent_run": ("ran", "TypeError"),
    "slashes_of_a_key": (["a/b/"], ["/a///b/"]),
    "statistics": (["made", "made", 0], ["TypeError", "TypeError", 5]),
    "stop_after_a_resume": ([6, 8], [6, 6]),
    "unclear_mode": ("made", "ValueError"),
    "with_reporter": ("entered", "TypeError"),
}


@pytest.mark.parametrize("program", list(programs(different=True)))
def test_a_difference_is_as_the_page_says(program, results):
    """Each library returns what stands here, and `DIFFERENCES` says which."""
    found = tuple(results[library][program] for library in ("chainer", "chainring"))
    assert found == DIFFERENCES[program.partition(".")[2]]


def test_each_difference_stands_in_the_page():
    """The first code of a program's docstring is in a row of "What differs"."""
    page = (HERE.parents[1] / "docs" / "migration" / "chainer.md").read_text()
    rows = [line for line in page.split("## What differs\n")[1].split("\n## ")[0].splitlines() if line.startswith("| ")]
    tree = ast.parse((HERE / "programs" / "differences.py").read_text())
    docstrings = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in DIFFERENCES:
        assert any(docstrings[name].split("`")[1] in row for row in rows), name


PATCH = """
import chainer, numpy
numpy.random.seed(0)
digits = numpy.load({digits!r})
make = lambda part: chainer.datasets.TupleDataset(digits[f"{{part}}_x"], digits[f"{{part}}_t"].astype(numpy.int32))
chainer.datasets.get_mnist = lambda: (make("train"), make("test"))  # the page's data without a download
"""
SEED = """
import torch
torch.manual_seed(0)
"""
PREDICT = """
y = model.predictor(digits["test_x"])
numpy.savez("mlp.npz", **{name.strip("/"): param.array for name, param in model.namedparams()})
numpy.save("scores.npy", y.array)
"""


def blocks():
    """The script before, the one after, and the one that copies weights."""
    page = (HERE.parents[1] / "docs" / "migration" / "chainer.md").read_text()
    return [part.split("```")[0] for part in re.split(r"```(?:python|\{code-block\} python)\n", page)[1:]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The folders in which the script before was run under Chainer, on the digits, and the one after as it stands."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("before", "after")}
    digits = folders["before"] / "digits.npz"
    parts = dict(zip(("train", "test"), (part[:] for part in datasets.get_digits()), strict=True))
    names = [(part, i, key) for part in parts for i, key in enumerate("xt")]
    np.savez(digits, **{f"{part}_{key}": np.stack([example[i] for example in parts[part]]) for part, i, key in names})
    before, after, *_ = blocks()
    run_script(CHAINER, PATCH.format(digits=str(digits)) + before + PREDICT, folders["before"])
    run_script(sys.executable, SEED + after, folders["after"])
    return folders


def run_script(python, text, folder):
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([python, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_script_before_and_the_one_after_write_the_same_rows(scripts):
    """Of the same epochs and iterations, with the same keys; both learn, from weights and orders of their own seeds."""
    theirs, ours = (json.loads((scripts[name] / "result" / "log").read_text()) for name in ("before", "after"))
    for row, other in zip(theirs, ours, strict=True):
        assert set(row) <= set(other)
        assert [row[key] for key in ("epoch", "iteration")] == [other[key] for key in ("epoch", "iteration")]
    for rows in (theirs, ours):
        assert rows[-1]["validation/main/accuracy"] > 0.6 > rows[0]["main/accuracy"]
    names = [sorted(path.name for path in (scripts[name] / "result").glob("snapshot_iter_*")) for name in scripts]
    assert names[0] == names[1]


def test_weights_of_an_npz_file_of_chainer_give_the_same_scores(scripts, monkeypatch):
    """Copied by name, as the page's last block does, into the model of the script after."""
    *_, after, copy = blocks()
    monkeypatch.chdir(scripts["before"])
    made = re.sub(r"saved = .*# np.load.*", "", copy).split("assert ")[0]
    assert made.count("\n") == copy.count("\n") - 1  # without the assertion, which is about the numbers of the page
    names = {"__name__": "page"}
    exec(after.split("optimizer = ")[0], names)
    with np.load("mlp.npz") as saved, np.load("digits.npz") as digits:
        names["saved"], images = dict(saved), digits["test_x"]
    exec(made, names)
    scores = names["model"].predictor(torch.from_numpy(images)).detach().numpy()
    assert scores == pytest.approx(np.load("scores.npy"), rel=1e-4, abs=1e-4)
