"""In a notebook: what is seen while a cell trains, and what an interrupt leaves behind."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLE = Path(__file__).parents[1] / "examples" / "notebook" / "digits.ipynb"
WIDGET, WIDGETS = "application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json"

CELL = """
import os, signal, torch
from torch import nn
from chainring import iterators, training
from chainring.training import extensions

net = nn.Linear(3, 1)
data = [(torch.randn(3), torch.randn(1)) for _ in range(20)]
updater = training.StandardUpdater(
    iterators.SerialIterator(data, 4),
    torch.optim.SGD(net.parameters(), 0.01),
    net,
    loss_func=lambda net, x, t: ((net(x) - t) ** 2).mean(),
)
trainer = training.Trainer(updater, (100, "iteration"), out={out!r})
trainer.extend(extensions.snapshot(), trigger=(50, "iteration"))
trainer.extend(
    lambda trainer: os.kill(os.getpid(), signal.SIGINT), name="interrupt", trigger=lambda trainer: updater.iteration == 7
)
trainer.run()
"""

TOY = """
import contextlib, io, sys, tempfile
from chainring import report, training
from chainring.training import extensions

class Updater(training.Updater):
    def update_core(self):
        if self.iteration == fails_after:
            raise LookupError("no data")
        report({{"a<b": 0.5}})

def train(length, stop, fails=None):
    global fails_after
    fails_after = fails
    reached = lambda trainer: trainer.updater.iteration >= stop
    trainer = training.Trainer(Updater(), reached, out=tempfile.mkdtemp(dir={out!r}))
    trainer.extend(extensions.LogReport(filename=None), trigger=(1, "iteration"))
    trainer.extend(extensions.PrintReport())
    trainer.extend(extensions.ProgressBar((length, "iteration"), update_interval=1))
    trainer.run()
"""


def client_of(notebook, directory):
    return NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(directory)}})


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example, executed, and the directory in which it ran."""
    directory = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    client_of(notebook, directory).execute()
    return notebook, directory


def outputs_of(notebook):
    """The outputs of each cell of code."""
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def tables_of(outputs):
    """The HTML tables among the outputs, each as rows of cells."""
    found = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    rows = [table.replace("</th>", "|").replace("</td>", "|").split("</tr>")[:-1] for table in found]
    return [[[text.rpartition(">")[2] for text in row.split("|")[:-1]] for row in table] for table in rows]


def bars_of(notebook, outputs):
    """The bars of tqdm's among the outputs: of each the state of its progress, and its text."""
    state = {key: model["state"] for key, model in notebook.metadata["widgets"][WIDGETS]["state"].items()}
    boxes = [state[output["data"][WIDGET]["model_id"]] for output in outputs if WIDGET in output.get("data", {})]
    parts = [[state[child.removeprefix("IPY_MODEL_")] for child in box["children"]] for box in boxes]
    return [(middle, left["value"] + right["value"]) for left, middle, right in parts]


def test_a_cell_shows_one_table_with_every_row(example):
    """It is replaced in place; its text is for who has no HTML. A resumed run shows the earlier rows first."""
    notebook, directory = example
    log = json.loads((directory / "result" / "log").read_text())
    columns = ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]
    rows = [columns, *([f"{row[key]:g}" for key in columns] for row in log)]
    _, first, second, _ = outputs_of(notebook)
    assert tables_of(first) == [rows[:11]]
    assert tables_of(second) == [rows]
    (text,) = [output["data"]["text/plain"] for output in second if "text/html" in output.get("data", {})]
    assert [line.split() for line in text.splitlines()] == rows


def test_a_cell_shows_tqdms_bar_of_widgets(example):
    """Full and green at the end, with the same text as in a terminal; all else is that the second run stops later."""
    notebook, _ = example
    _, *both, _ = outputs_of(notebook)
    streams = [output for output in both[1] if output["output_type"] == "stream"]
    both[1] = [output for output in both[1] if output not in streams]
    begins = [line.split()[:2] for output in streams for line in output["text"].splitlines()]
    assert begins == [["resumed", "from"], ["resumed", "with"], ["setting", "saved"], ["stop", "trigger"]]
    for outputs, epochs in zip(both, (10, 20), strict=True):
        ((bar, text),) = bars_of(notebook, outputs)
        assert (bar["value"], bar["max"], bar["bar_style"]) == (epochs, epochs, "success")
        assert f"epoch {epochs}.0" in text.replace("\u2007", " ")
        assert {output["output_type"] for output in outputs} == {"display_data"}


