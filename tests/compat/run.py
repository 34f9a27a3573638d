"""The tests under several versions of PyTorch, each in an environment of its own, and the table of them for the documents.

    python tests/compat/run.py ENVIRONMENTS [--torch 2.6 newest] [-- arguments of pytest]

Each environment is made in ENVIRONMENTS, or brought up to date if it is there; it takes up to 8 GB. The package is installed
from the checkout as a user does it. A row of docs/versions-table.md takes the place of the earlier one of its version.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "versions-table.md"
VERSIONS = {
    "2.6": ["torch==2.6.0", "numpy==1.26.*"],
    "2.9": ["torch==2.9.*"],
    "newest": ["torch"],
    "nightly": ["--extra-index-url https://download.pytorch.org/whl/nightly/cpu", "torch>=2.6.dev0"],
}
WITHOUT_NUMPY_1 = ["datasets", "pyarrow"]  # they demand NumPy 2, and their tests are skipped
HEAD = (
    "| PyTorch | Python | NumPy | safetensors | tests | passed | skipped | failed | day |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
DESCRIBE = """
import json, platform
from importlib.metadata import version
print(json.dumps([version("torch"), platform.python_version(), version("numpy"), version("safetensors")]))
"""


def environment(folder, name):
    """The Python of an environment with a version of torch, the package, and what its tests need."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    constraints = folder / f"{name}.txt"
    constraints.write_text("\n".join(VERSIONS[name]))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", constraints]
    subprocess.run([*pip, "--upgrade", "pip>=25.1", "setuptools"], check=True)
    subprocess.run([*pip, "--upgrade", ".[examples]", "--group", "dev"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", "."], cwd=ROOT, check=True)  # its version may be the same
    if any(line.startswith("numpy==1") for line in VERSIONS[name]):
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *WITHOUT_NUMPY_1], check=True)
    return python


def read_cases(results):
    """The tests of a run."""
    return list(ElementTree.parse(results).getroot().iter("testcase"))


def file_of(case):
    """The file of a test, or of one that could not be collected."""
    return (case.get("classname") or case.get("name")).replace(".", "/") + ".py"


def has_failed(case):
    """True also for an error outside of the test."""
    return case.find("failure") is not None or case.find("error") is not None


def run(python, arguments, results, again):
    """Run pytest; return the numbers of its tests, and how many were skipped for which reason.

    With ``again``, run the files in which tests have failed before, and count the others as they were.
    """
    written = results.with_suffix(".again.xml") if again else results  # so that it can be done again
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={written}", *arguments]
    before = read_cases(results) if again else []
    if again:
        failed = sorted({file_of(case) for case in before if has_failed(case)})
        before = [case for case in before if file_of(case) not in failed]
        command += failed
    subprocess.run(command, cwd=ROOT, check=False)
    cases = before + read_cases(written)
    skipped = Counter(found.get("message") for case in cases if (found := case.find("skipped")) is not None)
    failed = sum(map(has_failed, cases))
    return len(cases), len(cases) - skipped.total() - failed, skipped.total(), failed, skipped


def row(python, counts):
    """A row of the table."""
    described = json.loads(subprocess.run([python, "-c", DESCRIBE], capture_output=True, text=True, check=True).stdout)
    cells = [*described, *(f"{count:,}" for count in counts), datetime.date.today().isoformat()]
    return f"| {' | '.join(cells)} |"


def write_table(line, reasons, paths):
    """Put a row into the table, and below it why tests were skipped under that version, and which were run if not all."""
    version = line.split(" | ")[0].removeprefix("| ")
    text = TABLE.read_text() if TABLE.exists() else ""
    rows = {each.split(" | ")[0].removeprefix("| "): each for each in re.findall(r"^\| \d.*", text, re.MULTILINE)}
    notes = dict(re.findall(r"^- (\S+) skips (.*)", text, re.MULTILINE))
    rows[version] = line
    notes[version] = "; ".join(f"{count}: {reason}" for reason, count in sorted(reasons.items())) or "none"

    def order(version):
        return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))

    body = "\n".join(rows[each] for each in sorted(rows, key=order))
    if paths:
        notes[version] += f"; of all tests only those of {len(paths)} files were run"
    below = "\n".join(f"- {each} skips {notes[each]}" for each in sorted(notes, key=order))
    TABLE.write_text(f"{HEAD}{body}\n\n{below}\n")


def main():
    """Run what the command line asks for; the exit code says whether anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", type=Path)
    parser.add_argument("--torch", nargs="+", choices=list(VERSIONS), default=["2.6", "2.9", "newest"])
    parser.add_argument("--again", action="store_true", help="run the files with failures again, and keep the other results")
    arguments, others = parser.parse_known_args()
    others = [each for each in others if each != "--"]
    paths = [each for before, each in pairwise(["", *others]) if before != "--ignore" and each.startswith("tests/")]
    folder = arguments.environments.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for name in arguments.torch:
        python = environment(folder, name)
        *counts, reasons = run(python, others, folder / f"{name}.xml", arguments.again)
        write_table(row(python, counts), reasons, paths)
        has_failed |= counts[-1] > 0
    print(TABLE.read_text())
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
