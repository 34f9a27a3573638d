"""The script of docs/recipes/command-line.md is started as the page shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "command-line.md"
SCRIPT = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE).group(1)


def start(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_options_and_the_file_of_settings_are_recorded_with_the_run(tmp_path):
    """The file is made by the script, an option after it counts more, and run.json has what held."""
    (tmp_path / "train.py").write_text(
        re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE).group(1)
    )
    made = start(tmp_path, "--epochs", "1", "--optimizer", "SGD", "--print_config")
    (tmp_path / "sgd.yaml").write_text(made.stdout)
    done = start(tmp_path, "--config", "sgd.yaml", "--lr", "0.1", "--out", "sgd")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "sgd" / "run.json").read_text())["config"]
    assert (config["epochs"], config["optimizer"], config["lr"], config["out"]) == (1, "SGD", 0.1, "sgd")


def test_a_wrong_setting_is_refused_by_its_name(tmp_path):
    """Before anything is trained."""
    (tmp_path / "train.py").write_text(
        re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE).group(1)
    )
    for wrong, message in ((("--epochs", "two"), "epochs"), (("--epoch_count", "2"), "epoch_count")):
        done = start(tmp_path, *wrong)
        assert done.returncode == 2
        assert message in done.stderr
    assert not (tmp_path / "result").exists()
