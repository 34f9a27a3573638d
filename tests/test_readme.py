"""The first thing that a reader tries."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_script_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """Copied out and run in an empty directory, it trains and prints its table."""
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1), {})
    table = [line for line in capsys.readouterr().out.splitlines() if "|" not in line]  # without the progress
    assert table[0].split() == ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]
    assert table[-1].split()[0] == "20"
    assert (tmp_path / "result" / "log").exists()


def test_a_second_run_of_the_script_continues_where_the_first_stopped(tmp_path, monkeypatch, capsys):
    """For 3 epochs and then for 5."""
    monkeypatch.chdir(tmp_path)
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    for epochs in (3, 5):
        exec(script.replace('(20, "epoch")', f'({epochs}, "epoch")'), {})
    rows = [json.loads(row) for row in (tmp_path / "result" / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    starts = json.loads((tmp_path / "result" / "run.json").read_text())["starts"]
    assert [start["iteration"] for start in starts] == [0, rows[2]["iteration"]]


def test_the_times_beside_other_libraries_are_those_of_the_page_on_speed():
    """Rounded, for the versions that were measured: nobody writes them down twice."""
    page = (ROOT / "docs" / "speed.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| \d+ \| (?:raw loop)? \| ([-+]\d[\d.]*) ", page, re.MULTILINE))
    (header,) = re.findall(r"^\| \| Chainring \|.*$", README, re.MULTILINE)
    (times,) = re.findall(r"^\| added to the (\d+) us of a small raw iteration (\|.*)$", README, re.MULTILINE)
    assert f"| raw loop | {times[0]} |" in page
    versions = re.findall(r"\[(\w+)\] ([\d.]+)", header)
    names = {"Lightning": "lightning Trainer", "Ignite": "pytorch-ignite", "Accelerate": "accelerate"}
    measured = ["no extension", *(f"{names[library]} {version}" for library, version in versions)]
    assert re.findall(r"([-+]\d+) us", times[1]) == [f"{float(rows[name]):+.0f}" for name in measured]


def test_the_pictures_of_the_readme_are_there_for_light_and_for_dark_pages():
    """As a page chooses them, and each keeps to its colours."""
    sources = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert [name.rpartition("-")[2] for name in sources] == ["dark.svg", "light.svg"]
    assert all("prefers-color-scheme" not in (ROOT / name).read_text() for name in sources)


def test_the_commands_of_the_readme_are_in_the_makefile():
    """Each `make` command that it names is a target."""
    targets = (ROOT / "Makefile").read_text()
    for name in re.findall(r"make (\w+)", README):
        assert f"\n{name}:" in targets
