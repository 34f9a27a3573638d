"""Evaluations on virtual ranks: the same results, to the last bit, on two ranks and in one process."""

import random
import tempfile

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from chainring import Reporter, report, report_text
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer
from chainring.training.extensions import Evaluator, LogReport
from rank_pair import on_two_ranks

CLASSES = 3


class Net(nn.Module):
    """A classifier that draws from every generator in evaluation mode too, and reports what it is asked for."""

    def __init__(self, *asked):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))
        self.asked = asked
        self.metrics = {}
        if "counts" in asked:
            self.right, self.histogram = Right(), Histogram()
        if "torchmetrics" in asked:  # which takes two seconds, in each process of tests
            from torchmetrics import MetricCollection
            from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

            self.accuracy = MulticlassAccuracy(CLASSES)
            metrics = {"f1": MulticlassF1Score(CLASSES), "top": MulticlassAccuracy(CLASSES, top_k=2)}
            self.both = MetricCollection(metrics, compute_groups=False)  # which depend on the first update of a process
        if "buffers" in asked:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, t):
        if "dropout" in self.asked:
            self.layers[1].train()
        y = self.layers(x) + torch.rand(CLASSES) * random.random() + np.random.rand()
        loss = nn.functional.cross_entropy(y, t)
        report({"drawn": torch.rand(()), "half": y.mean()}, self)
        self.report_metrics(y.argmax(1), y, t)
        if "buffers" in self.asked:
            self.seen += len(x)
            report({"seen": self.seen}, self)
        if "media" in self.asked:
            report_text("sample", f"{x[0, 0].item()}")
        return {"loss": loss, "weight": (t > 0).sum()} if "weight" in self.asked else loss

    def report_metrics(self, predicted, y, t):
        if "counts" in self.asked:
            self.right.update(predicted, t)
            self.histogram.update(predicted)
            report({"right": self.right, "histogram": self.histogram}, self)
        if "torchmetrics" in self.asked:
            self.accuracy.update(y, t)
            self.both.update(y, t)
            report({"accuracy": self.accuracy, "both": self.both}, self)


class Right:
    """The fraction of right predictions, counted in a Python integer and a tensor."""

    def __init__(self):
        self.name = "right"
        self.reset()

    def reset(self):
        self.right, self.count = torch.zeros(()), 0

    def update(self, predicted, t):
        self.right += (predicted == t).sum()
        self.count += len(t)

    def compute(self):
        return self.right / self.count if self.count else 0.0


