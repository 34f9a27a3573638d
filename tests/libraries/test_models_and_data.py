"""Models of peft, data of pandas and graphs of torch_geometric."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from chainring.datasets import TupleDataset
from chainring.iterators import Batch, SerialIterator
from chainring.training import StandardUpdater, Trainer, extensions

pytest.importorskip("bitsandbytes", reason="make libraries installs them", exc_type=ImportError)
with warnings.catch_warnings(action="ignore"):
    logging.disable(logging.WARNING)
    import pandas
    import peft
    from torch_geometric.data import Batch as Graphs
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    logging.disable(logging.NOTSET)

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x, t):
        return (self.second(self.first(x).tanh())[:, 0] - t).square().mean()


def lora():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    model = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["first", "second"], r=2, lora_dropout=0.5))
    return model, TupleDataset(x, x.sum(1))


def frame():
    table = pandas.DataFrame({"x": range(12), "t": range(12, 24)}, dtype="float32").sample(frac=1, random_state=1)
    return Net(), TupleDataset(table[["x", "t", "x"]].to_numpy(), table["t"].to_numpy())


@pytest.mark.parametrize("make", [lora, frame])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, make):
    """With LoRA and its dropout, and with columns of a frame."""

    def run(out, epochs):
        torch.manual_seed(5)
        model, data = make()
        optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad])
        trainer = Trainer(StandardUpdater(SerialIterator(data, 4), optimizer, model), (epochs, "epoch"), out=str(out))
        trainer.extend(extensions.snapshot(autoload=True))
        trainer.run()
        return [parameter.detach() for parameter in model.parameters()]

    whole, _ = run(tmp_path / "whole", 2), run(tmp_path / "run", 1)
    assert all(map(torch.equal, whole, run(tmp_path / "run", 2)))


class MeanOfGraphs(nn.Module):
    """The squared error of the sum over the nodes of each graph."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(3, 1)

    def forward(self, graphs):
        sums = torch.zeros(graphs.num_graphs).index_add(0, graphs.batch, self.score(graphs.x)[:, 0])
        return (sums - graphs.y).square().mean()


def graphs():
    """Seven of two to four nodes."""
    generator, edges = torch.Generator().manual_seed(2), torch.tensor([[0, 1], [1, 0]])
    nodes = [torch.randn(2 + index % 3, 3, generator=generator) for index in range(7)]
    return [Data(x=x, edge_index=edges, y=x.sum().view(1)) for x in nodes]


def test_the_examples_of_a_batch_of_graphs_are_its_graphs():
    """The mean over batches of four and three is that over all; their nodes and edges are other numbers."""
    torch.manual_seed(5)
    model = MeanOfGraphs()
    whole, cut = (extensions.Evaluator(GraphLoader(graphs(), size), model).evaluate()["main/loss"] for size in (7, 4))
    assert cut == pytest.approx(whole, rel=1e-6)


def test_virtual_ranks_share_graphs_by_a_converter(tmp_path):
    """A batch of graphs cannot be cut by rows; the refusal names what can, which gives the same updates."""

    def train(loader, **settings):
        torch.manual_seed(5)
        model = MeanOfGraphs()
        updater = StandardUpdater(loader, torch.optim.SGD(model.parameters(), 0.01), model, **settings)
        Trainer(updater, (2, "epoch"), out=str(tmp_path)).run()
        return model.score.weight.detach()

    with pytest.raises(ValueError, match=r"is a DataBatch, which cannot be cut.*collate_fn=chainring\.iterators\.Batch"):
        train(GraphLoader(graphs(), 4), virtual_ranks=2)
    examples = DataLoader(graphs(), 4, collate_fn=Batch)
    shared = train(examples, virtual_ranks=2, converter=lambda batch, device: Graphs.from_data_list(list(batch)))
    torch.testing.assert_close(shared, train(GraphLoader(graphs(), 4)))
