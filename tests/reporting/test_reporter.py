"""Reporter: who reports what under which name, in which scope, and what becomes of it later."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chainring import DictSummary, Reporter, get_current_reporter, report, report_scope, report_text
from chainring.training import StandardUpdater, Trainer


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(2, 1)

    def forward(self, x):
        y = self.l1(x)
        report({"norm": y.abs().sum()}, self.l1)
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.predictor = Head()

    def forward(self, x):
        loss = self.predictor(x).square().mean()
        report({"loss": loss}, self)
        return loss


class Slotted:
    """Cannot be referred to weakly."""

    __slots__ = ()


def reporter_of(**observers):
    reporter = Reporter()
    for name, observer in observers.items():
        reporter.add_observer(name, observer)
    return reporter


def test_reporting_without_a_reporter_does_nothing():
    """A model that reports runs outside a trainer too, registered or not."""
    report({"loss": 1.0})
    report({"loss": 1.0}, nn.Linear(1, 1))


@pytest.mark.parametrize("ask", [get_current_reporter, lambda: report_scope({}).__enter__()])
def test_asking_for_a_reporter_where_none_is_current_says_how_to_get_one(ask):
    """Rule and remedy."""
    with pytest.raises(RuntimeError, match=r"no reporter is current.*with reporter\.scope\(\{\}\)"):
        ask()


def test_a_value_of_an_observer_has_its_name_before_the_key():
    """And one without an observer just its key; the last report of a key holds."""
    model = nn.Linear(1, 1)
    observation = {}
    with reporter_of(main=model).scope(observation):
        report({"loss": 1.0, "count": 2}, model)
        report({"loss": 3.0})
        report({"loss": 4.0})
    assert observation == {"main/loss": 1.0, "main/count": 2, "loss": 4.0}


def test_an_unregistered_observer_is_refused_with_the_known_names():
    """The error names its kind, what is registered, and what to call."""
    model = nn.Linear(1, 1)
    with reporter_of(main=model).scope({}), pytest.raises(KeyError) as caught:
        report({"loss": 1.0}, nn.ReLU())
    assert [w for w in ("ReLU", "['main']", "reporter.add_observer(name, it)") if w not in str(caught.value)] == []


def test_what_is_no_mapping_is_refused():
    """report(loss) is a likely slip."""
    with Reporter().scope({}), pytest.raises(TypeError, match=r'takes a mapping, such as \{"loss": loss\}; got Tensor'):
        report(torch.ones(()))


def test_submodules_are_named_with_slashes():
    """main, main/predictor, main/predictor/l1: no separator is lost."""
    model, reporter, observation = Model(), Reporter(), {}
    reporter.add_observers("main", model.named_modules())
    with reporter.scope(observation):
        model(torch.ones(1, 2))
        report({"seen": 1}, model.predictor)
    assert list(observation) == ["main/predictor/l1/norm", "main/loss", "main/predictor/seen"]


def test_the_trainers_reporter_knows_every_submodule(tmp_path):
    """Nothing has to be registered by hand."""
    model = Model()
    updater = StandardUpdater([torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1), model)
    trainer = Trainer(updater, (1, "iteration"), tmp_path)
    trainer.run()
    assert list(trainer.observation) == ["main/predictor/l1/norm", "main/loss"]


class Verbose(Model):
    def forward(self, x):
        loss = super().forward(x)
        report({f"k{i}": loss * i for i in range(20)}, self)
        return loss


@pytest.mark.parametrize("make", [Model, Verbose])
def test_reporting_inside_a_compiled_model_has_the_same_keys_and_values(make, tmp_path):
    """The wrapper's prefix shows nowhere."""
    observations = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make()
        given = torch.compile(model, backend="eager") if compiled else model
        updater = StandardUpdater([torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1), given)
        trainer = Trainer(updater, (2, "iteration"), tmp_path)
        trainer.run()
        observations.append(trainer.observation)
    torch.testing.assert_close(observations[1], observations[0])
    assert all(not value.requires_grad for value in observations[1].values())


def test_scopes_nest_and_each_gets_its_own():
    """Reporters form a stack; after a scope the one before is current again."""
    outer, inner = Reporter(), Reporter()
    first, second, third = {}, {}, {}
    with outer.scope(first):
        with inner.scope(second):
            report({"a": 1})
            assert get_current_reporter() is inner
        with outer.scope(third):
            report({"b": 2})
        report({"c": 3})
        assert get_current_reporter() is outer
    assert (first, second, third) == ({"c": 3}, {"a": 1}, {"b": 2})


def fail_after_reporting():
    report({"a": 1})
    return 1 / 0


