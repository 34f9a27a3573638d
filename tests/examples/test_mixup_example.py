"""examples/mixup: it learns from mixed images, and the averaged parameters do well."""

from running import log, run


def test_the_average_is_right_on_most_digits(tmp_path):
    """After 8 epochs of images that are mixed in pairs, by the model and by its average, which is on the disk."""
    run("mixup/train_mixup.py", "--epoch", 8, "--out", tmp_path)
    rows = log(tmp_path)
    assert len(rows) == 8
    assert rows[-1]["average/main/accuracy"] > 0.95
    assert rows[-1]["validation/main/accuracy"] > 0.9
    assert rows[-1]["main/loss"] > 2 * rows[-1]["validation/main/loss"]  # a mixed image is two digits
    assert (tmp_path / "best").exists()
