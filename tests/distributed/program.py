"""One rank of a run: the digits, in one process or as one of several, by options.

python program.py PLACE OPTIONS    where OPTIONS is the JSON of `Options`
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from layouts import MESHES, Blocks, lay_out
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import chainring
import chainring.writers
from chainring import _random, datasets, iterators, training
from chainring._distributed.sharding import to_full
from chainring.converters import concat_examples
from chainring.nn import Classifier
from chainring.parallel import create_communicator
from chainring.training import extensions

CODE = 128 + signal.SIGTERM


@dataclass
class Fault:
    """What befalls a rank.

    Attributes:
        kind: ``"kill"`` SIGKILL, ``"term"`` SIGTERM, ``"write"`` SIGKILL in its next snapshot's write, ``"machine"`` SIGKILL
            of its launcher as well; ``"example"`` and ``"loss"`` raise there, ``"slow"`` holds the rank up in every update
            and ``"hold"`` its writes; ``"stop"`` SIGSTOP, ``"asleep"`` sleeps in its data set and ``"deadlock"`` waits for
            ever in an extension.
        rank: which; ``None`` for the one that is told of it.
        iteration: in which update, or for a write after which.
        delay: seconds later for a signal, or by which the rank is slow.
        number: of the flush to the disk in the write.
    """

    kind: str
    rank: int | None
    iteration: int
    delay: float = 0.0
    number: int = 1


@dataclass
class Options:
    """How the run is made.

    Attributes:
        kind: how ranks exchange gradients: ``"plain"`` by the updater, ``"ddp"``, ``"fsdp"``, or a mesh of `layouts`.
        net: beside linear layers: ``""``, ``"dropout"``, ``"batchnorm"`` or ``"batchnorm dropout"``; with ``"blocks"`` the
            net of `layouts`, which meshes have anyway.
        batch: the batch size, of all ranks together.
        accumulate: parts of an update.
        examples: to train on.
        held_out: to validate on.
        repeat: whether the data begin again; otherwise the run ends with them.
        iterations: when the run ends, of data that begin again.
        period: of the snapshots.
        virtual_ranks: the number of virtual ranks, if there are.
        precision: of the forward.
        clip: the largest norm of the gradients, if there is.
        tokens: whether the loss comes with a weight.
        own_core: whether an ``update_core`` of its own takes two batches and steps with two optimizers.
        two: whether two optimizers step one after the other, each a part of the model.
        balance: how virtual ranks are dealt.
        audit: how many of them are computed twice in an update.
        extended: whether there are extensions that compute from parameters and reported values.
        across: whether the next epoch completes an update that the end of an epoch is inside of.
        optimizer: the class of PyTorch's, where there is one.
        counts: whether the model reports a metric object.
        written: the writers of the log, of which the model reports images, texts and histograms then, and whether there is a
            recorder: "csv tensorboard wandb mlflow recorder" or some of them.
        timeout: seconds for which ranks wait for one that is late.
        gradients: whether the gradients of the first update are told.
        survive: whether ranks go on when others are lost.
        losses: rank, iteration and seconds after it, of each that gets a signal, and its number; 0 when the run starts, and
            -1 when the ranks form their first group.
        url: the address of the run; without one it is in a directory of its place.
        environment: variables of the ranks.
        fault: what happens to it.
    """

    kind: str = "plain"
    net: str = ""
    batch: int = 50
    accumulate: int = 1
    examples: int = 400
    held_out: int = 40
    repeat: bool = True
    iterations: int = 20
    period: int = 4
    virtual_ranks: int | None = None
    precision: str = "fp32"
    clip: float | None = None
    tokens: bool = False
    own_core: bool = False
    two: bool = False
    balance: str = "even"
    audit: int = 0
    extended: bool = False
    across: bool = True
    optimizer: str = "Adam"
    counts: bool = False
    written: str = ""
    timeout: float | None = None
    gradients: bool = False
    survive: bool = False
    losses: list = field(default_factory=list)
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    fault: Fault | None = None


class Digits(datasets.DatasetMixin):
    """An image, its label and its number. `fault` is called with each number."""

    def __init__(self, pairs, size, fault=lambda: None):
        self.pairs, self.size, self.fault = pairs, size, fault

    def __len__(self):
        return self.size

    def get_example(self, i):
        self.fault()
        return *self.pairs[i], i


class Consumed:
    """A converter that takes down which examples are trained on: a list of numbers for each part of an update."""

    def __init__(self):
        self.parts = []

    def __call__(self, batch, device):
        self.parts.append([number for _, _, number in batch] if batch.weight else [])
        return images_and_labels(batch, device)


def images_and_labels(batch, device):
    return concat_examples([(image, label) for image, label, _ in batch], device)


class Befalling(training.Extension):
    """Makes the fault happen; does nothing on other ranks, and once in a place."""

    trigger = (1, "iteration")
    priority = 1000

    def __init__(self, fault, rank, place):
        self.fault = fault if fault is not None and fault.rank in (rank, None) else None
        self.mark = Path(place) / "happened"
        self.iteration = 0

    def initialize(self, trainer):
        self(trainer)

    def __call__(self, trainer):
        self.iteration = trainer.updater.iteration
        if self.fault is not None and self.fault.kind == "stop":
            self.mark.with_name("iteration-next").write_text(str(self.iteration))
            self.mark.with_name("iteration-next").replace(self.mark.with_name("iteration"))
        if self.is_now("kill", "term", "stop"):
            number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[self.fault.kind]
            timer = threading.Timer(self.fault.delay, os.kill, (os.getpid(), number))
            timer.daemon = True  # a run that is over first is not waited with
            timer.start()
        if self.is_now("machine"):
            timer = threading.Timer(self.fault.delay, self.lose_machine)
            timer.daemon = True
            timer.start()
        if self.is_now("write"):
            self.kill_in_write()
        if self.is_now("hold"):
            self.hold_up_writes()
        if self.is_now("deadlock"):
            self.deadlock()

    def is_now(self, *kinds):
        """Whether a fault of one of the kinds happens in the update under way, for the first time."""
        if self.fault is None or self.fault.kind not in kinds or self.fault.iteration > self.iteration:
            return False
        if self.mark.exists():
            return False
        self.mark.touch()
        return True

    def lose_machine(self):
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGKILL)

    def kill_in_write(self):
        flush, left = os.fsync, [self.fault.number]

        def killing(file):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            flush(file)

        os.fsync = killing

    def hold_up_writes(self):
        make = os.mkdir

        def slowly(*place, **settings):
            time.sleep(self.fault.delay)  # the training goes on meanwhile
            make(*place, **settings)

        os.mkdir = slowly

    def deadlock(self):
        lock = threading.Lock()
        with lock, lock:
            pass

    def in_example(self):
        if self.is_now("asleep"):
            time.sleep(1000)
        if self.is_now("example"):
            raise ValueError("broken example")

    def in_loss(self, model, *inputs):
        if self.fault is not None and self.fault.kind == "slow":
            time.sleep(self.fault.delay)
        if self.is_now("loss"):
            raise ArithmeticError("broken loss")
        return model(*inputs)


class Lost(training.Extension):
    """Sends this rank, and its torchrun, a signal after an iteration, if it is lost then; after 0 while the run starts."""

    trigger = (1, "iteration")
    priority = 999

    def __init__(self, losses, rank):
        self.moments = {iteration: (delay, number) for lost, iteration, delay, number in losses if lost == rank}

    def initialize(self, trainer):
        self(trainer)

    def __call__(self, trainer):
        self.await_loss(trainer.updater.iteration)

    def await_loss(self, iteration):
        if (moment := self.moments.pop(iteration, None)) is not None:
            timer = threading.Timer(moment[0], os.killpg, (os.getpgrp(), moment[1]))
            timer.daemon = True
            timer.start()


def lose_while_forming(losses):
    """Sends this rank a signal when the ranks begin to form their first group, if it is lost after -1."""
    lost, form = Lost(losses, int(os.environ["RANK"])), torch.distributed.init_process_group

    def losing(*arguments, **settings):
        lost.await_loss(-1)
        form(*arguments, **settings)

    torch.distributed.init_process_group = losing


class Loaded(training.Extension):
    """Keeps the digests of what the run begins with, when all state was put back."""

    def __call__(self, trainer):
        pass

    def initialize(self, trainer):
        self.iteration = trainer.updater.iteration
        self.parameters, self.optimizer = digests(trainer)


class Right:
    """A metric: the fraction of right predictions."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.count = torch.zeros((), dtype=torch.int64), 0

    def compute(self):
        return self.right / self.count


