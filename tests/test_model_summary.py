"""model_summary: a table of the modules of a model, which leaves the model as it was."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from chainring.iterators import SerialIterator
from chainring.nn import Classifier, model_summary


class Hostile(nn.Module):
    """Its forward changes whatever a forward can."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", None)
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x):
        x.add_(1)
        self.calls += 1
        self.mean = self.mean * 0.9 + x.mean(0).detach() * 0.1
        self.cache = x.detach().clone()
        self.frozen.data += 1
        random.random()
        np.random.random()
        y = self.dropout(self.norm(self.linear(x))) + torch.rand(4, generator=self.generator)
        self.eval()
        return y


def state_of(model, batch):
    return {
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "ids": {key: id(value) for key, value in model.state_dict(keep_vars=True).items()},
        "modes": [module.training for module in model.modules()],
        "calls": model.calls,
        "cache": model.cache,
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        "generators": list(pickle.dumps((random.getstate(), np.random.get_state()))),
        "torch": torch.get_rng_state(),
        "own generator": model.generator.get_state(),
        "batch": batch.clone(),
        "gradients": [parameter.grad for parameter in model.parameters()],
    }


def same(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    return True


def column(table, name, title):
    """The cell of a table in the line of a module, by the title above it."""
    titles, _, *lines = table.splitlines()
    (line,) = [line for line in lines if line.split()[:1] == [name]]
    after = [other for other in titles.split() if titles.index(other) > titles.index(title)]
    if title in ("parameters", "trainable", "memory"):
        start = {"parameters": -3, "trainable": -2, "memory": -1}[title]
        cells = line.replace(" B", "_B").replace(" KiB", "_KiB").split()
        return cells[start].replace("_", " ")
    end = titles.index(after[0])
    return line[titles.index(title) : end].strip()


def test_a_line_has_class_output_parameters_trainable_and_memory():
    """Each of the module itself; the last line is their sum."""
    model = Classifier(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    model.predictor[0].weight.requires_grad_(False)
    table = model_summary(model, (torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)))
    assert table.splitlines()[0].split() == ["module", "class", "output", "parameters", "trainable", "memory"]
    read = {
        name: [column(table, name, title) for title in ("class", "output", "parameters", "trainable", "memory")]
        for name in ("(model)", "predictor", "predictor.0", "predictor.1", "predictor.2")
    }
    assert read == {
        "(model)": ["Classifier", "[]", "0", "0", "0 B"],
        "predictor": ["Sequential", "[5, 2]", "0", "0", "0 B"],
        "predictor.0": ["Linear", "[5, 4]", "16", "4", "64 B"],
        "predictor.1": ["BatchNorm1d", "[5, 4]", "8", "8", "72 B"],
        "predictor.2": ["Linear", "[5, 2]", "10", "10", "40 B"],
    }
    assert table.splitlines()[-1].split() == ["total", "34", "22", "176", "B"]


def test_nothing_is_changed():
    """By no forward: not the model, its buffers, modes and attributes, the batch, nor any generator."""
    model, batch = Hostile(), torch.zeros(2, 4)
    model.dropout.eval()
    before = state_of(model, batch)
    assert column(model_summary(model, batch), "norm", "output") == "[2, 4]"
    assert same(state_of(model, batch), before)


def test_a_model_on_a_device_gets_its_batch_there(device):
    """And draws from its generators as before."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).to(device)
    generators = torch.get_device_module(device) if device != "cpu" else torch
    before = generators.get_rng_state()
    assert column(model_summary(model, torch.zeros(2, 4)), "1", "output") == "[2, 3]"
    assert torch.equal(generators.get_rng_state(), before)


def test_nothing_is_changed_by_a_call_that_fails():
    """And the error says in which module, and in which mode."""
    model, batch = Hostile(), torch.zeros(1, 4)  # one row has no variance
    before = state_of(model, batch)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        model_summary(model, batch)
    assert caught.value.__notes__ == ["while model_summary called the model with the batch, in training mode, in 'norm'"]
    assert same(state_of(model, batch), before)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, *, x, scale=1.0):
        return {"logits": self.linear(x) * scale, "more": (x, None, "text")}


def test_a_mapping_is_keywords():
    """Outputs in containers are told by their shapes; what is no tensor, by its class."""
    table = model_summary(ByName(), {"x": torch.zeros(5, 2), "scale": 2.0})
    assert "{logits: [5, 3], more: ([5, 2], None, str)}" in table


PAIR = nn.Bilinear(2, 3, 4)
BATCHES = {
    "a tuple": (torch.zeros(5, 2), torch.zeros(5, 3)),
    "a list of a DataLoader": [torch.zeros(5, 2), torch.zeros(5, 3)],
    "arrays": (np.zeros((5, 2), np.float32), np.zeros((5, 3), np.float32)),
    "examples": [(np.zeros(2, np.float32), np.zeros(3, np.float32))] * 5,
    "a batch of an iterator": SerialIterator([(torch.zeros(2), torch.zeros(3))] * 5, 5).next(),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_is_what_loaders_and_iterators_give(batch):
    """Two arguments here."""
    assert column(model_summary(PAIR, batch), "(model)", "output") == "[5, 4]"


def test_shared_modules_and_parameters_count_once():
    """A module in two places has one line, with every shape that it returned; tied weights count where they come first."""
    shared = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(shared, nn.Unflatten(0, (2, 1)), shared, nn.Linear(4, 4, bias=False))
    model[3].weight = shared.weight
    table = model_summary(model, torch.zeros(2, 4))
    assert [line.split()[0] for line in table.splitlines()[2:-2]] == ["(model)", "0", "1", "3"]
    assert column(table, "0", "output") == "[2, 4]; [2, 1, 4]"
    assert [column(table, name, "parameters") for name in "03"] == ["16", "0"]
    assert table.splitlines()[-1].split() == ["total", "16", "16", "64", "B"]


def test_without_a_batch_there_are_no_shapes():
    """And the model is not called."""
    table = model_summary(nn.Sequential(nn.Linear(2, 3)))
    assert (column(table, "0", "output"), column(table, "0", "parameters")) == ("-", "9")


@pytest.mark.parametrize("batch", [None, torch.zeros(1, 2)], ids=["without a batch", "with a batch"])
def test_lazy_modules_are_refused(batch):
    """The first call would make their parameters; after it, they are modules as any other."""
    model = nn.Sequential(nn.Identity(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'1' is a LazyLinear, .*; call the model once with a batch first"):
        model_summary(model, batch)
    model(torch.zeros(1, 2))
    assert column(model_summary(model, batch), "1", "parameters") == "9"


def test_other_objects_are_refused():
    """Such as a mapping of several models."""
    with pytest.raises(TypeError, match=r"a torch.nn.Module, got \{'main': .*; of several models call it for each"):
        model_summary({"main": nn.Linear(1, 1)})


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("it holds a socket")


def test_a_model_that_cannot_be_copied_has_a_table_without_shapes():
    """Rather than being changed by a call."""
    with pytest.raises(TypeError, match=r"cannot be copied \(RuntimeError: it holds a socket\); leave out the batch"):
        model_summary(Uncopyable(2, 3), torch.zeros(1, 2))
    assert column(model_summary(Uncopyable(2, 3)), "(model)", "parameters") == "9"


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", ["spectral_norm", "weight_norm"])
def test_reparametrized_layers_have_shapes(norm):
    """Those keep a result with a graph as an attribute, which PyTorch does not copy."""
    model = getattr(nn.utils, norm)(nn.Linear(2, 3))
    model(torch.zeros(1, 2))
    before = copy.deepcopy({key: value.detach() for key, value in model.state_dict().items()})
    assert column(model_summary(model, torch.zeros(5, 2)), "(model)", "output") == "[5, 3]"
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_compiled_model_is_not_compiled_for_it():
    """It is looked through, and compiled parts run as they were written."""

    def refuse(graph, inputs):
        raise AssertionError("compiled")

    model = torch.compile(nn.Sequential(torch.compile(nn.Linear(2, 3), backend=refuse)), backend=refuse)
    table = model_summary(model, torch.zeros(5, 2))
    assert column(table, "0", "output") == "[5, 3]"
    assert "_orig_mod" not in table


def test_a_model_that_differentiates_in_its_forward_has_shapes():
    """Gradients are on, as in an update, and none reaches the model."""

    class Force(nn.Linear):
        def forward(self, x):
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
            return force

    model = Force(2, 3)
    assert column(model_summary(model, torch.zeros(5, 2)), "(model)", "output") == "[5, 2]"
    assert model.weight.grad is None


def test_a_model_on_the_meta_device_has_shapes():
    """The batch goes where the model is."""
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    assert column(model_summary(model, torch.zeros(5, 2)), "(model)", "output") == "[5, 3]"


def test_models_that_need_all_ranks_are_refused(tmp_path):
    """Where only one rank asked for the table, it would wait forever; without a batch nothing is called."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="call it before fully_shard or parallelize_module, or leave out the batch"):
            model_summary(model, torch.zeros(5, 2))
        assert column(model_summary(model), "(model)", "parameters") == "9"
    finally:
        dist.destroy_process_group()
