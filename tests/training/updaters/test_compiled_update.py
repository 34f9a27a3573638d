"""``StandardUpdater(compile=True)``: the same numbers, exact resume, and one warning where it cannot be."""

import os
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
from recipes import assert_resumes_everywhere
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import default_collate
from toys import Valley

from chainring import iterators, report, training
from chainring.nn import Classifier
from chainring.training import UpdateCallbacks, clip_grad_norm
from chainring.training.extensions import ExponentialShift, FailOnNonNumber, LRScheduler, NonNumberError, dump_graph
from rank_pair import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, in its compiler

DATA = [(row, label % 4) for label, row in enumerate(torch.randn(40, 8, generator=torch.Generator().manual_seed(3)))]
STANDS = "updates run as they are, not compiled"


class Net(nn.Module):
    """Draws, counts in buffers, and reports from the inside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.25))
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        hidden = self.layers(x)
        report({"size": hidden.abs().mean()}, self)
        return self.last(hidden)


class Reading(Net):
    """Asks for a value of a tensor, on which no compiled function can decide."""

    def forward(self, x):
        return super().forward(x if x.sum() < 1e9 else -x)


def uneven():
    """Epochs of two batches of eight rows and one of four."""
    return iterators.FunctionIterator(lambda index: default_collate(DATA[:20][index % 3 * 8 :][:8]), epoch_length=3)


def trainer_of(out, length, *, net=Net, optimizer=None, iterator=None, **settings):
    torch.manual_seed(1)
    model = Classifier(net())
    make = optimizer or torch.optim.Adam
    source = iterator or iterators.SerialIterator(DATA, 8)
    updater = training.StandardUpdater(source, make(model.parameters(), lr=0.01), model, **settings)
    return training.Trainer(updater, (length, "iteration") if isinstance(length, int) else length, str(out))


def ran(trainer):
    """Trains; returns the observations of all iterations and the parameters and buffers in the end."""
    observations = []
    trainer.extend(lambda t: observations.append(dict(t.observation)), name="watch", trigger=(1, "iteration"))
    torch.manual_seed(2)
    trainer.run()
    return observations, trainer.updater.get_model("main").state_dict()


def assert_close(first, second, rtol=2e-4, atol=2e-5):
    for one, other in zip(first[0], second[0], strict=True):
        assert list(one) == list(other)
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=rtol, atol=atol, msg=key)
    for key, value in first[1].items():
        torch.testing.assert_close(second[1][key], value, rtol=rtol, atol=atol, msg=key)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_reports_and_parameters_are_those_of_the_plain_update(tmp_path, precision):
    """With dropout, whose draws are the same, and BatchNorm."""
    plain, compiled = (ran(trainer_of(tmp_path / str(each), 7, precision=precision, compile=each)) for each in (False, True))
    if precision == "fp32":
        assert_close(plain, compiled)
    else:  # a fused kernel rounds to eight bits less often
        for one, other in zip(plain[0], compiled[0], strict=True):
            assert float(one["main/loss"]) == pytest.approx(float(other["main/loss"]), rel=0.02)


OTHERS = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor)
COMPILED = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each not in OTHERS
]


class Many(nn.Module):
    """A layer for each optimizer, and its part of the loss, on which no other layer depends."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({each.__name__: nn.Linear(8, 4, bias=False) for each in COMPILED})

    def forward(self, x, t):
        return torch.stack([nn.functional.cross_entropy(layer(x), t) for layer in self.layers.values()]).sum()


def test_every_optimizer_of_torch_is_compiled_and_does_the_same():
    """All but those that take closures or sparse gradients, and Adafactor, whose step decides on a learning rate.

    Each has a layer of one model, so that all are compiled at once.
    """
    ends = []
    for compiles in (False, True):
        torch.manual_seed(1)
        model = Many()
        optimizers = {each.__name__: each(model.layers[each.__name__].parameters(), lr=0.01) for each in COMPILED}
        updater = training.StandardUpdater(iterators.SerialIterator(DATA, 8, seed=2), optimizers, model, compile=compiles)
        begun = [layer.weight.detach().clone() for layer in model.layers.values()]
        for _ in range(4):
            updater.update()
        assert not any(torch.equal(layer.weight, before) for layer, before in zip(model.layers.values(), begun, strict=True))
        ends.append(model)
    for name, layer in ends[0].layers.items():
        rtol, atol = (0.05, 0.01) if name == "Muon" else (2e-4, 2e-5)  # which computes in bfloat16
        torch.testing.assert_close(ends[1].layers[name].weight, layer.weight, rtol=rtol, atol=atol, msg=name)


