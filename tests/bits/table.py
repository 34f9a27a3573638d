"""A digest of what updates compute, for some hundred settings: two trees that agree in it compute the same bits.

    python tests/bits/table.py --write FILE      # of the package that is imported
    python tests/bits/table.py --compare FILE    # names the settings that differ, and in what; exit code 1 if any does
    python tests/bits/table.py --only accumulate # with either: the settings whose names contain that

It also names the settings that should compute the same bits as another one, such as with an audit, and do not.

Each setting is a short run of a trainer. Of it are kept the parameters, the buffers, the state of the optimizers, what is
reported in each iteration, the weights and counts of its updates, the stages that callbacks see, and the generators in the
end, of which each rank has its own. Only public names are used, so that a tree from before a change can be asked as well.
"""

import argparse
import contextvars
import hashlib
import itertools
import json
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

from chainring import report
from chainring.datasets import TupleDataset
from chainring.iterators import SerialIterator
from chainring.nn import Classifier
from chainring.parallel import DataParallel
from chainring.training import (
    ParallelUpdater,
    StandardUpdater,
    Trainer,
    UpdateCallbacks,
    clip_grad_norm,
    make_extension,
)
from rank_pair import on_ranks

STAGES = [
    "batch_on_finish", "forward_on_start", "forward_on_finish", "backward_on_start", "backward_on_finish", "comm_on_start",
    "comm_on_finish", "update_on_start", "update_on_finish",
]  # fmt: skip
UPDATES = 12
SAME = {}  # name of a setting -> that of another with the same bits, and in what; in all if None
SETTINGS = {}  # name -> (number of ranks, function of a communicator that returns a trainer, or how a run goes)


def data(rows=103, width=12):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, width, generator=generator)
    return TupleDataset(x.numpy(), torch.randint(0, 3, (rows,), generator=generator).numpy())


def network(drops=True, norm=True, width=12):
    torch.manual_seed(1)
    layers = [nn.Linear(width, 9), nn.BatchNorm1d(9) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.2) if drops else nn.Identity(), nn.Linear(9, 3))


def weighted(model, x, t):
    """Weights each loss by its number of tokens, which differs from that of its rows."""
    counted = (t > 0).float()
    losses = F.cross_entropy(model.predictor(x), t, reduction="none")
    return {"loss": (counted * losses).sum() / counted.sum(), "weight": counted.sum()}


def iterator(repeat=True, batch_size=10, rows=103):
    return SerialIterator(data(rows), batch_size, repeat=repeat, seed=3)


class Seen:
    """Callbacks of all stages, which note what they see."""

    def __init__(self, *stages):
        self.rows = []
        self.callbacks = UpdateCallbacks(**{stage: self.note(stage) for stage in stages or STAGES})

    def note(self, stage):
        def note(context):
            loss = None if context.loss is None else repr(float(context.loss))
            gradients = [p.grad is not None for p in context.updater.get_model("main").parameters()]
            self.rows.append((stage, context.iteration, context.micro_step, context.examples, loss, gradients))

        return note


def trainer_of(updater, seen=None, updates=UPDATES):
    trainer = Trainer(updater, (updates, "iteration"), out=updater.comm.gather_object(tempfile.mkdtemp())[0])
    trainer.rows = []

    @make_extension(trigger=(1, "iteration"), default_name="rows")
    def note(trainer):
        own = trainer.updater
        observation = {key: numbers(value) for key, value in sorted(trainer.observation.items())}
        counts = [own.iteration, own.epoch, repr(own.epoch_detail), repr(own.previous_epoch_detail), own.is_new_epoch]
        trainer.rows.append([observation, numbers(own.weight), counts])

    trainer.extend(note)
    trainer.seen = seen
    return trainer


def numbers(value):
    if isinstance(value, tuple):
        return list(map(numbers, value))
    return repr(float(value)) if isinstance(value, (int, float)) or hasattr(value, "__float__") else str(value)


