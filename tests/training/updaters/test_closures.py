"""Optimizers that compute the loss themselves, as often as they like: the default update, and ``step(closure=...)``."""

import copy

import pytest
import torch
from closure_ranks import REPLICATED, SETTINGS, WithBackward, train_each_on_rank, train_on_rank
from parallel_toys import TWO
from toys import Regression, assert_close, observed_update, parameters_of, regression_data, same_regression

from chainring import report
from chainring.iterators import SerialIterator
from chainring.testing import check_updater
from chainring.training import (
    ParallelUpdater,
    StandardUpdater,
    Trainer,
    UpdateCallbacks,
    clip_grad_norm,
    clip_grad_value,
    extensions,
)
from rank_pair import on_two_ranks

PLAIN = {"lr": 0.1, "max_iter": 4, "history_size": 3}
SEARCHING = {"lr": 1.0, "max_iter": 5, "line_search_fn": "strong_wolfe"}


def lbfgs(batch_size=4, *, model=None, kind=StandardUpdater, settings=SEARCHING, data=None, repeat=True, **keywords):
    model = same_regression() if model is None else model
    iterator = SerialIterator(regression_data() if data is None else data, batch_size, repeat=repeat, shuffle=False)
    return kind(iterator, torch.optim.LBFGS(model.parameters(), **settings), model, **keywords)


def by_hand(batch_size, updates, settings=SEARCHING, model=None, clip=lambda parameters: None):
    model = same_regression() if model is None else model
    optimizer = torch.optim.LBFGS(model.parameters(), **settings)
    x, t = regression_data().tensors
    for number in range(updates):
        rows = [(number * batch_size + i) % len(x) for i in range(batch_size)]

        def closure(rows=rows):
            optimizer.zero_grad()
            loss = model(x[rows], t[rows])
            loss.backward()
            clip(model.parameters())
            return loss

        optimizer.step(closure)
    return list(model.parameters())


def run(updater, updates):
    for _ in range(updates):
        updater.update()
    return updater


@pytest.mark.parametrize("settings", [PLAIN, SEARCHING], ids=["plain", "line search"])
@pytest.mark.parametrize("callbacks", [None, UpdateCallbacks(backward_on_finish=lambda context: None)])
def test_the_default_update_with_lbfgs_is_the_loop_by_hand(settings, callbacks):
    """Bit for bit: the closure computes the loss of the same batch again."""
    updater = run(lbfgs(settings=settings, callbacks=callbacks), 4)
    assert all(map(torch.equal, parameters_of(updater), by_hand(4, 4, settings)))


class Noisy(Regression):
    def forward(self, x, t):
        return super().forward(torch.nn.functional.dropout(x, 0.5), t)


def test_each_call_of_a_closure_draws_its_own_random_numbers():
    """As PyTorch's closures do: the forward runs again, dropout and all."""
    torch.manual_seed(3)
    updater = lbfgs(model=Noisy(), settings=PLAIN)
    torch.manual_seed(4)
    run(updater, 3)
    torch.manual_seed(3)
    model = Noisy()
    torch.manual_seed(4)
    assert all(map(torch.equal, parameters_of(updater), by_hand(4, 3, PLAIN, model)))


@pytest.mark.parametrize(("small", "accumulate"), [(1, 12), (2, 2), (5, 3)])
def test_an_accumulated_step_by_closure_is_that_of_one_large_batch(small, accumulate):
    """Each call of the closure goes through all micro-batches; losses and reports are their weighted means."""
    ours, whole = lbfgs(small, accumulate=accumulate), lbfgs(small * accumulate)
    for _ in range(3):
        assert_close(observed_update(ours), observed_update(whole))
        assert ours.weight == whole.weight
    torch.testing.assert_close(parameters_of(ours), parameters_of(whole), rtol=1e-8, atol=1e-8)


def test_a_step_by_closure_uses_what_there_is_when_the_data_end_inside_an_accumulation():
    """12 rows in micro-batches of 5: the third has 2, and the fourth does not come."""
    ours, whole = lbfgs(5, accumulate=4, repeat=False), lbfgs(12)
    assert_close(observed_update(ours), observed_update(whole))
    torch.testing.assert_close(parameters_of(ours), parameters_of(whole), rtol=1e-8, atol=1e-8)
    with pytest.raises(StopIteration):
        ours.update()


