"""The first thing that a reader tries."""

import json
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


def test_with_its_line_for_snapshots_a_second_run_goes_on_where_the_first_stopped(tmp_path, monkeypatch, capsys):
    """The script of the README with the line of the README, for 3 epochs and then for 5."""
    monkeypatch.chdir(tmp_path)
    script, line = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[:2]
    script = script.replace("trainer.run()", f"{line}trainer.run()")
    for epochs in (3, 5):
        exec(script.replace('(20, "epoch")', f'({epochs}, "epoch")'), {})
    rows = [json.loads(row) for row in (tmp_path / "result" / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    starts = json.loads((tmp_path / "result" / "run.json").read_text())["starts"]
    assert [start["iteration"] for start in starts] == [0, rows[2]["iteration"]]


def test_the_commands_of_the_readme_are_in_the_makefile():
    """Each `make` command that it names is a target."""
    targets = (Path(__file__).parent.parent / "Makefile").read_text()
    for name in re.findall(r"make (\w+)", README):
        assert f"\n{name}:" in targets