def feed(digest, value):
    """Add a nested value to a digest, tensors by their bytes."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            digest.update(repr(key).encode())
            feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        for item in value:
            feed(digest, item)
        digest.update(b"]")
    else:
        digest.update(repr(value).encode())


def digest_of(value):
    digest = hashlib.blake2b(digest_size=8)
    feed(digest, value)
    return digest.hexdigest()


def result(trainer):
    """Return a digest of each thing that a run leaves."""
    updater = trainer.updater
    models, optimizers = updater.get_all_models().values(), updater.get_all_optimizers().values()
    generators = [torch.get_rng_state(), random.getstate(), list(map(str, np.random.get_state()))]
    return {
        "parameters": digest_of([list(model.parameters()) for model in models]),
        "buffers": digest_of([list(model.buffers()) for model in models]),
        "optimizers": digest_of([optimizer.state_dict() for optimizer in optimizers]),
        "observations": digest_of([row[0] for row in trainer.rows]),
        "weights": digest_of([row[1] for row in trainer.rows]),
        "counts": digest_of([row[2] for row in trainer.rows]),
        "stages": digest_of(trainer.seen.rows if trainer.seen else []),
        "generators": digest_of(generators),
    }


def ddp(model):
    return DistributedDataParallel(model)


def viewed(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer is not model:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def seed():
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def setting(name, ranks=1, **arguments):
    """Register a function of a communicator (``None`` of one process) and arguments, which returns a trainer."""

    def register(function):
        if name.startswith("1 ranks") and arguments.get("wrap") in (ddp, sharded):
            return function  # there is no process group
        SETTINGS[name] = ranks, lambda comm: function(comm, **arguments)
        return function

    return register


def run(comm, name):
    seed()
    trainer = SETTINGS[name][1](comm)
    if isinstance(trainer, Trainer):
        trainer.run()
        return result(trainer)
    first, second = trainer  # the second continues what the first has begun
    first.run()
    state = first.state_dict()
    seed()
    second.load_state_dict(state)
    second.run()
    return result(second)


# --- one process ---


def classifier(comm, *, updates=UPDATES, clips=False, is_weighted=False, repeat=True, optimizer=torch.optim.AdamW, seen=None,
               wrap=None, drops=True, norm=True, batch_size=10, rows=103, **settings):  # fmt: skip
    model = Classifier(network(drops, norm))
    if wrap is not None:
        model = wrap(model)
    trained = optimizer(model.parameters(), 1e-2)
    if clips:
        seen = Seen("update_on_start", "update_on_finish") if seen is None else seen
        seen.callbacks.add("update_on_start", clip_grad_norm(0.5))
    callbacks = None if seen is None else seen.callbacks
    source = iterator(repeat, batch_size, rows)
    loss = weighted if is_weighted else None
    return trainer_of(
        StandardUpdater(source, trained, model, loss_func=loss, comm=comm, callbacks=callbacks, **settings), seen, updates
    )


for k, precision, clips, repeat, is_weighted in itertools.product(
    (1, 2, 3), ("fp32", "bf16", "fp16"), (False, True), (True, False), (False, True)
):
    words = ["clipped"] * clips + ["ends"] * (not repeat) + ["weighted"] * is_weighted
    setting(
        " ".join([f"accumulate={k}", precision, *words]),
        accumulate=k, precision=precision, clips=clips, repeat=repeat, is_weighted=is_weighted,
    )(classifier)  # fmt: skip

for k in (1, 2, 3):
    setting(f"all stages, accumulate={k}", accumulate=k)(lambda comm, **s: classifier(comm, seen=Seen(), **s))
    setting(f"all stages, fp16, accumulate={k}", accumulate=k, precision="fp16")(
        lambda comm, **s: classifier(comm, seen=Seen(), **s)
    )
    setting(f"within epochs, accumulate={k}", accumulate=k, accumulate_across_epochs=False)(classifier)
    setting(f"within epochs, ends, accumulate={k}", accumulate=k, accumulate_across_epochs=False, repeat=False)(classifier)


class Gan(StandardUpdater):
    """Two models, of which each has its own loss; that of the generator reaches the critic too."""

    def update_core(self):
        x, _ = self.next_batch()
        with self.autocast():
            fake = self.get_model("main")(x)
            loss = self.get_model("critic")(fake).mean()
        self.backward(loss)
        self.step("main")
        with self.autocast():
            loss = self.get_model("critic")(x).mean() - self.get_model("critic")(fake.detach()).mean()
        self.backward(loss)
        self.step("critic")
        report({"drawn": torch.rand(()), "critic": loss.detach()})


def gan(
    comm,
    *,
    updates=UPDATES,
    seen=None,
    cls=Gan,
    repeat=True,
    wrap=lambda model: model,
    optimizer=torch.optim.Adam,
    **settings,
):
    torch.manual_seed(2)
    body = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.1), nn.Linear(12, 12))
    models = {"main": wrap(body), "critic": wrap(nn.Linear(12, 1))}
    optimizers = {name: optimizer(model.parameters(), 1e-2) for name, model in models.items()}
    callbacks = None if seen is None else seen.callbacks
    return trainer_of(cls(iterator(repeat), optimizers, models, comm=comm, callbacks=callbacks, **settings), seen, updates)


for k in (1, 2, 3):
    setting(f"gan, accumulate={k}", accumulate=k)(gan)
    setting(f"gan, all stages, ends, accumulate={k}", accumulate=k, repeat=False)(
        lambda comm, **s: gan(comm, seen=Seen(), **s)
    )
    setting(f"gan, fp16, accumulate={k}", accumulate=k, precision="fp16")(gan)
    setting(f"gan, within epochs, accumulate={k}", accumulate=k, accumulate_across_epochs=False)(gan)


class TwoBatches(StandardUpdater):
    """An update of two batches of the main iterator, and a step between them."""

    def update_core(self):
        for _ in range(2):
            with self.autocast():
                loss = self.get_model("main")(*self.next_batch())
            self.backward(loss)
            self.step()


class ByItself(StandardUpdater):
    """An update that takes PyTorch's own way."""

    def update_core(self):
        loss = self.get_model("main")(*self.next_batch())
        loss.backward()
        self.get_optimizer("main").step()
        self.get_optimizer("main").zero_grad()


