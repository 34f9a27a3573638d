"""The Evaluator: what it reports, and that it leaves everything as it was."""

import copy
import io
import itertools
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted import Counting, run
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from chainring import Reporter, datasets, iterators, report, training
from chainring import nn as cnn
from chainring.parallel import Communicator
from chainring.reporting.summary import DictSummary
from chainring.training import extensions
from chainring.training.extensions import Evaluator
from rank_pair import on_two_ranks


class Mean(nn.Module):
    """Reports the mean of its batch as the loss."""

    def forward(self, x):
        loss = x.float().mean()
        report({"loss": loss}, self)
        return loss


class Drawing(nn.Module):
    """Draws from every generator of the host, whatever its mode."""

    def forward(self, x):
        report({"drawn": torch.rand(()) + random.random() + np.random.rand()}, self)
        return x.float().mean()


class Augmented(datasets.DatasetMixin):
    """Examples that are drawn anew each time one asks for them."""

    def __len__(self):
        return 7

    def get_example(self, i):
        return np.float32(i + np.random.rand() + random.random() + torch.rand(()).item())


def once(data, batch_size=2, **settings):
    return iterators.SerialIterator(data, batch_size, repeat=False, **{"shuffle": False, **settings})


def values(*numbers):
    return np.array(numbers, dtype=np.float32)


class Seen(training.Extension):
    """Keeps what each iteration reported."""

    def __init__(self):
        self.observations = []

    def __call__(self, trainer):
        self.observations.append(dict(trainer.observation))


def reported(tmp_path, *evaluators):
    """By one iteration of these; the reader is registered first, and comes after them by priority."""
    seen = Seen()
    run(Counting(), 1, tmp_path, seen, *evaluators)
    return seen.observations


def test_keys_begin_with_validation_and_the_second_evaluator_s_with_validation_1(tmp_path):
    """The prefix is the name in the trainer; what was reported is there for readers of the same iteration."""
    seen = reported(tmp_path, Evaluator(once(values(1, 3)), Mean()), Evaluator(once(values(5, 7)), Mean()))
    assert seen == [{"validation/main/loss": 2.0, "validation_1/main/loss": 6.0}]


def test_one_evaluator_registered_twice_reports_under_both_names(tmp_path):
    """The name lives in the trainer's entry and not on the object."""
    evaluator = Evaluator(once(values(1, 3)), Mean())
    assert reported(tmp_path, evaluator, evaluator) == [{"validation/main/loss": 2.0, "validation_1/main/loss": 2.0}]


def test_submodules_report_under_their_paths():
    """A part of the model reports as main/<path>, with slashes."""
    model = nn.Sequential(nn.Sequential(Mean()))
    assert Evaluator(once(values(1, 3)), model).evaluate() == {"main/0/0/loss": 2.0, "main/loss": 2.0}


def test_no_gradient_is_computed():
    """The model's output needs no gradient, and parameters get none."""
    flags = []

    class Watched(nn.Linear):
        def forward(self, x):
            flags.append((torch.is_grad_enabled(), super().forward(x).requires_grad))
            return x.mean()

    Evaluator(once(np.ones((3, 1), np.float32)), Watched(1, 1)).evaluate()
    assert flags == [(False, False)] * 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_every_submodule_gets_its_training_flag_back(fails):
    """Frozen parts stay frozen, training parts go on training; also when the evaluation fails."""

    class Failing(Mean):
        def forward(self, x):
            assert not any(part.training for part in model.modules())
            if fails:
                raise OSError("no data")
            return super().forward(x)

    model = nn.Sequential(nn.BatchNorm1d(1), nn.Sequential(nn.Dropout(), Failing()))
    model[0].eval()
    before = [part.training for part in model.modules()]
    evaluator = Evaluator(once(np.ones((2, 1), np.float32)), model)
    if fails:
        with pytest.raises(OSError, match="no data"):
            evaluator.evaluate()
    else:
        evaluator.evaluate()
    assert [part.training for part in model.modules()] == before


@pytest.mark.parametrize("source", [values(1, 2, 3), Augmented()], ids=["arrays", "augmented"])
def test_generators_are_untouched_even_when_the_model_draws(source):
    """What is drawn after an evaluation is what would have been drawn without it."""

    def drawn_after(action):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        action()
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    evaluator = Evaluator(once(source, shuffle=True), Drawing())
    assert drawn_after(evaluator.evaluate) == drawn_after(lambda: None)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 100])
