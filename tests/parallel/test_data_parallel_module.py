"""DataParallel as a module: its names and state are those of the module that it runs, and it trains as that would."""

import copy
import io
import json

import pytest
import torch
from nets import Net, assert_close, batch, hosts, net
from torch import nn

from chainring import serializers
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.parallel import DataParallel
from chainring.training import StandardUpdater, Trainer, extensions


def test_state_names_and_parameters_are_the_modules_own():
    """No prefix, one copy, and either loads the other's."""
    plain, parallel = net(), DataParallel(net(), hosts(3))
    assert list(parallel.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in parallel.named_buffers()] == ["scale"]
    assert [name for name, _ in parallel.named_modules()] == ["", *(name for name, _ in plain.named_modules())]
    assert set(parallel.parameters()) == set(parallel.module.parameters())
    other = Net()
    parallel.load_state_dict(other.state_dict())
    plain.load_state_dict(parallel.state_dict())
    assert_close(plain.state_dict(), other.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        parallel.load_state_dict({key: value for key, value in other.state_dict().items() if key != "scale"})


def test_inside_a_larger_model_it_leaves_no_trace_in_the_state():
    """The encoder of a model may be parallel where it was saved and plain where it is loaded, and the other way."""
    build = lambda wrap: nn.ModuleDict({"encoder": wrap(Net()), "head": nn.Linear(4, 1)})  # noqa: E731
    plain, parallel = build(lambda module: module), build(lambda module: DataParallel(module, hosts(2)))
    assert list(parallel.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in plain.named_parameters()]
    parallel.load_state_dict(plain.state_dict())
    assert_close(parallel.state_dict(), plain.state_dict())
    build(lambda module: module).load_state_dict(parallel.state_dict())
    assert parallel.get_submodule("encoder.hidden") is parallel["encoder"].module.hidden
    with pytest.raises(RuntimeError, match="Unexpected"):
        parallel.load_state_dict({**plain.state_dict(), "encoder.more": torch.ones(1)})


def test_modes_reach_the_module():
    """train, eval and what else goes through all parts."""
    parallel = DataParallel(nn.Dropout(0.5).eval(), hosts(2))
    assert not parallel.training
    assert parallel.train().module.training
    assert torch.equal(parallel.eval()(torch.ones(4)), torch.ones(4))
    assert parallel.float().zero_grad() is None


def test_an_attribute_that_it_lacks_is_the_modules():
    """Plain attributes, methods and parts; what neither has raises as usual."""
    parallel = DataParallel(net(), hosts(2))
    assert (parallel.width, parallel.twice(), parallel.hidden) == (4, 8, parallel.module.hidden)
    with pytest.raises(AttributeError, match="depth"):
        _ = parallel.depth


class Copying(Net):
    """Has a way of its own to be copied, as modules that torch.fx traces have."""

    def __deepcopy__(self, memo):
        twin = Copying()
        twin.load_state_dict(self.state_dict())
        return twin


@pytest.mark.parametrize("kind", [Net, Copying])
def test_copies_are_parallel_and_independent(kind):
    """By copy and through a file."""
    parallel, x = DataParallel(kind(), hosts(2)), batch(5)[0]
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    for twin in (copy.deepcopy(parallel), torch.load(file, weights_only=False)):
        assert type(twin) is DataParallel
        assert_close(twin(x), parallel(x))
        assert twin.hidden.weight is not parallel.hidden.weight


def test_a_module_that_was_moved_away_is_refused():
    """Rule, place and remedy, before anything runs."""
    parallel = DataParallel(net(), hosts(2)).to("meta")
    with pytest.raises(RuntimeError, match=r"first of its devices, cpu, .* on meta; give the updater device='cpu'"):
        parallel(batch(2)[0])


@pytest.mark.parametrize(
    ("module", "devices", "error", "words"),
    [
        (abs, ["cpu"], TypeError, "takes a module first"),
        (nn.Linear, ["cpu"], TypeError, "takes a module first"),
        (nn.Linear(1, 1), [], ValueError, "at least one device"),
        (nn.Linear(1, 1), "cpu", TypeError, "devices is a sequence"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(module, devices, error, words):
    """Rule, value and remedy."""
    with pytest.raises(error, match=words):
        DataParallel(module, devices)


def trainer_of(out, number, epochs=3):
    """A classifier of 23 examples in batches of 5, on so many devices; without devices the plain model."""
    torch.manual_seed(3)
    model = Classifier(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double())
    model = DataParallel(model, hosts(number)) if number else model
    x = batch(23)[0]
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    updater = StandardUpdater(SerialIterator(data, 5, seed=1), optimizer, model, device="cpu")
    trainer = Trainer(updater, (epochs, "epoch"), out=out)
    trainer.extend(extensions.Evaluator(SerialIterator(data, 4, repeat=False, shuffle=False), model, device="cpu"))
    trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
    trainer.extend(extensions.LogReport())
    return trainer


def rows(trainer):
    log = json.loads((trainer.out / "log").read_text())
    return [{key: value for key, value in row.items() if key != "elapsed_time"} for row in log]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_training_is_that_of_the_plain_model_also_resumed_from_its_snapshot(tmp_path, number):
    """Log rows and parameters to float tolerance, keys without a trace of the wrapper; either continues the other."""
    plain, parallel = trainer_of(tmp_path / "plain", 0), trainer_of(tmp_path / "parallel", number)
    plain.run()
    parallel.run()
    expected = rows(plain)
    assert set(expected[0]) > {"main/loss", "main/accuracy", "validation/main/loss", "validation/main/accuracy"}
    assert [list(row) for row in rows(parallel)] == [list(row) for row in expected]
    for row, twin in zip(rows(parallel), expected, strict=True):
        assert row == pytest.approx(twin, rel=1e-6)  # the accuracy is in single precision
    for source, other in (("plain", number), ("parallel", 0)):
        resumed = trainer_of(tmp_path / f"resumed from {source}", other)
        snapshot = next(path for path in sorted((tmp_path / source).iterdir()) if path.name.startswith("snapshot_iter_5"))
        serializers.load(snapshot, resumed)
        resumed.run()
        assert_close(resumed.updater.get_model("main").state_dict(), plain.updater.get_model("main").state_dict())
        assert rows(resumed)[-1] == pytest.approx(expected[-1], rel=1e-6)
