"""Random programs of users: equal to a plain loop and to themselves after a kill, or refused before the first update.

A program is drawn from forms of data, loaders, orders, optimizers, precisions and settings, and written out as a script that
a person could have written: once with Chainring, once as a loop of PyTorch alone. A program that fails is printed.
"""

import importlib.util
import json
import os
import signal
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from bench import Row

import forked
from ports import free_port
from tries import WrongEndError

REFUSED = 3  # the exit code of a program that was refused before its first update
SIZES = {"examples": (17, 24, 30), "batch": (4, 5, 8)}

DATA = {
    "pairs of tensors": """
        dataset = torch.utils.data.TensorDataset(X, Y)
        collate = None
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(x), y)
    """,
    "pairs of arrays": """
        dataset = [(x.numpy(), y.numpy()) for x, y in zip(X, Y)]
        collate = None
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(x), y)
    """,
    "dictionaries": """
        class Rows(torch.utils.data.Dataset):
            def __len__(self): return len(X)
            def __getitem__(self, index): return {"x": X[index], "y": Y[index]}
        dataset = Rows()
        collate = None
        def rows(batch): return len(batch["x"])
        def loss_func(model, x, y): return F.mse_loss(model(x), y)
    """,
    "named tuples": """
        Example = collections.namedtuple("Example", "x y")
        dataset = [Example(x, y) for x, y in zip(X, Y)]
        collate = None
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(x), y)
    """,
    "images of many sizes": """
        class Images(torch.utils.data.Dataset):
            def __len__(self): return len(X)
            def __getitem__(self, index):
                return X[index].reshape(1, 2, 3).repeat(3, 1, 1 + index % 3), {"y": Y[index], "id": torch.tensor(index)}
        dataset = Images()
        def collate(examples): return tuple(zip(*examples))
        def rows(batch): return len(batch[0])
        def loss_func(model, images, targets):
            pooled = torch.stack([image.mean(0)[:, :3].reshape(6) for image in images])
            return F.mse_loss(model(pooled), torch.stack([target["y"] for target in targets]))
    """,
    "lists of tensors in a dictionary": """
        dataset = [{"x": x, "y": y} for x, y in zip(X, Y)]
        def collate(examples): return {key: [example[key] for example in examples] for key in ("x", "y")}
        def rows(batch): return len(batch["x"])
        def loss_func(model, x, y): return F.mse_loss(model(torch.stack(x)), torch.stack(y))
    """,
    "batches of a dataclass": """
        @dataclasses.dataclass
        class Rows:
            x: torch.Tensor
            y: torch.Tensor
        dataset = list(zip(X, Y))
        def collate(examples): return Rows(*(torch.stack(column) for column in zip(*examples)))
        def rows(batch): return len(batch.x)
        def loss_func(model, batch): return F.mse_loss(model(batch.x), batch.y)
    """,
    "sentences that are padded": """
        dataset = [(X[index, : 2 + index % 5], Y[index]) for index in range(len(X))]
        def collate(examples):
            texts, targets = zip(*examples)
            return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.stack(targets)
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(F.pad(x, (0, 6 - x.shape[1]))), y)
    """,
    "labels of which some are masked": """
        mask = (torch.arange(len(X)) % 3 > 0).float()
        dataset = list(zip(X, Y, mask))
        collate = None
        def rows(batch): return batch[2].sum()
        def loss_func(model, x, y, mask):
            errors = (model(x) - y).square().mean(1)
            loss = (errors * mask).sum() / mask.sum()
            return {"loss": loss, "weight": mask.sum()} if CHAINRING else loss
    """,
    "a stream": """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return zip(X, Y)
        dataset = Stream()
        collate = None
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(x), y)
    """,
    "columns of a data frame": """
        import pandas
        from chainring.datasets import TupleDataset
        frame = pandas.DataFrame({"x": list(X.numpy()), "y": Y[:, 0].numpy()}).sample(frac=1, random_state=0)
        dataset = TupleDataset(np.stack(frame["x"]), frame["y"])
        collate = None
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(x)[:, 0], y.float())
    """,
    "data that are told the epoch": """
        class Turned(torch.utils.data.Dataset):
            epoch = 0
            def set_epoch(self, epoch): self.epoch = epoch
            def __len__(self): return len(X)
            def __getitem__(self, index): return X[index].roll(self.epoch), Y[index]
        turned = Turned()
        dataset = torch.utils.data.Subset(turned, range(len(X) - 1, -1, -1))
        collate = None
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(x), y)
    """,
    "examples that are augmented": """
        class Noisy(torch.utils.data.Dataset):
            def __len__(self): return len(X)
            def __getitem__(self, index): return X[index] + 0.1 * torch.rand(6), Y[index]
        dataset = Noisy()
        collate = None
        def rows(batch): return len(batch[0])
        def loss_func(model, x, y): return F.mse_loss(model(x), y)
    """,
}

