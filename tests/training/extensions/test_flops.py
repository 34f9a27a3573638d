"""Throughput(flops=True): the operations of an update, as a hand counts them, and what part they are of a device's peak."""

import copy
import time

import pytest
import torch
from regressions import Regression, updater_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from chainring import training
from chainring.iterators import SerialIterator
from chainring.training import extensions
from chainring.training.extensions._flops import peaks_of

ROWS = 6  # of a batch


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock, on which each update takes half a second."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Net(nn.Module):
    """Returns the mean of the squares of what a function of some layers returns."""

    def __init__(self, function, *layers):
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), function

    def forward(self, x):
        return self.function(x, *self.layers).square().mean()


def updater_for(net, x, kind=training.StandardUpdater, **settings):
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    return kind(SerialIterator(list(x), ROWS, shuffle=False), optimizer, net, **settings)


def values_of(out, clock, updater, iterations=2, **settings):
    """What is reported of the last iteration; each takes half a second."""
    seen = {}

    def go(trainer):
        clock[0] += 0.5

    trainer = training.Trainer(updater, (iterations, "iteration"), out=str(out))
    trainer.extend(go, priority=900)
    trainer.extend(extensions.Throughput((1, "iteration"), **{"flops": True, **settings}))
    trainer.extend(lambda trainer: seen.update(trainer.observation), "look")
    trainer.run()
    return {key.removeprefix("throughput/"): float(value) for key, value in seen.items() if "throughput/" in key}


def flops_of(*arguments, **settings):
    return round(values_of(*arguments, **settings)["model_flops_per_second"] / 2)


def attention(x, project, leave):
    query, key, value = project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return leave(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def tied(indices, embedding):
    return embedding(indices) @ embedding.weight.T


def linear(rows, n_in, n_out, *, is_first):
    """A product in the forward, and in the backward one for the weights and, unless it comes first, one for the input."""
    return 2 * rows * n_in * n_out * (2 if is_first else 3)


def normed(x, first, norm, second):
    return second(norm(first(x)).relu())


IMAGE, SERIES, WORDS = torch.randn(ROWS, 4, 8, 8), torch.randn(ROWS, 5, 8), torch.randint(0, 11, (ROWS, 5))
MODELS = {
    "perceptron": (
        Net(lambda x, a, b: b(a(x).relu()), nn.Linear(8, 16), nn.Linear(16, 3)),
        torch.randn(ROWS, 8),
        linear(ROWS, 8, 16, is_first=True) + linear(ROWS, 16, 3, is_first=False),
    ),
    "convolutions and BatchNorm": (
        Net(normed, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3, stride=2)),
        IMAGE,
        2 * 2 * ROWS * 36 * 6 * 4 * 9 + 3 * 2 * ROWS * 4 * 2 * 6 * 9,
    ),
    "a grouped convolution": (
        Net(lambda x, a, b: b(a(x)), nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.Conv2d(8, 8, 3, groups=8)),
        IMAGE,
        2 * 2 * ROWS * 64 * 8 * 1 * 9 + 3 * 2 * ROWS * 36 * 8 * 1 * 9,
    ),
    "a transposed convolution": (
        Net(lambda x, a: a(x), nn.ConvTranspose2d(4, 6, 2, stride=2)),
        IMAGE,
        2 * 2 * ROWS * 64 * 4 * 6 * 4,
    ),
    "attention": (
        Net(attention, nn.Linear(8, 24), nn.Linear(8, 8)),
        SERIES,
        linear(5 * ROWS, 8, 24, is_first=True) + linear(5 * ROWS, 8, 8, is_first=False) + 3 * 2 * (2 * ROWS * 2 * 5 * 5 * 4),
    ),
    "an LSTM": (
        Net(lambda x, a: a(x)[0], nn.LSTM(8, 6, num_layers=2, batch_first=True)),
        SERIES,
        3 * 2 * 5 * ROWS * 4 * 6 * (8 + 6 + 6 + 6),
    ),
    "an embedding, tied to the output": (Net(tied, nn.Embedding(11, 8)), WORDS, linear(5 * ROWS, 8, 11, is_first=False)),
    "an embedding alone, beside one product": (
        Net(lambda x, a, b: b(a(x).mean(1)), nn.Embedding(11, 8), nn.Linear(8, 2)),
        WORDS,
        linear(ROWS, 8, 2, is_first=False),
    ),
    "a layer used twice": (
        Net(lambda x, a: a(a(x).tanh()), nn.Linear(8, 8)),
        torch.randn(ROWS, 8),
        linear(ROWS, 8, 8, is_first=True) + linear(ROWS, 8, 8, is_first=False),
    ),
    "a layer that is not trained": (
        Net(lambda x, a, b: b(a(x)), nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 3)),
        torch.randn(ROWS, 8),
        2 * ROWS * 8 * 16 + linear(ROWS, 16, 3, is_first=True),
    ),
    "a product with a vector": (
        Net(lambda x, a: torch.mv(x, a.weight[0]), nn.Linear(8, 1)),
        torch.randn(ROWS, 8),
        2 * 2 * ROWS * 8,
    ),
}


