"""In a notebook, whose kernel must live on, an interrupt finishes the iteration, saves, and stays an interrupt."""

import json

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

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


def test_an_interrupted_cell_has_saved_its_run_and_the_kernel_lives_on(tmp_path):
    """KeyboardInterrupt, as from any cell that is stopped; the next cell continues from what was saved."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(CELL.format(out=str(tmp_path / "out"))),
        nbformat.v4.new_code_cell("print(updater.iteration, sorted(os.listdir(trainer.out)))"),
    ]
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        with pytest.raises(CellExecutionError) as caught:
            client.execute_cell(notebook.cells[0], 0)
        assert caught.value.ename == "KeyboardInterrupt"
        shown = client.execute_cell(notebook.cells[1], 1).outputs[0]["text"]
    assert shown.startswith("7 ")
    assert "snapshot_iter_7" in shown
    assert json.loads((tmp_path / "out" / "run.json").read_text())["starts"][0]["iteration"] == 0
