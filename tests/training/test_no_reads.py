"""What runs in an iteration reads no value of a tensor: on an accelerator, each would wait for the device."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import forked
from chainring import _random, datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import UpdateCallbacks, clip_grad_norm
from chainring.training.extensions import (  # fmt: skip
    Evaluator,
    LogReport,
    PrintReport,
    ProgressBar,
    Recorder,
    SystemMetrics,
    Throughput,
    dump_graph,
    observe_lr,
    snapshot,
)

BATCH, EPOCH, ITERATIONS = 4, 50, 250
OPERATIONS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}
METHODS = {"tolist", "numpy", "item", "cpu", "__float__", "__int__", "__bool__", "__array__", "__format__", "__repr__"}


class Counting(TorchDispatchMode):
    """Counts the operations that give a number, a shape or a decision from the values of a tensor."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func.overloadpacket.__name__ in OPERATIONS
        return func(*args, **(kwargs or {}))


class CountingCalls(TorchFunctionMode):
    """Counts the calls of methods that do the same, some of which are no operations on the host."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads += getattr(func, "__name__", "") in METHODS
        return func(*args, **(kwargs or {}))


def data_of(examples):
    draw = np.random.default_rng(0)
    return draw.standard_normal((examples, 8), dtype=np.float32), draw.integers(0, 3, examples)


def model_of():
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))


def reads_of_the_raw_loop(make_optimizer, device):
    """In one iteration: an optimizer may count its steps in a tensor."""
    model = model_of().to(device)
    optimizer = make_optimizer(model.parameters())
    x, t = (torch.from_numpy(column).to(device) for column in data_of(BATCH))
    with Counting() as operations, CountingCalls() as calls:
        for _ in range(3):
            optimizer.zero_grad()
            model(x, t).backward()
            optimizer.step()
    return (operations.reads + calls.reads) / 3


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("stages", [False, True], ids=["straight", "in stages"])
def test_iterations_read_no_more_than_the_raw_loop(tmp_path, device, optimizer, stages):
    """A thousand in all, with the extensions of the script, and clipping, but in the iterations that write a row."""
    model = model_of()
    callbacks = UpdateCallbacks(update_on_start=clip_grad_norm(1.0)) if stages else None
    data = datasets.TupleDataset(*data_of(BATCH * EPOCH))
    updater = training.StandardUpdater(
        iterators.SerialIterator(data, BATCH), optimizer(model.parameters()), model, callbacks=callbacks
    )
    trainer = training.Trainer(updater, (ITERATIONS, "iteration"), str(tmp_path))
    held_out = iterators.SerialIterator(datasets.TupleDataset(*data_of(8)), BATCH, repeat=False, shuffle=False)
    screen = (tmp_path / "screen").open("w")
    trainer.extend(Evaluator(held_out, model))
    trainer.extend(dump_graph("main/loss"))
    trainer.extend(snapshot(), trigger=(1, "epoch"))
    trainer.extend(LogReport())
    trainer.extend(PrintReport(["epoch", "main/loss", "validation/main/accuracy"], out=screen))
    trainer.extend(ProgressBar(out=screen))
    trainer.extend(observe_lr())
    trainer.extend(Throughput())
    trainer.extend(SystemMetrics())
    counts = []

    def count(trainer):
        counts.append(operations.reads + calls.reads)

    trainer.extend(count, trigger=(1, "iteration"), priority=-1000)
    with Counting() as operations, CountingCalls() as calls, screen:
        trainer.run()
    allowed = reads_of_the_raw_loop(optimizer, device)
    more = [later - earlier - allowed for earlier, later in itertools.pairwise(counts)]
    silent = [extra for iteration, extra in enumerate(more, start=2) if iteration % EPOCH]
    assert len(silent) == ITERATIONS - ITERATIONS // EPOCH - 1
    assert set(silent) == {0}
    assert max(more) > 0  # a row of the log has been read


def test_a_recorder_reads_once_in_32_iterations(tmp_path):
    """The losses, and the digests of the parameters that have been taken since, together.

    At the end of a block the states of the generators are read, which lie on the host.
    """
    model = model_of()
    updater = training.StandardUpdater(
        iterators.SerialIterator(datasets.TupleDataset(*data_of(BATCH * EPOCH)), BATCH),
        torch.optim.SGD(model.parameters(), 0.1),
        model,
    )
    trainer = training.Trainer(updater, (200, "iteration"), str(tmp_path))
    trainer.extend(Recorder((3, "iteration")))
    counts = []

    def count(trainer):
        counts.append(operations.reads + calls.reads)

    trainer.extend(count, trigger=(1, "iteration"), priority=-1000)
    with Counting() as operations, CountingCalls() as calls:
        trainer.run()
    with Counting() as of_generators, CountingCalls() as calls_of_generators:
        _random.digest_generators()
    on_host = of_generators.reads + calls_of_generators.reads
    reads = {iteration: later - earlier for iteration, (earlier, later) in enumerate(itertools.pairwise(counts), start=2)}
    assert [iteration for iteration, number in reads.items() if number and iteration % 32] == [33, 65, 97, 129, 161, 193]
    assert {number for iteration, number in reads.items() if iteration % 32 == 0} == {on_host}


# Tensors without numbers: whoever asks for one gets an error of PyTorch.
FAKE = """
import os, sys
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("numberless")
torch.numberless.is_initialized = lambda: False  # it has no generator
from chainring import converters, datasets, iterators, training
from chainring.nn import Classifier
from chainring.training import extensions

data = datasets.TupleDataset(torch.zeros(64, 8).numpy(), torch.zeros(64, dtype=torch.int64).numpy())
mode = FakeTensorMode(allow_non_fake_inputs=True)


def convert(batch, device):
    with mode:
        return converters.concat_examples(batch, "numberless")


with mode, torch.device("numberless"):
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)))
optimizer = torch.optim.Adam(model.parameters())
updater = training.StandardUpdater(iterators.SerialIterator(data, 8), optimizer, model, converter=convert)
trainer = training.Trainer(updater, (3, "iteration"), sys.argv[1])
trainer.extend(extensions.LogReport(trigger=(100, "iteration")))
trainer.extend(extensions.ProgressBar(out=open(os.devnull, "w")))
trainer.extend(extensions.observe_lr(), trigger=(1, "iteration"))
if sys.argv[2:]:
    trainer.extend(lambda trainer: float(trainer.observation["main/loss"]), trigger=(1, "iteration"), name="reads")
trainer.run()
print(updater.iteration, next(model.parameters()).device)
"""


def test_iterations_run_on_a_device_that_has_no_numbers(tmp_path):
    """What would be read cannot be: the accelerator's tensors have shapes alone."""
    done = forked.run(["-c", FAKE, str(tmp_path)])
    assert done.stdout.splitlines()[-1:] == ["3 numberless:0"], done.stderr
    done = forked.run(["-c", FAKE, str(tmp_path / "reads"), "reads"])
    assert done.returncode != 0
    assert "DataDependentOutputException" in done.stderr