@pytest.mark.parametrize(("net", "x", "by_hand"), MODELS.values(), ids=MODELS)
def test_the_operations_of_a_model_are_those_that_a_hand_counts(tmp_path, clock, net, x, by_hand):
    """Two for each multiplication with its addition; activations, norms and optimizers are left out."""
    assert flops_of(tmp_path, clock, updater_for(copy.deepcopy(net), x)) == by_hand


PERCEPTRON, INPUTS, BY_HAND = MODELS["perceptron"]


@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"virtual_ranks": 3}, {"accumulate": 2, "virtual_ranks": 2}])
def test_micro_batches_and_virtual_ranks_add_up(tmp_path, clock, settings):
    updater = updater_for(copy.deepcopy(PERCEPTRON), INPUTS, **settings)
    assert flops_of(tmp_path, clock, updater) == BY_HAND * settings.get("accumulate", 1)


def test_what_an_audit_computes_again_does_not_count(tmp_path, clock):
    updater = updater_for(copy.deepcopy(PERCEPTRON), INPUTS, virtual_ranks=3, audit=2)
    assert flops_of(tmp_path, clock, updater) == BY_HAND


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_what_gradient_checkpointing_computes_again_does_not_count(tmp_path, clock, is_reentrant):
    """Only what the model needs, which is what MFU is about."""
    net = Net(lambda x, a, b: b(checkpoint(lambda y: a(y).relu(), x, use_reentrant=is_reentrant)), *PERCEPTRON.layers)
    needs_gradient = torch.randn(ROWS, 8).requires_grad_()  # as a reentrant one demands
    updater = updater_for(copy.deepcopy(net), [torch.zeros(8)] * ROWS, converter=lambda batch, device: needs_gradient)
    assert flops_of(tmp_path, clock, updater) == BY_HAND + 2 * ROWS * 8 * 16


def test_a_gradient_of_a_gradient_counts(tmp_path, clock):
    """Its backward runs with a graph, as checkpointing does."""

    def penalty(x, layer):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        return gradient

    net = Net(penalty, nn.Linear(8, 4))
    # x W^T, g W, and in the backward two for each of them.
    assert flops_of(tmp_path, clock, updater_for(net, INPUTS)) == 2 * ROWS * 8 * 4 * 6


class Adversaries(training.StandardUpdater):
    """Steps twice in an update."""

    def update_core(self):
        model, x = self.get_model("main"), self.next_batch()
        for _ in range(2):
            self.backward(model(x))
            self.step()


def test_an_update_core_of_your_own_counts_what_it_computes(tmp_path, clock):
    updater = updater_for(copy.deepcopy(PERCEPTRON), INPUTS, Adversaries)
    assert flops_of(tmp_path, clock, updater) == 2 * BY_HAND


