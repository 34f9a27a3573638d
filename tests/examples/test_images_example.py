"""examples/images: augmentation helps, and is the same in any process."""

import pytest
from running import log, run

SCRIPT = "images/train_images.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the images, and the result of 30 epochs with two workers beside them."""
    directory = tmp_path_factory.mktemp("images")
    run(SCRIPT, "--images", directory / "images", "--epoch", 30, "--workers", 2, "--out", directory / "workers")
    return directory


def test_the_folder_has_300_images_to_train_on_and_360_to_test_with(folder):
    """PNG files, 30 of each class to train on, in a folder for each class."""
    assert len(list((folder / "images/train").glob("[0-9]/*.png"))) == 300
    assert len(list((folder / "images/test").glob("[0-9]/*.png"))) == 360


def test_with_augmentation_there_is_less_overfitting(folder):
    """As they are, the images that are trained on are soon known by heart; augmented, they stay as hard as others."""
    run(SCRIPT, "--images", folder / "images", "--epoch", 30, "--no-augment", "--out", folder / "plain")
    plain, augmented = log(folder / "plain")[-1], log(folder / "workers")[-1]
    assert plain["main/accuracy"] > 0.97 > 0.9 > augmented["main/accuracy"]
    assert augmented["validation/main/accuracy"] > 0.9


def test_workers_do_not_matter_nor_does_a_stop(folder, tmp_path):
    """Begun in this process, stopped after 15 epochs and continued with workers, the log is that of two workers."""
    for epoch, workers in ((15, 0), (30, 3)):
        run(SCRIPT, "--images", folder / "images", "--epoch", epoch, "--workers", workers, "--out", tmp_path)
    assert log(tmp_path) == log(folder / "workers")
