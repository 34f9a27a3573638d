"""The script of docs/recipes/command-line.md is started as the page shows."""

import json
import re
from pathlib import Path

import pytest

import forked

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "command-line.md"
SCRIPT = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE).group(1)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the script with arguments, in the directory of the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return lambda *arguments: forked.run(["train.py", *arguments])


def test_options_and_the_file_of_settings_are_recorded_with_the_run(tmp_path, start):
    """The file is made by the script, an option after it counts more, and run.json has what held."""
    made = start("--epochs", "1", "--optimizer", "SGD", "--print_config")
    (tmp_path / "sgd.yaml").write_text(made.stdout)
    done = start("--config", "sgd.yaml", "--lr", "0.1", "--out", "sgd")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "sgd" / "run.json").read_text())["config"]
    assert (config["epochs"], config["optimizer"], config["lr"], config["out"]) == (1, "SGD", 0.1, "sgd")


def test_a_wrong_setting_is_refused_by_its_name(tmp_path, start):
    """Before anything is trained."""
    for wrong, message in ((("--epochs", "two"), "epochs"), (("--epoch_count", "2"), "epoch_count")):
        done = start(*wrong)
        assert done.returncode == 2
        assert message in done.stderr
    assert not (tmp_path / "result").exists()
