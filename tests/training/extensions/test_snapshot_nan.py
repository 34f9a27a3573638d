"""Where parameters become NaN, the newest snapshot before is kept, and a run says so."""

import math

import pytest
import torch
from snapshots import EVERY, trainer_of

from chainring import serializers
from chainring.training import extensions


def spoil(at, value=math.nan):
    """An extension that writes a number into the parameters in an iteration."""

    def write(trainer):
        if trainer.updater.iteration == at:
            with torch.no_grad():
                trainer.updater.get_model("main").head.bias.fill_(value)

    return write


def names(out):
    return sorted(int(path.name.rpartition("_")[2]) for path in out.glob("snapshot_iter_*"))


def train(out, at, taken, value=math.nan, stop=9):
    trainer = trainer_of(out, stop, spoil(at, value), (taken, EVERY))
    trainer.run()
    return names(out)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_newest_snapshot_without_nan_is_kept_beside_the_newest(tmp_path, asynchronous):
    """Which is said once, with the first tensor and what stops there."""
    with pytest.warns(UserWarning, match=r"head/bias is NaN in snapshot 'snapshot_iter_4'.*FailOnNonNumber") as caught:
        kept = train(tmp_path, 4, extensions.snapshot(n_retains=2, asynchronous=asynchronous))
    assert kept == [3, 8, 9]
    assert len([each for each in caught if "is NaN" in str(each.message)]) == 1
    trainer = trainer_of(tmp_path / "again", 1)
    serializers.load(tmp_path / "snapshot_iter_3", trainer)
    assert all(parameter.isfinite().all() for parameter in trainer.updater.get_model("main").parameters())


def test_run_that_continues_from_nan_says_so_and_keeps_what_is_sound(tmp_path, capsys):
    """The state is what it is; nothing else is loaded in its place."""
    with pytest.warns(UserWarning, match="is NaN in snapshot"):
        train(tmp_path, 4, extensions.snapshot(n_retains=1, autoload=True), stop=6)
    capsys.readouterr()
    with pytest.warns(UserWarning, match="is NaN in snapshot"):
        assert train(tmp_path, 4, extensions.snapshot(n_retains=1, autoload=True)) == [3, 9]
    assert "after iteration 6, epoch 2, with NaN among its parameters" in capsys.readouterr().out


def test_infinite_numbers_are_no_failure(tmp_path):
    """A mask of attention holds them."""
    assert train(tmp_path, 4, extensions.snapshot(n_retains=2), -math.inf, stop=4) == [3, 4]


def test_snapshot_of_a_model_alone_is_looked_at_too(tmp_path):
    """The manifest says which tensor it is."""
    trainer = trainer_of(tmp_path, 4, spoil(3))
    model = trainer.updater.get_model("main")
    taken = extensions.snapshot("net_{.updater.iteration}", target=model, n_retains=1)
    trainer.extend(taken, trigger=EVERY)
    with pytest.warns(UserWarning, match="head/bias is NaN in snapshot 'net_3'"):
        trainer.run()
    assert sorted(path.name for path in tmp_path.glob("net_*")) == ["net_2", "net_4"]
    assert '"NaN": "' in (tmp_path / "net_4" / "manifest.json").read_text()