@pytest.mark.parametrize("scope", [report_scope, lambda observation: get_current_reporter().scope(observation)])
def test_a_scope_is_left_when_an_error_passes_through(scope):
    """Later reports do not leak into the inner observation."""
    outer, inner = {}, {}
    with Reporter().scope(outer):
        with pytest.raises(ZeroDivisionError), scope(inner):
            fail_after_reporting()
        report({"b": 2})
    assert (outer, inner) == ({"b": 2}, {"a": 1})


def test_an_error_inside_the_only_scope_leaves_no_reporter_behind():
    """And the reporter's own observation is the one it had."""
    reporter = Reporter()
    before = reporter.observation
    with pytest.raises(ZeroDivisionError), reporter.scope({}):
        1 / 0  # noqa: B018
    assert reporter.observation is before
    with pytest.raises(RuntimeError):
        get_current_reporter()


def test_a_reporter_is_current_only_in_its_own_thread():
    """Two threads report at once, each into its own; a third without a reporter does nothing."""
    observations, barrier = [{}, {}, {}], threading.Barrier(3, timeout=120)

    def work(number):
        if number == 2:
            barrier.wait()
            report({"value": number})
            barrier.wait()
            return
        with Reporter().scope(observations[number]):
            barrier.wait()
            report({"value": number})
            barrier.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observations == [{"value": 0}, {"value": 1}, {}]


def test_a_reported_tensor_is_detached():
    """No graph is kept alive, and the reported one can still be differentiated."""
    parameter = torch.ones((), requires_grad=True)
    loss = parameter * 2
    observation = {}
    with Reporter().scope(observation):
        report({"loss": loss, "pair": (loss, 3)})
    assert not observation["loss"].requires_grad
    assert not observation["pair"][0].requires_grad
    loss.backward()
    assert parameter.grad == 2


def many_values(kind):
    """More values than are copied one by one; those of some kinds do not fit into one tensor."""
    parameter = torch.linspace(0, 1, 40, requires_grad=True)
    values = {f"k{i}": parameter[i] * 3 for i in range(40)}
    others = {
        "alike": {},
        "other types": {"text": "abc", "number": 0.1, "pair": (parameter[0] * 2, 3), "array": np.array(2.0), "none": None},
        "other dtypes": {"half": torch.tensor(0.1, dtype=torch.float16), "count": torch.tensor(2**53 + 1)},
        "with dimensions": {"rows": torch.ones(3)},
        "a subclass": {"parameter": nn.Parameter(torch.tensor(0.5))},
        "dimensions first": {"k0": torch.ones(2), "rows": torch.ones(2)},
    }
    return {**values, **others[kind]}


@pytest.mark.parametrize(
    "kind", ["alike", "other types", "other dtypes", "with dimensions", "a subclass", "dimensions first"]
)
def test_many_values_are_reported_as_each_would_be_alone(kind):
    """To the bit, of the same types and dtypes, in the same order, and outside of their graphs."""
    values, together, alone = many_values(kind), {}, {}
    with Reporter().scope(together):
        report(values)
    with Reporter().scope(alone):
        for key, value in values.items():
            report({key: value})
    assert list(together) == list(alone)
    for key, value in alone.items():
        assert type(together[key]) is type(value)
        if isinstance(value, torch.Tensor):
            assert together[key].dtype == value.dtype
            assert torch.equal(together[key], value)
            assert not together[key].requires_grad
        else:
            assert together[key] == value


def test_a_change_in_place_of_one_of_many_values_reaches_no_other():
    """Neither of the value that was given, nor of the one in the observation."""
    values, observation = {f"k{i}": torch.tensor(float(i)) for i in range(40)}, {}
    with Reporter().scope(observation):
        report(values)
    values["k3"].add_(100)
    observation["k4"].add_(1000)
    assert [float(observation[f"k{i}"]) for i in range(2, 6)] == [2.0, 3.0, 1004.0, 5.0]
    assert float(values["k4"]) == 4.0


@pytest.mark.parametrize("make", [lambda: torch.ones(()) * 2, lambda: np.array(2.0)])
def test_a_change_in_place_after_the_report_does_not_reach_it(make):
    """By loss /= k, or a replayed graph; also of a value that brings its weight."""
    value, observation = make(), {}
    with Reporter().scope(observation):
        report({"loss": value, "pair": (value, 1)})
    value /= 2
    assert (float(observation["loss"]), float(observation["pair"][0])) == (2.0, 2.0)


def test_strings_and_arrays_stay_in_the_observation_and_out_of_means():
    """A reported string does not end the training."""
    array, observation, summary = np.ones(3), {}, DictSummary()
    with Reporter().scope(observation):
        report({"name": "abc", "array": array, "rows": torch.ones(2), "nothing": None, "loss": 1.0})
    summary.add(observation)
    assert observation["array"] is array
    assert observation["name"] == "abc"
    with pytest.warns(UserWarning, match="is not averaged") as caught:
        assert summary.compute_mean() == {"loss": 1.0}
    assert [str(each.message).split("'")[1] for each in caught] == ["array", "rows"]