@pytest.mark.parametrize("kind", [StandardUpdater, WithBackward])
def test_the_gradient_of_each_call_is_clipped_before_the_optimizer_sees_it(kind):
    """By the callbacks of ``update_on_start``, as those of any other update."""
    clip = UpdateCallbacks(update_on_start=clip_grad_value(0.01))
    updater = run(lbfgs(settings=PLAIN, callbacks=clip, kind=kind), 3)
    expected = by_hand(4, 3, PLAIN, clip=lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01))
    assert all(map(torch.equal, parameters_of(updater), expected))


def test_the_reported_values_are_those_of_the_first_call_in_an_update():
    """The loss and the norm before the step, and not those of the last point that the line search has tried."""
    updater = lbfgs(callbacks=UpdateCallbacks(update_on_start=clip_grad_norm(float("inf"))))
    model, (x, t) = same_regression(), regression_data().tensors
    loss = model(x[:4], t[:4])
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert_close(observed_update(updater), {"main/loss": loss.detach(), "grad_norm": norm})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2},
        {"precision": "bf16"},
        {"callbacks": UpdateCallbacks(update_on_start=clip_grad_norm(0.1))},
    ],
    ids=["plain", "accumulated", "bf16", "clipped"],
)
def test_a_run_with_lbfgs_resumes_bit_for_bit(settings):
    """With the history and the counts of evaluations that the optimizer keeps."""
    check_updater(lambda: lbfgs(5, model=Noisy(), settings=PLAIN, **settings), iterations=5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_closure_of_ones_own_may_call_loss_backward(accumulate):
    """It is averaged as by ``self.backward``, also over micro-batches of unequal size: the third has two rows."""
    ours, default = (lbfgs(5, kind=kind, accumulate=accumulate, repeat=False) for kind in (WithBackward, StandardUpdater))
    assert_close(observed_update(ours), observed_update(default))
    assert_close(parameters_of(ours), parameters_of(default))


class TwoPasses(torch.optim.SGD):
    """Climbs along the gradient that it finds, takes the gradient there, and steps from where it was (SAM)."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        before = [parameter.clone() for parameter in parameters]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.add_(parameter.grad * 0.5 / norm)
        closure()
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        return super().step()


class Sharpness(StandardUpdater):
    def update_core(self):
        x, t = self.next_batch()

        def closure():
            loss = (self.get_model("main").predictor(x) - t).square().mean()
            self.backward(loss)
            return loss

        report({"loss": closure()}, self.get_model("main"))
        self.step(closure=closure)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_optimizer_of_two_passes_finds_the_gradient_of_the_first_and_computes_the_second(accumulate):
    """Both gradients are means over the micro-batches, and the loss is that of the first pass."""
    model = same_regression()
    iterator = SerialIterator(regression_data(), 4, shuffle=False)
    updater = Sharpness(iterator, TwoPasses(model.parameters(), lr=0.1), model, accumulate=accumulate)
    expected, (x, t) = same_regression(), regression_data().tensors
    rows = slice(0, 4 * accumulate)
    optimizer = TwoPasses(expected.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = expected(x[rows], t[rows])
        with torch.enable_grad():
            expected(x[rows], t[rows]).backward()
        return loss

    loss = closure().detach()
    optimizer.step(closure)
    assert_close(observed_update(updater), {"main/loss": loss})
    assert_close(parameters_of(updater), [parameter.detach() for parameter in expected.parameters()])


class Pair(StandardUpdater):
    """Two models, of which the second reads the first without detaching it."""

    def update_core(self):
        first, second = self.get_model("main"), self.get_model("second")
        x, t = self.next_batch()

        def fit():
            loss = (first.predictor(x) - t).square().mean()
            self.backward(loss)
            return loss

        def follow():
            loss = (second.predictor(x) - first.predictor(x)).square().mean()
            self.backward(loss)
            return loss

        self.backward((first.predictor(x) - t).square().mean())
        self.step("second", follow)
        self.step("main")
        self.step("second", follow)
        self.step("main", fit)


def test_a_closure_leaves_the_gradients_of_other_optimizers_as_they_are():
    """Each steps on the gradients of its own loss, whatever a closure in between has reached."""

    def pair():
        models = {"main": same_regression(), "second": Regression()}
        for parameter in models["second"].parameters():
            torch.nn.init.ones_(parameter)
        optimizers = {
            "main": torch.optim.SGD(models["main"].parameters(), lr=0.1),
            "second": torch.optim.LBFGS(models["second"].parameters(), **PLAIN),
        }
        return Pair(SerialIterator(regression_data(), 4, shuffle=False), optimizers, models)

    updater, expected = pair(), pair()
    run(updater, 1)
    (x, t), (first, second) = (each[:4] for each in regression_data().tensors), expected.get_all_models().values()
    sgd, other = expected.get_all_optimizers().values()

    def follow():
        other.zero_grad()
        loss = (second.predictor(x) - first.predictor(x).detach()).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        sgd.zero_grad()
        if _ == 0:
            first(x, t).backward()
        other.step(follow)
        if _ == 1:
            first(x, t).backward()
        sgd.step()
    for name in ("main", "second"):
        assert_close(parameters_of(updater, name), parameters_of(expected, name))


def test_two_optimizers_of_which_one_needs_a_closure_step_one_after_the_other():
    """The default update gives each the closure of the batch."""
    models = [same_regression(), same_regression()]
    pairs = [
        {"a": torch.optim.LBFGS([model.predictor.weight], **PLAIN), "b": torch.optim.SGD([model.predictor.bias], lr=0.1)}
        for model in models
    ]
    run(StandardUpdater(SerialIterator(regression_data(), 4, shuffle=False), pairs[0], models[0]), 1)
    x, t = (each[:4] for each in regression_data().tensors)
    for optimizer in pairs[1].values():

        def closure():
            models[1].zero_grad()
            loss = models[1](x, t)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_replicas_step_by_closure_as_one_model():
    """ParallelUpdater computes the shares again in each call."""
    ours, whole = lbfgs(5, kind=ParallelUpdater, devices=TWO), lbfgs(5)
    for _ in range(2):
        assert_close(observed_update(ours), observed_update(whole))
    torch.testing.assert_close(parameters_of(ours), parameters_of(whole), rtol=1e-8, atol=1e-8)


def test_lbfgs_minimises_a_function_without_data():
    """One update is enough for a quadratic."""

    class Bowl(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.point = torch.nn.Parameter(torch.tensor([3.0, -2.0]))

        def forward(self):
            return (self.point - 1).square().sum()

    model = Bowl()
    run(StandardUpdater(None, torch.optim.LBFGS(model.parameters(), **SEARCHING), model), 1)
    torch.testing.assert_close(model.point.detach(), torch.ones(2))


def test_a_graph_is_kept_for_a_second_backward_on_request():
    """Two losses over one forward, as DCGAN's authors write it."""

    class Twice(StandardUpdater):
        def update_core(self):
            x, t = self.next_batch()
            error = self.get_model("main").predictor(x) - t
            self.backward(error.square().mean(), retain_graph=True)
            self.backward(error.abs().mean())
            self.step()

    model, expected, (x, t) = same_regression(), same_regression(), (each[:4] for each in regression_data().tensors)
    iterator = SerialIterator(regression_data(), 4, shuffle=False)
    run(Twice(iterator, torch.optim.SGD(model.parameters(), lr=0.1), model), 1)
    error = expected.predictor(x) - t
    (error.square().mean() + error.abs().mean()).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert_close(list(map(torch.detach, model.parameters())), list(map(torch.detach, expected.parameters())))


class Demanding(torch.optim.SGD):
    def step(self, gradients):
        raise AssertionError


class Bare(torch.optim.SGD):
    def step(self):
        raise AssertionError


def given(closure, **settings):
    kind = type("Given", (StandardUpdater,), {"update_core": lambda self: self.step(closure=closure)})
    return lbfgs(kind=kind, **settings)


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        (lambda: lbfgs(precision="fp16"), ValueError, 'precision="fp16" scales the loss.*"bf16"'),
        (lambda: given(lambda: 1.0, precision="fp16").update(), ValueError, 'precision="fp16" scales the loss.*"bf16"'),
        (lambda: given(3).update(), TypeError, "a closure is a function without arguments.*got int"),
        (lambda: given(lambda: None).update(), TypeError, "returns the loss, one number; got NoneType"),
        (lambda: given(lambda: torch.ones(2)).update(), TypeError, "returns the loss, one number; got Tensor"),
        (
            lambda: StandardUpdater(SerialIterator([0], 1), Demanding(MODEL.parameters()), MODEL),
            TypeError,
            r"Demanding.step\(self, gradients\); write update_core",
        ),
        (
            lambda: StandardUpdater(
                SerialIterator([0], 1),
                {"a": torch.optim.LBFGS([MODEL.predictor.weight]), "b": Bare([MODEL.predictor.bias])},
                MODEL,
            ),
            TypeError,
            r"step\(closure\), because.*'b' is Bare.step\(self\); write update_core",
        ),
    ],
)
def test_what_cannot_step_by_a_closure_is_refused_with_the_remedy(use, kind, text):
    """A scaled loss, what is no closure, an optimizer that asks for something else."""
    with pytest.raises(kind, match=text):
        use()


