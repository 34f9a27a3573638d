"""A run in which memory runs out where a test says, beside the run in which it does not."""

import contextlib
import contextvars
import io
import random
import shutil
import tempfile
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import chainring
from chainring import iterators, report, training
from chainring.datasets import TupleDataset
from chainring.training import extensions

ERRORS = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
    lambda: MemoryError("Unable to allocate 2.00 GiB for an array"),
)
STAGES = ("batch", "first", "last", "backward", "step", "evaluation", "snapshot")
RETRIED = STAGES[:4]
VIRTUAL, LENGTH = 3, 6


class Plan:
    """Memory runs out at the call ``number`` of a stage, and at the ``times - 1`` calls of that stage after it.

    Attributes:
        calls: how often each stage was passed, kept where no state is looked for.
    """

    def __init__(self, stage=None, number=0, times=1, kind=0):
        self.stage, self.numbers, self.kind = stage, range(number, number + times), kind
        calls = dict.fromkeys(STAGES, 0)
        self._calls = contextvars.ContextVar("calls", default=calls)

    @property
    def calls(self):
        return self._calls.get()

    def passes(self, stage):
        self.calls[stage] += 1
        if stage == self.stage and self.calls[stage] in self.numbers:
            raise ERRORS[self.kind]()


class Passing(torch.autograd.Function):
    """The values as they are; the plan is asked in the backward."""

    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.plan.passes("backward")
        return gradient, None


class Counted:
    """A metric that counts in place."""

    def __init__(self):
        self.seen = torch.zeros(2, dtype=torch.int64)

    def add(self, x):
        self.seen += torch.tensor([len(x), 1])

    def reset(self):
        self.seen = torch.zeros(2, dtype=torch.int64)

    def compute(self):
        return float(self.seen[0]) + float(self.seen[1]) / 1000


class Net(nn.Module):
    """Draws from every generator, has running statistics and a metric."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.counted = Counted()

    def forward(self, x, t):
        if not self.training:
            self.plan.passes("evaluation")
            return (self.last(self.norm(self.first(x)).relu()) - t).square().mean()
        self.plan.passes("first")
        h = Passing.apply(torch.dropout(self.norm(self.first(x)).relu(), 0.3, True), self.plan)
        h = h * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        self.counted.add(x)
        report({"mean": h.mean(), "counted": self.counted}, self)
        self.plan.passes("last")
        return (self.last(Passing.apply(h, self.plan)) - t).square().mean()


class Held(training.Extension):
    """Has state; the plan is asked when it is saved."""

    def __init__(self, plan):
        self.plan = plan

    def __call__(self, trainer):
        pass

    def serialize(self, serializer):
        if isinstance(serializer, chainring.serializers.Serializer):
            self.plan.passes("snapshot")
        serializer("nothing", 0)


class Own(training.StandardUpdater):
    """The default update, written out."""

    def update_core(self):
        x, t = self.next_batch()
        with self.autocast():
            loss = self.get_model("main")(x, t)
        self.backward(loss)
        self.step()


def trained(comm, plan, *, updater_class=training.StandardUpdater, wraps=False, data=48, **settings):
    """Everything that a run leaves; or, if it ends by an error, its text with the notes."""
    chainring.deterministic(0)
    model, settings = Net(plan), {"virtual_ranks": VIRTUAL, **settings}
    wrapped = DistributedDataParallel(model) if wraps else model
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: plan.passes("step"))
    examples = TupleDataset(torch.randn(data, 4), torch.randn(data, 1))

    def convert(batch, device):
        plan.passes("batch")
        return chainring.converters.concat_examples(batch, device)

    iterator = iterators.SerialIterator(examples, 8, seed=1)
    updater = updater_class(iterator, optimizer, wrapped, converter=convert, comm=comm, **settings)
    out = tempfile.mkdtemp() if comm is None else comm.broadcast_object(tempfile.mkdtemp())
    trainer = training.Trainer(updater, (LENGTH, "iteration"), out=out)
    passes = iterators.SerialIterator(examples, 16, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(passes, wrapped), trigger=(3, "iteration"))
    trainer.extend(extensions.Recorder())
    trainer.extend(log := extensions.LogReport(trigger=(1, "iteration")))
    trainer.extend(extensions.Throughput(trigger=(2, "iteration")))
    trainer.extend(extensions.snapshot(), trigger=(2, "iteration"))
    trainer.extend(Held(plan), trigger=(1, "iteration"))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.run()
    except Exception as error:
        failure = error if comm is None else comm.failed(error)
        return "\n".join([f"{type(failure).__name__}: {failure}", *getattr(failure, "__notes__", ())])
    rows = [{key: value for key, value in row.items() if "time" not in key and "throughput" not in key} for row in log.log]
    tensors = [*model.state_dict().items(), *((str(n), s["exp_avg"]) for n, s in enumerate(optimizer.state.values()))]
    recorded = None
    if comm is None or comm.is_main:  # the only rank that writes there, and removes it
        with open(f"{out}/recorder.bin", "rb") as file:
            recorded = file.read()
        shutil.rmtree(out)
    return {
        "tensors": {name: tensor.numpy().tobytes() for name, tensor in tensors},
        "rows": repr(rows),
        "recorded": recorded,
        "generators": (torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())),
        "counted": model.counted.seen.tolist() if comm is None else None,
        "said": said.getvalue(),
        "calls": plan.calls,
    }


BITS = ("tensors", "rows", "recorded", "generators", "counted")


def trained_on_ranks(comm, failing, plans, settings):
    """What `trained` returns with each of some plans, of which the rank ``failing`` alone knows."""
    return [trained(comm, Plan(*plan) if comm.rank == failing else Plan(), **settings) for plan in plans]
