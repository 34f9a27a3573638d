"""dump_graph: what it draws, when, that it lets go of the graph, and that the training does not notice."""

import gc
import json
import re
import stat
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch
from scripted import Counting, run
from torch import nn
from torch.utils.data import TensorDataset

from chainring import report, training
from chainring.iterators import SerialIterator
from chainring.training.extensions import dump_graph


@pytest.fixture(autouse=True)
def _no_dot(monkeypatch, tmp_path):
    """Graphviz is not there, unless a test says so."""
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))


def dot_that(monkeypatch, tmp_path, does):
    """A program ``dot`` in the only directory of the path."""
    program = tmp_path / "programs" / "dot"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))


def labels(path):
    """What the boxes and ellipses of a DOT file say, line by line."""
    return [label.split("\\n") for label in re.findall(r'label="([^"]*)"', path.read_text())]


def graph_of(path):
    """The labels of the nodes, and the edges as pairs of the first lines of labels."""
    text = path.read_text()
    names = dict(re.findall(r'^  (\w+) \[label="([^"\\]*)', text, re.MULTILINE))
    return [(names[source], names[target]) for source, target in re.findall(r"(\w+) -> (\w+);", text)]


class Reporting(nn.Module):
    """A regression."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.predictor = nn.Linear(3, 1).double()

    def forward(self, x, t):
        loss = (self.predictor(x) - t).square().mean()
        report({"loss": loss}, self)
        return loss


class Marked(Reporting):
    """The same; its graphs can be watched dying, and it may fail after its report."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.graphs = []
        self.fails_at = fails_at

    def forward(self, x, t):
        loss = super().forward(x, t)
        token = type("Token", (), {})()
        loss.grad_fn.metadata["token"] = token
        self.graphs.append(weakref.ref(token))
        if len(self.graphs) == self.fails_at:
            raise ArithmeticError("the model failed")
        return loss


def updater_of(batch_size=4, model=None, **settings):
    model = Reporting() if model is None else model
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(*(torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return training.StandardUpdater(SerialIterator(data, batch_size, shuffle=False), optimizer, model, **settings)


def alive(model):
    gc.collect()
    return [ref() is not None for ref in model.graphs]


def test_the_drawing_has_the_operations_and_the_parameters_by_name_and_shape(tmp_path):
    """Leaves are called as in saved state; the root is called as it was reported."""
    run(updater_of(), 1, tmp_path, dump_graph("main/loss"))
    assert sorted(label for label in labels(tmp_path / "cg.dot") if len(label) > 1) == [
        ["main/loss", "()"],
        ["main/predictor/bias", "(1,)"],
        ["main/predictor/weight", "(1, 3)"],
    ]
    edges = graph_of(tmp_path / "cg.dot")
    for edge in [("main/predictor/bias", "Addmm"), ("Addmm", "Sub"), ("Sub", "Pow"), ("Pow", "Mean"), ("Mean", "main/loss")]:
        assert edge in edges


def test_the_json_is_the_same_graph(tmp_path):
    """Nodes and edges with the labels and shapes of the drawing."""
    run(updater_of(), 1, tmp_path, dump_graph("main/loss"))
    graph = json.loads((tmp_path / "cg.json").read_text())
    names = [node["label"] for node in graph["nodes"]]
    assert [(names[source], names[target]) for source, target in graph["edges"]] == graph_of(tmp_path / "cg.dot")
    assert graph["nodes"][0] == {"kind": "root", "label": "main/loss", "shape": []}
    assert {"kind": "leaf", "label": "main/predictor/weight", "shape": [1, 3]} in graph["nodes"]
    assert {"kind": "operation", "label": "Addmm"} in graph["nodes"]
    assert graph["is_truncated"] is False


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: {"loss": loss}], ids=["the loss", "a mapping"])
def test_a_loss_that_is_only_returned_is_drawn(tmp_path, returns):
    """The updater reports it in the model's place."""
    updater = updater_of(model=nn.Linear(3, 1).double(), loss_func=lambda m, x, t: returns((m(x) - t).square().mean()))
    run(updater, 1, tmp_path, dump_graph("main/loss"))
    assert ["main/weight", "(1, 3)"] in labels(tmp_path / "cg.dot")


@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"precision": "bf16"}], ids=str)
def test_every_kind_of_update_is_drawn(tmp_path, settings):
    """With several parts it is the graph of one of them."""
    run(updater_of(batch_size=2, **settings), 2, tmp_path, dump_graph("main/loss"))
    assert labels(tmp_path / "cg.dot").count(["main/predictor/weight", "(1, 3)"]) == 1


