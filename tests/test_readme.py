"""The first thing that a reader tries, and what it shows: each of its outputs is of a run."""

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import forked

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
REPOSITORY = PROJECT["urls"]["Repository"]
FILES = f"{REPOSITORY}/blob/main/"
RAW = FILES.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")


def test_the_script_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """Copied out and run in an empty directory, it trains and prints its table."""
    monkeypatch.chdir(tmp_path)
    exec(SCRIPT, {})
    table = [line for line in capsys.readouterr().out.splitlines() if "|" not in line]  # without the progress
    measured = ["main/loss", "main/accuracy", "validation/main/loss", "validation/main/accuracy"]
    assert table[0].split() == [*measured, "epoch", "iteration", "elapsed_time"]
    assert table[-1].split()[4] == "20"
    assert (tmp_path / "result" / "log").exists()


def test_a_second_run_of_the_script_continues_where_the_first_stopped(tmp_path, monkeypatch, capsys):
    """For 3 epochs and then for 5."""
    monkeypatch.chdir(tmp_path)
    for epochs in (3, 5):
        exec(SCRIPT.replace('(20, "epoch")', f'({epochs}, "epoch")'), {})
    rows = [json.loads(row) for row in (tmp_path / "result" / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    starts = json.loads((tmp_path / "result" / "run.json").read_text())["starts"]
    assert [start["iteration"] for start in starts] == [0, rows[2]["iteration"]]


def test_the_script_says_what_it_needs():
    """In the header that `uv run` and `pipx run` read: a Python and a package of the project, with its data."""
    (header,) = re.findall(r"^# /// script\n((?:#(?: .*)?\n)+?)# ///$", SCRIPT, re.MULTILINE)
    needed = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.MULTILINE))
    assert needed.keys() == {"requires-python", "dependencies"}
    assert needed["requires-python"] == PROJECT["requires-python"]
    (dependency,) = needed["dependencies"]
    assert dependency.partition(" @ git+")[::2] in (("chainring[examples]", ""), ("chainring[examples]", REPOSITORY))
    assert f'"{dependency}"' in re.search(r"^pip install .*$", README, re.MULTILINE).group()


def test_the_difference_of_the_readme_leads_from_a_plain_loop_to_its_script_with_the_same_bits(tmp_path, monkeypatch):
    """Its lines that go, in place of those that come, are a loop that trains to the same parameters."""
    monkeypatch.chdir(tmp_path)
    lines = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1).splitlines()
    goes, comes = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
    assert SCRIPT.count(comes) == 1
    ordered = SCRIPT.replace("shuffle=True", "shuffle=True, generator=torch.Generator().manual_seed(0)")
    plain, ours = {}, {}
    exec(ordered.replace(comes, goes), plain)
    exec(ordered, ours)
    pairs = zip(plain["model"].parameters(), ours["model"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Terminal:
    """What a program writes to a terminal of 80 columns."""

    def __init__(self, script):
        fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))  # Windows has none of them
        here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = forked.Forked([script], stdin=subprocess.DEVNULL, stdout=there, stderr=there)
        os.close(there)
        self.file, self.text = here, ""

    def read(self, until=None):
        """Return the lines without the progress: all of them, or those until one that is as the pattern."""
        with contextlib.suppress(OSError):  # which Linux raises where the program has ended
            while not (until and re.search(until, self.text, re.MULTILINE)) and (more := os.read(self.file, 1 << 16)):
                self.text += more.decode()
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.text) if "|" not in line and line.strip()]

    def end(self, number=None):
        """Return how it has ended, after a signal if one is given."""
        if number is not None:
            self.process.send_signal(number)
        self.read()
        os.close(self.file)
        return self.process.wait()


def numbers(line):
    """The columns of a row but the last, which is the time."""
    return [float(word) for word in line.split()[:6]]


def test_what_the_readme_says_that_its_script_prints_is_what_it_prints(tmp_path, monkeypatch):
    """In a terminal of 80 columns, killed and started again; digits may differ on another kind of machine, and times do."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    (shown,) = re.findall(r"^```\n\$ python train.py\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    killed, resumed, _ = re.split(r"^\$ .*\n", shown, flags=re.MULTILINE)
    terminal = Terminal("train.py")
    terminal.read(until=r"\s3        45 .*\r?$")
    assert terminal.end(signal.SIGKILL) == -signal.SIGKILL
    again = Terminal("train.py")
    printed = again.read()
    assert again.end() == 0
    title, *rows, end = killed.splitlines()
    assert end == "Killed"
    start, at = next(each for each in enumerate(printed) if each[1].split() == title.split())
    said = " ".join(" ".join(printed[:start]).split())
    pattern = r"resumed from \S+/result/snapshot_iter_\d+, after iteration \d+, epoch \d"
    assert re.fullmatch(pattern, said)
    first, title_again, *rows_again = resumed.splitlines()
    assert re.fullmatch(pattern, first)
    assert (title_again, at) == (title, title)
    table = [numbers(line) for line in printed[start + 1 :]]
    assert [row[4] for row in table] == list(range(1, 21))
    for row in [*rows, *rows_again]:
        if row != "...":
            assert numbers(row) == pytest.approx(table[int(row.split()[4]) - 1], rel=0.05)


def test_the_bars_of_the_readme_are_of_the_page_on_speed(tmp_path):
    """What docs/pictures/iteration.py draws of its table is what the README shows, with the versions of its own table."""
    subprocess.run([sys.executable, ROOT / "docs" / "pictures" / "iteration.py", tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(drawn) == ["iteration-dark.svg", "iteration-light.svg"]
    assert drawn == {name: (ROOT / "docs" / "pictures" / name).read_text() for name in drawn}
    versions = re.findall(r"^\| \[(\w+)\] (\d[\d.]+) \|", README, re.MULTILINE)
    assert [library for library, _ in versions] == ["Lightning", "Ignite", "Accelerate"]
    for library, version in versions:
        assert re.search(rf">{library}(?: Trainer)? {re.escape(version)}<", drawn["iteration-light.svg"])


def test_the_pictures_of_the_readme_are_there_for_light_and_for_dark_pages():
    """As a page chooses them, and each keeps to its colours."""
    sources = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert [name.rpartition("-")[2] for name in sources] == ["dark.svg", "light.svg"] * 2
    assert all("prefers-color-scheme" not in (ROOT / name.removeprefix(RAW)).read_text() for name in sources)


def test_the_commands_of_the_readme_are_in_the_makefile():
    """Each `make` command that it names is a target."""
    targets = (ROOT / "Makefile").read_text()
    for name in re.findall(r"make (\w+)", README):
        assert f"\n{name}:" in targets


def test_links_of_the_readme_lead_there_from_any_page():
    """None is relative, since an index of packages shows it too; a file of the repository is there, with its heading."""
    links = [*re.findall(r"\]\(([^)\s]+)\)", README), *re.findall(r'(?:src|srcset|href)="([^"]+)"', README)]
    links += re.findall(r"^\[[^]]+\]: (\S+)$", README, re.MULTILINE)
    assert [link for link in links if not link.startswith("https://")] == []
    assert [link for link in links if link.startswith(REPOSITORY) and not link.startswith(FILES)] == []
    for link in links:
        name, _, anchor = link.removeprefix(FILES).removeprefix(RAW).partition("#")
        if name != link.partition("#")[0]:
            assert (ROOT / name).is_file(), link
            headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