class Counting(Classifier):
    """Reports a metric beside its means."""

    def __init__(self, predictor):
        super().__init__(predictor, accfun=self.count)
        self.right = Right()

    def count(self, scores, labels):
        are_right = scores.argmax(1) == labels
        self.right.right += are_right.sum()
        self.right.count += len(labels)
        chainring.report({"right": self.right}, self)
        return are_right.float().mean()


class Showing(Classifier):
    """Reports an image, a text and a histogram beside its means."""

    def forward(self, images, labels):
        loss = super().forward(images, labels)
        chainring.report_image("seen", images[0].reshape(8, 8) / images.max().clamp(min=1))
        chainring.report_text("labels", " ".join(map(str, labels.tolist())))
        chainring.report_histogram("weights", next(self.predictor.parameters()))
        return loss


def writers_of(options, place):
    writers = {
        "csv": lambda: chainring.writers.CsvWriter(),
        "tensorboard": lambda: chainring.writers.TensorBoardWriter(),
        "trackio": lambda: chainring.writers.TrackioWriter(project="digits", name="run"),
        "wandb": lambda: chainring.writers.WandbWriter(mode="offline", settings={"silent": True, "console": "off"}),
        "comet": lambda: chainring.writers.CometWriter(online=False),
        "mlflow": lambda: chainring.writers.MlflowWriter(f"sqlite:///{place}/mlflow.db"),
    }
    return [make() for name, make in writers.items() if name in options.written.split()]


