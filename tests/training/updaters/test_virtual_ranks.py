"""An update computed as virtual ranks: what it computes, from which rows and random numbers."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from toys import Regression, assert_close, observed_update, parameters_of, regression_data, same_regression, updater_of

from chainring import Reporter, report, report_text
from chainring.converters import concat_examples
from chainring.parallel import Communicator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm
from chainring.training.extensions import LogReport
from rank_pair import on_two_ranks

BATCH = 7


class Normalised(Regression):
    """A regression with statistics of the batch; what it is called with is kept. Its loss may come with a weight."""

    def __init__(self, weighted=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.weighted, self.rows = weighted, []

    def forward(self, x, t):
        self.rows.append(x)
        loss = super().forward(self.norm(x), t)
        return {"loss": loss, "weight": (t > 0).sum() + 1} if self.weighted else loss


def normalised(**settings):
    torch.manual_seed(3)
    return Normalised(**settings)


def updated(updates, virtual_ranks, *, batch_size=BATCH, examples=21, **settings):
    """An updater after so many updates, and what was reported in each."""
    updater = updater_of(batch_size, data=regression_data(examples), virtual_ranks=virtual_ranks, **settings)
    updater.start()
    return updater, [observed_update(updater) for _ in range(updates)]


def computed_apart(model, updates, count, *, batch_size=BATCH, examples=21, accumulate=1):
    """The same in PyTorch alone: a copy of the model for each virtual rank. The losses are returned."""
    x, t = regression_data(examples).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, start = [], 0
    for _ in range(updates):
        batches = [[(start + i * batch_size + j) % examples for j in range(batch_size)] for i in range(accumulate)]
        start += accumulate * batch_size
        parts = []
        for number in range(count):
            part = copy.deepcopy(model)
            for batch in batches:
                rows = batch[number::count]
                found = part(x[rows], t[rows])
                loss, weight = (found["loss"], int(found["weight"])) if isinstance(found, dict) else (found, len(rows))
                gradients = torch.autograd.grad(loss, list(part.parameters()))
                parts.append((part, weight, len(rows), loss.item(), gradients))
        total, rows = sum(weight for _, weight, *_ in parts), sum(n for _, _, n, *_ in parts)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = sum(weight * gradients[index] for _, weight, _, _, gradients in parts) / total
        optimizer.step()
        for name, buffer in model.named_buffers():
            values = [(part.get_buffer(name), n) for part, _, n, *_ in parts]
            buffer.copy_(sum(v * n for v, n in values) / rows if buffer.is_floating_point() else values[0][0])
        losses.append(sum(weight * loss for _, weight, _, loss, _ in parts) / total)
    return losses


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"comm": Communicator()}])
def test_one_virtual_rank_is_the_whole_update(settings):
    one, reports = updated(4, 1, model=normalised(), **settings)
    plain, plain_reports = updated(4, None, model=normalised(), **settings)
    assert_close(parameters_of(one), parameters_of(plain))
    assert_close(list(one.get_model("main").buffers()), list(plain.get_model("main").buffers()))
    assert [float(each["main/loss"]) for each in reports] == pytest.approx([float(e["main/loss"]) for e in plain_reports])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_update_is_the_weighted_mean_of_virtual_ranks_with_statistics_of_their_own(count, accumulate, weighted):
    model = normalised(weighted=weighted)
    expected = computed_apart(model, 4, count, accumulate=accumulate)
    updater, reports = updated(4, count, model=normalised(weighted=weighted), accumulate=accumulate)
    assert_close(parameters_of(updater), [parameter.detach() for parameter in model.parameters()])
    assert_close(list(updater.get_model("main").buffers()), list(model.buffers()))
    assert [float(each["main/loss"]) for each in reports] == pytest.approx(expected, rel=1e-12)


def test_virtual_rank_has_every_so_manyth_row_of_the_batch():
    model = normalised()
    updated(1, 3, model=model)
    x, _ = regression_data(21).tensors
    assert [rows.tolist() for rows in model.rows] == [x[number:BATCH:3].tolist() for number in range(3)]


def test_virtual_rank_computes_all_its_micro_batches_before_the_next_one():
    model = normalised()
    updated(1, 2, model=model, accumulate=2)
    x, _ = regression_data(21).tensors
    expected = [x[start + number : start + BATCH : 2].tolist() for number in range(2) for start in (0, BATCH)]
    assert [rows.tolist() for rows in model.rows] == expected


def test_virtual_rank_without_rows_does_not_count():
    """The last batch is of two examples for three virtual ranks."""
    updater, reports = updated(4, 3, model=same_regression(), examples=23, repeat=False)
    plain, plain_reports = updated(4, None, model=same_regression(), examples=23, repeat=False)
    assert_close(parameters_of(updater), parameters_of(plain))
    assert float(reports[-1]["main/loss"]) == pytest.approx(float(plain_reports[-1]["main/loss"]), rel=1e-12)
    assert float(updater.weight) == 2


def test_weight_of_an_update_is_that_of_all_its_virtual_ranks():
    assert float(updated(1, 3, accumulate=2)[0].weight) == 2 * BATCH


def test_gradient_after_an_update_is_the_mean():
    updater, _ = updated(1, 3)
    x, t = regression_data(21).tensors
    model = same_regression()
    model(x[:BATCH], t[:BATCH]).backward()
    assert_close([p.grad for p in updater.get_model("main").parameters()], [p.grad for p in model.parameters()])


def test_callbacks_of_the_step_run_once_with_the_mean_gradient():
    norms = []
    settings = {"update_on_start": clip_grad_norm(0.1), "update_on_finish": lambda c: norms.append(norm_of(c.updater))}
    updated(2, 3, callbacks=UpdateCallbacks(**settings))
    assert norms == pytest.approx([0.1, 0.1])


def norm_of(updater):
    return torch.cat([p.grad.reshape(-1) for p in updater.get_model("main").parameters()]).norm().item()


def test_step_is_left_out_for_all_where_the_gradient_of_one_overflows_in_half_precision():
    class Overflowing(Regression):
        calls = 0

        def forward(self, x, t):
            self.calls += 1
            return super().forward(x, t) * (torch.inf if self.calls == 2 else 1)

    updater = updater_of(BATCH, model=Overflowing().float(), precision="fp16", converter=to_float, virtual_ranks=3)
    updater.start()
    before = parameters_of(updater)
    updater.update()
    assert_close(parameters_of(updater), before)
    updater.update()
    assert all((now != then).any() for now, then in zip(parameters_of(updater), before, strict=True))


def to_float(batch, device):
    return tuple(column.float() / 100 for column in concat_examples(batch, device))


def test_gradient_that_only_some_virtual_ranks_have_counts_by_the_weight_of_all():
    class Partial(Regression):
        calls = 0

        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x, t):
            self.calls += 1
            return super().forward(x, t) + (self.extra * 6 if self.calls == 2 else 0)

    updater, _ = updated(1, 3, model=Partial())
    assert updater.get_model("main").extra.grad.item() == pytest.approx(6 * 2 / BATCH)


# --- random numbers ---


class Drawing(Regression):
    """Draws from every generator and keeps what it has drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x, t):
        self.drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        return super().forward(x, t)