LOADERS = {
    "SerialIterator": None,
    "MultiprocessIterator": None,
    "DataLoader": "loader = torch.utils.data.DataLoader({arguments})",
    "DataLoader with workers": "loader = torch.utils.data.DataLoader({arguments}, num_workers=2)",
    "StatefulDataLoader": (
        "from torchdata.stateful_dataloader import StatefulDataLoader\nloader = StatefulDataLoader({arguments})"
    ),
    "a list of batches": "loader = list(torch.utils.data.DataLoader({arguments}))",
    "a function": (
        "def loader():\n"
        "    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(3)).tolist()\n"
        "    for at in range(0, len(order), BATCH):\n"
        "        yield (collate or torch.utils.data.default_collate)([dataset[index] for index in order[at : at + BATCH]])"
    ),
}

ORDERS = {
    "in order": "",
    "shuffled by the global generator": ", shuffle=True",
    "shuffled by its own generator": ", shuffle=True, generator=torch.Generator().manual_seed(5)",
    "without the last batch": ", shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(5)",
    "weighted": ", sampler=torch.utils.data.WeightedRandomSampler([1 + i % 4 for i in range(len(dataset))], len(dataset), "
    "generator=torch.Generator().manual_seed(6))",
    "a sampler of its own": ", sampler=Backwards(len(dataset))",
    "a sampler with epochs": ", sampler=torch.utils.data.DistributedSampler(dataset, 1, 0, seed=4)",
    "a sampler with its own generator": ", sampler=Shuffled(len(dataset))",
    "batches by a sampler": ", batch_sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(dataset, "
    "generator=torch.Generator().manual_seed(8)), BATCH, False)",
    "batches by a sampler with epochs": ", batch_sampler=torch.utils.data.BatchSampler("
    "torch.utils.data.DistributedSampler(dataset, 1, 0, seed=4), BATCH, False)",
}

OPTIMIZERS = {
    "torch": [
        "torch.optim.SGD({parameters}, lr=0.05)",
        "torch.optim.SGD({parameters}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
        "torch.optim.Adam({parameters}, lr=0.01, amsgrad=True)",
        "torch.optim.AdamW({parameters}, lr=0.01, foreach=True)",
        "torch.optim.AdamW({parameters}, lr=0.01, fused=True)",
        "torch.optim.Adam({parameters}, lr=torch.tensor(0.01), capturable=False)",
        "torch.optim.RMSprop({parameters}, lr=0.01, centered=True, momentum=0.5)",
        "torch.optim.Adagrad({parameters}, lr=0.05)",
        "torch.optim.NAdam({parameters}, lr=0.01, decoupled_weight_decay=True)",
        "torch.optim.RAdam({parameters}, lr=0.01)",
        "torch.optim.Adamax({parameters}, lr=0.01)",
        "torch.optim.ASGD({parameters}, lr=0.05)",
        "torch.optim.Adadelta({parameters}, lr=1.0)",
        "torch.optim.Rprop({parameters}, lr=0.01)",
        "torch.optim.Adafactor({parameters}, lr=0.01)",
    ],
    "pytorch_optimizer": [
        "pytorch_optimizer.Lion({parameters}, lr=0.01)",
        "pytorch_optimizer.AdaBelief({parameters}, lr=0.01)",
        "pytorch_optimizer.Lookahead(pytorch_optimizer.RAdam({parameters}, lr=0.01), k=3)",
        "pytorch_optimizer.AdEMAMix({parameters}, lr=0.01)",
        "pytorch_optimizer.Ranger21({parameters}, lr=0.01, num_iterations=100)",
    ],
    "schedulefree": [
        "schedulefree.AdamWScheduleFree({parameters}, lr=0.01)",
        "schedulefree.SGDScheduleFree({parameters}, lr=0.05)",
    ],
    "bitsandbytes": ["bitsandbytes.optim.AdamW8bit({parameters}, lr=0.01, min_8bit_size=1)"],
}
PARAMETERS = ["model.parameters()", "[{'params': model[0].parameters(), 'lr': 0.02}, {'params': model[2].parameters()}]"]