def model_of(options, comm):
    layers = {"batchnorm": nn.BatchNorm1d(24), "dropout": nn.Dropout(0.3)}
    between = [layers[name] for name in options.net.split() if name in layers]
    if "blocks" in options.net or options.kind in MESHES:
        net = Blocks(*between)
    else:
        net = nn.Sequential(nn.Linear(64, 24), *between, nn.ReLU(), nn.Linear(24, 10))
    model = (Counting if options.counts else Showing if options.written else Classifier)(net)
    if comm.size > 1 and options.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if comm.size > 1 and options.kind == "fsdp":
        mesh = init_device_mesh("cpu", (comm.size,))
        fully_shard(next(model.predictor.children()), mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(options, model):
    if not (options.own_core or options.two):
        return getattr(torch.optim, options.optimizer)(model.parameters(), lr=0.01)
    *body, head = getattr(model, "module", model).predictor
    return {
        "body": torch.optim.AdamW(nn.Sequential(*body).parameters(), lr=0.01),
        "head": torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
    }


def extensions_of(model, optimizer, report_grads):
    return [
        extensions.ExponentialMovingAverage(model, 0.9),
        extensions.ParameterStatistics(model, report_grads=report_grads, trigger=(2, "iteration")),
        extensions.MicroAverage("main/loss", "main/accuracy", "ratio", trigger=(2, "iteration")),
        extensions.MinValue("main/loss", trigger=(2, "iteration")),
        extensions.ExponentialShift("lr", 0.9, optimizer=optimizer),
        extensions.observe_lr(optimizer),
        extensions.FailOnNonNumber(),
    ]


class TwoSteps(training.StandardUpdater):
    """Trains one part of the model after the other, on a batch each; what it draws and reports follows a step."""

    average = None

    def update_core(self):
        for name in self.get_all_optimizers():
            images, labels = self.next_batch()
            with self.autocast():
                loss = self.loss_func(self.get_model("main"), images, labels)
            self.backward(loss)
            self.step(name)
            chainring.report({f"{name}/drawn": torch.rand(())})
            if self.average is not None:
                self.average.update()


def in_tokens(function):
    """The function, whose loss then has a weight: as if labels were so many tokens."""

    def weighted(model, images, labels):
        return {"loss": function(model, images, labels), "weight": labels.sum() + 1}

    return weighted


def callbacks_of(options, model, first):
    """Clipping, and taking down the first gradients, where there are."""
    called = [] if options.clip is None else [training.clip_grad_norm(options.clip)]
    if options.gradients:
        called.append(lambda _: first or first.extend(to_full(p.grad).tolist() for p in model.parameters()))
    return training.UpdateCallbacks(update_on_start=called) if called else None


def build(options, comm, place):
    """The trainer, the list of the examples that its updates consume, and that of its first gradients."""
    chainring.deterministic(0)
    first = []
    model, consumed = model_of(options, comm), Consumed()
    if options.kind in MESHES:
        comm = lay_out(options.kind, model, options.timeout)
    befalling = Befalling(options.fault, comm.world.rank, place)
    train, test = datasets.get_digits()
    data = iterators.SerialIterator(Digits(train, options.examples, befalling.in_example), options.batch, options.repeat)
    updater = (TwoSteps if options.own_core else training.StandardUpdater)(
        data,
        optimizer_of(options, model),
        model,
        converter=consumed,
        comm=comm,
        accumulate=options.accumulate,
        loss_func=in_tokens(befalling.in_loss) if options.tokens else befalling.in_loss,
        precision=options.precision,
        callbacks=callbacks_of(options, model, first),
        accumulate_across_epochs=options.across,
        virtual_ranks=options.virtual_ranks,
        balance=options.balance,
        audit=options.audit,
    )
    stop = (options.iterations, "iteration") if options.repeat else None
    trainer = training.Trainer(updater, stop, out=options.url or f"{place}/out")
    held_out = iterators.SerialIterator(Digits(test, options.held_out), 30, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(held_out, model, images_and_labels), trigger=(5, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "iteration"), writers=writers_of(options, place)))
    if "recorder" in options.written:
        trainer.extend(extensions.Recorder((3, "iteration")))
    trainer.extend(extensions.snapshot(autoload=True), trigger=(options.period, "iteration"))
    # The loss of the second step leaves gradients with the first optimizer, which each rank has by itself.
    further = extensions_of(model, list(updater.get_all_optimizers())[-1], report_grads=not options.own_core)
    for extension in further if options.extended else ():
        if options.own_core and options.accumulate == 1 and isinstance(extension, extensions.ExponentialMovingAverage):
            updater.average = extension
        trainer.extend(extension)
    trainer.extend(befalling, name="befalling")
    if options.losses:
        trainer.extend(Lost(options.losses, comm.rank), name="lost")
    trainer.extend(Loaded(), name="loaded")
    return trainer, consumed.parts, first


