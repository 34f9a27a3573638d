"""What two ranks do in an update_core of their own, for test_exchange.py."""

import tempfile

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toys import Regression, parameters_of, regression_data, same_regression

from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm
from chainring.training.extensions import ExponentialMovingAverage, snapshot


def loss_of(updater, name="main"):
    x, t = updater.next_batch()
    model = updater.get_model(name)
    return model(x, t) if isinstance(model, DistributedDataParallel) else (model.predictor(x) - t).square().mean()


class ByItself(StandardUpdater):
    """As without the library."""

    def update_core(self):
        loss_of(self).backward()
        self.get_optimizer("main").step()


class WeighedByItself(StandardUpdater):
    def update_core(self):
        self.backward(loss_of(self))
        self.get_optimizer("main").step()


class WithClosure(StandardUpdater):
    def update_core(self):
        x, t = self.next_batch()

        def closure():
            self.get_optimizer("main").zero_grad()
            loss = self.get_model("main")(x, t)
            loss.backward()
            return loss

        self.get_optimizer("main").step(closure)


class OwnStep(StandardUpdater):
    """The default update, with a step that communicates nothing."""

    def step(self, name="main", closure=None):
        self.get_optimizer(name).step()


class ByHand(StandardUpdater):
    def update_core(self):
        loss_of(self).backward()
        for parameter in self.get_model("main").parameters():
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None


class OneOfTwo(StandardUpdater):
    """The second model is forgotten."""

    def update_core(self):
        self.backward(loss_of(self))
        self.step()
        loss_of(self, "second").backward()
        self.get_optimizer("second").step()


class Rarely(StandardUpdater):
    """Trains in every third update, limits the parameters in the others, and looks at a batch in each."""

    def update_core(self):
        loss = loss_of(self)
        if self.iteration % 3 == 2:
            self.backward(loss)
            self.step()
        else:
            with torch.no_grad():
                for parameter in self.get_model("main").parameters():
                    parameter.clamp_(-0.5, 0.5)


class Shared(StandardUpdater):
    """Two losses of which the second reaches the first model too, each clipped when its optimizer steps."""

    def update_core(self):
        x, t = self.next_batch()
        first, second = self.get_model("main"), self.get_model("second")
        self.backward((first.predictor(x) - t).square().mean())
        self.step()
        self.backward((second.predictor(x) - first.predictor(x)).square().mean())
        self.step("second")


def make(kind, wraps=False, comm=None, model=None, batch_size=4, **settings):
    models = {"main": (model or same_regression)(), "second": Regression()}
    for parameter in models["second"].parameters():
        torch.nn.init.constant_(parameter, 0.3)
    if wraps:
        models["main"] = DistributedDataParallel(models["main"])
    if kind not in (OneOfTwo, Shared):
        models = {"main": models["main"]}
    iterator = SerialIterator(regression_data(), batch_size, shuffle=False)
    if (virtual_ranks := settings.get("virtual_ranks")) is not None:
        iterator.use_virtual_ranks(virtual_ranks)
    if comm is not None:
        iterator.share(comm.rank, comm.size)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    callbacks = UpdateCallbacks(update_on_start=clip_grad_norm(0.1)) if kind is Shared else None
    return kind(iterator, optimizers, models, comm=comm, callbacks=callbacks, **settings)


def train(updater):
    """The parameters and the number of updates after four, or the error that the first has raised."""
    try:
        updater.start()
        for _ in range(4):
            updater.update()
    except RuntimeError as error:
        return str(error), updater.iteration
    return [p.tolist() for name in updater.get_all_models() for p in parameters_of(updater, name)], updater.iteration


def train_on_rank(comm, runs):
    """What becomes of each of some runs, given as the class, whether DDP wraps the model, and settings."""
    return [train(make(kind, wraps, comm, **settings)) for kind, wraps, settings in runs]


class Gathered(torch.nn.Module):
    """Looks rows up by a function, in a way of which no layer tells."""

    def __init__(self, way):
        super().__init__()
        self.table, self.way = torch.nn.Parameter(torch.ones(12, 2)), way

    def forward(self, indices):
        if self.way == "gather":
            return torch.gather(self.table, 0, indices[:, None].expand(-1, 2), sparse_grad=True)
        return torch.nn.functional.embedding(indices, self.table, sparse=True)


class Table(torch.nn.Embedding):
    """A class of the user's."""


def sparse_model(kind):
    """A model with sparse gradients."""
    nn = torch.nn
    table = nn.Embedding(12, 2, sparse=True)
    if kind == "a bag":
        return nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.EmbeddingBag(12, 2, sparse=True))
    return {
        "a layer": lambda: table,
        "within": lambda: nn.Sequential(nn.Sequential(table), nn.Linear(2, 1)),
        "DDP": lambda: DistributedDataParallel(table),
        "a class": lambda: Table(12, 2, sparse=True),
    }.get(kind, lambda: Gathered(kind))()


