"""The first thing that a reader tries."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_script_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """Copied out and run in an empty directory, it trains and prints its table."""
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1), {})
    table = [line for line in capsys.readouterr().out.splitlines() if "|" not in line]  # without the progress
    assert table[0].split() == ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]
    assert table[-1].split()[0] == "20"
    assert (tmp_path / "result" / "log").exists()


def test_the_commands_of_the_readme_are_in_the_makefile():
    """Each `make` command that it names is a target."""
    targets = (Path(__file__).parent.parent / "Makefile").read_text()
    for name in re.findall(r"make (\w+)", README):
        assert f"\n{name}:" in targets