def test_a_fused_optimizer_steps_by_its_own_kernel_beside_what_is_compiled(tmp_path):
    """It does the same without a warning; its kernel cannot be a part of a compiled function."""
    fused = partial(torch.optim.Adam, fused=True)
    plain, compiled = (ran(trainer_of(tmp_path / str(each), 4, optimizer=fused, compile=each)) for each in (False, True))
    assert_close(plain, compiled)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=["whole", "in stages"])
def test_it_resumes_bit_for_bit_after_every_iteration(tmp_path, settings):
    """In a run whose last batch of an epoch is shorter: two shapes are compiled."""

    def make(out, length):
        return trainer_of(out, length, iterator=uneven(), compile=True, **settings)

    assert_resumes_everywhere(make, tmp_path, 5)


def test_rates_and_frozen_parameters_may_change_and_nothing_is_compiled_anew_for_a_rate(tmp_path):
    plain, compiled = (trainer_of(tmp_path / str(each), 6, compile=each) for each in (False, True))
    for trainer in (plain, compiled):
        trainer.extend(ExponentialShift("lr", 0.8), trigger=(1, "iteration"))
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.updater.get_optimizer("main"), 3)
        trainer.extend(LRScheduler(scheduler), trigger=(1, "iteration"))
    compiled.extend(lambda t: torch.compiler.set_stance("fail_on_recompile"), name="fix", trigger=(1, "iteration"))
    try:
        assert_close(ran(plain), ran(compiled))
    finally:
        torch.compiler.set_stance("default")
    rates = [type(trainer.updater.get_optimizer("main").param_groups[0]["lr"]) for trainer in (plain, compiled)]
    assert rates == [float, float]


def test_parameters_may_be_frozen_and_thawed_on_the_way(tmp_path):
    def thaw(trainer):
        last = trainer.updater.get_model("main").predictor.last
        last.weight.requires_grad_(trainer.updater.iteration % 3 != 0)

    plain, compiled = (trainer_of(tmp_path / str(each), 7, compile=each) for each in (False, True))
    for trainer in (plain, compiled):
        trainer.extend(thaw, trigger=(1, "iteration"))
    assert_close(ran(plain), ran(compiled))


def test_a_loss_function_with_weights_and_dump_graph_go_with_it(tmp_path):
    """The first update is watched for the graph, so it runs as it is."""

    def loss_func(model, x, t):
        mask = (t > 0).float()
        losses = nn.functional.cross_entropy(model.predictor(x), t, reduction="none")
        return {"loss": (losses * mask).sum() / mask.sum(), "weight": mask.sum(), "accuracy": mask.mean()}

    plain, compiled = (trainer_of(tmp_path / str(each), 4, loss_func=loss_func, compile=each) for each in (False, True))
    weights = []
    for trainer in (plain, compiled):
        trainer.extend(dump_graph("main/loss"))
        trainer.extend(lambda t: weights.append(float(t.updater.weight)), name="weigh", trigger=(1, "iteration"))
    assert_close(ran(plain), ran(compiled))
    assert weights[:4] == weights[4:]
    assert (tmp_path / "True" / "cg.dot").exists()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_of_weight_0_is_refused_where_its_step_is_compiled(tmp_path, accumulate):
    """Before it counts, and no snapshot has what the step has made; of micro-batches only the gradients are compiled."""

    def loss_func(model, x, t):
        losses, counts = nn.functional.cross_entropy(model.predictor(x), t, reduction="none"), (t > 9).sum()
        return {"loss": losses.sum() / counts, "weight": counts}

    trainer = trainer_of(tmp_path, 2, loss_func=loss_func, compile=True, accumulate=accumulate)
    before = [parameter.detach().clone() for parameter in trainer.updater.get_model("main").parameters()]
    if accumulate == 1:
        with pytest.raises(
            RuntimeError, match=r"stepped in an update of weight 0.* Resume from the last snapshot with compile=False"
        ):
            trainer.run()
        with pytest.raises(RuntimeError, match="an update of weight 0"):
            trainer.updater.state_dict()
        assert trainer.updater.iteration == 0
    else:
        trainer.run()
        assert all(map(torch.equal, before, trainer.updater.get_model("main").parameters()))