CONVERTER = """\
loader = None


def convert(batch, device=None):
    batch = (collate or torch.utils.data.default_collate)([*batch])
    return tuple(batch) if isinstance(batch, list) else batch
"""

SCRIPT = '''\
"""{title}"""

import collections
import dataclasses
import itertools
import json
import os
import random
import signal
import sys

import numpy as np
import torch
{imports}from torch.nn import functional as F

import chainring
from chainring import iterators, training
from chainring.parallel import create_communicator
from chainring.training import extensions

CHAINRING = sys.argv[1] != "plain"
BATCH, ACCUMULATE, ITERATIONS = {batch}, {accumulate}, {iterations}


class Backwards(torch.utils.data.Sampler):
    def __init__(self, size): self.size = size
    def __iter__(self): return iter(range(self.size - 1, -1, -1))
    def __len__(self): return self.size


class Shuffled(Backwards):
    def __init__(self, size):
        super().__init__(size)
        self.random = random.Random(9)
    def __iter__(self): return iter(self.random.sample(range(self.size), self.size))


generator = torch.Generator().manual_seed(1)
X, Y = torch.randn({examples}, 6, generator=generator), torch.randn({examples}, 2, generator=generator)
chainring.deterministic(2)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = {optimizer}
{data}
{loader}


def finish(losses=()):
    """Save what the two scripts are compared by."""
    arrays = {{name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}}
    np.savez(sys.argv[2], losses=np.array(losses), **arrays)


def passes():
    for epoch in itertools.count():
        batches = getattr(loader, "batch_sampler", None)
        for told in (getattr(loader, "sampler", None), getattr(batches, "sampler", None), getattr(dataset, "dataset", None)):
            if hasattr(told, "set_epoch") and not callable(loader):
                told.set_epoch(epoch)
        yield from loader() if callable(loader) else loader


def plain():
    """Train without Chainring."""
    batches, losses = {batches}, []
    model.train()
{before}    for _ in range(ITERATIONS):
        group = [next(batches) for _ in range(ACCUMULATE)]
        total = sum(rows(batch) for batch in group)
        optimizer.zero_grad()
        mean = 0.0
        if not total:  # nothing to learn from: nothing changes
            losses.append(float("nan"))
            continue
        for batch in filter(rows, group):
            with torch.autocast("cpu", torch.bfloat16, enabled={bf16}):
                if isinstance(batch, dict):
                    loss = loss_func(model, **batch)
                elif isinstance(batch, (tuple, list)):
                    loss = loss_func(model, *batch)
                else:
                    loss = loss_func(model, batch)
            (loss if ACCUMULATE == 1 else loss * (rows(batch) / total)).backward()
            mean += loss.item() if ACCUMULATE == 1 else loss.item() * float(rows(batch) / total)
        optimizer.step()
{schedule}        losses.append(mean)
    finish(losses)


def chained():
    """Train with Chainring; the third argument is the iteration at which the process is killed."""
    updater = None
    try:
        comm = create_communicator("cpu") if "RANK" in os.environ else None
        settings = dict(accumulate=ACCUMULATE, precision={precision!r}, comm=comm)
        updater = training.StandardUpdater({iterator}, optimizer, model, {converter}loss_func=loss_func, **settings)
        trainer = training.Trainer(updater, (ITERATIONS, "iteration"), out=sys.argv[4])
        trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
{extensions}        trainer.extend(extensions.snapshot(autoload=True), trigger=({every}, "iteration"))
        cut = int(sys.argv[3])

        def kill(trainer):
            if trainer.updater.iteration == cut:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.extend(kill)
        trainer.run()
    except Exception as error:
        if updater is not None and updater.iteration:
            raise
        print(type(error).__name__, error, file=sys.stderr)
        sys.exit({refused})
    if comm is None or comm.is_main:
        finish()
    if comm is not None:
        comm.close()


if __name__ == "__main__":
    chained() if CHAINRING else plain()
'''