def test_means_do_not_depend_on_the_batch_size(batch_size):
    """Batches are weighted by their examples: a short last batch counts for what it holds."""
    data = values(0, 0, 9, 2, 4, 8, 16)
    result = Evaluator(once(data, batch_size), Mean()).evaluate()
    assert result["main/loss"] == pytest.approx(np.mean(data), rel=1e-6)


def test_a_value_reported_with_a_weight_of_its_own_keeps_it():
    """(value, weight) is a weighted value, whatever the batch holds."""

    class Weighted(nn.Module):
        def forward(self, x):
            report({"score": (x.mean(), int(x[0]))}, self)
            return x.mean()

    result = Evaluator(once(values(1, 3), 1), Weighted()).evaluate()
    assert result["main/score"] == (1 * 1 + 3 * 3) / 4


WITHOUT_A_BATCH = {
    "an empty list": list,
    "an iterator over nothing": lambda: once([]),
    "a loader that drops the only batch": lambda: DataLoader(TensorDataset(torch.ones(3)), 4, drop_last=True),
    "a loader over nothing": lambda: DataLoader([], 4),
    "a function that yields nothing": lambda: lambda: iter(()),
    "a stream without data": lambda: DataLoader(Stream(), 2),
}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("virtual_ranks", [None, 2])
@pytest.mark.parametrize("source", WITHOUT_A_BATCH.values(), ids=WITHOUT_A_BATCH)
def test_an_evaluation_without_a_batch_is_said(source, virtual_ranks):
    """Its keys are missing in the log, and no error tells why."""
    evaluator = Evaluator(source(), Mean(), virtual_ranks=virtual_ranks)
    with pytest.warns(UserWarning, match="the validation has no data, because its iterator gave no batch; check"):
        assert evaluator.evaluate() == {}


def test_an_evaluation_without_a_batch_is_said_once(tmp_path):
    """Not also by the table that misses its keys, which says the others that are missing."""
    table = extensions.PrintReport(["validation/main/loss", "validation_1/main/los"], out=io.StringIO())
    log, full = extensions.LogReport(trigger=(1, "iteration")), Evaluator(once(values(1, 2)), Mean())
    with pytest.warns(UserWarning, match="no ") as caught:
        run(Counting([{"main/loss": 1.0}]), 1, tmp_path, Evaluator([], Mean()), full, log, table)
    first, second = (str(warning.message) for warning in caught)
    assert "the validation has no data" in first
    assert "no values for ['validation_1/main/los']" in second


def test_an_evaluation_that_only_looks_needs_no_word():
    """It has seen batches."""
    seen = []
    assert Evaluator(once(values(1, 2)), Mean(), eval_func=seen.append).evaluate() == {}
    assert len(seen) == 1


def test_a_value_of_an_evaluation_that_has_no_mean_is_said():
    """With its key, as a LogReport does."""
    evaluator = Evaluator(once(values(1, 2, 3)), nn.Identity(), eval_func=lambda x: report({"each": x}))
    with pytest.warns(UserWarning, match="'each' is not averaged.*Tensor of shape"):
        assert evaluator.evaluate() == {}


def test_a_value_that_has_no_mean_is_said_once_in_a_run(tmp_path):
    """Training and two evaluations report it, a log and a table miss it: one cause, one warning."""
    evaluator = Evaluator(once(values(1, 2, 3)), nn.Identity(), eval_func=lambda x: report({"each": x}))
    table = extensions.PrintReport(["epoch", "each", "validation/each"], out=io.StringIO())
    log = extensions.LogReport(trigger=(1, "iteration"))
    with pytest.warns(UserWarning, match="'each' is not averaged") as caught:
        run(Counting([{"each": torch.ones(3)}] * 2), 2, tmp_path, evaluator, log, table)
    assert len(caught) == 1


@pytest.mark.parametrize("collate", [DataLoader, list], ids=["DataLoader", "list of batches"])
def test_a_loader_is_accepted_where_an_iterator_is(collate):
    """Its batches are weighted by their examples and it can be evaluated again."""
    loader = DataLoader(TensorDataset(torch.tensor([0.0, 0.0, 9.0])), batch_size=2)
    evaluator = Evaluator(loader if collate is DataLoader else list(loader), Mean())
    assert [evaluator.evaluate(), evaluator.evaluate()] == [{"main/loss": 3.0}] * 2


