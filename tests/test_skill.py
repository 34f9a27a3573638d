"""What an agent reads: SKILL.md in the package, for scripts, and AGENTS.md in the repository, for Chainring itself."""

import importlib.resources
import re
from pathlib import Path

import pytest
import yaml

from chainring.cli import main

ROOT = Path(__file__).parent.parent
SKILL = (importlib.resources.files("chainring") / "SKILL.md").read_text()


def test_the_skill_is_in_the_package_with_its_name_and_description():
    """Which an agent reads to know when to read the rest, and for which 1024 characters are allowed."""
    front, text = re.fullmatch(r"---\n(.*?)---\n(.*)", SKILL, re.DOTALL).groups()
    described = yaml.safe_load(front)
    assert described.keys() == {"name", "description"}
    assert described["name"] == "chainring"
    assert 100 < len(described["description"]) < 1024
    assert len(text.splitlines()) < 120


def test_the_python_of_the_skill_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """All its blocks, one after the other in one program: it trains, rehearses and reads its log."""
    monkeypatch.chdir(tmp_path)
    program = {"__name__": "__main__"}
    for code in re.findall(r"^```python\n(.*?)^```$", SKILL, re.DOTALL | re.MULTILINE):
        exec(code, program)
    epoch, accuracy = capsys.readouterr().out.splitlines()[-1].split()
    assert 1 <= int(epoch) <= 3
    assert 0.2 < float(accuracy) < 1.0


def test_the_commands_of_the_skill_are_there(capsys):
    """Each with the options that it is shown with."""
    shown = re.findall(r"^(?:.*`)?chainring ([a-z-]+) ([^`#\n]*)", SKILL, re.MULTILINE)
    assert {"verify-resume", "report", "diff", "bisect", "replay", "control", "export"} <= {name for name, _ in shown}
    for name, arguments in shown:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([name, "--help"])
        help_text = capsys.readouterr().out
        assert all(option in help_text for option in re.findall(r"--[a-z-]+", arguments))


def test_the_commands_for_agents_in_the_repository_are_in_the_makefile():
    """Each `make` command of AGENTS.md is a target, and each path that it names is there."""
    text = (ROOT / "AGENTS.md").read_text()
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", text, re.MULTILINE)) <= set(targets)
    assert all((ROOT / path).exists() for path in re.findall(r"(?:tests|docs|src)/[\w/.]*\w", text))
