"""An update_core of one's own runs once for each virtual rank, and all meet in step."""

import copy
import math
import os
import signal
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from toys import Regression, assert_close, observed_update, parameters_of, regression_data, same_regression, updater_of

from chainring import report
from chainring.iterators import SerialIterator
from chainring.parallel import Communicator
from chainring.training import StandardUpdater
from chainring.training.extensions import ExponentialMovingAverage
from rank_pair import on_two_ranks

BATCH = 6


@pytest.fixture(autouse=True)
def _no_thread_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def started(kind, virtual_ranks=3, **settings):
    updater = updater_of(BATCH, kind=kind, virtual_ranks=virtual_ranks, **settings)
    updater.start()
    return updater


class Plain(StandardUpdater):
    """What the default does, in stages."""

    def update_core(self):
        self.backward(self.get_model("main")(*self.next_batch()))
        self.step()


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"accumulate": 2, "accumulate_across_epochs": False}])
def test_update_core_of_the_default_stages_trains_like_the_default(settings):
    data = regression_data(15)  # the third batch is of three examples
    own = started(Plain, data=data, repeat=False, **settings)
    default = started(StandardUpdater, data=data, repeat=False, **settings)
    updates = 2 if settings else 3
    own_reports = [observed_update(own) for _ in range(updates)]
    default_reports = [observed_update(default) for _ in range(updates)]
    assert all(map(torch.equal, parameters_of(own), parameters_of(default)))
    assert own_reports == default_reports
    assert own.is_new_epoch
    with pytest.raises(StopIteration):
        own.update()
    assert own.iteration == updates


def test_each_virtual_rank_has_its_rows_and_runs_to_its_step_before_the_next_one():
    events = []

    class Noting(StandardUpdater):
        def update_core(self):
            x, t = self.next_batch()
            events.append(("begins", x[:, 0].tolist()))
            self.backward(self.get_model("main")(x, t))
            self.step()
            events.append(("goes on", x[:, 0].tolist()))

    started(Noting).update()
    x = regression_data().tensors[0][:, 0]
    shares = [x[number:BATCH:3].tolist() for number in range(3)]
    assert events == [(what, share) for what in ("begins", "goes on") for share in shares]


def test_after_step_every_virtual_rank_sees_the_stepped_parameters_and_their_gradient():
    seen = []

    class Looking(Plain):
        def update_core(self):
            super().update_core()
            seen.append([(p.tolist(), p.grad.tolist()) for p in self.get_model("main").parameters()])

    updater = started(Looking)
    updater.update()
    assert seen == [[(p.tolist(), p.grad.tolist()) for p in updater.get_model("main").parameters()]] * 3


def test_generators_go_on_in_each_virtual_rank_after_a_step():
    drawn = {}

    class Drawing(StandardUpdater):
        def update_core(self):
            x, t = self.next_batch()
            numbers = drawn.setdefault(x[0, 0].item(), [])
            numbers.append(torch.rand(()).item())
            self.backward(self.get_model("main")(x, t))
            self.step()
            numbers.append(torch.rand(()).item())

    class DrawingBefore(Drawing):
        def update_core(self):
            x, t = self.next_batch()
            drawn.setdefault(x[0, 0].item(), []).extend(torch.rand(2).tolist())
            self.backward(self.get_model("main")(x, t))
            self.step()

    found = []
    for kind in (Drawing, DrawingBefore):
        drawn.clear()
        started(kind).update()
        found.append(dict(drawn))
    assert found[0] == found[1]