MODEL = same_regression()


def test_a_step_by_closure_is_not_compiled_and_says_so():
    """The update is the same as without."""
    with pytest.warns(UserWarning, match="not compiled: .*closures"):
        updater = lbfgs(compile=True)
    assert all(map(torch.equal, parameters_of(run(updater, 2)), by_hand(4, 2)))


def test_a_loss_that_is_nan_in_a_closure_skips_the_step(tmp_path, capsys):
    """FailOnNonNumber checks the first call of a closure, and the update is saved for a replay."""

    class Breaking(Regression):
        def forward(self, x, t):
            return super().forward(x, t) * (float("nan") if self.training and (x == 7).any() else 1.0)

    x, t = regression_data().tensors
    x = x.clone()
    x[5, 0] = 7
    torch.manual_seed(3)
    updater = lbfgs(model=Breaking(), data=torch.utils.data.TensorDataset(x, t), settings=PLAIN)
    trainer = Trainer(updater, (3, "iteration"), str(tmp_path))
    trainer.extend(extensions.FailOnNonNumber("skip"))
    seen = []
    trainer.extend(lambda trainer: seen.append(copy.deepcopy(parameters_of(updater))), name="watch")
    trainer.run()
    first, second, third = seen
    assert all(map(torch.equal, first, second))
    assert not all(map(torch.equal, second, third))
    assert "has NaN or infinity in the gradients" in capsys.readouterr().out
    again = lbfgs(model=Breaking())
    extensions.FailOnNonNumber.replay(tmp_path / "non_number_iter_2", again)
    assert all(bool(parameter.grad.isnan().all()) for parameter in again.get_model("main").parameters())