def averaged(trainer):
    """The averages of the parameters and buffers, where an extension keeps them."""
    try:
        return list(trainer.get_extension("ExponentialMovingAverage").model.state_dict().values())
    except KeyError:
        return []


def digests(trainer):
    """Of the whole parameters and buffers, and of the whole state of optimizer and averages; every rank calls it."""
    updater = trainer.updater
    states = [optimizer.state_dict()["state"] for optimizer in updater.get_all_optimizers().values()]
    kept = [state[number][name] for state in states for number in sorted(state) for name in sorted(state[number])]
    return digest(updater.get_model("main").state_dict().values()), digest([*kept, *averaged(trainer)])


def digest(tensors):
    held = [to_full(tensor.detach()) for tensor in tensors]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in held)).hexdigest()[:16]


def outcome(trainer, parts, first):
    """What a rank tells about its run."""
    parameters, optimizer = digests(trainer)
    loaded = trainer.get_extension("loaded")
    rows = trainer.get_extension("LogReport").log
    return {
        "data": trainer.comm.rank,
        "started": loaded.iteration,
        "at load": [loaded.parameters, loaded.optimizer],
        "iteration": trainer.updater.iteration,
        "parameters": parameters,
        "values": [
            to_full(value).tolist()
            for value in [*trainer.updater.get_model("main").state_dict().values(), *averaged(trainer)]
        ],
        "optimizer": optimizer,
        "gradients": first,
        "log": [{key: value for key, value in row.items() if key != "elapsed_time"} for row in rows],
        "parts": parts,
        "drawn": digest([_random.get_rng_state()["torch"]]),
    }


def train(options, place):
    """Runs to the end, of which the outcome is left in the place, also where a signal has made it."""
    if "mlflow" in options.written:
        os.chdir(place)  # where it puts artifacts
    if options.survive:
        lose_while_forming(options.losses)
    comm = create_communicator("cpu", timeout=options.timeout, survive=options.survive)
    trainer, parts, first = build(options, comm, place)
    told = {"signalled": None}
    # Called beside the run's own, and there when the run is over, so that a signal that comes late does nothing.
    if threading.current_thread() is threading.main_thread():  # a worker of Ray trains in another
        signal.signal(signal.SIGTERM, lambda *_: told.update(signalled=trainer.updater.iteration))
    interrupted = None
    if options.losses:
        trainer.get_extension("lost").await_loss(0)
    try:
        trainer.run()
    except training.Interrupted as error:
        interrupted = error
    told |= outcome(trainer, parts, first)
    Path(place, f"outcome-{comm.rank}.json").write_text(json.dumps(told))
    comm.close()
    if interrupted is not None:
        raise interrupted


def as_json(options):
    """To be given to the program."""
    return json.dumps(asdict(options))


def from_json(text):
    settings = json.loads(text)
    fault = settings.pop("fault")
    return Options(**settings, fault=None if fault is None else Fault(**fault))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(from_json(sys.argv[2]), sys.argv[1])