def test_the_example_learns(example):
    """The last cell prints what the model knows, after both runs."""
    notebook, _ = example
    (said,) = outputs_of(notebook)[-1]
    right, _, of = said["text"].removeprefix("after 20 epochs ").partition(" test images")[0].partition(" of ")
    assert int(right) / int(of) > 0.94


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Short runs in one kernel: red, green, long, captured, without ipywidgets."""
    directory = tmp_path_factory.mktemp("toys")
    sources = [
        TOY.format(out=str(directory)),
        "train(4, 4, fails=2)",
        "train(8, 4)",
        "train(150, 150)",
        "with contextlib.redirect_stdout(io.StringIO()) as text:\n    train(2, 2)\nprint(text.getvalue())",
        "sys.modules['ipywidgets'] = None\ntrain(4, 4)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.cells[1].metadata["tags"] = ["raises-exception"]
    client_of(notebook, directory).execute()
    return notebook


def test_the_bar_is_red_where_the_run_failed(toys):
    """And stands where it stopped; the table has the rows so far."""
    outputs = outputs_of(toys)[1]
    assert outputs[-1]["ename"] == "LookupError"
    ((bar, _),) = bars_of(toys, outputs)
    assert (bar["value"], bar["max"], bar["bar_style"]) == (2, 4, "danger")
    assert len(tables_of(outputs)[0]) == 3


def test_the_bar_is_green_where_a_stop_trigger_ended_the_run_early(toys):
    """That is no failure."""
    ((bar, _),) = bars_of(toys, outputs_of(toys)[2])
    assert (bar["value"], bar["max"], bar["bar_style"]) == (4, 8, "success")


def test_names_are_text_in_the_table(toys):
    """A key may hold what HTML would take for a tag."""
    (table,) = tables_of(outputs_of(toys)[2])
    assert table[0][0] == "a&lt;b"


def test_a_long_table_is_its_newest_rows(toys):
    """Each update sends all of it; a caption says where the others are."""
    (table,) = tables_of(outputs_of(toys)[3])
    head, *rows = table
    iteration = head.index("iteration")
    assert [row[iteration] for row in rows] == [str(k) for k in range(51, 151)]
    assert "<caption>the newest 100 rows; the log has 50 earlier ones</caption>" in str(outputs_of(toys)[3])


def test_where_stdout_goes_elsewhere_so_does_the_text(toys):
    """A cell that collects what is printed gets a table of text and plain lines."""
    (shown,) = outputs_of(toys)[4]
    assert shown["text"].split()[0] == "a<b"
    assert "100%|" in shown["text"]


def test_without_ipywidgets_the_bar_is_text_and_leaves_nothing_behind(toys):
    """It is drawn over itself, steps aside for the table, and is gone at the end."""
    outputs = outputs_of(toys)[5]
    assert len(tables_of(outputs)) == 1
    kinds = ["text" if output["output_type"] == "stream" else "table" for output in outputs]
    table = kinds.index("table")
    for part in (outputs[:table], outputs[table + 1 :]):
        text = "".join(output["text"] for output in part)
        assert "%|" in text
        assert text.rpartition("\r")[2] == ""
        assert text.split("\r")[-2].isspace()


def test_an_interrupted_cell_has_saved_its_run_and_the_kernel_lives_on(tmp_path):
    """KeyboardInterrupt, as from any cell that is stopped; the next cell continues from what was saved."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(CELL.format(out=str(tmp_path / "out"))),
        nbformat.v4.new_code_cell("print(updater.iteration, sorted(os.listdir(trainer.out)))"),
    ]
    client = client_of(notebook, tmp_path)
    with client.setup_kernel():
        with pytest.raises(CellExecutionError) as caught:
            client.execute_cell(notebook.cells[0], 0)
        assert caught.value.ename == "KeyboardInterrupt"
        shown = client.execute_cell(notebook.cells[1], 1).outputs[0]["text"]
    assert shown.startswith("7 ")
    assert "snapshot_iter_7" in shown
    assert json.loads((tmp_path / "out" / "run.json").read_text())["starts"][0]["iteration"] == 0