class Program:
    """What was drawn, as a script and as what its runs must come to."""

    def __init__(self, draw):
        self.data, self.loader, self.order = (draw.choice(list(forms)) for forms in (DATA, LOADERS, ORDERS))
        if self.data == "a stream":
            self.loader, self.order = draw.choice([name for name in LOADERS if "DataLoader" in name]), "in order"
        libraries = [name for name in OPTIMIZERS if importlib.util.find_spec(name)]
        self.library = draw.choice(libraries)
        self.optimizer = draw.choice(OPTIMIZERS[self.library])
        self.parameters = draw.choice(PARAMETERS)
        self.precision = draw.choice(["fp32", "fp32", "bf16"])
        self.examples, self.batch = draw.choice(SIZES["examples"]), draw.choice(SIZES["batch"])
        self.accumulate, self.ranks = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2])
        if "Rprop" in self.optimizer or "Lion" in self.optimizer:  # by the signs of gradients, of which rounding turns some
            self.accumulate = self.ranks = 1
        self.iterations, self.every = draw.randint(6, 12), draw.randint(1, 4)
        self.cut = draw.randint(1, self.iterations - 1)
        self.has_schedule = draw.random() < 0.3

    @property
    def title(self):
        kinds = (self.data, self.loader, self.order if "DataLoader" in self.loader else "", self.optimizer, self.precision)
        numbers = f"accumulated {self.accumulate} times, {self.ranks} ranks, cut at {self.cut} of {self.iterations}"
        return "; ".join(filter(None, [*kinds, numbers]))

    @property
    def is_exact(self):
        """Whether the plain loop must be met to the last bit: nothing is summed in another order."""
        return self.accumulate == self.ranks == 1

    @property
    def has_its_own_stream(self):
        """Whether Chainring gives it other random numbers or epochs than a plain loop has."""
        draws, is_told = self.data == "examples that are augmented", self.data == "data that are told the epoch"
        if "DataLoader" in self.loader:
            return draws or self.order == "shuffled by the global generator"
        return (draws and self.loader == "a function") or (is_told and self.loader.endswith("Iterator"))

    def text(self):
        loader, batches, iterator, before = self._reads()
        schedule = "torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)"
        if self.library == "schedulefree":
            before += "    optimizer.train()\n"
        added = ""
        if self.has_schedule:
            before += f"    schedule = {schedule}\n"
            added = f'        trainer.extend(extensions.LRScheduler({schedule}), trigger=(1, "iteration"))\n'
        return SCRIPT.format(
            title=self.title.replace('"', "'"), imports="" if self.library == "torch" else f"import {self.library}\n",
            batch=self.batch, accumulate=self.accumulate, iterations=self.iterations, examples=self.examples,
            optimizer=self.optimizer.format(parameters=self.parameters), data=textwrap.dedent(DATA[self.data]).strip(),
            loader=loader, batches=batches, iterator=iterator, before=before, bf16=self.precision == "bf16",
            converter="converter=convert, " if self.loader.endswith("Iterator") else "",
            schedule="        schedule.step()\n" if self.has_schedule else "", precision=self.precision, extensions=added,
            every=self.every, refused=REFUSED,
        )  # fmt: skip

    def _reads(self):
        """The lines that make the loader, and the expressions by which the plain loop and Chainring read it."""
        if self.loader.endswith("Iterator"):
            made = f"iterators.{self.loader}(dataset, BATCH, seed=7)"
            batches = "(convert(batch) for batch in iterators.SerialIterator(dataset, BATCH, seed=7))"
            return CONVERTER, batches, made, ""
        size = "" if "batch_sampler" in ORDERS[self.order] else ", BATCH"
        arguments = f"dataset{size}, collate_fn=collate{ORDERS[self.order]}"
        return LOADERS[self.loader].format(arguments=arguments), "passes()", "loader", ""


