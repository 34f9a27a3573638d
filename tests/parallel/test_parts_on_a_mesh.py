"""Every part of the loop works on a mesh of ranks as it does with one process."""

import contextlib
import functools
import io
import math
import os
import resource
import signal
import tempfile
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from chainring import report
from chainring.iterators import SerialIterator
from chainring.parallel import create_communicator
from chainring.training import StandardUpdater, Trainer, extensions, triggers
from chainring.training.updaters import UpdateCallbacks, clip_grad_norm, clip_grad_value
from rank_pair import on_ranks

X = torch.linspace(-1, 1, 96).reshape(16, 6) ** 3
T = torch.linspace(1, 2, 16).reshape(16, 1)
DATA = list(zip(X, T, strict=True))
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
LAYOUTS = {"tp": (1, 2), "part fsdp": (2, 1), "tp x dp": (2, 2), "tp x fsdp": (2, 2), "hsdp": (2, 2)}
EVERYWHERE = {"tp", "tp x dp", "tp x fsdp"}
CASES = {}  # by layout and name


def feature(function, layouts=EVERYWHERE):
    """Register a part of the loop, ``function(place)``, which returns numbers by name."""
    CASES.update({(layout, function.__name__): function for layout in (None, *LAYOUTS) if layout in {None, *layouts}})
    return function


def feature_of_a_model(function):
    """Register a part of the loop to which it does not matter how the gradients of data ranks become one."""
    return feature(function, {"tp", "tp x fsdp"})


def feature_of_all_layouts(function):
    """Register a part of the loop that depends on where each parameter lies."""
    return feature(function, LAYOUTS)


class Place:
    """A layout of models on a mesh of ranks, or one process."""

    def __init__(self, layout=None):
        self.layout = layout
        if layout is None:
            self.comm = create_communicator("cpu")
            return
        self.mesh = init_device_mesh("cpu", LAYOUTS[layout], mesh_dim_names=("dp", "tp"))
        self.comm = create_communicator(mesh=self.mesh if layout == "hsdp" else self.mesh["dp"])

    def lay(self, net, plan=PLAN, sharded=("0", "2", "")):
        """Lay a model on the mesh; in the layout "part fsdp" what does not belong to the first modules stays plain."""
        layout = self.layout or "one process"
        if "tp" in layout:
            parallelize_module(net, self.mesh["tp"], plan)
        for path in sharded if "fsdp" in layout or layout == "hsdp" else ():
            if path or layout != "part fsdp":
                fully_shard(net.get_submodule(path), mesh=self.mesh if layout == "hsdp" else self.mesh["dp"])
        return net

    def holds_last(self, parameter):
        """True on the ranks whose shard of a parameter may be poisoned: each value of it on all ranks that have it."""
        is_last = self.layout is None or self.comm.data_ranks[-1] == self.comm.world.size - 1
        return is_last and local(parameter).numel() > 0

    @contextlib.contextmanager
    def out(self):
        with tempfile.TemporaryDirectory() as out:
            yield self.comm.world.broadcast_object(out)
            self.comm.world.barrier()


def a_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def mse(net, x, t):
    return ((net(x) - t) ** 2).mean()


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_of(net, name=""):
    values = {path: p.detach() for path, p in net.named_parameters()}
    return {name + path: (v.full_tensor() if isinstance(v, DTensor) else v).tolist() for path, v in values.items()}


def an_evaluator(target, every, batch=5, **settings):
    evaluator = extensions.Evaluator(SerialIterator(DATA, batch, repeat=False, shuffle=False), target, **settings)
    evaluator.trigger = (every, "iteration")
    return evaluator