def test_a_model_that_runs_without_gradients_counts_its_forward(tmp_path, clock):
    """In inference mode, too, where torch does not take a layer to pieces."""
    teacher = nn.Linear(8, 3)

    def loss(model, x):
        with torch.inference_mode():
            target = teacher(x)
        return model(x) + target.clone().square().mean() * 0

    updater = updater_for(copy.deepcopy(PERCEPTRON), INPUTS, loss_func=loss)
    assert flops_of(tmp_path, clock, updater) == BY_HAND + 2 * ROWS * 8 * 3


def test_operations_follow_the_examples_of_batches_that_differ(tmp_path, clock):
    """The first update has six rows, the second the rest of the data, three."""
    net, loader = copy.deepcopy(PERCEPTRON), torch.utils.data.DataLoader(torch.randn(9, 8), ROWS)
    updater = training.StandardUpdater(loader, torch.optim.SGD(net.parameters(), 0.01), net)
    assert flops_of(tmp_path, clock, updater) == BY_HAND // 2


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"virtual_ranks": 2}, {"precision": "bf16"}])
def test_counting_changes_no_bit(tmp_path, settings):
    """Of parameters, random numbers and what is reported; dropout and an LSTM in it, or a GRU.

    Not every processor computes an LSTM of torch in bfloat16.
    """
    ends, recurrent = [], nn.GRU if "precision" in settings else nn.LSTM
    for flops in (None, True):
        torch.manual_seed(7)
        net = Net(lambda x, a, b, c: c(b(a(x)[0])), recurrent(8, 6, batch_first=True), nn.Dropout(), nn.Linear(6, 3))
        updater = updater_for(net, SERIES, **settings)
        trainer = training.Trainer(updater, (3, "iteration"), out=str(tmp_path / str(flops)))
        trainer.extend(extensions.Throughput((1, "iteration"), flops=flops))
        losses = []
        trainer.extend(lambda trainer, losses=losses: losses.append(float(trainer.observation["main/loss"])), "look")
        trainer.run()
        ends.append(([*net.parameters(), torch.get_rng_state()], losses))
    (one, losses), (other, losses_again) = ends
    assert losses == losses_again
    assert all(map(torch.equal, one, other))


def test_the_part_of_the_peak_is_reported_where_it_is_given(tmp_path, clock):
    """MFU; a peak alone asks for the count, too."""
    values = values_of(tmp_path, clock, updater_for(copy.deepcopy(PERCEPTRON), INPUTS), flops=None, peak_flops=1e6)
    assert values["mfu"] == pytest.approx(2 * BY_HAND / 1e6)


def test_without_a_known_peak_there_is_no_part_of_it(tmp_path, clock):
    """As on a CPU; and nothing is counted that is not asked for."""
    values = values_of(tmp_path, clock, updater_for(copy.deepcopy(PERCEPTRON), INPUTS))
    assert "mfu" not in values
    values = values_of(tmp_path / "not", clock, updater_for(copy.deepcopy(PERCEPTRON), INPUTS), flops=None)
    assert "model_flops_per_second" not in values


def test_an_operation_without_a_formula_is_named(tmp_path, clock):
    """Rather than taken for nothing."""
    net = Net(lambda x, a: a(x, x), nn.Bilinear(8, 8, 2))
    with pytest.warns(UserWarning, match=r"no formula for aten\._trilinear; torch\.utils\.flop_counter\.register_flop"):
        values = values_of(tmp_path, clock, updater_for(net, INPUTS))
    assert "model_flops_per_second" not in values


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports its compiler
def test_a_function_that_torch_compile_was_given_is_refused(tmp_path):
    """It would run as it stands while the update is counted, with other last bits."""
    compiled = torch.compile(lambda y: y @ y.T)
    net = Net(lambda x, a: compiled(a(x)), nn.Linear(8, 4))
    trainer = training.Trainer(updater_for(net, INPUTS), (2, "iteration"), out=str(tmp_path))
    trainer.extend(extensions.Throughput(flops=True))
    with pytest.raises(RuntimeError, match=r"leave flops out, or compile the model"):
        trainer.run()


