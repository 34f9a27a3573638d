"""examples/gpt: both splits are evaluated from iteration 0 on, the schedule is kept, and the best model is on the disk."""

import pytest
from running import log, run

SMALL = (
    "--characters",
    60_000,
    "--unit",
    32,
    "--layer",
    1,
    "--block",
    24,
    "--iteration",
    60,
    "--evaluate",
    15,
    "--dropout",
    0,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run of 60 updates, and what it printed."""
    out = tmp_path_factory.mktemp("gpt")
    return out, run("gpt/train_gpt.py", *SMALL, "--out", out)


def test_the_log_begins_before_the_first_update(whole):
    """Its first row has the losses of both splits of an untrained model, which guesses; then both fall."""
    first, *later = log(whole[0])
    assert first["iteration"] == 0
    assert "main/loss" not in first
    assert first["train/main/loss"] == pytest.approx(first["val/main/loss"], rel=0.02)
    assert first["val/main/loss"] == pytest.approx(4.56, abs=0.15)  # the logarithm of 96 characters
    assert [row["iteration"] for row in later] == [15, 30, 45, 60]
    assert later[-1]["val/main/loss"] < 3.4


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(whole):
    """Three updates up, then half a cosine; a row has the rate of its last update."""
    rates = [row["lr"] for row in log(whole[0])[1:]]
    assert 0.0019 > rates[0] > rates[1] > rates[2] > rates[3] > 0.0002
    assert rates[3] == pytest.approx(0.0002, rel=0.02)


def test_the_best_model_writes_the_sample(whole):
    """It is in ``best``, and 501 characters are printed behind the table."""
    out, printed = whole
    assert (out / "best").exists()
    assert len(printed.rstrip("\n")) > 500


def test_it_trains_in_bfloat16(tmp_path):
    """The losses are those of float32 to the first digits."""
    run("gpt/train_gpt.py", *SMALL, "--iteration", 15, "--precision", "bf16", "--out", tmp_path / "bf16")
    run("gpt/train_gpt.py", *SMALL, "--iteration", 15, "--out", tmp_path / "fp32")
    low, full = (log(tmp_path / name)[-1]["val/main/loss"] for name in ("bf16", "fp32"))
    assert low == pytest.approx(full, rel=0.01)
    assert low != full