def drawn(seed=5, disturb=0, updates=2, start=0, **settings):
    model = Drawing()
    updater = updater_of(6, model=model, virtual_ranks=3, **settings)
    torch.manual_seed(seed)
    updater.start()
    updater.iteration = start
    for _ in range(updates):
        for _ in range(disturb):
            random.random(), np.random.rand(), torch.rand(3)
        updater.update()
    return model.drawn


def test_random_numbers_depend_on_nothing_but_seed_iteration_micro_batch_and_virtual_rank():
    assert drawn(disturb=0) == drawn(disturb=2)
    assert drawn(updates=2)[3:] == drawn(updates=1, start=1)
    assert drawn() != drawn(seed=6)


def test_random_numbers_differ_in_each_micro_batch_of_each_virtual_rank():
    every = drawn(accumulate=2, updates=3)
    assert len(every) == 18
    assert all(len(set(column)) == 18 for column in zip(*every, strict=True))


def test_first_micro_batch_draws_what_an_update_of_one_draws():
    assert drawn(accumulate=2, updates=1)[::2] == drawn(updates=1)


def test_seed_is_saved_and_loaded():
    first = updater_of(6, model=Drawing(), virtual_ranks=3)
    torch.manual_seed(5)
    first.start()
    assert first.virtual_seed == 5
    first.update()
    second = updater_of(6, model=Drawing(), virtual_ranks=3)
    torch.manual_seed(6)
    second.load_state_dict(first.state_dict())
    second.start()
    first.update()
    second.update()
    assert second.virtual_seed == 5
    assert second.get_model("main").drawn == first.get_model("main").drawn[3:]


def test_generators_are_left_as_they_were():
    updater = updater_of(6, model=Drawing(), virtual_ranks=3)
    updater.start()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    updater.update()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_generators_are_left_as_they_were_when_an_update_fails():
    class Failing(Drawing):
        def forward(self, x, t):
            super().forward(x, t)
            raise ArithmeticError("broken loss")

    updater = updater_of(6, model=Failing(), virtual_ranks=3)
    updater.start()
    before = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(ArithmeticError, match="broken loss"):
        updater.update()
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


# --- reports ---