class Histogram:
    """How often each class was predicted, in a mapping, a list and an array."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.by_class, self.in_list, self.in_array = {}, [0] * CLASSES, np.zeros(CLASSES)

    def update(self, predicted):
        for number in predicted.tolist():
            self.by_class[number] = self.by_class.get(number, 0) + 1
            self.in_list[number] += 1
            self.in_array[number] += 1

    def compute(self):
        counted = {f"class {number}": count for number, count in sorted(self.by_class.items())}
        return counted | {"list": sum(n * n for n in self.in_list), "array": float((self.in_array**2).sum())}


CASES = {
    # asked of the model, rows, batch size, virtual ranks, settings of the Evaluator
    "even": ((), 32, 8, 4, {}),
    "uneven last batch": (("dropout",), 23, 8, 4, {}),
    "blocks of unequal size": (("dropout", "weight"), 23, 8, 3, {}),
    "hardly any rows": (("dropout", "counts", "torchmetrics"), 5, 2, 7, {}),
    "one rank without any row": (("counts", "torchmetrics"), 1, 4, 8, {}),
    "bf16": (("dropout", "weight"), 23, 6, 5, {"precision": "bf16"}),
    "metrics": (("counts", "torchmetrics"), 23, 8, 3, {}),
    "buffers": (("buffers",), 23, 8, 3, {}),
    "media": (("media",), 23, 8, 4, {}),
    "fully_shard": (("dropout", "counts", "torchmetrics"), 10, 4, 3, {}),
    "ddp": (("buffers", "counts"), 10, 4, 3, {}),
}


def examples(rows):
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))
    return [(x[i], i % CLASSES) for i in range(rows)]


def an_evaluator(case, comm=None):
    """The evaluator of a case, and what would begin it."""
    asked, rows, batch_size, virtual_ranks, settings = CASES[case]
    net = Net(*asked)
    if comm is not None and case == "fully_shard":
        fully_shard(net.layers[0])
        fully_shard(net)
    if comm is not None and case == "ddp":
        net = DistributedDataParallel(net)
    iterator = SerialIterator(examples(rows), batch_size, repeat=False, shuffle=False)
    return Evaluator(iterator, net, virtual_ranks=virtual_ranks, **settings)


def a_trainer(out, comm=None):
    """A run that trains another model."""
    trained = nn.Linear(5, 1)
    loss = lambda net, x, t: net(x).square().mean()  # noqa: E731
    batches = SerialIterator(examples(8), 8)
    updater = StandardUpdater(batches, torch.optim.SGD(trained.parameters(), 0.1), trained, loss_func=loss, comm=comm)
    return Trainer(updater, (1, "iteration"), out=out)


def evaluations(comm, cases):
    """What two evaluations of each case find, and the text that they show."""
    found = {}
    with tempfile.TemporaryDirectory() as out:
        for case in cases:
            torch.manual_seed(7 if comm is None or comm.rank == 0 else 8)  # the seed is that of rank 0
            evaluator = an_evaluator(case, comm)
            evaluator.initialize(a_trainer(out, comm))
            reporter, texts = Reporter(), {}
            reporter.media_watchers = (texts.__setitem__,)
            with reporter.scope({}):
                found[case] = [evaluator(), evaluator(), {key: text.text for key, text in texts.items()}]
    return found


def evaluated(comm, cases):
    return evaluations(comm, cases), rows_of_the_log(comm, 3)


@pytest.fixture(scope="module")
def on_ranks():
    """What each of two ranks finds, and the log of its run."""
    ranks = on_two_ranks(evaluated, list(CASES))
    for rank in ranks:
        assert isinstance(rank, tuple), rank
    return ranks


def test_two_ranks_find_what_one_process_finds(on_ranks):
    """Every number is the same to the last bit, and in the same order; each evaluation draws the same numbers."""
    alone = evaluations(None, CASES)
    ranks = [found for found, _ in on_ranks]
    for case, expected in alone.items():
        assert expected[0] == expected[1], case
        assert [repr(ranks[0][case])] == [repr(expected)], case
        assert [repr(ranks[1][case][:2])] == [repr(expected[:2])], case
    assert alone["even"][0] != alone["uneven last batch"][0]
    assert alone["media"][2].keys() == {"sample"}


def test_a_metric_counts_every_example_once():
    """Of all ranks, and of those that compute a forward to keep in step."""
    (found, *_), (shared, *_) = (evaluations(None, [case])[case] for case in ("metrics", "fully_shard"))
    assert sum(found[f"main/histogram/class {k}"] for k in range(CLASSES) if f"main/histogram/class {k}" in found) == 23
    assert sum(value for key, value in shared.items() if "class" in key) == 10


def test_parts_draw_numbers_of_their_own(tmp_path):
    """Which follow from the seed, the batch and the part."""
    trainer = a_trainer(tmp_path)
    net = Net()
    for seed, expected_to_differ in ((1, False), (2, True)):
        found = []
        for virtual_ranks in (1, 2):
            torch.manual_seed(1)
            first = evaluator_of(net, virtual_ranks, trainer).evaluate()
            torch.manual_seed(seed)
            second = evaluator_of(net, virtual_ranks, trainer).evaluate()
            assert (first != second) == expected_to_differ
            found.append(first)
        assert found[0]["main/drawn"] != found[1]["main/drawn"]


def evaluator_of(net, virtual_ranks, trainer):
    evaluator = Evaluator(SerialIterator(examples(8), 4, repeat=False), net, virtual_ranks=virtual_ranks)
    evaluator.initialize(trainer)
    return evaluator


def rows_of_the_log(comm, virtual_ranks):
    """The log of a run in bf16, whose model draws, counts in metrics and gives its weights; without times."""
    torch.manual_seed(7)
    net = Net("dropout", "counts", "torchmetrics", "weight")
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    batches = SerialIterator(examples(23), 8, seed=0)
    updater = StandardUpdater(batches, optimizer, net, comm=comm, virtual_ranks=virtual_ranks, precision="bf16")
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(updater, (2, "epoch"), out=out if comm is None else comm.broadcast_object(out))
        trainer.extend(LogReport(trigger=(1, "epoch")))
        trainer.extend(Evaluator(SerialIterator(examples(11), 4, repeat=False, shuffle=False), net))
        trainer.run()
        return [
            {key: value for key, value in row.items() if "time" not in key} for row in trainer.get_extension("LogReport").log
        ]


def test_a_run_on_virtual_ranks_is_evaluated_on_them(on_ranks):
    """Every row of its log is the same on two ranks as in one process, of training and evaluation."""
    expected = rows_of_the_log(None, 3)
    assert len(expected) == 2
    assert {"main/loss", "validation/main/loss", "validation/main/accuracy"} <= expected[0].keys()
    for _, found in on_ranks:
        assert repr(found) == repr(expected)


class Losses:
    """A metric of one's own whose state is not counts."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.seen = 0.0, []

    def compute(self):
        return self.total

    def update(self, loss, rows):
        self.total += loss
        self.seen.append(rows)


