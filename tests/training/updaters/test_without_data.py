"""``StandardUpdater(None, optimizer, model)``: updates that need no data, such as those that minimise a function."""

import pytest
import torch
from toys import Regression, Valley, observed_update

from chainring.testing import check_updater
from chainring.training import ParallelUpdater, StandardUpdater, Trainer, UpdateCallbacks, clip_grad_norm, extensions
from rank_pair import on_two_ranks


def updater_of(model=None, **settings):
    model = Valley() if model is None else model
    return StandardUpdater(None, torch.optim.Adam(model.parameters(), lr=0.1), model, **settings)


def by_hand(updates, loss=lambda model: model()):
    model = Valley()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model.point


@pytest.mark.parametrize("callbacks", [None, UpdateCallbacks(update_on_start=lambda context: None)])
def test_without_data_the_model_is_called_with_nothing(callbacks):
    """Bit for bit the loop by hand, with stages and without."""
    torch.manual_seed(1)
    updater = updater_of(callbacks=callbacks)
    for _ in range(4):
        updater.update()
    torch.manual_seed(1)
    assert torch.equal(updater.get_model("main").point, by_hand(4))


def test_without_data_a_loss_function_is_called_with_the_model_alone():
    """Its scalars are reported as with data."""

    def loss_func(model):
        return {"loss": model.point.square().sum(), "size": model.point.abs().max()}

    updater = updater_of(loss_func=loss_func)
    assert {key: float(value) for key, value in observed_update(updater).items()} == {"main/loss": 13.0, "main/size": 3.0}
    updater.update()
    assert torch.equal(updater.get_model("main").point, by_hand(2, lambda model: model.point.square().sum()))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_without_data_counts_once_and_belongs_to_no_epoch(accumulate):
    """In a mean over updates all weigh the same."""
    updater = updater_of(accumulate=accumulate)
    updater.update()
    assert (updater.iteration, updater.epoch, updater.epoch_detail, updater.is_new_epoch) == (1, 0, 0.0, False)
    assert (updater.weight, updater.counts_epochs, updater.get_all_iterators()) == (accumulate, False, {})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"callbacks": UpdateCallbacks(update_on_start=clip_grad_norm(1.0))},
    ],
    ids=["plain", "accumulated", "bf16", "fp16", "clipped"],
)
def test_a_run_without_data_resumes_bit_for_bit(settings):
    """After each iteration, under each setting."""
    check_updater(lambda: updater_of(**settings), iterations=4)


def test_accumulation_without_data_is_the_mean_of_as_many_calls():
    """Each draws its own noise."""
    torch.manual_seed(1)
    updater = updater_of(accumulate=4)
    updater.update()
    torch.manual_seed(1)
    expected = by_hand(1, lambda model: sum(model() for _ in range(4)) / 4)
    torch.testing.assert_close(updater.get_model("main").point, expected)


def test_a_run_without_data_is_explained_rehearsed_and_logged(tmp_path):
    """Epochs stand at 0, iterations and times go on."""
    trainer = Trainer(updater_of(), (6, "iteration"), str(tmp_path))
    trainer.extend(extensions.LogReport(trigger=(2, "iteration")))
    trainer.extend(extensions.PrintReport(["epoch", "iteration", "main/loss"]), trigger=(2, "iteration"))
    trainer.extend(extensions.Throughput(), trigger=(2, "iteration"))
    trainer.extend(extensions.ProgressBar(update_interval=1))
    trainer.extend(extensions.FailOnNonNumber())
    trainer.extend(extensions.snapshot(), trigger=(3, "iteration"))
    assert "at 2, 4, 6" in trainer.explain()
    trainer.rehearse()
    trainer.run()
    rows = trainer.get_extension("LogReport").log
    assert [(row["epoch"], row["iteration"]) for row in rows] == [(0, 2), (0, 4), (0, 6)]
    assert rows[-1]["main/loss"] < rows[0]["main/loss"]


def test_a_trigger_in_epochs_is_refused_before_the_first_update_without_data(tmp_path):
    """It would never fire; the extension is named."""
    trainer = Trainer(updater_of(), (6, "iteration"), str(tmp_path))
    trainer.extend(extensions.PrintReport(), trigger=(2, "iteration"))
    trainer.extend(extensions.LogReport(trigger=(1, "epoch")))
    with pytest.raises(ValueError, match='"epoch" needs an updater that counts epochs') as caught:
        trainer.run()
    assert caught.value.__notes__ == ["raised in extension 'LogReport' after iteration 0"]
    assert trainer.updater.iteration == 0


class Asking(StandardUpdater):
    def update_core(self):
        self.next_batch()


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        (lambda: StandardUpdater({}, torch.optim.SGD(MODEL.parameters()), MODEL), ValueError, "iterator.*None for updates"),
        (lambda: StandardUpdater({"main": None}, torch.optim.SGD(MODEL.parameters()), MODEL), TypeError, "NoneType"),
        (
            lambda: ParallelUpdater(None, torch.optim.SGD(MODEL.parameters()), MODEL, devices={"main": None}),
            TypeError,
            "splits each batch.*StandardUpdater",
        ),
        (lambda: Asking(None, torch.optim.SGD(MODEL.parameters()), MODEL).update(), KeyError, "no iterator 'main'"),
        (
            lambda: StandardUpdater(None, torch.optim.SGD(REGRESSION.parameters()), REGRESSION).update(),
            TypeError,
            r"called with no inputs.*missing a required argument: 'x'",
        ),
    ],
)
def test_what_cannot_go_without_data_is_refused_with_words(use, kind, text):
    """An empty dict remains an error; replicas have nothing to share; a model that wants inputs says so."""
    with pytest.raises(kind, match=text):
        use()


MODEL, REGRESSION = Valley(), Regression()


def descend(comm):
    """Each rank measures with its own noise."""
    torch.manual_seed(comm.rank)
    noise = []

    def loss_func(model):
        noise.append(torch.randn(2))
        return (model.point * noise[-1]).sum() + model.point.square().sum()

    model = Valley()
    updater = StandardUpdater(None, torch.optim.SGD(model.parameters(), lr=0.1), model, loss_func=loss_func, comm=comm)
    updater.start()
    for _ in range(2):
        updater.update()
    return model.point.tolist(), [each.tolist() for each in noise], float(updater.weight)


def test_without_data_each_rank_calls_the_loss_once_and_their_mean_is_the_step():
    """Weight 1 each."""
    first, second = on_two_ranks(descend)
    point = torch.tensor([3.0, -2.0])
    for ours, theirs in zip(first[1], second[1], strict=True):
        point = point - 0.1 * ((torch.tensor(ours) + torch.tensor(theirs)) / 2 + 2 * point)
    assert first[0] == second[0]
    assert (len(first[1]), first[2], second[2]) == (2, 1.0, 1.0)
    torch.testing.assert_close(torch.tensor(first[0]), point)
