"""`snapshot(keep_best=)` keeps those of the best values, and beside them what a run continues from."""

import math
import os
import random

import pytest
from counting import CountingUpdater, a_trainer

from chainring import report, serializers
from chainring.training import extensions, triggers

KEY = "validation/main/loss"
EVERY = (1, "iteration")


class Reporting(CountingUpdater):
    """Reports one given value an update; ``None`` reports nothing."""

    def __init__(self, values, key=KEY):
        super().__init__(per_epoch=2)
        self.values, self.key, self.best = values, key, None

    def update_core(self):
        if self.values[self.iteration] is not None:
            report({self.key: self.values[self.iteration]})


def train(out, values, taken, trigger=EVERY, key=KEY, until=None):
    trainer = a_trainer(out, Reporting(values, key), (until or len(values), "iteration"))
    trainer.extend(taken, trigger=trigger)
    trainer.run()
    return sorted(int(path.name.rpartition("_")[2]) for path in out.glob("*iter_*") if not path.is_symlink())


def best_of(values, count, sign=-1):
    ranked = [
        (-sign * value, number) for number, value in enumerate(values, 1) if value is not None and math.isfinite(value)
    ]
    return sorted(number for _, number in sorted(ranked)[:count])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("key", "sign"), [(KEY, -1), ("validation/main/accuracy", 1)])
def test_the_best_of_all_are_kept(tmp_path, seed, key, sign):
    """Also where values are equal, of which the earlier is better, and where some are NaN or missing."""
    draw = random.Random(seed)
    values = [draw.choice([*range(8), math.nan, -math.inf]) for _ in range(20)]
    taken = extensions.snapshot(keep_best=(key, 3))
    assert train(tmp_path, values, taken, key=key) == best_of(values, 3, sign)


def test_beside_the_best_the_newest_is_kept_from_which_a_run_continues(tmp_path):
    """With autoload one, with n_retains so many."""
    values = [5, 1, 2, 3, 4, 6, 7, 8]
    assert train(tmp_path / "a", values, extensions.snapshot(keep_best=(KEY, 2), autoload=True)) == [2, 3, 8]
    assert train(tmp_path / "b", values, extensions.snapshot(keep_best=(KEY, 2), n_retains=3)) == [2, 3, 6, 7, 8]


def test_fixed_name_leads_to_the_best(tmp_path):
    """And not to the newest of those that are kept."""
    assert train(tmp_path, [5, 1, 2, 3], extensions.snapshot("best", keep_best=(KEY, 3), autoload=True)) == [2, 3, 4]
    assert (tmp_path / "best").resolve().name == "best_iter_2"
    updater = Reporting([])
    serializers.load(tmp_path / "best", a_trainer(tmp_path / "other", updater))
    assert updater.iteration == 2


def test_values_are_means_since_the_trigger_last_fired(tmp_path):
    """Of epochs of two iterations here; a run that continues within an epoch counts all of it."""
    values = [9, 1, 4, 5, 0, 9, 8, 8]
    expected = [4, 6]  # by the means of the epochs, 5, 4.5, 4.5 and 8, and not by their last values, 1, 5, 9 and 8

    def snapshots():
        return extensions.snapshot(keep_best=(KEY, 2), autoload=True)

    assert train(tmp_path / "whole", values, snapshots(), (1, "epoch")) == [*expected, 8]
    train(tmp_path / "cut", values, snapshots(), (1, "epoch"), until=5)
    assert train(tmp_path / "cut", values, snapshots(), (1, "epoch")) == [*expected, 8]


@pytest.mark.filterwarnings("ignore:.*has nothing to compare")
@pytest.mark.parametrize("cut", range(1, 12))
def test_run_that_is_continued_keeps_what_one_that_was_not_cut_keeps(tmp_path, cut):
    """At every iteration; the values of snapshots are in their manifests."""
    values = [5, 3, 8, 1, None, 6, 2, 9, math.nan, 4, 7, 0]
    snapshots = [extensions.snapshot(keep_best=(KEY, 3), autoload=True) for _ in range(3)]
    train(tmp_path / "cut", values, snapshots[0], until=cut)
    assert train(tmp_path / "cut", values, snapshots[1]) == train(tmp_path / "whole", values, snapshots[2]) == [4, 7, 12]