def test_observers_are_held_weakly():
    """Registering a model does not keep it alive."""
    model = nn.Linear(1, 1)
    reporter = reporter_of(main=model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert reporter.observation == {}


def test_a_new_object_never_inherits_the_name_of_one_that_is_gone():
    """Names are not keyed by an id that is given out again."""
    reporter = Reporter()
    for _ in range(50):
        reporter.add_observer("old", nn.Linear(1, 1))
        with reporter.scope({}), pytest.raises(KeyError):
            report({"loss": 1.0}, nn.Linear(1, 1))


def test_an_object_without_weak_references_can_observe_too():
    """It is kept alive, so its id stays its own."""
    reporter, observation = reporter_of(slotted=Slotted()), {}
    with reporter.scope(observation), pytest.raises(KeyError):
        report({"a": 1}, Slotted())
    known = Slotted()
    reporter.add_observer("known", known)
    with reporter.scope(observation):
        report({"a": 1}, known)
    assert observation == {"known/a": 1}


def test_an_observer_that_is_registered_again_has_its_new_name():
    """The last name holds."""
    model, observation = nn.Linear(1, 1), {}
    reporter = reporter_of(old=model)
    reporter.add_observer("new", model)
    with reporter.scope(observation):
        report({"a": 1}, model)
    assert observation == {"new/a": 1}


@pytest.mark.parametrize("function", [lambda: 1.0, print, "text".upper], ids=["lambda", "builtin", "method"])
def test_a_function_is_not_a_value(function):
    """It is refused where it is reported, instead of missing from the log; objects that can be called are values."""

    class Metric:
        def __call__(self):
            return 1.0

    metric = Metric()
    reporter, observation = Reporter(), {}
    with reporter.scope(observation):
        report({"metric": metric})
        with pytest.raises(TypeError, match="is a function, which is not called later; report what it returns"):
            report({"x": function})
    assert observation == {"metric": metric}


class Hooked(nn.Module):
    """Reports in its forward, a part of which is computed again in the backward, and in a hook of the backward."""

    def __init__(self, names_itself=True, tells_shape=False):
        super().__init__()
        self.layer, self.names_itself, self.tells_shape = nn.Linear(3, 2), names_itself, tells_shape

    def block(self, x):
        y = self.layer(x)
        report({"size": y.detach().abs().sum()}, self)
        return y.tanh()

    def forward(self, x):
        y = checkpoint(self.block, x, use_reentrant=False)
        y.register_hook(self.note)
        return y.square().sum()

    def note(self, gradient):
        report({"gradient": gradient.norm()}, self if self.names_itself else None)
        if self.tells_shape:
            report_text("shape", str(list(gradient.shape)))


def test_a_hook_of_a_backward_reports_into_the_observation_of_the_forward(device):
    """Also on an accelerator, where autograd calls it in a thread of its own; outside of a run it does nothing."""
    model, reporter, texts = Hooked(tells_shape=True).to(device), Reporter(), {}
    reporter.add_observer("main", model)
    reporter.media_watchers = (texts.__setitem__,)
    with Reporter().scope(outer := {}), reporter.scope(observation := {}):  # as a run inside of another
        model(torch.ones(4, 3, device=device)).backward()
    assert outer == {}
    assert observation.keys() == {"main/size", "main/gradient"}
    assert observation["main/gradient"] > 0
    assert texts.keys() == {"shape"}
    model(torch.ones(4, 3, device=device)).backward()


@pytest.mark.parametrize("names_itself", [True, False])
def test_a_hook_of_a_backward_reports_to_no_other_run_of_the_process(device, names_itself):
    """On an accelerator it is known by the module that reports; without it there is an error."""
    model, reporter, barrier = Hooked(names_itself).to(device), Reporter(), threading.Barrier(2, timeout=120)
    reporter.add_observer("main", model)

    def train(other):
        with Reporter().scope(other):
            barrier.wait()
            barrier.wait()

    thread = threading.Thread(target=train, args=[other := {}])
    thread.start()
    barrier.wait()
    try:
        with reporter.scope(observation := {}):
            loss = model(torch.ones(4, 3, device=device))
            if device == "cpu" or names_itself:
                loss.backward()
                assert "gradient" in str(observation.keys())
            else:
                with pytest.raises(RuntimeError, match=r"give report\(\) the module that reports"):
                    loss.backward()
    finally:
        barrier.wait()
        thread.join()
    assert other == {}
