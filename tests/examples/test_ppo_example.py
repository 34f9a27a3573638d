"""examples/ppo: the poles stand longer, and where they are is part of the state."""

from running import log, run


def test_the_poles_stand_longer(tmp_path):
    """At first they fall after some 20 steps; after 20 iterations they stand for more than 100."""
    run("ppo/train_ppo.py", "--iteration", 20, "--out", tmp_path)
    rows = log(tmp_path)
    assert [row["iteration"] for row in rows] == [10, 20]
    assert rows[0]["epoch"] == 0
    assert rows[-1]["main/length"] > 100
    assert rows[-1]["main/length"] > rows[0]["main/length"]