class InTurn(StandardUpdater):
    """The default update with stages of its own."""

    def autocast(self):
        report({"drawn": torch.rand(())})
        return super().autocast()

    def next_batch(self, name="main"):
        x, t = super().next_batch(name)
        return x * 2, t


def own(comm, *, cls, seen=None, wrap=None, optimizer=torch.optim.AdamW, repeat=True, **settings):
    model = Classifier(network()) if wrap is None else wrap(Classifier(network()))
    callbacks = None if seen is None else seen.callbacks
    updater = cls(iterator(repeat), optimizer(model.parameters(), 1e-2), model, comm=comm, callbacks=callbacks, **settings)
    return trainer_of(updater, seen)


for k in (1, 2):
    setting(f"two batches, accumulate={k}", cls=TwoBatches, accumulate=k)(own)
    setting(f"own stages, accumulate={k}", cls=InTurn, accumulate=k)(own)
setting("by itself", cls=ByItself)(own)


def two_optimizers(comm, *, wrap=None, seen=None, **settings):
    model = Classifier(network()) if wrap is None else wrap(Classifier(network()))
    first, *rest = model.parameters()
    optimizers = {"main": torch.optim.AdamW([first], 1e-2), "second": torch.optim.SGD(rest, 0.1, momentum=0.9)}
    callbacks = None if seen is None else seen.callbacks
    return trainer_of(StandardUpdater(iterator(), optimizers, model, comm=comm, callbacks=callbacks, **settings), seen)


for k in (1, 3):
    setting(f"two optimizers, accumulate={k}", accumulate=k)(lambda comm, **s: two_optimizers(comm, seen=Seen(), **s))


def without_data(comm, *, seen=None, **settings):
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    callbacks = None if seen is None else seen.callbacks
    updater = StandardUpdater(
        None, torch.optim.SGD(model.parameters(), 0.1), model, comm=comm, callbacks=callbacks,
        loss_func=lambda model: (model(torch.randn(2, 3)) - 1).square().mean(), **settings,
    )  # fmt: skip
    return trainer_of(updater, seen)


for k in (1, 2):
    setting(f"without data, accumulate={k}", accumulate=k)(without_data)
    setting(f"without data, all stages, accumulate={k}", accumulate=k)(
        lambda comm, **s: without_data(comm, seen=Seen(), **s)
    )


# --- closures ---


def lbfgs(parameters, rate):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