class Adversaries(nn.Module):
    """Two parts, each of which learns against the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.maker, self.judge = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()


class Adversarial(StandardUpdater):
    """The judge steps first, and the maker learns of the judge that has stepped."""

    def update_core(self):
        model = self.get_model("main")
        x, t = self.next_batch()
        made = model.maker(x)
        judged = (model.judge(x) - t).square().mean() + model.judge(made.detach()).square().mean()
        self.backward(judged)
        self.step("judge")
        made_loss = (model.judge(made) - 1).square().mean()
        self.backward(made_loss)
        self.step("maker")
        report({"judge": judged, "maker": made_loss})


def adversarial(virtual_ranks, kind=Adversarial, **settings):
    model = Adversaries()
    optimizers = {name: torch.optim.Adam(getattr(model, name).parameters(), 0.1) for name in ("judge", "maker")}
    iterator = SerialIterator(regression_data(), BATCH, shuffle=False)
    if "comm" in settings:
        iterator.use_virtual_ranks(virtual_ranks)
        iterator.share(settings["comm"].rank, settings["comm"].size)
    updater = kind(iterator, optimizers, model, virtual_ranks=virtual_ranks, **settings)
    updater.start()
    return updater


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_optimizers_that_step_one_after_the_other_train_as_without_virtual_ranks(accumulate):
    virtual, plain = adversarial(3, accumulate=accumulate), adversarial(None, accumulate=accumulate)
    for _ in range(4):
        found, expected = observed_update(virtual), observed_update(plain)
        assert {key: float(value) for key, value in found.items()} == pytest.approx(
            {key: float(value) for key, value in expected.items()}
        )
    assert_close(parameters_of(virtual), parameters_of(plain))


def test_different_steps_in_different_virtual_ranks_are_named():
    class Straying(Adversarial):
        def update_core(self):
            model = self.get_model("main")
            x, t = self.next_batch()
            self.backward((model.judge(model.maker(x)) - t).square().mean())
            self.step("judge" if torch.equal(x[0], regression_data().tensors[0][1]) else "maker")

    updater = adversarial(3)
    updater.__class__ = Straying
    with pytest.raises(RuntimeError, match=r"all meet in self\.step\(\).*virtual rank 0 has called.*'maker'.*'judge'"):
        updater.update()


def test_virtual_rank_that_does_not_step_is_named():
    class Straying(StandardUpdater):
        def update_core(self):
            x, t = self.next_batch()
            self.backward(self.get_model("main")(x, t))
            if torch.equal(x[0], regression_data().tensors[0][0]):
                self.step()

    with pytest.raises(RuntimeError, match=r"must call it for the same optimizers"):
        started(Straying).update()


class SteppingByRows(StandardUpdater):
    """Virtual rank 0 steps with other optimizers than the others."""

    steps_of_first, steps_of_others = (), ()

    def update_core(self):
        model = self.get_model("main")
        x, t = self.next_batch()
        is_first = torch.equal(x[0], regression_data().tensors[0][0])
        for name in self.steps_of_first if is_first else self.steps_of_others:
            self.backward((model.judge(model.maker(x)) - t).square().mean())
            self.step(name)


def strayed_on_rank(comm, virtual_ranks, first, others):
    updater = adversarial(virtual_ranks, comm=comm, kind=SteppingByRows)
    updater.steps_of_first, updater.steps_of_others = first, others
    with pytest.raises(RuntimeError, match=r"all meet in self\.step\(\)") as refused:
        updater.update()
    return str(refused.value)


@pytest.mark.parametrize(
    ("first", "others"), [(("judge",), ()), ((), ("judge",)), (("judge",), ("maker",)), (("judge", "maker"), ("judge",))]
)
def test_different_steps_on_different_ranks_are_named_on_all(first, others):
    for said in on_two_ranks(strayed_on_rank, 2, first, others):
        assert "virtual rank 0 has called " in said
        assert ", virtual rank 1 has called " in said


@pytest.mark.parametrize("error", [ArithmeticError("broken"), KeyboardInterrupt("broken"), SystemExit("broken")])
@pytest.mark.parametrize("failing", [1, 2, 3, 4, 6])
def test_error_in_one_virtual_rank_ends_the_update(failing, error):
    """In the first, second, last one; and after a step, in the first and the last one."""
    calls = []

    def fail():
        calls.append(None)
        if len(calls) == failing:
            raise error

    class Failing(StandardUpdater):
        def update_core(self):
            batch = self.next_batch()
            fail()
            self.backward(self.get_model("main")(*batch))
            self.step()
            fail()

    updater = started(Failing)
    with pytest.raises(type(error), match="broken"):
        updater.update()
    assert updater.iteration == 0
    calls.extend([None] * 6)
    updater.update()
    assert updater.iteration == 1


def test_stop_iteration_that_is_not_the_end_of_the_data_is_an_error():
    class Failing(Plain):
        def update_core(self):
            next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration was raised in update_core"):
        started(Failing).update()


@pytest.mark.parametrize("virtual_ranks", [1, 3])
def test_running_statistics_of_an_update_that_the_end_of_the_data_cuts_short_are_undone(virtual_ranks):
    """The first of its two steps stands, as without virtual ranks; ranks would differ in what they had computed after it."""

    class TwoBatches(StandardUpdater):
        def update_core(self):
            for _ in range(2):
                x, t = self.next_batch()
                self.backward(self.get_model("main")[1](self.get_model("main")[0](x), t))
                self.step()

    model = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), same_regression())
    updater = started(TwoBatches, virtual_ranks, model=model, data=regression_data(3 * BATCH), repeat=False)
    updater.update()
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(StopIteration):
        updater.update()
    assert_close(list(model.buffers()), before)


def test_signal_in_the_middle_of_an_update_ends_it():
    class Interrupted(Plain):
        def update_core(self):
            os.kill(os.getpid(), signal.SIGINT)
            super().update_core()

    with pytest.raises(KeyboardInterrupt):
        started(Interrupted).update()


def test_update_of_a_single_virtual_rank_needs_no_thread():
    threads = set()

    class Looking(Plain):
        def update_core(self):
            super().update_core()
            threads.add(threading.current_thread())

    started(Looking, virtual_ranks=1).update()
    assert threads == {threading.main_thread()}


def test_virtual_ranks_compute_under_the_settings_of_the_thread_that_trains():
    seen = []

    class Looking(Plain):
        def update_core(self):
            x, t = self.next_batch()
            seen.append((x.float() @ torch.ones(3, 1)).dtype)
            self.backward(self.get_model("main")(x, t))
            self.step()

    updater = started(Looking)
    with torch.autocast("cpu", torch.bfloat16):
        updater.update()
    updater.update()
    assert seen == [torch.bfloat16] * 3 + [torch.float32] * 3


class Chainer(StandardUpdater):
    """Takes a batch as Chainer's updaters do."""

    def update_core(self):
        batch = self.get_iterator("main").next()
        self.backward(self.get_model("main")(*self.converter(batch, self.device)))
        self.step()