def test_a_compiled_model_is_drawn_under_the_same_names(tmp_path):
    """The wrapper's prefix shows nowhere."""
    updater = updater_of(model=torch.compile(Reporting(), backend="eager"))
    run(updater, 3, tmp_path, dump_graph("main/loss"))
    assert ["main/predictor/weight", "(1, 3)"] in labels(tmp_path / "cg.dot")


def test_a_tied_parameter_is_one_box_and_an_unnamed_leaf_is_called_leaf(tmp_path):
    """Whoever uses it; a tensor that no model has is shown by its shape."""
    model, extra = nn.Linear(1, 1).double(), torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    updater = updater_of(model=model, loss_func=lambda m, x, t: {"loss": m(m(t)).mean() + (extra * extra).sum()})
    run(updater, 1, tmp_path, dump_graph("main/loss"))
    seen = labels(tmp_path / "cg.dot")
    assert seen.count(["main/weight", "(1, 1)"]) == seen.count(["leaf", "(2, 1)"]) == 1
    assert graph_of(tmp_path / "cg.dot").count(("leaf", "Mul")) == 2


def test_a_name_with_quotes_and_backslashes_stays_one_label(tmp_path):
    """They are escaped as DOT wants it."""
    value = torch.ones(1, requires_grad=True) * 2
    run(Counting([{'a "b" \\c': value}]), 1, tmp_path, dump_graph('a "b" \\c', filename="own.dot"))
    assert r'label="a \"b\" \\c\n(1,)"' in (tmp_path / "own.dot").read_text()


def test_of_a_graph_too_deep_for_the_stack_the_part_next_to_the_root_is_drawn(tmp_path):
    """The walk does not recurse, and torch, which does when it frees what was walked, survives."""
    value = torch.ones((), requires_grad=True)
    for _ in range(100_000):
        value = value + 1
    run(Counting([{"deep": value * 2}]), 1, tmp_path, dump_graph("deep"))
    seen = labels(tmp_path / "cg.dot")
    assert (seen.count(["Add"]), seen.count(["Mul"])) == (9_999, 1)
    assert ["and more: only 10000 nodes are drawn"] in seen


def test_the_graph_is_gone_after_the_iteration_that_drew_it(tmp_path):
    """And later iterations keep none; a reader after it in the same iteration no longer finds it."""
    model, seen = Marked(), []
    before = training.make_extension(priority=150)(lambda _: seen.append(alive(model)[-1]))
    after = training.make_extension(priority=50)(lambda _: seen.append(alive(model)[-1]))
    trainer = training.Trainer(updater_of(model=model), (3, "iteration"), tmp_path)
    trainer.extend(before, name="before")
    trainer.extend(dump_graph("main/loss"))
    trainer.extend(after, name="after")
    trainer.run()
    assert seen == [True, False, False, False, False, False]


