"""examples/byol: features that are learned without a label tell digits apart better than those of an untrained network."""

from running import log, run


def test_features_become_better_without_labels(tmp_path):
    """By the nearest of 50 labelled images, from the row of iteration 0 to the tenth epoch."""
    run("byol/train_byol.py", "--epoch", 10, "--out", tmp_path)
    rows = log(tmp_path)
    assert [row["iteration"] for row in rows[:2]] == [0, 12]
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.02
    assert rows[-1]["online/loss"] < rows[1]["online/loss"]