def train(place, *parts, net=None, updates=4, keys=(), cls=StandardUpdater, data=DATA, batch=8, optimizer=None, **settings):
    """What a run has logged, and the parameters after it."""
    net = place.lay(a_net()) if net is None else net
    optimizer = torch.optim.AdamW(net.parameters(), 0.01) if optimizer is None else optimizer
    iterator = None if data is None else SerialIterator(data, batch, seed=1)
    updater = cls(iterator, optimizer, net, comm=place.comm, **{"loss_func": mse, **settings})
    with place.out() as out:
        trainer = Trainer(updater, (updates, "iteration"), out=out)
        for part in parts:
            trainer.extend(part)
        log = extensions.LogReport(trigger=(1, "iteration"))
        trainer.extend(log)
        trainer.run()
    reported = {key: [row.get(key) for row in log.log] for key in ("main/loss", *keys)}
    return reported | {name: p for model in updater.get_all_models().values() for name, p in parameters_of(model).items()}


# --- clipping ---


@feature_of_all_layouts
def clipping_by_norm(place):
    """Plain parameters and those of each mesh are one vector."""
    found = {}
    for norm_type in (1.0, 2.0, math.inf):
        callbacks = UpdateCallbacks(update_on_start=clip_grad_norm(0.2, norm_type))
        one = train(place, callbacks=callbacks, keys=["grad_norm"], updates=3)
        found |= {f"{norm_type}: {key}": value for key, value in one.items()}
    return found


@feature
def clipping_by_value(place):
    return train(place, callbacks=UpdateCallbacks(update_on_start=clip_grad_value(0.01)))


def poison(place, at):
    """A callback that puts NaN into the gradients of one shard of the first parameter."""

    def put_nan(context):
        parameter = context.updater.get_model("main").get_submodule("0").weight
        if context.iteration == at and place.holds_last(parameter):
            local(parameter.grad)[-1] = math.nan

    return put_nan


@feature_of_all_layouts
def a_norm_of_nan_in_one_shard(place):
    found = {}
    for norm_type in (1.0, 2.0, math.inf):
        callbacks = UpdateCallbacks(update_on_start=[poison(place, 1), clip_grad_norm(math.inf, norm_type)])
        found[str(norm_type)] = train(place, callbacks=callbacks, keys=["grad_norm"], updates=2)["grad_norm"]
    return found