def test_reported_numbers_are_weighted_means_and_other_values_of_one_virtual_rank():
    class Reporting(Regression):
        def forward(self, x, t):
            report({"rows": float(len(x)), "own": (torch.tensor(float(len(x))), 1), "text": "said"}, self)
            return super().forward(x, t)

    _, (observation,) = updated(1, 3, model=Reporting())
    assert float(observation["main/rows"]) == pytest.approx((3 * 3 + 2 * 2 + 2 * 2) / 7)
    assert float(observation["main/own"]) == pytest.approx((3 + 2 + 2) / 3)
    assert observation["main/text"] == "said"


def test_texts_and_images_are_those_of_virtual_rank_0():
    class Reporting(Regression):
        def forward(self, x, t):
            report_text("first", str(x[0].tolist()))
            report({"said": str(x[0].tolist())}, self)
            return super().forward(x, t)

    updater = updater_of(BATCH, model=Reporting(), virtual_ranks=3)
    updater.start()
    reporter, observation, shown = Reporter(), {}, []
    reporter.add_observer("main", updater.get_model("main"))
    reporter.media_watchers = (lambda key, text: shown.append(text.text),)
    with reporter.scope(observation):
        updater.update()
        report_text("after", "update")
    x, _ = regression_data().tensors
    assert shown == [str(x[0].tolist()), "update"]
    assert observation["main/said"] == str(x[0].tolist())


def test_key_that_some_virtual_ranks_report_is_the_mean_of_those():
    class Reporting(Regression):
        def forward(self, x, t):
            if len(x) == 2:
                report({"twos": t.sum()}, self)
            return super().forward(x, t)

    _, (observation,) = updated(1, 3, model=Reporting())
    _, t = regression_data(21).tensors
    assert float(observation["main/twos"]) == pytest.approx((t[1:7:3].sum() + t[2:7:3].sum()).item() / 2)


def test_weight_of_the_loss_is_reported_as_its_sum():
    model = normalised(weighted=True)
    _, (observation,) = updated(1, 3, model=model)
    _, t = regression_data(21).tensors
    assert float(observation["main/weight"]) == (t[:BATCH] > 0).sum().item() + 3


# --- an update without data; compile ---


def test_update_without_data_is_computed_once_for_each_virtual_rank():
    class Hill(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.drawn = []

        def forward(self):
            self.drawn.append(torch.rand(()).item())
            return (self.x**2).sum() * self.drawn[-1]

    model = Hill()
    updater = StandardUpdater(None, torch.optim.SGD(model.parameters(), 0.1), model, virtual_ranks=3)
    updater.start()
    updater.update()
    assert len(set(model.drawn)) == 3
    assert model.x.grad.tolist() == pytest.approx([2 * sum(model.drawn) / 3] * 2)


def test_compile_says_that_virtual_ranks_need_stages():
    with pytest.warns(UserWarning, match="virtual ranks"):
        updater_of(6, virtual_ranks=3, compile=True)


# --- metric objects ---


class Positive(Regression):
    """Reports a metric: the fraction of positive targets."""

    def __init__(self):
        super().__init__()
        self.positive = Fraction()

    def forward(self, x, t):
        self.positive.found += int((t > 0).sum())
        self.positive.count += len(t)
        report({"positive": self.positive}, self)
        return super().forward(x, t)


class Fraction:
    def __init__(self):
        self.reset()

    def reset(self):
        self.found = self.count = 0

    def compute(self):
        return self.found / self.count


def logged(comm, out):
    """The fraction of positive targets in the log of four updates, in two intervals."""
    updater = updater_of(BATCH, data=regression_data(21), model=Positive(), comm=comm, virtual_ranks=3)
    trainer = Trainer(updater, (4, "iteration"), out=out)
    trainer.extend(LogReport(trigger=(2, "iteration")))
    trainer.run()
    return [row["main/positive"] for row in trainer.get_extension("LogReport").log]


def test_metric_has_counted_the_rows_of_all_ranks(tmp_path):
    _, t = regression_data(21).tensors
    counted = torch.cat([t, t])[: 4 * BATCH].reshape(2, -1) > 0
    expected = [each.sum().item() / (2 * BATCH) for each in counted]
    assert logged(Communicator(), tmp_path / "one") == expected
    assert on_two_ranks(logged, tmp_path / "two") == [expected, expected]


def test_metric_does_not_count_the_example_that_stands_for_missing_rows():
    """The last batch is of one example for three virtual ranks; the metric had counted before."""
    model = Positive()
    updated(2, 3, model=model, examples=BATCH + 1, repeat=False)
    _, t = regression_data(BATCH + 1).tensors
    assert (model.positive.found, model.positive.count) == ((t > 0).sum().item(), BATCH + 1)
    model = Positive()
    updated(2, 3, model=model, examples=BATCH + 1, repeat=False, kind=OwnCore)
    assert (model.positive.found, model.positive.count) == ((t > 0).sum().item(), BATCH + 1)


class OwnCore(StandardUpdater):
    def update_core(self):
        self.backward(self.get_model("main")(*self.next_batch()))
        self.step()