@pytest.mark.parametrize("virtual_ranks", [1, 3])
def test_batch_of_all_virtual_ranks_of_a_rank_is_refused(virtual_ranks):
    updater = started(Chainer, virtual_ranks)
    before = parameters_of(updater)
    with pytest.raises(RuntimeError, match=r"from iterator 'main' itself, .*; write self\.next_batch\(\)"):
        updater.update()
    assert_close(parameters_of(updater), before)


def test_batches_of_several_iterators_are_each_shared_out():
    seen = []

    class Two(StandardUpdater):
        def update_core(self):
            (x, t), (other, _) = self.next_batch(), self.next_batch("other")
            seen.append((x[:, 0].tolist(), other[:, 0].tolist()))
            self.backward(self.get_model("main")(x, t))
            self.step()

    model = same_regression()
    iterators = {
        "main": SerialIterator(regression_data(), 6, shuffle=False),
        "other": SerialIterator(regression_data(), 4, shuffle=False),
    }
    updater = Two(iterators, torch.optim.SGD(model.parameters(), 0.1), model, virtual_ranks=3, comm=Communicator())
    updater.start()
    updater.update()
    x = regression_data().tensors[0][:, 0]
    assert seen == [(x[number:6:3].tolist(), x[number:4:3].tolist()) for number in range(3)]


def test_step_of_ones_own_is_met_by_all():
    norms = []

    class Own(StandardUpdater):
        def step(self, name="main", closure=None):
            super().step(name, closure)
            norms.append([p.grad.norm().item() for p in self.get_model("main").parameters()])

    updater = started(Own)
    updater.update()
    assert norms == [[p.grad.norm().item() for p in updater.get_model("main").parameters()]] * 3


class Reporting(Regression):
    def forward(self, x, t):
        report({"first": x[0, 0]}, self)
        return super().forward(x, t)


def test_values_reported_before_and_after_a_step_are_means_over_virtual_ranks():
    class After(StandardUpdater):
        def update_core(self):
            x, t = self.next_batch()
            self.backward(self.get_model("main")(x, t))
            self.step()
            report({"after": x[0, 0]})

    observation = observed_update(started(After, model=Reporting()))
    mean = regression_data().tensors[0][:3, 0].mean().item()
    assert float(observation["main/first"]) == pytest.approx(mean)
    assert float(observation["after"]) == pytest.approx(mean)


