"""accumulate=k is one batch k times as large: parameters, reports, epochs."""

import copy

import pytest
import torch
from toys import Regression, assert_close, observed_update, parameters_of, regression_data, updater_of

from chainring import DictSummary, report
from chainring.iterators import SerialIterator
from chainring.training import StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm, extensions, make_extension


def pair(small, accumulate, **settings):
    """An updater of accumulated micro-batches, and one of whole batches."""
    return updater_of(small, accumulate=accumulate, **settings), updater_of(small * accumulate, **settings)


@pytest.mark.parametrize(("small", "accumulate"), [(1, 12), (2, 2), (4, 3), (6, 2), (5, 3)])
def test_accumulated_parts_equal_one_large_batch(small, accumulate):
    """Not k gradients added up: the mean over all examples, over several updates with momentum."""
    ours, whole = pair(small, accumulate)
    for _ in range(4):
        assert_close(observed_update(ours), observed_update(whole))
    assert_close(parameters_of(ours), parameters_of(whole))


def masked_data():
    """Twelve sequences of four tokens of which unequal numbers count."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.tensor([4, 4, 3, 4, 1, 1, 1, 2, 1, 1, 4, 1])[:, None]
    return torch.utils.data.TensorDataset(x, x.sum(2), mask)


@pytest.mark.parametrize("as_number", [False, True])
def test_a_token_weighted_loss_with_uneven_parts_equals_the_whole_batch(as_number):
    """The loss returns how many tokens its mean counts, as "weight"; by examples the result would differ."""

    def loss_func(model, x, t, mask):
        errors = (model.predictor(x).squeeze(2) - t).square() * mask
        weight = mask.sum()
        return {"loss": errors.sum() / weight, "weight": weight.item() if as_number else weight}

    ours, whole = pair(4, 3, data=masked_data(), loss_func=loss_func)
    for _ in range(3):
        seen, expected = observed_update(ours), observed_update(whole)
        assert_close(torch.as_tensor(seen["main/loss"]), torch.as_tensor(expected["main/loss"]))
        assert float(ours.weight) == float(whole.weight) == 27
    assert_close(parameters_of(ours), parameters_of(whole))


def test_a_loss_that_is_divided_in_place_after_the_report_does_not_change_the_log():
    """A loss /= k inside the model, a habit from hand-written accumulation, does not reach what was reported."""

    class Dividing(Regression):
        def forward(self, x, t):
            loss = super().forward(x, t)
            loss /= 2
            return loss

    torch.manual_seed(3)
    ours, plain = updater_of(4, model=Dividing(), accumulate=2), updater_of(8)
    assert_close(observed_update(ours), observed_update(plain))


def test_data_that_end_inside_an_accumulation_make_an_update_of_what_there_is():
    """Parts of 5, 5 and 2 with accumulate=2: the second update is the mean over the 2, and then the data end."""
    ours, whole = updater_of(5, accumulate=2, repeat=False), updater_of(10, repeat=False)
    for _ in range(2):
        assert_close(observed_update(ours), observed_update(whole))
        assert ours.weight == whole.weight
    assert_close(parameters_of(ours), parameters_of(whole))
    with pytest.raises(StopIteration):
        ours.update()
    assert ours.iteration == 2


def test_an_uneven_last_part_is_weighted_by_its_length():
    """Parts of 8 and 4 with accumulate=2 are one batch of 12."""
    ours, whole = updater_of(8, accumulate=2, repeat=False), updater_of(12)
    assert_close(observed_update(ours), observed_update(whole))
    assert_close(parameters_of(ours), parameters_of(whole))


def test_callbacks_of_an_update_that_the_end_of_the_data_cuts_short_see_its_last_micro_batch():
    """Not the micro-batch that never came."""
    seen = []
    callbacks = UpdateCallbacks(update_on_start=lambda c: seen.append((c.micro_step, len(c.batch[0]), c.loss is None)))
    updater_of(8, accumulate=3, repeat=False, callbacks=callbacks).update()
    assert seen == [(1, 4, False)]


def test_epoch_attributes_speak_of_the_whole_update():
    """An epoch that ends in the first micro-batch is new for the whole update; previous is where the update began."""
    updater = updater_of(3, data=regression_data(9), accumulate=2)
    seen = []
    for _ in range(4):
        updater.update()
        seen.append((updater.epoch, round(updater.previous_epoch_detail * 3), updater.is_new_epoch))
    assert seen == [(0, 0, False), (1, 2, True), (2, 4, True), (2, 6, False)]


def test_epoch_attributes_of_the_whole_update_are_saved():
    """A resumed run knows them before its first update."""
    updater, fresh = (updater_of(3, data=regression_data(9), accumulate=2) for _ in range(2))
    updater.update()
    updater.update()
    fresh.load_state_dict(updater.state_dict())
    assert (fresh.previous_epoch_detail, fresh.is_new_epoch) == (updater.previous_epoch_detail, True)


def test_other_reports_are_averaged_by_weight_and_of_the_rest_the_last_holds():
    """Numbers, pairs of value and weight, tensors of few bits; strings and arrays; keys that a micro-batch lacks."""
    calls = iter(range(2))

    def loss_func(model, x, t):
        part = next(calls)
        report({"number": float(part), "own": (float(part), 1 + 2 * part), "name": "ab"[part], "rows": x})
        report({"half": torch.tensor(60000.0 - part, dtype=torch.float16), f"only {part}": 7})
        return model(x, t)

    seen = observed_update(updater_of(8, accumulate=2, repeat=False, loss_func=loss_func))
    assert seen["number"] == pytest.approx(4 / 12)
    assert seen["own"] == (pytest.approx(3 / 4), 4)
    assert seen["half"].item() == pytest.approx((60000 * 8 + 59968 * 4) / 12, rel=1e-3)
    assert (seen["name"], len(seen["rows"]), seen["only 0"], seen["only 1"]) == ("b", 4, 7, 7)


def test_a_mean_over_updates_does_not_depend_on_accumulation():
    """The weight of an update is the sum over its micro-batches, so a log row is the mean over all examples."""
    means = []
    for updater in (updater_of(5, accumulate=2, repeat=False, lr=0.0), updater_of(12, lr=0.0)):
        summary = DictSummary()
        for _ in range(2 if updater.accumulate == 2 else 1):
            summary.add(observed_update(updater), updater.weight)
        means.append(summary.compute_mean())
    assert means[0] == pytest.approx(means[1], rel=1e-14)


def test_step_after_a_backward_past_the_updater_is_refused_where_parts_are_weighed():
    """loss.backward() would count every micro-batch in full."""

    class Past(StandardUpdater):
        def update_core(self):
            self.get_model("main")(*self.next_batch()).backward()
            self.step()

    with pytest.raises(RuntimeError, match=r"write self\.backward\(loss\) in update_core, not loss\.backward\(\)"):
        updater_of(kind=Past, accumulate=2).update()


def test_a_chainer_like_update_core_keeps_its_epochs():
    """One that takes the batch from the iterator itself still says when an epoch ended."""

    class Chainer(StandardUpdater):
        def update_core(self):
            batch = self.get_iterator("main").next()
            loss = self.get_model("main")(*self.converter(batch, self.device))
            loss.backward()
            self.get_optimizer("main").step()

    updater, plain = updater_of(6, kind=Chainer), updater_of(6)
    for is_new in (False, True, False):
        updater.update()
        plain.update()
        assert updater.is_new_epoch is is_new
    assert_close(parameters_of(updater), parameters_of(plain))


def test_one_iterable_of_batches_accumulates_as_the_iterator_does():
    """A list of batches at the door counts examples by the first dimension."""
    x, t = regression_data().tensors
    model = updater_of(6).get_model("main")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ours = StandardUpdater([(x[:8], t[:8]), (x[8:], t[8:])], optimizer, model, accumulate=2)
    whole = StandardUpdater(SerialIterator(regression_data(), 12, shuffle=False), *_fresh())
    for _ in range(3):
        ours.update()
        whole.update()
    assert_close(parameters_of(ours), parameters_of(whole))


def _fresh():
    twin = updater_of(6)
    return twin.get_optimizer("main"), twin.get_model("main")


@pytest.mark.parametrize("counts", [(1, 2, 2), (1, 3, 1), (2, 1, 3), (2, 4, 1), (3, 1, 1), (1, 1, 4)])
@pytest.mark.parametrize("form", ["plain", "own", "clipped", "bf16", "ends with the epoch"])
def test_accumulate_holds_from_the_next_update_on_after_it_is_set(form, counts):
    """As an attribute of the updater, between two updates: each is one on a batch so many times as large."""

    class Own(StandardUpdater):
        def update_core(self):
            self.backward(self.get_model("main")(*self.next_batch()))
            self.step()

    settings = {
        "own": {"kind": Own},
        "clipped": {"callbacks": UpdateCallbacks(update_on_start=clip_grad_norm(0.1))},
        "bf16": {"precision": "bf16"},
        "ends with the epoch": {"accumulate_across_epochs": False},
    }.get(form, {})
    updater = updater_of(2, accumulate=counts[0], **settings)
    before = [updater_of(2, accumulate=count, **settings) for count in counts]
    for count, other in zip(counts, before, strict=True):
        updater.accumulate = count
        for name in ("model:main", "optimizer:main", "iterator:main"):  # as the other one would begin there
            source, target = (getattr(of, f"get_{name.partition(':')[0]}")("main") for of in (updater, other))
            target.load_state_dict(copy.deepcopy(source.state_dict()))
        updater.update()
        other.update()
        assert_close(parameters_of(updater), parameters_of(other))
        assert (updater.weight, updater.epoch_detail) == (2 * count, other.epoch_detail)
        assert updater.is_new_epoch == other.is_new_epoch


def test_settings_that_cannot_change_are_refused_where_they_are_set():
    """With the rule and the value: virtual ranks and compilation at any time, and none in the middle of an update."""
    updater = updater_of(2, accumulate=2)
    wrong = {"accumulate": (0, ValueError), "accumulate_across_epochs": (1, TypeError)}
    decided = {"virtual_ranks": (2, AttributeError), "compile": (True, AttributeError)}
    for name, (value, kind) in {**wrong, **decided}.items():
        before = getattr(updater, name)
        with pytest.raises(kind, match=name):
            setattr(updater, name, value)
        assert getattr(updater, name) is before
    with pytest.raises(TypeError, match=r"an integer, got 2\.0"):
        updater.accumulate = 2.5 - 0.5
    updater.accumulate = 3
    updater.callbacks.add("batch_on_finish", lambda context: setattr(context.updater, "accumulate", 1))
    with pytest.raises(RuntimeError, match="accumulate changes between two updates"):
        updater.update()


def test_an_extension_may_let_more_micro_batches_make_an_update(tmp_path):
    """A run of two updates of one batch and then two of three."""
    trainer = Trainer(updater := updater_of(2), (4, "iteration"), out=str(tmp_path))
    weights = []

    def grow(trainer):
        weights.append(trainer.updater.weight)
        trainer.updater.accumulate = 1 if trainer.updater.iteration < 2 else 3

    trainer.extend(grow, trigger=(1, "iteration"))
    trainer.run()
    assert weights == [2, 2, 6, 6]
    assert updater.epoch_detail == 16 / 12


def test_a_run_whose_batch_grows_by_a_schedule_resumes_after_any_iteration(tmp_path):
    """The number of micro-batches is no state: the initializer sets it by the progress of the run."""

    def grown(out, stop):
        trainer = Trainer(updater := updater_of(2), (stop, "iteration"), out=str(tmp_path / out))
        trainer.extend(extensions.snapshot(autoload=True), trigger=(1, "iteration"))
        weights = {}

        def choose(trainer):
            weights[trainer.updater.iteration] = trainer.updater.weight
            trainer.updater.accumulate = 1 if trainer.updater.iteration < 2 else 3

        trainer.extend(make_extension(trigger=(1, "iteration"), initializer=choose)(choose))
        trainer.run()
        return weights[stop], [value.tolist() for value in updater.get_model("main").state_dict().values()]

    whole = grown("whole", 4)
    for cut in (1, 2, 3):
        grown(f"cut{cut}", cut)
        assert grown(f"cut{cut}", 4) == whole