def test_another_loss_function_is_refused_where_the_first_is_compiled(tmp_path):
    """It would not be called."""
    trainer = trainer_of(tmp_path, 2, loss_func=lambda model, x, t: model(x, t), compile=True)
    trainer.updater.loss_func = lambda model, x, t: 2 * model(x, t)
    with pytest.raises(AttributeError, match=r"loss_func is compiled, and cannot change"):
        trainer.run()


def test_what_hooks_into_the_step_is_called(tmp_path):
    """The step is then made outside of what is compiled: extensions look at the gradients there."""

    def clip(optimizer, args, settings):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    plain, compiled = (trainer_of(tmp_path / str(each), 3, compile=each) for each in (False, True))
    for trainer in (plain, compiled):
        trainer.updater.get_optimizer("main").register_step_pre_hook(clip)
    assert_close(ran(plain), ran(compiled))
    broken = [*DATA[:16], (torch.full((8,), torch.nan), 0)]
    source = iterators.SerialIterator(broken, 8, shuffle=False)
    trainer = trainer_of(tmp_path / "broken", 6, iterator=source, compile=True)
    trainer.extend(FailOnNonNumber())
    with pytest.raises(NonNumberError):
        trainer.run()


def test_with_a_hook_of_a_gradient_it_runs_as_it_is(tmp_path):
    """A compiled function would pass over it."""
    plain, compiled = (trainer_of(tmp_path / str(each), 3, compile=each) for each in (False, True))
    for trainer in (plain, compiled):
        trainer.updater.get_model("main").predictor.last.weight.register_hook(lambda gradient: gradient * 0)
    expected = ran(plain)
    with pytest.warns(UserWarning, match="hook of its gradient"):
        assert_close(expected, ran(compiled))


@pytest.mark.parametrize("callbacks", [None, UpdateCallbacks(batch_on_finish=lambda context: None)])
def test_what_cannot_be_compiled_runs_as_it_is_and_one_warning_says_why(tmp_path, callbacks):
    """To the last bit, also where a callback looks at the batch, and a resumed run does not try again."""
    compiled = trainer_of(tmp_path / "compiled", 4, net=Reading, compile=True, callbacks=callbacks)
    with pytest.warns(UserWarning, match=STANDS) as caught:
        end = ran(compiled)
    assert len([each for each in caught if STANDS in str(each.message)]) == 1
    assert "ranching" in str(caught[0].message)
    plain = ran(trainer_of(tmp_path / "plain", 4, net=Reading))
    assert all(torch.equal(plain[1][key], end[1][key]) for key in plain[1])
    resumed = trainer_of(tmp_path / "resumed", 6, net=Reading, compile=True)
    resumed.load_state_dict(compiled.state_dict())
    ran(resumed)


def test_a_mistake_of_the_model_is_raised_as_it_is(tmp_path):
    """After the warning, since the compiler saw it first."""
    wrong = nn.Linear(3, 4)
    trainer = trainer_of(tmp_path, 4, net=lambda: wrong, compile=True)
    with pytest.warns(UserWarning, match=STANDS), pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer.run()


def test_what_is_left_uncompiled_is_said_at_once(tmp_path):
    """Virtual ranks, whose sums are equal to the last bit."""
    with pytest.warns(UserWarning, match=STANDS):
        trainer_of(tmp_path, 2, compile=True, virtual_ranks=2)