class ByClosure(StandardUpdater):
    """Closures of an update's own, of which one weights its loss itself and one does not; a backward comes before one."""

    def update_core(self):
        x, t = self.next_batch()
        self.backward(self.get_model("main").predictor(x).square().mean())
        for weighs in (True, False):

            def closure(weighs=weighs):
                with self.autocast():
                    loss = self.get_model("main")(x, t)
                if weighs:
                    self.backward(loss, weight=len(x) + 1)
                else:
                    loss.backward()
                return loss

            self.step(closure=closure)


for k in (1, 2, 3):
    setting(f"closures, accumulate={k}", accumulate=k, optimizer=lbfgs)(lambda comm, **s: classifier(comm, seen=Seen(), **s))
    setting(f"closures, clipped, ends, accumulate={k}", accumulate=k, optimizer=lbfgs, clips=True, repeat=False)(classifier)
    setting(f"closures of its own, accumulate={k}", cls=ByClosure, accumulate=k, optimizer=lbfgs)(
        lambda comm, **s: own(comm, seen=Seen(), **s)
    )
setting("closures, bf16, weighted", optimizer=lbfgs, precision="bf16", is_weighted=True, accumulate=2)(classifier)


# --- compiled, replicas, changed batches ---

for name, settings in {
    "plain": {},
    "accumulate=2": {"accumulate": 2},
    "fp16": {"precision": "fp16"},
    "weighted": {"is_weighted": True},
}.items():
    setting(f"compiled, {name}", compile=True, **settings)(classifier)
setting("compiled, batch callback", compile=True)(lambda comm, **s: classifier(comm, seen=Seen("batch_on_finish"), **s))


def in_replicas(comm, *, count, seen=None, optimizer=torch.optim.AdamW, is_weighted=False, batch_size=10, norm=True):
    model = Classifier(network(norm=norm))
    devices = {"main": "cpu", **{f"replica{i}": "cpu" for i in range(1, count)}}
    updater = ParallelUpdater(
        iterator(batch_size=batch_size), optimizer(model.parameters(), 1e-2), model, devices=devices,
        loss_func=weighted if is_weighted else None,
    )  # fmt: skip
    if seen is not None:
        updater.callbacks = seen.callbacks
    return trainer_of(updater, seen)


for count in (1, 2, 3):
    setting(f"replicas={count}", count=count)(lambda comm, **s: in_replicas(comm, seen=Seen(), **s))
setting("replicas=2, weighted", count=2, is_weighted=True)(in_replicas)
setting("replicas=3, closures", count=3, optimizer=lbfgs)(in_replicas)
setting("replicas=3, two rows", count=3, batch_size=2, norm=False)(in_replicas)
setting("data parallel", wrap=lambda model: DataParallel(model, ["cpu", "cpu"]))(classifier)
setting("data parallel, accumulate=2", accumulate=2, wrap=lambda model: DataParallel(model, ["cpu"] * 3))(classifier)


def resumed(comm, *, make, **settings):
    return make(comm, **settings), make(comm, updates=UPDATES + 5, **settings)


setting("resumed", make=classifier)(resumed)
setting("resumed, accumulate=3, clipped", make=classifier, accumulate=3, clips=True)(resumed)
setting("resumed, fp16, within epochs", make=classifier, accumulate=2, precision="fp16", accumulate_across_epochs=False)(
    resumed
)
setting("resumed, closures", make=classifier, optimizer=lbfgs)(resumed)
setting("resumed, gan", make=gan, accumulate=2)(resumed)
setting("resumed, virtual=3", make=classifier, virtual_ranks=3)(resumed)
setting("resumed, virtual=2, gan", make=gan, virtual_ranks=2)(resumed)


# --- several ranks ---


