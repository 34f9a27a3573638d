"""Metrics that count by themselves, of torchmetrics and one's own: in training, in evaluation, and over a resume."""

import warnings

import pytest
import torch
from recipes import assert_resumes_everywhere, definitions, rows_of
from torch import nn

from chainring import iterators, report, serializers, training
from chainring.reporting.summary import DictSummary
from chainring.training.extensions import Evaluator, LogReport, snapshot

DRAW = torch.Generator().manual_seed(3)
DATA = [(row, label % 10) for label, row in enumerate(torch.randn(60, 64, generator=DRAW))]
TEST = [(row, label % 10) for label, row in enumerate(torch.randn(30, 64, generator=DRAW))]


def scored(seed=1):
    torch.manual_seed(seed)
    return definitions("Metrics that")["Scored"]()


OWN = definitions("Metrics that")


class Small(nn.Module):
    """Reports the metric that it was given; ``count`` is called with the answer and the labels."""

    def __init__(self, metric, count):
        super().__init__()
        torch.manual_seed(1)
        self.predictor, self.metric, self.count = nn.Linear(64, 10), metric, count

    def forward(self, x, t):
        y = self.predictor(x)
        self.count(self.metric, y.detach(), t)
        report({"score": self.metric}, self)
        return nn.functional.cross_entropy(y, t)


def with_own():
    """Of the metric on the page."""
    return Small(OWN["Largest"](), lambda metric, y, t: metric.update(y))


def accuracy(**settings):
    """A metric of torchmetrics, whose import takes two seconds, in each process of tests."""
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(10, **settings)


def with_torchmetrics(metric=None):
    return Small(metric or accuracy(), lambda metric, y, t: metric.update(y, t))


class Seen:
    """Notes what the predictor of a model answers, in training and in evaluation."""

    def __init__(self, model):
        self.model, self.answers = model, {True: [], False: []}
        model.register_forward_pre_hook(self.labels)
        model.predictor.register_forward_hook(self.note)

    def labels(self, model, inputs):
        self.given = inputs[1]

    def note(self, module, inputs, output):
        self.answers[self.model.training].append((output.detach().clone(), self.given))

    def take(self, is_training, number=None):
        taken = self.answers[is_training][:number]
        del self.answers[is_training][:number]
        return (torch.cat(part) for part in zip(*taken, strict=True))


def f1(answers):
    from sklearn.metrics import f1_score

    y, t = answers
    return f1_score(t.numpy(), y.argmax(1).numpy(), average="macro", labels=range(10), zero_division=0)


def trainer_of(model, out, length=(12, "iteration"), evaluation=(4, "iteration")):
    updater = training.StandardUpdater(iterators.SerialIterator(DATA, 10), torch.optim.Adam(model.parameters()), model)
    trainer = training.Trainer(updater, length, str(out))
    trainer.extend(Evaluator(iterators.SerialIterator(TEST, 10, repeat=False, shuffle=False), model), trigger=evaluation)
    return trainer


def test_one_metric_is_the_score_of_the_interval_and_of_the_evaluation(tmp_path):
    """Against scikit-learn; the evaluations come in the midst of an interval of six and count by themselves."""
    model = scored()
    seen = Seen(model)
    trainer = trainer_of(model, tmp_path)
    trainer.extend(LogReport(trigger=(6, "iteration")))
    validations = []
    trainer.extend(lambda trainer: validations.append(trainer.observation["validation/main/f1"]), "note", (4, "iteration"))
    trainer.run()
    assert [row["main/f1"] for row in rows_of(trainer)] == pytest.approx(
        [f1(seen.take(True, 6)) for _ in range(2)], rel=1e-5
    )
    assert validations == pytest.approx([f1(seen.take(False, 3)) for _ in range(3)], rel=1e-5)


def test_a_plain_object_is_one_too(tmp_path):
    """A few lines with compute and reset: the largest of the interval, and of the evaluation."""
    model = with_own()
    seen = Seen(model)
    trainer = trainer_of(model, tmp_path, (8, "iteration"))
    trainer.extend(LogReport(trigger=(4, "iteration")))
    trainer.run()
    rows = rows_of(trainer)
    for row in rows:
        assert row["main/score"] == float(next(seen.take(True, 4)).max())
        assert row["validation/main/score"] == float(next(seen.take(False, 3)).max())
    assert len({row["main/score"] for row in rows}) == 2