def noting(stages, seen):
    """Callbacks that note their stage and whether there is a loss, and clip the final gradients."""
    notes = {stage: [lambda context, stage=stage: seen.append((stage, context.loss is not None))] for stage in stages}
    notes["update_on_start"] = [clip_grad_norm(0.1), *notes["update_on_start"]]
    return UpdateCallbacks(**notes)


INSIDE = ("forward_on_finish", "backward_on_start")


def test_accumulation_and_callbacks_around_the_gradients_go_with_it(tmp_path):
    """Micro-batches, gradients and norms are those of the plain update; in an epoch whose last batch is shorter."""
    stages = [stage for stage in vars(UpdateCallbacks()) if "_on_" in stage and stage not in INSIDE]
    ends, seen = [], ([], [])
    for compiles in (False, True):
        source, callbacks = uneven(), noting(stages, seen[compiles])
        trainer = trainer_of(
            tmp_path / str(compiles), 5, iterator=source, compile=compiles, accumulate=2, callbacks=callbacks
        )
        ends.append(ran(trainer))
    assert_close(*ends)
    assert "grad_norm" in ends[0][0][0]
    assert seen[0] == seen[1] != []


def test_a_callback_gets_the_converted_batch_and_may_replace_it(tmp_path):
    """Tensors, and how many examples they are; what is compiled computes from what the callback leaves in the context."""
    ends, seen = [], ([], [])
    for compiles in (False, True):

        def look(context, compiles=compiles):
            rows, labels = context.batch
            seen[compiles].append((context.iteration, context.micro_step, context.examples, rows.tolist(), labels.tolist()))
            if context.iteration == 2:
                context.batch = torch.zeros_like(rows), torch.zeros_like(labels)

        trainer = trainer_of(tmp_path / str(compiles), 4, compile=compiles)
        trainer.updater.callbacks.add("batch_on_finish", look)
        ends.append(ran(trainer))
    assert_close(*ends)
    assert seen[0] == seen[1]
    assert [each[:3] for each in seen[0]] == [(iteration, 0, 8) for iteration in range(4)]
    sizes = [float(each["main/predictor/size"]) for each in ends[1][0]]
    assert sizes[2] < 0.1 < min(sizes[:2])


def test_an_update_without_data_is_compiled_without_a_warning():
    """To float tolerance the same."""
    points = []
    for compiles in (False, True):
        model = Valley()
        updater = training.StandardUpdater(None, torch.optim.SGD(model.parameters(), lr=0.01), model, compile=compiles)
        torch.manual_seed(1)
        for _ in range(2):
            updater.update()
        points.append(model.point)
    torch.testing.assert_close(*points)


@pytest.mark.parametrize("stage", INSIDE)
def test_with_a_callback_between_forward_and_backward_an_update_runs_as_it_is(tmp_path, stage):
    """To the last bit."""
    callbacks = UpdateCallbacks(**{stage: lambda context: None})
    plain, compiled = (
        ran(trainer_of(tmp_path / str(each), 3, compile=each, callbacks=callbacks))[1] for each in (False, True)
    )
    assert all(torch.equal(plain[key], compiled[key]) for key in plain)


class Twins(nn.Module):
    """Two parameters whose gradients are one tensor, and one whose gradient repeats a number."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.third = (nn.Parameter(torch.ones(8)) for _ in range(3))

    def forward(self, x):
        return (x * (self.one + self.other)).sum(1, keepdim=True) + self.third.sum() + torch.zeros(4)


def test_gradients_that_share_memory_are_clipped_once(tmp_path):
    ends = []
    for compiles in (False, True):
        callbacks = UpdateCallbacks(update_on_start=clip_grad_norm(0.1))
        trainer = trainer_of(
            tmp_path / str(compiles), 3, net=Twins, optimizer=torch.optim.SGD, compile=compiles, callbacks=callbacks
        )
        ends.append(ran(trainer))
    assert_close(*ends)


class Product(nn.Module):
    """A parameter whose gradient is what the batch or a number of the model says: the compiler returns that itself."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(4, 3))
        self.register_buffer("factor", torch.full((4, 3), 2.0))

    def forward(self, x):
        other = {"batch": x, "buffer": self.factor, "constant": torch.tensor([[1.0, 2.0, 3.0]] * 4)}[self.kind]
        return (self.weight * other * torch.ones(4, 3)).sum() / 1.0 + 0.0 * x.mean()