def partial_net(place):
    """A layer norm over rows of which each rank of a model has some: of its gradients each has a part of a sum."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(0)), "3": SequenceParallel(sequence_dim=0)}
    plan["4"] = RowwiseParallel(input_layouts=Shard(0))
    return place.lay(a_net(), plan)


@feature
def gradients_that_are_parts_of_a_sum(place):
    found = {}
    for norm_type in (2.0, math.inf):
        callbacks = UpdateCallbacks(update_on_start=[clip_grad_norm(0.2, norm_type), clip_grad_value(0.1)])
        one = train(place, net=partial_net(place), callbacks=callbacks, keys=["grad_norm"], updates=3)
        found |= {f"{norm_type}: {key}": value for key, value in one.items()}
    return found


def tensor_parallel(function):
    return feature(function, {"tp"})


@tensor_parallel
def clipping_where_ranks_of_one_model_have_no_communicator(place):
    """The only ranks are those of one model, which see the same rows."""
    found = {}
    for norm_type in (2.0, math.inf):
        net, callbacks = (
            partial_net(place),
            UpdateCallbacks(update_on_start=[clip_grad_norm(0.2, norm_type), clip_grad_value(0.1)]),
        )
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        updater = StandardUpdater(SerialIterator(DATA, 8, seed=1), optimizer, net, loss_func=mse, callbacks=callbacks)
        for _ in range(3):
            updater.update()
        found |= parameters_of(net, f"{norm_type}: ")
    return found


# --- extensions ---


@feature_of_all_layouts
def an_average_of_the_parameters(place):
    net = place.lay(a_net())
    average = extensions.ExponentialMovingAverage(net, decay=0.8)
    evaluator = an_evaluator(average.model, 3, loss_func=mse)
    return train(place, average, evaluator, keys=["validation/main/loss"], net=net) | parameters_of(
        average.model, "average "
    )


@feature_of_all_layouts
def an_average_in_a_snapshot(place):
    found = {}
    with place.out() as out:
        for updates in (2, 4):
            net = place.lay(a_net())
            average = extensions.ExponentialMovingAverage(net, decay=0.8)
            iterator, optimizer = SerialIterator(DATA, 8, seed=1), torch.optim.AdamW(net.parameters(), 0.01)
            updater = StandardUpdater(iterator, optimizer, net, loss_func=mse, comm=place.comm)
            trainer = Trainer(updater, (updates, "iteration"), out=out)
            trainer.extend(average)
            trainer.extend(extensions.snapshot(autoload=True), trigger=(2, "iteration"))
            trainer.run()
            place.comm.world.barrier()
        found |= parameters_of(average.model, "average ") | parameters_of(net)
    return found


@feature_of_a_model
def an_average_made_between_the_calls_that_shard(place):
    """After `parallelize_module`, whose modules compute otherwise, and before `fully_shard`."""
    net = place.lay(a_net(), sharded=())
    average = extensions.ExponentialMovingAverage(net, decay=0.8)
    if place.layout != "tp":
        place.lay(net, plan={})
    return train(place, average, net=net, updates=3) | parameters_of(average.model, "average ")


@feature_of_all_layouts
def statistics_after_an_evaluation(place):
    net = place.lay(a_net())
    functions = {"norm": torch.linalg.vector_norm, "max": torch.max}
    statistics = extensions.ParameterStatistics(net, functions, trigger=(1, "iteration"))
    paths = [name.replace(".", "/") for name, _ in net.named_parameters()]
    keys = [f"main/{path}/{part}/{of}" for path in paths for part in ("data", "grad") for of in functions]
    return train(place, an_evaluator(net, 1), statistics, net=net, keys=[*keys, "validation/main/loss"], updates=4)


@feature_of_all_layouts
def a_step_that_is_left_out_for_nan_in_one_shard(place):
    callbacks = UpdateCallbacks(update_on_start=poison(place, 2))
    return train(place, extensions.FailOnNonNumber("skip"), callbacks=callbacks, updates=4)


@feature_of_all_layouts
def an_update_that_one_process_repeats(place):
    """The bundle of a step that is left out has the whole model, and the rows of the rank whose loss is NaN."""
    x = X.clone()
    x[SerialIterator(range(16), 8, seed=1).__next__()[-1], 0] = math.nan
    net = place.lay(a_net())
    updater = StandardUpdater(
        SerialIterator(list(zip(x, T, strict=True)), 8, seed=1), torch.optim.SGD(net.parameters(), 0.1), net, loss_func=mse,
        comm=place.comm,
    )  # fmt: skip
    with place.out() as out:
        trainer = Trainer(updater, (1, "iteration"), out=out)
        trainer.extend(extensions.FailOnNonNumber("skip"))
        trainer.run()
        place.comm.world.barrier()
        plain = a_net()
        for parameter in plain.parameters():
            nn.init.zeros_(parameter)
        again = StandardUpdater(SerialIterator(DATA, 8), torch.optim.SGD(plain.parameters(), 0.1), plain, loss_func=mse)
        extensions.FailOnNonNumber.replay(f"{out}/non_number_iter_1", again)
    return parameters_of(plain) | {"is repeated": bool(plain[0].weight.grad.isnan().any())}


@feature
def a_run_that_goes_back_for_nan_in_one_shard(place):
    callbacks = UpdateCallbacks(update_on_start=poison(place, 2))
    snapshot = extensions.snapshot()
    snapshot.trigger = (2, "iteration")
    return train(place, extensions.FailOnNonNumber("rollback"), snapshot, callbacks=callbacks, updates=4)


@feature_of_a_model
def a_best_value(place):
    found = []

    @extensions_of("note", triggers.MinValueTrigger("main/loss", (2, "iteration")))
    def note(trainer):
        found.append(trainer.updater.iteration)

    train(place, note, updates=8)
    return {"fired": found}


def extensions_of(name, trigger):
    def make(function):
        function.trigger, function.default_name = trigger, name
        return function

    return make


@feature_of_all_layouts
def counts_of_examples(place):
    """Those of ranks that see the same rows count once, as do operations; the peak of memory is that of all ranks."""
    names = ["throughput/examples_per_second", "throughput/iterations_per_second", "throughput/peak_memory_mib"]
    if place.comm.world.rank == place.comm.world.size - 1:
        torch.ones(16 << 20)  # 64 MiB, which make its peak that of all
    peaks = place.comm.world.gather_object(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    names.append("throughput/model_flops_per_second")
    found = train(place, extensions.Throughput((2, "iteration"), flops=True), keys=names)
    assert found["throughput/peak_memory_mib"][-1] >= max(peaks) - 1e-3
    examples, iterations, _, flops = (found[name] for name in names)
    counts = {"examples": examples, "flops": flops}
    return {key: [a and round(a / b, 6) for a, b in zip(of, iterations, strict=True)] for key, of in counts.items()}


@feature_of_a_model
def what_one_rank_writes(place):
    shown = io.StringIO()
    net = place.lay(a_net())
    iterator, optimizer = SerialIterator(DATA, 8, seed=1), torch.optim.AdamW(net.parameters(), 0.01)
    updater = StandardUpdater(iterator, optimizer, net, loss_func=mse, comm=place.comm)
    with place.out() as out:
        trainer = Trainer(updater, (4, "iteration"), out=out)
        trainer.extend(extensions.dump_graph("main/loss"))
        trainer.extend(extensions.Profiler(), trigger=(2, "iteration"))
        trainer.extend(extensions.ProgressBar(update_interval=1, out=shown))
        trainer.run()
        place.comm.world.barrier()
        files = sorted(path.name for path in Path(out).iterdir())
    return {"files": files, "only the main rank shows a bar": bool(shown.getvalue()) == place.comm.is_main}


@feature_of_a_model
def an_average_made_before_parallelize_module(place):
    """Its modules would compute on whole parameters."""
    net = a_net()
    average = extensions.ExponentialMovingAverage(net, decay=0.8)
    place.lay(net)
    words = ""
    try:
        average.update()
    except ValueError as error:
        words = str(error)
    return {"is refused": (place.layout is None) != ("make the average" in words)}


class Sum(nn.Module):
    """A metric that exchanges what it has counted, as one of torchmetrics, whose import takes three seconds of each rank."""

    def __init__(self, process_group):
        super().__init__()
        self.process_group = process_group
        self.reset()

    def reset(self):
        self.total = torch.zeros(())

    def update(self, values):
        self.total += values.sum()

    def sync(self):
        dist.all_reduce(self.total, group=self.process_group)

    def compute(self):
        if dist.is_initialized():
            self.sync()
        return self.total


@functools.partial(feature, layouts={"tp x fsdp"})
def a_metric_object(place):
    """One that exchanges what it has counted over all ranks would count rows more than once, and is refused."""
    found, words = [], ""
    for group in (None, None if place.layout is None else place.mesh["dp"].get_group()):
        net = place.lay(a_net())
        net[0].metric = Sum(group)

        def loss_func(net, x, t):
            net[0].metric.update(x[:, 0])
            report({"sum": net[0].metric}, net)
            return mse(net, x, t)

        evaluator, optimizer = an_evaluator(net, 1, batch=8, loss_func=loss_func), torch.optim.AdamW(net.parameters())
        updater = StandardUpdater(SerialIterator(DATA, 8), optimizer, net, loss_func=loss_func, comm=place.comm)
        evaluator.initialize(Trainer(updater, (1, "iteration")))
        try:
            found.append(evaluator.evaluate()["main/sum"])
        except ValueError as error:
            words = str(error)
    return {"sum": found[-1:], "is refused": (place.layout is None) != ("process_group=mesh" in words)}


@feature_of_a_model
def a_signal_to_one_rank(place):
    """All ranks end after the same iteration."""

    def send(trainer):
        if trainer.updater.iteration == 3 and place.comm.world.rank == place.comm.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    seen = []
    try:
        train(place, send, lambda trainer: seen.append(trainer.updater.iteration), updates=20)
    except SystemExit as error:
        ended = place.comm.world.gather_object((error.code, seen))
        return {"code": [error.code], "alike": all(each == ended[0] for each in ended), "early": seen[-1] < 8}


# --- updates ---


@feature_of_all_layouts
def updates_with_accumulation(place):
    return train(place, accumulate=3, batch=5, updates=8)


@functools.partial(feature, layouts={"tp x dp"})
def parameters_of_the_first_data_rank(place):
    """Those of the others do not count, as where each was seeded differently."""
    net = place.lay(a_net())
    for parameter in net.parameters() if place.comm.rank else ():
        nn.init.zeros_(local(parameter.detach()))
    return train(place, net=net, updates=1)


@feature
def accumulation_up_to_the_end_of_an_epoch(place):
    return train(place, accumulate=3, batch=5, accumulate_across_epochs=False)


@feature
def batches_with_fewer_rows_than_ranks(place):
    return train(place, data=DATA[:13], batch=4, updates=8)


@feature
def weights_of_tokens(place):
    def loss_func(net, x, t):
        mask = (x[:, 0] > -0.3).float()
        return {"loss": (((net(x) - t) ** 2)[:, 0] * mask).sum() / mask.sum().clamp(min=1), "weight": mask.sum()}

    return train(place, loss_func=loss_func, keys=["main/weight"], accumulate=2)


class TwoOptimizers(StandardUpdater):
    def update_core(self):
        x, t = self.next_batch()
        first, second = self.get_model("main"), self.get_model("second")
        self.backward(mse(first, x, t))
        self.step("main")
        self.backward(((second(x) - first(x).detach()) ** 2).mean())
        self.step("second")


@feature_of_all_layouts
def two_optimizers_by_turns(place):
    found = {}
    models = {"main": place.lay(a_net()), "second": place.lay(a_net())}
    optimizers = {name: torch.optim.AdamW(net.parameters(), 0.01) for name, net in models.items()}
    for accumulate in (1, 2):  # the models again, whose last forward had no backward
        updater = TwoOptimizers(SerialIterator(DATA, 4, seed=1), optimizers, models, comm=place.comm, accumulate=accumulate)
        with place.out() as out:
            Trainer(updater, (3, "iteration"), out=out).run()
        for name, net in updater.get_all_models().items():
            found |= parameters_of(net, f"{accumulate} {name} ")
    return found


@feature_of_all_layouts
def fp16_with_an_overflow_in_one_shard(place):
    """All ranks leave the step out, and lower the scale once: the moments of the optimizer count the steps."""
    net = place.lay(a_net())
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    callbacks = UpdateCallbacks(comm_on_finish=poison(place, 2))
    loss_func = lambda net, x, t: mse(net, x, t) * 1e-3  # noqa: E731 - which does not overflow by itself
    train(place, net=net, optimizer=optimizer, precision="fp16", callbacks=callbacks, loss_func=loss_func)
    return {"steps": [float(optimizer.state[p]["step"]) for p in net.parameters()]}


@feature_of_a_model
def a_loss_that_is_sharded(place):
    linear = RowwiseParallel(input_layouts=Replicate(), use_local_output=False)
    net = place.lay(a_net(), PLAN | {"4": linear})

    def loss_func(net, x, t):
        y = net(x)
        loss = ((y - DTensor.from_local(t, y.device_mesh, [Replicate()]) if isinstance(y, DTensor) else y - t) ** 2).mean()
        return {"loss": loss, "double": loss * 2, "weight": (loss * 0 + len(x)).detach()}

    keys = ["main/double", "validation/main/loss"]
    return train(place, an_evaluator(net, 3), net=net, loss_func=loss_func, keys=keys)


@feature_of_a_model
def a_loss_over_shards_of_the_classes(place):
    """As `loss_parallel` computes it."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "2": ColwiseParallel(use_local_output=False)}
    net = place.lay(net, plan)
    data = [(x, index % 4) for index, x in enumerate(X)]
    loss_func = lambda net, x, t: nn.functional.cross_entropy(net(x), t)  # noqa: E731
    with contextlib.nullcontext() if place.layout is None else loss_parallel():
        return train(place, net=net, data=data, loss_func=loss_func)