class Replacing(nn.Module):
    """Divides by a running size, a buffer that it replaces in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        scaled = x / self.size
        self.size = 0.9 * self.size + 0.1 * x.detach().abs().mean(0)
        return scaled


class InPlace(Replacing):
    """Changes its buffer in place before it is used."""

    def forward(self, x):
        self.size.lerp_(x.detach().abs().mean(0), 0.1)
        return x / self.size


class Late(Replacing):
    """Replaces its buffer, and changes the new one in place before it is used."""

    def forward(self, x):
        self.size = self.size.clone()
        self.size.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        return x / self.size


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3).double())


NORMS = {
    "BatchNorm": lambda: nn.BatchNorm1d(3, dtype=torch.float64),
    "BatchNorm without a momentum": lambda: nn.BatchNorm1d(3, momentum=None, dtype=torch.float64),
    "BatchNorm in evaluation mode": lambda: nn.BatchNorm1d(3, dtype=torch.float64).eval(),
    "a buffer that is replaced": Replacing,
    "a buffer that is changed in place": InPlace,
    "a buffer that is replaced and changed": Late,
    "spectral norm": spectral,
}


class Normed(nn.Module):
    """Adversaries of which the maker keeps statistics."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(3)
        self.maker, self.judge = nn.Sequential(NORMS[norm](), nn.Linear(3, 3).double()), nn.Linear(3, 1).double()

    def losses(self, x, t):
        """That of the judge, and afterwards that of the maker, by the graph of what was made before."""
        made = self.maker(x)
        yield (self.judge(x) - t).square().mean() + self.judge(made.detach()).square().mean()
        yield (self.judge(made) - 1).square().mean()


class LivingGraph(StandardUpdater):
    """The graph through the maker lives on while the judge steps."""

    def update_core(self):
        losses = self.get_model("main").losses(*self.next_batch())
        for name in ("judge", "maker"):
            self.backward(next(losses))
            self.step(name)


def computed_side_by_side(model, updates, count):
    """The same with PyTorch alone: each virtual rank has the parameters, and buffers of its own."""
    optimizers = [torch.optim.Adam(getattr(model, name).parameters(), 0.1) for name in ("judge", "maker")]
    x, t = regression_data().tensors
    for update in range(updates):
        start = update * BATCH % len(x)
        parts = [copy.deepcopy(model, {id(p): p for p in model.parameters()}) for _ in range(count)]
        rows = [slice(start + number, start + BATCH, count) for number in range(count)]
        losses = [part.losses(x[each], t[each]) for part, each in zip(parts, rows, strict=True)]
        for optimizer in optimizers:
            model.zero_grad()
            for loss in losses:
                (next(loss) / count).backward(inputs=optimizer.param_groups[0]["params"], retain_graph=True)
            optimizer.step()
        for name, buffer in model.named_buffers():
            results = [part.get_buffer(name) for part in parts]
            buffer.copy_(sum(results) / count if buffer.is_floating_point() else results[0])


@pytest.mark.parametrize("norm", NORMS)
def test_graph_that_lives_while_an_optimizer_steps_has_the_buffers_of_its_virtual_rank(norm):
    model, expected = Normed(norm), Normed(norm)
    optimizers = {name: torch.optim.Adam(getattr(model, name).parameters(), 0.1) for name in ("judge", "maker")}
    updater = LivingGraph(SerialIterator(regression_data(), BATCH, shuffle=False), optimizers, model, virtual_ranks=3)
    updater.start()
    for _ in range(4):
        updater.update()
    computed_side_by_side(expected, 4, 3)
    assert_close(parameters_of(updater), [parameter.detach() for parameter in expected.parameters()])
    assert_close(list(model.buffers()), list(expected.buffers()))


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("kind", [StandardUpdater, Plain])
def test_updater_without_a_trainer_trains_as_a_started_one(kind, repeat):
    alone, begun = (updater_of(BATCH, kind=kind, virtual_ranks=3, repeat=repeat) for _ in range(2))
    begun.start()
    for _ in range(2):
        alone.update()
        begun.update()
    assert all(map(torch.equal, parameters_of(alone), parameters_of(begun)))


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"accumulate": 2, "accumulate_across_epochs": False}])
@pytest.mark.parametrize("kind", [Plain, StandardUpdater])
def test_epoch_is_that_of_the_batch_of_a_virtual_rank(kind, settings):
    """Before it has taken its batch, the epoch of the batch before; the batch was fetched for all of them."""

    class Asking(kind):
        def update_core(self):
            before = self.epoch, self.epoch_detail
            super().update_core()
            epochs.append((before, (self.epoch, self.epoch_detail)))

    def epochs_with(virtual_ranks):
        epochs.clear()
        updater = started(Asking, virtual_ranks, **settings)
        for _ in range(3):
            updater.update()
        assert (updater.epoch, updater.epoch_detail) == (updater.get_iterator("main").epoch, epochs[-1][1][1])
        return list(epochs)

    epochs = []
    without = epochs_with(None)
    assert sorted(epochs_with(3)) == sorted(without * 3)
    assert sorted(epochs_with(1)) == sorted(without)