def triple(optimizer, args, settings):
    """A hook that writes to gradients."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(3)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {}], ids=["in stages", "fused"])
@pytest.mark.parametrize("kind", ["batch", "buffer", "constant"])
def test_a_gradient_that_is_another_tensor_is_not_written_into_that(kind, settings):
    """What adds to gradients or clips them leaves the data and the buffers of the model alone."""
    ends = []
    for compiles in (False, True):
        data, model = torch.ones(4, 3), Product(kind)
        source = iterators.FunctionIterator(lambda index, data=data: data, epoch_length=4)
        callbacks = UpdateCallbacks(update_on_start=clip_grad_norm(0.5)) if settings else UpdateCallbacks()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        updater = training.StandardUpdater(
            source, optimizer, model, loss_func=lambda model, x: model(x), callbacks=callbacks, compile=compiles, **settings
        )
        if not settings:
            optimizer.register_step_pre_hook(triple)
        for _ in range(3):
            updater.update()
        assert data.tolist() == torch.ones(4, 3).tolist()
        assert model.factor.tolist() == torch.full((4, 3), 2.0).tolist()
        ends.append(model.weight.detach())
    torch.testing.assert_close(*ends)


def test_a_loss_scaler_goes_with_it(tmp_path):
    """In fp16, where the loss is scaled before the backward and the gradients are checked before the step."""
    plain, compiled = (ran(trainer_of(tmp_path / str(each), 6, precision="fp16", compile=each)) for each in (False, True))
    for one, other in zip(plain[0], compiled[0], strict=True):
        assert float(one["main/loss"]) == pytest.approx(float(other["main/loss"]), rel=0.01)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=["plain", "accumulate"])
def test_a_short_last_batch_costs_one_compilation_more_and_nothing_else_does(tmp_path, settings):
    """Neither a second epoch, nor a rate, nor the first step of an optimizer."""
    counters.clear()
    trainer = trainer_of(tmp_path, (4, "epoch"), iterator=uneven(), compile=True, **settings)
    trainer.extend(ExponentialShift("lr", 0.8), trigger=(1, "iteration"))
    ran(trainer)
    assert counters["stats"]["unique_graphs"] == 2


def on_a_rank(comm, out, compiles):
    """A run of this rank."""
    source = iterators.SerialIterator(DATA, 8, seed=4)
    observations, state = ran(trainer_of(out, 5, iterator=source, compile=compiles, comm=comm, accumulate=2))
    return [float(each["main/loss"]) for each in observations], {key: value.tolist() for key, value in state.items()}


def test_two_ranks_compute_what_they_compute_without(tmp_path):
    """Each compiles for its own share, and gradients are exchanged before the step."""
    plain, compiled = (on_ranks(2, on_a_rank, tmp_path / str(each), each, seconds=300) for each in (False, True))
    for rank in range(2):
        assert compiled[rank][0] == pytest.approx(plain[rank][0], rel=2e-4)
        for key, value in plain[rank][1].items():
            torch.testing.assert_close(torch.tensor(compiled[rank][1][key]), torch.tensor(value), rtol=2e-4, atol=2e-5)
    parameters = [{key: value for key, value in rank[1].items() if "layers.1" not in key} for rank in compiled]
    assert parameters[0] == parameters[1]


def test_without_a_compiler_it_says_so_and_trains(tmp_path):
    program = """
        import torch, sys
        from chainring import iterators, training
        model = torch.nn.Linear(2, 1)
        data = [(torch.ones(2), torch.ones(1))] * 4
        updater = training.StandardUpdater(iterators.SerialIterator(data, 2), torch.optim.SGD(model.parameters(), lr=0.1),
            model, loss_func=lambda model, x, t: (model(x) - t).square().mean(), compile=True)
        training.Trainer(updater, (3, "iteration"), out=sys.argv[1]).run()
    """
    environment = {**os.environ, "CXX": str(tmp_path / "absent"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "out")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(STANDS) == 1