class Drawing(Regression):
    """Draws random numbers in its forward, counts its calls, and reports."""

    calls = 0

    def forward(self, x, t):
        self.calls += 1
        return super().forward(nn.functional.dropout(x), t)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports its compiler
def test_a_compiled_model_is_counted_on_a_copy_without_data(tmp_path, clock):
    """Which draws no random number and changes nothing; compiled it runs in every update, the first one too."""

    def run(flops, backend=lambda graph, inputs: graph.forward):
        torch._dynamo.reset()
        torch.manual_seed(4)
        model = Drawing()
        torch.manual_seed(4)
        model.compile(backend=backend)
        values = values_of(tmp_path / str(flops), clock, updater_of(model), 3, flops=flops)
        return values, model

    (values, counted), (_, plain) = run(True), run(False)
    assert values["model_flops_per_second"] == 2 * linear(4, 3, 1, is_first=True)
    assert counted.calls == plain.calls
    assert all(map(torch.equal, counted.parameters(), plain.parameters()))


@pytest.mark.parametrize("wrong", [1, 312e12, "True"])
def test_flops_is_a_flag(wrong):
    with pytest.raises(TypeError, match="flops is True to count the operations of an update, or False; got"):
        extensions.Throughput(flops=wrong)


@pytest.mark.parametrize("settings", [{"peak_flops": 0}, {"peak_flops": "fast"}, {"flops": False, "peak_flops": 1e12}])
def test_a_peak_is_a_number_above_0_of_what_is_counted(settings):
    with pytest.raises(ValueError, match="peak_flops is the operations a second that one device can do, a number above 0"):
        extensions.Throughput(**settings)


NAMES = {  # as drivers call them, with their peak in half precision and in float32 with and without TF32
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12, 19.5e12),
    "NVIDIA H100 80GB HBM3": (989.4e12, 494.7e12, 66.9e12),
    "NVIDIA H100 PCIe": (756e12, 378e12, 51.2e12),
    "NVIDIA H100 NVL": (835.5e12, 417.5e12, 60e12),
    "NVIDIA H200": (989.4e12, 494.7e12, 66.9e12),
    "NVIDIA B200": (2250e12, 1100e12, None),
    "NVIDIA L4": (121e12, 60e12, 30.3e12),
    "NVIDIA L40S": (362.05e12, 183e12, 91.6e12),
    "NVIDIA A10": (125e12, 62.5e12, 31.2e12),
    "Tesla V100-SXM2-16GB": (None, None, 15.7e12),
    "Tesla T4": (None, None, 8.1e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12, 82.6e12),
    "NVIDIA GeForce RTX 3090": (71e12, 35.6e12, 35.6e12),
    "AMD Instinct MI250X": (191.5e12, None, 47.9e12),
    "AMD Instinct MI300X": (1307.4e12, 653.7e12, 163.4e12),
}
UNKNOWN = [
    "NVIDIA A10G", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H200 NVL", "NVIDIA RTX A4000",
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti", "AMD Instinct MI250X/MI250", "AMD Instinct MI250",
]  # fmt: skip


@pytest.mark.parametrize(("name", "peaks"), [*NAMES.items(), *((name, (None,) * 3) for name in UNKNOWN)])
def test_a_device_is_known_by_its_whole_name(monkeypatch, name, peaks):
    """A smaller one whose name begins alike, or a part of a GPU, is not taken for it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    known = peaks_of(torch.device("cuda"))
    assert (known.get("bfloat16"), known.get("tf32"), known.get("float32")) == pytest.approx(peaks)