def test_a_repeating_iterator_is_refused():
    """It would never end; the error names the iterator and the remedy."""
    with pytest.raises(ValueError, match=r"'main' \(SerialIterator\) repeats .*repeat=False"):
        Evaluator(iterators.SerialIterator(values(1, 2), 1), Mean())


@pytest.mark.parametrize("source", [np.arange(7.0), Augmented()], ids=["shuffled", "augmented"])
def test_every_evaluation_of_a_model_gives_the_same_result(source):
    """A shuffled or augmenting iterator begins the same order and the same draws again."""
    seen = []

    class Seeing(Mean):
        def forward(self, x):
            seen.extend(x.tolist())
            return super().forward(x)

    evaluator = Evaluator(once(source, 3, shuffle=True), Seeing())
    results = [evaluator.evaluate() for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert seen[:7] == seen[7:14] == seen[14:]


def test_a_shuffling_loader_gives_the_same_batches_at_every_evaluation():
    """The loader's draws are a function of the pass, which begins anew."""
    data = TensorDataset(torch.arange(7.0))

    class First(nn.Module):
        def forward(self, x):
            report({"first": x[0] * len(x)}, self)
            return x.mean()

    evaluator = Evaluator(DataLoader(data, batch_size=3, shuffle=True), First())
    assert evaluator.evaluate() == evaluator.evaluate()


def test_it_can_be_called_without_a_trainer():
    """Then the keys have no prefix, and they go to the reporter that is current."""
    evaluator = Evaluator(once(values(1, 3)), Mean())
    observation = {}
    with Reporter().scope(observation):
        result = evaluator()
    assert result == observation == {"main/loss": 2.0}


def test_evaluate_reports_nothing_to_the_reporter_outside():
    """Only the call reports; what the model reports during an evaluation stays inside."""
    observation = {}
    with Reporter().scope(observation):
        Evaluator(once(values(1, 3)), Mean()).evaluate()
    assert observation == {}


def test_eval_hook_is_called_with_the_evaluator_before_each_evaluation():
    """Once for each evaluation."""
    seen = []
    evaluator = Evaluator(once(values(1)), Mean(), eval_hook=seen.append)
    evaluator.evaluate()
    evaluator.evaluate()
    assert seen == [evaluator, evaluator]


def test_eval_func_takes_the_place_of_the_model():
    """With it there need be no target at all, and the loss that it returns is the main one."""
    evaluator = Evaluator(once(values(1, 2, 6), 2), {}, eval_func=lambda x: x.mean())
    assert evaluator.evaluate() == {"main/loss": 3.0}


def test_a_loss_that_is_only_returned_is_the_main_loss():
    """As in training, a model need not report."""
    assert Evaluator(once(values(1, 2, 6), 2), nn.Identity(), lambda b, _: (torch.tensor(b).mean(),)).evaluate() == {
        "main/loss": 3.0
    }


def test_a_mapping_that_is_returned_is_reported_by_its_weight():
    """Scalars of the mapping become keys; "weight" says how much the batch counts."""

    def evaluate(x):
        return {"loss": x.mean(), "largest": x.max(), "weight": x.sum(), "all": x}

    result = Evaluator(once(values(1, 3), 1), {}, eval_func=evaluate).evaluate()
    assert result["main/loss"] == result["main/largest"] == (1 * 1 + 3 * 3) / 4
    assert "main/all" not in result


@pytest.mark.parametrize("examples", [[(1.0, 2.0), (3.0, 4.0)], [{"t": 2.0, "x": 1.0}, {"t": 4.0, "x": 3.0}]])
def test_a_tuple_is_passed_by_position_and_a_mapping_by_keyword(examples):
    """Of the converted batch."""
    assert Evaluator(once(examples), {}, eval_func=lambda x, t: (t * 10 + x).mean()).evaluate() == {"main/loss": 32.0}


def test_the_converter_gets_the_batch_and_the_device():
    """What it returns is what the model is called with."""
    seen = []

    def converter(batch, device):
        seen.append((list(batch), device))
        return torch.tensor(float(len(batch)))

    assert Evaluator(once([5, 6, 7]), Mean(), converter, device="cpu").evaluate() == {"main/loss": (2 * 2 + 1) / 3}
    assert seen == [([5, 6], torch.device("cpu")), ([7], torch.device("cpu"))]


def test_the_classifier_s_accuracy_is_that_of_all_examples():
    """Compared with plain torch over the whole data at once."""
    x, t = torch.randn(23, 4), torch.randint(0, 3, (23,))
    model = cnn.Classifier(nn.Linear(4, 3))
    result = Evaluator(once(datasets.TupleDataset(x, t), 5), model).evaluate()
    scores = model.predictor(x)
    assert result["main/accuracy"] == pytest.approx((scores.argmax(1) == t).float().mean().item())
    assert result["main/loss"] == pytest.approx(nn.functional.cross_entropy(scores, t).item(), rel=1e-6)


def test_a_dataset_in_the_iterator_s_place_is_refused():
    """The error says what to wrap it in."""
    with pytest.raises(TypeError, match="SerialIterator"):
        Evaluator(Augmented(), Mean())


def test_a_function_in_the_model_s_place_is_refused():
    """The error says that a module belongs there."""
    with pytest.raises(TypeError, match=r"nn\.Module"):
        Evaluator(once(values(1)), lambda x: x)


def test_finalize_finalizes_the_iterator(tmp_path):
    """A run that ends lets go of the validation data too."""
    ended = []

    class Ending(iterators.SerialIterator):
        def finalize(self):
            ended.append(True)

    reported(tmp_path, Evaluator(Ending(values(1), 1, repeat=False, shuffle=False), Mean()))
    assert ended


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x).square().mean()


