"""What the replicas of a ParallelUpdater report is one observation, of the whole batch."""

import pytest
from parallel_toys import pair
from torch import nn
from toys import Regression, assert_close, observed_update

from chainring import report
from chainring.training import Trainer, extensions


class Part(nn.Linear):
    """Reports about itself."""

    def forward(self, x):
        y = super().forward(x)
        report({"size": y.detach().abs().mean()}, self)
        return y


class Deep(nn.Module):
    """Reports from two parts of its predictor and from itself."""

    def __init__(self):
        super().__init__()
        self.predictor = nn.ModuleDict({"l1": Part(3, 4), "l2": Part(4, 1)}).double()

    def forward(self, x, t):
        loss = (self.predictor["l2"](self.predictor["l1"](x).tanh()) - t).square().mean()
        report({"loss": loss, "root": loss.detach().sqrt()}, self.predictor)
        return loss


def test_parts_of_every_replica_report_under_the_main_names():
    """No KeyError, no second/..., and the mean over the whole batch, as by one device."""
    ours, whole = pair(Deep)
    seen, expected = observed_update(ours), observed_update(whole)
    assert list(seen) == list(expected)
    assert list(seen)[:2] == ["main/predictor/l1/size", "main/predictor/l2/size"]
    del seen["main/predictor/root"], expected["main/predictor/root"]  # no mean over examples
    assert_close(seen, expected)


def test_a_trainer_logs_the_whole_batch(tmp_path):
    """The rows of LogReport are those of one device."""
    logs = []
    for updater in pair(Deep):
        trainer = Trainer(updater, (6, "iteration"), str(tmp_path / type(updater).__name__))
        trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
        trainer.extend(extensions.FailOnNonNumber())
        trainer.run()
        logs.append(trainer.get_extension("LogReport").log)
    for ours, whole in zip(*logs, strict=True):
        for key in ("main/loss", "main/predictor/loss", "main/predictor/l2/size", "epoch", "iteration"):
            assert ours[key] == pytest.approx(whole[key], rel=1e-12)


def test_reports_go_to_whichever_reporter_is_current():
    """Of two trainers over one updater, or a reporter in a test, each knows the replicas."""
    updater, _ = pair(Deep)
    assert list(observed_update(updater)) == list(observed_update(updater))


def test_a_metric_that_every_replica_has_for_itself_is_refused():
    """One that counted a part of the batch would pass for the whole; one object for all is taken as it is."""

    class Count:
        seen = 0

        def compute(self):
            return self.seen

        def reset(self):
            self.seen = 0

    class Counted(Regression):
        def __init__(self):
            super().__init__()
            self.metric = Count()

        def forward(self, x, t):
            report({"metric": self.metric}, self)
            return super().forward(x, t)

    with pytest.raises(TypeError, match=r"'main/metric' is a metric of which each replica has its own.*outside the model"):
        observed_update(pair(Counted)[0])
    shared = Count()

    def loss_func(model, x, t):
        shared.seen += len(x)
        report({"metric": shared})
        return model(x, t)

    assert observed_update(pair(Regression, loss_func=loss_func)[0])["metric"] is shared
    assert shared.seen == 5


def test_a_weight_beside_a_loss_is_its_sum_over_the_replicas():
    """As one device reports that of the whole batch."""

    class Weighted(Regression):
        def forward(self, x, t):
            return {"loss": (self.predictor(x) - t).square().mean(), "weight": float(len(x))}

    ours, whole = pair(Weighted)
    assert observed_update(ours)["main/weight"] == observed_update(whole)["main/weight"]