@feature
def running_statistics(place):
    """Those of all rows, or where ranks share the rows of those of one rank, and the same on all ranks."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    net = place.lay(net, {"2": RowwiseParallel(input_layouts=Replicate())}, sharded=("0", "2"))
    found = train(place, net=net, optimizer=torch.optim.SGD(net.parameters(), 0.01))
    buffers = [buffer.tolist() for buffer in net.buffers()]
    are_same = len(set(map(str, place.comm.world.gather_object(buffers)))) == 1
    return {"same": are_same} | ({} if place.comm.size > 1 else found | {"buffers": buffers[:2]})


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = checkpoint(module, x, use_reentrant=False)
        return x


@feature_of_a_model
def activation_checkpointing(place):
    return train(place, net=place.lay(Checkpointed(*a_net())))


@feature_of_a_model
def updates_without_data(place):
    return train(place, data=None, loss_func=lambda net: mse(net, X, T))


@feature_of_a_model
def parameters_in_parts_are_left_uncompiled_with_a_warning(place):
    on_mesh = place.layout is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(place, compile=on_mesh, updates=3)
    return found | {"said": on_mesh == any("sharded parameters" in str(warning.message) for warning in caught)}


class OwnClosure(StandardUpdater):
    def update_core(self):
        x, t = self.next_batch()

        def closure():
            loss = mse(self.get_model("main"), x, t)
            self.backward(loss, retain_graph=True)
            return loss

        self.step(closure=closure)


@feature
def steps_by_closures(place):
    return train(place, cls=OwnClosure, accumulate=2)


@feature_of_a_model
def a_quasi_newton_method(place):
    net = a_net()  # plain, as it has to be
    return train(place, net=net, optimizer=torch.optim.LBFGS(net.parameters(), max_iter=4), updates=2)


# --- the ranks ---


def all_cases(world, layouts):
    found = {}
    for layout in layouts:
        place = Place(layout)
        for case, function in CASES.items():
            if case[0] == layout:
                try:
                    found[case] = function(place)
                except Exception as error:
                    return found | {case: "".join(traceback.format_exception(error))}
    return found


@functools.cache
def of_one_process():
    return all_cases(None, [None])


@functools.cache
def of_ranks(size):
    layouts = [layout for layout, shape in LAYOUTS.items() if math.prod(shape) == size]
    return on_ranks(size, all_cases, layouts, seconds=400)


@pytest.mark.parametrize(("layout", "name"), [case for case in CASES if case[0] is not None])
def test_a_part_of_the_loop_works_on_a_mesh_as_in_one_process(layout, name):
    """What it logs and the parameters after it, on every rank of the mesh."""
    for rank in of_ranks(math.prod(LAYOUTS[layout])):
        assert isinstance(rank, dict), rank
        found = rank.get((layout, name), "the ranks have stopped before")
        assert isinstance(found, dict), found
        for key, expected in of_one_process()[None, name].items():
            if key in found or name != "running_statistics":
                assert_close(key, found[key], expected)


def assert_close(key, found, expected):
    if isinstance(expected, list) and isinstance(expected[0], float | list | None):
        one, other = (torch.tensor([math.nan if x is None else x for x in each]) for each in (found, expected))
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-5, equal_nan=True, msg=lambda text: f"{key}: {text}")
    else:
        assert found == expected, key