def said_of(tmp_path, target, *, updates=4, lr=0.1, eval_func=None):
    """Warnings of a run that trains a model and evaluates it, its average or a copy of it after each two updates."""
    model, data = Regression(), torch.ones(4, 3)
    updater = training.StandardUpdater(iterators.SerialIterator(data, 2), torch.optim.SGD(model.parameters(), lr), model)
    trainer = training.Trainer(updater, (updates, "iteration"), str(tmp_path))
    average = extensions.ExponentialMovingAverage(model)
    trainer.extend(average)
    targets = {"model": model, "average": average.model, "copy": copy.deepcopy(model)}
    trainer.extend(Evaluator(once(data), targets[target], eval_func=eval_func), trigger=(2, "iteration"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    return [str(warning.message) for warning in caught]


def test_an_evaluation_of_a_copy_of_the_model_is_said_at_the_end(tmp_path):
    """It gives the same, to the last bit, however long the model is trained; an average that is trained with it does not."""
    (text,) = said_of(tmp_path, "copy", updates=7)
    assert text.startswith(
        "all evaluations, after iterations 2 to 6, gave the same to the last bit: the model that is evalua"
    )
    assert text.endswith("give the Evaluator the model of the updater")
    assert said_of(tmp_path, "average") == []


def test_evaluations_that_may_well_be_alike_need_no_word(tmp_path):
    """A single one, those of a model that learns nothing, and those of a function, which may call another model."""
    assert said_of(tmp_path, "copy", updates=3) == []
    assert said_of(tmp_path, "model", lr=0.0) == []
    assert said_of(tmp_path, "copy", eval_func=torch.sum) == []


class Dtype(nn.Module):
    """Reports the size in bytes of what its layer computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        y = self.layer(x[:, None])
        report({"bytes": y.element_size()}, self)
        return y.float().square().mean()


def evaluated(model, evaluator, **settings):
    """The keys and values of one evaluation beside the training of a model."""
    iterator = iterators.SerialIterator(values(1, 2, 3, 4), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    updater = training.StandardUpdater(iterator, optimizer, model, **settings)
    seen = Seen()
    with tempfile.TemporaryDirectory() as out:
        trainer = training.Trainer(updater, (1, "iteration"), out=out)
        trainer.extend(evaluator, trigger=(1, "iteration"))
        trainer.extend(seen, priority=-1)
        trainer.rehearse()  # which leaves nothing behind
        trainer.run()
    return seen.observations[-1]


@pytest.mark.filterwarnings("ignore:two updates")  # it takes down what is observed
def test_a_model_is_evaluated_in_the_precision_of_its_training():
    """bfloat16 has two bytes; the average of a model and any other target stay as they are."""
    model, other = Dtype(), Dtype()
    data = values(1, 2)
    assert evaluated(model, Evaluator(once(data), model), precision="bf16")["validation/main/bytes"] == 2
    assert evaluated(model, Evaluator(once(data), torch.nn.Sequential(other)), precision="bf16")["main/bytes"] == 2
    assert evaluated(model, Evaluator(once(data), {"main": other}), precision="bf16")["validation/main/bytes"] == 4


@pytest.mark.filterwarnings("ignore:two updates")  # it takes down what is observed
def test_the_precision_of_an_evaluation_may_be_another():
    """A setting of the evaluator takes precedence over that of the updater; an unknown one is refused."""
    model = Dtype()
    asked = Evaluator(once(values(1, 2)), model, precision="fp32")
    assert evaluated(model, asked, precision="bf16")["validation/main/bytes"] == 4
    asked = Evaluator(once(values(1, 2)), model, precision="bf16")
    assert evaluated(model, asked)["validation/main/bytes"] == 2
    with pytest.raises(ValueError, match=r'precision is "fp32", "bf16" or "fp16", got \'half\''):
        Evaluator(once(values(1, 2)), model, precision="half")


@pytest.mark.filterwarnings("ignore:two updates")  # it takes down what is observed
def test_a_model_is_evaluated_by_the_loss_function_of_its_training():
    """And another target is called as it is; an eval_func or a loss_func of the evaluator takes precedence."""
    model, other = nn.Linear(1, 1), Mean()

    def loss_func(model, x):
        return {"loss": model(x[:, None]).mean() * 0 + 7.0}

    def key(evaluator):
        return evaluated(model, evaluator, loss_func=loss_func)["validation/main/loss"]

    data = values(1, 3)
    assert key(Evaluator(once(data), model)) == 7
    assert key(Evaluator(once(data), other)) == 2
    assert key(Evaluator(once(data), model, eval_func=lambda x: {"loss": x.sum()})) == 4
    assert key(Evaluator(once(data), model, loss_func=lambda model, x: model(x[:, None]).mean() * 0 + 5)) == 5
    assert key(Evaluator(once(data), other, loss_func=lambda model, x: {"loss": 2 * model(x)})) == 4


def test_one_function_is_called_in_an_evaluation():
    """A loss_func and an eval_func are two; a loss of PyTorch does not take the model."""
    with pytest.raises(ValueError, match=r"loss_func\(model, \*inputs\) or eval_func\(\*inputs\), and both were given"):
        Evaluator(once(values(1)), Mean(), eval_func=lambda x: x, loss_func=lambda model, x: x)
    with pytest.raises(TypeError, match="takes no model"):
        Evaluator(once(values(1)), Mean(), loss_func=nn.functional.mse_loss)


def test_a_function_that_does_not_fit_the_batch_is_refused_with_the_rule_of_its_call():
    """An eval_func with the parameters of a loss_func, a loss_func without the model, and a model without the target."""
    data = [(torch.ones(2), torch.tensor(1)), (torch.ones(2), torch.tensor(0))]
    model = nn.Linear(2, 2)
    without_model = r"eval_func is called with 2 inputs, .*; loss\(model, x, t\) cannot be: .* loss_func of an Evaluator"

    def loss(model, x, t):
        return nn.functional.cross_entropy(model(x), t)

    with pytest.raises(TypeError, match=without_model):
        Evaluator(once(data), model, eval_func=loss).evaluate()
    with pytest.raises(TypeError, match="loss_func is called with the model first and then 2 inputs"):
        Evaluator(once(data), model, loss_func=lambda x, t: x.sum()).evaluate()
    with pytest.raises(TypeError, match=r"without a loss_func the model is called with 2 inputs.* Linear\.forward"):
        Evaluator(once(data), model).evaluate()
    with pytest.raises(TypeError, match=r"^an error inside$"):
        Evaluator(once(data), model, eval_func=raise_type_error).evaluate()


def raise_type_error(x, t):
    raise TypeError("an error inside")


class Largest:
    """A metric: the largest number that it has seen since its reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.seen = []

    def update(self, x):
        self.seen += x.tolist()
        return self

    def compute(self):
        return torch.tensor(max(self.seen))


@pytest.mark.parametrize("loss", [{}, {"loss": torch.tensor(1.0)}])
def test_metrics_and_numbers_in_the_mapping_of_an_eval_func_are_reported(loss):
    """A metric object is computed at the end of each evaluation, over the whole pass."""
    largest = Largest()
    evaluator = Evaluator(
        once(values(1, 5, 2)), {}, eval_func=lambda x: {**loss, "largest": largest.update(x), "size": len(x)}
    )
    for _ in range(2):
        assert evaluator.evaluate() == {
            **{f"main/{key}": 1 for key in loss},
            "main/size": pytest.approx(5 / 3),
            "main/largest": 5,
        }


class WithoutReset(iterators.Iterator):
    """Two batches."""

    repeat = False
    batch_size = 1
    epoch_detail = 0.0

    def __init__(self):
        self.batches = iter([values(1), values(2)])

    def __next__(self):
        return next(self.batches)


class Bare:
    """An iterator that knows nothing of this library, with the attributes of Chainer's."""

    epoch_detail = 0.0

    def __next__(self):
        raise StopIteration


@pytest.mark.parametrize("iterator", [WithoutReset(), Bare()], ids=["of ours", "bare"])
def test_an_iterator_without_reset_is_refused(iterator):
    """The second evaluation would have no data."""
    with pytest.raises(ValueError, match=rf"{type(iterator).__name__}\) has none; define reset\(\)"):
        Evaluator(iterator, Mean())


@pytest.mark.parametrize("source", [iter([values(1)]), (batch for batch in [values(1)])], ids=["list_iterator", "generator"])
def test_a_source_of_one_pass_is_refused(source):
    """A generator or the iterator of a list has nothing left for the second evaluation."""
    with pytest.raises(ValueError, match=rf"a {type(source).__name__}, can be used only once; pass its source"):
        Evaluator(source, Mean())


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("source", ["iterator", "loader"])
def test_a_terminal_shows_a_bar_of_the_batches_if_asked_for(monkeypatch, source):
    """It is gone afterwards; the results are those without it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    data = np.arange(6.0)

    def evaluate(**settings):
        batches = iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
        return Evaluator(batches if source == "iterator" else DataLoader(data, 2), Mean(), **settings).evaluate()

    assert evaluate() == {"main/loss": 2.5}
    assert sys.stdout.getvalue() == ""
    assert evaluate(progress_bar=True) == {"main/loss": 2.5}
    assert "validation" in sys.stdout.getvalue()
    assert sys.stdout.getvalue().endswith("\r")


def test_elsewhere_than_in_a_terminal_no_bar_is_shown(capsys):
    """A file or a pipe gets nothing."""
    batches = iterators.SerialIterator(np.arange(6.0), 2, repeat=False, shuffle=False)
    assert Evaluator(batches, Mean(), progress_bar=True).evaluate() == {"main/loss": 2.5}
    assert capsys.readouterr() == ("", "")


class Counted(nn.Module):
    """Has metrics of several makers, which it updates; of a count of its own it returns the metric."""

    def __init__(self, external):
        import torchmetrics  # which takes two seconds, in each process of tests

        super().__init__()
        self.mean, self.largest = torchmetrics.MeanMetric(), torchmetrics.MaxMetric()
        self.joined = torchmetrics.MetricCollection({"sum": torchmetrics.SumMetric(), "cat": torchmetrics.CatMetric()})
        self.error = torchmetrics.MeanSquaredError()
        self.external = [external]  # no attribute that is a metric

    def forward(self, x):
        x = x.float()
        self.error.update(x, torch.zeros_like(x))
        for metric in (self.mean, self.largest, self.joined, self.external[0]):
            metric.update(x)
        sums = {"sum": self.joined["sum"], "mean": self.mean, "largest": self.largest, "error": self.error}
        return {**sums, "external": self.external[0], "loss": x.mean()}


def a_sum():
    from torchmetrics import SumMetric

    return SumMetric()


def trainer_of_ranks(comm, out):
    model = nn.Linear(1, 1)
    updater = training.StandardUpdater([torch.ones(2, 1)], torch.optim.SGD(model.parameters(), 0.1), model, comm=comm)
    return training.Trainer(updater, (1, "iteration"), out=out)


def evaluate_metrics(comm, out):
    """Twice over 5, 3 and 1 examples in batches of two, of the last of which rank 1 has none."""
    found = []
    for size in (5, 3, 1):
        evaluator = Evaluator(once(values(*range(1, size + 1))), Counted(a_sum()))
        evaluator.initialize(trainer_of_ranks(comm, out))
        found += [evaluator.evaluate() for _ in range(2)]
    return found


class Reporting(Counted):
    """In training it reports its metrics."""

    def __init__(self, external):
        super().__init__(external)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x):
        found = super().forward(x)
        external = found.pop("external")
        report({key: value for key, value in found.items() if key != "loss"}, self)
        if self.external[1:]:
            report({"external": external}, self)
        return found["loss"] * self.factor


def train_metrics(comm, out, reports_external):
    model = Reporting(a_sum())
    model.external += [True] * reports_external
    loader = DataLoader(torch.arange(1.0, 6.0), batch_size=2)
    updater = training.StandardUpdater(loader, torch.optim.SGD([model.factor], 0.0), model, comm=comm)
    trainer = training.Trainer(updater, (2, "epoch"), out=out)
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    trainer.run()
    log = trainer.get_extension("LogReport").log
    return [{key: value for key, value in row.items() if key.startswith("main/")} for row in log]


@pytest.mark.parametrize(
    "result", [None, 0.5, torch.tensor(0.5), [("main/loss", 0.5)], ("main/loss", 0.5), {0: 0.5}, "main/loss", iter([0.5])]
)
def test_a_subclass_whose_evaluate_returns_no_means_is_told_what_to_return(result):
    """By the name of the class, also where it forgets the return."""

    class Forgetful(Evaluator):
        def evaluate(self):
            super().evaluate()
            return result

    with pytest.raises(TypeError, match=r"Forgetful\.evaluate\(\) returns a mapping .* let it end with: return means"):
        Forgetful(once(values(1, 2)), Mean())()


class Looping(Evaluator):
    """Loops over its iterator itself, as Chainer's documents show it."""

    def evaluate(self):
        iterator, summary, rows = self.get_iterator("main"), DictSummary(), []
        iterator.reset()
        for batch in iterator:
            x = self.converter(batch, self.device)
            rows += x.tolist()
            summary.add({"mean": self.get_target("main")(x)}, len(batch))
        return {**summary.compute_mean(), "rows": rows}


class Adding(Looping):
    def evaluate(self):
        return {**Evaluator.evaluate(self), **super().evaluate()}


def evaluate_in_loops(comm, out):
    found, data = [], values(1, 2, 3, 4, 5)
    sources = once(data), iterators.MultiprocessIterator(list(data), 2, False, False, n_processes=1), DataLoader(data, 2)
    for cls, source in itertools.product([Looping, Adding], sources):
        evaluator = cls(source, Mean())
        evaluator.initialize(trainer_of_ranks(comm, out))
        found += [evaluator.evaluate() for _ in range(2)]
        evaluator.finalize()
    source = iterators.LoaderIterator(DataLoader(data, 2), per_rank=True)
    evaluator = Looping(source, Mean())
    evaluator.initialize(trainer_of_ranks(comm, out))
    try:
        return found, evaluator.evaluate()
    except ValueError as error:
        return found, str(error)


def evaluate_weights(comm, out):
    found = []
    for size, virtual_ranks in itertools.product([1, 2, 5], [None, 3]):
        source = once(values(1, 2, 3, 4, 5), size)
        weigh = lambda x: {"loss": x.mean(), "weight": (x > 1).sum()}  # noqa: E731
        evaluator = Evaluator(source, {}, eval_func=weigh, virtual_ranks=virtual_ranks)
        evaluator.initialize(trainer_of_ranks(comm, out))
        found.append(evaluator.evaluate()["main/weight"])
    return found


def count_on_a_rank(comm, out):
    found = [evaluate_metrics(comm, f"{out}/evaluation"), train_metrics(comm, f"{out}/training", False)]
    found += [evaluate_in_loops(comm, f"{out}/loops"), evaluate_weights(comm, f"{out}/weights")]
    Path(f"{out}/found-{comm.rank}.json").write_text(json.dumps(found))
    train_metrics(comm, f"{out}/refused", True)


@pytest.fixture(scope="module")
def counted_on_ranks(tmp_path_factory):
    """Of two ranks the results of evaluations, the rows of logs, and an error."""
    out = tmp_path_factory.mktemp("ranks")
    errors = on_two_ranks(count_on_a_rank, str(out))
    return [[*json.loads((out / f"found-{rank}.json").read_text()), errors[rank]] for rank in range(2)]


def test_metrics_count_no_example_that_a_rank_repeats(counted_on_ranks, tmp_path):
    """A rank does so to keep in step, where the last batch has fewer examples than there are ranks."""
    one = evaluate_metrics(Communicator(), str(tmp_path))
    assert [evaluations for evaluations, *_ in counted_on_ranks] == [one, one]
    assert one[0]["main/sum"] == one[0]["main/external"] == 15


def test_metrics_in_training_count_no_example_that_a_rank_repeats(counted_on_ranks, tmp_path):
    """Those that are attributes of the model."""
    one = train_metrics(Communicator(), str(tmp_path), False)
    assert counted_on_ranks[0][1] == one
    assert one[0]["main/sum"] == 15


def test_a_metric_outside_of_the_model_that_has_counted_a_repeated_example_is_refused(counted_on_ranks, tmp_path):
    """With the remedies; on one process nothing is repeated."""
    assert train_metrics(Communicator(), str(tmp_path), True)[0]["main/external"] == 15
    assert "the metric 'main/external' has counted it; make the metric an attribute" in counted_on_ranks[1][-1]


def test_a_loop_of_a_subclass_has_all_examples_on_every_rank(counted_on_ranks, tmp_path):
    """Each once, as on one, also beside ``super().evaluate()``; not where the loader gives each rank its own share."""
    one, of_shares = evaluate_in_loops(Communicator(), str(tmp_path))
    assert one[0] == {"mean": 3.0, "rows": [1, 2, 3, 4, 5]}
    assert one[-1] == {"main/loss": 3.0, **one[0]}
    assert isinstance(of_shares, dict)
    for rank in counted_on_ranks:
        assert rank[2][0] == one
        assert "return the values of a batch from eval_func, whose means are over all ranks" in rank[2][1]


def test_the_weight_beside_a_loss_is_reported_as_its_sum(counted_on_ranks, tmp_path):
    """Over batches and ranks: the tokens of an evaluation, say."""
    assert [rank[3] for rank in counted_on_ranks] == [evaluate_weights(Communicator(), str(tmp_path))] * 2 == [[4.0] * 6] * 2


class Sampling(nn.Module):
    """Reports a number that it draws where its inputs are."""

    def forward(self, x, t):
        report({"loss": torch.rand((), device=x.device)}, self)


def test_an_evaluation_leaves_the_generator_of_its_device_as_it_was(device):
    """So that the training goes on with the same numbers."""
    draw = lambda: torch.rand(3, device=device).tolist()  # noqa: E731
    evaluator = Evaluator(iterators.SerialIterator([(0.0, 0)], 1, repeat=False), Sampling(), device=device)
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    evaluator.evaluate()
    assert draw() == expected


def in_order():
    return iterators.SerialIterator(list(range(12)), 4, repeat=False, shuffle=False)


@pytest.mark.parametrize("make", [in_order, lambda: DataLoader(torch.arange(12), 4)])
def test_a_limit_ends_an_evaluation_after_its_first_batches(tmp_path, make):
    """Each time the same ones, and the run is that without a limit in all else; more batches than there are is all."""

    def log(out, limit, stop=2):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        updater = training.StandardUpdater(
            iterators.SerialIterator(list(range(6)), 3),
            torch.optim.SGD(model.parameters(), 0.01),
            model,
            loss_func=lambda model, x: (model(x[:, None].float()) * torch.rand(())).mean(),
        )
        trainer = training.Trainer(updater, (stop, "epoch"), out=str(tmp_path / out))
        trainer.extend(Evaluator(make(), Mean(), limit=limit))
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        trainer.run()
        rows = trainer.get_extension("LogReport").log
        return [row["validation/main/loss"] for row in rows], [row["main/loss"] for row in rows]

    limited, trained = log("limited", 2)
    assert limited == [3.5, 3.5]
    assert (log("all", None)[1], log("more", 9)[0]) == (trained, [5.5, 5.5])
    log("cut", 2, stop=1)
    assert log("cut", 2) == (limited, trained)


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
def test_a_limit_is_a_number_of_batches(limit):
    """At least one; it is no part of an epoch."""
    with pytest.raises(ValueError, match="number of batches of an evaluation"):
        Evaluator(DataLoader(torch.arange(4.0)), Mean(), limit=limit)