def evaluate_uncountable(comm):
    losses = Losses()

    def measure(x, t):
        losses.update(x.mean().item(), len(x))
        return {"loss": x.mean(), "losses": losses}

    iterator = SerialIterator(examples(8), 4, repeat=False)
    evaluator = Evaluator(iterator, {}, eval_func=measure, virtual_ranks=2)
    with tempfile.TemporaryDirectory() as out:
        evaluator.initialize(a_trainer(out, comm))
    return evaluator.evaluate()


def evaluate_reported_by_some(comm):
    right = Right()

    def measure(x, t):
        right.update(t, t)
        return {"loss": x.mean()} | ({"right": right} if comm.rank == 0 else {})

    evaluator = Evaluator(SerialIterator(examples(8), 4, repeat=False), {}, eval_func=measure, virtual_ranks=2)
    with tempfile.TemporaryDirectory() as out:
        evaluator.initialize(a_trainer(out, comm))
    return evaluator.evaluate()


def test_an_updater_gives_its_virtual_ranks_and_seed(tmp_path):
    """Unless the evaluator has its own."""

    def evaluate(**settings):
        trained = nn.Linear(5, 1)
        loss = lambda net, x, t: net(x).square().mean()  # noqa: E731
        batches = SerialIterator(examples(8), 8)
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        updater = StandardUpdater(batches, optimizer, trained, loss_func=loss, virtual_ranks=4)
        torch.manual_seed(11)
        updater.start()
        evaluator = Evaluator(SerialIterator(examples(8), 8, repeat=False, seed=0), Net(), **settings)
        evaluator.initialize(Trainer(updater, (1, "iteration"), out=tmp_path))
        torch.manual_seed(random.randrange(1000))
        return evaluator.evaluate()

    assert evaluate() == evaluate() == evaluate(virtual_ranks=4) != evaluate(virtual_ranks=2)


def test_the_seed_of_an_evaluator_with_virtual_ranks_of_its_own_is_saved(tmp_path):
    """A resumed run draws the same numbers whatever seed its script has set."""

    def an_evaluator():
        return Evaluator(SerialIterator(examples(8), 4, repeat=False, seed=0), Net(), virtual_ranks=2)

    torch.manual_seed(1)
    trainer, first, second = a_trainer(tmp_path), an_evaluator(), an_evaluator()
    first.initialize(trainer)
    expected, saved = first.evaluate(), first.state_dict()
    torch.manual_seed(2)
    second.load_state_dict(saved)
    second.initialize(trainer)
    assert second.evaluate() == expected


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_a_wrong_number_of_virtual_ranks_is_refused(count, error):
    """When the evaluator is made."""
    with pytest.raises(error, match=f"virtual_ranks is an integer of at least 1.*{count}"):
        Evaluator(SerialIterator(examples(8), 4, repeat=False), Net(), virtual_ranks=count)


def begin_with_too_few(comm):
    evaluator = Evaluator(SerialIterator(examples(8), 4, repeat=False), Net(), virtual_ranks=1)
    with tempfile.TemporaryDirectory() as out:
        evaluator.initialize(a_trainer(out, comm))


def refusals(comm):
    found = []
    for function in (evaluate_uncountable, evaluate_reported_by_some, begin_with_too_few):
        try:
            found.append(function(comm))
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_the_same_on_several_ranks_is_refused():
    """A metric that does not count, which one process computes; one that not all report; fewer virtual ranks than ranks."""
    assert "main/losses" in evaluate_uncountable(None)
    for uncountable, reported_by_some, too_few in on_two_ranks(refusals):
        assert "metric 'main/losses' (Losses) of 2 ranks" in uncountable
        assert "its seen, total is not made of whole numbers" in uncountable
        assert "rank 1 has not reported it; report it in every forward" in reported_by_some
        assert "virtual_ranks=1 and 2 ranks" in too_few