class Sparse(nn.Module):
    """Some parameters that only some ranks, or none, touch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body, self.rare, self.never = nn.Linear(12, 3), nn.Linear(1, 1), nn.Linear(2, 2)

    def forward(self, x, t):
        loss = F.cross_entropy(self.body(x), t)
        return loss + self.rare(loss.view(1, 1)).sum() if len(x) % 2 else loss


def rarely(comm, **settings):
    model = Sparse()
    return trainer_of(StandardUpdater(iterator(), torch.optim.AdamW(model.parameters(), 1e-2), model, comm=comm, **settings))


for n in (1, 2, 3):
    setting(f"{n} ranks", n, batch_size=11)(classifier)
    setting(f"{n} ranks, accumulate=2, weighted", n, accumulate=2, is_weighted=True, repeat=False, norm=False)(classifier)
    setting(f"{n} ranks, all stages, accumulate=2", n, accumulate=2)(lambda comm, **s: classifier(comm, seen=Seen(), **s))
    setting(f"{n} ranks, clipped", n, clips=True)(classifier)
    setting(f"{n} ranks, gan, accumulate=2", n, accumulate=2)(gan)
    setting(f"{n} ranks, gan", n)(lambda comm, **s: gan(comm, seen=Seen(), **s))
    setting(f"{n} ranks, closures, accumulate=2", n, accumulate=2, optimizer=lbfgs)(classifier)
    setting(f"{n} ranks, rarely", n)(rarely)
    setting(f"{n} ranks, ddp", n, wrap=ddp, norm=False)(classifier)
    setting(f"{n} ranks, ddp, accumulate=2", n, wrap=ddp, accumulate=2, repeat=False, norm=False)(classifier)
    setting(f"{n} ranks, fp16, accumulate=2", n, accumulate=2, precision="fp16")(classifier)
    setting(f"{n} ranks, sharded", n, wrap=sharded, norm=False, accumulate=1, clips=True)(classifier)
    setting(f"{n} ranks, sharded, accumulate=2", n, wrap=sharded, norm=False, accumulate=2, repeat=False)(classifier)
    setting(f"{n} ranks, virtual=3", n, virtual_ranks=3)(classifier)
    setting(f"{n} ranks, virtual=4, accumulate=2, weighted", n, virtual_ranks=4, accumulate=2, is_weighted=True)(classifier)
    setting(f"{n} ranks, virtual=4, gan", n, virtual_ranks=4)(gan)
    setting(f"{n} ranks, virtual=3, gan, accumulate=2, ends", n, virtual_ranks=3, accumulate=2, repeat=False)(gan)
    setting(f"{n} ranks, virtual=3, clipped, within epochs", n, virtual_ranks=3, clips=True, accumulate=2,
            accumulate_across_epochs=False)(classifier)  # fmt: skip
    setting(f"{n} ranks, virtual=4, sharded", n, virtual_ranks=4, wrap=sharded, norm=False)(classifier)
    setting(f"{n} ranks, virtual=3, three rows", n, virtual_ranks=3, norm=False, batch_size=3, rows=7, repeat=False)(
        classifier
    )
    setting(f"{n} ranks, virtual=3, fp16", n, virtual_ranks=3, precision="fp16")(classifier)
setting("2 ranks, virtual=2", 2, virtual_ranks=2)(classifier)
setting("2 ranks, virtual=2, rarely", 2, virtual_ranks=2)(rarely)
setting("2 ranks, virtual=3, ddp", 2, virtual_ranks=3, wrap=ddp)(classifier)
setting("2 ranks, virtual=3, two batches", 2, virtual_ranks=3, cls=TwoBatches)(own)
setting("2 ranks, ddp views, gan, accumulate=3", 2, wrap=viewed, accumulate=3)(gan)
setting("2 ranks, ddp views, accumulate=3", 2, wrap=viewed, accumulate=3)(classifier)
setting("2 ranks, ddp, closures", 2, wrap=ddp, optimizer=lbfgs, accumulate=2)(classifier)
setting("2 ranks, sharded, gan", 2, wrap=sharded, accumulate=2)(gan)
setting("2 ranks, three rows", 2, batch_size=2, rows=7, norm=False)(classifier)
setting("2 ranks, two optimizers, accumulate=2", 2, accumulate=2)(lambda comm, **s: two_optimizers(comm, seen=Seen(), **s))
setting("2 ranks, within epochs, ddp", 2, accumulate=3, accumulate_across_epochs=False, wrap=ddp)(classifier)
setting("2 ranks, resumed", 2, make=classifier, accumulate=2)(resumed)
setting("2 ranks, without data", 2)(without_data)


# --- the same bits as without ---


def also(name, what, function=classifier, keys=None, **arguments):
    """Register a setting that computes the bits of another one, of all or of some keys."""
    SAME[f"{name}, {what}"] = name, keys
    setting(f"{name}, {what}", int(name[0]), **arguments)(function)


def exhausted(model):
    """Lacks memory in every fifth forward, but not when that is tried again."""
    calls = contextvars.ContextVar("calls")  # in which no state is looked for
    calls.set(itertools.count(1))

    def fail(*_):
        if next(calls.get()) % 5 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(fail)
    return model


def uneven(model):
    """Is slow on rank 1."""
    model.register_forward_pre_hook(lambda *_: time.sleep(0.01 * torch.distributed.get_rank()))
    return model


OF_ONE = ["parameters", "buffers", "optimizers", "counts"]  # each rank that may survive reports and draws what all have
for n in (1, 2, 3):
    also(f"{n} ranks, virtual=3", "audit=1", virtual_ranks=3, audit=1)
    also(f"{n} ranks, virtual=3", "memory", virtual_ranks=3, wrap=exhausted)
    if n > 1:
        also(f"{n} ranks, virtual=3", "survive", keys=OF_ONE, virtual_ranks=3)
        also(f"{n} ranks", "survive", keys=OF_ONE, batch_size=11)
        also(f"{n} ranks, accumulate=2, weighted", "survive", keys=OF_ONE, accumulate=2, is_weighted=True, repeat=False,
             norm=False)  # fmt: skip
        also(f"{n} ranks, gan, accumulate=2", "survive", gan, OF_ONE, accumulate=2)
        also(f"{n} ranks, rarely", "survive", rarely, OF_ONE)
also("2 ranks, virtual=3", "dealt by speed", virtual_ranks=3, balance="speed", wrap=uneven)
also("2 ranks, virtual=4, accumulate=2, weighted", "audit=2", virtual_ranks=4, accumulate=2, is_weighted=True, audit=2)


def of_ranks(comm, names):
    """Return the digests of this rank, up to the first setting that fails: the others would wait for it."""
    found = {}
    for name in names:
        found[name] = of_setting(comm, name)
        if "error" in found[name]:
            break
    return found


def of_setting(comm, name):
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run(comm, name)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def table(only=""):
    """Return the digests of each setting, of several ranks in a list."""
    chosen = [name for name in SETTINGS if only in name]
    digests = {name: of_setting(None, name) for name in chosen if SETTINGS[name][0] == 1 and " ranks" not in name}
    for size, survive in itertools.product((1, 2, 3), (False, True)):
        names = [name for name in chosen if name.startswith(f"{size} ranks") and name.endswith(", survive") == survive]
        for rank in on_ranks(size, of_ranks, names, seconds=600, survive=survive) if names else ():
            for name in names:
                missing = {"error": "not run" if isinstance(rank, dict) else str(rank)}
                digests.setdefault(name, []).append(rank.get(name, missing) if isinstance(rank, dict) else missing)
    return digests


def differences(expected, found):
    """Yield the names of settings that differ, each with what differs."""
    for name, digests in found.items():
        for rank, (before, now) in enumerate(zip(as_list(expected.get(name)), as_list(digests), strict=False)):
            if before != now:
                is_told = isinstance(before, dict) and isinstance(now, dict)
                keys = [key for key in {**before, **now} if before.get(key) != now.get(key)] if is_told else [now]
                errors = [now["error"]] if is_told and "error" in now else []
                yield f"{name}, rank {rank}: {', '.join(map(str, [*keys, *errors]))}"


def unlike(found):
    """Yield the names of settings that do not compute the bits of the other one, each with what differs."""
    for name, (other, keys) in SAME.items():
        if name in found and other in found:
            for rank, pair in enumerate(zip(found[name], found[other], strict=True)):
                if differing := [key for key in keys or pair[1] if pair[0].get(key) != pair[1].get(key)]:
                    yield f"{name}, rank {rank}, is not {other}: {', '.join(differing)}"


def as_list(digests):
    return digests if isinstance(digests, list) else [digests]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    found = table(given.only)
    if given.write:
        given.write.write_text(json.dumps(found, indent=1))
    errors = [name for name, digests in found.items() if any("error" in rank for rank in as_list(digests))]
    different = list(differences(json.loads(given.compare.read_text()), found)) if given.compare else []
    different += unlike(found)
    print(*different, sep="\n")
    print(f"{len(found)} settings, {len(different)} differ; refused: {errors}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