def one(bench, number, draw, place):
    """Draws a program and runs it plainly, whole, and killed and resumed."""
    program = Program(draw)
    script = place / "program.py"
    script.write_text(program.text())
    try:
        return _proven(program, script, place)
    except WrongEndError:
        print(f"--- the program of try {number}\n{script.read_text()}---")
        raise


def _proven(program, script, place):
    _run(place, script, "plain", place / "plain.npz")
    whole = place / "whole.npz", 0, place / "whole"
    codes, words = _run(place, script, "whole", *whole, ranks=program.ranks, allowed=(0, REFUSED))
    if REFUSED in codes:
        if 0 in codes:
            raise WrongEndError(f"{program.title}: refused on some ranks only: {codes}")
        print(f"refused: {program.title}: {words[0]}")
        return Counter({"programs": 1, "refused": 1})
    if not program.has_its_own_stream:
        _compare(program, "a plain loop", _loaded(place, "plain"), _loaded(place, "whole"), program.is_exact)
    cut = place / "cut.npz", program.cut, place / "cut"
    _run(place, script, "cut", *cut, ranks=program.ranks, allowed=(-signal.SIGKILL,))
    codes, words = _run(place, script, "cut", cut[0], 0, cut[2], ranks=program.ranks, allowed=(0, REFUSED))
    if REFUSED in codes:
        print(f"refused to resume: {program.title}: {words[0]}")
        return Counter({"programs": 1, "refused to resume": 1})
    _compare(program, "its uninterrupted run", _loaded(place, "whole"), _loaded(place, "cut"), is_exact=True)
    kind = "of a random stream" if program.has_its_own_stream else "exact" if program.is_exact else "within rounding"
    return Counter({"programs": 1, kind: 1})


def _run(place, script, *arguments, ranks=1, allowed=(0,)):
    """Runs the script on so many ranks; returns the exit codes, each one of those allowed, and the last line of each."""
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

    def start(rank):
        variables = {**shared, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
        return forked.run([str(script), *map(str, arguments)], env=environment, timeout=600)

    with ThreadPoolExecutor(ranks) as pool:
        ended = list(pool.map(start, range(ranks)))
    if not {done.returncode for done in ended} <= set(allowed):
        said = "\n".join(done.stderr[-3000:] for done in ended)
        raise WrongEndError(f"{arguments[0]} ended with {[done.returncode for done in ended]}:\n{said}")
    return [done.returncode for done in ended], [done.stderr.strip().rpartition("\n")[2] for done in ended]


def _loaded(place, name):
    """The arrays that a run has saved, its losses among them."""
    with np.load(place / f"{name}.npz") as file:
        arrays = dict(file)
    if name != "plain":
        rows = json.loads((place / name / "log").read_text())
        arrays["losses"] = np.array([float(row.get("main/loss", "nan")) for row in rows])
    return arrays


def _compare(program, with_what, wanted, found, is_exact):
    close = 0.05 if program.precision == "bf16" else 2e-4
    for name, array in wanted.items():
        other = found[name]
        if name == "losses" and with_what == "a plain loop":
            array, other = array[~np.isnan(array)], other[~np.isnan(array)]
        same = array.shape == other.shape and (
            np.array_equal(array, other, equal_nan=True) if is_exact else np.allclose(array, other, close, close)
        )
        if not same or (name != "losses" and not np.isfinite(other).all()):
            raise WrongEndError(f"{program.title}: {name} is not that of {with_what}:\n{array}\n{other}")


ROWS = [
    Row(
        "programs", "random programs of users: data, loader, order, optimizer of a library, precision, accumulation, ranks, "
        "killed and resumed", "a plain loop's numbers and those of an uninterrupted run, or refused before the first update",
        "programs", 200, one, small=20,
    ),
]  # fmt: skip