def test_a_metric_is_computed_once_an_interval(tmp_path):
    """And not every iteration: what it costs to compute, a log of the epoch costs once."""
    model, calls = with_own(), []
    compute, model.metric.compute = model.metric.compute, lambda: calls.append(1) or compute()
    trainer = trainer_of(model, tmp_path, evaluation=(100, "iteration"))
    trainer.extend(LogReport(trigger=(6, "iteration")))
    trainer.run()
    assert len(calls) == 2


def test_after_an_evaluation_the_model_has_its_own_metric(tmp_path):
    """The very object, also when the evaluation fails."""
    model = scored()
    metric = model.f1
    evaluator = Evaluator([(torch.ones(2, 64), torch.ones(2, dtype=torch.long))], model)
    evaluator.evaluate()
    assert model.f1 is metric
    assert not metric.update_called
    with pytest.raises(RuntimeError):
        Evaluator([(torch.ones(2, 7), torch.ones(2, dtype=torch.long))], model).evaluate()
    assert model.f1 is metric


def test_a_trained_part_with_methods_of_those_names_is_no_metric():
    """An evaluation leaves a layer as it is that can be reset."""

    class Memory(nn.Linear):
        compute = nn.Linear.forward

        def reset(self):
            nn.init.zeros_(self.weight)

    model = with_own()
    model.predictor = Memory(64, 10)
    model.predictor.bias.data.fill_(5.0)
    model.predictor.weight.data.fill_(1.0)
    ones = (torch.ones(2, 64), torch.ones(2, dtype=torch.long))
    assert Evaluator([ones], model).evaluate()["main/score"] == 69.0


def test_a_saved_metric_resumes_at_every_iteration(tmp_path):
    """persistent(True): each snapshot in the midst of an interval has what was counted."""
    assert_resumes_everywhere(lambda out, length: trainer_of(scored(), out, length), tmp_path, 7)


@pytest.mark.parametrize("make", [with_own, with_torchmetrics])
def test_a_snapshot_inside_the_interval_of_an_unsaved_metric_says_so(tmp_path, make):
    """With the key and the remedy; one at the end of an interval has nothing to say."""
    for log, expected in ((1, 0), (2, 1)):
        trainer = trainer_of(make(), tmp_path / str(log), (1, "iteration"))
        trainer.extend(LogReport(trigger=(log, "iteration")))
        trainer.extend(snapshot(), trigger=(1, "iteration"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.run()
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == expected, texts
        assert all("metrics ['main/score']" in text and "persistent(True)" in text for text in texts)


def test_snapshots_at_the_ends_of_intervals_need_no_saved_metric(tmp_path):
    """The resumed row is the same."""

    def run(out, length, load=None):
        trainer = trainer_of(with_torchmetrics(), out, length)
        trainer.extend(LogReport(trigger=(3, "iteration")))
        trainer.extend(snapshot(), trigger=(3, "iteration"))
        if load is not None:
            serializers.load(load, trainer)
        trainer.run()
        return rows_of(trainer)

    whole = run(tmp_path / "whole", (9, "iteration"))
    assert run(tmp_path / "rest", (9, "iteration"), tmp_path / "whole" / "snapshot_iter_3") == whole


def test_a_collection_gives_a_number_for_each_of_its_metrics(tmp_path):
    """Under its key and their names."""
    from torchmetrics import MetricCollection

    collection = MetricCollection({"micro": accuracy(average="micro"), "macro": accuracy()})
    model = with_torchmetrics(collection)
    seen = Seen(model)
    trainer = trainer_of(model, tmp_path, (6, "iteration"), (6, "iteration"))
    trainer.extend(LogReport(trigger=(6, "iteration")))
    trainer.run()
    (row,) = rows_of(trainer)
    for is_training, prefix in ((True, "main"), (False, "validation/main")):
        y, t = seen.take(is_training)
        right = (y.argmax(1) == t).double()
        assert row[f"{prefix}/score/micro"] == pytest.approx(float(right.mean()), rel=1e-5)
        by_class = [float(right[t == label].mean()) for label in range(10)]
        assert row[f"{prefix}/score/macro"] == pytest.approx(sum(by_class) / 10, rel=1e-5)


def test_a_metric_of_torchmetrics_says_over_which_ranks_it_exchanges():
    """By that, one that would count the rows of a mesh more than once is refused."""
    metric = accuracy(process_group="the ranks")
    assert (metric.process_group, metric.sync_on_compute, callable(metric.sync)) == ("the ranks", True, True)


def test_loading_into_a_summary_forgets_the_metrics_of_before():
    """As it forgets the numbers."""
    summary, metric = DictSummary(), OWN["Largest"]()
    empty = summary.state_dict()
    summary.add({"score": metric})
    summary.load_state_dict(empty)
    assert summary.compute_mean() == {}