def test_snapshot_that_a_person_has_removed_does_not_count(tmp_path):
    """The next that would have been too bad is kept in its place."""
    values = [1, 2, 3, 4]
    train(tmp_path, values, extensions.snapshot(keep_best=(KEY, 2), autoload=True), until=3)
    for path in (tmp_path / "snapshot_iter_1").iterdir():
        path.unlink()
    (tmp_path / "snapshot_iter_1").rmdir()
    assert train(tmp_path, values, extensions.snapshot(keep_best=(KEY, 2), autoload=True)) == [2, 3, 4]


def test_key_that_is_not_reported_keeps_the_newest_and_says_so(tmp_path):
    """Nothing that a run has saved is lost by a misspelled key."""
    words = r"snapshot\(keep_best=.* 'validation/main/lost' was not reported; .*did you mean 'validation/main/loss'\?"
    with pytest.warns(UserWarning, match=words):
        assert train(tmp_path, [3, 1, 2], extensions.snapshot(keep_best=(f"{KEY[:-1]}t", 2), mode="min")) == [3]


def test_fixed_name_leads_nowhere_where_nothing_was_compared(tmp_path):
    """What is called the best is never merely the newest: the link comes with the first value."""
    with pytest.warns(UserWarning, match="has nothing to compare"):
        assert train(tmp_path, [None, None], extensions.snapshot("best", keep_best=(KEY, 1), autoload=True)) == [2]
    assert not os.path.lexists(tmp_path / "best")
    train(tmp_path, [None, None, math.nan, 4], extensions.snapshot("best", keep_best=(KEY, 1), autoload=True))
    assert os.readlink(tmp_path / "best") == "best_iter_4"


def test_rehearsal_refuses_a_key_that_is_not_reported(tmp_path):
    """With the nearest that is."""
    trainer = a_trainer(tmp_path, Reporting([1, 2, 3]), (3, "iteration"))
    trainer.extend(extensions.snapshot(keep_best=("validation/main/los", 2), mode="min"), trigger=EVERY)
    with pytest.raises(ValueError, match="the nearest is 'validation/main/loss'"):
        trainer.rehearse()


def test_extensions_of_one_name_keep_their_own(tmp_path):
    """Each what it has taken: the best of every second, and the newest of all."""
    values = [1, 5, 2, 4, 3, 6, 7, 3]
    trainer = a_trainer(tmp_path, Reporting(values), (8, "iteration"))
    trainer.extend(extensions.snapshot(keep_best=(KEY, 1)), name="best", trigger=(2, "iteration"))
    trainer.extend(extensions.snapshot(n_retains=2), name="newest", trigger=EVERY)
    trainer.run()
    means = {2: 3.0, 4: 3.0, 6: 4.5, 8: 5.0}
    best = min(means, key=lambda number: (means[number], number))
    assert {path.name for path in tmp_path.glob("snapshot_iter_*")} == {f"snapshot_iter_{n}" for n in (best, 7, 8)}


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"keep_best": 3}, TypeError, "the key of a reported value and how many to keep"),
        ({"keep_best": (KEY, 0)}, ValueError, "at least 1"),
        ({"keep_best": (KEY, 1.5)}, TypeError, "how many to keep"),
        ({"keep_best": ("acc", 1)}, ValueError, r"snapshot\(keep_best=\('acc', 1\), mode=\"max\"\) if greater"),
        ({"keep_best": (KEY, 1), "mode": "best"}, ValueError, 'mode is "auto", "max" or "min"'),
        ({"mode": "max"}, ValueError, "give keep_best"),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings, error, words):
    """With what to write."""
    with pytest.raises(error, match=words):
        extensions.snapshot(**settings)


def test_condition_and_an_own_trigger_are_asked_too(tmp_path):
    """What the condition leaves out does not count among the best."""
    wanted = iter([False, True, True, True])
    taken = extensions.snapshot(keep_best=(KEY, 2), condition=lambda: next(wanted))
    assert train(tmp_path, [1, 4, 3, 5], taken, triggers.ManualScheduleTrigger([1, 2, 3, 4], "iteration")) == [2, 3]
