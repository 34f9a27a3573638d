"""StandardUpdater: what it takes, what it calls, what it reports, and what it refuses."""

from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import Regression, assert_close, observed_update, parameters_of, regression_data, same_regression, updater_of

from chainring.converters import concat_examples
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, UpdateCallbacks


def raw_loop(data, batch_size, updates, lr=0.1):
    """The same training by hand."""
    model = same_regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    x, t = data.tensors
    for number in range(updates):
        rows = [(number * batch_size + i) % len(x) for i in range(batch_size)]
        optimizer.zero_grad()
        (model.predictor(x[rows]) - t[rows]).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Echo(nn.Module):
    """Remembers what it was called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        self.called_with = (args, kwargs)
        return self.weight * 1.0


@pytest.mark.parametrize("callbacks", [None, UpdateCallbacks(update_on_start=lambda context: None)])
def test_an_update_is_that_of_the_plain_loop(callbacks):
    """Five updates, with stages and without, give bit for bit the parameters of zero_grad, backward, step."""
    updater = updater_of(4, callbacks=callbacks)
    for _ in range(5):
        updater.update()
    assert all(map(torch.equal, parameters_of(updater), raw_loop(regression_data(), 4, 5)))


def test_single_parts_are_called_main_and_found_by_name():
    """One iterator, model, optimizer each is registered as "main"; another name is refused with the known ones."""
    updater = updater_of()
    assert list(updater.get_all_iterators()) == list(updater.get_all_models()) == list(updater.get_all_optimizers())
    assert updater.get_optimizer("main").param_groups[0]["params"][0] is updater.get_model("main").predictor.weight
    with pytest.raises(KeyError, match=r"no model 'mian'; registered: \['main'\]"):
        updater.get_model("mian")


def test_a_gradient_left_over_from_outside_does_not_enter_an_update():
    """An update begins with no gradients."""
    updater = updater_of()
    for parameter in updater.get_model("main").parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    updater.update()
    assert all(map(torch.equal, parameters_of(updater), raw_loop(regression_data(), 4, 1)))


@pytest.mark.parametrize("device", [None, -1, "cpu", torch.device("cpu")])
def test_the_converter_gets_the_batch_and_the_device(device):
    """None stays None, every way of naming the host is the host."""
    seen = []

    def convert(batch, device):
        seen.append((len(batch), device))
        return concat_examples(batch, device)

    updater_of(4, converter=convert, device=device).update()
    assert seen == [(4, None if device is None else torch.device("cpu"))]


def test_models_are_moved_once_at_construction():
    """A model that stands elsewhere later stays there: its device is not looked at every update."""
    calls = []

    class Moved(Regression):
        def to(self, *args, **kwargs):
            calls.append(args)
            return super().to(*args, **kwargs)

    updater = updater_of(model=Moved(), device="cpu")
    updater.update()
    updater.update()
    assert calls == [(torch.device("cpu"),)]


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("converted", "args", "kwargs"),
    [
        ((1, 2), (1, 2), {}),
        (Pair(1, 2), (1, 2), {}),
        ({"a": 1, "b": 2}, (), {"a": 1, "b": 2}),
        ([1, 2], ([1, 2],), {}),
        (3, (3,), {}),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_converted_batch_is_passed_by_its_form(converted, args, kwargs, accumulate):
    """A tuple by position, a mapping by keyword, anything else as one; a loss_func gets the model before that."""
    model, calls = Echo(), []

    def loss_func(*args, **kwargs):
        calls.append((args, kwargs))
        return model(*args)

    for function in (None, loss_func):
        iterator = SerialIterator([0.0, 1.0], 1)
        converter = lambda batch, device: converted  # noqa: E731
        StandardUpdater(iterator, sgd(model), model, converter=converter, loss_func=function, accumulate=accumulate).update()
        if function is None:
            assert model.called_with == (args, kwargs)
    assert calls[0] == ((model, *args), kwargs)


def test_a_plain_loss_is_reported_as_main_loss():
    """A loss function that reports nothing still shows up."""
    updater = updater_of(loss_func=lambda model, x, t: (model.predictor(x) - t).abs().mean())
    x, t = regression_data().tensors
    expected = (same_regression().predictor(x[:4]) - t[:4]).abs().mean()
    assert_close(observed_update(updater), {"main/loss": expected.detach()})


def test_a_loss_that_the_model_reported_itself_is_kept():
    """The default does not overwrite main/loss."""

    class Halving(Regression):
        def forward(self, x, t):
            return super().forward(x, t) / 2

    torch.manual_seed(3)
    observation = observed_update(updater_of(model=Halving()))
    assert_close(observation, observed_update(updater_of()))


def test_all_scalars_of_a_returned_mapping_are_reported_under_the_models_name():
    """Arrays and strings in it are not."""

    def loss_func(model, x, t):
        return {"loss": model.predictor(x).mean(), "count": 4, "name": "a", "rows": x}

    observation = observed_update(updater_of(loss_func=loss_func))
    assert sorted(observation) == ["main/count", "main/loss"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failing_update_gives_its_batches_back(accumulate):
    """The iterator agrees with iteration, so the next update trains on the very batch that failed."""
    batches, failing = [], [True]

    def loss_func(model, x, t):
        batches.append(x[0, 0].item())
        if failing[0] and len(batches) == accumulate:
            raise ArithmeticError("once")
        return model(x, t)

    updater = updater_of(4, loss_func=loss_func, accumulate=accumulate)
    with pytest.raises(ArithmeticError):
        updater.update()
    assert (updater.iteration, updater.epoch_detail, updater.get_iterator("main").epoch_detail) == (0, 0.0, 0.0)
    failing[0] = False
    updater.update()
    assert batches[:accumulate] == batches[accumulate:]


@pytest.mark.parametrize("stage", ["next_batch", "autocast", "backward"])
def test_a_subclass_may_replace_a_single_stage(stage):
    """An overridden stage is used although update_core is the default."""
    calls = []

    class Own(StandardUpdater):
        pass

    def replaced(self, *args, **kwargs):
        calls.append(stage)
        return getattr(StandardUpdater, stage)(self, *args, **kwargs)

    setattr(Own, stage, replaced)
    updater_of(kind=Own).update()
    assert calls == [stage]


def test_the_weight_of_an_update_is_its_number_of_examples():
    """A short last batch counts for less in a mean over updates."""
    updater = updater_of(8, repeat=False)
    weights = [updater.update() or updater.weight for _ in range(2)]
    assert weights == [8, 4]


# Refusals: rule, value, remedy.


def construct(**settings):
    return lambda: updater_of(**settings)


def foreign_optimizer():
    model = Regression()
    StandardUpdater(SerialIterator([0], 1), {"critic": sgd(Regression())}, model)


def swapped():
    model = Regression()
    StandardUpdater(SerialIterator([0], 1), model, sgd(model))


def third(thing):
    return lambda: StandardUpdater(SerialIterator([0], 1), sgd(Regression()), thing)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (third(concat_examples), TypeError, ["third the model", "concat_examples", "converter= is a keyword"]),
        (third(Regression), TypeError, ["third the model", "the class Regression", "call the class"]),
        (swapped, TypeError, ["an iterator, an optimizer and third the model", "SGD"]),
        (foreign_optimizer, ValueError, ["'critic'", "belong to none of ['main']", "model={"]),
        (lambda: third(Regression())(), ValueError, ["must belong to a registered model", "'main'"]),
        (foreign_optimizer, ValueError, ["model={'main': ..., 'loose': torch.nn.ParameterList([parameter])}"]),
        (construct(accumulate=0), ValueError, ["at least 1", "got 0"]),
        (construct(accumulate=2.0), TypeError, ["an integer", "got 2.0"]),
        (construct(accumulate=True), TypeError, ["an integer", "got True"]),
        (construct(converter=3), TypeError, ["a batch and a device", "int"]),
        (construct(callbacks=print), TypeError, ["UpdateCallbacks(update_on_start=f)", "print"]),
        (construct(precision="fp8"), ValueError, ["fp32", "bf16", "fp16", "'fp8'"]),
        (construct(device=99), ValueError, ["device 99", "-1 is the CPU"]),
        (construct(loss_func=3), TypeError, ["loss_func is a function of the model and the inputs", "int"]),
        (construct(loss_func=nn.CrossEntropyLoss()), TypeError, ["the model first", "CrossEntropyLoss", "Classifier"]),
        (construct(loss_func=F.mse_loss), TypeError, ["the model first", "mse_loss", "lambda model, x, t"]),
        (construct(loss_func=partial(F.huber_loss, delta=2.0)), TypeError, ["the model first", "huber_loss"]),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, kind, words):
    """Each error names the rule, the value and the remedy."""
    with pytest.raises(kind) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("loss_func", "kind", "words"),
    [
        (lambda x, t: x, TypeError, ["the model first", "2 inputs", "(x, t)", "lambda model, x, t"]),
        (lambda model, x, t: model.predictor(x), ValueError, ["a scalar tensor", "(4, 1)", ".mean()"]),
        (lambda model, x, t: 1.0, TypeError, ["a scalar tensor", "float", "loss_func(model, *inputs)"]),
        (lambda model, x, t: None, TypeError, ["NoneType", '{"loss": loss, "weight": 0} to skip a batch']),
        (lambda model, x, t: {"los": x}, TypeError, ['a mapping that has "loss"', "dict"]),
        (lambda model, x, t: t.mean(), ValueError, ["depends on no parameter", "detach()"]),
        (
            lambda model, x, t: {"loss": model(x, t), "weight": np.ones(3)},
            ValueError,
            ['"weight"', "one number", "(3,)", "mask.sum()"],
        ),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_cannot_be_trained_on_is_refused_before_anything_changes(loss_func, kind, words, accumulate):
    """The first update raises with rule, value and remedy, and leaves parameters and iterator alone."""
    updater = updater_of(4, loss_func=loss_func, accumulate=accumulate)
    before = parameters_of(updater)
    with pytest.raises(kind) as caught:
        updater.update()
    assert [word for word in words if word not in str(caught.value)] == []
    assert all(map(torch.equal, before, parameters_of(updater)))
    assert updater.get_iterator("main").epoch_detail == 0.0


def test_a_loss_module_of_ones_own_may_take_the_model_first():
    """Only torch's losses are known to take no model."""

    class Own(nn.Module):
        def forward(self, model, x, t):
            return model(x, t)

    updater = updater_of(loss_func=Own())
    updater.update()
    assert updater.iteration == 1