def test_no_thread_is_left_wherever_an_update_is_interrupted():
    """Also where that is before or after virtual ranks compute."""
    updater, frames = started(Plain), []

    def interrupt(frame, event, _):
        if "_virtual.py" not in frame.f_code.co_filename:
            return None
        frames.append(event)
        if len(frames) == moment:
            raise KeyboardInterrupt
        return interrupt

    moment = 0
    while not frames or len(frames) >= moment:
        moment += 7
        frames.clear()
        sys.settrace(interrupt)
        try:
            updater.update()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert not [thread.name for thread in threading.enumerate() if "virtual-rank" in thread.name]


class Averaging(StandardUpdater):
    """Updates averages at some moments of its update."""

    def update_core(self):
        x, t = self.next_batch()
        if self.moment == "before the step":
            self.average()
        self.backward(self.get_model("main")(x, t) + self.averages[0].model.predictor(x).square().mean())
        self.step()
        if self.moment in ("after the step", "twice"):
            self.average()
        if self.moment != "before the step":
            self.backward(self.get_model("main")(x, t))
            self.step()
        if self.moment in ("at the end", "twice"):
            self.average()

    def average(self):
        for average in self.averages:
            average.update()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("moment", ["before the step", "after the step", "at the end", "twice"])
def test_average_is_updated_once_for_all_virtual_ranks(moment, number):
    found = []
    for virtual_ranks in (None, 1, 3):
        updater = updater_of(BATCH, kind=Averaging, virtual_ranks=virtual_ranks)
        updater.moment = moment
        updater.averages = [ExponentialMovingAverage(updater.get_model("main"), 0.8) for _ in range(number)]
        for _ in range(4):
            updater.update()
        found.append([*parameters_of(updater), *(p.detach() for each in updater.averages for p in each.model.parameters())])
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def test_average_that_only_some_virtual_ranks_update_is_refused():
    class Straying(Averaging):
        def update_core(self):
            x, t = self.next_batch()
            self.backward(self.get_model("main")(x, t))
            self.step()
            if torch.equal(x[0], regression_data().tensors[0][0]):
                self.averages[0].update()

    updater = started(Straying)
    updater.averages = [ExponentialMovingAverage(updater.get_model("main"))]
    with pytest.raises(RuntimeError, match="the same in what runs once an update"):
        updater.update()


def test_average_that_a_loss_updates_is_refused():
    updater = started(StandardUpdater, loss_func=lambda model, x, t: [model(x, t), average.update()][0])
    average = ExponentialMovingAverage(updater.get_model("main"))
    with pytest.raises(RuntimeError, match=r"call it at the end of an update_core .*trainer\.extend\(average\)"):
        updater.update()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("count", [2, 4, 8, 16, 32])
def test_virtual_ranks_that_wait_for_a_step_hold_no_more_gradients_than_the_sum_has_nodes(count, steps):
    gradients, numbers = [], []

    class Counting(StandardUpdater):
        def update_core(self):
            for _ in range(steps):
                x, t = self.next_batch()
                self.backward(self.get_model("main")(x, t))
                gradients.append(weakref.ref(self.get_model("main").predictor.weight.grad))
                numbers.append(sum(each() is not None for each in gradients))
                self.step()

    updater = updater_of(count, data=regression_data(2 * count), kind=Counting, virtual_ranks=count)
    updater.start()
    updater.update()
    assert len(numbers) == count * steps
    assert max(numbers) <= math.log2(count) + 2