@pytest.mark.parametrize("where", ["in the model", "in an extension", "in a rehearsal"])
def test_the_graph_is_let_go_of_when_the_iteration_fails(tmp_path, where):
    """Wherever it fails; nothing is left watching."""
    model = Marked(fails_at=None if where == "in an extension" else 1)
    trainer = training.Trainer(updater_of(model=model), (3, "iteration"), tmp_path, extensions=[dump_graph("main/loss")])

    def fail(_):
        raise ArithmeticError("the extension failed")

    if where == "in an extension":
        trainer.extend(fail, priority=200)
    with pytest.raises(ArithmeticError) as caught:
        trainer.rehearse() if where == "in a rehearsal" else trainer.run()
    traceback.clear_frames(caught.tb)  # which hold the local variables of the model
    assert alive(model) == [False]
    assert trainer.reporter.watchers == ()
    assert not (tmp_path / "cg.dot").exists()


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_the_training_is_bit_for_bit_the_one_without_it(tmp_path, settings):
    """Parameters and every observation."""
    results = []
    for extensions in ([], [dump_graph("main/loss")]):
        seen = []
        updater = updater_of(batch_size=2, **settings)
        run(updater, 7, tmp_path, *extensions, lambda trainer, seen=seen: seen.append(trainer.observation["main/loss"]))
        results.append([*seen, *updater.get_model("main").parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_rehearsal_leaves_the_drawing_to_the_run(tmp_path):
    """It writes to a scratch directory, and does not count."""
    trainer = training.Trainer(updater_of(), (1, "iteration"), tmp_path, extensions=[dump_graph("main/loss")])
    trainer.rehearse()
    assert not (tmp_path / "cg.dot").exists()
    trainer.run()
    assert (tmp_path / "cg.dot").exists()


def test_a_resumed_run_does_not_draw_again_and_keeps_no_graph(tmp_path):
    """Nor does it touch the file of the earlier part."""
    first = run(updater_of(), 2, tmp_path / "a", dump_graph("main/loss"))
    watching = []
    look = training.make_extension(initializer=lambda trainer: watching.append(trainer.reporter.watchers))(lambda _: None)
    trainer = training.Trainer(updater_of(), (4, "iteration"), tmp_path / "b", extensions=[dump_graph("main/loss")])
    trainer.load_state_dict(first.state_dict())
    trainer.extend(look, name="look")
    with pytest.warns(UserWarning, match="look"):
        trainer.run()
    assert watching == [()]
    assert not (tmp_path / "b" / "cg.dot").exists()


def test_two_values_are_drawn_into_two_files(tmp_path):
    """Each by an extension of its own."""
    weight = torch.ones(2, requires_grad=True)

    updater = Counting([{"sum": weight.sum(), "mean": (weight.mean(), 3)}])
    run(updater, 1, tmp_path, dump_graph("sum", "sum.dot"), dump_graph("mean", "mean.dot"))
    assert ["Sum"] in labels(tmp_path / "sum.dot")
    assert ["Mean"] in labels(tmp_path / "mean.dot")


def late(iteration):
    """Reports the value from one iteration on."""
    value = torch.ones(2, requires_grad=True).sum()
    return Counting([{"other": 1.0, **({"late": value} if n >= iteration else {})} for n in range(1, 13)])


@pytest.mark.parametrize(("iteration", "is_drawn"), [(2, True), (10, True), (11, False)])
def test_a_value_that_is_not_there_yet_is_warned_about_once_and_waited_for(tmp_path, iteration, is_drawn):
    """The warning names what was reported; after ten iterations it is given up."""
    with pytest.warns(UserWarning, match=r"'late' was not reported; reported were \['other'\]") as caught:
        trainer = run(late(iteration), 12, tmp_path, dump_graph("late"))
    assert len(caught) == 1
    assert (tmp_path / "cg.dot").exists() is is_drawn
    assert trainer.reporter.watchers == ()


def test_a_resumed_run_goes_on_waiting_without_a_second_warning(tmp_path):
    """The tries of the earlier part count."""
    with pytest.warns(UserWarning, match="'late' was not reported"):
        first = run(late(5), 3, tmp_path, dump_graph("late"))
    run(late(5), 6, tmp_path, dump_graph("late"), state=first.state_dict())
    assert ["Sum"] in labels(tmp_path / "cg.dot")


@pytest.mark.parametrize("value", [1.0, torch.ones(()), torch.ones((), requires_grad=True)], ids=str)
def test_a_value_without_a_graph_is_warned_about(tmp_path, value):
    """The warning says what to report."""
    with pytest.warns(UserWarning, match=r"'x' was reported without a graph.*not its item\(\) or detach\(\)"):
        run(Counting([{"x": value}]), 1, tmp_path, dump_graph("x"))


def test_only_the_first_rank_writes(tmp_path):
    """The others keep the same state."""
    updater = late(1)
    updater.comm = SimpleNamespace(rank=1, size=2)
    trainer = run(updater, 1, tmp_path, dump_graph("late"))
    assert list(tmp_path.iterdir()) == []
    assert trainer.reporter.watchers == ()


def test_where_dot_is_installed_an_svg_comes_beside(tmp_path, monkeypatch):
    """Drawn by dot from the file."""
    dot_that(monkeypatch, tmp_path, 'echo "<svg>$1 $2</svg>"')
    run(updater_of(), 1, tmp_path / "out", dump_graph("main/loss"))
    assert sorted(path.name for path in (tmp_path / "out").glob("cg*")) == ["cg.dot", "cg.json", "cg.svg"]
    assert (tmp_path / "out" / "cg.svg").read_text() == f"<svg>-Tsvg {tmp_path / 'out' / 'cg.dot'}</svg>\n"


def test_a_dot_that_fails_is_warned_about_and_the_training_goes_on(tmp_path, monkeypatch):
    """With what it said; the DOT file is there."""
    dot_that(monkeypatch, tmp_path, "echo 'no fonts' >&2; exit 3")
    with pytest.warns(UserWarning, match=r"cg\.dot is written, and drawing it failed.*exit status 3.*no fonts"):
        trainer = run(updater_of(), 2, tmp_path / "out", dump_graph("main/loss"))
    assert trainer.updater.iteration == 2
    assert sorted(path.name for path in (tmp_path / "out").glob("cg*")) == ["cg.dot", "cg.json"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((3,), TypeError), (("x", 3), TypeError), (("x", "a.svg"), ValueError), (("x", "a.json"), ValueError)],
)
def test_names_that_cannot_be_are_refused(arguments, error):
    """When it is made."""
    with pytest.raises(error, match="such as"):
        dump_graph(*arguments)