def mean_square(model, x):
    return model(x).square().mean()


def train_sparse(comm, cases):
    """The error of each, and whether the updater could be made."""
    found = []
    for kind, name, settings in cases:
        model, updater = sparse_model(kind), None
        iterator = SerialIterator(list(range(12)), 4, shuffle=False)
        iterator.share(comm.rank, comm.size)
        try:
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
            updater = StandardUpdater(iterator, optimizer, model, loss_func=mean_square, comm=comm, **settings)
            updater.start()
            updater.update()
        except (TypeError, ValueError) as error:
            found.append((type(error).__name__, str(error), updater is None))
    return found


class ByLoss(StandardUpdater):
    """Sets a learning rate from the loss of its rows."""

    def update_core(self):
        loss = loss_of(self)
        self.get_optimizer("main").param_groups[0]["lr"] = float(loss.detach())
        self.backward(loss)
        self.step()


class Scaling(StandardUpdater):
    """Scales its weights by its rows, after the step."""

    def update_core(self):
        x, t = self.next_batch()
        self.backward((self.get_model("main").predictor(x) - t).square().mean())
        self.step()
        for parameter in self.get_model("main").parameters():
            parameter.data.mul_(x.mean())


class Quantised(Regression):
    """Keeps an average of its rows in a parameter."""

    def __init__(self):
        super().__init__()
        torch.nn.init.zeros_(self.predictor.weight)
        self.centre = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)

    def forward(self, x, t):
        self.centre.data.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.centre, t)


class Bounded(Regression):
    """Looks up rows that are scaled to a norm of at most 0.1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(40, 3, dtype=torch.float64, max_norm=0.1)

    def forward(self, x, t):
        return super().forward(x + self.table((x[:, 0] * 10).abs().long()), t)


def add_noise(updater):
    torch.manual_seed(updater.comm.rank)
    for parameter in updater.get_model("main").parameters():
        parameter.data += torch.randn_like(parameter)


def add_ulp(trainer):
    trainer.updater.get_model("main").predictor.bias.data += 1e-15 * trainer.comm.rank


def diverging_on_rank(comm, virtual_ranks):
    """What is said of updates after which ranks differ, and after how many, and of a difference at a snapshot."""
    said = []
    for kind, model, between in [
        (StandardUpdater, None, add_noise), (ByLoss, None, None), (Scaling, None, None), (StandardUpdater, Quantised, None),
        (StandardUpdater, Bounded, None),
    ]:  # fmt: skip
        try:
            updater = make(kind, model=model, comm=comm, virtual_ranks=virtual_ranks)
            updater.start()
            for _ in range(3):
                updater.update()
                if between is not None:
                    between(updater)
        except (RuntimeError, ValueError) as error:
            said.append((str(error), updater.iteration))
    with tempfile.TemporaryDirectory() as folder:
        updater = make(StandardUpdater, comm=comm, virtual_ranks=virtual_ranks)
        trainer = Trainer(updater, (9, "iteration"), out=comm.broadcast_object(folder))
        trainer.extend(snapshot(), trigger=(3, "iteration"))
        trainer.extend(add_ulp, trigger=(5, "iteration"))
        try:
            trainer.run()
        except RuntimeError as error:
            said.append((str(error), updater.iteration))
        comm.barrier()
    return said


class Following(StandardUpdater):
    """Updates averages of its model at the end, or after each of two steps."""

    times = 1

    def update_core(self):
        for _ in range(self.times):
            x, t = self.next_batch()
            model = self.get_model("main")
            loss = (model.predictor(model.norm(x)) - t).square().mean() + (self.averages[0].model.predictor(x) ** 2).mean()
            self.backward(loss)
            self.step()
            for average in self.averages:
                average.update()


class Normalised(Regression):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)


def followed(virtual_ranks, times, number, comm=None):
    """The parameters, the buffers, and those of averages, after four updates; without a communicator in one process."""
    torch.manual_seed(3)
    updater = make(Following, model=Normalised, comm=comm, batch_size=8, virtual_ranks=virtual_ranks)
    updater.times, averages = times, [lambda n: n / (n + 1), 0.9][:number]
    updater.averages = [ExponentialMovingAverage(updater.get_model("main"), decay) for decay in averages]
    updater.start()
    for _ in range(4):
        updater.update()
    models = [updater.get_model("main"), *(average.model for average in updater.averages)]
    return [tensor.tolist() for model in models for tensor in model.state_dict().values()]


def followed_on_rank(comm, cases):
    return [followed(*case, comm) for case in cases]