@pytest.mark.parametrize("wrapping", REPLICATED)
def test_on_two_ranks_a_step_by_closure_is_that_of_one_process(wrapping):
    """Bit for bit the same on both ranks, whose line searches decide by the loss of all; 5 rows are shared as 3 and 2."""
    first, second = on_two_ranks(train_each_on_rank, wrapping)
    assert first == second
    for ours, settings in zip(first, SETTINGS, strict=True):
        alone = [parameter.tolist() for parameter in parameters_of(run(lbfgs(5, **settings), 3))]
        torch.testing.assert_close(ours, alone, rtol=1e-7, atol=1e-7)


def test_on_two_ranks_a_closure_may_call_loss_backward_on_a_plain_model():
    """It is weighed afterwards; DDP, which exchanges in the backward, is refused with the remedy."""
    alone = [parameter.tolist() for parameter in parameters_of(run(lbfgs(5), 3))]
    first, second = on_two_ranks(train_on_rank, "plain", WithBackward)
    assert first == second
    torch.testing.assert_close(first, alone, rtol=1e-7, atol=1e-7)
    assert "write self.backward(loss) in the closure" in on_two_ranks(train_on_rank, "ddp", WithBackward)[0]


def test_lbfgs_over_sharded_parameters_is_refused_at_construction():
    """PyTorch's makes one vector of all gradients, which those of fully_shard do not let it."""
    assert "LBFGS, which takes all gradients as one vector" in on_two_ranks(train_on_rank, "sharded")[0]
