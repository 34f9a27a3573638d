"""DataParallel: the module on several devices is the module on one."""

import copy

import pytest
import torch
from nets import GRID, assert_close, batch, gradients, hosts, net
from torch import nn

from chainring import Reporter, report
from chainring.nn import Classifier
from chainring.parallel import DataParallel


@GRID
def test_outputs_and_gradients_are_those_of_one_device(number, rows):
    """For 1 to 5 devices and 0 to 17 rows; gradients of the gathered outputs are summed into the module's."""
    x, mask = batch(rows)
    plain, parallel = net(), DataParallel(net(), hosts(number))
    answers = [model(x, mask=mask) for model in (plain, parallel)]
    for answer in answers:
        (answer["y"].square().sum() + answer["both"][0].sum()).backward()
    assert_close(answers[1], answers[0])
    assert_close(gradients(parallel.module), gradients(plain))


@GRID
def test_a_scalar_loss_and_what_is_reported_are_those_of_one_device(number, rows):
    """A mean over rows stays one number, its gradient exact for parts of unequal length."""
    x, t = batch(rows + 1)[0], torch.arange(rows + 1) % 4
    results = []
    for wrap in (lambda model: model, lambda model: DataParallel(model, hosts(number))):
        torch.manual_seed(3)
        model = wrap(Classifier(nn.Linear(3, 4).double()))
        reporter, observation = Reporter(), {}
        reporter.add_observers("main", model.named_modules())
        with reporter.scope(observation):
            loss = model(x, t)
        loss.backward()
        observation["main/accuracy"] = observation["main/accuracy"].double()
        results.append((loss, observation, gradients(model)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert_close(results[1][0], results[0][0])
    assert_close(results[1][2], results[0][2])


def test_a_submodule_reports_under_its_own_name():
    """Each replica is the registered module, and its reports are weighted by rows."""
    x, _ = batch(5)
    seen = []
    for model in (net(), DataParallel(net(), hosts(3))):
        reporter = Reporter()
        reporter.add_observers("main", model.named_modules())
        with reporter.scope({}):
            model(x)
            seen.append(dict(reporter.observation))
    assert list(seen[1]) == ["main/hidden/size"]
    assert_close(seen[1], seen[0])


def test_a_loss_with_a_weight_is_averaged_by_it():
    """As in an update of parts: the number of unpadded tokens, which adds up."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x, mask):
            loss = (self.factor * x * mask).square().sum() / mask.sum()
            report({"seen": loss})
            return {"loss": loss, "weight": mask.sum()}

    x, mask = batch(5)[0], torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]])
    answers = []
    for model in (Masked(), DataParallel(Masked(), hosts(3))):
        reporter, observation = Reporter(), {}
        with reporter.scope(observation):
            answer = model(x, mask)
        answer["loss"].backward()
        answers.append((answer, observation, gradients(model)))
    assert_close(answers[1], answers[0])
    assert answers[1][0]["weight"] == 8


def test_a_plain_torch_optimizer_trains_it():
    """No optimizer of its own, so nothing that a wrapper could fail to pass on."""
    x, _ = batch(7)
    models = [net(), DataParallel(net(), hosts(3))]
    for model in models:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(4):
            optimizer.zero_grad()
            model(x)["both"][0].square().mean().backward()
            optimizer.step()
            scheduler.step()
    assert_close(models[1].state_dict(), models[0].state_dict())


def test_no_replica_is_kept():
    """Parameters that change between two calls are used at once, on every device."""
    x, _ = batch(6)
    parallel = DataParallel(net(), hosts(3))
    parallel(x)
    with torch.no_grad():
        parallel.module.hidden.weight.add_(1)
    assert_close(parallel(x), parallel.module(x))


def test_a_mean_keeps_the_precision_of_the_loss():
    """A weight of many digits does not make a half-precision loss a single-precision one."""

    class Half(nn.Module):
        def forward(self, x):
            return {"loss": x.half().mean(), "weight": torch.tensor(float(len(x)))}

    loss = DataParallel(Half(), hosts(2))(torch.arange(3.0))["loss"]
    assert (loss.dtype, loss.item()) == (torch.float16, 1.0)


class Seen(nn.Module):
    """Takes down where it runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.devices = []

    def forward(self, x):
        self.devices.append({tensor.device.type for tensor in (x, self.weight, self.mean)})


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_data_parameters_and_buffers_of_a_part_are_on_its_device(rows):
    """Also where there are fewer rows than devices; afterwards the module has its own again."""
    parallel = DataParallel(Seen(), ["cpu", "meta", "meta"])
    parallel(torch.ones(rows, 2))
    assert parallel.module.devices == [{"cpu"}, {"meta"}, {"meta"}][:rows]
    assert parallel.weight.is_leaf
    assert {tensor.device.type for tensor in (parallel.weight, parallel.mean)} == {"cpu"}


def test_outputs_are_on_the_first_device_unless_another_is_named():
    """Name the device of the labels; a single device may have another output device."""
    x, _ = batch(4)
    assert DataParallel(net(), ["cpu", "cpu"])(x)["y"].device.type == "cpu"
    assert DataParallel(net(), ["cpu"])(x)["y"].device.type == "cpu"
    for number in (1, 2):
        assert DataParallel(net(), hosts(number), output_device="meta")(x)["y"].device.type == "meta"


def test_arguments_reach_forward_as_they_were_passed():
    """By position and by keyword, with defaults and values that are not tensors."""

    class Echo(nn.Module):
        def forward(self, x, *rest, **options):
            return x, rest, options

    x = torch.arange(4.0)
    out = DataParallel(Echo(), hosts(3))(x, None, (x, "a"), k=1, t=x)
    torch.testing.assert_close(out[0], x)
    assert out[1][0] is None
    assert out[1][1][0].tolist() == out[2]["t"].tolist() == x.tolist()
    assert (out[1][1][1], out[2]["k"]) == ("a", 1)


def test_arguments_of_unlike_length_are_refused_by_name():
    """The error is raised on one device too, so that it is found on a machine with a single one."""
    for number in (1, 2):
        with pytest.raises(ValueError, match=r"inputs\[0\] has 4, inputs\['mask'\] has 1"):
            DataParallel(net(), hosts(number))(batch(4)[0], mask=torch.ones(1, 4))


def test_without_rows_to_divide_it_runs_once():
    """A model that is called with nothing, or with a number, is not asked by every device."""

    class Count(nn.Module):
        def forward(self, start=0):
            return torch.arange(start, 3)

    assert DataParallel(Count(), hosts(3))().tolist() == [0, 1, 2]
    assert DataParallel(Count(), hosts(3))(1).tolist() == [1, 2]


def test_buffers_keep_what_the_first_part_made_of_them():
    """Statistics of a BatchNorm, and a count of forwards, which every part finds as it was before."""

    class Counting(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) + self.num_batches_tracked

    plain, parallel = Counting(3), DataParallel(Counting(3), hosts(3))
    x = torch.randn(9, 3)
    out = parallel(x)
    torch.testing.assert_close(out[:3], plain(x[:3]))
    torch.testing.assert_close(parallel.state_dict(), plain.state_dict())
    torch.testing.assert_close(out[3:6], Counting(3)(x[3:6]))


def test_recurrent_layers_use_and_train_their_own_weights():
    """They keep a list of their weights beside the registered ones; here the rows lie in dimension 1."""
    torch.manual_seed(3)
    plain = nn.LSTM(3, 2)
    parallel = DataParallel(copy.deepcopy(plain), hosts(2), dim=1)
    x = torch.randn(4, 5, 3)
    for model in (plain, parallel):
        model(x)[0].sum().backward()
    torch.testing.assert_close(gradients(parallel), gradients(plain))
    torch.testing.assert_close(parallel(x), plain(x))
