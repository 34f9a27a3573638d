"""What a weight of 0 means: nothing of it counts, in gradients, in optimizers and in the log."""

import itertools
import math

import pytest
import torch
from toys import assert_close, observed_update, parameters_of
from weight_ranks import FORMS, OwnUpdate, as_lists, masked_updater, train, train_on_rank, train_with_nan

from chainring.training import ParallelUpdater, Trainer, UpdateCallbacks, clip_grad_norm
from chainring.training.extensions import LogReport, LRScheduler
from rank_pair import on_two_ranks

FIRST_AND_LAST = (0, 1, 2, 3, 8, 9, 10, 11)
SETTINGS = {
    "plain": {},
    "accumulated": {"accumulate": 2, "batch_size": 2},
    "virtual ranks": {"virtual_ranks": 2},
    "virtual ranks, accumulated": {"virtual_ranks": 2, "accumulate": 2, "batch_size": 2},
    "an update_core of one's own": {"kind": OwnUpdate},
    "its own, accumulated": {"kind": OwnUpdate, "accumulate": 2, "batch_size": 2},
    "bf16": {"precision": "bf16"},
    "clipped": {"callbacks": UpdateCallbacks(update_on_start=clip_grad_norm(1.0))},
    "replicas": {"kind": ParallelUpdater, "devices": {"main": "cpu", "second": "cpu"}},
}


CASES = [*itertools.product(SETTINGS, ["int", "tensor"]), *itertools.product(["plain", "accumulated"], FORMS)]


@pytest.mark.parametrize(("setting", "form"), CASES)
def test_an_update_of_weight_0_changes_no_parameter_and_no_optimizer(setting, form, capsys):
    """Its loss is NaN. It counts as an update, and one line says so; the updates around it are as without it."""
    seen = train(updater := masked_updater(FIRST_AND_LAST, form, **SETTINGS[setting]))
    assert_close(seen[1], seen[0])
    assert updater.iteration == 3
    assert all(bool(torch.isfinite(number).all()) for number in seen[2])
    assert not torch.equal(seen[2][0], seen[1][0])
    assert capsys.readouterr().out.count("update 2 has weight 0, so nothing in it counts") == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", ["plain", "own", "virtual"])
def test_a_micro_batch_of_weight_0_whose_loss_is_nan_adds_nothing(form, setting):
    """Not to the gradients, and not to the log: the update is that of the batch of which a third does not count."""
    settings = {"plain": {}, "own": {"kind": OwnUpdate}, "virtual": {"virtual_ranks": 2}}[setting]
    parts, whole = (
        masked_updater(FIRST_AND_LAST, form, 4, accumulate=3, **settings),
        masked_updater(FIRST_AND_LAST, form, 12),
    )
    parts.start()
    observations = [observed_update(parts), observed_update(whole)]
    assert_close(parameters_of(parts), parameters_of(whole))
    if setting != "own":
        assert_close(*[torch.as_tensor(float(values["main/loss"])).double() for values in observations])
    assert float(parts.weight) == float(whole.weight) == 8


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_with_a_closure_is_left_as_it_is_by_an_update_of_weight_0(form):
    """LBFGS, which keeps a history of its steps."""
    for settings in ({}, {"accumulate": 2, "batch_size": 2}):
        updater = masked_updater(FIRST_AND_LAST, form, optimizer=torch.optim.LBFGS, **settings)
        states, parameters = [], []
        for _ in range(3):
            updater.update()
            parameters.append(parameters_of(updater))
            states.append(str(updater.get_optimizer("main").state_dict()["state"]))
        assert_close(parameters[1], parameters[0])
        assert states[1] == states[0] != states[2]
        assert all(bool(torch.isfinite(number).all()) for number in parameters[2])


def test_two_ranks_leave_out_an_update_of_weight_0_and_a_share_of_it():
    """Plain, accumulated, with an update_core of one's own, in virtual ranks, and wrapped in DDP."""
    one_share = (0, 2, *FIRST_AND_LAST[4:])  # of the first batch, rank 1 has only what does not count
    accumulated, virtual = {"accumulate": 2, "batch_size": 2}, [{"virtual_ranks": 2}, {"virtual_ranks": 4}]
    settings = [{}, {"form": "int"}, accumulated, {"kind": OwnUpdate}, *virtual]
    cases = [(one_share, case) for case in settings] + [(one_share, {"wraps": True, "form": "int", "least": 1})]
    ranks = on_two_ranks(train_on_rank, cases)
    for (counting, case), *found in zip(cases, *ranks, strict=True):
        kept = {key: value for key, value in case.items() if key not in ("virtual_ranks", "wraps", "least")}
        expected = as_lists(train(masked_updater(counting, **kept)))
        for seen, iteration in found:
            assert iteration == 3
            assert_close(seen, expected)


def test_a_loss_of_nan_and_weight_0_is_refused_where_ddp_would_exchange_its_gradients():
    """On all ranks, with what to write."""
    for text in on_two_ranks(train_with_nan, (0, 2, *FIRST_AND_LAST[4:])):
        assert "divide by a count of at least 1, as by mask.sum().clamp(min=1)" in text


def test_the_log_has_the_mean_of_what_counts(tmp_path):
    """Over updates of which the second has weight 0 and a loss of NaN."""
    for folder, settings in {"plain": {}, "parts": {"accumulate": 2, "batch_size": 2}}.items():
        trainer = Trainer(masked_updater(FIRST_AND_LAST, **settings), (3, "iteration"), out=str(tmp_path / folder))
        trainer.extend(LogReport(trigger=(3, "iteration")))
        trainer.run()
        (row,) = trainer.get_extension("LogReport").log
        assert math.isfinite(row["main/loss"]), row


def test_a_scheduled_rate_goes_on_in_an_update_of_weight_0(tmp_path):
    """As its trigger says, which counts updates."""
    updater = masked_updater(FIRST_AND_LAST)
    scheduler = torch.optim.lr_scheduler.StepLR(updater.get_optimizer("main"), 1, 0.5)
    trainer = Trainer(updater, (3, "iteration"), out=str(tmp_path))
    trainer.extend(LRScheduler(scheduler), trigger=(1, "iteration"))
    trainer.run()
    assert updater.get_optimizer("main").param_groups[0]["lr"] == 0.1 / 8
